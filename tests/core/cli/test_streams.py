"""What the program writes to pipes, files and full disks: no trailing blanks, and no lost output."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from program import Run

from breccia.cli.streams import OutputError, Piped, streams
from breccia.dispatch.registry import registry

#: Of each command the lines of words that make it print all it has, in a folder with model.safetensors.
LINES = {
    "convert": (
        "convert model.safetensors small.safetensors -r nvfp4 --dry-run",
        "convert model.safetensors small.safetensors -r int4",
        "convert model.safetensors small.safetensors -r int4 --force --json",
    ),
    "compare": (
        "compare model.safetensors small.safetensors",
        "compare model.safetensors small.safetensors model.safetensors --sort sqnr --top 1",
        "compare model.safetensors small.safetensors --json",
        "compare model.safetensors small.safetensors --fail-under 90",
    ),
    "why": ("why model.safetensors small.safetensors", "why model.safetensors small.safetensors --top 1 --remedies 0 --json"),
    "merge": (
        "merge small.safetensors adapter merged.safetensors",
        "merge small.safetensors adapter merged.safetensors --json",
    ),
    "diff": (
        "diff model.safetensors small.safetensors",
        "diff model.safetensors model.safetensors",
        "diff model.safetensors small.safetensors --json",
    ),
    "inspect": ("inspect model.safetensors", "inspect small.safetensors --scales", "inspect small.safetensors --json"),
    "explain": ("explain matmul fp8_block fp8_block", "explain cast_ste nvfp4 --on torch", "explain cast nvfp4 --json"),
    "recipes": ("recipes", "recipes nvfp4 int4,offset=bias", "recipes --json"),
    "rosetta": ("rosetta", "rosetta mxfp4", "rosetta mxfp4 nvfp4 --json"),
    "plugins": ("plugins", "plugins --json"),
    "plugin": ("plugin new mine", "plugin new other --json", "plugin new mine"),
    "doctor": ("doctor", "doctor --json"),
    "bench": (
        "bench nvfp4 --size 32 --runs 1",
        "bench matmul nvfp4 --size 32 --runs 1 --rows 1",
        "bench nvfp4 --size 32 --runs 1 --json",
    ),
}
OTHERS = ("", "--help", "--version", "convrt", "explain cast nvpf4", "explain cast nvpf4 --json")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small checkpoint, which is the current one."""
    bridges = pytest.importorskip("breccia_bridges.safetensors")
    draw = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    tensors = {"layers.0.mlp.weight": draw, "embed_tokens.weight": draw, "norm.weight": np.ones(64, np.float32)}
    bridges.save_safetensors(tensors, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.together
def test_no_output_of_any_command_has_trailing_blanks(model: Path, run: Run) -> None:
    assert set(LINES) == set(registry().commands)
    helps = [f"{command} --help" for command in (*LINES, "plugin new")]
    for line in (*(line for lines in LINES.values() for line in lines), *helps, *OTHERS):
        code, out, err = run(*line.split())
        assert out or err, line
        assert [text for text in (out + err).splitlines() if text != text.rstrip()] == [], line
        if code == 0 and "--json" in line:
            json.loads(out)


def test_blanks_inside_lines_colors_and_bytes_stay() -> None:
    below = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    piped = Piped(below, needed=True)
    for text in ("a  b ", " c", "  ", "\n", "\x1b[1mbold  \x1b[0m\nnext \t", "\r\n", "", " end  \x1b[0m"):
        assert piped.write(text) == len(text)
    piped.finish()
    assert below.buffer.getvalue().decode() == "a  b  c\n\x1b[1mbold\x1b[0m\nnext\r\n end\x1b[0m"  # type: ignore[attr-defined]
    assert piped.buffer is below.buffer and piped.encoding == "utf-8" and not piped.isatty() and piped.writable()
    with pytest.raises(TypeError):
        piped.write(b"bytes")  # type: ignore[arg-type]  # click tries it, to find a stream of bytes


def test_a_long_row_of_blanks_takes_linear_time() -> None:
    below = io.StringIO()
    Piped(below, needed=True).write(" " * 10**6 + "x\n")
    assert len(below.getvalue()) == 10**6 + 2


class Refusing(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    flush = write  # type: ignore[assignment]


def test_write_errors_of_standard_output_have_a_reason_and_those_of_standard_error_are_silent() -> None:
    with pytest.raises(OutputError, match="cannot write to standard output: No space left on device; send it to a file"):
        Piped(Refusing(errno.ENOSPC), needed=True).write("x")
    with pytest.raises(OutputError, match="cannot write to standard output: it is closed; "):
        Piped(None, needed=True).write("x")
    with pytest.raises(OutputError) as raised:
        Piped(Refusing(errno.EPIPE), needed=True).write("x")
    assert raised.value.nobody_reads and not isinstance(raised.value, OSError)
    Piped(Refusing(errno.ENOSPC), needed=False).write("x")


def test_the_streams_return_after_any_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout, sys.stderr
    for end in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(end), streams(lambda e: sys.exit(1)):
            assert isinstance(sys.stdout, Piped) and isinstance(sys.stderr, Piped)
            raise end
        assert (sys.stdout, sys.stderr) == before
    monkeypatch.setattr(sys, "stdout", Refusing(errno.ENOSPC))
    failed: list[OutputError] = []
    with pytest.raises(SystemExit), streams(lambda e: failed.append(e) or sys.exit(1)):
        print("x")
    assert len(failed) == 1


# -- pipes, full disks and closed descriptors ------------------------------------------------------------------------


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `breccia` is the program of this environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BRECCIA_")}
    program = f'breccia() {{ "{sys.executable}" -m breccia "$@"; }}; set -o pipefail; '
    return subprocess.run(["bash", "-c", program + line], env=clean, capture_output=True, text=True, timeout=120)


posix = pytest.mark.skipif(os.name != "posix" or shutil.which("bash") is None, reason="bash runs the lines")


@posix
@pytest.mark.parametrize("command", ["recipes", "recipes --json", "--help", "plugins", "explain matmul fp8_block fp8_block"])
def test_a_reader_that_ends_early_ends_the_program_without_a_word(command: str) -> None:
    """As `ls`, `git` and `cat` end: killed by SIGPIPE. The reader has closed the pipe before the program writes."""
    done = shell(f"breccia {command} | true")
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGPIPE, "", "")


@posix
def test_the_first_line_of_a_pipe_arrives() -> None:
    done = shell("breccia recipes | head -1")
    assert done.stdout.startswith("recipe ") and done.stdout.count("\n") == 1
    assert done.returncode in (0, 128 + signal.SIGPIPE) and done.stderr == ""  # 0: all was written before `head` ended


@posix
def test_errors_of_a_command_whose_reader_has_ended_are_still_said() -> None:
    done = shell("breccia explain cast nvpf4 | true")
    assert done.returncode == 1 and done.stderr.startswith("error: no recipe 'nvpf4'") and done.stderr.count("\n") == 1


@posix
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a disk that is always full")
@pytest.mark.parametrize("command", ["recipes", "--help", pytest.param("doctor --json", marks=pytest.mark.long)])
def test_a_full_disk_is_an_error_of_one_line(command: str) -> None:
    done = shell(f"breccia {command} > /dev/full")
    assert done.returncode == 1
    reason = "cannot write to standard output: No space left on device"
    if "--json" in command:
        found = json.loads(done.stderr)["error"]
        assert found["type"] == "OutputError" and found["message"].startswith(reason)
    else:
        assert done.stderr.startswith(f"error: {reason}; ") and done.stderr.count("\n") == 1


@posix
def test_a_closed_standard_output_is_an_error_of_one_line() -> None:
    done = shell("breccia recipes >&-")
    assert done.returncode == 1 and done.stderr.startswith("error: cannot write to standard output: it is closed; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
@posix
def test_a_standard_error_that_cannot_be_written_changes_no_exit_code() -> None:
    for there in ("2>&-", *(["2>/dev/full"] if os.path.exists("/dev/full") else [])):
        done = shell(f"breccia explain cast nvpf4 {there}; echo $?; breccia --version {there}; echo $?")
        assert done.stdout.splitlines()[0] == "1" and done.stdout.splitlines()[-1] == "0", there


@pytest.mark.long
@posix
@pytest.mark.together
def test_no_file_of_a_command_becomes_a_closed_standard_output(model: Path) -> None:
    """A descriptor that is closed is the next one that the system gives to a file, and what C code prints would end in it."""
    done = shell("breccia convert model.safetensors small.safetensors -r nvfp4 >&- 2>&- <&-; breccia inspect small.safetensors")
    assert done.returncode == 0 and "nvfp4" in done.stdout, done.stderr
