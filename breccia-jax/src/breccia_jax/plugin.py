"""Everything breccia-jax adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Framework, hookimpl

api = 1


@hookimpl
def breccia_frameworks() -> Iterable[Framework]:
    return [Framework("jax", "jax", ("Array",), "breccia_jax.ops:JAX", devices="breccia_jax.ops:devices")]
