"""Why two tensors differ: the table of causes, each with the test that proves it.

No cause is guessed. Most are a transformation of one side after which all its numbers are the other's; the others find how
one or both sides follow from the weights that were quantized.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from breccia import BrecciaError, Format, RecipeError, ScaledTensor, ScalingRecipe
from breccia.backend import components, registry

from . import hypotheses as h
from .hypotheses import Candidates, Found, Side
from .measure import FileTensor, first_row, same_values, slabs
from .recasting import Recast
from .roundings import rounding_of


@dataclass(frozen=True)
class Pair:
    """Two tensors of one name that differ.

    original: the tensor that both were quantized from, if it is known.
    elsewhere: f(label, numbers=) -> the name of another tensor of that checkpoint that has these numbers.
    """

    a: Side
    b: Side
    original: Side | None
    elsewhere: Callable[..., str | None]

    @property
    def both_ways(self) -> tuple[tuple[Side, Side], tuple[Side, Side]]:
        return (self.a, self.b), (self.b, self.a)

    @property
    def k_last(self) -> Pair:
        """The same, transposed where that is what puts the contraction axis last."""
        scaled = [side.x.axis for side in (self.a, self.b) if isinstance(side.x, ScaledTensor)]
        is_turned = set(scaled) == {-2} and min(self.a.x.ndim, self.b.x.ndim) > 1
        return replace(self, a=self.a.mT, b=self.b.mT) if is_turned else self


#: Returns what the sentence names, or None if the cause is another.
Test = Callable[[Pair], Found | None]


@dataclass(frozen=True)
class Cause:
    """One reason why tensors differ. sentence: a template of what its test found, with `x` and `y`, the labels of sides."""

    name: str
    sentence: str
    test: Test


def by_codes(transformed: Callable[[ScaledTensor, Side], Candidates]) -> Test:
    """The test of a transformation of the codes or scales of one side."""

    def test(pair: Pair) -> Found | None:
        for x, y in pair.k_last.both_ways:
            if x.scaled is not None and (found := _first(transformed(x.scaled, y), y)) is not None:
                return {"x": x.label, "y": y.label, **found}
        return None

    return test


def by_values(transformed: Callable[[Side, Side], Candidates]) -> Test:
    """The test of a transformation of the numbers of one side."""

    def test(pair: Pair) -> Found | None:
        for x, y in pair.both_ways:
            if (found := _first(transformed(x, y), y)) is not None:
                return {"x": x.label, "y": y.label, **found}
        return None

    return test


def _first(candidates: Candidates, y: Side) -> Found | None:
    """What the first candidate names that has all numbers of `y`."""
    return next((found for candidate, found in candidates if same_values(candidate, y.numbers)), None)


def _elsewhere(pair: Pair) -> Found | None:
    for x, y in pair.both_ways:
        if (name := pair.elsewhere(x.label, numbers=y.numbers)) is not None:
            return {"x": x.label, "y": y.label, "name": name}
    return None


def _permuted(pair: Pair) -> Found | None:
    """Rows or columns, or elements of a vector, in another order."""
    a, b = pair.a, pair.b
    if a.numbers.shape != b.numbers.shape:
        return None
    if a.x.ndim == 1:
        lined = [Side(s.label, np.ravel(s.x)[:, None], s.dtype) for s in (a, b) if isinstance(s.x, np.ndarray)]
        return _moved("element", *lined) if len(lined) == 2 else None
    if a.x.ndim < 2:
        return None
    return _moved("row", a, b) or _moved("column", a.mT, b.mT)


def _moved(what: str, a: Side, b: Side) -> Found | None:
    """Where rows of `b` are in `a`, if each is there exactly as often. Rows of a stack are counted through all matrices."""
    if a.x.ndim == 2:  # the first elements of all rows tell most of what is not the same rows
        firsts = [np.sort(first_row(side.mT.numbers)) for side in (a, b)]
        if not np.array_equal(*firsts, equal_nan=True):
            return None
    before, after = (list(_digests(side.numbers)) for side in (a, b))
    if sorted(before) != sorted(after):
        return None
    moved = [n for n, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    first = moved[0]
    return {"what": what, "count": len(moved), "all": len(before), "to": first, "from_": before.index(after[first])}


def _digests(numbers: FileTensor) -> Iterator[bytes]:
    """A digest of 128 bits of each row, with one zero and one NaN."""
    for slab in slabs(numbers.shape, numbers.unit):
        values = numbers.values(slab)
        values = np.where(np.isnan(values), values.dtype.type(np.nan), values + values.dtype.type(0))
        for row in values.reshape(-1, values.shape[-1]):
            yield hashlib.blake2b(row.tobytes(), digest_size=16).digest()


def _variants(recipe: ScalingRecipe) -> Iterator[ScalingRecipe]:
    """The recipe, and those that differ from it in the rule of their scales."""
    if not recipe.decode_only:
        yield recipe
        for changes in ({"scale_rule": name} for name in registry().declared["breccia_rules"]):
            yield from _changed(recipe, changes)
        yield from _changed(recipe, {"power_of_two_scale": not getattr(recipe, "power_of_two_scale", False)})


def _changed(recipe: ScalingRecipe, changes: Mapping[str, Any]) -> Iterator[ScalingRecipe]:
    """The recipe with other fields, if it has them, and they differ and are allowed."""
    if all(getattr(recipe, name, value) != value for name, value in changes.items()):
        try:
            yield type(recipe).with_fields({**recipe.changed, **changes})
        except RecipeError:
            return


def recipe_of(side: Side, original: Side) -> ScalingRecipe | None:
    """The recipe, of those with the format of a side, under which a cast of the original has its numbers."""
    if isinstance(side.x, ScaledTensor) and original.numbers.shape == side.numbers.shape:
        for recipe in _variants(side.x.recipe):
            try:
                if same_values(Recast.of(original.numbers, recipe, side.x), side.numbers):
                    return recipe
            except BrecciaError:  # the rule does not go with the codec, or the recipe with the shape
                continue
    return None


def _formats(pair: Pair) -> list[Format]:
    """The formats of quantized sides."""
    return [side.x.recipe.format for side in (pair.a, pair.b) if isinstance(side.x, ScaledTensor)]


def _of_the_original(pair: Pair) -> Found | None:
    """The recipes by which both sides follow from the original."""
    found = [recipe_of(side, pair.original) for side in (pair.a, pair.b)] if pair.original is not None else []
    specs = [recipe.spec for recipe in found if recipe is not None]
    return {"how": f"of the original's values, A is {specs[0]} and B is {specs[1]}"} if len(specs) == 2 else None


def _scale_rule(pair: Pair) -> Found | None:
    """Both sides follow from the original under different rules; or one from the other's numbers under another rule."""
    formats = _formats(pair)
    if len(formats) != 2 or formats[0] != formats[1]:
        return None
    if pair.original is not None:
        return _of_the_original(pair)
    for x, y in pair.both_ways:
        if (recipe := recipe_of(y, x)) is not None:
            return {"how": f"{y.label} is {recipe.spec} of the values of {x.label}"}
    return None


def _recipe(pair: Pair) -> Found | None:
    """Both sides follow from the original, in different formats."""
    formats = _formats(pair)
    return _of_the_original(pair) if len(formats) == 2 and formats[0] != formats[1] else None


def _rounding(pair: Pair) -> Found | None:
    """The scales are equal, and the codes follow from the original by different roundings."""
    a, b = pair.k_last.a.scaled, pair.k_last.b.scaled
    if pair.original is None or a is None or b is None or a.recipe.format != b.recipe.format or a.layout != b.layout:
        return None
    scales = [{name: part for name, part in components(st).items() if name != "data"} for st in (a, b)]
    if not all(np.array_equal(part, scales[1][name]) for name, part in scales[0].items()):
        return None
    original = pair.original if pair.k_last is pair else pair.original.mT
    found = [rounding_of(st, original.numbers) for st in (a, b)]
    return {"mine": found[0], "theirs": found[1]} if None not in found and found[0] != found[1] else None


def _quantized(pair: Pair) -> Found | None:
    """One side is the other, quantized."""
    for x, y in pair.both_ways:
        if not isinstance(y.x, ScaledTensor) or x.numbers.shape != y.numbers.shape:
            continue
        if (recipe := recipe_of(y, x)) is not None:
            return {"x": x.label, "y": y.label, "how": f"as a cast to {recipe.spec}"}
        turned = Pair(x, y, None, pair.elsewhere).k_last
        if isinstance(x.x, np.ndarray) and turned.b.scaled is not None:
            rounding = rounding_of(turned.b.scaled, turned.a.numbers)
            if rounding is not None:
                name = y.x.recipe.name
                return {"x": x.label, "y": y.label, "how": f"to {name} under scales of its own, rounded {rounding}"}
    return None


#: In the order of their tests: codes and scales first, from the most specific; then numbers.
CAUSES: tuple[Cause, ...] = (
    Cause("nibble_order", "The codes of {bits} bits within each byte are in reverse.", by_codes(h.codes_of_bytes)),
    Cause("code_order", "The codes are packed in another order: in {y}, {how}.", by_codes(h.codes_of_words)),
    Cause("code_offset", "The codes of {y} are those of {x} with an offset of {offset}.", by_codes(h.codes_shifted)),
    Cause(
        "element_codec", "The bytes are equal; {x} reads codes as {here}, {y} as {there}.", by_codes(h.read_as_another_codec)
    ),
    Cause(
        "multiplication_order",
        "The bytes are equal; {x} multiplies {here}, {y} {there}.",
        by_codes(h.multiplied_in_another_order),
    ),
    Cause("tiles_transposed", "The codes of each block of {block} are transposed.", by_codes(h.tiles_transposed)),
    Cause("scale_order", "The scales of {y} are those of {x}, {how}.", by_codes(h.scales_reordered)),
    Cause("scale_missing", "{y} has the values of {x} without its {part}.", by_codes(h.scales_missing)),
    Cause("zero_point_shift", "The zero-points of {y} are those of {x} less by one.", by_codes(h.zero_points_shifted)),
    Cause("group_index", "{y} has the groups of {x} in order, and ignores their index.", by_codes(h.group_index_ignored)),
    Cause("scale_convention", "{y} stores the {part} {how}.", by_codes(h.scales_in_another_convention)),
    Cause("scale_dtype", "{y} has the {part} of {x} rounded to {dtype}.", by_codes(h.scales_of_another_dtype)),
    Cause("other_tensor", "{y} has here what {x} has as {name}.", _elsewhere),
    Cause("transposed", "{y} is the transpose of {x}.", by_values(h.transposed)),
    Cause("plus_one", "{y} is {x} plus 1.", by_values(h.plus_one)),
    Cause("rounded", "{y} is {x} {how}.", by_values(h.rounded)),
    Cause("factor", "{y} is {x} times {factor}.", by_values(h.times_a_constant)),
    Cause("permuted", "{count} of {all} {what}s are in another place: {what} {to} of B is {what} {from_} of A.", _permuted),
    Cause("rounding", "The scales are equal; codes are rounded {mine} in A, {theirs} in B.", _rounding),
    Cause("scale_rule", "The scales follow another rule: {how}.", _scale_rule),
    Cause("recipe", "The recipes differ: {how}.", _recipe),
    Cause("quantized", "{y} is {x} quantized, {how}.", _quantized),
)


def explain(pair: Pair) -> tuple[str, str] | None:
    """The name of the first cause whose test holds, and its sentence."""
    for cause in CAUSES:
        if (found := cause.test(pair)) is not None:
            return cause.name, cause.sentence.format(**found)
    return None
