"""A component as the argument of any `from_dlpack`, and what each framework requires of the memory that it shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from breccia.backend import NUMPY, Shape, dtype_name
from breccia.internal import bit_pattern

from .capsules import CODES, CPU, METAL, Opened, opened

#: Alignment, in bytes, that XLA requires of shared memory; NumPy aligns to 16.
ALIGNMENT = 64
#: Kinds of device by DLDeviceType.
DEVICES = {CPU: "cpu", 2: "cuda", 3: "cpu", METAL: "metal", 10: "rocm", 13: "cuda"}


def _any(shape: Shape, strides: Shape) -> bool:
    return True


def forward(shape: Shape, strides: Shape) -> bool:
    """Has no axis a negative stride?"""
    return not strides or min(strides) >= 0


def _compact(shape: Shape, strides: Shape) -> bool:
    """Are the items contiguous in memory, in any order of axes?"""
    expected = 1
    for step, length in sorted((step, length) for step, length in zip(strides, shape, strict=True) if length > 1):
        if step != expected:
            return False
        expected *= length
    return True


@dataclass(frozen=True)
class Consumer:
    """A framework's requirements on shared memory; a component that does not meet them is copied first.

    module: of its `from_dlpack`; by default the framework's own. writes: are its arrays mutable? aligned: required alignment
    in bytes; JAX copies unaligned memory. metal: can it read Metal memory?
    """

    strides: Callable[[Shape, Shape], bool] = _compact
    writes: bool = True
    aligned: int = 1
    metal: bool = False
    module: str = ""


#: Negative strides abort the process in torch 2.13. JAX 0.10 accepts permutations of C order.
CONSUMERS = {
    "numpy": Consumer(_any, writes=False),
    "torch": Consumer(forward),
    "jax": Consumer(_compact, writes=False, aligned=ALIGNMENT, module="jax.numpy"),
    "mlx": Consumer(forward, writes=False, metal=True),
}
#: The remedy for arrays without memory to share.
_VALUES = "Pass arrays with values in memory: outside jit, vmap and compile, on a real device, detached from gradients."


class Refused(BufferError):
    """Memory cannot be shared. A `remedy` means that a copy cannot be shared either."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.remedy = remedy


class Part:
    """An array as the argument of any `from_dlpack`; `renamed` maps its dtype's name to the exported one.

    dtype: the name of the dtype whose bits the array holds, if it is another than the array's: JAX holds numbers as integers.
    """

    __slots__ = ("_consumer", "_renamed", "address", "array", "dtype", "refused")

    def __init__(self, array: Any, renamed: Callable[[str], str], consumer: Consumer, dtype: str | None = None) -> None:
        self.dtype = dtype
        self.array = NUMPY.to_numpy(array) if _is_numpy(array) and not _exchangeable(array) else array
        self._renamed, self._consumer = renamed, consumer
        #: The address at the last export.
        self.address: int | None = None
        #: Why the export failed; consumers may raise an error of their own.
        self.refused: Refused | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        try:
            return self.array.__dlpack_device__()
        except Exception as e:  # tracers lack the attribute; other libraries raise errors of any type
            raise self._no(said_by(e), _VALUES) from e

    def __dlpack__(self, **options: Any) -> Any:
        """A capsule, by those options of the array API standard that the array's own method supports."""
        capsule = self._exported(options)
        try:
            tensor = opened(capsule)
        except (BufferError, ValueError) as e:
            raise self._no(said_by(e), _VALUES) from e
        if 0 not in tensor.shape:
            self._check(tensor)
        self.address = tensor.data + tensor.byte_offset
        if tensor.dtype is not None and (wanted := self._renamed(self.dtype or tensor.dtype)) in CODES:
            tensor.declare(CODES[wanted][0])
        return capsule

    def _exported(self, options: dict[str, Any]) -> Any:
        """The array's own capsule. If it rejects the options, those that are None are left out, and max_version."""
        try:
            try:
                return self.array.__dlpack__(**options)
            except TypeError:
                asked = {name: value for name, value in options.items() if value is not None and name != "max_version"}
                return self.array.__dlpack__(**asked)
        except Exception as e:
            raise self._no(said_by(e), "" if _is_numpy(self.array) else _VALUES) from e

    def _check(self, tensor: Opened) -> None:
        if not tensor.data:
            raise self._no("it has no values in memory", _VALUES)
        if tensor.device_type == METAL and not self._consumer.metal:
            raise self._no("it is in Metal memory")
        if tensor.read_only and self._consumer.writes:
            raise self._no("it is read-only, and shared memory would be writable")
        if tensor.strides and not self._consumer.strides(tensor.shape, tensor.strides):
            raise self._no(f"its strides are not supported (strides {tensor.strides}, shape {tensor.shape})")

    def _no(self, why: str, remedy: str = "") -> Refused:
        self.refused = Refused(why, remedy)
        return self.refused

    def __repr__(self) -> str:
        kind, number = self.__dlpack_device__()
        name = bit_pattern(self.dtype or dtype_name(self.array))
        return f"<{name} {tuple(self.array.shape)} on {DEVICES.get(int(kind), kind)}:{number}>"


def _is_numpy(array: Any) -> bool:
    return isinstance(array, np.ndarray | np.generic)


def _exchangeable(array: Any) -> bool:
    """Can NumPy export it? Not scalars, which have no memory, nor dtypes of ml_dtypes (`isbuiltin` 2)."""
    return isinstance(array, np.ndarray) and array.dtype.isbuiltin != 2


def said_by(e: Exception) -> str:
    """The first line of another library's error, to end a sentence with."""
    return f"{type(e).__name__}: {str(e).partition(chr(10))[0].rstrip('.')}"
