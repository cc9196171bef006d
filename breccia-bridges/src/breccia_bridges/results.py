"""What became of the tensors of a checkpoint: one record for each, and their sums. `convert` and `compare` make them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from breccia import ScalingRecipe

from .measure import NOTHING, ErrorMetrics, Histogram
from .safetensors import plan
from .safetensors_file import Shape, byte_count
from .text import named

#: The reason for not measuring two tensors of the same bytes.
EQUAL = "same in both"

#: Called with a tensor's name and the bytes of it that were dealt with.
Advance = Callable[[str, int], None]


def unnoticed(name: str, bytes_done: int) -> None:
    """The `Advance` of those who do not ask."""


@dataclass(frozen=True)
class TensorReport:
    """One tensor, before and after.

    dtype, stored_as: what it was and is, as a dtype of the file or a recipe's name.
    reason: why it was left as it is, or could not be compared; empty where it was quantized, or compared.
    fidelity, histogram: how near it is to what it was, and its elements by value; None where that was not asked for.
    """

    name: str
    shape: Shape
    dtype: str
    stored_as: str
    reason: str
    bytes_in: int
    bytes_out: int
    fidelity: ErrorMetrics | None = None
    histogram: Histogram | None = None

    @property
    def quantized(self) -> bool:
        return not self.reason

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def bits_per_parameter(self) -> float | None:
        """Bits that a parameter takes, its share of the scales included; None where there is no parameter."""
        return 8 * self.bytes_out / self.parameters if self.parameters else None

    @property
    def measured(self) -> ErrorMetrics:
        """`fidelity`, or that of nothing."""
        return self.fidelity or NOTHING

    def to_dict(self) -> dict[str, Any]:
        """Everything but the histogram, ready for `json.dumps`: figures that are not finite, or unknown, become None."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "stored_as": self.stored_as,
            "quantized": self.quantized,
            "reason": self.reason or None,
            "parameters": self.parameters,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            **(self.fidelity.to_dict() if self.fidelity else dict.fromkeys(NOTHING.to_dict())),
        }


@dataclass(frozen=True)
class Report:
    """A checkpoint before and after: what was read, what there is now, and how near it is.

    recipe: the one that was asked for; None where checkpoints were compared.
    unmatched: patterns of the selection that match no tensor. missing, added: tensors of only one of two checkpoints.
    """

    source: str
    destination: str
    recipe: ScalingRecipe | None = None
    tensors: list[TensorReport] = field(default_factory=list[TensorReport])
    unmatched: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])
    added: list[str] = field(default_factory=list[str])

    @property
    def quantized(self) -> list[TensorReport]:
        return [t for t in self.tensors if t.quantized]

    @property
    def kept(self) -> list[TensorReport]:
        return [t for t in self.tensors if not t.quantized]

    @property
    def recipes(self) -> list[str]:
        """What quantized tensors are stored as, the commonest first."""
        return [name for name, _ in Counter(t.stored_as for t in self.quantized).most_common()]

    @property
    def reasons(self) -> dict[str, int]:
        """How many tensors were kept for which reason, the commonest first."""
        return dict(Counter(t.reason for t in self.kept).most_common())

    @property
    def unlike(self) -> list[TensorReport]:
        """Those kept that are not equal in both of two checkpoints: nobody can say how near they are."""
        return [t for t in self.kept if t.reason != EQUAL]

    @property
    def parameters(self) -> int:
        return sum(t.parameters for t in self.tensors)

    @property
    def bytes_in(self) -> int:
        return sum(t.bytes_in for t in self.tensors)

    @property
    def bytes_out(self) -> int:
        return sum(t.bytes_out for t in self.tensors)

    @property
    def bytes_kept(self) -> int:
        """Bytes left in the precision they had."""
        return sum(t.bytes_out for t in self.kept)

    @property
    def bits_per_parameter(self) -> float:
        """Bits that a quantized parameter takes, its share of the scales included."""
        return 8 * sum(t.bytes_out for t in self.quantized) / max(1, sum(t.parameters for t in self.quantized))

    @property
    def fidelity(self) -> ErrorMetrics:
        """Of all quantized tensors together."""
        return sum((t.measured for t in self.quantized), NOTHING)

    @property
    def sqnr(self) -> float:
        """Of all quantized tensors together, in dB."""
        return self.fidelity.sqnr

    @property
    def cosine(self) -> float:
        """Of all quantized tensors together, as one vector; 1 where there are none."""
        return self.fidelity.cosine

    @property
    def worst(self) -> TensorReport | None:
        """The quantized tensor of lowest SQNR; one that is not finite comes first."""
        measured = [t for t in self.quantized if t.fidelity]
        return min(measured, key=lambda t: -math.inf if math.isnan(t.measured.sqnr) else t.measured.sqnr, default=None)

    def _wide(self, recipe: ScalingRecipe) -> list[str]:
        """The quantized tensors that take half as much again as tensors of whole blocks do."""
        side = 4096
        parts, _ = plan("w", (side, side), recipe)
        whole = 8 * sum(byte_count(*part) for part in parts.values()) / side**2
        return [
            f"{t.name} ({t.bits_per_parameter:.2f} bits)" for t in self.quantized if (t.bits_per_parameter or 0) > 1.5 * whole
        ]

    @property
    def warnings(self) -> list[str]:
        """What a user should hear of, in sentences."""
        found = [f"the pattern {pattern!r} matches no tensor{_hint(pattern)}." for pattern in self.unmatched]
        for names, here, there in ((self.missing, self.source, self.destination), (self.added, self.destination, self.source)):
            if names:
                found.append(f"in {here} and not in {there}: {named(names)}.")
        if not self.quantized and self.recipe is not None:
            found.append("no tensor was quantized; `--json` says why each was kept.")
        if self.recipe is not None and (wide := self._wide(self.recipe)):
            found.append(
                f"the last axis of {named(wide)} is shorter than a block, so that scales take more room than they should; "
                "--exclude keeps such tensors as they are."
            )
        bad = [t.name for t in self.quantized if t.measured.bad]
        worse = [t.name for t in self.quantized if t.measured.bad_after and not t.measured.bad]
        if bad:
            blocks = "; their blocks decode to NaN" if self.recipe is not None else ""
            found.append(f"NaN or Inf in {self.source}: {named(bad)}{blocks}.")
        if worse:
            found.append(f"NaN or Inf in {self.destination} alone: {named(worse)}.")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything but histograms, ready for `json.dumps`: figures that are not finite, or unknown, become None."""
        worst, fidelity = self.worst, self.fidelity
        known = worst is not None
        return {
            "source": self.source,
            "destination": self.destination,
            "recipe": self.recipe and self.recipe.to_dict(),
            "recipes": self.recipes,
            "parameters": self.parameters,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "bytes_kept": self.bytes_kept,
            "bits_per_parameter": self.bits_per_parameter,
            **(fidelity.to_dict() if known else dict.fromkeys(NOTHING.to_dict())),
            "worst": worst.name if worst else None,
            "kept": self.reasons,
            "unmatched": self.unmatched,
            "missing": self.missing,
            "added": self.added,
            "warnings": self.warnings,
            "tensors": [t.to_dict() for t in self.tensors],
        }


def _hint(pattern: str) -> str:
    return "; give the option once for each pattern" if "," in pattern else ""
