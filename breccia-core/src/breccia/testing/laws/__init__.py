"""The laws, a module for each kind of declaration. Each is a function named as the sentence it proves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import bridges, choosing, codecs, frameworks, kernels, manifest, products, recipes, rules, storages
from .law import Law, Subject

__all__ = ["LAWS", "PARTS", "Law", "Subject"]

#: What gives the laws about a plug-in, kind by kind.
LAWS: tuple[Callable[[Subject], Iterator[Law]], ...] = (
    manifest.laws,
    codecs.laws,
    rules.laws,
    recipes.laws,
    storages.laws,
    frameworks.laws,
    kernels.laws,
    bridges.laws,
)

#: Modules that hold further laws of a kind.
PARTS = {"kernels": (choosing, products)}
