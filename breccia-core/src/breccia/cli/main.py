"""The program `breccia`: commands that plug-ins declare, one-line errors, meaningful exit codes.

Exit codes: 0 success, 1 an error explained in one line, 2 an invalid command line, 130 interrupted; killed by SIGPIPE
(141 in shells) if nobody reads the output any more. With `--json` on the line errors are JSON too, on standard error. An
exception that is neither breccia's own nor the system's is a bug: its traceback is shown.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from .. import __version__, targets
from ..dispatch.hookspecs import Command
from ..dispatch.registry import registry
from ..errors import BrecciaError, PluginError, PluginWarning, printable
from ..siblings import SIBLINGS, Sibling
from .streams import streams


class _Interrupted(Exception):
    """Carries KeyboardInterrupt through Typer, which would exit silently or with its own message."""


class _Program(TyperGroup):
    """All commands; those of plug-ins are listed first. A command's return value is not an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        core = [name for name, command in registry().commands.items() if command.plugin == "core"]
        return sorted(super().list_commands(ctx), key=lambda name: name in core)

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
    """The program: all declared commands, and hidden ones that print how to install the distribution that has them."""
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
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", callback=_version)] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; allowed anywhere.")] = False,
    ) -> None:
        """Options that precede the command."""

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
    before = words[: words.index("--")] if "--" in words else words
    debug, as_json = "--debug" in before, "--json" in before
    rest = [*(word for word in before if word != "--debug"), *words[len(before) :]]
    with streams(lambda e: _fail(e, str(e), 1, as_json)):
        _run(rest, debug, as_json)


def _run(words: list[str], debug: bool, as_json: bool) -> NoReturn:
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = _warned
            sys.exit(application().main(words, prog_name="breccia", standalone_mode=False))
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
    line = printable(" ".join(str(message).split()))
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("warning: ", "bold yellow"), line), highlight=False)


def _fail(e: Exception, message: str, code: int, as_json: bool) -> NoReturn:
    """Print the error on standard error, and exit."""
    line = printable(" ".join(message.split())) or type(e).__name__
    if as_json:
        values_json = json.dumps(getattr(e, "found", {}), default=str, skipkeys=True)
        plain = json.loads(values_json, parse_constant=str)  # JSON has no NaN
        typer.echo(json.dumps({"error": {"type": type(e).__name__, "message": line, "found": plain}}, indent=2), err=True)
    else:
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), line), highlight=False)
    sys.exit(code)


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
