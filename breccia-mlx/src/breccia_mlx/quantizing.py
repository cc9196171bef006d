"""`quantize`: the layers of a model, in place, with their weights under a recipe, like `mlx.nn.quantize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from breccia import bridges
from breccia.backend import (
    BrecciaError,
    OptionError,
    ScalingRecipe,
    UnsupportedError,
    abbreviated,
    as_recipe,
    checks,
)

from .nn import ScaledEmbedding, ScaledLinear, as_activation

#: Called with a layer's path and the layer: whether to quantize it, or how.
Predicate = Callable[[str, nn.Module], bool | dict[str, Any]]

_OPTIONS = ("recipe", "activation", "prefer")
#: The layers that have a quantized form, and MLX's own quantized ones.
LAYERS = (nn.Linear, nn.Embedding)
QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


@dataclass(frozen=True, repr=False)
class QuantizeSummary:
    """What `quantize` did. Printing it shows the numbers and the names.

    quantized: paths of the layers whose high-precision weights were cast. kept: of layers that MLX had quantized, with the same
    codes and scales. recast: of such layers whose values were cast again, with the recipe that they had.
    left: paths of the other layers of these kinds.
    bytes_before, bytes_after: of all parameters of the model.
    """

    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    recast: Mapping[str, ScalingRecipe]
    left: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def __repr__(self) -> str:
        count = len(self.quantized) + len(self.kept) + len(self.recast)
        lines = [f"{count} layers quantized; the model has {_size(self.bytes_after)}, before {_size(self.bytes_before)}"]
        if self.kept:
            lines.append(f"quantized by MLX, codes and scales kept: {abbreviated(self.kept)}")
        for recipe in dict.fromkeys(self.recast.values()):
            names = [path for path, had in self.recast.items() if had == recipe]
            lines.append(f"quantized by MLX under {recipe.spec}, cast again: {abbreviated(names)}")
        if self.left:
            lines.append(f"left as they were: {abbreviated(self.left)}")
        return "\n".join(lines)


def quantize(
    model: nn.Module,
    recipe: ScalingRecipe | str | None = None,
    *,
    activation: ScalingRecipe | str | None = None,
    prefer: str | None = None,
    class_predicate: Predicate | None = None,
) -> QuantizeSummary:
    """Replace linear and embedding layers of `model`, in place, by ScaledLinear and ScaledEmbedding ones under `recipe`.

    Layers that MLX has quantized keep their codes and scales if `recipe` is theirs; else their values are cast again. With
    `recipe=None` all such layers keep them, and no others are chosen.

    activation: a recipe under which linear layers cast their inputs. prefer: the kernel of their products.
    class_predicate: called with each leaf module's path and the module; True for one to quantize, or a dict of `recipe`,
        `activation` and `prefer` for it alone. By default every `mlx.nn.Linear` and `mlx.nn.Embedding`, also quantized ones,
        except subclasses.

    A layer at several places is replaced by one layer. Nothing is replaced unless all chosen layers can be. Returns what was
    done.

    Raises what `breccia.cast` raises, naming the layer; UnsupportedError for a model that is itself such a layer, and for a
    chosen module that is not; DialectError for a layer of a format of MLX that has no recipe; OptionError for other results of
    the predicate, and if no layer is chosen.
    """
    recipe, activation = None if recipe is None else as_recipe(recipe), as_activation(activation)
    if not isinstance(model, nn.Module) or _makes(model):
        one = ": breccia_mlx.nn has from_linear and from_embedding for a single layer." if _makes(model) else "."
        raise UnsupportedError(f"quantize replaces layers of a model; got a {type(model).__name__}{one}")
    before = _bytes(model)
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    given: dict[str, Any] = {"recipe": recipe, "activation": activation, "prefer": prefer}
    chosen = {path: (m, given | how) for path, m in leaves if (how := _how(class_predicate, path, m, recipe)) is not None}
    if not chosen:
        plain = sum(type(m) in LAYERS for _, m in leaves)
        asked = "; class_predicate, which is called with each path and module, chose none." if class_predicate else "."
        none = " Pass a recipe." if recipe is None and plain and class_predicate is None else ""
        raise OptionError(
            f"quantize: no layer is chosen: {plain} of {len(leaves)} leaf modules are Linear or Embedding{asked}{none}"
        )
    found = {path: _checked(path, module, options) for path, (module, options) in chosen.items()}  # before anything changes
    made: dict[int, nn.Module] = {}
    for module, options in chosen.values():
        if id(module) not in made:
            made[id(module)] = _replacement(module, **options)
    model.update_modules(tree_unflatten([(path, made[id(module)]) for path, (module, _) in chosen.items()]))
    recast = {path: had for path, had in found.items() if had is not None and chosen[path][1]["recipe"] not in (None, had)}
    return QuantizeSummary(
        quantized=tuple(path for path, had in found.items() if had is None),
        kept=tuple(path for path, had in found.items() if had is not None and path not in recast),
        recast=recast,
        left=tuple(path for path, module in leaves if path not in chosen and _makes(module)),
        bytes_before=before,
        bytes_after=_bytes(model),
    )


def _how(predicate: Predicate | None, path: str, module: nn.Module, recipe: ScalingRecipe | None) -> dict[str, Any] | None:
    """The individual options of a chosen layer; None if it is not chosen."""
    if predicate is None:
        return {} if type(module) in (QUANTIZED if recipe is None else LAYERS + QUANTIZED) else None
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
        held = bridges.from_mlx_layer(module) if isinstance(module, QUANTIZED) else None
        if held is None and recipe is None:
            raise OptionError("the weight is not quantized; pass a recipe.")
        if held is None:
            checks.check_cast(module.weight, recipe)
        if recipe is not None:
            checks.fitted_layout(recipe, tuple((module.weight if held is None else held).shape), -1)
    except BrecciaError as e:
        raise type(e)(f"quantize: {path}.weight: {e}", **e.found) from e
    return None if held is None else held.recipe


def _replacement(module: Any, recipe: ScalingRecipe | None, activation: ScalingRecipe | None, prefer: str | None) -> nn.Module:
    if isinstance(module, nn.Linear | nn.QuantizedLinear):
        return ScaledLinear.from_linear(module, recipe, activation=activation, prefer=prefer)
    return ScaledEmbedding.from_embedding(module, recipe, prefer=prefer)


def _bytes(model: nn.Module) -> int:
    """Bytes of all parameters, shared ones counted once."""
    return sum({id(a): a.nbytes for _, a in _flat(model)}.values())


def _flat(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from tree_flatten(model.parameters())  # pyright: ignore[reportReturnType]


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.2f} kB"
