"""The command `breccia merge`."""

from __future__ import annotations

from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from breccia.backend import Json, print_json, print_table
from breccia.internal import printable

from .commands import From, PathOrURL, Top, interruptible, print_hidden, progress
from .merge import MIN_SHARE, NOISE, MergeReport
from .merge import merge as merge_adapter
from .remote_path import path_of
from .results import Verify
from .text import percent


def merge(
    source: Annotated[
        PathOrURL, typer.Argument(metavar="MODEL", help="A quantized checkpoint: a file or folder.", parser=path_of)
    ],
    adapter: Annotated[PathOrURL, typer.Argument(metavar="ADAPTER", help="The folder of PEFT's LoRA adapter.", parser=path_of)],
    destination: Annotated[PathOrURL, typer.Argument(metavar="OUT", help="Where to write, like MODEL.", parser=path_of)],
    min_share: Annotated[
        float, typer.Option(metavar="SHARE", help="Write nothing if less of the change survives; 0 allows any loss.")
    ] = MIN_SHARE,
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A text, or ids.npy: --min-share also of KL divergence.", show_default=False),
    ] = None,
    top: Top = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file, or a checkpoint folder.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what an interrupted run has finished.")] = False,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Largest peak of memory.")] = "4GiB",
    verify: Annotated[Verify, typer.Option(metavar="HOW", help="full, bytes or none: what is read back.")] = Verify.bytes,
    source_dialect: From = None,
    as_json: Json = False,
) -> None:
    """Add a LoRA adapter to a quantized checkpoint, in its own format, and say how much of the change survives.

    Tensors and blocks that the adapter does not change keep every byte.

    \b
    breccia merge model-int4 adapter model-int4-merged
    """
    started = perf_counter()
    with interruptible(destination, verify), progress("merge", source, 3) as advance:
        report = merge_adapter(
            source,
            adapter,
            destination,
            min_share=min_share,
            calibrate=calibrate,
            force=force,
            advance=advance,
            source_dialect=source_dialect,
            restart=restart,
            max_memory=max_memory,
            verify=verify.value,
        )
    if as_json:
        print_json({**report.to_dict(), "seconds": perf_counter() - started})
    else:
        _print(report, top, perf_counter() - started)


def _print(report: MergeReport, top: int | None, seconds: float) -> None:
    worst = sorted(report.tensors, key=lambda t: t.share)
    shown = worst[:top]
    rows = [
        (percent(t.share), f"{t.error:.2f}", str(t.rank), f"{t.changed} of {t.blocks}", str(t.rescaled), t.stored_as, t.name)
        for t in shown
    ]
    print_table((">survives", ">error", ">rank", ">blocks changed", ">rescaled", "stored as", "tensor"), rows)
    print_hidden(len(worst), len(shown))
    table = Table(box=None, show_header=False, pad_edge=False)
    lines = {
        "merged": f"{len(report.tensors)} tensors changed; all others, and blocks without a change, keep every byte",
        "survives": f"{percent(report.share)} of the change; {report.error:.2f} of its norm is rounded otherwise",
    }
    if report.divergence is not None:
        before, after = report.divergence
        survives = f"{percent(report.divergence_share)} survives"
        if report.divergence_share is None:
            survives = f"below {NOISE:g}, which rounding in FP32 alone costs: no share"
        lines["KL"] = f"{after:.3g} per token from the model with the whole change; {before:.3g} without it ({survives})"
    elif report.error > 1:
        lines["caution"] = (
            "rounding changes the weights by more than the adapter does, and may cost more than it gains: "
            "measure that by --calibrate FILE"
        )
    lines["written"] = f"{report.destination}; {seconds:.1f} s"
    for name, value in lines.items():
        table.add_row(name, Text(printable(value)))
    Console(soft_wrap=True).print(table)
