"""Acme's own form of a tensor: a dict of the very buffers."""

from acme_breccia.plugin import Acme6Scaling
from breccia import DialectError, from_buffer


def to_acme(scaled):
    if scaled.recipe != Acme6Scaling():
        raise DialectError(f"Acme holds recipe 'acme6', not {scaled.recipe.name!r}; breccia.requantize it first.")
    return {"codes": scaled.data, "scales": scaled.scale, "shape": scaled.shape}


def from_acme(held):
    recipe = Acme6Scaling()
    return from_buffer(held["codes"], held["scales"], recipe, recipe.layout.fitted(held["shape"]), shape=held["shape"])
