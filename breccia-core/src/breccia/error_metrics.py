"""ErrorMetrics: what `breccia.metrics` and `breccia compare` return. Imports no framework."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, repr=False)
class ErrorMetrics:
    """Sums over the elements x of a tensor and their counterparts y; adding two gives the metrics of both tensors.

    signal: of x * x. noise: of (x - y)^2. dot: of x * y. energy: of y * y. All in FP64.
    max_error: largest |x - y|.
    nonzero: elements x other than 0. flushed: nonzero elements that became 0.
    bounded: elements whose format has a largest value for their block. clipped: bounded elements that exceed it by more than
        half of its last step, and so saturated.
    bad, bad_after: elements x, and elements y, that are NaN or Inf.
    """

    count: int = 0
    signal: float = 0.0
    noise: float = 0.0
    dot: float = 0.0
    energy: float = 0.0
    max_error: float = 0.0
    nonzero: int = 0
    flushed: int = 0
    bounded: int = 0
    clipped: int = 0
    bad: int = 0
    bad_after: int = 0

    def __add__(self, other: ErrorMetrics) -> ErrorMetrics:
        sums: dict[str, Any] = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        both = self.max_error, other.max_error
        sums["max_error"] = math.nan if any(map(math.isnan, both)) else max(both)
        return ErrorMetrics(**sums)

    @property
    def sqnr(self) -> float:
        """Signal-to-quantization-noise ratio in dB; inf if lossless, NaN if the tensor is not finite."""
        if self.noise == 0:
            return math.inf
        ratio = self.signal / self.noise
        return -math.inf if ratio == 0 else 10 * math.log10(ratio)

    @property
    def cosine(self) -> float:
        """Cosine similarity of the two, as vectors; 1 if both are zero."""
        if self.signal == 0 and self.energy == 0:
            return 1.0
        product = self.signal * self.energy
        return self.dot / math.sqrt(product) if product != 0 else 0.0

    @property
    def clip_rate(self) -> float | None:
        """Share of elements that saturated; None if no format bounds them."""
        return self.clipped / self.bounded if self.bounded else None

    @property
    def underflow_rate(self) -> float:
        """Share of nonzero elements that became zero."""
        return self.flushed / self.nonzero if self.nonzero else 0.0

    @property
    def lossless(self) -> bool:
        return self.noise == 0

    def to_dict(self) -> dict[str, Any]:
        """Metrics by name, ready for `json.dumps`: non-finite values become None."""
        figures = {"sqnr_db": self.sqnr, "cosine": self.cosine, "max_error": self.max_error}
        plain = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        return {**plain, "clip_rate": self.clip_rate, "underflow_rate": self.underflow_rate, "lossless": self.lossless}

    def __repr__(self) -> str:
        clipped = "" if self.clip_rate is None else f", {self.clip_rate:.3%} clipped"
        return (
            f"ErrorMetrics(SQNR {self.sqnr:.2f} dB, cosine {self.cosine:.6f}, max error {self.max_error:.4g}{clipped}, "
            f"{self.underflow_rate:.3%} underflowed, of {self.count} values)"
        )


#: The metrics of no elements.
NOTHING = ErrorMetrics()
