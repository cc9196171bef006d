"""Kernels for JAX arrays on the CPU: the NumPy kernels, zero-copy, eager and inside compiled functions.

Arrays in memory are viewed as NumPy arrays and results are handed to JAX, so that a new shape compiles nothing. Inside compiled
functions XLA calls the same kernels through breccia-native (`breccia_jax.native`).
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from breccia import ScaledTensor, ScalingRecipe
from breccia.backend import (
    DEFAULT,
    FLOAT32,
    NUMPY,
    PARTS,
    PLAIN,
    CastOptions,
    Metadata,
    Prefer,
    ProductOptions,
    calls,
    checks,
    dtype_name,
    packing,
    part_shapes,
    product_options,
    reference,
    registry,
)
from breccia.internal import keeps_values

from .container import Static, leaf_of, of_leaves, untransposed
from .meshes import check_operand
from .native import NumPyProgram, OnCPU, as_numpy
from .ops import JAX
from .primitive import Shapes, traced

Array = Any
#: XLA takes memory at multiples of this address over without a copy.
_ALIGNMENT = 64
#: Items of the largest operand below which XLA computes the examples of a batch at once.
_SMALL = 1 << 14


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`cast` by the kernel for NumPy arrays."""
    checks.check_cast(x, recipe)
    scale = options.scale
    if options.out is not None or not (scale is None or isinstance(scale, jax.Array)):
        return reference.cast(x, recipe, options)  # which refuses `out`, and reads numbers of any kind
    stochastic = options.rounding == "stochastic"
    arrays = [x, *(() if scale is None else (scale,)), *(() if options.importance is None else (options.importance,))]
    if stochastic:
        words = JAX.words(np.asarray(options.seed) if in_memory([options.seed]) else options.seed)
        arrays.append(jnp.stack(words) if any(isinstance(word, Tracer) for word in words) else np.array(words, np.int32))
    fits = options.axis in (-1, -2) and len(x.shape) >= -options.axis  # the generic algorithm says what does not
    if not fits or not _static(arrays) or not (options.nonfinite == "propagate" or in_memory(arrays)):
        return reference.cast(x, recipe, options)
    if isinstance(scale, Tracer):  # an error of the kernel would be one of XLA's
        layout = checks.fitted_layout(recipe, tuple(x.shape), options.axis)
        reference.check_supplied(JAX, scale, x, recipe.format, layout, options.axis)
    weighted = options.importance is not None
    program = Cast(recipe.to_json(), options.axis, scale is not None, stochastic, options.nonfinite, _shapes(arrays), weighted)
    return program.static.assembled(_ran(program, arrays))


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Array:
    """`dequantize` by the kernel for NumPy arrays; inside compiled functions the generic algorithm, which XLA fuses."""
    tensor, arrays = Tensor.of(st)
    check_operand("st", st)
    if tensor is None or options.out is not None or not in_memory(arrays):
        return reference.dequantize(st, options)
    return _ran(Decode(tensor, tuple(st.shape), options.out_dtype, _shapes(arrays)), arrays)[0]


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """`matmul` by the kernel for NumPy arrays."""
    out_dtype, bias, out = options
    checks.check_matmul(a, b, bias)
    for name, operand in (("a", a), ("b", b)):
        if isinstance(operand, ScaledTensor):
            check_operand(name, operand)
    (left, first), (right, second) = Tensor.of(a), Tensor.of(b)
    arrays = [*first, *second, *(() if bias is None else (bias,))]
    if out is not None or not _static(arrays):
        return reference.matmul(a, b, options)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if bias is not None and np.broadcast_shapes(shape, bias.shape) != shape:
        return reference.matmul(a, b, options)
    return _ran(Product(left, right, bias is not None, shape, out_dtype, _shapes(arrays)), arrays)[0]


# ------------------------------------------------------------------------------------------------ eager calls


def in_memory(arrays: Iterable[Any]) -> bool:
    """Whether all are arrays in the memory of one CPU device, outside of any mesh. NumPy's arrays are everywhere."""
    devices: set[Any] = set()
    for array in arrays:
        if isinstance(array, np.ndarray):
            continue
        if not isinstance(array, jax.Array) or isinstance(array, Tracer) or type(array.sharding) is not SingleDeviceSharding:
            return False
        devices.add(array.device)
    return len(devices) == 1 and devices.pop().platform == "cpu" and jax.sharding.get_abstract_mesh().empty


def runs(op: str, a: Any, b: Any = None, recipe: Any = None, options: Any = None, prefer: Prefer = None) -> bool:
    """Whether a call of these operands, all in memory, runs by a kernel of this module, and so compiles nothing."""
    arrays = [part for x in (a, b) for part in (_leaves(x) if isinstance(x, ScaledTensor) else (x,)) if part is not None]
    for name in ("scale", "seed", "bias", "importance"):
        if isinstance(part := None if options is None else options.get(name), jax.Array):
            arrays.append(part)
    if not in_memory(arrays):
        return False
    return _is_eager(_chosen(op, a, b, recipe, options, prefer))


def multiplies(x: Array, b: ScaledTensor) -> bool:
    """Whether `matmul` of these operands, traced or not, runs by the kernel of this module, or by one for the storage of b."""
    kernel = _chosen("matmul", x, b).kernel
    return kernel.eager or (b.storage != PLAIN and b.storage in kernel.reads)


def _chosen(op: str, a: Any, b: Any = None, recipe: Any = None, options: Any = None, prefer: Prefer = None) -> Any:
    known = registry()
    operation = known.operation(op)
    used = operation.default if options is None else options
    return known.table.choose(operation, "jax", a, b, recipe, used, prefer)


def _is_eager(chosen: Any) -> bool:
    return chosen.kernel.eager


def _is_composite(chosen: Any) -> bool:
    return chosen.kernel.kind == "composite"


def casts_and_multiplies(x: Array, recipe: ScalingRecipe, b: Any, bias: Array | None) -> bool:
    """Whether `cast_matmul` is a cast and a product by kernels of this module."""
    if not runs("cast", x, None, recipe) or not runs("matmul", x, b, options=product_options("float32", bias)):
        return False
    return _is_composite(_chosen("cast_matmul", x, b, recipe))


def casts(op: str, x: Array, recipe: ScalingRecipe | None, options: CastOptions, prefer: Prefer) -> bool:
    """Whether a composite of casts runs by kernels of this module."""
    if prefer is not None or not runs("cast", x, None, recipe, options):
        return False
    return _is_composite(_chosen(op, x, None, recipe, options))


def recasts(st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions) -> bool:
    """Whether `requantize` decodes, by the kernel of this module, and casts, rather than keep scales and translate codes."""
    if options.scale is None and (st.recipe == recipe or keeps_values(st.recipe, st.layout.plain, st.axis, recipe)):
        return False
    return _is_composite(_chosen("requantize", st, None, recipe, options)) and runs("dequantize", st)


def _ran(program: NumPyProgram, arrays: Sequence[Array]) -> list[Array]:
    """The results of a program, at once or in the function that is traced."""
    if not in_memory(arrays):
        return traced(program, arrays)
    results = [_aligned(*of) for of in program.results]
    program.run([np.asarray(a) for a in arrays], results)
    first = arrays[0]
    return [jax.device_put(a, first.device if first.committed else None) for a in results]


def _aligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Memory of an array, which XLA can take over."""
    n = math.prod(shape) * jnp.dtype(dtype).itemsize
    raw = np.empty(n + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return as_numpy(raw[start : start + n], shape, dtype)


# ------------------------------------------------------------------------------------------------ programs


@dataclass(frozen=True)
class Tensor:
    """A ScaledTensor without its arrays.

    dtypes: of the components, by name, where arrays hold them as integers. turned: whether it is the transpose of the described
    tensor.
    """

    metadata: str
    names: tuple[str, ...]
    dtypes: tuple[str | None, ...]
    turned: bool

    @classmethod
    def of(cls, x: Any) -> tuple[Tensor | None, list[Any]]:
        """(The description of a ScaledTensor, its arrays); (None, [x]) for an array."""
        if not isinstance(x, ScaledTensor):
            return None, [x]
        st, turned = untransposed(x)
        dtypes = (None,) * len(PARTS) if st.held is None else st.held.dtypes
        parts = [(*both, part) for *both, part in zip(PARTS, dtypes, _leaves(st), strict=True) if part is not None]
        names, kinds, arrays = zip(*parts, strict=True)
        return cls(_text_of(Metadata.of(st)), names, kinds, turned), list(arrays)

    def generic(self, arrays: Sequence[Array]) -> ScaledTensor:
        """The tensor with these arrays."""
        leaves = dict(zip(self.names, arrays, strict=True))
        dtypes = dict(zip(self.names, self.dtypes, strict=True))
        static = Static(_metadata_of(self.metadata), tuple(map(dtypes.get, PARTS)))
        st = of_leaves(static, tuple(map(leaves.get, PARTS)))
        return st.mT if self.turned else st

    def numpy(self, arrays: Sequence[np.ndarray]) -> ScaledTensor:
        """The tensor of NumPy with this memory."""
        parts = {
            name: NUMPY.to_numpy(array if dtype is None else array.view(jnp.dtype(dtype)))
            for name, dtype, array in zip(self.names, self.dtypes, arrays, strict=True)
        }
        st = _metadata_of(self.metadata).assembled(**parts)
        return st.mT if self.turned else st


@dataclass(frozen=True)
class Cast(OnCPU):
    """A call of `cast`: of `x`, a supplied scale, an importance, and the two words of a seed, if there are any."""

    recipe: str
    axis: int
    supplied: bool
    stochastic: bool
    nonfinite: str
    operands: Shapes
    weighted: bool = False

    @property
    def static(self) -> _Result:
        return _result(self.recipe, self.operands[0][0], self.axis, self.operands[1][0] if self.supplied else None)

    @property
    def results(self) -> Shapes:
        return self.static.leaves

    def text(self) -> str:
        return _text(self)

    def _options(self, arrays: Sequence[Any], **changed: Any) -> CastOptions:
        scale = arrays[1] if self.supplied else None
        changed["importance"] = arrays[1 + self.supplied] if self.weighted else None
        rounding = "stochastic" if self.stochastic else "nearest"
        return CastOptions(self.axis, scale, rounding, arrays[-1] if self.stochastic else None, self.nonfinite, **changed)

    def generic(self, *arrays: Array) -> list[Array]:
        st = reference.cast(arrays[0], ScalingRecipe.from_json(self.recipe), self._options(arrays))
        return [leaf_of(getattr(st, name))[0] for name in st.recipe.format.parts]

    def batched(self, arrays: Sequence[Array], axes: Sequence[int | None]) -> list[Array] | None:
        return each(self, arrays, axes)

    def run(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        out = self.static.numpy(results)
        options = self._options(arrays, out=out)
        if self.stochastic:
            low, high = (int(word) & 0xFFFFFFFF for word in arrays[-1])
            options = options.replace(seed=high << 32 | low)
        calls.cast(arrays[0], out.recipe, options)


@dataclass(frozen=True)
class Decode(OnCPU):
    """A call of `dequantize`."""

    tensor: Tensor
    shape: tuple[int, ...]
    dtype: str
    operands: Shapes

    @property
    def results(self) -> Shapes:
        return ((self.shape, self.dtype),)

    def text(self) -> str:
        return _text(self)

    def generic(self, *arrays: Array) -> list[Array]:
        return [reference.dequantize(self.tensor.generic(arrays), product_options(self.dtype))]

    def batched(self, arrays: Sequence[Array], axes: Sequence[int | None]) -> list[Array] | None:
        return None

    def run(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        calls.dequantize(self.tensor.numpy(arrays), ProductOptions(self.dtype, out=results[0]))


@dataclass(frozen=True)
class Product(OnCPU):
    """A call of `matmul`. a, b: the operands that are ScaledTensors. bias: whether there is one, the last array."""

    a: Tensor | None
    b: Tensor | None
    bias: bool
    shape: tuple[int, ...]
    dtype: str
    operands: Shapes

    @property
    def results(self) -> Shapes:
        return ((self.shape, self.dtype),)

    def text(self) -> str:
        return _text(self)

    def _parted(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
        """The arrays of each operand, and the bias."""
        n = 1 if self.a is None else len(self.a.names)
        return list(arrays[:n]), list(arrays[n : len(arrays) - self.bias]), arrays[-1] if self.bias else None

    def generic(self, *arrays: Array) -> list[Array]:
        a, b, bias = self._parted(arrays)
        left, right = (x[0] if t is None else t.generic(x) for x, t in ((a, self.a), (b, self.b)))
        return [reference.matmul(left, right, product_options(self.dtype, bias))]

    def batched(self, arrays: Sequence[Array], axes: Sequence[int | None]) -> list[Array] | None:
        """Rows of all products of a batch by one weight, as one product; else each product."""
        shapes = [shape for shape, _ in self.operands]
        one = axes[0] is not None and all(axis is None for axis in axes[1:])
        if (
            self.a is not None
            or self.b is None
            or not one
            or len(shapes[0]) != 2
            or len(self.shape) != 2
            or (self.bias and math.prod(shapes[-1][:-1]) != 1)
        ):
            return each(self, arrays, axes)
        x = jnp.moveaxis(arrays[0], axes[0] or 0, 0)
        _, b, bias = self._parted(arrays)
        rows = jnp.reshape(x, (-1, x.shape[-1]))
        return [
            jnp.reshape(calls.matmul(rows, self.b.generic(b), product_options(self.dtype, bias)), (x.shape[0], *self.shape))
        ]

    def run(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        a, b, bias = self._parted(arrays)
        left, right = (x[0] if t is None else t.numpy(x) for x, t in ((a, self.a), (b, self.b)))
        calls.matmul(left, right, ProductOptions(self.dtype, bias, results[0]))


@dataclass(frozen=True)
class Each(OnCPU):
    """A call for each example of a batch. mapped: whether an operand has an axis of examples, in front."""

    call: NumPyProgram
    count: int
    mapped: tuple[bool, ...]

    @property
    def operands(self) -> Shapes:
        shapes = zip(self.call.operands, self.mapped, strict=True)
        return tuple(((self.count, *shape) if mapped else shape, dtype) for (shape, dtype), mapped in shapes)

    @property
    def results(self) -> Shapes:
        return tuple(((self.count, *shape), dtype) for shape, dtype in self.call.results)

    def text(self) -> str:
        return json.dumps(
            ["Each", {"call": self.call.text(), "count": self.count, "mapped": self.mapped}], separators=(",", ":")
        )

    def generic(self, *arrays: Array) -> list[Array]:
        return jax.vmap(self.call.generic, in_axes=tuple(0 if mapped else None for mapped in self.mapped))(*arrays)

    def batched(self, arrays: Sequence[Array], axes: Sequence[int | None]) -> list[Array] | None:
        return each(self, arrays, axes)

    def run(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        for i in range(self.count):
            operands = [a[i, ...] if mapped else a for a, mapped in zip(arrays, self.mapped, strict=True)]
            self.call.run(operands, [result[i, ...] for result in results])


def each(call: NumPyProgram, arrays: Sequence[Array], axes: Sequence[int | None]) -> list[Array] | None:
    """The results of a call for each example along these axes; None for many small ones, faster at once by XLA."""
    if max(math.prod(shape) for shape, _ in call.operands) < _SMALL:
        return None
    arrays = [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True)]
    mapped = tuple(axis is not None for axis in axes)
    return traced(Each(call, arrays[mapped.index(True)].shape[0], mapped), arrays)


def read(text: str) -> NumPyProgram:
    """The inverse of `Program.text`."""
    kind, fields = json.loads(text, object_hook=_tuples)
    if kind == "Each":
        return Each(read(fields["call"]), fields["count"], fields["mapped"])
    return {"Cast": Cast, "Decode": Decode, "Product": Product}[kind](**fields)


def _text(program: Any) -> str:
    return json.dumps([type(program).__name__, asdict(program)], separators=(",", ":"))


def _tuples(fields: dict[str, Any]) -> Any:
    frozen = {name: _frozen(value) for name, value in fields.items()}
    return Tensor(**frozen) if "metadata" in frozen else frozen


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# Texts are read and written at each call, so they are remembered.


@lru_cache(maxsize=1024)
def _text_of(metadata: Metadata) -> str:
    return metadata.to_json()


@lru_cache(maxsize=1024)
def _metadata_of(text: str) -> Metadata:
    return Metadata.from_json(text)


@lru_cache(maxsize=1024)
def _result(text: str, shape: tuple[int, ...], axis: int, supplied: tuple[int, ...] | None) -> _Result:
    """What a cast of an array of that shape under the recipe `text` writes. supplied: the shape of a given scale."""
    recipe = ScalingRecipe.from_json(text)
    layout = checks.fitted_layout(recipe, shape, axis)
    padding = -shape[axis] % packing(recipe.format.element)[0]
    shapes = part_shapes(recipe.format, layout, shape, axis, supplied)
    return _Result(Metadata(recipe, layout, axis, padding), shapes, JAX.dtypes(recipe.format))


@dataclass(frozen=True)
class _Result:
    """What a cast writes."""

    metadata: Metadata
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    @property
    def leaves(self) -> Shapes:
        """Of the arrays that hold the components."""
        leaves = (leaf_of(jax.ShapeDtypeStruct(self.shapes[name], jnp.dtype(dtype)))[0] for name, dtype in self.dtypes.items())
        return tuple((leaf.shape, dtype_name(leaf)) for leaf in leaves)

    def assembled(self, leaves: Sequence[Array]) -> ScaledTensor:
        names, by_name = tuple(self.dtypes), {}
        for name, leaf in zip(names, leaves, strict=True):
            by_name[name] = leaf, None if dtype_name(leaf) == self.dtypes[name] else self.dtypes[name]
        pairs = [by_name.get(name, (None, None)) for name in PARTS]
        return of_leaves(Static(self.metadata, tuple(dtype for _, dtype in pairs)), tuple(leaf for leaf, _ in pairs))

    def numpy(self, memory: Sequence[np.ndarray]) -> ScaledTensor:
        """The tensor of NumPy in this memory."""
        pairs = zip(self.dtypes.items(), memory, strict=True)
        return self.metadata.assembled(**{name: NUMPY.to_numpy(array.view(jnp.dtype(dtype))) for (name, dtype), array in pairs})


# ------------------------------------------------------------------------------------------------ arrays


def _leaves(st: ScaledTensor) -> tuple[Any, ...]:
    """What the tensor holds for each component; reading components that are held as integers would copy them."""
    return tuple(getattr(st, name) for name in PARTS) if st.held is None else st.held.leaves


def _shapes(arrays: Sequence[Any]) -> Shapes:
    return tuple((tuple(a.shape), dtype_name(a)) for a in arrays)


def _static(arrays: Sequence[Any]) -> bool:
    """Whether all lengths are known. `jax.export` traces functions of symbolic ones."""
    return all(isinstance(n, int) for a in arrays for n in a.shape)
