"""Parameters of a model from safetensors files, under JAX's names or torch's."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import breccia
from breccia import ScaledTensor, ShapeError, UnsupportedError, bridges
from breccia.backend import dtype_name
from breccia.internal import check_names

from .weights import ScaledWeight

Names = Mapping[str, str] | Callable[[str], str] | None

#: The leaves of JAX's libraries whose name in torch is "weight"; matrices among them are the other way round there.
_WEIGHT = {"kernel": True, "embedding": False, "scale": False, "weight": False}


def load(
    parameters: Mapping[str, Any],
    path: str | os.PathLike[str],
    names: Names,
    strict: bool,
    flipped: Collection[str] = (),
) -> dict[str, Any]:
    """The tensors of the file by the names of `parameters`, in their shapes and dtypes.

    flipped: the kernels of transposed convolutions, which torch stores in the reverse order of positions.

    Raises UnknownNameError, ShapeError, and UnsupportedError for one of `flipped` under its name in torch.
    """
    tensors = bridges.load_safetensors(path, framework="jax")
    sources = {name: _source(name, tensors, names) for name in parameters}
    missing = [name for name, source in sources.items() if source is None]
    used = {source for source, _ in filter(None, sources.values())}
    unexpected = [name for name in tensors if name not in used]
    if strict:
        claim = f"{os.fspath(path)} does not match the parameters of the model"
        remedy = "Pass names= for other names, or strict=False to load the matching ones."
        check_names(claim, missing, unexpected, remedy)
    for name in flipped:
        if (source := sources[name]) and source[1]:
            raise UnsupportedError(
                f"{name} is the kernel of a transposed convolution, and {source[0]} in the file is torch's, of shape (in, out, "
                f"...) and in the reverse order of positions. Store it in JAX's order as {name}.",
                name=name,
            )
    return {name: _fitted(name, parameters[name], tensors[source[0]], source[1]) for name, source in sources.items() if source}


def _source(name: str, tensors: Mapping[str, Any], names: Names) -> tuple[str, bool | None] | None:
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


def _fitted(name: str, parameter: Any, new: Any, turned: bool | None) -> Any:
    """The tensor of a file in place of `parameter`. Raises ShapeError."""
    shape, dtype = tuple(parameter.shape), parameter.dtype if isinstance(parameter, ScaledWeight) else dtype_name(parameter)
    new_shape = tuple(new.shape)
    if len(new_shape) < 2 and (
        new_shape == shape or (name.rpartition(".")[2] == "bias" and math.prod(shape) == math.prod(new_shape))
    ):
        values = breccia.dequantize(new, out_dtype=dtype) if isinstance(new, ScaledTensor) else new
        return values.reshape(shape).astype(dtype)  # torch has the features of heads, and of channels, along one axis
    if turned is not True and _fits(shape, new_shape):
        return _placed(new, shape, dtype)
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
        if isinstance(new, ScaledTensor):
            raise ShapeError(
                f"{name} is a quantized convolution in the file, of shape {new_shape} in torch's order, whose blocks run along "
                f"axis {new.axis}: JAX contracts other axes. Leave it out when you convert the file (--exclude), "
                "and quantize the loaded model.",
                found=new_shape,
                expected=shape,
            )
        return new.transpose(*range(2, len(new_shape)), 1, 0).astype(dtype)
    if fits:
        return _placed(new.mT, shape, dtype)
    raise ShapeError(
        f"{name} has shape {new_shape} in the file, and {shape} in the model"
        f"{'' if turned is False else ', which no order of torch explains'}. Store it in the model's shape, or map the "
        "parameter to another tensor by names=.",
        found=new_shape,
        expected=shape,
    )


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
