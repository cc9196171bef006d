"""Laws of recipes: they serialize, and they cast and decode as the oracle does on every framework."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ... import api, specs, targets
from ...dispatch.registry import registry
from ...formats import TENSOR
from ...kernels import reference
from ...options import CastOptions
from ...recipes import MXFP8BlockScaling, ScalingRecipe
from ...rules import RULES
from ...tensors.components import components
from ...tensors.metadata import Metadata
from ...tensors.tensor import ScaledTensor
from .. import oracle, strategies
from ..compare import expect, expect_numbers, expect_tensor, expect_written, fp32, written
from ..examples import every_decodable, special_rows, wide
from ..places import Place
from .law import Law, Subject, each

_NUMPY = Place("numpy")
_SEED = 0x9E3779B97F4A7C15

#: Name -> options of `cast` under which every framework's bytes are compared with NumPy's.
_OPTIONS: dict[str, dict[str, Any]] = {
    "along rows": {"axis": -2},
    "stochastic": {"rounding": "stochastic", "seed": _SEED},
}


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the recipes of a plug-in: the default of each class, and further instances to test."""
    for kind in subject.of("recipes"):
        yield from each("recipes", kind.name, (its_class_is_documented_and_tested,), kind, subject)
    for recipe in instances(subject):
        name = recipe.spec
        alone = (
            it_round_trips_through_json_and_pickle,
            it_round_trips_through_safetensors,
            any_bit_pattern_is_cast_as_the_oracle_casts_it,
        )
        yield from each("recipes", name, alone, recipe)
        yield from each(
            "recipes",
            name,
            (equal_recipes_have_equal_hashes_and_fingerprints,),
            recipe,
            [*strategies.defaults(), *instances(subject)],
        )
        for place in subject.places:
            checks = (
                a_cast_writes_the_oracles_bytes,
                a_stochastic_cast_writes_the_oracles_bytes,
                every_code_under_every_scale_decodes_as_the_oracle_says,
                casts_write_the_bytes_of_numpy,
                nothing_non_finite_becomes_finite,
                an_empty_array_stays_empty,
                requantize_writes_the_bytes_of_numpy,
            )
            yield from each("recipes", name, checks, recipe, place=place)


def instances(subject: Subject) -> list[ScalingRecipe]:
    """The recipe instances of a plug-in to test."""
    defaults = [kind() for kind in subject.of("recipes") if not kind.needed_fields()]
    return list(dict.fromkeys([*defaults, *subject.settings]))


# ------------------------------------------------------------------------------------------------ the declaration


def its_class_is_documented_and_tested(kind: type[ScalingRecipe], subject: Subject) -> None:
    expect(bool(kind.source and kind.source.strip()), f"{kind.__name__} has no source; cite where the format is defined")
    expect(bool(kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")), f"{kind.__name__} has no docstring")
    tried = [recipe for recipe in instances(subject) if type(recipe) is kind]
    needed = ", ".join(kind.needed_fields())
    expect(bool(tried), f"{kind.__name__} needs {needed}: no instance is tested; pass conformance(..., recipes=[...])")


def it_round_trips_through_json_and_pickle(recipe: ScalingRecipe) -> None:
    read = ScalingRecipe.from_json(recipe.to_json())
    expect(read == recipe, f"from_json(to_json()) gave {read!r}")
    expect(read.to_json() == recipe.to_json(), "its JSON differs after a round trip")
    every = dataclasses.fields(recipe)  # type: ignore[arg-type]
    # A field that was added later is omitted at its default, so that default must never change.
    fields = {f.name for f in every if not (f.metadata.get("added") and getattr(recipe, f.name) == f.default)}
    absent = sorted(fields - set(json.loads(recipe.to_json())["fields"]))
    expect(not absent, f"its JSON lacks {', '.join(absent)}: a file would be read with the reader's default")
    for way, back in (("pickle", pickle.loads(pickle.dumps(recipe))), ("deepcopy", copy.deepcopy(recipe))):
        expect(back == recipe and type(back) is type(recipe), f"{way} gave {back!r}")
    expect(specs.recipe(recipe.spec) == recipe, f"breccia.recipe({recipe.spec!r}) gave {specs.recipe(recipe.spec)!r}")


def equal_recipes_have_equal_hashes_and_fingerprints(recipe: ScalingRecipe, others: list[ScalingRecipe]) -> None:
    """Files, caches and compiled graphs identify recipes by equality, hash and fingerprint."""
    other = type(recipe).with_fields({f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)})  # type: ignore[arg-type]
    expect(other == recipe and hash(other) == hash(recipe), f"{other!r} and {recipe!r} are not equal")
    expect(other.fingerprint() == recipe.fingerprint(), "equal recipes have different fingerprints")
    x = wide((6, 64), seed=1, exponents=3)
    for other in others:
        if other.fingerprint() == recipe.fingerprint():
            expect(type(other) is type(recipe), f"{other!r} has the same fingerprint")
            first, second = (list(map(bytes, components(reference.cast(x, r)).values())) for r in (recipe, other))
            expect(first == second, f"{other!r} has the same fingerprint but writes different bytes")


def it_round_trips_through_safetensors(recipe: ScalingRecipe) -> None:
    bridges = registry().bridges
    if not {"save_safetensors", "load_safetensors"} <= set(bridges):
        pytest.skip("breccia-bridges is not installed")
    save, load = (targets.load(bridges[name].target) for name in ("save_safetensors", "load_safetensors"))
    st = reference.cast(wide((5, 37), seed=2, exponents=3), recipe)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kept.safetensors"
        save({"w": st}, path)
        expect_tensor(_NUMPY, load(path)["w"], st)


# ------------------------------------------------------------------------------------------------ against the oracle


def _need_oracle(recipe: ScalingRecipe) -> None:
    """Skip if the oracle cannot compute casts: it knows only the rule classes of breccia-core."""
    for rule in recipe.rules:
        if type(rule) not in {type(known) for known in RULES}:
            pytest.skip(f"the oracle does not know {type(rule).__name__}; casts are compared with NumPy's instead")


def _awkward() -> np.ndarray:
    """An array whose last blocks are partial for all usual block sizes and packings."""
    return np.concatenate([special_rows(67), wide((9, 67), seed=3, exponents=60), wide((8, 67), seed=4, exponents=2)])


def a_cast_writes_the_oracles_bytes(recipe: ScalingRecipe, place: Place) -> None:
    """The result also decodes to the oracle's values."""
    _need_oracle(recipe)
    expected, decoded = _oracles_cast(recipe)
    st = api.cast(place.array(_awkward()), recipe)
    expect_written(place, st, expected)
    expect_numbers("decoded", place, api.dequantize(st), decoded)


def a_stochastic_cast_writes_the_oracles_bytes(recipe: ScalingRecipe, place: Place) -> None:
    _need_oracle(recipe)
    options: dict[str, Any] = {"rounding": "stochastic", "seed": _SEED}
    expected, _ = _oracles_cast(recipe, **options)
    expect_written(place, api.cast(place.array(_awkward()), recipe, **options), expected)


@cache
def _oracles_cast(recipe: ScalingRecipe, **options: Any) -> tuple[oracle.Written, np.ndarray]:
    """The oracle's cast and its decoded values; they do not depend on the place."""
    expected = oracle.cast(_awkward(), recipe, **options)
    return expected, oracle.dequantize(expected, recipe)


def any_bit_pattern_is_cast_as_the_oracle_casts_it(recipe: ScalingRecipe) -> None:
    """The generic algorithm and the kernel selected on NumPy, on 25 arrays drawn by Hypothesis.

    Failing examples are not shrunk: that would call the slow oracle thousands of times.
    """
    _need_oracle(recipe)

    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(x=strategies.arrays(strategies.shapes(recipe, max_side=20), recipe=recipe))
    def holds(x: np.ndarray) -> None:
        expected = oracle.cast(x, recipe)
        for cast in (reference.cast, api.cast):
            expect_written(_NUMPY, cast(x, recipe), expected)

    holds()


def every_code_under_every_scale_decodes_as_the_oracle_says(recipe: ScalingRecipe, place: Place) -> None:
    """Includes codes that no cast writes: NaN, Inf and others."""
    st, expected = _every_decodable(recipe)
    expect_numbers("decoded", place, api.dequantize(moved(st, place)), expected)


@cache
def _every_decodable(recipe: ScalingRecipe) -> tuple[ScaledTensor, np.ndarray]:
    """Codes under scales, and the values that the oracle decodes; they do not depend on the place."""
    st = every_decodable(recipe, scales=60)
    parts = written(_NUMPY, st)
    if st.layout.block(-1) == TENSOR:  # a scale for each matrix: the oracle reads one at a time
        zeros = [None] * len(parts.codes) if parts.zero_point is None else parts.zero_point
        rows = zip(parts.codes, parts.scale, zeros, strict=True)
        expected = np.stack([oracle.dequantize(oracle.Written(c, s, parts.global_scale, z), recipe) for c, s, z in rows])
    else:
        expected = oracle.dequantize(parts, recipe)
    return st, expected


# ------------------------------------------------------------------------------------------------ against NumPy


def casts_write_the_bytes_of_numpy(recipe: ScalingRecipe, place: Place) -> None:
    """Three axes, `axis=-2`, stochastic rounding and half precision, compared with the generic algorithm on NumPy."""
    x = wide((3, 10, 37), seed=5, exponents=20)
    for name, options in _OPTIONS.items():
        try:
            expect_tensor(place, api.cast(place.array(x), recipe, **options), reference.cast(x, recipe, CastOptions(**options)))
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from None
    expected = reference.cast(wide((4, 37), seed=6, exponents=3).astype(np.float16).astype(np.float32), recipe)
    narrow = place.ops.to_float(place.array(wide((4, 37), seed=6, exponents=3)), "float16")
    expect_tensor(place, api.cast(narrow, recipe), expected)


def nothing_non_finite_becomes_finite(recipe: ScalingRecipe, place: Place) -> None:
    x = np.repeat(wide((1, 96), seed=7, exponents=2), 6, axis=0)
    for row, bad in enumerate((np.nan, np.inf, -np.inf)):
        x[2 * row, 40] = bad
    back = fp32("decoded", place, api.dequantize(api.cast(place.array(x), recipe)), x.shape)
    expect(not np.isfinite(back[~np.isfinite(x)]).any(), "a NaN or Inf decodes to a number")


def an_empty_array_stays_empty(recipe: ScalingRecipe, place: Place) -> None:
    for shape in ((0, 32), (4, 0), (2, 0, 16)):
        st = api.cast(place.array(np.ones(shape, np.float32)), recipe)
        back = api.dequantize(st)
        expect(st.shape == shape and tuple(back.shape) == shape, f"{shape} became {st.shape}, then {tuple(back.shape)}")


def requantize_writes_the_bytes_of_numpy(recipe: ScalingRecipe, place: Place) -> None:
    st = reference.cast(wide((6, 70), seed=8, exponents=4), recipe)
    there, other = moved(st, place), MXFP8BlockScaling()
    expect(api.requantize(there, recipe) is there, "requantize to the same recipe copies")
    expect_tensor(place, api.requantize(there, other), reference.requantize(st, other))


def moved(st: ScaledTensor, place: Place) -> ScaledTensor:
    """A NumPy tensor moved to a place: the same bytes, in the dtypes in which its framework stores them."""
    dtypes = place.ops.dtypes(st.recipe.format)

    def there(name: str, part: np.ndarray) -> Any:
        word = np.asarray(part, order="C")
        dtype = dtypes[name] if dtypes[name] != str(word.dtype) else None
        return place.array(word.view(f"u{word.itemsize}") if dtype else word, dtype)

    return Metadata.of(st).assembled(**{name: there(name, np.asarray(part)) for name, part in components(st).items()})
