"""`quantize`: the layers of a model, in place, with their weights under a recipe, like `mlx.nn.quantize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from breccia import BrecciaError, OptionError, Policy, ScalingRecipe, UnsupportedError, bridges
from breccia.backend import NO_MATRIX, Chosen, Parameter, as_recipe, checks, choose, none_chosen
from breccia.backend import QuantizeSummary as _Summary
from breccia.internal import abbreviated

from .nn import ScaledEmbedding, ScaledLinear, as_activation

#: Called with a layer's path and the layer: whether to quantize it, or how.
Predicate = Callable[[str, nn.Module], bool | dict[str, Any]]

_OPTIONS = ("recipe", "activation", "prefer")
#: The layers that have a quantized form, and MLX's own quantized ones.
LAYERS = (nn.Linear, nn.Embedding)
QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


@dataclass(frozen=True, repr=False)
class QuantizeSummary(_Summary):
    """What `quantize` did. Printing it shows the numbers, the recipes and the reasons.

    chosen: (recipe, contracted axes) by name of the weights that were cast, once or again. kept: names of weights that MLX had
        quantized, with the same codes and scales. recast: the former recipe by name of the weights that MLX had quantized and
        whose values were cast again. left: reasons by name, for every other parameter of two axes or more.
    bytes_before, bytes_after: of all parameters of the model.
    """

    kept: tuple[str, ...] = ()
    recast: Mapping[str, ScalingRecipe] = field(default_factory=dict[str, ScalingRecipe])

    def lines(self) -> Iterator[str]:
        yield from super().lines()
        if self.kept:
            yield f"quantized by MLX, codes and scales kept: {abbreviated(self.kept)}"
        for recipe in dict.fromkeys(self.recast.values()):
            names = [path for path, had in self.recast.items() if had == recipe]
            yield f"quantized by MLX under {recipe.spec}, cast again: {abbreviated(names)}"


def quantize(
    model: nn.Module,
    recipe: ScalingRecipe | str | Policy | Mapping[str, Any] | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    activation: ScalingRecipe | str | None = None,
    prefer: str | None = None,
    class_predicate: Predicate | None = None,
) -> QuantizeSummary:
    """Replace linear and embedding layers of `model`, in place, by ScaledLinear and ScaledEmbedding ones under `recipe`.

    Layers that MLX has quantized keep their codes and scales if `recipe` is theirs; else their values are cast again. With
    `recipe=None` all such layers keep them, and no others are chosen.

    recipe: a recipe or its spec, or a policy: a mapping from patterns to recipes or "keep", or the path of a YAML file with
        one; see `breccia.Policy`. One recipe leaves embeddings, routers, output heads and the other kinds of
        `breccia.backend.KEPT`, as every framework does. `{"preset": "mlx.nn.quantize", "default": "nvfp4"}` takes what
        `mlx.nn.quantize` takes: every `Linear` and `Embedding`.
    include, exclude: shell-style globs over names of weights ("lm_head.weight"): `exclude` beats `include`, which beats the
        default.
    activation: a recipe under which linear layers cast their inputs. prefer: the kernel of their products.
    class_predicate: called with each leaf module's path and the module, in place of patterns; True for one to quantize, or a
        dict of `recipe`, `activation` and `prefer` for it alone.

    A layer at several places is replaced by one layer. Nothing is replaced unless all chosen layers can be. Returns what was
    done.

    Raises what `breccia.cast` raises, naming the layer; UnsupportedError for a model that is itself such a layer, and for a
    chosen module that is not; DialectError for a layer of a format of MLX that has no recipe; UnknownNameError for a pattern
    that matches no weight; OptionError for other results of the predicate, for patterns beside it, and if no layer is chosen.

        >>> import mlx.nn as nn, breccia_mlx
        >>> model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU())
        >>> summary = breccia_mlx.quantize(model, "mxfp8")
        >>> [type(layer).__name__ for layer in model.layers]
        ['ScaledLinear', 'ReLU']
    """
    activation = as_activation(activation)
    if not isinstance(model, nn.Module) or _makes(model):
        one = ": breccia_mlx.nn has from_linear and from_embedding for a single layer." if _makes(model) else "."
        raise UnsupportedError(f"quantize replaces layers of a model; got a {type(model).__name__}{one}")
    before = _bytes(model)
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    layers = dict(leaves)
    options: dict[str, dict[str, Any]]
    defaults: dict[str, Any] = {"recipe": None, "activation": activation, "prefer": prefer}
    if class_predicate is not None:
        if include or exclude:
            raise OptionError("quantize takes class_predicate or patterns (include=, exclude=), not both.")
        defaults["recipe"] = None if recipe is None else as_recipe(cast("ScalingRecipe", recipe))
        answers = {path: _answer(class_predicate, path, module) for path, module in leaves}
        options = {path: {**defaults, **answer} for path, answer in answers.items() if answer is not None}
        left = {f"{p}.weight": "left out by class_predicate" for p, m in leaves if p not in options and _makes(m)}
    elif recipe is None:
        options = {path: {**defaults} for path, module in leaves if type(module) in QUANTIZED}
        left = {f"{path}.weight": "not quantized by MLX" for path, module in leaves if _makes(module) and path not in options}
    else:
        policy = Policy.of(recipe, include, exclude)
        chosen, left = choose(_parameters(leaves), policy, "quantize", what="weight", listed_by="`model.parameters()`")
        options = {name.removesuffix(".weight"): {**defaults, "recipe": how.recipe} for name, how in chosen.items()}
    if not options:
        raise none_chosen("quantize", left, "" if recipe is not None or class_predicate else "; pass a recipe")
    old_recipes = {path: _checked(path, layers[path], how) for path, how in options.items()}  # before anything changes
    replacements: dict[int, nn.Module] = {}
    for path, how in options.items():
        if id(layers[path]) not in replacements:
            replacements[id(layers[path])] = _replacement(layers[path], **how)
    model.update_modules(tree_unflatten([(path, replacements[id(layers[path])]) for path in options]))
    unchanged = [path for path, had in old_recipes.items() if had is not None and options[path]["recipe"] in (None, had)]
    return QuantizeSummary(
        chosen={f"{path}.weight": Chosen(how["recipe"], (1,)) for path, how in options.items() if path not in unchanged},
        left=left,
        bytes_before=before,
        bytes_after=_bytes(model),
        kept=tuple(f"{path}.weight" for path in unchanged),
        recast={f"{path}.weight": had for path, had in old_recipes.items() if had is not None and path not in unchanged},
    )


def _parameters(leaves: list[tuple[str, Any]]) -> Iterator[Parameter]:
    """The parameters of two axes or more of leaf modules; of MLX's quantized layers, as they were."""
    for path, module in leaves:
        if isinstance(module, LAYERS + QUANTIZED):
            embedding = isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
            why = "" if _makes(module) else f"{type(module).__name__} is a subclass of {LAYERS[embedding].__name__}"
            kind = "embedding" if embedding else "linear"
            yield Parameter(f"{path}.weight", *_in_float(module), kind, (1,), why, module)
            continue
        for leaf, array in _flat(module):
            if array.ndim >= 2:
                kind = "bias" if leaf.endswith("bias") else NO_MATRIX
                why = f"{leaf} of {type(module).__name__} is no weight of a linear or embedding layer"
                yield Parameter(f"{path}.{leaf}", tuple(array.shape), array.nbytes, kind, None, why, module)


def _in_float(module: Any) -> tuple[tuple[int, ...], int]:
    """The shape and the bytes of a layer's weight in high precision."""
    if not isinstance(module, QUANTIZED):
        return tuple(module.weight.shape), module.weight.nbytes
    rows, words = module.weight.shape  # of 32 bits
    columns = words * 32 // module.bits
    return (rows, columns), rows * columns * max(module.scales.itemsize, 2)


def _answer(predicate: Predicate, path: str, module: nn.Module) -> dict[str, Any] | None:
    """The individual options of a chosen layer; None if it is not chosen."""
    answer = predicate(path, module)
    if isinstance(answer, bool):
        return {} if answer else None
    if not isinstance(answer, dict) or not set(answer) <= set(_OPTIONS):
        raise OptionError(
            f"class_predicate must return True, False, or a dict of {', '.join(_OPTIONS)}; for {path} it returned {answer!r}.",
            path=path,
        )
    return answer


def _makes(module: Any) -> bool:
    """Is it exactly a linear or embedding layer, not a subclass?"""
    return any(isinstance(module, kind) and type(module).__call__ is kind.__call__ for kind in LAYERS + QUANTIZED)


def _checked(path: str, module: Any, options: dict[str, Any]) -> ScalingRecipe | None:
    """The recipe of a layer that MLX has quantized; None for another one. Raises an error naming a layer that has none."""
    if not _makes(module):
        raise UnsupportedError(
            f"quantize: {path} is a {type(module).__name__}, but only Linear and Embedding have a quantized form; exclude "
            "it in class_predicate.",
            path=path,
        )
    try:
        options["activation"] = as_activation(options["activation"])
        options["recipe"] = recipe = None if options["recipe"] is None else as_recipe(options["recipe"])
        tensor = bridges.from_mlx_layer(module) if isinstance(module, QUANTIZED) else None
        if tensor is None and recipe is None:
            raise OptionError("the weight is not quantized; pass a recipe.")
        if tensor is None:
            checks.check_cast(module.weight, recipe)
        if recipe is not None:
            checks.fitted_layout(recipe, tuple((module.weight if tensor is None else tensor).shape), -1)
    except BrecciaError as e:
        raise type(e)(f"quantize: {path}.weight: {e}", **e.found) from e
    return None if tensor is None else tensor.recipe


def _replacement(module: Any, recipe: ScalingRecipe | None, activation: ScalingRecipe | None, prefer: str | None) -> nn.Module:
    if isinstance(module, nn.Linear | nn.QuantizedLinear):
        return ScaledLinear.from_linear(module, recipe, activation=activation, prefer=prefer)
    return ScaledEmbedding.from_embedding(module, recipe, prefer=prefer)


def _bytes(model: nn.Module) -> int:
    """Bytes of all parameters, shared ones counted once."""
    return sum({id(a): a.nbytes for _, a in _flat(model)}.values())


def _flat(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from tree_flatten(model.parameters())  # pyright: ignore[reportReturnType]
