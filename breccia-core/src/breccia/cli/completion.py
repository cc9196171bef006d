"""Shell completion of the arguments of commands, by the names that are registered when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..dispatch.explaining import PLAIN_OPERAND
from ..dispatch.registry import registry
from ..policies import COMPLETE
from ..specs import SHORTHANDS
from ..training import PRESETS


def _completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Shell completion from the values of `names`, called when completion runs."""

    def offered(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return offered


recipe_names = _completing(lambda: [*registry().recipes, *SHORTHANDS])
listed_names = _completing(lambda: dict.fromkeys([*registry().recipes, *SHORTHANDS, *PRESETS]))
benched_names = _completing(lambda: ["matmul", *registry().recipes])
policy_names = _completing(lambda: [*registry().recipes, *SHORTHANDS, *COMPLETE])
framework_names = _completing(lambda: registry().frameworks)
operand_names = _completing(lambda: [*registry().recipes, PLAIN_OPERAND])
op_names = _completing(lambda: [name for op in registry().operations.values() for name in (op.name, *op.aliases)])
kernel_names = _completing(lambda: [kernel.name for kernel in registry().table.kernels])
