"""Time of `matmul` of FP32 activations by quantized weights on the CPU, interleaved with torch's own products.

    python benchmarks/bench_matmul_cpu.py [--size 4096] [--rows 1,4,16,64] [--out benchmarks/results]

Weights are (N, K), N = K = size. Every arm rotates over copies of its weight of 256 MiB in all, so that none stays in a cache,
and takes its turn with all others, since machines have faster and slower moments: compare ratios, not microseconds. The arm
`read` sums 64 MiB, of another copy each turn: what a product of one row, which reads its weight once, cannot exceed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import common
import numpy as np
import tables
import torch
import typer

import breccia
from breccia.backend import components

RECIPES = ("int4", "mxfp4", "nvfp4", "nf4", "mxfp8", "fp8_block", "int8")
#: The arm that the others are compared with.
BASE = "F.linear FP32"
_ROTATED, _READ = 256 << 20, 64 << 20


def rotated(make: Callable[[], Any], nbytes: int) -> Callable[[], Any]:
    """Copies of a weight, each time the next."""
    copies = [make() for _ in range(max(_ROTATED // nbytes, 2))]
    turn = -1

    def following() -> Any:
        nonlocal turn
        turn = (turn + 1) % len(copies)
        return copies[turn]

    return following


def copied(st: breccia.ScaledTensor) -> breccia.ScaledTensor:
    """A tensor with memory of its own."""
    parts = {name: part.clone() for name, part in components(st).items()}
    given = [parts.get(name) for name in ("data", "scale", "zero_point", "global_scale")]
    return breccia.ScaledTensor.from_parts(*given[:2], st.recipe, st.layout, *given[2:], st.axis, st.padding)


def weights(size: int) -> dict[str, Callable[[Any], Callable[[], Any]]]:
    """By arm, what makes its call from activations; its weights are made once."""
    w = torch.from_numpy(common.normal((size, size), 0)) * 0.02
    linear = torch.nn.functional.linear
    full, half = rotated(w.clone, 4 * w.numel()), rotated(w.bfloat16().clone, 2 * w.numel())
    blocks = rotated(lambda: np.ones(_READ // 4, np.float32), _READ)
    arms: dict[str, Callable[[Any], Callable[[], Any]]] = {
        BASE: lambda x: lambda: linear(x, full()),
        "F.linear BF16": lambda x: (lambda y: lambda: linear(y, half()))(x.bfloat16()),
        "read": lambda x: lambda: torch.from_numpy(blocks()).sum(),
    }
    packed = torch.randint(0, 255, (size, size // 2), dtype=torch.uint8)
    try:
        codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (size, size), dtype=torch.int32), 1)
        scales = torch.ones(size // 128, size, 2, dtype=torch.bfloat16)
        int4 = rotated(codes.clone, packed.numel())
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        arms["torch int4"] = lambda x: (lambda y: lambda: product(y, int4(), 128, scales))(x.bfloat16())
    except (AttributeError, RuntimeError):  # a version of torch without it
        pass
    for name in RECIPES:
        st = breccia.cast(w, name)
        arms[name] = (lambda weight: lambda x: lambda: breccia.matmul(x, weight().mT))(
            rotated(lambda st=st: copied(st), int(st.data.nbytes))
        )
    return arms


def main(
    size: Annotated[int, typer.Option(min=128, help="N and K.")] = 4096,
    rows: Annotated[str, typer.Option(help="Rows of activations.")] = "1,4,16,64",
    runs: Annotated[int, typer.Option(min=1, help="Calls of each arm.")] = 40,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch and of breccia.")] = common.cores(),
    out: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time products on the CPU."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    breccia.set_num_threads(threads)
    arms, found = weights(size), list[dict[str, Any]]()
    for m in map(int, rows.split(",")):
        x = torch.from_numpy(common.normal((m, size), m))
        calls = {name: make(x) for name, make in arms.items()}
        for name, times in zip(calls, common.swept(list(calls.values()), runs, 0), strict=True):
            found.append({"rows": m, "arm": name, **times})
    result: dict[str, Any] = {"benchmark": "matmul-cpu", "schema": common.SCHEMA, "provenance": common.provenance()}
    options = {"size": size, "threads": threads, "torch": torch.__version__, "base": BASE, "read_bytes": _READ}
    tables.tell({**result, "options": options, "rows": found}, out, as_json)


if __name__ == "__main__":
    typer.run(main)
