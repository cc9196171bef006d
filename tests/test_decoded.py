"""Products of decoded codes without a GPU: which calls, how they are compiled, and what a launch is told."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weights import FORMATS, tensor

import breccia
from breccia_triton import decoded_plans as plans
from breccia_triton import weight_plans
from breccia_triton.cuda import compiler, fp8_plans
from breccia_triton.decoded_plans import Form

STORAGE, NAME = "mma_16x128", "cuda.weight_only_decoded"
CUDA = Path(compiler.__file__).parent


def operand_of(name: str) -> weight_plans.Operand:
    found = weight_plans.operand_of(FORMATS[name], FORMATS[name].scale.block)
    assert isinstance(found, weight_plans.Operand)
    return found


def form_of(name: str) -> Form:
    found = plans.form_of(operand_of(name), FORMATS[name].scale.block)
    assert isinstance(found, Form)
    return found


def test_scales_of_rows_and_tensors_and_those_in_the_codes_multiply_whole_sums() -> None:
    whole = {name for name in FORMATS if form_of(name).scales == fp8_plans.OUTER}
    assert whole == {
        "int4-row", "int8-row", "e4m3-tensor", "e5m2-row", "mxfp4", "mxfp8", "mxfp8-e5m2",
        "nvfp4", "nvfp4-one", "nvfp4-divisor", "nvfp4-amax",
    }  # fmt: skip
    for name, group in (
        ("int4-128", 128),
        ("int4-256", 128),
        ("e4m3-square", 128),
        ("int4-64", 64),
        ("uint4", 32),
        ("int4-16", 16),
    ):
        form = form_of(name)
        assert form.group == group
        # A promotion of a step's part sees the columns of one scale.
        assert form.step == group * form.pieces and form.levels(648) == -(-648 // group)
    assert form_of("nvfp4").levels(648) == 1


def test_global_scales_beside_scales_of_sums_have_no_place() -> None:
    from breccia.codecs import E2M1, F16, F32
    from breccia.formats import TENSOR, Format, Level

    fmt = Format(E2M1, (Level(F32, TENSOR), Level(F16, (1, 32))))
    found = weight_plans.operand_of(fmt, (1, 32))
    assert isinstance(found, weight_plans.Operand) and "global scale" in str(plans.form_of(found, (1, 32)))


def test_it_runs_only_where_it_is_named_and_says_what_it_does_not_take() -> None:
    def reason(b: Any, dtype: str = "bfloat16") -> str | None:
        a = SimpleNamespace(dtype=dtype, shape=(600, b.shape[-2]), empty=False)
        facts = {"recipe": b.recipe, "layout": b.layout, "storage": b.storage, "axis": b.axis, "ndim": b.ndim, "shape": b.shape}
        call: Any = SimpleNamespace(
            op="matmul", a=a, b=SimpleNamespace(**facts, empty=False), option=lambda _, default: default
        )  # fmt: skip
        return plans.accepts(call)

    plain = tensor("int4-128", 64, 256)
    stored = plain.to_storage(STORAGE)
    assert reason(stored.mT) is None
    assert "'mma_16x128'" in str(reason(plain.mT))
    assert "activations are float16" in str(reason(stored.mT, "float16"))
    assert "K = 132 is not a multiple of 8" in str(reason(tensor("int4-64", 64, 132).to_storage(STORAGE).mT))
    said = str(breccia.explain("matmul", "array", "int4", on="torch:cuda"))
    assert f"name it with prefer='{NAME}'" in said


@pytest.mark.parametrize("k", [128, 136, 512, 8192])
def test_tiles_have_a_step_for_each_part_of_k_and_stages_for_two_steps(k: int) -> None:
    for name in ("int8-row", "int4-128", "int4-64", "uint4", "int4-16"):
        form = form_of(name)
        for n in (64, 200, 4096, 28672):
            for m in (1, 64, 512, 4096):
                tile = plans.tile_of(form, n, m, k, 132)
                assert tile.split <= -(-k // form.step)
                for out, staged in (("bfloat16", True), ("float32", False)):
                    variant = plans.variant_of(form, tile, out, "float32", staged)
                    assert variant.stages >= 2 * form.span and variant.shared <= fp8_plans.SHARED
    assert plans.tile_of(form_of("int4-128"), 8192, 4096, 8192, 132).name == "256x128"


def test_slices_are_whole_blocks_of_rows_and_cover_the_weight() -> None:
    assert plans.slices(200, None) == [(0, 200)]
    assert plans.slices(200, 130) == [(0, 128), (128, 72)]
    assert plans.slices(200, 1) == [(0, 64), (64, 64), (128, 64), (192, 8)]


@pytest.mark.skipif(compiler.missing() is not None, reason="no NVRTC")
@pytest.mark.parametrize("name", FORMATS)
def test_the_pass_that_decodes_codes_and_scales_compiles_without_spilling(name: str) -> None:
    source = compiler.Source.read(CUDA / "weight_only_decode.cu")
    macros = weight_plans.macros_of_decoding(operand_of(name), "float32", "float16")
    _, log = compiler.nvrtc().compile(source, compiler.options_of("sm_90a", macros))
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}
    assert "warning" not in log
