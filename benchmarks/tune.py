"""The fastest configurations of the Triton kernels on this machine's GPU, for breccia-triton to ship.

    python benchmarks/tune.py [--recipes nvfp4] [--ops cast] [--dtypes bf16] [--shapes 16384x8192] [--seconds 180] [--out OUT]

For each call, every candidate of `breccia_triton.tuning` is compiled in processes beside this one, and timed here in rotation
with the default. What is faster than the default goes into the file of the device; the table shows all calls. A candidate that
writes other bytes than the default is an error, and the status is 1. Calls that matter most come first; `--seconds` ends the
run early. Entries of an existing file remain where this run does not come to their call.

`--device cpu` tries the script without a GPU, in Triton's interpreter, with the host's clock and few candidates.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_gpu_casts import RECIPES
from harness.command import Device, Recipes, known, recipes_named, sizes
from harness.device import check_device, message, where
from harness.results import ROOT, cores
from plain import TILES
from rich.console import Console
from rich.table import Table

import breccia

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Products of so many rows of activations and a weight of the shape.
PRODUCTS = {f"matmul-{rows}": rows for rows in (1, 16, 128, 4096)}
OPS = ("cast", "cast-axis-2", "dequantize", "dequantize-axis-2", "cast_ste", *PRODUCTS)
#: The first shape stands for all tensors but small ones, the second for these (see `choices.SMALL`).
SHAPES = ("16384x8192", "1024x1024")
FOLDER = ROOT / "breccia-triton/src/breccia_triton/configurations"
#: What comes first: the calls furthest from the bandwidth of a copy.
FIRST = (
    *(("cast-axis-2", spec) for spec in ("mxint8", "fp8_block", "fp8_row", "int8", "nvfp4", "mxfp8")),
    ("cast", TILES),
    ("cast", "int4,symmetric=false,signed=false"),
    *(("dequantize", spec) for spec in ("mxfp6", "nf4", "nvfp4", "mxint8", "int4", "mxfp4", "fp8_block")),
)
#: Candidates of a call on a CPU.
FEW = 4


@dataclass(frozen=True)
class Case:
    """A call to tune."""

    op: str
    spec: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.op.removesuffix("-axis-2")

    @property
    def rows(self) -> int:
        """Of activations; 0 for other ops."""
        return PRODUCTS.get(self.op, 0)

    @property
    def axis(self) -> int:
        return -2 if self.op.endswith("-axis-2") else -1

    def operand(self, device: str) -> Any:
        """Standard normal numbers, or their cast."""
        from breccia.backend import ScaledTensor

        dtype = getattr(torch, self.dtype)
        if device == "meta":
            x = torch.empty(self.shape, dtype=dtype, device=device)
        else:
            x = torch.randn(self.shape, device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)
        if self.name != "dequantize" and not self.rows:
            return x
        st = breccia.cast(x, breccia.recipe(self.spec), axis=self.axis)
        # The generic algorithm may return views, the kernels do not.
        parts = [None if part is None else part.contiguous() for part in (st.data, st.scale, st.zero_point, st.global_scale)]
        st = ScaledTensor.from_parts(*parts[:2], st.recipe, st.layout, *parts[2:], st.axis, st.padding)
        if not self.rows:
            return st
        from breccia_triton.multiplying import Operand

        a = torch.ones((self.rows, self.shape[1]), dtype=dtype, device=device)
        return Operand(a, False), Operand(st.mT, True)

    def prepared(self, operand: Any, hardware: Any, choose: Any) -> Any:
        """As of `cast.prepared`, `decode.prepared` or `fused_matmul.prepared`."""
        from breccia_triton import cast, decode, fused_matmul

        if self.rows:
            return fused_matmul.prepared(*operand, None, self.dtype, hardware, choose)
        if self.name == "dequantize":
            return decode.prepared(operand, self.dtype, hardware, choose)
        return cast.prepared(self.name, operand, breccia.recipe(self.spec), self.axis, self._options, hardware, choose)

    @property
    def _options(self) -> Any:
        from breccia.backend import CastOptions

        return CastOptions(axis=self.axis)

    def launches(self, made: Any) -> list[Any]:
        if self.rows:
            return [made.launch] if made.sum is None else [made.launch, made.sum]
        return [made] if self.name == "dequantize" else made.launches

    def compiled(self, operand: Any, made: Any) -> Callable[[], Any]:
        """The call, on its operand."""
        from breccia_triton import cast, decode, fused_matmul

        if self.rows:
            product = fused_matmul.Call(*operand, self.dtype, made)
            return lambda: product(*operand, None, None)
        if self.name == "dequantize":
            decoded = decode.Call(operand, self.dtype, made)
            return lambda: decoded(operand, None)
        call, options = cast.Call(operand, made), self._options
        return lambda: call(operand, options)


def cases(recipes: list[str], ops: list[str], dtypes: list[str], shapes: list[tuple[int, ...]]) -> Iterator[Case]:
    """Every call in the order of its importance."""
    for shape, dtype in itertools.product(shapes, dtypes):
        every = dict.fromkeys([*FIRST, *itertools.product(ops, recipes)])
        for op, spec in every:
            if op in ops and spec in recipes:
                yield Case(op, spec, DTYPES[dtype], shape)


def choosing(key: Any, choice: Any) -> Any:
    """A choice for one key, and the default for others."""
    from breccia_triton.choices import DEFAULT

    return lambda other: choice if other == key else DEFAULT


def keys_of(case: Case, hardware: Any) -> list[Any]:
    """The keys of the choices that a call asks for; none where no kernel runs."""
    from breccia_triton.choices import DEFAULT
    from breccia_triton.specs import Unsupported

    keys: list[Any] = []

    def asked(key: Any) -> Any:
        keys.append(key)
        return DEFAULT

    try:
        case.prepared(case.operand("meta"), hardware, asked)
    except Unsupported:
        return []
    return keys


def compile_one(case: Case, key: Any, choice: Any, hardware: Any, target: Any) -> None:
    """Compile the kernels of a candidate into Triton's cache on disk, without a GPU."""
    from breccia_triton.launch import Launcher

    made = case.prepared(case.operand("meta"), hardware, choosing(key, choice))
    for launch in case.launches(made):
        Launcher(launch, target)


def bytes_of(result: Any) -> list[Any]:
    """The components of a result as bytes."""
    from breccia.backend import ScaledTensor, components

    parts = components(result).values() if isinstance(result, ScaledTensor) else [result]
    return [part.reshape(-1).contiguous().view(torch.uint8) for part in parts]


class OtherBytes(Exception):
    """A candidate wrote other bytes than the default."""


def timed(case: Case, operand: Any, different: dict[Any, Any], dry: bool) -> Any:
    """What `tuning.fastest` finds among the candidates of a key."""
    from breccia_triton import tuning
    from breccia_triton.choices import DEFAULT

    expected = bytes_of(case.compiled(operand, different[DEFAULT])())

    def maker(made: Any) -> Callable[[], Any]:
        call = case.compiled(operand, made)
        # Candidates of a product add in other orders: tests hold them to its bound.
        if not case.rows and not all(torch.equal(a, b) for a, b in zip(bytes_of(call()), expected, strict=True)):
            raise OtherBytes("it writes other bytes than the default")
        return call

    makers = {choice: lambda made=made: maker(made) for choice, made in different.items()}
    if dry:
        return tuning.fastest(makers, lambda call, calls: timeit.timeit(call, number=calls) / calls, 1, 1)
    return tuning.fastest(makers, tuning.elapsed, tuning.SAMPLES, tuning.FINAL_SAMPLES)


def printed(rows: dict[Any, tuple[Any, int]]) -> None:
    """Print the table, and what failed."""
    table = Table("call", "default µs", "best µs", "gain", "choice", "tried", box=None)
    for key, (found, tried) in rows.items():
        default, best = found.best.default_seconds * 1e6, found.best.seconds * 1e6
        table.add_row(
            str(key), f"{default:.1f}", f"{best:.1f}", f"{100 * (default / best - 1):.1f} %", str(found.best.choice), f"{tried}"
        )
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for key, (found, _) in rows.items():
        for choice, why in found.failed.items():
            print(f"{key}: {choice}: {why}")


def main(
    recipes: Recipes = None,
    ops: Annotated[list[str] | None, typer.Option(help="Those of OPS; repeat for several. Default: all.")] = None,
    dtypes: Annotated[list[str] | None, typer.Option(help="bf16, fp16, fp32; repeat for several. Default: bf16.")] = None,
    shapes: Annotated[list[str] | None, typer.Option(help="ROWSxCOLUMNS; repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(help="Begin no call later than this; calls left out are counted.")] = 180,
    jobs: Annotated[int, typer.Option(help="Processes that compile. Default: the cores but two.")] = 0,
    device: Device = "cuda",
    out: Annotated[Path, typer.Option(help="Folder of the file. Default: that of breccia-triton.")] = FOLDER,
) -> None:
    """Tune the Triton kernels on this machine."""
    started, dry = time.monotonic(), device == "cpu"
    check_device(device)
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"
    recipes_named(recipes)  # exits on an unknown name
    chosen = known(ops, OPS, "--ops"), known(dtypes or ["bf16"], DTYPES, "--dtypes")
    every = list(cases(list(recipes or RECIPES), *chosen, [sizes(shape) for shape in shapes or SHAPES]))

    from breccia_triton import choices, tuning
    from breccia_triton.operands import hardware

    found = hardware(torch.device(device))
    work: dict[Any, Case] = {}  # by key: several calls may ask for the same choice
    for case in every:
        for key in keys_of(case, found):
            work.setdefault(key, case)

    def candidates(case: Case, key: Any, operand: Any) -> dict[Any, Any]:
        def prepare(choose: Any) -> Any:
            return case.prepared(operand, found, choose)

        different = tuning.distinct(key, prepare, case.launches, lambda other: choices.DEFAULT)
        return dict(itertools.islice(different.items(), FEW if dry else None))

    executor, compiling = None, dict[Any, list[Future[None]]]()
    if not dry:
        import triton

        target = triton.runtime.driver.active.get_current_target()
        executor = ProcessPoolExecutor(jobs or max(1, cores() - 2), get_context("spawn"))
        for key, case in work.items():
            tried = candidates(case, key, case.operand("meta"))
            compiling[key] = [executor.submit(compile_one, case, key, choice, found, target) for choice in tried]
    rows: dict[Any, tuple[Any, int]] = {}
    operand: tuple[Case | None, Any] = (None, None)
    left = 0
    for key, case in work.items():
        remaining = seconds - (time.monotonic() - started)
        if remaining <= 0 or wait(compiling.get(key, []), timeout=remaining).not_done:
            left += 1
            continue
        operand = operand if operand[0] == case else (case, case.operand(device))
        different = candidates(case, key, operand[1])
        try:
            if len(different) > 1:
                rows[key] = timed(case, operand[1], different, dry), len(different)
                print(f"{time.monotonic() - started:.0f} s: {key}: {rows[key][0].best.choice}", file=sys.stderr)
        except Exception as e:  # one call that fails must not stop the rest
            print(f"{key}: {message(e)}", file=sys.stderr)
    if executor is not None:
        executor.shutdown(wait=False, cancel_futures=True)
    name, facts = found.name or "cpu", where(device)
    path = out / choices.file_name(name)
    kept = {part: facts[part] for part in ("date_utc", "device", "versions", "commit", "command") if part in facts}
    choices.write(path, name, {key: found.best for key, (found, _) in rows.items()}, kept, defaults=False)
    printed(rows)
    print(f"{len(rows)} calls tuned, {left} left for lack of time; written to {path.name}.")
    wrong = [why for found, _ in rows.values() for why in found.failed.values() if why.startswith(OtherBytes.__name__)]
    if wrong:
        sys.exit(f"tune: {len(wrong)} candidates wrote other bytes than the default; see the table.")


if __name__ == "__main__":
    typer.run(main)
