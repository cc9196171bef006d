"""Seconds on a GPU: samples of all arms of a row in rotation, by CUDA events or graphs, after each result was checked.

A GPU lowers its clock under load, so times compare only if they are interleaved. On the device "cpu" the host's clock replaces
events and graphs, which tries a script without a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
import timeit
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.commands import refuse
from harness.results import output, provenance
from harness.timing import Call, summary

#: Returns the call, prepared, or None if there is none.
Make = Callable[[], Call | None]

#: A sample lasts at least this long, and has at least this many calls unless they take longer than the maximum.
SAMPLE_S, SAMPLE_CALLS, SAMPLE_MOST_S = 1e-3, 10, 20e-3
#: All samples of a call together take at most about this long, unless FEWEST of them take longer.
SAMPLES_MOST_S, FEWEST = 2.0, 3
#: Calls in a CUDA graph, and in a sample of host time: with 50 launches each they still fit the queue of launches.
GRAPH_CALLS = HOST_CALLS = 20
#: Seconds of load before a row ("hot"), and of idling before every sample ("burst").
LOAD_S, IDLE_S = 0.25, 0.35
WARM_UP = 3


def check_device(device: str) -> None:
    """Exit unless torch has the device."""
    if device not in ("cpu", "cuda"):
        refuse(f"--device takes cuda or cpu; got {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        refuse("torch sees no CUDA device here; --device cpu tries the script without one.")


def where(device: str) -> dict[str, Any]:
    if device == "cpu":
        return provenance(["torch"], torch_threads=torch.get_num_threads())
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return provenance(["torch", "triton"], device=f"{name}, driver {driver}" if driver else name)


def message(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0][:200] if lines else ''}"


def rotating(call: Callable[[Any], object], operands: Iterable[Any]) -> Call:
    """A call that takes the next operand each time."""
    following = itertools.cycle(operands)
    return lambda: call(next(following))


def beyond_cache(nbytes: int, device: str) -> int:
    """How many copies of so many bytes exceed the device's cache twice, so that the last one evicts the first; at least 1."""
    cache = torch.cuda.get_device_properties().L2_cache_size if device == "cuda" else 0
    return max(1, math.ceil(2 * cache / nbytes))


@dataclass
class Timer:
    """Samples of one call, in seconds. each: how often one `call` does the work. calls: of a sample."""

    call: Call
    device: str
    each: float = 1.0
    calls: int = 1
    most: float = math.inf
    seconds: list[float] = field(default_factory=list[float])

    def fit(self) -> Timer:
        """Set the number of calls of a sample, and the most samples."""
        once = elapsed(self.call, 1, self.device)
        if once < SAMPLE_MOST_S:
            once = elapsed(self.call, WARM_UP, self.device)
        most = max(1, int(SAMPLE_MOST_S / once))
        self.calls = min(max(SAMPLE_CALLS, math.ceil(SAMPLE_S / once)), most)
        self.most = max(FEWEST, SAMPLES_MOST_S / (once * self.calls))
        return self

    def sample(self) -> None:
        if len(self.seconds) < self.most:
            self.seconds.append(elapsed(self.call, self.calls, self.device) / self.each)


@dataclass
class HostTimer(Timer):
    """Samples of the time until a call returns; each starts with an empty queue."""

    calls: int = HOST_CALLS

    def sample(self) -> None:
        self.seconds.append(host_time(self.call, self.device, self.calls))


def elapsed(call: Call, calls: int, device: str) -> float:
    """Seconds per call: between CUDA events, or of the host's clock on a CPU."""
    if device == "cpu":
        return timeit.timeit(call, number=calls) / calls

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if calls > 1:
        call()  # while the device is busy with it, the host prepares the first counted call
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def host_time(call: Call, device: str, calls: int = HOST_CALLS) -> float:
    """Seconds per call until it returns, with an empty queue at the start."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def graph_of(call: Call, device: str, calls: int = GRAPH_CALLS, warm_up: int = 1) -> Call:
    """The replay of a CUDA graph of calls; on a CPU, the calls. It keeps the cache of memory, unlike `torch.cuda.graph`."""
    if device == "cpu":
        return lambda: [call() for _ in range(calls)]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()  # operands were written on another stream
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(warm_up):
            call()  # some libraries allocate on the first call on a stream, which a capture forbids
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                call()
        except Exception:
            with contextlib.suppress(Exception):  # a call that cannot be captured makes this fail too, and says less
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay


def graphed(call: Call, device: str, calls: int = GRAPH_CALLS, warm_up: int = 1) -> Timer:
    """A timer of replays that take at least SAMPLE_S."""
    replay = graph_of(call, device, calls, warm_up)
    # The first replay also uploads the graph to the device: 0.07 ms in the median, for products of 7 and of 100 µs alike.
    _, once = (elapsed(replay, 1, device) for _ in range(2))
    return Timer(replay, device, calls, math.ceil(SAMPLE_S / once))


def sampled(timers: Iterable[Timer], count: int, idle: bool = False) -> None:
    """Take `count` samples of each timer, interleaved. idle: pause before each sample.

    Each round has an order of its own. At its power limit a card is faster for what follows light work, and in a fixed order
    that is always the same timer.
    """
    every, order = list(timers), random.Random(0)
    for _ in range(count):
        order.shuffle(every)
        for timer in every:
            if idle:
                time.sleep(IDLE_S)
            timer.sample()


def load(device: str) -> int | None:
    """Keep the device busy with matrix products. Returns its SM clock under that load in MHz, if it can be read."""
    if device == "cpu":
        return None

    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    b = torch.empty_like(a)
    until = time.perf_counter() + LOAD_S
    while time.perf_counter() < until:
        for _ in range(50):
            torch.mm(a, a, out=b)
        synchronize(device)
    for _ in range(50):
        torch.mm(a, a, out=b)
    clock = None
    with contextlib.suppress(Exception):  # NVML's bindings may be missing, or a virtual machine may hide it
        clock = torch.cuda.clock_rate()
    synchronize(device)
    return clock


class Arms:
    """The arms of one row: each is prepared, called, checked and given a timer. What it raises is recorded, and it is left out.

    A CUDA graph keeps addresses, not tensors: `calls` holds the tensors.
    """

    def __init__(self, device: str, check: Callable[[str, Any], float | None] = lambda arm, result: None) -> None:
        self.device, self.check = device, check
        self.calls: dict[str, Call] = {}
        self.timers: dict[tuple[str, str], Timer] = {}
        self.fields: dict[str, dict[str, Any]] = {}

    def note(self, measure: str, arm: str, value: Any) -> None:
        self.fields.setdefault(measure, {})[arm] = value

    def add(
        self, makers: Mapping[str, Make], timer: Callable[[Call, str], Timer] = lambda call, device: Timer(call, device)
    ) -> None:
        """Prepare arms. `check` returns an error as a multiple of its bound, or raises for a wrong result."""
        for arm, make in makers.items():
            try:
                call = make()
                if call is None:
                    continue
                if (over := self.check(arm, call())) is not None:
                    self.note("over_bound", arm, over)
                synchronize(self.device)
                self.timers["time", arm] = timer(call, self.device)
                self.calls[arm] = call
            except Exception as e:  # of any library; one arm that fails must not stop the rest
                self.note("errors", arm, message(e))

    def times(self, every: bool = True) -> dict[str, dict[str, Any]]:
        """The measures of the row by arm. every: keep all samples, not only their min, median and max."""
        for (measure, arm), timer in self.timers.items():
            self.note(measure, arm, summary(timer.seconds, every))
        return self.fields


#: Rows of a product that are checked, in all columns.
CHECKED = 64
#: A product with a larger relative error is wrong, for random data and a BF16 result.
WRONG = 0.02
#: Unit roundoff of BF16 (8 significant bits), to which a product is rounded once.
UNIT = 2.0**-8


@dataclass(frozen=True)
class Reference:
    """Rows of a product in FP64. rows: their indices. allowed: the contract's bound of the error of sums, before rounding."""

    rows: Any
    exact: Any
    allowed: Any

    def error_over_bound(self, found: Any) -> float:
        """The largest error of `found`, as a multiple of the bound of docs/spec/numerics.md, section 9.

        found: the whole product in BF16 or FP32. Its sums are within `allowed` of the exact ones, and rounding to BF16 changes
        each by at most UNIT times its magnitude. Raises ValueError for a wrong product.
        """
        error = found[self.rows].double() - self.exact
        relative = (error.norm() / self.exact.norm()).item()
        if not relative < WRONG:
            raise ValueError(f"the relative error is {relative:.3g}")
        unit = 0.0 if found.dtype == torch.float32 else UNIT
        return (error.abs() / (self.allowed * (1 + unit) + unit * self.exact.abs())).max().item()


def reference(x: Any, weights: Any, ends: Any, bound: Callable[[Any, int], Any]) -> Reference:
    """The reference of x (M, K) times the transpose of each group's weight (N, K), for randomly chosen rows.

    x: a function from rows to their values in FP64. weights: a function from a group to its values in FP64. ends: the row after
    each group; rows after the last one are not chosen. bound: from the product of magnitudes and K to what sums may err by.
    """
    rows = torch.randperm(int(ends[-1]), generator=torch.Generator().manual_seed(0))[:CHECKED].sort().values.to(ends.device)
    groups = torch.searchsorted(ends.to(rows.dtype), rows, right=True)
    parts: list[tuple[Any, Any]] = []
    for group in groups.unique().tolist():
        left, right = x(rows[groups == group]), weights(group).mT
        parts.append((left @ right, bound(left.abs() @ right.abs(), left.shape[1])))
    exact, allowed = (torch.cat(some) for some in zip(*parts, strict=True))
    return Reference(rows, exact, allowed)
