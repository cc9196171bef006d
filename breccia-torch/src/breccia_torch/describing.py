"""Recipes and layouts as the texts that operators take, in functions that Dynamo traces or calls."""

from __future__ import annotations

import dataclasses
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import torch

import breccia
from breccia import InStorage, Layout, ScalingRecipe

from .operators import layout_of, text_of
from .sharing import facts_in_graphs


def constant(function: Any) -> Any:
    """A function that Dynamo calls but does not trace: its arguments and result are constants."""
    return torch.compiler.assume_constant_result(function)


#: Recipes and layouts that were made while Dynamo traced. Global, since the guards of a graph name what they guard.
DECLARED = SimpleNamespace()


def keep(declared: ScalingRecipe | Layout) -> str:
    """Keep what a `constant` function made. Returns the name under which `recall` finds it, the same for equal ones.

    Dynamo guards that two places have the same object or class. It cannot name the result of a `constant` function in such
    a guard, and refuses the graph, unless the result is only numbers, text and tuples.
    """
    name = f"{declared.kind}_{sha256(declared.to_json().encode()).hexdigest()}"
    vars(DECLARED).setdefault(name, declared)
    return name


def recall(name: str) -> Any:
    """The recipe or layout of that name, traced."""
    return getattr(DECLARED, name)


@constant
def names(kind: type) -> tuple[str, ...]:
    """The fields of a recipe or layout class."""
    return tuple(f.name for f in dataclasses.fields(kind))


@constant
def text_of_fields(kind: type, fields: tuple[Any, ...]) -> str:
    """The text of the recipe or layout with these fields, of that very class: `PerBlockMN(1, k)` would be a `PerBlockK`."""
    return text_of(type.__call__(kind, *fields))


def fields_of(declared: Any) -> tuple[Any, ...]:
    """The values of a recipe's or layout's fields."""
    return tuple([known(getattr(declared, name)) for name in names(type(declared))])


def known(value: Any) -> Any:
    """A field's value; a symbolic integer of Dynamo is specialized to its concrete value."""
    return range(value).stop if isinstance(value, int) and not isinstance(value, bool) else value


def recipe_text(recipe: Any) -> str:
    """The text of a recipe."""
    return text_of_fields(type(recipe), fields_of(recipe))


def layout_text(layout: Any) -> str:
    """The text of a layout, including a storage layout."""
    if type(layout) is not InStorage:
        return text_of_fields(type(layout), fields_of(layout))
    plain = text_of_fields(type(layout.layout), fields_of(layout.layout))
    return _stored_text(plain, layout.storage, tuple([known(n) for n in layout.matrix]), known(layout.data_axes))


def facts_of(recipe: Any, layout: Any, padding: int, dtype: str) -> str:
    """What the operator of a layer is told besides its tensors."""
    return _joined(recipe_text(recipe), layout_text(layout), known(padding), dtype)


@constant
def _joined(*facts: Any) -> str:
    return facts_in_graphs(*facts)


@constant
def _stored_text(plain: str, storage: str, matrix: tuple[int, ...], data_axes: int) -> str:
    return text_of(InStorage(layout_of(plain), storage, matrix, data_axes))


def named(recipe: Any) -> Any:
    """The recipe, of which only the name may have been given."""
    return recall(_of_name(recipe)) if isinstance(recipe, str) else recipe


as_recipe = named  # what is traced in place of `breccia.backend.as_recipe`


def recipe(spec: Any, **fields: Any) -> Any:
    """`breccia.recipe` under a compiler."""
    return recall(_of_name(spec, tuple([(name, known(value)) for name, value in fields.items()])))


@constant
def _of_name(spec: str, fields: tuple[tuple[str, Any], ...] = ()) -> str:
    return keep(breccia.recipe(spec, **dict(fields)))
