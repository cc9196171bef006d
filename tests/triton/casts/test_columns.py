"""Casts along axis -2 on CUDA: codes of a block lie next to each other, views are cast as they lie, products copy nothing."""

from __future__ import annotations

from typing import Any

import pytest
from triton_casts import DEVICE, ON_GPU, numbers, same, same_values

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("breccia_triton")

import torch

import breccia
from breccia import backend
from breccia.backend import CastOptions, reference
from breccia_triton import operands
from breccia_triton.casts import cast as triton_cast
from breccia_triton.casts import decode
from breccia_triton.gemm.fp8 import matmul as fp8_matmul
from breccia_triton.gemm.scaled_mm import scaled_mm

pytestmark = [
    pytest.mark.covering(1, 1),  # the interpreter takes seconds for some cases; `make slow` and a GPU run all
    *([pytest.mark.gpu] if ON_GPU else []),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

DOWN, ALONG = CastOptions(axis=-2), CastOptions()
#: One of each kind: blocks, tiles, tensor, whole columns; 8, 6 and 4 bits; floats, integers, tables; offsets; two levels.
SPECS = [
    "fp8_block,block_k=32",
    "fp8_block,block_m=32,block_k=32",
    "fp8_current",
    "fp8_row",
    "mxint8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
    "int4,group_size=32",
    "int4,symmetric=false,signed=false,group_size=32",
    "nf4,block_size=32",
]


def adjacent(st: Any) -> bool:
    """Whether the codes of a block lie next to each other."""
    return (st.data.mT if st.axis == -2 else st.data).is_contiguous()


def calls() -> list[Any]:
    """The calls that were prepared."""
    return [each for call in triton_cast._calls.values() for each in getattr(call, "calls", (call,))]


@pytest.mark.parametrize("shape", [(64, 32), (2, 36, 24)], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_codes_of_a_block_lie_next_to_each_other_in_both_orientations(spec: str, shape: tuple[int, ...]) -> None:
    x, recipe = numbers(shape, seed=41), breccia.recipe(spec)
    for st in (triton_cast.cast(x, recipe, DOWN), *triton_cast.cast_pair(x, recipe)):
        assert adjacent(st)
        same(st, reference.cast(x, recipe, CastOptions(axis=st.axis)))


@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4", "int4,group_size=32"])
def test_four_bits_are_cast_both_ways_from_one_read(spec: str) -> None:
    triton_cast._calls.clear()
    pair = triton_cast.cast_pair(numbers((64, 96), seed=42), breccia.recipe(spec))
    (call,) = triton_cast._calls.values()
    assert isinstance(call, triton_cast.Call)
    assert len(call.launches) == 1 + (spec == "nvfp4"), "and a pass for the amax of the tensor"
    for st, axis in zip(pair, (-1, -2), strict=True):
        same(st, reference.cast(numbers((64, 96), seed=42), breccia.recipe(spec), CastOptions(axis=axis)))


@pytest.mark.long
@pytest.mark.parametrize("spec", ["fp8_block,block_k=32", "fp8_current", "fp8_row", "nvfp4"])
def test_a_transposed_view_is_read_as_it_lies(spec: str) -> None:
    x, recipe = numbers((3, 48, 32), seed=43).mT, breccia.recipe(spec)
    triton_cast._calls.clear()
    for options in (ALONG, DOWN, CastOptions(axis=-2, rounding="stochastic", seed=5)):
        found = triton_cast.cast(x, recipe, options)
        assert adjacent(found)
        same(found, reference.cast(x, recipe, options))
    for st in triton_cast.cast_pair(x, recipe):
        assert adjacent(st)
        same(st, reference.cast(x, recipe, CastOptions(axis=st.axis)))
    same_values(triton_cast.cast_ste(x, recipe), reference.cast_ste(x, recipe))
    assert all(call.flat_shape is None and not call.strided for call in calls())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("spec", ["fp8_current", "fp8_delayed", "nvfp4", "fp8_row", "fp8_block,block_m=32,block_k=32"])
def test_a_transposed_view_of_many_matrices_takes_scales_of_each(spec: str, count: int) -> None:
    """A scale per matrix has the leading axes alone: they are not turned with the matrices."""
    x, recipe = numbers((2, count, 32, 64), seed=47).mT, breccia.recipe(spec)
    for axis in (-1, -2):
        own = reference.cast(x, recipe, CastOptions(axis=axis))
        scale = torch.arange(1, 2 * count + 1, dtype=torch.float32, device=x.device).reshape(2, count)
        if own.global_scale is None and own.scale.ndim:
            scale = own.scale * scale[:, :, None, None]
        options = CastOptions(axis=axis, scale=scale)
        same(triton_cast.cast(x, recipe, options), reference.cast(x, recipe, options))
        same_values(triton_cast.cast_ste(x, recipe, options), reference.cast_ste(x, recipe, options))
        if own.global_scale is not None or not own.scale.ndim:
            pair, expected = (
                triton_cast.cast_pair(x, recipe, options.replace(axis=-1)),
                (options.replace(axis=a) for a in (-1, -2)),
            )
            for found, of in zip(pair, expected, strict=True):
                same(found, reference.cast(x, recipe, of))


def test_a_transposed_view_takes_scales_outputs_and_histories() -> None:
    x, recipe = numbers((64, 32), seed=44).mT, breccia.recipe("fp8_block,block_k=32")
    scale = reference.cast(3 * x, recipe).scale
    expected = reference.cast(x, recipe, CastOptions(scale=scale))
    out = triton_cast.cast(x, recipe)
    assert triton_cast.cast(x, recipe, CastOptions(scale=scale, out=out)) is out
    same(out, expected)
    delayed: Any = breccia.recipe("fp8_delayed")
    x = x.nan_to_num(1.0, 2.0, -3.0).clamp(-9, 9)
    amaxes, scale = torch.ones(1, device=DEVICE), torch.full((), 0.25, device=DEVICE)
    found, *recorded = triton_cast.cast_and_record(x, delayed, amaxes, scale)
    same(found, reference.cast(x, delayed, CastOptions(scale=scale)))
    for ours, theirs in zip(recorded, reference.record_amax(x, delayed, amaxes, scale), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("spec", ["fp8_delayed", "fp8_block,block_m=32,block_k=32", "nvfp4"])
def test_a_pair_takes_one_scale_for_both(spec: str) -> None:
    x, recipe = numbers((64, 96), seed=45), breccia.recipe(spec)
    other = reference.cast(2 * x, recipe, DOWN)
    scale = other.scale if other.global_scale is None else other.global_scale
    for given in (x, x.mT.contiguous().mT):
        pair = triton_cast.cast_pair(given, recipe, CastOptions(scale=scale))
        for st, axis in zip(pair, (-1, -2), strict=True):
            same(st, reference.cast(x, recipe, CastOptions(axis=axis, scale=scale)))


def test_a_pair_refuses_a_scale_that_fits_one_of_them() -> None:
    x = numbers((64, 96), seed=46)
    scale = breccia.cast(x, "mxfp8").scale
    with pytest.raises(breccia.LayoutError, match=r"must have shape \(2, 96\)"):
        breccia.cast_pair(x, "mxfp8", scale=scale)
    with pytest.raises(breccia.LayoutError, match=r"must have shape \(2, 96\)"):
        triton_cast.cast_pair(x, breccia.recipe("mxfp8"), CastOptions(scale=scale))


@pytest.mark.parametrize("spec", ["mxfp8", "fp8_block,block_m=32,block_k=32", SPECS[-2]])
def test_kernels_read_the_scales_of_columns_as_they_lie(spec: str) -> None:
    columns = triton_cast.cast(numbers((64, 96), seed=47), breccia.recipe(spec), DOWN)
    rows = columns.mT
    read = {part.data_ptr() for part in operands.components_of(rows)}
    assert read == {part.data_ptr() for part in backend.components(rows).values()}
    same_values(decode.dequantize(columns), reference.dequantize(columns))
    same(triton_cast.requantize(columns, breccia.recipe("fp8_row")), reference.requantize(columns, breccia.recipe("fp8_row")))


@pytest.mark.parametrize("spec", ["fp8_block", "fp8_block,block_m=128", "fp8_current", "fp8_row"])
def test_products_of_columns_copy_no_operand(spec: str) -> None:
    columns, copies = triton_cast.cast(numbers((256, 132), seed=48), breccia.recipe(spec), DOWN), list[Any]()
    for transposed, st in ((True, columns), (False, columns.mT)):
        side = fp8_matmul.Fp8Operand(st, transposed, copies, False)
        assert copies == []
        assert (side.data, side.scale) == (columns.data.data_ptr(), columns.scale.data_ptr())
        assert side.pitch == (132 if spec == "fp8_block" else 0)


def test_cublas_reads_the_scales_of_columns_as_they_lie() -> None:
    """Other scales are copied to the same order."""
    columns = triton_cast.cast(numbers((256, 132), seed=50), breccia.recipe("fp8_block"), DOWN)
    scale = columns.mT.scale
    assert scaled_mm.rows_adjacent(scale).data_ptr() == columns.scale.data_ptr()
    copy = scaled_mm.rows_adjacent(scale.contiguous())
    assert copy.stride() == (1, 132)
    assert torch.equal(copy.view(torch.int32), scale.view(torch.int32)), "NaN among them"


def test_an_operand_in_another_order_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, copied = list[Any](), torch.Tensor.clone
    st = triton_cast.cast(numbers((132, 256), seed=49), breccia.recipe("fp8_block"))
    given = breccia.from_buffer(st.data.mT.contiguous().mT, st.scale, st.recipe, st.layout)
    monkeypatch.setattr(torch.Tensor, "clone", lambda x, **options: made.append(x) or copied(x, **options))
    copies = list[Any]()
    side = fp8_matmul.Fp8Operand(given, False, copies, False)
    assert len(made) == 1
    assert side.data == copies[0].data_ptr()
    assert torch.equal(copies[0].view(torch.uint8), st.data.view(torch.uint8))
