"""What of launches only a GPU can show: maps that are moved, outputs with rows apart, CUDA graphs, streams and new threads.

    python tests/gpu/launches.py

Each check prints a line, and the next one runs also where one fails, unless the device has faulted. Products are compared with
FP64 products of the decoded operands. `host_time` prints ns of the host for a call, of one product and of eight in turn.
tests/triton holds the laws of these products; this is the first thing to run after a change of breccia_triton's launches.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

import breccia
from breccia.backend import product_options

DEVICE = "cuda"
#: The largest relative error of a product, of its norm: rounding to BF16 leaves 2^-9 of each number at most.
MOST = 0.01
STORED = "mma_16x128"
CHECKS: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS.append(function)
    return function


def weight(spec: str, n: int, k: int) -> Any:
    return breccia.cast(torch.randn(n, k, device=DEVICE) * 0.02, spec)


def rows(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, device=DEVICE).bfloat16()


def quantized(spec: str, m: int, k: int) -> Any:
    return breccia.cast(torch.randn(m, k, device=DEVICE), spec)


def expect(found: torch.Tensor, a: Any, b: Any, bias: torch.Tensor | None = None) -> None:
    """`found` is a @ b + bias. b: the weight in the plain storage."""
    left = breccia.dequantize(a).double() if isinstance(a, breccia.ScaledTensor) else a.double()
    exact = left @ breccia.dequantize(b).double() + (0 if bias is None else bias.double())
    error = float((found.double() - exact).norm() / exact.norm())
    assert error < MOST, f"relative error {error:.3g}"


def multiply(a: Any, b: Any, dtype: str, kernel: str, plain: Any, bias: torch.Tensor | None = None) -> None:
    """Check the product by one kernel, if it takes these operands."""
    if breccia.explain("matmul", a, b, out_dtype=dtype, prefer=kernel).running != kernel:
        print(f"     {kernel} does not take {tuple(a.shape)} by {plain.recipe.spec} to {dtype}")
        return
    expect(breccia.matmul(a, b, dtype, bias=bias, prefer=kernel), a, plain, bias)


@check
def moved_maps_are_those_that_the_driver_encodes() -> None:
    from breccia_triton.launch.driver import MovableMap, driver

    at = torch.empty(1 << 22, device=DEVICE, dtype=torch.uint8).data_ptr()
    found = driver()
    assert found.address_word is not None, "every call encodes its maps anew"
    every: Iterable[tuple[Any, ...]] = (
        *((dtype, (64, 512), (512,), (64, 64), 128, 128) for dtype in ("bfloat16", "float16")),
        ("bfloat16", (1, 256, 512), (131072, 512), (1, 64, 64), 128),
        ("bfloat16", (1, 64, 256), (16384, 256), (1, 32, 64), 128),
        ("float32", (1, 4, 256), (1024, 256), (1, 1, 128), 0),
        ("uint8", (1, 256, 512), (131072, 512), (1, 64, 128), 128),
    )
    for facts in every:
        moved = MovableMap(found, *facts)
        for shift in (0, 16, 4096, 1 << 20, 48):
            moved.move(at + shift)
            assert list(moved.map.words) == list(found.encoder(*facts)(at + shift).words), facts


@check
def stored_weights_by_every_kernel_of_few_rows() -> None:
    stored_weights(5)


@check
def stored_weights_by_every_kernel_of_many_rows() -> None:
    stored_weights(300)


def stored_weights(m: int, n: int = 1024, k: int = 1024) -> None:
    """At other addresses in each call, and into outputs whose rows lie apart."""
    from breccia_triton.gemm.weight_only import matmul as weight_only
    from breccia_triton.gemm.weight_only import plans as weight_plans

    for spec in ("int4,group_size=128", "mxfp4", "nvfp4", "mxfp8"):
        plain = weight(spec, n, k)
        stored = plain.to_storage(STORED).mT
        of = weight_plans.weight_format_of(plain.recipe.format, plain.layout.plain.block(-1))
        wide = weight_plans.Config(64, 2, 1, 4, wide=True), weight_plans.Decoded(), weight_plans.DecodedCodes()
        small = [config for config in weight_plans.configs(of, m, n, k) if config.fits(of, m, k)][:1]
        for config in (*small, *(config for config in wide if config.fits(of, m, k))):
            call = weight_only.executable(rows(m, k), stored, None, "bfloat16", config)
            for _ in range(3):
                x = rows(m, k)
                expect(call(x, stored, None, None), x, plain.mT)
            for before, behind in ((0, 24), (1, 24)):  # the second begins at an odd address
                whole = torch.full((m, before + n + behind), 7.0, device=DEVICE, dtype=torch.bfloat16)
                out = whole[:, before : before + n]
                call(x, stored, None, out)
                expect(out, x, plain.mT)
                assert (whole[:, :before] == 7).all() and (whole[:, before + n :] == 7).all(), f"{config} wrote beside `out`"


@check
def biases_batches_and_slices() -> None:
    plain = weight("int4,group_size=128", 512, 640)
    stored = plain.to_storage(STORED).mT
    for m in (1, 12, 300):
        x, bias = rows(m, 640), torch.randn(512, device=DEVICE)
        expect(breccia.matmul(x, stored, "float32", bias=bias), x, plain.mT, bias)
        expect(breccia.matmul(x, stored, "float16", bias=bias.half()), x, plain.mT, bias)
        expect(breccia.matmul(x[None].expand(3, m, 640), stored, "bfloat16")[2], x, plain.mT)
        for part in (rows(m, 1280)[:, ::2], rows(m, 1280)[:, :640]):
            expect(breccia.matmul(part, stored, "bfloat16"), part, plain.mT)


@check
def pairs_of_fp8() -> None:
    tiles = ("fp8_block", "fp8_block,block_m=128")
    for a, b in (("fp8_row", "fp8_row"), ("fp8_current", "fp8_current"), tiles, ("fp8_block", "fp8_block"), ("mxfp8", "mxfp8")):
        for m, n, k in ((1, 264, 640), (300, 264, 640), (1024, 2048, 1024)):
            w, bias = weight(b, n, k), torch.randn(n, device=DEVICE)
            for _ in range(2):
                x = quantized(a, m, k)
                for kernel in ("cuda.fp8_matmul", "triton.fp8_matmul"):
                    multiply(x, w.mT, "bfloat16", kernel, w.mT, bias)


@check
def groups_of_rows() -> None:
    starts, ends = (0, 5, 5, 205), (5, 5, 205, 208)
    for spec, kernel, storage in (
        ("fp8_block,block_m=128", "cuda.fp8_grouped_matmul", "plain"),
        ("mxfp4", "cuda.weight_only_grouped", STORED),
        ("nvfp4", "cuda.weight_only_grouped", STORED),
        ("mxfp4", "triton.grouped_matmul_bf16", "plain"),
    ):
        w = breccia.cast(torch.randn(4, 264, 640, device=DEVICE) * 0.02, spec)
        x = quantized("fp8_block", 215, 640) if kernel.startswith("cuda.fp8") else rows(215, 640)
        offsets = torch.tensor(ends, device=DEVICE)
        y = breccia.grouped_matmul(x, w.to_storage(storage).mT, offsets, "bfloat16", prefer=kernel)
        for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end > start:
                expect(y[start:end], x[start:end], w[group].mT)


@check
def products_in_bf16_in_registers_and_of_gradients() -> None:
    for spec in ("mxfp8", "nvfp4", "int4,group_size=128", "int8"):
        w = weight(spec, 1024, 1024)
        for m in (1, 300):
            x, bias = rows(m, 1024), torch.randn(1024, device=DEVICE)
            for kernel in ("triton.matmul_bf16", "triton.weight_only"):
                for added, dtype in ((None, "bfloat16"), (bias, "float16"), (bias, "float32")):
                    multiply(x, w.mT, dtype, kernel, w.mT, added)
            multiply(x, w.to_storage(STORED), "bfloat16", "triton.matmul_bf16", w)
        out = torch.empty(1024, 1024, device=DEVICE)
        assert breccia.dequantize(w, out=out) is out


@check
def graphs_and_streams_give_the_bits_of_plain_calls() -> None:
    weights: list[Any] = []
    for spec in ("int4,group_size=128", "mxfp4"):
        w = weight(spec, 512, 512)
        weights += [w.mT, w.to_storage(STORED).mT]
    tiles = weight("fp8_block,block_m=128", 512, 512)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        found = [breccia.matmul(x, w, "bfloat16") for w in weights]
        return [*found, breccia.matmul(breccia.cast(x, "fp8_block"), tiles.mT, "bfloat16")]

    for m in (1, 64, 512):
        x = rows(m, 512)
        run(x)
        expected = run(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(x)
        for _ in range(3):
            x.copy_(rows(m, 512))
            graph.replay()
            expected = run(x)
            assert all(map(torch.equal, found, expected)), f"a graph of {m} rows"
        late, stream = torch.zeros_like(x), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # so that a launch on another stream would read zeros
            late.copy_(x)
            found = run(late)
        stream.synchronize()
        assert all(map(torch.equal, found, expected)), f"a stream, {m} rows"


@check
def a_product_may_be_the_first_call_of_a_thread() -> None:
    from breccia_triton.gemm.fp8 import matmul as fp8_matmul

    a, w, x = quantized("fp8_row", 384, 1024), weight("fp8_row", 2048, 1024), rows(96, 1024)
    stored = weight("int4,group_size=128", 2048, 1024).to_storage(STORED).mT
    torch.cuda.synchronize()
    failed: list[str] = []

    def alone(call: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                call()
            except Exception as e:
                failed.append(f"{type(e).__name__}: {e}")

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    alone(lambda: fp8_matmul.matmul(a, w.mT, product_options("bfloat16")))
    alone(lambda: breccia.matmul(x, stored, "bfloat16"))
    assert not failed, failed


def timed(kind: str, n: int) -> Callable[[], Any]:
    x, a = rows(1, 1024), quantized("fp8_row", 16, 1024)
    if kind == "stored":
        stored = weight("int4,group_size=128", n, 1024).to_storage(STORED).mT
        return lambda: breccia.matmul(x, stored, "bfloat16")
    if kind == "registers":
        plain = weight("int4,group_size=128", n, 1024).mT
        return lambda: breccia.matmul(x, plain, "bfloat16", prefer="triton.weight_only")
    if kind == "fp8":
        w = weight("fp8_row", n, 1024).mT
        return lambda: breccia.matmul(a, w, "bfloat16", prefer="cuda.fp8_matmul")
    codes = weight("mxfp8", n, 256)
    return lambda: breccia.dequantize(codes, out_dtype="bfloat16")


@check
def host_time() -> str:
    found: list[str] = []
    for kind in ("stored", "registers", "fp8", "dequantize"):
        calls = [timed(kind, 256 + 64 * i) for i in range(8)]
        for count in (1, 8):
            for call in calls * 3:
                call()
            best, turns = float("inf"), 400 // count
            for _ in range(20):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(turns):
                    for call in calls[:count]:
                        call()
                best = min(best, (time.perf_counter() - start) / (turns * count))
            found.append(f"{kind} × {count} {1e9 * best:.0f}")
    return ", ".join(found)


def main() -> int:
    torch.manual_seed(0)
    failed = 0
    for one in CHECKS:
        start = time.perf_counter()
        try:
            said = one() or ""
            torch.cuda.synchronize()
            print(f"ok   {one.__name__} {said} {time.perf_counter() - start:.1f} s", flush=True)
        except Exception as e:
            failed += 1
            print(f"FAIL {one.__name__}: {type(e).__name__}: {str(e)[:300]}", flush=True)
            traceback.print_exc(limit=4)
            if "illegal" in str(e):  # the device has faulted, and nothing that follows means anything
                break
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
