"""Parameters of a model from checkpoints of any library, under JAX's names or torch's."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import breccia
from breccia import ScaledTensor, ShapeError, UnsupportedError, bridges
from breccia.backend import dtype_name
from breccia.internal import check_names

from .weights import ScaledWeight

Names = Mapping[str, str] | Callable[[str], str] | None
#: Makes a parameter's value of the tensor of a file.
Fit = Callable[[Any], Any]

#: The leaves of JAX's libraries whose name in torch is "weight"; matrices among them are the other way round there.
_WEIGHT = {"kernel": True, "embedding": False, "scale": False, "weight": False}


def load(
    parameters: Mapping[str, Any],
    path: str | os.PathLike[str],
    names: Names,
    strict: bool,
    source_dialect: str | None = None,
    flipped: Collection[str] = (),
) -> dict[str, Any]:
    """The values of a checkpoint by the names of `parameters`, in their shapes and dtypes.

    flipped: the kernels of transposed convolutions, which torch stores in the reverse order of positions.

    Names and shapes are checked by headers; then values are read one by one. Raises UnknownNameError, ShapeError, DialectError
    for codes without scales in place of floats, and UnsupportedError for one of `flipped` under its name in torch.
    """
    checkpoint = bridges.load_checkpoint(path, framework="jax", source_dialect=source_dialect)
    sources = {name: source for name in parameters if (source := _source(name, checkpoint, names)) is not None}
    missing = [name for name in parameters if name not in sources]
    used = {source for source, _ in sources.values()}
    checkpoint.check_inputs(used)
    checkpoint.check_codes(source for name, (source, _) in sources.items() if _is_floating(parameters[name]))
    used.update(checkpoint.activations)
    unexpected = [name for name in checkpoint if name not in used]
    if strict:
        claim = f"{os.fspath(path)} does not match the parameters of the model"
        remedy = "Pass names= for other names, or strict=False to load the matching ones."
        check_names(claim, missing, unexpected, remedy)
    for name in flipped:
        if name in sources and sources[name][1]:
            raise UnsupportedError(
                f"{name} is the kernel of a transposed convolution, and {sources[name][0]} in the file is torch's, of shape "
                f"(in, out, ...) and in the reverse order of positions. Store it in JAX's order as {name}.",
                name=name,
            )
    fits: dict[str, dict[str, Fit]] = {}
    for name, (source, turned) in sources.items():
        fits.setdefault(source, {})[name] = _fit(name, parameters[name], checkpoint.header(source), turned)
    loaded: dict[str, Any] = {}
    for source, users in fits.items():
        loaded |= _fitted(checkpoint[source], users)
    return loaded


def _fitted(value: Any, fits: Mapping[str, Fit]) -> dict[str, Any]:
    """The parameters of one value, computed: the memory of the value is free for the next one."""
    fitted = {name: fit(value) for name, fit in fits.items()}
    return jax.block_until_ready(jax.tree.map(jnp.asarray, fitted))  # arrays of 64 bits are read as NumPy's


def _is_floating(parameter: Any) -> bool:
    """Are its values floats? Those of a parameter of FP8 are codes, without scales in the model too."""
    if isinstance(parameter, ScaledWeight | ScaledTensor):
        return True
    return jnp.issubdtype(parameter.dtype, jnp.floating) and parameter.dtype.itemsize > 1


def _source(name: str, tensors: Collection[str], names: Names) -> tuple[str, bool | None] | None:
    """(The name in the file, whether its matrix is the other way round, or None where its shape tells)."""
    if names is not None:
        source = names.get(name) if isinstance(names, Mapping) else names(name)
        if source is not None:
            return (source, None) if source in tensors else None
    return next(((other, turned) for other, turned in _candidates(name) if other in tensors), None)


def _candidates(name: str) -> Iterator[tuple[str, bool]]:
    for base in dict.fromkeys((name, name.removeprefix("params."))):
        yield base, False
        owner, _, leaf = base.rpartition(".")
        if leaf in _WEIGHT:
            yield f"{owner}.weight".lstrip("."), _WEIGHT[leaf]


def _fit(name: str, parameter: Any, header: Any, turned: bool | None) -> Fit:
    """The function that puts a value with this header in place of `parameter`. Raises ShapeError where none fits."""
    shape, dtype = tuple(parameter.shape), parameter.dtype if isinstance(parameter, ScaledWeight) else dtype_name(parameter)
    new_shape, leaf = header.shape, name.rpartition(".")[2]
    if turned is None and header.recipe is not None and new_shape[-1:] == new_shape[-2:-1] and leaf in _WEIGHT:
        turned = header.axis != (-2 if _WEIGHT[leaf] else -1)  # a square matrix: blocks run along the axis that is contracted
    if len(new_shape) < 2 and (new_shape == shape or (leaf == "bias" and math.prod(shape) == math.prod(new_shape))):
        return lambda new: _line(new, shape, dtype)
    if turned is not True and _fits(shape, new_shape):
        return lambda new: _placed(new, shape, dtype)
    swapped = (*new_shape[:-2], *new_shape[:-3:-1])
    kernel = (*new_shape[2:], *new_shape[1::-1])  # of a convolution: (out, in, height, width) in torch
    fits = turned is not False and len(new_shape) >= 2 and _fits(shape, swapped)
    if turned is not False and len(new_shape) >= 3 and kernel == shape:
        if fits:
            raise ShapeError(
                f"{name} has shape {new_shape} in the file: torch's order of a convolution, or matrices (out, in), which fit "
                f"the shape {shape} in the model alike. Store it in the model's order under its name.",
                found=new_shape,
                expected=shape,
            )
        if header.recipe is not None:
            raise ShapeError(
                f"{name} is a quantized convolution in the file, of shape {new_shape} in torch's order, whose blocks run along "
                f"axis {header.axis}: JAX contracts other axes. Leave it out when you convert the file (--exclude), "
                "and quantize the loaded model.",
                found=new_shape,
                expected=shape,
            )
        return lambda new: new.transpose(*range(2, len(new_shape)), 1, 0).astype(dtype)
    if fits:
        return lambda new: _placed(new.mT, shape, dtype)
    raise ShapeError(
        f"{name} has shape {new_shape} in the file, and {shape} in the model"
        f"{'' if turned is False else ', which no order of torch explains'}. Store it in the model's shape, or map the "
        "parameter to another tensor by names=.",
        found=new_shape,
        expected=shape,
    )


def _line(new: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A tensor of one axis: torch has the features of heads, and of channels, along one."""
    values = breccia.dequantize(new, out_dtype=dtype) if isinstance(new, ScaledTensor) else new
    return values.reshape(shape).astype(dtype)


def _placed(new: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A tensor whose last two axes stand for neighbouring axes of the parameter."""
    if isinstance(new, ScaledTensor):
        return ScaledWeight(new, shape[len(new.shape) - 2 :], dtype)
    return new.reshape(shape).astype(dtype)


def _fits(shape: tuple[int, ...], new_shape: tuple[int, ...]) -> bool:
    """Is `new_shape` the shape, or the shape with neighbouring axes joined into its last two?"""
    lead = len(new_shape) - 2
    if new_shape == shape or lead < 0:
        return new_shape == shape
    if new_shape[:lead] != shape[:lead] or math.prod(new_shape) != math.prod(shape):
        return False
    rest = shape[lead:]
    return any(math.prod(rest[:cut]) == new_shape[-2] for cut in range(1, len(rest)))
