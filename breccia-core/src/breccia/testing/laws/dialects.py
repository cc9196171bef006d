"""Laws of dialects: what one writes it recognizes and reads back byte for byte, and what it does not write it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from ... import targets
from ...dialects import Dialect, Entry, StoredValue, TensorGroup
from ...errors import BrecciaError, DialectError, UnsupportedError
from ...kernels import reference
from ...recipes import ScalingRecipe
from ...tensors.tensor import ScaledTensor
from .. import strategies
from ..compare import expect, expect_tensor
from ..examples import wide
from ..places import Place
from .law import Law, Subject, each
from .recipes import instances

_SHAPE = (32, 256)
#: The tensors of a value: dtypes of a file and arrays, by the ends of names.
_Tensors = Mapping[str, tuple[str, Any]]


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the dialects of a plug-in; of those without `write`, that their functions load."""
    recipes = list(dict.fromkeys([*strategies.defaults(), *instances(subject)]))
    for dialect in subject.of("dialects"):
        yield from each("dialects", dialect.name, (its_functions_load,), dialect)
        if dialect.write is not None:
            yield from each("dialects", dialect.name, (it_writes_some_recipe,), dialect, recipes)
            checks = (
                what_it_writes_is_recognized_and_read_byte_for_byte,
                a_part_of_another_shape_is_refused,
                scales_that_are_not_finite_are_refused,
            )
            for recipe in recipes:
                yield from each("dialects", f"{dialect.name}.{recipe.spec}", checks, dialect, recipe)


def its_functions_load(dialect: Dialect) -> None:
    for target in (dialect.form, dialect.read, dialect.write, dialect.settings):
        if target is not None:
            expect(callable(targets.load(target)), f"{target} is not a function")


def it_writes_some_recipe(dialect: Dialect, recipes: list[ScalingRecipe]) -> None:
    refusals: list[str] = []
    for recipe in recipes:
        try:
            _written(dialect, _tensor(recipe))
        except BrecciaError as e:
            refusals.append(str(e))
        else:
            return
    raise AssertionError(f"it refuses every recipe: {'; '.join(dict.fromkeys(refusals))[:600]}")


def what_it_writes_is_recognized_and_read_byte_for_byte(dialect: Dialect, recipe: ScalingRecipe) -> None:
    """The parts are those of one of its groups, `form` says what `read` returns, and `read` returns what was written."""
    st = _tensor(recipe)
    tensors = _tensors(dialect, st)
    _group(dialect, tensors)
    value = _value(dialect, tensors)
    try:
        form = targets.load(dialect.form or "")(value)
        back = targets.load(dialect.read or "")(value, form)
    except BrecciaError as e:
        raise AssertionError(f"it refuses what it wrote: {e}") from e
    expect(isinstance(back, ScaledTensor), f"read returned {type(back).__name__}, expected a ScaledTensor")
    expect(back.recipe == form.recipe, f"form says {form.recipe!r}, read returned {back.recipe!r}")
    expect(tuple(back.shape) == tuple(form.shape), f"form says shape {form.shape}, read returned {back.shape}")
    expect_tensor(Place("numpy"), back.mT if form.is_transposed else back, st)


def a_part_of_another_shape_is_refused(dialect: Dialect, recipe: ScalingRecipe) -> None:
    """Any part but the largest one, with a row more: its shape follows from the others."""
    tensors = _tensors(dialect, _tensor(recipe))
    largest = max(tensors, key=lambda end: tensors[end][1].nbytes)
    for end, (dtype, array) in tensors.items():
        if end != largest and array.ndim:
            wrong = {**tensors, end: (dtype, np.concatenate([array, array[:1]]))}
            _expect_refused(dialect, wrong, f"{end!r} has a row too many")


def scales_that_are_not_finite_are_refused(dialect: Dialect, recipe: ScalingRecipe) -> None:
    tensors = _tensors(dialect, _tensor(recipe))
    for end, (dtype, array) in tensors.items():
        if dtype in ("F32", "F16"):
            bad = array.copy()
            bad.reshape(-1)[0] = np.nan
            _expect_refused(dialect, {**tensors, end: (dtype, bad)}, f"{end!r} has a NaN")


def _expect_refused(dialect: Dialect, tensors: _Tensors, what: str) -> None:
    value = _value(dialect, tensors)
    try:
        targets.load(dialect.read or "")(value, targets.load(dialect.form or "")(value))
    except (DialectError, UnsupportedError):
        return
    except Exception as e:
        raise AssertionError(f"{what}: expected a DialectError, got {type(e).__name__}: {e}") from e
    raise AssertionError(f"{what}: expected a DialectError, got a tensor")


def _tensor(recipe: ScalingRecipe) -> ScaledTensor:
    return reference.cast(wide(_SHAPE), recipe)


def _written(dialect: Dialect, st: ScaledTensor) -> _Tensors:
    return targets.load(dialect.write or "")(st, _settings(dialect))


def _tensors(dialect: Dialect, st: ScaledTensor) -> _Tensors:
    """What the dialect writes; skips the law for a tensor that it does not hold."""
    try:
        return _written(dialect, st)
    except (DialectError, UnsupportedError) as e:
        pytest.skip(f"{dialect.name} does not hold {st.recipe.spec!r}: {e}")


def _settings(dialect: Dialect) -> dict[str, Any]:
    """Those of the first config that announces the dialect."""
    wanted: Mapping[str, tuple[Any, ...]] = dialect.configs[0] if dialect.configs else {}
    return {key: values[0] for key, values in wanted.items() if values and values[0] is not None}


def _group(dialect: Dialect, tensors: _Tensors) -> TensorGroup:
    """The group whose parts these are."""
    for group in dialect.groups:
        known = {**group.parts, **group.optional}
        complete = group.parts.keys() <= tensors.keys() <= known.keys()
        if complete and all(not known[end] or dtype in known[end] for end, (dtype, _) in tensors.items()):
            return group
    listed = {end: dtype for end, (dtype, _) in tensors.items()}
    raise AssertionError(f"write returned {listed}, which are the parts of none of its groups")


def _value(dialect: Dialect, tensors: _Tensors) -> StoredValue:
    group = _group(dialect, tensors)
    ends = [end for end in (*group.parts, *group.optional) if end in tensors]
    entries = {end: Entry(tensors[end][0], tuple(tensors[end][1].shape)) for end in ends}
    return StoredValue("layer.weight", entries, _settings(dialect), lambda end: tensors[end][1])
