"""The fastest configurations of the Triton kernels on this machine's GPU, for breccia-triton to ship.

Every candidate of `breccia_triton.tuning.timing` is compiled in processes beside this one, and timed here in rotation with the
default. What is faster goes into the file of the device, where entries of other calls remain. A candidate that writes other
bytes than the default is an error. `--device cpu` tries the script in Triton's interpreter.
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
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_gpu_casts import RECIPES
from harness import ROOT, Device, Recipes, Table, cores, known, recipes_named, show, sizes, table
from harness.device import Call, check_device, message, where
from plain import TILES

import breccia

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Products of so many rows of activations and a weight of the shape.
PRODUCTS = {f"matmul-{rows}": rows for rows in (1, 16, 128, 4096)}
OPS = ("cast", "cast-axis-2", "cast_pair", "dequantize", "dequantize-axis-2", "cast_ste", *PRODUCTS)
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
class Tunable:
    """A call that breccia-triton prepares under choices. launches, compiled: kernels, and the call, of what was prepared."""

    prepare: Callable[[Any], Any]
    launches: Callable[[Any], list[Any]]
    compiled: Callable[[Any], Call]


@dataclass(frozen=True)
class Case:
    """What to tune."""

    op: str
    spec: str
    dtype: str
    shape: tuple[int, ...]

    def tunable(self, device: str, hardware: Any) -> Tunable:
        """The call on standard normal numbers or their cast; on device "meta", it cannot be made."""
        from breccia import ScaledTensor
        from breccia.backend import CastOptions
        from breccia_triton.casts import cast, decode
        from breccia_triton.gemm.contiguous import ContiguousOperand
        from breccia_triton.gemm.fused import matmul as fused_matmul

        recipe, rows, dtype = breccia.recipe(self.spec), PRODUCTS.get(self.op, 0), getattr(torch, self.dtype)
        name, options = self.op.removesuffix("-axis-2"), CastOptions(axis=-2 if self.op.endswith("-axis-2") else -1)
        generator = None if device == "meta" else torch.Generator(device).manual_seed(0)
        x = torch.randn(self.shape, device=device, generator=generator).to(dtype)
        if name in ("cast", "cast_pair", "cast_ste"):

            def compiled(made: Any) -> Call:
                call = cast.Call(x, made)
                return lambda: call(x, options)

            prepare = partial(cast.prepared, name, x, recipe, options.axis, options, hardware)
            return Tunable(prepare, lambda made: made.launches, compiled)
        st = breccia.cast(x, recipe, axis=options.axis)
        # The generic algorithm may return views, the kernels do not.
        parts = [None if part is None else part.contiguous() for part in (st.data, st.scale, st.zero_point, st.global_scale)]
        st = ScaledTensor.from_parts(*parts[:2], st.recipe, st.layout, *parts[2:], st.axis, st.padding)
        if not rows:

            def decoding(made: Any) -> Call:
                call = decode.executable(st, self.dtype, made)
                return lambda: call(st, None, None, None)

            return Tunable(partial(decode.prepared, st, self.dtype, hardware), lambda made: [made], decoding)
        a = torch.ones((rows, self.shape[1]), dtype=dtype, device=device)
        pair = ContiguousOperand(a, False), ContiguousOperand(st.mT, True)

        def product(made: Any) -> Call:
            call = fused_matmul.executable(*pair, self.dtype, made)
            return lambda: call(*pair, None, None)

        prepare = partial(fused_matmul.prepared, *pair, None, self.dtype, hardware)
        return Tunable(prepare, lambda made: [made.launch, *([made.sum] if made.sum is not None else [])], product)


def cases(recipes: list[str], ops: list[str], dtypes: list[str], shapes: list[tuple[int, ...]]) -> Iterator[Case]:
    for shape, dtype in itertools.product(shapes, dtypes):
        every = dict.fromkeys([*FIRST, *itertools.product(ops, recipes)])
        for op, spec in every:
            if op in ops and spec in recipes:
                yield Case(op, spec, DTYPES[dtype], shape)


def choosing(key: Any, choice: Any) -> Any:
    from breccia_triton.tuning.choices import DEFAULT

    return lambda other: choice if other == key else DEFAULT


def keys_of(case: Case, hardware: Any) -> list[Any]:
    """The keys of the choices that a call asks for; none where no kernel runs."""
    from breccia_triton.specs import Unsupported
    from breccia_triton.tuning.choices import DEFAULT

    keys: list[Any] = []
    try:
        case.tunable("meta", hardware).prepare(lambda key: keys.append(key) or DEFAULT)
    except Unsupported:
        return []
    return keys


def candidates(call: Tunable, key: Any, most: int | None) -> dict[Any, Any]:
    """What was prepared under each candidate for the key."""
    from breccia_triton.tuning import choices, timing

    different = timing.distinct(key, call.prepare, call.launches, lambda other: choices.DEFAULT)
    return dict(itertools.islice(different.items(), most))


def compile_one(case: Case, key: Any, choice: Any, hardware: Any, target: Any) -> None:
    """Compile the kernels of a candidate into Triton's cache on disk, without a GPU."""
    from breccia_triton.launch.launcher import Launcher

    call = case.tunable("meta", hardware)
    for launch in call.launches(call.prepare(choosing(key, choice))):
        Launcher(launch, target)


def bytes_of(result: Any) -> list[Any]:
    from breccia import ScaledTensor
    from breccia.backend import components

    if isinstance(result, tuple):
        return [part for each in result for part in bytes_of(each)]
    parts = components(result).values() if isinstance(result, ScaledTensor) else [result]
    return [part.reshape(-1).contiguous().view(torch.uint8) for part in parts]


class OtherBytes(Exception):
    """A candidate wrote other bytes than the default."""


def timed(case: Case, call: Tunable, different: dict[Any, Any], dry: bool) -> Any:
    from breccia_triton.tuning import timing
    from breccia_triton.tuning.choices import DEFAULT

    expected = bytes_of(call.compiled(different[DEFAULT])())

    def maker(made: Any) -> Call:
        compiled = call.compiled(made)
        # Candidates of a product add in other orders: tests hold them to its bound.
        same = case.op in PRODUCTS or all(torch.equal(a, b) for a, b in zip(bytes_of(compiled()), expected, strict=True))
        if not same:
            raise OtherBytes("it writes other bytes than the default")
        return compiled

    makers = {choice: partial(maker, made) for choice, made in different.items()}
    if dry:
        return timing.fastest(makers, lambda call, calls: timeit.timeit(call, number=calls) / calls, 1, 1)
    return timing.fastest(makers, timing.elapsed)


def gains(rows: dict[Any, tuple[Any, int]]) -> Table:
    """Times of the default and of the best choice, and what failed."""
    columns = {
        "call": lambda item: item[0],
        "default µs": lambda item: f"{1e6 * item[1][0].best.default_seconds:.1f}",
        "best µs": lambda item: f"{1e6 * item[1][0].best.seconds:.1f}",
        "gain": lambda item: f"{100 * (item[1][0].best.default_seconds / item[1][0].best.seconds - 1):.1f} %",
        "choice": lambda item: item[1][0].best.choice,
        "tried": lambda item: item[1][1],
    }
    failed = [f"{key}: {choice}: {why}" for key, (found, _) in rows.items() for choice, why in found.failed.items()]
    return table("tuned calls", columns, rows.items(), "\n".join(failed))


def main(
    recipes: Recipes = None,
    ops: Annotated[list[str] | None, typer.Option(help="Those of OPS; repeat for several. Default: all.")] = None,
    dtypes: Annotated[list[str] | None, typer.Option(help="bf16, fp16, fp32; repeat for several. Default: bf16.")] = None,
    shapes: Annotated[list[str] | None, typer.Option(help="ROWSxCOLUMNS; repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(help="Begin no call later than this; calls left out are counted.")] = 180,
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

    from breccia_triton.operands import hardware
    from breccia_triton.tuning import choices, measurements

    found = hardware(torch.device(device))
    work: dict[Any, Case] = {}  # by key: several calls may ask for the same choice
    for case in every:
        for key in keys_of(case, found):
            work.setdefault(key, case)

    most, executor, compiling = FEW if dry else None, None, dict[Any, list[Future[None]]]()
    if not dry:
        import triton

        target = triton.runtime.driver.active.get_current_target()
        executor = ProcessPoolExecutor(max(1, cores() - 2), get_context("spawn"))
        for key, case in work.items():
            tried = candidates(case.tunable("meta", found), key, most)
            compiling[key] = [executor.submit(compile_one, case, key, choice, found, target) for choice in tried]
    rows: dict[Any, tuple[Any, int]] = {}
    call: tuple[Case | None, Any] = (None, None)
    left = 0
    for key, case in work.items():
        remaining = seconds - (time.monotonic() - started)
        if remaining <= 0 or wait(compiling.get(key, []), timeout=remaining).not_done:
            left += 1
            continue
        call = call if call[0] == case else (case, case.tunable(device, found))
        different = candidates(call[1], key, most)
        try:
            if len(different) > 1:
                rows[key] = timed(case, call[1], different, dry), len(different)
                print(f"{time.monotonic() - started:.0f} s: {key}: {rows[key][0].best.choice}", file=sys.stderr)
        except Exception as e:  # one call that fails must not stop the rest
            print(f"{key}: {message(e)}", file=sys.stderr)
    if executor is not None:
        executor.shutdown(wait=False, cancel_futures=True)
    name, facts = found.name or "cpu", where(device)
    path = out / measurements.shipped("triton", name).name
    kept = {part: facts[part] for part in ("date_utc", "device", "versions", "commit", "command") if part in facts}
    choices.write(path, name, {key: found.best for key, (found, _) in rows.items()}, kept, defaults=False)
    show(gains(rows), f"{len(rows)} calls tuned, {left} left for lack of time; written to {path.name}.")
    wrong = [why for found, _ in rows.values() for why in found.failed.values() if why.startswith(OtherBytes.__name__)]
    if wrong:
        sys.exit(f"tune: {len(wrong)} candidates wrote other bytes than the default; see the table.")


if __name__ == "__main__":
    typer.run(main)
