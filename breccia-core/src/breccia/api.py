"""The verbs. Each finds its kernel by type and calls it; what the result must be is in docs/spec/numerics.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .codecs import Integer, Minifloat
from .dispatch import OPS, Explanation, Options
from .errors import OptionError, RecipeError, UnknownNameError, UnsupportedError, suggestion
from .frameworks import Framework, device_of, framework_of, output_dtype, same_framework
from .options import check_options
from .recipes import ScalingRecipe, check_recipe
from .registry import Plugin, registry
from .tensor import ScaledTensor, contraction_axis

Prefer = str | Sequence[str] | None


def cast(
    x: Any,
    recipe: ScalingRecipe,
    *,
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    out: ScaledTensor | None = None,
    prefer: Prefer = None,
) -> ScaledTensor:
    """Quantize `x` under `recipe`.

    x: FP32, FP16 or BF16 array of any installed framework, of any length along each axis (the last block may be partial);
        at least 2-D for block recipes, 1-D for per-tensor ones.
    axis: the contraction axis blocks run along, the last or the one before it.
    scale: supplies the (coarsest) scale instead of computing it from `x`: a number for per-tensor scales, or an array as the
        level is stored (codes, for E8M0 and E4M3), of the layout's shape.
    rounding: "nearest" (ties to even) or "stochastic", which needs `seed` (0 .. 2^64 - 1) and gives the same bytes everywhere.
        On JAX a seed may be traced: a whole number, or its low and high 32 bits as an array of shape (2,).
    nonfinite: "propagate" marks a block that holds NaN or Inf so that it decodes to NaN; "raise" raises NonFiniteError.
    out: a ScaledTensor of an equal earlier call to write into.
    prefer: name(s) of kernels to use; see `breccia.explain`.

    Raises UnsupportedError (a TypeError) for a dtype or type it does not take, ShapeError or LayoutError (ValueErrors) for
    shapes, NoKernelError where no kernel can.
    """
    kernel = _casting("cast", x, recipe, prefer, axis, scale, rounding, seed, nonfinite, out)
    given = {} if out is None else {"out": out}
    return kernel(x, recipe, axis=axis, scale=scale, rounding=rounding, seed=seed, nonfinite=nonfinite, **given)


def dequantize(st: ScaledTensor, *, out_dtype: Any = "float32", out: Any = None, prefer: Prefer = None) -> Any:
    """The high-precision array `st` stands for, on the framework and device of its data.

    out_dtype: float32, float16 or bfloat16, in NumPy's, a framework's or a string's spelling. FP32 values, rounded once.
    out: an array of the result's shape and dtype to write into, for frameworks whose arrays are mutable.
    """
    _need_scaled("dequantize", st)
    kernel = registry().table.resolve("dequantize", st.framework, st, None, None, prefer, _out_options(out_dtype, out))
    return kernel(st, out_dtype=out_dtype) if out is None else kernel(st, out_dtype=out_dtype, out=out)


def requantize(
    st: ScaledTensor,
    recipe: ScalingRecipe,
    *,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    require_exact: bool = False,
    out: ScaledTensor | None = None,
    prefer: Prefer = None,
) -> ScaledTensor:
    """`st` under another recipe, blocks along the same axis. Under its own recipe it is returned as it is.

    Where the new format holds all that the old one can say (MXFP4 to MXFP8, 128x128 tiles to 1x128, INT4 to FP8 blocks, ...),
    scales are kept and codes renamed: nothing is rounded, and `rounding` has nothing to do. Elsewhere values go through
    FP32 and `cast`.

    require_exact: raise InexactError instead of changing a bit of a decoded value. Except on the promised pairs that reads
        values, so it is not for traced functions.

    The other options are those of `cast`.
    """
    _need_scaled("requantize", st)
    if not isinstance(recipe, ScalingRecipe):
        _refuse_recipe(recipe)
    if not isinstance(require_exact, bool):
        raise OptionError(f"require_exact is True or False; got {require_exact!r}.", require_exact=require_exact)
    options = _cast_options(st, st.axis, scale, rounding, seed, nonfinite, out)
    given = {"require_exact": True} if require_exact else {}
    kernel = registry().table.resolve("requantize", st.framework, st, None, recipe, prefer, (*options, *given.items()))
    given = given if out is None else {**given, "out": out}
    return kernel(st, recipe, scale=scale, rounding=rounding, seed=seed, nonfinite=nonfinite, **given)


def matmul(a: Any, b: Any, out_dtype: Any = "float32", *, out: Any = None, prefer: Prefer = None) -> Any:
    """`a @ b` with FP32 accumulation: (..., M, K) by (..., K, N) to (..., M, N) of `out_dtype`.

    Each operand is a ScaledTensor or a floating array of the same framework. A weight stored (N, K) with blocks along K is
    passed as `w.mT`.
    """
    arrays = {name: x.data if isinstance(x, ScaledTensor) else x for name, x in (("a", a), ("b", b))}
    framework = same_framework(arrays).name
    kernel = registry().table.resolve("matmul", framework, a, b, None, prefer, _out_options(out_dtype, out))
    return kernel(a, b, out_dtype) if out is None else kernel(a, b, out_dtype, out=out)


def cast_ste(
    x: Any,
    recipe: ScalingRecipe,
    *,
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    prefer: Prefer = None,
) -> Any:
    """The values of `dequantize(cast(x, recipe))` in `x`'s dtype; gradients pass straight through to `x`.

    Options are those of `cast`. On NumPy, which has no gradients, it is the round trip.
    """
    kernel = _casting("cast_ste", x, recipe, prefer, axis, scale, rounding, seed, nonfinite)
    return kernel(x, recipe, axis=axis, scale=scale, rounding=rounding, seed=seed, nonfinite=nonfinite)


def cast_ste_clipped(
    x: Any,
    recipe: ScalingRecipe,
    clip_min: float | None = None,
    clip_max: float | None = None,
    *,
    clip: str = "element",
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    prefer: Prefer = None,
) -> Any:
    """`cast_ste` whose gradient is zero where `x` lies outside a range.

    clip: "element", the range [clip_min, clip_max], by default plus and minus the element codec's largest value; or "scale",
        what each block can hold under its scale: the gradient is zero where the cast saturates, and in blocks marked as NaN.
    """
    kernel = _casting("cast_ste_clipped", x, recipe, prefer, axis, scale, rounding, seed, nonfinite)
    options = {"axis": axis, "scale": scale, "rounding": rounding, "seed": seed, "nonfinite": nonfinite}
    return kernel(x, recipe, clip_min, clip_max, clip=clip, **options)


def explain(op: str, *operands: Any, on: str | None = None, prefer: Prefer = None) -> Explanation:
    """Which kernel serves a call, why the others do not, and where each one's source is.

    operands: those of the verb; a recipe, or its name, may stand for a ScaledTensor, and `cast` needs no array.
    on: the framework, where no operand is an array, or framework and device: "torch:cuda".

        >>> print(breccia.explain("cast", x, breccia.NVFP4BlockScaling()))
        >>> print(breccia.explain("matmul", "block", "block", on="torch"))
    """
    if op not in OPS:
        raise UnknownNameError(f"no op {op!r}{suggestion(op, list(OPS))}", name=op, known=OPS)
    values = [recipe(x) if isinstance(x, str) else x for x in operands]
    new: ScalingRecipe | None = None
    if op not in ("dequantize", "matmul"):
        if not values or not isinstance(values[-1], ScalingRecipe):
            raise UnsupportedError(f"explain({op!r}, ...) needs the recipe to write as its last operand.")
        new = values.pop()
    wanted = {"dequantize": (1,), "requantize": (1,), "matmul": (2,)}.get(op, (0, 1))
    if len(values) not in wanted or (0 in wanted and any(isinstance(x, ScalingRecipe) for x in values)):
        raise UnsupportedError(f"{op} has {wanted[-1] + (new is not None)} operands; explain got {len(operands)}.")
    arrays = [x.data if isinstance(x, ScaledTensor) else x for x in values if not isinstance(x, ScalingRecipe)]
    name, _, device = (on or "").partition(":")
    framework = framework_of(arrays[0]).name if arrays else name or "numpy"
    declared: Framework = registry().look_up("breccia_frameworks", name or framework, "framework")
    if device and declared.kinds and device not in declared.kinds:
        raise UnsupportedError(f"{declared.name} arrays are on {' or '.join(declared.kinds)} only; got on={on!r}.", on=on)
    where = f"{framework}:{device_of(arrays[0])}" if arrays else on
    if arrays and on not in (None, framework, where):
        raise UnsupportedError(f"explain: on={on!r}, but the operand is on {where}; leave on= out.")
    a, b = (*values, None, None)[:2]
    return registry().table.explain(op, framework, a, b, new, prefer, device or None)


def plugins() -> list[Plugin]:
    """The plug-ins found: name, distribution, version, what each declares, and why any was set aside."""
    return list(registry().plugins)


def recipe(spec: str, **fields: Any) -> ScalingRecipe:
    """The recipe of that name, from any plug-in, with the fields given.

    spec: a name ("nvfp4") or class name, in any case, or with fields as the command line spells them:
        "block,block_m=128,power_of_two_scale=true".
    Raises UnknownNameError with a suggestion, or RecipeError for a field.
    """
    if not isinstance(spec, str):
        raise UnsupportedError(f"recipe() takes a recipe's name, got {spec!r}.")
    name, *settings = (part.strip() for part in spec.split(","))
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"recipe {spec!r}: fields are written name=value; got {setting!r}.", setting=setting)
        fields[field.strip()] = _field_value(value.strip())
    known = registry().recipes
    spelled = next((n for n, c in known.items() if name.lower() in (n.lower(), c.__name__.lower())), None)
    if spelled is None and (held := [n for n, c in known.items() if name.lower() in _element_names(c)]):
        raise UnknownNameError(
            f"{name!r} is an element format and no recipe; recipes of it differ in their scales: {', '.join(held)}.",
            name=name,
            known=held,
        )
    return registry().look_up("breccia_recipes", spelled or name, "recipe").with_fields(fields)


def _element_names(of: type[ScalingRecipe]) -> tuple[str, ...]:
    """What people call the element format of a recipe; nothing where it has none before its fields are given."""
    if of.needed_fields():
        return ()
    element = of().format.element
    kind = "fp" if isinstance(element, Minifloat) else "int" if isinstance(element, Integer) else ""
    return element.name.lower(), f"{kind}{element.bits}", f"float{element.bits}" if kind == "fp" else ""


def _field_value(text: str) -> Any:
    """`text` as a number or truth value if it spells one, else as it is."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def _casting(op: str, x: Any, recipe: ScalingRecipe, prefer: Prefer, axis: int, *options: Any) -> Any:
    """The kernel of a verb that casts array `x`."""
    if not isinstance(recipe, ScalingRecipe):
        _refuse_recipe(recipe)
    if isinstance(x, ScaledTensor):
        raise UnsupportedError("x is a ScaledTensor already: breccia.requantize(x, recipe) writes it under another recipe.")
    framework = framework_of(x).name
    return registry().table.resolve(op, framework, x, None, recipe, prefer, _cast_options(x, axis, *options))


def _cast_options(x: Any, axis: int, scale: Any, rounding: str, seed: int | None, nonfinite: str, out: Any = None) -> Options:
    """The options of a cast that are not at their default, for kernels to decline."""
    if axis == -1 and scale is None and rounding == "nearest" and seed is None and nonfinite == "propagate" and out is None:
        return ()
    check_options(rounding, seed, nonfinite)
    given = {"axis": contraction_axis(axis, len(x.shape)), "scale": scale is not None, "out": out is not None}
    given |= {"rounding": rounding, "nonfinite": nonfinite}
    default = {"axis": -1, "scale": False, "out": False, "rounding": "nearest", "nonfinite": "propagate"}
    return tuple((name, value) for name, value in given.items() if value != default[name])


def _out_options(out_dtype: Any, out: Any) -> Options:
    """Likewise of `dequantize` and `matmul`."""
    if out is None and out_dtype == "float32":
        return ()
    name = output_dtype(out_dtype)
    options: Options = () if name == "float32" else (("out_dtype", name),)
    return options if out is None else (*options, ("out", True))


def _need_scaled(verb: str, st: Any) -> None:
    if not isinstance(st, ScaledTensor):
        raise UnsupportedError(
            f"{verb} takes a ScaledTensor, got {type(st).__name__}; quantize an array with breccia.cast, or wrap buffers with "
            "breccia.from_buffer."
        )


def _refuse_recipe(found: Any) -> None:
    if isinstance(found, str):
        raise UnsupportedError(f"recipe must be a ScalingRecipe instance, got {found!r}; pass breccia.{recipe(found)!r}.")
    check_recipe(found)
