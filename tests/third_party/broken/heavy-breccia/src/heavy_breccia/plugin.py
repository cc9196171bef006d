"""Imports torch in its manifest, and so in every process that uses breccia. Its declarations are valid."""

import torch

from breccia import Bridge, hookimpl

api = 1
FLOAT8 = [name for name in dir(torch) if name.startswith("float8")]


@hookimpl
def breccia_bridges():
    return [Bridge("to_float8_names", "heavy_breccia.plugin:names")]


def names():
    return FLOAT8
