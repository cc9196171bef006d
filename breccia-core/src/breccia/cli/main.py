"""The program `breccia`: commands that plug-ins declare, one-line errors, meaningful exit codes.

Exit codes: 0 success, 1 an error explained in one line, 2 an invalid command line, 130 interrupted; killed by SIGPIPE
(141 in shells) if nobody reads the output any more. With `--json` on the line errors are JSON too, on standard error. An
exception that is neither breccia's own nor the system's is a bug: its traceback is shown.
"""

from __future__ import annotations

import inspect
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
from ..api import explain as explain_call
from ..declared import spelled
from ..dispatch.explaining import PLAIN_OPERAND
from ..dispatch.explanation import Explanation
from ..dispatch.hookspecs import Command
from ..dispatch.registry import registry
from ..errors import BrecciaError, OptionError, PluginError, PluginWarning, printable
from ..formats import Level
from ..operations import OPERATIONS
from ..siblings import SIBLINGS, Sibling
from ..specs import recipe
from .doctor import FAULTS, MISSING, NOTE, OK, OPTIONAL, PROBLEM, Finding, examine
from .recipes import SIDE, Listed, covered, listed
from .skeleton import write_plugin
from .streams import streams

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Shell completion from the values of `names`, called when completion runs."""

    def offered(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return offered


recipe_names = _completing(lambda: registry().recipes)
benched_names = _completing(lambda: ["matmul", *registry().recipes])
framework_names = _completing(lambda: registry().frameworks)
_operand_names = _completing(lambda: [*registry().recipes, PLAIN_OPERAND])
_OPS = ", ".join(OPERATIONS)
_op_names = _completing(lambda: [name for op in registry().operations.values() for name in (op.name, *op.aliases)])
_kernel_names = _completing(lambda: [kernel.name for kernel in registry().table.kernels])


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
    op: Annotated[str, typer.Argument(metavar="OP", help=f"The operation: {_OPS}.", autocompletion=_op_names)],
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE",
            help="Recipe of each operand: NAME or NAME,field=value; `array` if it is not quantized.",
            autocompletion=_operand_names,
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
        typer.Option(metavar="KERNEL", help="Prefer the kernel of this name; repeatable.", autocompletion=_kernel_names),
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


def recipes(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE",
            help="Explain these: a name, or NAME,field=value.",
            show_default="all",
            autocompletion=recipe_names,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the recipes: bits per value, formats, fields and the values they take. With names, explain these."""
    declarations = registry()
    chosen = [recipe(name) for name in names or ()]
    every = [listed(declarations, type(r), r) for r in chosen] or [
        listed(declarations, kind) for kind in declarations.recipes.values()
    ]
    if as_json:
        print_json([one.to_dict() for one in every])
    elif chosen:
        for place, one in enumerate(every):
            typer.echo("\n" * (place > 0), nl=False)
            _explain_recipe(one)
    else:
        _list_recipes(every)


def _list_recipes(every: list[Listed]) -> None:
    headings = ("recipe", ">bits/value", "element", "block", "scale", "class", "aliases", "distribution")
    rows = [(one.kind.name, *_figures(one), one.kind.__name__, _aliases(one), one.plugin.distribution) for one in every]
    print_table(headings, rows)
    typer.echo(f"bits/value: codes and scales of a {SIDE}x{SIDE} matrix. + F32: one more scale for the whole tensor.\n")
    lines = [(one.kind.name if n == 0 else "", *line) for one in every for n, line in enumerate(_fields(one))]
    print_table(("recipe", "field", "default", "values"), lines)
    typer.echo("Set fields after the name: fp8_block,block_m=128. `breccia recipes NAME` explains one recipe.")


def _figures(one: Listed) -> tuple[str, str, str, str]:
    """Bits per value, element, block and scale; unknown where a field has no default."""
    if one.recipe is None:
        return "–", "–", "–", "–"
    fmt = one.recipe.format
    scales = " + ".join(level.codec.name for level in reversed(fmt.levels))
    return f"{one.bits_per_value:.3f}", fmt.element.name, covered(fmt.scale.block), scales


def _aliases(one: Listed) -> str:
    return ", ".join(one.kind.aliases) or "–"


def _fields(one: Listed) -> list[tuple[str, str, str]]:
    """Name, value and possible values of each field."""
    return [(f.name, "(needed)" if one.recipe is None and f.needed else spelled(f.value), f.takes) for f in one.fields]


def _explain_recipe(one: Listed) -> None:
    typer.secho(printable(f"{one.kind.name}: {one.kind.__name__} of {one.plugin.distribution} {one.plugin.version}"), bold=True)
    for line in one.doc.splitlines():
        typer.echo(printable(line))
    assert one.recipe is not None, "a recipe that was asked for is complete"
    fmt = one.recipe.format
    named = [rule.name for rule in one.recipe.rules]
    rows = {
        "bits per value": f"{one.bits_per_value:.3f}, scales included, in a {SIDE}x{SIDE} matrix",
        "element": f"{fmt.element.name}, {fmt.element.bits} bits",
        "scale": f"{_level(fmt.scale)}, one per {_block(fmt.scale)}, by rule {named[-1]}",
    }
    if fmt.global_scale is not None:
        rows["global scale"] = f"{_level(fmt.global_scale)}, one per tensor, by rule {named[0]}"
    if fmt.offset != "none":
        rows["offset"] = f"{fmt.offset.replace('_', '-')}, one per {_block(fmt.scale)}"
    rows |= {"aliases": _aliases(one), "source": one.kind.source or "–"}
    width = max(map(len, rows))
    typer.echo()
    for name, text in rows.items():
        typer.echo(printable(f"{name:{width}}  {text}"))
    typer.echo()
    print_table(("field", "value", "values"), _fields(one))


def _block(level: Level) -> str:
    """The elements that share its scale: "tensor", "row" or "block of 1x128"."""
    extent = covered(level.block)
    return f"block of {extent}" if "x" in extent else extent


def _level(level: Level) -> str:
    """The codec of a scale, and its convention."""
    codec = level.codec
    return f"{codec.name}, {codec.bits} bits, {_CONVENTIONS.get(level.convention, level.convention)}"


_CONVENTIONS = {"multiplier": "multiplies codes", "divisor": "divides codes", "amax": "holds the block's amax"}


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
