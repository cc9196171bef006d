"""`breccia recipes`: the table of recipes, and the page of one."""

from __future__ import annotations

from textwrap import wrap
from typing import Annotated

import typer

from ..declared import spelled
from ..dispatch.registry import registry
from ..errors import printable
from ..formats import Level
from ..specs import SHORTHANDS, recipe
from .completion import recipe_names
from .printing import Json, print_json, print_table
from .recipes import SIDE, Listed, covered, listed


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


#: Columns of the list of recipes.
_WIDTH = 100


def _list_recipes(every: list[Listed]) -> None:
    headings = ("recipe", ">bits/value", "element", "block", "scale", "class", "aliases", "distribution")
    rows = [(one.kind.name, *_figures(one), one.kind.__name__, _aliases(one), one.plugin.distribution) for one in every]
    print_table(headings, rows)
    typer.echo(f"bits/value: codes and scales of a {SIDE}x{SIDE} matrix. + F32: one more scale for the whole tensor.\n")
    lines = [(one.kind.name if n == 0 else "", *line) for one in every for n, line in enumerate(_fields(one))]
    headings = ("recipe", "field", "default", "values")
    left = _WIDTH - sum(max(map(len, column)) + 2 for column in list(zip(headings, *lines, strict=True))[:-1])
    wrapped = [
        (*(first if n == 0 else ("", "", "")), text) for *first, values in lines for n, text in enumerate(wrap(values, left))
    ]
    print_table(headings, wrapped)
    typer.echo("Set fields after the name: fp8_block,block_m=128. `breccia recipes NAME` explains one recipe.\n")
    print_table(("shorthand", "for"), list(SHORTHANDS.items()))


def _figures(one: Listed) -> tuple[str, str, str, str]:
    """Bits per value, element, block and scale; unknown where a field has no default."""
    if one.recipe is None:
        return "–", "–", "–", "–"
    fmt = one.recipe.format
    scales = ", ".join(level.codec.name for level in reversed(fmt.block_levels))
    scales += "" if fmt.global_scale is None else f" + {fmt.global_scale.codec.name}"
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
    if fmt.alternative is not None:
        rows["element"] += f"; under negative scales {fmt.alternative.name}"
    for n, level in enumerate(fmt.block_levels[:-1]):
        under = n + len(fmt.levels) - len(fmt.block_levels)
        rows["scale of scales"] = f"{_level(level)}, one per {_block(level)}, by rule {named[under]}"
    if one.recipe.decode_only:
        rows["casts"] = f"none: {one.recipe.decode_only}"
    if fmt.global_scale is not None:
        rows["global scale"] = f"{_level(fmt.global_scale)}, one per tensor, by rule {named[0]}"
    if fmt.offset != "none":
        rows["offset"] = f"{fmt.offset.replace('_', '-')}, one per {_block(fmt.scale)}" + (
            ", coded as scales are" if fmt.offset_levels else ""
        )
    for name, default in (("order", "codes_first"), ("factor", 1.0), ("precision", "fp32")):
        if getattr(fmt, name) != default:
            rows[name] = str(getattr(fmt, name)).replace("_", " ")
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
