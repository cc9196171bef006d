"""Equinox: modules whose linear layers train in low precision under a `breccia.TrainingRecipe`.

A converted module holds no state: a training step gives it histories and keys by `with_state`, inside of the function that it
differentiates, so that optimizers see parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
from jax import tree_util

from breccia import AmaxHistory, OptionError, TrainingRecipe
from breccia.backend import TrainingSummary

from . import container
from .delayed import histories as empty_histories
from .dot_general import DotGeneral
from .equinox_trees import parameters_of
from .training_rules import chosen_layers, of_layer

Array = Any
Module = TypeVar("Module")
#: The histories of each layer by its name, then by tensor.
State = Mapping[str, Mapping[str, AmaxHistory]]


class TrainingLinear(eqx.Module):
    """An `eqx.nn.Linear` that trains in low precision; `convert_to_training` makes it.

    layer: the layer, whose attributes are attributes of this one. name: its path in the model. dot_general: its product.
    state, key: its histories and its key, which `with_state` sets. Under `jax.vmap` the examples are rows of one product. A key
    given to a call replaces its own.
    """

    layer: eqx.nn.Linear
    dot_general: DotGeneral = eqx.field(static=True)
    name: str = eqx.field(static=True)
    state: Mapping[str, AmaxHistory] | None = None
    key: Array | None = None

    def __call__(self, x: Array, *, key: Array | None = None) -> Array:
        own = partial(self.dot_general.product, state=self.state, key=self.key if key is None else key)
        weight: Any = _Weight(self.layer.weight, own)
        layer = object.__new__(eqx.nn.Linear)
        for field, value in vars(self.layer).items():
            object.__setattr__(layer, field, value)
        object.__setattr__(layer, "weight", weight)
        with of_layer(self.name):
            return layer(x)

    def __getattr__(self, name: str) -> Any:
        if name in ("layer", "state", "key") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.layer, name)


class _Weight:
    """A weight (N, K) whose product with a vector (K,) is `product` of one row."""

    def __init__(self, weight: Array, product: Any) -> None:
        self.weight, self.product = weight, product

    def __matmul__(self, x: Array) -> Array:
        return self.product(x[None], self.weight.T)[0]


def convert_to_training(
    module: Module,
    recipe: TrainingRecipe | str,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[Module, TrainingSummary]:
    """The module with linear layers that train in low precision under `recipe`, and a summary of what was left, and why.

    `eqx.nn.Linear` layers become `TrainingLinear`s, those inside `eqx.nn.MultiheadAttention` too. recipe, include, exclude,
    axis_name, what is left by default and what it raises: as `breccia_jax.flax.convert_to_training`, with names such as
    "layers.0.weight".

    Recipes with delayed scaling or stochastic rounding need `with_state` in each step.

        >>> import equinox as eqx, jax
        >>> from breccia_jax.equinox import convert_to_training
        >>> model, summary = convert_to_training(eqx.nn.MLP(64, 8, 64, 1, key=jax.random.key(0)), "mxfp8")
        >>> summary
        1 layers train under TrainingRecipe('mxfp8'): layers.0.weight
        left in high precision (64 x 8 has a side that is no multiple of 16): layers.1.weight
        >>> jax.vmap(model)(np.ones((4, 64), np.float32)).shape
        (4, 8)
    """
    container.register()
    dot = DotGeneral(TrainingRecipe.of(recipe), axis_name=axis_name)
    listed = []
    for p, layer in parameters_of(module, (TrainingLinear,)):
        if isinstance(layer, TrainingLinear) and p.shape == layer.weight.shape:
            p = replace(p, axes=None, why="trains in low precision already", kind="linear")
        elif p.axes is not None and p.kind == "linear" and type(layer) is not eqx.nn.Linear:
            p = replace(p, axes=None, why=f"{type(layer).__name__} has no form for training")
        listed.append(p)
    summary = chosen_layers(listed, dot.recipe, include, exclude)

    def converted(path: Any, leaf: Any) -> Any:
        name = tree_util.keystr(path, simple=True, separator=".")
        if type(leaf) is not eqx.nn.Linear or f"{name}.weight".lstrip(".") not in summary.chosen:
            return leaf
        return TrainingLinear(leaf, dot, name)

    return tree_util.tree_map_with_path(converted, module, is_leaf=_is_linear), summary


def histories(module: Any) -> dict[str, dict[str, AmaxHistory]]:
    """The empty histories of the layers of a converted module, by name; {} without delayed scaling.

    `breccia_jax.advance` makes those of the next step, from the gradient of the loss with respect to them.

        >>> import equinox as eqx, jax
        >>> from breccia_jax import equinox as be
        >>> model, _ = be.convert_to_training(eqx.nn.MLP(32, 32, 32, 1, key=jax.random.key(0)), "fp8_delayed")
        >>> list(be.histories(model))
        ['layers.0', 'layers.1']
    """
    made = {layer.name: empty_histories(layer.dot_general.recipe, layer.weight.shape[:-2]) for layer in _layers(module)}
    return {name: of for name, of in made.items() if of}


def with_state(module: Module, state: State | None = None, *, key: Array | None = None) -> Module:
    """The converted module for one step of training, with the histories `state` and a key for stochastic rounding.

    Call it inside of the function that is differentiated, for gradients with respect to `state`:

        >>> import equinox as eqx, jax, breccia_jax
        >>> from breccia_jax import equinox as be
        >>> model, _ = be.convert_to_training(eqx.nn.MLP(32, 32, 32, 1, key=jax.random.key(0)), "fp8_delayed")
        >>> state, x = be.histories(model), np.ones((4, 32), np.float32)
        >>> def loss(both):
        ...     model, state = both
        ...     return (jax.vmap(be.with_state(model, state))(x) ** 2).mean()
        >>> gradients, recorded = eqx.filter_grad(loss)((model, state))
        >>> state = breccia_jax.advance(state, recorded)

    key: of `jax.random.key` or `PRNGKey`; each layer folds its number into it. Use a new one each step.

    Raises OptionError for a module that was not converted, and for a state with other layers.
    """
    layers = _layers(module)
    names = {layer.name for layer in layers if layer.dot_general.recipe.delayed}
    if not layers or set(state or {}) - names:
        raise OptionError(
            "with_state: the state has the layers of a module that convert_to_training made: "
            f"{', '.join(sorted(names)) or 'none'}; got {', '.join(sorted(state or {})) or 'none'}.",
            expected=sorted(names),
            found=sorted(state or {}),
        )
    numbers = {layer.name: n for n, layer in enumerate(layers)}

    def prepared(leaf: Any) -> Any:
        if not isinstance(leaf, TrainingLinear):
            return leaf
        own = None
        if key is not None and leaf.dot_general.recipe.stochastic:
            own = jax.random.fold_in(key, numbers[leaf.name])
            lead = leaf.weight.shape[:-2]
            own = jax.random.split(own, lead) if lead else own
        return TrainingLinear(leaf.layer, leaf.dot_general, leaf.name, (state or {}).get(leaf.name), own)

    return jax.tree.map(prepared, module, is_leaf=_is_layer)


def _layers(module: Any) -> list[TrainingLinear]:
    return [leaf for leaf in jax.tree.leaves(module, is_leaf=_is_layer) if isinstance(leaf, TrainingLinear)]


def _is_linear(x: Any) -> bool:
    return isinstance(x, eqx.nn.Linear | TrainingLinear)


def _is_layer(x: Any) -> bool:
    return isinstance(x, TrainingLinear)
