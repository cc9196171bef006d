"""Places: the framework and device that a law is tested on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from .. import targets
from ..arrays.frameworks import device_of
from ..arrays.ops import Array, Ops
from ..dispatch.kernel import ANY_FRAMEWORK, Kernel
from ..dispatch.registry import registry
from ..errors import OptionError


@dataclass(frozen=True)
class Place:
    """A framework and a kind of device; "" is the framework's default device."""

    framework: str
    device: str = ""

    def __str__(self) -> str:
        return self.framework + (self.device and f":{self.device}")

    @property
    def ops(self) -> Ops:
        """The framework's backend primitives."""
        return targets.load(registry().frameworks[self.framework].ops)

    @property
    def absence(self) -> str:
        """Why nothing can be tested here; empty if tests can run."""
        return _absence(self)

    def array(self, x: np.ndarray, dtype: str | None = None) -> Array:
        """`x` as an array of this place, viewed as `dtype` if given."""
        array = self.ops.from_numpy(np.array(x), dtype)
        return self.ops.to(array, self.device) if self.device else array

    def words(self, a: Array) -> np.ndarray:
        """The bit patterns of an array of this place, as unsigned integers."""
        return words(np.asarray(self.ops.to_numpy(a)))

    @property
    def flushes(self) -> bool:
        """Whether FP32 results below 2^-126 become zeros here. XLA's do; the contract allows it for decoded values only."""
        return _flushes(self)


def everywhere() -> tuple[Place, ...]:
    """One place of each framework that an active plug-in declares, installed or not."""
    return tuple(map(Place, registry().frameworks))


def place(spec: str) -> Place:
    """The place named "torch" or "torch:cuda". Raises UnknownNameError for a framework that no plug-in declares."""
    framework, _, device = spec.partition(":")
    registry().look_up("breccia_frameworks", framework, "framework")
    return Place(framework, device)


def places_of(kernel: Kernel, among: Iterable[Place]) -> list[Place]:
    """The places where a kernel is tested: on its own kind of device, if it declares one."""
    fitting = (p for p in among if kernel.framework in (ANY_FRAMEWORK, p.framework))
    return list(dict.fromkeys(Place(p.framework, kernel.device or p.device) for p in fitting))


@cache
def _absence(place: Place) -> str:
    framework = registry().frameworks.get(place.framework)
    if framework is None:
        return f"no plug-in declares the framework {place.framework!r}"
    if not targets.installed(framework.package):
        return f"{framework.package} is not installed"
    if not place.device:
        return ""
    try:
        device = device_of(place.array(np.zeros(1, np.float32)))
    except OptionError as e:
        return f"no device {place.device!r}: {e}".splitlines()[0]
    return "" if device == place.device else f"no device {place.device!r}: {place.framework} puts its arrays on {device}"


@cache
def _flushes(place: Place) -> bool:
    least = place.array(np.array([2.0**-126], np.float32))
    return not place.words(least * 0.5).any() or not place.words(place.ops.div(least, 2.0)).any()


def words(a: np.ndarray) -> np.ndarray:
    """The bit patterns of an array, as unsigned integers."""
    host = np.asarray(a, order="C")  # np.ascontiguousarray would add an axis to a 0-d array
    return host.view(f"u{host.itemsize}")
