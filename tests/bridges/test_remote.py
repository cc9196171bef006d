"""Checkpoints at URLs: read by ranges, written so that no reader takes a part for the whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_dialects import EXPECTED, REFUSED, unpacked
from paths import ROOT
from program import Run
from web import Web, serving

import breccia
from breccia.bridges import compare, convert, diff, load_checkpoint, load_safetensors, save_safetensors
from breccia_bridges import remote_path
from breccia_bridges.checkpoint import INDEX
from breccia_bridges.destination import check_destination
from breccia_bridges.remote_path import RemotePath, path_of, read_ranges
from breccia_bridges.results import EQUAL
from breccia_bridges.uploads import HIDDEN, staged_at

fsspec = pytest.importorskip("fsspec", reason="fsspec comes with breccia-bridges[remote]")

NAMES = [f"layers.{n}.mlp.weight" for n in range(4)]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    """The filesystem of memory://, empty; and an empty cache folder."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four matrices and vectors in two shards with an index, and other files."""
    rng = np.random.default_rng(0)
    plain, folder = tmp_path / "plain", tmp_path / "m"
    plain.mkdir()
    weights = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in NAMES}
    save_safetensors({**weights, "norm.weight": np.ones(64, np.float32)}, plain / "model.safetensors")
    (plain / "config.json").write_text('{"model_type": "llama"}')
    (plain / "more").mkdir()
    (plain / "more" / "notes.txt").write_text("notes")
    convert(plain, folder, "none", dialect=None, max_shard_size=40_000)
    assert (folder / INDEX).is_file()
    return folder


def contents(path: Path) -> dict[str, bytes]:
    """The files of a folder on this machine."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def stored(store: Any, folder: str) -> dict[str, bytes]:
    """The files of a folder of memory://."""
    root = "/" + folder.removeprefix("memory://") + "/"
    return {name.removeprefix(root): store.cat_file(name) for name in store.find(root)}


def put(store: Any, folder: Path, url: str) -> str:
    for name, data in contents(folder).items():
        store.pipe_file(f"{url}/{name}", data)
    return url


def nothing_is_left(tmp_path: Path) -> bool:
    return not any((tmp_path / "cache").rglob("*staging*"))


# ---------------------------------------------------------------------------------------------- both ways


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 5_000}, {"verify": "none"}], ids=str)
def test_the_bytes_are_those_of_a_local_conversion(options: dict[str, Any], source: Path, tmp_path: Path, store: Any) -> None:
    report = convert(source, tmp_path / "local", "nvfp4", **options)
    there = put(store, source, "memory://models/m")
    assert convert(there, tmp_path / "down", "nvfp4", **options).tensors == report.tensors
    assert convert(source, "memory://models/up", "nvfp4", **options).tensors == report.tensors
    across = convert(there, "memory://models/across", "nvfp4", **options)
    assert (across.source, across.destination) == ("memory://models/m", "memory://models/across")
    expected = contents(tmp_path / "local")
    assert "more/notes.txt" in expected and len([name for name in expected if name.endswith(".safetensors")]) > 1
    assert contents(tmp_path / "down") == stored(store, "models/up") == stored(store, "models/across") == expected
    assert nothing_is_left(tmp_path)


def test_one_file_is_written_in_its_place(source: Path, tmp_path: Path, store: Any) -> None:
    file = next(source.glob("*00001*"))
    convert(file, tmp_path / "local.safetensors", "mxfp8")
    convert(file, "memory://up.safetensors", "mxfp8")
    assert store.cat_file("/up.safetensors") == (tmp_path / "local.safetensors").read_bytes()
    assert store.find("/") == ["/up.safetensors"] and nothing_is_left(tmp_path)


def test_files_without_an_index_get_one(tmp_path: Path, store: Any) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for n in range(2):
        save_safetensors({NAMES[n]: np.ones((64, 64), np.float32)}, folder / f"part-{n}.safetensors")
    convert(folder, tmp_path / "local", "nvfp4")
    convert(folder, "memory://up", "nvfp4")
    up = stored(store, "up")
    assert up.pop(INDEX) and up == contents(tmp_path / "local")


def test_everything_that_reads_checkpoints_reads_urls(source: Path, store: Any) -> None:
    url = put(store, source, "memory://m")
    here, there = load_checkpoint(source), load_checkpoint(url)
    assert list(there) == list(here) and all((there[name] == here[name]).all() for name in here)
    assert "memory://m" in repr(there)
    listed = load_checkpoint([f"{url}/{path.name}" for path in sorted(source.glob("*.safetensors"))])
    assert list(listed) == list(here)
    file = next(source.glob("*00001*")).name
    loaded = load_safetensors(f"{url}/{file}")
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        name: array.tobytes() for name, array in load_safetensors(source / file).items()
    }
    assert not diff(source, url).different
    assert [t.reason for t in compare(source, url).tensors] == [EQUAL] * len(here)


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_a_gguf_file_is_a_source_and_a_destination(recipe: str, source: Path, tmp_path: Path, store: Any) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("output.weight", np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    store.pipe_file("/m.gguf", (tmp_path / "m.gguf").read_bytes())
    convert(tmp_path / "m.gguf", tmp_path / "local.safetensors", recipe, include=() if recipe == "none" else ["*"])
    report = convert("memory://m.gguf", tmp_path / "down.safetensors", recipe, include=() if recipe == "none" else ["*"])
    assert (tmp_path / "down.safetensors").read_bytes() == (tmp_path / "local.safetensors").read_bytes()
    assert len(report.tensors) == 1
    folder = convert("memory://m.gguf", "memory://folder", recipe, include=() if recipe == "none" else ["*"])
    assert any("transformers reads them from a file on a disk" in said for said in folder.not_made)
    convert(tmp_path / "m.gguf", tmp_path / "local.gguf", dialect="gguf", recipe="q8_0")
    convert(tmp_path / "m.gguf", "memory://up.gguf", dialect="gguf", recipe="q8_0")
    assert store.cat_file("/up.gguf") == (tmp_path / "local.gguf").read_bytes()
    with pytest.raises(
        breccia.UnsupportedError, match="memory://m.gguf is a URL, and the library gguf copies the keys of a file"
    ):
        convert("memory://m.gguf", tmp_path / "again.gguf", dialect="gguf", recipe="q8_0")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, said in EXPECTED.items() if not said.startswith(REFUSED)])
def test_every_dialect_is_read_by_ranges(name: str, tmp_path: Path, store: Any) -> None:
    folder, _ = unpacked(name, tmp_path)
    url = put(store, folder, f"memory://{name}")
    for recipe in ("none", "nvfp4"):
        outcomes: list[Any] = []
        for path, out in ((folder, tmp_path / f"{recipe}-here"), (url, tmp_path / f"{recipe}-there")):
            try:
                convert(path, out, recipe)
                outcomes.append(contents(out))
            except breccia.BrecciaError as e:
                outcomes.append(str(e).replace(str(path), "SOURCE"))
        assert outcomes[0] == outcomes[1]
    assert not diff(folder, url).different
    values = load_checkpoint(url)
    assert [type(values[n]) for n in values] == [type(value) for value in load_checkpoint(folder).values()]


# ---------------------------------------------------------------------------------------------- a web server


@pytest.fixture
def web(tmp_path: Path) -> Generator[Web]:
    pytest.importorskip("aiohttp", reason="aiohttp comes with breccia-bridges[remote]")
    folder = tmp_path / "web"
    folder.mkdir()
    with serving(folder) as server:
        yield server


def large(folder: Path) -> Path:
    """A file of 24 MB, of which one tensor has 64 kB."""
    tensors = {"big.weight": np.zeros((3000, 2000), np.float32), "small.weight": np.ones((128, 128), np.float32)}
    save_safetensors(tensors, folder / "large.safetensors")
    return folder / "large.safetensors"


def test_only_the_header_and_the_tensors_that_are_needed_are_sent(web: Web, run: Run) -> None:
    large(web.folder)
    code, out, err = run("inspect", f"{web.url}/large.safetensors")
    assert code == 0 and "2 tensors" in out, err
    assert 0 < web.sent["large.safetensors"] <= (1 << 18) + 1024  # fsspec reads so much ahead
    web.sent.clear()
    values = load_checkpoint(f"{web.url}/large.safetensors")
    assert (values["small.weight"] == 1).all()
    assert 128 * 128 * 4 <= web.sent["large.safetensors"] <= 128 * 128 * 4 + (1 << 18) + 1024


def test_a_folder_that_a_server_lists_is_a_source(web: Web, source: Path, tmp_path: Path) -> None:
    source.rename(web.folder / "m")
    convert(web.folder / "m", tmp_path / "local", "nvfp4")
    convert(f"{web.url}/m", tmp_path / "down", "nvfp4")
    assert {n: b for n, b in contents(tmp_path / "down").items() if "/" not in n} == {
        n: b for n, b in contents(tmp_path / "local").items() if "/" not in n
    }


def test_a_server_without_ranges_is_refused(web: Web) -> None:
    large(web.folder)
    web.ranges = False
    with pytest.raises(breccia.UnsupportedError, match="gives whole files only, no ranges.*Download the file"):
        load_checkpoint(f"{web.url}/large.safetensors")


def test_a_connection_that_breaks_is_an_error_after_which_the_same_call_goes_on(web: Web, source: Path, tmp_path: Path) -> None:
    file = next(source.glob("*00001*"))
    file.rename(web.folder / "model.safetensors")
    url, out = f"{web.url}/model.safetensors", tmp_path / "out.safetensors"
    convert(web.folder / "model.safetensors", tmp_path / "local.safetensors", "nvfp4")

    def stop(name: str, size: int) -> None:
        web.breaks = web.answers  # those to come are cut off

    with pytest.raises(ConnectionError, match=rf"{re.escape(url)}: its filesystem says \w+"):
        convert(url, out, "nvfp4", advance=stop)
    assert not out.exists()
    web.breaks = None
    with pytest.warns(UserWarning, match=r"[1-9] tensors are written"):
        convert(url, out, "nvfp4")
    assert out.read_bytes() == (tmp_path / "local.safetensors").read_bytes()


def test_a_header_that_does_not_arrive_is_an_error(web: Web) -> None:
    large(web.folder)
    web.breaks = 1  # the first answer is a byte, by which breccia learns that there are ranges
    with pytest.raises(ConnectionError, match=r"/large.safetensors: its filesystem says Client"):
        load_checkpoint(f"{web.url}/large.safetensors")
    (web.folder / "empty.safetensors").touch()
    with pytest.raises(breccia.CorruptFileError, match="/empty.safetensors: 0 bytes long"):
        load_checkpoint(f"{web.url}/empty.safetensors")


def test_a_server_that_is_not_there_is_no_missing_file(web: Web) -> None:
    with pytest.raises(FileNotFoundError, match=rf"no checkpoint {web.url}/none.safetensors"):
        load_checkpoint(f"{web.url}/none.safetensors")
    with pytest.raises(ConnectionError, match=r"http://127.0.0.1:9/m: its filesystem says Client.*Cannot connect"):
        load_checkpoint("http://127.0.0.1:9/m")


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded_as_for_a_file(web: Web, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4096, 12_000), dtype=np.float32)
    save_safetensors({"layers.0.mlp.weight": x}, web.folder / "x.safetensors")
    peaks: list[int] = []
    for source, out in ((web.folder / "x.safetensors", "a.safetensors"), (f"{web.url}/x.safetensors", "b.safetensors")):
        command = [sys.executable, str(ROOT / "tests" / "tools" / "anonymous.py"), str(source), str(tmp_path / out), "--recipe"]
        done = subprocess.run([*command, "nvfp4"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stderr.splitlines()[-1]))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    # Of 197 MB, the slabs of 16 MiB that two threads read at a time, in pieces and joined; and fsspec with aiohttp.
    assert peaks[1] < peaks[0] + 2 * 2 * (16 << 20) + (32 << 20)


def test_a_web_server_is_no_destination(web: Web, source: Path) -> None:
    with pytest.raises(breccia.UnsupportedError, match="is on a web server, where breccia does not write"):
        convert(source, f"{web.url}/out", "nvfp4")


# ---------------------------------------------------------------------------------------------- interruptions


class Stop(Exception):
    """Ends a conversion; no error of breccia."""


def looks_whole(store: Any, folder: str, whole: dict[str, bytes]) -> bool:
    """Would a reader take it for a checkpoint, though it is not `whole`?"""
    found = {name: data for name, data in stored(store, folder).items() if not name.startswith(HIDDEN)}
    if found == whole or "config.json" not in found:
        return False
    try:
        load_checkpoint(f"memory://{folder}")
    except (breccia.BrecciaError, OSError):
        return False
    return True


@pytest.mark.parametrize("steps", [pytest.param(range(1, 99), marks=pytest.mark.long), (4, 9, 12, 99)], ids=["all", "some"])
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
def test_a_failure_at_any_step_leaves_nothing_that_looks_whole_and_the_same_call_goes_on(
    replaces: bool, steps: Sequence[int], source: Path, tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "local", "nvfp4")
    new = contents(tmp_path / "local")
    old: dict[str, bytes] = {}
    if replaces:
        convert(source, tmp_path / "old", "mxfp8")
        old = contents(tmp_path / "old")
    calls, fails_at = 0, 0

    def failing(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise Stop("the store is gone")
            return real(*arguments, **options)

        return call

    for name in ("put_file", "cp_file", "rm_file", "pipe_file"):
        monkeypatch.setattr(store, name, failing(getattr(store, name)))
    went_on: list[int] = []
    for fails_at in steps:
        if replaces:
            put(fsspec.filesystem("memory", skip_instance_cache=True), tmp_path / "old", "memory://up")
        calls = 0
        try:
            convert(source, "memory://up", "nvfp4", force=replaces)
        except ConnectionError as e:
            assert "memory://up" in str(e) and "Stop: the store is gone" in str(e)
        else:
            break
        found = {name: data for name, data in stored(store, "up").items() if not name.startswith(HIDDEN)}
        assert found in ({}, old) or not looks_whole(store, "up", new)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            calls = -1000
            convert(source, "memory://up", "nvfp4", force=replaces)
        went_on += [fails_at for one in caught if "goes on with" in str(one.message)]
        assert stored(store, "up") == new and nothing_is_left(tmp_path)
        store.store.clear()
    # A file to try, and its copy; then five files are uploaded, perhaps five removed, five copied, and all hidden ones removed.
    assert fails_at == 99 or fails_at == 2 + 5 + 5 * replaces + 5 + 7 + 1
    assert went_on == [step for step in steps if 3 <= step < fails_at]


def test_shards_that_are_uploaded_are_not_made_again(
    source: Path, tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(source, tmp_path / "local", "nvfp4", histograms=True)
    calls: list[str] = []

    def stop(name: str, size: int) -> None:
        calls.append(name)
        if calls.count(NAMES[2]) == 2:
            raise Stop

    with pytest.raises(Stop):
        convert(source, "memory://up", "nvfp4", histograms=True, advance=stop)
    assert not any(name.endswith("config.json") for name in store.find("/up"))
    with pytest.raises(breccia.OptionError, match=r"an interrupted conversion to memory://up finished.*recipe: nvfp4 there"):
        convert(source, "memory://up", "mxfp8")
    uploaded: list[str] = []
    real = store.put_file
    monkeypatch.setattr(store, "put_file", lambda here, there: uploaded.append(there) or real(here, there))
    with pytest.warns(UserWarning, match="goes on with what an interrupted run has left"):
        report = convert(source, "memory://up", "nvfp4", histograms=True)
    assert report.tensors == whole.tensors and stored(store, "up") == contents(tmp_path / "local")
    first = next(source.glob("*00001*")).name
    assert not any(name.endswith(first) for name in uploaded) and len(uploaded) == len(contents(tmp_path / "local")) - 1


def test_an_uploaded_shard_that_changed_is_made_again(source: Path, tmp_path: Path, store: Any) -> None:
    convert(source, tmp_path / "local", "nvfp4")

    def stop(name: str, size: int) -> None:
        if stored(store, "up").keys() - {f"{HIDDEN}/trial", f"{HIDDEN}/trial-copy"}:
            raise Stop

    with pytest.raises(Stop):
        convert(source, "memory://up", "nvfp4", advance=stop)
    (shard,) = (name for name in store.find("/up") if name.endswith(".safetensors"))
    store.pipe_file(shard, store.cat_file(shard)[::-1])
    with pytest.warns(UserWarning, match="goes on with"):
        convert(source, "memory://up", "nvfp4")
    assert stored(store, "up") == contents(tmp_path / "local")


def test_restart_discards_what_was_uploaded_and_a_refusal_leaves_nothing(source: Path, tmp_path: Path, store: Any) -> None:
    def stop(name: str, size: int) -> None:
        if name == NAMES[3]:
            raise Stop

    with pytest.raises(Stop):
        convert(source, "memory://up", "nvfp4", advance=stop)
    assert stored(store, "up")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert(source, "memory://up", "mxfp8", restart=True)
    assert any(f"removed memory://up/{HIDDEN}" in str(one.message) for one in caught)
    convert(source, tmp_path / "local", "mxfp8")
    assert stored(store, "up") == contents(tmp_path / "local")

    def refuse(name: str, size: int) -> None:
        raise breccia.ShapeError("refused")

    with pytest.raises(breccia.ShapeError):
        convert(source, "memory://refused", "nvfp4", advance=refuse)
    assert not stored(store, "refused") and nothing_is_left(tmp_path)


KILLED = """
import os, sys
from pathlib import Path
import fsspec
from fsspec.implementations.local import LocalFileSystem
import platformdirs

platformdirs.user_cache_path = lambda name: Path("cache", name).absolute()

class Shared(LocalFileSystem):
    protocol = "shared"
    calls = 0

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("shared://", os.getcwd() + "/"))

    def _count(self):
        Shared.calls += 1
        if Shared.calls == int(sys.argv[1]):
            os._exit(9)

    def put_file(self, *arguments, **options):
        self._count()
        super().put_file(*arguments, **options)

    def cp_file(self, *arguments, **options):
        super().cp_file(*arguments, **options)
        self._count()

fsspec.register_implementation("shared", Shared)
from breccia.bridges import convert
convert("m", "shared://up", "nvfp4")
"""


@pytest.mark.long
@pytest.mark.parametrize("dies_at", [4, 11])
def test_a_process_that_is_killed_leaves_nothing_that_looks_whole_and_the_next_one_goes_on(
    dies_at: int, source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "local", "nvfp4")
    command = [sys.executable, "-W", "always", "-c", KILLED]
    killed = subprocess.run([*command, str(dies_at)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert killed.returncode == 9, killed.stderr
    assert not (tmp_path / "up" / "config.json").exists() and (tmp_path / "up" / HIDDEN).is_dir()
    with pytest.raises((breccia.BrecciaError, OSError)):
        load_checkpoint(tmp_path / "up")
    done = subprocess.run([*command, "0"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "goes on with what an interrupted run has left" in done.stderr, done.stderr
    assert contents(tmp_path / "up") == contents(tmp_path / "local") and nothing_is_left(tmp_path)


def test_a_source_that_changes_is_an_error(source: Path, tmp_path: Path, store: Any) -> None:
    url = put(store, source, "memory://m")
    file = next(name for name in store.find("/m") if "00001" in name)

    def change(name: str, size: int) -> None:
        store.pipe_file(file, store.cat_file(file))

    with pytest.raises(breccia.CorruptFileError, match=r"memory://m/.*replaced or modified since its header was read"):
        convert(url, tmp_path / "out", "nvfp4", advance=change)
    assert not (tmp_path / "out").exists()


def test_an_upload_that_arrives_as_other_bytes_is_an_error(source: Path, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = next(source.glob("*00001*")), store.put_file

    def damaged(here: str, there: str) -> None:
        real(here, there)
        store.pipe_file(there, store.cat_file(there)[::-1])

    monkeypatch.setattr(store, "put_file", damaged)
    with pytest.raises(ConnectionError, match="memory://up.safetensors reads back other bytes than were uploaded"):
        convert(file, "memory://up.safetensors", "nvfp4")
    monkeypatch.setattr(store, "put_file", lambda here, there: store.pipe_file(there, b"short"))
    with (
        pytest.warns(UserWarning, match="goes on with"),
        pytest.raises(ConnectionError, match=r"up.safetensors has 5 bytes, and \d+ were written"),
    ):
        convert(file, "memory://up.safetensors", "nvfp4")


# ---------------------------------------------------------------------------------------------- names and refusals


def test_what_is_no_url_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("model", "C:\\models\\m", "C:/models/m", "c://m", "a::b", "s3:/m", "://m"):
        assert path_of(text) == Path(text) and not isinstance(path_of(text), RemotePath)
    assert path_of((tmp_path / "a b").as_uri()) == tmp_path / "a b"
    monkeypatch.chdir(tmp_path)
    save_safetensors({"w": np.ones((2, 64), np.float32)}, "a::b.safetensors")
    assert list(load_checkpoint("a::b.safetensors")) == ["w"]


def test_a_url_keeps_its_form() -> None:
    path = path_of("memory://a/b.safetensors")
    assert str(path) == os.fspath(path) == "memory://a/b.safetensors" and repr(path) == "RemotePath('memory://a/b.safetensors')"
    assert str(path.parent) == "memory://a" and str(path.parent.parent) == "memory://" and path.suffix == ".safetensors"
    assert str(path.with_name("c") / "d") == "memory://a/c/d" and path.relative_to(path.parent) == Path("b.safetensors")
    with pytest.raises(ValueError, match="is not in"):
        path.relative_to("memory://c")


@pytest.mark.parametrize(
    "url, kind, said",
    [
        ("nowhere://m", breccia.UnsupportedError, "fsspec has no filesystem for nowhere://.*s3://"),
        ("simplecache::memory://m", breccia.UnsupportedError, "chains filesystems"),
        ("memory://m", FileNotFoundError, "no checkpoint memory://m; give"),
        ("memory://m/x.safetensors", FileNotFoundError, "no checkpoint memory://m/x.safetensors"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(url: str, kind: type[Exception], said: str, run: Run) -> None:
    with pytest.raises(kind, match=said):
        load_checkpoint(url)
    code, _, err = run("inspect", url)
    assert code == 1 and re.search(said, err)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    remote_path.filesystem.cache_clear()
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ImportError, match=r"s3:// paths need a package beside fsspec, which says: Install s3fs"):
        load_checkpoint("s3://bucket/m")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"gs:// paths need fsspec: pip install .*breccia-bridges\[remote\]"):
        load_checkpoint("gs://bucket/m")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(
        ImportError, match=r"memory://up needs platformdirs to be written: pip install .*breccia-bridges\[remote\]"
    ):
        staged_at(RemotePath("memory://up"))
    remote_path.filesystem.cache_clear()


def test_files_of_torch_are_refused_by_name(store: Any) -> None:
    store.pipe_file("/m/pytorch_model.bin", b"PK")
    with pytest.raises(breccia.UnsupportedError, match=r"memory://m/pytorch_model.bin is a file of torch.save.*Download it"):
        load_checkpoint("memory://m")


def test_destinations_that_would_destroy_something_are_refused(source: Path, store: Any) -> None:
    url = put(store, source, "memory://a/m")
    for there, said in [
        ("memory://a/m", "is the source"),
        ("memory://a/m/x", "lies inside the source memory://a/m"),
        ("memory://a", "contains the source memory://a/m"),
        ("memory://up.safetensors", "names a file but the source is a folder"),
    ]:
        with pytest.raises(breccia.UnsupportedError, match=f"^{there} {said}"):
            convert(url, there, "nvfp4")
    store.pipe_file("/other/notes.txt", b"notes")
    with pytest.raises(FileExistsError, match="memory://other exists; choose another name"):
        convert(url, "memory://other", "nvfp4")
    with pytest.raises(FileExistsError, match="memory://other does not look like a checkpoint"):
        convert(url, "memory://other", "nvfp4", force=True)
    store.pipe_file("/file", b"x")
    with pytest.raises(FileExistsError, match="memory://file is a file but the source is a folder"):
        convert(url, "memory://file", "nvfp4")
    check_destination(source, [], RemotePath("memory://a/n"), False)
    assert staged_at(source) == source


def test_ranges_that_come_short_are_an_error(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe_file("/x", b"12345678")
    with pytest.raises(ConnectionError, match="memory://x: asked for 8 bytes from byte 4 on, and got 4"):
        read_ranges(RemotePath("memory://x"), [(4, memoryview(bytearray(8)))])
    with pytest.raises(FileNotFoundError, match="there is nothing at memory://y"):
        read_ranges(RemotePath("memory://y"), [(4, memoryview(bytearray(8)))])

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError("no access")

    monkeypatch.setattr(store, "cat_ranges", denied)
    with pytest.raises(PermissionError, match="memory://x: no access"):
        read_ranges(RemotePath("memory://x"), [(4, memoryview(bytearray(1)))])


def test_the_commands_take_urls(source: Path, store: Any, run: Run) -> None:
    url = put(store, source, "memory://m")
    code, out, err = run("convert", url, "memory://up", "--recipe", "mxfp8")
    assert code == 0 and "memory://up, read back and compared" in out, err
    code, out, err = run("compare", url, "memory://up")
    assert code == 0 and NAMES[0] in out, err
    code, out, err = run("diff", "memory://up", "memory://up", "--original", url)
    assert code == 0, err
    code, out, err = run("inspect", "memory://up", "--json")
    assert code == 0 and '"path": "memory://up"' in out, err
    code, _, err = run("convert", url, "memory://up", "--recipe", "mxfp8")
    assert code == 1 and "memory://up exists" in err


def test_an_interrupted_command_says_what_is_where(
    source: Path, tmp_path: Path, store: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = store.cp_file, 0

    def interrupted(here: str, there: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:  # after the trial, the index is in its place
            raise KeyboardInterrupt
        real(here, there)

    monkeypatch.setattr(store, "cp_file", interrupted)
    words = ("convert", source, "memory://up", "--recipe", "nvfp4")
    code, _, err = run(*words)
    assert code == 130 and "nothing is written to memory://up yet; the same command goes on from what is finished" in err
    with pytest.raises(breccia.CorruptFileError, match=rf"memory://up/{INDEX} names .* which the folder lacks"):
        load_checkpoint("memory://up")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = run(*words)
    assert code == 0 and "goes on with what an interrupted run has left in" in err
    convert(source, tmp_path / "local", "nvfp4")
    assert stored(store, "up") == contents(tmp_path / "local") and nothing_is_left(tmp_path)


def test_another_command_after_a_begun_replacement_is_refused_and_restart_replaces_it(
    source: Path, tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store.cp_file

    def failing(here: str, there: str) -> None:
        if there.endswith("config.json"):
            raise Stop
        real(here, there)

    with monkeypatch.context() as patched:
        patched.setattr(store, "cp_file", failing)
        with pytest.raises(ConnectionError, match="memory://up/config.json: its filesystem says Stop"):
            convert(source, "memory://up", "nvfp4")
    with pytest.raises(breccia.OptionError, match="an interrupted conversion to memory://up finished"):
        convert(source, "memory://up", "mxfp8")
    with pytest.warns(UserWarning, match="which an interrupted run left behind"):
        convert(source, "memory://up", "mxfp8", restart=True)
    convert(source, tmp_path / "local", "mxfp8")
    assert stored(store, "up") == contents(tmp_path / "local") and nothing_is_left(tmp_path)


def test_a_dry_run_leaves_nothing(source: Path, tmp_path: Path, store: Any) -> None:
    report = convert(source, "memory://up", "nvfp4", dry_run=True)
    assert len(report.tensors) == 5 and not store.find("/") and nothing_is_left(tmp_path)
