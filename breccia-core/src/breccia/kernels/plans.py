"""What core's kernels accept, and the calls of composites, without importing kernels or frameworks (for `explain`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..arrays.frameworks import FLOATS, output_dtype
from ..codecs import BF16, F16, F32, Integer
from ..dispatch.call import Call
from ..dispatch.facts import OPTIONS, Described
from ..formats import TENSOR, Block, Format
from ..layouts import PerGroupIndex, Shape
from ..options import DEFAULT, FLOAT32, PLAIN, CastOptions, ProductOptions, product_options
from ..recipes import FlatScaling, ScalingRecipe
from .checks import fitted_layout
from .exactness import keeps_values

# -- the NumPy kernels -----------------------------------------------------------------------------------------------


def k_last(shape: Shape, axis: int) -> Shape:
    """`shape` with the contraction axis last."""
    return shape if axis == -1 else (*shape[:-2], shape[-1], shape[-2])


def alone(shape: Shape, block: Block) -> bool:
    """Whether stacking matrices keeps the blocks of each: they are as high as all rows, or divide them."""
    if block == TENSOR:  # a row has no other axis
        return True
    rows, m = shape[-2], block[0]
    return m is None or rows % m == 0 or (type(rows) is int and rows < m)


def scattered(shape: Shape, block: Block, lead: Shape, contiguous: bool, most: int = 64) -> bool:
    """Whether there would be more than `most` pieces, all small: from 64 on they cost more than the generic algorithm."""
    count = math.prod(shape[: len(lead)] if contiguous and alone(shape, block) else shape[:-2])
    return count > most and math.prod(shape) // count < 1 << 14


#: Columns that a compiled microkernel of `dequantize` decodes at a time, and its shortest blocks under records.
STRIP, SHORTEST = 256, 8


def unread_records(fmt: Format) -> str | None:
    """Why compiled microkernels of `dequantize` do not read the records of coded scales and biases, or None."""
    for part in ("scale", "zero_point"):
        if (record := fmt.record(part)) is None:
            if fmt.scale_record is not None and part in fmt.parts:
                return "it reads biases of coded scales from records only"
            continue
        base, *coded = (level.codec for level in record.levels)
        if len(coded) != 1 or type(coded[0]) is not Integer or coded[0].fraction_bits or base not in (F16, BF16, F32):
            return f"it reads records of integers under a float; there are {' under '.join(c.name for c in (*coded, base))}"
        outer, inner = record.levels[0].block[1], record.levels[1].block[1]
        assert outer is not None and inner is not None
        if STRIP % outer or inner < SHORTEST:
            return f"it reads records of up to {STRIP} elements, which divide {STRIP}, and blocks of {SHORTEST} or more"
    return None


def accepts_dequantize(call: Call) -> str | None:
    """Why `dequantize` would pass the whole tensor to the generic algorithm, or None."""
    recipe, layout = call.a.recipe, call.a.layout
    assert recipe is not None and layout is not None
    if (reason := unread_records(recipe.format)) is not None:
        return reason
    if not layout.in_order:
        return f"it does not support layout {type(layout).__name__}"
    if recipe.format.global_scale is not None and layout.block() == TENSOR:
        return "a tensor scale under another one has no fast form here"
    if call.a.empty:
        return "the generic algorithm runs for an empty tensor"
    padded = recipe.format.element.bits in (4, 6, 8)  # by rows of zeros, to whole blocks
    if not padded and call.a.ndim > 2 and scattered(k_last(call.a.shape, call.a.axis), layout.block(call.a.axis), (), True):
        return "many small matrices are faster all at once"
    return None


def plan_on_numpy(call: Call) -> Iterator[Call]:
    """The same op on the same memory, as NumPy's: for kernels of other frameworks that call those."""
    a, b = (None if x is None else x.described() for x in (call.a, call.b))
    yield call.makes(call.op, a, b, recipe=call.recipe, framework="numpy", options=call.values[OPTIONS])


# -- composites ------------------------------------------------------------------------------------------------------


def plan_of_requantize(call: Call) -> Iterator[Call]:
    """No calls where codes are translated; else values are decoded and cast."""
    a, recipe = call.a, call.recipe
    assert a.recipe is not None and a.layout is not None and recipe is not None
    if call.option("scale") is None and keeps_values(a.recipe, a.layout.plain, a.axis, recipe):
        if call.option("nonfinite") == "raise":
            yield call.makes("dequantize", a)
        return
    yield call.makes("dequantize", a)
    yield call.makes("cast", _decoded(a.described()), recipe=recipe, options=_casting(call, axis=a.axis))
    if call.option("require_exact"):
        yield call.makes("dequantize", _written(call, a.axis))


def plan_of_products(call: Call) -> Iterator[Call]:
    """Every ScaledTensor operand is decoded."""
    for operand in (call.a, call.b):
        if operand is not None and (described := operand.described()).recipe is not None and described.layout is not None:
            yield call.makes("dequantize", operand)


def plan_of_cast_pair(call: Call) -> Iterator[Call]:
    """Two casts."""
    for axis in (-1, -2):
        yield call.makes("cast", call.a, recipe=call.recipe, options=_casting(call, axis=axis))


def plan_of_cast_and_record(call: Call) -> Iterator[Call]:
    """A cast under a supplied scale, and its amax."""
    yield call.makes("cast", call.a, recipe=call.recipe, options=call.cast_options().replace(scale=1.0, out=None))
    yield call.makes("record_amax", call.a, recipe=call.recipe)


def plan_of_cast_pair_and_record(call: Call) -> Iterator[Call]:
    """Two casts under a supplied scale, and the amax."""
    yield call.makes("cast_pair", call.a, recipe=call.recipe, options=call.cast_options().replace(scale=1.0))
    yield call.makes("record_amax", call.a, recipe=call.recipe)


def plan_of_cast_matmul(call: Call) -> Iterator[Call]:
    """A cast, and a product of two scaled operands."""
    yield call.makes("cast", call.a, recipe=call.recipe)
    yield call.makes("matmul", _written(call), call.b, options=call.product_options())


def plan_of_round_trips(call: Call) -> Iterator[Call]:
    """A cast, and its values in the dtype of the input."""
    yield call.makes("cast", call.a, recipe=call.recipe, options=_casting(call))
    yield call.makes("dequantize", _written(call), options=_in_dtype(call.a.dtype))


def plan_of_storages(call: Call) -> Iterator[Call]:
    """The same op on plain tensors."""
    operands = [None if x is None else _in_plain_storage(x.described()) for x in (call.a, call.b)]
    options: Any = _casting(call) if call.operation.stores else call.values[OPTIONS]
    yield call.makes(call.op, *operands, recipe=call.recipe, options=options)


def _casting(call: Call, **changed: Any) -> CastOptions:
    """The options of an intermediate cast: plain storage, no `out`."""
    options = call.cast_options().replace(storage=PLAIN, out=None, require_exact=False, **changed)
    return options if options.given() else DEFAULT


def _in_dtype(dtype: str) -> ProductOptions:
    return product_options(output_dtype(dtype) if dtype in FLOATS else "float32")


def _decoded(of: Described) -> Described:
    return of._replace(recipe=None, dtype="float32", layout=None, axis=-1)


def _in_plain_storage(of: Described) -> Described:
    return of if of.layout is None else of._replace(layout=of.layout.plain)


def _written(call: Call, axis: int | None = None) -> Described:
    """The result of a cast of the first operand."""
    recipe, x = call.recipe, call.a.described()
    assert recipe is not None
    axis = int(call.option("axis", -1)) if axis is None else axis
    layout = fitted_layout(recipe, x.shape, axis) if len(x.shape) > 1 else recipe.layout
    return x._replace(recipe=recipe, dtype=call.a.storage_of(recipe.format.element), layout=layout, axis=axis)


# -- scales of several levels (`flattening`) ---------------------------------------------------------------------------

#: Features of formats whose scales and offsets multiply to one number for each block before they meet a code.
_FLAT = frozenset(("coded_scales", "scales_first", "float_zero_point"))


def flat_recipe(recipe: ScalingRecipe) -> FlatScaling | None:
    """The recipe of the flattened tensor; None where values are computed in another way."""
    fmt = recipe.format
    (rows, length), features = fmt.scale.block, fmt.features
    if rows != 1 or not features or not features <= _FLAT or fmt.element.name not in FlatScaling.elements():
        return None
    if fmt.global_scale is not None and fmt.order != "scales_first":
        return None
    return FlatScaling(fmt.element.name, length, fmt.offset.removeprefix("float_"))


def accepts_flattened(call: Call) -> str | None:
    """Why the scales of an operand do not multiply to one for each block, or None."""
    operands = [operand for operand in (call.a, call.b) if operand is not None and operand.recipe is not None]
    if not call.features:
        return "every operand has one scale for each block, which kernels know"
    for operand in operands:
        recipe = operand.recipe
        assert recipe is not None
        if recipe.format.features and flat_recipe(recipe) is None:
            return f"values of {recipe.spec} are not codes times one FP32 scale for each block"
        if isinstance(operand.layout, PerGroupIndex):
            return "scales are given by an index"
    return None


def accepts_written_as(call: Call) -> str | None:
    """Why no other recipe writes the bytes, or None."""
    recipe = call.recipe
    assert recipe is not None
    return "no recipe of a simpler format writes the same bytes" if recipe.written_as is recipe else None


def plan_of_flattened(call: Call) -> Iterator[Call]:
    """The same op on flattened operands."""
    a, b = (None if x is None else _flat(x.described()) for x in (call.a, call.b))
    yield call.makes(call.op, a, b, options=call.values[OPTIONS])


def plan_of_written_as(call: Call) -> Iterator[Call]:
    """A cast under the other recipe."""
    assert call.recipe is not None
    yield call.makes("cast", call.a, recipe=call.recipe.written_as, options=call.values[OPTIONS])


# -- rotations (`rotating`) --------------------------------------------------------------------------------------------


def accepts_rotated(call: Call) -> str | None:
    """Why there is nothing to rotate, or None."""
    recipe = call.recipe if call.op == "cast" else call.a.recipe
    return "the format has no rotation" if recipe is None or recipe.format.rotation is None else None


def plan_of_rotated(call: Call) -> Iterator[Call]:
    """The same op under the recipe without the rotation."""
    if call.op == "cast":
        assert call.recipe is not None
        x = call.a.described()._replace(dtype="float32")
        yield call.makes("cast", x, recipe=call.recipe.unrotated, options=call.values[OPTIONS])
    else:
        st = call.a.described()
        assert st.recipe is not None
        yield call.makes("dequantize", st._replace(recipe=st.recipe.unrotated), options=FLOAT32)


def _flat(of: Described) -> Described:
    if of.recipe is None or not of.recipe.format.features:
        return of
    flat = flat_recipe(of.recipe)
    assert flat is not None
    layout = fitted_layout(flat, of.shape, of.axis) if len(of.shape) > 1 else flat.layout
    return of._replace(recipe=flat, layout=layout)
