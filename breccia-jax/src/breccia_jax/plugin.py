"""Everything breccia-jax adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Framework, hookimpl

api = 1


@hookimpl
def breccia_frameworks() -> Iterable[Framework]:
    ops = "breccia_jax.ops"
    return [
        Framework(
            "jax",
            "jax",
            ("Array",),
            f"{ops}:JAX",
            devices=f"{ops}:devices",
            device=f"{ops}:device",
            capability=f"{ops}:capability",
            container="breccia_jax.container:register",
            frontend="breccia_jax.frontend",
            forks=False,
        )
    ]
