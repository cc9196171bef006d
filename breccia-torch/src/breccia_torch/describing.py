"""Recipes and layouts as the JSON that operators take, in functions that Dynamo traces or calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from breccia.backend import ScalingRecipe, Stored, as_recipe

from .operators import layout_of


def constant(function: Any) -> Any:
    """A function that Dynamo calls but does not trace: its arguments and result are constants."""
    return torch.compiler.assume_constant_result(function)


@constant
def names(kind: type) -> tuple[str, ...]:
    """The fields of a recipe or layout class."""
    return tuple(f.name for f in dataclasses.fields(kind))


@constant
def json_of(kind: type, fields: tuple[Any, ...]) -> str:
    """The JSON of the recipe or layout with these fields."""
    return kind(*fields).to_json()


def fields_of(declared: Any) -> tuple[Any, ...]:
    """The values of a recipe's or layout's fields."""
    return tuple([known(getattr(declared, name)) for name in names(type(declared))])


def known(value: Any) -> Any:
    """A field's value; a symbolic integer of Dynamo is specialized to its concrete value."""
    return range(value).stop if isinstance(value, int) and not isinstance(value, bool) else value


def recipe_json(recipe: Any) -> str:
    """The JSON of a recipe."""
    return json_of(type(recipe), fields_of(recipe))


def layout_json(layout: Any) -> str:
    """The JSON of a layout, including a storage layout."""
    if type(layout) is not Stored:
        return json_of(type(layout), fields_of(layout))
    plain = json_of(type(layout.layout), fields_of(layout.layout))
    return _stored_text(plain, layout.storage, tuple([known(n) for n in layout.matrix]), known(layout.data_axes))


@constant
def _stored_text(plain: str, storage: str, matrix: tuple[int, ...], data_axes: int) -> str:
    return Stored(layout_of(plain), storage, matrix, data_axes).to_json()


def named(recipe: Any) -> Any:
    """The recipe, of which only the name may have been given."""
    return _of_name(recipe) if isinstance(recipe, str) else recipe


@constant
def _of_name(name: str) -> ScalingRecipe:
    return as_recipe(name)
