"""Laws of dialects: what one writes it recognizes and reads back byte for byte, and what it does not write it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from ... import targets
from ...dialects import FUNCTIONS, Dialect, Entry, StoredForm, StoredValue, TensorGroup, ValueForm
from ...errors import BrecciaError, DialectError, UnsupportedError
from ...kernels import reference
from ...recipes import ScalingRecipe
from ...specs import as_recipe
from ...tensors.tensor import ScaledTensor
from .. import strategies
from ..compare import expect, expect_tensor
from ..examples import wide
from ..places import Place
from .law import Law, Subject, each
from .recipes import instances

_SHAPE = (32, 256)
_LAYER = "layer"
_VALUE = f"{_LAYER}.weight"
#: The tensors of a value: their entries in a file, and arrays, by the ends of names.
_Tensors = Mapping[str, tuple[Entry, Any]]
#: Dtypes of numbers, as safetensors names them; others are types of blocks.
_NUMBERS = re.compile(r"BOOL|BF16|[CFIU]\d.*")


class _Beside(NamedTuple):
    """What a config says of a layer, and the metadata of its file."""

    settings: Mapping[str, Any]
    metadata: Mapping[str, str]


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the dialects of a plug-in; of those without `write`, that their functions load."""
    others = [*strategies.defaults(), *instances(subject)]
    for dialect in subject.of("dialects"):
        yield from each("dialects", dialect.name, (its_functions_load,), dialect)
        if dialect.write is not None:
            own = [as_recipe(spec) for spec in dialect.recipes]
            yield from each("dialects", dialect.name, (it_stores_its_recipes,), dialect, own)
            checks = (
                what_it_writes_is_recognized_and_read_byte_for_byte,
                a_part_of_another_shape_is_refused,
                scales_that_are_not_finite_are_refused,
            )
            for recipe in dict.fromkeys([*own, *others]):
                yield from each("dialects", f"{dialect.name}.{recipe.spec}", checks, dialect, recipe)


def its_functions_load(dialect: Dialect) -> None:
    for name in FUNCTIONS:
        if (target := getattr(dialect, name)) is not None:
            expect(callable(targets.load(target)), f"{target} is not a function")


def it_stores_its_recipes(dialect: Dialect, recipes: list[ScalingRecipe]) -> None:
    """None of `Dialect.recipes` is refused."""
    refusals: list[str] = []
    for recipe in recipes:
        try:
            _written(dialect, _tensor(recipe))
        except BrecciaError as e:
            refusals.append(f"{recipe.spec}: {e}")
    expect(not refusals, f"it refuses what it says it stores: {'; '.join(refusals)[:600]}")


def what_it_writes_is_recognized_and_read_byte_for_byte(dialect: Dialect, recipe: ScalingRecipe) -> None:
    """The parts are those of one of its groups, `form` says what `read` returns, and `read` returns what was written.

    The recipe may be another one of the same format: files have no rules by which scales were chosen.
    """
    st = _tensor(recipe)
    value = _value(dialect, _tensors(dialect, st), _beside(dialect, st))
    try:
        form = targets.load(dialect.form or "")(value)
        back = targets.load(dialect.read or "")(value, form)
    except BrecciaError as e:
        raise AssertionError(f"it refuses what it wrote: {e}") from e
    expect(isinstance(back, ScaledTensor), f"read returned {type(back).__name__}, expected a ScaledTensor")
    expect(back.recipe == form.recipe, f"form says {form.recipe!r}, read returned {back.recipe!r}")
    expect(back.recipe.format == recipe.format, f"read returned the format of {back.recipe!r}, expected that of {recipe!r}")
    asked = _form(dialect, st).is_transposed
    expect(form.is_transposed == asked, f"form says is_transposed={form.is_transposed} of what was stored with {asked}")
    expect(tuple(back.shape) == tuple(form.shape), f"form says shape {form.shape}, read returned {back.shape}")
    expect_tensor(Place("numpy"), replace(back, recipe=recipe), st)


def a_part_of_another_shape_is_refused(dialect: Dialect, recipe: ScalingRecipe) -> None:
    """Any part but the largest one, with a row more: its shape follows from the others."""
    tensors, beside = _tensors(dialect, _tensor(recipe)), _beside(dialect, _tensor(recipe))
    largest = max(tensors, key=lambda end: tensors[end][1].nbytes)
    for end, (entry, array) in tensors.items():
        if end != largest and array.ndim:
            longer = np.concatenate([array, array[:1]])
            wrong = {**tensors, end: (Entry(entry.dtype, longer.shape), longer)}
            _expect_refused(dialect, wrong, beside, f"{end!r} has a row too many")


def scales_that_are_not_finite_are_refused(dialect: Dialect, recipe: ScalingRecipe) -> None:
    tensors, beside = _tensors(dialect, _tensor(recipe)), _beside(dialect, _tensor(recipe))
    for end, (entry, array) in tensors.items():
        if entry.dtype in ("F32", "F16"):
            bad = array.copy()
            bad.reshape(-1)[0] = np.nan
            _expect_refused(dialect, {**tensors, end: (entry, bad)}, beside, f"{end!r} has a NaN")


def _expect_refused(dialect: Dialect, tensors: _Tensors, beside: _Beside, what: str) -> None:
    value = _value(dialect, tensors, beside)
    try:
        targets.load(dialect.read or "")(value, targets.load(dialect.form or "")(value))
    except (DialectError, UnsupportedError):
        return
    except Exception as e:
        raise AssertionError(f"{what}: expected a DialectError, got {type(e).__name__}: {e}") from e
    raise AssertionError(f"{what}: expected a DialectError, got a tensor")


def _tensor(recipe: ScalingRecipe) -> ScaledTensor:
    return reference.cast(wide(_SHAPE), recipe)


def _form(dialect: Dialect, st: ScaledTensor) -> ValueForm:
    """The form under which it stores a tensor: of the value itself, or where it refuses that, of the value's transpose."""
    form, store = ValueForm(st.recipe, tuple(st.shape), st.layout), targets.load(dialect.stored or "")
    try:
        store(form)
    except UnsupportedError as e:
        form = replace(form, is_transposed=True)
        try:
            store(form)
        except UnsupportedError:
            raise e from None
    return form


def _stored(dialect: Dialect, st: ScaledTensor) -> StoredForm:
    stored = targets.load(dialect.stored or "")(_form(dialect, st))
    expect(isinstance(stored, StoredForm), f"stored returned {type(stored).__name__}, expected a StoredForm")
    return stored


def _written(dialect: Dialect, st: ScaledTensor) -> _Tensors:
    """What the dialect writes, which has to be what it said before.

    Of a type of blocks, such as "Q4_K", an entry has the shape of the elements, and the array rows of bytes.
    """
    stored = _stored(dialect, st)
    arrays = {**targets.load(dialect.write or "")(st, stored), **stored.known}
    shapes = {end: _rows(array.shape, stored.entries[end]) for end, array in arrays.items()}
    announced = {end: _rows(entry.shape, entry) for end, entry in stored.entries.items()}
    expect(shapes == announced, f"write returned arrays of shapes {shapes}; stored said {announced}")
    return {end: (entry, arrays[end]) for end, entry in stored.entries.items()}


def _rows(shape: Sequence[int], entry: Entry) -> tuple[int, ...]:
    return tuple(shape) if _NUMBERS.fullmatch(entry.dtype) else tuple(shape[:-1])


def _tensors(dialect: Dialect, st: ScaledTensor) -> _Tensors:
    """What the dialect writes; skips the law for a tensor that it does not hold."""
    try:
        return _written(dialect, st)
    except (DialectError, UnsupportedError) as e:
        pytest.skip(f"{dialect.name} does not hold {st.recipe.spec!r}: {e}")


def _beside(dialect: Dialect, st: ScaledTensor) -> _Beside:
    """What the dialect writes beside the tensors of a layer."""
    metadata = dict[str, str]()
    if dialect.header is not None:
        metadata = targets.load(dialect.header)({_VALUE: _stored(dialect, st)})
    return _Beside(_config_settings(dialect, st), metadata)


def _config_settings(dialect: Dialect, st: ScaledTensor) -> Mapping[str, Any]:
    """Those of a layer by the config that the dialect writes for it."""
    if dialect.config is None:
        return _settings(dialect)
    files: Mapping[str, Mapping[str, Any]] = targets.load(dialect.config)({_LAYER: _stored(dialect, st)}, (), None)
    own = [settings for file, settings in files.items() if file != "config.json"]
    config: Mapping[str, Any] = files.get("config.json", {}).get("quantization_config", {})
    if own and not config:  # a file of the library's own announces the dialect by its name
        return _of_layer(dialect, own[0])
    method = config.get("quant_method", next(iter(dialect.methods), ""))  # where another key of the file announces it
    expect(dialect.announced_by(method, config), f"the config that it writes does not announce it: {config!r}")
    return _of_layer(dialect, config)


def _settings(dialect: Dialect) -> Mapping[str, Any]:
    """Those of a layer by the first config that announces the dialect."""
    wanted: Mapping[str, tuple[Any, ...]] = dialect.configs[0] if dialect.configs else {}
    return _of_layer(dialect, {key: values[0] for key, values in wanted.items() if values and values[0] is not None})


def _of_layer(dialect: Dialect, config: Mapping[str, Any]) -> Mapping[str, Any]:
    if dialect.settings is None:
        return config
    settings = targets.load(dialect.settings)(config)(_LAYER)
    expect(isinstance(settings, Mapping), f"settings of {config} are {settings!r} for a layer, expected a mapping")
    return settings


def _group(dialect: Dialect, tensors: _Tensors) -> TensorGroup:
    """The group whose parts these are."""
    for group in dialect.groups:
        known = {**group.parts, **group.optional}
        complete = group.parts.keys() <= tensors.keys() <= known.keys()
        if complete and all(not known[end] or entry.dtype in known[end] for end, (entry, _) in tensors.items()):
            return group
    listed = {end: entry.dtype for end, (entry, _) in tensors.items()}
    raise AssertionError(f"write returned {listed}, which are the parts of none of its groups")


def _value(dialect: Dialect, tensors: _Tensors, beside: _Beside) -> StoredValue:
    group = _group(dialect, tensors)
    ends = [end for end in (*group.parts, *group.optional) if end in tensors]
    entries = {end: tensors[end][0] for end in ends}
    return StoredValue(_VALUE, entries, beside.settings, lambda end: tensors[end][1], metadata=beside.metadata)
