"""`breccia convert` and `breccia inspect`, through the program's own entry, on checkpoints made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import breccia
from breccia.bridges import load_safetensors
from breccia_bridges import convert as converter
from breccia_bridges.container import Container, Writer
from breccia_bridges.convert import INDEX, Selection, convert

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The program in this process: (exit code, standard output, standard error)."""
    from breccia.cli import run as program

    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: Any) -> tuple[int, str, str]:
        try:
            program([str(w) for w in words])
            code: Any = 0
        except SystemExit as e:
            code = e.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return call


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


def test_figures_of_the_report_are_those_of_the_definition(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out.safetensors", breccia.NVFP4BlockScaling())
    by_name = {t.name: t for t in report.tensors}
    x = weights()["layer.0.attention.weight"].astype(np.float64)
    y = breccia.dequantize(breccia.cast(x.astype(np.float32), breccia.NVFP4BlockScaling())).astype(np.float64)
    t = by_name["layer.0.attention.weight"]
    assert t.sqnr == pytest.approx(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()), rel=1e-12)  # FP64 sums, other order
    assert t.cosine == pytest.approx((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()), rel=1e-12)
    assert t.max_error == np.abs(x - y).max()
    assert t.bytes_out == 64 * 64 // 2 + 64 * 4 + 4 and t.bytes_in == 64 * 64 * 4
    assert report.worst is min(report.quantized, key=lambda t: t.sqnr)
    assert report.bytes_kept == sum(a.nbytes for n, a in weights().items() if n not in QUANTIZED)


def test_selection_keeps_embeddings_norms_and_heads_unless_included(source: Path, tmp_path: Path) -> None:
    recipe = breccia.MXFP8BlockScaling()
    everything = convert(source, tmp_path / "a.safetensors", recipe, selection=Selection(include=("*",)))
    assert sorted(t.name for t in everything.quantized) == sorted([*QUANTIZED, "embed_tokens.weight", "lm_head.weight"])
    some = convert(source, tmp_path / "b.safetensors", recipe, selection=Selection(include=("lm_head*",), exclude=("*.mlp.*",)))
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


def test_a_sharded_folder_converts_shard_by_shard_with_its_companions(sharded: Path, tmp_path: Path) -> None:
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


def test_a_folder_without_an_index_converts_too(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    source.rename(folder / "model.safetensors")
    convert(folder, tmp_path / "out", breccia.MXFP8BlockScaling())
    assert entries(tmp_path / "out") == ["model.safetensors"]


def test_force_replaces_files_and_folders_whole(sharded: Path, source: Path, tmp_path: Path) -> None:
    for src, dst in ((source, tmp_path / "o.safetensors"), (sharded, tmp_path / "o")):
        convert(src, dst, breccia.MXFP8BlockScaling())
        with pytest.raises(FileExistsError, match="exists; choose another name, or replace it with --force"):
            convert(src, dst, breccia.NVFP4BlockScaling())
        convert(src, dst, breccia.NVFP4BlockScaling(), force=True)
        path = dst if dst.is_file() else dst / "model-00001-of-00002.safetensors"
        assert "nvfp4" in str(Container(path).metadata)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_failure_midway_leaves_nothing_and_keeps_what_was_there(
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
        with pytest.raises(OSError, match="No space"):
            convert(src, tmp_path / "new", breccia.NVFP4BlockScaling(), advance=fails)
        assert not (tmp_path / "new").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_bytes_that_read_back_otherwise_are_caught(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Writer.write

    def flips(self: Writer, name: str, data: Any) -> None:
        damaged = np.array(data)
        if name == "layer.0.experts.scale":
            damaged.reshape(-1).view(np.uint8)[3] ^= 1
        honest(self, name, damaged)

    monkeypatch.setattr(converter, "open_writer", _flipping(flips, converter.open_writer))
    with pytest.raises(breccia.CorruptFileError, match="'layer.0.experts.scale' reads back other bytes than were written"):
        convert(source, tmp_path / "o.safetensors", breccia.MXFP8BlockScaling())
    assert entries(tmp_path) == ["model.safetensors"]


def _flipping(write: Any, opener: Any) -> Any:
    def opened(*arguments: Any) -> Any:
        writer = opener(*arguments)
        writer.__class__ = type("Flipping", (type(writer),), {"write": write})
        return writer

    return opened


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (lambda t: (t / "absent.safetensors", t / "o.safetensors"), "no checkpoint .*absent.safetensors; give a .safetensors"),
        (lambda t: (_text(t / "model.bin"), t / "o.safetensors"), "model.bin is not a .safetensors file"),
        (lambda t: (_folder(t / "empty"), t / "o"), "empty holds no .safetensors file"),
        (lambda t: (t / "model.safetensors", t / "no" / "o.safetensors"), "there is no folder .*/no; create it first"),
        (lambda t: (t / "model.safetensors", _folder(t / "taken")), "the source is a file and .*taken a folder"),
        (lambda t: (t / "model.safetensors", t / "model.safetensors"), "is the source, or lies in it"),
        (lambda t: (_text(t / "cut.safetensors"), t / "o.safetensors"), "cut.safetensors"),
        (lambda t: (_index(t, "{"), t / "o"), "has no readable weight_map"),
        (lambda t: (_index(t, '{"weight_map": {"a": "../x.safetensors"}}'), t / "o"), "files of the same folder"),
        (
            lambda t: (_index(t, '{"weight_map": {"a": "x.safetensors"}}'), t / "o"),
            "names x.safetensors, which the folder lacks",
        ),
    ],
)
def test_a_conversion_that_cannot_be_is_one_readable_line_and_leaves_no_file(
    arrange: Any, message: str, source: Path, tmp_path: Path, run: Run
) -> None:
    src, dst = arrange(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("convert", src, dst, "--recipe", "mxfp8", "--force")
    assert (code, out) == (1, "")
    import re

    assert err.startswith("error: ") and err.count("\n") == 1 and re.search(message, err)
    assert sorted(tmp_path.rglob("*")) == before


def _text(path: Path) -> Path:
    path.write_text("no tensors")
    return path


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _index(folder: Path, text: str) -> Path:
    (_folder(folder / "indexed") / INDEX).write_text(text)
    return folder / "indexed"


def test_converting_twice_is_refused(source: Path, tmp_path: Path, run: Run) -> None:
    convert(source, tmp_path / "o.safetensors", breccia.MXFP8BlockScaling())
    code, _, err = run("convert", tmp_path / "o.safetensors", tmp_path / "p.safetensors", "-r", "nvfp4")
    assert code == 1 and "holds tensors that breccia quantized already; convert the original" in err


def test_the_program_converts_inspects_and_reports(source: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.safetensors"
    code, text, err = run("convert", source, out, "--recipe", "int4,group_size=32", "--exclude", "*.mlp.*")
    assert (code, err) == (0, "")
    for part in ("INT4Scaling(group_size=32", "2 tensors, ", "kept", "SQNR", "worst", "verified"):
        assert part in text
    code, text, _ = run("inspect", out)
    assert code == 0 and "layer.0.experts" in text and "3×16×32" in text and "11 tensors, 2 of them scaled" in text
    code, text, _ = run("inspect", out, "--json")
    rows = {row["name"]: row for row in json.loads(text)["tensors"]}
    assert rows["layer.0.experts"]["recipe"] == breccia.INT4Scaling(group_size=32).to_dict()
    assert rows["layer.0.experts"]["shape"] == [3, 16, 32] and rows["step"]["shape"] == []
    assert rows["layer.0.experts"]["bytes"] == 3 * 16 * 32 // 2 + 3 * 16 * 2
    code, text, _ = run("convert", source, out, "-r", "mxfp8", "--force", "--json")
    report = json.loads(text)
    assert report["recipe"] == breccia.MXFP8BlockScaling().to_dict() and len(report["tensors"]) == 11 and report["seconds"] > 0


def test_a_source_with_nan_is_converted_and_said(tmp_path: Path, run: Run) -> None:
    bad = np.ones((4, 64), np.float32)
    bad[1, 40] = np.nan
    save_file({"w": bad, "v": np.ones((4, 64), np.float32)}, tmp_path / "m.safetensors")
    code, text, _ = run("convert", tmp_path / "m.safetensors", tmp_path / "o.safetensors", "-r", "mxfp8")
    assert code == 0 and "warning: NaN or Inf in the source of w; their blocks decode to NaN." in text
    code, text, _ = run("convert", tmp_path / "m.safetensors", tmp_path / "p.safetensors", "-r", "mxfp8", "--json")
    assert json.loads(text)["sqnr_db"] is None and json.loads(text)["worst"] == "w"


def test_explain_plugins_version_and_unknown_words(run: Run) -> None:
    code, text, _ = run("explain", "cast", "nvfp4", "--on", "numpy")
    assert code == 0 and text.startswith("cast of nvfp4 on numpy\n -> reference.cast") and "reference.py:" in text
    code, text, _ = run("explain", "matmul", "block", "mxfp8", "--json")
    assert json.loads(text)["winner"] == "reference.matmul"
    code, text, _ = run("plugins")
    assert code == 0 and "breccia-core" in text and "breccia-bridges" in text
    code, text, _ = run("plugins", "--json")
    assert {p["name"] for p in json.loads(text)} >= {"core", "bridges"}
    assert run("--version") == (0, f"breccia {breccia.__version__}\n", "")
    code, _, err = run("explain", "cast", "nvpf4")
    assert (
        code == 1
        and err == "error: no recipe 'nvpf4'; did you mean 'nvfp4'? Known: block, current, delayed, int4, mxfp8, nvfp4.\n"
    )
    code, _, err = run("convrt")
    assert code == 2 and "convert" in err
    with pytest.raises(breccia.UnknownNameError):
        run("--debug", "explain", "cast", "nvpf4")


@pytest.mark.parametrize("command", ["", "convert", "inspect", "explain", "plugins"])
def test_help_of_every_command_fits_a_screen(command: str, run: Run) -> None:
    code, text, _ = run(*command.split(), "--help")
    assert code == 0 and "Usage: breccia" in text and len(text.splitlines()) <= 40


def program(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "breccia", *words], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_commands_of_an_absent_distribution_say_where_they_come_from() -> None:
    done = program("convert", "a", "b", "--recipe", "nvfp4", BRECCIA_BLOCK="bridges")
    assert done.returncode == 1
    assert done.stderr == "error: `breccia convert` comes with breccia-bridges: pip install breccia-bridges\n"


def test_without_the_extra_the_program_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ImportError('blocked', name='typer')")
    done = program("plugins", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "breccia: the command line needs typer, which is not installed: pip install 'breccia-core[cli]'\n"
