"""Flax: models whose linear layers train in low precision under a `breccia.TrainingRecipe`.

A layer keeps Flax's code and its parameters; its product is a `DotGeneral`. nnx modules hold the histories of delayed scaling
in `AmaxHistories` variables, and draw keys from a stream. Linen modules are functions of their variables: `TrainingModel`
gives their layers the product while they run, with histories from the collection "amax_history" and keys from the rng
"rounding".
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from flax import linen, nnx
from flax.traverse_util import unflatten_dict
from jax import Array

from breccia import OptionError, TrainingRecipe, UnsupportedError
from breccia.backend import Parameter, TrainingSummary

from . import container
from .delayed import advance, histories
from .dot_general import DotGeneral
from .flax_layers import plain
from .flax_trees import parameters_of, places_of
from .training_rules import CALLER, chosen_layers, of_layer

Axes = tuple[int, ...]
Axis = str | tuple[str, ...] | None
COLLECTION, ROUNDING = "amax_history", "rounding"
OWN_PRODUCT = "its layer has a dot_general or promote_dtype of its own"


def convert_to_training(
    model: Any,
    recipe: TrainingRecipe | str,
    *inputs: Any,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    axis_name: Axis = None,
    rngs: nnx.Rngs | nnx.RngStream | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Any, TrainingSummary]:
    """A model whose linear layers train in low precision under `recipe`, and a summary of what was converted, left, and why.

    `Dense`, `DenseGeneral`, `Linear` and `LinearGeneral` layers are converted, so attention too. Parameters stay in high
    precision, so optimizers, averages, checkpoints, tying and freezing work as ever. By default embeddings, norms, routers, an
    output head named `lm_head` and the other kinds of `breccia.backend.KEPT` keep their precision, as do layers with a side
    that is no multiple of 16, which FP8 GEMMs of GPUs need.

    model: an nnx module, which is not changed: the converted one is a copy. Or a linen module; the converted one is a
        `TrainingModel`, which has its `init` and `apply`.
    recipe: a `breccia.TrainingRecipe`, or the name of a preset.
    inputs, options: of a linen module, what its `__call__` takes, as for `init`: arrays, or their shapes. Nothing is computed.
    include, exclude: shell-style patterns of names of weights, "*.up.kernel", as of `quantize`. `include` also converts what
        the defaults leave, `exclude` leaves layers in high precision. `exclude` beats `include`.
    axis_name: for `shard_map` and `pmap`: see `DotGeneral`.
    rngs: of an nnx module, for recipes with stochastic rounding: its stream "rounding", or its default one, is forked.

    With delayed scaling, an nnx module has its state in variables of type `AmaxHistories`; a `TrainingModel` makes it by
    `histories()`. Differentiate the loss with respect to the parameters and the state, and call `advance_`, of linen `advance`,
    beside the optimizer's update.

    Raises UnsupportedError for other models, OptionError if nothing is converted, and for missing inputs and rngs,
    UnknownNameError for a pattern that matches nothing, and what `TrainingRecipe` raises. Errors in training name the layer.

        >>> from flax import nnx
        >>> from breccia_jax.flax import convert_to_training
        >>> model = nnx.Sequential(nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(128, 10, rngs=nnx.Rngs(1)))
        >>> model, summary = convert_to_training(model, "mxfp8")
        >>> summary
        1 layers train under TrainingRecipe('mxfp8'): layers.0.kernel
        left in high precision (128 x 10 has a side that is no multiple of 16): layers.2.kernel
        >>> model(np.ones((4, 64), np.float32)).shape
        (4, 10)
    """
    container.register()
    dot = DotGeneral(TrainingRecipe.of(recipe), axis_name=axis_name)
    if isinstance(model, nnx.Module):
        if inputs or options:
            raise OptionError(f"{CALLER}: inputs are for linen modules; an nnx module has its parameters.")
        return _convert_nnx(model, dot, include, exclude, rngs)
    if not isinstance(model, linen.Module):
        raise UnsupportedError(
            f"{CALLER} converts an nnx or a linen module; got a {type(model).__name__}. For variables of a linen model, give "
            "the module and its inputs."
        )
    if not inputs and not options:
        raise OptionError(
            f"{CALLER}: a linen module needs the inputs of its __call__, to list its layers: (module, recipe, x)."
        )
    return _convert_linen(model, dot, inputs, options or {}, include, exclude)


# ------------------------------------------------------------------------------------------------ nnx


class AmaxHistories(nnx.Variable[Any]):
    """The histories of a layer with delayed scaling, by tensor; not an `nnx.Param`, so optimizers leave them alone.

    `nnx.DiffState(0, nnx.Any(nnx.Param, AmaxHistories))` differentiates with respect to both; then
    `optimizer.update(model, gradients)` and `breccia_jax.flax.advance_(model, gradients)`.
    """


def advance_(model: nnx.Module, recorded: Any, *, taken: Any = None) -> None:
    """`breccia_jax.advance` for an nnx module, in place.

    recorded: gradients with respect to its `AmaxHistories`; those of parameters may be among them. taken: as of `advance`.

        >>> from flax import nnx
        >>> from breccia_jax import flax as bf
        >>> model, _ = bf.convert_to_training(nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0))), "fp8_delayed")
        >>> both = nnx.DiffState(0, nnx.Any(nnx.Param, bf.AmaxHistories))
        >>> gradients = nnx.grad(lambda model: model(np.ones((4, 32), np.float32)).sum(), argnums=both)(model)
        >>> bf.advance_(model, gradients)
        >>> print(model.layers[0].amax_histories.get_raw_value()["input"].amaxes[-2:])
        [0. 1.]
    """
    state = nnx.state(model, AmaxHistories)
    nnx.update(model, advance(state, nnx.state(recorded, AmaxHistories), taken=taken))


def _called(self: Any, inputs: Array, out_sharding: Any = None) -> Array:
    """`__call__` of the base class, whose product is that of the recipe."""
    base: Any = type(self).__base__
    layer = object.__new__(base)
    vars(layer).update(vars(self))
    state = None if self.amax_histories is None else self.amax_histories.get_raw_value()
    key = None if self.rounding is None else self.rounding()
    vars(layer)["dot_general"] = partial(self.training, state=state, key=key)
    with of_layer(self.path):
        return layer(inputs, out_sharding)


class TrainingLinear(nnx.Linear):
    """`nnx.Linear` that trains in low precision; `convert_to_training` makes it."""

    __call__ = _called


class TrainingLinearGeneral(nnx.LinearGeneral):
    """`nnx.LinearGeneral` that trains in low precision; `convert_to_training` makes it."""

    __call__ = _called


_TRAINED: dict[type, type] = {nnx.Linear: TrainingLinear, nnx.LinearGeneral: TrainingLinearGeneral}


def _convert_nnx(
    model: Any, dot: DotGeneral, include: Iterable[str], exclude: Iterable[str], rngs: Any
) -> tuple[Any, TrainingSummary]:
    recipe = dot.recipe
    if recipe.stochastic and rngs is None:
        raise OptionError(
            f"{CALLER}: {recipe!r} rounds stochastically: pass rngs=nnx.Rngs(rounding=0), from which layers draw their keys."
        )
    stream = rngs[ROUNDING] if isinstance(rngs, nnx.Rngs) else rngs
    model = nnx.clone(model)
    places, parameters = parameters_of(model)
    listed = [_trainable(places[p.name][0], places[p.name][1], p) for p in parameters]
    summary = chosen_layers(listed, recipe, include, exclude)
    for name in summary.chosen:
        layer, _, variable = places[name]
        if type(layer) not in _TRAINED:
            continue  # a layer at several places, converted under another name
        lead = variable.get_raw_value().shape[: variable.get_raw_value().ndim - _rank(layer)]
        new = histories(recipe, lead)
        layer.training = dot
        layer.path = name.rpartition(".")[0]
        layer.amax_histories = AmaxHistories(new) if new else nnx.data(None)
        layer.rounding = stream.fork(split=lead or None) if recipe.stochastic else nnx.data(None)
        object.__setattr__(layer, "__class__", _TRAINED[type(layer)])
    return model, summary


def _trainable(layer: Any, leaf: str, p: Parameter) -> Parameter:
    """The parameter with the reason why it cannot train in low precision, if there is one."""
    if p.axes is None or p.kind == "embedding":
        return p
    if leaf != "kernel" or type(layer) not in _TRAINED:
        done = type(layer) in _TRAINED.values()
        return replace(p, axes=None, why="trains in low precision already" if done else _no_form(layer))
    return p if plain(layer) else replace(p, axes=None, why=OWN_PRODUCT)


def _no_form(layer: Any) -> str:
    return f"{type(layer).__name__} has no form for training"


def _rank(layer: Any) -> int:
    return 2 if isinstance(layer, nnx.Linear) else len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)


# ------------------------------------------------------------------------------------------------ linen


@dataclass(frozen=True)
class TrainingModel:
    """A linen module whose chosen layers train in low precision, with the variables of the module.

    module: the module. dot_general: the product of its layers. layers: for each of them, by its path, the axes along which
    `nn.scan` or `nn.vmap` stack it.

    Where the recipe has delayed scaling, `apply` reads the collection "amax_history", which `histories` makes; list it in
    `nn.scan(variable_axes={"params": 0, "amax_history": 0})`. Stochastic rounding needs `apply(..., rngs={"rounding": key})`,
    and `split_rngs={"rounding": True}` there.
    """

    module: linen.Module
    dot_general: DotGeneral
    layers: Mapping[tuple[str, ...], Axes]

    def init(self, *args: Any, **options: Any) -> Any:
        """The variables that `module.init` returns, and empty histories."""
        variables = self.module.init(*args, **options)
        return {**variables, **self.histories()}

    def apply(self, variables: Any, *args: Any, **options: Any) -> Any:
        """`module.apply`, in low precision."""
        with linen.intercept_methods(self._called):
            return self.module.apply(variables, *args, **options)

    def histories(self) -> dict[str, Any]:
        """The collection of empty histories, {"amax_history": {...}}; {} without delayed scaling."""
        made = {path: histories(self.dot_general.recipe, lead) for path, lead in self.layers.items()}
        return {COLLECTION: unflatten_dict(made)} if self.dot_general.recipe.delayed else {}

    def _called(self, function: Callable[..., Any], args: Any, options: Any, context: Any) -> Any:
        layer = context.module
        if context.method_name != "__call__" or layer.path not in self.layers or layer.is_initializing():
            return function(*args, **options)
        name, recipe, before = ".".join(layer.path), self.dot_general.recipe, layer.dot_general
        state = {tensor: layer.get_variable(COLLECTION, tensor) for tensor in recipe.delayed}
        if None in state.values():
            raise OptionError(
                f"{name}: apply needs the collection {COLLECTION!r} of model.histories(): apply({{**params, **state}}, ...), "
                f'and nn.scan and nn.vmap need it in variable_axes, as {{"params": 0, "{COLLECTION}": 0}}.',
                layer=name,
            )
        if recipe.stochastic and not layer.has_rng(ROUNDING):
            raise OptionError(
                f'{name}: {recipe!r} rounds stochastically: apply(..., rngs={{"{ROUNDING}": key}}), with a new key each step.',
                layer=name,
            )
        key = layer.make_rng(ROUNDING) if recipe.stochastic else None
        object.__setattr__(layer, "dot_general", partial(self.dot_general, state=state, key=key))
        try:
            with of_layer(name):
                return function(*args, **options)
        finally:
            object.__setattr__(layer, "dot_general", before)


def _convert_linen(
    module: linen.Module,
    dot: DotGeneral,
    inputs: tuple[Any, ...],
    options: Mapping[str, Any],
    include: Iterable[str],
    exclude: Iterable[str],
) -> tuple[TrainingModel, TrainingSummary]:
    found: dict[tuple[str, ...], tuple[Any, Axes, int]] = {}

    def noted(function: Callable[..., Any], args: Any, options: Any, context: Any) -> Any:
        layer = context.module
        if context.method_name == "__call__" and layer.path not in found:
            first, rank = _contracted(layer, args)
            found[layer.path] = layer, first, rank
        return function(*args, **options)

    with linen.intercept_methods(noted):
        variables = jax.eval_shape(partial(module.init, **options), jax.random.key(0), *inputs)
    parameters: list[Parameter] = []
    paths: dict[str, tuple[tuple[str, ...], Axes]] = {}
    for place, p in places_of(variables):
        path = tuple(place[1:-1])  # without the collection and the leaf
        layer, axes, rank = found.get(path, (None, (), 0))
        stacked = len(p.shape) - rank
        if p.kind == "embedding" or (p.axes is None and place[-1] != "kernel"):
            parameters.append(p)
            continue
        if type(layer) not in (linen.Dense, linen.DenseGeneral) or place[-1] != "kernel" or stacked < 0:
            parameters.append(replace(p, axes=None, why=p.why or _no_form(layer)))
            continue
        why = "" if plain(layer) else OWN_PRODUCT
        paths[p.name] = path, tuple(p.shape[:stacked])
        parameters.append(replace(p, axes=None if why else tuple(a + stacked for a in axes), why=why))
    summary = chosen_layers(parameters, dot.recipe, include, exclude)
    return TrainingModel(module, dot, dict(paths[name] for name in summary.chosen)), summary


def _contracted(layer: Any, args: Any) -> tuple[Axes, int]:
    """The contracted axes of a layer's kernel, and the number of its axes, without those of `nn.scan` and `nn.vmap`."""
    if type(layer) is linen.Dense:
        return (0,), 2
    if type(layer) is not linen.DenseGeneral:
        return (), 0
    counts = [len(n) if isinstance(n, Iterable) else 1 for n in (layer.batch_dims, layer.axis, layer.features)]
    return tuple(range(counts[0], counts[0] + counts[1])), sum(counts)
