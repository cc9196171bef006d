"""`convert(verify=...)`: what is written is the same, and the report says what was verified."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from program import Run
from safetensors.numpy import save_file

from breccia import CorruptFileError, OptionError
from breccia.bridges import convert
from breccia_bridges import convert_file, staged_writer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    w = {name: rng.standard_normal((48, 64), np.float32) for name in ("a.weight", "b.weight")}
    path = tmp_path / "model.safetensors"
    save_file({**w, "norm.weight": np.ones(64, np.float32)}, path)
    return path


@pytest.mark.parametrize("verify", ["bytes", "none"])
def test_the_same_bytes_are_written_and_nothing_is_measured(verify: str, source: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    measured = convert(source, tmp_path / "full.safetensors", "nvfp4", advance=lambda *step: seen.append(step))
    steps: list[tuple[str, int]] = []
    found = convert(source, tmp_path / "out.safetensors", "nvfp4", verify=verify, advance=lambda *step: steps.append(step))
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "full.safetensors").read_bytes()
    assert steps == seen, "progress is that of two passes"
    assert found.worst is None and all(t.fidelity is None for t in found.tensors) and measured.worst is not None
    listed = found.to_dict()
    assert (listed["verify"], listed["sqnr_db"], listed["bytes_out"]) == (verify, None, measured.bytes_out)
    assert found.warnings == measured.warnings and found.verdict == measured.verdict
    assert repr(found).endswith(" bits per parameter, not measured)") and "SQNR" in repr(measured)


@pytest.mark.parametrize(("verify", "refused"), [("full", True), ("bytes", True), ("none", False)])
def test_bytes_that_read_back_otherwise_are_refused(
    verify: str, refused: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_file.Hash, "agrees", lambda *_: False)
    out = tmp_path / "out.safetensors"
    if not refused:
        assert convert(source, out, "int4", verify=verify).quantized and out.exists()
        return
    with pytest.raises(CorruptFileError, match="reads back bytes other than those written; check the disk"):
        convert(source, out, "int4", verify=verify)
    assert not out.exists()


def test_what_the_disk_says_while_a_file_is_written_through_is_raised(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system says it once, to the first that asks: nothing would say it at the end."""
    real, said = os.fsync, list[int]()

    def fsync(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread() and not said:
            said.append(descriptor)
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(staged_writer, "_SYNCED", 1 << 10)
    monkeypatch.setattr(os, "fsync", fsync)
    out = tmp_path / "out.safetensors"
    with pytest.raises(OSError, match="Input/output error") as e:
        convert(source, out, "int4", verify="none")
    assert said and Path(e.value.filename).name == out.name and not out.exists()


def test_another_word_and_histograms_of_what_is_not_decoded_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    with pytest.raises(OptionError, match=r"verify takes 'full', 'bytes', 'none'; got 'byte'; did you mean 'bytes'\?"):
        convert(source, out, "int4", verify="byte")
    with pytest.raises(OptionError, match=r"and verify='bytes' decodes none\. Use verify='full'"):
        convert(source, out, "int4", verify="bytes", histograms=True)
    assert not out.exists()


@pytest.mark.parametrize(
    ("verify", "said"),
    [
        ("full", "verified    {}, read back and compared; "),
        ("bytes", "verified    {}, bytes read back and compared; values were not measured; "),
        ("none", "written     {}, not read back; "),
    ],
)
def test_the_command_says_what_was_verified(verify: str, said: str, source: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.safetensors"
    words = ("convert", str(source), str(out), "-r", "int4", "--verify", verify)
    code, told, _ = run(*words)
    assert code == 0 and said.format(out) in told
    assert ("SQNR" in told) == (verify == "full")
    code, told, _ = run(*words, "--force", "--json")
    assert code == 0 and json.loads(told)["verify"] == verify
    if verify != "full":
        code, _, told = run(*words, "--force", "--report", str(tmp_path / "r.html"))
        assert code == 2 and f"--verify {verify} measures nothing" in " ".join(told.replace("│", " ").split())
