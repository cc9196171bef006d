"""Formats beyond one scale for a block: records, coded biases, the order of scales, factors, float zero-points, precision."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from marks import jax_is_long
from recipes import declared, recipe_id

import breccia
from breccia import (
    Format,
    GGUFScaling,
    INT4Scaling,
    INT8Scaling,
    LayoutError,
    Level,
    NVFP4BlockScaling,
    PerBlockK,
    UnsupportedError,
)
from breccia.codecs import E2M1, E4M3, E8M0, F16, F32, INT4, INT8, INTEGERS, Lookup
from breccia.dispatch.registry import _recipe_class, registry
from breccia.errors import PluginError
from breccia.formats import TENSOR
from breccia.kernels import reference
from breccia.kernels.flattening import flat_recipe, flattened
from breccia.testing import oracle
from breccia.testing.compare import expect_numbers, expect_written
from breccia.testing.examples import every_decodable, special_rows, wide
from breccia.testing.laws import recipes as laws
from breccia.testing.places import Place

KINDS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
DECODED = ("IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0")
#: Bits per value in files of GGUF, which a tensor has too; TQ1_0 has 1.6875 there.
BITS = {"Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "TQ2_0": 2.0625}
NUMPY = Place("numpy")


@dataclass(frozen=True)
class Scaled(breccia.ScalingRecipe):
    """INT8 codes with an FP32 scale per 32, and a factor or a precision."""

    name: ClassVar[str] = "scaled_by_a_factor"
    source: ClassVar[str] = "this test"
    factor: float = 1.0
    precision: str = "fp32"

    @property
    def format(self) -> Format:  # type: ignore[override]
        return Format(INT8, (Level(F32, (1, 32)),), factor=self.factor, precision=self.precision)


THREE = declared(
    INT4,
    Level(E8M0, (1, 32)),
    Level(INTEGERS[3, False], (1, 16)),
    Level(INTEGERS[1, False], (1, 4)),
    rule=(breccia.rules.RCEIL, breccia.rules.LINEAR, breccia.rules.LINEAR),
)
GLOBAL = declared(E2M1, Level(F32, TENSOR), Level(F16, (1, 32)), Level(INTEGERS[5, False], (1, 8)))
FACTORS = Lookup("FACTORS", 2, None, "this test", (1.0, 2.0, 4.0, 8.0))
HALVES = Lookup("HALVES", 1, None, "this test", (0.5, 1.0))
#: Powers of two, under an FP16 scale.
POWERS = declared(
    E2M1,
    Level(F16, (1, 32)),
    Level(FACTORS, (1, 16)),
    Level(HALVES, (1, 8)),
    rule=(breccia.rules.LINEAR, breccia.rules.RCEIL, breccia.rules.EVEN),
    name="powers",
)
WRITTEN = [
    *map(GGUFScaling, KINDS),
    NVFP4BlockScaling(order="scales_first"),
    NVFP4BlockScaling(order="scales_first", global_sense="divisor"),
    INT4Scaling(16, signed=False, symmetric=False, offset="float_zero_point"),
    INT8Scaling(None, signed=False, symmetric=False, offset="float_zero_point", scale_dtype="bf16"),
    Scaled(factor=0.007874015718698502),
    Scaled(precision="bf16"),
    Scaled(0.25, "fp16"),
    GLOBAL,
    POWERS,
]
FRAMEWORKS = ("numpy", "torch", "jax", "mlx")


@pytest.mark.parametrize("recipe", WRITTEN, ids=recipe_id)
def test_casts_in_numpy_are_those_of_the_oracle(recipe: breccia.ScalingRecipe) -> None:
    laws.a_cast_writes_the_oracles_bytes(recipe, NUMPY)


@pytest.mark.long
@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("recipe", WRITTEN, ids=recipe_id)
def test_casts_and_values_are_those_of_the_oracle(recipe: breccia.ScalingRecipe, framework: str) -> None:
    place, known = Place(framework), type(recipe).__module__.startswith("breccia")
    if not known and framework == "torch":
        pytest.skip("torch's operators know declared recipes only")
    laws.a_cast_writes_the_oracles_bytes(recipe, place)
    laws.every_code_under_every_scale_decodes_as_the_oracle_says(recipe, place)
    laws.casts_write_the_bytes_of_numpy(recipe, place)
    laws.nothing_non_finite_becomes_finite(recipe, place)
    laws.an_empty_array_stays_empty(recipe, place)


@pytest.mark.long
@pytest.mark.parametrize("recipe", WRITTEN, ids=recipe_id)
def test_stochastic_casts_and_any_bit_pattern_are_those_of_the_oracle(recipe: breccia.ScalingRecipe) -> None:
    laws.a_stochastic_cast_writes_the_oracles_bytes(recipe, NUMPY)
    laws.any_bit_pattern_is_cast_as_the_oracle_casts_it(recipe)


@pytest.mark.long
@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("kind", [*KINDS, *DECODED])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_any_bytes_of_a_gguf_format_decode_as_the_oracle_says(kind: str, framework: str) -> None:
    laws.every_code_under_every_scale_decodes_as_the_oracle_says(GGUFScaling(kind), Place(framework))


def test_levels_of_three_codecs_decode_from_the_coarsest_down() -> None:
    st, place = every_decodable(THREE, 40), NUMPY
    expect_numbers("decoded", place, breccia.dequantize(st), oracle.dequantize(laws.written(place, st), THREE))
    x = wide((5, 70), seed=1, exponents=3)
    expect_written(place, breccia.cast(x, THREE), oracle.cast(x, THREE))


def test_factors_are_the_powers_of_two_that_the_rule_says() -> None:
    """Under an FP16 scale of 48 / (6 * 8 * 1), 2^ceil(log2(a / 6)) for 16 elements. Below it 1 where a rounds to 4 or more."""
    x = np.zeros((1, 32), np.float32)
    x[0, [0, 8, 16, 24]] = [48, 12, 3.5, 3.4]
    st = breccia.cast(x, POWERS)
    scale, factors, halves = oracle.oracle_records.from_bytes(POWERS.format.block_levels, st.scale)
    assert scale.astype(np.uint16).view(np.float16).tolist() == [[1.0]]
    assert factors.tolist() == [[3, 0]] and halves.tolist() == [[1, 0, 1, 0]]
    assert breccia.dequantize(st)[0, [0, 8, 16, 24]].tolist() == [48, 12, 4, 3]  # 3.5 ties to even


@pytest.mark.parametrize("rule", [breccia.rules.RCEIL, breccia.rules.LINEAR], ids=lambda rule: rule.name)
def test_a_table_that_a_rule_does_not_write_is_refused(rule: breccia.rules.Rule) -> None:
    """Powers of two are written to tables of consecutive ones."""
    gap = Lookup("GAP", 1, None, "this test", (1.0, 4.0))
    said = {
        "rceil": "codec 'GAP' cannot store the power-of-two scales of this rule",
        "linear": "rule 'linear' writes float scales; GAP is a table: use 'rceil'",
    }
    recipe = declared(INT4, Level(F16, (1, 32)), Level(gap, (1, 8)), rule=(breccia.rules.LINEAR, rule))
    with pytest.raises(breccia.RecipeError, match=said[rule.name]):
        breccia.cast(np.ones((1, 32), np.float32), recipe)


# -- records ---------------------------------------------------------------------------------------------------------


def test_a_record_of_q4_k_by_hand() -> None:
    """0.5 * c * q - 0.25 * m, with c and m of 6 bits in dense little-endian streams; all numbers are exact in FP32."""
    q = np.arange(256) * 7 % 16
    c, m = np.array([1, 2, 3, 5, 8, 13, 21, 63]), np.array([63, 0, 1, 2, 40, 5, 6, 7])
    sixes = [int(sum(int(n) << (6 * i) for i, n in enumerate(row))).to_bytes(6, "little") for row in (c, m)]
    scale = np.frombuffer(struct.pack("<e", 0.5) + sixes[0], np.uint8)[None]
    bias = np.frombuffer(struct.pack("<e", -0.25) + sixes[1], np.uint8)[None]
    data = (q[::2] | q[1::2] << 4).astype(np.uint8)[None]
    st = breccia.from_buffer(data, scale, GGUFScaling("Q4_K"), PerBlockK(256), bias)
    assert st.shape == (1, 256) and st.nbytes == 144
    expected = 0.5 * np.repeat(c, 32) * q - 0.25 * np.repeat(m, 32)
    assert (breccia.dequantize(st)[0] == expected).all()


def test_a_record_of_q3_k_by_hand() -> None:
    """0.125 * c * q, codes of 3 bits and scales of 6 in two's complement."""
    q, c = np.arange(256) * 3 % 8 - 4, np.arange(16) * 5 % 64 - 32
    scale = np.frombuffer(
        struct.pack("<e", 0.125) + int(sum((int(n) & 63) << (6 * i) for i, n in enumerate(c))).to_bytes(12, "little"), np.uint8
    )[None]
    data = np.frombuffer(int(sum((int(n) & 7) << (3 * i) for i, n in enumerate(q))).to_bytes(96, "little"), np.uint8)[None]
    st = breccia.from_buffer(data, scale, GGUFScaling("Q3_K"), PerBlockK(256))
    assert st.nbytes == 110 and (breccia.dequantize(st)[0] == 0.125 * np.repeat(c, 16) * q).all()


@pytest.mark.parametrize("kind", BITS)
def test_a_tensor_has_as_many_bytes_as_in_a_file_of_gguf(kind: str) -> None:
    recipe = GGUFScaling(kind)
    shapes = breccia.backend.part_shapes(recipe.format, recipe.layout, (3, 512))
    sizes = {name: 2 if codec is not None and codec.bits == 16 else 1 for name, codec in recipe.format.parts.items()}
    assert sum(int(np.prod(shapes[name])) * sizes[name] for name in shapes) * 8 == BITS[kind] * 3 * 512


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_a_cast_follow_the_written_rule(kind: str) -> None:
    """d = FP16 of the largest amax over the largest codes; a scale's code is RNE of its own over d (docs/spec, section 5.2)."""
    recipe, x = GGUFScaling(kind), wide((2, 256), seed=4, exponents=2)
    fmt, st = recipe.format, breccia.cast(x, recipe)
    size = fmt.scale.block[1]
    assert size is not None
    blocks = x.reshape(2, -1, size)
    low = np.minimum(blocks.min(-1), 0)
    statistic = np.abs(blocks).max(-1) if fmt.offset == "none" else np.maximum(blocks.max(-1), 0) - low
    caps = np.float32(fmt.element.max * fmt.scale.codec.max), np.float32(fmt.element.max)
    d = (statistic.max(-1, keepdims=True) / caps[0]).astype(np.float16)
    codes = np.rint(np.minimum(statistic / caps[1] / d.astype(np.float32), fmt.scale.codec.max))
    found = oracle.oracle_records.from_bytes(fmt.block_levels, st.scale)
    assert (found[0].astype(np.uint16).view(np.float16) == d).all() and (found[1] == codes).all()


def test_a_nan_marks_its_super_block_and_no_other() -> None:
    x = wide((2, 512), seed=0, exponents=1)
    x[0, 300], x[1, 0] = np.nan, np.inf
    for kind in KINDS:
        lost = np.isnan(breccia.dequantize(breccia.cast(x, GGUFScaling(kind))))
        assert lost.reshape(2, 2, 256).all(-1).tolist() == [[False, True], [True, False]] and lost.sum() == 512


def test_a_last_super_block_may_be_partial() -> None:
    x = wide((3, 300), seed=2, exponents=1)
    whole = np.zeros((3, 512), np.float32)
    whole[:, :300] = x
    for kind in KINDS:
        part, full = (breccia.cast(each, GGUFScaling(kind)) for each in (x, whole))
        assert part.scale.tobytes() == full.scale.tobytes() and part.layout == PerBlockK(256, partial=True)
        assert (breccia.dequantize(part) == breccia.dequantize(full)[:, :300]).all()


@pytest.mark.parametrize("framework", jax_is_long(FRAMEWORKS))
def test_structural_ops_keep_whole_super_blocks(framework: str) -> None:
    place = Place(framework)
    x = wide((4, 768), seed=3, exponents=1)
    st = breccia.cast(place.array(x), GGUFScaling("Q4_K"))
    y = breccia.dequantize(breccia.cast(x, GGUFScaling("Q4_K")))

    def values(st: breccia.ScaledTensor) -> np.ndarray:
        return np.asarray(breccia.dequantize(st))

    assert (values(st[1:3, 256:]) == y[1:3, 256:]).all()
    assert (values(st.mT[256:512]) == y.T[256:512]).all()
    assert (values(breccia.concat([st[..., :256], st[..., 256:]], axis=-1)) == y).all()
    assert (values(breccia.stack([st, st])[1]) == y).all() and (values(st.reshape(1, 4, 768)) == y[None]).all()
    with pytest.raises(LayoutError, match="axis 1 .* stored in units of 256"):
        st[:, 32:]
    assert st.digest() == breccia.cast(x, GGUFScaling("Q4_K")).digest()


# -- what is refused -------------------------------------------------------------------------------------------------


def q4_k(columns: int = 256, **changed: Any) -> dict[str, Any]:
    parts = {"data": np.zeros((2, columns // 2), np.uint8)}
    parts |= {name: np.zeros((2, 8 * -(-columns // 256)), np.uint8) for name in ("scale", "zero_point")}
    return parts | changed


@pytest.mark.parametrize(
    ("parts", "layout", "error", "said"),
    [
        (q4_k(320), PerBlockK(256), LayoutError, r"data.shape\[-1\]=320 must be divisible by block_size=256"),
        (q4_k(scale=np.zeros((2, 7), np.uint8)), PerBlockK(256), LayoutError,
         r"scale.shape must be \(2, 8\), a record of 8 bytes for each block of 256 .* got \(2, 7\)"),
        (q4_k(zero_point=np.zeros((2, 9), np.uint8)), PerBlockK(256), LayoutError, r"zero_point.shape must be \(2, 8\), a rec"),
        (q4_k(zero_point=np.zeros((2, 8), np.float16)), PerBlockK(256), UnsupportedError,
         "records of biases as one of uint8; got float16"),
        (q4_k(scale=np.zeros((2, 8), np.float16)), PerBlockK(256), UnsupportedError,
         "scale must hold bytes as uint8; got dtype float16"),
        (q4_k(zero_point=None), PerBlockK(256), LayoutError, "needs a zero_point; got none"),
        (q4_k(), PerBlockK(32), LayoutError, r"scale.shape must be"),
    ],
)  # fmt: skip
def test_components_that_contradict_the_format_are_refused(parts: Any, layout: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        breccia.ScaledTensor(parts["data"], parts["scale"], GGUFScaling("Q4_K"), layout, parts["zero_point"])


@pytest.mark.parametrize("kind", DECODED)
def test_a_recipe_that_is_only_decoded_is_not_written(kind: str) -> None:
    reason = "its table has no 0" if kind.startswith("IQ") else "its scale is the value of 1, which no rule of a cast computes"
    with pytest.raises(UnsupportedError, match=f"cast does not write gguf,type={kind}: {reason}. It is for data that exists"):
        breccia.cast(np.ones((1, 256), np.float32), GGUFScaling(kind))
    assert "only decoded" in str(breccia.explain("cast", np.ones((1, 256), np.float32), GGUFScaling(kind)))


def test_scales_that_are_coded_cannot_be_supplied() -> None:
    with pytest.raises(UnsupportedError, match="here UINT6 ones are coded under others. Omit it"):
        breccia.cast(np.ones((1, 256), np.float32), GGUFScaling("Q4_K"), scale=np.ones((1, 1), np.float32))


def test_no_storage_holds_records() -> None:
    st = breccia.cast(np.ones((128, 256), np.float32), GGUFScaling("Q6_K"))
    with pytest.raises(UnsupportedError, match="'swizzle_128x4' orders one scale per block; gguf,type=Q6_K has records"):
        st.to_storage("swizzle_128x4")


def test_a_kernel_that_does_not_know_a_feature_says_so() -> None:
    st = breccia.cast(special_rows(64), NVFP4BlockScaling(order="scales_first"))
    told = str(breccia.explain("dequantize", st))
    for kernel in registry().table.kernels:
        if kernel.op == "dequantize" and kernel.framework == "numpy" and "scales_first" not in kernel.knows:
            assert f"{kernel.name}" in told and "does not know scales first, which nvfp4,order=scales_first has" in told


# -- by the kernels for one scale per block ----------------------------------------------------------------------------

FLATTENED = [r for r in WRITTEN if flat_recipe(r) is not None]


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("framework", jax_is_long(FRAMEWORKS))
@pytest.mark.parametrize("recipe", FLATTENED, ids=recipe_id)
def test_a_flattened_tensor_has_the_same_values(recipe: breccia.ScalingRecipe, framework: str) -> None:
    place = Place(framework)
    st = laws.moved(every_decodable(recipe, 40), place)
    flat = flattened(st)
    assert not flat.recipe.format.features and flat.shape == st.shape and flat.layout == flat.recipe.layout.fitted(flat.shape)
    expected = reference.dequantize(every_decodable(recipe, 40))
    expect_numbers("flattened", place, breccia.dequantize(flat), expected)
    expect_numbers(
        "its transpose", place, breccia.dequantize(flattened(st.mT)), np.ascontiguousarray(expected.swapaxes(-1, -2))
    )
    assert breccia.explain("dequantize", st).winner.name in ("flattened.dequantize", *own_kernels("dequantize", recipe))  # type: ignore[union-attr]


def own_kernels(op: str, recipe: breccia.ScalingRecipe) -> list[str]:
    """The kernels that know the format themselves."""
    known = [k for k in registry().table.kernels if k.op == op and k.kind == "kernel"]
    return [k.name for k in known if recipe.format.features <= set(k.knows)]


@pytest.mark.parametrize(
    "recipe", [GGUFScaling("Q4_K"), GGUFScaling("Q6_K"), NVFP4BlockScaling(order="scales_first")], ids=recipe_id
)
def test_products_of_flattened_tensors_keep_the_bound(recipe: breccia.ScalingRecipe) -> None:
    """Each element is within K u / (1 - K u) of the sum of magnitudes (docs/spec/numerics.md, section 9)."""
    rng = np.random.default_rng(9)
    x, weight = rng.standard_normal((3, 512)).astype(np.float32), wide((40, 512), seed=7, exponents=2)
    st = breccia.cast(weight, recipe)
    values = reference.dequantize(st).astype(np.float64)
    gamma = 512 * 2.0**-24 / (1 - 512 * 2.0**-24)
    bound = gamma * (np.abs(x.astype(np.float64)) @ np.abs(values.T))
    product = breccia.matmul(x, st.mT, prefer="flattened.matmul")
    assert (np.abs(product - x.astype(np.float64) @ values.T) <= bound).all()
    ends = np.array([1, 3], np.int32)
    grouped = breccia.grouped_matmul(x, breccia.stack([st, st]).mT, ends, prefer="flattened.grouped_matmul")
    assert (np.abs(grouped - x.astype(np.float64) @ values.T) <= bound).all()


def test_what_is_not_one_scale_per_block_is_not_flattened() -> None:
    for recipe in (GLOBAL, Scaled(0.5), Scaled(precision="bf16"), breccia.MXFP8BlockScaling()):
        assert flat_recipe(recipe) is None
    st = breccia.cast(wide((4, 64), seed=1, exponents=2), Scaled(0.5))
    told = str(breccia.explain("dequantize", st))
    assert "values of scaled_by_a_factor,factor=0.5 are not codes times one FP32 scale for each block" in told


def test_a_cast_with_the_bytes_of_another_recipe_is_that_cast() -> None:
    recipe, x = NVFP4BlockScaling(order="scales_first"), wide((4, 64), seed=1, exponents=2)
    told = str(breccia.explain("cast", x, recipe))
    assert "-> flattened.cast" in told and "calls cast of nvfp4" in told
    st, out = breccia.cast(x, recipe, axis=-2), breccia.cast(x, recipe)
    assert st.recipe == recipe and st.axis == -2
    assert breccia.cast(x[::-1], recipe, out=out) is out and breccia.bytes_equal(out, breccia.cast(x[::-1].copy(), recipe))


# -- order, factor, zero-point ---------------------------------------------------------------------------------------


def test_scales_first_multiplies_the_two_scales_before_the_code() -> None:
    x = wide((8, 64), seed=5, exponents=6)
    first, last = (breccia.cast(x, NVFP4BlockScaling(order=order)) for order in ("scales_first", "codes_first"))
    assert first.data.tobytes() == last.data.tobytes() and first.scale.tobytes() == last.scale.tobytes()
    codes = np.array([E2M1.value(c) for c in range(16)], np.float32)[
        np.stack([first.data & 15, first.data >> 4], -1).reshape(8, 64)
    ]
    scales = first.scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * first.global_scale
    values = breccia.dequantize(first)
    assert (values == codes * np.repeat(scales, 16, axis=1)).all() and (values != breccia.dequantize(last)).any()
    assert first.recipe.format.fingerprint() != last.recipe.format.fingerprint()


def test_fingerprints_of_the_classic_formats_have_no_new_facts() -> None:
    """Computed from the text that docs/spec/fingerprints.md shows, with what it had before there were others."""
    for recipe in (INT4Scaling(), NVFP4BlockScaling()):
        fmt = recipe.format
        tables = {codec: {"bits": codec.bits, "table": list(codec.table)} for codec in (E4M3, fmt.element)}
        tables |= {codec: {"bits": codec.bits, "name": codec.name} for codec in (F16, F32)}
        levels = [[tables[level.codec], list(level.block), level.convention] for level in fmt.levels]
        facts = {"numerics": 1, "element": tables[fmt.element], "levels": levels, "offset": "none"}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        assert fmt.fingerprint() == hashlib.sha256(text.encode()).hexdigest()


def test_a_float_zero_point_is_subtracted_before_the_scale() -> None:
    x = wide((4, 32), seed=6, exponents=1)
    st = breccia.cast(x, INT4Scaling(16, signed=False, symmetric=False, offset="float_zero_point"))
    assert st.zero_point.dtype == np.float16 and (st.zero_point != np.rint(st.zero_point)).any()
    codes = np.stack([st.data & 15, st.data >> 4], -1).reshape(4, 32).astype(np.float32)
    zero, scale = (np.repeat(part.astype(np.float32), 16, axis=1) for part in (st.zero_point, st.scale))
    assert (breccia.dequantize(st) == (codes - zero) * scale).all()
    assert breccia.recipe("int4,offset=float_zero_point").format.offset == "float_zero_point"


def test_a_table_without_zero_is_for_recipes_that_are_only_decoded() -> None:
    table = Lookup("NO_ZERO", 1, None, "this test", (1.0, 2.0))

    @dataclass(frozen=True)
    class NoZero(breccia.ScalingRecipe):
        name: ClassVar[str] = "no_zero"
        source: ClassVar[str] = "this test"
        format = Format(table, (Level(F16, (1, 32)),))  # type: ignore[assignment]

    class NoZeroBeside(NoZero):
        levels = Level(E4M3, (1, 32))
        format = Format(INTEGERS[1, False], (levels,), alternative=Lookup("NO_ZERO", 1, None, "this test", (-1.0, 1.0)))  # type: ignore[assignment]

    for kind in (NoZero, NoZeroBeside):
        with pytest.raises(PluginError, match="has elements of NO_ZERO, which has no 0: declare `decode_only`"):
            _recipe_class(kind)
