"""What other programs store beside the values that they quantized, and what of it means nothing without their codes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from breccia.backend import registry

from .source import Source


def activations(source: Source) -> list[str]:
    """The tensors that a quantized model may lack: they say how its layers quantize inputs, outputs and caches.

    They are beside a quantized value, or have one element, since models have parameters of such names too.
    """
    layers = _quantized(source)
    named = _ended(source, "activations") if layers else ()
    return [name for name, of in named if of in layers or math.prod(source.values[name].shape) == 1]


def left_behind(source: Source) -> list[str]:
    """Those of `activations` that mean nothing once the values have left their codes; other tensors may be the model's own.

    They have one element, or one for each expert of a stack, and are beside a quantized value, or in the module that has one
    as a part, as an attention has projections.
    """
    layers = _quantized(source)
    modules = {layer.rpartition(".")[0] for layer in layers}
    listed: list[str] = []
    for name, of in _ended(source, "activations"):
        count = math.prod(source.values[name].shape)
        experts = math.prod(source.values[layers[of]].shape[:-2]) if of in layers else 1
        if count in (1, experts) and (of in layers or of in modules):
            listed.append(name)
    return listed


def factors(source: Source) -> dict[str, str]:
    """The tensors by which layers of other programs multiply their inputs, by the names of their quantized weights.

    A file may be read in a dialect that declares none, and by breccia's recipes after a conversion that keeps codes.
    """
    layers = _quantized(source)
    return {layers[of]: name for name, of in _ended(source, "factors") if of in layers}


def _quantized(source: Source) -> dict[str, str]:
    """The names of the quantized values, by those of their layers."""
    return {name.removesuffix(".weight"): name for name, value in source.values.items() if value.is_scaled}


def _ended(source: Source, kind: Literal["activations", "factors"]) -> Iterator[tuple[str, str]]:
    """The plain tensors whose names have an end that any dialect declares, each with the name of its layer."""
    ends = {end for dialect in registry().dialects.values() for end in getattr(dialect, kind)}
    inner = tuple(end for end in ends if end[0] == "_")
    for name, value in source.values.items():
        layer, _, last = name.rpartition(".")
        if value.is_scaled:
            continue
        if last in ends:
            yield name, layer
        elif name.endswith(inner):
            yield name, name.removesuffix(next(end for end in inner if name.endswith(end)))


def described(source: Source) -> set[str]:
    """The keys of the files' metadata by which other programs say what their tensors are."""
    stored = [value.stored for value in source.values.values() if value.stored]
    return {*(key for one in stored for key in one.dialect.metadata), *(source.values if stored else ())}
