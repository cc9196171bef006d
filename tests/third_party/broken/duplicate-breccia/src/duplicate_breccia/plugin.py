"""Declares a recipe under a name that core has."""

from dataclasses import dataclass

from breccia import MXFP8BlockScaling, hookimpl

api = 1


@dataclass(frozen=True)
class Another(MXFP8BlockScaling):
    """MXFP8 once more."""

    name = "mxfp8"


@hookimpl
def breccia_recipes():
    return [Another]
