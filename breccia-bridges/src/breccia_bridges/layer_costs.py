"""What `breccia why` knows of a quantized model: its layers, what each costs, and what was tried for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from breccia import ErrorMetrics

from .block_faults import BlockFaults
from .results import Report
from .text import number, size

#: What costs are counted in.
UNITS = {"kl": "nats per token", "output_error": "of the outputs' energy", "squared error": "of the layer's energy"}


@dataclass(frozen=True)
class Remedy:
    """What was tried for a layer. recipe: a spec, or "keep". nbytes: that it adds. left: what the model then costs; without a
    text, the share of the layer's energy that is lost.
    """

    recipe: str
    what: str
    nbytes: int
    left: float

    def to_dict(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "what": self.what, "bytes_added": self.nbytes, "left": number(self.left)}


@dataclass(frozen=True)
class Layer:
    """A value, or the experts of a layer together, and what its quantization costs.

    alone: the cost of the model with this layer quantized, and no other; without: with all others quantized, and not this one.
    Both are KL divergences per token in nats, or None without a text. faults: see `BlockFaults`; None for a plain value.
    peak, outliers: of its inputs on the text, the largest over their root mean square, and the columns whose root mean square
    is 6 times the median column's or more.
    """

    name: str
    names: tuple[str, ...]
    recipe: str
    parameters: int
    nbytes: int
    fidelity: ErrorMetrics
    faults: BlockFaults | None = None
    alone: float | None = None
    without: float | None = None
    peak: float | None = None
    outliers: int | None = None
    remedies: tuple[Remedy, ...] = ()
    cheapest: Remedy | None = None

    @property
    def lost(self) -> float:
        """The share of its energy that is lost."""
        share = self.fidelity.noise / self.fidelity.signal if self.fidelity.signal else float(self.fidelity.noise > 0)
        return math.inf if math.isnan(share) or self.fidelity.bad_after > self.fidelity.bad else share

    @property
    def is_broken(self) -> bool:
        """Has it blocks with nothing of their values left, or NaN that the model has not?"""
        return bool(self.faults and self.faults.broken) or self.fidelity.bad_after > self.fidelity.bad

    @property
    def findings(self) -> list[str]:
        """What is wrong with it, the worst first."""
        found: list[str] = []
        if self.fidelity.bad:
            found.append(f"the original has NaN or Inf, {self.fidelity.bad} element{'s' * (self.fidelity.bad != 1)}")
        if self.fidelity.bad_after > self.fidelity.bad:
            found.append(f"{self.fidelity.bad_after - self.fidelity.bad} elements became NaN or Inf")
        if self.faults and self.faults.broken:
            found.append(f"{_blocks(self.faults.broken)} of {self.faults.blocks} broken: nothing of the values is left")
        if self.faults and self.faults.dead:
            found.append(f"{_blocks(self.faults.dead)} dead: a scale of zero, or codes that are all zero")
        if self.faults and self.faults.saturating:
            found.append(f"{_blocks(self.faults.saturating)} saturating")
        if self.outliers:
            found.append(f"{self.outliers} columns of inputs are outliers, the largest {self.peak:.0f} times their mean")
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tensors": len(self.names),
            "recipe": self.recipe,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "alone": number(self.alone),
            "without": number(self.without),
            "lost": number(self.lost),
            "blocks": self.faults and self.faults.blocks,
            "broken_blocks": self.faults and self.faults.broken,
            "dead_blocks": self.faults and self.faults.dead,
            "saturating_blocks": self.faults and self.faults.saturating,
            "input_peak": number(self.peak),
            "input_outliers": self.outliers,
            "findings": self.findings,
            "remedies": [one.to_dict() for one in self.remedies],
            "cheapest": self.cheapest and self.cheapest.to_dict(),
            **self.fidelity.to_dict(),
        }


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


@dataclass(frozen=True, repr=False)
class Why:
    """The layers of a quantized model, the worst first.

    measure: of costs: "kl", or "output_error" for a model without logits, on `tokens` tokens; "squared error" without a text.
    total: the cost of the quantized model; None without a text. comparison: the report of `compare`.
    """

    model: str
    quantized: str
    measure: str
    tokens: int
    total: float | None
    layers: tuple[Layer, ...]
    comparison: Report = field(compare=False)

    def __repr__(self) -> str:
        return f"Why({self.model!r} -> {self.quantized!r}: {self.verdict})"

    @property
    def verdict(self) -> str:
        """The worst layer, what is wrong with it, and the cheapest remedy, in one sentence."""
        if not self.layers:
            return "no tensor differs"
        worst = self.layers[0]
        if self.total is None:
            cost = f"{worst.lost:.3g} of its energy is lost"
        else:
            cost = f"alone it costs {worst.alone:.3g} of {self.total:.3g} {UNITS[self.measure]}"
        said = "; ".join([cost, *worst.findings[:2]])
        if worst.cheapest is not None:
            said += f"; cheapest remedy: {worst.cheapest.what}, {_added(worst.cheapest)}: {worst.cheapest.left:.3g} left"
        return f"{worst.name}: {said}"

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`: non-finite or unknown numbers become None."""
        return {
            "model": self.model, "quantized": self.quantized, "measure": self.measure, "tokens": self.tokens,
            "total": number(self.total), "verdict": self.verdict, "layers": [layer.to_dict() for layer in self.layers],
        }  # fmt: skip


def _added(remedy: Remedy) -> str:
    return f"{size(abs(remedy.nbytes))} {'more' if remedy.nbytes >= 0 else 'less'}"
