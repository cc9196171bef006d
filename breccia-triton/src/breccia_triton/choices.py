"""Choices: the numbers that a kernel may vary without changing its results, by device and call.

The user's own file comes first, in the user cache directory; then the file that is shipped for the device in `configurations`;
then what `geometry` takes by default. Imports no framework.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from breccia import Format
from breccia.backend import TENSOR, Block
from breccia.internal import reentrant

#: Of the files. Raised when a number means something else, or kernels change so much that choices have to be tuned anew.
SCHEMA = 1
#: The files of this distribution, by device.
SHIPPED = Path(__file__).parent / "configurations"
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

    def __str__(self) -> str:
        return ", ".join(f"{name} {n}" for name, n in self.numbers.items()) or "default"


DEFAULT = Choice()


@dataclass(frozen=True)
class Key:
    """What the best choice depends on, besides the device. kernel: what the candidates depend on, of `tuning.GRIDS`."""

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


class Choices:
    """The choices for calls on a device: `choices(key)`. device: its name; "" has the default choices only.

    user: those of the user's file, by the text of their keys. It is read once in a process.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._tuned: dict[Key, Tuned] = {}
        self.user = _known(user_file(device), device) if device else {}
        shipped = measured_as(device)
        self._shipped = _known(SHIPPED / file_name(shipped), shipped) if shipped else {}

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


def file_name(device: str) -> str:
    """The name of a device's file: "nvidia_h200.json"."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


@dataclass(frozen=True)
class Properties:
    """What decides which measurements hold for a device. processors: its multiprocessors. memory_mhz: the clock of its memory,
    0 where torch does not know it."""

    capability: tuple[int, int]
    processors: int
    memory_mhz: float

    def distance(self, other: Properties) -> float:
        """How far two devices are apart, by ratios of processors and memory clocks; infinite if measurements do not hold."""
        ratios = self.processors / other.processors, (self.memory_mhz or other.memory_mhz) / other.memory_mhz
        if self.capability != other.capability or not all(1 / _ALIKE <= ratio <= _ALIKE for ratio in ratios):
            return math.inf
        return sum(abs(math.log(ratio)) for ratio in ratios)


#: Devices with files in `SHIPPED`, by name.
MEASURED = {"NVIDIA H200": Properties((9, 0), 132, 3201.0)}
#: Up to this ratio of processors, and of memory clocks, devices of one compute capability take the same choices.
_ALIKE = 1.34
_families: dict[str, str] = {}


def name_of(properties: Any) -> str:
    """The name of a CUDA device, by torch's properties, after which `measured_as` knows its family."""
    name = str(properties.name)
    if name not in _families:
        clock = getattr(properties, "memory_clock_rate", 0) / 1e3  # torch says kHz
        own = Properties((properties.major, properties.minor), properties.multi_processor_count, clock)
        distances = {known: own.distance(of) for known, of in MEASURED.items()}
        nearest_name = min(distances, key=distances.__getitem__)
        _families[name] = name if name in MEASURED or math.isinf(distances[nearest_name]) else nearest_name
    return name


def measured_as(device: str) -> str:
    """The device whose shipped measurements hold for a device, by their names: itself, or the nearest one of its family."""
    return _families.get(device, device)


T = TypeVar("T")


@lru_cache
def measured(kind: str, device: str, under: str, parse: Callable[[Any], T]) -> Mapping[str, T]:
    """What was measured on a device: entries below `under` of the shipped file `<kind>_<device>.json`, each through `parse`.

    Empty where there is no file, or, with one warning that names the file, where it cannot be used. parse: raises ValueError or
    TypeError for a wrong entry.
    """
    device = measured_as(device)
    path = SHIPPED / f"{kind}_{file_name(device)}"
    if not device or not path.is_file():
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        _check_head(content, device)
        entries = content.get(under)
        if not isinstance(entries, dict):
            raise ValueError(f"it has no {under}")
        return {key: parse(entry) for key, entry in entries.items()}
    except (OSError, ValueError, TypeError) as e:
        warnings.warn(f"breccia leaves out {path}: {e}", stacklevel=2)
        return {}


def times_over_bound(entry: Any) -> float:
    """A measured time over its lower bound, of a file. Raises ValueError for what is none."""
    if not isinstance(entry, float | int) or not 0 < entry < float("inf"):
        raise ValueError(f"{entry!r} is not a positive number")
    return float(entry)


def measured_key(head: str, rows: int, columns: int, depth: int) -> str:
    """The key of a product's time in a file of measured times. head: kernel and formats. rows, columns, depth: M, N and K."""
    return f"{head} {rows}x{columns}x{depth}"


def nearest(known: Mapping[str, float], head: str, rows: int, columns: int, depth: int) -> float | None:
    """The entry of the measured shape that is nearest to (M, N, K), by ratios of lengths; None where none was measured.

    known: times by the keys of `measured_key`. M counts twice: it decides which kernels run, N and K how long.
    """
    wanted, distances = (rows, columns, depth), list[tuple[float, str]]()
    for key in known:
        if key.startswith(f"{head} "):
            ratios = (math.log2(n / int(m)) for n, m in zip(wanted, key.rpartition(" ")[2].split("x"), strict=True))
            m, n, k = map(abs, ratios)
            distances.append((2 * m + n + k, key))
    return known[min(distances)[1]] if distances else None


def write_measured(path: Path, device: str, under: str, entries: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write what `measured` reads. Entries of another run stay, where the file is usable and this run did not measure them."""
    try:
        old_content: Any = json.loads(path.read_text(encoding="utf-8"))
        _check_head(old_content, device)
        entries = {**old_content[under], **entries}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    content = {"schema": SCHEMA, "device": device, "provenance": dict(provenance), under: dict(sorted(entries.items()))}
    replace_file(path, json.dumps(content, indent=1) + "\n")


def _check_head(content: Any, device: str) -> None:
    """Raise ValueError unless the content of a file has this version's schema and is for this device."""
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"its schema is {schema!r}; this version of breccia-triton reads {SCHEMA}")
    if content.get("device") != device:
        raise ValueError(f"it is for {content.get('device')!r}, not for {device!r}")


def _known(path: Path, device: str) -> dict[str, Choice]:
    """The choices in a file; none, with one warning, where it cannot be used."""
    try:
        return {text: Choice.of(entry["choice"]) for text, entry in read(path, device).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        warnings.warn(
            f"breccia ignores the configurations of Triton kernels in {path}: {e}. Delete the file, or tune anew with "
            "breccia_triton.configure(autotune=True).",
            stacklevel=2,
        )
        return {}


def read(path: Path, device: str) -> dict[str, dict[str, Any]]:
    """The entries of a file, each checked. Raises ValueError that says what is wrong with it, OSError if it cannot be read."""
    content = json.loads(path.read_text(encoding="utf-8"))
    _check_head(content, device)
    entries = content.get("choices")
    if not isinstance(entries, dict):
        raise ValueError("it has no choices")
    for text, entry in entries.items():
        numbers = entry.get("choice") if isinstance(entry, dict) else None
        if not isinstance(numbers, dict):
            raise ValueError(f"{text!r} has no choice")
        try:
            Choice.of(numbers)
        except ValueError as e:
            raise ValueError(f"of {text!r} {e}") from None
    return entries


def write(
    path: Path, device: str, choices: Mapping[Key, Tuned], provenance: Mapping[str, Any] | None = None, defaults: bool = True
) -> None:  # fmt: skip
    """Merge choices into a file. A file that cannot be used is replaced. defaults: also write those that are the default.

    A reader sees the file as it was or as it will be. Where several processes write at once, the last one wins: entries that
    another one added meanwhile may get lost.
    """
    with _writing:
        try:
            entries = read(path, device)
        except (OSError, ValueError):
            entries = {}
        for key, tuned in choices.items():
            times = {"us": round(tuned.seconds * 1e6, 2), "default_us": round(tuned.default_seconds * 1e6, 2)}
            entries[str(key)] = {"choice": tuned.choice.numbers, **times}
            if tuned.choice == DEFAULT and not defaults:
                del entries[str(key)]
        content: dict[str, Any] = {"schema": SCHEMA, "device": device}
        content |= {} if provenance is None else {"provenance": provenance}
        content["choices"] = dict(sorted(entries.items()))
        replace_file(path, _text(content))


def replace_file(path: Path, text: str | bytes) -> None:
    """Write a file by way of another one, so that readers see the old content or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


_writing = reentrant()


def _text(content: dict[str, Any]) -> str:
    """JSON with one line for each choice."""
    entries = ",\n".join(f"    {json.dumps(text)}: {json.dumps(entry)}" for text, entry in content["choices"].items())
    head = json.dumps({name: value for name, value in content.items() if name != "choices"}, indent=2)
    return f'{head[:-2]},\n  "choices": {{' + (f"\n{entries}\n  " if entries else "") + "}\n}\n"
