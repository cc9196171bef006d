"""Products of many rows by a weight whose codes are decoded to memory: which calls, and how sums take the scales.

No figure of this kernel was measured yet. Imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from breccia.backend import TENSOR, Block, Call

from . import weight_plans
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


def form_of(of: Operand, block: Block) -> Form | str:
    """The form of a weight whose blocks run along K, or the reason why it has none."""
    if of.decodes_scales or block == TENSOR or block[1] is None:
        return Form(OUTER)
    if of.global_scale or of.factor != 1.0:
        return "scales of blocks multiply sums, and a global scale beside them has no place"
    return _FORMS[of.group]


def overlapped_form_of(of: Operand) -> Form | str:
    """The same where the product decodes the weight: a scale of a row is in each chunk, as one of 128 columns."""
    return form_of(of, (1, of.group))


def accepts_overlapped(call: Call) -> str | None:
    """Why the kernel that decodes while it multiplies does not take these operands, or None."""
    if (why := weight_plans.accepts(call)) is not None:
        return why
    assert call.b is not None and call.b.recipe is not None and call.b.layout is not None
    if call.a.dtype != "bfloat16":
        return f"codes are decoded to bfloat16, and activations are {call.a.dtype}"
    of = weight_plans.operand_of(call.b.recipe.format, call.b.layout.plain.block(-2))
    assert isinstance(of, Operand), of  # `weight_plans.accepts` has asked
    found = overlapped_form_of(of)
    return found if isinstance(found, str) else None


def accepts(call: Call) -> str | None:
    """Why the kernel does not multiply these operands, or None."""
    if (why := weight_plans.accepts(call)) is not None:
        return why
    a, b = call.a, call.b
    assert b is not None and b.recipe is not None and b.layout is not None
    if a.dtype != "bfloat16":
        return f"codes are decoded to bfloat16, and activations are {a.dtype}"
    if (k := b.shape[-2]) % 8:
        return f"K = {k} is not a multiple of 8, so decoded rows would not begin at multiples of 16 bytes"
    block = b.layout.plain.block(-2)
    of = weight_plans.operand_of(b.recipe.format, block)
    assert isinstance(of, Operand), of  # `weight_plans.accepts` has asked
    found = form_of(of, block)
    return found if isinstance(found, str) else None


def tile_of(form: Form, rows: int, m: int, k: int, processors: int) -> Tile:
    """The tile for so many rows of a weight and m rows of activations, which are columns of the tile."""
    steps = -(-k // form.step)
    fitting = (tile for tile in TABLE if tile.split <= steps)
    return min(fitting, key=lambda tile: cycles(tile, rows, m, steps * form.span, 1, processors))


#: Tiles of the product that decodes. Its blocks share activations; each decodes its own rows of the weight.
OVERLAPPED = (
    Tile("128x192", 192, share=(2, 1), turns=True, parts=3, efficiency=0.84),
    Tile("128x128", 128, share=(2, 1), stages=6, turns=True, efficiency=0.75),
    Tile("128x128 alone", 128, stages=6, turns=True, efficiency=0.74),
    Tile("128x64", 64, stages=7, efficiency=0.5),
)


def overlapped_tile_of(form: Form, rows: int, m: int, k: int, processors: int) -> Tile:
    """The tile where the product decodes the weight."""
    steps = -(-k // form.step) * form.span
    return min(OVERLAPPED, key=lambda tile: cycles(tile, rows, m, steps, 1, processors))


def overlapped(variant: Variant, of: Operand) -> Variant:
    """The variant that decodes: with three chunks of codes ahead, or two where the ring would have fewer than four stages."""
    macros = tuple(sorted({**of.macros, "ACT": weight_plans.DTYPES["bfloat16"]}.items()))
    made = replace(variant, decode=macros, chunk_bytes=4 * of.slice_bytes, code_stages=3)
    return made if made.stages >= 4 else replace(made, code_stages=2)


def variant_of(form: Form, tile: Tile, out: str, bias: str | None, staged: bool) -> Variant:
    """The kernel. Only sums that take scales along K leave the tensor core: of BF16 products it keeps FP32."""
    return Variant(
        tile, form.scales, CODECS, out, bias or "none", a_plain=False, staged=staged, promote=form.scales != OUTER,
        pieces=form.pieces, span=form.span,
    )  # fmt: skip


def slices(n: int, rows: int | None) -> list[tuple[int, int]]:
    """(First row, rows) of the parts of a weight that are decoded one after the other. rows: of a part, in whole blocks."""
    each = n if rows is None else max(1, rows // weight_plans.ROWS) * weight_plans.ROWS
    return [(first, min(each, n - first)) for first in range(0, n, each)]


assert COLUMNS == 2 * WIDTH
