"""Which parameters of a model are quantized, how, and why the others are not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from breccia.backend import (
    EXCLUDED,
    FLOATS,
    BrecciaError,
    OptionError,
    ScalingRecipe,
    Selection,
    abbreviated,
    as_recipe,
    cast_nbytes,
    check_patterns,
    checks,
    dtype_name,
    kept_kind,
    matches,
)

from .weights import ScaledWeight, matrix_of, quantized

Axes = int | tuple[int, ...]
#: How to quantize a parameter: a recipe, a recipe and the contracted axes, or None to leave it.
Rule = ScalingRecipe | str | tuple[ScalingRecipe | str, Axes] | None
#: One rule for all weights, or rules by shell-style patterns of names, of which the first that matches applies.
Rules = Rule | Mapping[str, Rule]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model.

    name: its path, joined by dots, as in files. axes: its contracted axes, None where nothing tells them; why: the reason then.
    kind: the entry of `breccia.backend.KEPT` that the type of its layer implies, whatever its name.
    """

    name: str
    array: Any
    axes: tuple[int, ...] | None
    why: str = ""
    kind: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """What `quantize` did. Printing it shows the recipes, the axes and the reasons.

    taken: (recipe, contracted axes) by name. left: reasons by name, for every other parameter of two axes or more.
    bytes_before, bytes_after: of all parameters.
    """

    taken: Mapping[str, tuple[ScalingRecipe, tuple[int, ...]]]
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int

    def __repr__(self) -> str:
        count = len(self.taken)
        lines = [f"{count} parameters quantized; the model has {_size(self.bytes_after)}, before {_size(self.bytes_before)}"]
        groups: dict[str, list[str]] = {}
        for name, (recipe, axes) in self.taken.items():
            along = f"axis {axes[0]}" if len(axes) == 1 else f"axes {', '.join(map(str, axes))}"
            groups.setdefault(f"{recipe.spec}, blocks along {along}", []).append(name)
        lines += [f"{how}: {abbreviated(names, 5)}" for how, names in groups.items()]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"left in high precision ({reason}): {abbreviated(names, 5)}" for reason, names in reasons.items()]
        return "\n".join(lines)


def apply(
    parameters: Iterable[Parameter], rules: Rules, include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> tuple[dict[str, ScaledWeight], Report]:
    """The quantized parameters by name, and the report.

    Raises what `breccia.cast` raises, naming the parameter; UnknownNameError for a pattern that matches no parameter;
    OptionError for rules that are none, axes that are not consecutive, and if no parameter is chosen.
    """
    listed = list(parameters)
    wide = [p for p in listed if len(p.array.shape) >= 2 and dtype_name(p.array) in FLOATS]
    chosen, left = _chosen(wide, rules, Selection(tuple(include), tuple(exclude)))
    if not chosen:
        reasons = "; ".join(_by_reason(left)) or "the model has no floating-point parameter of two axes or more"
        raise OptionError(f"quantize: no parameter is chosen: {reasons}.", left=left)
    made: dict[str, ScaledWeight] = {}
    for parameter in wide:
        if parameter.name in chosen:
            try:
                made[parameter.name] = quantized(parameter.array, *chosen[parameter.name])
            except BrecciaError as e:
                raise type(e)(f"quantize: {parameter.name}: {e}", **e.found) from e
    before = sum(nbytes(p.array) for p in listed)
    after = before + sum(made[p.name].nbytes - nbytes(p.array) for p in wide if p.name in made)
    return made, Report(chosen, left, before, after)


def _chosen(
    parameters: list[Parameter], rules: Rules, selection: Selection
) -> tuple[dict[str, tuple[ScalingRecipe, tuple[int, ...]]], dict[str, str]]:
    """(recipe, axes) of the chosen parameters, and the reasons for the others."""
    by_pattern = {pattern: _parsed(rule) for pattern, rule in rules.items()} if isinstance(rules, Mapping) else None
    one = None if isinstance(rules, Mapping) else _parsed(rules)
    names = [p.name for p in parameters]
    if by_pattern is not None:
        if selection.include or selection.exclude:
            raise OptionError(
                "quantize takes rules by pattern, where None leaves what matches, or one rule with include=, exclude=."
            )
        check_patterns(by_pattern, names, "parameter of two axes", "the model's tree")
    elif one is None:
        raise OptionError("quantize needs a recipe, a (recipe, axes) pair, or such rules by pattern; got None.")
    selection.check(names, "parameter of two axes", "the model's tree")
    chosen: dict[str, tuple[ScalingRecipe, tuple[int, ...]]] = {}
    left: dict[str, str] = {}
    for parameter in parameters:
        name = parameter.name
        if by_pattern is None:
            rule, reason = one, selection.reason_to_keep(name)
            if not reason and parameter.kind and not matches(name, selection.include):
                reason = parameter.kind
        else:
            pattern = next((pattern for pattern in by_pattern if matches(name, [pattern])), None)
            rule = None if pattern is None else by_pattern[pattern]
            reason = "no rule" if pattern is None else EXCLUDED if rule is None else ""
        if not reason and rule is not None:
            recipe, given = rule
            axes = parameter.axes if given is None else _consecutive(name, given, len(parameter.array.shape))
            reason = (
                kept_kind(name) or parameter.why
                if axes is None
                else "would not shrink"
                if _grows(parameter.array, recipe, axes)
                else ""
            )
            if axes is not None and not reason:
                chosen[name] = recipe, axes
                continue
        left[name] = reason
    return chosen, left


def _parsed(rule: Rule) -> tuple[ScalingRecipe, tuple[int, ...] | None] | None:
    if rule is None:
        return None
    recipe, axes = rule if isinstance(rule, tuple) else (rule, None)
    return as_recipe(recipe), (axes,) if isinstance(axes, int) else None if axes is None else tuple(axes)


def _consecutive(name: str, axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    found = tuple(sorted(a + ndim if a < 0 else a for a in axes))
    if not found or found[0] < 0 or found[-1] >= ndim or found != tuple(range(found[0], found[-1] + 1)):
        raise OptionError(
            f"quantize: {name} has {ndim} axes; its contracted axes are consecutive ones of them, got {axes}.",
            name=name,
            axes=axes,
        )
    return found


def _grows(array: Any, recipe: ScalingRecipe, axes: tuple[int, ...]) -> bool:
    """Whether the parameter takes no fewer bytes under the recipe: its rows are much shorter than a block."""
    axis, lead, matrix, _ = matrix_of(tuple(array.shape), axes)
    try:
        layout = checks.fitted_layout(recipe, matrix[lead:], axis)
        return cast_nbytes(recipe.format, layout, matrix[lead:], axis) * math.prod(matrix[:lead]) >= nbytes(array)
    except BrecciaError:  # raised with the parameter's name by the cast
        return False


def nbytes(array: Any) -> int:
    """The bytes of an array, a tracer or a description of an array."""
    return math.prod(array.shape) * array.dtype.itemsize


def _by_reason(left: Mapping[str, str]) -> Iterator[str]:
    for reason in dict.fromkeys(left.values()):
        yield f"{reason}: {abbreviated(name for name, found in left.items() if found == reason)}"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.2f} kB"
