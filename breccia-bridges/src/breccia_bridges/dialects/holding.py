"""Which integers a dialect holds, and what its config says of modules that differ. Refusals name a recipe that works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from breccia import ScalingRecipe, UnsupportedError
from breccia.backend import StoredForm, ValueForm

from ..announcements import TORCH_NAMES
from ..text import spelled
from . import writing

#: By `activations`: layers of these dialects quantize no inputs.
NO_INPUTS: dict[str | None, None] = {None: None, "none": None}
_EXCLUDE = "leave this value as it is: exclude= (--exclude)"


def check_matrix(form: ValueForm, dialect: str, *, by_index: bool = False) -> None:
    """Raise UnsupportedError unless the value is a matrix with groups along its last axis. by_index: in any order."""
    if len(form.shape) != 2:
        raise writing.refused(form, dialect, f"its weights are matrices; {_EXCLUDE}")
    writing.check_matrix(replace(form, layout=None) if by_index else form, dialect)


def check_format(form: ValueForm, has: str, nearest: ScalingRecipe) -> None:
    """Raise UnsupportedError unless `nearest` has the format. has: what the dialect has."""
    if form.recipe.format != nearest.format:
        raise UnsupportedError(
            f"it has {has}, not {form.recipe.spec!r}. The nearest recipe is {nearest.spec!r}.",
            recipe=form.recipe,
            nearest=nearest.spec,
        )


def check_multiples(form: ValueForm, dialect: str, *units: int) -> None:
    """Raise UnsupportedError unless the lengths of a matrix are multiples of these."""
    if any(length % unit for length, unit in zip(form.shape, units, strict=True)):
        raise writing.refused(form, dialect, f"its lengths are multiples of {spelled(units)} there; {_EXCLUDE}")


def most_common(stored: Mapping[str, StoredForm], *keys: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The settings that most modules have, and those of the other modules by their names."""
    settings = {module: tuple(form.settings[key] for key in keys) for module, form in stored.items()}
    common, _ = Counter(settings.values()).most_common(1)[0]
    others = {module: dict(zip(keys, own, strict=True)) for module, own in settings.items() if own != common}
    return dict(zip(keys, common, strict=True)), others


def model_dtype(stored: Mapping[str, StoredForm], title: str) -> dict[str, str]:
    """The dtype of scales, in which libraries load the model, under both keys that configs have for it.

    Raises UnsupportedError where modules have several.
    """
    dtypes = {form.entries["scales"].dtype: module for module, form in stored.items()}
    if len(dtypes) > 1:
        (one, module), (two, other), *_ = dtypes.items()
        raise UnsupportedError(
            f"{title} has scales in the dtype of the model; those of {module} are {one}, those of {other} {two}. Give all "
            "modules one scale_dtype.",
            dtypes=list(dtypes),
        )
    (dtype,) = dtypes
    return {"dtype": TORCH_NAMES[dtype], "torch_dtype": TORCH_NAMES[dtype]}
