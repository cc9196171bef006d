"""What a conversion has finished: lines of a file in its staging folder, by which the same command goes on after any end."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import breccia
from breccia import BrecciaError, ErrorMetrics, OptionError
from breccia.internal import abbreviated, printable

from .engines import WorkerError
from .measure import Histogram
from .remote_path import is_remote
from .results import TensorReport
from .safetensors_file import ChangedFileError, identity
from .staging import Staging, naming, remove

#: Seconds between two times that the lines are written through to the disk. Less is lost only when the power is.
_SYNC = 1.0


class Journal:
    """The values that are written, with digests of their tensors' bytes, and those that are verified, with their metrics.

        with staging, Journal(staging, key) as journal:
            journal.write("w", {"w.data": "..."})
            journal.verify(report)

    key: what the conversion depends on. Its values are plain data, and its keys are what messages call them.

    Lines are trusted for nothing but what to look at: bytes of a tensor that do not have its digest are written again. A line
    that was cut off is none. The file stays, and with it the staging folder, after an exception that says nothing against the
    conversion: one of the system, a signal, a file that changed. It goes where nothing is finished, or breccia refuses a value.
    """

    def __init__(self, staging: Staging, key: Mapping[str, Any]) -> None:
        self.staging, self.key = staging, json.loads(json.dumps(key))
        self.written: dict[str, dict[str, str]] = {}
        self.verified: dict[str, tuple[ErrorMetrics | None, Histogram | None]] = {}
        #: The size and version of files that are uploaded, and of those of them that are in their place.
        self.uploaded: dict[str, list[int]] = {}
        self.placed: dict[str, list[int]] = {}
        self.calibrated: dict[str, dict[str, Any]] = {}
        self._file: Any = None
        self._synced = 0.0

    def check(self) -> None:
        """Raise OptionError where an interrupted run with another key has left a journal."""
        lines = _lines(self.staging.journal)
        if not lines or lines[0] == self.key:
            return
        differ = _differences(lines[0], self.key)
        said = "; ".join(f"{what}: {how}" for what, how in differ.items())
        raise OptionError(
            f"{self.staging.folder} has what an interrupted conversion to {self.staging.target} finished, and it was "
            f"another one ({said}). Run that one again, which goes on with it; or discard it: restart=True (--restart).",
            differ=list(differ),
        )

    def __enter__(self) -> Self:
        self.check()
        path = self.staging.journal
        lines = _lines(path)
        for line in lines[1:]:
            self._take(line)
        with naming(path):
            self._file = path.open("r+b" if lines else "wb")
            self._file.truncate(sum(len(_encoded(line)) for line in lines))
            self._file.seek(0, os.SEEK_END)
        if not lines:
            self._add(self.key)
        else:
            blocks = f"{len(self.calibrated)} parts are chosen, " if self.calibrated else ""
            warnings.warn(
                f"goes on with what an interrupted run has left in {self.staging.folder}: {blocks}{len(self.written)} tensors "
                f"are written, {len(self.verified)} of them verified.",
                stacklevel=5,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        is_refused = isinstance(error, BrecciaError) and not isinstance(error, ChangedFileError | WorkerError)
        try:
            self._file.close()
        finally:
            if is_refused or not (self.written or self.calibrated):
                remove(self.staging.journal)

    def write(self, name: str, digests: Mapping[str, str]) -> None:
        """Note that a value is written. digests: of the bytes of each of its tensors in the file."""
        self._note({"written": name, "digests": dict(digests)})

    def verify(self, report: TensorReport) -> None:
        """Note that a value is verified."""
        metrics, counts = report.fidelity, report.histogram
        self._note({"verified": report.name, "fidelity": metrics and asdict(metrics), "histogram": counts and asdict(counts)})

    def finished(
        self, names: Iterable[str]
    ) -> tuple[dict[str, dict[str, str]], dict[str, tuple[ErrorMetrics | None, Histogram | None]]]:
        """What is written, and what is verified, of some values."""
        listed = list(names)
        written, verified = self.written, self.verified
        return {n: written[n] for n in listed if n in written}, {n: verified[n] for n in listed if n in verified}

    def note_uploaded(self, name: str, state: list[int]) -> None:
        """Note that a file is complete and uploaded. state: its size and version there."""
        self._note({"uploaded": name, "state": state})

    def note_placing(self) -> None:
        """Note that all files are uploaded, and the destination is about to change."""
        self._note({"placing": True})

    def note_placed(self, name: str, state: list[int]) -> None:
        """Note that an uploaded file is in its place."""
        self._note({"placed": name, "state": state})

    def calibrate(self, stage: str, file: str, digest: str, records: Mapping[str, Any]) -> None:
        """Note that the values of a block are chosen. file, digest: where they are, and SHA-256 of its bytes."""
        self._note({"calibrated": stage, "file": file, "digest": digest, "records": records})

    def _note(self, line: dict[str, Any]) -> None:
        self._add(line)
        self._take(line)

    def _add(self, line: dict[str, Any]) -> None:
        with naming(self.staging.journal):
            self._file.write(_encoded(line))
            self._file.flush()
            if time.monotonic() - self._synced > _SYNC:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()

    def _take(self, line: Mapping[str, Any]) -> None:
        if "written" in line:
            self.written[line["written"]] = line["digests"]
            self.verified.pop(line["written"], None)
        elif "uploaded" in line:
            self.uploaded[line["uploaded"]] = line["state"]
        elif "placed" in line:
            self.placed[line["placed"]] = line["state"]
        elif "calibrated" in line:
            self.calibrated[line["calibrated"]] = dict(line)
        elif "verified" in line:
            metrics, counts = line["fidelity"], line["histogram"]
            self.verified[line["verified"]] = metrics and ErrorMetrics(**metrics), counts and _histogram(counts)


def is_placing(staging: Staging) -> bool:
    """Was a run interrupted while it put uploaded files in their place?"""
    return any("placing" in line for line in _lines(staging.journal))


def _histogram(counts: Mapping[str, Any]) -> Histogram:
    before, after = tuple(counts["before"]), tuple(counts["after"])
    return Histogram(counts["limit"], before, after, counts["outside"])


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal, up to the first that was cut off; none where there is no journal."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    lines: list[dict[str, Any]] = []
    for line in text.splitlines(keepends=True):
        try:
            read = json.loads(line)
        except ValueError:  # a block of zeros, after a power failure
            break
        if not line.endswith(b"\n") or _encoded(read) != line:
            break
        lines.append(read)
    return lines


def conversion_key(source: Path, files: list[Path], options: Mapping[str, Any]) -> dict[str, Any]:
    """What decides about the bytes that a conversion writes: the version, the source's files as they are, and its options."""
    states = {os.path.relpath(path, source): identity(path.stat())[2:] for path in sorted(files)}
    return {
        "version": breccia.__version__,
        "source": str(source) if is_remote(source) else os.path.realpath(source),
        **options,
        "files of the source": states,
    }


def _differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """How two keys differ, by what differs."""
    said: dict[str, str] = {}
    for what in {**there, **now}:
        before, after = there.get(what), now.get(what)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            said[what] = f"{abbreviated(n for n in {**before, **after} if before.get(n) != after.get(n))} changed"
        else:
            said[what] = " there, ".join(printable(str(one or "none")) for one in (before, after)) + " now"
    return said
