"""Whole models in files, quantized weights included: `save_model`, and `load_model` of any library's checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

import breccia
from breccia import BrecciaError, DialectError, Layout, ScaledTensor, ScalingRecipe, ShapeError, UnsupportedError, bridges
from breccia.backend import PARTS, StoredValue, as_recipe, checks, components
from breccia.internal import check_names

from .native import MODES
from .nn import INDEX_MARK, ScaledEmbedding, ScaledLinear, ScaledWeight, as_activation
from .quantizing import LAYERS, QUANTIZED

Array = Any
Path = str | os.PathLike[str]
#: Layers that are replaced by one that holds a quantized weight, or whose weight is.
_HOLDERS = (*LAYERS, *QUANTIZED, ScaledLinear, ScaledEmbedding)
#: A component of a ScaledWeight, as `save_weights` of a model names it: the weight's name, the recipe, the component.
_COMPONENT = re.compile(rf"(.+)\.([^.]+)\.({'|'.join(PARTS)})")
#: The modes of MLX whose scales are codes, by bits and group size.
_MODES = {(element.bits, block): mode for (element, _), (mode, block) in MODES.items()}


class _Model(NamedTuple):
    """What a model holds, by name.

    weights: layers that have a quantized form, by the name of their weight. arrays: every other parameter. words: modules of
    other libraries some of whose arrays are MLX's words, scales and biases, such as mlx-lm's stacked experts. names: all names
    of each parameter, by one of them: several where the model holds a module at several places.
    """

    weights: dict[str, nn.Module]
    arrays: dict[str, Array]
    words: dict[str, nn.Module]
    names: dict[str, list[str]]

    @classmethod
    def of(cls, model: nn.Module) -> _Model:
        weights: dict[str, nn.Module] = {}
        words: dict[str, nn.Module] = {}
        owned: set[str] = set()
        for path, module in model.named_modules():
            name = f"{path}.weight".lstrip(".")
            if type(module) in _HOLDERS:
                weights[name] = module
                owned |= {name, *_leaves(name, module)}
            elif _holds_words(module):
                words[name] = module
        scaled = tuple(f"{name}." for name, module in weights.items() if isinstance(module, ScaledLinear | ScaledEmbedding))
        every: Any = tree_flatten(model.parameters())
        arrays = {name: a for name, a in every if name not in owned and not name.startswith(scaled)}
        return cls(weights, arrays, words, _names(model, (*weights, *arrays)))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight in high precision, or of an array; () for an unknown name."""
        layer = self.weights.get(name, self.words.get(name))
        if layer is not None:
            return _shape(layer)
        return tuple(self.arrays[name].shape) if name in self.arrays else ()

    def is_floating(self, name: str) -> bool:
        """Are the values of a weight or an array floats?"""
        layer = self.weights.get(name)
        if layer is not None and type(layer) not in LAYERS:
            return True
        array: Array = self.arrays[name] if layer is None else layer.weight
        return mx.issubdtype(array.dtype, mx.floating)


def save_model(model: nn.Module, path: Path, metadata: Mapping[str, str] | None = None, *, force: bool = False) -> None:
    """Write the parameters of `model`, with quantized weights as `breccia.bridges.save_safetensors` writes ScaledTensors.

    The names are those of `breccia convert`, and weights that MLX has quantized are written as ScaledTensors too. `load_model`
    reads the file in MLX, and `breccia_torch.load_model` in torch.

    metadata: further entries of the file's metadata, in addition to `{"format": "mlx"}`.
    force: replace an existing file; otherwise FileExistsError.

    Raises DialectError for a layer of a format of MLX that has no recipe, and what `save_safetensors` raises.

        >>> import mlx.nn as nn, breccia_mlx
        >>> model = nn.Sequential(nn.Linear(64, 32))
        >>> summary = breccia_mlx.quantize(model, "mxfp8")
        >>> breccia_mlx.save_model(model, tmp / "model.safetensors")
        >>> breccia.bridges.load_safetensors(tmp / "model.safetensors", names=["*.weight"])
        {'layers.0.weight': breccia.ScaledTensor('mxfp8', shape=(32, 64), numpy cpu, 8.25 bits per value)}
    """
    _need_module("save_model", model)
    weights, arrays, *_ = _Model.of(model)
    tensors: dict[str, Any] = {name: _weight(layer) for name, layer in weights.items()} | arrays
    mx.eval(list(arrays.values()))
    bridges.save_safetensors(tensors, path, {"format": "mlx", **(metadata or {})}, force=force)


def load_model(
    model: nn.Module,
    path: Path,
    *,
    strict: bool = True,
    activation: ScalingRecipe | str | None = None,
    source_dialect: str | None = None,
) -> tuple[list[str], list[str]]:
    """Read the parameters of `model` from the checkpoint of any library; returns (missing, unexpected) names.

    path: a safetensors file or a folder of them: what `breccia convert` and `save_model` wrote, what `save_weights` wrote of a
        model that breccia or MLX has quantized, plain weights, and every dialect that `breccia.bridges.load_checkpoint` reads.
    strict: raise UnknownNameError if the file lacks a parameter of the model or has one that the model lacks. One of the names
        of a layer that the model holds at several places is enough. Scales by which another library casts inputs
        (`up.input_scale`) may be there: they are among the unexpected names.
    activation: a recipe under which layers that become ScaledLinear cast their inputs.
    source_dialect: the name of the dialect, where the config and the tensors leave a choice.

    Codes and scales of quantized weights are kept: `nn.Linear` becomes ScaledLinear and `nn.Embedding` ScaledEmbedding, as do
    layers that MLX has quantized. Other quantized tensors of the file are decoded, experts of three axes among them, unless
    the module holds MLX's words. A plain weight for a quantized layer is cast under the layer's recipe. MLX's files need no
    config here: bits and group size follow from the shapes of the model.

    The model does not change if names, shapes or axes do not fit, which the headers tell before any value is read. Values are
    then read one by one.

    Raises ShapeError naming the tensor, and for names of one layer that differ in the file; DialectError for words of a module
    with other options than the file's, for codes without scales in place of floats, and where two dialects are possible; and
    what `load_checkpoint` raises.

        >>> import mlx.nn as nn, breccia_mlx
        >>> w = breccia.cast(np.ones((32, 64), np.float32), "mxfp8")
        >>> breccia.bridges.save_safetensors({"layers.0.weight": w}, tmp / "model.safetensors")
        >>> model = nn.Sequential(nn.Linear(64, 32, bias=False))
        >>> breccia_mlx.load_model(model, tmp / "model.safetensors")
        ([], [])
        >>> type(model.layers[0]).__name__
        'ScaledLinear'

    A layer as GPTQ stores it, whose versions 1 and 2 a file without a config does not tell apart:

        >>> from safetensors.numpy import save_file
        >>> words = {"qweight": np.full((8, 32), 0x99999999, np.uint32), "qzeros": np.full((1, 4), 0x77777777, np.uint32)}
        >>> layer = {f"layers.0.{end}": array.view(np.int32) for end, array in words.items()}
        >>> save_file(layer | {"layers.0.scales": np.ones((1, 32), np.float16)}, tmp / "gptq.safetensors")
        >>> model = nn.Sequential(nn.Linear(64, 32, bias=False))
        >>> breccia_mlx.load_model(model, tmp / "gptq.safetensors", source_dialect="gptq")
        ([], [])
        >>> breccia.dequantize(model.layers[0].weight)[0, :3]
        array([1, 1, 1], dtype=float32)
    """
    _need_module("load_model", model)
    activation = as_activation(activation)
    parameters = _Model.of(model)
    file = _File(path, source_dialect, parameters)
    in_file = {name: [one for one in every if one in file.names] for name, every in parameters.names.items()}
    words = {
        name: module
        for name, module in parameters.words.items()
        if any(file.header(one).recipe is not None for one in in_file.get(name, ()))
    }
    leaves = {leaf for name, module in words.items() for leaf in _leaves(name, module)}
    in_file = {name: ones for name, ones in in_file.items() if name in words or name not in leaves}
    known = {one for name in in_file for one in parameters.names[name]}
    file.check_inputs(known)
    file.check_codes(
        one for name, ones in in_file.items() if name not in words and parameters.is_floating(name) for one in ones
    )
    missing = [name for name, ones in in_file.items() if not ones]
    unexpected = [name for name in file.names if name not in known]
    if strict:
        claim = f"{os.fspath(path)} does not match the parameters of this {type(model).__name__}"
        foreign = [name for name in unexpected if name not in file.activations]
        check_names(claim, missing, foreign, "Pass strict=False to load the matching ones.")
    for name, ones in in_file.items():
        layer = parameters.weights.get(name, words.get(name))
        shape = tuple(parameters.arrays[name].shape) if layer is None else _shape(layer)
        for one in ones:
            _check_fits(one, shape, file.header(one), layer is not None)
    new: dict[str, Array] = {}
    replaced: dict[str, nn.Module] = {}
    for name, ones in in_file.items():
        values = (_value(name, parameters, words, file.read(one)) for one in ones)
        value = next(values, {})
        for one, other in zip(ones[1:], values, strict=True):
            if not _same(value, other):
                raise ShapeError(
                    f"the model has one layer for {ones[0]} and {one}, but they differ in the file. Make it two in the model.",
                    names=(ones[0], one),
                )
        if isinstance(value, ScaledTensor):
            layer = _layer(parameters.weights[name], value, activation)
            replaced |= {one.rpartition(".")[0]: layer for one in parameters.names[name]}
        else:
            new |= value
    model.update_modules(tree_unflatten(list(replaced.items())))
    model.update(tree_unflatten(list(new.items())))
    return missing, unexpected


def _need_module(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module) or type(model) in _HOLDERS:
        raise UnsupportedError(f"{op} takes a model, an mlx.nn.Module of layers, and a path; got a {type(model).__name__}.")


def _names(model: nn.Module, every: Iterable[str]) -> dict[str, list[str]]:
    """All names of each parameter, by the first one."""
    modules = dict(reversed(model.named_modules()))  # in the order of their definition
    first: dict[int, str] = {}
    for path, module in modules.items():
        first.setdefault(id(module), path)
    names: dict[str, list[str]] = {}
    for name in every:
        owner = name.rpartition(".")[0]
        while owner not in modules:  # a list or a dict in a module
            owner = owner.rpartition(".")[0]
        one = (first[id(modules[owner])] + name[len(owner) :]).lstrip(".")
        names.setdefault(one, [one])
        names[one] += [name] if name != one else []
    return names


def _weight(layer: Any) -> ScaledTensor | Array:
    """The weight of a layer."""
    if isinstance(layer, QUANTIZED):
        return bridges.from_mlx_layer(layer)
    return layer.weight.tensor if isinstance(layer.weight, ScaledWeight) else layer.weight


def _holds_words(module: Any) -> bool:
    """Are the codes of its weight MLX's 32-bit words?"""
    return "scales" in module and hasattr(module, "bits") and hasattr(module, "group_size")


def _leaves(name: str, module: Any) -> list[str]:
    """The names of the arrays in which a module holds its weight, if these are MLX's words."""
    leaves = ("weight", "scales", "biases") if _holds_words(module) else ()
    return [name.removesuffix("weight") + leaf for leaf in leaves if leaf in module]


def _shape(layer: Any) -> tuple[int, ...]:
    """The shape of a layer's weight in high precision."""
    *rows, length = layer.weight.shape
    return (*rows, length * 32 // layer.bits if _holds_words(layer) else length)


def _check_fits(name: str, expected: tuple[int, ...], header: _Header, of_layer: bool) -> None:
    """Raise ShapeError for a value that cannot take the place of an array of the model, or of the weight of a layer."""
    if header.shape != expected:
        raise ShapeError(
            f"{name} has shape {header.shape} in the file and {expected} in the model.",
            found=header.shape,
            expected=expected,
            name=name,
        )
    if of_layer and header.axis != -1:
        raise ShapeError(
            f"{name} has blocks along axis {header.axis} in the file; those of a layer run along the last one.",
            axis=header.axis,
        )


def _value(
    name: str, parameters: _Model, words: Mapping[str, nn.Module], value: ScaledTensor | Array
) -> ScaledTensor | dict[str, Array]:
    """What a tensor of the file becomes under the name of a parameter: the weight of a ScaledLinear or ScaledEmbedding, or
    arrays by their names."""
    if name in words:
        return _words(name, words[name], value)
    layer = parameters.weights.get(name)
    if layer is None:
        return {name: _decoded(parameters.arrays[name], value)}
    if type(layer) in LAYERS and not isinstance(value, ScaledTensor):
        return {name: _decoded(layer.weight, value)}
    return _cast(name, layer, value)


def _same(a: ScaledTensor | dict[str, Array], b: ScaledTensor | dict[str, Array]) -> bool:
    if isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor):
        return isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor) and breccia.bytes_equal(a, b)
    return all(bool(mx.array_equal(array, b[name], equal_nan=True)) for name, array in a.items())


def _decoded(parameter: Array, tensor: ScaledTensor | Array) -> Array:
    """A tensor of the file in place of `parameter`."""
    array = (breccia.dequantize(tensor) if isinstance(tensor, ScaledTensor) else tensor).astype(parameter.dtype)
    mx.eval(array)  # else what it is computed from stays in memory with it
    return array


def _words(name: str, module: Any, tensor: ScaledTensor | Array) -> dict[str, Array]:
    """The arrays of a module that holds MLX's words, of a tensor of the file."""
    own = {"group_size": module.group_size, "bits": module.bits, "mode": getattr(module, "mode", "affine")}
    try:
        w, scales, biases, options = bridges.to_mlx(tensor)
    except BrecciaError as e:
        raise type(e)(f"{name}, of {type(module).__name__}: {e}", **e.found) from e
    if options != own:
        raise DialectError(
            f"{name} has {options} in the file, and its {type(module).__name__} {own}. Make the module with the options of the "
            "file.",
            name=name,
        )
    parts = {"weight": w, "scales": scales} | ({} if biases is None else {"biases": biases})
    return {name.removesuffix("weight") + leaf: _decoded(module[leaf], part) for leaf, part in parts.items()}


def _cast(name: str, layer: Any, tensor: ScaledTensor | Array) -> ScaledTensor:
    """A quantized weight of a layer, computed: plain values are cast under the recipe of the layer."""
    if not isinstance(tensor, ScaledTensor):
        recipe = _weight(layer).recipe
        try:
            tensor = breccia.cast(tensor, recipe)
        except BrecciaError as e:
            raise type(e)(f"{name}: {e}", **e.found) from e
    mx.eval(list(components(tensor).values()))
    return tensor


def _layer(layer: Any, tensor: ScaledTensor, activation: ScalingRecipe | None) -> nn.Module:
    """The replacement of a layer, with a weight of the file."""
    if isinstance(layer, nn.Linear | nn.QuantizedLinear):
        return ScaledLinear.in_place_of(tensor, layer, activation=activation)
    if isinstance(layer, ScaledLinear):
        return ScaledLinear.in_place_of(tensor, layer, activation=layer.activation, prefer=layer.prefer)
    return ScaledEmbedding.in_place_of(tensor, layer, prefer=getattr(layer, "prefer", None))


# ------------------------------------------------------------------------------------------------ files


class _Header(NamedTuple):
    """A value of a file. recipe: None for a plain array."""

    shape: tuple[int, ...]
    recipe: ScalingRecipe | None
    axis: int


class _File:
    """A checkpoint, in which a weight whose components `save_weights` wrote is one value.

    names: of its values. activations: of those by which another library casts inputs.

    Raises ShapeError for components that are not those of their recipe, and UnsupportedError for those of a weight with a group
    index.
    """

    def __init__(self, path: Path, source_dialect: str | None, model: _Model) -> None:
        settings = partial(_settings, model)
        self._checkpoint = bridges.load_checkpoint(path, framework="mlx", source_dialect=source_dialect, settings=settings)
        self.activations, self.check_inputs = frozenset(self._checkpoint.activations), self._checkpoint.check_inputs
        parts: dict[tuple[str, str], dict[str, str]] = {}
        self.names = dict.fromkeys(self._checkpoint)
        for key in self._checkpoint:
            match = _COMPONENT.fullmatch(key)
            if match is not None and match[1] in model.weights and self._checkpoint.header(key).recipe is None:
                parts.setdefault((match[1], match[2]), {})[match[3]] = key
                del self.names[key]
        self._of_components = {
            name: _Components.of(name, spec, keys, _shape(model.weights[name])) for (name, spec), keys in parts.items()
        }
        self.names |= dict.fromkeys(self._of_components)

    def check_codes(self, floating: Iterable[str]) -> None:
        """Raise DialectError for codes without scales under one of these names."""
        self._checkpoint.check_codes(name for name in floating if name not in self._of_components)

    def header(self, name: str) -> _Header:
        """The shape, recipe and axis of a value, without reading it."""
        if name in self._of_components:
            return self._of_components[name].header
        header = self._checkpoint.header(name)
        return _Header(header.shape, header.recipe, header.axis)

    def read(self, name: str) -> ScaledTensor | Array:
        """A value, read into memory."""
        if name in self._of_components:
            return self._of_components[name].read(name, self._checkpoint)
        value = self._checkpoint[name]
        return mx.array(value) if isinstance(value, np.ndarray) else value  # MLX has no float64


class _Components(NamedTuple):
    """The components of a ScaledWeight in a file. keys: their names there, as the model's `save_weights` writes them."""

    header: _Header
    layout: Layout
    keys: dict[str, str]

    @classmethod
    def of(cls, name: str, spec: str, keys: dict[str, str], shape: tuple[int, ...]) -> _Components:
        if INDEX_MARK in spec:
            raise UnsupportedError(
                f"{name} has a group index, which save_weights does not write; save the model with breccia_mlx.save_model.",
                name=name,
            )
        try:
            recipe = as_recipe(spec)
            layout = checks.fitted_layout(recipe, shape, -1)
        except BrecciaError as e:
            raise ShapeError(f"{name}: {e}", name=name) from e
        if any(part not in keys for part in recipe.format.parts):
            parts = ", ".join(recipe.format.parts)
            raise ShapeError(f"{name}: the file has only its {', '.join(keys)}; {spec} has {parts}.", name=name)
        return cls(_Header(shape, recipe, -1), layout, keys)

    def read(self, name: str, arrays: Mapping[str, Array]) -> ScaledTensor:
        """The tensor, whose float scales are stored as bit patterns."""
        shape, recipe, _ = self.header
        assert recipe is not None
        fmt = recipe.format
        dtypes = {"scale": fmt.scale_codec.dtype, "global_scale": "float32"}
        dtypes |= {} if fmt.offset_codec is None else {"zero_point": fmt.offset_codec.dtype}
        parts = {part: arrays[key] for part, key in self.keys.items()}
        parts = {part: _float_of(a, dtypes[part]) if part in dtypes else a for part, a in parts.items()}
        try:
            return ScaledTensor(recipe=recipe, layout=self.layout, shape=shape, **parts)
        except BrecciaError as e:
            raise ShapeError(f"{name}: {e}", name=name) from e


def _float_of(words: Array, dtype: str | None) -> Array:
    """A float scale from its bit pattern: of 16 bits in the dtype of the recipe. Scales of 8 bits are codes."""
    if words.dtype == mx.uint8:
        return words
    return words.view(mx.float32 if words.dtype == mx.uint32 else getattr(mx, dtype or "float16"))


def _settings(model: _Model, value: StoredValue) -> dict[str, Any] | None:
    """MLX's options of a weight in a file without a config: bits and group size follow from the lengths of the model's rows."""
    name, shape, weight, scales = value.name, model.shape(value.name), *map(value.entries.get, ("weight", "scales"))
    if weight is None or scales is None or weight.dtype != "U32" or not shape or not weight.shape or not scales.shape:
        return None
    length = shape[-1]
    bits, group = weight.shape[-1] * 32 // length, length // max(scales.shape[-1], 1)
    if weight.shape[-1] * 32 != bits * length or scales.shape[-1] * group != length:
        raise ShapeError(
            f"{name} has rows of {weight.shape[-1]} words and {scales.shape[-1]} scales in the file; no width of codes gives "
            f"the {length} columns of the model.",
            found=(weight.shape, scales.shape),
            name=name,
        )
    mode = "affine" if len(value.entries) > 2 else _MODES.get((bits, group))
    if mode is None:
        modes, found = ", ".join(_MODES.values()), f"of {bits} bits in groups of {group}"
        raise DialectError(f"{name}: mode is one of affine, {modes}; got {found!r} without biases.", name=name)
    return {"group_size": group, "bits": bits, "mode": mode}
