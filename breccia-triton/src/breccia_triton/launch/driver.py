"""The CUDA driver through ctypes: load a cubin, describe tensors to TMA, launch.

A launch is prepared once for its arguments, and costs one foreign call after that. Everything runs in the current context of
the thread, which is the one that torch made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from breccia import BrecciaError, KernelError
from breccia.internal import once, reentrant

from .generated import defined

#: CUtensorMapDataType, by bytes and kind: FP8 codes are bytes to TMA.
DTYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
_ITEMSIZE = {"uint8": 1, "float16": 2, "float32": 4, "bfloat16": 2}
#: CUtensorMapSwizzle, by bytes of a row of the box.
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
#: CUtensorMapL2promotion.
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_CLUSTER, _DEPENDENT = 4, 6  # CUlaunchAttributeID
_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAP_ALIGNMENT = 64
_ALIGNED = 16  # of addresses that a tensor map takes
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class DriverError(BrecciaError, RuntimeError):
    """A call of the CUDA driver failed. name: the driver's name of the error."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class TensorMap(ctypes.Structure):
    """A tensor as TMA knows it: an argument of a kernel (`const __grid_constant__`)."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class MovableMap:
    """A tensor map whose address changes from call to call. map: what kernels are passed. Other arguments: of `tensor_map`.

    The map is opaque. Where `Driver.address_word` has found how it holds the address, that word is changed.
    """

    def __init__(self, driver: Driver, *facts: Any) -> None:
        self.driver, self.encoded, self.map = driver, driver.encoder(*facts), TensorMap()
        self._words = self.map.words
        #: (Index of the word, shift, address, word) of a map that was made.
        self._made: tuple[int, int, int, int] | None = None

    def move(self, address: int) -> None:
        """Describe the tensor at an address. Raises DriverError where the driver refuses it."""
        if self._made is not None and not address % _ALIGNED:
            index, shift, base, word = self._made
            self._words[index] = word + ((address - base) >> shift)
            return
        made = self.encoded(address)
        ctypes.memmove(self._words, made.words, ctypes.sizeof(TensorMap))
        if (place := self.driver.address_word) is not None:
            self._made = *place, address, self._words[place[0]]


class Driver:
    """The driver. library: the loaded shared library, whose functions return 0 or the number of an error."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.launch: Any = library.cuLaunchKernelEx
        #: The context of the last device on which a kernel was loaded.
        self.entered: ctypes.c_void_p | None = None

    def check(self, status: int, what: str) -> None:
        """Raise DriverError for a status other than 0. what: what was asked."""
        if status:
            name = ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(name))
            said = name.value.decode() if name.value else f"error {status}"
            raise DriverError(f"CUDA: {what} failed with {said}.", name=said)

    def enter(self, index: int) -> ctypes.c_void_p:
        """Make a device's context, which torch uses too, the current one of this thread. Returns it."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self.library.cuDeviceGet(ctypes.byref(device), index), f"finding device {index}")
        self.check(self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"using device {index}")
        self.check(self.library.cuCtxSetCurrent(context), f"using device {index}")
        self.entered = context
        return context

    def in_some_context(self, status: int, again: Callable[[], int]) -> int:
        """The status of a call that any device answers alike, or of the next one where the thread had no context.

        The thread has none after it either: which device it works on is up to torch.
        """
        if status != _NO_CONTEXT or self.entered is None:
            return status
        self.library.cuCtxPushCurrent_v2(self.entered)
        try:
            return again()
        finally:
            self.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    @cached_property
    def address_word(self) -> tuple[int, int] | None:
        """(The index of the word of a tensor map that holds the address, by how many bits it is shifted right there).

        None unless maps of one tensor at several addresses differ in one word alone, and there as the addresses do.
        """
        first = 0x7F40_0000_0000
        addresses = first, first + 16, first + 0x3E9_0020, first + (1 << 36), first - (1 << 34)
        facts = "uint8", (2, 64, 256), (16384, 256), (1, 64, 128), 128
        try:
            maps = [list(self.tensor_map(at, *facts).words) for at in addresses]
        except DriverError:
            return None
        changing = [index for index in range(16) if len({words[index] for words in maps}) > 1]
        if len(changing) != 1:
            return None
        (index,) = changing
        for shift in (0, 4):
            steps = ((at - first) >> shift for at in addresses)
            if all(words[index] - maps[0][index] == step for words, step in zip(maps, steps, strict=True)):
                return index, shift
        return None

    def load(self, cubin: bytes, entry: str, shared: int) -> Function:
        """A kernel of a cubin, loaded on the current device. shared: bytes of dynamic shared memory that it uses."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.library.cuModuleLoadData(ctypes.byref(module), cubin), f"loading kernel {entry!r}")
        self.check(
            self.library.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"finding kernel {entry!r}"
        )
        status = self.library.cuFuncSetAttribute(function, _SHARED_BYTES, ctypes.c_int(shared))
        self.check(status, f"reserving {shared} bytes of shared memory for kernel {entry!r}")
        return Function(self, entry, function, shared)

    def tensor_map(
        self,
        address: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int = 0,
        promotion: int = 128,
    ) -> TensorMap:
        """A tensor in global memory of which a kernel copies boxes. Raises DriverError where the driver refuses it.

        dtype: a key of `DTYPES`. shape, strides, box: C order, the last axis adjacent in memory; strides in elements, of all
        axes but the last. swizzle: 0, 32, 64 or 128, bytes of a row of the box. promotion: bytes that a fetch brings to L2.
        The address and all strides in bytes are multiples of 16. Elements of a box beyond the tensor read as 0.
        """
        return self.encoder(dtype, shape, strides, box, swizzle, promotion)(address)

    def encoder(
        self,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int = 0,
        promotion: int = 128,
    ) -> Callable[[int], TensorMap]:
        """`tensor_map` as a function of the address: its other arguments are made once."""
        rank, item = len(shape), _ITEMSIZE[dtype]
        dims = (ctypes.c_uint64 * rank)(*reversed(shape))
        pitches = (ctypes.c_uint64 * max(1, rank - 1))(*[stride * item for stride in reversed(strides)])
        boxes, ones = (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*[1] * rank)
        room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + _MAP_ALIGNMENT)
        place = (ctypes.addressof(room) + _MAP_ALIGNMENT - 1) & -_MAP_ALIGNMENT
        made, start = TensorMap.from_buffer(room, place - ctypes.addressof(room)), ctypes.c_void_p(place)
        rest = dims, pitches, boxes, ones, 0, _SWIZZLES[swizzle], _PROMOTIONS[promotion], 0

        def encoded(address: int) -> TensorMap:
            call = partial(self.library.cuTensorMapEncodeTiled, start, DTYPES[dtype], rank, ctypes.c_void_p(address), *rest)
            if status := self.in_some_context(call(), call):
                what = f"a {dtype} tensor of shape {tuple(shape)}, strides {tuple(strides)}, box {tuple(box)}"
                self.check(status, f"describing {what}")
            return TensorMap.from_buffer_copy(made)

        return encoded


class Function:
    """A kernel that is loaded on a device. context: the device's; set, calls also work in threads that had none yet."""

    context: ctypes.c_void_p | None = None

    def __init__(self, driver: Driver, entry: str, handle: ctypes.c_void_p, shared: int) -> None:
        self.driver, self.entry, self.handle, self.shared = driver, entry, handle, shared

    def prepare(
        self,
        grid: Sequence[int],
        threads: int,
        values: Sequence[Any],
        slots: Sequence[Slot] = (),
        cluster: int = 1,
        dependent: bool = False,
    ) -> CudaLaunch:
        """A launch of this kernel, which can be repeated.

        grid: blocks along x, y, z. threads: of a block. values: the arguments, as ctypes objects (c_void_p for an address,
        c_int, c_float, a structure) or tensor maps. slots: those of them that each call sets. cluster: neighbouring blocks
        along x that share memory. dependent: it may start before the kernel ahead of it has ended, and waits for that itself
        (griddepcontrol).
        """
        return CudaLaunch(self, grid, threads, values, slots, cluster, dependent)

    def in_context(self, status: int, again: Callable[[], int]) -> int:
        """The status of a call of the driver, or of the next one in the kernel's context where the thread had none."""
        if status != _NO_CONTEXT or self.context is None:
            return status
        self.driver.library.cuCtxSetCurrent(self.context)
        return again()

    def clusters(self, threads: int, cluster: int) -> int:
        """How many clusters of blocks the device runs at a time."""
        count = ctypes.c_int()
        config = _config(self, (cluster, 1, 1), threads, cluster, False)
        ask = partial(self.driver.library.cuOccupancyMaxActiveClusters, ctypes.byref(count), self.handle, ctypes.byref(config))
        self.driver.check(self.in_context(ask(), ask), f"counting clusters of {cluster} blocks of kernel {self.entry!r}")
        return count.value


#: What takes a number of each call: a ctypes number, a (structure, name of its field), a tensor map whose address it is, or a
#: list of them that take the same number.
Slot = Any


def writing(slots: Sequence[Slot], body: Sequence[str], **names: Any) -> Callable[..., None]:
    """A function of a stream and a number for each slot: it writes the numbers into the slots, then runs the lines of `body`.

    One thread runs it at a time. Raises KernelError where it is called in the middle of itself.
    """
    lines: list[str] = []
    for n, slot in enumerate(slots):
        for i, each in enumerate(slot if isinstance(slot, list) else [slot]):
            owner, field = each if isinstance(each, tuple) else (each, "value")
            moved = isinstance(each, MovableMap)
            names[f"_{n}_{i}"] = owner.move if moved else owner
            lines.append(f"_{n}_{i}(x{n})" if moved else f"_{n}_{i}.{field} = x{n}")
    inside = "".join(f"\n            {line}" for line in (*lines, *body))
    numbers = "".join(f", x{n}" for n in range(len(slots)))
    text = f"""def run(stream{numbers}):
    nonlocal busy
    with turn:
        if busy:
            raise KernelError(BUSY)
        busy = True
        try:{inside}
        finally:
            busy = False
"""
    return defined(text, {**names, "turn": reentrant(), "busy": False, "KernelError": KernelError, "BUSY": _BUSY})


_BUSY = (
    "a signal handler or a finalizer called for a product while the same one was being launched in this thread; "
    "call it after the handler has returned."
)


class CudaLaunch:
    """A kernel with its arguments. `run(stream, *numbers)` enqueues it with a number in each slot; the others stay the same.

    Raises DriverError and KernelError.
    """

    def __init__(
        self,
        function: Function,
        grid: Sequence[int],
        threads: int,
        values: Sequence[Any],
        slots: Sequence[Slot],
        cluster: int,
        dependent: bool,
    ) -> None:
        self.function = function
        self.values = tuple(value.map if isinstance(value, MovableMap) else value for value in values)
        self.config = _config(function, grid, threads, cluster, dependent)
        # The driver reads the values at each launch.
        arguments = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in self.values])
        launch, config, handle = function.driver.launch, ctypes.byref(self.config), function.handle
        self._again = partial(launch, config, handle, arguments, None)
        body = "config.stream = stream or None", "if status := launch(reference, handle, arguments, None):", "    fail(status)"
        names = {"config": self.config, "reference": config, "handle": handle, "arguments": arguments}
        self.run = writing(slots, body, launch=launch, fail=self._failed, **names)

    def _failed(self, status: int) -> None:
        """Launch again in the kernel's context where the thread had none. Raises DriverError."""
        self.function.driver.check(self.function.in_context(status, self._again), f"launching kernel {self.function.entry!r}")


def _config(function: Function, grid: Sequence[int], threads: int, cluster: int, dependent: bool) -> _LaunchConfig:
    attributes, count = (_Attribute * 2)(), 0
    if cluster > 1:
        attributes[0].id, count = _CLUSTER, 1
        attributes[0].value[0], attributes[0].value[1], attributes[0].value[2] = cluster, 1, 1
    if dependent:
        attributes[count].id, attributes[count].value[0], count = _DEPENDENT, 1, count + 1
    return _LaunchConfig(*grid, threads, 1, 1, function.shared, None, attributes, count)


@once
def driver() -> Driver:
    """The driver of this machine. Raises DriverError where there is none."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return Driver(ctypes.CDLL(name))
        except OSError:
            continue
    raise DriverError("CUDA C++ kernels need the NVIDIA driver (libcuda.so.1), which was not found.", name="missing")
