"""What was measured on devices: files of numbers by key, and the devices for which they hold. Imports no framework.

All files have one form, {"schema", "device", "provenance", "entries": {key: entry}} with an entry a line. Those of this
distribution are `configurations/<kind>_<device>.json`, of four kinds:

- "triton": choices of the Triton kernels (`choices.Choice`); a user's own file has this kind too;
- "weight_only": configurations of the products by weights (`gemm.weight_only.plans.Config`);
- "matmul" and "weight_times": times over a lower bound, by which kernels are chosen.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from breccia import Device
from breccia.internal import reentrant

T = TypeVar("T")
#: Of the files. Raised when a number means something else, or kernels change so much that all has to be measured anew.
SCHEMA = 2
#: The files of this distribution.
SHIPPED = Path(__file__).parents[1] / "configurations"


# ------------------------------------------------------------------------------------------------ devices


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


def device_name(device: Device) -> str:
    """The name of a CUDA device; "" where torch sees none."""
    torch = sys.modules.get("torch")
    if torch is None or device.kind != "cuda" or not torch.cuda.is_available():
        return ""
    index = device.index or 0  # JAX numbers the devices of all processes
    return name_of(torch.cuda.get_device_properties(index if index < torch.cuda.device_count() else 0))


def measured_as(device: str) -> str:
    """The device whose shipped measurements hold for a device, by their names: itself, or the nearest one of its family."""
    return _families.get(device, device)


# ------------------------------------------------------------------------------------------------ files


def file_name(device: str) -> str:
    """The name of a device's file: "nvidia_h200.json"."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def shipped(kind: str, device: str) -> Path:
    """The file of a kind for a device, which may not be there."""
    return SHIPPED / f"{kind}_{file_name(device)}"


@lru_cache
def measured(kind: str, device: str, parse: Callable[[Any], T]) -> Mapping[str, T]:
    """The entries of the shipped file for a device or its family, each through `parse`; empty where there is none."""
    device = measured_as(device)
    return known(shipped(kind, device), device, parse) if device else {}


def known(path: Path, device: str, parse: Callable[[Any], T], remedy: str = "") -> Mapping[str, T]:
    """The entries of a file; none where there is no file, or, with one warning that names it, where it cannot be used."""
    try:
        return read(path, device, parse)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        warnings.warn(f"breccia ignores {path}: {e}.{remedy}", stacklevel=2)
        return {}


def read(path: Path, device: str, parse: Callable[[Any], T]) -> dict[str, T]:
    """The entries of a file, each through `parse`, which raises ValueError or TypeError for a wrong one.

    Raises ValueError that says what is wrong with the file, OSError if it cannot be read.
    """
    content: Any = json.loads(path.read_text(encoding="utf-8"))
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"its schema is {schema!r}; this version of breccia-triton reads {SCHEMA}")
    if content.get("device") != device:
        raise ValueError(f"it is for {content.get('device')!r}, not for {device!r}")
    entries = content.get("entries")
    if not isinstance(entries, dict):
        raise ValueError("it has no entries")
    parsed: dict[str, T] = {}
    for key, entry in entries.items():
        try:
            parsed[key] = parse(entry)
        except (ValueError, TypeError) as e:
            raise ValueError(f"of {key!r} {e}") from None
    return parsed


def merge(
    path: Path, device: str, entries: Mapping[str, Any], provenance: Mapping[str, Any] | None = None,
    parse: Callable[[Any], Any] = lambda entry: entry,
) -> None:  # fmt: skip
    """Write entries into a file beside those that it has; None drops one. A file that `read` cannot use is replaced.

    A reader sees the file as it was or as it will be. Where several processes write at once, the last one wins: entries that
    another one added meanwhile may get lost.
    """
    with _writing:
        old = dict[str, Any]()
        with contextlib.suppress(OSError, ValueError):
            read(path, device, parse)
            old = read(path, device, lambda entry: entry)
        merged = {key: entry for key, entry in sorted({**old, **entries}.items()) if entry is not None}
        head = {"schema": SCHEMA, "device": device} | ({} if provenance is None else {"provenance": dict(provenance)})
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in merged.items())
        body = f"\n{lines}\n  " if lines else ""
        replace_file(path, f'{json.dumps(head, indent=2)[:-2]},\n  "entries": {{{body}}}\n}}\n')


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


# ------------------------------------------------------------------------------------------------ times


def times_over_bound(entry: Any) -> float:
    """A measured time over its lower bound, of a file. Raises ValueError for anything else."""
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
