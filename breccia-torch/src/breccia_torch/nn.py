"""Layers whose weight is a ScaledTensor; `breccia_torch.quantize_` gives them to a model."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

import breccia
from breccia import BrecciaError, CorruptFileError, ScaledTensor, ScalingRecipe, ShapeError
from breccia.backend import (
    FLOATS,
    PARTS,
    PLAIN,
    Declared,
    Prefer,
    as_recipe,
    checks,
    components,
    dtype_name,
    framework_of,
    product_options,
    targets,
)
from breccia.internal import check_scaled, layout_of_tensor, parsed_json

from . import frontend
from .ops import TORCH, WORDS, autocast_dtype, transforming
from .reading import ReadAsTensor

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
        both = (", ".join(f"{key} {fields.get(key)!r}" for key in differ) for fields in (theirs, ours))
        return "the state has {}, and the model {}; quantize the model like the saved one.".format(*both)


def metadata(state: Tensor) -> dict[str, Any]:
    """The metadata that `get_extra_state` wrote. Raises CorruptFileError for anything else."""
    kinds = {"recipe": ScalingRecipe.from_json, "activation": ScalingRecipe.from_json, "layout": layout_of_tensor}
    try:
        listed = parsed_json(bytes(state.tolist()))
        return {k: kinds[k](json.dumps(v)) if k in kinds and v is not None else v for k, v in listed.items()}
    except (BrecciaError, ValueError, TypeError, AttributeError) as e:
        raise CorruptFileError(f"the state of a layer is JSON that names its recipe: {e}; save the model again.") from e


def _mark_when_saved() -> None:
    """Let transformers, if it is loaded, say in config.json that a model which it saves holds quantized weights."""
    if "transformers.modeling_utils" in sys.modules:
        with suppress(ImportError):  # `quantize_` reports it
            targets.load("breccia_torch.hf.marking:watch")()


def _saveable(part: Tensor | None) -> Tensor | None:
    """A component that autograd can save: made under `torch.inference_mode` it is copied, since layers may be trained later."""
    if part is None or not part.is_inference():
        return part
    with torch.inference_mode(False):
        return part.clone()


class ScaledWeight(ReadAsTensor, _WithMetadata):
    """A ScaledTensor as part of a model. Its components are buffers, so it moves, saves, loads and is copied with the model.

    `state_dict` has them as `data`, `scale`, and `zero_point`, `global_scale` if the recipe has them, and their metadata as
    JSON in a uint8 tensor. `load_state_dict` refuses components with other metadata. `.half()`, `.to(dtype)` and the like skip
    them: codes and scales do not follow the model's precision. `data` are codes; the values are
    `breccia.dequantize(weight.tensor)`. Models that read a layer's weight as a tensor get decoded values, anew for each use.

    A tensor in a storage keeps it; `state_dict` and `load_state_dict` use the components of the plain tensor.
    """

    #: The dtype of decoded values, which adapters of peft follow: the layer's, and then the model's.
    dtype: torch.dtype = torch.float32
    #: Whether the transpose is kept between calls. It would hold memory that accelerate frees after each.
    keeps_transpose: bool = True

    def __init__(self, tensor: ScaledTensor) -> None:
        super().__init__()
        check_scaled("ScaledWeight", tensor, "torch")
        _mark_when_saved()
        for name in PARTS:
            self.register_buffer(name, _saveable(getattr(tensor, name)))
        self.recipe, self.layout, self.axis, self.padding = tensor.recipe, tensor.layout, tensor.axis, tensor.padding

    @property
    def tensor(self) -> ScaledTensor:
        """The ScaledTensor of the current buffers; zero-copy."""
        b = self._buffers
        parts = (self.recipe, self.layout, b["zero_point"], b["global_scale"], self.axis, self.padding)
        return ScaledTensor.from_parts(b["data"], b["scale"], *parts)

    @property
    def transposed(self) -> ScaledTensor:
        """`tensor.mT`, made once for the buffers that the module holds. Calls of a layer need nothing else of the weight."""
        if torch.compiler.is_compiling():
            return self.tensor.mT
        b: dict[str, Any] = self._buffers
        cache = self.__dict__.get(_TRANSPOSE)
        data, scale, zero_point, global_scale = b["data"], b["scale"], b["zero_point"], b["global_scale"]
        if (
            cache is None
            or cache[0] is not data
            or cache[1] is not scale
            or cache[2] is not zero_point
            or cache[3] is not global_scale
            or cache[4] is not self.layout
            or cache[5] != data.data_ptr()  # `buffer.data = ...` keeps the object, and if it is cut, the address
            or cache[6] != scale.data_ptr()
            or (zero_point is not None and cache[7] != zero_point.data_ptr())
            or (global_scale is not None and cache[8] != global_scale.data_ptr())
            or cache[9] != data.shape
        ):
            transpose = self.tensor.mT
            if type(data) is not Tensor:
                for name, part in components(transpose).items():
                    framework_of(part, f"{name} of the weight")  # refuses some
            if type(data) is not Tensor or not self.keeps_transpose or transforming():  # such tensors may have no memory
                return transpose
            parts = data, scale, zero_point, global_scale
            addresses = [None if part is None else part.data_ptr() for part in parts]
            self.__dict__[_TRANSPOSE] = (*parts, self.layout, *addresses, data.shape, transpose)
            return transpose
        return cache[10]

    def __getstate__(self) -> dict[str, Any]:
        """Without what is kept for calls, and with components that pickle supports."""
        state = self.__dict__.copy()
        for name in _KEPT:
            state.pop(name, None)
        parts: dict[str, Any] = state["_buffers"]
        state["_buffers"] = {name: part if part is None else TORCH.portable(part) for name, part in parts.items()}
        state[_DTYPES] = {name: part.dtype for name, part in parts.items() if part is not None}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        dtypes, parts = state[_DTYPES], state["_buffers"]
        buffers = {name: part if part is None else part.view(dtypes[name]) for name, part in parts.items()}
        _mark_when_saved()
        super().__setstate__({name: value for name, value in state.items() if name != _DTYPES} | {"_buffers": buffers})

    @property
    def __scaled_tensor__(self) -> ScaledTensor:
        """Lets the ops of `breccia` accept the weight: `breccia.dequantize(layer.weight)`."""
        return self.tensor

    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values in `dtype`, by default the weight's."""
        return breccia.dequantize(self.tensor, out_dtype=dtype or self.dtype)

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
        """Apply `fn` to each component viewed as integers, which changes of precision skip, and to `dtype`."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype

        def as_integers(part: Tensor) -> Tensor:
            words = part.view(WORDS[part.itemsize])
            new_words = fn(words)
            return new_words.view(part.dtype) if new_words.dtype == words.dtype else part.to(new_words.device)

        return super()._apply(as_integers, recurse)

    def _metadata(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "layout": self.layout.plain, "axis": self.axis, "padding": self.padding}

    def restore_dtypes(self) -> None:
        """View components of uint8, as files hold all 8-bit codes, in the recipe's storage dtypes."""
        for name, dtype in TORCH.dtypes(self.recipe.format).items():
            part = getattr(self, name)
            if part is not None and part.dtype == torch.uint8:
                setattr(self, name, part.view(getattr(torch, dtype)))

    def take(self, tensor: ScaledTensor) -> None:
        """Hold `tensor` instead: the same weight, in another storage."""
        for name in PARTS:
            setattr(self, name, _saveable(getattr(tensor, name)))
        self.layout = tensor.layout

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout.storage != PLAIN:
            for name, part in components(self.tensor.to_plain()).items():
                destination[prefix + name] = part if keep_vars else part.detach()

    def _load_from_state_dict(self, *arguments: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        storage = self.layout.storage
        if storage != PLAIN:
            self.take(self.tensor.to_plain())
        super()._load_from_state_dict(*arguments)
        if storage != PLAIN:
            self.take(self.tensor.to_storage(storage))

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

    #: The axis of the weight that the product sums over.
    contraction: ClassVar[int] = -1
    #: The kernels that multiply the gradient of the output by the weight, as of `prefer=` of `breccia.matmul`. Where none of
    #: them runs, the one that would run without it does. "triton.matmul_bf16_rounded" rounds the weight to BF16 there, as most
    #: libraries do: an error of up to 2^-8 of each value, in half the time. For layers in eager mode that cast no inputs.
    prefer_backward: Prefer = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: ScalingRecipe | str,
        activation: ScalingRecipe | str | None = None,
    ) -> None:
        linear = nn.Linear(in_features, out_features, bias, device, dtype)
        self._take(ScaledWeight(breccia.cast(linear.weight.detach(), recipe)), linear.bias, activation)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, recipe: ScalingRecipe | str, *, activation: ScalingRecipe | str | None = None
    ) -> Self:
        """Quantize `linear`'s weight under `recipe` and keep its bias. Raises what `breccia.cast` raises."""
        return cls.in_place_of(linear, cls.quantized(linear.weight, recipe), activation)

    @classmethod
    def quantized(cls, weight: Tensor, recipe: ScalingRecipe | str) -> ScaledWeight:
        """A layer's weight under `recipe`, with blocks along the contraction axis."""
        return ScaledWeight(breccia.cast(weight.detach(), recipe, axis=cls.contraction))

    @classmethod
    def in_place_of(cls, linear: nn.Linear, weight: ScaledWeight, activation: ScalingRecipe | str | None = None) -> Self:
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
        weight.dtype = linear.weight.dtype
        self._take(weight, linear.bias, activation)
        return self.train(linear.training)

    def _take(self, weight: ScaledWeight, bias: nn.Parameter | None, activation: ScalingRecipe | str | None) -> None:
        super().__init__()
        self._check_weight(weight)
        self.in_features, self.out_features = weight.shape if self.contraction == -2 else weight.shape[::-1]
        self.weight, self.bias = weight, bias
        self.activation = None if activation is None else as_recipe(activation)

    def _check_weight(self, weight: ScaledWeight) -> None:
        if len(weight.shape) != 2 or weight.axis != -1:
            raise ShapeError(
                f"a linear layer has a weight of shape (out_features, in_features) with blocks along the last axis; got shape "
                f"{weight.shape} and axis {weight.axis}.",
                shape=weight.shape,
            )

    @property
    def _matrix(self) -> ScaledTensor:
        """The weight as (in_features, out_features)."""
        weight: Any = self._modules["weight"]  # reading an attribute of a module takes longer
        return weight.transposed

    def to_linear(self, dtype: torch.dtype = torch.float32) -> nn.Linear:
        """An `nn.Linear` of the weight's values in `dtype`, with the same bias."""
        values = breccia.dequantize(self._matrix, out_dtype=dtype).mT.contiguous()
        linear = nn.Linear(self.in_features, self.out_features, False, "meta", dtype)
        linear.weight = nn.Parameter(values)
        linear.register_parameter("bias", self.bias)
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and (y := self._repeated(x)) is not None:
            return y
        shape = x.shape
        ndim = len(shape)
        if ndim == 0 or shape[-1] != self.in_features:
            raise ShapeError(
                f"the layer takes inputs of shape (..., {self.in_features}); got {tuple(shape)}.",
                found=tuple(shape),
                in_features=self.in_features,
            )
        dtype = _FLOATS.get(x.dtype)
        if dtype is not None and (mixed := autocast_dtype(x)) is not None:
            x, dtype = x.to(mixed), _FLOATS.get(mixed)
        rows: Any = x if ndim > 1 else x[None]
        if torch.compiler.is_compiling() and dtype is not None and self._is_one_operator(x):
            y = _operator_of(rows, self.weight, dtype, self.bias)
            return y if ndim > 1 else y[0]
        weight, out_dtype = self._matrix, dtype or "float32"
        parameters = self._parameters  # where it is not, it may be parametrized
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        if self.activation is None:
            if dtype is None or torch.compiler.is_compiling():
                y = breccia.matmul(rows, weight, out_dtype, bias=bias)
            else:  # all that it checks holds, except where the bias was replaced by another
                if bias is not None and (bias.shape != (self.out_features,) or type(bias) not in _PLAIN):
                    framework_of(bias, "bias")  # refuses a DTensor
                    checks.check_matmul(rows, weight, bias)
                prefer: Any = None if self.prefer_backward is None else frontend.Preferred(None, self.prefer_backward)
                y = frontend.multiply((rows, weight, product_options(out_dtype, bias)), prefer)
                if x is rows:
                    self._keep_for(x, weight, bias, out_dtype)
            return y if ndim > 1 else y[0]
        y = breccia.cast_matmul(rows.flatten(0, -2), self.activation, weight, out_dtype, bias=bias)
        return y if ndim == 2 else y.reshape(*shape[:-1], self.out_features)

    def _is_one_operator(self, x: Tensor) -> bool:
        """Whether a compiled or exported graph has one operator for the layer, which autograd does not know."""
        return (
            x.device.type == "cpu"
            and not torch.is_grad_enabled()
            and self.activation is None
            and self.contraction == -1
            and self.weight.layout.in_order
        )

    def _repeated(self, x: Tensor) -> Tensor | None:
        """The product by the function that an earlier call has kept; None where something differs from that call."""
        repeat = self._modules["weight"].__dict__.get(_REPEAT)
        if repeat is None or self.activation is not None or not frontend.is_constant(x):
            return None
        parameters = self._parameters
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        if bias is not None and bias.requires_grad and torch.is_grad_enabled():
            return None
        return repeat(x, self._matrix, bias)

    def _keep_for(self, x: Tensor, weight: ScaledTensor, bias: Any, out_dtype: str) -> None:
        """Keep what repeats this product, after two calls in succession with inputs of one shape; else nothing."""
        module: Any = self._modules["weight"]
        kept, repeat = module.__dict__, None
        shape, refused = kept.get(_LAST, (None, None))
        if shape != x.shape:
            refused = None
        elif refused is not weight and module.keeps_transpose and frontend.is_constant(x):
            tracked = bias is not None and bias.requires_grad and torch.is_grad_enabled()
            home = "cpu" if x.is_cpu else "repeating"
            repeat = None if tracked else targets.load(f"breccia_torch.{home}:repeated")(x, weight, bias, out_dtype)
            refused = None if repeat is not None or tracked or x.is_cpu else weight
        kept[_LAST], kept[_REPEAT] = (x.shape, refused), repeat

    def extra_repr(self) -> str:
        activation = f", activation={self.activation!r}" if self.activation is not None else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{activation}"

    def _metadata(self) -> dict[str, Any]:
        return {"activation": self.activation}


class ScaledConv1D(ScaledLinear):
    """A ScaledLinear whose weight is (in_features, out_features), as in transformers' Conv1D: x @ dequantize(weight) + bias.

    `quantize_` gives it blocks along in_features, the contraction axis; a converted checkpoint has them along out_features.
    """

    contraction = -2

    def _check_weight(self, weight: ScaledWeight) -> None:
        if len(weight.shape) != 2:
            raise ShapeError(
                f"a Conv1D has a weight of shape (in_features, out_features); got {weight.shape}.", shape=weight.shape
            )

    @property
    def _matrix(self) -> ScaledTensor:
        return self.weight.tensor


class ScaledExperts(ScaledWeight):
    """The weights of all experts of a mixture in place of a 3-D parameter, decoded where its module indexes or multiplies them.

    tensor: (experts, rows, columns); or (experts, parts, rows, columns) where a module fuses projections along the rows that
        were quantized separately (gate and up, each with its own tensor-level scale).
    dtype: the dtype of decoded weights: that of the parameter, and then of the model's changes of precision.

    `weights[i]` is expert i as a plain tensor; torch functions take all experts as one plain tensor. Both decode anew.
    """

    def __init__(self, tensor: ScaledTensor, dtype: torch.dtype) -> None:
        super().__init__(tensor)
        if tensor.ndim not in (3, 4):
            raise ShapeError(
                f"ScaledExperts takes (experts, rows, columns) or (experts, parts, rows, columns); got {tensor.shape}.",
                shape=tensor.shape,
            )
        self.dtype = dtype

    @classmethod
    def quantized(cls, weight: Tensor, recipe: ScalingRecipe | str, axis: int = -1) -> ScaledExperts:
        """A 3-D parameter under `recipe`, each expert cast alone, with blocks along `axis`."""
        return cls(breccia.stack([breccia.cast(one, recipe, axis=axis) for one in weight.detach()]), weight.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter in high precision: (experts, parts * rows, columns)."""
        experts, *parts, rows, columns = self.tensor.shape
        return experts, math.prod(parts) * rows, columns

    @property
    def ndim(self) -> int:
        return 3

    def grouped_matmul(self, x: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
        """`breccia.grouped_matmul` of rows sorted by expert; `transposed` weights are (experts, in_features, out_features)."""
        tensor = self.tensor
        parts = [tensor] if tensor.ndim == 3 else [_part(tensor, part) for part in range(tensor.shape[1])]
        products = [breccia.grouped_matmul(x, w if transposed else w.mT, offsets, x.dtype) for w in parts]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        """All experts in `dtype`, by default the weight's, as one plain tensor."""
        return self._decoded(self.tensor, dtype)

    def __getitem__(self, index: Any) -> Tensor:
        """Expert `index` decoded, or several where it is a list or a 1-D tensor."""
        return self._decoded(self.tensor.select(0, index.tolist() if isinstance(index, Tensor) else index))

    def __len__(self) -> int:
        return self.shape[0]

    def _decoded(self, tensor: ScaledTensor, dtype: torch.dtype | None = None) -> Tensor:
        values = breccia.dequantize(tensor, out_dtype=dtype or self.dtype)
        return values.flatten(-3, -2) if self.tensor.ndim == 4 else values


def _operator_of(x: Tensor, weight: ScaledWeight, dtype: str, bias: Tensor | None) -> Tensor:
    """A layer's product as one operator, traced by a compiler."""
    from .describing import facts_of

    facts = facts_of(weight.recipe, weight.layout, weight.padding, dtype)
    return torch.ops.breccia.linear(x, weight.data, weight.scale, weight.zero_point, weight.global_scale, bias, facts)


def _part(tensor: ScaledTensor, part: int) -> ScaledTensor:
    """`tensor[:, part]` in the same storage: storages arrange each matrix alone."""
    if tensor.storage == PLAIN:
        return tensor[:, part]
    cut = {name: component[:, part] if component.ndim > 1 else component for name, component in components(tensor).items()}
    rest = (tensor.recipe, tensor.layout, cut.get("zero_point"), cut.get("global_scale"), tensor.axis, tensor.padding)
    return ScaledTensor.from_parts(cut["data"], cut["scale"], *rest)


#: Where a ScaledWeight keeps its transpose.
_TRANSPOSE = "_kept_transpose"
#: Where it keeps the function that repeats a layer's last product, and (the shape of the last input, the transpose whose
#: products with inputs of that shape no kernel repeats, or None).
_REPEAT, _LAST = "_kept_repeat", "_kept_shape"
#: What is not part of its state.
_KEPT = (_TRANSPOSE, _REPEAT, _LAST)
#: The dtypes of a pickled ScaledWeight's components.
_DTYPES = "_dtypes"
#: The classes of most biases.
_PLAIN = (nn.Parameter, Tensor)
#: The names of the dtypes of inputs.
_FLOATS = {getattr(torch, name): name for name in FLOATS}


#: Layers in training, which have a folder of their own.
_HOMES = {"TrainingLinear": "linear", "TrainingExperts": "experts"}
if TYPE_CHECKING:
    from .training.experts import TrainingExperts as TrainingExperts
    from .training.linear import TrainingLinear as TrainingLinear


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return targets.load(f"breccia_torch.training.{_HOMES[name]}:{name}")
