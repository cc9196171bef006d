"""Histories of amaxes for delayed scaling in training: a pytree that a training step takes, differentiates and returns.

A layer reads the scales of the step from its histories, and the gradient of the loss with respect to a history is what the step
has recorded: the amax, in place of `scale`. `advance` makes the histories of the next step from both.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from breccia import AmaxHistory, OptionError, TrainingRecipe
from breccia.backend import calls

from . import container

Array = Any


def histories(recipe: TrainingRecipe | str, lead: tuple[int, ...] = ()) -> dict[str, AmaxHistory]:
    """The empty histories of a layer, for `DotGeneral(...)(..., state=)`: by tensor, "input", "weight" and "gradient".

    Empty for a recipe without delayed scaling. The first step scales by its own amaxes.
    lead: the axes along which layers are stacked, for `jax.lax.scan` or `vmap` over layers.

        >>> import breccia_jax
        >>> breccia_jax.histories("fp8_delayed")["gradient"].amaxes.shape
        (16,)
    """
    container.register()
    return {
        tensor: AmaxHistory(of, jnp.zeros((*lead, of.amax_history_len)), jnp.ones(lead))
        for tensor, of in TrainingRecipe.of(recipe).delayed.items()
    }


def scale_of_step(history: AmaxHistory, amax: Array) -> Array:
    """The scale for a tensor of this amax: by the steps before, or by the amax itself where there are none."""
    own = calls.record_amax(amax.reshape(1), history.recipe, (), jnp.float32(1))[1]
    return jnp.where(jnp.max(history.amaxes) > 0, history.scale, own)


def advance(state: Any, recorded: Any, *, taken: Any = None) -> Any:
    """The state for the next step of training: each history with the amax that the step has recorded.

    Call it once a step, beside the optimizer's update.

    state: a pytree with `AmaxHistory`s, as `histories` and `convert_to_training` make them. Other leaves are returned as they
        are.
    recorded: the gradient of the loss with respect to `state`. Of several microbatches or devices, the largest:
        `jax.tree.map(jnp.maximum, first, second)`. A layer that is called several times in one function records the sum of its
        amaxes, since gradients add up: its scales are then larger than they need to be.
    taken: whether the step is taken, a boolean that may be traced; False leaves the state as it is, as the skipped step of a
        loss scaler needs. A step with a NaN or Inf among its amaxes is never recorded, as after a loss of NaN.

    A history whose amax is zero stays: nothing was recorded.

    Raises OptionError if `recorded` is not of the structure of `state`.

        >>> import jax, breccia_jax
        >>> dot = breccia_jax.DotGeneral(breccia.TrainingRecipe("fp8_delayed"))
        >>> x, w = jax.numpy.ones((4, 32)), jax.numpy.ones((32, 8))
        >>> state = breccia_jax.histories("fp8_delayed")
        >>> recorded = jax.grad(lambda state: dot(x, w, (((1,), (0,)), ((), ())), state=state).sum())(state)
        >>> print(breccia_jax.advance(state, recorded)["input"].amaxes[-2:])
        [0. 1.]
    """
    if (found := jax.tree.structure(recorded)) != (expected := jax.tree.structure(state)):
        raise OptionError(
            f"advance: `recorded` is the gradient with respect to the state, so it has its structure {expected}; got {found}.",
            expected=expected,
            found=found,
        )
    finite = jnp.asarray(True) if taken is None else jnp.asarray(taken)
    for each in jax.tree.leaves(recorded, is_leaf=_is_history):
        if isinstance(each, AmaxHistory):
            finite = finite & jnp.isfinite(each.scale).all()

    def moved(history: AmaxHistory, amax: Array) -> AmaxHistory:
        if jnp.ndim(amax):  # of stacked layers
            return jax.vmap(moved)(history, amax)
        amaxes, scale = calls.record_amax(amax.reshape(1), history.recipe, history.amaxes, history.scale)
        move = finite & (amax > 0)
        return AmaxHistory(history.recipe, jnp.where(move, amaxes, history.amaxes), jnp.where(move, scale, history.scale))

    def next_of(history: Any, step: Any) -> Any:
        return moved(history, lax.stop_gradient(step.scale)) if isinstance(history, AmaxHistory) else history

    return jax.tree.map(next_of, state, recorded, is_leaf=_is_history)


def _is_history(x: Any) -> bool:
    return isinstance(x, AmaxHistory)
