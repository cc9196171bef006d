"""Arms of bench_weight_only.py: formats of weights, CUDA graphs of products, FP64 references, and the memory's rate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common
from fp8_checks import CHECKED, Reference

#: Recipes of weights.
FORMATS = {
    "int4": "int4,group_size=128",
    "int4-32": "int4,group_size=32",
    "int4-asymmetric": "int4,group_size=128,symmetric=false,signed=false",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "fp8": "fp8_block,block_m=128",
    "mxfp8": "mxfp8",
    "int8": "int8",
}
OURS, BF16, TORCH, HUMMING, TRITON = "breccia", "bf16", "torch-int4", "humming", "triton"
#: torch's grouped product of BF16 rows; and one torch product for each group, for which the host has to know the sizes.
BF16_GROUPED, BF16_EACH = "bf16-grouped", "bf16-each"
#: Arms that are kernels of breccia's table: other libraries', and breccia's for other devices.
IN_TABLE = {TORCH: "torch.int4", HUMMING: "humming.weight_only", TRITON: "triton.weight_only"}
#: Arms whose times `score` reads, with the kernels' names in its keys.
MEASURED = {OURS: "cuda", TORCH: "torch", HUMMING: "humming"}
#: Arms that are left out above this many rows, where they take milliseconds.
MOST = {TORCH: 128}
#: Default rows of activations.
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
#: The storage of `cuda.weight_only`.
STORAGE = "mma_16x128"
#: Bytes of weights that a CUDA graph reads: more than the L2 cache of any GPU.
BEYOND_CACHE = 240 << 20
#: Products in a CUDA graph; a quarter of them from LONG rows on.
PRODUCTS, LONG = 48, 512
#: Bytes of the array whose copy and sum measure the memory's rate.
STREAMED = 2 << 30


def weights_of(spec: str, n: int, k: int) -> tuple[Any, Any, list[Any]]:
    """(The plain tensor, its values in FP64, copies in the kernel's storage)."""
    import torch

    import breccia
    from breccia.backend import as_recipe

    torch.manual_seed(0)
    plain = breccia.cast(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02, as_recipe(spec))
    stored = plain.to_storage(STORAGE)
    count = max(2, -(-BEYOND_CACHE // stored.nbytes))
    copies = [stored, *(copy_of(stored) for _ in range(count - 1))]
    return plain, breccia.dequantize(plain).double(), copies


def copy_of(st: Any) -> Any:
    from breccia import ScaledTensor

    zero_point = None if st.zero_point is None else st.zero_point.clone()
    return ScaledTensor.from_parts(
        st.data.clone(), st.scale.clone(), st.recipe, st.layout, zero_point, st.global_scale, st.axis, st.padding
    )


def graph_of(calls: list[Callable[[], Any]], products: int = PRODUCTS) -> tuple[Any, int]:
    """A CUDA graph of `calls`, repeated for about `products` calls; and the number of calls in it."""
    import torch

    calls = calls * max(1, products // len(calls))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph, len(calls)


def timed(graphs: dict[str, tuple[Any, int]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a product, by kernel and round; the kernels alternate."""
    import torch

    events: dict[str, list[Any]] = {name: [] for name in graphs}
    for graph, _ in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, (graph, _) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) * 1e-3 / graphs[name][1] for a, b in pairs] for name, pairs in events.items()}


# -- references --------------------------------------------------------------------------------------------------------


def reference(x: Any, values: Any) -> Reference:
    """The reference of BF16 activations (M, K) times the transpose of a weight (N, K), for randomly chosen rows.

    values: the weight's in FP64. The bound is the contract's for sums of K products in FP32.
    """
    import torch

    from breccia.kernels import bounds

    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:CHECKED].sort().values.to(x.device)
    left, k = x[rows].double(), x.shape[1]
    return Reference(rows, left @ values.mT, bounds.accumulated(left.abs() @ values.abs().mT, k, k))


def grouped_reference(x: Any, values: list[Any], sizes: list[int]) -> Reference:
    """The reference of a grouped product: each group of rows times the transpose of its own weight."""
    import torch

    ends = torch.tensor(sizes).cumsum(0).tolist()
    found = [reference(rows, w) for rows, w in zip(x.split(sizes), values, strict=True)]
    rows = torch.cat([one.rows + end - size for one, end, size in zip(found, ends, sizes, strict=True)])
    return Reference(rows, torch.cat([one.exact for one in found]), torch.cat([one.allowed for one in found]))


class Row:
    """The CUDA graphs of one row, by arm. y: the output of breccia's kernels. notes: messages of arms that failed.

    A graph keeps addresses, not tensors, so `calls` keeps the operands alive.
    """

    def __init__(self, y: Any, exact: Reference, m: int, notes: dict[str, str]) -> None:
        self.y, self.exact, self.m, self.notes = y, exact, m, notes
        self.graphs: dict[str, tuple[Any, int]] = {}
        self.calls: dict[str, list[Callable[[], Any]]] = {}
        self.errors: dict[str, float] = {}

    def add(self, arm: str, calls: list[Callable[[], Any]], check: bool = True) -> None:
        """Capture the calls of an arm, if the first result is right. check: False for an arm with another weight."""
        self.y.fill_(float("nan"))
        try:
            found = calls[0]()
            if check:
                self.errors[arm] = self.exact.error_over_bound(found)
            self.graphs[arm] = graph_of(calls, PRODUCTS if self.m < LONG else PRODUCTS // 4)
            self.calls[arm] = calls
        except Exception as e:  # one arm that fails must not stop the rest
            self.note(arm, e)

    def note(self, arm: str, e: Exception) -> None:
        """Note why an arm failed."""
        self.notes[f"{arm} M={self.m}"] = f"{type(e).__name__}: {e}"[:200]

    def times(self, rounds: int) -> dict[str, Any]:
        """Summaries by arm, with the largest error as a multiple of the bound."""
        taken = {arm: common.summary(found) for arm, found in timed(self.graphs, rounds).items()}
        return {arm: {**found, **self._error(arm)} for arm, found in taken.items()}

    def _error(self, arm: str) -> dict[str, float]:
        return {"error_over_bound": round(self.errors[arm], 4)} if arm in self.errors else {}


# -- the memory ------------------------------------------------------------------------------------------------------------


def memory_rate(rounds: int = 7) -> dict[str, float]:
    """Bytes per second of a copy, read and written, and of a sum, read only: medians of interleaved samples."""
    import torch

    source = torch.ones(STREAMED // 4, device="cuda")
    target = torch.empty_like(source)
    graphs = {"copy": graph_of([lambda: target.copy_(source)], 3), "sum": graph_of([source.sum], 3)}
    taken = {what: common.summary(found)["median_s"] for what, found in timed(graphs, rounds).items()}
    return {"copy": 2 * source.nbytes / taken["copy"], "sum": source.nbytes / taken["sum"]}


# -- compilation -----------------------------------------------------------------------------------------------------------


def compile_before(pairs: Iterable[tuple[str, int, int]], rows: list[int], rivals: list[str]) -> dict[str, str]:
    """Compile all kernels in parallel, by one product for each format, shape and number of rows. Returns errors by product.

    humming compiles each kernel in a process, and NVRTC releases the GIL.
    """
    import torch

    import breccia

    failed: dict[str, str] = {}

    def weight(pair: tuple[str, int, int]) -> tuple[str, Any, Any]:
        name, n, k = pair
        plain = breccia.cast(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02, breccia.recipe(FORMATS[name]))
        return f"{name} {n}x{k}", plain.mT, plain.to_storage(STORAGE).mT

    def multiply(task: tuple[str, Any, int, str | None]) -> None:
        what, w, m, kernel = task
        try:
            breccia.matmul(torch.zeros(m, w.shape[0], device="cuda", dtype=torch.bfloat16), w, torch.bfloat16, prefer=kernel)
        except Exception as e:  # of any library; an arm that fails here is tried and noted again when it is timed
            failed[f"{kernel or OURS} {what} M={m}"] = f"{type(e).__name__}: {e}"[:200]

    weights = [weight(pair) for pair in pairs]
    kernels = [IN_TABLE[rival] for rival in rivals if rival != TORCH]
    first = [(what, plain, rows[0], kernel) for what, plain, _ in weights for kernel in kernels]  # rearrange the weight
    rest = [(what, plain, m, kernel) for what, plain, _ in weights for m in rows[1:] for kernel in kernels]
    ours = [(what, stored, m, None) for what, _, stored in weights for m in rows]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(multiply, first))
        list(pool.map(multiply, rest + ours))
    torch.cuda.synchronize()
    return failed
