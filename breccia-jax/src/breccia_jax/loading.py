"""Parameters of a model from safetensors files, under JAX's names or torch's."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import breccia
from breccia import bridges
from breccia.backend import ScaledTensor, ShapeError, check_names, dtype_name

from .weights import ScaledWeight

Names = Mapping[str, str] | Callable[[str], str] | None

#: The leaves of JAX's libraries whose name in torch is "weight"; matrices among them are the other way round there.
_WEIGHT = {"kernel": True, "embedding": False, "scale": False, "weight": False}


def load(held: Mapping[str, Any], path: str | os.PathLike[str], names: Names, strict: bool) -> dict[str, Any]:
    """The parameters of the file by name, in the shapes and dtypes of `held`. Raises UnknownNameError and ShapeError."""
    found = bridges.load_safetensors(path, framework="jax")
    sources = {name: _source(name, found, names) for name in held}
    missing = [name for name, source in sources.items() if source is None]
    used = {source for source, _ in filter(None, sources.values())}
    unexpected = [name for name in found if name not in used]
    if strict:
        claim = f"{os.fspath(path)} does not match the parameters of the model"
        remedy = "Pass names= for other names, or strict=False to load the matching ones."
        check_names(claim, missing, unexpected, remedy)
    return {name: _fitted(name, held[name], found[source[0]], source[1]) for name, source in sources.items() if source}


def _source(name: str, found: Mapping[str, Any], names: Names) -> tuple[str, bool | None] | None:
    """(The name in the file, whether its matrix is the other way round, or None where its shape tells)."""
    if names is not None:
        given = names.get(name) if isinstance(names, Mapping) else names(name)
        if given is not None:
            return (given, None) if given in found else None
    return next(((other, turned) for other, turned in _candidates(name) if other in found), None)


def _candidates(name: str) -> Iterator[tuple[str, bool]]:
    for base in dict.fromkeys((name, name.removeprefix("params."))):
        yield base, False
        owner, _, leaf = base.rpartition(".")
        if leaf in _WEIGHT:
            yield f"{owner}.weight".lstrip("."), _WEIGHT[leaf]


def _fitted(name: str, held: Any, new: Any, turned: bool | None) -> Any:
    """The tensor of a file in place of `held`. Raises ShapeError."""
    shape, dtype = tuple(held.shape), held.dtype if isinstance(held, ScaledWeight) else dtype_name(held)
    if turned is None:
        turned = not _fits(shape, tuple(new.shape)) and len(new.shape) >= 2
    if turned:
        new = new.mT
    given = tuple(new.shape)
    if not _fits(shape, given):
        raise ShapeError(
            f"{name} has shape {given} in the file{' after its last two axes are swapped' if turned else ''}, and {shape} in "
            "the model.",
            found=given,
            expected=shape,
        )
    if isinstance(new, ScaledTensor):
        if len(given) < 2:
            return breccia.dequantize(new, out_dtype=dtype)
        return ScaledWeight(new, shape[len(given) - 2 :], dtype)
    return new.reshape(shape).astype(dtype)


def _fits(shape: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Is `given` the shape, or with neighbouring axes of its last two as one?"""
    lead = len(given) - 2
    if given == shape or lead < 0:
        return given == shape
    if given[:lead] != shape[:lead] or math.prod(given) != math.prod(shape):
        return False
    rest = shape[lead:]
    return any(math.prod(rest[:cut]) == given[-2] for cut in range(1, len(rest)))
