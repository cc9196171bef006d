"""Checkpoints that other programs quantized: what is announced and what is found; block FP8 as an example of a dialect."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from program import Run

import breccia
from breccia.bridges import compare, convert, load_safetensors
from breccia_bridges.checkpoint import INDEX
from breccia_bridges.inspection import inspected
from breccia_bridges.safetensors_file import Container
from breccia_bridges.safetensors_writer import Writer

RNG = np.random.default_rng(11)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

#: A dtype of a file, a shape, and bytes of it.
Entry = tuple[str, np.ndarray]


def write(path: Path, tensors: dict[str, Entry]) -> Path:
    """A safetensors file of entries by name, with dtypes that NumPy may lack."""
    with Writer(path, {name: (dtype, array.shape) for name, (dtype, array) in tensors.items()}) as writer:
        for name, (_, array) in tensors.items():
            writer.write(name, array)
    return path


def folder(path: Path, tensors: dict[str, Entry], config: Any = None, **files: Any) -> Path:
    """A folder of one safetensors file, with config.json and other JSON files."""
    path.mkdir()
    write(path / "model.safetensors", tensors)
    for name, listed in {"config": config, **files}.items():
        if listed is not None:
            (path / f"{name}.json").write_text(listed if isinstance(listed, str) else json.dumps(listed))
    return path


def codes(*shape: int) -> Entry:
    """E4M3 codes of finite numbers."""
    c = RNG.integers(0, 256, shape, np.uint8)
    return "F8_E4M3", np.where((c & 0x7F) == 0x7F, c & 0xF0, c).astype(np.uint8)


def brain(*shape: int) -> Entry:
    return "BF16", (RNG.standard_normal(shape) * 0.02).astype(ml_dtypes.bfloat16).view(np.uint16)


def scales(dtype: str, *shape: int) -> Entry:
    """Scales of about 2^-8, in any dtype that checkpoints have them in."""
    x = RNG.uniform(0.5, 2, shape) / 256
    match dtype:
        case "F32":
            return dtype, x.astype(np.float32)
        case "BF16":
            return dtype, x.astype(ml_dtypes.bfloat16).view(np.uint16)
        case _:
            return dtype, RNG.integers(115, 123, shape, np.uint8)


def widened(entry: Entry) -> np.ndarray:
    """Codes or scales as FP32, by ml_dtypes."""
    dtype, array = entry
    names = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "U8": "float8_e8m0fnu", "BF16": "bfloat16"}
    return array.astype(np.float32) if dtype not in names else array.view(getattr(ml_dtypes, names[dtype])).astype(np.float32)


def decoded(weight: Entry, scale: Entry, rows: int = 128, columns: int = 128) -> np.ndarray:
    """Codes times the scale of their block, in FP32."""
    x, s = widened(weight), widened(scale)
    m, k = x.shape[-2:]
    return x * np.repeat(np.repeat(s, rows, -2)[..., :m, :], columns, -1)[..., :k]


Q_A = "model.layers.0.self_attn.q_a_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
EXPERTS = [f"model.layers.1.mlp.experts.{i}.up_proj.weight" for i in range(2)]
FUSED = "model.layers.1.mlp.experts.gate_up_proj"


def deepseek(dtype: str = "F32") -> dict[str, Entry]:
    """The tensors of a DeepSeek-like checkpoint: partial tiles, experts one by one and fused, the rest in BF16."""
    shapes = {Q_A: (576, 256), DOWN: (256, 300), **dict.fromkeys(EXPERTS, (200, 256)), FUSED: (3, 200, 130)}
    found = {
        "model.embed_tokens.weight": brain(100, 256),
        "model.layers.0.input_layernorm.weight": brain(256),
        "model.layers.1.mlp.gate.weight": brain(4, 256),
        "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", np.ones(4, np.float32)),
        "lm_head.weight": brain(100, 256),
    }
    for name, shape in shapes.items():
        found[name] = codes(*shape)
        found[f"{name}_scale_inv"] = scales(dtype, *shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return found


def sharded(path: Path, tensors: dict[str, Entry]) -> Path:
    """Three shards with their index. Experts have their scales in other shards; the third shard has scales only."""
    path.mkdir()
    files = {name: "1" if "layers.1" not in name else "2" for name in tensors}
    files |= {f"{EXPERTS[0]}_scale_inv": "1", f"{EXPERTS[1]}_scale_inv": "3", f"{FUSED}_scale_inv": "3"}
    files = {name: f"model-0000{file}-of-00003.safetensors" for name, file in files.items()}
    for file in set(files.values()):
        write(path / file, {name: entry for name, entry in tensors.items() if files[name] == file})
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    config = {"model_type": "tiny", "torch_dtype": "bfloat16", "quantization_config": FP8, "vocab_size": 100}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E8M0", "U8"])
def test_block_fp8_is_quantized_again_from_its_decoded_values(dtype: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("breccia.kernels.measuring.SLAB", 1 << 14)  # several slabs for each tensor
    tensors, recipe = deepseek(dtype), breccia.NVFP4BlockScaling()
    report = convert(sharded(tmp_path / "ds", tensors), tmp_path / "out", recipe)
    loaded = load_safetensors(tmp_path / "out")
    assert set(loaded) == {name for name in tensors if not name.endswith("_scale_inv")}
    for name in (Q_A, DOWN, FUSED, *EXPERTS):
        values = decoded(tensors[name], tensors[f"{name}_scale_inv"])
        assert loaded[name].digest() == breccia.cast(values, recipe).digest()
        t = next(t for t in report.quantized if t.name == name)
        noise = np.linalg.norm((values - breccia.dequantize(loaded[name])).astype(np.float64))
        # The same FP64 sums in another order.
        assert t.measured.sqnr == pytest.approx(20 * np.log10(np.linalg.norm(values.astype(np.float64)) / noise), rel=1e-9)
        assert t.dtype == "fp8_block" and t.bytes_in == sum(tensors[f"{name}{s}"][1].nbytes for s in ("", "_scale_inv"))
    for name in set(tensors) - {t.name for t in report.quantized}:
        if not name.endswith("_scale_inv"):
            assert loaded[name].tobytes() == tensors[name][1].tobytes()
    assert report.bytes_in == sum(array.nbytes for _, array in tensors.values())


def test_the_written_folder_has_no_trace_of_the_old_scales(tmp_path: Path) -> None:
    convert(sharded(tmp_path / "ds", deepseek()), tmp_path / "out", breccia.NVFP4BlockScaling())
    files = {p.name: Container(p) for p in (tmp_path / "out").glob("*.safetensors")}
    assert sorted(files) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2)], "the third had scales only"
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"] == {name: file for file, container in files.items() for name in container.entries}
    assert index["metadata"]["total_size"] == sum(e.nbytes for c in files.values() for e in c.entries.values())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(config) == ["model_type", "torch_dtype", "quantization_config", "vocab_size", "transformers_weights"]
    assert config["quantization_config"] == {
        "quant_method": "breccia",
        "recipe": breccia.NVFP4BlockScaling().to_dict(),
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"],
    }


@pytest.mark.parametrize(("dtype", "lossless"), [("F32", False), ("F8_E8M0", True)])
def test_fp8_weights_that_are_kept_are_decoded_to_the_models_dtype(
    dtype: str, lossless: bool, tmp_path: Path, run: Run
) -> None:
    """E4M3 codes times powers of two fit BF16; other scales round."""
    tensors = deepseek(dtype)
    source = sharded(tmp_path / "ds", tensors)
    code, text, err = run("convert", source, tmp_path / "out", "-r", "nvfp4", "--exclude", "*.self_attn.*")
    assert code == 0 and "1 excluded and decoded to BF16" in text
    assert err == ("" if lossless else f"warning: not quantized, and rounded to BF16 when decoded: {Q_A}.\n")
    kept = load_safetensors(tmp_path / "out")[Q_A]
    values = decoded(tensors[Q_A], tensors[f"{Q_A}_scale_inv"])
    assert kept.tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()
    assert (kept.astype(np.float32) == values).all() == lossless
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.self_attn.q_a_proj" in settings["modules_to_not_convert"]
    config = json.loads((source / "config.json").read_text())
    del config["torch_dtype"]
    (source / "config.json").write_text(json.dumps(config | {"text_config": {"dtype": "float32"}}))
    report = convert(source, tmp_path / "exact", breccia.NVFP4BlockScaling(), exclude=["*.self_attn.*"])
    assert load_safetensors(tmp_path / "exact")[Q_A].tobytes() == values.tobytes() and report.warnings == []


def test_a_recipe_as_wide_as_fp8_still_quantizes_fp8_weights(tmp_path: Path) -> None:
    """What counts is the size of the decoded weight."""
    report = convert(sharded(tmp_path / "ds", deepseek()), tmp_path / "out", breccia.MXFP8BlockScaling())
    assert {t.name for t in report.quantized} == {Q_A, DOWN, FUSED, *EXPERTS}


def test_a_dry_run_of_block_fp8_says_what_the_run_does(tmp_path: Path) -> None:
    source = sharded(tmp_path / "ds", deepseek())
    planned = convert(source, tmp_path / "out", breccia.NVFP4BlockScaling(), dry_run=True)
    assert not (tmp_path / "out").exists()
    written = convert(source, tmp_path / "out", breccia.NVFP4BlockScaling())

    def facts(report: Any) -> list[Any]:
        return [(t.name, t.reason, t.stored_as, t.bytes_in, t.bytes_out) for t in report.tensors]

    assert facts(planned) == facts(written)


def test_a_single_file_of_block_fp8_converts_without_a_config(tmp_path: Path) -> None:
    tensors = {name: entry for name, entry in deepseek().items() if name.startswith(Q_A)}
    convert(write(tmp_path / "m.safetensors", tensors), tmp_path / "o.safetensors", breccia.MXFP4BlockScaling())
    expected = breccia.cast(decoded(tensors[Q_A], tensors[f"{Q_A}_scale_inv"]), breccia.MXFP4BlockScaling())
    assert load_safetensors(tmp_path / "o.safetensors")[Q_A].digest() == expected.digest()


def test_other_block_sizes_come_from_config_json(tmp_path: Path) -> None:
    tensors = {"w": codes(6, 100), "w_scale_inv": scales("U8", 6, 4)}
    config = {"quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]}}
    convert(folder(tmp_path / "m", tensors, config), tmp_path / "out", breccia.NVFP4BlockScaling())
    expected = breccia.cast(decoded(tensors["w"], tensors["w_scale_inv"], 1, 32), breccia.NVFP4BlockScaling())
    assert load_safetensors(tmp_path / "out")["w"].digest() == expected.digest()


def test_memory_stays_that_of_a_slab_of_whole_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"w": codes(2048, 512), "w_scale_inv": scales("F32", 16, 4)}
    path = write(tmp_path / "m.safetensors", tensors)
    monkeypatch.setattr("breccia.kernels.measuring.SLAB", 1 << 14)
    convert(path, tmp_path / "o.safetensors", breccia.NVFP4BlockScaling())  # imports what it needs
    tracemalloc.start()
    try:
        for exclude in ((), ("w",)):
            tracemalloc.reset_peak()
            convert(path, tmp_path / "o.safetensors", breccia.NVFP4BlockScaling(), force=True, exclude=exclude)
            assert tracemalloc.get_traced_memory()[1] < 2048 * 512 * 4, "less than the decoded weight"
    finally:
        tracemalloc.stop()


def test_compare_decodes_block_fp8(tmp_path: Path) -> None:
    tensors = deepseek()
    source = sharded(tmp_path / "ds", tensors)
    made = convert(source, tmp_path / "out", breccia.NVFP4BlockScaling())
    found = compare(source, tmp_path / "out")
    assert (found.missing, found.added) == ([], [])
    assert {t.name: t.measured.sqnr for t in found.quantized} == {t.name: t.measured.sqnr for t in made.quantized}
    assert compare(source, source).quantized == []
    changed = dict(tensors)
    changed[f"{Q_A}_scale_inv"] = "F32", tensors[f"{Q_A}_scale_inv"][1] * np.float32(2)
    (t,) = compare(source, sharded(tmp_path / "twice", changed)).quantized
    assert t.name == Q_A and t.measured.sqnr == 0.0, "y = 2x has noise as strong as the signal"


def test_inspect_shows_the_scales_of_block_fp8_in_other_shards(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in inspected(sharded(tmp_path / "ds", deepseek())).rows}
    assert {name: (row["scaled_by"], row["block"]) for name, row in rows.items() if row["scaled_by"]} == {
        Q_A: (f"{Q_A}_scale_inv", (128, 128)),
        DOWN: (f"{DOWN}_scale_inv", (128, 128)),
        FUSED: (f"{FUSED}_scale_inv", (1, 128, 128)),
        **{name: (f"{name}_scale_inv", (128, 128)) for name in EXPERTS},
    }
    assert all(row["suspicious"] == [] for row in rows.values())


# ------------------------------------------------------------------------------------------------ refused by name


def zeros(dtype: str, *shape: int) -> Entry:
    """Zeros of a dtype, as the file's bytes are seen."""
    numpy = {"I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1", "U32": "u4", "F16": "f2", "BF16": "u2", "F32": "f4", "I64": "i8"}
    return dtype, np.zeros(shape, numpy.get(dtype, "u1"))


W = "model.layers.0.mlp.up_proj."
GPTQ = {
    f"{W}qweight": zeros("I32", 32, 512),
    f"{W}qzeros": zeros("I32", 2, 64),
    f"{W}scales": zeros("F16", 2, 512),
    f"{W}g_idx": zeros("I32", 256),
}
GPT_OSS = {
    "model.layers.0.mlp.experts.gate_up_proj_blocks": zeros("U8", 2, 64, 4, 16),
    "model.layers.0.mlp.experts.gate_up_proj_scales": zeros("U8", 2, 64, 4),
}
AQLM = {
    f"{W}codebooks": zeros("F16", 1, 256, 1, 8),
    f"{W}codes": zeros("I8", 64, 8),
    f"{W}scales": zeros("F16", 64, 1),
}
UNKNOWN = {f"{W}codes": zeros("I8", 512, 256), f"{W}codes_scale": zeros("BF16", 512, 1)}

FOREIGN: dict[str, tuple[dict[str, Entry], str, str | None]] = {
    "aqlm": (AQLM, "AQLM", "aqlm"),
    "unknown": (UNKNOWN, "codes with scales, of an unknown program", None),
}


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("name", FOREIGN)
def test_what_cannot_be_read_is_refused_by_name_with_and_without_its_config(name: str, tmp_path: Path, run: Run) -> None:
    tensors, form, method = FOREIGN[name]
    plain = {"lm_head.weight": brain(10, 64), **tensors}
    sources = {"is": folder(tmp_path / "bare", plain)}
    if method is not None:
        configured = folder(tmp_path / "configured", plain, {"quantization_config": {"quant_method": method}})
        sources[f"config.json: quantization_config is {method!r}; "] = configured
    for where, source in sources.items():
        code, out, err = run("convert", source, tmp_path / "out", "-r", "nvfp4")
        assert (code, out) == (1, "") and f"{source} is already quantized ({form}): " in err and where in err
        assert any(f"{tensor} is {dtype}" in err for tensor, (dtype, _) in tensors.items())
        assert "; codes and scales are not values. " in err and "convert the checkpoint that it was made from" in err
        assert not (tmp_path / "out").exists()
        code, _, err = run("compare", source, source)
        assert code == 1 and f"{source} is already quantized ({form}): " in err
        assert run("inspect", source)[0] == 0


def test_a_config_whose_tensors_look_like_another_format_says_both(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", deepseek(), {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    message = (
        r"quantized \(GPTQ, and its tensors look like block FP8, as DeepSeek-V3\): .* is 'gptq'; .*_scale_inv is F32.*; "
        r"codes and scales are not values. Give source_dialect= \(on the command line --from\)"
    )
    with pytest.raises(breccia.UnsupportedError, match=message):
        convert(source, tmp_path / "out", breccia.NVFP4BlockScaling())


def test_a_dialect_beside_the_one_that_a_config_announces_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", deepseek() | GPT_OSS, GOOD)
    with pytest.raises(
        breccia.UnsupportedError, match=r"its tensors look like MXFP4, as gpt-oss\): .* is 'fp8'; .*_blocks is U8"
    ):
        convert(source, tmp_path / "out", breccia.NVFP4BlockScaling())


def test_a_checkpoint_without_a_config_may_mix_dialects(tmp_path: Path) -> None:
    experts = {name: ("U8", RNG.integers(0, 120, array.shape, np.uint8)) for name, (_, array) in GPT_OSS.items()}
    source = folder(tmp_path / "n", deepseek() | experts)
    assert set(breccia.bridges.load_checkpoint(source).dialects) == {"deepseek_v3", "gpt_oss"}
    report = convert(source, tmp_path / "out", "none")
    assert {t.stored_as for t in report.codes_kept} == {"fp8_block", "mxfp4"} and compare(
        source, tmp_path / "out"
    ).sqnr == np.inf


def test_a_config_without_quantized_tensors_says_what_to_remove(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", {"w": brain(4, 64)}, {"quantization_config": {"quant_method": "bitsandbytes"}})
    message = r"is 'bitsandbytes'; but no tensor is quantized. Remove .*config.json: quantization_config, or download it again"
    with pytest.raises(breccia.UnsupportedError, match=message):
        convert(source, tmp_path / "out", breccia.NVFP4BlockScaling())


def test_plain_fp8_without_any_scale_is_kept_as_it_is(tmp_path: Path) -> None:
    tensors = {"w": codes(4, 64), "v": brain(4, 64)}
    report = convert(write(tmp_path / "m.safetensors", tensors), tmp_path / "o.safetensors", breccia.NVFP4BlockScaling())
    assert {t.name: t.reason for t in report.tensors} == {"w": "F8_E4M3 cannot be cast", "v": ""}


def test_plain_parameters_with_names_that_other_formats_use_are_no_codes(tmp_path: Path) -> None:
    tensors = {
        "attention.W_q": brain(64, 64),
        "w": brain(64, 64),
        "w_scale": brain(1),
        "weight": brain(8, 64),
        "scales": brain(8),
    }
    report = convert(write(tmp_path / "m.safetensors", tensors), tmp_path / "o.safetensors", breccia.MXFP8BlockScaling())
    assert {t.name for t in report.quantized} == {"attention.W_q", "w", "weight"}


def test_every_method_of_transformers_is_known() -> None:
    config = pytest.importorskip("transformers.utils.quantization_config")
    known = {method for dialect in breccia.backend.registry().dialects.values() for method in dialect.methods}
    assert {method.value for method in config.QuantizationMethod} - known == set()


# ------------------------------------------------------------------------------------------------ bad input

GOOD = {"quantization_config": FP8}
Arranged = tuple[dict[str, Entry], dict[str, Any]]


def without(name: str) -> dict[str, Entry]:
    return {key: entry for key, entry in deepseek().items() if key != name}


def fp8(**settings: Any) -> dict[str, Any]:
    return {"config": {"quantization_config": FP8 | settings}}


BAD: dict[str, Callable[[], tuple[Arranged, str]]] = {
    "two keys": lambda: (
        (deepseek(), {"config": GOOD | {"compression_config": {"quant_method": "compressed-tensors"}}}),
        "config.json has both quantization_config and compression_config; keep the one that describes the tensors",
    ),
    "two files": lambda: (
        (deepseek(), {"config": GOOD, "quantize_config": {"bits": 4, "group_size": 128}}),
        "two quantization configs disagree: .*config.json: quantization_config is 'fp8', and .*quantize_config.json is 'gptq'. "
        "Keep the one that describes the tensors",
    ),
    "modelopt's file": lambda: (
        (GPTQ, {"config": {"quantization_config": {"quant_method": "gptq"}}, "hf_quant_config": {"quantization": {}}}),
        "disagree: .* is 'gptq', and .*hf_quant_config.json is 'modelopt'",
    ),
    "no JSON": lambda: ((deepseek(), {"config": "{"}), "config.json is not JSON .Expecting property name"),
    "no object": lambda: ((deepseek(), {"config": [1]}), r"config.json is a JSON object; found \[1\]"),
    "settings that are no object": lambda: (
        (deepseek(), {"config": {"quantization_config": "fp8"}}),
        "config.json: quantization_config is an object; found 'fp8'. Fix it, or download it again",
    ),
    "settings of a part": lambda: (
        (deepseek(), {"config": {"text_config": {"quantization_config": 8}}}),
        "config.json: text_config.quantization_config is an object; found 8",
    ),
    "an unknown method": lambda: (
        (deepseek(), {"config": {"quantization_config": {"quant_method": "gptqq"}}}),
        "quantization_config has quant_method 'gptqq', which breccia does not know; did you mean 'gptq'\\? Known: aqlm, .* "
        "Convert the checkpoint that it was made from; if the weights are not quantized, remove ",
    ),
    "no method": lambda: (
        (deepseek(), {"config": {"quantization_config": {"bits": 4}}}),
        "quantization_config has no quant_method; its keys are bits. Known: ",
    ),
    "a scale without a weight": lambda: (
        (without(Q_A), {"config": GOOD}),
        f"'{Q_A}_scale_inv' is a part of block FP8, as DeepSeek-V3 without the others: no file has '{Q_A}'. Give the folder",
    ),
    "a weight without a scale": lambda: (
        (without(f"{Q_A}_scale_inv"), {"config": GOOD}),
        f"'{Q_A}' is F8_E4M3 without a scale: no file has '{Q_A}_scale_inv' or .*. Give the folder of all shards",
    ),
    "a scale of another shape": lambda: (
        (deepseek() | {f"{Q_A}_scale_inv": scales("F32", 4, 2)}, {"config": GOOD}),
        f"{Q_A} \\(block FP8, as DeepSeek-V3\\): codes of shape 576x256 need a scale of shape 5x2, one per 128x128, one per "
        "row, or one; '_scale_inv' has shape 4x2. Check weight_block_size in config.json",
    ),
    "a vector": lambda: (
        (deepseek() | {"v": codes(64), "v_scale_inv": scales("F32", 1)}, {"config": GOOD}),
        r"v \(block FP8, as DeepSeek-V3\): its codes have shape 64; a weight has two axes or more",
    ),
    "a weight of another dtype": lambda: (
        (deepseek() | {Q_A: brain(576, 256)}, {"config": GOOD}),
        f"'{Q_A}' is BF16; block FP8, as DeepSeek-V3 has F8_E4M3 or F8_E5M2 or F8_E4M3FNUZ or F8_E5M2FNUZ there. Download",
    ),
    "scales of another dtype": lambda: (
        (deepseek() | {f"{Q_A}_scale_inv": zeros("I32", 5, 2)}, {"config": GOOD}),
        f"'{Q_A}' is F8_E4M3 without a scale: '{Q_A}_scale_inv' is I32, not F32 or BF16 or F16 or F8_E8M0 or U8",
    ),
    "a block size of another kind": lambda: (
        (deepseek(), fp8(weight_block_size=128)),
        "weight_block_size is two integers >= 1; found 128. Fix config.json",
    ),
    "no blocks": lambda: (
        (deepseek(), fp8(weight_block_size=None)),
        "one per row, or one; '_scale_inv' has shape 5x2. Check weight_block_size in config.json",
    ),
}


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("name", BAD)
def test_a_source_that_contradicts_itself_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    (tensors, files), message = BAD[name]()
    source = folder(tmp_path / "m", tensors, **files)
    for dry_run in (True, False):
        kinds = breccia.CorruptFileError, breccia.UnsupportedError, breccia.DialectError
        with pytest.raises(kinds, match=message) as refused:
            convert(source, tmp_path / "out", breccia.NVFP4BlockScaling(), dry_run=dry_run)
        assert str(source) in str(refused.value) and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_file_that_the_index_names_and_the_folder_lacks_is_refused(tmp_path: Path) -> None:
    source = sharded(tmp_path / "ds", deepseek())
    (source / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(breccia.CorruptFileError, match="names model-00003-of-00003.safetensors, which the folder lacks"):
        convert(source, tmp_path / "out", breccia.NVFP4BlockScaling())
    assert [p.name for p in tmp_path.iterdir()] == ["ds"]


def test_a_shard_without_the_weight_of_a_scale_is_refused(tmp_path: Path) -> None:
    source = sharded(tmp_path / "ds", deepseek())
    shutil.move(source / "model-00001-of-00003.safetensors", tmp_path / "alone.safetensors")
    with pytest.raises(
        breccia.CorruptFileError, match="alone.safetensors: .*without the others: no file has .*Give the folder of all"
    ):
        convert(tmp_path / "alone.safetensors", tmp_path / "out.safetensors", breccia.NVFP4BlockScaling())


def test_fp8_codes_that_the_config_announces_need_scales(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", {"w": codes(4, 64)}, GOOD)
    with pytest.raises(breccia.CorruptFileError, match="'w' is F8_E4M3 without a scale: no file has 'w_scale_inv'"):
        convert(source, tmp_path / "out", breccia.NVFP4BlockScaling())
