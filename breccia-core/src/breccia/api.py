"""The public ops: each checks its arguments once and calls the frontend of the array's framework.

docs/spec/numerics.md specifies the results. Where a framework has no frontend for an op, the kernel is called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from . import targets
from .arrays.frameworks import common_framework, framework_of, ops_of, output_dtype, same_framework
from .calling import arrays_of, cast_options, check_array, framework_of_steps, need_scaled, run
from .dispatch.explanation import Explanation
from .dispatch.facts import array_of
from .dispatch.kernel import Prefer
from .dispatch.registry import Plugin, registry
from .errors import OptionError, UnsupportedError
from .kernels.checks import check_cast, check_grouped, check_importance, check_matmul, check_weights, clip_bounds
from .operations import CASTING, Kind, Operation
from .options import DEFAULT, PLAIN, product_options
from .recipes import DelayedScaling, ScalingRecipe
from .specs import as_recipe
from .tensors.pair import TensorPair
from .tensors.tensor import ScaledTensor, scaled
from .tracing import traced_by_framework

if TYPE_CHECKING:
    from .error_metrics import ErrorMetrics
    from .formats import Format
    from .kernels.exactness import Exactness


def cast(
    x: Any,
    recipe: ScalingRecipe | str,
    *,
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: Any = None,
    nonfinite: str = "propagate",
    storage: str = PLAIN,
    group_index: Any = None,
    importance: Any = None,
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
        A seed may be an array of shape (2,) with its low and high 32 bits, which a CUDA kernel reads on the device. On JAX and
        MLX it may be traced, and on JAX a key of `jax.random.key`, whose words it then has.
    nonfinite: "propagate" makes a block with NaN or Inf decode to NaN; "raise" raises NonFiniteError.
    storage: name of a registered storage, the memory order of codes and scales; see `ScaledTensor.to_storage`.
    group_index: for each element of the contraction axis its group, integers from 0, as a sequence, an array or a
        `PerGroupIndex` (GPTQ's g_idx): groups of any elements, each as many as the recipe's groups have at most. For recipes
        with one float scale per group, rounded to nearest.
    importance: for recipes that search for scales (`scale_rule="mse"`): a non-negative number for each element of the
        contraction axis, a 1-D array of the framework of `x`. The search multiplies squared errors by it. For the weight of a
        layer, use the mean square of each of its inputs.
    out: a ScaledTensor to write into, from an earlier call with equal arguments.
    prefer: name(s) of kernels to use; see `breccia.explain`.

    Raises UnsupportedError (a TypeError) for unsupported types and dtypes, ShapeError or LayoutError (ValueErrors) for
    shapes, NoKernelError where no kernel supports the call.

        >>> st = breccia.cast(np.ones((4, 64), np.float32), "nvfp4")
        >>> st
        breccia.ScaledTensor('nvfp4', shape=(4, 64), numpy cpu, 4.625 bits per value)
        >>> st.data.shape, st.scale.shape  # two codes to a byte; one scale for 16 values
        ((4, 32), (4, 4))
        >>> breccia.cast(np.ones((64, 4), np.float32), "nvfp4", axis=-2).scale.shape
        (4, 4)
        >>> x = np.array([[8, 1, 2, 3]], np.float32)
        >>> st = breccia.cast(x, "int4,group_size=4,scale_rule=mse")  # finds that code -8 and a negative scale fit
        >>> breccia.dequantize(st), st.scale
        (array([[8., 1., 2., 3.]], dtype=float32), array([[-1.]], dtype=float16))
    """
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    options = cast_options(x, axis, scale, rounding, seed, nonfinite, storage, out, importance=importance)
    if importance is not None:
        check_importance(importance, x, recipe, options.axis)
        check_weights(ops_of(importance), importance)
    if group_index is not None:
        return targets.load("breccia.kernels.indexed:cast")(x, recipe, group_index, options)
    return run("cast", framework_of(x), (x, recipe, options), prefer)


def cast_pair(
    x: Any,
    recipe: ScalingRecipe | str,
    *,
    scale: Any = None,
    rounding: str = "nearest",
    seed: Any = None,
    nonfinite: str = "propagate",
    storage: str = PLAIN,
    prefer: Prefer = None,
) -> TensorPair:
    """Quantize `x` twice under `recipe`: with blocks along its last axis, and with blocks along the one before it.

    x: an array of at least two axes. The options are those of `cast`.
    scale: one scale for both tensors, for recipes with one scale per tensor or per square tile, and for the global scale of
        two-level recipes. Other recipes have scales of different shapes for the two tensors: call `cast` twice.

    Returns a `TensorPair`, which unpacks like a tuple: `rows, columns = breccia.cast_pair(x, recipe)`. A backward pass
    multiplies by both. The results equal `cast(x, recipe)` and `cast(x, recipe, axis=-2)` byte for byte; a kernel may compute
    both in one read of `x`.

    Raises what `cast` raises, and LayoutError for a scale where the two tensors need different ones.

        >>> rows, columns = breccia.cast_pair(np.ones((64, 128), np.float32), "mxfp8")
        >>> rows.scale.shape, columns.scale.shape  # for 32 values of a row, of a column
        ((64, 4), (2, 128))
    """
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    options = cast_options(x, -1, scale, rounding, seed, nonfinite, storage, None)
    return TensorPair(*run("cast_pair", framework_of(x), (x, recipe, options), prefer))


def record_amax(x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any, *, prefer: Prefer = None) -> tuple[Any, Any]:
    """The op of `AmaxHistory.update`: (`amaxes` with the amax of `x`, the scale for the next cast).

    amaxes: FP32 array of shape (n,), oldest first, or () before the first update. scale: FP32 array of shape (), or a number.
    """
    check_array(x)
    check_cast(x, recipe)
    return run("record_amax", framework_of_steps(x, amaxes, scale), (x, recipe, amaxes, scale), prefer)


def cast_and_record(
    x: Any,
    recipe: DelayedScaling,
    amaxes: Any,
    scale: Any,
    *,
    axis: int = -1,
    rounding: str = "nearest",
    seed: Any = None,
    nonfinite: str = "propagate",
    storage: str = PLAIN,
    out: ScaledTensor | None = None,
    prefer: Prefer = None,
) -> tuple[ScaledTensor, Any, Any]:
    """The op of `AmaxHistory.cast`: `x` under `recipe` with the supplied `scale`, and what `record_amax` returns."""
    options = cast_options(x, axis, None, rounding, seed, nonfinite, storage, out)
    return run("cast_and_record", framework_of_steps(x, amaxes, scale), (x, recipe, amaxes, scale, options), prefer)


def cast_pair_and_record(
    x: Any,
    recipe: DelayedScaling,
    amaxes: Any,
    scale: Any,
    *,
    rounding: str = "nearest",
    seed: Any = None,
    nonfinite: str = "propagate",
    storage: str = PLAIN,
    prefer: Prefer = None,
) -> tuple[ScaledTensor, ScaledTensor, Any, Any]:
    """The op of `AmaxHistory.cast_pair`: `cast_pair` with the supplied `scale`, and what `record_amax` returns."""
    options = cast_options(x, -1, None, rounding, seed, nonfinite, storage, None)
    return run("cast_pair_and_record", framework_of_steps(x, amaxes, scale), (x, recipe, amaxes, scale, options), prefer)


def dequantize(st: ScaledTensor, *, out_dtype: Any = "float32", out: Any = None, prefer: Prefer = None) -> Any:
    """Decode `st` to high precision, on the framework and device of its data.

    out_dtype: float32, float16 or bfloat16, as a string ("bf16" and "half" too), a NumPy dtype or a framework's. FP32 values
        are rounded once.
    out: an array of the result's shape and dtype to write into, for frameworks whose arrays are mutable.

    Raises UnsupportedError (a TypeError) for other types and dtypes, ShapeError for an `out` of another shape or dtype.

        >>> st = breccia.cast(np.array([[0.1, 1.0, 2.7, 6.0]], np.float32), "mxfp4")
        >>> breccia.dequantize(st)  # FP4 has 0, 0.5, 1, 1.5, 2, 3, 4, 6
        array([[0., 1., 3., 6.]], dtype=float32)
        >>> breccia.dequantize(st, out_dtype="float16").dtype
        dtype('float16')
    """
    if not isinstance(st, ScaledTensor):
        st = need_scaled("dequantize", st)
    options = product_options(output_dtype(out_dtype), out=out)
    return run("dequantize", framework_of(st.data_source), (st, options), prefer)


def requantize(
    st: ScaledTensor,
    recipe: ScalingRecipe | str,
    *,
    scale: Any = None,
    rounding: str = "nearest",
    seed: Any = None,
    nonfinite: str = "propagate",
    require_exact: bool = False,
    storage: str = PLAIN,
    out: ScaledTensor | None = None,
    prefer: Prefer = None,
) -> ScaledTensor:
    """Convert `st` to another recipe, with blocks along the same axis. If `st` has that recipe already, it is returned itself.

    Where the new format can represent all values of the old one (MXFP4 to MXFP8, 128x128 tiles to 1x128, INT4 to FP8, ...),
    codes and scales are translated: nothing is rounded and `rounding` has no effect. Otherwise values go through FP32 and
    `cast`. `breccia.exactness(st.recipe, recipe)` says which.

    require_exact: raise InexactError if a decoded value would change, and find exact conversions that these values allow.
        Except on the pairs that `breccia.exactness` calls exact, this reads values, so it cannot be used in traced functions.

    The other options and errors are those of `cast`.

        >>> st = breccia.cast(np.array([[0.5, 1.0, -3.0, 6.0]], np.float32), "mxfp4")
        >>> wide = breccia.requantize(st, "mxfp8", require_exact=True)
        >>> breccia.dequantize(wide)
        array([[ 0.5,  1. , -3. ,  6. ]], dtype=float32)
        >>> wide.scale, st.scale  # the same
        (array([[127]], dtype=uint8), array([[127]], dtype=uint8))
    """
    if not isinstance(st, ScaledTensor):
        st = need_scaled("requantize", st)
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    if not isinstance(require_exact, bool):
        raise OptionError(f"require_exact is True or False; got {require_exact!r}.", require_exact=require_exact)
    options = cast_options(st, -1, scale, rounding, seed, nonfinite, storage, out, of_tensor=True)
    if require_exact:
        options = options.replace(require_exact=True)
    return run("requantize", framework_of(st.data_source), (st, recipe, options), prefer)


def matmul(a: Any, b: Any, out_dtype: Any = "float32", *, bias: Any = None, out: Any = None, prefer: Prefer = None) -> Any:
    """`a @ b` with FP32 accumulation: (..., M, K) by (..., K, N) to (..., M, N) of `out_dtype`.

    Each operand is a ScaledTensor or a floating array of the same framework. A weight stored (N, K) with blocks along K is
    passed as `w.mT`.

    bias: a floating array of shape (N,), added to the FP32 product before it is rounded to `out_dtype`.

    Raises ShapeError for shapes that do not fit, UnsupportedError (a TypeError) for other types, dtypes or several frameworks.

        >>> x = breccia.cast(np.array([[1, 2], [3, 4]], np.float32), "mxfp8")
        >>> w = breccia.cast(np.array([[1, 0], [0, 2], [1, 1]], np.float32), "mxfp8")  # (N, K)
        >>> breccia.matmul(x, w.mT)
        array([[1., 4., 3.],
               [3., 8., 7.]], dtype=float32)
        >>> breccia.matmul(x, w.mT, "float16", bias=np.array([0, 0, 1], np.float32))
        array([[1., 4., 4.],
               [3., 8., 8.]], dtype=float16)
    """
    framework = common_framework(array_of(a), array_of(b), bias)
    if framework is None:
        try:
            framework = same_framework(arrays_of(a=a, b=b, bias=bias))
        except UnsupportedError:
            if scaled(a) is a and scaled(b) is b:
                raise
            return matmul(scaled(a), scaled(b), out_dtype, bias=bias, out=out, prefer=prefer)
    check_matmul(a, b, bias)
    return run("matmul", framework, (a, b, product_options(output_dtype(out_dtype), bias, out)), prefer)


def cast_matmul(
    x: Any, recipe: ScalingRecipe | str, b: Any, out_dtype: Any = "float32", *, bias: Any = None, prefer: Prefer = None
) -> Any:
    """`matmul(cast(x, recipe), b)`, with a gradient for `x`: it passes straight through the cast.

    Use it for a layer with quantized activations: the kernel for the two recipes multiplies the two ScaledTensors, with or
    without a gradient.

    x: (..., M, K), an array, cast with blocks along K. The other arguments and the errors are those of `matmul`.

        >>> x = np.array([[1, 2], [3, 4]], np.float32)
        >>> w = breccia.cast(np.array([[1, 0], [0, 2]], np.float32), "mxfp8")
        >>> breccia.cast_matmul(x, "mxfp8", w.mT)
        array([[1., 4.],
               [3., 8.]], dtype=float32)
    """
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    check_array(x)
    framework = common_framework(x, array_of(b), bias) or same_framework(arrays_of(x=x, b=b, bias=bias))
    check_matmul(x, b, bias)
    options = product_options(output_dtype(out_dtype), bias)
    return run("cast_matmul", framework, (x, recipe, b, options), prefer)


def grouped_matmul(a: Any, b: Any, offsets: Any, out_dtype: Any = "float32", *, out: Any = None, prefer: Prefer = None) -> Any:
    """Grouped matrix product for mixture of experts: the rows of `a`, sorted by expert, times their expert's matrix.

    a: (M, K). b: (E, K, N), one matrix per expert; pass weights stored (E, N, K) as `w.mT`. Each operand is a
        ScaledTensor or a floating array.
    offsets: int32 array of shape (E,): the end of each expert's rows, non-decreasing; expert e has rows
        offsets[e - 1] to offsets[e]. Rows from offsets[-1] on belong to no expert, and are zero in the result.

    Returns (M, N) of `out_dtype`, with the accumulation of `matmul`. Raises what `matmul` raises.

        >>> x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
        >>> w = breccia.cast(np.array([[[1, 0], [0, 1]], [[2, 0], [0, 2]]], np.float32), "mxfp8")
        >>> offsets = np.array([1, 3], np.int32)  # expert 0 has row 0, expert 1 rows 1 and 2
        >>> breccia.grouped_matmul(x, w.mT, offsets)
        array([[ 1.,  2.],
               [ 6.,  8.],
               [10., 12.]], dtype=float32)
    """
    framework = same_framework(arrays_of(a=a, b=b, offsets=offsets))
    check_grouped(a, b, offsets)
    options = product_options(output_dtype(out_dtype), out=out)
    return run("grouped_matmul", framework, (a, b, offsets, options), prefer)


def cast_ste(
    x: Any,
    recipe: ScalingRecipe | str,
    *,
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: Any = None,
    nonfinite: str = "propagate",
    prefer: Prefer = None,
) -> Any:
    """Round `x` to values of `recipe`: `dequantize(cast(x, recipe))` in the dtype of `x`. Gradients pass straight through.

    The options and errors are those of `cast`. NumPy has no gradients; there, it only rounds.

        >>> import torch
        >>> x = torch.tensor([[0.1, 1.0, 2.7, 6.0]], requires_grad=True)
        >>> y = breccia.cast_ste(x, "mxfp4")
        >>> y.tolist()
        [[0.0, 1.0, 3.0, 6.0]]
        >>> y.sum().backward()
        >>> x.grad
        tensor([[1., 1., 1., 1.]])
    """
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    options = cast_options(x, axis, scale, rounding, seed, nonfinite, PLAIN, None)
    return run("cast_ste", framework_of(x), (x, recipe, options), prefer)


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
    seed: Any = None,
    nonfinite: str = "propagate",
    prefer: Prefer = None,
) -> Any:
    """`cast_ste` whose gradient is zero where `x` lies outside a range.

    clip: "element", the range [clip_min, clip_max], by default plus and minus the element codec's largest value; or "scale",
        each block's representable range: the gradient is zero where the cast saturates, and in blocks that decode to NaN.

    Raises what `cast` raises, and OptionError for an empty range, and for `clip_min` or `clip_max` beside clip="scale".

        >>> import torch
        >>> x = torch.tensor([[1.0, 2.7, 500.0]], requires_grad=True)
        >>> breccia.cast_ste_clipped(x, "fp8_current").sum().backward()
        >>> x.grad  # 500 exceeds 448, the largest value of E4M3
        tensor([[1., 1., 0.]])
    """
    if not isinstance(recipe, ScalingRecipe):
        recipe = as_recipe(recipe)
    options = cast_options(x, axis, scale, rounding, seed, nonfinite, PLAIN, None)
    options = options.replace(clip=clip_bounds(recipe, clip_min, clip_max, clip) or "scale")
    return run("cast_ste", framework_of(x), (x, recipe, options), prefer)


def exactness(source: Any, target: ScalingRecipe | Format | str) -> Exactness:
    """What a conversion to `target` keeps: decided from two formats; or found for one tensor, with counts.

    source: a recipe, its spec or a format, for what holds for every tensor; or a ScaledTensor of any framework, for what
        `requantize(source, target, require_exact=True)` does with it. This reads its values where the formats leave a choice,
        so it cannot be traced.
    target: a recipe or its spec; or a format, if the source is not a tensor. A recipe also says whether scales are powers of
        two.

    Raises UnknownNameError for an unknown recipe, UnsupportedError for other types.

        >>> breccia.exactness("mxfp4", "mxfp8")
        Exactness(same codes: codes of E4M3 for the same numbers)
        >>> breccia.exactness("mxfp4", "nvfp4")
        Exactness(values decide: exact if exponents of scales span at most 17 in a tensor; by at most 1 of a scale)
        >>> st = breccia.cast(np.array([[0.5, 1.0, -3.0, 6.0]], np.float32), "mxfp4")
        >>> found = breccia.exactness(st, "nvfp4")
        >>> found.kind, found.exact, found.changed
        ('same codes', True, 0)
        >>> breccia.exactness(breccia.cast(np.array([[1.0, 1.125]], np.float32), "mxfp8"), "mxfp4").changed
        1
    """
    return targets.load("breccia.kernels.conversions:exactness")(source, target)


def metrics(reference: Any, quantized: Any) -> ErrorMetrics:
    """SQNR, cosine similarity, largest error, clip rate and underflow rate of `quantized` against `reference`.

    Each is a ScaledTensor or an FP64, FP32, FP16 or BF16 array, of one shape and any framework. The numbers are those of
    `breccia compare` for the same tensors; the clip rate needs a ScaledTensor as `quantized`, whose format has largest values.
    Adding two results gives the metrics of both tensors together. Values are read, so tensors cannot be traced.

    Raises ShapeError if the shapes differ, UnsupportedError for other types and dtypes.

        >>> x = np.array([[0.125, 1.0, 3.0, 6.0]], np.float32)
        >>> errors = breccia.metrics(x, breccia.cast(x, "mxfp4"))
        >>> errors.max_error, errors.underflow_rate  # 0.125 became 0
        (0.125, 0.25)
        >>> print(f"{errors.sqnr:.1f} dB")
        34.7 dB
    """
    return targets.load("breccia.kernels.measuring:metrics")(reference, quantized)


def explain(op: str, *operands: Any, on: str | None = None, prefer: Prefer = None, **options: Any) -> Explanation:
    """Explain which kernel runs for a call, why the others do not, which kernels it calls, and where each source is.

    operands: those of the op; a recipe or its name may replace a ScaledTensor, and "array" a plain operand. `cast`
        needs none.
    on: the framework, or framework and device ("torch:cuda"), where no operand is an array.
    options: keyword options of the op.

        >>> x = np.ones((4, 64), np.float32)
        >>> print(breccia.explain("cast", x, "nvfp4", prefer="numpy.cast"))
        cast of nvfp4 on numpy
         -> numpy.cast      core       .../breccia/kernels/numpy/casting.py:...
            reference.cast  core       .../breccia/kernels/reference/casting.py:...
              skipped: prefer= names numpy.cast
        >>> explanation = breccia.explain("matmul", "array", "nvfp4", on="torch", prefer="reference.matmul")
        >>> explanation.winner.name
        'reference.matmul'
    """
    return targets.load("breccia.dispatch.explaining:explain")(op, operands, on, prefer, options)


def public(op: Operation) -> Callable[..., Any]:
    """The function that users call for the op of a plug-in: f(*arguments, **options), with `prefer=` as another option.

    It checks its arguments, computes gradients by `op.derivative`, and works in `torch.compile`, `jax.jit` and `mx.compile`.
    A recipe may be given by its name. See docs/api/plugins.md.

    The function raises TypeError for missing and unknown arguments; UnsupportedError for arrays of several frameworks, and for
    a ScaledTensor where an array is due or the other way round; and what `op.validate` raises.

        >>> from breccia.backend import OPERATIONS, public
        >>> cast_pair = public(OPERATIONS["cast_pair"])  # breccia's own; a plug-in passes its op
        >>> rows, columns = cast_pair(np.ones((64, 128), np.float32), "mxfp8", nonfinite="raise")
        >>> columns
        breccia.ScaledTensor('mxfp8', shape=(64, 128), numpy cpu, 8.25 bits per value, axis=-2)
    """
    positional = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name, _ in op.arguments]
    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(op.default, name)) for name in op.options]
    prefer = Parameter("prefer", Parameter.KEYWORD_ONLY, default=None)
    signature = Signature([*positional, *options, prefer])

    def function(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        named = bound.arguments
        values = {name: _argument(op, name, kind, named[name]) for name, kind in op.arguments}
        arrays = {name: array_of(x) for name, x in values.items() if hasattr(array_of(x), "shape")}
        framework = same_framework(arrays)
        first = values[op.arguments[0][0]]
        if op.default is None:
            taken: tuple[Any, ...] = ()
        elif "out_dtype" in op.options:
            taken = (product_options(output_dtype(named["out_dtype"]), named.get("bias"), named.get("out")),)
        else:
            defaults = {name: getattr(DEFAULT, name) for name in CASTING} | {name: named[name] for name in op.options}
            extra = {name: defaults.pop(name) for name in op.options if name not in CASTING}
            casting = cast_options(first, **defaults, of_tensor=isinstance(first, ScaledTensor))
            taken = (casting.replace(**extra) if extra else casting,)
        if op.validate is not None:
            targets.load(op.validate)(*values.values(), *taken)
        return run(op.name, framework, (*values.values(), *taken), named["prefer"])

    function.__name__ = function.__qualname__ = op.name
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return traced_by_framework(function)


def _argument(op: Operation, name: str, kind: Kind, x: Any) -> Any:
    """An argument of an op of a plug-in. Raises UnsupportedError where it is of another kind."""
    if kind is Kind.RECIPE:
        recipe = as_recipe(x)
        if not isinstance(recipe, op.recipe):
            raise UnsupportedError(f"{op.name} takes a {op.recipe.__name__} as {name}; got {recipe!r}.", op=op.name)
        return recipe
    operand = scaled(x)
    if kind is Kind.TENSOR:
        return need_scaled(op.name, operand)
    if kind is not Kind.EITHER and isinstance(operand, ScaledTensor):
        raise UnsupportedError(f"{op.name} takes an array as {name}, got a ScaledTensor; pass its values: x.dequantize().")
    return operand


def plugins() -> list[Plugin]:
    """The installed plug-ins: each with its name, distribution, version, declarations, status, and why it was set aside.

    >>> [plugin.name for plugin in breccia.plugins()]
    ['core', ...]
    >>> breccia.plugins()[0].distribution, breccia.plugins()[0].status
    ('breccia-core', 'active')
    """
    return list(registry().plugins)


for _op in (cast, cast_pair, dequantize, requantize, matmul, cast_matmul, grouped_matmul, cast_ste, cast_ste_clipped):
    traced_by_framework(_op)
