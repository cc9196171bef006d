"""The recipes that a conversion to a number of bits has chosen, as a policy that repeats it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from breccia import Policy

from .text import number

#: How the file of a policy begins.
POLICY = "# A policy of `breccia convert --target-bits`: "


@dataclass(frozen=True)
class Mix:
    """The recipes that were chosen, as a policy.

    rules: pattern → spec or "keep", as a YAML file has them; `Policy.of` of it chooses the same. bits: per parameter, of all
    tensors that were chosen among; parameters: of them. damage: the sum that was minimized, and that of the best single recipe
    in as many bytes, by its spec. measure: what was summed.
    """

    rules: Mapping[str, str]
    bits: float
    parameters: int
    damage: float
    single: tuple[str, float] | None
    measure: str
    counts: Mapping[str, int]

    @property
    def policy(self) -> Policy:
        return Policy.of(dict(self.rules))

    def yaml(self, said: str) -> str:
        """The policy as a file. said: of what it is."""
        lines = [f"{json.dumps(pattern)}: {json.dumps(spec)}" for pattern, spec in self.rules.items()]
        return "\n".join([f"{POLICY}{said}", *lines, ""])

    def to_dict(self) -> dict[str, Any]:
        single = {"recipe": self.single[0], "damage": number(self.single[1])} if self.single else None
        return {
            "bits_per_parameter": self.bits, "damage": number(self.damage), "measure": self.measure, "single": single,
            "tensors": dict(self.counts), "policy": dict(self.rules),
        }  # fmt: skip


def policy_path(destination: Path) -> Path:
    """Where the policy of a conversion is written: beside its destination."""
    stem = destination.stem if destination.suffix in (".safetensors", ".gguf") else destination.name
    return destination.with_name(f"{stem}.policy.yaml")
