"""DLPack capsules: the C structure in them, and the shortest way of host memory from one library to another.

`HostRoute` hands over arrays in host memory in a few calls of compiled functions. It only does what needs no question to the
libraries and refuses everything else, without a reason: `breccia_bridges.dlpack` then takes the public functions of both, and
says what is wrong if they refuse too. The structure: https://dmlc.github.io/dlpack/latest/c_api.html.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from breccia.backend import Array, Shape, framework_of, targets

#: DLTensor: data, device type and id, ndim, dtype (code, bits, lanes), pointers to shape and strides, byte offset.
_TENSOR = "QiiiBBHQQQ"
#: Where its dtype's code is.
_CODE_AT = 20
#: The first fields of DLManagedTensorVersioned, before its tensor: major, minor, context, deleter, flags. The older
#: DLManagedTensor begins with the tensor.
_MANAGED = "IIQQQ"
_MANAGED_BYTES = struct.calcsize(f"={_MANAGED}")
_read_plain, _read_versioned = struct.Struct(f"={_TENSOR}").unpack, struct.Struct(f"={_MANAGED}{_TENSOR}").unpack
_PlainBytes, _VersionedBytes = (ctypes.c_char * struct.calcsize(f"={fields}") for fields in (_TENSOR, _MANAGED + _TENSOR))
_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"
_READ_ONLY = 1

_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

#: (DLDataTypeCode, bits) by the common dtype name.
CODES = {
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "uint8": (1, 8),
    "uint16": (1, 16),
    "uint32": (1, 32),
    "float16": (2, 16),
    "float32": (2, 32),
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}
_NAMES = {code: name for name, code in CODES.items()}
_UNSIGNED = 1
CPU, METAL = 1, 8
#: The oldest version with a read-only flag.
VERSION = (1, 0)


class Opened(NamedTuple):
    """The DLTensor of an unconsumed capsule. code_at: the address of its DLDataTypeCode. read_only: is its memory?"""

    code_at: int
    read_only: bool
    data: int
    device_type: int
    code: int
    bits: int
    lanes: int
    shape: Shape
    strides: Shape
    byte_offset: int

    @property
    def dtype(self) -> str | None:
        """The common name of the dtype; None if it has none."""
        return _NAMES.get((self.code, self.bits)) if self.lanes == 1 else None

    def declare(self, code: int) -> None:
        """Set the DLDataTypeCode, in the capsule."""
        ctypes.c_uint8.from_address(self.code_at).value = code


def opened(capsule: Any) -> Opened:
    """The DLTensor of `capsule`. Raises BufferError for other and consumed capsules, ValueError for other objects."""
    name = _capsule_name(capsule)
    at, read_only = _capsule_pointer(capsule, name), False
    if name != _PLAIN:
        major, _, _, _, flags, *_ = _read_versioned(_VersionedBytes.from_address(at))
        if name != _VERSIONED or major != 1:
            raise BufferError(f"a capsule {name!r} is not a DLPack tensor of version 1 or earlier")
        at, read_only = at + _MANAGED_BYTES, bool(flags & _READ_ONLY)
    data, device, _, ndim, code, bits, lanes, shape, strides, offset = _read_plain(_PlainBytes.from_address(at))
    lengths, steps = _integers(shape, ndim), _integers(strides, ndim)
    return Opened(at + _CODE_AT, read_only, data, device, code, bits, lanes, lengths, steps, offset)


def _integers(at: int, count: int) -> Shape:
    """The 64-bit integers at an address; none at NULL."""
    return struct.unpack(f"={count}q", _int64s(count).from_address(at).raw) if at and count else ()


@cache
def _int64s(count: int) -> type[ctypes.Array[ctypes.c_char]]:
    """The bytes of that many 64-bit integers."""
    return ctypes.c_char * (8 * count)


# ------------------------------------------------------------------------------------------------ the shortest way


#: Arrays for data, scale, zero_point and global_scale; None for absent components.
Arrays = tuple[Any, ...]
#: For each the name of the dtype whose bits it holds, if not its own.
Dtypes = tuple[str | None, ...]


#: In place of a code: that of the array's own dtype.
_SAME = -1


class Codes(dict[tuple[str | None, int, int, int], int]):
    """The DLDataTypeCode to export: of each (dtype whose bits an array holds, if not its own; its own code, bits and lanes).

    renamed: maps the name of a dtype to that of the exported one. A key that does not fit raises KeyError.
    changes: the codes of arrays met before, by (type, dtype, name of the dtype whose bits they hold); _SAME for their own code.
    """

    def __init__(self, renamed: Callable[[str], str]) -> None:
        super().__init__()
        self.renamed = renamed
        self.changes: dict[tuple[type, Any, str | None], int] = {}

    def __missing__(self, key: tuple[str | None, int, int, int]) -> int:
        dtype, code, bits, lanes = key
        own = _NAMES[code, bits]
        if lanes != 1 or (dtype is not None and own != f"uint{CODES[dtype][1]}"):
            raise KeyError(key)
        exported, size = CODES[self.renamed(dtype or own)]
        if size != bits:
            raise KeyError(key)
        self[key] = exported
        return exported


class Export(NamedTuple):
    """How arrays of a type are exported. call: makes a capsule of an array. versioned: of which kind?

    contiguous: whether an array is in C order; False where that is not known. checked: may a capsule go unread to a
    library that checks strides itself? `call` then only exports host memory, and nothing without memory.
    """

    call: Callable[[Any], Any]
    versioned: bool
    contiguous: Callable[[Any], bool]
    checked: bool


class HostRoute:
    """The shortest way to a library from the host memory of others.

    framework: the library's name; its own arrays do not travel. take: makes an array of a capsule. flagged: has a capsule to
    say whether memory is read-only? writes: are the library's arrays mutable? strides: can it read memory of that shape and
    these strides? None if `take` refuses the strides that it cannot read.
    """

    __slots__ = ("_exports", "_flagged", "_framework", "_known", "_strides", "_take", "_writes")

    def __init__(
        self,
        framework: str,
        take: Callable[[Any], Array],
        flagged: bool,
        writes: bool,
        strides: Callable[[Shape, Shape], bool] | None,
    ) -> None:
        self._framework, self._take, self._flagged, self._writes, self._strides = framework, take, flagged, writes, strides
        self._exports: dict[type, Export] = {}
        #: Results of `strides`, by the bytes of its arguments.
        self._known: dict[bytes, bool] = {}

    def taken(self, arrays: Arrays, dtypes: Dtypes, codes: Sequence[Codes]) -> Arrays | None:
        """The arrays in the library, their bits as the dtypes of `codes`; None where the longer way has to be taken."""
        try:
            return tuple(map(self._part, arrays, dtypes, codes))
        except Exception:  # both libraries raise errors of any type
            return None

    def _part(self, array: Any, dtype: str | None, codes: Codes) -> Array | None:
        """Raises an Exception of any type where the array needs a closer look."""
        if array is None:
            return None
        kind = type(array)
        try:
            export, versioned, contiguous, checked = self._exports[kind]
        except KeyError:
            export, versioned, contiguous, checked = self._exports[kind] = self._export_of(array)
        capsule, facts = export(array), None
        if checked:
            facts = kind, array.dtype, dtype
            change = codes.changes.get(facts)
            if change is not None:
                if change != _SAME:
                    _PlainBytes.from_address(_capsule_pointer(capsule, _PLAIN))[_CODE_AT] = change
                return self._take(capsule)  # which checks the rest
        if versioned:
            raw = _VersionedBytes.from_address(_capsule_pointer(capsule, _VERSIONED))
            major, _, _, _, flags, data, device, _, ndim, code, bits, lanes, shape, strides, _ = _read_versioned(raw)
            if major != 1 or (flags & _READ_ONLY and self._writes):
                raise BufferError
        else:
            raw = _PlainBytes.from_address(_capsule_pointer(capsule, _PLAIN))
            data, device, _, ndim, code, bits, lanes, shape, strides, _ = _read_plain(raw)
        if not data or device != CPU or not (contiguous(array) or self._fits(ndim, shape, strides)):
            raise BufferError
        exported = codes[dtype, code, bits, lanes]
        if exported != code:
            raw[_CODE_AT + (_MANAGED_BYTES if versioned else 0)] = exported
        if facts is not None:
            codes.changes[facts] = _SAME if exported == code else exported
        return self._take(capsule)

    def _fits(self, ndim: int, shape: int, strides: int) -> bool:
        """`strides` of the numbers at these addresses."""
        if self._strides is None or not ndim or not strides:
            return True
        read = _int64s(ndim).from_address
        key = read(shape).raw + read(strides).raw
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            numbers = struct.unpack(f"={2 * ndim}q", key)
            known = self._known[key] = 0 in numbers[:ndim] or self._strides(numbers[:ndim], numbers[ndim:])
        return known

    def _export_of(self, array: Any) -> Export:
        """How arrays of that type are exported. Raises an Exception of any type if it is unknown."""
        framework = framework_of(array).name
        if framework == self._framework:
            raise BufferError
        export = _EXPORTS[framework](type(array), self._flagged)
        return export._replace(checked=export.checked and self._strides is None)


_REMEMBERED = 1024


def _of_numpy(kind: type[np.ndarray], flagged: bool) -> Export:
    """Without the flag NumPy refuses read-only memory."""
    versioned = partial(kind.__dlpack__, max_version=VERSION)
    return Export(versioned if flagged else kind.__dlpack__, flagged, _in_c_order, True)


def _in_c_order(array: np.ndarray) -> bool:
    return array.flags.c_contiguous


def _of_mlx(kind: Any, flagged: bool) -> Export:
    """Builds with a GPU backend allocate all arrays in memory of the GPU, or in memory that it shares."""
    host = not any(targets.load(f"mlx.core:{gpu}.is_available")() for gpu in ("metal", "cuda"))
    return Export(kind.__dlpack__, False, _unknown, host)


def _unknown(array: Any) -> bool:
    return False


def _of_torch(kind: type, flagged: bool) -> Export:
    """The compiled part of `Tensor.__dlpack__`, which refuses less than the Python before it.

    It refuses sparse tensors. `Codes` refuses complex ones. `HostRoute` reads every capsule that has a flag, and refuses those
    on other devices and without memory.
    """
    if kind not in (targets.load("torch:Tensor"), targets.load("torch:nn.Parameter")):
        raise BufferError
    give = targets.load("torch._C:_to_dlpack_versioned" if flagged else "torch.utils.dlpack:to_dlpack")

    def export(tensor: Any) -> Any:
        if tensor.requires_grad:
            raise BufferError
        return give(tensor)

    def export_from_host(tensor: Any) -> Any:
        if not tensor.is_cpu or not tensor.data_ptr():
            raise BufferError
        return export(tensor)

    return Export(export if flagged else export_from_host, flagged, kind.is_contiguous, not flagged)


def _of_jax(kind: type, flagged: bool) -> Export:
    """The compiled part of `Array.__dlpack__`. Of an array on several devices it would export one shard."""
    if kind is not targets.load("jaxlib._jax:ArrayImpl"):
        raise BufferError
    give = targets.load("jaxlib._jax:buffer_to_dlpack_managed_tensor")
    single = targets.load("jax.sharding:SingleDeviceSharding")

    def export(array: Any) -> Any:
        if type(array.sharding) is not single:
            raise BufferError
        return give(array)

    return Export(export, False, _unknown, False)


#: Makes the Export of a type of arrays, by the name of its framework. flagged: a capsule with a read-only flag, if it has one.
_EXPORTS: dict[str, Callable[[type, bool], Export]] = {
    "numpy": _of_numpy,
    "torch": _of_torch,
    "jax": _of_jax,
    "mlx": _of_mlx,
}


class _Holder:
    """A capsule as the argument of NumPy's `from_dlpack`."""

    __slots__ = ("_capsule",)

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0


def _numpy_of(capsule: Any) -> np.ndarray:
    return np.from_dlpack(_Holder(capsule))


class Take(NamedTuple):
    """How a library makes arrays. call: makes an array of a capsule of host memory.

    flagged: has the capsule to say whether memory is read-only? strict: does `call` refuse strides that it cannot read?
    """

    call: Callable[[Any], Array]
    flagged: bool
    strict: bool


def host_take(framework: str) -> Take | None:
    """How a library makes arrays of host memory; None if that is not known.

    NumPy's arrays are read-only where the capsule does not say it, torch's never are, and JAX reads no capsule that says it.
    """
    if framework == "numpy":
        return Take(_numpy_of, True, False)
    if framework == "torch":
        return Take(targets.load("torch.utils.dlpack:from_dlpack"), False, False)
    if framework == "mlx":
        return Take(targets.load("mlx.core:from_dlpack"), True, False)
    return _compiled_part_of_jax() if framework == "jax" else None


def _compiled_part_of_jax() -> Take | None:
    """The compiled part of `jax.numpy.from_dlpack` for host memory, without the Python around it, which takes longer.

    None where a version of JAX has that part elsewhere, or where it does anything else.
    """
    try:
        take = targets.load("jaxlib._jax:dlpack_managed_tensor_to_buffer")
        device, probe = targets.load("jax:local_devices")(backend="cpu")[0], np.arange(3, dtype=np.float32)
        array, expected = take(probe.__dlpack__(), device, None, None), targets.load("jax.numpy:from_dlpack")(probe)
        same = array.dtype == expected.dtype and array.sharding == expected.sharding and array.committed == expected.committed
        if same and np.array_equal(array, probe):

            def call(capsule: Any) -> Array:
                return take(capsule, device, None, None)

            return Take(call, False, True)
    except Exception:  # a private function: any version may have it otherwise
        pass
    return None
