"""Layers that engines compute as one: they need one scale where their recipe has a scale for the whole tensor."""

from __future__ import annotations

from collections.abc import Iterable

#: Names of layers beside each other whose weights vLLM (0.32) and SGLang (0.5) join to one matrix.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


def fused(names: Iterable[str]) -> list[list[str]]:
    """The values of layers that become one, in groups of two or more."""
    groups: dict[tuple[str, int, str], list[str]] = {}
    for name in names:
        module, dot, end = name.rpartition(".")
        parent, _, layer = module.rpartition(".")
        for n, layers in enumerate(FUSED):
            if dot and layer in layers:
                groups.setdefault((parent, n, end), []).append(name)
    return [group for group in groups.values() if len(group) > 1]
