"""ScaledWeight: a quantized parameter of a model, which takes the place of its array."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import export, tree_util

import breccia
from breccia import OptionError, ScaledTensor
from breccia.backend import dtype_name, matrix_of

from . import container
from .contraction import contracted
from .keys import weight_key

Array = Any
Shape = tuple[int, ...]


@tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, repr=False, eq=False)
class ScaledWeight:
    """A ScaledTensor in place of a parameter of any shape, whose contracted axes it has as one.

    tensor: of shape (..., K, N) or (..., M, K), with blocks along K.
    ends: the axes of the parameter that the last two of the tensor stand for: (in, heads, features) for a tensor of shape
        (in, heads * features). Leading axes are those of the tensor, so `vmap` and `scan` may take them off.
    dtype: the dtype name of the parameter's values.

    A pytree node. JAX and Flax read its values where a model reads the parameter: `weight.unbox()` decodes them. `weight @ x`
    and `breccia.matmul(x, weight)` multiply by the codes, where a kernel does; in `x @ weight` an array of JAX asks for the
    values first.
    """

    tensor: ScaledTensor
    ends: Shape
    dtype: str

    @property
    def shape(self) -> Shape:
        """The shape of the parameter."""
        return (*self.tensor.shape[:-2], *self.ends)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def __scaled_tensor__(self) -> ScaledTensor:
        """Lets the ops of `breccia` accept the weight: `breccia.matmul(x, weight)`."""
        return self.tensor

    def unbox(self, dtype: Any = None) -> Array:
        """The values, as an array of the parameter's shape, in its dtype or in `dtype`."""
        for reading in READINGS:
            reading(self)
        values = breccia.dequantize(self.tensor, out_dtype=self.dtype if dtype is None else dtype)
        return values if values.shape == self.shape else values.reshape(self.shape)

    def replace_boxed(self, val: Any) -> Any:
        """A parameter with other values is no quantized one."""
        return val

    def add_axis(self, index: int, params: dict[Any, Any]) -> ScaledWeight:
        """Flax tells that a transform adds an axis; the shape is that of the components."""
        return _leading(self, index)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> ScaledWeight:
        """Flax tells that a transform takes an axis off."""
        return _leading(self, index)

    def __matmul__(self, x: Any) -> Array:
        """The product of the values, of two axes, and `x` of one or two, as `jax.numpy.matmul`."""
        y = contracted(x, self, (max(x.ndim - 2, 0),), (1,), _promoted(self, x)) if self.ndim == 2 and x.ndim <= 2 else None
        return self.unbox() @ x if y is None else y.swapaxes(-1, 0)

    def __rmatmul__(self, x: Any) -> Array:
        """The product of `x` and the values, of two axes, as `jax.numpy.matmul`."""
        y = contracted(x, self, (x.ndim - 1,), (0,), _promoted(self, x)) if self.ndim == 2 else None
        return x @ self.unbox() if y is None else y

    def __jax_array__(self) -> Array:
        return self.unbox()

    def __getitem__(self, index: Any) -> Any:
        return self if index is Ellipsis else self.unbox()[index]

    def __repr__(self) -> str:
        return f"breccia_jax.ScaledWeight({self.tensor!r}, ends={self.ends}, dtype={self.dtype!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], tuple[Shape, str]]:
        container.register()
        return ((weight_key(self.ends, self.dtype), self.tensor),), (self.ends, self.dtype)

    @classmethod
    def tree_unflatten(cls, static: tuple[Shape, str], children: tuple[Any]) -> ScaledWeight:
        return cls(children[0], *static)


#: Called with each weight that is unboxed. `breccia_jax.flax` adds one, which sees the layer that reads it.
READINGS: list[Callable[[ScaledWeight], None]] = []


def _promoted(weight: ScaledWeight, x: Any) -> Any:
    return jnp.promote_types(weight.dtype, x.dtype)


def _leading(weight: ScaledWeight, index: int) -> ScaledWeight:
    if index != 0:
        raise OptionError(
            f"a quantized parameter has its layers along axis 0; the transform uses axis {index}. Use axis 0 for the "
            "parameters, or leave this one in high precision.",
            axis=index,
        )
    return weight


def quantized(array: Array, recipe: Any, axes: tuple[int, ...]) -> ScaledWeight:
    """The parameter `array` under `recipe`, with blocks along its contracted `axes`, which must be consecutive.

    Axes in front of the contracted ones are cast one by one, so that each has its own tensor-level scale, unless the contracted
    axes are the last ones. Raises what `breccia.cast` raises.
    """
    import jax

    axis, lead, matrix, ends = matrix_of(tuple(array.shape), axes)
    x = array.reshape(matrix)

    def cast(x: Array) -> ScaledTensor:
        return breccia.cast(x, recipe, axis=axis)

    for _ in range(lead):
        cast = jax.vmap(cast)
    return ScaledWeight(cast(x), ends, dtype_name(array))


export.register_pytree_node_serialization(
    ScaledWeight,
    serialized_name="breccia_jax.ScaledWeight",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda written: (tuple((listed := json.loads(written))[0]), listed[1]),
)
