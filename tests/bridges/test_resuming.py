"""A conversion that ended before it was complete goes on from the last finished tensor, and gives the same bytes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from program import Run

import breccia
from breccia.bridges import convert, save_safetensors
from breccia.internal import measuring
from breccia_bridges import jobs
from breccia_bridges.journal import Journal
from breccia_bridges.results import Report
from breccia_bridges.staging import staging_folder

NAMES = [f"layers.{n}.mlp.weight" for n in range(4)]


def checkpoint(folder: Path) -> Path:
    """Four matrices in two shards, a vector, and other files."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for n in range(2):
        weights = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in NAMES[2 * n : 2 * n + 2]}
        save_safetensors({**weights, f"layers.{n}.bias": np.ones(8, np.float32)}, folder / f"model-{n}.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "notes.txt").write_text("notes")
    return folder


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file()}


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (staging_folder(out) / "journal").read_text().splitlines()]


class Stop(Exception):
    """Ends a conversion; no error of breccia."""


def stopped(source: Path, out: Path, after: int, recipe: str = "nvfp4", **options: Any) -> None:
    """A conversion that ends when `after` values are written or verified."""
    calls = 0

    def advance(name: str, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise Stop

    with pytest.raises(Stop):
        convert(source, out, recipe, advance=advance, **options)
    assert not out.exists() and staging_folder(out).is_dir()


def going_on(source: Path, out: Path, recipe: str = "nvfp4", **options: Any) -> Report:
    with pytest.warns(UserWarning, match="goes on with what an interrupted run has left in"):
        return convert(source, out, recipe, **options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "m")


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="the test kills processes")
def test_twenty_kills_at_random_points_give_the_bytes_of_an_uninterrupted_run() -> None:
    command = [sys.executable, str(ROOT / "tests" / "tools" / "killed.py"), "resumed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10, "most of them had finished tensors to go on with"


KILLED = """
import sys, time
from breccia_bridges import slab_casts
real = slab_casts.cast

def cast(*arguments, **options):
    time.sleep(0.1)
    return real(*arguments, **options)

slab_casts.cast = cast
from breccia.cli.main import run
run(sys.argv[1:])
"""


@pytest.mark.skipif(os.name != "posix", reason="the test kills processes")
@pytest.mark.parametrize("finished", [1, 3])
def test_a_command_that_is_killed_goes_on(finished: int, source: Path, tmp_path: Path, run: Run) -> None:
    convert(source, tmp_path / "whole", "nvfp4")
    out = tmp_path / "out"
    journal = staging_folder(out) / "journal"
    words = ["convert", str(source), str(out), "--recipe", "nvfp4"]
    with subprocess.Popen([sys.executable, "-c", KILLED, *words], stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + 60
        while not (journal.is_file() and journal.read_bytes().count(b'"written"') >= finished):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.005)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = run(*words)
    assert code == 0 and "goes on with what an interrupted run has left" in err
    assert contents(out) == contents(tmp_path / "whole") and entries(tmp_path) == ["m", "out", "whole"]


@pytest.mark.parametrize("after", [1, 3, 4, 6, 8, 11])
def test_what_is_finished_is_not_done_again_and_the_report_is_the_same(
    after: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(source, tmp_path / "whole", "nvfp4", histograms=True)
    out = tmp_path / "out"
    stopped(source, out, after, histograms=True)
    found = lines(out)
    written = [line["written"] for line in found if "written" in line]
    verified = [line["verified"] for line in found if "verified" in line]
    assert len(written) == min(after, 3) + max(0, min(after - 6, 3)) and (after < 5 or verified)
    cast: list[str] = []
    real = jobs.Job.casts

    def casts(self: jobs.Job, *arguments: Any) -> Any:
        cast.append(self.name)
        return real(self, *arguments)

    monkeypatch.setattr(jobs.Job, "casts", casts)
    report = going_on(source, out, histograms=True)
    assert cast == [name for name in NAMES if name not in written]
    assert report.tensors == whole.tensors
    assert contents(out) == contents(tmp_path / "whole") and entries(tmp_path) == ["m", "out", "whole"]


def test_bytes_that_are_not_those_of_the_journal_are_written_again(source: Path, tmp_path: Path) -> None:
    """After a power failure, lines may be on the disk and the bytes of their tensors not; the last line may be cut off."""
    convert(source, tmp_path / "whole", "nvfp4")
    out = tmp_path / "out"
    for damage in ("data", "header", "short", "gone", "line", "zeros"):
        shutil.rmtree(out, ignore_errors=True)
        stopped(source, out, 8)
        staged, journal = staging_folder(out) / "new" / "out" / "model-0.safetensors", staging_folder(out) / "journal"
        raw, text = staged.read_bytes(), journal.read_bytes()
        if damage == "data":
            staged.write_bytes(raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
        elif damage == "header":
            staged.write_bytes(raw[:9] + b"x" + raw[10:])
        elif damage == "short":
            staged.write_bytes(raw[:-1])
        elif damage == "gone":
            staged.unlink()
        else:
            journal.write_bytes(text[:-5] if damage == "line" else text[:-50] + bytes(50))
        (staged.parent / "config.json").write_text("{")
        (staged.parent / "stray.txt").write_text("of another time")
        going_on(source, out)
        assert contents(out) == contents(tmp_path / "whole"), damage
        assert entries(tmp_path) == ["m", "out", "whole"]


#: Options of another call than that of mxfp8, and what the refusal says of them.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "recipe": ({"recipe": "nvfp4"}, "recipe: mxfp8 there, nvfp4 now"),
    "exclude": (
        {"exclude": ["*.0.*"]},
        r"recipe: mxfp8 there, '\*\.0\.\*': keep, 'default': mxfp8, preset: breccia now",
    ),
    "dialect": ({"dialect": "compressed_tensors"}, "dialect: none there, compressed_tensors now"),
    "histograms": ({"histograms": True}, "histograms: none there, True now"),
    "shards": ({"max_shard_size": "5kB"}, "max_shard_size: none there, 5000 now"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_command_is_refused_and_restart_discards(other: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped(source, out, 3, "mxfp8")
    before = contents(staging_folder(out))
    changed, said = OTHERS[other]
    options = {"recipe": "mxfp8", **changed}
    for dry_run in (True, False):
        with pytest.raises(
            breccia.OptionError,
            match=rf"has what an interrupted conversion to .*out finished, and it was another one \({said}\)"
            r"\. Run that one again, which goes on with it; or discard it: restart=True \(--restart\)\.",
        ):
            convert(source, out, **options, dry_run=dry_run)
    assert contents(staging_folder(out)) == before
    with pytest.warns(UserWarning, match="removed .*, which an interrupted run left behind"):
        convert(source, out, **options, restart=True)
    convert(source, tmp_path / "whole", **options)
    assert contents(out) == contents(tmp_path / "whole") and entries(tmp_path) == ["m", "out", "whole"]


def test_another_version_and_another_source_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    out = tmp_path / "out"
    stopped(source, out, 3)
    with monkeypatch.context() as patch:
        patch.setattr(breccia, "__version__", "99.0")
        with pytest.raises(breccia.OptionError, match=r"\(version: .* there, 99\.0 now\)"):
            convert(source, out, "nvfp4")
    shutil.copytree(source, tmp_path / "m2")
    with pytest.raises(breccia.OptionError, match=r"\(source: .*/m there, .*/m2 now"):
        convert(tmp_path / "m2", out, "nvfp4")
    file = source / "model-1.safetensors"
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    with pytest.raises(breccia.OptionError, match=r"\(files of the source: model-1\.safetensors changed\)"):
        convert(source, out, "nvfp4")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    going_on(source, out)
    assert entries(tmp_path) == ["m", "m2", "out"]


def test_the_command_restarts(source: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    stopped(source, out, 3)
    code, _, err = run("convert", source, out, "--recipe", "mxfp8")
    assert code == 1 and "discard it: restart=True (--restart)" in err
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = run("convert", source, out, "--recipe", "mxfp8", "--restart")
    assert code == 0 and "which an interrupted run left behind" in err
    assert entries(tmp_path) == ["m", "out"]


def test_a_signal_says_that_the_same_command_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    real, out = Journal.verify, tmp_path / "out"

    def stopping(self: Journal, report: Any) -> None:
        real(self, report)
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "verify", stopping)
        code, _, err = run("convert", source, out, "--recipe", "mxfp8")
    said = f"interrupted; nothing is written to {out} yet; the same command goes on from what is finished\n"
    assert (code, err) == (143, said) and not out.exists()
    going_on(source, out, "mxfp8")
    assert entries(tmp_path) == ["m", "out"]


def test_a_refused_value_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """The next command is another one."""

    def advance(name: str, size: int) -> None:
        raise breccia.UnsupportedError("a value that nothing holds")

    with pytest.raises(breccia.UnsupportedError, match="nothing holds"):
        convert(source, tmp_path / "out", "nvfp4", advance=advance)
    assert entries(tmp_path) == ["m"]


def test_a_companion_that_changes_is_copied_again_by_the_next_run(source: Path, tmp_path: Path) -> None:
    calls: list[str] = []

    def advance(name: str, size: int) -> None:
        calls.append(name)
        (source / "notes.txt").write_text("other notes")

    with pytest.raises(breccia.CorruptFileError, match=r"notes\.txt: it was replaced or modified"):
        convert(source, tmp_path / "out", "nvfp4", advance=advance)
    going_on(source, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "other notes"


def test_a_full_disk_loses_nothing(source: Path, tmp_path: Path) -> None:
    """By a limit of the size of files, which the second tensor of the second file crosses: the first file is written."""
    resource = pytest.importorskip("resource")
    big = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    save_safetensors({"layers.9.mlp.weight": big}, source / "model-9.safetensors")
    convert(source, tmp_path / "whole", "nvfp4")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*model-9\.safetensors'"):
            convert(source, tmp_path / "out", "nvfp4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {line["written"] for line in lines(tmp_path / "out") if "written" in line} >= set(NAMES)
    going_on(source, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole") and entries(tmp_path) == ["m", "out", "whole"]


def tmpfs(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of so many bytes, in memory. Skips where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip() if shutil.which('mount') else 'there is no mount'}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # mapped files may still be open


@pytest.mark.parametrize(
    "options", [{}, {"dialect": "awq", "recipe": "int4,signed=false,symmetric=false"}], ids=["", "columns"]
)
def test_a_disk_that_another_program_fills_loses_nothing(
    options: dict[str, str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has room when the conversion begins. The columns of AWQ's words are written apart."""
    for n in range(2):  # matrices of several slabs, which one page does not hold
        weight = np.random.default_rng(n).standard_normal((512, 256)).astype(np.float32)
        save_safetensors({NAMES[n]: weight}, source / f"model-{n}.safetensors", force=True)
    monkeypatch.setattr(measuring, "SLAB", 1 << 16)
    recipe, more = options.get("recipe", "nvfp4"), {name: options[name] for name in options if name != "recipe"}
    convert(source, tmp_path / "whole", recipe, **more)
    with contextmanager(tmpfs)(tmp_path / "disk", 4 << 20) as disk:
        filler = disk / "filler"

        def fill(name: str, size: int) -> None:
            if not filler.exists():
                with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass

        with pytest.raises(OSError, match=r"No space left on device: '.*disk") as refused:
            convert(source, disk / "out", recipe, advance=fill, **more)
        assert refused.value.errno == errno.ENOSPC and not (disk / "out").exists()
        assert [line["written"] for line in lines(disk / "out") if "written" in line] == [NAMES[0]]
        filler.unlink()
        going_on(source, disk / "out", recipe, **more)
        assert contents(disk / "out") == contents(tmp_path / "whole") and entries(disk) == ["out"]


@pytest.mark.parametrize("after", [1, 5], ids=["while it is written", "when it is written"])
def test_a_source_that_changes_on_the_way_is_an_error_and_restart_converts_the_new_one(
    after: int, source: Path, tmp_path: Path
) -> None:
    out, calls = tmp_path / "out", 0
    other = {name: np.full((64, 64), 2, np.float32) for name in NAMES[:2]}

    def advance(name: str, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            save_safetensors({**other, "layers.0.bias": np.ones(8, np.float32)}, source / "model-0.safetensors", force=True)

    with pytest.raises(breccia.CorruptFileError, match=r"model-0\.safetensors: it was replaced or modified since"):
        convert(source, out, "nvfp4", advance=advance)
    assert not out.exists()
    if staging_folder(out).exists():
        with pytest.raises(breccia.OptionError, match=r"\(files of the source: model-0\.safetensors changed\)"):
            convert(source, out, "nvfp4")
        with pytest.warns(UserWarning, match="which an interrupted run left behind"):
            convert(source, out, "nvfp4", restart=True)
    else:
        convert(source, out, "nvfp4")
    convert(source, tmp_path / "whole", "nvfp4")
    assert contents(out) == contents(tmp_path / "whole") and entries(tmp_path) == ["m", "out", "whole"]


def test_staged_files_that_are_removed_on_the_way_are_an_error_and_the_same_command_works(source: Path, tmp_path: Path) -> None:
    out, calls = tmp_path / "out", 0

    def advance(name: str, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            shutil.rmtree(staging_folder(out))

    with pytest.raises(OSError, match=r"breccia-staging|out"):
        convert(source, out, "nvfp4", advance=advance)
    assert not out.exists() and entries(tmp_path) == ["m"]
    convert(source, out, "nvfp4")
    assert entries(tmp_path) == ["m", "out"]


def test_a_target_that_is_removed_is_an_error_and_the_same_command_works(source: Path, tmp_path: Path) -> None:
    parent = tmp_path / "there"
    parent.mkdir()

    def advance(name: str, size: int) -> None:
        shutil.rmtree(parent, ignore_errors=True)

    with pytest.raises(FileNotFoundError, match="there"):
        convert(source, parent / "out", "nvfp4", advance=advance)
    assert entries(tmp_path) == ["m"]
    parent.mkdir()
    convert(source, parent / "out", "nvfp4")
    assert entries(parent) == ["out"]


@pytest.mark.parametrize("after", [2, 5])
def test_one_file_and_a_dialect_and_gguf_go_on(after: int, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    source = tmp_path / "m"
    source.mkdir()
    hidden = {f"model.layers.0.self_attn.{x}_proj.weight": rng.standard_normal((64, 64)).astype(np.float32) for x in "qkvo"}
    save_safetensors(hidden, source / "model.safetensors")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 10}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128, **sizes}
    (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    for name, recipe, options in (
        ("out.gguf", "int8,group_size=32,scale_dtype=fp16", {"dialect": "gguf"}),
        ("out", "mxfp8", {"dialect": "compressed_tensors"}),
    ):
        out, whole = tmp_path / name, tmp_path / f"whole-{name}"
        convert(source, whole, recipe, **options)
        stopped(source, out, after, recipe, **options)
        written = [line for line in lines(out) if "written" in line]
        assert len(written) == min(after, 4)
        going_on(source, out, recipe, **options)
        assert contents(out).values() == contents(whole).values() or contents(out) == contents(whole)
    assert entries(tmp_path) == ["m", "out", "out.gguf", "whole-out", "whole-out.gguf"]
