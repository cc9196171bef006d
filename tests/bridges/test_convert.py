"""`breccia convert` and `breccia inspect`, called through the command line, on checkpoints made here."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from program import Run
from safetensors import SafetensorError
from safetensors.numpy import save_file

import breccia
from breccia import codecs, formats
from breccia.bridges import load_safetensors, save_safetensors
from breccia.internal import kept_kind
from breccia.siblings import install
from breccia.testing.examples import special_rows, wide
from breccia_bridges import commands, compiled, destination, staging
from breccia_bridges import convert_file as converter
from breccia_bridges.checkpoint import INDEX
from breccia_bridges.compare import compare
from breccia_bridges.convert import convert
from breccia_bridges.huggingface import REFUSAL
from breccia_bridges.results import Report
from breccia_bridges.safetensors_file import Container
from breccia_bridges.safetensors_writer import Writer
from breccia_bridges.slab_casts import SlabCasts
from breccia_bridges.source import Source

#: `make test` runs every recipe and every framework; `make test-all` runs all combinations.
pytestmark = pytest.mark.covering(1, 2)


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.02).astype(np.float32)

    return {
        "embed_tokens.weight": normal(50, 64),
        "layer.0.attention.weight": normal(64, 64),
        "layer.0.mlp.weight": normal(48, 65),
        "layer.0.mlp.half": normal(8, 64).astype(np.float16),
        "layer.0.mlp.brain": normal(8, 64).astype(ml_dtypes.bfloat16),
        "layer.0.norm.weight": normal(64),
        "layer.0.experts": normal(3, 16, 32),
        "lm_head.weight": normal(50, 64),
        "positions": np.arange(50).reshape(1, 50),
        "step": np.asarray(7, np.int64),
        "nothing": np.zeros((0, 4), np.float32),
    }


QUANTIZED = [
    "layer.0.attention.weight",
    "layer.0.experts",
    "layer.0.mlp.brain",
    "layer.0.mlp.half",
    "layer.0.mlp.weight",
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path, metadata={"format": "np"})
    return path


def entries(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_every_recipe_converts_and_loads_as_a_direct_cast(recipe: breccia.ScalingRecipe, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    report = convert(source, out, recipe)
    loaded = load_safetensors(out)
    assert sorted(t.name for t in report.quantized) == QUANTIZED
    for name, original in weights().items():
        if name in QUANTIZED:
            expected = breccia.cast(original, recipe)
            assert loaded[name].data.tobytes() == expected.data.tobytes()
            assert loaded[name].scale.tobytes() == expected.scale.tobytes()
            assert (loaded[name].recipe, loaded[name].shape) == (recipe, original.shape)
        else:
            assert loaded[name].dtype == original.dtype and loaded[name].tobytes() == original.tobytes()
    assert report.bytes_out == sum(e.nbytes for e in Container(out).entries.values())
    assert entries(tmp_path) == ["model.safetensors", "out.safetensors"]


def test_the_report_has_the_defined_error_metrics(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out.safetensors", breccia.NVFP4BlockScaling())
    by_name = {t.name: t for t in report.tensors}
    x = weights()["layer.0.attention.weight"].astype(np.float64)
    y = breccia.dequantize(breccia.cast(x.astype(np.float32), breccia.NVFP4BlockScaling())).astype(np.float64)
    t = by_name["layer.0.attention.weight"]
    assert t.measured.sqnr == pytest.approx(
        10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()), rel=1e-12
    )  # FP64 sums in another order
    assert t.measured.cosine == pytest.approx((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()), rel=1e-12)
    assert t.measured.max_error == np.abs(x - y).max()
    assert t.bytes_out == 64 * 64 // 2 + 64 * 4 + 4 and t.bytes_in == 64 * 64 * 4
    assert report.worst is min(report.quantized, key=lambda t: t.measured.sqnr)
    assert report.bytes_kept == sum(a.nbytes for n, a in weights().items() if n not in QUANTIZED)


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "model.layers.3.mlp.gate.weight": "router",  # Qwen3-MoE, DeepSeek-V3
        "model.layers.0.block_sparse_moe.gate.weight": "router",  # Mixtral
        "model.layers.0.feed_forward.router.weight": "router",  # Llama 4
        "model.layers.1.mlp.shared_expert_gate.weight": "router",  # Qwen2-MoE
        "model.layers.3.mlp.gate_proj.weight": "",
        "model.layers.3.mlp.experts.7.gate_proj.weight": "",
        "model.layers.3.mlp.experts.gate_up_proj": "",
        "transformer.wte.weight": "embedding",  # GPT-2
        "shared.weight": "embedding",  # T5
        "model.layers.0.mlp.shared_experts.down_proj.weight": "",
        "transformer.h.0.ln_1.weight": "norm",
        "model.layers.0.mlp.experts.gate_up_proj_bias": "bias",  # GPT-OSS: one row per expert
        "lm_head.weight": "output head",
        "base_model.model.layers.0.q_proj.lora_A.default.weight": "adapter",
    }.items(),
)
def test_names_of_hugging_face_models_belong_to_the_kinds_that_keep_their_precision(name: str, kind: str) -> None:
    assert kept_kind(name) == kind


def test_selection_keeps_embeddings_norms_and_heads_unless_included(source: Path, tmp_path: Path) -> None:
    recipe = breccia.MXFP8BlockScaling()
    everything = convert(source, tmp_path / "a.safetensors", recipe, include=("*",))
    assert sorted(t.name for t in everything.quantized) == sorted([*QUANTIZED, "embed_tokens.weight", "lm_head.weight"])
    some = convert(source, tmp_path / "b.safetensors", recipe, include=("lm_head*",), exclude=("*.mlp.*",))
    assert sorted(t.name for t in some.quantized) == ["layer.0.attention.weight", "layer.0.experts", "lm_head.weight"]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "extra").mkdir(parents=True)
    tensors = weights()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for shard, held in shards.items():
        save_file({n: tensors[n] for n in held}, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": {n: s for s, held in shards.items() for n in held}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    (folder / "extra" / "notes.txt").write_text("kept")
    (folder / "pytorch_model.bin").write_bytes(b"weights in another format")
    return folder


def test_a_sharded_folder_converts_shard_by_shard_with_its_other_files(sharded: Path, tmp_path: Path) -> None:
    out = tmp_path / "quantized"
    convert(sharded, out, breccia.INT4Scaling(group_size=32))
    assert entries(out) == [
        "config.json",
        "extra",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    assert (out / "extra" / "notes.txt").read_text() == "kept"
    index = json.loads((out / INDEX).read_text())
    found = {name: p.name for p in out.glob("*.safetensors") for name in Container(p).entries}
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(
        e.nbytes for p in out.glob("*.safetensors") for e in Container(p).entries.values()
    )
    loaded = {k: v for p in out.glob("*.safetensors") for k, v in load_safetensors(p).items()}
    assert set(loaded) == set(weights())


def test_a_converted_folder_loads_as_one_checkpoint(sharded: Path, tmp_path: Path) -> None:
    convert(sharded, tmp_path / "out", breccia.NVFP4BlockScaling())
    loaded = load_safetensors(tmp_path / "out")
    assert set(loaded) == set(weights())
    assert {name for name, tensor in loaded.items() if isinstance(tensor, breccia.ScaledTensor)} <= set(QUANTIZED)
    with pytest.raises(breccia.UnsupportedError, match="contains no .safetensors file"):
        load_safetensors(_folder(tmp_path / "empty"))


def test_a_folder_without_an_index_converts_too(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    source.rename(folder / "model.safetensors")
    convert(folder, tmp_path / "out", breccia.MXFP8BlockScaling())
    assert entries(tmp_path / "out") == ["model.safetensors"]


def test_force_replaces_whole_files_and_folders(sharded: Path, source: Path, tmp_path: Path) -> None:
    for src, dst in ((source, tmp_path / "o.safetensors"), (sharded, tmp_path / "o")):
        convert(src, dst, breccia.MXFP8BlockScaling())
        with pytest.raises(FileExistsError, match="exists; choose another name, or replace it: force=True"):
            convert(src, dst, breccia.NVFP4BlockScaling())
        convert(src, dst, breccia.NVFP4BlockScaling(), force=True)
        path = dst if dst.is_file() else dst / "model-00001-of-00002.safetensors"
        assert "nvfp4" in str(Container(path).metadata)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_failed_conversion_keeps_existing_files_and_goes_on_from_what_it_has_finished(
    source: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def fails(name: str, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError("No space left on device")

    for src, dst in ((source, tmp_path / "o.safetensors"), (sharded, tmp_path / "o")):
        convert(src, dst, breccia.MXFP8BlockScaling())
        before = {p: p.read_bytes() for p in ([dst] if dst.is_file() else sorted(dst.rglob("*.*"))) if p.is_file()}
        calls = 0
        with pytest.raises(OSError, match="No space"):
            convert(src, dst, breccia.NVFP4BlockScaling(), force=True, advance=fails)
        assert {p: p.read_bytes() for p in before} == before
        calls = 0
        new = tmp_path / f"new{dst.suffix}"
        with pytest.raises(OSError, match="No space"):
            convert(src, new, breccia.NVFP4BlockScaling(), advance=fails)
        assert not new.exists()
        for path, options in ((dst, {"force": True}), (new, {})):
            with pytest.warns(UserWarning, match="goes on with what an interrupted run has left in .*: . tensors are written"):
                convert(src, path, breccia.NVFP4BlockScaling(), **options)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_bytes_that_differ_when_read_back_are_reported(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reopen = Container.view

    def flips(self: Container, name: str) -> np.ndarray:
        found = reopen(self, name)
        if name == "layer.0.experts.scale":
            found = found.copy()
            found.reshape(-1).view(np.uint8)[3] ^= 1
        return found

    monkeypatch.setattr(Container, "view", flips)
    with pytest.raises(breccia.CorruptFileError, match="'layer.0.experts.scale' reads back bytes other than those written"):
        convert(source, tmp_path / "o.safetensors", breccia.MXFP8BlockScaling())
    assert entries(tmp_path) == ["model.safetensors"]


def test_safetensors_must_be_able_to_open_the_output(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = converter.safe_open

    def of_the_source(path: Path, framework: str) -> Any:
        return real(source, framework=framework)

    def refuses(path: Path, framework: str) -> Any:
        raise SafetensorError("unknown dtype")

    recipe, out = breccia.MXFP8BlockScaling(), tmp_path / "o.safetensors"
    monkeypatch.setattr(converter, "safe_open", of_the_source)
    with pytest.raises(breccia.CorruptFileError, match="the stock safetensors reader finds tensors other than those written"):
        convert(source, out, recipe)
    monkeypatch.setattr(converter, "safe_open", refuses)
    with pytest.raises(breccia.CorruptFileError, match=r"reader rejects it \(unknown dtype\); upgrade safetensors"):
        convert(source, out, recipe)
    assert entries(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (
            lambda t: (t / "absent.safetensors", t / "o.safetensors"),
            "no checkpoint .*absent.safetensors; give a .safetensors or",
        ),
        (lambda t: (_text(t / "model.gguf"), t / "o.safetensors"), "model.gguf: its header ends at byte 24 of a file"),
        (lambda t: (_text(t / "model.bin"), t / "o.safetensors"), "model.bin is no zip archive, which torch.save writes"),
        (lambda t: (_folder(t / "empty"), t / "o"), "empty contains no .safetensors file"),
        (lambda t: (t / "model.safetensors", t / "no" / "o.safetensors"), "there is no folder .*/no; create it first"),
        (
            lambda t: (t / "model.safetensors", _folder(t / "taken")),
            "taken is a folder but the source is a file; give a name that",
        ),
        (lambda t: (t / "model.safetensors", t / "o"), "o does not end in .safetensors; add the suffix"),
        (
            lambda t: (Path(os.devnull), t / "o.safetensors"),
            "null is neither a file nor a folder; give a .safetensors or .gguf",
        ),
        (
            lambda t: (_checkpoint(t / "m"), _text(t / "taken")),
            "taken is a file but the source is a folder; choose another name",
        ),
        (
            lambda t: (t / "model.safetensors", _fifo(t / "o.safetensors")),
            "o.safetensors is neither a file nor a folder; choose",
        ),
        (lambda t: (t / "model.safetensors", t / "model.safetensors"), "model.safetensors is the source; choose another"),
        (lambda t: (_checkpoint(t / "m"), _link(t / "l", t / "m")), "l is the source; choose another destination"),
        (lambda t: (_checkpoint(t / "m"), t / "m" / "fp8"), "fp8 lies inside the source .*m; choose a destination outside it"),
        (lambda t: (_checkpoint(t / "m"), _checkpoint(t / "m" / "fp8")), "fp8 lies inside the source"),
        (lambda t: (_checkpoint(t / "m"), _link(t / "m" / "l", _folder(t / "far"))), "l lies inside the source"),
        (lambda t: (_checkpoint(t / "n" / "m"), t / "n"), "n contains the source .*m; choose another destination"),
        (lambda t: (_link(t / "l", _checkpoint(t / "n" / "m")), t / "n"), "n contains the source .*l; choose"),
        (lambda t: (_linked_shards(t), t / "blobs"), "blobs contains the source .*snapshot; choose"),
        (lambda t: (_checkpoint(t / "m"), Path(".")), "is or contains the current folder"),
        (
            lambda t: (_checkpoint(t / "m"), Path("..")),
            "cwd is or contains the current folder; choose a folder or file inside it",
        ),
        (
            lambda t: (_checkpoint(t / "m"), _folder(t / "papers")),
            "papers does not look like a checkpoint .*does not replace it",
        ),
        (
            lambda t: (_dangling(t / "m"), t / "o"),
            "m has broken links or special files: gone.safetensors, which the folder",
        ),
        (lambda t: (_text(t / "cut.safetensors"), t / "o.safetensors"), "cut.safetensors"),
        (lambda t: (_index(t, "{"), t / "o"), "has no readable weight_map"),
        (lambda t: (_index(t, '{"weight_map": {"a": "../x.safetensors"}}'), t / "o"), "files of the same folder"),
        (
            lambda t: (_index(t, '{"weight_map": {"a": "x.safetensors"}}'), t / "o"),
            "names x.safetensors, which the folder lacks",
        ),
    ],
)
def test_an_impossible_conversion_prints_one_line_and_leaves_no_file(
    arrange: Any, message: str, source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd" / "inner")
    src, dst = arrange(tmp_path)
    assert tmp_path in (Path.cwd() / dst).parents, "a test may replace only files in its own folder"
    before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    code, out, err = run("convert", src, dst, "--recipe", "mxfp8", "--force")
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and re.search(message, err)
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == before


def test_the_root_folder_is_refused_as_destination(source: Path, tmp_path: Path) -> None:
    root = destination.location(Path("/"))
    with pytest.raises(
        breccia.UnsupportedError, match="^/ is or contains the current folder; choose a folder or file inside it"
    ):
        destination.check_destination(source, [source], root, True)  # this function only checks


def _text(path: Path) -> Path:
    path.write_text("no tensors")
    return path


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _fifo(path: Path) -> Path:
    if not hasattr(os, "mkfifo"):
        pytest.skip("named pipes are POSIX's")
    os.mkfifo(path)
    return path


def _link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


def _checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": np.ones((4, 64), np.float32)}, folder / "model.safetensors")
    return folder


def _linked_shards(folder: Path) -> Path:
    """A checkpoint as in a download cache: links to files in another folder."""
    _link(_folder(folder / "snapshot") / "model.safetensors", _checkpoint(folder / "blobs") / "model.safetensors")
    return folder / "snapshot"


def _dangling(folder: Path) -> Path:
    _link(_checkpoint(folder) / "gone.safetensors", folder / "nowhere")
    return folder


def _index(folder: Path, text: str) -> Path:
    (_folder(folder / "indexed") / INDEX).write_text(text)
    return folder / "indexed"


def test_what_breccia_quantized_keeps_its_codes_or_is_quantized_again(source: Path, tmp_path: Path, run: Run) -> None:
    convert(source, tmp_path / "o.safetensors", breccia.MXFP8BlockScaling())
    before = load_safetensors(tmp_path / "o.safetensors")
    code, out, _ = run("convert", tmp_path / "o.safetensors", tmp_path / "p.safetensors", "-r", "mxfp8")
    assert code == 0 and "codes kept  of 5 tensors that were quantized before: no value changed" in out and "again " not in out
    same = load_safetensors(tmp_path / "p.safetensors")
    scaled = {name for name, x in before.items() if isinstance(x, breccia.ScaledTensor)}
    assert len(scaled) == 5 and all(breccia.bytes_equal(same[name], before[name]) for name in scaled)
    code, out, _ = run("convert", tmp_path / "o.safetensors", tmp_path / "q.safetensors", "-r", "nvfp4")
    assert code == 0 and "again       5 tensors that were quantized before, from their decoded values" in out
    for name in scaled:
        expected = breccia.cast(breccia.dequantize(before[name]), "nvfp4")
        assert breccia.bytes_equal(load_safetensors(tmp_path / "q.safetensors")[name], expected)


@pytest.mark.parametrize(("word", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_a_quantized_checkpoint_becomes_dense(word: str, dtype: str, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "o.safetensors", breccia.MXFP8BlockScaling())
    before = load_safetensors(tmp_path / "o.safetensors")
    report = convert(tmp_path / "o.safetensors", tmp_path / "p.safetensors", word)
    after = load_safetensors(tmp_path / "p.safetensors")
    assert not report.quantized and report.recipe is None
    for name, x in before.items():
        if isinstance(x, breccia.ScaledTensor):
            assert after[name].dtype.name == dtype
            assert after[name].tobytes() == breccia.dequantize(x).astype(after[name].dtype).tobytes()
        else:
            assert after[name].dtype == x.dtype and after[name].tobytes() == x.tobytes()


def test_words_that_quantize_nothing_take_no_patterns(source: Path, tmp_path: Path) -> None:
    with pytest.raises(breccia.OptionError, match="recipe 'none' quantizes nothing, so include= and exclude= have nothing to"):
        convert(source, tmp_path / "o.safetensors", "none", exclude=["*"])


def test_the_program_converts_inspects_and_reports(source: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.safetensors"
    code, text, err = run("convert", source, out, "--recipe", "int4,group_size=32", "--exclude", "*.mlp.*")
    assert (code, err) == (0, "")
    for part in ("INT4Scaling(group_size=32", "2 tensors, ", "kept", "SQNR", "worst", "verified"):
        assert part in text
    code, text, _ = run("inspect", out)
    assert code == 0 and "layer.0.experts" in text and "3x16x32" in text and "11 tensors, 2 of them scaled" in text
    code, text, _ = run("inspect", out, "--json")
    rows = {row["name"]: row for row in json.loads(text)["tensors"]}
    assert rows["layer.0.experts"]["recipe"] == breccia.INT4Scaling(group_size=32).to_dict()
    assert rows["layer.0.experts"]["shape"] == [3, 16, 32] and rows["step"]["shape"] == []
    assert rows["layer.0.experts"]["bytes"] == 3 * 16 * 32 // 2 + 3 * 16 * 2
    code, text, _ = run("convert", source, out, "-r", "mxfp8", "--force", "--json")
    report = json.loads(text)
    assert report["recipe"] == breccia.MXFP8BlockScaling().to_dict() and len(report["tensors"]) == 11 and report["seconds"] > 0


def test_a_source_with_nan_is_converted_with_a_warning(tmp_path: Path, run: Run) -> None:
    bad = np.ones((4, 64), np.float32)
    bad[1, 40] = np.nan
    save_file({"w": bad, "v": np.ones((4, 64), np.float32)}, tmp_path / "m.safetensors")
    code, _, err = run("convert", tmp_path / "m.safetensors", tmp_path / "o.safetensors", "-r", "mxfp8")
    assert (code, err) == (0, f"warning: NaN or Inf in {tmp_path / 'm.safetensors'}: w; their blocks decode to NaN.\n")
    code, text, _ = run("convert", tmp_path / "m.safetensors", tmp_path / "p.safetensors", "-r", "mxfp8", "--json")
    assert json.loads(text)["sqnr_db"] is None and json.loads(text)["worst"] == "w"
    assert {t["name"]: t["max_error"] for t in json.loads(text)["tensors"]} == {"w": None, "v": 0.0}


# ------------------------------------------------------------------------------------------------ replacing the destination


def test_a_link_at_the_destination_is_replaced_and_its_target_kept(source: Path, tmp_path: Path) -> None:
    recipe = breccia.MXFP8BlockScaling()
    model, other = _checkpoint(tmp_path / "m"), _checkpoint(tmp_path / "other")
    kept = (other / "model.safetensors").read_bytes()
    for src, name in ((source, "file.safetensors"), (model, "folder")):
        target = other / "model.safetensors" if src is source else other
        for aim in (target, tmp_path / "nowhere"):
            link = _link(tmp_path / name, aim)
            with pytest.raises(FileExistsError, match="exists; choose another name, or replace it: force=True"):
                convert(src, link, recipe)
            convert(src, link, recipe, force=True)
            assert not link.is_symlink() and link.is_dir() == src.is_dir()
            shutil.rmtree(link) if link.is_dir() else link.unlink()
    assert (other / "model.safetensors").read_bytes() == kept and not (tmp_path / "nowhere").exists()
    assert entries(tmp_path) == ["m", "model.safetensors", "other"]


def test_a_mount_point_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, disk = _checkpoint(tmp_path / "m"), _checkpoint(tmp_path / "disk")
    monkeypatch.setattr(os.path, "ismount", lambda path: path == disk)
    with pytest.raises(FileExistsError, match="disk is a mount point, which cannot be replaced; choose a folder in it"):
        convert(model, disk, breccia.MXFP8BlockScaling(), force=True)


def _failing_renames(monkeypatch: pytest.MonkeyPatch, *failing: int) -> None:
    """Make the n-th calls of Path.rename, from 1, fail, on a system that cannot exchange two paths."""
    monkeypatch.setattr(staging, "exchange", lambda a, b: False)
    real, calls = Path.rename, 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls in failing:
            raise PermissionError(f"rename {calls} fails")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


def test_a_folder_that_cannot_be_replaced_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, old = _checkpoint(tmp_path / "m"), _checkpoint(tmp_path / "old")
    (old / "mine.txt").write_text("mine")
    _failing_renames(monkeypatch, 2)
    with pytest.raises(PermissionError, match="rename 2 fails"):
        convert(model, old, breccia.MXFP8BlockScaling(), force=True)
    assert (old / "mine.txt").read_text() == "mine" and entries(tmp_path) == [".breccia-staging.old", "m", "old"]
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="goes on with what"):
        convert(model, old, breccia.MXFP8BlockScaling(), force=True)
    assert "mxfp8" in str(Container(old / "model.safetensors").metadata) and entries(tmp_path) == ["m", "old"]


def test_a_folder_that_cannot_be_restored_is_kept_and_its_path_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, old = _checkpoint(tmp_path / "m"), _checkpoint(tmp_path / "old")
    (old / "mine.txt").write_text("mine")
    _failing_renames(monkeypatch, 2, 3)
    with pytest.raises(OSError, match="old could not be replaced or restored .*; the old contents are complete in") as refused:
        convert(model, old, breccia.MXFP8BlockScaling(), force=True)
    kept = staging.staging_folder(old) / "old" / "old"
    assert str(refused.value).endswith(f" the old contents are complete in {kept}.")
    assert (kept / "mine.txt").read_text() == "mine" and not old.exists()
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="old is back: a run that was interrupted"), staging.Staging(old):
        pass
    assert (old / "mine.txt").read_text() == "mine" and entries(tmp_path) == ["m", "old"]


def test_old_contents_that_cannot_be_removed_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, old = _checkpoint(tmp_path / "m"), _checkpoint(tmp_path / "old")
    with monkeypatch.context() as patch:
        patch.setattr(staging.shutil, "rmtree", lambda path, ignore_errors=False: None)
        with pytest.raises(OSError, match="old is written; the old contents could not be removed and are in .*staging.old"):
            convert(model, old, breccia.MXFP8BlockScaling(), force=True)
        with pytest.warns(UserWarning), pytest.raises(OSError, match="is left from an interrupted run and cannot be removed"):
            convert(model, old, breccia.MXFP8BlockScaling(), force=True)
    assert "mxfp8" in str(Container(old / "model.safetensors").metadata)


def test_a_destination_created_during_the_conversion_is_not_touched(tmp_path: Path) -> None:
    model, out = _checkpoint(tmp_path / "m"), tmp_path / "out"

    def appears(name: str, size: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "mine.txt").write_text("mine")

    for force, message in ((False, "exists; choose"), (True, "does not look like a checkpoint")):
        with pytest.raises(FileExistsError, match=message):
            convert(model, out, breccia.MXFP8BlockScaling(), force=force, advance=appears)
        assert entries(tmp_path) == [".breccia-staging.out", "m", "out"] and entries(out) == ["mine.txt"]
        shutil.rmtree(out)
        with pytest.warns(UserWarning, match="goes on with what"):
            convert(model, out, breccia.MXFP8BlockScaling())
        assert entries(tmp_path) == ["m", "out"]
        shutil.rmtree(out)


INTERRUPTED = """
import signal, sys, time
from breccia_bridges import slab_casts
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background may ignore these two
signal.signal(signal.SIGHUP, signal.SIG_DFL)

real = slab_casts.cast

def cast(*arguments, **options):
    print("casting", flush=True)
    time.sleep(1)  # a slab that a thread has begun is ended
    return real(*arguments, **options)

slab_casts.cast = cast
from breccia.cli.main import run
run(sys.argv[1:])
"""


@pytest.mark.skipif(os.name != "posix", reason="other systems end a process without a signal handler")
@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("SIGTERM", 143, marks=pytest.mark.long),
        pytest.param("SIGHUP", 129, marks=pytest.mark.long),
        ("SIGINT", 130),
    ],
)
def test_a_signal_leaves_no_files_and_prints_one_line(name: str, code: int, tmp_path: Path) -> None:
    source, out = _checkpoint(tmp_path / "m"), _checkpoint(tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    words = ["convert", str(source), str(out), "-r", "mxfp8", "--force"]
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, *words], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "casting\n"
        assert len(entries(tmp_path)) == 3, "the conversion is running and has a temporary folder"
        process.send_signal(getattr(signal, name))
        text, err = process.communicate(timeout=30)
    assert (process.returncode, text, err) == (code, "", "interrupted; nothing was written\n")
    assert entries(tmp_path) == ["m", "out"] and (out / "model.safetensors").read_bytes() == before


def test_a_signal_after_the_output_is_written_says_so(
    source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = staging.Staging.commit, tmp_path / "o.safetensors"

    def stopped(self: staging.Staging) -> None:
        real(self)
        if self.destination == out:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(staging.Staging, "commit", stopped)
    before = signal.getsignal(signal.SIGTERM)
    found = run("convert", source, out, "-r", "mxfp8")
    assert found == (143, "", f"interrupted; {out}, complete and verified, was written\n")
    assert entries(tmp_path) == ["model.safetensors", "o.safetensors"]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="SIGHUP exists only on POSIX")
def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with commands.interruptible(tmp_path):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# ------------------------------------------------------------------------------------------------ folders


def test_other_files_are_copied_except_weights_hidden_folders_and_dangling_links(sharded: Path, tmp_path: Path) -> None:
    files = {
        ".gitattributes": True,
        "tokenizer.json": True,
        "original/params.json": True,
        "2_Dense/model.safetensors": True,  # a separate module, which the index does not list
        "original/consolidated.00.pth": False,
        "onnx/model.onnx": False,
        "onnx/model.onnx_data": False,
        "pytorch_model.bin.index.json": False,
        "consolidated.safetensors": False,
        "TF_MODEL.H5": False,
        ".git/config": False,
        "extra/.cache/blob": False,
    }
    for name in files:
        (sharded / name).parent.mkdir(parents=True, exist_ok=True)
        (sharded / name).write_text(name)
    _link(sharded / "merges.txt", sharded / "tokenizer.json")
    _link(sharded / "gone.txt", tmp_path / "nowhere")
    _link(sharded / "gone", tmp_path / "nowhere")
    _link(sharded / "up", tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(sharded / "pipe")
    convert(sharded, tmp_path / "out", breccia.MXFP8BlockScaling())
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    ours = {INDEX, "config.json", "extra/notes.txt", "merges.txt", *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2))}
    assert found == ours | {name for name, copied in files.items() if copied}
    assert not (tmp_path / "out" / "onnx").exists() and not (tmp_path / "out" / "merges.txt").is_symlink()


def test_other_files_that_cannot_be_copied_stop_a_conversion_before_it_starts(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, destination: Path) -> None:
        raise OSError(28, "No space left on device")

    def worked(name: str, size: int) -> None:
        pytest.fail("a tensor was converted first")

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="No space left"):
        convert(sharded, tmp_path / "out", breccia.MXFP8BlockScaling(), advance=worked)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith((".", "out"))]


def test_hidden_files_are_not_shards(tmp_path: Path) -> None:
    _text(_checkpoint(tmp_path / "m") / "._model.safetensors")
    report = convert(tmp_path / "m", tmp_path / "out", breccia.MXFP8BlockScaling())
    assert [t.name for t in report.tensors] == ["w"]


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (
            {"a": "1", "b": "2", "c": "2"},
            "tensor 'c' is in 2.safetensors by the index, but in no file in fact; download",
        ),
        ({"a": "2", "b": "1"}, "tensor 'a' is in 2.safetensors by the index, but in 1.safetensors in fact; download"),
        ({"a": "1", "x": "2"}, "tensor 'x' is in 2.safetensors by the index, but in no file in fact"),
        ({"b": "2"}, ""),
        ({"b": "2", "twice": "3"}, "tensor 'twice' is in both 3.safetensors and 4.safetensors; download"),
        ({"a": "1", "e": "4", "twice": "4"}, "tensor 'twice' is in both"),
    ],
)
def test_an_index_that_contradicts_its_shards_is_refused_before_the_conversion(
    listed: dict[str, str], message: str, tmp_path: Path
) -> None:
    folder = _folder(tmp_path / "m")
    for name, held in {"1": ["a"], "2": ["b"], "3": ["twice"], "4": ["e", "twice"]}.items():
        save_file({tensor: np.ones((4, 64), np.float32) for tensor in held}, folder / f"{name}.safetensors")
    if "twice" in listed:  # both files belong to the checkpoint only if the index lists both
        listed = {**listed, "twice": "3", "e": "4"}
    (folder / INDEX).write_text(json.dumps({"weight_map": {t: f"{n}.safetensors" for t, n in listed.items()}}))
    if not message:
        assert len(convert(folder, tmp_path / "out", breccia.MXFP8BlockScaling()).tensors) == 1
        return
    with pytest.raises(breccia.CorruptFileError, match=message) as refused:
        convert(folder, tmp_path / "out", breccia.MXFP8BlockScaling())
    assert str(refused.value).startswith(str(folder / INDEX)) and entries(tmp_path) == ["m"]


def test_a_tensor_missing_from_the_index_is_reported_with_its_file(sharded: Path, tmp_path: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    file = index["weight_map"].pop("layer.0.experts")
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(breccia.CorruptFileError, match=f"'layer.0.experts' of {file} is missing from the index; download"):
        convert(sharded, tmp_path / "out", breccia.MXFP8BlockScaling())


def test_a_quantized_shard_beside_a_plain_one_is_converted(tmp_path: Path) -> None:
    folder, x = _folder(tmp_path / "m"), np.ones((4, 64), np.float32)
    save_file({"v": x}, folder / "model.safetensors")
    breccia.bridges.save_safetensors({"w": breccia.cast(x, "mxfp8")}, folder / "z.safetensors")
    report = convert(folder, tmp_path / "out", breccia.MXFP8BlockScaling())
    assert {t.name: t.codes_kept for t in report.quantized} == {"v": False, "w": True}


def test_config_json_of_a_converted_folder_names_the_recipe_and_what_kept_its_precision(
    sharded: Path, source: Path, tmp_path: Path, run: Run
) -> None:
    config = {"architectures": ["Tiny"], "torch_dtype": "float32", "quantization_config": None, "vocab_size": 50}
    (sharded / "config.json").write_text(json.dumps(config))
    (sharded / "config.json").chmod(0o444)
    _, text, _ = run("convert", sharded, tmp_path / "out", "-r", "mxfp8", "--exclude", "*.brain")
    assert text.splitlines()[-1].rstrip().split(maxsplit=1) == [
        "load",
        "breccia.bridges.load_safetensors(folder); or import breccia_torch.hf (pip install 'breccia-torch[hf]'), then "
        "transformers' from_pretrained(folder)",
    ]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {
        "quantization_config": {
            "quant_method": "breccia",
            "recipe": breccia.MXFP8BlockScaling().to_dict(),
            "modules_to_not_convert": ["layer.0.mlp.brain", "lm_head"],
        },
        "transformers_weights": REFUSAL,
    }
    assert list(written) == [*config, "transformers_weights"], "the order of keys is kept"
    assert not list((tmp_path / "out").glob("*.tmp"))
    _, text, _ = run("convert", source, tmp_path / "o.safetensors", "-r", "mxfp8")
    assert "transformers" not in text


def test_config_json_stays_without_quantization_where_nothing_is_quantized(sharded: Path, tmp_path: Path) -> None:
    (sharded / "config.json").write_text(json.dumps({"vocab_size": 50}))
    convert(sharded, tmp_path / "out", breccia.MXFP8BlockScaling(), exclude=["*"])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"vocab_size": 50}


# ------------------------------------------------------------------------------------------------ tensors that are kept


def test_every_kept_tensor_has_a_reason(tmp_path: Path, run: Run) -> None:
    save_file(
        {
            "conv.weight": np.ones((8, 8, 3, 3), np.float32),
            "conv2.weight": np.ones((8, 8, 3, 3), np.float32),  # 4 bits in blocks of 3 under FP32 scales
            "time_mix": np.ones((1, 1, 64), np.float32),
            "experts": np.ones((2, 4, 64), np.float32),
            "thin.weight": np.ones((64, 1), ml_dtypes.bfloat16),
            "wide": np.ones((4, 64), np.float64),
            "ids": np.ones((4, 64), np.int32),
            "out": np.ones((4, 64), np.float32),
            "w": np.ones((4, 64), np.float32),
            "bias": np.ones(64, np.float32),
            "none": np.ones((0, 64), np.float32),
            "embed": np.ones((4, 64), np.float32),
        },
        tmp_path / "m.safetensors",
    )
    words = ("convert", tmp_path / "m.safetensors", tmp_path / "o.safetensors", "-r")
    code, text, err = run(*words, "int4,scale_dtype=fp32", "--exclude", "out", "--include", "conv2*", "--json")
    report = json.loads(text)
    assert code == 0 and err.count("\n") == 1 and "the last axis of conv2.weight (16.00 bits) is shorter than a block" in err
    assert {t["name"]: t["reason"] for t in report["tensors"]} == {
        "conv.weight": "kept by default (no matrix)",
        "conv2.weight": None,
        "time_mix": "kept by default (no matrix)",
        "experts": None,
        "thin.weight": "would not shrink",
        "wide": "F64 cannot be cast",
        "ids": "not floating",
        "out": "excluded",
        "w": None,
        "bias": "fewer than two axes",
        "none": "empty",
        "embed": "kept by default (embedding)",
    }
    assert report["kept"]["would not shrink"] == 1
    shutil.copy(tmp_path / "m.safetensors", tmp_path / "n.safetensors")
    halves = {"conv": np.ones((64, 64), np.float16), "column": np.ones((64, 1), np.float16)}
    save_file(halves, tmp_path / "m.safetensors")
    code, text, err = run(*words, "mxfp8", "--force")
    assert code == 0 and "kept        1 tensors, 128 B in their original precision: 1 would not shrink" in text
    assert load_safetensors(tmp_path / "o.safetensors")["column"].tobytes() == halves["column"].tobytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--include", "lm_hed*"), "the pattern 'lm_hed*' matches no tensor; did you mean 'lm_head*'?"),
        (("--exclude", "*.mpl.*", "--exclude", "*.mlp.*"), "the pattern '*.mpl.*' matches no tensor; did you mean '*.mlp.*'?"),
        (
            ("--include", "embed*,lm_head*"),
            "the pattern 'embed*,lm_head*' matches no tensor; give each pattern separately.",
        ),
        (
            ("--exclude", "vision*"),
            "the pattern 'vision*' matches no tensor; `breccia inspect` lists the names, such as embed_tokens.weight, "
            "layer.0.attention.weight, layer.0.experts and 8 more.",
        ),
        (("--include", "lm_hed*", "--exclude", "*.mpl.*"), "lm_head*'? the pattern '*.mpl.*' matches no tensor; did you mean"),
    ],
)
def test_a_pattern_that_matches_no_tensor_is_an_error_before_anything_is_written(
    options: tuple[str, ...], message: str, source: Path, tmp_path: Path, run: Run
) -> None:
    for more in ((), ("--dry-run",)):
        code, out, err = run("convert", source, tmp_path / "o.safetensors", "-r", "mxfp8", *options, *more)
        assert (code, out) == (1, "") and err.startswith("error: ") and message in err
    assert entries(tmp_path) == ["model.safetensors"]


def test_a_conversion_of_nothing_is_warned_of(source: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "o.safetensors"
    code, _, err = run("convert", source, out, "-r", "mxfp8", "--exclude", "*", "--json")
    assert (code, err) == (0, "warning: no tensor was quantized; `--json` says why each was kept.\n")
    assert load_safetensors(out)["lm_head.weight"].tobytes() == weights()["lm_head.weight"].tobytes()


def test_values_that_overflow_when_decoded_are_reported(tmp_path: Path, run: Run) -> None:
    x = np.full((4, 64), np.finfo(np.float32).max)
    x[0, 1] = 0.0
    save_file({"w": x}, tmp_path / "m.safetensors")
    code, text, _ = run("convert", tmp_path / "m.safetensors", tmp_path / "o.safetensors", "-r", "mxfp8")
    assert code == 0 and "worst       w: -inf dB" in text


def test_bfloat16_checkpoints_convert_without_ml_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brain = {name: weights()["layer.0.mlp.brain"] for name in ("w", "norm.weight")}
    save_file(brain, tmp_path / "m.safetensors")
    expected = breccia.cast(brain["w"], breccia.INT4Scaling(16, scale_dtype="bf16"))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    report = convert(tmp_path / "m.safetensors", tmp_path / "o.safetensors", expected.recipe)
    assert [t.name for t in report.quantized] == ["w"]
    written = Container(tmp_path / "o.safetensors")
    assert written.array("w.data").tobytes() == expected.data.tobytes()
    assert written.array("norm.weight").tobytes() == brain["norm.weight"].tobytes()


def test_tensors_of_four_and_six_bits_are_kept(tmp_path: Path) -> None:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "w": ("F32", (4, 64)),
        "four": ("F4", (4, 64)),
        "six": ("F6_E3M2", (4, 64)),
    }
    with Writer(tmp_path / "m.safetensors", shapes) as writer:
        for name, entry in writer.entries.items():
            writer.write(name, bytes(range(64)) * (entry.nbytes // 64))
    report = convert(tmp_path / "m.safetensors", tmp_path / "o.safetensors", breccia.NVFP4BlockScaling())
    assert {t.name: t.reason for t in report.tensors} == {"w": "", "four": "F4 cannot be cast", "six": "F6_E3M2 cannot be cast"}
    for name in ("four", "six"):
        found = [Container(tmp_path / f"{file}.safetensors").array(name).tobytes() for file in "mo"]
        assert found[0] == found[1]


# ------------------------------------------------------------------------------------------------ slabs


def awkward() -> dict[str, np.ndarray]:
    """Tensors of several ranks whose largest, or faulty, element lies in the first, a middle, or the last slab."""
    rows, rng = special_rows(96), np.random.default_rng(5)
    finite = rows[np.isfinite(rows).all(-1)]
    out = {
        "special": rows,
        "special.finite": finite,
        "special.reversed": finite[::-1].copy(),
        "wide": wide((7, 65)),
        "experts": wide((3, 16, 48), exponents=3),
        "four axes": wide((2, 3, 10, 40), exponents=3),
        "thin matrices": wide((9, 3, 40), exponents=3),
        "zero": np.zeros((6, 64), np.float32),
        "tiny": np.full((6, 64), 2.0**-130, np.float32),
        "half": rng.standard_normal((6, 64)).astype(np.float16),
        "brain": rng.standard_normal((6, 64)).astype(ml_dtypes.bfloat16),
    }
    for name, value in (("nan", np.nan), ("inf", -np.inf)):
        for row in (0, 3, 5):
            out[f"{name} in row {row}"] = rng.standard_normal((6, 64)).astype(np.float32)
            out[f"{name} in row {row}"][row, 40] = value
    return out


@pytest.mark.parametrize("slab", [130, *(pytest.param(slab, marks=pytest.mark.long) for slab in (1, 1000))])
def test_the_slab_size_changes_no_byte(
    slab: int, recipe: breccia.ScalingRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = awkward()
    save_file(tensors, tmp_path / "m.safetensors")
    whole = convert(tmp_path / "m.safetensors", tmp_path / "whole.safetensors", recipe, include=["*"])
    monkeypatch.setattr("breccia.kernels.measuring.SLAB", slab)
    report = convert(tmp_path / "m.safetensors", tmp_path / "o.safetensors", recipe, include=["*"])
    loaded = load_safetensors(tmp_path / "o.safetensors")
    for name, x in tensors.items():
        expected = breccia.cast(x, recipe)
        assert isinstance(loaded[name], breccia.ScaledTensor)
        for part in ("data", "scale", "zero_point", "global_scale"):
            found, wanted = getattr(loaded[name], part), getattr(expected, part)
            assert (found is None) == (wanted is None)
            assert wanted is None or (found.shape, found.tobytes()) == (wanted.shape, wanted.tobytes()), (name, part)
    for a, b in zip(report.tensors, whole.tensors, strict=True):
        assert a.measured.max_error == b.measured.max_error or (
            np.isnan(a.measured.max_error) and np.isnan(b.measured.max_error)
        )
        assert a.measured.sqnr == pytest.approx(b.measured.sqnr, rel=1e-12, nan_ok=True)  # FP64 sums in another order


@dataclass(frozen=True)
class Shifted(breccia.ScalingRecipe):
    """A tensor-level scale and zero-point."""

    name = "shifted"

    @property
    def format(self) -> formats.Format:
        return formats.Format(codecs.UINT4, (formats.Level(codecs.F32, formats.TENSOR),), "zero_point")


@dataclass(frozen=True)
class Eighths(breccia.ScalingRecipe):
    """A tensor-level 8-bit scale, which may be zero."""

    name = "eighths"

    @property
    def format(self) -> formats.Format:
        return formats.Format(codecs.E2M1, (formats.Level(codecs.E4M3, formats.TENSOR),))


@dataclass(frozen=True)
class Columns(breccia.ScalingRecipe):
    """One scale for each row of a matrix."""

    name = "columns"

    @property
    def format(self) -> formats.Format:
        return formats.Format(codecs.E4M3, (formats.Level(codecs.F32, (1, None)),))


@pytest.mark.parametrize("recipe", [Shifted(), Eighths(), Columns()], ids=["all", "zero", "row"])
def test_third_party_recipes_write_the_same_bytes_in_slabs(
    recipe: breccia.ScalingRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breccia.kernels.measuring.SLAB", 64)
    for i, x in enumerate((wide((3, 10, 40), exponents=3), np.full((3, 10, 40), 1e-6, np.float32))):
        save_file({"w": x}, tmp_path / f"{i}.safetensors")
        pieces = list(SlabCasts(Source.open(tmp_path / f"{i}.safetensors").values["w"].numbers(), recipe).cast())
        expected = breccia.cast(x, recipe)
        assert len(pieces) == 30
        for part in pieces[0]:
            assert b"".join(p[part].tobytes() for p in pieces if part in p) == getattr(expected, part).tobytes()


def test_slabs_are_whole_blocks_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breccia.kernels.measuring.SLAB", 150)
    save_file({"w": np.ones((6, 10, 16), np.float32), "v": np.ones((6, 5, 8), np.float32)}, tmp_path / "m.safetensors")
    opened, recipe = Source.open(tmp_path / "m.safetensors"), breccia.Float8BlockScaling(block_k=8, block_m=4)

    def shapes(name: str, recipe: breccia.ScalingRecipe) -> list[tuple[int, ...]]:
        source = SlabCasts(opened.values[name].numbers(), recipe)
        return [source.stored.values(slab).shape for slab in source.slabs]

    assert shapes("w", recipe) == [(1, 8, 16) if i % 2 == 0 else (1, 2, 16) for i in range(12)], "a matrix at a time"
    assert shapes("v", recipe) == [(3, 5, 8)] * 2, "several matrices at a time"
    assert shapes("w", breccia.MXFP8BlockScaling()) == [(1, 9, 16), (1, 1, 16)] * 6, "rows of one matrix"


@pytest.mark.long
def test_peak_memory_is_bounded_by_the_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = wide((1024, 512), exponents=3)
    save_file({"w": x}, tmp_path / "m.safetensors")
    monkeypatch.setattr("breccia.kernels.measuring.SLAB", 1 << 12)
    monkeypatch.setattr("breccia_bridges.extremes._BYTES", 1 << 16)
    convert(tmp_path / "m.safetensors", tmp_path / "o.safetensors", breccia.NVFP4BlockScaling())  # so that all imports are done
    tracemalloc.start()
    try:
        for recipe in (breccia.NVFP4BlockScaling(), breccia.Float8CurrentScaling(), breccia.Float8BlockScaling(block_m=4)):
            tracemalloc.reset_peak()
            convert(tmp_path / "m.safetensors", tmp_path / "o.safetensors", recipe, force=True)
            assert tracemalloc.get_traced_memory()[1] < x.nbytes
    finally:
        tracemalloc.stop()


RESIDENT = """
import sys, threading, time
from pathlib import Path
import numpy as np
import breccia
from breccia_bridges.safetensors_writer import Writer
from breccia_bridges.convert import convert

folder, rng, peak = Path(sys.argv[1]), np.random.default_rng(0), 0

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def sample():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.001)

def source(name, rows):
    with Writer(folder / name, {"w": ("F32", (rows, 4096))}) as writer, writer.stream("w") as put:
        for i in range(0, rows, 64):
            put(rng.standard_normal((64, 4096), np.float32))
    return folder / name

tiny, large = source("tiny.safetensors", 64), source("large.safetensors", 1 << 16)
threading.Thread(target=sample, daemon=True).start()
for words in sys.argv[2:]:
    measured = []
    for path in (tiny, large):
        peak = 0
        convert(path, folder / "out.safetensors", breccia.recipe(words), force=True)
        measured.append(peak)
    print(words, measured[1] - measured[0], flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read as Linux tells it")
def test_a_tensor_of_a_gibibyte_takes_megabytes(tmp_path: Path) -> None:
    """Peak of RssAnon, sampled every millisecond: resident memory without pages of mapped files, which the system may drop.

    The assertion bounds the difference between a 1 GiB FP32 tensor and one of 1 MiB (a quarter of a slab): measured 65 MB.
    """
    words = ["nvfp4", "fp8_current"]
    command = [sys.executable, "-c", RESIDENT, str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    extra = {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()}
    print("bytes beyond those of the small tensor:", extra)
    assert list(extra) == words and max(extra.values()) < 150e6


# ------------------------------------------------------------------------------------------------ writing in pieces


def test_tensors_can_be_written_in_pieces_in_any_order(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    with Writer(tmp_path / "f", {"x": ("F32", (4, 3)), "n": ("U8", (2,)), "empty": ("F32", (0, 3))}) as writer:
        with writer.stream("x") as put, writer.stream("n") as count:
            for i in range(2):
                put(x[2 * i : 2 * i + 2])
                count(bytes([i]))
        with writer.stream("empty"):
            pass
    written = Container(tmp_path / "f")
    assert written.array("x").tobytes() == x.tobytes() and written.array("n").tolist() == [0, 1]


def test_pieces_must_add_up_and_each_tensor_is_written_once(tmp_path: Path) -> None:
    with Writer(tmp_path / "f", {"x": ("F32", (2,))}) as writer:
        with pytest.raises(breccia.ShapeError, match=r"of shape \(2,\), 8 bytes; got 4 bytes"), writer.stream("x") as put:
            put(bytes(4))
        with pytest.raises(breccia.BrecciaError, match="pieces of 'x' are put inside `with w.stream"):
            put(bytes(4))
        with pytest.raises(breccia.ShapeError, match="8 bytes; got 12 bytes"), writer.stream("x") as put:
            put(bytes(4))
            put(bytes(8))
        with writer.stream("x") as put:
            put(struct.pack("<f", 1))
            with pytest.raises(breccia.BrecciaError, match="'x' is already written"), writer.stream("x"):
                pass
            put(struct.pack("<f", 2))
        with pytest.raises(breccia.BrecciaError, match="'x' is already written; write each tensor once"):
            writer.write("x", bytes(8))
    assert Container(tmp_path / "f").array("x").tolist() == [1, 2]


# ------------------------------------------------------------------------------------------------ the program


@pytest.mark.together
def test_explain_plugins_version_and_unknown_arguments(run: Run) -> None:
    from breccia_native.availability import missing_products

    code, text, _ = run("explain", "cast", "nvfp4", "--on", "numpy", "--prefer", "numpy.cast")
    assert code == 0 and text.startswith("cast of nvfp4 on numpy\n -> numpy.cast") and "kernels/numpy/casting.py:" in text
    code, text, _ = run("explain", "matmul", "fp8_block", "mxfp8", "--json")
    assert json.loads(text)["winner"] == ("numpy.matmul" if missing_products("cpu") else "native.matmul")
    code, text, _ = run("plugins")
    assert code == 0 and "breccia-core" in text and "breccia-bridges" in text
    code, text, _ = run("plugins", "--json")
    assert {p["name"] for p in json.loads(text)} >= {"core", "bridges"}
    assert run("--version") == (0, f"breccia {breccia.__version__}\n", "")
    code, _, err = run("explain", "cast", "nvpf4")
    assert (
        code == 1
        and err
        == "error: no recipe 'nvpf4'; did you mean 'nvfp4'? Known: bnb_fp4, bnb_int8, flat, fp8_block, fp8_current, "
        "fp8_delayed, fp8_row, gguf, int, int4, int4_bias, int8, int_rounded, mlx_affine, mxfp4, mxfp6, mxfp8, mxint8, nf4, "
        "nvfp4.\n"
    )
    code, _, err = run("convrt")
    assert code == 2 and "convert" in err
    with pytest.raises(breccia.UnknownNameError):
        run("--debug", "explain", "cast", "nvpf4")


@pytest.mark.parametrize("command", ["", "convert", "diff", "inspect", "explain", "plugins"])
def test_help_of_every_command_fits_on_a_screen(command: str, run: Run) -> None:
    code, text, _ = run(*command.split(), "--help")
    assert code == 0 and "Usage: breccia" in text and len(text.splitlines()) <= 40


def program(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "breccia", *words], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_commands_of_a_missing_distribution_name_the_distribution() -> None:
    done = program("convert", "a", "b", "--recipe", "nvfp4", BRECCIA_BLOCK="bridges")
    assert done.returncode == 1
    assert done.stderr == f"error: `breccia convert` comes with breccia-bridges: {install('breccia-bridges')}\n"


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ImportError('blocked', name='typer')")
    done = program("plugins", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"breccia: the command line needs typer, which is not installed: {install('breccia-core[cli]')}\n"


TWICE = """
import sys
from breccia.bridges import convert
convert(sys.argv[1], sys.argv[2], "nvfp4")
convert(sys.argv[1], sys.argv[3], "nvfp4")
"""


@pytest.mark.long
def test_without_compiled_kernels_it_converts_to_the_same_bytes_and_says_once_that_it_is_slower(
    source: Path, tmp_path: Path
) -> None:
    outs = [tmp_path / f"{name}.safetensors" for name in ("ours", "one", "two")]
    convert(source, outs[0], "nvfp4")
    command = [sys.executable, "-c", TWICE, str(source), *map(str, outs[1:])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "BRECCIA_BLOCK": "native"})
    said = (
        "no compiled kernel of breccia-native runs here, so NumPy converts: to the same bytes, several times slower. "
        "It is installed but blocked: named in BRECCIA_BLOCK."
    )
    assert done.returncode == 0 and done.stderr.count(said) == done.stderr.count("Warning:") == 1, done.stderr
    assert outs[0].read_bytes() == outs[1].read_bytes() == outs[2].read_bytes()
    done = program("convert", str(source), str(tmp_path / "three.safetensors"), "-r", "nvfp4", BRECCIA_BLOCK="native")
    assert done.returncode == 0 and " ".join(done.stderr.split()) == f"warning: {said}"


def test_without_breccia_native_the_warning_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        table = type("Table", (), {"kernels": ()})

        def absence(self, distribution: str) -> str:
            return ""

    monkeypatch.setattr(compiled, "registry", Nothing)
    with pytest.warns(UserWarning, match=rf"several times slower\. Install it: {re.escape(install('breccia-native'))}\.$"):
        compiled.warn_without_kernels()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_numbers_beyond_a_dtype_saturate_when_they_are_decoded(dtype: str, tmp_path: Path) -> None:
    """Slabs without such numbers, or NaN, are decoded by kernels alone."""
    x = np.ones((2, 128), np.float32)
    x[0, 0], x[1, 0] = 3.4e38, np.nan
    save_safetensors({"mlp.weight": breccia.cast(x, "fp8_block")}, tmp_path / "q.safetensors")
    convert(tmp_path / "q.safetensors", tmp_path / "out.safetensors", dtype)
    found = Container(tmp_path / "out.safetensors")
    codec = {"bf16": codecs.BF16, "fp16": codecs.F16}[dtype]
    words = found.read("mlp.weight").view(np.uint16).reshape(2, 128)
    largest = max(code for code in range(1 << 15) if math.isfinite(codec.value(code)))
    assert words[0, 0] == largest and set(words[1].tolist()) == {codec.nan_code}


# -- policies and presets ----------------------------------------------------------------------------------------------


def test_a_preset_is_given_as_a_recipe_is(tmp_path: Path, run: Run) -> None:
    source, out = tmp_path / "m.safetensors", tmp_path / "out.safetensors"
    names = [f"model.layers.0.{name}.weight" for name in ("mlp.up_proj", "self_attn.q_proj")]
    save_safetensors({name: np.ones((128, 128), np.float32) for name in [*names, "lm_head.weight"]}, source)
    expected = {names[0]: None, names[1]: "excluded", "lm_head.weight": "no rule"}
    for dry_run in (["--dry-run"], []):
        code, text, _ = run("convert", source, out, "--recipe", "nvfp4-mlp", *dry_run, "--json")
        assert code == 0 and {t["name"]: t["reason"] for t in json.loads(text)["tensors"]} == expected
    assert convert(source, tmp_path / "same.safetensors", {"preset": "nvfp4-mlp"}).recipes == ["nvfp4"]
    assert out.read_bytes() == (tmp_path / "same.safetensors").read_bytes()
    code, text, _ = run("convert", "--help")
    assert code == 0 and all(name in " ".join(text.split()) for name in ("deepseek-fp8", "nvfp4-mlp", "int4-except-attention"))
    code, _, said = run("convert", source, tmp_path / "o.safetensors", "--recipe", "int4-except-atention")
    assert code == 1 and "no recipe and no preset 'int4-except-atention'; did you mean 'int4-except-attention'?" in said


# -- dry runs and reports ----------------------------------------------------------------------------------------------


def test_a_dry_run_prints_what_would_be_written_and_writes_nothing(source: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "o.safetensors"
    before = entries(tmp_path)
    code, text, _ = run("convert", source, out, "-r", "nvfp4", "--dry-run", "--json")
    assert code == 0 and entries(tmp_path) == before
    planned = json.loads(text)
    _, text, _ = run("convert", source, out, "-r", "nvfp4", "--json")
    written = json.loads(text)
    measured = {"sqnr_db", "cosine", "max_error", "clip_rate", "underflow_rate", "lossless", "worst", "seconds", "dry_run"}
    assert planned["dry_run"] and not written["dry_run"]
    assert {k: v for k, v in planned.items() if k not in measured | {"tensors"}} == {
        k: v for k, v in written.items() if k not in measured | {"tensors"}
    }
    for a, b in zip(planned["tensors"], written["tensors"], strict=True):
        assert all(a[key] == b[key] for key in a if key not in measured)
        assert a["sqnr_db"] is None and a["lossless"] is None
    assert planned["sqnr_db"] is None and planned["worst"] is None


def test_a_dry_run_reads_no_tensor_and_says_so(source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Container, "view", lambda self, name: pytest.fail(f"read {name}"))
    code, out, err = run("convert", source, tmp_path / "o.safetensors", "-r", "int4", "--dry-run")
    assert (code, err) == (0, "")
    assert f"dry run     nothing was written to {tmp_path / 'o.safetensors'}" in out
    assert "verified" not in out and "SQNR" not in out and "quantized   5 tensors" in out


def test_a_dry_run_fails_if_the_conversion_would(source: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "o.safetensors").write_bytes(b"mine")
    code, _, err = run("convert", source, tmp_path / "o.safetensors", "-r", "int4", "--dry-run")
    assert code == 1 and "exists; choose another name, or replace it: force=True (--force)." in err
    assert (tmp_path / "o.safetensors").read_bytes() == b"mine"
    assert run("convert", source, tmp_path / "o.safetensors", "-r", "int4", "--dry-run", "--force")[0] == 0
    assert (tmp_path / "o.safetensors").read_bytes() == b"mine"


def test_a_dry_run_refuses_to_write_a_report(source: Path, tmp_path: Path, run: Run) -> None:
    words = ("convert", source, tmp_path / "o.safetensors", "-r", "int4", "--dry-run", "--report", tmp_path / "r.html")
    code, _, err = run(*words)
    assert code == 2 and "--report shows measurements, and --dry-run measures nothing; use only one of them." in err
    assert entries(tmp_path) == ["model.safetensors"]


def drawn(page: Path) -> list[dict[str, Any]]:
    """The runs that the script of a report draws."""
    found = re.search(r'id="data">([^<]+)<', page.read_text("utf-8"))
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))["runs"]


def test_convert_and_compare_write_reports(source: Path, tmp_path: Path, run: Run) -> None:
    for recipe in ("nvfp4", "mxfp8"):
        code, out, _ = run(
            "convert", source, tmp_path / f"{recipe}.safetensors", "-r", recipe, "--report", tmp_path / f"{recipe}.html"
        )
        assert code == 0 and f"report      {tmp_path / recipe}.html" in out
        assert {"layer.0.mlp.weight", "step"} < {t["name"] for t in drawn(tmp_path / f"{recipe}.html")[0]["tensors"]}
    candidates = [tmp_path / f"{recipe}.safetensors" for recipe in ("nvfp4", "mxfp8")]
    code, out, _ = run("compare", source, *candidates, "--report", tmp_path / "both.html")
    assert code == 0 and f"report      {tmp_path / 'both.html'}" in out
    assert [r["label"] for r in drawn(tmp_path / "both.html")] == ["nvfp4", "mxfp8"]


def test_a_report_that_cannot_be_written_stops_the_run_before_it_starts(source: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "o.safetensors"
    for path in (tmp_path / "r.txt", tmp_path / "nowhere" / "r.html"):
        for words in (("convert", source, out, "-r", "int4"), ("compare", source, source)):
            code, _, err = run(*words, "--report", path)
            assert code == 1 and err.startswith("error: ") and str(path) in err.replace("\n", "")
    assert entries(tmp_path) == ["model.safetensors"]


def test_runs_with_one_recipe_are_labelled_by_their_files(source: Path, tmp_path: Path) -> None:
    reports = [convert(source, tmp_path / f"{n}.safetensors", breccia.INT4Scaling(), histograms=True) for n in "ab"]
    assert [r["label"] for r in commands.runs(reports)] == ["a", "b"]
    (alone,) = commands.runs(reports[:1])
    assert alone["label"] == "int4"
    listed = {t["name"]: t["histogram"] for t in alone["tensors"]}
    assert listed["step"] is None and sum(listed["layer.0.attention.weight"]["before"]) == 64 * 64


def test_runs_of_one_recipe_with_other_fields_are_labelled_by_their_fields(source: Path, tmp_path: Path) -> None:
    specs = ["int4,group_size=32", "int4,group_size=64"]
    files = [tmp_path / f"{n}.safetensors" for n in range(2)]
    for spec, file in zip(specs, files, strict=True):
        convert(source, file, breccia.recipe(spec))
    found = commands.runs([compare(source, file) for file in files])
    assert [r["label"] for r in found] == specs
    assert [[used["spec"] for used in r["recipe_fields"]] for r in found] == [[spec] for spec in specs]
    quantized = [t for t in found[0]["tensors"] if t["quantized"]]
    assert quantized and {t["spec"] for t in quantized} == {specs[0]}
    assert {t["spec"] for t in found[0]["tensors"] if not t["quantized"]} == {None}


def test_labels_are_the_shortest_that_tell_runs_apart(source: Path, tmp_path: Path) -> None:
    def labels(*destinations: str) -> list[str]:
        reports = [Report(str(source), str(tmp_path / path), breccia.INT4Scaling()) for path in destinations]
        return commands._labels(reports)

    assert labels("Qwen2.5-a", "Qwen2.5-b") == ["Qwen2.5-a", "Qwen2.5-b"]
    assert labels("a/model.safetensors", "b/model.safetensors") == ["a/model", "b/model"]
    assert labels("a.safetensors", "a.safetensors") == ["1: a", "2: a"]


def test_a_report_never_overwrites_a_checkpoint(source: Path, tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "out.html"
    folder.mkdir()
    shutil.copy(source, folder / "m.safetensors")
    code, _, err = run("convert", folder, tmp_path / "new.html", "-r", "int4", "--report", tmp_path / "new.html")
    assert code == 1 and "is one of the checkpoints; choose another name for the report." in err
    assert entries(tmp_path) == ["model.safetensors", "out.html"]


def test_a_read_only_folder_stops_the_run(source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path, mode: int = 0) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", locked)
    out, report = tmp_path / "o.safetensors", tmp_path / "r.html"
    for words in (("compare", source, source), ("convert", source, out, "-r", "int4")):
        code, _, err = run(*words, "--report", report)
        assert (code, err) == (1, f"error: cannot write {report}: Permission denied; choose another folder.\n")
    assert entries(tmp_path) == ["model.safetensors"]


def test_a_folder_cannot_be_converted_to_a_file(sharded: Path, tmp_path: Path, run: Run) -> None:
    code, _, err = run("convert", sharded, tmp_path / "o.safetensors", "-r", "int4")
    assert code == 1 and "names a file but the source is a folder; give the name of a folder." in err


def test_an_element_format_in_place_of_a_recipe_lists_its_recipes(source: Path, run: Run) -> None:
    for word, recipes in [
        ("fp8", "fp8_delayed, fp8_current, fp8_row, fp8_block, mxfp8"),
        ("FP4", "mxfp4, nvfp4"),
        ("e2m1", "mxfp4, nvfp4"),
        ("float6", "mxfp6"),
    ]:
        code, _, err = run("explain", "cast", word)
        assert code == 1
        assert err == f"error: {word!r} is an element format, not a recipe; its recipes differ in their scales: {recipes}.\n"


def test_tensors_kept_by_default_are_listed(source: Path, tmp_path: Path, run: Run) -> None:
    _, out, _ = run("convert", source, tmp_path / "o.safetensors", "-r", "int4")
    assert "by default  kept, unless --include names them: embed_tokens.weight, lm_head.weight" in out


def test_rows_shorter_than_a_block_give_a_warning(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(0)
    shapes = {"conv.weight": (32, 16, 3, 3), "tail.weight": (32, 40), "fine.weight": (32, 64)}
    save_file({name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "m.safetensors")
    _, _, err = run("convert", tmp_path / "m.safetensors", tmp_path / "o.safetensors", "-r", "nvfp4", "--include", "*")
    assert err == (
        "warning: the last axis of conv.weight (8.01 bits) is shorter than a block, so scales take more space than usual; "
        "--exclude keeps such tensors unquantized.\n"
    )
