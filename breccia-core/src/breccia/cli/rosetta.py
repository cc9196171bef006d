"""`breccia rosetta`: between which formats conversions keep every value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated

import typer

from ..api import exactness
from ..declared import spelled
from ..dispatch.registry import Registry, registry
from ..errors import RecipeError
from ..formats import Format
from ..kernels.exactness import BY_VALUES, INEXACT, NEW_CODES, SAME_CODES, Exactness
from ..recipes import ScalingRecipe, choices_of, with_implied
from ..specs import recipe
from .completion import recipe_names
from .printing import Json, print_json, print_table

#: What conversions keep, by the specs of source and target.
Matrix = dict[tuple[str, str], Exactness]


def every_format(declarations: Registry) -> dict[str, ScalingRecipe]:
    """A recipe of each format that registered recipes have by default, or with another choice of one field, by its spec."""
    found: dict[Format, tuple[str, ScalingRecipe]] = {}
    kinds = [kind for kind in declarations.recipes.values() if not kind.needed_fields()]
    for kind in kinds:
        found.setdefault(kind().format, (kind.name, kind()))
    for kind in kinds:
        for f in dataclasses.fields(kind):  # type: ignore[arg-type]
            for choice in (False, True) if f.type == "bool" else choices_of(kind, f.name)[0]:
                try:
                    one = kind.with_fields(with_implied(kind, {f.name: choice}))
                except RecipeError:  # it requires values of several other fields
                    continue
                found.setdefault(one.format, (f"{kind.name},{f.name}={spelled(choice)}", one))
    return dict(found.values())


def fitted(source: ScalingRecipe, target: ScalingRecipe) -> ScalingRecipe:
    """`target` with the blocks of `source`, if it takes blocks of any length."""
    block, kind = source.format.scale.block, type(target)
    for f in dataclasses.fields(target):  # type: ignore[arg-type]
        if "int" not in str(f.type).split(" | ") or choices_of(kind, f.name)[0]:
            continue
        try:
            one = kind.with_fields({**target.changed, f.name: block[1]})
        except RecipeError:
            continue
        if one.format.scale.block == block:
            return one
    return target


def matrix(recipes: dict[str, ScalingRecipe]) -> Matrix:
    """What conversions between all of these keep, in blocks of the source where the target takes them."""
    return {(a, b): exactness(old, fitted(old, new)) for a, old in recipes.items() for b, new in recipes.items()}


def rosetta(
    source: Annotated[
        str | None,
        typer.Argument(metavar="SOURCE", help="What is converted.", show_default="all formats", autocompletion=recipe_names),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="To what.", show_default="all formats", autocompletion=recipe_names),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which conversions keep every value, as the two formats decide it.

    Without TARGET, recipes that take blocks of any length have those of SOURCE.

    \b
    breccia rosetta mxfp4 nvfp4
    """
    everything = every_format(registry())
    if source is None:
        found = matrix(everything)
    else:
        old = recipe(source)
        asked = {spec: recipe(spec) for spec in targets} if targets else {k: fitted(old, v) for k, v in everything.items()}
        found = {(source, spec): exactness(old, new) for spec, new in asked.items()}
    if as_json:
        keep = ("kind", "why", "bound")
        print_json([{"source": a, "target": b} | {name: getattr(one, name) for name in keep} for (a, b), one in found.items()])
    elif source is None:
        _print_matrix(everything, found)
    else:
        rows = [(one.kind, target, f"{one.bound:g}" if one.bound else "–", one.why) for (_, target), one in found.items()]
        print_table(("from " + source, "to", ">bound", "why"), rows)
        typer.echo("bound: how far a value that changes moves at most, as a multiple of its new scale.")


def _print_matrix(specs: Iterable[str], found: Matrix) -> None:
    """A row for each source: the targets that hold all of it, and how many hold some."""
    specs = list(specs)

    def targets(source: str, kind: str) -> list[str]:
        return [target for target in specs if target != source and found[source, target].kind == kind]

    rows = [
        (
            source,
            *(str(len(targets(source, kind))) for kind in (SAME_CODES, NEW_CODES, BY_VALUES, INEXACT)),
            " ".join(targets(source, SAME_CODES) + targets(source, NEW_CODES)) or "–",
        )
        for source in specs
    ]
    print_table(("from", ">same codes", ">new codes", ">values decide", ">inexact", "exact for every tensor"), rows)
    typer.echo("`breccia rosetta SOURCE` says why. Recipes that take blocks of any length have those of the source.")
