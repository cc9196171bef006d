"""Time of hand-overs between the frameworks by DLPack: every pair, tensors of two and of three components.

    python benchmarks/bench_dlpack.py [--samples 200] [--out benchmarks/results]

Each hand-over is timed beside the bare calls for it: one export and one import of each component by the fastest functions that
the two libraries have for arrays of `uint8`, with no dtype, header or check. All calls are interleaved in one process, so that
a disturbance affects all of them. Components lie at multiples of 64 bytes, which JAX shares; MLX allocates its own and always
copies.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import common
import numpy as np
import tables
import typer

import breccia
from breccia.backend import components
from breccia.bridges import from_dlpack, to_dlpack

FRAMEWORKS = ("numpy", "torch", "jax", "mlx")
#: Two components, and three.
RECIPES = ("mxfp8", "nvfp4")
SHAPE = (16, 128)
ALIGNMENT = 64
#: Calls per sample.
CALLS = 20


def exporters() -> dict[str, Callable[[Any], Any]]:
    """The fastest function of each library that makes a capsule of an array."""
    import mlx.core as mx
    from jaxlib._jax import buffer_to_dlpack_managed_tensor
    from torch.utils.dlpack import to_dlpack as of_torch

    of_jax = buffer_to_dlpack_managed_tensor
    return {"numpy": np.ndarray.__dlpack__, "torch": of_torch, "jax": of_jax, "mlx": mx.array.__dlpack__}


def importers() -> dict[str, Callable[[Any], Any]]:
    """The fastest function of each library that makes an array of a capsule; NumPy's takes the exporter."""
    import jax
    import mlx.core as mx
    from jaxlib._jax import dlpack_managed_tensor_to_buffer
    from torch.utils.dlpack import from_dlpack as to_torch

    host = jax.local_devices(backend="cpu")[0]
    return {
        "torch": to_torch,
        "jax": lambda capsule: dlpack_managed_tensor_to_buffer(capsule, host, None, None),
        "mlx": mx.from_dlpack,
    }


class Exporter:
    """What NumPy's `from_dlpack` takes."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 64 bytes."""
    raw = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    found = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def bare(arrays: list[Any], export: Callable[[Any], Any], take: Callable[[Any], Any] | None) -> Callable[[], Any]:
    """One export and one import of each array."""
    if take is None:
        return lambda: [np.from_dlpack(Exporter(export(array))) for array in arrays]
    return lambda: [take(export(array)) for array in arrays]


def calls() -> dict[tuple[str, str, str], dict[str, Callable[[], Any]]]:
    """By (recipe, from, to): the hand-over of a tensor, of a bundle, and the bare calls. To "": the export."""
    import jax

    found: dict[tuple[str, str, str], dict[str, Callable[[], Any]]] = {}
    from_parts: Any = breccia.ScaledTensor
    give, take = exporters(), importers()
    for name in RECIPES:
        x, recipe = common.normal(SHAPE, 0), breccia.recipe(name)
        cast = breccia.cast(x, recipe)
        parts = {part: aligned(array) for part, array in components(cast).items()}
        codes = [aligned(np.atleast_1d(array).view(np.uint8)) for array in parts.values()]
        source = from_parts(recipe=recipe, layout=cast.layout, **parts)
        for here in FRAMEWORKS:
            st = source if here == "numpy" else from_dlpack(source, here)
            if here == "jax":  # a cast there holds integers for codes and scales, which takes longer
                st = breccia.cast(jax.numpy.asarray(x), recipe)
            arrays = codes if here == "numpy" else [take[here](array.__dlpack__()) for array in codes]
            bundle = to_dlpack(st)
            found[name, here, ""] = {"tensor": lambda st=st: to_dlpack(st)}
            for there in FRAMEWORKS:
                if there != here:
                    found[name, here, there] = {
                        "tensor": lambda st=st, to=there: from_dlpack(st, to),
                        "bundle": lambda bundle=bundle, to=there: from_dlpack(bundle, to),
                        "bare": bare(arrays, give[here], take.get(there)),
                    }
    return found


def measured(samples: int) -> list[dict[str, Any]]:
    """Rows of the table: the least seconds of each call."""
    of_pairs = calls()
    timers = [timeit.Timer(call) for of_pair in of_pairs.values() for call in of_pair.values()]
    least = [timer.timeit(CALLS) for timer in timers]
    for _ in range(samples):
        least = [min(before, timer.timeit(CALLS)) for before, timer in zip(least, timers, strict=True)]
    found = iter(least)
    return [
        {"recipe": recipe, "from": here, "to": there, **{f"{what}_s": round(next(found) / CALLS, 10) for what in of_pair}}
        for (recipe, here, there), of_pair in of_pairs.items()
    ]


def main(
    samples: Annotated[int, typer.Option(min=1, help="Samples of each call, interleaved; the least counts.")] = 200,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time hand-overs by DLPack."""
    import torch

    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "dlpack", "schema": common.SCHEMA, "provenance": common.provenance()}
    options = {"samples": samples, "calls": CALLS, "shape": SHAPE}
    tables.tell({**result, "options": options, "rows": measured(samples)}, out, as_json)


if __name__ == "__main__":
    typer.run(main)
