"""Products of many rows by a weight whose codes are decoded to memory: how sums take the scales.

Imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from breccia.backend import TENSOR, Block

from .cuda.fp8_plans import OUTER, ROWS, TABLE, Tile, Variant, cycles
from .weight_plans import COLUMNS, Operand

#: The codecs of `fp8_matmul.cu` for BF16 operands, and elements along K of a stage.
CODECS = "bf16", "bf16"
WIDTH = 64


@dataclass(frozen=True)
class Form:
    """How sums take scales: macros SCALES, SPAN and PIECES of `fp8_matmul.cu`.

    group: columns of a scale; 0 for one scale of a row.
    """

    scales: int
    span: int = 1
    pieces: int = 1
    group: int = 0

    @property
    def step(self) -> int:
        """Elements along K of a step of the product."""
        return WIDTH * self.span

    def levels(self, k: int) -> int:
        """Scales of a row of k columns."""
        return -(-k // self.group) if self.group else 1


#: Forms with scales along K, by the columns of a group.
_FORMS = {128: Form(ROWS, 2, 1, 128), 64: Form(ROWS, 1, 1, 64), 32: Form(ROWS, 1, 2, 32), 16: Form(ROWS, 1, 4, 16)}


def form_of(of: Operand, block: Block) -> Form:
    """The form of a weight whose blocks run along K, which `weight_plans.DecodedCodes` fits."""
    return Form(OUTER) if of.decodes_scales or block == TENSOR or block[1] is None else _FORMS[of.group]


def tile_of(form: Form, rows: int, m: int, k: int, processors: int) -> Tile:
    """The tile for so many rows of a weight and m rows of activations, which are columns of the tile."""
    steps = -(-k // form.step)
    fitting = (tile for tile in TABLE if tile.split <= steps)
    return min(fitting, key=lambda tile: cycles(tile, rows, m, steps * form.span, 1, processors))


def variant_of(form: Form, tile: Tile, out: str, bias: str | None, staged: bool) -> Variant:
    """The kernel. Only sums that take scales along K leave the tensor core: of BF16 products it keeps FP32."""
    return Variant(
        tile, form.scales, CODECS, out, bias or "none", a_plain=False, staged=staged, promote=form.scales != OUTER,
        pieces=form.pieces, span=form.span,
    )  # fmt: skip


assert COLUMNS == 2 * WIDTH
