"""The Triton kernels: in Triton's interpreter at small sizes, compiled for GPUs that are not here, and on a GPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from marks import long_but, slow_but
from triton_casts import DEVICE, ON_GPU, SPECS, numbers, same, same_values

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("breccia_triton")

import ptx
import torch
import triton
import triton.language as tl
from recipes import declared
from repeated_codes import REPEATED
from triton_products import captured, compiled, without_waiting

import breccia
from breccia import Device, Integer, Minifloat, ScaledTensor, backend
from breccia.backend import E2M3, E8M0, F32, NUMPY, CastOptions, Metadata, components, f32, reference
from breccia.kernels.reference.packing import pack
from breccia.options import product_options
from breccia.rules import LINEAR, RCEIL
from breccia.tensors.components import with_parts
from breccia_triton import availability, numerics, operands, plugin
from breccia_triton.casts import cast as triton_cast
from breccia_triton.casts import decode, plans, prepare
from breccia_triton.facts import Hardware
from breccia_triton.launch import device as launch_device
from breccia_triton.launch import launcher as launch
from breccia_triton.launch.cache import Remembered

pytestmark = [
    pytest.mark.covering(1, 1),  # the interpreter takes seconds for some cases; `make slow` and a GPU run all
    *([pytest.mark.gpu] if ON_GPU else []),  # where there is one, every test runs on it
    # Triton's interpreter computes with NumPy, which warns of Inf - Inf and of NaN; GPUs do not.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


#: One of each kind of scales and codes.
FEW_SPECS = ("fp8_block", "fp8_current", "nvfp4", "mxfp6", "int4,symmetric=false,signed=false,group_size=32")


def check(x: Any, spec: Any, generic: bool = False, **options: Any) -> None:
    """The kernel and the generic algorithm write the same; `generic` says whether the kernel passes the call on to it."""
    recipe, given = backend.as_recipe(spec), CastOptions(**options)
    expected = reference.cast(x, recipe, given)

    def once() -> None:
        triton_cast._calls.clear()
        found = triton_cast.cast(x, recipe, given)
        assert [isinstance(call, str) for call in triton_cast._calls.values()] == [generic]
        same(found, expected)

    in_one_launch_and_in_two(once)


def in_one_launch_and_in_two(compare: Callable[[], None]) -> None:
    """Compare; and if one kernel waited for the amax of the tensor, again as for larger tensors, with a launch for it."""

    def waiting() -> bool:
        made = [each for call in triton_cast._calls.values() for each in getattr(call, "calls", (call,))]
        return any(isinstance(call, triton_cast.Call) and call.waits for call in made)

    compare()
    if waiting():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepare, "SMALL", 0)
            compare()
            assert not waiting()


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", SPECS)
def test_every_recipe_is_cast_bit_for_bit(spec: str, axis: int) -> None:
    check(numbers((40, 72), seed=1), spec, axis=axis)


@pytest.mark.parametrize("spec", ["fp8_row,fp8_format=E4M3FNUZ", "fp8_current,fp8_format=E5M2FNUZ"])
def test_fnuz_codes_are_those_of_the_generic_algorithm(spec: str) -> None:
    """The kernels round sign and magnitude apart, and here the code of -0 is NaN."""
    x = numbers((40, 72), seed=1)
    x[0] = -x[0].abs() * 2.0**-12
    check(x, spec, generic=True)
    check_decoded(reference.cast(x, breccia.recipe(spec)), generic=True)
    assert "has no formula for codes of E" in str(plans.readable(breccia.recipe(spec), breccia.recipe(spec).layout))


#: Codes of a table in which several stand for one number.
TABLE = declared(REPEATED, breccia.Level(F32, (1, 16)))


@pytest.mark.parametrize("options", [{}, {"axis": -2}, {"rounding": "stochastic", "seed": 7}], ids=str)
def test_of_several_codes_for_one_number_the_lowest_is_cast_and_all_are_decoded(options: dict[str, Any]) -> None:
    x = numbers((40, 64), seed=15)
    x[8:16] = torch.tensor([v + d for v in REPEATED.values for d in (0, 2**-4, -(2**-4), 2**-3)], device=DEVICE)
    x[8:16, ::16] = 2.0
    check(x, TABLE, **options)
    st = breccia.from_buffer(
        torch.arange(256, dtype=torch.uint8, device=DEVICE).reshape(8, 32),
        torch.ones(8, 4, device=DEVICE),
        TABLE,
        breccia.PerBlockK(16),
    )
    assert torch.equal(decode.dequantize(st), reference.dequantize(st))


#: Recipes of codes of less than a byte: all, and one of each kind.
NARROW = [s for s in SPECS if s.startswith(("mxfp6", "mxfp4", "nvfp4", "nf4", "int4"))]
OF_EACH_KIND = ("mxfp6", "mxfp4", "nvfp4", "nf4", "int4,symmetric=false,signed=false,group_size=32")


@pytest.mark.long
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", slow_but(OF_EACH_KIND, NARROW))
def test_whole_blocks_of_narrow_codes_are_cast_bit_for_bit(spec: str, axis: int) -> None:
    recipe = breccia.recipe(spec)
    for shape, dtype in (((32, 256), torch.float32), ((2, 128, 80), torch.bfloat16)):
        x = numbers(shape, seed=12, dtype=dtype)
        check(x, spec, axis=axis)
        whole = x.shape[axis] % (recipe.format.scale.block[-1] or 1) == 0
        assert [call.prepared.narrow for call in triton_cast._calls.values()] == [whole and "12" not in spec]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spec", ["nvfp4,two_level=false", "int4,group_size=16,scale_dtype=fp32", "nvfp4,scale_rule=mse", "mxfp6"]
)
def test_nothing_is_written_behind_a_tensor_whose_last_blocks_do_not_fill_a_thread(spec: str, dtype: Any) -> None:
    recipe = breccia.recipe(spec)
    x = numbers((7, 3 * (recipe.format.block[1] or 1)), seed=5, dtype=dtype)
    expected = reference.cast(x, recipe)
    count = expected.data.numel()
    memory = torch.full((count + 64,), 0x5A, dtype=torch.uint8, device=DEVICE)
    out = reference.cast(torch.ones_like(x), recipe)
    out = with_parts(out, components(out) | {"data": memory[:count].view(expected.data.dtype).view_as(expected.data)})
    same(triton_cast.cast(x, recipe, CastOptions(out=out)), expected)
    assert out.data.data_ptr() == memory.data_ptr() and (memory[count:] == 0x5A).all()


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="the GPU runs the instructions themselves")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", slow_but(OF_EACH_KIND, NARROW))
def test_branches_for_nvidia_gpus_write_the_same_bits(
    spec: str, axis: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    ptx.emulate(monkeypatch)
    for module in (triton_cast, operands):
        monkeypatch.setattr(module, "hardware", lambda device: Hardware(ptx=True))
    x = numbers((32, 256), seed=14, dtype=dtype)
    x[:12] = (torch.randn(12, 256) * 2.0**-126).to(dtype)  # scales and products at the ends of FP32
    x[12:14] = (3e38 * torch.randn(2, 256).sign()).to(dtype)
    check(x, spec, axis=axis)


#: Codecs at the ends of what forms allow: the finest steps, and codes that are FP32's largest exponents but for the shift.
EDGES = [
    Minifloat("fine E4M3", 8, None, "this test", 4, 3, 22, 448 * 2.0**-15, nan=0x7F),
    Minifloat("coarse E4M3", 8, None, "this test", 4, 3, 0, 448 * 2.0**7, nan=0x7F),
    Minifloat("fine E2M1", 4, None, "this test", 2, 1, 24, 6 * 2.0**-23),
    Minifloat("coarse E2M1", 4, None, "this test", 2, 1, 0, 12.0),
    Integer("coarse INT4", 4, None, "this test", True, -100),
]


@pytest.mark.skipif(ON_GPU, reason="it is of the interpreter, with and without the instructions of GPUs")
@pytest.mark.parametrize("level", [F32, E8M0], ids=lambda c: c.name)
@pytest.mark.parametrize(
    ("codec", "emulated"),  # instructions on four bytes at once are not emulated
    [(codec, emulated) for codec in EDGES for emulated in (False, True) if codec.bits == 4 or not emulated],
    ids=lambda c: getattr(c, "name", str(c)),
)
def test_codecs_at_the_ends_of_forms_are_cast_and_decoded_bit_for_bit(
    codec: Minifloat | Integer, level: Any, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if emulated:
        ptx.emulate(monkeypatch)
        for module in (triton_cast, operands):
            monkeypatch.setattr(module, "hardware", lambda device: Hardware(ptx=True))
    recipe = declared(codec, breccia.Level(level, (1, 16)), rule=RCEIL if level is E8M0 else LINEAR)
    x = numbers((32, 256), seed=14)
    check(x, recipe)
    st = reference.cast(x, recipe)
    same_values(decode.dequantize(st), reference.dequantize(st))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", SPECS)
def test_every_recipe_is_cast_bit_for_bit_on_a_gpu(spec: str, axis: int, dtype: Any) -> None:
    columns = axis == -2 and spec.startswith("int8,symmetric=false")  # whole columns have to fit a tile here
    check(numbers((1030, 784), seed=1, dtype=dtype), spec, generic=columns, axis=axis)
    check(numbers((256, 1024), seed=2, dtype=dtype), spec, axis=axis)
    check(numbers((3, 512, 384), seed=13, dtype=dtype), spec, axis=axis)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", ["fp8_block", "nvfp4", "mxfp6", "int4,group_size=32", "fp8_current", "int8"])
def test_halves_are_cast_as_their_fp32_values(spec: str, dtype: Any) -> None:
    check(numbers((34, 96), seed=2, dtype=dtype), spec)


@pytest.mark.long
@pytest.mark.parametrize("spec", ["fp8_block", "nvfp4", "mxfp4", "fp8_current", "fp8_row", "fp8_block,block_m=32,block_k=32"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_leading_axes_and_strides_are_taken(spec: str, axis: int) -> None:
    check(numbers((2, 3, 33, 64), seed=3), spec, axis=axis)
    check(numbers((64, 35), seed=4).mT, spec, axis=axis)
    check(numbers((3, 40, 80), seed=5)[:, ::2, 8:72], spec, axis=axis)
    check(numbers((33, 4, 64), seed=6).transpose(0, 1), spec, axis=axis)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("block_size", [4, 8, 20, 48])
def test_six_bit_codes_are_packed_in_blocks_of_any_whole_groups(block_size: int, axis: int) -> None:
    x, recipe = numbers((80, 160), seed=11), declared(E2M3, breccia.Level(F32, (1, block_size)))
    triton_cast._calls.clear()
    found = triton_cast.cast(x, recipe, CastOptions(axis=axis))
    assert [isinstance(call, str) for call in triton_cast._calls.values()] == [False]
    same(found, reference.cast(x, recipe, CastOptions(axis=axis)))


@pytest.mark.parametrize(
    "shape", [(1,), (7,), (5000,), (1, 1), pytest.param((1, 5000), marks=pytest.mark.slow), (3, 1), (129, 2)]
)
def test_shapes_of_few_elements_are_taken(shape: tuple[int, ...]) -> None:
    x = torch.linspace(-3, 5, int(np.prod(shape))).reshape(shape).to(DEVICE)
    check(x, "fp8_current")
    if len(shape) > 1:
        check(x, "mxfp8")
        check(x, "nvfp4", axis=-2)


@pytest.mark.parametrize("spec", ["fp8_block", "mxfp8", "mxfp6", "nvfp4", "int4,group_size=32", "nf4", "fp8_current", "int8"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_stochastic_rounding_draws_the_same_numbers(spec: str, axis: int) -> None:
    x = numbers((2, 33, 64), seed=7)
    check(x, spec, axis=axis, rounding="stochastic", seed=2**40 + 5)
    expected = reference.cast(x, breccia.recipe(spec), CastOptions(axis, rounding="stochastic", seed=2**40 + 5))
    for dtype in (torch.int32, torch.int64):  # in the memory of the device
        options = CastOptions(axis, rounding="stochastic", seed=torch.tensor([5, 2**8], dtype=dtype))
        same(triton_cast.cast(x, breccia.recipe(spec), options), expected)


def test_every_cast_reads_a_seed_of_two_words() -> None:
    seed = 2**63 + 2**31 + 7  # both words are negative as int32
    x, recipe = numbers((40, 64), seed=8), breccia.recipe("mxfp8")
    words = torch.tensor([seed & 0xFFFFFFFF, seed >> 32])
    of_int, of_words = (CastOptions(rounding="stochastic", seed=each) for each in (seed, words))
    for dtype in (torch.int64, torch.int32, torch.uint32):
        options = of_words.replace(seed=words.to(dtype) if dtype != torch.uint32 else words.to(torch.int32).view(torch.uint32))
        for one, other in zip(triton_cast.cast_pair(x, recipe, options), triton_cast.cast_pair(x, recipe, of_int), strict=True):
            same(one, other)
        same_values(triton_cast.cast_ste(x, recipe, options), triton_cast.cast_ste(x, recipe, of_int))
    history = torch.ones(1, device=DEVICE), torch.full((), 0.5, device=DEVICE)
    delayed = breccia.DelayedScaling(amax_history_len=3)
    results = [triton_cast.cast_and_record(x.nan_to_num(), delayed, *history, each) for each in (of_int, of_words)]
    same(results[0][0], results[1][0])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_seed_on_the_host_is_read_there() -> None:
    x = torch.randn(64, 256, device="cuda")
    for cast in (
        lambda seed: breccia.cast(x, "mxfp8", rounding="stochastic", seed=seed),
        lambda seed: breccia.AmaxHistory("fp8_delayed").cast(x, rounding="stochastic", seed=seed)[0],
    ):
        assert cast(torch.tensor([7, 0])).digest() == cast(7).digest() == cast(torch.tensor([7, 0], device="cuda")).digest()


def test_requantize_reads_a_seed_in_the_memory_of_the_device() -> None:
    st, recipe = breccia.cast(numbers((40, 64), seed=8), "mxfp8"), breccia.recipe("nvfp4")
    expected = triton_cast.requantize(st, recipe, CastOptions(rounding="stochastic", seed=2**40 + 5))
    same(triton_cast.requantize(st, recipe, CastOptions(rounding="stochastic", seed=torch.tensor([5, 2**8]))), expected)


@pytest.mark.parametrize("spec", ["fp8_block", "fp8_block,fp8_format=E5M2", "mxfp8", "mxfp4", "nvfp4", "int4,group_size=32"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_supplied_scales_are_used_and_faults_marked(spec: str, axis: int) -> None:
    x, recipe = numbers((40, 96), seed=8), breccia.recipe(spec)
    made = reference.cast(torch.nan_to_num(x, 1.0, 2.0, -2.0), recipe, CastOptions(axis=axis))
    check(x, spec, axis=axis, scale=made.scale if made.global_scale is None else made.global_scale)


@pytest.mark.parametrize("spec", ["nvfp4", "nvfp4,global_sense=amax", "nvfp4,global_sense=divisor"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 3e38, 0.0, -1.0, 1e-42, 2.0**-126])
def test_a_global_scale_that_is_no_scale_makes_scales_of_blocks_nan(spec: str, scale: float) -> None:
    """But for blocks of zeros, whose scale is zero under every global scale."""
    check(numbers((8, 64), seed=10), spec, scale=torch.tensor(scale, device=DEVICE))


@pytest.mark.parametrize("spec", ["fp8_delayed", "fp8_delayed,fp8_format=E5M2"])
def test_a_supplied_scale_for_the_tensor_needs_no_pass_for_the_amax(spec: str) -> None:
    x = numbers((40, 96), seed=9)
    check(x, spec, scale=torch.tensor(0.037, device=DEVICE))
    assert next(iter(triton_cast._calls.values())).passes == {}
    recipe = breccia.recipe(spec)
    same(triton_cast.cast(x, recipe, CastOptions(scale=0.037)), reference.cast(x, recipe, CastOptions(scale=0.037)))
    for scale in (float("nan"), 0.0, -1.0, 1e-42, float("inf")):
        check(x, spec, scale=torch.tensor(scale, device=DEVICE))


@pytest.mark.parametrize("spec", ["fp8_delayed", "fp8_delayed,fp8_format=E5M2"])
def test_every_bf16_number_is_cast_under_a_supplied_scale(spec: str) -> None:
    x = torch.arange(2**16, device=DEVICE).to(torch.int16).view(torch.bfloat16).reshape(256, 256)
    recipe = breccia.recipe(spec)
    for scale in (1.0, 0.037, 2.0**-120, 2.0**120):
        options = CastOptions(scale=torch.tensor(scale, device=DEVICE))
        expected = [reference.cast(x, recipe, replace(options, axis=axis)) for axis in (-1, -2)]
        same(triton_cast.cast(x, recipe, options), expected[0])
        for found, st in zip(triton_cast.cast_pair(x, recipe, options), expected, strict=True):
            same(found, st)


def test_results_are_written_into_out() -> None:
    x, recipe = numbers((33, 64), seed=10), breccia.recipe("nvfp4")
    out = triton_cast.cast(torch.ones_like(x), recipe)
    assert triton_cast.cast(x, recipe, CastOptions(out=out)) is out
    same(out, reference.cast(x, recipe))
    other = triton_cast.cast(x.mT.contiguous(), recipe)
    with pytest.raises(breccia.LayoutError, match="out= is .*, but the cast returns"):
        triton_cast.cast(x, recipe, CastOptions(out=other))


def test_kernels_write_only_into_tensors_of_their_device() -> None:
    shape, dtype, device = (4, 32), torch.float32, torch.empty(0, device=DEVICE).device
    assert operands.writable(torch.empty(shape, device=DEVICE), shape, dtype, device)
    elsewhere = torch.empty(shape, device="meta" if not ON_GPU else "cpu")
    for other in (elsewhere, torch.empty((4, 64), device=DEVICE)[:, ::2], torch.empty((4, 33), device=DEVICE)):
        assert not operands.writable(other, shape, dtype, device)


def test_nonfinite_numbers_are_refused_on_request() -> None:
    with pytest.raises(breccia.NonFiniteError, match="x holds NaN or Inf"):
        triton_cast.cast(numbers((33, 64)), breccia.recipe("mxfp8"), CastOptions(nonfinite="raise"))
    check(torch.ones((33, 64), device=DEVICE), "mxfp8", nonfinite="raise")


def test_other_calls_go_to_the_generic_algorithm() -> None:
    check(torch.ones((4, 0), device=DEVICE), "mxfp8", generic=True)
    check(numbers((40, 128)), "fp8_block,block_k=70000", generic=True)
    check(numbers((40, 128)), "int4,group_size=31", generic=True)
    with pytest.raises(breccia.UnsupportedError, match="cast takes float32, float16, bfloat16; got float64"):
        triton_cast.cast(torch.ones((4, 32), dtype=torch.float64, device=DEVICE), breccia.recipe("mxfp8"))


def check_decoded(st: ScaledTensor, dtype: str = "float32", generic: bool = False) -> None:
    decode._calls.clear()
    found = decode.dequantize(st, product_options(dtype))
    assert [isinstance(call, str) for call in decode._calls.values()] == [generic]
    same_values(found, reference.dequantize(st, product_options(dtype)))


def check_op(op: str, x: Any, spec: str, generic: bool = False, **options: Any) -> None:
    """An op of the Triton kernels and the generic one return the same; `generic` says whether other calls do it."""
    recipe, given = breccia.recipe(spec), CastOptions(**options)
    expected = getattr(reference, op)(x, recipe, given)

    def once() -> None:
        triton_cast._calls.clear()
        found = getattr(triton_cast, op)(x, recipe, given)
        made = [call for key, call in triton_cast._calls.items() if key[0] == op]
        assert [not isinstance(call, triton_cast.Call | triton_cast.Repeated) for call in made] == [generic]
        if op == "cast_ste":
            same_values(found, expected)
        else:
            for a, b in zip(*((y if isinstance(y, tuple) else (y,)) for y in (found, expected)), strict=True):
                same(a, b)

    in_one_launch_and_in_two(once)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", SPECS)
def test_every_recipe_is_decoded_bit_for_bit(spec: str, axis: int) -> None:
    st = reference.cast(numbers((40, 72), seed=21), breccia.recipe(spec), CastOptions(axis=axis))
    check_decoded(st)
    check_decoded(st.mT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "spec", ["fp8_block", "mxfp8", "nvfp4", "int4,symmetric=false,signed=false,group_size=32", "fp8_current"]
)
def test_values_are_rounded_once_to_the_dtype_of_the_result(spec: str, dtype: str) -> None:
    check_decoded(reference.cast(numbers((34, 96), seed=22), breccia.recipe(spec)), dtype)


@pytest.mark.long
@pytest.mark.parametrize("codec", ["E4M3", "E5M2", "E2M1", "E2M3", "E3M2"])
@pytest.mark.parametrize("scales", ["E8M0", "UE4M3", "UE5M3", "E4M3"])
def test_every_code_and_scale_is_decoded(codec: str, scales: str) -> None:
    element = getattr(backend, codec)
    codes = torch.arange(256, dtype=torch.int32).reshape(1, 256) & ((1 << element.bits) - 1)
    data = torch.tensor(pack(NUMPY, codes.numpy(), element))
    scale = torch.arange(256, dtype=torch.uint8).reshape(256, 1).expand(256, 8).contiguous()
    recipe = declared(element, breccia.Level(getattr(backend, scales), (1, 32)))
    st = ScaledTensor.from_parts(
        data.expand(256, -1).contiguous().to(DEVICE), scale.to(DEVICE), recipe, breccia.PerBlockK(32), None, None, -1, 0
    )
    check_decoded(st)


@pytest.mark.long
@pytest.mark.parametrize("spec", ["fp8_block", "nvfp4", "mxfp6", "mxfp4", "int4,group_size=32", "fp8_row", "fp8_current"])
def test_tensors_of_leading_axes_slices_and_stacks_are_decoded(spec: str) -> None:
    recipe = breccia.recipe(spec)
    for axis in (-1, -2):
        st = reference.cast(numbers((2, 3, 36, 64), seed=23), recipe, CastOptions(axis=axis))
        check_decoded(st)
        check_decoded(st[1])
        check_decoded(st[:, 1])
    if recipe.format.global_scale is None:
        each = [reference.cast(numbers((33, 64), seed=n), recipe) for n in range(3)]
        check_decoded(breccia.stack(each))


def test_parts_of_a_tensor_have_scales_of_any_alignment_and_stride() -> None:
    for spec in ("fp8_block", "int4,symmetric=false,signed=false,group_size=32"):
        st = reference.cast(numbers((4, 33, 64), seed=33), breccia.recipe(spec))
        decode._calls.clear()
        triton_cast._calls.clear()
        for part in (st[0], st[1], st[2]):  # of one shape, at other addresses
            same_values(decode.dequantize(part), reference.dequantize(part))
            other = breccia.recipe("mxfp8,fp8_format=E5M2")
            same(triton_cast.requantize(part, other), reference.requantize(part, other))
        spaced = torch.stack([st.scale, st.scale], -1)[..., 0]  # not contiguous
        moved = ScaledTensor.from_parts(st.data, spaced, st.recipe, st.layout, st.zero_point, None, -1, 0)
        same_values(decode.dequantize(moved), reference.dequantize(st))
        assert len(decode._calls) == 2


def test_values_are_written_into_out() -> None:
    st = reference.cast(numbers((33, 64), seed=24), breccia.recipe("nvfp4"))
    out = torch.empty((33, 64), dtype=torch.bfloat16, device=DEVICE)
    assert decode.dequantize(st, product_options("bfloat16", out=out)) is out
    same_values(out, reference.dequantize(st, product_options("bfloat16")))
    columns = torch.empty((64, 33), device=DEVICE).mT
    assert decode.dequantize(st, product_options("float32", out=columns)) is columns
    same_values(columns, reference.dequantize(st))
    with pytest.raises(breccia.ShapeError, match="out= must have shape"):
        decode.dequantize(st, product_options("float32", out=torch.empty((33, 65), device=DEVICE)))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", long_but(FEW_SPECS, SPECS))
def test_every_round_trip_is_that_of_cast_and_dequantize(spec: str, axis: int) -> None:
    check_op("cast_ste", numbers((40, 72), seed=25), spec, axis=axis)


@pytest.mark.long
@pytest.mark.parametrize("spec", ["fp8_block", "nvfp4", "fp8_delayed", "mxfp6"])
def test_round_trips_take_every_option(spec: str) -> None:
    x = numbers((2, 33, 64), seed=26, dtype=torch.bfloat16)
    check_op("cast_ste", x, spec, rounding="stochastic", seed=3)
    check_op("cast_ste", x.mT, spec)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", FEW_SPECS)
def test_round_trips_of_the_same_facts_share_one_call(spec: str, axis: int) -> None:
    x, recipe = numbers((40, 72), seed=37, dtype=torch.bfloat16), breccia.recipe(spec)
    triton_cast._calls.clear()
    for _ in range(2):
        found = triton_cast.cast_ste(x, recipe, CastOptions(axis=axis))
        same_values(found, reference.cast_ste(x, recipe, CastOptions(axis=axis)))
    assert [type(call) for call in triton_cast._calls.values()] == [triton_cast.Call]


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("spec", ["fp8_block", "fp8_current", "nvfp4", "mxfp6", "int4"])
def test_the_kernel_of_clipped_round_trips_runs_forward_and_their_gradient_stops_beyond_the_clip(spec: str) -> None:
    x = torch.randn((256, 512), device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    plain = breccia.cast_ste(x, spec)
    x.requires_grad_()
    y = breccia.cast_ste_clipped(x, spec, -1.0, 1.0)
    y.backward(torch.ones_like(y))
    same_values(y.detach(), plain)
    assert breccia.explain("cast_ste_clipped", x.detach(), breccia.recipe(spec)).running == "triton.cast_ste"
    assert torch.equal(x.grad != 0, (x.detach() >= -1) & (x.detach() <= 1))


@pytest.mark.parametrize("spec", long_but(FEW_SPECS, SPECS))
def test_both_orientations_are_written_from_one_read(spec: str) -> None:
    fmt = breccia.recipe(spec).format
    m, k = fmt.scale.block
    one_tile = (m is None) == (k is None) and (k or 1) & ((k or 1) - 1) == 0
    check_op("cast_pair", numbers((40, 72), seed=27), spec, generic=fmt.element.bits < 8 or not one_tile)


@pytest.mark.long
@pytest.mark.parametrize("spec", ["fp8_block", "fp8_row", "nvfp4", "mxfp6", "fp8_current"])
def test_pairs_take_leading_axes_strides_and_rounding(spec: str) -> None:
    two_casts = spec in ("nvfp4", "mxfp6", "fp8_row")
    check_op("cast_pair", numbers((2, 3, 33, 64), seed=28, dtype=torch.bfloat16), spec, two_casts)
    check_op("cast_pair", numbers((64, 36), seed=29).mT, spec, two_casts, rounding="stochastic", seed=9)


REQUANTIZED = [
    ("fp8_block", "mxfp8"), ("mxfp8", "fp8_block"), ("mxfp4", "nvfp4"), ("nvfp4", "fp8_block"),
    ("mxfp6", "int4,group_size=32"), ("int4,symmetric=false,signed=false,group_size=32", "mxfp6"),
    ("fp8_block,block_m=32,block_k=32", "fp8_block,block_m=3,block_k=20"),
    ("fp8_block,block_m=3,block_k=20", "nvfp4"), ("fp8_current", "fp8_row,fp8_format=E5M2"),
    ("fp8_row", "fp8_current"), ("nf4", "fp8_delayed"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("old", "new"), REQUANTIZED)
def test_requantize_decodes_and_casts_in_one_kernel(old: str, new: str, axis: int) -> None:
    st = reference.cast(numbers((2, 40, 80), seed=30), breccia.recipe(old), CastOptions(axis=axis))
    check_op("requantize", st, new)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fp8_block,block_m=128", "fp8_block"),
        ("fp8_block,block_m=16", "fp8_block,block_k=32"),
        ("fp8_block,block_m=4,block_k=48", "fp8_block,block_m=2,block_k=16"),
        ("fp8_row", "fp8_block,block_k=32"),
    ],
)
def test_requantize_to_finer_blocks_repeats_scales_and_keeps_codes(old: str, new: str, axis: int) -> None:
    for shape in ((256, 128), (2, 40, 72), (3, 128)):
        st = reference.cast(torch.randn(shape, device=DEVICE), breccia.recipe(old), CastOptions(axis=axis))
        check_op("requantize", st, new)
        (call,) = triton_cast._calls.values()
        found = triton_cast.requantize(st, breccia.recipe(new))
        assert isinstance(call, triton_cast.Repeated) and found.data.data_ptr() == st.data.data_ptr()
        into = reference.cast(torch.ones(shape, device=DEVICE), breccia.recipe(new), CastOptions(axis=axis))
        assert triton_cast.requantize(st, breccia.recipe(new), CastOptions(out=into)) is into
        same(into, found)


def test_requantize_keeps_codes_and_refuses_as_the_generic_algorithm() -> None:
    st = reference.cast(numbers((40, 64), seed=31), breccia.recipe("mxfp4"))
    check_op("requantize", st, "mxfp8", generic=True)
    with pytest.raises(breccia.InexactError):
        triton_cast.requantize(st, breccia.recipe("fp8_current"), CastOptions(require_exact=True))
    with pytest.raises(breccia.NonFiniteError):
        triton_cast.requantize(st, breccia.recipe("nvfp4"), CastOptions(nonfinite="raise"))


@pytest.mark.long
@pytest.mark.parametrize("shape", [(40, 160), (2, 130, 96), (256, 128)])
@pytest.mark.parametrize("storage", plugin.STORAGES)
@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4", "fp8_block", "int4,symmetric=false,signed=false,group_size=32"])
def test_scales_are_written_and_read_in_storages(spec: str, storage: str, shape: tuple[int, ...]) -> None:
    recipe, x = breccia.recipe(spec), numbers(shape, seed=32)
    if storage == "swizzle_128x4" and recipe.format.scale.codec.bits != 8:
        with pytest.raises(breccia.UnsupportedError, match="the order is one of bytes"):
            triton_cast.cast(x, recipe, CastOptions(storage=storage))
        return
    for axis in (-1, -2):
        triton_cast._calls.clear()
        found = triton_cast.cast(x, recipe, CastOptions(axis=axis, storage=storage))
        assert [isinstance(call, str) for call in triton_cast._calls.values()] == [False]
        expected = reference.cast(x, recipe, CastOptions(axis=axis)).to_storage(storage)
        same(found, expected)
        check_decoded(found)
    for found, axis in zip(triton_cast.cast_pair(x, recipe, CastOptions(storage=storage)), (-1, -2), strict=True):
        same(found, reference.cast(x, recipe, CastOptions(axis=axis)).to_storage(storage))
    again = triton_cast.requantize(expected, breccia.recipe("mxfp6"), CastOptions(storage="transposed"))
    same(again, reference.requantize(expected, breccia.recipe("mxfp6")).to_storage("transposed"))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spec", ["fp8_delayed", "fp8_delayed,margin=1,scale_rule=te", "fp8_delayed,fp8_format=E5M2,scale_rule=recip"]
)
def test_a_history_is_recorded_in_one_launch_with_or_without_a_cast(spec: str, dtype: Any) -> None:
    recipe: Any = replace(breccia.recipe(spec), amax_history_len=3)  # type: ignore[type-var]
    ordinary = torch.randn((2, 33, 64), generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    faulty = ordinary.clone()
    faulty[1, 2, 3] = float("nan")
    steps = [ordinary, ordinary * 4, ordinary * 0, faulty, ordinary.mT, ordinary[:, ::2], ordinary / 8]
    both: tuple[Any, Any] = (), 1.0
    one = expected = both
    for step, x in enumerate(steps):
        given = CastOptions(
            axis=-1 - step % 2, rounding="stochastic" if step == 4 else "nearest", seed=3 if step == 4 else None
        )
        st, *recorded = triton_cast.cast_and_record(x, recipe, *both, given)
        same(st, reference.cast(x, recipe, given.replace(scale=expected[1])))
        options = given.replace(axis=-1)
        *pair, amaxes, scale = triton_cast.cast_pair_and_record(x, recipe, *both, options)
        for found, axis in zip(pair, (-1, -2), strict=True):
            same(found, reference.cast(x, recipe, options.replace(axis=axis, scale=expected[1])))
        assert all(map(torch.equal, (amaxes.nan_to_num(), scale), (recorded[0].nan_to_num(), recorded[1])))
        both, one = (recorded[0], recorded[1]), triton_cast.record_amax(x, recipe, *one)
        expected = reference.record_amax(x, recipe, *expected)
        for found in (both, one):
            same_values(found[0], expected[0])
            same_values(found[1], expected[1])
    made = {key[0]: isinstance(call, str) for key, call in triton_cast._calls.items() if "record" in key[0]}
    assert made == dict.fromkeys(("record_amax", "cast_and_record", "cast_pair_and_record"), False)


@pytest.mark.parametrize("shape", [(3, 64, 192), (5, 33, 96)], ids=str)
@pytest.mark.parametrize("op", ["cast_and_record", "cast_pair_and_record"])
def test_a_program_of_several_tiles_stops_at_the_last(op: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in memory after the tensor is neither cast nor recorded."""
    monkeypatch.setattr(prepare, "_PROGRAMS", 1)
    triton_cast._calls.clear()
    count, recipe = math.prod(shape), breccia.recipe("fp8_delayed")
    memory = torch.full((count + 4 * shape[1] * shape[2],), 1e4, device=DEVICE)
    x = memory[:count].view(shape).copy_(torch.randn(shape))
    scale = torch.full((), 0.25, device=DEVICE)
    for axis in (-1, -2)[: 1 if "pair" in op else 2]:
        options = CastOptions(axis=axis)
        *tensors, amaxes, _ = getattr(triton_cast, op)(x, recipe, (), scale, options)
        assert amaxes.tolist() == [x.abs().max().item()]
        for found, along in zip(tensors, (axis, -2), strict=False):
            same(found, reference.cast(x, recipe, CastOptions(axis=along, scale=scale)))
    assert any(launch.constants["V"].steps > 1 for call in triton_cast._calls.values() for launch in call.launches)
    triton_cast._calls.clear()


def test_the_reason_names_what_is_not_supported() -> None:
    def reason(spec: str) -> str:
        lines = str(breccia.explain("cast", spec, on="torch:cuda")).splitlines()
        at = next(i for i, line in enumerate(lines) if "breccia_triton" in line)
        return lines[at + 1] if "->" not in lines[at] else lines[at]

    assert "blocks of 1x70000 do not fit a tile of 16384 elements" in reason("fp8_block,block_k=70000")
    assert "blocks are not whole groups of packed codes" in reason("int4,group_size=31")
    assert reason("nvfp4").startswith(" -> triton.cast")
    assert availability.available(Device("cuda", 0, (9, 0))) is None
    assert availability.available(Device("cuda", 0, (7, 5))) == "it needs compute capability 8.0; cuda:0 has 7.5"


@pytest.mark.skipif(ON_GPU, reason="the interpreter's environment variable is for machines without a GPU")
def test_without_triton_the_kernel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.targets, "installed", lambda module: False)
    assert availability.available(Device("cuda", 0, (9, 0))) == "triton is not installed; pip install triton"


# -- on a GPU only ---------------------------------------------------------------------------------------------------

CALLED = ["fp8_block", "fp8_current", "nvfp4", "mxfp6", "int4,symmetric=false,signed=false", "fp8_row"]


OTHER = breccia.recipe("mxfp8,fp8_format=E5M2")


def every_op(x: Any, spec: Any, history: Any) -> list[Any]:
    """The components of what every op returns."""
    recipe = breccia.recipe(spec) if isinstance(spec, str) else spec
    st = breccia.cast(x, recipe)
    pair = breccia.cast_pair(x, recipe)
    other = breccia.requantize(st, OTHER)
    delayed, history = history.cast(x)
    history = history.update(x)
    found = [part for y in (st, *pair, other, delayed) for part in components(y).values()]
    return [*found, breccia.dequantize(st, out_dtype="bf16"), breccia.cast_ste(x, recipe), history.amaxes, history.scale]


@pytest.mark.parametrize(
    "function", ["cast", "cast_pair", "record_amax", "cast_and_record", "cast_pair_and_record", "cast_ste"]
)
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_a_launch_passes_each_argument_at_its_place(function: str, layout: str) -> None:
    """The function that is compiled for a launch calls the launcher of Triton as its kernel's parameters say."""
    name = "fp8_delayed" if "record" in function else "int4,signed=false,symmetric=false,group_size=32"
    spec = "fp8_block" if function == "cast_pair" else name
    recipe, x = breccia.recipe(spec), torch.zeros((64, 512), device=DEVICE)[:, :256]
    x = x.contiguous() if layout == "contiguous" else x
    options = CastOptions(
        scale=torch.ones((), device=DEVICE) if function.endswith("and_record") else None,
        **({} if "record" in function else {"rounding": "stochastic", "seed": 1}),
    )
    made = triton_cast.prepared(function, x, recipe, -1, options, operands.hardware(x.device))
    ran = list[Any]()
    for prepared in made.launches:
        ran.clear()
        launcher = launch.Launcher(prepared)
        run = launcher._written_out(lambda *given: ran.append(given), ("kernel", 0, "metadata"))
        varying = [n for n in prepared.arguments if n not in prepared.fixed]
        assert {"x", "stride_row"} & set(varying) == ({"x"} if layout == "contiguous" else {"x", "stride_row"})
        run("stream", *[f"the {name}" for name in varying])
        integers = dict(zip([n for n in prepared.arguments if n not in varying], prepared.integers, strict=True))
        assert integers["rows"] * integers["columns"] == x.numel()
        parameters = prepared.function.arg_names
        given = {name: f"the {name}" for name in varying} | integers
        expected = [given.get(name) for name in parameters]
        assert ran == [(*prepared.programs, "stream", "kernel", 0, "metadata", *expected)]


class Launches:
    """A launcher that records launches: (the kernel, the stream, the values)."""

    made: ClassVar[list[Any]] = []

    def __init__(self, launched: Any) -> None:
        self.launch = launched

    def run(self, *given: Any) -> None:
        self.made.append((self.launch.function, *given))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """CPU tensors pass for those of CUDA device 0, and launches are recorded."""
    for module in (triton_cast, operands):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(triton_cast, "index_of", lambda device: 0)
    monkeypatch.setattr(triton_cast, "elsewhere", lambda index: False)
    monkeypatch.setattr(triton_cast, "stream_of", lambda index: 7)
    monkeypatch.setattr(triton_cast, "current_stream", lambda device: 7)
    monkeypatch.setattr(triton_cast, "Launcher", Launches)
    kept = launch_device._workspace(torch.device("cpu"))
    monkeypatch.setattr(triton_cast, "workspace", lambda device, stream: kept)
    monkeypatch.setattr(Launches, "made", [])
    Remembered.forget()
    yield Launches.made
    Remembered.forget()


@pytest.fixture(params=[prepare.SMALL, 0])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most elements that one launch casts under a scale of the tensor, on a device that holds 8 programs at a time."""
    monkeypatch.setattr(prepare, "SMALL", request.param)
    monkeypatch.setattr(triton_cast, "hardware", lambda device: Hardware(resident=8))
    return request.param


def parts_of(y: Any) -> list[Any]:
    return list(components(y).values()) if isinstance(y, ScaledTensor) else [y]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of the inputs of calls that took the short way."""
    taken = list[int]()

    def counted(way: Any) -> Any:
        return lambda call, address, *rest: taken.append(address) or way(call, address, *rest)

    for kind, name in ((triton_cast.Call, "plainly"), (triton_cast.Call, "recording"), (triton_cast.Pair, "plainly")):
        monkeypatch.setattr(kind, name, counted(getattr(kind, name)))
    return taken


SUPPLIED = CastOptions(scale=torch.tensor(0.5))
#: Op, options and recipes of calls that may be repeated.
CALLS = [
    ("cast", backend.DEFAULT, (*CALLED, "int8", "fp8_delayed", "nvfp4,two_level=false")),
    ("cast_ste", backend.DEFAULT, ("fp8_block", "fp8_current", "nvfp4", "int4")),
    ("cast_pair", backend.DEFAULT, ("fp8_block", "fp8_current", "nvfp4", "mxfp4")),
    *((op, backend.COLUMNS, ("fp8_block", "fp8_row", "int8", "nvfp4", "fp8_current")) for op in ("cast", "cast_ste")),
    *((op, SUPPLIED, ("fp8_delayed",)) for op in ("cast", "cast_ste", "cast_pair")),
    *((op, backend.DEFAULT, ("fp8_delayed,amax_history_len=3",)) for op in ("cast_and_record", "cast_pair_and_record")),
]


@pytest.mark.skipif(ON_GPU, reason="tensors of the CPU pass for those of a GPU")
@pytest.mark.parametrize(("op", "options", "spec"), [(op, options, spec) for op, options, specs in CALLS for spec in specs])
def test_a_repeated_call_launches_what_the_first_one_launched(
    op: str, options: CastOptions, spec: str, small: int, stand_in: list[Any], short: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way of a call that was prepared does what the general way does."""
    zeros, made = list[Any](), torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **given: zeros.append(made(*shape, **given)) or zeros[-1])
    x, recipe = torch.randn(1024 if options is backend.COLUMNS else 64, 256), breccia.recipe(spec)
    history = {"amaxes": torch.tensor([1.0, 2.0, 3.0]), "scale": torch.tensor(0.5)} if op.endswith("and_record") else {}
    work, amax = triton_cast.workspace(x.device, 7)
    known = {"x": x, "work": work, "amax": amax, **history} | ({} if options.scale is None else {"supplied": options.scale})

    def launched() -> tuple[list[Any], list[Any]]:
        """(The results, the launches with names in place of addresses)."""
        stand_in.clear()
        zeros.clear()
        given = getattr(triton_cast, op)(x, recipe, *history.values(), options)
        results = list(given) if isinstance(given, tuple) else [given]
        parts = [part for y in results for part in parts_of(y)]
        named = {part.data_ptr(): name for name, part in known.items()}
        for kind, each in (("result", parts), ("zeros", zeros)):
            named |= {part.data_ptr(): f"{kind} {n} {tuple(part.shape)}" for n, part in enumerate(each)}
        return results, [(function, *[named.get(value, value) for value in values]) for function, *values in stand_in]

    found, first = launched()
    assert not short
    again, repeated = launched()
    call = next(iter(triton_cast._calls.values()))
    assert set(short) == ({x.data_ptr()} if call.plain else set()) and first == repeated
    for _, stream, at, *others in first:
        assert (stream, at) == (7, "x") and all(type(other) is str or other < 4 for other in others), "addresses have names"
    written = {name for given in first for name in given if str(name).startswith("result")}
    assert len(written) == sum(len(parts_of(y)) for y in found)
    if isinstance(call, triton_cast.Call):
        assert len(first) == 1 + len(call.passes) and call.plain is (len(call.passes) < 2)
        waiting = small > 0 and spec in ("fp8_current", "fp8_delayed", "nvfp4") and options is not SUPPLIED
        assert call.waits is (waiting and not history and op != "cast_pair")
    for a, b in zip(found, again, strict=True):
        one, other = ([(part.shape, part.dtype, part.stride()) for part in parts_of(y)] for y in (a, b))
        assert one == other and (not isinstance(a, ScaledTensor) or Metadata.of(a) == Metadata.of(b))


@pytest.mark.skipif(ON_GPU, reason="tensors of the CPU pass for those of a GPU")
def test_calls_that_differ_from_a_repeated_cast_under_a_history_do_not_take_its_short_way(
    small: int, stand_in: list[Any], short: list[int]
) -> None:
    x, recipe = torch.randn(64, 256).bfloat16(), breccia.DelayedScaling(amax_history_len=3)
    amaxes, scale = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(0.5)
    for _ in range(2):
        triton_cast.cast_and_record(x, recipe, amaxes, scale)
    triton_cast.cast_and_record(x, recipe, amaxes, scale, CastOptions(rounding="stochastic", seed=1))
    triton_cast.cast_and_record(x.mT, recipe, amaxes, scale)
    triton_cast.cast_and_record(x.half(), recipe, amaxes, scale)
    assert short == [x.data_ptr()], "other options, views and dtypes take the long way at first"
    for unread in (amaxes.double(), torch.ones(6)[::2]):  # by the generic algorithm: nothing here runs a kernel
        _, *recorded = triton_cast.cast_and_record(x, recipe, unread, scale)
        for part, expected in zip(recorded, reference.record_amax(x, recipe, unread, scale), strict=True):
            assert torch.equal(part, expected)


@pytest.mark.skipif(ON_GPU, reason="tensors of the CPU pass for those of a GPU")
def test_calls_that_differ_from_a_repeated_cast_do_not_take_its_short_way(stand_in: list[Any], short: list[int]) -> None:
    x, recipe = torch.randn(64, 256), breccia.recipe("fp8_block")
    triton_cast.cast(x, recipe)
    triton_cast.cast(x, recipe)
    assert short == [x.data_ptr()]
    memory = torch.randn(64 * 256 + 1)
    others = {
        "strided": torch.randn(64, 512)[:, :256],
        "transposed": torch.randn(256, 64).mT,
        "another shape": torch.randn(128, 128),
        "another dtype": x.bfloat16(),
        "with the negative bit": torch._neg_view(x),
        "not aligned": memory[1:].view(64, 256),
    }
    for name, other in others.items():
        triton_cast.cast(other, recipe)
        assert len(short) == 1, name
    st = triton_cast.cast(x, recipe, CastOptions(axis=-2))
    triton_cast.cast(x, recipe, CastOptions(rounding="stochastic", seed=1))
    triton_cast.cast(x, recipe, CastOptions(axis=-2, out=st))
    triton_cast.cast(x, breccia.recipe("fp8_block,block_k=32"))
    delayed = breccia.recipe("fp8_delayed")
    triton_cast.cast(x, delayed, SUPPLIED)
    triton_cast.cast(x, delayed, CastOptions(scale=0.5))
    triton_cast.cast(x, delayed, SUPPLIED.replace(rounding="stochastic", seed=1))
    assert len(short) == 1
    with pytest.raises(breccia.UnsupportedError, match="x is a sparse tensor"):
        triton_cast.cast(x.to_sparse(), recipe)
    Remembered.forget()
    triton_cast.cast(x, recipe)
    assert len(short) == 1, "settings changed: the call is prepared anew"
    triton_cast.cast(x, recipe)
    assert len(short) == 2


def test_what_a_kernel_leaves_to_the_next_one_belongs_to_a_thread_and_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another thread's launch between the two would change it."""
    capturing, zeros, synchronized = [False], torch.zeros, list[Any]()
    monkeypatch.setattr(launch_device, "_workspaces", launch_device._Workspaces())
    monkeypatch.setattr(launch_device, "_unused", launch_device._Unused())
    monkeypatch.setattr(launch_device._Unused, "COUNT", 2)
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    device = torch.device("cuda", 0)

    def number(stream: int, device: torch.device = device) -> Any:
        work, amax = launch_device.workspace(device, stream)
        assert work.tolist() == [0, 0] and work.data_ptr() % 16 == amax.data_ptr() % 16 == 0
        assert amax.data_ptr() >= work.data_ptr() + work.nbytes
        return amax

    mine = number(1)
    assert number(1) is mine
    elsewhere: list[Any] = [number(2), number(1, torch.device("cuda", 1))]
    thread = threading.Thread(target=lambda: elsewhere.append(number(1)))
    thread.start()
    thread.join()
    capturing[0] = True
    graphs = [number(1) for _ in range(4)]
    assert len({x.data_ptr() for x in (mine, *elsewhere, *graphs)}) == 8, "and each call in a graph, on any stream"
    first, second, *others = (x.untyped_storage().data_ptr() for x in graphs)
    assert first == second and first not in others, "two were zeros before the capture; the graph fills the others"
    assert synchronized == [device, torch.device("cuda", 1)]


def same_parts(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        x, y = (part.reshape(-1).contiguous().view(torch.uint8) for part in (a, b))
        assert torch.equal(x, y)


@pytest.fixture
def on_gpu() -> Any:
    if not ON_GPU:
        pytest.skip("needs a GPU")
    return torch.randn((256, 512), device="cuda", dtype=torch.bfloat16)


@triton.jit
def _reciprocals(x, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, numerics.reciprocal(tl.load(x + at), True))


@triton.jit
def _quotients(x, out, B: tl.constexpr, INVERSE: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, numerics.quotient(tl.load(x + at), B, INVERSE, True))


def every_number(first: int, last: int, at_once: int = 1 << 26) -> Iterator[Any]:
    """FP32 numbers with bits from `first` up to `last`, in parts of whole programs."""
    for start in range(first, last, at_once):
        yield torch.arange(start, min(start + at_once, last), dtype=torch.int32, device="cuda").view(torch.float32)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_every_reciprocal_is_rounded_as_ieee_754_says() -> None:
    different = 0
    for x in every_number(0x00800000, 0x7E800000):  # 2^-126 up to 2^126
        found = torch.empty_like(x)
        _reciprocals[(x.numel() // 1024,)](x, found, 1024, enable_fp_fusion=False)
        different += int((found.view(torch.int32) != (1 / x).view(torch.int32)).sum())
    assert different == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("divisor", [448.0, 57344.0, 6.0, 2688.0, 7.0, 127.0, 28.0])
def test_every_quotient_by_a_largest_code_is_rounded_as_ieee_754_says(divisor: float) -> None:
    different = 0
    least = np.float32(divisor * 2.0**-126).view(np.int32).item() & ~1023
    for x in every_number(least + 1024, 0x7F800000):  # quotients from 2^-126 on
        found, inverse = torch.empty_like(x), f32(1 / divisor)
        _quotients[(x.numel() // 1024,)](x, found, divisor, inverse, 1024, enable_fp_fusion=False)
        different += int((found.view(torch.int32) != (x / torch.full_like(x, divisor)).view(torch.int32)).sum())
    assert different == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("spec", CALLED)
def test_no_call_waits_for_the_gpu(spec: str, on_gpu: Any) -> None:
    history = breccia.AmaxHistory("fp8_delayed").update(on_gpu)  # type: ignore[arg-type]
    every_op(on_gpu, spec, history)
    without_waiting(lambda: every_op(on_gpu, spec, history))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", CALLED)
def test_calls_are_captured_in_cuda_graphs(spec: str, on_gpu: Any) -> None:
    x, history = on_gpu.clone(), breccia.AmaxHistory("fp8_delayed").update(on_gpu)  # type: ignore[arg-type]
    every_op(x, spec, history)
    graph, found = captured(lambda: every_op(x, spec, history))
    for n in range(3):
        x.copy_(torch.randn_like(x) * 4.0**n)
        graph.replay()
        same_parts(found, every_op(x, spec, history))


@pytest.mark.gpu
def test_calls_run_on_the_current_stream(on_gpu: Any) -> None:
    x, history = on_gpu, breccia.AmaxHistory("fp8_delayed").update(on_gpu)  # type: ignore[arg-type]
    expected = {spec: every_op(x, spec, history) for spec in CALLED}
    streams = [torch.cuda.Stream() for _ in range(4)]
    later = torch.zeros_like(x)
    torch.cuda.synchronize()
    for n, spec in enumerate(CALLED * 4):
        stream = streams[n % 4]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            mine = later.clone()
            mine.copy_(x)  # a call on another stream would read zeros
            found = every_op(mine, spec, history)
        stream.synchronize()
        same_parts(found, expected[spec])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
@pytest.mark.parametrize("spec", ["fp8_block", "nvfp4"])
def test_compiled_graphs_run_the_kernels(spec: str, on_gpu: Any) -> None:
    history = breccia.AmaxHistory("fp8_delayed").update(on_gpu)  # type: ignore[arg-type]

    recipe = breccia.recipe(spec)

    def steps(x: Any) -> list[Any]:
        return [y.float() for y in every_op(x, recipe, history)]

    for a, b in zip(torch.compile(steps, fullgraph=True)(on_gpu), steps(on_gpu), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", ["fp8_block", "fp8_current", "nvfp4", "mxfp6", "fp8_row"])
def test_tensors_beyond_two_billion_elements(spec: str, axis: int, on_gpu: Any) -> None:
    recipe, rows = breccia.recipe(spec), 2**31 // 8192 + 512
    x = torch.empty((rows, 8192), device="cuda", dtype=torch.bfloat16)
    x.view(-1, 512, 8192).copy_(torch.randn((512, 8192), device="cuda", dtype=torch.bfloat16))
    tail = x[-512:].clone()  # rows repeat, so that it has the amax of the tensor and of every column
    st, small = breccia.cast(x, recipe, axis=axis), breccia.cast(tail, recipe, axis=axis)
    same(st[-512:], small)
    back = breccia.dequantize(st, out_dtype="bf16")
    same_values(back[-512:], breccia.dequantize(small, out_dtype="bf16"))
    assert same_values(breccia.cast_ste(x, recipe, axis=axis)[-512:], back[-512:]) is None


COMPILED = """
import sys, torch, breccia
from breccia.backend import reference
from breccia_torch.ops import TORCH
from triton.backends.compiler import GPUTarget
from breccia_triton.casts import decode, prepare
from breccia_triton.launch import launcher as launch
from breccia_triton import operands
from breccia_triton.facts import Array, Hardware
from breccia_triton import specs
from breccia_triton.specs import Unsupported

name = sys.argv[1]
target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[2:]), 32)
hardware = Hardware() if name.startswith("gfx") else Hardware(True, int(name[2:]) >= 89)
operands.hardware = lambda device: hardware
made, kernels = [], []

def compiled(launched):
    kernels.append((launch.Launcher(launched, target).compiled, launched.warps))
    made.append(launched.function.__name__)

def prepared(op, recipe, given, axis=-1, options=prepare.Options(), turns=False):
    call = prepare.Prepared(op, recipe, given, axis, options, TORCH.dtypes(recipe.format), hardware, turns=turns)
    for each in call.passes.values():
        compiled(each.launch)
    compiled(call.launch)

x = Array.dense((256, 512), "bfloat16")
for spec in ("fp8_block", "mxfp6", "nvfp4", "int4,symmetric=false,signed=false", "nf4"):
    recipe = breccia.recipe(spec)
    for axis in (-1, -2):
        prepared("cast", recipe, x, axis, prepare.Options(stochastic=spec == "mxfp6"))
    prepared("cast_ste", recipe, x)
    try:
        prepared("cast_pair", recipe, x)
    except Unsupported as e:
        assert str(e) == "two casts are faster"
    st = reference.cast(torch.ones((256, 512), dtype=torch.bfloat16), recipe)
    spec = specs.needed(prepare.readable(recipe, st.layout))
    compiled(prepare.decoding(operands.codes_of(st, spec, True), "bfloat16"))
    prepared("requantize", breccia.recipe("mxfp8,fp8_format=E5M2"), operands.codes_of(st, spec, False))
if hardware.ptx:
    hardware = Hardware(True, hardware.fp8, resident=8 * 100)
    for spec in ("fp8_current", "nvfp4"):
        prepared("cast", breccia.recipe(spec), x)
    assert made[-2:] == ["waiting_cast_kernel"] * 2
for axis in (-1, -2):
    prepared("cast", breccia.recipe("mxfp4"), x, axis)
    prepared("cast", breccia.recipe("int4,symmetric=false,signed=false,offset=bias"), x, axis)
for spec in ("fp8_block", "mxfp4", "mxfp6"):
    prepared("cast", breccia.recipe(spec), x, -2, turns=True)
for spec in ("fp8_block,block_m=128", "mxfp4"):
    prepared("cast_pair", breccia.recipe(spec), x, turns=True)
assert {kernel.metadata.warp_size for kernel, _ in kernels} == {target.warp_size}
assert all(kernel.metadata.num_warps == max(1, 32 * warps // target.warp_size) for kernel, warps in kernels)
print(len(made), "kernels compiled")
"""


@pytest.mark.slow  # test_triton_levels.py compiles fewer kernels for another GPU
@pytest.mark.parametrize("target", ("sm80", "sm89", "sm90", "sm100", "gfx942", "gfx950"))
def test_kernels_compile_for_gpus_that_are_not_here(target: str, tmp_path: Path) -> None:
    assert f"{40 if target.startswith('sm') else 38} kernels compiled" in compiled(COMPILED, target, tmp_path)
