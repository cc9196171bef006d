"""Choices: the numbers that a kernel may vary without changing its results, by device and call.

The user's own file comes first, in the user cache directory; then the file that is shipped for the device in `configurations`;
then what `geometry` takes by default. Imports no framework.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import platformdirs

from breccia import Format
from breccia.backend import TENSOR, Block

from .measurements import file_name, known, measured_as, merge, shipped

#: Tensors of fewer elements are small: a device is not busy with them for long, so they have choices of their own.
SMALL = 2**22
#: The least and the most that each number may be. All are powers of two.
LIMITS = {
    "elements": (32, 16384),
    "wide": (16, 16384),
    "each": (4, 512),
    "vector": (1, 16),
    "warps": (1, 16),
    "steps": (1, 64),
    "programs": (64, 16384),
    "lines": (16, 256),
    "deep": (16, 256),
    "stages": (1, 8),
    "split": (1, 16),
}


@dataclass(frozen=True)
class Choice:
    """What a kernel may vary without changing what it writes; 0 is for the default. Raises ValueError.

    elements: of a tile. wide: the most columns of a tile. each: elements of a thread. vector: the most columns that a thread
    loads at once. warps: of a program. steps: tiles of a program. programs: of a pass over the tensor, at most.
    Of a product that decodes in registers, lines: columns of a tile. deep: columns of K of a step. stages: steps of a pipeline.
    split: parts of K. Another deep or split adds in another order, so results may differ within the bound of products.
    A number that a call does not allow, such as a tile smaller than a block, becomes the nearest one that it allows.
    """

    elements: int = 0
    wide: int = 0
    each: int = 0
    vector: int = 0
    warps: int = 0
    steps: int = 0
    programs: int = 0
    lines: int = 0
    deep: int = 0
    stages: int = 0
    split: int = 0

    def __post_init__(self) -> None:
        for name, n in asdict(self).items():
            least, most = LIMITS[name]
            if type(n) is not int or (n != 0 and not (least <= n <= most and n & (n - 1) == 0)):
                raise ValueError(f"{name} is {n!r}, which is not a power of two from {least} to {most}")

    @property
    def numbers(self) -> dict[str, int]:
        """Those that are not the default, by name."""
        return {name: n for name, n in asdict(self).items() if n}

    @staticmethod
    def of(numbers: Mapping[str, Any]) -> Choice:
        """The choice with these numbers, by name."""
        if unknown := sorted(numbers.keys() - LIMITS.keys()):
            raise ValueError(f"{unknown[0]!r} is unknown; there are {', '.join(LIMITS)}")
        return Choice(**numbers)

    @staticmethod
    def entry(entry: Any) -> Choice:
        """The choice of an entry in a file. Raises ValueError."""
        numbers = entry.get("choice") if isinstance(entry, dict) else None
        if not isinstance(numbers, dict):
            raise ValueError("there is no choice")
        return Choice.of(numbers)

    def __str__(self) -> str:
        return ", ".join(f"{name} {n}" for name, n in self.numbers.items()) or "default"


DEFAULT = Choice()


@dataclass(frozen=True)
class Key:
    """What the best choice depends on, besides the device. kernel: what the candidates depend on, of `timing.GRIDS`."""

    kernel: str
    call: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.call}"


#: Returns the choice for a call.
Choose = Callable[[Key], Choice]


def key_of(kernel: str, elements: int, *facts: object) -> Key:
    """The key of a call of a kernel for a tensor of so many elements. facts: what else the best choice depends on."""
    return Key(kernel, " ".join(map(str, facts)) + (" small" if elements < SMALL else ""))


def block_text(block: Block) -> str:
    """A block in a key: "1x128", "1xall", "tensor"."""
    return "tensor" if block == TENSOR else "x".join("all" if n is None else f"{n}" for n in block)


def codecs_of(fmt: Format) -> str:
    """The codecs of elements and scales, fine to coarse, and the offset: "E2M1/E4M3/F32", "UINT4/F16+zero_point"."""
    offset = "" if fmt.offset == "none" else f"+{fmt.offset}"
    return "/".join([fmt.element.name, *(level.codec.name for level in reversed(fmt.levels))]) + offset


@dataclass(frozen=True)
class Tuned:
    """A choice that was measured, and seconds of a call under it and under the default."""

    choice: Choice
    seconds: float
    default_seconds: float

    @property
    def entry(self) -> dict[str, Any]:
        """It in a file."""
        times = {"us": round(self.seconds * 1e6, 2), "default_us": round(self.default_seconds * 1e6, 2)}
        return {"choice": self.choice.numbers, **times}


class Choices:
    """The choices for calls on a device: `choices(key)`. device: its name; "" has the default choices only.

    user: those of the user's file, by the text of their keys. It is read once in a process.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._tuned: dict[Key, Tuned] = {}
        remedy = " Delete the file, or tune anew with breccia_triton.configure(autotune=True)."
        self.user = dict(known(user_file(device), device, Choice.entry, remedy)) if device else {}
        shipped_for = measured_as(device)
        self._shipped = known(shipped("triton", shipped_for), shipped_for, Choice.entry) if shipped_for else {}

    def __call__(self, key: Key) -> Choice:
        text = str(key)
        return self.user.get(text) or self._shipped.get(text) or DEFAULT

    def keep(self, choices: Mapping[Key, Tuned]) -> None:
        """Add choices to the user's file, also those that are the default: they need not be tuned again."""
        self.user |= {str(key): tuned.choice for key, tuned in choices.items()}
        self._tuned |= choices
        path = user_file(self.device)
        try:
            write(path, self.device, self._tuned)  # all of this process: another one may have dropped some
        except OSError as e:
            warnings.warn(f"breccia cannot keep what it tuned in {path}: {e}; the next process tunes it again.", stacklevel=2)


@lru_cache
def choices_of(device: str) -> Choices:
    """The choices of a device, by its name."""
    return Choices(device)


def user_file(device: str) -> Path:
    """Where choices that are tuned on this machine are kept: in the user cache directory of the operating system."""
    return platformdirs.user_cache_path("breccia") / "triton" / file_name(device)


def write(
    path: Path, device: str, choices: Mapping[Key, Tuned], provenance: Mapping[str, Any] | None = None, defaults: bool = True
) -> None:  # fmt: skip
    """Merge choices into a file. defaults: also those that are the default."""
    kept = {str(key): tuned.entry if defaults or tuned.choice != DEFAULT else None for key, tuned in choices.items()}
    merge(path, device, kept, provenance, Choice.entry)
