"""Products of the kernels of breccia-triton: their operands, their bound, and where they run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fresh import printed
from triton_casts import DEVICE, ON_GPU

from breccia import ScaledTensor
from breccia.backend import Call, reference
from breccia.dispatch.registry import registry
from breccia.dispatch.table import Table
from breccia.kernels import bounds
from breccia.operations import OPERATIONS
from breccia.options import ProductOptions
from breccia.testing.places import Place

#: Unit roundoffs of results.
ROUNDOFF = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def uneven(shape: tuple[int, ...], seed: int = 0) -> Any:
    """Rows of different magnitude, with one large number each, and a row of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, (*shape[:-1], 1)))
    x[..., 0] *= 256
    x[..., -1, :] = 0
    return torch.tensor(x.astype(np.float32)).to(DEVICE)


def values(x: Any) -> Any:
    """Values in FP64, decoded by the generic algorithm."""
    return (reference.dequantize(x) if isinstance(x, ScaledTensor) else x).double()


def check(found: Any, a: Any, b: Any, bias: Any = None, tensor_cores: bool = False) -> None:
    """The bound of sums in docs/spec/numerics.md, section 9, and one rounding. NaN and Inf where values have them."""
    x, y = values(a), values(b)
    exact, size = x @ y, x.abs() @ y.abs()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    dtype = str(found.dtype).removeprefix("torch.")
    k = x.shape[-1]
    bound = bounds.accumulated(size, k + (bias is not None), k, tensor_cores)
    bound = bound + ROUNDOFF[dtype] * (exact.abs() + bound) + (2.0**-25 if dtype == "float16" else 0.0)
    assert found.shape == exact.shape
    assert torch.equal(found.isnan(), exact.isnan())
    known = exact.isfinite()
    if dtype == "float16":  # others do not overflow here
        known &= exact.abs() + bound < 65504
    error = torch.where(known, (found.double() - exact).abs() / bound.clamp(min=1e-300), 0.0)
    assert error.max() <= 1, f"the error is {error.max().item():.3g} times the bound"
    infinite = exact.isinf()
    assert torch.equal(found[infinite].double(), exact[infinite])


def call_of(a: Any, b: Any, **options: Any) -> Call:
    """A product as the checks of kernels see it."""
    return Call(OPERATIONS["matmul"], "torch", (a, b, None, ProductOptions(**options), registry().frameworks["torch"]))


def declared_here(monkeypatch: pytest.MonkeyPatch, *names: str) -> Place:
    """Where these kernels run; without a GPU they are declared for CPUs."""
    found = registry()
    if ON_GPU:
        return Place("torch", "cuda")
    kernels = [replace(k, device=None, available=None) if k.name in names else k for k in found.table.kernels]
    monkeypatch.setattr(found, "table", Table(kernels, frameworks=found.frameworks))
    return Place("torch")


def captured(run: Callable[[], Any]) -> tuple[Any, Any]:
    """(A graph of what `run` launches, its result)."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    return graph, made


def without_waiting(run: Callable[[], Any]) -> Any:
    """The result of `run`, which must not wait for the GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a prototype, says torch
            torch.cuda.set_sync_debug_mode("error")
        return run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_another_stream(run: Callable[[], Any]) -> Any:
    """The result of `run` on another stream, which is busy at first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000)
        found = run()
    stream.synchronize()
    return found


#: How a script for `compiled` begins: it names the GPU that `Launcher` compiles for, and lists the kernels in `made`.
COMPILING = """
import sys, torch, breccia
from triton.backends.compiler import GPUTarget
from breccia_triton.launch import launcher as launch
from breccia_triton.facts import Hardware

name = sys.argv[1]
target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[2:]), 32)
found = Hardware() if name.startswith("gfx") else Hardware(True, int(name[2:]) >= 89)
limit = {"sm80": 166912, "sm89": 101376, "gfx942": 65536, "gfx950": 163840}.get(name, 232448)
made = []

class Launcher(launch.Launcher):
    def __init__(self, launched):
        super().__init__(launched, target)
        assert self.compiled.metadata.shared <= limit, (self.compiled.metadata.shared, launched.constants)
        made.append(launched.function.__name__)
"""


def compiled(script: str, target: str, folder: Path, *more: str) -> str:
    """What `script` prints, which compiles for a target that is not here. folder: for what Triton keeps."""
    return printed(script, target, *more, TRITON_CACHE_DIR=str(folder), XDG_CACHE_HOME=str(folder), TRITON_INTERPRET=None)
