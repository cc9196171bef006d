"""Layers whose weight is a ScaledTensor, and `quantize_`, which gives them to a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import breccia
from breccia.errors import BrecciaError, OptionError, ShapeError, UnsupportedError
from breccia.frameworks import dtype_name
from breccia.recipes import ScalingRecipe, check_recipe
from breccia.tensor import PARTS, ScaledTensor

from .ops import WORDS, autocast_dtype

Filter = Callable[[nn.Module, str], bool]


class ScaledWeight(nn.Module):
    """A ScaledTensor as part of a model. Its parts are buffers, so it moves, saves, loads and is copied with the model.

    `state_dict` holds them as `data`, `scale`, and `zero_point`, `global_scale` where the recipe has them, and beside them, as
    JSON in a uint8 tensor, what they mean. `load_state_dict` refuses parts of another meaning. `.half()`, `.to(dtype)` and the
    like pass over them: codes and scales are no numbers of the model's precision.
    """

    def __init__(self, tensor: ScaledTensor) -> None:
        super().__init__()
        if not isinstance(tensor, ScaledTensor):
            raise UnsupportedError(f"ScaledWeight takes a ScaledTensor, got {type(tensor).__name__}; breccia.cast makes one.")
        if tensor.framework != "torch":
            raise UnsupportedError(f"ScaledWeight takes a ScaledTensor of torch; this one is of {tensor.framework}.")
        for name in PARTS:
            self.register_buffer(name, getattr(tensor, name))
        self.recipe, self.layout, self.axis, self.tail = tensor.recipe, tensor.layout, tensor.axis, tensor.tail

    @property
    def tensor(self) -> ScaledTensor:
        """The ScaledTensor of the buffers as they are now; nothing is copied."""
        parts = (self.recipe, self.layout, self.zero_point, self.global_scale, self.axis, self.tail)
        return ScaledTensor.assemble(self.data, self.scale, *parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight in high precision."""
        return self.tensor.shape

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def extra_repr(self) -> str:
        return f"{self.shape}, {self.recipe!r}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScaledWeight:
        """Every part goes through `fn` as integers, which no change of precision touches."""

        def as_integers(part: Tensor) -> Tensor:
            return fn(part.view(WORDS[part.itemsize])).view(part.dtype)

        return super()._apply(as_integers, recurse)

    def _meaning(self) -> dict[str, Any]:
        """What the buffers mean, ready for JSON."""
        return {"recipe": self.recipe.to_dict(), "layout": self.layout.to_dict(), "axis": self.axis, "tail": self.tail}

    def get_extra_state(self) -> Tensor:
        """What the buffers mean: recipe, layout, axis and tail as JSON in UTF-8."""
        return _text(json.dumps(self._meaning(), sort_keys=True, separators=(",", ":")))

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing is left to do: `_load_from_state_dict` has seen that it says what `get_extra_state` does."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        told = state_dict.get(f"{prefix}_extra_state")
        if told is not None and _read(told) != _read(self.get_extra_state()):
            theirs, ours = json.loads(_read(told)), self._meaning()
            differ = [key for key in ours if theirs.get(key) != ours[key]]
            error_msgs.append(
                f"{prefix[:-1]}: the state has {_listed(theirs, differ)}, and the model {_listed(ours, differ)}; quantize "
                "the model as the one that was saved."
            )
            return
        for name in PARTS:
            ours, theirs = getattr(self, name), state_dict.get(f"{prefix}{name}")
            if ours is None or theirs is None or theirs.dtype == ours.dtype:
                continue
            if torch.uint8 not in (theirs.dtype, ours.dtype) or theirs.itemsize != ours.itemsize:
                error_msgs.append(f"{prefix}{name} is {dtype_name(theirs)} in the state and {dtype_name(ours)} in the model.")
                return
            state_dict[f"{prefix}{name}"] = theirs.view(ours.dtype)  # codes as bytes, which copying would take for numbers
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


class ScaledLinear(nn.Module):
    """`nn.Linear` whose weight is quantized: x @ dequantize(weight).mT + bias, accumulated in FP32.

    weight: the ScaledWeight of shape (out_features, in_features); blocks run along in_features.
    activation: a recipe under which each input is cast, its rows being the tokens; None leaves inputs as they are. The gradient
        of an input passes straight through that cast.

    Inputs are FP32, FP16 or BF16 of shape (..., in_features); the output has their dtype, or that of autocast. The weight takes
    no gradient; the bias is a Parameter as it was.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: ScalingRecipe,
        activation: ScalingRecipe | None = None,
    ) -> None:
        linear = nn.Linear(in_features, out_features, bias, device, dtype)
        self._take(ScaledWeight(breccia.cast(linear.weight.detach(), recipe)), linear.bias, activation)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: ScalingRecipe, *, activation: ScalingRecipe | None = None) -> ScaledLinear:
        """The layer of `linear`'s weight under `recipe`, with its bias. Raises what `breccia.cast` raises."""
        return cls.in_place_of(linear, ScaledWeight(breccia.cast(linear.weight.detach(), recipe)), activation)

    @classmethod
    def in_place_of(cls, linear: nn.Linear, weight: ScaledWeight, activation: ScalingRecipe | None = None) -> ScaledLinear:
        """The layer of `linear`'s bias and of a weight that is quantized already.

        Raises ShapeError unless that has the shape of `linear`'s, with blocks along its rows.
        """
        if weight.shape != tuple(linear.weight.shape):
            raise ShapeError(
                f"the layer has a weight of shape {tuple(linear.weight.shape)}, and the quantized one is {weight.shape}.",
                expected=tuple(linear.weight.shape),
                found=weight.shape,
            )
        self = cls.__new__(cls)
        self._take(weight, linear.bias, activation)
        return self.train(linear.training)

    def _take(self, weight: ScaledWeight, bias: nn.Parameter | None, activation: ScalingRecipe | None) -> None:
        super().__init__()
        if len(weight.shape) != 2 or weight.axis != -1:
            raise ShapeError(
                f"a linear layer has a weight of shape (out_features, in_features) with blocks along the last axis; got shape "
                f"{weight.shape} and axis {weight.axis}.",
                shape=weight.shape,
            )
        if activation is not None:
            check_recipe(activation)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias, self.activation = weight, bias, activation

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(autocast_dtype(x) or x.dtype)
        rows: Any = x.reshape(-1, x.shape[-1])
        if self.activation is not None:
            through = torch.is_grad_enabled() and x.requires_grad
            # In FP32 the round trip has the values that the product would decode.
            rows = breccia.cast_ste(rows.float(), self.activation) if through else breccia.cast(rows, self.activation)
        y = breccia.matmul(rows, self.weight.tensor.mT, x.dtype).reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        activation = f", activation={self.activation!r}" if self.activation is not None else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{activation}"

    def get_extra_state(self) -> Tensor:
        """The UTF-8 JSON of `activation`; empty for None."""
        return _text("" if self.activation is None else self.activation.to_json())

    def set_extra_state(self, state: Tensor) -> None:
        text = _read(state)
        self.activation = ScalingRecipe.from_json(text) if text else None


def _text(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _read(text: Tensor) -> str:
    return bytes(text.tolist()).decode()


def _listed(meaning: dict[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key} {json.dumps(meaning.get(key))}" for key in keys)


# ------------------------------------------------------------------------------------------------ quantize_


def quantize_(
    model: nn.Module, recipe: ScalingRecipe, filter_fn: Filter | None = None, *, activation: ScalingRecipe | None = None
) -> None:
    """Replace linear layers of `model`, in place, by ScaledLinear ones with their weights under `recipe`.

    filter_fn: called with each `nn.Linear` and its name in the model; true for those to quantize. By default all are, but for
        subclasses, whose owners may read their weight (nn.MultiheadAttention does), and for those whose weight is tied to
        something that is no such layer (an embedding).
    activation: a recipe under which those layers cast their inputs.

    Layers that share a weight go on sharing it. Nothing is replaced unless all chosen layers can be.

    Raises what `breccia.cast` raises, naming the layer; UnsupportedError for a model that is itself a linear layer, and for a
    chosen layer tied to one that stays; OptionError where no layer is chosen.
    """
    check_recipe(recipe)
    if isinstance(model, nn.Linear) or not isinstance(model, nn.Module):
        way = ": breccia_torch.nn.ScaledLinear.from_linear(model, recipe) is its quantized layer." if callable(model) else "."
        raise UnsupportedError(f"quantize_ replaces layers of a model; got a {type(model).__name__}{way}")
    layers = {name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)}
    chosen = {name: m for name, m in layers.items() if (filter_fn(m, name) if filter_fn else type(m) is nn.Linear)}
    tied = dict(_ties(model, chosen))
    if tied and filter_fn:
        name, owners = next(iter(tied.items()))
        raise UnsupportedError(
            f"quantize_: {name}.weight is tied to {', '.join(owners)}, which would stay as it is. Leave {name} out, or give it "
            f"a weight of its own first: {name}.weight = nn.Parameter({name}.weight.clone()).",
            name=name,
            tied=owners,
        )
    chosen = {name: m for name, m in chosen.items() if name not in tied}
    if not chosen:
        raise OptionError(
            f"quantize_: no layer is chosen: {len(layers)} nn.Linear in the model, {len(tied)} of them tied to other layers"
            + (", and filter_fn took none." if filter_fn else "."),
            layers=tuple(layers),
        )
    for name, module in chosen.items():  # shapes and dtypes alone, before anything changes
        try:
            breccia.cast(module.weight.detach().to("meta"), recipe)
        except BrecciaError as e:
            raise type(e)(f"quantize_: {name}.weight: {e}", **e.found) from e
    weights: dict[int, ScaledWeight] = {}
    made: dict[int, ScaledLinear] = {}
    for name, module in chosen.items():
        if id(module) not in made:
            if id(module.weight) not in weights:
                weights[id(module.weight)] = ScaledWeight(breccia.cast(module.weight.detach(), recipe))
            made[id(module)] = ScaledLinear.in_place_of(module, weights[id(module.weight)], activation)
        replace(model, name, made[id(module)])


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `name` is in the model."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _ties(model: nn.Module, chosen: dict[str, nn.Linear]) -> Iterator[tuple[str, list[str]]]:
    """The layers, of those chosen, whose weight belongs to others as well; and the names it has there."""
    owners: dict[int, list[str]] = {}
    taken = {id(module) for module in chosen.values()}
    for name, module in model.named_modules():
        if id(module) not in taken:
            for leaf, parameter in module.named_parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(f"{name}.{leaf}".lstrip("."))
    return ((name, owners[id(m.weight)]) for name, m in chosen.items() if id(m.weight) in owners)
