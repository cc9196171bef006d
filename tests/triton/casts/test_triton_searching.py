"""The search for scales in the Triton kernels of casts: bytes of the generic algorithm, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import long_but, slow_but
from triton_casts import DEVICE, ON_GPU, numbers, same, same_values

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("breccia_triton")

import ptx
import torch
from recipes import declared
from triton_products import compiled

import breccia
from breccia import Level, ScaledTensor, backend
from breccia.backend import E2M1, E4M3, F16, F32, INT4, UINT4, Call, CastOptions, reference
from breccia.dispatch.registry import registry
from breccia.operations import OPERATIONS
from breccia.rules import FOUR_SIX, MSE, Window
from breccia_triton import operands, specs
from breccia_triton.casts import cast as triton_cast
from breccia_triton.casts import plans
from breccia_triton.facts import Hardware

pytestmark = [
    pytest.mark.covering(1, 1),  # the interpreter takes seconds for some cases; `make slow` and a GPU run all
    *([pytest.mark.gpu] if ON_GPU else []),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

#: A window of each codec of scales, and elements of each kind.
SPECS = [
    "nvfp4,scale_rule=mse", "nvfp4,scale_rule=four_six", "nvfp4,block_m=16,scale_rule=mse",
    "nvfp4,two_level=false,scale_format=UE5M3,scale_rule=mse", "nvfp4,two_level=false,scale_rule=four_six",
    "nvfp4,global_sense=divisor,scale_rule=mse", "nvfp4,global_sense=amax,scale_rule=mse",
    "mxfp4,scale_rule=mse", "mxfp6,scale_rule=mse", "mxfp6,fp6_format=E3M2,scale_rule=mse", "mxfp8,scale_rule=mse",
    "mxfp8,fp8_format=E5M2,scale_rule=mse", "mxint8,scale_rule=mse", "int4,group_size=32,scale_rule=mse",
    "int4,group_size=12,scale_dtype=bf16,scale_rule=mse", "int4,group_size=8,signed=false,scale_dtype=fp32,scale_rule=mse",
    "int4,group_size=32,scale_dtype=fp32,scale_rule=mse", "int8,scale_rule=mse", "int8,group_size=20,scale_rule=mse",
    "nf4,scale_rule=mse", "nf4,block_size=16,scale_dtype=fp16,scale_rule=mse",
]  # fmt: skip
#: One of each codec of scales.
FEW = ["nvfp4,scale_rule=mse", "mxfp4,scale_rule=mse", "int4,group_size=12,scale_dtype=bf16,scale_rule=mse"]


def importance(length: int, dtype: Any = torch.float32) -> Any:
    """Weights of very different size, some of them zero or none at all."""
    found = np.random.default_rng(5).random(length) ** 24
    some = found[:: max(1, length // 7)]
    some[:] = np.resize([0.0, -1.0, np.nan, np.inf, 1e-40, 3e38, 2.0**-126, 0.5], some.size)
    return torch.tensor(found.astype(np.float32)).to(dtype).to(DEVICE)


def check(x: Any, spec: Any, generic: bool = False, **options: Any) -> None:
    """The kernel and the generic algorithm write the same; `generic` says whether the kernel passes the call on to it."""
    recipe, given = backend.as_recipe(spec), CastOptions(**options)
    triton_cast._calls.clear()
    found = triton_cast.cast(x, recipe, given)
    assert [isinstance(call, str) for call in triton_cast._calls.values()] == [generic]
    same(found, reference.cast(x, recipe, given))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", long_but(FEW, SPECS))
def test_every_search_writes_the_bytes_of_the_generic_algorithm(spec: str, axis: int, weighted: bool) -> None:
    x = numbers((40, 72), seed=1)
    check(x, spec, axis=axis, importance=importance(x.shape[axis]) if weighted else None)


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="the GPU runs the instructions themselves")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith(("mxfp8", "int8", "mxint8"))])
def test_branches_for_nvidia_gpus_search_alike(spec: str, axis: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ptx.emulate(monkeypatch)
    for module in (triton_cast, operands):
        monkeypatch.setattr(module, "hardware", lambda device: Hardware(ptx=True))
    x = numbers((32, 128), seed=14, dtype=dtype)
    x[:8] = (torch.randn(8, 128) * 2.0**-126).to(dtype)  # scales and products at the ends of FP32
    x[8:12] = (3e38 * torch.randn(4, 128).sign()).to(dtype)
    check(x, spec, axis=axis, importance=importance(x.shape[axis]) if dtype == torch.bfloat16 else None)


#: Blocks of a thread, and of several threads, of which each has chunks that lie apart.
WHOLE_BLOCKS = [
    "nvfp4,scale_rule=mse", "int4,scale_rule=mse", "mxfp4,scale_rule=mse", "mxfp6,scale_rule=mse", "nf4,scale_rule=mse",
    "int4,group_size=32,scale_dtype=fp32,scale_rule=mse", "nvfp4,two_level=false,scale_rule=four_six",
    "int4,group_size=1024,scale_rule=mse",
]  # fmt: skip


@pytest.mark.parametrize("emulated", [False] if ON_GPU else [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", [*long_but(WHOLE_BLOCKS[:2], WHOLE_BLOCKS[:-1]), *slow_but((), WHOLE_BLOCKS[-1:])])
def test_whole_blocks_are_searched_in_the_registers_of_their_threads(
    spec: str, dtype: Any, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if emulated:
        ptx.emulate(monkeypatch)
        for module in (triton_cast, operands):
            monkeypatch.setattr(module, "hardware", lambda device: Hardware(ptx=True))
    length = breccia.recipe(spec).format.block[1]
    assert length is not None
    x = numbers((7, 3 * length), seed=17, dtype=dtype)
    x[1] *= 2.0**-20  # scales at the end of their codes: numbers of codes are small beside the largest element
    x[2, length:] = 0
    x[3, 0], x[4, -1] = float("nan"), float("inf")
    x[5] = (torch.randn(3 * length) * 2.0**-126).to(dtype)
    check(x, spec)
    (call,) = (call for call in triton_cast._calls.values())
    assert call.launcher.launch.function.__name__ == "lanes_kernel"


@pytest.mark.parametrize("element", [INT4, E2M1], ids=lambda codec: codec.name)
def test_a_search_ends_only_where_no_smaller_scale_is_better(element: Any) -> None:
    """INT4 reaches further below zero: under smaller scales the error of the largest element rises first, and falls again."""
    rows = [[-105.0, 26, 26, 52, 78], [105.0, 26, 26, 52, 78], [6.0, 3, 1.5], [1.0] * 16, [0.3, 0.1]]
    for row in rows:
        x = torch.tensor([row + [0.0] * (16 - len(row))] * 4, device=DEVICE)
        check(x, declared(element, Level(E4M3, (1, 16)), rule=MSE))
        check(x, declared(element, Level(E4M3, (1, 16)), rule=MSE), importance=torch.ones(16, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", FEW)
def test_halves_and_their_importance_are_searched_as_their_fp32_values(spec: str, dtype: Any) -> None:
    check(numbers((20, 48), seed=2, dtype=dtype), spec, importance=importance(48, dtype))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 40), (5, 37), (2, 3, 18)])
@pytest.mark.parametrize("spec", FEW)
def test_partial_blocks_and_leading_axes_are_searched(spec: str, shape: tuple[int, ...]) -> None:
    """Blocks that the tensor does not fill, and packed codes with padding."""
    rng = np.random.default_rng(3)
    x = torch.tensor((rng.standard_normal(shape) * np.exp2(rng.integers(-90, 90, shape))).astype(np.float32)).to(DEVICE)
    for axis in (-1, -2):
        check(x, spec, axis=axis, importance=importance(shape[axis]))


@pytest.mark.parametrize("spec", long_but(FEW, SPECS))
def test_of_equal_errors_the_first_scale_is_taken(spec: str) -> None:
    """Blocks of one magnitude, of codes that several scales represent, and with one element that is not zero."""
    x = torch.zeros((8, 48), device=DEVICE)
    x[0], x[1, ::2], x[2, 5], x[3] = 1.0, -6.0, 2.0**-30, 3.0
    x[4] = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=DEVICE).repeat(6)
    x[5] = -x[4]
    check(x, spec)
    check(x, spec, importance=torch.zeros(48, device=DEVICE))


def test_views_and_importances_that_are_not_contiguous_are_searched() -> None:
    weights = importance(128)[::2]
    check(numbers((64, 35), seed=4).mT, "nvfp4,scale_rule=mse", importance=weights)
    check(numbers((3, 40, 80), seed=5)[:, ::2, 8:72], "mxfp4,scale_rule=mse", importance=weights)
    check(numbers((6, 64), seed=6), "int4,group_size=32,scale_rule=mse", importance=weights)


def test_a_search_takes_stochastic_rounding_storages_and_out() -> None:
    x, weights = numbers((33, 64), seed=7), importance(64)
    check(x, "nvfp4,scale_rule=mse", importance=weights, rounding="stochastic", seed=2**40 + 5)
    recipe = breccia.recipe("nvfp4,scale_rule=mse")
    out = triton_cast.cast(torch.ones_like(x), recipe)
    assert triton_cast.cast(x, recipe, CastOptions(out=out, importance=weights)) is out
    expected = reference.cast(x, recipe, CastOptions(importance=weights))
    same(out, expected)
    stored = triton_cast.cast(x, recipe, CastOptions(storage="swizzle_128x4", importance=weights))
    same(stored.to_storage("plain"), expected)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_supplied_scales_of_either_sign_are_used_and_others_are_nan(dtype: str) -> None:
    x, spec = numbers((8, 64), seed=8), f"int4,group_size=16,scale_dtype={dtype},scale_rule=mse"
    scale = torch.tensor([0.25, -0.5, float("nan"), 0.0, float("-inf"), 1e-39, -3.0, -(2.0**-126)], device=DEVICE)
    of_blocks = scale.to({"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]).repeat(4).reshape(8, 4)
    check(x, spec, scale=of_blocks)
    check(x, spec, scale=of_blocks, importance=importance(64))
    check(x, spec.replace("rule=mse", "rule=linear"), scale=of_blocks)


@pytest.mark.parametrize("scale", [0.01, 1e-37, 3e37, float("nan"), -1.0])
def test_blocks_are_searched_under_a_supplied_global_scale(scale: float) -> None:
    for spec in ("nvfp4,scale_rule=mse", "nvfp4,scale_rule=four_six", "nvfp4,global_sense=divisor,scale_rule=mse"):
        check(numbers((8, 64), seed=10), spec, scale=torch.tensor(scale, device=DEVICE), importance=importance(64))


@pytest.mark.long
@pytest.mark.parametrize("spec", slow_but(FEW[1:], FEW))
def test_round_trips_pairs_and_requantize_search(spec: str) -> None:
    x, recipe = numbers((48, 96), seed=11), breccia.recipe(spec)
    triton_cast._calls.clear()
    same_values(triton_cast.cast_ste(x, recipe), reference.cast_ste(x, recipe))
    for found, expected in zip(triton_cast.cast_pair(x, recipe), reference.cast_pair(x, recipe), strict=True):
        same(found, expected)
    st: ScaledTensor = reference.cast(x, breccia.recipe("mxfp8"))
    same(triton_cast.requantize(st, recipe), reference.requantize(st, recipe))
    made = {key[0]: isinstance(call, str) for key, call in triton_cast._calls.items() if key[0] != "cast_pair"}
    assert {"cast_ste", "requantize"} <= made.keys() and not any(made.values())


def test_what_is_not_searched_goes_to_the_generic_algorithm() -> None:
    check(numbers((4, 16400)), "int8,scale_rule=mse", generic=True)
    check(numbers((4, 62)), "int4,group_size=31,scale_rule=mse", generic=True)
    check(numbers((8, 64)), declared(INT4, Level(F16, (1, 16)), rule=MSE))
    with pytest.raises(breccia.RecipeError, match="rule 'four_six' has no window of F16 scales"):
        triton_cast.cast(numbers((8, 64)), declared(INT4, Level(F16, (1, 16)), rule=FOUR_SIX))
    offset = declared(UINT4, Level(F32, (1, 16)), rule=MSE, offset="bias")
    with pytest.raises(breccia.RecipeError, match="searches for scales of formats whose values are codes times scales"):
        triton_cast.cast(numbers((8, 64)), offset)
    with pytest.raises(breccia.ShapeError, match="importance= has a number for each element of x along its contraction axis"):
        triton_cast.cast(numbers((8, 64)), breccia.recipe("mxfp4,scale_rule=mse"), CastOptions(importance=importance(63)))


def test_the_reason_names_what_is_not_searched() -> None:
    def reason(x: Any, spec: str) -> str:
        call = Call(OPERATIONS["cast"], "torch", (x, None, breccia.recipe(spec), CastOptions(), registry().frameworks["torch"]))
        return plans.accepts_cast(call) or "it is searched"

    assert reason(torch.empty(4, 16384), "int8,scale_rule=mse") == "it is searched"
    assert reason(torch.empty(4, 16400), "int8,scale_rule=mse") == "blocks whose scale is searched for have to fit a tile"
    offset = declared(UINT4, Level(F32, (1, 16)), rule=MSE, offset="bias")
    assert specs.spec_of(offset) == "it searches for scales of formats without an offset only"
    no_window = declared(INT4, Level(F16, (1, 16)), rule=FOUR_SIX)
    assert specs.spec_of(no_window) == "rule 'four_six' has no window of F16 scales"
    uneven = replace(MSE, bytes=Window(steps=(-3, -1, 1)))
    assert specs.spec_of(declared(E2M1, Level(E4M3, (1, 16)), rule=uneven)) == (
        "the window of rule 'mse' is neither multiples nor steps from each code to the next"
    )
    for spec in SPECS:
        assert "-> triton.cast" in str(breccia.explain("cast", spec, on="torch:cuda")), spec


COMPILED = """
import re, sys, breccia
from breccia_torch.ops import TORCH
from triton.backends.compiler import GPUTarget
from breccia_triton.launch import launcher as launch
from breccia_triton.casts import prepare
from breccia_triton.facts import Array, Hardware

for name in ("mxint8", "mxfp4", "nvfp4", "int4", "nf4"):
    recipe = breccia.recipe(spec := f"{name},scale_rule=mse")
    for dtype, weighted in (("bfloat16", False), ("float32", True)):
        options, x = prepare.Options(weighted=weighted), Array.dense((256, 512), dtype)
        call = prepare.Prepared("cast", recipe, x, -1, options, TORCH.dtypes(recipe.format), Hardware(True, True), turns=True)
        made = launch.Launcher(call.launch, GPUTarget("cuda", int(sys.argv[1][2:]), 32)).compiled
        flushing = re.findall(r"\\b(?:add|sub|fma|mad)[.\\w]*[.](?:ftz|approx)", made.asm["ptx"])
        print(spec, len(flushing), "fma." in made.asm["ptx"])
"""


@pytest.mark.slow
def test_compiled_searches_neither_fuse_nor_flush_what_the_contract_rounds(tmp_path: Path) -> None:
    """Reciprocals of scales are refined by fused additions, and minifloats rounded: without both, nothing may be fused."""
    printed = compiled(COMPILED, "sm90", tmp_path).splitlines()
    fused = {"mxint8": "False", "mxfp4": "True", "nvfp4": "True", "int4": "True", "nf4": "True"}
    assert printed == [f"{name},scale_rule=mse 0 {kind}" for name, kind in fused.items() for _ in range(2)]
