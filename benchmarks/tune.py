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
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import common
import typer
from bench_gpu import DTYPES, RECIPES, RecipesOption, check_device, known, message, sizes, where
from rivals import TILES

#: Products of so many rows of activations and a weight of the shape.
PRODUCTS = {f"matmul-{rows}": rows for rows in (1, 16, 128, 4096)}
OPS = ("cast", "cast-axis-2", "dequantize", "dequantize-axis-2", "cast_ste", *PRODUCTS)
#: The first shape stands for all tensors but small ones, the second for these (see `choices.SMALL`).
SHAPES = ("16384x8192", "1024x1024")
FOLDER = common.ROOT / "breccia-triton/src/breccia_triton/configurations"
#: What comes first: the calls furthest from the bandwidth of a copy.
FIRST = (
    *(("cast-axis-2", spec) for spec in ("mxint8", "fp8_block", "fp8_row", "int8", "nvfp4", "mxfp8")),
    ("cast", TILES),
    ("cast", "int4,symmetric=false,signed=false"),
    *(("dequantize", spec) for spec in ("mxfp6", "nf4", "nvfp4", "mxint8", "int4", "mxfp4", "fp8_block")),
)
#: Candidates of a call on a CPU.
FEW = 4

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Case:
    """A call to tune."""

    op: str
    spec: str
    dtype: str
    shape: tuple[int, int]

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
        import torch

        import breccia
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
        import breccia
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


def cases(
    recipes: list[str], ops: list[str], dtypes: list[str], shapes: list[tuple[int, int]]
) -> Iterator[Case]:  # fmt: skip
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


@dataclass
class Row:
    """What was found for a key."""

    key: Any
    tuned: Any
    tried: int
    failed: dict[Any, str]

    @property
    def cells(self) -> list[str]:
        default, best = self.tuned.default_seconds * 1e6, self.tuned.seconds * 1e6
        gain = f"{100 * (default / best - 1):.1f} %"
        return [str(self.key), f"{default:.1f}", f"{best:.1f}", gain, str(self.tuned.choice), f"{self.tried}"]


HEADINGS = ["call", "default µs", "best µs", "gain", "choice", "tried"]


def printed(rows: list[Row]) -> None:
    """Print the table, and what failed."""
    table = [HEADINGS, *(row.cells for row in rows)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(HEADINGS))]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    for row in rows:
        for choice, why in row.failed.items():
            print(f"{row.key}: {choice}: {why}")


def bytes_of(result: Any) -> list[Any]:
    """The components of a result as bytes."""
    import torch

    from breccia.backend import ScaledTensor, components

    parts = components(result).values() if isinstance(result, ScaledTensor) else [result]
    return [part.reshape(-1).contiguous().view(torch.uint8) for part in parts]


class OtherBytes(Exception):
    """A candidate wrote other bytes than the default."""


def tuned(
    case: Case, key: Any, operand: Any, different: dict[Any, Any], sample: Callable[..., float], samples: tuple[int, int]
) -> Row:  # fmt: skip
    """Time the candidates for a key. sample, samples: as of `tuning.fastest`."""
    import torch

    from breccia_triton.choices import DEFAULT
    from breccia_triton.tuning import fastest

    expected = bytes_of(case.compiled(operand, different[DEFAULT])())

    def maker(made: Any) -> Callable[[], Any]:
        call = case.compiled(operand, made)
        # Candidates of a product add in other orders: tests hold them to its bound.
        if not case.rows and not all(torch.equal(a, b) for a, b in zip(bytes_of(call()), expected, strict=True)):
            raise OtherBytes("it writes other bytes than the default")
        return call

    makers = {choice: lambda made=made: maker(made) for choice, made in different.items()}
    timed = fastest(makers, sample, *samples)
    return Row(key, timed.best, len(different), timed.failed)


@app.command()
def main(
    recipes: RecipesOption = None,
    ops: Annotated[list[str] | None, typer.Option(help="Those of OPS; repeat for several. Default: all.")] = None,
    dtypes: Annotated[list[str] | None, typer.Option(help="bf16, fp16, fp32; repeat for several. Default: bf16.")] = None,
    shapes: Annotated[list[str] | None, typer.Option(help="ROWSxCOLUMNS; repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(help="Begin no call later than this; calls left out are counted.")] = 180,
    jobs: Annotated[int, typer.Option(help="Processes that compile. Default: the cores but two.")] = 0,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the script.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Folder of the file. Default: that of breccia-triton.")] = FOLDER,
) -> None:
    """Tune the Triton kernels on this machine."""
    started = time.monotonic()
    check_device(device)
    dry = device == "cpu"
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"
    chosen_ops = known(ops, OPS, "--ops")
    chosen_dtypes = known(dtypes or ["bf16"], tuple(DTYPES), "--dtypes")
    sides = [sizes(shape) for shape in shapes or SHAPES]
    common.recipes(list(recipes or []))  # exits on an unknown name

    import torch

    from breccia_triton import choices, tuning
    from breccia_triton.operands import hardware

    found = hardware(torch.device(device))
    name = found.name or "cpu"
    how = (host_time, (1, 1)) if dry else (tuning.elapsed, (tuning.SAMPLES, tuning.FINAL_SAMPLES))
    work: list[tuple[Case, Any]] = []
    for case in cases(list(recipes or RECIPES), chosen_ops, chosen_dtypes, sides):
        held = {key for _, key in work}
        work += [(case, key) for key in keys_of(case, found) if key not in held]

    def candidates(case: Case, key: Any, operand: Any) -> dict[Any, Any]:
        different = tuning.distinct(
            key, lambda choose: case.prepared(operand, found, choose), case.launches, lambda other: choices.DEFAULT
        )
        return dict(itertools.islice(different.items(), FEW if dry else None))

    rows: list[Row] = []
    executor: ProcessPoolExecutor | None = None
    compiling: list[list[Future[None]]] = [[] for _ in work]
    if not dry:
        import triton

        target = triton.runtime.driver.active.get_current_target()
        executor = ProcessPoolExecutor(jobs or max(1, common.cores() - 2), get_context("spawn"))
        for futures, (case, key) in zip(compiling, work, strict=True):
            for choice in candidates(case, key, case.operand("meta")):
                futures.append(executor.submit(compile_one, case, key, choice, found, target))
    operands: dict[Case, Any] = {}
    left = 0
    for futures, (case, key) in zip(compiling, work, strict=True):
        remaining = seconds - (time.monotonic() - started)
        if remaining <= 0 or not compiled_by(futures, remaining):
            left += 1
            continue
        if case not in operands:
            operands = {case: case.operand(device)}
        different = candidates(case, key, operands[case])
        if len(different) == 1:
            continue
        try:
            rows.append(tuned(case, key, operands[case], different, *how))
        except Exception as e:
            print(f"{key}: {message(e)}", file=sys.stderr)
            continue
        print(f"{time.monotonic() - started:.0f} s: {key}: {rows[-1].tuned.choice}", file=sys.stderr)
    if executor is not None:
        executor.shutdown(wait=False, cancel_futures=True)
    facts = where(device)
    provenance = {name: facts[name] for name in ("date_utc", "device", "versions", "commit", "command") if name in facts}
    path = out / choices.file_name(name)
    choices.write(path, name, {row.key: row.tuned for row in rows}, provenance, defaults=False)
    printed(rows)
    print(f"{len(rows)} calls tuned, {left} left for lack of time; written to {path.name}.")
    wrong = [why for row in rows for why in row.failed.values() if why.startswith(OtherBytes.__name__)]
    if wrong:
        sys.exit(f"tune: {len(wrong)} candidates wrote other bytes than the default; see the table.")


def compiled_by(futures: list[Future[None]], seconds: float) -> bool:
    """Wait until candidates are compiled; False where that takes longer. One that failed fails again when it is timed."""
    from concurrent.futures import wait

    return not wait(futures, timeout=seconds).not_done


def host_time(call: Callable[[], object], calls: int) -> float:
    """Seconds per call by the host's clock."""
    return timeit.timeit(call, number=calls) / calls


if __name__ == "__main__":
    app()
