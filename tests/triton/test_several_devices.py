"""Calls on another device than the current one, also on another stream, return the results of the current device.

On a machine with at least two GPUs: `pytest -m gpu tests/triton/test_several_devices.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("breccia_triton")

import breccia  # noqa: E402
from breccia.backend import components  # noqa: E402

TWO = torch.cuda.is_available() and torch.cuda.device_count() > 1
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not TWO, reason="needs two GPUs")]

HERE, THERE = "cuda:0", "cuda:1"
#: Up to a million elements, one launch finds the amax of the tensor and casts; beyond, two do.
SMALL, LARGE = (256, 512), (2048, 1024)
RECIPES = [
    "fp8_block", "fp8_block,block_m=128", "fp8_row", "fp8_current", "mxfp8", "mxfp6", "nvfp4", "int4",
    "int4,symmetric=false,signed=false",
]  # fmt: skip
TILES = "fp8_block,block_m=128"


def numbers(shape: tuple[int, ...], seed: int = 0) -> Any:
    """Normal BF16 numbers on the CPU; rows differ in size."""
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=made) * torch.exp2(torch.randint(-4, 5, (shape[0], 1), generator=made))).bfloat16()


def same(there: list[Any], here: list[Any]) -> None:
    """Compare tensors of two devices bit by bit."""
    assert len(there) == len(here)
    for a, b in zip(there, here, strict=True):
        assert a.device == torch.device(THERE) and b.device == torch.device(HERE)
        x, y = (part.reshape(-1).contiguous().view(torch.uint8).cpu() for part in (a, b))
        assert torch.equal(x, y)


@contextmanager
def busy_stream(device: str) -> Iterator[None]:
    """Make a busy stream the current one of a device, without a change of the current device."""
    current = torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.Stream(device)), torch.cuda.device(current):
        with torch.cuda.device(device):
            torch.cuda._sleep(20_000_000)
        assert torch.cuda.current_device() == current
        yield
    torch.cuda.synchronize(device)


def on_both(run: Callable[[Any], list[Any]], x: Any) -> None:
    """Check that `run` returns the same on both devices, whichever is the current one, and on a busy stream.

    That stream writes the input late, so a call on another stream would read zeros.
    """
    here = run(x.to(HERE))
    for current in (HERE, THERE):
        with torch.cuda.device(current):
            for _ in range(2):  # the second call takes the short way
                same(run(x.to(THERE)), here)
            late = torch.zeros(x.shape, dtype=x.dtype, device=THERE)
            given = x.to(THERE)
            torch.cuda.synchronize(THERE)
            with busy_stream(THERE):
                late.copy_(given)
                found = run(late)
            same(found, here)
            assert torch.cuda.current_device() == torch.device(current).index


def parts(*tensors: Any) -> list[Any]:
    return [part for st in tensors for part in components(st).values()]


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("spec", RECIPES)
def test_casts_run_on_the_device_of_their_input(spec: str, shape: tuple[int, int]) -> None:
    recipe = breccia.recipe(spec)

    def run(x: Any) -> list[Any]:
        across = breccia.cast(x, recipe, axis=-2)
        random = breccia.cast(x, recipe, rounding="stochastic", seed=5)
        values = [breccia.cast_ste(x, recipe), breccia.cast_ste_clipped(x, recipe, -1.0, 1.0)]
        return [*parts(breccia.cast(x, recipe), across, random, *breccia.cast_pair(x, recipe)), *values]

    on_both(run, numbers(shape))


@pytest.mark.parametrize("spec", RECIPES)
def test_scaled_tensors_are_decoded_and_requantized_on_their_device(spec: str) -> None:
    recipe = breccia.recipe(spec)

    def run(x: Any) -> list[Any]:
        st = breccia.cast(x, recipe)
        out = torch.empty(x.shape, device=x.device)
        assert breccia.dequantize(st, out=out) is out
        finer = "fp8_block" if spec == TILES else "mxfp8,fp8_format=E5M2"
        again = breccia.requantize(st, finer), breccia.requantize(st, "nvfp4")
        return [breccia.dequantize(st, out_dtype="bfloat16"), out, *parts(*again)]

    on_both(run, numbers(SMALL, 1))


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_histories_are_recorded_on_the_device_of_their_input(shape: tuple[int, int]) -> None:
    def run(x: Any) -> list[Any]:
        history = breccia.AmaxHistory(breccia.DelayedScaling(amax_history_len=4))
        found = list[Any]()
        for _ in range(3):
            st, history = history.cast(x)
            found += parts(st)
            history = history.update(x)
        return [*found, history.amaxes, history.scale]

    on_both(run, numbers(shape, 2))


@pytest.mark.parametrize(("a", "w"), [("fp8_row", "fp8_row"), ("fp8_block", TILES), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")])
def test_products_of_two_tensors_run_on_their_device(a: str, w: str) -> None:
    weight, bias = numbers((384, 512), 3), numbers((1, 384), 4)[0]

    def run(x: Any) -> list[Any]:
        left, right = breccia.cast(x, a), breccia.cast(weight.to(x.device), w).mT
        plain = breccia.matmul(left, right, "bfloat16")
        return [plain, breccia.matmul(left, right, bias=bias.to(x.device)), breccia.matmul(left[:16], right, "float16")]

    on_both(run, numbers(SMALL, 5))


@pytest.mark.parametrize("spec", ["int4", "mxfp4", "nvfp4", "mxfp8", "fp8_row"])
def test_weight_only_products_run_on_the_device_of_their_operands(spec: str) -> None:
    weight = numbers((384, 512), 6)

    def run(x: Any) -> list[Any]:
        st = breccia.cast(weight.to(x.device), spec)
        stored = st.to_storage("mma_16x128").mT
        found = [breccia.matmul(x[:m], w, "bfloat16") for w in (st.mT, stored) for m in (1, 16, 200)]
        return found

    on_both(run, numbers(SMALL, 7))


@pytest.mark.parametrize("spec", ["int4", "nvfp4", "fp8_block", "mxfp8"])
def test_models_are_quantized_and_run_on_their_device(spec: str) -> None:
    import breccia_torch

    weights = [numbers((512, 512), 8), numbers((256, 512), 9)]

    def run(x: Any) -> list[Any]:
        layers = [torch.nn.Linear(512, len(w), bias=False, device=x.device, dtype=torch.bfloat16) for w in weights]
        for layer, w in zip(layers, weights, strict=True):
            layer.weight.data.copy_(w)
        model = torch.nn.Sequential(*layers).eval().requires_grad_(False)
        breccia_torch.quantize_(model, spec)
        with torch.no_grad():
            return [model(x), model(x[:3])]

    on_both(run, numbers(SMALL, 10))


@pytest.mark.parametrize("spec", ["fp8_current", "nvfp4", "fp8_block"])
def test_graphs_captured_on_another_device_replay_there(spec: str) -> None:
    recipe, x = breccia.recipe(spec), numbers(SMALL, 11)
    expected = parts(breccia.cast(x.to(HERE), recipe), *breccia.cast_pair(x.to(HERE), recipe))
    with torch.cuda.device(THERE):
        given = torch.zeros(SMALL, dtype=torch.bfloat16, device=THERE)
        breccia.cast(given, recipe), breccia.cast_pair(given, recipe)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(THERE)):
            found = parts(breccia.cast(given, recipe), *breccia.cast_pair(given, recipe))
    given.copy_(x)
    with torch.cuda.device(THERE):
        graph.replay()
        torch.cuda.synchronize()
    same(found, expected)
