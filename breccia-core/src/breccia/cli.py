"""The program `breccia`: commands that plug-ins declare, errors in one line, exit codes that mean something.

Exit codes: 0 done, 1 an error that its line explains, 2 a command line that cannot be read.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__, targets
from .api import explain as explain_call
from .dispatch import OPS
from .errors import BrecciaError
from .registry import registry

#: Commands of breccia-bridges: where that is not installed, the program says so instead of "No such command".
_ELSEWHERE = {"convert": "breccia-bridges", "inspect": "breccia-bridges"}

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def application() -> typer.Typer:
    """The Typer application of all declared commands."""
    app = typer.Typer(
        name="breccia",
        help="Block-scaled low-precision tensors: the same bytes in every framework.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(  # pyright: ignore[reportUnusedFunction]
        version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", callback=_version)] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    ) -> None:
        pass

    for command in registry().commands.values():
        app.command(command.name, help=command.help)(targets.load(command.target))
    for name, distribution in _ELSEWHERE.items():
        if name not in registry().commands:
            app.command(name, hidden=True, context_settings={"ignore_unknown_options": True})(_absent(name, distribution))
    return app


def run(arguments: list[str] | None = None) -> None:
    """Run the program and exit."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        application()(words, prog_name="breccia")
    except (BrecciaError, OSError, ImportError) as e:
        if "--debug" in words:
            raise
        line = Text.assemble(("error: ", "bold red"), " ".join(str(e).split()))
        Console(stderr=True, soft_wrap=True).print(line, highlight=False)
        sys.exit(1)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2))


def explain(
    op: Annotated[str, typer.Argument(help=f"The verb: {', '.join(OPS)}.")],
    recipes: Annotated[list[str], typer.Argument(help="Recipe of each operand: a name, or NAME,field=value.")],
    on: Annotated[str, typer.Option(help="The framework: numpy, torch, jax, mlx, ...")] = "numpy",
    prefer: Annotated[list[str] | None, typer.Option(help="A kernel to prefer, by name; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Say which kernel serves a call, and why the others do not."""
    found = explain_call(op, *recipes, on=on, prefer=prefer)
    if as_json:
        rows = [{"kernel": v.kernel.name, "reason": v.reason, "location": v.location} for v in found.verdicts]
        winner = found.winner.name if found.winner else None
        print_json({"call": found.call, "framework": found.framework, "winner": winner, "candidates": rows})
    else:
        typer.echo(str(found))


def plugins(as_json: Json = False) -> None:
    """List the plug-ins found, what they declare, and what was set aside."""
    found = registry().plugins
    if as_json:
        print_json([asdict(p) for p in found])
        return
    table = Table("plug-in", "distribution", "version", "status", "declares", box=None, header_style="bold")
    for p in found:
        style = {"active": "green", "blocked": "yellow"}.get(p.status, "red")
        counts = {hook: sum(d.startswith(f"{hook}:") for d in p.declares) for hook in _kinds(p.declares)}
        declares = ", ".join(f"{hook} {n}" for hook, n in counts.items()) or "nothing yet"
        table.add_row(p.name, p.distribution, p.version, Text(p.status, style), p.reason or declares)
    Console().print(table)


def _kinds(declares: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(d.partition(":")[0] for d in declares))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"breccia {__version__}")
        raise typer.Exit


def _absent(name: str, distribution: str) -> Any:
    def command(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        raise ImportError(f"`breccia {name}` comes with {distribution}: pip install {distribution}", name=distribution)

    return command
