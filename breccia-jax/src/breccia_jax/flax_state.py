"""Quantized leaves, and histories of amaxes, in the states of `flax.serialization`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flax import serialization

from breccia import AmaxHistory, OptionError, ScaledTensor
from breccia.internal import once

from . import container
from .keys import parsed
from .weights import ScaledWeight


@once
def register() -> None:
    """Let `flax.serialization` store quantized leaves, under names with their metadata, and refuse targets of another recipe.

    Done at the first JAX array if Flax is already imported then, and when `breccia_jax.flax` is imported.
    """
    serialization.register_serialization_state(AmaxHistory, _state_of_history, _history_from_state)
    for kind, flatten, unflatten in (
        (ScaledTensor, container.flatten_with_keys, container.unflatten),
        (ScaledWeight, ScaledWeight.tree_flatten_with_keys, ScaledWeight.tree_unflatten),
    ):
        serialization.register_serialization_state(kind, _state(flatten), _from_state(flatten, unflatten))


def _state_of_history(history: AmaxHistory) -> dict[str, Any]:
    return {"amaxes": history.amaxes, "scale": history.scale}


def _history_from_state(target: AmaxHistory, state: dict[str, Any]) -> AmaxHistory:
    restored = serialization.from_state_dict(_state_of_history(target), state)
    return AmaxHistory(target.recipe, restored["amaxes"], restored["scale"])


def _state(flatten: Callable[[Any], tuple[Any, Any]]) -> Callable[[Any], dict[str, Any]]:
    def state(node: Any) -> dict[str, Any]:
        children = flatten(node)[0]
        return {key.name: serialization.to_state_dict(child) for key, child in children if child is not None}

    return state


def _from_state(
    flatten: Callable[[Any], tuple[Any, Any]], unflatten: Callable[[Any, Any], Any]
) -> Callable[[Any, dict[str, Any]], Any]:
    def from_state(target: Any, state: dict[str, Any]) -> Any:
        children, static = flatten(target)
        names = [key.name for key, child in children if child is not None]
        if set(names) != set(state):
            raise OptionError(
                f"the state holds {_told(state)}, and the target {_told(names)}; a target has the recipe, layout and axis of "
                "what was stored. breccia_jax.assembled(flax.serialization.msgpack_restore(...)) needs no target.",
                found=sorted(state),
                expected=sorted(names),
            )
        new_children = [
            None if child is None else serialization.from_state_dict(child, state[key.name], name=key.attribute)
            for key, child in children
        ]
        return unflatten(static, new_children)

    return from_state


def _told(names: Iterable[str]) -> str:
    """The recipe and the axis in the names of components, or what they are."""
    key = next(iter(map(parsed, names)), None)
    if key is None:
        return "no quantized parameter"
    facts = key[1]
    if "recipe" not in facts:
        return f"a quantized parameter of {facts['ends']} {facts['dtype']}"
    recipe = ", ".join(f"{name}={value}" for name, value in facts["recipe"]["fields"].items())
    return f"{facts['recipe']['name']} ({recipe}) along axis {facts['axis']} in {facts['layout']['name']}"
