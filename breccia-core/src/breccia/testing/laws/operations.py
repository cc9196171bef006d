"""Laws of ops that a plug-in declares: kernels write what the reference does, and the op's own laws hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ... import targets
from ...dispatch import calls
from ...dispatch.kernel import kernels_of
from ...dispatch.registry import registry
from ...operations import Operation
from ...tensors.tensor import ScaledTensor
from ..compare import expect, expect_numbers, expect_tensor
from ..places import Place
from .law import Law, Subject, each
from .recipes import moved
from .trying import run_alone, skip_unless_run


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the ops of a plug-in, with their examples. Those of core's ops are laws of their kernels."""
    for op in subject.of("operations"):
        if op.examples is None and op.laws is None:
            continue
        own = () if op.laws is None else targets.load_declared(f"op {op.name!r}: laws", op.laws)
        shared = (
            () if op.examples is None else (its_kernels_write_what_the_reference_does, the_derivative_has_the_operands_shape)
        )
        for place in subject.places:
            yield from each("operations", op.name, (*shared, *own), op, place=place)


def its_kernels_write_what_the_reference_does(op: Operation, place: Place) -> None:
    """Byte for byte, each kernel that runs at the place; the reference is called with arrays of the place itself."""
    reference = targets.load(op.reference)
    generic = {kernel.name for kernel in kernels_of(op)}
    for kernel in registry().table.kernels:
        if kernel.op != op.name or kernel.framework not in ("*", place.framework) or kernel.opt_in:
            continue
        ran = False
        for arguments in _examples(op, place):
            result = run_alone(kernel, getattr(calls, op.name), *arguments)
            if result is None:
                continue
            ran = True
            expected = reference(*op.with_defaults(arguments))
            several = len(op.results) > 1
            for one, other in zip(result if several else (result,), expected if several else (expected,), strict=True):
                _expect_equal(op, place, one, other)
        if kernel.name not in generic:
            skip_unless_run(kernel, ran)


def the_derivative_has_the_operands_shape(op: Operation, place: Place) -> None:
    """By each operand that is an array, and it is linear: twice the direction gives twice the product."""
    if op.derivative is None:
        pytest.skip("its results are constants to gradients")
    for arguments in _examples(op, place):
        all_arguments = op.with_defaults(arguments)
        for n, (name, _) in enumerate(op.arguments):
            if not hasattr(arguments[n], "shape") or isinstance(arguments[n], ScaledTensor):
                continue
            direction = place.array(np.ones(tuple(arguments[n].shape), np.float32))
            once, twice = (targets.load(op.derivative)(calls, d, n, *all_arguments) for d in (direction, direction + direction))
            expect(tuple(once.shape) == tuple(arguments[n].shape), f"by {name} it has the shape {tuple(once.shape)}")
            expect_numbers(f"the derivative by {name}", place, twice, place.ops.to_numpy(once) * np.float32(2))


def _examples(op: Operation, place: Place) -> Iterator[tuple[Any, ...]]:
    """The op's examples, at a place."""
    assert op.examples is not None
    for arguments in targets.load(op.examples)():
        yield tuple(_there(x, place) for x in arguments)


def _there(x: Any, place: Place) -> Any:
    if isinstance(x, ScaledTensor):
        return moved(x, place)
    return place.array(x) if hasattr(x, "shape") else x


def _expect_equal(op: Operation, place: Place, result: Any, expected: Any) -> None:
    if not isinstance(expected, ScaledTensor):
        expect_numbers(op.name, place, result, np.asarray(place.ops.to_numpy(place.ops.f32(expected))))
        return
    parts = {name: place.ops.to_numpy(getattr(expected, name)) for name in expected.recipe.format.parts}
    here = {name: np.asarray(part) for name, part in parts.items()}
    plain = ScaledTensor.from_parts(
        recipe=expected.recipe, layout=expected.layout, axis=expected.axis, padding=expected.padding, **here
    )
    expect_tensor(place, result, plain)
