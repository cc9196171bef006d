"""Recipes, layouts, formats and codecs: fields, defaults, checks, JSON forms, and every error message."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import pickle
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from recipes import RECIPES as SETTINGS
from recipes import recipe_id

import breccia
from breccia import (
    DelayedScaling,
    FlatScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    GGUFScaling,
    InStorage,
    INT4Scaling,
    INT8Scaling,
    INTScaling,
    LayoutError,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    MXINT8BlockScaling,
    NVFP4BlockScaling,
    PerBlockK,
    PerBlockMN,
    PerChannel,
    PerTensor,
    RecipeError,
    declared,
)
from breccia.codecs import E2M1, E4M3, E8M0, F16, F32, INT4, INT8, MXINT8, NF4
from breccia.dispatch.registry import registry
from breccia.formats import TENSOR, Format, Level
from breccia.layouts import Layout
from breccia.recipes import RECIPES, implication_of
from breccia.rules import EVEN, HALF_RANGE, LINEAR, RCEIL, TE

#: Fields, their order and defaults in the recipes. They are public API: positions and names must not change.
INTEGERS: dict[str, Any] = {"symmetric": True, "scale_rule": "linear", "offset": "zero_point"}
FIELDS = {
    "fp8_delayed": {"fp8_format": "E4M3", "amax_history_len": 16, "margin": 0, "scale_rule": "linear"},
    "fp8_current": {"fp8_format": "E4M3", "scale_rule": "linear"},
    "fp8_row": {"fp8_format": "E4M3", "power_of_two_scale": False, "scale_rule": "linear"},
    "fp8_block": {"fp8_format": "E4M3", "block_k": 128, "block_m": 1, "power_of_two_scale": False, "scale_rule": "linear"},
    "mxfp8": {"fp8_format": "E4M3", "block_size": 32, "scale_rule": "rceil"},
    "mxfp6": {"fp6_format": "E2M3", "block_size": 32, "scale_rule": "rceil"},
    "mxfp4": {"block_size": 32, "scale_rule": "rceil"},
    "mxint8": {"block_size": 32, "scale_rule": "rceil"},
    "nvfp4": {"fp4_format": "E2M1", "block_size": 16, "scale_format": "E4M3", "two_level": True},
    "int4": {"group_size": 128, "signed": True, "scale_dtype": "fp16"} | INTEGERS,
    "nf4": {"block_size": 64, "scale_dtype": "fp32"},
    "int8": {"group_size": None, "signed": True, "scale_dtype": "fp32"} | INTEGERS,
    "int": {"bits": 4, "group_size": 128, "signed": True, "scale_dtype": "fp16"} | INTEGERS,
    "gguf": {"type": "Q4_K"},
}

K_LEVELS = (Level(F16, (1, 8)), Level(INT4, (1, 4)))
#: Fields added later, at the end: files and digests of tensors contain them only where they differ from their default.
ROTATION = {"rotation": 0, "rotation_seed": 0}
ADDED: dict[str, dict[str, Any]] = {
    "nvfp4": {"global_sense": "multiplier", "order": "codes_first", "scale_rule": "linear", "block_m": 1} | ROTATION,
    "mxfp4": ROTATION,
    "int4": ROTATION,
    "nf4": {"scale_rule": "linear"},
}


@pytest.mark.parametrize("cls", RECIPES, ids=lambda c: c.name)
def test_recipes_have_their_fields_defaults_and_json_form(cls: type[breccia.ScalingRecipe]) -> None:
    recipe = cls()
    fields = {f.name: f.default for f in dataclasses.fields(recipe)}  # type: ignore[arg-type]
    assert list(fields.items()) == list((FIELDS[cls.name] | ADDED.get(cls.name, {})).items())
    assert recipe.to_dict() == {"name": cls.name, "fields": FIELDS[cls.name]}
    assert json.loads(recipe.to_json()) == recipe.to_dict()
    assert breccia.recipe(cls.name) == recipe and recipe.changed == {} and recipe.spec == cls.name
    assert breccia.ScalingRecipe.from_json(recipe.to_json()) == cls.from_json(recipe.to_json()) == recipe
    assert hash(recipe) == hash(cls()) and pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe.source
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.fp8_format = "E5M2"  # type: ignore[attr-defined]


def test_a_field_added_later_is_written_only_if_it_differs_from_its_default() -> None:
    divisor = NVFP4BlockScaling(global_sense="divisor")
    assert divisor.to_dict() == {"name": "nvfp4", "fields": FIELDS["nvfp4"] | {"global_sense": "divisor"}}
    assert breccia.ScalingRecipe.from_json(divisor.to_json()) == divisor != NVFP4BlockScaling()
    assert NVFP4BlockScaling.from_json('{"name":"nvfp4","fields":{"two_level":true}}') == NVFP4BlockScaling()
    assert (
        divisor.interned_key is not NVFP4BlockScaling().interned_key
        and divisor.fingerprint() != NVFP4BlockScaling().fingerprint()
    )
    assert pickle.loads(pickle.dumps(divisor)) == divisor


@pytest.mark.parametrize("recipe", SETTINGS, ids=recipe_id)
def test_the_text_form_of_a_recipe_parses_as_the_recipe(recipe: breccia.ScalingRecipe) -> None:
    assert breccia.recipe(recipe.spec) == recipe
    assert recipe.spec.count(",") == len(recipe.changed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayedScaling("E3M4"), "fp8_format must be one of 'E4M3', 'E5M2', 'E4M3FNUZ', 'E5M2FNUZ', got 'E3M4'"),
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len must be >= 1, got 0"),
        (lambda: DelayedScaling(amax_history_len=2.0), "amax_history_len must be int, got 2.0"),  # type: ignore[arg-type]
        (lambda: DelayedScaling(margin=127), r"margin must lie in -126..126 .* got 127"),
        (lambda: DelayedScaling(margin=True), "margin must be int, got True"),
        (lambda: Float8CurrentScaling("E4M4"), "fp8_format must be one of 'E4M3', .*, got 'E4M4'; did you mean 'E4M3'"),
        (lambda: MXFP8BlockScaling("E4M3FNUZ"), "fp8_format must be 'E4M3' or 'E5M2', got 'E4M3FNUZ'"),
        (lambda: Float8BlockScaling(block_k=0), "block_k must be > 0, got 0"),
        (lambda: Float8BlockScaling(block_m=-1), "block_m must be > 0, got -1"),
        (lambda: Float8BlockScaling(power_of_two_scale=1), "power_of_two_scale must be bool, got 1"),  # type: ignore[arg-type]
        (lambda: MXFP8BlockScaling(block_size=16), "MXFP8 block_size is fixed at 32 by the OCP MX spec, got 16"),
        (lambda: MXFP8BlockScaling(scale_rule="up"), "scale_rule must be one of 'rceil', 'floor', 'even', 'mse', got 'up'"),
        (lambda: NVFP4BlockScaling(fp4_format="E3M0"), "NVFP4 fp4_format is fixed at 'E2M1', got 'E3M0'"),
        (lambda: NVFP4BlockScaling(block_size=32), "NVFP4 block_size is fixed at 16, got 32"),
        (lambda: NVFP4BlockScaling(scale_format="E8M0"), "scale_format must be 'E4M3' or 'UE5M3', got 'E8M0'"),
        (lambda: NVFP4BlockScaling(two_level=0), "two_level must be bool, got 0"),  # type: ignore[arg-type]
        (lambda: INT4Scaling(group_size=0), "group_size must be > 0, got 0"),
        (lambda: INT4Scaling(scale_dtype="fp8"), "scale_dtype must be one of 'fp16', 'bf16', 'fp32', got 'fp8'"),
        (lambda: INT4Scaling(symmetric=False), r"asymmetric INT4 \(symmetric=False\) requires signed=False.*got signed=True"),
        (lambda: Float8CurrentScaling(scale_rule="floor"), "must be one of 'linear', 'recip', 'divide', 'te', got 'floor'"),
        (
            lambda: Float8BlockScaling(power_of_two_scale=True, scale_rule="divide"),
            "power_of_two_scale=True requires scale_rule='linear' or 'te', got 'divide'",
        ),
        (lambda: Float8RowScaling(power_of_two_scale=0), "power_of_two_scale must be bool, got 0"),  # type: ignore[arg-type]
        (lambda: MXFP6BlockScaling("E2M1"), "fp6_format must be 'E2M3' or 'E3M2', got 'E2M1'"),
        (lambda: MXFP4BlockScaling(block_size=16), "MXFP4 block_size is fixed at 32 by the OCP MX spec, got 16"),
        (lambda: MXINT8BlockScaling(scale_rule="te"), "scale_rule must be one of 'rceil', 'floor', 'even', 'mse', got 'te'"),
        (lambda: INT8Scaling(group_size=0), "group_size must be > 0, got 0"),
        (lambda: INT8Scaling(symmetric=False), r"asymmetric INT8 .*unsigned 0..255 range.*got signed=True"),
        (lambda: INT4Scaling(offset="bias"), "offset='bias' requires symmetric=False; symmetric INT4 has no offset"),
        (lambda: INT4Scaling(offset="none"), "offset must be one of 'zero_point', 'float_zero_point', 'bias', got 'none'"),
        (lambda: INT4Scaling(signed=False, scale_rule="half_range"), "'half_range' is for signed codes; got signed=False"),
        (lambda: INTScaling(9), "bits must be one of 1, 2, 3, 4, 5, 6, 7, 8, got 9"),
        (lambda: INTScaling(True), "bits must be one of 1, 2, 3, 4, 5, 6, 7, 8, got True"),
        (lambda: INTScaling(1), "one signed bit has no positive value; bits=1 requires signed=False, got signed=True"),
        (lambda: INTScaling(3, group_size=0), "group_size must be > 0, got 0"),
        (lambda: INTScaling(3, symmetric=False), r"asymmetric INT3 .*unsigned 0..7 range.*got signed=True"),
        (lambda: INTScaling(2, offset="bias"), "offset='bias' requires symmetric=False; symmetric INT2 has no offset"),
        (lambda: INTScaling(1, signed=False, scale_rule="half_range"), "'half_range' is for signed codes; got signed=False"),
        (lambda: INT4Scaling(group_size=None), "group_size must be int, got None"),  # type: ignore[arg-type]
        (lambda: PerBlockK(0), "block_size must be > 0, got 0"),
        (lambda: PerBlockMN(0, 4), "block_m must be > 0, got 0"),
        (lambda: PerBlockMN(4, 0), "block_n must be > 0, got 0"),
        (lambda: PerBlockK(partial=1), "partial must be bool, got 1"),  # type: ignore[arg-type]
        (lambda: Level(F32, TENSOR, "inverse"), "scale convention is one of multiplier, divisor, amax; got 'inverse'"),
        (lambda: Level(F32, (0, 1)), r"sides are >= 1, or None for all; got \(0, 1\)"),
        (lambda: Format(E4M3, ()), "a format has one scale level or more.*; got 0"),
        (
            lambda: Format(E2M1, (Level(F32, (1, 8)), Level(E4M3, (1, 3)))),
            r"blocks of a coded level lie within.*got \(1, 3\) in \(1, 8\)",
        ),
        (
            lambda: Format(E2M1, (Level(F32, (2, 8)), Level(E4M3, (1, 4)))),
            r"blocks of a coded level lie within.*got \(1, 4\) in \(2, 8\)",
        ),
        (lambda: Format(E2M1, (Level(F32, (1, 8)), Level(E4M3, TENSOR))), "only the first level spans the tensor"),
        (lambda: Format(E2M1, (Level(INT4, (1, 8)), Level(E4M3, (1, 4)))), "one byte, or as F16, BF16, F32; codec 'INT4'"),
        (lambda: Format(E2M1, (Level(INT8, (1, 8)), Level(E4M3, (1, 4)))), "whose NaN marks faults; INT8 has no NaN"),
        (lambda: Format(E2M1, (Level(F16, (1, 8)), Level(INT4, (1, 4), "divisor"))), "coded under others are multipliers"),
        (
            lambda: Format(INT4, (Level(F16, (1, 8)),), "none", (Level(F16, (1, 8)),)),
            "offset_levels are those of a bias; offset is 'none'",
        ),
        (
            lambda: Format(INT4, K_LEVELS, "bias", (Level(F16, (1, 16)),)),
            r"a bias has the blocks of the scale, \(1, 4\); got \(1, 16\)",
        ),
        (
            lambda: Format(INT4, K_LEVELS, "bias", (Level(F16, (1, 4)),)),
            r"records .* span the same elements, \(1, 8\); got \(1, 4\)",
        ),
        (lambda: Format(INT4, (Level(F16, (1, 8)),), order="scales_first"), "multiplies a block's scale by the global one"),
        (
            lambda: Format(INT4, (Level(F16, (1, 8)),), order="finest"),
            "order is one of codes_first, scales_first; got 'finest'",
        ),
        (lambda: Format(INT4, (Level(F16, (1, 8)),), factor=0.1), "factor is a positive FP32 number; got 0.1"),
        (lambda: Format(INT4, (Level(F16, (1, 8)),), precision="fp8"), "precision is one of fp16, bf16, fp32; got 'fp8'"),
        (lambda: FlatScaling("E8M0"), "element must be one of .*'E2M1'.*, got 'E8M0'"),
        (lambda: FlatScaling(block_size=0), "block_size must be > 0, got 0"),
        (lambda: FlatScaling("NF4", offset="zero_point"), "a zero-point shifts integers; the element codec here is NF4"),
        (lambda: NVFP4BlockScaling(two_level=False, order="scales_first"), "order='scales_first' is that of two scales"),
        (
            lambda: Format(E4M3, (Level(F32, TENSOR),), "shift"),
            "offset is one of none, zero_point, float_zero_point, bias; got 'shift'",
        ),
        (lambda: Format(MXINT8, (Level(F32, TENSOR),), "zero_point"), "zero-point shifts integers; .* MXINT8"),
        (lambda: Format(E2M1, (Level(F32, TENSOR),), "zero_point"), "zero-point shifts integers; .* E2M1"),
        (lambda: breccia.recipe("nvpf4"), r"no recipe 'nvpf4'; did you mean 'nvfp4'\? Known: .*fp8_block, fp8_current"),
        (lambda: breccia.recipe("fp8_block,blok_k=4"), r"recipe 'fp8_block' has no field 'blok_k'; did you mean 'block_k'\?"),
        (lambda: breccia.recipe("fp8_block,128"), "fields are written name=value; got '128'"),
        (lambda: breccia.recipe("int4,group_size=big"), "group_size must be int, got 'big'"),
        (
            lambda: breccia.recipe("int4,symmetric=false,signed=true"),
            r"asymmetric INT4 .* requires signed=False.*got signed=True",
        ),
        (lambda: breccia.recipe("int8,offset=bias,signed=true"), r"asymmetric INT8 .* requires signed=False.*got signed=True"),
        (lambda: breccia.recipe("int4,offset=bias,symmetric=true"), "offset='bias' requires symmetric=False; symmetric INT4"),
        (
            lambda: breccia.recipe("int4,symmetric=false,scale_rule=half_range"),
            "'half_range' is for signed codes; got signed=False, which symmetric=False requires",
        ),
        (lambda: breccia.recipe("int4,symmetric=0"), "INT4Scaling: symmetric must be bool, got 0"),
        (lambda: breccia.ScalingRecipe.from_json("[1]"), r"a recipe in JSON is .*name.*fields.*; got \[1\]"),
        (lambda: breccia.ScalingRecipe.from_json("{"), "a recipe in JSON .* not JSON"),
        (lambda: INT4Scaling.from_json(MXFP8BlockScaling().to_json()), "this is a recipe 'mxfp8', not 'int4'"),
    ],
)
def test_an_invalid_field_value_is_refused_with_the_name_of_the_field(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert isinstance(caught.value, breccia.BrecciaError)


def test_recipes_parse_from_the_command_line() -> None:
    assert breccia.recipe("fp8_block, block_m=128, power_of_two_scale=true") == Float8BlockScaling(
        block_m=128, power_of_two_scale=True
    )
    assert breccia.recipe("nvfp4,two_level=False") == NVFP4BlockScaling(two_level=False)
    assert breccia.recipe("fp8_current,fp8_format=E5M2") == Float8CurrentScaling("E5M2")
    assert breccia.recipe("NVFP4") == breccia.recipe("NVFP4BlockScaling") == NVFP4BlockScaling()
    assert breccia.recipe("int4", group_size=32) == INT4Scaling(group_size=32)
    assert breccia.recipe("int,bits=3,group_size=64") == INTScaling(3, 64)


@pytest.mark.parametrize(
    ("short", "recipe"),
    [
        ("int1", INTScaling(1, signed=False)),
        ("int3", INTScaling(3)),
        ("INT5,group_size=null,symmetric=false", INTScaling(5, None, False, symmetric=False)),
        ("q4_0", INT4Scaling(32)),
        ("q4_1", INT4Scaling(32, False, symmetric=False, offset="bias")),
        ("Q5_0", INTScaling(5, 32)),
        ("q5_1,scale_dtype=bf16", INTScaling(5, 32, False, "bf16", False, offset="bias")),
        ("q8_0", INT8Scaling(32, scale_dtype="fp16")),
        ("q3_k", GGUFScaling("Q3_K")),
        ("IQ4_XS", GGUFScaling("IQ4_XS")),
        ("iq4_nl", GGUFScaling("IQ4_NL")),
        ("tq1_0", GGUFScaling("TQ1_0")),
    ],
)
def test_a_shorthand_is_a_name_with_fields(short: str, recipe: breccia.ScalingRecipe) -> None:
    assert breccia.recipe(short) == recipe == breccia.recipe(recipe.spec)
    assert breccia.recipe("q4_0", group_size=16) == INT4Scaling(16), "fields come before those of the shorthand"
    with pytest.raises(breccia.UnknownNameError, match="no recipe 'q5_0'"):  # a file has a recipe's name
        breccia.ScalingRecipe.from_json('{"name": "q5_0", "fields": {}}')


@pytest.mark.parametrize("spec", ["iq2_xs", "IQ2_XS", "gguf,type=IQ2_XS"])
def test_a_type_of_gguf_that_is_only_decoded_is_named_as_one(spec: str) -> None:
    said = "IQ2_XS is a type of GGUF files whose tensors breccia decodes: .* A recipe of about as many bits is 'q2_k'"
    with pytest.raises(breccia.UnknownNameError, match=said) as caught:
        breccia.recipe(spec)
    assert breccia.recipe(caught.value.found["known"][0]) == GGUFScaling("Q2_K")
    with pytest.raises(breccia.RecipeError, match="type must be one of .*, got 'Q9'"):
        breccia.recipe("gguf,type=Q9")


@pytest.mark.parametrize("kind", [INT4Scaling, INT8Scaling])
@pytest.mark.parametrize(
    "fields", [{}, {"signed": False}, *({"signed": False, "symmetric": False, "offset": of} for of in ("zero_point", "bias"))]
)
def test_integers_of_4_and_8_bits_have_one_format_by_either_name(kind: Any, fields: dict[str, Any]) -> None:
    """So they have the same kernels, and `requantize` between them changes the recipe alone."""
    named = kind(16, scale_dtype="bf16", **fields)
    wide = INTScaling(kind.bits, 16, scale_dtype="bf16", **fields)
    assert named.format == wide.format and named.fingerprint() != wide.fingerprint()
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    st = breccia.cast(x, named)
    again = breccia.requantize(st, wide, require_exact=True)
    assert again.recipe == wide and again.data is st.data and again.scale is st.scale and again.zero_point is st.zero_point
    assert breccia.requantize(again, named).digest() == st.digest()
    assert breccia.bytes_equal(breccia.cast(x, wide), again)
    for op, (mine, theirs) in {"cast": ((x, named), (x, wide)), "dequantize": ((st,), (again,))}.items():
        assert breccia.explain(op, *mine).running == breccia.explain(op, *theirs).running


def test_codes_of_few_bits_are_scaled_by_their_largest() -> None:
    """By hand: amax 3 by 1, the largest code of signed 2 bits and of 1 bit, and by 1.5, half of the range -2..1."""
    x = np.array([[3.0, -3.0, 1.4, 1.6]], np.float32)
    two, half = (breccia.cast(x, INTScaling(2, 4, scale_rule=rule)) for rule in ("linear", "half_range"))
    assert (float(two.scale[0, 0]), breccia.dequantize(two).tolist()) == (3.0, [[3.0, -3.0, 0.0, 3.0]])
    assert (float(half.scale[0, 0]), breccia.dequantize(half).tolist()) == (2.0, [[2.0, -4.0, 2.0, 2.0]])
    one = breccia.cast(x, "int,bits=1,group_size=4")
    assert (one.data.tolist(), breccia.dequantize(one).tolist()) == ([[0b1001]], [[3.0, 0.0, 0.0, 3.0]])
    ends = breccia.cast(x, INTScaling(1, 4, False, symmetric=False, offset="bias"))
    assert breccia.dequantize(ends).tolist() == [[3.0, -3.0, 3.0, 3.0]], "the least and the largest"
    shifted = breccia.cast(x, INTScaling(1, 4, False, symmetric=False))
    assert (float(shifted.scale[0, 0]), shifted.zero_point.tolist()) == (6.0, [[0]]), "half a step rounds to even"
    assert breccia.dequantize(shifted).tolist() == [[0.0] * 4]


def test_a_spec_needs_no_fields_that_its_other_fields_require() -> None:
    for spec in ("int4,symmetric=false", "INT4Scaling,symmetric=False", "int4,symmetric=false,signed=false"):
        assert breccia.recipe(spec) == INT4Scaling(symmetric=False, signed=False), spec
    assert breccia.recipe("int8,symmetric=false") == INT8Scaling(symmetric=False, signed=False)
    assert breccia.recipe("int8", symmetric=False) == INT8Scaling(symmetric=False, signed=False)
    biased = INT4Scaling(group_size=64, symmetric=False, signed=False, offset="bias")
    for spec in ("int4,offset=bias,group_size=64", "int4,group_size=64,symmetric=false,offset=BIAS"):
        assert breccia.recipe(spec) == biased, spec
    assert breccia.recipe("int4,signed=false") == INT4Scaling(signed=False), "unsigned codes do not require zero-points"
    assert breccia.recipe("int4,offset=zero_point") == INT4Scaling(), "a default requires nothing"


def test_a_spec_sets_only_what_would_be_refused_otherwise() -> None:
    """And a recipe that its constructor refuses for want of other fields has them implied."""
    found = 0
    for kind in registry().recipes.values():
        for name in kind.__dataclass_fields__:
            values, implied = implication_of(kind, name)
            found += bool(implied)
            for value in (values if isinstance(values, tuple) else (values,)) if implied else ():
                made = breccia.recipe(kind.name, **{name: value})
                assert {of: getattr(made, of) for of in implied} == implied
                with pytest.raises(RecipeError):
                    kind(**{name: value})
    assert found == 7


@pytest.mark.parametrize("bare", ["block", "row", "current", "delayed"])
def test_recipes_parse_by_their_earlier_names(bare: str) -> None:
    recipe = breccia.recipe(bare)
    assert recipe.name == f"fp8_{bare}" and recipe == breccia.recipe(f"fp8_{bare}") == breccia.recipe(bare.upper())
    assert breccia.ScalingRecipe.from_json(recipe.to_json().replace(recipe.name, bare)) == recipe
    assert breccia.recipe("block,block_m=128").spec == "fp8_block,block_m=128"


@pytest.mark.parametrize(("tile", "axis"), [(PerBlockMN(1, 4), -1), (PerBlockMN(4, 1), -2)])
def test_tiles_one_row_high_are_blocks_along_k(tile: PerBlockMN, axis: int) -> None:
    """Equal block shapes have one layout in a tensor, whichever class was passed."""
    recipe = Float8BlockScaling(block_k=4)
    expected = breccia.cast(np.arange(64, dtype=np.float32).reshape(8, 8), recipe, axis=axis)
    st = breccia.ScaledTensor(expected.data, expected.scale, recipe, tile, axis=axis)
    assert st.layout == expected.layout == PerBlockK(4) and st.digest() == expected.digest()
    assert st.mT.layout == PerBlockK(4) and breccia.PerBlockMN(4, 4).canonical(axis) == PerBlockMN(4, 4)
    assert tile.canonical(-3 - axis) == tile, "one column wide, 4 rows high"


def test_formats_have_the_expected_qmax() -> None:
    nvfp4 = NVFP4BlockScaling().format
    assert nvfp4.global_scale is not None
    assert (nvfp4.qmax(nvfp4.global_scale), nvfp4.qmax(nvfp4.scale)) == (2688.0, 6.0)
    assert INT4Scaling().format.qmax(INT4Scaling().format.scale) == 7.0


def test_the_default_layout_of_a_recipe_follows_from_its_block() -> None:
    @dataclasses.dataclass(frozen=True)
    class Row(breccia.ScalingRecipe):
        @property
        def format(self) -> Format:
            return Format(INT4, (Level(F32, (1, None)),))

    assert Row().layout == PerChannel()
    assert Float8CurrentScaling().layout == PerTensor()
    assert MXFP8BlockScaling().layout == PerBlockK(32)
    assert NVFP4BlockScaling().layout == PerBlockK(16)
    assert Float8BlockScaling().layout == PerBlockK(128)
    assert Float8BlockScaling(block_m=128).layout == PerBlockMN(128, 128)
    assert INT4Scaling().layout == PerBlockK(128)
    x = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
    st = breccia.cast(x, Row())
    assert st.scale.shape == (5, 1)
    assert (
        np.abs(breccia.dequantize(st) - x).max() <= np.abs(x).max() / 14 * 1.001
    )  # half a step in the row with the largest values


def test_an_incompatible_rule_and_codec_are_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Odd(breccia.ScalingRecipe):
        """Declares the default rule, which writes float scales, for E8M0."""

        element: Any = E4M3
        rule: Any = LINEAR

        @property
        def format(self) -> Format:
            return Format(self.element, (Level(E8M0, (1, 4)),))

        @property
        def rules(self) -> tuple[Any, ...]:
            return (self.rule,)

    x = np.ones((2, 8), np.float32)
    with pytest.raises(RecipeError, match="rule 'linear' writes float scales; E8M0 has powers of two only: use 'rceil'"):
        breccia.cast(x, Odd())
    with pytest.raises(RecipeError, match="rule 'even' rounds to the element's mantissa bits; NF4 has none"):
        breccia.cast(x, Odd(NF4, EVEN))

    @dataclasses.dataclass(frozen=True)
    class Narrow(Odd):
        @property
        def format(self) -> Format:
            return Format(E4M3, (Level(F16, (1, 4)),))

    with pytest.raises(RecipeError, match="rule 'te' needs a codec for scales up to 2.126; .* F16 is 65504: use"):
        breccia.cast(x, Narrow(E4M3, TE))
    with pytest.raises(RecipeError, match="rule 'te' writes float scales; E8M0 has powers of two only"):
        breccia.cast(x, Odd(E4M3, TE))

    @dataclasses.dataclass(frozen=True)
    class Rounded(Float8CurrentScaling):
        @property
        def rules(self) -> tuple[Any, ...]:
            return (HALF_RANGE,)

    with pytest.raises(RecipeError, match="rule 'half_range' is for signed integer elements; E4M3 is not one"):
        breccia.cast(x, Rounded())

    @dataclasses.dataclass(frozen=True)
    class TwoLevels(NVFP4BlockScaling):
        fine: Any = TE

        @property
        def rules(self) -> tuple[Any, ...]:
            return (LINEAR, self.fine)

    for fine in (TE, RCEIL):
        with pytest.raises(RecipeError, match=f"rule '{fine.name}' is for formats with one scale level; use 'linear' under"):
            breccia.cast(x, TwoLevels(fine=fine))


# ------------------------------------------------------------------------------------------------ interned keys


def interned_keys(sizes: range) -> list[weakref.ref[object]]:
    """Weak references to the interned keys of recipes and layouts of these sizes, none of which stays alive."""
    found: list[weakref.ref[object]] = []
    for n in sizes:
        found += [weakref.ref(Float8BlockScaling(block_k=n).interned_key), weakref.ref(PerBlockK(n).interned_key)]
    return found


def test_an_interned_key_is_freed_with_the_last_equal_declaration() -> None:
    one, equal = Float8BlockScaling(block_k=7001), Float8BlockScaling(block_k=7001)
    seen = weakref.ref(one.interned_key)
    assert equal.interned_key is seen() is not None
    del one
    gc.collect()
    assert seen() is not None and Float8BlockScaling(block_k=7001).interned_key is seen(), "an equal one lives"
    del equal
    gc.collect()
    assert seen() is None


def test_short_lived_declarations_leave_no_interned_keys() -> None:
    gc.collect()
    before = len(declared._interned)
    seen = interned_keys(range(10_000, 12_000))
    gc.collect()
    assert [ref for ref in seen if ref() is not None] == []
    assert len(declared._interned) == before


def test_only_declarations_of_one_class_share_an_interned_key() -> None:
    @dataclasses.dataclass(frozen=True)
    class Subclass(Float8BlockScaling):
        """Has the same fields as its base."""

    kept = [Float8BlockScaling(block_k=48), Subclass(block_k=48), PerBlockK(48), PerBlockK(48, partial=True)]
    assert len({id(each.interned_key) for each in kept}) == len(kept)
    stored = [InStorage(PerBlockMN(1, 32), "interleaved", (4, 64), 3), InStorage(PerBlockMN(1, 32), "interleaved", [4, 64], 3)]  # type: ignore[arg-type]
    assert stored[0].interned_key is stored[1].interned_key and stored[0].layout.interned_key is PerBlockMN(1, 32).interned_key


def test_concurrent_threads_get_one_interned_key() -> None:
    for n in range(20_000, 20_050):
        start, found = threading.Barrier(8), list[tuple[object, object]]()

        def ask(n: int = n, start: threading.Barrier = start, found: list[tuple[object, object]] = found) -> None:
            recipe = Float8BlockScaling(block_k=n)
            start.wait()
            found.append((recipe, recipe.interned_key))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(identity) for _, identity in found}) == 1 and len(found) == 8


# ------------------------------------------------------------------------------------------------ fingerprints


def test_fingerprints_follow_their_published_definition() -> None:
    """Recomputed from the definition in the docstrings. If these numbers change, the numerics version must change too."""

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    assert Float8CurrentScaling().fingerprint() == digest('{"fields":{},"numerics":1,"recipe":"fp8_current"}')
    block = Float8BlockScaling("E5M2", block_m=128)
    assert block.fingerprint() == digest('{"fields":{"block_m":128,"fp8_format":"E5M2"},"numerics":1,"recipe":"fp8_block"}')
    codes = ",".join(str(int(v)) for v in np.arange(16, dtype=np.int8).astype(np.float32).view(np.uint32))
    signed = ",".join(str(int(v)) for v in np.array([*range(8), *range(-8, 0)], np.float32).view(np.uint32))
    for unsigned, table in ((True, codes), (False, signed)):
        decoding = (
            f'{{"element":{{"bits":4,"table":[{table}]}},"levels":[[{{"bits":16,"name":"F16"}},[1,128],"multiplier"]],'
            '"numerics":1,"offset":"none"}'
        )
        assert INT4Scaling(signed=not unsigned).format.fingerprint() == digest(decoding)


def test_fingerprints_differ_exactly_where_the_bytes_may_differ() -> None:
    assert len({r.fingerprint() for r in SETTINGS}) == len(SETTINGS)
    assert DelayedScaling(amax_history_len=4).fingerprint() == DelayedScaling().fingerprint()
    assert Float8CurrentScaling().format.fingerprint() == DelayedScaling(margin=2).format.fingerprint()
    assert MXFP8BlockScaling().format.fingerprint() == MXFP8BlockScaling(scale_rule="floor").format.fingerprint()
    assert MXFP8BlockScaling().fingerprint() != MXFP8BlockScaling(scale_rule="floor").fingerprint()


# ------------------------------------------------------------------------------------------------ layouts


def scale(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("layout", "shape", "scale_shape", "axis"),
    [
        (PerTensor(), (4, 8), (), -1), (PerTensor(), (3, 4, 8), (3,), -1), (PerTensor(), (5,), (), -1),
        (PerBlockK(4), (3, 8), (3, 2), -1), (PerBlockK(4), (8, 3), (2, 3), -2),
        (PerBlockK(4, partial=True), (3, 9), (3, 3), -1), (PerChannel(), (2, 3, 8), (2, 3, 1), -1),
        (PerChannel(), (3, 8), (3,), -1), (PerChannel(), (3, 8), (1, 8), -2),
        (PerBlockMN(2, 4), (2, 6, 8), (2, 3, 2), -1),
        (PerBlockMN(128, 128, partial=True), (576, 7168), (5, 56), -1),
    ],
    ids=str,
)  # fmt: skip
def test_layouts_accept_the_shapes_they_describe(layout: Layout, shape: Any, scale_shape: Any, axis: int) -> None:
    layout.validate(np.zeros(shape, np.uint8), scale(*scale_shape), axis=axis)


@pytest.mark.parametrize(
    ("layout", "shape", "scale_shape", "message"),
    [
        (PerTensor(), (4, 8), (1,), r"PerTensor requires a scalar scale \(ndim=0\).*got ndim=1 with shape=\(1,\); reshape"),
        (PerBlockMN(2, 4), (8,), (2,), r"PerBlockMN requires data.ndim >= 2, got ndim=1; reshape it to \(1, 8\)"),
        (PerBlockK(4), (8,), (1, 2), r"PerBlockK: scale.shape must be \(2,\), got \(1, 2\)"),
        (PerChannel(), (8,), (8,), r"PerChannel: scale.shape must be \(1,\), got \(8,\)"),
        (PerBlockK(4), (3, 9), (3, 3), r"data.shape\[-1\]=9 must be divisible by block_size=4; pass partial=True"),
        (PerBlockK(4, partial=True), (3, 8), (3, 2), r"partial=True, but shape \(3, 8\) divides evenly into blocks"),
        (PerBlockK(4), (3, 8), (3, 3), r"PerBlockK: scale.shape must be \(3, 2\), got \(3, 3\)"),
        (PerChannel(), (3, 8), (8,), r"PerChannel: scale.shape must be one of \[\(3,\), \(3, 1\)\], got \(8,\)"),
        (PerBlockMN(2, 4), (3, 8), (2, 2), r"data.shape\[-2\]=3 must be divisible by block_m=2"),
        (PerBlockMN(2, 4), (4, 9), (2, 3), r"data.shape\[-1\]=9 must be divisible by block_n=4"),
        (PerBlockMN(2, 4), (4, 8), (2, 3), r"PerBlockMN: scale.shape must be \(2, 2\), got \(2, 3\)"),
    ],
    ids=str,
)
def test_layouts_refuse_other_shapes_and_name_the_valid_ones(
    layout: Layout, shape: Any, scale_shape: Any, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        layout.validate(np.zeros(shape, np.uint8), scale(*scale_shape))


def test_layouts_transpose_and_round_trip_through_json() -> None:
    assert PerBlockMN(2, 4).mT == PerBlockMN(4, 2) and PerBlockK(4).mT == PerBlockK(4)
    assert PerBlockMN(4, 16).oriented(-2) == PerBlockMN(16, 4)
    assert PerBlockMN(1, 16).oriented(-2) == PerBlockMN(16, 1).canonical(-2) == PerBlockK(16)
    assert PerBlockMN(1, 16).block(-1) == PerBlockMN(16, 1).block(-2) == (1, 16)
    assert PerBlockK(4, partial=True).to_dict() == {"name": "per_block_k", "fields": {"block_size": 4, "partial": True}}
    assert PerTensor().to_dict() == {"name": "per_tensor", "fields": {}}
    with pytest.raises(LayoutError, match="PerBlockMN tiles the last two axes.*got -3"):
        PerBlockMN(2, 4).validate(np.zeros((4, 2, 8), np.uint8), scale(4, 1, 2), axis=-3)
