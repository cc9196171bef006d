"""Kernels for torch's CPU tensors: the NumPy kernels, zero-copy. Components are viewed as arrays, results as tensors."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch

from breccia import ScaledTensor, ScalingRecipe
from breccia.backend import (
    DEFAULT,
    FLOAT32,
    PLAIN,
    CastOptions,
    ProductOptions,
    calls,
    checks,
    components,
    composites,
    product_options,
    reference,
    registry,
    targets,
    threads,
)
from breccia.internal import InternedKey

from .ops import BIT_PATTERNS, TORCH, need_dense, opaque
from .repeating import Repeat, likeness

Array = Any


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`cast` by the kernel for NumPy arrays, on at most as many threads as torch may use."""
    scale, out, importance = options.scale, options.out, options.importance
    supplied = isinstance(scale, torch.Tensor)
    if (supplied and not (_readable(scale) and scale.dtype in _SCALES)) or (out is not None and not _takes(out, recipe)):
        return reference.cast(x, recipe, options)
    if importance is not None:
        checks.check_importance(importance, x, recipe, options.axis)
        if not _readable(importance):
            return reference.cast(x, recipe, options)
        options = options.replace(importance=_floats(importance))
    if options is not DEFAULT:
        numpy_scale = scale
        if supplied:  # BF16 as numbers: bit patterns would be a scale of another dtype
            numpy_scale = _floats(scale) if scale.dtype == torch.bfloat16 else _array(scale)
        options = options.replace(scale=numpy_scale, out=None if out is None else _arrays(out, _written))
    if x.dtype not in _FLOATS:
        checks.check_cast(x, recipe)
    if x.numel() <= _ALONE:
        written = calls.cast(_floats(x), recipe, options)
    else:
        written = threads.at_most(torch.get_num_threads(), calls.cast, _floats(x), recipe, options)
    return _tensors(written) if out is None else out


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Array:
    """`dequantize` by the kernel for NumPy arrays, on at most as many threads as torch may use."""
    out_dtype, _, out = options
    if out is not None:
        if not (_readable(out) and out.dtype in _FLOATS):
            return reference.dequantize(st, options)
        options = options._replace(out=_floats(out, _written))
    if st.data.numel() <= _ALONE:
        values = calls.dequantize(_arrays(st), options)
    else:
        values = threads.at_most(torch.get_num_threads(), calls.dequantize, _arrays(st), options)
    return _tensor(values, getattr(torch, out_dtype)) if out is None else out


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """`matmul` by the kernel for NumPy arrays, on at most as many threads as torch may use."""
    return _matmul(a, b, options, None)


def matmul_int8(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """`matmul` of activations rounded to INT8: `breccia_native.matmul.matmul_int8`."""
    return _matmul(a, b, options, "native.matmul_int8")


def matmul_bf16(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """`matmul` of activations rounded to BF16: `breccia_native.matmul.matmul_bf16`."""
    return _matmul(a, b, options, "native.matmul_bf16")


def grouped_matmul(a: Any, b: Any, offsets: Array, options: ProductOptions = FLOAT32) -> Array:
    """`grouped_matmul` by the kernel for NumPy arrays, on at most as many threads as torch may use."""
    out_dtype, _, out = options
    if not _readable(offsets) or (out is not None and not _readable(out)):
        return composites.grouped_matmul(a, b, offsets, options)
    left, right = [_arrays(x) if isinstance(x, ScaledTensor) else _floats(x) for x in (a, b)]
    product = threads.at_most(torch.get_num_threads(), calls.grouped_matmul, left, right, _array(offsets))
    tensor = torch.from_numpy(product)
    return tensor if out is None and out_dtype == "float32" else reference.result(TORCH, tensor, out_dtype, out)


def _matmul(a: Any, b: Any, options: ProductOptions, prefer: str | None) -> Array:
    out_dtype, bias, out = options
    if not (bias is None or _readable(bias)) or not (out is None or _readable(out)):  # a transform may wrap a bias alone
        return composites.matmul(a, b, options)
    if out is None and (tensor := _repeated(a, b, bias, prefer)) is not None:
        return tensor if out_dtype == "float32" else reference.result(TORCH, tensor, out_dtype, None)
    left, right = [_arrays(x) if isinstance(x, ScaledTensor) else _floats(x) for x in (a, b)]
    numpy_options = FLOAT32 if bias is None else ProductOptions(bias=_floats(bias))
    product = threads.at_most(torch.get_num_threads(), calls.matmul, left, right, numpy_options, prefer=prefer)
    tensor = torch.from_numpy(product)
    return tensor if out is None and out_dtype == "float32" else reference.result(TORCH, tensor, out_dtype, out)


# ------------------------------------------------------------------------------------------------ repeated products


def _repeated(a: Any, b: Any, bias: Array | None, prefer: str | None) -> Array | None:
    """The FP32 product by the call that was prepared for operands like these; None where there is none.

    The kernel for NumPy checks such operands once, and reads once what it needs of them besides their numbers.
    """
    if not isinstance(b, ScaledTensor) or isinstance(a, ScaledTensor) or a.layout is not torch.strided:
        return None
    if bias is not None and bias.dtype != torch.float32:
        bias = bias.float()
    at = _addresses(a, b, bias)
    multiply = _call(a, b, bias, at, prefer)
    if multiply is None:
        return None
    return _multiplied(multiply, a, at[0], at[1:], b.global_scale)


def _multiplied(multiply: Any, x: Array, place: int, rest: tuple[int, ...], global_scale: Array | None) -> Array | None:
    """The FP32 product by a prepared call in memory of torch, whose alignment the next product may need; or None."""
    product = x.new_empty(multiply.shape, dtype=torch.float32)
    scale = None if global_scale is None else global_scale.item()
    return None if multiply(place, *rest, scale, _threads(), product.data_ptr()) is None else product


def _addresses(a: Array, b: ScaledTensor, bias: Array | None) -> tuple[int, int, int, int, int]:
    """Where the operands lie, 0 for none: x, codes, scales, offsets, bias."""
    offset = b.zero_point
    return (
        a.data_ptr(),
        b.data.data_ptr(),
        b.scale.data_ptr(),
        0 if offset is None else offset.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )


def lend_threads() -> None:
    """Let compiled kernels work on torch's threads, where torch and breccia-native have what that needs.

    After each operation of torch, its threads look for work for milliseconds, and would take the processors from others.
    """
    # A library finds the functions of those that it needs.
    library = ctypes.CDLL(torch._C.__file__)  # pyright: ignore[reportPrivateUsage]
    with suppress(AttributeError, ImportError):  # torch below 2.10; no breccia-native, or one without POSIX threads
        functions = library.torch_parallel_for, library.torch_get_num_threads
        at = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
        targets.load("breccia_native.pool:borrow")(*at)


lend_threads()


def _threads() -> int:
    return min(torch.get_num_threads(), threads.get_num_threads())


def _call(a: Array, b: ScaledTensor, bias: Array | None, at: tuple[int, int, int, int, int], prefer: str | None) -> Any:
    """The call that was prepared for operands like these, at their addresses; None if there is none."""
    data, parts = b.data, (a, b.scale, b.zero_point, bias, b.global_scale)
    x, _, scales, offsets, added = at
    facts = (
        b.recipe.interned_key,
        b.layout.interned_key,
        b.axis,
        b.padding,
        (x | scales | offsets | added) & 3,  # what the kernel reads besides codes, which are bytes, may be unaligned
        data.shape,
        data.stride(),
        data.dtype,
        data.device,
        prefer,
        *[part if part is None else _facts(part) for part in parts],
    )
    table, known = registry().table, _products.get(facts)
    if known is None or known[0] is not table:
        if len(_products) >= _REMEMBERED:
            _products.clear()
        known = _products[facts] = table, _prepared(a, b, bias, prefer)
    return known[1]


def _facts(x: Array) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.is_neg()


def _prepared(a: Any, b: ScaledTensor, bias: Array | None, prefer: str | None) -> Any:
    """The call that repeats the product of these operands, if the table's kernel for NumPy prepares one."""
    parts = [a, *components(b).values(), *(() if bias is None else (bias,))]
    if len(b.data.shape) != 2 or not all(
        x.layout is torch.strided and x.device.type == "cpu" and not x.is_neg() for x in parts
    ):
        return None
    left, right, added = _floats(a), _arrays(b), None if bias is None else _floats(bias)
    options = FLOAT32 if added is None else ProductOptions(bias=added)
    known = registry()
    chosen = known.table.choose(known.operation("matmul"), "numpy", left, right, None, options, prefer)
    if chosen.checked or chosen.traced or chosen.kernel.prepare is None:
        return None
    return targets.load(chosen.kernel.prepare)(left, right, added)


def repeated(a: Array, b: ScaledTensor, bias: Array | None, out_dtype: str) -> Repeat | None:
    """The product of these operands as a function that their layer keeps; None where `matmul` prepares no call for it.

    The function returns None for other operands: those in which anything differs that the choice of a kernel, or its call, may
    depend on. Operands need no gradient.
    """
    multiplier = _multiplier(a, b, bias, out_dtype)
    if multiplier is None:
        return None
    again, at, global_scale = _again(multiplier, a, bias, out_dtype), _addresses(a, b, bias)[1:], b.global_scale

    def repeat(x: Array, weight: ScaledTensor, added: Array | None) -> Array | None:
        return None if weight is not b or added is not bias else again(x, at, global_scale, added)

    return repeat


def _again(multiplier: tuple[Any, Any], a: Array, bias: Array | None, out_dtype: str) -> Callable[..., Array | None]:
    """What multiplies inputs like `a` again by what `_multiplier` returned for it.

    The function takes an input, the addresses of the other operands, the global scale and the bias, and returns None for an
    input or a bias of another kind. It keeps no tensor.
    """
    table, multiply = multiplier
    is_like, of_bias = likeness(a, table), None if bias is None else _facts(bias)
    added_at = 0 if bias is None else bias.data_ptr()

    def again(x: Array, rest: tuple[int, ...], global_scale: Array | None, added: Array | None) -> Array | None:
        if not is_like(x) or (added is not None and (added.data_ptr() != added_at or _facts(added) != of_bias)):
            return None
        place = x.data_ptr()
        if place % _ALIGNED:
            return None
        product = _multiplied(multiply, x, place, rest, global_scale)
        return product if product is None or out_dtype == "float32" else reference.result(TORCH, product, out_dtype, None)

    return again


def _multiplier(a: Array, b: ScaledTensor, bias: Array | None, out_dtype: str) -> tuple[Any, Any] | None:
    """The table of kernels, and the call that was prepared by the kernel that it chooses for these operands; or None."""
    known = registry()
    chosen = known.table.choose(known.operation("matmul"), "torch", a, b, None, product_options(out_dtype, bias))
    is_ours = chosen.function in _NAMES and not (chosen.checked or chosen.traced)
    if not is_ours or type(a) is not torch.Tensor or not (bias is None or bias.dtype is torch.float32):
        return None
    at = _addresses(a, b, bias)
    multiply = _call(a, b, bias, at, _NAMES[chosen.function])
    return None if multiply is None or at[0] % _ALIGNED else (known.table, multiply)


def linear(
    x: Array,
    data: Array,
    scale: Array,
    zero_point: Array | None,
    global_scale: Array | None,
    bias: Array | None,
    facts: str,
    weight: Callable[..., tuple[ScaledTensor, str]],
) -> Array:
    """The product of an input and the transpose of a weight, plus a bias: for compiled graphs, which have no layers.

    facts: what else the product depends on. weight: makes the weight, and the name of the product's dtype, of its components
    and facts. What repeats the product of these tensors is kept as long as the codes exist. A graph calls this for each layer
    and token, so it only looks at what may differ between two calls, and in no loop.
    """
    key = id(data)
    kept = _kept.get(key)
    if kept is not None:
        known, codes, scales, offsets, globals_, added, at, again = kept
        if (
            data is codes()
            and scale is scales()
            and (offsets is _nothing if zero_point is None else zero_point is offsets())
            and (globals_ is _nothing if global_scale is None else global_scale is globals_())
            and (added is _nothing if bias is None else bias is added())  # one that has ended is another than none
            and known == facts
            and data.data_ptr() == at[0]
            and scale.data_ptr() == at[1]
            and (zero_point is None or zero_point.data_ptr() == at[2])
        ):
            product = again(x if x.data_ptr() % _ALIGNED == 0 else x.clone(), at, global_scale, bias)
            if product is not None:
                if at[0] not in _layers and x.data_ptr() % _ALIGNED == 0:  # another tensor in the same memory has ended
                    st, dtype = weight(data, scale, zero_point, global_scale, facts)
                    _keep_in_c(_multiplier(x, st.mT, bias, dtype), st, dtype)
                return product
    st, dtype = weight(data, scale, zero_point, global_scale, facts)
    st = st.mT
    if (multiplier := _multiplier(x, st, bias, dtype)) is not None:
        others = [_nothing if part is None else weakref.ref(part) for part in (scale, zero_point, global_scale, bias)]
        at = _addresses(x, st, bias)[1:]
        codes = weakref.ref(data, lambda _: _forget(key, at[0]))
        if kept is not None:
            _layers.pop(kept[6][0], None)
        _kept[key] = facts, codes, *others, at, _again(multiplier, x, bias, dtype)
        _keep_in_c(multiplier, st, dtype)
    return calls.matmul(x, st, product_options(dtype, bias))


def _nothing() -> None:
    """What refers to no tensor."""


def _keep_in_c(multiplier: tuple[Any, Any] | None, b: ScaledTensor, out_dtype: str) -> None:
    """Let the compiled operator repeat a product by a weight, if it has asked for it. multiplier: from `_multiplier`."""
    layer = None
    if multiplier is not None and (keep := getattr(multiplier[1], "keep", None)) is not None:
        layer = keep(multiplier[0], None if b.global_scale is None else b.global_scale.item(), _NUMBERS[out_dtype])
    _layers[b.data.data_ptr()] = layer


def _forget(key: int, codes: int) -> None:
    """Forget what repeats the products of codes that no longer exist, by their identity and their address."""
    _kept.pop(key, None)
    _layers.pop(codes, None)


def operate() -> bool:
    """Let the operator of layers repeat products in C, where torch and breccia-native have what that needs.

    Python then only chooses a kernel, by the operator `linear_by_choice`, for operands of which nothing is kept.
    """
    library = ctypes.CDLL(torch._C.__file__)  # pyright: ignore[reportPrivateUsage]
    try:  # torch below 2.10; no breccia-native
        at = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _FUNCTIONS]
        return targets.load("breccia_native.products:operate")(tuple(at), _layers, registry, threads.get_num_threads)
    except (AttributeError, ImportError):
        return False


#: The functions of torch's stable interface in C that the operator calls, and the end of memory of C++.
_FUNCTIONS = (
    "aoti_torch_library_init_impl",
    "torch_library_impl",
    "torch_call_dispatcher",
    "torch_get_const_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dtype",
    "aoti_torch_get_device_type",
    "aoti_torch_empty_strided",
    "aoti_torch_copy_",
    "aoti_torch_delete_tensor_object",
    "torch_string_length",
    "torch_string_c_str",
    "torch_delete_string",
    "torch_get_num_threads",
    "aoti_torch_check",
    "_ZdlPv",
)
#: The numbers of dtypes in that interface.
_NUMBERS = {"float16": 5, "float32": 6, "bfloat16": 15}
#: What repeats products in C, by the address of the codes; None where only Python can.
_layers: dict[int, Any] = {}


#: The kernels for NumPy that these functions call, None for the one that its table chooses.
_NAMES = {matmul: None, matmul_int8: "native.matmul_int8", matmul_bf16: "native.matmul_bf16"}
#: What repeats products of compiled graphs, by the identity of the codes: facts, references to the operands, and addresses.
_kept: dict[int, tuple[Any, ...]] = {}
#: What the address of an input must be a multiple of, as torch's own memory is: kernels may be chosen by it.
_ALIGNED = 64
#: Prepared calls by the facts of operands, each with the table that it is for; None where a call cannot be prepared.
_products: dict[Any, tuple[Any, Any]] = {}


# ------------------------------------------------------------------------------------------------ the same memory


def _readable(x: Array) -> bool:
    """Can NumPy view the memory of `x`?"""
    return opaque(x) is None and x.device.type == "cpu" and x.layout is torch.strided and not x.is_nested


def _takes(out: Any, recipe: ScalingRecipe) -> bool:
    """Can the kernel write into `out`? Its view as bytes cannot distinguish float8 from uint8."""
    viewable = isinstance(out, ScaledTensor) and out.storage == PLAIN and all(map(_readable, components(out).values()))
    return viewable and {name: part.dtype for name, part in components(out).items()} == _dtypes(recipe)


class _Memory:
    """The memory of a tensor, for NumPy to read. `Tensor.numpy()` would fix the size of its storage, which FSDP changes."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Array) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return torch.to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _HOST


#: DLPack's name of the memory of CPUs.
_HOST = (1, 0)


def _read(x: Array) -> np.ndarray:
    """The memory of a tensor that needs no gradient, read-only."""
    return np.from_dlpack(_Memory(x))


def _written(x: Array) -> np.ndarray:
    """The memory of a tensor, writable."""
    return x.numpy()


def _floats(x: Array, view: Callable[[Array], np.ndarray] = _read) -> np.ndarray:
    """Numbers as an array. NumPy has BF16 from ml_dtypes. Raises UnsupportedError for a sparse tensor."""
    need_dense(x)
    if x.is_neg():  # an imaginary part may have torch's negative bit, which NumPy lacks
        x = x.resolve_neg()
    return _array(x, view).view(bfloat16()) if x.dtype == torch.bfloat16 else view(x)


@cache
def bfloat16() -> Any:
    """The dtype of NumPy for BF16. Imported where it is needed."""
    import ml_dtypes

    return ml_dtypes.bfloat16


def _array(part: Array, view: Callable[[Array], np.ndarray] = _read) -> np.ndarray:
    """A component as an array: float8 as bytes, bfloat16 as bit patterns, others unchanged."""
    if part.requires_grad:
        part = part.detach()
    word = BIT_PATTERNS.get(part.dtype)
    return view(part if word is None else part.view(word))


def _arrays(st: ScaledTensor, view: Callable[[Array], np.ndarray] = _read) -> ScaledTensor:
    zero_point, global_scale = st.zero_point, st.global_scale
    return ScaledTensor.from_parts(
        _array(st.data, view),
        _array(st.scale, view),
        st.recipe,
        st.layout,
        None if zero_point is None else _array(zero_point, view),
        None if global_scale is None else _array(global_scale, view),
        st.axis,
        st.padding,
    )


def _tensors(st: ScaledTensor) -> ScaledTensor:
    """The result of a NumPy kernel, in torch's storage dtypes."""
    dtypes, zero_point, global_scale = _dtypes(st.recipe), st.zero_point, st.global_scale
    return ScaledTensor.from_parts(
        _tensor(st.data, dtypes["data"]),
        _tensor(st.scale, dtypes["scale"]),
        st.recipe,
        st.layout,
        None if zero_point is None else _tensor(zero_point, dtypes["zero_point"]),
        None if global_scale is None else _tensor(global_scale, dtypes["global_scale"]),
        st.axis,
        st.padding,
    )


def _dtypes(recipe: ScalingRecipe) -> dict[str, torch.dtype]:
    """The storage dtypes of a cast's components."""
    dtypes = _known.get(recipe.interned_key)
    if dtypes is None:
        if len(_known) >= _REMEMBERED:
            _known.clear()
        dtypes = _known[recipe.interned_key] = {name: getattr(torch, d) for name, d in TORCH.dtypes(recipe.format).items()}
    return dtypes


_known: dict[InternedKey, dict[str, torch.dtype]] = {}
_REMEMBERED = 256
#: Elements up to which the kernels use one thread.
_ALONE = 1 << 13
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Dtypes of scales that NumPy can view: numbers, and codes as the level is stored.
_SCALES = {*_FLOATS, *BIT_PATTERNS, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}


def _tensor(part: np.ndarray, dtype: torch.dtype) -> Array:
    array = np.asarray(part)
    if dtype in BIT_PATTERNS and array.dtype.kind not in "ui":
        array = array.view(f"u{array.itemsize}")
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
