"""A quick benchmark of the operations on this machine. The repository's benchmarks/ compare with other libraries."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np

from .. import targets
from ..api import cast, dequantize, explain, matmul
from ..arrays.frameworks import Framework
from ..arrays.ops import Ops
from ..dispatch.registry import registry
from ..errors import OptionError, UnsupportedError
from ..options import whole_number
from ..recipes import ScalingRecipe
from ..storing import for_products
from ..tensors.tensor import ScaledTensor

#: Rows of the left operand of the timed product.
ROWS = 64


class _Timed:
    """What has the seconds of each run."""

    seconds: tuple[float, ...]

    @property
    def spread(self) -> tuple[float, float, float]:
        """Minimum, median and maximum."""
        return min(self.seconds), statistics.median(self.seconds), max(self.seconds)

    @property
    def named_spread(self) -> dict[str, float]:
        return dict(zip(("min_s", "median_s", "max_s"), self.spread, strict=True))


@dataclass(frozen=True)
class Timing(_Timed):
    """Seconds of each run of one operation. `bytes` counts all that it reads and writes: codes, scales and FP32."""

    recipe: str
    op: str
    kernel: str
    bytes: int
    seconds: tuple[float, ...]

    @property
    def least(self) -> float:
        return min(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """All fields, with the spread instead of every time."""
        return {"recipe": self.recipe, "op": self.op, "kernel": self.kernel, "bytes": self.bytes, **self.named_spread}


def measure(recipe: ScalingRecipe, on: str = "numpy", size: int = 4096, runs: int = 7, label: str = "") -> list[Timing]:
    """Time `cast`, `dequantize` and a `ROWS` x size by size x size `matmul` of standard normal FP32.

    on: framework, or framework:device. Each run waits for its result by reading one item. The first call, which loads
    and compiles, is not timed.

    Raises OptionError for a size or number of runs below 1 and for an unknown device, UnknownNameError for an unknown
    framework, ImportError if it is not installed.
    """
    _check_positive(("size", size), ("runs", runs))
    with _running(on) as (ops, device):
        return _timings(recipe, ops, device, size, runs, label or recipe.name)


def _check_positive(*options: tuple[str, int]) -> None:
    for name, value in options:
        if whole_number(name, value) < 1:
            raise OptionError(f"bench: {name} is at least 1; got {value}.", **{name: value})


@contextmanager
def _running(on: str) -> Generator[tuple[Ops, str]]:
    """The backend primitives and the device that FRAMEWORK:DEVICE names. Raises OptionError where nothing runs on it."""
    chosen = _chosen(on)
    try:
        yield chosen
    except (RuntimeError, UnsupportedError) as e:  # of frameworks for an unusable device, and for one without values
        raise OptionError(f"bench cannot run on {on}: {e}", on=on) from e


def _chosen(on: str) -> tuple[Ops, str]:
    """The backend primitives and the device that FRAMEWORK:DEVICE names."""
    name, _, device = on.partition(":")
    framework: Framework = registry().look_up("breccia_frameworks", name, "framework")
    root = framework.package
    if not targets.installed(root):
        raise ImportError(f"bench on {name} needs {root}, which is not installed: pip install {root}", name=root)
    return targets.load(framework.ops), device


@dataclass(frozen=True)
class Product(_Timed):
    """Seconds of a product of `rows` rows of activations. `over`: how many times faster than the dense product `base`."""

    arm: str
    rows: int
    kernel: str
    seconds: tuple[float, ...]
    over: float
    base: str = "dense float32"

    def to_dict(self) -> dict[str, Any]:
        """All fields, with the spread instead of every time."""
        return {
            "arm": self.arm,
            "rows": self.rows,
            "kernel": self.kernel,
            **self.named_spread,
            "over_dense": self.over,
            "dense": self.base,
        }


def measure_products(
    recipes: Sequence[tuple[str, ScalingRecipe]],
    on: str = "numpy",
    size: int = 4096,
    rows: Sequence[int] = (1, 16, 512),
    runs: int = 7,
) -> list[Product]:
    """Time products of activations by quantized weights against the framework's own dense ones (on CUDA: cuBLAS), in turns.

    The dense arms have weights and activations of FP32 and of BF16, where the framework has BF16. Weights are size x size and
    rotate, so that none stays in a cache. Short calls are timed several at a time, and their results are waited for together.

    On devices other than CPUs activations are BF16, weights are in the storage that their kernel reads, and there are arms for
    products of two tensors under a recipe: one for each kernel of the device that takes them and keeps the contract, so torch's
    (cuBLAS for FP8) is among them.

    Raises as `measure` does.
    """
    _check_positive(("size", size), ("runs", runs), *(("rows", m) for m in rows))
    with _running(on) as (ops, device):
        return _products(recipes, ops, device, size, rows, runs)


#: Bytes of the weights that an arm rotates over, and the most copies.
_ROTATED, _COPIES = 256 << 20, 64
#: Kinds of devices on which activations are FP32; "" is a framework's own. On others they are BF16.
HOSTS = ("", "cpu")
#: Seconds of a sample of short calls.
_SAMPLE = 2e-3


def _products(
    recipes: Sequence[tuple[str, ScalingRecipe]], ops: Ops, device: str, size: int, rows: Sequence[int], runs: int
) -> list[Product]:
    def copies(make: Callable[[], Any], nbytes: int) -> Callable[[], Any]:
        return cycle([make() for _ in range(min(max(_ROTATED // max(nbytes, 1), 2), _COPIES))]).__next__

    kind = device.partition(":")[0]
    apart = kind not in HOSTS
    w = _normal(ops, device, size, size)
    _wait(ops, w)  # refuses a device without values before hundreds of copies are cast
    dense_arms = {
        "dense float32": "float32",
        "dense bfloat16": "bfloat16" if ops.bfloat16 == "bfloat16" else "",
    }  # NumPy has no products of BF16
    following: dict[str, Callable[[], Any]] = {}
    for arm, dtype in dense_arms.items():
        if dtype:
            nbytes = (4 if dtype == "float32" else 2) * size * size
            following[arm] = copies(lambda dtype=dtype: ops.to_float(w * 1, dtype), nbytes)
    base = "dense bfloat16" if apart and "dense bfloat16" in following else "dense float32"
    sample = ops.to_float(w[:1], "bfloat16") if base == "dense bfloat16" else w[:1]
    plain: dict[str, Callable[[], Any]] = {}
    for label, recipe in recipes:
        nbytes = cast(w, recipe).nbytes
        following[label] = copies(lambda recipe=recipe: for_products(cast(w, recipe), sample), nbytes)
        if apart:
            plain[label] = copies(lambda recipe=recipe: cast(w, recipe), nbytes)
    products: list[Product] = []
    for m in rows:
        x = _normal(ops, device, m, size)
        calls: dict[str, Callable[[], Any]] = {}
        kernels: dict[str, str] = {}
        for arm, dtype in dense_arms.items():
            if arm in following:
                calls[arm] = partial(_dense_product, ops.to_float(x, dtype), following[arm])
        if base == "dense bfloat16":
            x = ops.to_float(x, "bfloat16")
        out = "bfloat16" if base == "dense bfloat16" else "float32"
        for label, recipe in recipes:
            calls[label] = partial(_quantized_product, x, following[label], out)
            winner = explain("matmul", x, following[label]().mT, out_dtype=out).winner
            kernels[label] = winner.name if winner else ""
            if apart:
                left, right = cast(x, recipe), plain[label]
                for name in taking(left, right().mT, kind, out):
                    arm = f"{label} x {label}" + (f" ({name})" if f"{label} x {label}" in calls else "")
                    calls[arm], kernels[arm] = partial(_quantized_product, left, right, out, name), name
        seconds: dict[str, list[float]] = {arm: [] for arm in calls}
        times = dict.fromkeys(calls, 1)
        for turn in range(-2, runs):  # the first call of an arm loads and compiles, the second says how long it takes
            for arm, call in calls.items():
                started = perf_counter()
                for result in [call() for _ in range(times[arm])]:
                    _wait(ops, result)
                taken = (perf_counter() - started) / times[arm]
                if turn == -1:
                    times[arm] = min(max(int(_SAMPLE / taken), 1), _COPIES)
                elif turn >= 0:
                    seconds[arm].append(taken)
        dense = statistics.median(seconds[base])
        for arm in calls:
            over = dense / statistics.median(seconds[arm])
            products.append(Product(arm, m, kernels.get(arm, ""), tuple(seconds[arm]), over, base))
    return products


def taking(a: ScaledTensor, b: ScaledTensor, device: str, out_dtype: str) -> list[str]:
    """The kernels for a kind of device that multiply two tensors and keep the contract, the one that runs first."""
    options = {"out_dtype": out_dtype}
    verdicts = explain("matmul", a, b, **options).verdicts
    names = [v.kernel.name for v in verdicts if v.kernel.device == device and not v.kernel.opt_in]
    return [name for name in names if explain("matmul", a, b, prefer=name, **options).winner is not None]


def _dense_product(x: Any, following: Callable[[], Any]) -> Any:
    return x @ following().T


def _quantized_product(x: Any, following: Callable[[], Any], out_dtype: str, prefer: str | None = None) -> Any:
    return matmul(x, following().mT, out_dtype, prefer=prefer)


def _normal(ops: Ops, device: str, *shape: int) -> Any:
    """Standard normal FP32 on the device."""
    x = ops.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))
    return ops.to(x, device) if device else x


def _wait(ops: Ops, result: Any) -> None:
    """Read one item of each array of a result."""
    parts = (result.data, result.scale) if isinstance(result, ScaledTensor) else (result,)
    for part in parts:
        ops.to_numpy(ops.reshape(part, (-1,))[:1])


def _timings(recipe: ScalingRecipe, ops: Ops, device: str, size: int, runs: int, label: str) -> list[Timing]:
    x, rows = _normal(ops, device, size, size), _normal(ops, device, ROWS, size)
    _wait(ops, x)
    st = cast(x, recipe)
    fp32 = 4 * size * size
    calls: dict[str, tuple[Callable[[], Any], int, tuple[Any, ...]]] = {
        "cast": (partial(cast, x, recipe), fp32 + st.nbytes, (x, recipe)),
        "dequantize": (partial(dequantize, st), fp32 + st.nbytes, (st,)),
        "matmul": (partial(matmul, rows, st.mT), 8 * ROWS * size + st.nbytes, (rows, st.mT)),
    }
    timings: list[Timing] = []
    for op, (call, touched, operands) in calls.items():
        _wait(ops, call())
        seconds: list[float] = []
        for _ in range(runs):
            started = perf_counter()
            _wait(ops, call())
            seconds.append(perf_counter() - started)
        winner = explain(op, *operands).winner
        timings.append(Timing(label, op, winner.name if winner else "", touched, tuple(seconds)))
    return timings
