"""Engines of `convert`: tasks that were pickled give the same bytes, and what a worker elsewhere does not have is named."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf_models import llama
from golden_dialects import EXACT, EXPECTED, unpacked
from program import Run

import breccia
from breccia.bridges import convert, save_safetensors
from breccia.internal import install
from breccia_bridges import convert_file, engines
from breccia_bridges.convert_file import FilePlan, Step, Task
from breccia_bridges.engines import WorkerError
from breccia_bridges.ray_engine import _converted  # pyright: ignore[reportPrivateUsage]
from breccia_bridges.results import Verify
from breccia_bridges.safetensors_file import ChangedFileError
from breccia_bridges.source import Source

#: A golden checkpoint of each library and kind.
DIALECTS = {re.split(r"_|\d", name)[0]: name for name, expected in EXPECTED.items() if expected == EXACT}


def contents(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (path.iterdir() if path.is_dir() else [path])}


def layers(folder: Path) -> Path:
    """Layers that engines compute as one, in two files."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for n, names in enumerate(("qk", "vo")):
        weights = {f"model.layers.0.self_attn.{x}_proj.weight": rng.standard_normal((64, 64)).astype(np.float32) for x in names}
        save_safetensors({**weights, f"bias.{n}": np.ones(8, np.float32)}, folder / f"model-{n}.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def state(folder: Path) -> Path:
    """A folder of torch.save."""
    torch = pytest.importorskip("torch")
    folder.mkdir()
    torch.save({"mlp.weight": torch.arange(4096.0).reshape(64, 64)}, folder / "pytorch_model.bin")
    return folder


def gguf(folder: Path) -> Path:
    pytest.importorskip("gguf")
    folder.mkdir()
    return llama(folder)


CONVERSIONS: dict[str, tuple[Callable[[Path], Path], str, dict[str, Any]]] = {
    "breccia": (layers, "nvfp4", {"histograms": True}),
    "cut": (layers, "mxfp8", {"max_shard_size": "5kB"}),
    "one scale of layers in two files": (layers, "nvfp4,global_sense=divisor", {"dialect": "compressed_tensors"}),
    "torch.save": (state, "mxfp8", {}),
    "from GGUF": (gguf, "none", {}),
    "GGUF": (gguf, "none", {"dialect": "gguf"}),
}


@pytest.mark.parametrize("which", CONVERSIONS)
def test_tasks_that_were_pickled_give_the_same_bytes_and_report(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, recipe, options = CONVERSIONS[which]
    source = make(tmp_path / "m")
    name = "out.gguf" if options.get("dialect") == "gguf" else "out.safetensors" if source.is_file() else "out"
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = convert(source, tmp_path / "a" / name, recipe, **options)
    tasks: list[Task] = []

    def pickled(task: Task) -> Generator[Step]:
        tasks.append(pickle.loads(pickle.dumps(task)))
        for step in convert_file.convert_file(tasks[-1]):
            yield pickle.loads(pickle.dumps(step))

    monkeypatch.setattr(engines, "convert_file", pickled)
    report = convert(source, tmp_path / "b" / name, recipe, **options)
    assert tasks and report.tensors == whole.tensors
    assert contents(tmp_path / "a" / name) == contents(tmp_path / "b" / name)


@pytest.mark.parametrize("name", DIALECTS.values())
def test_values_of_every_library_can_be_pickled(name: str, tmp_path: Path) -> None:
    """By the paths of files: no byte of a tensor is."""
    source = Source.open(unpacked(name, tmp_path)[0])
    scaled = [value for value in source.values.values() if value.stored]
    raw = pickle.dumps(scaled)
    for value, again in zip(scaled, pickle.loads(raw), strict=True):
        assert again.recipe == value.recipe and again.shape == value.shape
        assert breccia.dequantize(again.tensor()).tobytes() == breccia.dequantize(value.tensor()).tobytes()
    assert scaled and len(raw) < sum(value.nbytes for value in scaled)


# ------------------------------------------------------------------------------------------------ a worker elsewhere


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """The first task of a conversion, whose staging folder stays."""
    source = layers(tmp_path / "m")
    tasks: list[Task] = []

    def stop(task: Task) -> Generator[Step]:
        tasks.append(task)
        yield Step("", 0, {})
        raise KeyboardInterrupt

    monkeypatch.setattr(engines, "convert_file", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", "nvfp4")
    assert isinstance(tasks[0].planned, FilePlan) and tasks[0].verify is Verify.full
    return tasks[0]


def test_a_worker_does_a_task(task: Task) -> None:
    steps = list(_converted(breccia.__version__, pickle.dumps(task)))
    assert [step.name for step in steps] == 2 * list(task.planned.jobs) and task.planned.writer.path.is_file()


def test_a_worker_that_does_not_see_the_source_or_the_destination_says_so(task: Task, tmp_path: Path) -> None:
    raw, remedy = pickle.dumps(task), "Source and destination have to be in folders that all machines of the Ray cluster"
    folder = task.planned.writer.path.parent
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(WorkerError, match=rf"^the worker on .+ does not see {re.escape(str(folder))}\. {remedy}"):
        next(_converted(breccia.__version__, raw))
    (tmp_path / "elsewhere").rename(folder)
    (tmp_path / "m").rename(tmp_path / "elsewhere")
    with pytest.raises(WorkerError, match=rf"^the worker on .+ does not see .*model-0\.safetensors\. {remedy}"):
        next(_converted(breccia.__version__, raw))


def test_a_worker_that_does_not_see_where_uploads_are_made_names_the_url(task: Task, tmp_path: Path) -> None:
    raw, folder = pickle.dumps(replace(task, uploaded_to="s3://bucket/out")), task.planned.writer.path.parent
    assert len(list(_converted(breccia.__version__, raw))) == 2 * len(task.planned.jobs)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(
        WorkerError,
        match=rf"^the worker on .+ does not see {re.escape(str(folder))}, where files are made before they are uploaded to "
        r"s3://bucket/out\. Use a Ray cluster of one machine, or set XDG_CACHE_HOME to a folder that all machines of the "
        r"cluster have under the same path, such as one on NFS\.$",
    ):
        next(_converted(breccia.__version__, raw))


def test_a_url_needs_room_for_as_many_files_as_the_engine_has_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec", reason="fsspec comes with breccia-bridges[remote]")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    source, needed, cut = layers(tmp_path / "m"), list[int](), {"max_shard_size": "3kB"}
    convert(source, tmp_path / "out", "nvfp4", **cut)
    sizes = sorted((path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")), reverse=True)
    copied = (source / "config.json").stat().st_size
    monkeypatch.setattr("breccia_bridges.conversion.check_space", lambda path, nbytes: needed.append(nbytes))
    for engine in ("local", "ray"):
        convert(source, "memory://out", "nvfp4", engine=engine, dry_run=True, **cut)
    assert len(sizes) > 2 and needed == [copied + sizes[0], copied + sizes[0] + sizes[1]]


def test_a_worker_that_sees_another_source_or_has_another_version_refuses(task: Task, tmp_path: Path) -> None:
    raw, file = pickle.dumps(task), tmp_path / "m" / "model-0.safetensors"
    with pytest.raises(
        WorkerError,
        match=r"^the worker on .+ lacks a module of the conversion \(No module named 'brecciated'\)\. Install the same "
        r"plug-ins of breccia on all machines of the Ray cluster\.$",
    ):
        next(_converted(breccia.__version__, b"cbrecciated\nRecipe\n."))
    with pytest.raises(
        WorkerError,
        match=rf"^the worker on .+ has breccia {re.escape(breccia.__version__)}, and the program that started the conversion "
        r"has 0\.0\. Install one version on all machines of the Ray cluster\.$",
    ):
        next(_converted("0.0", raw))
    shutil.copy(file, tmp_path / "copy")
    os.replace(tmp_path / "copy", file)
    with pytest.raises(ChangedFileError, match=r"model-0\.safetensors: it was replaced or modified since its header was read"):
        next(_converted(breccia.__version__, raw))


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_unknown_engine_is_refused(dry_run: bool, tmp_path: Path, run: Run) -> None:
    with pytest.raises(breccia.OptionError, match=r"^no engine 'rya'; did you mean 'ray'\? Known: local, ray\.$"):
        convert(layers(tmp_path / "m"), tmp_path / "out", "nvfp4", engine="rya", dry_run=dry_run)
    code, _, err = run("convert", tmp_path / "m", tmp_path / "out", "--recipe", "nvfp4", "--engine", "rya")
    assert code == 1 and "no engine 'rya'" in err and not (tmp_path / "out").exists()


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = rf"^engine='ray' \(--engine ray\) needs the library ray \(.+\): {re.escape(install('breccia-bridges[ray]'))}\.$"
    with pytest.raises(breccia.UnsupportedError, match=said):
        convert(layers(tmp_path / "m"), tmp_path / "out", "nvfp4", engine="ray")


#: What is refused before anything runs, whatever the engine.
REFUSED: dict[str, dict[str, Any]] = {
    "source": {"source": "nowhere"},
    "recipe": {"recipe": "nvfp5"},
    "glob": {"exclude": ["nothing*"]},
    "memory": {"max_memory": "1kB"},
    "dialect": {"dialect": "compressed_tensors"},  # whose NVFP4 has a divisor
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_bad_input_is_refused_in_the_same_words_before_ray_is_used(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # any use of it is an AttributeError
    said: list[str] = []
    options: dict[str, Any] = {"source": "m", "recipe": "nvfp4", **REFUSED[wrong]}
    layers(tmp_path / "m")
    source = tmp_path / options.pop("source")
    for engine in ("local", "ray"):
        with pytest.raises((breccia.BrecciaError, OSError)) as refused:
            convert(source, tmp_path / "out", engine=engine, **options)
        said.append(f"{refused.type.__name__}: {refused.value}")
    assert said[0] == said[1] and sorted(path.name for path in tmp_path.iterdir()) == ["m"]
