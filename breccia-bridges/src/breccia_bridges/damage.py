"""What quantizing a value costs under a recipe: its squared error, or the KL divergence of the model on a text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from breccia import ScalingRecipe, bridges, dequantize

from .calibration import Calibration, is_searched
from .jobs import Job

#: Tokens of the text that KL divergences are measured on, at most.
TOKENS = 512


class Grouped(Protocol):
    """Values that get one recipe, and their jobs under each."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def jobs(self) -> Mapping[str, Sequence[Job]]: ...

    @property
    def parameters(self) -> int: ...

    def nbytes(self, spec: str) -> int: ...


class Damages:
    """Squared errors: of each value the share of its energy that is lost, times the square root of its parameters.

    That KL divergence is about a sum of such shares, each times a constant of its layer, is the linearity theorem of HIGGS
    (Malinovskii et al., arXiv:2411.17525). Without a text nothing tells the constants. Equal ones would give small layers too
    many bits, and ones in proportion to the parameters too few.
    """

    measure = "squared error"

    def searched(self, recipe: ScalingRecipe) -> ScalingRecipe:
        """The recipe as it is cast. Raises OptionError for one that the method does not take."""
        return recipe

    def of(self, groups: Sequence[Grouped], bits: float) -> list[dict[str, float]]:
        """For each group, what each of its recipes costs. bits: per parameter, about which they are chosen."""
        return [
            {spec: sum(lost(job) * math.sqrt(math.prod(job.value.shape)) for job in jobs) for spec, jobs in group.jobs.items()}
            for group in groups
        ]


class Divergences(Damages):
    """KL divergences on a text: measured for each group under the recipe nearest to the target, with the other groups as they
    are; under the other recipes scaled by the error, each column weighed by the mean square of its input. A group that the text
    does not reach counts as the median one.
    """

    measure = "KL divergence, nats per token"

    def __init__(self, calibration: Calibration, source: Path, limit: int, source_dialect: str | None) -> None:
        self._calibration, self._source, self._limit, self._dialect = calibration, source, limit, source_dialect
        self._importance: dict[str, np.ndarray] = {}

    def searched(self, recipe: ScalingRecipe) -> ScalingRecipe:
        return self._calibration.searching(recipe)

    def of(self, groups: Sequence[Grouped], bits: float) -> list[dict[str, float]]:
        nearest = [_nearest(group, bits) for group in groups]
        variants = {
            str(n): {job.name: self._version(job) for job in group.jobs[spec] if job.way == "cast"}
            for n, (group, spec) in enumerate(zip(groups, nearest, strict=True))
        }
        measured = bridges.divergences(
            self._source, self._calibration.ids(self._source), variants, device=self._calibration.device, limit=self._limit,
            source_dialect=self._dialect, most=TOKENS, observe=self._observe,
        )  # fmt: skip
        errors = [
            {spec: sum(lost(job, self._weights(job)) for job in jobs) for spec, jobs in group.jobs.items()} for group in groups
        ]
        pairs = zip(measured.costs.values(), errors, nearest, strict=True)
        constants = [cost / of[spec] if of[spec] else 0.0 for cost, of, spec in pairs]
        reached = [constant for constant in constants if constant > 0 and math.isfinite(constant)]
        typical = statistics.median(reached) if reached else 1.0
        return [
            {spec: error and error * (constant if constant > 0 else typical) for spec, error in of.items()}
            for constant, of in zip((math.inf if math.isnan(one) else one for one in constants), errors, strict=True)
        ]

    def _observe(self, name: str, inputs: Any) -> None:
        mean = inputs.square.mean()
        if mean > 0:
            self._importance[name] = (inputs.square / mean).astype(np.float32)

    def _weights(self, job: Job) -> np.ndarray | None:
        weights = self._importance.get(job.name)
        return weights if weights is not None and weights.shape == job.value.shape[-1:] else None

    def _version(self, job: Job) -> Any:
        def made() -> np.ndarray:
            weights = self._weights(job) if job.recipe and is_searched(job.recipe) else None
            slabs = list(decoded(job, weights))
            return np.concatenate([y.reshape(-1) for _, y in slabs]).reshape(job.value.shape)

        return made


def _nearest(group: Grouped, bits: float) -> str:
    """The recipe whose bytes are nearest to the target, among those that lose something."""
    return min(
        group.jobs, key=lambda spec: (not _loses(group.jobs[spec]), abs(8 * group.nbytes(spec) / group.parameters - bits))
    )


def _loses(jobs: Sequence[Job]) -> bool:
    return any(job.way == "cast" for job in jobs)


def decoded(job: Job, importance: np.ndarray | None = None) -> Any:
    """The numbers of a value that is cast, and what they decode to, slab by slab in C order."""
    casts = job.casts(importance=importance)
    for slab, st in zip(casts.slabs, casts.tensors(), strict=True):
        x = casts.stored.values(slab)
        yield x, dequantize(st).reshape(x.shape)


def lost(job: Job, importance: np.ndarray | None = None) -> float:
    """The share of the energy of a value that its cast loses, in FP64; 0 where all codes or numbers are kept.

    importance: the weight of each column, in both; scales are searched for under it. inf for a value with NaN or Inf, and for
    one that becomes such.
    """
    if job.way != "cast":
        return 0.0
    search = importance if job.recipe is not None and is_searched(job.recipe) else None
    noise = energy = 0.0
    weights = 1.0 if importance is None else importance.astype(np.float64)
    for x, y in decoded(job, search):
        with np.errstate(over="ignore", invalid="ignore"):
            noise += float((np.square(x - y, dtype=np.float64) * weights).sum())
            energy += float((np.square(x, dtype=np.float64) * weights).sum())
    share = noise / energy if energy else 0.0
    return share if math.isfinite(share) else math.inf
