"""Declares a recipe under a name that core uses."""

from dataclasses import dataclass

from breccia import MXFP8BlockScaling, hookimpl

api = 1


@dataclass(frozen=True)
class Another(MXFP8BlockScaling):
    """A second recipe named `mxfp8`."""

    name = "mxfp8"


@hookimpl
def breccia_recipes():
    return [Another]
