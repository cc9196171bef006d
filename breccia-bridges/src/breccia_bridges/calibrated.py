"""What calibration or a merge has chosen, part by part, in files of the staging folder: the same command goes on from them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from breccia import ScaledTensor

from .loading import Checkpoint
from .safetensors import Target, save_safetensors
from .safetensors_file import Container
from .source import Source

if TYPE_CHECKING:  # a journal knows the engines, and these the values
    from .journal import Journal


@dataclass(frozen=True)
class Stage:
    """The values of one block: see `breccia.bridges.calibrate`."""

    name: str
    tensors: Mapping[str, ScaledTensor]
    plain: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


class Calibrated:
    """The values that calibration or a merge has chosen, each read when it is asked for.

    folder: of the files, one for each stage. is_stored: whether plain values are arrays as their files store them, else FP32.
    """

    def __init__(self, folder: Path, journal: Journal, *, is_stored: bool = False) -> None:
        self.folder, self._journal, self.is_stored = folder, journal, is_stored
        self._stages: dict[str, Mapping[str, Any]] = {}
        self.records: dict[str, Mapping[str, Any]] = {}

    def finished(self, name: str) -> Stage | None:
        """The stage of that name, if an interrupted run has finished it, and its file has the bytes that were written."""
        line = self._journal.calibrated.get(name)
        if line is None:
            return None
        path = self.folder / line["file"]
        if not path.is_file() or _digest(path) != line["digest"]:
            return None
        self._open(name, path, line["records"])
        values = self._stages[name]
        scaled = {value: values[value] for value in values if isinstance(values[value], ScaledTensor)}
        return Stage(name, scaled, {value: values[value] for value in values if value not in scaled}, line["records"])

    def add(self, stage: Stage) -> None:
        """Write a stage."""
        self.folder.mkdir(exist_ok=True)
        before = self._journal.calibrated.get(stage.name)  # of a file that was damaged
        path = self.folder / (before["file"] if before else f"{len(self._journal.calibrated):05}.safetensors")
        save_safetensors({**stage.tensors, **stage.plain}, path, force=True)
        self._journal.calibrate(stage.name, path.name, _digest(path), stage.records)
        self._open(stage.name, path, stage.records)

    def _open(self, name: str, path: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
        source = Source.of(path, [Container(path)], foreign=False)  # plain values may look like another library's
        self._stages[name] = Checkpoint(source, list(source.values), Target.of("numpy", None))
        self.records.update(records)

    def get(self, name: str) -> ScaledTensor | np.ndarray | None:
        """The value of that name; None where calibration has not chosen it."""
        return next((stage[name] for stage in self._stages.values() if name in stage), None)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
