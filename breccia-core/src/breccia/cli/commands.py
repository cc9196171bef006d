"""The commands of core: `explain`, `plugins`, `plugin new`, `doctor` and `bench`; `recipes` is in `recipe_pages`."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .. import __version__
from ..api import explain as explain_call
from ..dispatch.explanation import Explanation
from ..dispatch.registry import registry
from ..errors import OptionError, printable
from ..operations import OPERATIONS
from ..specs import recipe
from .completion import benched_names, framework_names, kernel_names, op_names, operand_names
from .doctor import FAULTS, MISSING, NOTE, OK, OPTIONAL, PROBLEM, Finding, examine
from .printing import Json, print_json, print_table
from .skeleton import write_plugin

_OPS = ", ".join(OPERATIONS)


def explain(
    op: Annotated[str, typer.Argument(metavar="OP", help=f"The operation: {_OPS}.", autocompletion=op_names)],
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE",
            help="Recipe of each operand: NAME or NAME,field=value; `array` if it is not quantized.",
            autocompletion=operand_names,
        ),
    ],
    on: Annotated[
        str,
        typer.Option(
            metavar="FRAMEWORK", help="Framework, or FRAMEWORK:DEVICE such as torch:cuda.", autocompletion=framework_names
        ),
    ] = "numpy",
    prefer: Annotated[
        list[str] | None,
        typer.Option(metavar="KERNEL", help="Prefer the kernel of this name; repeatable.", autocompletion=kernel_names),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which kernel runs for a call, and why the others do not."""
    explanation = explain_call(op, *recipes, on=on, prefer=prefer)
    if as_json:
        rows = [{"kernel": v.kernel.name, "reason": v.reason, "location": v.location} for v in explanation.verdicts]
        winner = explanation.winner.name if explanation.winner else None
        where = {"framework": explanation.framework, "device": explanation.device or None}
        print_json(
            {"call": explanation.call, **where, "winner": winner, "candidates": rows, "calls": _planned(explanation.plan)}
        )
    else:
        typer.echo(str(explanation))


def _planned(steps: Iterable[Explanation]) -> list[dict[str, Any]]:
    """The winner's calls of other kernels, and recursively their calls."""
    return [
        {
            "call": step.call,
            "framework": step.framework,
            "winner": step.winner.name if step.winner else None,
            "calls": _planned(step.plan),
        }
        for step in steps
    ]


def plugins(as_json: Json = False) -> None:
    """List the installed plug-ins, what they declare, and why any was set aside."""
    plugins = registry().plugins
    if as_json:
        print_json([asdict(p) for p in plugins])
        return
    counts = {p.name: Counter(d.partition(":")[0] for d in p.declares) for p in plugins}
    declared = {name: ", ".join(f"{hook} {n}" for hook, n in count.items()) for name, count in counts.items()}
    said = {p.name: [t for t in (declared[p.name], p.reason) if t] for p in plugins}
    rows = [(p.name, p.distribution, p.version, p.status, "; ".join(said[p.name]) or "nothing yet") for p in plugins]
    print_table(("plug-in", "distribution", "version", "status", "declares"), rows)


plugin = typer.Typer(
    name="plugin", add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="Write a new plug-in."
)


@plugin.callback()
def _plugin() -> None:  # pyright: ignore[reportUnusedFunction]
    """With a callback, Typer keeps `new` as a subcommand."""


@plugin.command("new", short_help="Write a working plug-in with its test.")
def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the plug-in, such as 'acme'.", show_default=False)],
    parent: Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="Folder to create it in.")] = Path("."),
    as_json: Json = False,
) -> None:
    """Write a working plug-in: a recipe, a NumPy kernel and their conformance test. Never overwrites a file."""
    folder = write_plugin(name, parent)
    written = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    commands = [f"cd {shlex.quote(str(folder))}", "pip install -e '.[test]'", "pytest", f"breccia explain dequantize {name}"]
    if as_json:
        print_json({"folder": str(folder), "files": written, "next": commands})
        return
    for file in written:
        typer.echo(printable(f"wrote {folder / file}"))
    typer.echo("next:")
    for command in commands:
        typer.echo(printable(f"  {command}"))


def doctor(as_json: Json = False) -> None:
    """Check the installation, and print the command that fixes each problem.

    Exits with 1 if something is broken, or something that is installed needs what is missing; optional parts may be absent.
    """
    findings = examine()
    if as_json:
        print_json([asdict(f) for f in findings])
    else:
        width = max(len(f.subject) for f in findings)
        console = Console(soft_wrap=True)
        for section, lines in groupby(findings, lambda f: f.section):
            console.print(section, style="bold")
            for f in lines:
                status = ("-" if f.status == OPTIONAL else f.status).ljust(8), _STYLES[f.status]
                line = Text.assemble("  ", status, f"{f.subject:{width}}  ", f.text)
                if f.status == OPTIONAL:
                    line.append(f": {f.remedy}", "cyan")
                console.print(line, highlight=False)
                if f.remedy and f.status != OPTIONAL:
                    console.print(f"{'':{width + 12}}{f.remedy}", style="cyan", markup=False, highlight=False)
        typer.echo(_verdict(findings))
    if any(f.status in FAULTS for f in findings):
        raise typer.Exit(1)


def _verdict(findings: list[Finding]) -> str:
    """The last line of `doctor`."""
    faults = [f.subject for f in findings if f.status in FAULTS]
    said = f"{len(faults)} problem{'s' * (len(faults) > 1)} found: {', '.join(faults)}" if faults else "no problems found"
    return f"{said}; what is optional need not be installed" if any(f.status == OPTIONAL for f in findings) else said


_STYLES = {OK: "green", OPTIONAL: "dim", NOTE: "yellow", MISSING: "bold red", PROBLEM: "bold red"}


def bench(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[matmul] RECIPE",
            help="Recipes to time; after the word matmul, products against the framework's own dense ones.",
            show_default="fp8_block mxfp8 nvfp4 int4",
            autocompletion=benched_names,
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            metavar="FRAMEWORK", help="Framework, or FRAMEWORK:DEVICE such as torch:cuda.", autocompletion=framework_names
        ),
    ] = "numpy",
    size: Annotated[int, typer.Option(metavar="N", min=1, help="Rows and columns of the matrix.")] = 4096,
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Timed runs of each op.")] = 7,
    rows: Annotated[str, typer.Option(metavar="M,...", help="Rows of activations of `bench matmul`.")] = "1,16,512",
    as_json: Json = False,
) -> None:
    """Time cast, dequantize and matmul on this machine. The repository's benchmarks/ compare with other libraries.

    `breccia bench matmul` times products by quantized weights in turns with the framework's own in FP32 and BF16.
    """
    from .bench import ROWS, measure

    products, specs = recipes is not None and recipes[:1] == ["matmul"], recipes
    if products:
        specs = specs[1:] if specs else None
    specs = specs or ["fp8_block", "mxfp8", "nvfp4", "int4"]
    if products:
        _bench_products(specs, on, size, runs, rows, as_json)
        return
    timings = [t for spec in specs for t in measure(recipe(spec), on, size, runs, spec)]
    if as_json:
        shape = {"on": on, "size": size, "rows": ROWS, "runs": runs}
        print_json({**shape, "version": __version__, "timings": [t.to_dict() for t in timings]})
        return
    lines = [
        (t.recipe, t.op, *(f"{1e3 * s:.3g}" for s in t.spread), f"{t.bytes / t.least / 1e9:.3g}", t.kernel) for t in timings
    ]
    print_table(("recipe", "op", ">min ms", ">median", ">max", ">GB/s", "kernel"), lines)
    Console(soft_wrap=True).print(
        f"{size}x{size} FP32 on {on}; matmul: {ROWS}x{size} by its transpose. GB/s: codes, scales and FP32 at the "
        "minimum time.",
        highlight=False,
    )


def _bench_products(specs: list[str], on: str, size: int, runs: int, rows: str, as_json: bool) -> None:
    from .bench import measure_products

    try:
        counts = [int(m) for m in rows.split(",")]
    except ValueError:
        raise OptionError(f"--rows takes numbers separated by commas; got {rows!r}.", rows=rows) from None
    products = measure_products([(spec, recipe(spec)) for spec in specs], on, size, counts, runs)
    if as_json:
        shape = {"on": on, "size": size, "runs": runs}
        print_json({**shape, "version": __version__, "products": [p.to_dict() for p in products]})
        return
    lines = [(str(p.rows), p.arm, *(f"{1e6 * s:,.0f}" for s in p.spread[:2]), f"{p.over:.2f}x", p.kernel) for p in products]
    base = "BF16" if products[0].base == "dense bfloat16" else "FP32"
    print_table((">rows", "weight", ">min us", ">median", f">over {base}", "kernel"), lines)
    Console(soft_wrap=True).print(
        f"rows x {size} by {size} x {size} on {on}, in turns; weights rotate, so that none stays in a cache. over {base}: "
        f"the median of the framework's dense {base} product divided by this one.",
        highlight=False,
    )
