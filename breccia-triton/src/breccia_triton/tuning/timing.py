"""Tuning: candidates of a kernel's choices, timed on the device. Nothing is timed without `configure(autotune=True)`."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import torch

from breccia.internal import reentrant

from ..facts import INTERPRETED
from ..launch.cache import Remembered
from ..launch.device import on
from ..launch.triton_launch import Launch
from .choices import DEFAULT, Choice, Choose, Key, Tuned, choices_of

_T = TypeVar("_T")
Call = Callable[[], object]

#: The candidates of each kernel: every combination of these numbers.
GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "tile along": {"elements": (2048, 4096, 8192), "wide": (256, 512, 1024), "each": (16, 32, 64)},
    "tile down": {"elements": (0, 8192), "wide": (32, 64, 128), "each": (32, 64, 128), "vector": (8, 16)},
    "tile turned": {"elements": (0, 4096, 16384), "wide": (32, 64, 128), "each": (32, 64, 128), "vector": (4, 8)},
    "pair": {"elements": (0, 4096, 8192), "wide": (64, 128, 256), "each": (32, 64, 128), "vector": (4, 8, 16)},
    "tile whole": {"elements": (4096, 8192, 16384), "each": (16, 32, 64, 128), "vector": (0, 4, 8)},
    "lanes": {"each": (16, 32, 64), "warps": (2, 4, 8), "steps": (1, 2, 4)},
    "panels": {"wide": (32, 64, 128), "vector": (4, 8)},
    "strips": {"each": (32, 64, 128), "vector": (4, 8), "warps": (2, 4, 8)},
    "decode": {"elements": (2048, 4096, 8192), "wide": (256, 512, 1024), "each": (8, 16, 32)},
    "fused": {"lines": (32, 64, 128), "deep": (64, 128), "stages": (2, 4), "split": (1, 2, 4)},
    "amax": {"elements": (2048, 4096, 8192), "warps": (4, 8, 16), "programs": (512, 1024, 2048)},
}
#: A choice has to be faster than the default by this part of its time.
GAIN = 0.02
#: Samples of each candidate; then of the fastest ones and the default.
SAMPLES, FINALISTS, FINAL_SAMPLES = 3, 3, 9
#: A sample lasts about this many seconds, and has so many calls at most.
SAMPLE_S, MOST_CALLS = 1e-3, 20
#: Clock cycles that the device waits at the start of a sample, so that calls are ready before it comes to them.
HEAD_START = 1_000_000


class configure:
    """Set how the Triton kernels run in this process: from now on, or for a `with` block.

    autotune: the first call of each kind on a device tries dozens of configurations, which takes seconds, and keeps the fastest
    one in the user cache directory, for later processes as well. Results have the same bytes under all configurations. Calls
    inside the capture of a CUDA graph are not tuned. Off by default: nothing is timed then.
    Raises TypeError for anything but a bool.
    """

    def __init__(self, *, autotune: bool) -> None:
        if not isinstance(autotune, bool):
            raise TypeError(f"configure(autotune=) takes True or False; got {autotune!r}")
        self._before = _settings.autotune
        _set(autotune)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _set(self._before)


@dataclass
class _Settings:
    autotune: bool = False


_settings = _Settings()


def _set(autotune: bool) -> None:
    _settings.autotune = autotune
    if autotune:  # calls that were prepared before are tuned too
        Remembered.forget()


def candidates(key: Key) -> Iterator[Choice]:
    """The choices to try for a call, the default first."""
    yield DEFAULT
    grid = GRIDS[key.kernel]
    for numbers in itertools.product(*grid.values()):
        yield Choice(**dict(zip(grid, numbers, strict=True)))


def distinct(
    key: Key, prepare: Callable[[Choose], _T], launches: Callable[[_T], list[Launch]], base: Choose
) -> dict[Choice, _T]:
    """A call as it is prepared under each candidate for one of its keys, without those that make no difference.

    prepare: prepares the call under choices. launches: its kernels. base: the choices for its other keys.
    """
    calls: dict[Choice, _T] = {}
    seen: list[list[Launch]] = []
    for choice in candidates(key):
        call = prepare(lambda other, choice=choice: choice if other == key else base(other))
        if (kernels := launches(call)) not in seen:
            seen.append(kernels)
            calls[choice] = call
    return calls


@dataclass
class Timed:
    """What was measured of the candidates. seconds: the median of a call under each. failed: why others did not run."""

    seconds: dict[Choice, float] = field(default_factory=dict)
    failed: dict[Choice, str] = field(default_factory=dict)

    @property
    def best(self) -> Tuned:
        """The fastest choice, or the default unless that is slower by more than `GAIN`."""
        default = self.seconds[DEFAULT]
        choice = min(self.seconds, key=self.seconds.__getitem__)
        choice = choice if self.seconds[choice] < (1 - GAIN) * default else DEFAULT
        return Tuned(choice, self.seconds[choice], default)


def fastest(
    makers: Mapping[Choice, Callable[[], Call]],
    sample: Callable[[Call, int], float],
    samples: int = SAMPLES,
    final_samples: int = FINAL_SAMPLES,
) -> Timed:
    """Time calls in rotation: all of them, then the fastest ones and the default again, which decides.

    makers: each compiles a call. A candidate that does not compile or run is left out; an error of the default is raised.
    sample: seconds per call of so many calls. samples, final_samples: of each candidate.
    """
    timed, calls = Timed(), dict[Choice, Call]()
    for choice, make in makers.items():
        try:
            calls[choice] = make()
            calls[choice]()
        except Exception as e:
            if choice == DEFAULT:
                raise
            timed.failed[choice] = f"{type(e).__name__}: {e}"
            calls.pop(choice, None)
    count = min(max(1, int(SAMPLE_S / max(sample(calls[DEFAULT], 1), 1e-9))), MOST_CALLS)

    def medians(choices: list[Choice], samples: int) -> dict[Choice, float]:
        taken: dict[Choice, list[float]] = {choice: [] for choice in choices}
        for _ in range(samples):
            for choice, seconds in taken.items():
                seconds.append(sample(calls[choice], count))
        return {choice: statistics.median(seconds) for choice, seconds in taken.items()}

    first = medians(list(calls), samples)
    best = sorted((choice for choice in calls if choice != DEFAULT), key=first.__getitem__)[:FINALISTS]
    timed.seconds = medians([DEFAULT, *best], final_samples)
    return timed


def elapsed(call: Call, calls: int) -> float:
    """Seconds per call on the current CUDA device, between events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def timeable(device: torch.device) -> bool:
    """Whether calls on a device can be timed now: not while a CUDA graph is captured or torch.compile traces."""
    if INTERPRETED or device.type != "cuda":
        return False
    return not (torch.cuda.is_current_stream_capturing() or torch.compiler.is_compiling())


def tuned(
    prepare: Callable[[Choose], _T],
    launches: Callable[[_T], list[Launch]],
    compiled: Callable[[_T], Call],
    device: torch.device,
    name: str,
) -> _T:
    """A call prepared under the choices that are known; under `configure(autotune=True)`, others are found now.

    prepare, launches: as of `distinct`. compiled: returns the call that is timed. name: of the device.
    """
    known = choices_of(name)
    if not (_settings.autotune and timeable(device)):
        return prepare(known)
    keys: list[Key] = []

    def asked(key: Key) -> Choice:
        keys.append(key)
        return known(key)

    call = prepare(asked)
    with _timing, on(device):  # one at a time, so that threads do not disturb each other's times
        for key in dict.fromkeys(keys):
            if str(key) in known.user:
                continue
            different = distinct(key, prepare, launches, known)
            if len(different) > 1:
                makers = {choice: lambda other=other: compiled(other) for choice, other in different.items()}
                known.keep({key: fastest(makers, elapsed).best})
                call = prepare(known)
    return call


_timing = reentrant()


def one(launch: Any) -> list[Launch]:
    """The only kernel of a call."""
    return [launch]
