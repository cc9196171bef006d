"""The laws, one module per kind of declaration. Each law is a function; its name is the sentence that it tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import bridges, choosing, codecs, dialects, frameworks, kernels, manifest, operations, products, recipes, rules, storages
from .law import Law, Subject

__all__ = ["LAWS", "SUBMODULES", "Law", "Subject"]

#: The generators of the laws about a plug-in, one per kind of declaration.
LAWS: tuple[Callable[[Subject], Iterator[Law]], ...] = (
    manifest.laws,
    codecs.laws,
    rules.laws,
    recipes.laws,
    storages.laws,
    frameworks.laws,
    operations.laws,
    kernels.laws,
    bridges.laws,
    dialects.laws,
)

#: Kind -> further modules that define its laws.
SUBMODULES = {"kernels": (choosing, products)}
