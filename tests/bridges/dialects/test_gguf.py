"""GGUF's types of tensors: every value that ggml decodes, in as many bytes (tests/golden/make_gguf.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialect_values import digest
from gguf_bytes import NUMBERS, Tensor, gguf
from gguf_models import keys, llama, split_llama, tensors
from golden_dialects import GOLDEN

import breccia
from breccia import ScaledTensor
from breccia.backend import components, registry
from breccia.bridges import compare, convert, load_checkpoint, load_safetensors
from breccia_bridges.dialects.gguf import KINDS
from breccia_bridges.gguf_types import DECODED, TYPES
from breccia_bridges.inspection import inspected

FOLDER = GOLDEN.parent / "gguf"
RECORD: dict[str, Any] = json.loads((FOLDER / "record.json").read_text())
BLOCKS = {one.name for one in TYPES.values() if not one.dtype} - {*DECODED}
_BY_NAME = {one.name: one for one in TYPES.values()}


def floats(value: Any) -> np.ndarray:
    """Values as FP32."""
    if isinstance(value, ScaledTensor):
        return np.asarray(breccia.dequantize(value), np.float32)
    return np.asarray(value, np.float32)


def stored_bytes(value: ScaledTensor) -> int:
    return sum(part.nbytes for part in components(value).values())


@pytest.mark.parametrize(("file", "of"), [("types.gguf", "types"), ("llama-00001-of-00002.gguf", "llama")])
def test_the_values_of_a_file_are_those_that_ggml_decodes(file: str, of: str) -> None:
    pytest.importorskip("gguf")  # has the tables of IQ1 to IQ3
    checkpoint, record = load_checkpoint(FOLDER / file), RECORD[of]
    assert checkpoint.keys() == record.keys()
    for name, value in checkpoint.items():
        assert list(value.shape) == record[name]["shape"]
        assert digest(floats(value)) == record[name]["sha256"], name


def test_golden_files_have_every_type() -> None:
    kinds = {one["type"] for one in RECORD["types"].values()}
    assert kinds == {one.name for one in TYPES.values()} - {"Q8_1", "Q8_K", "Q1_0"}
    assert {*KINDS, *DECODED} == {kind for kind in kinds if not _BY_NAME[kind].dtype}


def test_the_dialect_declares_every_type_with_codes() -> None:
    declared = [dtypes for group in registry().dialects["gguf"].groups for dtypes in group.parts.values()]
    assert declared == [declared[0]] * 2 and sorted(declared[0]) == sorted(BLOCKS)


def random_blocks(rng: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    """Bytes of blocks of a type whose scales are finite. shape: without the bytes of a block."""
    blocks = rng.integers(0, 256, (*shape, _BY_NAME[kind].size), np.uint8)
    one = KINDS[kind]
    for part in (one.scale, one.bias):
        if part is not None and part.dtype == "F16":
            scales = rng.standard_normal((*shape, 1)).astype(np.float16)
            blocks[..., part.field] = scales.view(np.uint8)
        elif part is not None:
            blocks[..., part.field] %= 0xF0 if part.dtype == "E8M0" else 0x80
    return blocks


def written(folder: Path, tensors: list[Tensor]) -> Path:
    (folder / "m.gguf").write_bytes(gguf([], tensors))
    return folder / "m.gguf"


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (1, 2, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_any_bytes_have_the_values_of_the_library(tmp_path: Path, kind: str, lead: tuple[int, ...]) -> None:
    library = pytest.importorskip("gguf")
    blocks = random_blocks(np.random.default_rng(sum(lead)), kind, *lead, 3)
    rows = blocks.reshape(*lead, -1)
    tensor = Tensor("w", (3 * _BY_NAME[kind].length, *lead[::-1]), NUMBERS[kind], rows.tobytes())
    st = load_checkpoint(written(tmp_path, [tensor]))["w"]
    with np.errstate(over="ignore"):  # of MXFP4, with the largest scales
        wanted = library.dequantize(rows, library.GGMLQuantizationType[kind])
    assert st.shape == wanted.shape == (*lead, 3 * _BY_NAME[kind].length)
    # Zeros may have another sign: ggml's table has no -0 of E2M1, and a sum with a bias flushes products to +0 in breccia.
    np.testing.assert_array_equal(floats(st), wanted)
    if kind != "TQ1_0":  # five codes in a byte become four
        assert stored_bytes(st) == blocks.nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 500])
def test_many_blocks_are_rearranged_as_one(tmp_path: Path, kind: str, count: int) -> None:
    """More than are rearranged at a time, and a part of these."""
    one = random_blocks(np.random.default_rng(3), kind, 1)
    whole = np.tile(one, (count * 7, 1))
    tensor = Tensor("w", (_BY_NAME[kind].length, len(whole)), NUMBERS[kind], whole.tobytes())
    found = floats(load_checkpoint(written(tmp_path, [tensor]))["w"])
    np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))


_SCALED = [(kind, part) for kind in KINDS for part in ("scale", "bias") if getattr(KINDS[kind], part) is not None]


@pytest.mark.parametrize(("kind", "part"), _SCALED)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0xFFFF])
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, kind: str, part: str, bits: int) -> None:
    scales = getattr(KINDS[kind], part)
    blocks = random_blocks(np.random.default_rng(0), kind, 2)
    one = np.array([bits], np.uint16).view(np.uint8) if scales.dtype == "F16" else np.uint8(0xFF)
    blocks[1, scales.field] = one
    tensor = Tensor("w", (_BY_NAME[kind].length, 2), NUMBERS[kind], blocks.tobytes())
    path = written(tmp_path, [tensor])
    wrong = "4 of its scales are" if scales.dtype == "UE4M3" else "1 of its scales is"
    with pytest.raises(breccia.DialectError, match=rf"m\.gguf: w \(GGUF\): {wrong} NaN or Inf"):
        load_checkpoint(path)["w"]
    with pytest.raises(breccia.DialectError):
        convert(path, tmp_path / "out", "none")
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_the_scale_of_nvfp4_that_ggml_decodes_as_zero_is_zero(tmp_path: Path) -> None:
    blocks = np.full((1, 36), 0x11, np.uint8)
    blocks[0, :4] = (0x7F, 0x38, 0x00, 0x7F)
    st = load_checkpoint(written(tmp_path, [Tensor("w", (64, 1), NUMBERS["NVFP4"], blocks.tobytes())]))["w"]
    np.testing.assert_array_equal(floats(st)[0], np.repeat([0, 0.5, 0, 0], 16))


def test_the_scale_of_a_tensor_of_nvfp4_is_its_global_scale(tmp_path: Path) -> None:
    blocks = random_blocks(np.random.default_rng(1), "NVFP4", 4, 2)
    factor, other = np.array([0.75], np.float32), np.array([3.0], np.float32)
    weight = Tensor("blk.0.ffn_up.weight", (128, 4), NUMBERS["NVFP4"], blocks.tobytes())
    beside = [Tensor(f"blk.0.ffn_up.{end}", (1,), 0, one.tobytes()) for end, one in (("scale", factor), ("input_scale", other))]
    alone = floats(load_checkpoint(written(tmp_path, [weight]))["blk.0.ffn_up.weight"])
    path = written(tmp_path, [weight, *beside])
    found = load_checkpoint(path)
    assert list(found) == ["blk.0.ffn_up.weight", "blk.0.ffn_up.input_scale"]
    st = found["blk.0.ffn_up.weight"]
    assert st.recipe == breccia.NVFP4BlockScaling()
    np.testing.assert_array_equal(floats(st), alone * factor)
    assert found.activations == ["blk.0.ffn_up.input_scale"]
    with pytest.raises(breccia.DialectError, match="'scale' has 1 scales that are not finite"):
        load_checkpoint(written(tmp_path, [weight, Tensor("blk.0.ffn_up.scale", (1,), 0, b"\0\0\x80\x7f")]))[
            "blk.0.ffn_up.weight"
        ]
    with pytest.raises(breccia.DialectError, match=r"'scale' has shape \[2\]; its other parts need"):
        load_checkpoint(written(tmp_path, [weight, Tensor("blk.0.ffn_up.scale", (2,), 0, bytes(8))]))
    ternary = Tensor("blk.0.ffn_up.weight", (256, 1), NUMBERS["TQ2_0"], bytes(66))
    with pytest.raises(breccia.UnsupportedError, match="multiplied by a scale of the tensor, for which TQ2_0 has no place"):
        load_checkpoint(written(tmp_path, [ternary, beside[0]]))


@pytest.mark.parametrize("kind", sorted(BLOCKS - {*KINDS}))
def test_types_of_activations_are_refused(tmp_path: Path, kind: str) -> None:
    one = _BY_NAME[kind]
    path = written(tmp_path, [Tensor("w", (one.length,), NUMBERS[kind], bytes(one.size))])
    with pytest.raises(breccia.UnsupportedError, match=rf"w \(GGUF\): it is {kind}; breccia reads Q4_0, Q4_1"):
        load_checkpoint(path)
    (row,) = inspected(path).rows
    assert kind in row["suspicious"][0]


@pytest.mark.parametrize("kind", DECODED)
def test_tables_of_vectors_are_decoded_and_marked(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    name = f"{kind.lower()}.weight"
    checkpoint = load_checkpoint(FOLDER / "types.gguf")
    assert checkpoint.header(name).dtype == "F32" and checkpoint.header(name).recipe is None
    (row,) = (row for row in inspected(FOLDER / "types.gguf").rows if row["name"] == name)
    assert (row["type"], row["stored_as"], row["recipe"]) == (kind, "F32", None)
    assert row["bytes"] == 2 * _BY_NAME[kind].size
    report = convert(FOLDER / "types.gguf", tmp_path / "out.safetensors", "none")
    (of,) = (tensor for tensor in report.tensors if tensor.name == name)
    assert of.reason == f"decoded from {kind}"
    np.testing.assert_array_equal(load_safetensors(tmp_path / "out.safetensors", names=[name])[name], checkpoint[name])
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(breccia.UnsupportedError, match=rf"{name} is {kind}, .*tables.*pip install .*breccia-bridges\[gguf\]"):
        checkpoint[name]


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_every_framework_holds_the_values(framework: str) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(framework, framework))
    pytest.importorskip(f"breccia_{framework}")
    numpy = load_checkpoint(FOLDER / "types.gguf")
    names = [f"{kind.lower()}.weight" for kind in KINDS]
    for name, value in load_checkpoint(FOLDER / "types.gguf", names=names, framework=framework).items():
        assert breccia.backend.framework_of(value.data, name).name == framework
        found = np.asarray(breccia.backend.ops_of(value.data).to_numpy(breccia.dequantize(value)))
        np.testing.assert_array_equal(found, floats(numpy[name]))


def test_inspect_lists_types(run: Any) -> None:
    status, listed, _ = run("inspect", FOLDER / "types.gguf", "--top", "31")
    assert status == 0
    for words in ("Q4_K  ", "Q4_0, as int4", "IQ2_XS, decoded to F32", "GGUF (gguf): 16 values, recognized by", "4.500"):
        assert words in listed
    assert "suspicious" not in run("inspect", FOLDER / "types.gguf", "--scales")[1]


# ------------------------------------------------------------------------------------------------ converting


def test_a_file_becomes_a_file_of_weights_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # without which there is no config
    source = llama(tmp_path)
    report = convert(source, tmp_path / "m.safetensors", "none")
    assert report.bytes_in == report.bytes_out and report.warnings == []
    assert compare(source, tmp_path / "m.safetensors").verdict.startswith("equal: all tensors have the same values")
    report = convert(source, tmp_path / "m", "none")
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["model.safetensors"]
    config, tokenizer = report.warnings
    assert config.startswith("config.json was not made, for which transformers is needed")
    assert tokenizer.startswith("the tokenizer was not made, for which transformers is needed")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


def test_what_transformers_does_not_read_is_said(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "olmo.gguf").write_bytes(gguf(keys("olmo"), tensors()))  # which transformers does not read
    config, _ = convert(tmp_path / "olmo.gguf", tmp_path / "out", "bf16").warnings[:2]
    assert config.startswith("config.json was not made: transformers says ") and config.isprintable()
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
@pytest.mark.parametrize("has_config", [False, True])
def test_beside_tensors_without_names_of_transformers_there_is_no_config(
    tmp_path: Path, run: Any, recipe: str, has_config: bool
) -> None:
    """transformers would find none of its tensors, and leave all weights at random."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "m.gguf").write_bytes(gguf(keys("rwkv7"), tensors()))
    if has_config:
        (source / "config.json").write_text('{"model_type": "rwkv7"}')
    status, said, warned = run("convert", source, tmp_path / "out", "--recipe", recipe)
    assert status == 0 and "load_safetensors" not in said
    assert (
        "m.gguf is not a model that transformers can load from here: breccia does not map the tensors of architecture 'rwkv7' "
        "to transformers' names, so that they keep GGUF's. No config of the model was written, with which transformers would "
        "fill all weights with random numbers."
    ) in " ".join((said + warned).split())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert load_checkpoint(tmp_path / "out").header("blk.0.attn_q.weight").shape == (64, 64)


def test_a_library_whose_folder_describes_no_model_is_not_said_to_load_it(tmp_path: Path, run: Any) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf([], [Tensor("blk.0.ffn_up.weight", (64, 96), NUMBERS["F32"], bytes(4 * 64 * 96))]))
    options = ("--dialect", "compressed_tensors", "--recipe", "int8,group_size=32")
    status, said, warned = run("convert", tmp_path / "m.gguf", tmp_path / "out", *options)
    assert status == 0 and "breccia.bridges.load_checkpoint(folder)" in said and "or by" not in said
    assert "the tensors of a file that names no architecture" in " ".join((said + warned).split())


def test_what_is_beside_a_model_is_copied_and_not_made(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    llama(source)
    (source / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    (source / "tokenizer.json").write_text("{}")
    report = convert(source, tmp_path / "out", "mxfp8")
    assert report.warnings == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["recipe"]["name"] == "mxfp8"
    assert report.counts["quantized again"] == 14 and report.counts["decoded"] == 1


def test_a_split_model_becomes_files_with_an_index(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    first, second = split_llama(source)
    for name in ("config.json", "tokenizer.json"):
        (source / name).write_text("{}")
    convert(source, tmp_path / "out", "none")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert compare(first, tmp_path / "out").verdict.startswith("equal: all tensors have the same values")
    with pytest.raises(breccia.UnsupportedError, match="names a file, but the source has 2; give the name of a folder"):
        convert(second, tmp_path / "one.safetensors", "none")


def test_a_dry_run_finds_what_a_run_finds(tmp_path: Path) -> None:
    source = llama(tmp_path)
    dry = convert(source, tmp_path / "out", "mxfp8", dry_run=True)
    run = convert(source, tmp_path / "out", "mxfp8")
    assert [(t.name, t.bytes_in, t.bytes_out) for t in dry.tensors] == [(t.name, t.bytes_in, t.bytes_out) for t in run.tensors]
    with pytest.raises(FileExistsError):
        convert(source, tmp_path / "out", "mxfp8")
    convert(source, tmp_path / "out", "none", force=True)
