"""DotGeneral: a quantized `jax.lax.dot_general`, for the layers of models in training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from breccia import AmaxHistory, OptionError, ScalingRecipe, ShapeError, TrainingRecipe, UnsupportedError
from breccia.backend import as_recipe, dtype_name

from .ops import JAX
from .ragged import ragged_product
from .rows import product_of_rows
from .training import Histories, How, Operand, cast_operands, of_tensor

Array = Any
State = Mapping[str, AmaxHistory] | None


@dataclass(frozen=True)
class DotGeneral:
    """`jax.lax.dot_general` whose operands are cast, with blocks along the axes that it contracts, also in its gradient.

    Pass it to layers that take one: `nn.Dense(features, dot_general=DotGeneral(...))`, `nnx.Linear(..., dot_general=...)`,
    `nn.MultiHeadDotProductAttention(qkv_dot_general=..., out_dot_general=...)`; where a layer takes a class,
    `dot_general_cls=functools.partial(DotGeneral, ...)`. `breccia_jax.flax.convert_to_training` does it for a whole model.

    lhs: a `breccia.TrainingRecipe`, which says all; or the recipe of the first operand (of layers: the activations), and of
        both unless `rhs` is given.
    rhs: the recipe of the second operand (of layers: the kernel); "none" leaves it in high precision.
    gradients: the recipe of the incoming gradient in both products of the backward pass, where the other operand is cast
        under its own recipe, with blocks along the axes that those products contract. By default gradients are not cast, and
        the backward pass multiplies them by the rounded operands of the forward pass.
    axis_name: for `shard_map` and `pmap`: the mesh axis, or axes, over whose shards each scale of a whole tensor is shared, as
        `jit` shares it: amaxes are `lax.pmax`ed. () gives each shard its own scales. Scales of blocks and rows are always those
        of a shard, which equal those of the whole tensor where shards hold whole blocks.

    Each operand is cast once for both of its products. Products accumulate in FP32. Results have the promoted dtype of the
    operands, or `preferred_element_type`. Gradients pass straight through the casts. Under `jax.vmap` over the first operand
    alone the examples are rows of one product.

    Raises OptionError for contracted axes of the two that differ, for a recipe with a scale of a whole tensor inside
    `shard_map` without `axis_name`, and for a missing state or key; and what `breccia.cast` and `TrainingRecipe` raise.

        >>> import jax, breccia_jax
        >>> dot = breccia_jax.DotGeneral(breccia.TrainingRecipe("nvfp4"))
        >>> x, w = jax.numpy.ones((4, 32)), jax.numpy.ones((32, 8))
        >>> dot(x, w, (((1,), (0,)), ((), ())), key=jax.random.key(0)).shape
        (4, 8)
    """

    lhs: TrainingRecipe | ScalingRecipe | str
    rhs: ScalingRecipe | str | None = None
    gradients: ScalingRecipe | str | None = None
    axis_name: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.axis_name, list):
            object.__setattr__(self, "axis_name", tuple(self.axis_name))
        if isinstance(self.lhs, TrainingRecipe):
            if self.rhs is not None or self.gradients is not None:
                raise OptionError(
                    "DotGeneral: a TrainingRecipe has the recipes of all operands; leave out rhs= and gradients=."
                )
            return
        lhs = as_recipe(self.lhs)
        rhs = lhs if self.rhs is None else "none" if self.rhs == "none" else as_recipe(self.rhs)
        object.__setattr__(self, "lhs", lhs)
        object.__setattr__(self, "rhs", rhs)
        object.__setattr__(self, "gradients", None if self.gradients is None else as_recipe(self.gradients))

    @property
    def recipe(self) -> TrainingRecipe:
        """What the three products multiply. Without `gradients` the backward pass rounds nothing anew."""
        if isinstance(self.lhs, TrainingRecipe):
            return self.lhs
        return TrainingRecipe(input=self.lhs, weight=self.rhs, gradient=self.gradients)

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
        state: State = None,
        key: Array | None = None,
    ) -> Array:
        """The product of `lhs` and `rhs` for the dimension numbers of `jax.lax.dot_general`.

        precision: of products of two operands in high precision.
        state: the histories of delayed scaling, as `breccia_jax.histories` makes them; `breccia_jax.advance` moves them on.
        key: of `jax.random.key` or `PRNGKey`, for stochastic rounding; use each once. With `axis_name` the shards round by
            different numbers. `functools.partial` gives state and key to a layer.
        """
        lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
        (left, right), (left_batch, right_batch) = dimension_numbers
        left, right, left_batch, right_batch = map(tuple, (left, right, left_batch, right_batch))
        left, right = (tuple(a % x.ndim for a in axes) for x, axes in ((lhs, left), (rhs, right)))
        if not left or [lhs.shape[a] for a in left] != [rhs.shape[a] for a in right]:
            raise OptionError(
                f"DotGeneral contracts axes of equal lengths; got axes {left} of shape {tuple(lhs.shape)} and {right} of "
                f"{tuple(rhs.shape)}.",
                found=(left, right),
            )
        dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
        rows = [a for a in range(lhs.ndim) if a not in (*left, *left_batch)]
        columns = [a for a in range(rhs.ndim) if a not in (*right, *right_batch)]
        batch = [lhs.shape[a] for a in left_batch]
        k = math.prod(lhs.shape[a] for a in left)
        m, n = (math.prod(x.shape[a] for a in axes) for x, axes in ((lhs, rows), (rhs, columns)))
        a = lhs.transpose(*left_batch, *rows, *left).reshape(*batch, m, k)
        b = rhs.transpose(*right_batch, *right, *columns).reshape(*batch, k, n)
        y: Any = self.product(a, b, dtype=dtype, precision=precision, state=state, key=key)
        y = y.reshape(*batch, *(lhs.shape[a] for a in rows), *(rhs.shape[a] for a in columns))
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)

    def product(
        self, x: Array, w: Array, *, dtype: Any = None, precision: Any = None, state: State = None, key: Array | None = None
    ) -> Array:
        """`x @ w` for x (..., M, K) and w (..., K, N). dtype: of the result; by default the promoted one."""
        histories, seed = self.inputs(state, key)
        x, w = _alike(jnp.asarray(x), jnp.asarray(w))  # NumPy's arrays have no gradients
        dtype = dtype_name(jnp.zeros((), dtype or jnp.promote_types(x.dtype, w.dtype)))
        return product_of_rows(x, w, histories, seed, self.how(dtype, precision))

    def ragged_dot(
        self,
        lhs: Array,
        rhs: Array,
        group_sizes: Array,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        state: State = None,
        key: Array | None = None,
    ) -> Array:
        """`jax.lax.ragged_dot`: rows, sorted by expert, times the matrix of their expert; its gradient has GEMMs by expert too.

        lhs: (M, K). rhs: (E, K, N). group_sizes: (E,) integers, the number of rows of each expert, which may be zero; rows
        beyond their sum are of no expert, and zero in the result and the gradient. precision: ignored. The rest is as for a
        call.

        Each expert is cast as if it were alone, except that scales of whole tensors, and of whole columns (fp8_row), span all.

        Raises ShapeError for other shapes, and what calls raise.

            >>> import jax, breccia_jax
            >>> dot = breccia_jax.DotGeneral(breccia.TrainingRecipe("mxfp8"))
            >>> x, w = jax.numpy.ones((6, 32)), jax.numpy.ones((3, 32, 8))
            >>> print(dot.ragged_dot(x, w, jax.numpy.array([4, 0, 1]))[:, 0])
            [32. 32. 32. 32. 32.  0.]
        """
        lhs, rhs, group_sizes = map(jnp.asarray, (lhs, rhs, group_sizes))
        if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1] or group_sizes.shape != rhs.shape[:1]:
            raise ShapeError(
                "ragged_dot multiplies (M, K) by (E, K, N) for group sizes (E,); got shapes "
                f"{lhs.shape}, {rhs.shape} and {group_sizes.shape}.",
                found=(lhs.shape, rhs.shape, group_sizes.shape),
            )
        if not isinstance(self.lhs, TrainingRecipe):
            raise UnsupportedError("ragged_dot needs DotGeneral(TrainingRecipe(...)), which says what its gradient multiplies.")
        histories, seed = self.inputs(state, key)
        lhs, rhs = _alike(lhs, rhs)
        dtype = dtype_name(jnp.zeros((), preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)))
        return ragged_product(lhs, rhs, group_sizes, histories, seed, self.how(dtype))

    def gemm_operands(
        self, x: Array, w: Array, dy: Array, *, state: State = None, key: Array | None = None
    ) -> dict[str, tuple[Operand, Operand]]:
        """What the three GEMMs of a step multiply, for x (M, K), a kernel w (K, N) and dy (M, N).

        Returns (a, b) by GEMM: "output", (M, K) by (K, N); "grad_input", (M, N) by (N, K); "grad_weight", (K, M) by (M, N).
        `breccia.matmul(a, b)` is the GEMM. An operand in high precision is an array.

            >>> import jax, breccia_jax
            >>> dot = breccia_jax.DotGeneral(breccia.TrainingRecipe("fp8_block"))
            >>> x, w, dy = (jax.numpy.ones(shape) for shape in ((32, 128), (128, 256), (32, 256)))
            >>> dot.gemm_operands(x, w, dy)["grad_weight"][0].shape
            (128, 32)
        """
        histories, seed = self.inputs(state, key)
        how = self.how("float32")
        x_rows, x_columns, _ = cast_operands(how, "input", jnp.asarray(x), histories, seed)
        w_columns, w_rows, _ = cast_operands(how, "weight", jnp.asarray(w), histories, seed)
        dy_rows, dy_columns, _ = cast_operands(how, "gradient", jnp.asarray(dy), histories, seed)
        return {
            "output": (x_rows, w_columns),
            "grad_input": (dy_rows, w_rows.mT),
            "grad_weight": (x_columns.mT, dy_columns),
        }

    # -- what products take ------------------------------------------------------------------------------------------

    def how(self, dtype: str, precision: Any = None) -> How:
        """What a product is compiled for. Raises OptionError where shards would have scales of their own in silence."""
        rounded = not isinstance(self.lhs, TrainingRecipe) and self.gradients is None
        recipe, axes = self.recipe, self.axis_name
        if axes is None:
            axes = ()
            _check_shards(recipe)
        return How(recipe, (axes,) if isinstance(axes, str) else tuple(axes), dtype, precision, rounded)

    def inputs(self, state: State, key: Array | None) -> tuple[Histories, Array | None]:
        """The histories and the seed of a product, checked."""
        if not isinstance(self.lhs, TrainingRecipe):
            return {}, None
        recipe, histories = self.recipe, dict(state or {})
        found = {name: history.recipe for name, history in histories.items() if isinstance(history, AmaxHistory)}
        if found != dict(recipe.delayed):
            needed = ", ".join(recipe.delayed) or "none"
            raise OptionError(
                f"DotGeneral: {recipe!r} needs the histories of: {needed}; got state with: {', '.join(histories) or 'none'}. "
                "Pass state=breccia_jax.histories(recipe) in the first step, and what breccia_jax.advance returns after that.",
                needed=list(recipe.delayed),
                found=list(histories),
            )
        if not recipe.stochastic:
            return histories, None
        if key is None:
            raise OptionError(
                f"DotGeneral: {recipe!r} rounds stochastically and needs a key: pass key=jax.random.fold_in(key, step), or "
                'gradient_rounding="nearest" to the recipe.',
                recipe=recipe,
            )
        if self.axis_name:
            key = jax.random.fold_in(key, lax.axis_index(self.axis_name))
        return histories, jnp.asarray(JAX.seed(key))


def _check_shards(recipe: TrainingRecipe) -> None:
    mesh = jax.sharding.get_abstract_mesh()
    axes = [name for name in mesh.manual_axes if mesh.shape[name] > 1]
    cast = {operand.recipe for pair in recipe.operands.values() for operand in pair if of_tensor(operand.recipe)}
    if axes and cast:
        specs = ", ".join(sorted(r.spec for r in cast if r is not None))
        raise OptionError(
            f"DotGeneral: inside shard_map over {', '.join(map(repr, axes))}, {specs} has one scale for a tensor, which "
            "shards do not know. Pass axis_name=, the axes that tensors are sharded along, to share it, or axis_name=() for a "
            "scale of each shard.",
            axes=axes,
        )


def _alike(*arrays: Array) -> list[Array]:
    """The arrays, varying over the same axes of a `shard_map` that checks them; JAX sums gradients over the others."""
    kinds = [_varying(array) for array in arrays]
    every = frozenset().union(*kinds)
    return [_vary(array, tuple(sorted(every - kind))) for array, kind in zip(arrays, kinds, strict=True)]


def _varying(x: Array) -> frozenset[str]:
    aval: Any = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)  # `vma` before JAX 0.10


def _vary(x: Array, axes: tuple[str, ...]) -> Array:
    if not axes:
        return x
    jax_lax: Any = lax
    return jax_lax.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else jax_lax.pvary(x, axes)  # JAX before 0.8
