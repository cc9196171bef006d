"""The ops below frontends: each function selects a kernel in the table and calls it.

Arguments are not checked here and gradients are not handled. Frontends and kernels
composed of other ops (`kernels.composites`) call these functions, and so do plug-ins.
"""

from __future__ import annotations

import sys
from typing import Any

from ..arrays.frameworks import FLOATS, dtype_name, framework_of
from ..errors import BrecciaError
from ..options import DEFAULT, CastOptions
from ..recipes import ScalingRecipe
from ..targets import load
from ..tensors.checks import need_one_device
from ..tensors.components import is_row
from ..tensors.tensor import ScaledTensor
from .call import NO_OPTIONS, Options
from .facts import ARGUMENTS
from .kernel import Prefer
from .registry import registry
from .table import Chosen

Array = Any
#: The range inside which gradients of `cast_ste_clipped` pass; "scale" for each block's own.
Clip = tuple[float, float] | str


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None) -> ScaledTensor:
    """`x` under `recipe`."""
    chosen = registry().table.choose("cast", framework_of(x).name, x, None, recipe, options, prefer)
    found = _run(chosen, x, recipe, options)
    if chosen.checked:
        _expect_tensor(chosen, found, recipe, x, options.axis, options.storage)
        _audit(chosen, (x, recipe, options), found)
    return found


def cast_pair(
    x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None
) -> tuple[ScaledTensor, ScaledTensor]:
    """`x` under `recipe`, with blocks along its last axis, and along the one before it."""
    chosen = registry().table.choose("cast_pair", framework_of(x).name, x, None, recipe, options, prefer)
    found: Any = _run(chosen, x, recipe, options)
    if chosen.checked:
        if type(found) is not tuple or len(found) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise chosen.refused(f"cast_pair returns a tuple of two ScaledTensors, not {found!r:.80}.")
        _expect_tensor(chosen, found[0], recipe, x, -1, options.storage)
        _expect_tensor(chosen, found[1], recipe, x, -2, options.storage)
        _audit(chosen, (x, recipe, options), found)
    return found  # pyright: ignore[reportUnknownVariableType]


def dequantize(st: ScaledTensor, out_dtype: str = "float32", out: Array | None = None, prefer: Prefer = None) -> Array:
    """The values of `st` in the floating dtype named."""
    if st.held_data.ndim == 1 and is_row(st):
        return load("breccia.kernels.composites:dequantize_row")(st, out_dtype, out, prefer)
    options = _given(out_dtype, out=out)
    chosen = registry().table.choose("dequantize", framework_of(st.held_data).name, st, None, None, options, prefer)
    found = _run(chosen, st, out_dtype, out)
    if chosen.checked:
        _expect_array(chosen, found, st.shape, out_dtype)
        _audit(chosen, (st, out_dtype, out), found)
    return found


def requantize(
    st: ScaledTensor,
    recipe: ScalingRecipe,
    options: CastOptions = DEFAULT,
    require_exact: bool = False,
    prefer: Prefer = None,
) -> ScaledTensor:
    """`st` under another recipe, blocks along the same axis; `options.axis` is ignored."""
    if st.held_data.ndim == 1 and is_row(st):
        return load("breccia.kernels.composites:requantize_row")(st, recipe, options, require_exact, prefer)
    given: Any = options if not require_exact else Options(options.given(), require_exact=True)
    chosen = registry().table.choose("requantize", framework_of(st.held_data).name, st, None, recipe, given, prefer)
    found = _run(chosen, st, recipe, options, require_exact)
    if chosen.checked:
        _expect_tensor(chosen, found, recipe, st, st.axis, options.storage)
        _audit(chosen, (st, recipe, options, require_exact), found)
    return found


def matmul(
    a: Any,
    b: Any,
    bias: Array | None = None,
    out_dtype: str = "float32",
    out: Array | None = None,
    prefer: Prefer = None,
) -> Array:
    """`a @ b + bias`; at least one operand is a ScaledTensor, or both are arrays."""
    options = _given(out_dtype, bias, out)
    chosen = registry().table.choose("matmul", _framework(a), a, b, None, options, prefer)
    found = _run(chosen, a, b, bias, out_dtype, out)
    if chosen.checked:
        _expect_product(chosen, found, a, b, out_dtype)
        _audit(chosen, (a, b, bias, out_dtype, out), found)
    return found


def cast_matmul(
    x: Array,
    recipe: ScalingRecipe,
    b: Any,
    bias: Array | None = None,
    out_dtype: str = "float32",
    prefer: Prefer = None,
) -> Array:
    """`matmul(cast(x, recipe), b) + bias`."""
    options = _given(out_dtype, bias)
    chosen = registry().table.choose("cast_matmul", framework_of(x).name, x, b, recipe, options, prefer)
    found = _run(chosen, x, recipe, b, bias, out_dtype)
    if chosen.checked:
        _expect_product(chosen, found, x, b, out_dtype)
        _audit(chosen, (x, recipe, b, bias, out_dtype), found)
    return found


def grouped_matmul(
    a: Any, b: Any, offsets: Array, out_dtype: str = "float32", out: Array | None = None, prefer: Prefer = None
) -> Array:
    """Rows of `a`, in groups that end at `offsets`, each group times its own matrix of `b`."""
    options = _given(out_dtype, out=out)
    chosen = registry().table.choose("grouped_matmul", _framework(a), a, b, None, options, prefer)
    found = _run(chosen, a, b, offsets, out_dtype, out)
    if chosen.checked:
        _expect_array(chosen, found, (a.shape[0], b.shape[-1]), out_dtype)
        _audit(chosen, (a, b, offsets, out_dtype, out), found)
    return found


def cast_ste(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None) -> Array:
    """The values of `cast(x, recipe)` in the dtype of `x`."""
    chosen = registry().table.choose("cast_ste", framework_of(x).name, x, None, recipe, options, prefer)
    found = _run(chosen, x, recipe, options)
    if chosen.checked:
        _expect_array(chosen, found, x.shape, dtype_name(x))
        _audit(chosen, (x, recipe, options), found)
    return found


def cast_ste_clipped(
    x: Array, recipe: ScalingRecipe, clip: Clip, options: CastOptions = DEFAULT, prefer: Prefer = None
) -> Array:
    """Same as `cast_ste`: the clip affects only the gradient, which the frontend computes."""
    chosen = registry().table.choose("cast_ste_clipped", framework_of(x).name, x, None, recipe, options, prefer)
    found = _run(chosen, x, recipe, clip, options)
    if chosen.checked:
        _expect_array(chosen, found, x.shape, dtype_name(x))
        _audit(chosen, (x, recipe, clip, options), found)
    return found


def record_amax(x: Array, recipe: ScalingRecipe, amaxes: Any, scale: Any, prefer: Prefer = None) -> tuple[Array, Array]:
    """`amaxes` with the amax of `x` appended, and the scale for the next cast (see `breccia.AmaxHistory`)."""
    chosen = registry().table.choose("record_amax", framework_of(x).name, x, None, recipe, NO_OPTIONS, prefer)
    found = _run(chosen, x, recipe, amaxes, scale)
    if chosen.checked:
        _expect_record(chosen, found, recipe, amaxes)
        _audit(chosen, (x, recipe, amaxes, scale), found)
    return found


def cast_and_record(
    x: Array, recipe: ScalingRecipe, amaxes: Any, scale: Any, options: CastOptions = DEFAULT, prefer: Prefer = None
) -> tuple[ScaledTensor, Array, Array]:
    """`cast` under the supplied `scale`, and what `record_amax` returns."""
    chosen = registry().table.choose("cast_and_record", framework_of(x).name, x, None, recipe, options, prefer)
    found = _run(chosen, x, recipe, amaxes, scale, options)
    if chosen.checked:
        if type(found) is not tuple or len(found) != 3:  # pyright: ignore[reportUnknownArgumentType]
            raise chosen.refused(f"cast_and_record returns a ScaledTensor and two arrays, not {found!r:.80}.")
        _expect_tensor(chosen, found[0], recipe, x, options.axis, options.storage)
        _expect_record(chosen, found[1:], recipe, amaxes)
        _audit(chosen, (x, recipe, amaxes, scale, options), found)
    return found  # pyright: ignore[reportUnknownVariableType]


# -- calling a kernel ------------------------------------------------------------------------------------------------


def _given(out_dtype: str = "float32", bias: Array | None = None, out: Array | None = None) -> Options:
    if bias is None and out is None:
        return _RESULTS[out_dtype]
    found = Options() if out_dtype == "float32" else Options(out_dtype=out_dtype)
    if bias is not None:
        found["bias"] = bias
    if out is not None:
        found["out"] = out
    return found


class _Results(dict[str, Options]):
    def __missing__(self, dtype: str) -> Options:
        return Options(out_dtype=dtype)


#: The options of a call whose only option is the dtype of its result.
_RESULTS = _Results({dtype: NO_OPTIONS if dtype == "float32" else Options(out_dtype=dtype) for dtype in FLOATS})


def _framework(a: Any) -> str:
    return framework_of(a.held_data if isinstance(a, ScaledTensor) else a, "a").name


def _run(chosen: Chosen, *arguments: Any) -> Any:
    """Run the kernel and return its result. Errors that are not breccia's own get a note naming the kernel."""
    if chosen.traced:
        print(chosen.traced, file=sys.stderr)
    try:
        found = chosen.function(*arguments)
    except BrecciaError:
        raise
    except Exception as e:
        need_one_device(**dict(zip(ARGUMENTS.get(chosen.kernel.op, ()), arguments, strict=False)))
        chosen.failed(e)
        raise
    return found


def _audit(chosen: Chosen, arguments: tuple[Any, ...], found: Any) -> None:
    """Compare `found` with the generic algorithm's result, under BRECCIA_CHECK."""
    if chosen.audited:
        load("breccia.kernels.audit:check")(chosen, arguments, found)


# Check the results of plug-ins' kernels here: a wrong shape would be noticed far from the kernel, or never.


def _expect_tensor(chosen: Chosen, found: Any, recipe: ScalingRecipe, like: Any, axis: int, storage: str) -> None:
    if not isinstance(found, ScaledTensor):
        raise chosen.refused(f"{chosen.kernel.op} returns a ScaledTensor, not {type(found).__name__}.")
    if found.recipe is not recipe and found.recipe != recipe:
        raise chosen.refused(f"{chosen.kernel.op} was to write {recipe!r}; the result has {found.recipe!r}.")
    shape, expected = tuple(found.shape), tuple(like.shape)
    if shape != expected:
        raise chosen.refused(f"{chosen.kernel.op} of shape {expected} gave a tensor of shape {shape}.")
    if found.axis != axis:
        raise chosen.refused(f"{chosen.kernel.op} was to write blocks along axis {axis}; the result has axis {found.axis}.")
    if found.storage != storage:
        raise chosen.refused(f"{chosen.kernel.op} was to write {storage!r} storage; the result is in {found.storage!r}.")


def _expect_record(chosen: Chosen, found: Any, recipe: Any, amaxes: Any) -> None:
    if type(found) is not tuple or len(found) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise chosen.refused(f"{chosen.kernel.op} returns the amaxes and the next scale, not {found!r:.80}.")
    _expect_array(chosen, found[0], (min(len(amaxes) + 1, recipe.amax_history_len),), "float32")
    _expect_array(chosen, found[1], (), "float32")


def _expect_product(chosen: Chosen, found: Any, a: Any, b: Any, dtype: str) -> None:
    left, right = tuple(a.shape), tuple(b.shape)
    if len(left) == 2 == len(right):
        return _expect_array(chosen, found, (left[0], right[1]), dtype)
    lead = [max(m, n) if 0 not in (m, n) else 0 for m, n in _aligned(left[:-2], right[:-2])]
    return _expect_array(chosen, found, (*lead, left[-2], right[-1]), dtype)


def _aligned(left: tuple[int, ...], right: tuple[int, ...]) -> zip[tuple[int, int]]:
    """Leading axes of both operands, the shorter one preceded by ones."""
    ndim = max(len(left), len(right))
    return zip((1,) * (ndim - len(left)) + left, (1,) * (ndim - len(right)) + right, strict=True)


def _expect_array(chosen: Chosen, found: Any, shape: Any, dtype: str) -> None:
    if not hasattr(found, "shape") or isinstance(found, ScaledTensor):
        raise chosen.refused(f"{chosen.kernel.op} returns an array, not {type(found).__name__}.")
    if tuple(found.shape) != tuple(shape):
        raise chosen.refused(f"{chosen.kernel.op} gives shape {tuple(shape)}; got {tuple(found.shape)}.")
    if dtype_name(found) != dtype:
        raise chosen.refused(f"{chosen.kernel.op} was asked for {dtype}; got {dtype_name(found)}.")
