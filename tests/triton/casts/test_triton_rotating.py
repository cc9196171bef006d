"""The Triton kernel that rotates: bits of the generic algorithm, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import slow_but
from triton_casts import DEVICE, ON_GPU, numbers, same, same_values

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("breccia_triton")

import torch
from triton_products import compiled

import breccia
from breccia.backend import CastOptions, Rotation, product_options, reference
from breccia.kernels import rotating as generic
from breccia_triton.casts import rotating

pytestmark = [
    pytest.mark.covering(1, 1),  # the interpreter takes a second for each case; `make slow` and a GPU run all
    *([pytest.mark.gpu] if ON_GPU else []),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

WAYS = [(rotating.rotated, generic.rotated), (rotating.unrotated, generic.unrotated)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that asks for a launch of the kernel."""
    asked: list[Any] = []
    launcher = rotating._launcher
    monkeypatch.setattr(rotating, "_launcher", lambda *arguments: asked.append(arguments) or launcher(*arguments))
    return asked


def extreme(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every magnitude, zeros of both signs, NaN and infinities."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.exp2(torch.arange(shape[-1]) % 250 - 140.0)
    flat = x.view(-1)
    flat[::97], flat[1::89], flat[5], flat[300], flat[700] = 0.0, -0.0, torch.nan, torch.inf, -torch.inf
    return x.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("block", [2, 16, 32, 128])
@pytest.mark.parametrize("shape", [(128, 128), (2, 128, 384), (256, 640)], ids=str)
def test_the_kernel_rotates_bit_for_bit(
    block: int, axis: int, dtype: torch.dtype, shape: tuple[int, ...], launches: list[Any]
) -> None:
    x = extreme(shape, dtype)
    for ours, expected in WAYS:
        found = ours(x, Rotation(block, 7), axis)
        assert found.dtype == torch.float32 and found.is_contiguous()
        same_values(found, expected(x, Rotation(block, 7), axis))
    assert len(launches) == 2


def test_views_are_rotated_and_a_transposed_one_gives_one(launches: list[Any]) -> None:
    x = extreme((64, 96), torch.float32)
    for view, axis in ((x[:, ::2], -1), (x.mT, -1), (x.mT, -2), (torch._neg_view(x), -1), (x[16:48], -2)):
        for ours, expected in WAYS:
            same_values(ours(view, Rotation(16), axis), expected(view.resolve_neg(), Rotation(16), axis))
    assert len(launches) == 10
    assert rotating.rotated(x.mT, Rotation(16), -2).mT.is_contiguous()


def test_partial_blocks_empty_tensors_and_other_dtypes_take_the_generic_algorithm(launches: list[Any]) -> None:
    x = extreme((64, 100), torch.float32)
    for ours, expected in WAYS:
        found = ours(x, Rotation(16), -1)
        same_values(found[:, :96], expected(x[:, :96], Rotation(16), -1))
        same_values(found[:, 96:], x[:, 96:])  # the last block is partial
    assert rotating.rotated(torch.empty(0, 16, device=DEVICE), Rotation(16), -1).shape == (0, 16)
    assert rotating.rotated(x[:, :64].double(), Rotation(16), -1).dtype == torch.float32
    assert not launches


@pytest.mark.parametrize("axis", [-1, -2])
def test_an_unaligned_view_is_rotated(axis: int, launches: list[Any]) -> None:
    memory = extreme((1, 64 * 128 + 1), torch.bfloat16).view(-1)
    x = memory[1:].view(64, 128)
    for ours, expected in WAYS:
        same_values(ours(x, Rotation(16), axis), expected(x.clone(), Rotation(16), axis))
    assert [aligned for _, aligned, *_ in launches] == [False, False]


def test_more_columns_than_the_grid_has_places_for_take_the_generic_algorithm(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotating, "GRID", 2)
    x = extreme((32, 192), torch.float32)
    for ours, expected in WAYS:
        same_values(ours(x, Rotation(16), -2), expected(x, Rotation(16), -2))
    assert not launches


@pytest.mark.parametrize("spec", ["nvfp4,rotation=16", "mxfp4,rotation=64,rotation_seed=5", "int4,group_size=32,rotation=128"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_casts_and_decoding_are_those_of_the_generic_algorithm(spec: str, axis: int, launches: list[Any]) -> None:
    x, recipe = numbers((128, 256), seed=3), breccia.recipe(spec)
    options = CastOptions(axis, rounding="stochastic", seed=11)
    expected = reference.cast(x, recipe, options)
    found = rotating.cast(x, recipe, options)
    same(found, expected)
    assert rotating.cast(x * 2, recipe, options.replace(out=found)) is found
    same(found, reference.cast(x * 2, recipe, options))
    expected = found
    for dtype in ("float32", "bfloat16"):
        same_values(rotating.dequantize(found, product_options(dtype)), reference.dequantize(expected, product_options(dtype)))
    assert len(launches) == 4


COMPILED = """
import re, sys
import torch
from triton.backends.compiler import GPUTarget
from breccia.backend import Rotation
from breccia_triton.casts import rotating

name, launcher = sys.argv[1], rotating.Launcher
target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[2:]), 32)
rotating.Launcher = lambda launch: launcher(launch, target)
for block in (16, 128):
    for columns in (1, 256):
        for back in (False, True):
            made = rotating._launcher("bfloat16", True, Rotation(block), 64, columns, back, torch.device("cpu"))
            instructions = re.findall(r"(?:ld|st).global\\S*", made.compiled.asm.get("ptx", ""))
            print(block, columns, {"ld.global.v4.b32", "st.global.v4.b32"} <= set(instructions))
"""


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="compiles for GPUs that are absent")
@pytest.mark.parametrize("target", slow_but({"sm90"}, ("sm90", "sm80", "gfx942")))
def test_the_kernel_compiles_and_reads_and_writes_16_bytes_at_a_time(target: str, tmp_path: Path) -> None:
    wide = target.startswith("sm")  # PTX alone is read here
    expected = [f"{block} {columns} {wide}" for block in (16, 128) for columns in (1, 256) for _ in range(2)]
    assert compiled(COMPILED, target, tmp_path).splitlines() == expected


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_casts_on_a_gpu_run_the_kernel() -> None:
    x = torch.randn(256, 256, device="cuda")
    assert breccia.explain("cast", x, "nvfp4,rotation=16").running == "triton.rotated.cast (triton.cast)"
    st = breccia.cast(x, "nvfp4,rotation=16")
    assert breccia.explain("dequantize", st).running == "triton.rotated.dequantize (triton.dequantize)"
    host = breccia.cast(x.cpu(), "nvfp4,rotation=16")
    assert st.digest() == host.digest()
    assert np.array_equal(st.dequantize().cpu().numpy(), host.dequantize().numpy())
