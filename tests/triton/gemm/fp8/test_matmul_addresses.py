"""Prepared FP8 products read the memory of each call's own tensors, never that of the call that they were prepared for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import breccia
from breccia.options import ProductOptions

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fp8_stand_in import ADDRESSES, MAPS, StandIn, installed  # noqa: E402

from breccia_triton.gemm.fp8 import matmul as fp8_matmul  # noqa: E402
from breccia_triton.gemm.fp8 import plans as fp8_plans  # noqa: E402

ROW, TENSOR, MX = breccia.Float8RowScaling(), breccia.Float8CurrentScaling(), breccia.MXFP8BlockScaling()
BLOCK, TILES = breccia.Float8BlockScaling(), breccia.Float8BlockScaling(block_m=128)
SHORT = breccia.Float8BlockScaling(block_k=32)


@pytest.fixture(params=[False, True], ids=["moved maps", "new maps"])
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield installed(monkeypatch, request.param)
    fp8_matmul.forget()


def operand(shape: tuple[int, ...], recipe: Any, seed: int) -> Any:
    """Numbers whose sizes differ from row to row, from column to column and from seed to seed."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape)) * 2.0**seed
    return breccia.cast(torch.from_numpy(x.astype(np.float32)), recipe)


def down(st: Any) -> Any:
    """The tensor with codes whose columns are adjacent."""
    return breccia.from_buffer(st.data.mT.contiguous().mT, st.scale, st.recipe, st.layout)


def at_8_bytes(st: Any) -> Any:
    """The tensor with codes at an address that 16 does not divide."""
    room = torch.empty(st.data.numel() + 32, dtype=torch.uint8)
    place = room[8 - room.data_ptr() % 16 + 16 :][: st.data.numel()].view(st.data.dtype).view(st.data.shape)
    place.copy_(st.data)
    assert place.data_ptr() % 16 == 8
    return breccia.from_buffer(place, st.scale, st.recipe, st.layout)


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of operands that differ by a seed. copied: the slots at which the kernel reads copies."""

    operands: Callable[[int], tuple[Any, Any]]
    copied: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    bias: Callable[[int, int], Any] | None = None
    offsets: Callable[[int], Any] | None = None
    out: Callable[[tuple[int, ...]], Any] | None = None
    copiers: bool = False

    def run(self, seed: int) -> tuple[Any, list[Any]]:
        """(The product, all tensors that it was made of)."""
        a, b = self.operands(seed)
        shape = (*(() if self.offsets else a.shape[:-2]), a.shape[-2], b.shape[-1])
        out = self.out(shape) if self.out else None
        if self.offsets:
            ends = self.offsets(seed)
            options = ProductOptions(self.dtype, None, out)
            return fp8_matmul.grouped_matmul(a, b, ends, options), [a, b, ends, out]
        bias = self.bias(b.shape[-1], seed) if self.bias else None
        return fp8_matmul.matmul(a, b, ProductOptions(self.dtype, bias, out)), [a, b, bias, out]


def pair(left: Any, right: Any, k: int = 512, batch: tuple[int, ...] = ()) -> Callable[[int], tuple[Any, Any]]:
    return lambda seed: (operand((*batch, 300, k), left, seed), operand((264, k), right, seed + 20).mT)


def groups(left: Any, right: Any, storage: str = "plain") -> Callable[[int], tuple[Any, Any]]:
    def made(seed: int) -> tuple[Any, Any]:
        a = operand((53, 640), left, seed)
        if storage != "plain":
            a = breccia.cast(breccia.dequantize(a), left, storage=storage)
        return a, operand((2, 264, 640), right, seed + 20).mT

    return made


def bias(n: int, seed: int) -> Any:
    return torch.arange(n, dtype=torch.float32) + seed


def ends(seed: int) -> Any:
    return torch.tensor([5 + seed, 53 - seed], dtype=torch.int32)


def zeros(shape: tuple[int, ...]) -> Any:
    return torch.zeros(shape, dtype=torch.bfloat16)


CASES = {
    "rows": Case(pair(ROW, ROW), bias=bias),
    "fp32": Case(pair(TENSOR, TENSOR), dtype="float32"),
    "blocks": Case(pair(BLOCK, TILES), bias=bias, out=zeros),
    "blocks that warps copy": Case(pair(BLOCK, BLOCK, 640), copiers=True),
    "batches": Case(
        lambda seed: (operand((3, 50, 640), BLOCK, seed), operand((3, 72, 640), TILES, seed + 20).mT), ("scales of a", "sa")
    ),
    "scales of blocks are copied": Case(pair(BLOCK, BLOCK, 640), ("scales of a", "scales of b", "sa", "sw")),
    "MX": Case(pair(MX, MX), bias=bias, out=zeros),
    "scales of MX at 4 bytes": Case(
        lambda seed: (operand((301, 640), MX, seed)[1:], operand((265, 640), MX, seed + 20)[1:].mT), bias=bias, out=zeros
    ),
    "scales of MX are copied": Case(pair(MX, MX, 272), ("sa", "sw"), bias=bias, out=zeros),
    "scales of blocks of 32 are copied": Case(pair(SHORT, SHORT, 272), ("scales of a", "scales of b", "sa", "sw"), out=zeros),
    "codes of b are copied": Case(
        lambda seed: (operand((300, 512), ROW, seed), down(operand((264, 512), ROW, seed + 20)).mT), ("codes of b",)
    ),
    "codes of a are copied": Case(
        lambda seed: (at_8_bytes(operand((300, 512), ROW, seed)), operand((264, 512), ROW, seed + 20).mT), ("codes of a",)
    ),
    "codes of b are at 8 bytes": Case(
        lambda seed: (operand((300, 512), ROW, seed), at_8_bytes(operand((264, 512), ROW, seed + 20)).mT), ("codes of b",)
    ),
    "the bias is copied": Case(pair(ROW, ROW), ("bias",), bias=lambda n, seed: bias(2 * n, seed)[::2]),
    "the output is copied": Case(
        pair(ROW, ROW), ("output", "out"), out=lambda shape: torch.empty(shape[0], 300, dtype=torch.bfloat16)[:, : shape[1]]
    ),
    "groups": Case(groups(ROW, ROW), offsets=ends),
    "groups of blocks": Case(groups(BLOCK, TILES), ("scales of a", "sa"), offsets=ends),
    "groups of column-major blocks": Case(
        groups(BLOCK, BLOCK, "column_major"), ("scales of a", "scales of b", "sa", "sw"), offsets=ends
    ),
    "offsets are copied": Case(groups(ROW, ROW), ("offsets",), offsets=lambda seed: ends(seed).long()),
}  # fmt: skip
#: What no launch reads.
WRITTEN = ("out", "output")


def launched(stand_in: StandIn, case: Case, seed: int) -> tuple[dict[str, bytes], bool, list[Any]]:
    """(What the kernel reads by slot, whether all of the result is what it wrote, the tensors of the call)."""
    result, tensors = case.run(seed)
    count = len(stand_in.launched)
    read = {name: held for name, held in stand_in.read.items() if name not in WRITTEN}
    return read, bool((result.contiguous().view(torch.uint8) == count).all()), [result, *tensors]


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    """Let warps or TMA copy the scales, as a case says."""
    return lambda case: monkeypatch.setattr(fp8_plans, "copiers", lambda *of: case.copiers)


def spoiled(read: dict[str, bytes]) -> list[Any]:
    """Memory of the sizes that a call had, which takes the place of what the call has freed."""
    return [torch.full((len(held),), 255, dtype=torch.uint8) for held in read.values() for _ in range(4)]


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("name", CASES)
def test_a_repeated_product_reads_what_a_new_one_reads(name: str, stand_in: StandIn, forms: Callable[[Case], None]) -> None:
    case = CASES[name]
    forms(case)
    new: list[dict[str, bytes]] = []
    for seed in range(3):
        fp8_matmul.forget()
        read, whole, _ = launched(stand_in, case, seed)
        assert whole and read
        new.append(read)
    for slot in new[0]:
        assert len({read[slot] for read in new}) == 3, f"{slot} does not tell the calls apart"
    fp8_matmul.forget()
    kept = list[Any]()
    for seed in (0, 1, 2, 0, 2, 1):
        read, whole, tensors = launched(stand_in, case, seed)
        assert whole, "the kernel wrote elsewhere"
        assert [slot for slot in read if read[slot] != new[seed][slot]] == []
        kept += tensors, spoiled(read)
    assert len(fp8_matmul._calls) == 1, "calls have the facts of the first"


@pytest.mark.parametrize("name", CASES)
def test_operands_are_copied_only_where_a_kernel_cannot_read_them(
    name: str, stand_in: StandIn, forms: Callable[[Case], None]
) -> None:
    case = CASES[name]
    forms(case)
    for seed in range(2):
        result, (a, b, other, out) = case.run(seed)
        own = {x.data_ptr() for x in (a.data, b.data, a.scale, b.scale, other, result if out is None else out) if x is not None}
        assert {slot for slot, place in stand_in.places.items() if place not in own} == set(case.copied)


PLANTED = [
    *(("blocks", slot) for slot in (*MAPS, *ADDRESSES) if slot != "offsets"),
    *(("scales of MX are copied", slot) for slot in (*MAPS, *ADDRESSES) if not slot.startswith("scales") and slot != "offsets"),
    *(("scales of blocks of 32 are copied", slot) for slot in ("scales of a", "scales of b")),
    *((name, "offsets") for name in ("groups", "offsets are copied")),
    ("the bias is copied", "bias"),
    ("codes of b are copied", "codes of b"),
]


@pytest.mark.parametrize(("name", "slot"), [(n, s) for n, s in PLANTED if (n, s) != ("blocks", "scales of b")])
def test_an_address_of_an_earlier_call_is_noticed(
    name: str, slot: str, stand_in: StandIn, forms: Callable[[Case], None]
) -> None:
    """The test above can fail: the first call's memory is planted in each slot."""
    case = CASES[name]
    forms(case)
    new, _, tensors = launched(stand_in, case, 1)
    fp8_matmul.forget()
    stand_in.remember()
    first = launched(stand_in, case, 0)
    stand_in.planted = slot
    read, whole, _ = launched(stand_in, case, 1)
    found = [each for each in read if read[each] != new[each]]
    assert (found, whole) == (([], False) if slot in WRITTEN else ([slot], True)), (tensors, first)


def test_operands_that_differ_in_alignment_alone_are_prepared_apart(stand_in: StandIn) -> None:
    """TMA takes addresses that 16 divides: the operand elsewhere is copied, whichever it is."""
    a, w = operand((300, 512), ROW, 0), operand((264, 512), ROW, 1)
    for left, right in ((at_8_bytes(a), w), (a, at_8_bytes(w)), (at_8_bytes(a), at_8_bytes(w)), (a, w)):
        fp8_matmul.matmul(left, right.mT)
        assert all(each[2] % 16 == 0 for each in stand_in.maps)
        assert stand_in.read["codes of a"] == a.data.view(torch.uint8).numpy().tobytes()
        assert stand_in.read["codes of b"] == w.data.view(torch.uint8).numpy().tobytes()
    assert len(fp8_matmul._calls) == 4
