"""The public ops: each checks its arguments once and calls the frontend of the array's framework.

docs/spec/numerics.md specifies the results. Where a framework has no frontend for an op, the kernel is called directly.
"""

from __future__ import annotations

from dataclasses import fields
from numbers import Real
from typing import TYPE_CHECKING, Any

from . import targets
from .arrays.frameworks import (
    Device,
    Framework,
    common_framework,
    device_of,
    framework_of,
    ops_of,
    output_dtype,
    same_framework,
    shape_of,
)
from .dispatch import calls
from .dispatch.call import NO_OPTIONS, Call, Options
from .dispatch.explanation import Explanation
from .dispatch.facts import Described, array_of
from .dispatch.kernel import OPS, Prefer
from .dispatch.registry import Plugin, registry
from .errors import OptionError, UnknownNameError, UnsupportedError, suggestion
from .kernels.checks import check_cast, check_grouped, check_matmul, clip_bounds
from .options import COLUMNS, DEFAULT, PLAIN, CastOptions
from .recipes import DelayedScaling, ScalingRecipe
from .specs import as_recipe, recipe
from .tensors.checks import contraction_axis
from .tensors.pair import TensorPair
from .tensors.tensor import ScaledTensor, scaled
from .tracing import traced_by_framework

if TYPE_CHECKING:
    from .error_metrics import ErrorMetrics


def cast(
    x: Any,
    recipe: ScalingRecipe | str,
    *,
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    storage: str = PLAIN,
    out: ScaledTensor | None = None,
    prefer: Prefer = None,
) -> ScaledTensor:
    """Quantize `x` under `recipe`.

    x: FP32, FP16 or BF16 array of any installed framework, of any length along each axis (the last block may be partial);
        at least 2-D for block recipes, 1-D for per-tensor ones.
    recipe: a recipe, or its name or spec as `breccia.recipe` reads it: "nvfp4", "fp8_block,block_m=128".
    axis: the contraction axis blocks run along, the last or the one before it.
    scale: use this scale instead of computing one from `x`; for two-level recipes, the global scale. A number for
        per-tensor scales, or an array as the level is stored (codes, for E8M0 and E4M3), of the layout's shape.
    rounding: "nearest" (ties to even) or "stochastic", which needs `seed` (0 .. 2^64 - 1) and gives the same bytes everywhere.
        On JAX and MLX a seed may be traced: an integer, or an array of shape (2,) with its low and high 32 bits. On JAX it may
        be a key of `jax.random.key`, whose words it then has.
    nonfinite: "propagate" makes a block with NaN or Inf decode to NaN; "raise" raises NonFiniteError.
    storage: name of a registered storage, the memory order of codes and scales; see `ScaledTensor.to_storage`.
    out: a ScaledTensor to write into, from an earlier call with equal arguments.
    prefer: name(s) of kernels to use; see `breccia.explain`.

    Raises UnsupportedError (a TypeError) for unsupported types and dtypes, ShapeError or LayoutError (ValueErrors) for
    shapes, NoKernelError where no kernel supports the call.
    """
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    options = _options(x, axis, scale, rounding, seed, nonfinite, storage, out)
    return _frontend("cast", x)(x, recipe, options, prefer)


def cast_pair(
    x: Any,
    recipe: ScalingRecipe | str,
    *,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    storage: str = PLAIN,
    prefer: Prefer = None,
) -> TensorPair:
    """`x` quantized twice under `recipe`: with blocks along its last axis, and along the one before it.

    Returns a `TensorPair`, which unpacks like a tuple: `rows, columns = breccia.cast_pair(x, recipe)`. A backward pass
    multiplies by both. The results equal `cast(x, recipe)` and `cast(x, recipe, axis=-2)` byte for byte; a kernel may compute
    both in one read of `x`. Options are those of `cast`.

    scale: one for both tensors: of recipes with one scale for the tensor or for square tiles, and the global one of two levels.
        Under other recipes the two have scales of different shapes, and LayoutError is raised: cast twice.
    """
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    options = _options(x, -1, scale, rounding, seed, nonfinite, storage, None)
    return TensorPair(*_frontend("cast_pair", x)(x, recipe, options, prefer))


def record_amax(x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any, *, prefer: Prefer = None) -> tuple[Any, Any]:
    """The op of `AmaxHistory.update`: (`amaxes` with the amax of `x`, the scale for the next cast).

    amaxes: FP32 array of shape (n,), oldest first, or () before the first update. scale: FP32 array of shape (), or a number.
    """
    _check_array(x)
    check_cast(x, recipe)
    return _frontend("record_amax", x)(x, recipe, amaxes, scale, prefer)


def cast_and_record(
    x: Any,
    recipe: DelayedScaling,
    amaxes: Any,
    scale: Any,
    *,
    axis: int = -1,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    storage: str = PLAIN,
    out: ScaledTensor | None = None,
    prefer: Prefer = None,
) -> tuple[ScaledTensor, Any, Any]:
    """The op of `AmaxHistory.cast`: `x` under `recipe` with the supplied `scale`, and what `record_amax` returns."""
    options = _options(x, axis, None, rounding, seed, nonfinite, storage, out)
    return _frontend("cast_and_record", x)(x, recipe, amaxes, scale, options, prefer)


def dequantize(st: ScaledTensor, *, out_dtype: Any = "float32", out: Any = None, prefer: Prefer = None) -> Any:
    """The high-precision values of `st`, on the framework and device of its data.

    out_dtype: float32, float16 or bfloat16, as a string ("bf16" and "half" too), a NumPy dtype or a framework's. FP32 values
        are rounded once.
    out: an array of the result's shape and dtype to write into, for frameworks whose arrays are mutable.
    """
    if not isinstance(st, ScaledTensor):
        st = _need_scaled("dequantize", st)
    return _frontend("dequantize", st.held_data)(st, output_dtype(out_dtype), out, prefer)


def requantize(
    st: ScaledTensor,
    recipe: ScalingRecipe | str,
    *,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    require_exact: bool = False,
    storage: str = PLAIN,
    out: ScaledTensor | None = None,
    prefer: Prefer = None,
) -> ScaledTensor:
    """Convert `st` to another recipe, with blocks along the same axis. Under its own recipe, `st` itself is returned.

    Where the new format can represent all values of the old one (MXFP4 to MXFP8, 128x128 tiles to 1x128, INT4 to FP8, ...),
    scales are kept and codes translated: nothing is rounded and `rounding` has no effect. Otherwise values go through FP32 and
    `cast`.

    require_exact: raise InexactError if a decoded value would change. Except on the pairs documented as exact, this reads
        values, so it cannot be used in traced functions.

    The other options are those of `cast`.
    """
    if not isinstance(st, ScaledTensor):
        st = _need_scaled("requantize", st)
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    if not isinstance(require_exact, bool):
        raise OptionError(f"require_exact is True or False; got {require_exact!r}.", require_exact=require_exact)
    options = _options(st, -1, scale, rounding, seed, nonfinite, storage, out, of_tensor=True)
    return _frontend("requantize", st.held_data)(st, recipe, options, require_exact, prefer)


def matmul(a: Any, b: Any, out_dtype: Any = "float32", *, bias: Any = None, out: Any = None, prefer: Prefer = None) -> Any:
    """`a @ b` with FP32 accumulation: (..., M, K) by (..., K, N) to (..., M, N) of `out_dtype`.

    Each operand is a ScaledTensor or a floating array of the same framework. A weight stored (N, K) with blocks along K is
    passed as `w.mT`.

    bias: a floating array of shape (N,), added to the FP32 product before it is rounded to `out_dtype`.
    """
    framework = common_framework(array_of(a), array_of(b), bias)
    if framework is None:
        try:
            framework = same_framework(_arrays(a=a, b=b, bias=bias))
        except UnsupportedError:
            if scaled(a) is a and scaled(b) is b:
                raise
            return matmul(scaled(a), scaled(b), out_dtype, bias=bias, out=out, prefer=prefer)
    check_matmul(a, b, bias)
    return _entry("matmul", framework)(a, b, bias, output_dtype(out_dtype), out, prefer)


def cast_matmul(
    x: Any, recipe: ScalingRecipe | str, b: Any, out_dtype: Any = "float32", *, bias: Any = None, prefer: Prefer = None
) -> Any:
    """`matmul(cast(x, recipe), b)`, with a gradient for `x`: it passes straight through the cast.

    Use it for a layer with quantized activations: the kernel for the two recipes multiplies the two ScaledTensors, with or
    without a gradient. x: (..., M, K), blocks along K. The other arguments are those of `matmul`.
    """
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    _check_array(x)
    framework = common_framework(x, array_of(b), bias) or same_framework(_arrays(x=x, b=b, bias=bias))
    check_matmul(x, b, bias)
    return _entry("cast_matmul", framework)(x, recipe, b, bias, output_dtype(out_dtype), prefer)


def grouped_matmul(a: Any, b: Any, offsets: Any, out_dtype: Any = "float32", *, out: Any = None, prefer: Prefer = None) -> Any:
    """Grouped matrix product for mixture of experts: the rows of `a`, sorted by expert, times their expert's matrix.

    a: (M, K). b: (E, K, N), one matrix per expert; pass weights stored (E, N, K) as `w.mT`. Each operand is a
        ScaledTensor or a floating array.
    offsets: int32 array of shape (E,): the end of each expert's rows, non-decreasing; expert e has rows
        offsets[e - 1] to offsets[e]. Rows from offsets[-1] on belong to no expert, and are zero in the result.

    Returns (M, N) of `out_dtype`, with the accumulation of `matmul`.
    """
    framework = same_framework(_arrays(a=a, b=b, offsets=offsets))
    check_grouped(a, b, offsets)
    return _entry("grouped_matmul", framework)(a, b, offsets, output_dtype(out_dtype), out, prefer)


def cast_ste(
    x: Any,
    recipe: ScalingRecipe | str,
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
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    options = _options(x, axis, scale, rounding, seed, nonfinite, PLAIN, None)
    return _frontend("cast_ste", x)(x, recipe, options, prefer)


def cast_ste_clipped(
    x: Any,
    recipe: ScalingRecipe | str,
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
        each block's representable range: the gradient is zero where the cast saturates, and in blocks that decode to NaN.
    """
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    options = _options(x, axis, scale, rounding, seed, nonfinite, PLAIN, None)
    bounds = clip_bounds(recipe, clip_min, clip_max, clip) or "scale"
    return _frontend("cast_ste_clipped", x)(x, recipe, bounds, options, prefer)


def metrics(reference: Any, quantized: Any) -> ErrorMetrics:
    """SQNR, cosine similarity, largest error, clip rate and underflow rate of `quantized` against `reference`.

    Each is a ScaledTensor or an FP64, FP32, FP16 or BF16 array, of one shape and any framework. The numbers are those of
    `breccia compare` for the same tensors; the clip rate needs a ScaledTensor as `quantized`, whose format has largest values.
    Adding two results gives the metrics of both tensors together. Values are read, so tensors cannot be traced.

    Raises ShapeError for two shapes, UnsupportedError for other types and dtypes.

        >>> breccia.metrics(w, breccia.cast(w, "nvfp4")).sqnr
    """
    return targets.load("breccia.kernels.measuring:metrics")(reference, quantized)


def explain(op: str, *operands: Any, on: str | None = None, prefer: Prefer = None, **options: Any) -> Explanation:
    """Explain which kernel runs for a call, why the others do not, which kernels it calls, and where each source is.

    operands: those of the op; a recipe or its name may replace a ScaledTensor, and "array" a plain operand. `cast`
        needs none.
    on: the framework, or framework and device ("torch:cuda"), where no operand is an array.
    options: keyword options of the op.

        >>> print(breccia.explain("cast", x, breccia.NVFP4BlockScaling()))
        >>> print(breccia.explain("matmul", "fp8_block", "fp8_block", on="torch"))
        >>> print(breccia.explain("matmul", "array", "nvfp4", on="torch"))
    """
    if op not in OPS:
        raise UnknownNameError(f"no op {op!r}{suggestion(op, list(OPS))}", name=op, known=OPS)
    values = [_named_operand(x) if isinstance(x, str) else x for x in operands]
    new: ScalingRecipe | None = None
    if op == "cast_matmul":
        if len(values) == 3 and isinstance(values[1], ScalingRecipe):
            new = values.pop(1)
        elif len(values) == 2 and isinstance(values[0], ScalingRecipe):
            new = values.pop(0)
        else:
            raise UnsupportedError("explain('cast_matmul', ...) needs x, a recipe and b; x may be omitted.")
    elif op not in ("dequantize", "matmul", "grouped_matmul"):
        if not values or not isinstance(values[-1], ScalingRecipe):
            raise UnsupportedError(f"explain({op!r}, ...) needs the target recipe as its last operand.")
        new = values.pop()
    wanted = _OPERANDS.get(op, (0, 1))
    arrays_only = values[: len(values) - (op == "cast_matmul")] if op in _ARRAYS_ONLY else []
    if len(values) not in wanted or any(isinstance(x, ScalingRecipe) for x in arrays_only):
        raise UnsupportedError(f"{op} has {wanted[-1] + (new is not None)} operands; explain got {len(operands)}.")
    if op in ("dequantize", "requantize") and values[0] is _PLAIN_OPERAND:
        raise UnsupportedError(f"{op} takes a ScaledTensor; name its recipe, as in explain({op!r}, 'mxfp8').")
    there = [x for x in values if not isinstance(x, ScalingRecipe) and x is not _PLAIN_OPERAND]
    arrays = [x.held_data if isinstance(x, ScaledTensor) else x for x in there]
    name, _, device = (on or "").partition(":")
    framework = framework_of(arrays[0]).name if arrays else name or "numpy"
    declared: Framework = registry().look_up("breccia_frameworks", name or framework, "framework")
    if device and declared.kinds and device.partition(":")[0] not in declared.kinds:
        raise UnsupportedError(f"{declared.name} arrays are on {' or '.join(declared.kinds)} only; got on={on!r}.", on=on)
    where = f"{framework}:{device_of(arrays[0])}" if arrays else on
    if arrays and on not in (None, framework, where):
        raise UnsupportedError(f"explain: on={on!r}, but the operand is on {where}; omit on=.")
    known = _explained_options(op, options, len(shape_of(arrays[0], "the operand")) if arrays else 2)
    kind, _, index = device.partition(":")
    asked = Device(kind or (device_of(arrays[0]) if arrays else "cpu"), int(index) if index.isdigit() else None)
    if op in _ARRAYS_ONLY and len(values) < wanted[-1]:
        values.insert(0, _PLAIN_OPERAND)
    axes = (-1, -2 if op in _PRODUCTS else -1)  # a recipe as second operand of a product stands for a weight w.mT
    filled = [_described(x, asked, axis) if isinstance(x, ScalingRecipe) else x for x, axis in zip(values, axes, strict=False)]
    filled = [_PLAIN_OPERAND._replace(device=asked) if x is _PLAIN_OPERAND else x for x in filled]
    a, b = (*filled, None)[:2]
    return registry().table.explain(Call(op, framework, (a, b, new, known, declared)), prefer, device)


#: The name of a plain operand in `explain`, and its stand-in: an aligned matrix.
PLAIN_OPERAND = "array"
_PLAIN_OPERAND = Described(shape=(256, 256))


def _named_operand(name: str) -> Any:
    return _PLAIN_OPERAND if name == PLAIN_OPERAND else recipe(name)


#: The numbers of operands that `explain` takes, without the target recipe: an array may be omitted.
_OPERANDS = {"dequantize": (1,), "requantize": (1,), "matmul": (2,), "grouped_matmul": (2,), "cast_matmul": (1, 2)}
#: Ops whose first operand is an array, never a ScaledTensor.
_PRODUCTS = ("matmul", "grouped_matmul", "cast_matmul")
_ARRAYS_ONLY = ("cast", "cast_pair", "cast_ste", "cast_ste_clipped", "cast_matmul", "record_amax", "cast_and_record")
_WITH_CAST_OPTIONS = ("cast", "cast_pair", "requantize", "cast_ste", "cast_ste_clipped", "cast_and_record")


def _explained_options(op: str, options: dict[str, Any], ndim: int) -> Any:
    """Keyword options as the op passes them on. Raises OptionError for unknown ones."""
    casts = op in _WITH_CAST_OPTIONS
    names = [f.name for f in fields(CastOptions)] if casts else [] if op == "record_amax" else ["out_dtype", "out", "bias"]
    names += {"requantize": ["require_exact"], "cast_ste_clipped": ["clip_min", "clip_max", "clip"]}.get(op, [])
    for name in options:
        if name not in names:
            raise OptionError(f"{op} has no option {name!r}{suggestion(name, names)}", option=name)
    given = {k: v for k, v in options.items() if v is not None and not k.startswith("clip")}
    if not casts:
        dtype = output_dtype(given.pop("out_dtype", "float32"))
        return Options(given if dtype == "float32" else {**given, "out_dtype": dtype}) or NO_OPTIONS
    if "axis" in given:
        given["axis"] = contraction_axis(given["axis"], ndim)
    exact = given.pop("require_exact", False)
    found = CastOptions(**given)
    if found.storage != PLAIN:
        registry().look_up("breccia_storages", found.storage, "storage")
    if exact:
        return Options(found.given(), require_exact=True)
    return found if found.given() else DEFAULT


def _described(of: ScalingRecipe, device: Device, axis: int = -1) -> Described:
    """An aligned matrix under that recipe, with blocks along the axis."""
    return Described(of, of.format.element.dtype or "uint8", (256, 256), of.layout.oriented(axis), axis, device)


def plugins() -> list[Plugin]:
    """The plug-ins found: name, distribution, version, declarations, and the reason where one was set aside."""
    return list(registry().plugins)


# -- checks of arguments ---------------------------------------------------------------------------------------------


def _frontend(op: str, x: Any) -> Any:
    """The function that runs the op for array `x`."""
    return _entry(op, framework_of(x))


def _entry(op: str, framework: Framework) -> Any:
    """The frontend's function, or that of `calls` where it has none."""
    home = calls if framework.frontend is None else targets.load_module(framework.frontend)
    return getattr(home, op, None) or getattr(calls, op)


def _options(
    x: Any,
    axis: int,
    scale: Any,
    rounding: str,
    seed: Any,
    nonfinite: str,
    storage: str,
    out: Any,
    of_tensor: bool = False,
) -> CastOptions:
    """The options of an op that casts `x`."""
    if not of_tensor:
        _check_array(x)
    if (
        scale is None
        and out is None
        and seed is None
        and type(axis) is int
        and (axis == -1 or (axis == -2 and len(shape_of(x)) > 1))
        and rounding == "nearest"
        and nonfinite == "propagate"
        and storage == PLAIN
    ):
        return DEFAULT if axis == -1 else COLUMNS
    if hasattr(seed, "dtype"):
        seed = ops_of(x.held_data if of_tensor else x).seed(seed)
    if isinstance(scale, Real) and not isinstance(scale, bool):  # NumPy's numbers too, for arrays of any framework
        scale = float(scale)
    options = CastOptions(axis, scale, rounding, seed, nonfinite, storage, out)
    if storage != PLAIN:
        registry().look_up("breccia_storages", storage, "storage")
    axis = contraction_axis(axis, len(shape_of(x)))
    return options if type(options.axis) is int and axis == options.axis else options.replace(axis=axis)


def _check_array(x: Any) -> None:
    """Raise for a ScaledTensor in place of an array to cast."""
    if isinstance(x, ScaledTensor):
        raise UnsupportedError("x is a ScaledTensor already: breccia.requantize(x, recipe) converts it to another recipe.")


def _arrays(**operands: Any) -> dict[str, Any]:
    """For each operand given, the array that determines its framework and device."""
    return {name: array_of(x) for name, x in operands.items() if x is not None}


def _need_scaled(op: str, st: Any) -> ScaledTensor:
    """The ScaledTensor that `st` contains. Raises UnsupportedError."""
    found = scaled(st)
    if not isinstance(found, ScaledTensor):
        raise UnsupportedError(
            f"{op} takes a ScaledTensor, got {type(st).__name__}; quantize an array with breccia.cast, or wrap buffers with "
            "breccia.from_buffer."
        )
    return found


for _op in (cast, cast_pair, dequantize, requantize, matmul, cast_matmul, grouped_matmul, cast_ste, cast_ste_clipped):
    traced_by_framework(_op)
