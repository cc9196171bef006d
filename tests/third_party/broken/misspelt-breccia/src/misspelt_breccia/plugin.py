"""Misspells a hook: breccia_recipe for breccia_recipes."""

from breccia import hookimpl

api = 1


@hookimpl
def breccia_recipe():
    return []
