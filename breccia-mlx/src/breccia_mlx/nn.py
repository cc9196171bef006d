"""Layers whose weight is a ScaledTensor."""

from __future__ import annotations

import hashlib
import json
import operator
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

import breccia
from breccia import PerBlockK, PerGroupIndex, ScaledTensor, ScalingRecipe, ShapeError, UnsupportedError, bridges
from breccia.backend import TENSOR, Metadata, as_recipe, components, dtype_name
from breccia.internal import ADVICE, check_scaled

from . import native
from .ops import opaque

Array = Any
#: Integers of the width of float scales: changes of a model's precision skip them.
_WORDS = {2: mx.uint16, 4: mx.uint32}


#: Between the recipe and the digest of a group index, in names of parameters.
INDEX_MARK = "+g_idx-"


class _All(set[str]):
    """The set of all names: such parameters cannot be unfrozen."""

    def __contains__(self, name: object) -> bool:
        return True


class ScaledWeight(nn.Module):
    """A ScaledTensor as part of a model: its components are parameters, so they save, load and are evaluated with the model.

    Their names include the recipe (`weight.mxfp8.data`, `weight.mxfp8.scale`), so `load_weights` refuses another recipe's; with
    a group index, which is not a parameter, also a digest of it.
    Float scales are stored as integer bit patterns, which `set_dtype` skips. The parameters are permanently frozen; the values
    are `breccia.dequantize(weight.tensor)`.
    """

    def __init__(self, tensor: ScaledTensor) -> None:
        super().__init__()
        check_scaled("ScaledWeight", tensor, "mlx")
        tensor = tensor.to_plain()  # files contain the components of the plain tensor
        parts = components(tensor)
        self._metadata = Metadata.of(tensor)
        self._dtypes = tuple(map(dtype_name, parts.values()))
        self._name = tensor.recipe.spec + _index_mark(tensor)
        self[self._name] = {name: _as_words(part) for name, part in parts.items()}
        self._no_grad = _All()

    @property
    def tensor(self) -> ScaledTensor:
        """The ScaledTensor of the current parameters; zero-copy."""
        words = list(zip(self[self._name].items(), self._dtypes, strict=True))
        for (name, part), dtype in words:
            if part.dtype != _word(dtype):
                raise UnsupportedError(
                    f"parameter {self._name}.{name} has dtype {part.dtype}; the bits of its {dtype} are {_word(dtype)}. A "
                    "change of dtype over all parameters changes codes as if they were numbers; model.set_dtype leaves them.",
                    name=name,
                    found=str(part.dtype),
                )
        return self._metadata.assembled(**{name: _as_floats(part, dtype) for (name, part), dtype in words})

    @property
    def transposed(self) -> ScaledTensor:
        """`tensor.mT`, the same object until the parameters change: kernels keep what they find out about it."""
        parts, known = tuple(self[self._name].values()), self.__dict__.get("_known")
        if known is not None and all(map(operator.is_, parts, known[0])):
            return known[1]
        transpose = self.tensor.mT
        if opaque(*parts) is None:
            object.__setattr__(self, "_known", (parts, transpose))
        return transpose

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out what `transposed` keeps."""
        return {name: value for name, value in self.__dict__.items() if name != "_known"}

    @property
    def __scaled_tensor__(self) -> ScaledTensor:
        """Lets the ops of `breccia` accept the weight: `breccia.dequantize(layer.weight)`."""
        return self.tensor

    @property
    def recipe(self) -> ScalingRecipe:
        return self._metadata.recipe

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight in high precision."""
        return self.tensor.shape

    def _extra_repr(self) -> str:
        return f"{self.shape}, {self.recipe!r}"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Runs only for missing attributes: those of arrays and tensors get the call to make."""
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("_"):
                    raise
                hint = _advice(name)
            raise AttributeError(f"'ScaledWeight' object has no attribute {name!r}{hint}", name=name, obj=self)


def _index_mark(tensor: ScaledTensor) -> str:
    """A digest of a tensor's group index, after `INDEX_MARK`; empty for a layout that follows from the recipe and the shape."""
    if not isinstance(tensor.layout, PerGroupIndex):
        return ""
    index = json.dumps([tensor.layout.index, tensor.layout.groups])
    return INDEX_MARK + hashlib.sha256(index.encode()).hexdigest()[:12]


def _advice(name: str) -> str:
    """What to call in place of a missing attribute of a ScaledWeight."""
    if hasattr(ScaledTensor, name):
        return f": st = weight.tensor, its ScaledTensor, has st.{name}; breccia.matmul(x, st.mT) multiplies by it."
    if name in ADVICE:
        return f": {ADVICE[name]}, for st = weight.tensor."
    return ""


def _word(dtype: str) -> Any:
    """The dtype of the parameter of a component: see `ScaledWeight`."""
    kind = getattr(mx, dtype)
    return _WORDS[kind.size] if mx.issubdtype(kind, mx.floating) else kind


def _as_words(part: Array) -> Array:
    return part.view(_WORDS[part.dtype.size]) if mx.issubdtype(part.dtype, mx.floating) else part


def _as_floats(part: Array, dtype: str) -> Array:
    """Inverse of `_as_words`. Integers stay the same object: `native.has_nan` caches by it."""
    kind = getattr(mx, dtype)
    return part if part.dtype == kind else part.view(kind)


class _Scaled(nn.Module):
    """A layer of one quantized weight (M, K), blocks along K."""

    def _take(self, weight: ScaledWeight, activation: ScalingRecipe | str | None, prefer: str | None) -> None:
        activation = as_activation(activation)
        if len(weight.shape) != 2 or weight.tensor.axis != -1:
            raise ShapeError(
                f"a layer has a weight of two axes with blocks along the last one; got shape {weight.shape} and axis "
                f"{weight.tensor.axis}.",
                shape=weight.shape,
            )
        self.weight, self.activation, self.prefer = weight, activation, prefer

    def _product(self, x: Array, bias: Array | None = None, dtype: Any = None) -> Array:
        """`x` times the transposed weight, and the bias, in FP32, rounded once to `dtype`, by default `x`'s."""
        length = self.weight.shape[1]
        if x.ndim == 0 or x.shape[-1] != length:
            raise ShapeError(
                f"the layer takes inputs of shape (..., {length}); got {tuple(x.shape)}.", found=tuple(x.shape), length=length
            )
        rows = mx.reshape(x, (-1, length)) if x.size else mx.zeros((0, length), x.dtype)
        weight, dtype = self.weight.transposed, x.dtype if dtype is None else dtype
        prefer = _compiled(rows, weight) if self.prefer is None and self.activation is None else self.prefer
        if self.activation is None:
            y = breccia.matmul(rows, weight, dtype, bias=bias, prefer=prefer)
        elif prefer is None:
            y = breccia.cast_matmul(rows, self.activation, weight, dtype, bias=bias)
        else:  # the name is of a kernel of `matmul`
            rows = breccia.cast_ste(rows, self.activation)
            y = breccia.matmul(rows, weight, dtype, bias=bias, prefer=prefer)
        return mx.reshape(y, (*x.shape[:-1], self.weight.shape[0]))


def _compiled(rows: Array, weight: ScaledTensor) -> str | None:
    """The kernel to name for few rows in a function compiled with the weight among its inputs, where the default one decodes.

    Only mx.compile makes placeholders of a model's parameters; those of `rows` may be of mx.vmap, which `mx.quantized_matmul`
    does not support.
    """
    if opaque(weight.data) is None or native.unsupported(weight) is not None:
        return None
    return native.NAME if len(rows) <= native.most_rows(weight.recipe.format, compiled=True) else None


class ScaledLinear(_Scaled):
    """`mlx.nn.Linear` whose weight is quantized: x @ dequantize(weight).T + bias in FP32, rounded once to the input's dtype.

    weight: the ScaledWeight of shape (output_dims, input_dims); blocks run along input_dims.
    activation: a recipe under which each input is cast, with tokens as rows; None leaves inputs unchanged. The gradient of
        an input passes straight through that cast.
    prefer: the kernel of the product, as in `breccia.matmul`: "mlx.quantized_matmul", say.

    Inputs are FP32, FP16 or BF16 of shape (..., input_dims). The weight takes no gradient; the bias is unchanged.
    """

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        bias: bool = True,
        *,
        recipe: ScalingRecipe | str,
        activation: ScalingRecipe | str | None = None,
        prefer: str | None = None,
    ) -> None:
        super().__init__()
        recipe = as_recipe(recipe)
        linear = nn.Linear(input_dims, output_dims, bias)
        self._take(ScaledWeight(breccia.cast(linear.weight, recipe)), activation, prefer)
        if bias:
            self.bias = linear.bias

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear | nn.QuantizedLinear,
        recipe: ScalingRecipe | str | None = None,
        *,
        activation: ScalingRecipe | str | None = None,
        prefer: str | None = None,
    ) -> ScaledLinear:
        """Quantize `linear`'s weight under `recipe` and keep its bias.

        An `mlx.nn.QuantizedLinear` keeps its codes and scales if that is their recipe, or `recipe` is None; else its values are
        cast. Raises what `breccia.cast` and `breccia.bridges.from_mlx_layer` raise.
        """
        return cls.in_place_of(quantized_weight(linear, recipe), linear, activation=activation, prefer=prefer)

    @classmethod
    def in_place_of(
        cls,
        tensor: ScaledTensor,
        linear: Any = None,
        *,
        activation: ScalingRecipe | str | None = None,
        prefer: str | None = None,
    ) -> ScaledLinear:
        """A layer with the quantized weight `tensor`, (output_dims, input_dims), and the bias of `linear`, if it has one."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._take(ScaledWeight(tensor), activation, prefer)
        if linear is None:
            return self
        if "bias" in linear:
            self.bias = linear.bias
            self._no_grad.update(linear._no_grad & {"bias"})
        self.train(linear.training)
        return self

    holding = in_place_of  # the deprecated name

    def to_linear(self, dtype: Any = "float32") -> nn.Linear:
        """An `mlx.nn.Linear` of the weight's values in `dtype`, with the same bias."""
        linear = nn.Linear(1, 1, "bias" in self)
        linear.weight = breccia.dequantize(self.weight.tensor, out_dtype=dtype)
        if "bias" in self:
            linear.bias = self.bias
        linear.train(self.training)
        return linear

    def __call__(self, x: Array) -> Array:
        return self._product(x, self.bias if "bias" in self else None)

    def _extra_repr(self) -> str:
        activation = f", activation={self.activation!r}" if self.activation is not None else ""
        rows, length = self.weight.shape
        return f"input_dims={length}, output_dims={rows}, bias={'bias' in self}{activation}"


class ScaledEmbedding(_Scaled):
    """`mlx.nn.Embedding` whose weight is quantized; only the requested rows are decoded.

    weight: the ScaledWeight of shape (num_embeddings, dims); blocks run along dims.
    dtype: the dtype name of returned rows, that of the original weight; `set_dtype` of a model does not change it.
    """

    def __init__(self, num_embeddings: int, dims: int, *, recipe: ScalingRecipe | str, prefer: str | None = None) -> None:
        super().__init__()
        recipe = as_recipe(recipe)
        self._take(ScaledWeight(breccia.cast(nn.Embedding(num_embeddings, dims).weight, recipe)), None, prefer)
        self.dtype = "float32"

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding | nn.QuantizedEmbedding,
        recipe: ScalingRecipe | str | None = None,
        *,
        prefer: str | None = None,
    ) -> ScaledEmbedding:
        """Quantize `embedding`'s weight under `recipe`; an `mlx.nn.QuantizedEmbedding` as in `ScaledLinear.from_linear`.

        Raises what `breccia.cast` and `breccia.bridges.from_mlx_layer` raise.
        """
        return cls.in_place_of(quantized_weight(embedding, recipe), embedding, prefer=prefer)

    @classmethod
    def in_place_of(cls, tensor: ScaledTensor, embedding: Any = None, *, prefer: str | None = None) -> ScaledEmbedding:
        """A layer with the quantized weight `tensor`, (num_embeddings, dims), and rows of the dtype of `embedding`, or FP32."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._take(ScaledWeight(tensor), None, prefer)
        self.dtype = "float32" if embedding is None else rows_dtype(embedding)
        if embedding is not None:
            self.train(embedding.training)
        return self

    holding = in_place_of  # the deprecated name

    def to_embedding(self, dtype: Any = None) -> nn.Embedding:
        """An `mlx.nn.Embedding` of the weight's values, in `dtype`, by default that of its rows."""
        embedding = nn.Embedding(1, 1)
        embedding.weight = breccia.dequantize(self.weight.tensor, out_dtype=self.dtype if dtype is None else dtype)
        embedding.train(self.training)
        return embedding

    def __call__(self, x: Array) -> Array:
        """Rows `x`, an integer array of any shape, as (..., dims)."""
        w = self.weight.tensor
        y = breccia.dequantize(_rows(w, mx.reshape(x, (-1,))), out_dtype=self.dtype)
        return mx.reshape(y, (*x.shape, w.shape[1]))

    def _extra_repr(self) -> str:
        return ", ".join(map(str, self.weight.shape))

    def as_linear(self, x: Array) -> Array:
        """`x` times the transposed weight, as an output layer that shares the embedding's weight computes it."""
        return self._product(x)


def _rows(w: ScaledTensor, index: Array) -> ScaledTensor:
    """The rows `index` of a matrix with blocks along K, each with the scales of its blocks."""
    m, k = block = w.layout.block()
    index = mx.where(index < 0, index + w.shape[0], index)
    parts = {
        name: part if name == "global_scale" or block == TENSOR else part[index // m if m else mx.zeros_like(index)]
        for name, part in components(w).items()
        if name != "data"
    }
    layout = w.layout if m in (1, None) or k is None else PerBlockK(k, partial=bool(w.shape[1] % k))
    return ScaledTensor.from_parts(w.data[index], recipe=w.recipe, layout=layout, axis=-1, padding=w.padding, **parts)


def quantized_weight(layer: Any, recipe: ScalingRecipe | str | None) -> ScaledTensor:
    """The weight of a layer under `recipe`; None keeps the one that it has."""
    if not isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
        if recipe is None:
            raise UnsupportedError(f"the weight of a {type(layer).__name__} is not quantized; pass a recipe.")
        return breccia.cast(layer.weight, recipe)
    tensor = bridges.from_mlx_layer(layer)
    return tensor if recipe is None or as_recipe(recipe) == tensor.recipe else breccia.requantize(tensor, recipe)


def rows_dtype(embedding: Any) -> str:
    """The dtype name of the rows that an embedding returns."""
    if isinstance(embedding, ScaledEmbedding):
        return embedding.dtype
    if not isinstance(embedding, nn.QuantizedEmbedding):
        return dtype_name(embedding.weight)
    return dtype_name(embedding.scales) if embedding.mode == "affine" else "bfloat16"


def as_activation(activation: Any) -> ScalingRecipe | None:
    """The recipe of activations, which may be given by name, or None. Raises UnsupportedError for anything else."""
    if activation is not None and not isinstance(activation, ScalingRecipe | str):
        raise UnsupportedError(f"activation is a ScalingRecipe instance or None; got {activation!r}.", activation=activation)
    return None if activation is None else as_recipe(activation)
