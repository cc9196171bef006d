"""A CUDA driver for the FP8 products of CPU tensors: no kernel runs, and what one would read is recorded at its launch."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from breccia_triton.gemm.fp8 import matmul as fp8_matmul
from breccia_triton.gemm.fp8 import plans as fp8_plans
from breccia_triton.gemm.fp8.matmul import Args
from breccia_triton.launch import driver
from breccia_triton.launch.driver import TensorMap

#: The tensor maps of a launch, in the order of the kernel's arguments, and its addresses (`Args`). Between the first two is the
#: map of the rows where a ends.
MAPS = ("codes of a", "codes of b", "scales of a", "scales of b", "output")
ADDRESSES = ("sa", "sw", "bias", "offsets", "out")


class StandIn:
    """The driver's library, which records what launches are passed.

    opaque: two words of a tensor map change with the address, so that maps have to be made anew for each call.

    described: how many maps were made. maps: those of the last launch, as it found them: [dtype, axes, address, lengths, bytes
    from one to the next, box, ...]. end: that of the rows where a ends, or empty. launched: (blocks, the arguments) of each.
    places, read: each address that the last launch was passed, and the memory there. variants: the kernels that were loaded.

    planted: one of `MAPS` or `ADDRESSES`. Launches after the first find the memory of the first one there.
    """

    def __init__(self, opaque: bool = False) -> None:
        self.opaque, self.planted = opaque, ""
        self.described = 0
        self.maps: list[list[Any]] = []
        self.end: list[Any] = []
        self.launched: list[tuple[int, Any]] = []
        self.variants: list[fp8_plans.GemmVariant] = []
        self.places: dict[str, int] = {}
        self.read: dict[str, bytes] = {}
        self._facts: list[list[Any]] = []
        self._first: dict[str, Any] = {}

    def cuTensorMapEncodeTiled(self, place: Any, dtype: int, rank: int, address: Any, *rest: Any) -> int:
        facts = [dtype, rank, *(list(x) if isinstance(x, ctypes.Array) else x for x in rest)]
        self._facts += [] if facts in self._facts else [facts]
        self.described += 1
        words = TensorMap.from_address(place.value).words
        words[:] = [address.value, self._facts.index(facts) + 1, address.value if self.opaque else 0, *[0] * 13]
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: Any) -> int:
        first, end, *rest = (TensorMap.from_address(arguments[i]) for i in range(1 + len(MAPS)))
        assert not end.words[1] or end.words[0] == first.words[0]
        maps = dict(zip(MAPS, (first, *rest), strict=True))
        found = {name: each for name, each in maps.items() if each.words[1]}
        args = Args.from_buffer_copy(Args.from_address(arguments[1 + len(MAPS)]))
        if self.planted and self._first:
            address = ctypes.addressof(self._first[self.planted])
            if self.planted in found:
                found[self.planted].words[0] = address
            else:
                setattr(args, self.planted, address)
        self.maps = [self._map(each) for each in found.values()]
        self.end = self._map(end) if end.words[1] else []
        self.launched.append((config._obj.grid_x, args))
        places = {name: self._extent(each) for name, each in zip(found, self.maps, strict=True)}
        places |= self._addresses(args, self.variants[function.value - 1])
        self._write(places)
        self.places = {name: address for name, (address, _) in places.items()}
        whole = {name: ctypes.string_at(*place) for name, place in places.items()}
        self.read = whole | {name: _rows(each, whole[name]) for name, each in zip(found, self.maps, strict=True)}
        self._first = self._first or {name: ctypes.create_string_buffer(held, len(held)) for name, held in whole.items()}
        return 0

    def remember(self) -> None:
        """Let the next launch be the first one."""
        self._first = {}

    def _map(self, each: TensorMap) -> list[Any]:
        dtype, rank, *rest = self._facts[each.words[1] - 1]
        return [dtype, rank, each.words[0], *rest]

    @staticmethod
    def _extent(each: list[Any]) -> tuple[int, int]:
        """(The address, the bytes up to the end of the last matrix)."""
        return each[2], each[3][-1] * each[4][-1]

    @staticmethod
    def _addresses(args: Any, variant: fp8_plans.GemmVariant) -> dict[str, tuple[int, int]]:
        """Those of the arguments, each with the bytes up to the last number that its strides reach."""
        last = args.matrices - 1
        widths = {"float32": 4, "float16": 2, "bfloat16": 2, "none": 0}

        def scales(e8m0: bool, rows: int, row: int, matrix: int) -> int:
            return (rows * row + last * matrix) if e8m0 else 4 * (1 + (rows - 1) * row + last * matrix)

        found = {
            "sa": (args.sa, scales(variant.e8m0[0], args.M, args.sa_row, args.sa_matrix)),
            "sw": (args.sw, scales(variant.e8m0[1], args.N, args.sw_row, args.sw_matrix)),
            "bias": (args.bias, args.N * widths[variant.bias]),
            "offsets": (args.offsets, 4 * args.matrices if variant.grouped else 0),
            "out": (args.out, args.M * args.N * (1 if variant.grouped else args.matrices) * widths[variant.out]),
        }
        return {name: place for name, place in found.items() if place[1]}

    def _write(self, places: dict[str, tuple[int, int]]) -> None:
        """Each byte of the output is the number of the launch: a half through the arguments, the rest through a map if any."""
        address, count = places["out"]
        other, half = places.get("output", places["out"])[0], count // 2
        ctypes.memset(address, len(self.launched), half)
        ctypes.memset(other + half, len(self.launched), count - half)

    def cuOccupancyMaxActiveClusters(self, found: Any, function: Any, config: Any) -> int:
        found._obj.value = 66
        return 0


def _rows(each: list[Any], held: bytes) -> bytes:
    """The memory of a map without what lies between its rows."""
    widths = {number: {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}[name] for name, number in driver.DTYPES.items()}
    length, step = each[3][0] * widths[each[0]], each[4][0]
    return b"".join(held[at : at + length] for at in range(0, len(held), step))


def installed(monkeypatch: pytest.MonkeyPatch, opaque: bool = False) -> StandIn:
    """The driver in place of the machine's until the end of the test. No call is prepared yet."""
    library = StandIn(opaque)
    fake = driver.Driver(library)
    assert (fake.address_word is None) is opaque
    library.described = 0  # without those that show how a map holds its address

    def loaded(variant: fp8_plans.GemmVariant, device: Any) -> Any:
        library.variants.append(variant)
        return driver.Function(fake, "fp8_matmul", ctypes.c_void_p(len(library.variants)), variant.shared)

    monkeypatch.setattr(fp8_matmul, "driver", lambda: fake)
    monkeypatch.setattr(fp8_matmul, "loaded", loaded)
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    fp8_matmul.forget()
    return library
