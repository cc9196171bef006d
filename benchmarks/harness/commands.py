"""Benchmarks by name, their command lines, and functions that run in processes of their own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table as RichTable

from harness import results
from harness.plots import Plot
from harness.results import HERE, Result, told
from harness.tables import Table

#: Columns of text where the output is no terminal whose width could be asked.
WIDE = 180
#: Seconds between two writings of a result that is still growing.
SAVE_S = 10.0

Recipes = Annotated[list[str] | None, typer.Option(help="Recipes by name or spec; repeat for several. Default: all.")]
Device = Annotated[str, typer.Option(help="cuda, or cpu to try the script.")]
Seconds = Annotated[float, typer.Option(help="Start no row after this many seconds; the result counts the rows left out.")]
_OUT = Annotated[Path | None, typer.Option(help="Folder for the JSON result.")]
_JSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]

Item = TypeVar("Item")


#: All benchmarks of the subjects that were imported.
BENCHMARKS: dict[str, Benchmark] = {}


@dataclass
class Benchmark:
    """A benchmark: what its results show.

    tables, plots: by the name of the block that shows them. key: the fields that identify a row, if runs can be joined.
    A plot takes the machine's tag, the result, and all results.
    """

    name: str
    tables: Mapping[str, Callable[[Result], Table]]
    key: tuple[str, ...] = ()
    plots: Mapping[str, Callable[[str, Result, Mapping[str, list[tuple[str, Result]]]], Plot]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        BENCHMARKS[self.name] = self

    def result(
        self,
        rows: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Result:
        """A result of one run. run: its provenance. more: fields beside rows, such as the versions of `rivals`.

        "refused", a message, keeps the result from being written; "failed" is a message after it was written. Both exit with 1.
        """
        made = {"benchmark": self.name, "schema": results.SCHEMA, "runs": [run or results.provenance()]}
        return {**made, "options": options or {}, **more, "rows": rows}


def command(function: Callable[..., Any]) -> Callable[..., None]:
    """The command of a function from options to a result, or to the results so far, one after the other, or None for none.

    The command also takes --out and --json. It prints the last result, and writes it where --out says.
    """

    @functools.wraps(function)
    def run(out: Path | None = None, as_json: bool = False, **options: Any) -> None:
        found = function(**options)
        latest: dict[str, Result] = {}
        saved = time.monotonic()
        for result in found if isinstance(found, Iterator) else [found] if found else []:
            latest[result["benchmark"]] = result
            if out is not None and isinstance(found, Iterator) and time.monotonic() - saved > SAVE_S:
                results.save(result, out)  # so that a run that is stopped leaves a result
                saved = time.monotonic()
        for result in latest.values():
            tell(result, out, as_json)

    own = inspect.signature(function, eval_str=True)
    added = [
        inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_OUT),
        inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_JSON),
    ]
    every = [*own.parameters.values(), *added]
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return run


def program(function: Callable[..., Any]) -> Callable[..., None]:
    """As `command`; it also runs, if the function is the last one of the file that Python was started with."""
    made = command(function)
    if function.__module__ == "__main__":
        typer.run(made)
    return made


def tell(result: Result, out: Path | None, as_json: bool) -> None:
    result = json.loads(json.dumps(result))
    refused, failed = result.pop("refused", ""), result.pop("failed", "")
    path = results.save(result, out) if out is not None and not refused else None  # first: a table that fails loses no run
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        show(*map(told, result["runs"]), *(make(result) for make in BENCHMARKS[result["benchmark"]].tables.values()))
    if refused:
        sys.exit(f"{Path(sys.argv[0]).stem}: {refused}")
    if path is not None and not as_json:
        Console().print(f"written: {path}", soft_wrap=True, markup=False)
    if failed:
        sys.exit(failed)


def show(*items: str | Table) -> None:
    console = Console() if Console().is_terminal else Console(width=WIDE)
    for item in items:
        if isinstance(item, str):
            console.print(item, markup=False, highlight=False, soft_wrap=True)
            continue
        drawn = RichTable(*item.headings, title=item.title, caption=escape(item.note), title_justify="left")
        drawn.caption_justify = "left"
        for row in item.rows:
            drawn.add_row(*map(escape, row))
        console.print(drawn)


def run(**commands: Callable[..., None]) -> None:
    """Run the command that the first word names."""
    app = typer.Typer(add_completion=False)
    for name, function in commands.items():
        app.command(name)(function)
    app()


def progress(items: Iterable[Item], what: str) -> Iterable[Item]:
    """The items, with a bar on standard error that says how many are done."""
    return track(list(items), description=what, console=Console(stderr=True))


def refuse(message: str) -> Any:
    sys.exit(f"{Path(sys.argv[0]).stem}: {message}")


def recipes_named(names: Iterable[str] | None) -> list[Any]:
    """The default instance of every registered recipe, or of those named. Exits on an unknown name."""
    import breccia
    from breccia.dispatch.registry import registry

    try:
        return [breccia.recipe(name) for name in names or registry().recipes]
    except breccia.UnknownNameError as e:
        sys.exit(f"--recipes: {e}")


def known(given: Sequence[Any] | None, there_are: Iterable[Any], option: str) -> list[Any]:
    """The given names, or all if there are none. Exits on an unknown one."""
    every = list(there_are)
    if unknown := [name for name in given or [] if name not in every]:
        refuse(f"{option} takes {', '.join(map(str, every))}; got {unknown[0]!r}.")
    return list(given or every)


def sizes(shape: str, count: int = 2) -> tuple[int, ...]:
    """Lengths of "16384x8192". Exits on others, and on a last one that some rivals cannot divide into blocks."""
    words = shape.split("x")
    if len(words) != count or not all(word.isdecimal() and int(word) for word in words) or int(words[-1]) % 128:
        form = "ROWSxCOLUMNS, columns" if count == 2 else "MxNxK, K"
        refuse(f"--shapes takes {form} a multiple of 128; got {shape!r}.")
    return tuple(map(int, words))


def apart(target: str, *arguments: Any, python_path: Path | str | None = None, prefix: Iterable[str] = ()) -> Any:
    """What a function of a module of benchmarks/ returns, as JSON, in a process of its own.

    target: "module:function". python_path: goes before everything installed. prefix: a program that runs the process. Exits
    if the process fails.
    """
    paths = [str(python_path) if python_path else "", str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    inside = "import sys; from harness.commands import _inside; _inside(*sys.argv[1:])"
    words = [*prefix, sys.executable, "-c", inside, target, json.dumps(arguments)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{target} failed with status {done.returncode}; its own message is above.\n{done.stdout[-500:]}".strip())
    return json.loads(done.stdout.splitlines()[-1]) if not prefix else done.stdout


def _inside(target: str, arguments: str) -> None:
    module, _, name = target.partition(":")
    sys.argv = [module]  # messages name it
    with contextlib.redirect_stdout(sys.stderr):
        found = getattr(import_module(module), name)(*json.loads(arguments))
    print(json.dumps(found), flush=True)


class Worker:
    """The process of one library. failed: why it is left out."""

    def __init__(self, library: str) -> None:
        self.library, self.failed = library, ""
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns there, or None if the library failed."""
        try:
            return None if self.failed else self.pool.submit(function, *arguments).result()
        except Exception as e:  # of any library
            self.failed = f"{type(e).__name__}: {e}"[:200]
            return None

    def close(self) -> None:
        """End the process."""
        self.pool.shutdown()
