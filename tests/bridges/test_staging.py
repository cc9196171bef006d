"""Files and folders appear complete or not at all, whenever their writer ends; and what it leaves is taken over."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import long_but, slow_but
from paths import ROOT
from program import Run

import breccia
from breccia.bridges import compare, convert, load_safetensors, save_safetensors
from breccia_bridges import staging
from breccia_bridges.checkpoint import INDEX
from breccia_bridges.huggingface import refuse_in_transformers
from breccia_bridges.safetensors_writer import Writer
from breccia_bridges.staging import Staging, staging_folder, write_text

TOOLS = ROOT / "tests" / "tools"
X = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the tests kill processes, and make links")


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def checkpoint(folder: Path, scale: float = 1) -> Path:
    folder.mkdir()
    save_safetensors({"w": X * np.float32(scale), "v": X}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.long
@pytest.mark.parametrize("renames", [(), ("RENAMES",)], ids=["exchange", "two renames"])
@pytest.mark.parametrize(
    "name", slow_but({"out", "saved.safetensors"}, ["out", "out.safetensors", "saved.safetensors", "config/config.json"])
)
def test_a_process_killed_at_any_step_leaves_old_or_new_and_the_next_run_works(name: str, renames: tuple[str, ...]) -> None:
    command = [sys.executable, str(TOOLS / "killed.py"), name, *renames]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) > 5, done.stderr


def test_a_run_that_was_killed_between_two_renames_is_undone_by_the_next(tmp_path: Path) -> None:
    out = checkpoint(tmp_path / "out")
    before, folder = contents(out), staging_folder(out)
    (folder / "old").mkdir(parents=True), (folder / "new").mkdir(), (folder / "lock").touch()
    out.rename(folder / "old" / "out")
    (folder / "new" / "out").mkdir()
    source = checkpoint(tmp_path / "m")
    with pytest.raises(FileExistsError, match="out exists; choose another name"):
        convert(source, out, "mxfp8", dry_run=True)
    with (
        pytest.warns(UserWarning, match="out is back: a run that was interrupted while it replaced this folder had moved it"),
        pytest.raises(FileExistsError, match="out exists; choose another name"),
    ):
        convert(source, out, "mxfp8")
    assert contents(out) == before


def test_while_another_process_writes_a_destination_it_is_refused(tmp_path: Path, run: Run) -> None:
    source, out = tmp_path / "m.safetensors", tmp_path / "out.safetensors"
    save_safetensors({"w": X}, source)
    with Staging(out):
        for words in ((), ("--dry-run",)):
            code, _, err = run("convert", source, out, "-r", "mxfp8", *words)
            assert code == 1 and f"another process is writing {out}" in err
        with pytest.raises(BlockingIOError, match="another process is writing"):
            save_safetensors({"w": X}, out)
        with pytest.raises(BlockingIOError, match="another process is writing"), Writer(out, {}):
            pass
    assert entries(tmp_path) == ["m.safetensors"]
    assert run("convert", source, out, "-r", "mxfp8")[0] == 0


def test_threads_that_write_one_file_leave_it_complete(tmp_path: Path) -> None:
    path, refused = tmp_path / "f.safetensors", []

    def save(n: int) -> None:
        for _ in range(20):
            try:
                save_safetensors({"w": np.full((64, 64), n, np.float32)}, path, force=True)
            except BlockingIOError as e:
                refused.append(e)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = load_safetensors(path)["w"]
    assert (found == found[0, 0]).all() and entries(tmp_path) == ["f.safetensors"] and len(refused) < 80


@pytest.mark.parametrize("made", ["file", "link", "folder of others"])
def test_something_else_of_the_name_of_the_staging_folder_is_not_touched(made: str, tmp_path: Path) -> None:
    out, other = tmp_path / "out.safetensors", tmp_path / "other"
    other.mkdir()
    folder = staging_folder(out)
    if made == "file":
        folder.write_text("mine")
    elif made == "link":
        folder.symlink_to(other)
    else:
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not a folder that breccia made; remove it"):
        save_safetensors({"w": X}, out)
    assert folder.is_symlink() or folder.is_file() or entries(folder) == ["mine.txt"]
    assert not out.exists() and not entries(other)


def test_the_longest_name_of_a_file_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 243 + ".safetensors")
    save_safetensors({"w": X}, path)
    assert entries(tmp_path) == [path.name] and len(staging_folder(path).name) < 100


def test_everything_written_is_synchronized_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "m")
    (tmp_path / "m" / "more").mkdir()
    (tmp_path / "m" / "more" / "notes.txt").write_text("notes")
    synced: list[str] = []
    real_sync, real_replace = staging.sync, os.replace

    def sync(path: Path) -> None:
        synced.append(path.name)
        real_sync(path)

    def replace(a: Path, b: Path) -> None:
        synced.append(f"-> {Path(b).name}")
        real_replace(a, b)

    monkeypatch.setattr(staging, "sync", sync)
    monkeypatch.setattr(staging.os, "replace", replace)
    convert(tmp_path / "m", tmp_path / "out", "mxfp8")
    before = synced[: synced.index("-> out")]
    assert {"model.safetensors", "config.json", "notes.txt", "more", "out"} <= set(before)
    assert synced[-1] == tmp_path.name, "the folder of the new name comes last"
    synced.clear()
    write_text(tmp_path / "report.html", "text")
    assert synced == ["report.html", "-> report.html", tmp_path.name]


# ------------------------------------------------------------------------------------------------ sources


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _written_to(path: Path) -> None:
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def _replaced(path: Path) -> None:
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


def _removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [_truncated, _written_to, _replaced, _removed])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "notes.txt"])
def test_a_source_that_changes_during_a_conversion_is_an_error_and_nothing_is_written(
    file: str, change: Any, tmp_path: Path
) -> None:
    source = checkpoint(tmp_path / "m")
    (source / "notes.txt").write_text("notes of some length")
    calls: list[str] = []

    def advance(name: str, size: int) -> None:
        calls.append(name)
        if len(calls) == 2:
            change(source / file)

    with pytest.raises((breccia.CorruptFileError, FileNotFoundError), match=rf"{file}"):
        convert(source, tmp_path / "out", "mxfp8", advance=advance)
    assert len(calls) >= 2 and entries(tmp_path) == [".breccia-staging.out", "m"]


@pytest.mark.parametrize("call", long_but(["compare"], ["compare", "inspect", "jax"]))
def test_files_that_shrink_while_they_are_read_raise_and_end_no_process(call: str, tmp_path: Path) -> None:
    """In its own process: reading a page that a mapped file has lost ends it."""
    code = f"""
import os, sys
import numpy as np
import breccia
from breccia.bridges import compare, load_safetensors, save_safetensors
from breccia_bridges import safetensors_file, safetensors
from breccia_bridges.inspection import inspected
x = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)
for name in "ab":
    save_safetensors({{"w": breccia.cast(x, "mxfp8"), "v": x}}, name + ".safetensors")
real = safetensors_file.Container.view
def view(self, name):
    found = real(self, name)
    os.truncate(self.path, 5000)
    return found
safetensors_file.Container.view = view
calls = dict(
    compare=lambda: compare("a.safetensors", "b.safetensors"),
    inspect=lambda: inspected(__import__("pathlib").Path("a.safetensors"), scales=True),
    jax=lambda: load_safetensors("a.safetensors", framework="jax"),
)
try:
    calls["{call}"]()
except breccia.CorruptFileError as e:
    print("refused" if "replaced or modified" in str(e) else e)
"""
    if call == "jax":
        pytest.importorskip("jax")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


@pytest.mark.parametrize("call", ["convert", "save", "write_text"])
def test_a_file_that_cannot_be_written_is_named(call: str, tmp_path: Path) -> None:
    """As on a full disk: the system's error does not say which file it is about."""
    resource = pytest.importorskip("resource")
    source = checkpoint(tmp_path / "m")
    calls: dict[str, Any] = {
        "convert": lambda: convert(source, tmp_path / "out", "mxfp8"),
        "save": lambda: save_safetensors({"w": np.zeros(1 << 16, np.float32)}, tmp_path / "out.safetensors"),
        "write_text": lambda: write_text(tmp_path / "out.json", " " * (1 << 16)),
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/.*out") as e:
            calls[call]()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert e.value.errno == errno.EFBIG and entries(tmp_path) == ["m"]


# ------------------------------------------------------------------------------------------------ special files


def test_a_pipe_is_refused_at_once(tmp_path: Path, run: Run) -> None:
    """Opening one to read would wait for a program that writes into it."""
    pipe = tmp_path / "p.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(breccia.CorruptFileError, match=r"p\.safetensors: it is a pipe or a device\. Give a file"):
        load_safetensors(pipe)
    assert run("inspect", pipe)[0] == 1
    with pytest.raises(breccia.CorruptFileError, match=r"null: it is a pipe or a device"):
        load_safetensors(os.devnull)


@pytest.mark.parametrize("name", [INDEX, "config.json", "quantize_config.json"])
def test_a_special_file_that_decides_about_weights_is_refused_at_once(name: str, tmp_path: Path) -> None:
    """It is not as if there were none: without its config.json, a quantized checkpoint would be read as a plain one."""
    source, path = checkpoint(tmp_path / "m"), tmp_path / "m" / name
    for found, make in {
        "a broken link": lambda: path.symlink_to("nowhere"),
        "a broken link ": lambda: path.symlink_to(name),
        "no file": lambda: os.mkfifo(path),
        "no file ": path.mkdir,
    }.items():
        path.unlink(missing_ok=True)
        make()
        for dry_run in (True, False):
            with pytest.raises(breccia.CorruptFileError, match=rf"{name} is {found.strip()}; download it again, or remove it"):
                convert(source, tmp_path / "out", "mxfp8", dry_run=dry_run)
        with pytest.raises(breccia.CorruptFileError, match=rf"{name} is {found.strip()}"):
            compare(source, source)
    assert entries(tmp_path) == ["m"]


# ------------------------------------------------------------------------------------------------ links


def test_links_in_a_circle_are_left_out(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "m")
    (source / "self").symlink_to(".")
    (source / "a.txt").symlink_to("b.txt")
    (source / "b.txt").symlink_to("a.txt")
    convert(source, tmp_path / "out", "mxfp8")
    assert entries(tmp_path / "out") == ["config.json", "model.safetensors"]
    (source / "c.safetensors").symlink_to("c.safetensors")
    with pytest.raises(breccia.CorruptFileError, match=r"broken links or special files: c\.safetensors"):
        convert(source, tmp_path / "other", "mxfp8")
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(FileNotFoundError, match="no checkpoint .*circle"):
        convert(tmp_path / "circle", tmp_path / "other", "mxfp8")


def test_links_that_leave_the_source_are_not_followed(tmp_path: Path, run: Run) -> None:
    source, secret = checkpoint(tmp_path / "m"), tmp_path / "secret"
    secret.write_text("secret")
    (source / "sub").mkdir()
    (source / "tokenizer.json").symlink_to(secret)
    (source / "sub" / "key").symlink_to("../../secret")
    (source / "inside.txt").symlink_to("config.json")
    code, _, err = run("convert", source, tmp_path / "out", "-r", "mxfp8")
    assert code == 0 and f"not copied, as these are links that leave {source}: tokenizer.json, sub/key." in err
    assert entries(tmp_path / "out") == ["config.json", "inside.txt", "model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json", "quant_config.json"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_link_that_decides_about_weights_and_leaves_the_source_is_refused(name: str, dry_run: bool, tmp_path: Path) -> None:
    source, far = checkpoint(tmp_path / "m"), tmp_path / "far"
    far.mkdir()
    (far / name).write_bytes((source / name).read_bytes() if (source / name).exists() else b"{}")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(far / name)
    with pytest.raises(breccia.BrecciaError, match=rf"{name}"):
        convert(source, tmp_path / "out", "mxfp8", dry_run=dry_run)
    assert entries(tmp_path) == ["far", "m"]


def test_a_snapshot_of_a_download_cache_is_converted_with_its_blobs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    checkpoint(blobs)
    for name in ("model.safetensors", "config.json"):
        (blobs / name).rename(blobs / f"{name}.blob")
        (snapshot / name).symlink_to(f"../../blobs/{name}.blob")
    convert(snapshot, tmp_path / "out", "mxfp8")
    assert entries(tmp_path / "out") == ["config.json", "model.safetensors"]
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())


# ------------------------------------------------------------------------------------------------ existing files


def _torch_model(path: Path, **options: Any) -> None:
    torch, ours = pytest.importorskip("torch"), pytest.importorskip("breccia_torch")
    ours.save_model(torch.nn.Linear(4, 4), path, **options)


def _mlx_model(path: Path, **options: Any) -> None:
    pytest.importorskip("mlx.core")
    from mlx import nn

    import breccia_mlx

    breccia_mlx.save_model(nn.Sequential(nn.Linear(4, 4)), path, **options)


def _tensors(path: Path, **options: Any) -> None:
    save_safetensors({"w": X}, path, **options)


@pytest.mark.parametrize("save", [_tensors, _torch_model, _mlx_model])
def test_an_existing_file_is_replaced_only_with_force(save: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"exists; choose another name, or replace it: force=True"):
        save(path)
    assert path.read_text() == "mine"
    save(path, force=True)
    assert load_safetensors(path) and entries(tmp_path) == ["f.safetensors"]


def test_transformers_config_is_refused_or_written_whole(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "m")
    refuse_in_transformers(source)
    assert "transformers_weights" in json.loads((source / "config.json").read_text())
    assert entries(source) == ["config.json", "model.safetensors"]
