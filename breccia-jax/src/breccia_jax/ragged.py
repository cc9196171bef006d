"""`ragged_dot` in training: the three GEMMs of a mixture of experts, cast as a `breccia.TrainingRecipe` declares.

    forward    y  = x @ w[e]        rows of x, each by the matrix of its expert
    backward   dx = dy @ w[e].T
               dw[e] = x.T @ dy     over the rows of expert e

for x (M, K), w (E, K, N), dy (M, N), rows sorted by expert. Blocks and rotations along M lie inside one expert: its rows
are moved so that they begin at a multiple of their length, with rows of zeros between experts. So blocks of an expert are those
of its rows alone. Scales of the whole tensor, and of a whole column (fp8_row), are shared by all experts.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import breccia
from breccia import ScaledTensor
from breccia.backend import dtype_name

from .ops import JAX
from .training import Histories, How, Operand, cast_operands, declared, recorded

Array = Any

#: dw[e] = x.T @ dy over the rows of group e.
_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


class _Groups(NamedTuple):
    """Where the rows of each expert are. ends: (E,), as `breccia.grouped_matmul` takes them.

    aligned: (E,) numbers of rows, zeros counted, where experts begin at multiples; sources: the row for each of these, or -1.
    """

    ends: Array
    aligned: Array
    sources: Array


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def ragged_product(x: Array, w: Array, sizes: Array, histories: Histories, seed: Any, how: How) -> Array:
    """The rows of x times the matrix of their expert, (M, N) of `how.dtype`; rows beyond all groups are zero."""
    rows, _, _ = cast_operands(how, "input", _own(x, sizes), histories, seed, second=False)
    columns, _, _ = cast_operands(how, "weight", w, histories, seed, second=False)
    return breccia.grouped_matmul(rows, columns, _ends(sizes), how.dtype)


def _forward(x: Array, w: Array, sizes: Array, histories: Histories, seed: Any, how: How) -> tuple[Array, tuple[Any, ...]]:
    groups = _groups(how, x.shape[0], sizes)
    rows, columns, x_amax = _both(how, "input", _own(x, sizes), groups, histories, seed)
    w_columns, w_rows, w_amax = cast_operands(how, "weight", w, histories, seed)
    y = breccia.grouped_matmul(rows, w_columns, groups.ends, how.dtype)
    amaxes = {"input": x_amax, "weight": w_amax}
    return y, (columns, w_rows, sizes, groups, amaxes, histories, seed, x[:0], w[:0])


def _backward(how: How, saved: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    x_columns, w_rows, sizes, groups, amaxes, histories, seed, *like = saved
    dx_dtype, dw_dtype = map(dtype_name, like)
    rows, columns, amaxes["gradient"] = _both(how, "gradient", _own(dy, sizes), groups, histories, seed)
    dx = breccia.grouped_matmul(rows, w_rows.mT, groups.ends, dx_dtype)
    exact: dict[str, Any] = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    dw = lax.ragged_dot_general(_values(x_columns), _values(columns), groups.aligned, _OVER_ROWS, **exact)
    return dx, dw.astype(dw_dtype), None, recorded(histories, amaxes), None


ragged_product.defvjp(_forward, _backward)


def _both(
    how: How, tensor: str, x: Array, groups: _Groups, histories: Histories, seed: Any
) -> tuple[Operand, Operand, Array | None]:
    """The rows of x, and its columns with aligned experts."""
    if _alignment(how) == 1:
        return cast_operands(how, tensor, x, histories, seed)
    rows, _, amax = cast_operands(how, tensor, x, histories, seed, second=False)
    aligned = jnp.where(groups.sources[:, None] < 0, 0, x[groups.sources])
    return rows, cast_operands(how, tensor, aligned, histories, seed, first=False)[1], amax


def _alignment(how: How) -> int:
    """The number of rows at whose multiples experts begin for grad_weight."""
    lengths = [1]
    for tensor in ("input", "gradient"):
        operand = declared(how.recipe, tensor)[1]
        lengths.append(1 if operand.rotation is None else operand.rotation.block)
        if operand.recipe is not None:
            lengths += [level.block[1] or 1 for level in operand.recipe.format.levels]
    return math.lcm(*lengths)


def _groups(how: How, m: int, sizes: Array) -> _Groups:
    ends, multiple, sizes = _ends(sizes), _alignment(how), sizes.astype(jnp.int32)
    if multiple == 1:
        return _Groups(ends, sizes, jnp.arange(m))
    aligned = -(-sizes // multiple) * multiple
    until = jnp.cumsum(aligned)
    place = jnp.arange((m + len(sizes) * (multiple - 1)) // multiple * multiple)
    expert = jnp.minimum(jnp.searchsorted(until, place, side="right"), len(sizes) - 1)
    within = place - (until - aligned)[expert]
    return _Groups(ends, aligned, jnp.where(within < sizes[expert], (ends - sizes)[expert] + within, -1))


def _ends(sizes: Array) -> Array:
    return jnp.cumsum(sizes).astype(jnp.int32)


def _own(x: Array, sizes: Array) -> Array:
    """x with zeros in the rows of no expert, which casts must not see."""
    return jnp.where(jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes), x, 0)


def _values(x: Operand) -> Array:
    return breccia.dequantize(x) if isinstance(x, ScaledTensor) else JAX.f32(x)
