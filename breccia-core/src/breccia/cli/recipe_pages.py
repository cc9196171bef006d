"""`breccia recipes`: the tables of recipes and of presets for training, and the page of one."""

from __future__ import annotations

from textwrap import wrap
from typing import Annotated, Any

import typer

from ..declared import spelled
from ..dispatch.registry import registry
from ..errors import UnknownNameError, printable, suggestion
from ..formats import Level
from ..recipe_bases import ScalingRecipe
from ..specs import SHORTHANDS, recipe
from ..training import PRESETS, TENSORS, GemmOperand, TrainingRecipe
from .completion import listed_names
from .printing import Json, print_json, print_table
from .recipes import SIDE, Listed, covered, listed


def recipes(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE",
            help="Explain these: a name, NAME,field=value, or a preset for training.",
            show_default="all",
            autocompletion=listed_names,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the recipes: bits per value, formats, fields and their values; and the presets for training. Or explain some."""
    declarations = registry()
    if names:
        pages = [
            (name.lower(), found and listed(declarations, type(found), found)) for name in names for found in (_named(name),)
        ]
    else:
        pages = [(name, listed(declarations, kind)) for name, kind in declarations.recipes.items()]
        pages += [(name, None) for name in PRESETS if name not in declarations.recipes]
    if as_json:
        print_json([_entry(name, one) for name, one in pages])
    elif names:
        for place, (name, one) in enumerate(pages):
            typer.echo("\n" * (place > 0), nl=False)
            if one is not None:
                _explain_recipe(one)
            if name in PRESETS:
                typer.echo("\n" * (one is not None), nl=False)
                _explain_preset(name)
    else:
        _list_recipes([one for _, one in pages if one is not None])
        _list_presets()


def _named(name: str) -> ScalingRecipe | None:
    """The recipe of that name; None for a preset for training without one."""
    try:
        return recipe(name)
    except UnknownNameError as e:
        if name.lower() in PRESETS:
            return None
        known = list(registry().recipes)
        if e.found.get("known") != known:
            raise
        known += [preset for preset in PRESETS if preset not in known]
        raise UnknownNameError(f"no recipe {name!r}{suggestion(name, known)}", name=name, known=known) from None


def _entry(name: str, one: Listed | None) -> dict[str, Any]:
    """The facts of a recipe, and of the preset of that name."""
    facts: dict[str, Any] = {"name": name, "class": TrainingRecipe.__name__, "fields": []} if one is None else one.to_dict()
    return {**facts, "training": TrainingRecipe(name).to_dict() if name in PRESETS else None}


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


def _list_presets() -> None:
    rows: list[tuple[str, str, str]] = []
    for name in PRESETS:
        training = TrainingRecipe(name)
        given = training.to_dict()
        fields = [
            (field, of.spec if isinstance(of := getattr(training, field), ScalingRecipe) else spelled(of)) for field in given
        ]
        rows += [(name if n == 0 else "", *field) for n, field in enumerate(fields)]
    typer.echo()
    print_table(("for training", "field", "value"), rows)
    typer.echo("breccia.TrainingRecipe(NAME) takes these. `breccia recipes NAME` shows what its GEMMs multiply.")


#: How formulas name the tensors of a layer: x (M, K), w (N, K), dy (M, N).
_TENSORS: dict[str, str] = dict(zip(TENSORS, ("x", "w", "dy"), strict=True))


def _explain_preset(name: str) -> None:
    typer.secho(f"{name}: preset of breccia.TrainingRecipe", bold=True)
    typer.echo("What the GEMMs of a linear layer y = x @ w.T multiply in training: x (M, K), w (N, K), dy (M, N).\n")
    operands = [(gemm, operand) for gemm, pair in TrainingRecipe(name).operands.items() for operand in pair]
    rows = [
        (gemm if n % 2 == 0 else "", f"{'rows' if of.axis == -1 else 'columns'} of {_TENSORS[of.tensor]}", _cast(of))
        for n, (gemm, of) in enumerate(operands)
    ]
    print_table(("GEMM", "multiplies", "as"), rows)


def _cast(operand: GemmOperand) -> str:
    assert operand.recipe is not None, "presets leave no operand in high precision"
    rounded = ", rounded stochastically" * (operand.rounding == "stochastic")
    return operand.recipe.spec + rounded + (f", rotated in blocks of {operand.rotation.block}" if operand.rotation else "")


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
