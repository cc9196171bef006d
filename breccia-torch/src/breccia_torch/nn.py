"""Layers whose weight is a ScaledTensor, and `quantize_`, which gives them to a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import breccia
from breccia.backend import (
    FLOATS,
    PARTS,
    PLAIN,
    BrecciaError,
    Declared,
    Layout,
    OptionError,
    ScaledTensor,
    ScalingRecipe,
    ShapeError,
    UnsupportedError,
    check_recipe,
    checks,
    components,
    dtype_name,
)

from .ops import WORDS, autocast_dtype

Filter = Callable[[nn.Module, str], bool]


STATE = "_extra_state"


class _WithMetadata(nn.Module):
    """A module that stores metadata in its state, and refuses a state with other metadata."""

    def _metadata(self) -> dict[str, Any]:
        """Metadata by name: declarations, numbers or None."""
        raise NotImplementedError

    def get_extra_state(self) -> Tensor:
        """The metadata as JSON, in UTF-8."""
        told = {k: v.to_dict() if isinstance(v, Declared) else v for k, v in self._metadata().items()}
        text = json.dumps(told, sort_keys=True, separators=(",", ":"))
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Does nothing: `_load_from_state_dict` has checked that it equals `get_extra_state`."""

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
        refused = self._refused(state_dict, prefix)
        if refused:
            error_msgs.append(f"{prefix[:-1]}: {refused}")
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _refused(self, state_dict: dict[str, Any], prefix: str) -> str:
        """Why the state does not fit this module; empty if it does."""
        told = state_dict.get(prefix + STATE)
        if told is None:
            return ""
        try:
            theirs = metadata(told)
        except Exception as e:  # a damaged state may raise anything
            return f"its metadata cannot be read ({e}); the file it came from is damaged."
        ours = self._metadata()
        differ = [key for key in ours if theirs.get(key) != ours[key]]
        if not differ:
            return ""
        both = (", ".join(f"{key} {found.get(key)!r}" for key in differ) for found in (theirs, ours))
        return "the state has {}, and the model {}; quantize the model like the saved one.".format(*both)


def metadata(state: Tensor) -> dict[str, Any]:
    """The metadata that `get_extra_state` wrote."""
    kinds = {"recipe": ScalingRecipe, "activation": ScalingRecipe, "layout": Layout}
    listed = json.loads(bytes(state.tolist()))
    return {k: kinds[k].from_json(json.dumps(v)) if k in kinds and v is not None else v for k, v in listed.items()}


class ScaledWeight(_WithMetadata):
    """A ScaledTensor as part of a model. Its components are buffers, so it moves, saves, loads and is copied with the model.

    `state_dict` has them as `data`, `scale`, and `zero_point`, `global_scale` if the recipe has them, and their metadata as
    JSON in a uint8 tensor. `load_state_dict` refuses components with other metadata. `.half()`, `.to(dtype)` and the like skip
    them: codes and scales do not follow the model's precision. `data` are codes; the values are
    `breccia.dequantize(weight.tensor)`.

    A tensor in a storage keeps it; `state_dict` and `load_state_dict` use the components of the plain tensor.
    """

    def __init__(self, tensor: ScaledTensor) -> None:
        super().__init__()
        if not isinstance(tensor, ScaledTensor):
            raise UnsupportedError(f"ScaledWeight takes a ScaledTensor, got {type(tensor).__name__}; breccia.cast makes one.")
        if tensor.framework != "torch":
            raise UnsupportedError(f"ScaledWeight takes a torch ScaledTensor; this one is of {tensor.framework}.")
        for name in PARTS:
            self.register_buffer(name, getattr(tensor, name))
        self.recipe, self.layout, self.axis, self.padding = tensor.recipe, tensor.layout, tensor.axis, tensor.padding

    @property
    def tensor(self) -> ScaledTensor:
        """The ScaledTensor of the current buffers; zero-copy."""
        b = self._buffers
        parts = (self.recipe, self.layout, b["zero_point"], b["global_scale"], self.axis, self.padding)
        return ScaledTensor.from_parts(b["data"], b["scale"], *parts)

    @property
    def __scaled_tensor__(self) -> ScaledTensor:
        """Lets the ops of `breccia` accept the weight: `breccia.dequantize(layer.weight)`."""
        return self.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight in high precision."""
        return self.tensor.shape

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def extra_repr(self) -> str:
        return f"{self.shape}, {self.recipe!r}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScaledWeight:
        """Apply `fn` to each component viewed as integers, which changes of precision skip."""

        def as_integers(part: Tensor) -> Tensor:
            words = part.view(WORDS[part.itemsize])
            found = fn(words)
            return found.view(part.dtype) if found.dtype == words.dtype else part.to(found.device)

        return super()._apply(as_integers, recurse)

    def _metadata(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "layout": self.layout.plain, "axis": self.axis, "padding": self.padding}

    def _take_parts(self, tensor: ScaledTensor) -> None:
        """Set the buffers to the components of `tensor`."""
        for name in PARTS:
            setattr(self, name, getattr(tensor, name))
        self.layout = tensor.layout

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout.storage != PLAIN:
            for name, part in components(self.tensor.to_plain()).items():
                destination[prefix + name] = part if keep_vars else part.detach()

    def _load_from_state_dict(self, *arguments: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        storage = self.layout.storage
        if storage != PLAIN:
            self._take_parts(self.tensor.to_plain())
        super()._load_from_state_dict(*arguments)
        if storage != PLAIN:
            self._take_parts(self.tensor.to_storage(storage))

    def _refused(self, state_dict: dict[str, Any], prefix: str) -> str:
        refused = super()._refused(state_dict, prefix)
        for name in PARTS:
            ours, theirs = getattr(self, name), state_dict.get(f"{prefix}{name}")
            if refused or ours is None or theirs is None or theirs.dtype == ours.dtype:
                continue
            kinds = sorted(map(dtype_name, (ours, theirs)))
            if kinds[1] != "uint8" or not kinds[0].startswith("float8"):
                return f"{name} is {dtype_name(theirs)} in the state and {dtype_name(ours)} in the model."
            state_dict[f"{prefix}{name}"] = theirs.view(
                ours.dtype
            )  # a view of the codes, which copying would convert as numbers
        return refused


class ScaledLinear(_WithMetadata):
    """`nn.Linear` whose weight is quantized: x @ dequantize(weight).mT + bias in FP32, rounded once to the input's dtype.

    weight: the ScaledWeight of shape (out_features, in_features); blocks run along in_features.
    activation: a recipe under which each input is cast, with tokens as rows; None leaves inputs unchanged. The gradient of
        an input passes straight through that cast.

    Inputs are FP32, FP16 or BF16 of shape (..., in_features); the output has their dtype, or autocast's. The weight takes no
    gradient; the bias remains a Parameter.
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
        check_recipe(recipe)
        linear = nn.Linear(in_features, out_features, bias, device, dtype)
        self._take(ScaledWeight(breccia.cast(linear.weight.detach(), recipe)), linear.bias, activation)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: ScalingRecipe, *, activation: ScalingRecipe | None = None) -> ScaledLinear:
        """Quantize `linear`'s weight under `recipe` and keep its bias. Raises what `breccia.cast` raises."""
        return cls.in_place_of(linear, ScaledWeight(breccia.cast(linear.weight.detach(), recipe)), activation)

    @classmethod
    def in_place_of(cls, linear: nn.Linear, weight: ScaledWeight, activation: ScalingRecipe | None = None) -> ScaledLinear:
        """A layer with `linear`'s bias and an already quantized weight.

        Raises ShapeError unless the weight has the shape of `linear`'s, with blocks along its rows.
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
        check_activation(activation)
        if len(weight.shape) != 2 or weight.axis != -1:
            raise ShapeError(
                f"a linear layer has a weight of shape (out_features, in_features) with blocks along the last axis; got shape "
                f"{weight.shape} and axis {weight.axis}.",
                shape=weight.shape,
            )
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias, self.activation = weight, bias, activation

    def to_linear(self, dtype: torch.dtype = torch.float32) -> nn.Linear:
        """An `nn.Linear` of the weight's values in `dtype`, with the same bias."""
        values = breccia.dequantize(self.weight.tensor, out_dtype=dtype)
        made = nn.Linear(self.in_features, self.out_features, False, "meta", dtype)
        made.weight = nn.Parameter(values)
        made.register_parameter("bias", self.bias)
        return made.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ShapeError(
                f"the layer takes inputs of shape (..., {self.in_features}); got {tuple(x.shape)}.",
                found=tuple(x.shape),
                in_features=self.in_features,
            )
        floating = x.dtype in _FLOATS
        if floating and (dtype := autocast_dtype(x)) is not None:
            x = x.to(dtype)
        rows: Any = x if x.ndim == 2 else x.flatten(0, -2) if x.ndim > 2 else x[None]
        weight, dtype = self.weight.tensor.mT, x.dtype if floating else torch.float32
        if self.activation is None:
            y = breccia.matmul(rows, weight, dtype, bias=self.bias)
        else:
            y = breccia.cast_matmul(rows, self.activation, weight, dtype, bias=self.bias)
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        activation = f", activation={self.activation!r}" if self.activation is not None else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{activation}"

    def _metadata(self) -> dict[str, Any]:
        return {"activation": self.activation}


_FLOATS = tuple(getattr(torch, name) for name in FLOATS)


def check_activation(activation: Any) -> None:
    """Raise UnsupportedError unless it is a recipe, or None."""
    if activation is not None and not isinstance(activation, ScalingRecipe):
        raise UnsupportedError(f"activation is a ScalingRecipe instance or None; got {activation!r}.", activation=activation)


# ------------------------------------------------------------------------------------------------ quantize_


def quantize_(
    model: nn.Module, recipe: ScalingRecipe, filter_fn: Filter | None = None, *, activation: ScalingRecipe | None = None
) -> None:
    """Replace linear layers of `model`, in place, by ScaledLinear ones with their weights under `recipe`.

    filter_fn: called with each `nn.Linear` and its name in the model; true for those to quantize. By default all are, except
        subclasses, whose owners may read their weight (nn.MultiheadAttention does), and layers whose weight is tied to
        another kind of module (an embedding).
    activation: a recipe under which those layers cast their inputs.

    Layers that share a weight keep sharing it. Nothing is replaced unless all chosen layers can be.

    Raises what `breccia.cast` raises, naming the layer; UnsupportedError for a model that is itself a linear layer, and for a
    chosen layer that is tied to an unchosen one, that has hooks, or that does more than a linear layer; OptionError if no
    layer is chosen.
    """
    check_recipe(recipe)
    check_activation(activation)
    if isinstance(model, nn.Linear) or not isinstance(model, nn.Module):
        way = ": breccia_torch.nn.ScaledLinear.from_linear(model, recipe) is its quantized layer." if _is_linear(model) else "."
        raise UnsupportedError(f"quantize_ replaces layers of a model; got {_kind(model)}{way}")
    chosen = _chosen(model, filter_fn)
    for name, module in chosen.items():  # before anything changes
        check_replaceable(name, module)
        try:
            checks.check_cast(module.weight, recipe)
            checks.fitted_layout(recipe, tuple(module.weight.shape), -1)
        except BrecciaError as e:
            raise type(e)(f"quantize_: {name}.weight: {e}", **e.found) from e
    names: dict[nn.Linear, list[str]] = {}
    for name, module in chosen.items():
        names.setdefault(module, []).append(name)
    owners = Counter(id(module.weight) for module in names)
    shared: dict[int, ScaledWeight] = {}
    del chosen
    while names:  # each high-precision weight is freed once its last layer is replaced
        module, places = names.popitem()
        key = id(module.weight)
        weight = shared.get(key) or ScaledWeight(breccia.cast(module.weight.detach(), recipe))
        if owners[key] > 1:
            shared[key] = weight
        made = ScaledLinear.in_place_of(module, weight, activation)
        for name in places:
            replace(model, name, made)


def _chosen(model: nn.Module, filter_fn: Filter | None) -> dict[str, nn.Linear]:
    """The layers to replace, by name. Raises UnsupportedError for a tie to an unchosen layer, OptionError if none is chosen."""
    layers = {name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)}
    chosen = {name: m for name, m in layers.items() if (filter_fn(m, name) if filter_fn else _is_linear(m))}
    tied = dict(_ties(model, chosen))
    if tied and filter_fn:
        name, owners = next(iter(tied.items()))
        raise UnsupportedError(
            f"quantize_: {name}.weight is tied to {', '.join(owners)}, which would not be quantized. Leave {name} out or untie "
            f"its weight first: {name}.weight = nn.Parameter({name}.weight.clone()).",
            name=name,
            tied=owners,
        )
    left = {name: m for name, m in chosen.items() if name not in tied}
    if not left:
        done, plain = sum(isinstance(m, ScaledLinear) for m in model.modules()), sum(map(_is_linear, layers.values()))
        raise OptionError(
            f"quantize_: no layer is chosen: {plain} nn.Linear in the model ({len(tied)} of them tied to other layers), "
            f"{len(layers) - plain} of a subclass, {done} ScaledLinear"
            + ("; filter_fn, which is called with each nn.Linear and its name, chose none." if filter_fn else "."),
            layers=tuple(layers),
        )
    return left


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear


def _kind(found: Any) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"


def check_replaceable(name: str, module: nn.Linear) -> None:
    """Raise UnsupportedError if a ScaledLinear would lose behaviour of the layer."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, attribute, None) for attribute in hooks) or "forward" in vars(module):
        raise UnsupportedError(
            f"{name or 'the layer'} has hooks or a custom forward, which its quantized layer would lose: quantize first, "
            "then add them.",
            name=name,
        )
    if not name:
        raise UnsupportedError("the model itself is a linear layer, which cannot be replaced in place: put it into a model.")
    read = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)  # nn.MultiheadAttention reads it as a tensor
    if read or type(module).forward is not nn.Linear.forward or next(module.children(), None) is not None:
        raise UnsupportedError(
            f"{name} is a {type(module).__name__}, which is more than a linear layer; leave it out or convert it first.",
            name=name,
        )


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule `name` of the model."""
    owner, _, leaf = name.rpartition(".")
    parent = model.get_submodule(owner)
    setattr(parent, leaf, module)
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0  # else, in evaluation, it passes its weights to a fused kernel as tensors


def _ties(model: nn.Module, chosen: dict[str, nn.Linear]) -> Iterator[tuple[str, list[str]]]:
    """The chosen layers whose weight is tied to other modules, and its names there."""
    owners: dict[int, list[str]] = {}
    taken = {id(module) for module in chosen.values()}
    for name, module in model.named_modules():
        if id(module) not in taken:
            for leaf, parameter in module.named_parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(f"{name}.{leaf}".lstrip("."))
    tied = ((name, owners.get(id(m.weight))) for name, m in chosen.items())
    return ((name, found) for name, found in tied if found)
