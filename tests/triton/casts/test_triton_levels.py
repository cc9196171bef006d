"""Triton's decoder of codes of every width, of float zero-points, and of scales and biases of several levels.

In Triton's interpreter at small sizes, compiled for GPUs that are not here, and on a GPU. Values are those of the generic
algorithm, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("breccia_triton")

import torch
from marks import long_but, slow_but
from native_weights import integer
from records import LONG, OTHERS, READ, TYPES, coded
from triton_casts import DEVICE, ON_GPU, same, same_values
from triton_products import COMPILING, call_of, check, compiled, declared_here
from weights import in_torch, recipe_of, replaced, tensor

import breccia
from breccia import GGUFScaling, Integer, ScaledTensor
from breccia.backend import BF16, E2M1, E4M3, F16, F32, INT4, INT8, TENSOR, UINT4, CastOptions, components, reference
from breccia.codecs import IQ4, Lookup
from breccia.formats import Format, Level
from breccia.options import product_options
from breccia_triton import specs
from breccia_triton.casts import cast as triton_cast
from breccia_triton.casts import decode, plans
from breccia_triton.gemm.fused import matmul as fused_matmul
from breccia_triton.gemm.fused import plans as fused_plans

pytestmark = [
    pytest.mark.covering(1, 1),  # the interpreter takes seconds for some cases; `make slow` and a GPU run all
    *([pytest.mark.gpu] if ON_GPU else []),  # where there is one, every test runs on it
    # Triton's interpreter computes with NumPy, which warns of Inf - Inf and of NaN; GPUs do not.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

#: Rows and K around groups of codes, blocks, records and tiles.
SHAPES = ((3, 7), (2, 33), (9, 255), (5, 576), (1, 1030), (2, 3, 300))
#: Numbers of every magnitude, some of which share a code.
TABLES = {
    bits: Lookup(f"t{bits}", bits, None, "", (0.0, -3.5, 2.0**-20, 2.0**20, *(k / 8 for k in range(28)))[: 1 << bits])
    for bits in (2, 3, 4, 5)
}
#: Records of every kind, and biases of several levels beside scales of one.
RECORDS = {
    **READ,
    **LONG,
    **OTHERS,
    "biases alone": Format(UINT4, (Level(F16, (1, 32)),), "bias", (Level(BF16, (1, 32)), Level(integer(5, True), (1, 32)))),
    "codes of minifloats": Format(integer(3), (Level(F32, (1, 64)), Level(E4M3, (1, 16)))),
    "codes of a table": Format(integer(2, True), (Level(F16, (1, 96)), Level(TABLES[3], (1, 24)))),
    "under minifloats": Format(INT4, (Level(E4M3, (1, 64)), Level(integer(6), (1, 32)))),
}


def check_decoded(st: ScaledTensor, dtype: str = "float32", generic: bool = False) -> None:
    """The kernel, or for `generic` the algorithm that it leaves other tensors to, has the bits of the generic algorithm."""
    decode._calls.clear()
    found = decode.dequantize(st, product_options(dtype))
    assert [isinstance(call, str) for call in decode._calls.values()] == [generic], list(decode._calls.values())
    same_values(found, reference.dequantize(st, product_options(dtype)))


def recorded(fmt: Format, shape: tuple[int, ...], seed: int = 0, wild: bool = False) -> ScaledTensor:
    """Random codes and records. A scale of one level beside biases of several is FP16 around 2^-4."""
    if fmt.scale_record is not None:
        return in_torch(coded(fmt, shape, seed, wild), DEVICE)
    record = fmt.offset_record
    assert record is not None
    plain = tensor(replace(fmt, offset="none", offset_levels=()), *shape, seed)
    stored = np.random.default_rng(seed).integers(0, 120, (shape[0], plain.scale.shape[1] * record.nbytes), dtype=np.uint8)
    parts = {**components(plain), "zero_point": stored}
    return in_torch(
        ScaledTensor.from_parts(**parts, recipe=recipe_of(fmt), layout=plain.layout, axis=-1, padding=plain.padding), DEVICE
    )


def down(st: ScaledTensor) -> ScaledTensor:
    """The tensor with K first in memory."""
    parts = {name: part.mT.contiguous() if part.ndim > 1 else part for name, part in components(st).items()}
    turned = st.mT
    return ScaledTensor.from_parts(**parts, recipe=st.recipe, layout=turned.layout, axis=-2, padding=st.padding)


def formats_of_width(bits: int, offset: str) -> Iterator[Format]:
    """Formats of integers, under every float and blocks of several lengths."""
    for (k, codec), signed in itertools.product(((16, F16), (32, BF16), (12, F32), (None, F32), (160, F16)), (False, True)):
        if not (signed and (bits == 1 or offset == "zero_point")):
            yield Format(integer(bits, signed), (Level(codec, (1, k)),), offset)


@pytest.mark.long
@pytest.mark.parametrize("offset", ["none", "zero_point", "float_zero_point", "bias"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_of_every_width_are_decoded_bit_for_bit(bits: int, offset: str) -> None:
    for n, fmt in enumerate(formats_of_width(bits, offset)):
        st = in_torch(tensor(fmt, *SHAPES[:5][n % 5], n, wild=n % 3 == 1), DEVICE)
        check_decoded(st, ("float32", "bfloat16", "float16")[n % 3])
        check_decoded(st.mT)
        check_decoded(down(st))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_tables_are_looked_up_with_or_without_a_zero(bits: int, axis: int) -> None:
    for element in (TABLES[bits], IQ4) if bits == 4 else (TABLES[bits],):
        for shape in SHAPES[:5]:
            st = in_torch(tensor(Format(element, (Level(F16, (1, 32)),)), *shape), DEVICE)
            check_decoded(st if axis == -1 else down(st))


@pytest.mark.parametrize("wild", long_but([True], [False, True]))
@pytest.mark.parametrize("name", RECORDS)
def test_records_are_decoded_bit_for_bit(name: str, wild: bool) -> None:
    """Wild records hold NaN, Inf and subnormal numbers."""
    for seed, shape in enumerate(SHAPES[:5][wild::2] if RECORDS[name].scale_record is None else SHAPES[wild::2]):
        st = recorded(RECORDS[name], shape, seed, wild)
        check_decoded(st, ("float32", "bfloat16", "float16")[seed % 3])
        check_decoded(st.mT)
        check_decoded(down(st))


@pytest.mark.parametrize("kind", [*TYPES, "IQ4_NL", "TQ1_0", "TQ2_0"])
def test_every_type_of_gguf_is_decoded_in_every_dtype(kind: str) -> None:
    fmt = GGUFScaling(type=kind).format
    for dtype in ("float32", "bfloat16", "float16"):
        st = recorded(fmt, (7, 768)) if fmt.scale_record else in_torch(tensor(fmt, 7, 768), DEVICE)
        check_decoded(st, dtype)


@pytest.mark.parametrize("convention", ["multiplier", "divisor", "amax"])
def test_a_global_scale_may_multiply_scales_first(convention: str) -> None:
    for level in (Level(E4M3, (1, 16)), Level(F16, (1, 32))):
        fmt = Format(E2M1, (Level(F32, TENSOR, convention), level), order="scales_first")
        for wild in (False, True):
            check_decoded(in_torch(tensor(fmt, 9, 80, wild=wild), DEVICE))
    coded_levels = (Level(F32, TENSOR, convention), Level(F16, (1, 64)), Level(integer(6), (1, 16)))
    st = recorded(Format(INT4, coded_levels[1:]), (9, 200))
    parts = {**components(st), "global_scale": torch.tensor(3.7, device=DEVICE)}
    fmt = Format(INT4, coded_levels, order="scales_first")
    check_decoded(ScaledTensor.from_parts(**parts, recipe=recipe_of(fmt), layout=st.layout, axis=-1, padding=st.padding))


@pytest.mark.long
@pytest.mark.parametrize("spec", ["gguf", "gguf,type=Q6_K", "int,bits=3,group_size=32", "int,bits=5,group_size=24,offset=bias"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_views_slices_and_stacks_are_decoded(spec: str, axis: int) -> None:
    shape = (3, 2, 4, 264) if axis == -1 else (3, 2, 264, 6)
    x = torch.tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32)).to(DEVICE)
    st = reference.cast(x, breccia.recipe(spec), CastOptions(axis=axis))
    check_decoded(st)
    check_decoded(st.mT)
    check_decoded(st[1])
    check_decoded(st[:, 1])  # not contiguous
    check_decoded(breccia.stack([st[0], st[2]]))
    moved = replaced(st, scale=torch.stack([st.scale, st.scale], -1)[..., 0])  # not contiguous
    same_values(decode.dequantize(moved), reference.dequantize(st))
    turned = replaced(st, scale=st.scale.mT.contiguous().mT)
    same_values(decode.dequantize(turned), reference.dequantize(st))
    out = torch.empty(st.shape, dtype=torch.bfloat16, device=DEVICE)
    assert decode.dequantize(st, product_options("bfloat16", out=out)) is out
    same_values(out, reference.dequantize(st, product_options("bfloat16")))


def test_records_at_any_address_are_read() -> None:
    st = recorded(READ["Q6_K"], (9, 512))
    for part in ("data", "scale"):
        stored = getattr(st, part)
        room = torch.empty(stored.numel() + 1, dtype=torch.uint8, device=DEVICE)
        room[1:] = stored.reshape(-1)
        check_decoded(replaced(st, **{part: room[1:].view(stored.shape)}))


def test_an_empty_tensor_is_left_to_the_generic_algorithm() -> None:
    st = recorded(READ["Q4_K"], (2, 256))
    empty = ScaledTensor.from_parts(st.data[:0], st.scale[:0], st.recipe, st.layout, st.zero_point[:0], None, -1, 0)
    check_decoded(empty, generic=True)
    assert decode.dequantize(empty).shape == (0, 256)


@pytest.mark.parametrize(
    "spec", ["gguf", "gguf,type=Q3_K", "int,bits=3,group_size=32", "int,bits=2,group_size=16,symmetric=false"]
)
@pytest.mark.long
def test_they_are_cast_in_registers_to_another_recipe(spec: str) -> None:
    st = reference.cast(torch.randn(40, 256, device=DEVICE), breccia.recipe(spec))
    for other in ("mxfp8", "fp8_block", "int4,group_size=64", "fp8_current"):
        triton_cast._calls.clear()
        recipe = breccia.recipe(other)
        found = triton_cast.requantize(st, recipe)
        assert not any(isinstance(call, str) for call in triton_cast._calls.values())
        same(found, reference.requantize(st, recipe))


def check_product(x: torch.Tensor, b: ScaledTensor) -> None:
    """The kernel keeps the bound of sums."""
    fused_matmul._calls.clear()
    found = fused_matmul.fused_matmul(x, b)
    assert not any(isinstance(call, str) for call in fused_matmul._calls.values()), list(fused_matmul._calls.values())
    check(found, x, b)


def activations(k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(0).standard_normal((5, k)).astype(np.float32)).to(DEVICE, dtype)


@pytest.mark.long
@pytest.mark.parametrize("offset", ["none", "zero_point", "float_zero_point", "bias"])
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7])
def test_products_decode_codes_of_every_width(bits: int, offset: str) -> None:
    """Of K that groups of codes do not divide."""
    for dtype, signed in ((torch.bfloat16, False), (torch.float16, bits > 1 and offset != "zero_point")):
        st = in_torch(tensor(Format(integer(bits, signed), (Level(F16, (1, 32)),), offset), 24, 130), DEVICE)
        for b in (st.mT, down(st)):
            check_product(activations(130, dtype), b)


#: Formats whose blocks are steps of a product.
MULTIPLIED = {
    name: fmt for name, fmt in RECORDS.items() if fmt.scale.block[1] in (16, 32, 128) and fmt.global_scale is None
}  # fmt: skip


@pytest.mark.parametrize("name", MULTIPLIED)
@pytest.mark.long
def test_products_decode_scales_and_biases_of_several_levels(name: str) -> None:
    fmt = MULTIPLIED[name]
    st = recorded(fmt, (20, (fmt.block[1] or 0) + 24))
    for b in (st.mT, down(st)):
        check_product(activations(st.shape[-1]), b)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Q3_K", "Q4_K"])
def test_products_by_nan_inf_and_subnormal_scales_of_records_are_those_of_the_values(name: str) -> None:
    st = recorded(READ[name], (20, 512), wild=True)
    check_product(activations(512), st.mT)


@pytest.mark.parametrize("convention", ["multiplier", "divisor", "amax"])
def test_products_multiply_scales_first(convention: str) -> None:
    for level in (Level(E4M3, (1, 16)), Level(F16, (1, 32))):
        fmt = Format(E2M1 if level.codec == E4M3 else INT4, (Level(F32, TENSOR, convention), level), order="scales_first")
        check_product(activations(80), in_torch(tensor(fmt, 9, 80), DEVICE).mT)


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 7])
def test_casts_to_codes_that_no_kernel_packs_are_those_of_the_generic_algorithm(bits: int) -> None:
    recipe, x = breccia.INTScaling(bits, 32, signed=bits > 1), torch.randn(20, 96, device=DEVICE)
    triton_cast._calls.clear()
    found = triton_cast.cast(x, recipe)
    assert list(triton_cast._calls.values()) == [f"it does not pack codes of {bits} bits"]
    same(found, reference.cast(x, recipe))


REFUSED = {
    "offsets of coded scales from records only": Format(
        UINT4, (Level(F16, (1, 256)), Level(integer(6), (1, 32))), "zero_point"
    ),
    "does not read zero-points of E4M3": Format(UINT4, (Level(E4M3, (1, 16)),), "float_zero_point"),
    "does not read formats with factor, precision": Format(INT8, (Level(F32, (1, 32)),), factor=2.0, precision="bf16"),
    "reads tables of up to 32 numbers; t6 has 64": Format(
        Lookup("t6", 6, None, "", tuple(map(float, range(64)))), (Level(F16, (1, 32)),)
    ),
    "has no formula for codes of fine": Format(Integer("fine", 4, None, "", True, 30), (Level(F32, (1, 32)),)),
    "has no formula for codes of fine under": Format(
        INT4, (Level(F16, (1, 64)), Level(Integer("fine under", 4, None, "", False, 30), (1, 16)))
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_formats_are_refused_with_the_reason(reason: str) -> None:
    recipe = recipe_of(REFUSED[reason])
    assert reason in str(plans.readable(recipe, recipe.layout))


def test_nothing_is_cast_to_coded_scales_in_a_kernel() -> None:
    assert specs.spec_of(GGUFScaling()) == "it does not write formats with coded scales"
    st, recipe = recorded(READ["Q3_K"], (2, 256)), GGUFScaling(type="Q6_K")
    triton_cast._calls.clear()
    found = triton_cast.requantize(st, recipe)
    assert all(isinstance(call, str) for call in triton_cast._calls.values())
    same(found, reference.requantize(st, recipe))


def test_the_table_chooses_the_kernel_and_says_why_it_skips_others(monkeypatch: pytest.MonkeyPatch) -> None:
    declared_here(monkeypatch, "triton.dequantize", "triton.cast", "triton.weight_only", "triton.fp8_matmul")
    for st in (
        recorded(READ["Q4_K"], (4, 512)),
        in_torch(tensor(Format(integer(3), (Level(F16, (1, 32)),), "float_zero_point"), 4, 64), DEVICE),
    ):
        assert breccia.explain("dequantize", st, prefer="triton.dequantize").running == "triton.dequantize"
        same_values(breccia.dequantize(st, prefer="triton.dequantize"), reference.dequantize(st))
    st = recorded(READ["Q4_K"], (4, 512))
    assert "triton.weight_only" in breccia.explain("matmul", activations(512), st.mT, prefer="triton.weight_only").running
    refusals = {v.kernel.name: v.reason for v in breccia.explain("matmul", activations(512), st.mT).verdicts}
    assert refusals["triton.fp8_matmul"] == "does not know coded scales, which drawn has"
    refusals = {v.kernel.name: v.reason for v in breccia.explain("cast", activations(512), GGUFScaling()).verdicts}
    assert refusals["triton.cast"] == "does not know coded scales, which gguf has"


def test_products_refuse_what_has_no_step_or_no_kernel() -> None:
    narrow = recorded(RECORDS["blocks of 4"], (4, 128)).mT
    assert "blocks of 4 columns" in str(fused_plans.accepts_weight_only(call_of(activations(128), narrow)))
    fp8 = Format(E4M3, (Level(F16, (1, 128)), Level(integer(5, True), (1, 32))))
    assert fused_plans.way_of_fp8(fp8, fp8, True) == "coded scales of FP8 have no kernel here"
    levels = (Level(F32, TENSOR), Level(F16, (1, 64)), Level(integer(6), (1, 16)))
    assert "of coded scales" in str(fused_plans.way_of(Format(INT4, levels), 16, "bfloat16"))


def test_jax_arrays_are_decoded_by_the_same_kernels() -> None:
    jax_calls = pytest.importorskip("breccia_triton.jax.calls")
    from breccia.backend import Metadata, ops_of

    jnp = pytest.importorskip("jax.numpy")
    plain = coded(READ["Q4_K"], (3, 300), 0, False)
    arrays = {name: jnp.asarray(part) for name, part in components(plain).items()}
    st = ScaledTensor.from_parts(**arrays, recipe=plain.recipe, layout=plain.layout, axis=-1, padding=plain.padding)
    shapes = jax_calls.shapes_of(jax_calls.components(st))
    call = jax_calls.Decode(ops_of(st.data), shapes, Metadata.of(st), "float32")
    launch = jax_calls._decoding(call)
    assert launch.function.__name__ == "dequantize_kernel" and launch.arguments["x_zero_point"].type == "*u8"


COMPILED = (
    COMPILING
    + """
from breccia.backend import CastOptions, reference
from breccia_triton.casts import decode
from breccia_triton.gemm.fused import matmul as fused_matmul
from breccia_triton.gemm import contiguous
from breccia_triton import operands
from breccia_triton.tuning.choices import DEFAULT

operands.hardware = fused_matmul.hardware = lambda device: found
decode.Launcher = fused_matmul.Launcher = Launcher

def compiled(spec, axis, m):
    recipe = breccia.recipe(spec)
    st = reference.cast(torch.randn(64, 512) if axis == -1 else torch.randn(512, 64), recipe, CastOptions(axis=axis))
    Launcher(decode.prepared(st, "bfloat16", found, lambda key: DEFAULT))
    b = st.mT if axis == -1 else st
    x = torch.randn(m, 512).bfloat16()
    fused_matmul._new_call(contiguous.ContiguousOperand(x, False), contiguous.ContiguousOperand(b, True), None, "bfloat16")

for bits in (1, 3, 5, 7):
    compiled(f"int,bits={bits},group_size=32", -1, 1)
compiled("int,bits=2,group_size=64,symmetric=false", -2, 1)
for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
    compiled(f"gguf,type={kind}", -1, 1)
compiled("gguf", -2, 128)
print(made.count("dequantize_kernel"), "decoders and", made.count("fused_kernel"), "products compiled")
"""
)


@pytest.mark.long
@pytest.mark.parametrize("target", slow_but({"gfx942"}, ("sm90", "gfx942")))
def test_kernels_compile_for_gpus_that_are_not_here(target: str, tmp_path: Path) -> None:
    assert compiled(COMPILED, target, tmp_path) == "11 decoders and 11 products compiled\n"
