"""The program `breccia`: commands that plug-ins declare, one-line errors, meaningful exit codes.

Exit codes: 0 success, 1 an error explained in one line, 2 an invalid command line, 130 interrupted. With
`--json` on the line errors are JSON too, on standard error. An exception that is neither breccia's own nor the
system's is a bug: its traceback is shown.
"""

from __future__ import annotations

import inspect
import io
import json
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from .. import __version__, targets
from ..api import PLAIN_OPERAND
from ..api import explain as explain_call
from ..dispatch.explanation import Explanation
from ..dispatch.hookspecs import Command
from ..dispatch.kernel import OPS
from ..dispatch.registry import registry
from ..errors import BrecciaError, PluginError, PluginWarning
from ..recipes import recipe
from ..siblings import SIBLINGS, Sibling
from .doctor import MISSING, NOTE, OK, PROBLEM, examine
from .skeleton import write_plugin

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Shell completion from `names`, which are looked up on use."""

    def offered(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return offered


recipe_names = _completing(lambda: registry().recipes)
framework_names = _completing(lambda: registry().frameworks)
_operand_names = _completing(lambda: [*registry().recipes, PLAIN_OPERAND])
_op_names = _completing(lambda: OPS)
_kernel_names = _completing(lambda: [kernel.name for kernel in registry().table.kernels])


class _Interrupted(Exception):
    """Carries KeyboardInterrupt through Typer, which would exit silently or with its own message."""


class _Program(TyperGroup):
    """All commands, those of plug-ins first. A command's return value is not an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        ours = [name for name, command in registry().commands.items() if command.plugin == "core"]
        return sorted(super().list_commands(ctx), key=lambda name: name in ours)

    def invoke(self, ctx: Any) -> None:
        try:
            super().invoke(ctx)
        except KeyboardInterrupt as e:
            raise _Interrupted from e


class _Command(TyperCommand):
    """A declared command; its function is loaded on use, so that a broken one does not affect others."""

    def __init__(self, name: str, help: str, load: Callable[[], Any], hidden: bool = False) -> None:
        super().__init__(name, help=help, hidden=hidden)
        self._load = load

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._load().make_context(info_name, args, parent, **extra)


def application() -> TyperGroup:
    """The program: all declared commands, and those of distributions not installed, which print how to install them."""
    app = typer.Typer(
        name="breccia",
        cls=_Program,
        rich_markup_mode=None,
        help="Block-scaled low-precision tensors: the same bytes in every framework.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(  # pyright: ignore[reportUnusedFunction]
        version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", callback=_version)] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; anywhere on the line.")] = False,
    ) -> None:
        """Options before the command."""

    program = typer.main.get_command(app)
    assert isinstance(program, TyperGroup)
    declared = registry().commands
    for command in declared.values():
        program.add_command(_Command(command.name, command.help, lambda c=command: _loaded(c)))
    for sibling in SIBLINGS:
        for name in sibling.commands:
            if name not in declared:
                program.add_command(_Command(name, "", lambda n=name, s=sibling: _absent(n, s), hidden=True))
    return program


def run(arguments: list[str] | None = None) -> None:
    """Run the program and exit. KeyboardInterrupt passes through."""
    words = sys.argv[1:] if arguments is None else arguments
    ours = words[: words.index("--")] if "--" in words else words
    debug, as_json = "--debug" in ours, "--json" in ours
    for stream in (sys.stdout, sys.stderr):  # do not fail on characters that the terminal's encoding lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    rest = [*(word for word in ours if word != "--debug"), *words[len(ours) :]]
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = _warned
            sys.exit(application().main(rest, prog_name="breccia", standalone_mode=False))
    except _Interrupted as e:
        raise KeyboardInterrupt from e
    except (BrecciaError, OSError, ImportError, MemoryError, PluginWarning, typer.Abort) as e:
        if debug:
            raise
        _fail(e, str(e), 1, as_json)
    except Exception as e:
        if not hasattr(e, "format_message"):
            raise
        usage: Any = e  # an invalid command line; the class comes from different modules across Typer versions
        said = usage.format_message()
        if type(e).__name__ == "NoArgsIsHelpError" and not as_json:
            typer.echo(said, err=True)
            sys.exit(usage.exit_code)
        command = usage.ctx.command_path if usage.ctx else "breccia"
        _fail(e, f"{said}{'' if said.endswith(('.', '?', '!')) else '.'} See `{command} --help`.", usage.exit_code, as_json)


def _warned(message: Warning | str, *_: Any) -> None:
    """A warning as one line on standard error; `--debug` shows its origin."""
    line = " ".join(str(message).split())
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("warning: ", "bold yellow"), line), highlight=False)


def _fail(e: Exception, message: str, code: int, as_json: bool) -> NoReturn:
    """Print the error on standard error, and exit."""
    line = " ".join(message.split()) or type(e).__name__
    if as_json:
        found = json.dumps(getattr(e, "found", {}), default=str, skipkeys=True)
        plain = json.loads(found, parse_constant=str)  # JSON has no NaN
        typer.echo(json.dumps({"error": {"type": type(e).__name__, "message": line, "found": plain}}, indent=2), err=True)
    else:
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), line), highlight=False)
    sys.exit(code)


def printable(text: str) -> str:
    """`text` on one line, without terminal control characters: names may come from untrusted files."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns; those whose heading begins with ">" are aligned right. Put long columns last: nothing is truncated."""
    titles = [heading.removeprefix(">") for heading in headings]
    lines = [titles, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [">" if heading.startswith(">") else "<" for heading in headings]
    for n, line in enumerate(lines):
        text = "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, aligned, widths, strict=True)).rstrip()
        typer.secho(text, bold=n == 0)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2))


def explain(
    op: Annotated[str, typer.Argument(metavar="OP", help=f"The op: {', '.join(OPS)}.", autocompletion=_op_names)],
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE",
            help="Of each operand: a name, or NAME,field=value; `array` for a plain one.",
            autocompletion=_operand_names,
        ),
    ],
    on: Annotated[
        str,
        typer.Option(metavar="FRAMEWORK", help="Or FRAMEWORK:DEVICE, as torch:cuda.", autocompletion=framework_names),
    ] = "numpy",
    prefer: Annotated[
        list[str] | None,
        typer.Option(metavar="KERNEL", help="One to prefer, by name; may be repeated.", autocompletion=_kernel_names),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which kernel runs for a call, and why the others do not."""
    found = explain_call(op, *recipes, on=on, prefer=prefer)
    if as_json:
        rows = [{"kernel": v.kernel.name, "reason": v.reason, "location": v.location} for v in found.verdicts]
        winner = found.winner.name if found.winner else None
        where = {"framework": found.framework, "device": found.device or None}
        print_json({"call": found.call, **where, "winner": winner, "candidates": rows, "calls": _planned(found.plan)})
    else:
        typer.echo(str(found))


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
    """List the plug-ins found, what they declare, and what was set aside."""
    found = registry().plugins
    if as_json:
        print_json([asdict(p) for p in found])
        return
    counts = {p.name: Counter(d.partition(":")[0] for d in p.declares) for p in found}
    declared = {name: ", ".join(f"{hook} {n}" for hook, n in count.items()) for name, count in counts.items()}
    said = {p.name: [t for t in (declared[p.name], p.reason) if t] for p in found}
    rows = [(p.name, p.distribution, p.version, p.status, "; ".join(said[p.name]) or "nothing yet") for p in found]
    print_table(("plug-in", "distribution", "version", "status", "declares"), rows)


plugin = typer.Typer(
    name="plugin", add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="Start a plug-in of your own."
)


@plugin.callback()
def _plugin() -> None:  # pyright: ignore[reportUnusedFunction]
    """With a callback, Typer keeps `new` as a subcommand."""


@plugin.command("new", short_help="Write one that works, with its test.")
def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What breccia calls it, as in 'acme'.", show_default=False)],
    parent: Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="Where its folder is made.")] = Path("."),
    as_json: Json = False,
) -> None:
    """Write a plug-in that works: a recipe, a kernel for NumPy and their conformance test. Nothing is overwritten."""
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
    """Say what is installed, what is missing or wrong, and what to type. Exits with 1 where something is wrong."""
    found = examine()
    if as_json:
        print_json([asdict(f) for f in found])
    else:
        width = max(len(f.subject) for f in found)
        console = Console(soft_wrap=True)
        for section, lines in groupby(found, lambda f: f.section):
            console.print(section, style="bold")
            for f in lines:
                status = (f"{f.status:8}", _STYLES[f.status])
                console.print(Text.assemble("  ", status, f"{f.subject:{width}}  ", f.text), highlight=False)
                if f.remedy:
                    console.print(f"{'':{width + 12}}{f.remedy}", style="cyan", markup=False, highlight=False)
    if any(f.status == PROBLEM for f in found):
        raise typer.Exit(1)


_STYLES = {OK: "green", MISSING: "dim", NOTE: "yellow", PROBLEM: "bold red"}


def bench(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE", help="What to time.", show_default="block mxfp8 nvfp4 int4", autocompletion=recipe_names
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(metavar="FRAMEWORK", help="Or FRAMEWORK:DEVICE, as torch:cuda.", autocompletion=framework_names),
    ] = "numpy",
    size: Annotated[int, typer.Option(metavar="N", min=1, help="Rows and columns of the matrix.")] = 4096,
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Counted runs of each op.")] = 7,
    as_json: Json = False,
) -> None:
    """Time cast, dequantize and matmul on this machine; benchmarks/ of the repository compares with others."""
    from .bench import ROWS, measure

    specs = recipes or ["fp8_block", "mxfp8", "nvfp4", "int4"]
    found = [t for spec in specs for t in measure(recipe(spec), on, size, runs, spec)]
    if as_json:
        shape = {"on": on, "size": size, "rows": ROWS, "runs": runs}
        print_json({**shape, "version": __version__, "timings": [t.to_dict() for t in found]})
        return
    rows = [(t.recipe, t.op, *(f"{1e3 * s:.3g}" for s in t.spread), f"{t.bytes / t.least / 1e9:.3g}", t.kernel) for t in found]
    print_table(("recipe", "op", ">min ms", ">median", ">max", ">GB/s", "kernel"), rows)
    Console(soft_wrap=True).print(
        f"{size}x{size} FP32 on {on}; matmul: {ROWS}x{size} by that, transposed. GB/s: codes, scales and FP32, at the "
        "least time.",
        highlight=False,
    )


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"breccia {__version__}")
        raise typer.Exit


def _loaded(command: Command) -> Any:
    """The Typer command of the declared function. Raises PluginError, whatever the plug-in's module raises."""
    what = f"command {command.name!r} of {registry().origin(command.plugin)}"
    function = targets.load_declared(what, command.target)
    app = function
    if not isinstance(function, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(command.name, help=inspect.getdoc(function) or command.help)(function)
    try:
        return typer.main.get_command(app)
    except Exception as e:
        raise PluginError(f"{what} is not a function that Typer supports: {type(e).__name__}: {e}") from e


def _absent(name: str, sibling: Sibling) -> NoReturn:
    distribution = sibling.distribution
    raise ImportError(f"`breccia {name}` comes with {distribution}: {sibling.remedy}", name=distribution)
