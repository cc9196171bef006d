"""Products whose operands are decoded in registers, prepared from facts that are the same in every framework."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from breccia import Format
from breccia.backend import Block, Shape

from ...facts import GRID, INTERPRETED, LARGE, NUMBERS, Argument, Codes, Hardware
from ...geometry import Source, Tile, divided_up, power_of_two
from ...launch.triton_launch import Launch
from ...specs import Unsupported, needed
from ...tuning.choices import Choice, Choose, block_text, choices_of, key_of
from .kernels import GemmTiling, MainloopOperand, fused_kernel, sum_kernel
from .plans import PROMOTED, SHORTEST, STEP, MultiplyStrategy, deepest, group_of, way_of, way_of_fp8

#: Columns of K of a step in FP32: few, as each thread multiplies them one after the other.
_PLAIN = 16
#: Programs that fill a device, and the least number of steps of a part of K.
_PROGRAMS, _STEPS = 128, 4
#: Elements of a program that adds up parts of K, and its warps.
_BLOCK, _WARPS = 1024, 4


@dataclass(frozen=True)
class OperandFacts:
    """An operand as a matrix of lines (rows of a, columns of b), each of K numbers, in memory in one of two orders.

    codes: None for an array of a dtype. k_last: whether K is last in memory. aligned: 16 divides the address of numbers.
    """

    matrices: int
    lines: int
    depth: int
    k_last: bool
    dtype: str = ""
    codes: Codes | None = None
    block: Block | None = None
    format: Format | None = None
    aligned: bool = True

    @property
    def group(self) -> int:
        """Columns of K that share a scale; 0 for all."""
        return 0 if self.block is None else group_of(self.block)

    def arguments(self, name: str) -> dict[str, Argument]:
        """The types of its components, by the names in the kernel."""
        if self.codes is None:
            return {name: Argument(NUMBERS[self.dtype], self.aligned)}
        return {name + argument[1:]: kind for argument, kind in self.codes.arguments.items()}

    def source(self, lines: int, deep: int) -> Source | None:
        """How tiles are read."""
        if self.codes is None:
            return None
        tall, wide = (lines, deep) if self.k_last else (deep, lines)
        return self.codes.source(Tile(1 if self.codes.axis == -1 else 0, 1, tall, tall, 1, wide, wide))


def scaled(codes: Codes, fmt: Format) -> OperandFacts:
    """A ScaledTensor as an operand. Raises Unsupported."""
    matrices, *sides = codes.flat_shape
    k_last = codes.axis == -1
    lines, depth = sides if k_last else sides[::-1]
    if deepest(group_of(codes.block)) < STEP:
        raise Unsupported(f"blocks of {group_of(codes.block)} columns; steps of a product take multiples of {STEP}")
    return OperandFacts(matrices, lines, depth, k_last, codes=codes, block=codes.block, format=fmt)


class Product:
    """A product `a @ b + bias` for operands, dtypes and hardware: its kernels. Raises Unsupported.

    way: what is multiplied. tiling: how it is cut. launch: the product. sum: that of the parts of K, None where there is one.
    parts: the shape of what the product writes then.
    """

    def __init__(
        self,
        a: OperandFacts,
        b: OperandFacts,
        bias: str | None,
        out_dtype: str,
        hardware: Hardware,
        choose: Choose | None = None,
    ) -> None:
        """bias: its dtype. choose: returns choices; by default those of the device."""
        if 1 < a.matrices != b.matrices > 1:
            raise Unsupported("leading axes broadcast in both directions")
        self.way = self._way(a, b, hardware)
        if self.way.dot != "float32" and a.depth < SHORTEST:
            raise Unsupported(f"K = {a.depth} has too few terms for sums in tensor cores")
        self.matrices, rows, columns = max(a.matrices, b.matrices), a.lines, b.lines
        choice = (choose or choices_of(hardware.name))(self._key(a, b))
        self.tiling = tiling = self._tiling(a, b, hardware.ptx, choice)
        tiles = divided_up(rows, tiling.rows) * divided_up(columns, tiling.lines) * self.matrices
        warps = choice.warps or (8 if tiling.rows * tiling.lines >= 16384 else 4)
        added = {} if bias is None else {"bias": Argument(NUMBERS[bias])}
        integers = {"rows": Argument("i32"), "columns": Argument("i32", columns % 16 == 0)}
        one = tiling.split == 1
        out = {"out": Argument(NUMBERS[out_dtype if one else "float32"], True)}
        arguments = a.arguments("a") | b.arguments("b") | (added if one else {}) | out | integers
        constants = {"P": tiling, "A": self._operand(a, False), "B": self._operand(b, True)}
        stages = choice.stages or (4 if tiling.rows < 64 else 3)
        self.launch = Launch(fused_kernel, (tiles * tiling.split, 1, 1), arguments, constants, warps, (rows, columns), stages)
        self.sum: Launch | None = None
        self.parts: Shape = ()
        if not one:
            count = rows * columns
            self.parts = (self.matrices, tiling.split, rows, columns)
            arguments = {"parts": Argument("*fp32", True)} | added | {"out": Argument(NUMBERS[out_dtype], True)}
            arguments |= {"count": Argument("i32", count % 16 == 0), "columns": Argument("i32", columns % 16 == 0)}
            constants = {"SPLIT": tiling.split, "BLOCK": _BLOCK, "PTX": hardware.ptx}
            programs = (divided_up(count, _BLOCK), self.matrices, 1)
            self.sum = Launch(sum_kernel, programs, arguments, constants, _WARPS, (count, columns))

    @staticmethod
    def _way(a: OperandFacts, b: OperandFacts, hardware: Hardware) -> MultiplyStrategy:
        assert b.format is not None
        if a.format is None:
            return needed(way_of(b.format, b.group, a.dtype))
        # Tensor cores take FP8 numbers with K last.
        least = min(deepest(a.group), deepest(b.group))
        return needed(way_of_fp8(a.format, b.format, hardware.fp8 and hardware.ptx and a.k_last and b.k_last and least >= 32))

    def _key(self, a: OperandFacts, b: OperandFacts) -> Any:
        """What the best choice depends on."""
        assert b.codes is not None and b.block is not None
        rows = 1 << (min(a.lines, 4096) - 1).bit_length()
        facts = (a.dtype if a.codes is None else a.codes.kind, b.codes.kind, block_text(b.block), f"rows {rows}")
        return key_of("fused", b.matrices * b.lines * b.depth, *facts)

    def _tiling(self, a: OperandFacts, b: OperandFacts, ptx: bool, choice: Choice) -> GemmTiling:
        rows = min(max(16, power_of_two(a.lines)), 128)
        lines = choice.lines or (64 if rows <= 64 else 128)
        if self.way.parts > 1:
            rows = min(rows, 64)
            lines = min(lines, 64)
        deep = choice.deep or (128 if rows <= 32 and self.way.parts == 1 else 64)
        if self.way.dot == "float32":
            deep, rows, lines = min(deep, 32), min(rows, 64), min(lines, 64)
        elif self.way.dot == "float8":
            deep = min(max(choice.deep or 128, 32), PROMOTED)
        else:  # at least two steps: their sums are added in FP32
            deep = min(deep, power_of_two(a.depth + 1) // 4)
        deep = max(STEP, min(deep, *(deepest(side.group) for side in (a, b) if not (side is b and self.way.folded))))
        steps = divided_up(a.depth, deep)
        programs = divided_up(a.lines, rows) * divided_up(b.lines, lines) * max(a.matrices, b.matrices)
        split = choice.split or power_of_two(divided_up(_PROGRAMS, 2 * programs))
        if a.lines * b.lines >= LARGE or max(a.matrices, b.matrices) > GRID:  # of the kernel that adds up parts
            split = 1
        while split > 1 and steps < _STEPS * split:
            split //= 2
        return GemmTiling(
            rows, lines, deep, min(deep, _PLAIN) if self.way.dot != "float32" else deep, a.depth, divided_up(steps, split),
            split, self.way.dot, self.way.parts, INTERPRETED, int(a.matrices > 1), int(b.matrices > 1), ptx,
        )  # fmt: skip

    def _operand(self, operand: OperandFacts, second: bool) -> MainloopOperand:
        """The constants of an operand."""
        tiling, way = self.tiling, self.way
        lines = tiling.lines if second else tiling.rows
        source, plain = operand.source(lines, tiling.deep), operand.source(lines, tiling.plain)
        global_scale = None if source is None else source.spec.global_scale
        if source is not None:
            source = replace(source, spec=replace(source.spec, global_scale=None, scales_first=False))
        marks = (way.folded, way.valued) if second else (False, False)
        return MainloopOperand(
            source, plain, operand.k_last, *marks, way.low, way.high, global_scale, way.global_low, way.global_high
        )
