"""JAX on a CUDA device: compiled casts, products, and steps of a layer in training, beside XLA's own code.

XLA compiles the generic algorithm of the same casts, and BF16 products. Calls are enqueued one after the other, and the last
one is waited for. A compiled function multiplies by several weights, so that little of its time is JAX's own for a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import typer
from bench_gpu_backward import cell
from harness import Benchmark, Call, Device, Result, Row, command, progress
from harness.device import Arms, Make, Timer, check_device, sampled, where
from harness.tables import ABSENT, Table, failures, median, over, sides, table, three

import breccia

CASTS = ("fp8_current", "fp8_block", "mxfp8", "nvfp4", "int4")
PAIRS = ("fp8_current", "fp8_block", "mxfp8")
#: The recipe of a, and that of b.
PRODUCTS = {"fp8_current": "fp8_current", "fp8_block": "fp8_block,block_m=128", "mxfp8": "mxfp8"}
#: Weights of BF16 arrays.
WEIGHTS = ("int4", "nvfp4", "int8")
STEPS = ("fp8_current", "fp8_row", "fp8_block", "fp8_tile", "mxfp8")
#: The side of what is cast, rows of products and the side of their weights; rows, inputs and outputs of the layer in training.
CAST, ROWS, SIDE, LAYER = 16384, (1, 16, 128, 512, 4096), 8192, (4096, 8192, 8192)
#: Weights of a compiled function.
COUNT = 8
TINY = 256
OURS, STORED, TRITON, GENERIC, BF16 = "breccia", "stored weights", "in Triton", "generic algorithm", "BF16"
#: The storage of those.
STORAGE = "mma_16x128"
#: The kernels that arms prefer.
PREFER = {TRITON: "triton.jax.matmul", GENERIC: "reference.{op}"}
#: Seconds of a sample, and the most calls of one.
SAMPLE_S, MOST_CALLS = 20e-3, 200


def casts(result: Result) -> Table:
    rows = [row for row in result["rows"] if row["what"] in ("cast", "pair")]

    def bandwidth(row: Row) -> str:
        ours = median(row, OURS)
        return ABSENT if ours is None else three(row["nbytes"] / ours / 1e12)

    columns: dict[str, Any] = {
        "call": lambda row: f"{row['case']}, both orientations" if row["what"] == "pair" else row["case"],
        "breccia, µs": cell("time", OURS),
        "TB/s": bandwidth,
        "generic algorithm, µs": cell("time", GENERIC),
        "× faster": lambda row: over(median(row, GENERIC), median(row, OURS)),
    }
    side = result["options"]["sides"][0]
    note = f"Casts of {side}×{side} numbers in BF16 under `jax.jit`. {medians(result)} TB/s: bytes read once and written once."
    return table("casts in JAX on a GPU", columns, rows, note + raised(rows))


def products(result: Result) -> Table:
    rows = [row for row in result["rows"] if row["what"] == "product"]
    columns: dict[str, Any] = {
        "operands": "case",
        "rows": "rows",
        **{f"{arm}, µs": cell("time", arm) for arm in (OURS, STORED, TRITON, BF16)},
        "× BF16": lambda row: over(median(row, BF16), median(row, STORED) or median(row, OURS)),
        "kernel": "kernel",
    }
    side, count = result["options"]["sides"][1], result["options"]["weights"]
    note = (
        f"Products of rows by {count} weights of {side}×{side}, to BF16, in one function under `jax.jit`: the time of one. "
        f"What is quantized has been before. {STORED.capitalize()}: in `{STORAGE}`, by `cuda.jax.weight_only`; × BF16 is "
        "theirs where there are some. "
    )
    return table("products in JAX on a GPU", columns, rows, note + medians(result) + raised(rows))


def steps(result: Result) -> Table:
    rows = [row for row in result["rows"] if row["what"] == "step"]
    columns: dict[str, Any] = {
        "recipe": "case",
        **{f"{arm}, µs": cell("time", arm) for arm in (OURS, BF16)},
        "× BF16": lambda row: over(median(row, BF16), median(row, OURS)),
    }
    shape = sides(result["options"]["sides"][2])
    note = (
        f"Forward and backward of `breccia_jax.DotGeneral` under `jax.jit`, BF16 numbers, {shape} (rows, inputs, outputs); x, "
        f"the weight and the gradient are cast in each step. {medians(result)}"
    )
    return table("steps of a layer in training in JAX on a GPU", columns, rows, note + raised(rows))


def medians(result: Result) -> str:
    return f"Medians of {result['options']['samples']} samples in rotation, jax {result['options']['jax']}."


def raised(rows: list[Row]) -> str:
    return failures((arm, error, row["case"]) for row in rows for arm, error in row.get("errors", {}).items())


BENCHMARK = Benchmark(
    "gpu-jax", {"gpu-jax-casts": casts, "gpu-jax-products": products, "gpu-jax-steps": steps}, key=("what", "case", "rows")
)


def elapsed(call: Call, calls: int) -> float:
    """Seconds per call."""
    import jax

    start, last = time.perf_counter(), None
    for _ in range(calls):
        last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / calls


class Waited(Timer):
    """A timer of calls of JAX, of which the last is waited for. products: of a call, whose time they share."""

    def fit(self, products: int) -> Waited:
        self.products = products
        elapsed(self.call, 2)
        self.calls = min(MOST_CALLS, max(1, int(SAMPLE_S / elapsed(self.call, 3))))
        return self

    def sample(self) -> None:
        self.seconds.append(elapsed(self.call, self.calls) / self.products)


def timed(makers: dict[str, Make], samples: int, products: int = 1) -> Row:
    """The times of arms, interleaved, and the errors of those that cannot be called. products: of each call."""
    arms = Arms("cpu")  # torch's events and streams are not JAX's
    arms.add(makers, lambda call, device: Waited(call, device).fit(products))
    sampled(arms.timers.values(), samples)
    return arms.times(every=False)


def random(shape: tuple[int, ...], seed: int = 0) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def jitted(function: Callable[..., Any], *arrays: Any) -> Make:
    import jax

    def make() -> Call:
        compiled = jax.jit(function)
        return lambda: compiled(*arrays)

    return make


def cast_row(what: str, spec: str, side: int, samples: int) -> Row:
    x = random((side, side))
    op = {"cast": "cast", "pair": "cast_pair"}[what]
    call: Any = getattr(breccia, op)
    makers = {
        arm: jitted(lambda x, prefer=prefer: call(x, spec, prefer=prefer), x)
        for arm, prefer in ((OURS, None), (GENERIC, PREFER[GENERIC].format(op=op)))
    }
    written = call(x, spec)
    nbytes = x.nbytes + sum(st.nbytes for st in (written if what == "pair" else (written,)))
    return {"what": what, "case": spec, "nbytes": nbytes, **timed(makers, samples)}


def product_row(first: str, second: str, rows: int, side: int, samples: int) -> Row:
    x, weights = random((rows, side), 1), [random((side, side), seed) for seed in range(2, 2 + COUNT)]
    arrays = first == BF16
    a = x if arrays else breccia.cast(x, first)
    # The weights of BF16 arrays are as layers of JAX keep them, K first; .mT of arrays is a copy outside of compiled functions.
    factors = [breccia.cast(w.T, second, axis=-2) if arrays else breccia.cast(w, second) for w in weights]

    def factor(b: Any) -> Any:
        return b if arrays else b.mT

    def products(a: Any, factors: list[Any], prefer: str | None = None) -> list[Any]:
        return [breccia.matmul(a, factor(b), "bfloat16", prefer=prefer) for b in factors]

    makers = {
        OURS: jitted(products, a, factors),
        TRITON: jitted(partial(products, prefer=PREFER[TRITON]), a, factors),
        BF16: jitted(lambda x, weights: [x @ w.T for w in weights], x, weights),
    }
    if arrays:
        makers[STORED] = jitted(products, a, [breccia.cast(w, second).to_storage(STORAGE).mT for w in weights])
    kernel = breccia.explain("matmul", a, factor(factors[0])).running
    case = first if first == second else f"{first} by {second}"
    return {"what": "product", "case": case, "rows": rows, "kernel": kernel, **timed(makers, samples, COUNT)}


def step_row(preset: str, shape: tuple[int, int, int], samples: int) -> Row:
    import jax

    import breccia_jax

    m, k, n = shape
    x, w, dy = random((m, k), 1), random((k, n), 2) * k**-0.5, random((m, n), 3)

    def step(dot: Any) -> Make:
        def both(x: Any, w: Any, dy: Any) -> Any:
            y, back = jax.vjp(lambda x, w: dot(x, w, (((1,), (0,)), ((), ()))), x, w)
            return y, *back(dy)

        return jitted(both, x, w, dy)

    makers = {OURS: step(breccia_jax.DotGeneral(breccia.TrainingRecipe(preset))), BF16: step(jax.lax.dot_general)}
    return {"what": "step", "case": preset, **timed(makers, samples)}


@command
def jax(
    tiny: Annotated[bool, typer.Option("--tiny", help="Small matrices, to try the script.")] = False,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each arm, interleaved.")] = 9,
    device: Device = "cuda",
) -> Iterator[Result]:
    """Time casts, products and steps of layers in JAX, beside what XLA compiles."""
    import jax

    check_device(device)
    if device == "cuda" and jax.default_backend() != "gpu":
        raise typer.BadParameter("JAX sees no GPU here; --device cpu tries the script without one.")
    cast, side, layer = (TINY, TINY, (TINY,) * 3) if tiny else (CAST, SIDE, LAYER)
    works: list[Callable[[], Row]] = []
    products = [(*pair, m) for pair in (*PRODUCTS.items(), *((BF16, spec) for spec in WEIGHTS)) for m in ROWS]
    works += [lambda product=product: product_row(*product, side, samples) for product in products]
    works += [lambda preset=preset: step_row(preset, layer, samples) for preset in STEPS]
    works += [lambda spec=spec: cast_row("cast", spec, cast, samples) for spec in CASTS]
    works += [lambda spec=spec: cast_row("pair", spec, cast, samples) for spec in PAIRS]
    options = {"device": device, "samples": samples, "sides": (cast, side, layer), "weights": COUNT, "jax": jax.__version__}
    run, rows = where(device), list[Row]()
    for work in progress(works, "jax"):
        rows.append(work())
        yield BENCHMARK.result(rows, options, run)
