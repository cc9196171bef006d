"""Everything breccia-torch adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Framework, hookimpl

api = 1


@hookimpl
def breccia_frameworks() -> Iterable[Framework]:
    return [Framework("torch", "torch", ("Tensor",), "breccia_torch.ops:TORCH", devices="breccia_torch.ops:devices")]
