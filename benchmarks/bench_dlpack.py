"""Time of hand-overs between the frameworks by DLPack: every pair, tensors of two and of three components.

Beside each are the bare calls for it: one export and one import of each component by the fastest functions of both libraries.
Components lie at multiples of 64 bytes, which JAX shares; MLX always copies.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer
from harness import Benchmark, Call, Result, Table, normal, program, table

import breccia

FRAMEWORKS = ("numpy", "torch", "jax", "mlx")
#: Two components, and three.
RECIPES = ("mxfp8", "nvfp4")
SHAPE, ALIGNMENT = (16, 128), 64
#: Calls per sample.
CALLS = 20


def handovers(result: Result) -> Table:
    def us(arm: str) -> Callable[[Any], str]:
        return lambda row: f"{1e6 * row['time'][arm]['min_s']:.1f}" if arm in row["time"] else ""

    columns = {"recipe": "recipe", "from": "from", "to": lambda row: row["to"] or "a bundle"}
    height, width = result["options"]["shape"]
    note = (
        f"{height}×{width}; mxfp8 has two components, nvfp4 three. The least of {result['options']['samples']} interleaved "
        "samples. Bare: one export and one import of each component by the fastest functions of the two libraries, without "
        "dtypes and checks. One thread."
    )
    columns |= {f"{arm}, µs": us(arm) for arm in ("tensor", "bundle", "bare")}
    return table("hand-overs by DLPack", columns, result["rows"], note)


BENCHMARK = Benchmark("dlpack", {"dlpack": handovers})


class Exporter:
    """What NumPy's `from_dlpack` takes."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def fastest() -> tuple[dict[str, Callable[[Any], Any]], dict[str, Callable[[Any], Any]]]:
    """The fastest functions of each library from an array to a capsule, and from a capsule to an array."""
    import jax
    import mlx.core as mx
    from jaxlib._jax import buffer_to_dlpack_managed_tensor, dlpack_managed_tensor_to_buffer
    from torch.utils.dlpack import from_dlpack, to_dlpack

    host = jax.local_devices(backend="cpu")[0]
    give = {"numpy": np.ndarray.__dlpack__, "torch": to_dlpack, "mlx": mx.array.__dlpack__}
    take = {"numpy": lambda capsule: np.from_dlpack(Exporter(capsule)), "torch": from_dlpack, "mlx": mx.from_dlpack}
    give["jax"] = buffer_to_dlpack_managed_tensor
    return give, {**take, "jax": lambda capsule: dlpack_managed_tensor_to_buffer(capsule, host, None, None)}


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 64 bytes."""
    raw = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    found = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def cases() -> list[tuple[dict[str, str], dict[str, Call]]]:
    """For each recipe and pair: the hand-over of a tensor, of a bundle, and the bare calls. To "": the export."""
    import jax

    from breccia.backend import components
    from breccia.bridges import from_dlpack, to_dlpack

    found: list[tuple[dict[str, str], dict[str, Call]]] = []
    give, take = fastest()
    for name in RECIPES:
        x, recipe = normal(SHAPE, 0), breccia.recipe(name)
        cast = breccia.cast(x, recipe)
        parts = {part: aligned(array) for part, array in components(cast).items()}
        codes = [aligned(np.atleast_1d(array).view(np.uint8)) for array in parts.values()]
        source = breccia.ScaledTensor(recipe=recipe, layout=cast.layout, **parts)
        for here in FRAMEWORKS:
            st = source if here == "numpy" else from_dlpack(source, here)
            if here == "jax":  # a cast there holds integers for codes and scales, which takes longer
                st = breccia.cast(jax.numpy.asarray(x), recipe)
            arrays = codes if here == "numpy" else [take[here](array.__dlpack__()) for array in codes]
            bundle = to_dlpack(st)
            found.append(({"recipe": name, "from": here, "to": ""}, {"tensor": lambda st=st: to_dlpack(st)}))
            for there in FRAMEWORKS:
                arms: dict[str, Call] = {
                    "tensor": lambda st=st, to=there: from_dlpack(st, to),
                    "bundle": lambda bundle=bundle, to=there: from_dlpack(bundle, to),
                    "bare": lambda give=give[here], take=take[there], arrays=arrays: [take(give(a)) for a in arrays],
                }
                if there != here:
                    found.append(({"recipe": name, "from": here, "to": there}, arms))
    return found


@program
def main(
    samples: Annotated[int, typer.Option(min=1, help="Samples of each call, interleaved; the least counts.")] = 200,
) -> Result:
    """Time hand-overs by DLPack."""
    import torch

    torch.set_num_threads(1)
    every = cases()
    timers = [timeit.Timer(call) for _, arms in every for call in arms.values()]
    least = np.min([[timer.timeit(CALLS) / CALLS for timer in timers] for _ in range(samples + 1)], axis=0)
    taken = iter(least.round(10).tolist())
    rows = [{**case, "time": {arm: {"min_s": s} for arm, s in zip(arms, taken, strict=False)}} for case, arms in every]
    return BENCHMARK.result(rows, {"samples": samples, "calls": CALLS, "shape": SHAPE})
