"""Products of layers by quantized parameters: by the codes where a kernel multiplies them, else by decoded values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

import breccia
from breccia import ScaledTensor
from breccia.backend import FLOATS, dtype_name

from . import cpu

if TYPE_CHECKING:
    from .weights import ScaledWeight

Array = Any
Axes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CodesDotGeneral:
    """`jax.lax.dot_general` for a layer whose kernel is `weight`. The second operand is the decoded weight.

    Where breccia has a kernel for it, `breccia.matmul` multiplies by the codes, in FP32, and the second operand is not read.
    """

    weight: ScaledWeight

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> Array:
        """The product for the dimension numbers of `jax.lax.dot_general`. precision: of products of decoded values."""
        (left, right), batch = dimension_numbers
        dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
        y = None if any(map(len, batch)) or out_sharding is not None else contracted(lhs, self.weight, left, right, dtype)
        if y is not None:
            return y
        options = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        return lax.dot_general(lhs, rhs, dimension_numbers, **options)


def contracted(x: Array, weight: ScaledWeight, left: Any, right: Any, dtype: Any) -> Array | None:
    """The sums over axes `left` of `x` and `right` of the parameter, by codes; None where no kernel multiplies them.

    The result has the other axes of `x`, then those of the parameter, and `dtype`.
    """
    left, right = (tuple(a % n for a in axes) for axes, n in ((left, x.ndim), (right, weight.ndim)))
    operand = _matrix(weight, right)
    if operand is None or dtype_name(x) not in FLOATS or jnp.dtype(dtype).name not in FLOATS:
        return None
    if not all(isinstance(n, int) for n in x.shape):  # exported functions of symbolic lengths have the generic algorithm
        return None
    if jax.typeof(x).sharding.mesh.explicit_axes:  # types have shardings there, which reshapes would have to name
        return None
    matrix, columns = operand
    rows = [a for a in range(x.ndim) if a not in left]
    lengths = [x.shape[a] for a in rows]
    if tuple(rows) + left != tuple(range(x.ndim)):
        x = jnp.transpose(x, (*rows, *left))
    x = jnp.reshape(x, (*(lengths or [1]), matrix.shape[0]))
    if not cpu.multiplies(x, matrix):
        return None
    return jnp.reshape(breccia.matmul(x, matrix, out_dtype=dtype), (*lengths, *columns))


def _matrix(weight: ScaledWeight, axes: Axes) -> tuple[ScaledTensor, Axes] | None:
    """(The (K, N) tensor of a parameter whose `axes` are its K, its other axes); None where K are other axes."""
    st, ends, count = weight.tensor, weight.ends, len(axes)
    if len(st.shape) != 2:
        return None
    first = axes == tuple(range(count))
    k = ends[:count] if first else ends[-count:]
    if (not first and axes != tuple(range(len(ends) - count, len(ends)))) or math.prod(k) != st.shape[st.axis]:
        return None
    if st.axis != (-2 if first else -1):
        return None
    return (st, ends[count:]) if first else (st.mT, ends[:-count])
