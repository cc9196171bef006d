"""Which layers of a quantized model cost most, what is wrong with them, and what helps: by weights alone, or on a text."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from breccia import BrecciaError, OptionError, ScalingRecipe, bridges
from breccia.backend import as_recipe
from breccia.internal import choices_of

from .block_faults import block_faults
from .calibration import SEARCH, Calibration
from .compare import compare
from .damage import TOKENS, decoded, lost
from .jobs import Job
from .layer_costs import Layer, Remedy, Why
from .measure import slabs
from .remote_path import is_remote, path_of
from .results import Advance, Report, no_progress
from .source import Source, Value

#: Recipes that are tried in place of one with fewer bits, from few bits to many.
_WIDER = ("int4,group_size=32,offset=bias", "mxfp6", "mxfp8")
#: Groups that are tried in place of wider ones.
_FINER = (32, 16)
#: The share of what keeping a layer would save that a remedy has to save.
_ENOUGH = 0.5
#: A column of inputs is an outlier where its root mean square is beyond so many of the median column's.
_OUTLIER = 6.0
_EXPERT, _EVERY = re.compile(r"\.experts\.\d+\."), ".experts.*."


def why(
    model: str | os.PathLike[str],
    quantized: str | os.PathLike[str],
    *,
    calibrate: Any = None,
    device: str | None = None,
    remedies: int = 3,
    histograms: bool = False,
    advance: Advance | None = None,
    source_dialect: str | tuple[str | None, str | None] | None = None,
) -> Why:
    """Rank the layers of a quantized model by what they cost, say what is wrong with them, and try remedies for the worst.

    model, quantized, source_dialect, histograms: as `compare` takes them.
    calibrate: a text, or token ids, as `convert` takes them. The model of transformers runs with each layer quantized alone,
        and with all but it, and its KL divergence per token is taken on the first 512 tokens; all of that is one pass over
        its blocks. Without a text, layers are ranked by the share of their energy that is lost.
    device: what the model runs on, in torch's spelling; the CPU by default.
    remedies: for so many of the worst layers, the same recipe with a search for scales, finer groups, wider recipes, and
        keeping the layer are tried. The cheapest is the one of the fewest bytes that saves half of what keeping it would.
    advance: called with a tensor's name and its bytes in the model, when its weights are compared.

    Layers with broken blocks come first, whatever they cost: a block of which nothing is left is a fault of a file or a
    program, and not rounding. Raises what `compare` raises, OptionError for a device without a text and for a negative number
    of remedies, and what `convert` raises under `calibrate`: NonFiniteError for a model that itself has NaN or Inf on the text.

        >>> x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
        >>> breccia.bridges.save_safetensors({"a.weight": x, "b.weight": x}, tmp / "before.safetensors")
        >>> broken = x.copy()
        >>> broken[5, :32] *= 8
        >>> after = {"a.weight": breccia.cast(x, "mxfp4"), "b.weight": breccia.cast(broken, "mxfp4")}
        >>> breccia.bridges.save_safetensors(after, tmp / "after.safetensors")
        >>> result = breccia.bridges.why(tmp / "before.safetensors", tmp / "after.safetensors")
        >>> result.layers[0].name, result.layers[0].faults.broken
        ('b.weight', 1)
    """
    if isinstance(remedies, bool) or not isinstance(remedies, int) or remedies < 0:
        raise OptionError(f"remedies (--remedies) is the number of layers to try remedies for; got {remedies!r}.")
    calibration = Calibration.of(calibrate, None, device)
    source, candidate = path_of(model), path_of(quantized)
    if calibration is not None and is_remote(source):
        raise OptionError(
            f"calibrate= (--calibrate) runs a model that transformers opens from disk; {source} is a URL. Download it first.",
            source=str(source),
        )
    dialects = source_dialect if isinstance(source_dialect, tuple) else (source_dialect, source_dialect)
    report = compare(model, quantized, histograms=histograms, advance=advance or no_progress, source_dialect=source_dialect)
    before, after = (Source.open(path, one).values for path, one in zip((source, candidate), dialects, strict=True))
    layers = _by_weights(report, before, after)
    ranking: _Weights = (
        _Weights(before, after) if calibration is None else _OnText(before, after, calibration, source, dialects[0])
    )
    layers, total = ranking.ranked(layers)
    layers[:remedies] = ranking.treated(layers[:remedies], total)
    return Why(str(model), str(quantized), ranking.measure, ranking.tokens, total, tuple(layers), report)


def _by_weights(report: Report, before: Mapping[str, Value], after: Mapping[str, Value]) -> list[Layer]:
    """What the weights tell of each value that differs; experts of a layer are one."""
    groups: dict[str, list[Layer]] = {}
    for t in report.quantized:
        if t.measured.lossless:
            continue
        faults = None
        if t.recipe is not None:
            faults = block_faults(before[t.name].numbers(), after[t.name].numbers(), t.recipe)
        spec = t.recipe.spec if t.recipe else t.stored_as
        layer = Layer(t.name, (t.name,), spec, t.parameters, t.bytes_out, t.measured, faults)
        groups.setdefault(_EXPERT.sub(_EVERY, t.name), []).append(layer)
    return [_joined(name, each) for name, each in groups.items()]


def _joined(name: str, layers: Sequence[Layer]) -> Layer:
    first, *others = layers
    for other in others:
        faults = first.faults + other.faults if first.faults and other.faults else first.faults or other.faults
        names = (*first.names, *other.names)
        parameters, nbytes = first.parameters + other.parameters, first.nbytes + other.nbytes
        first = replace(
            first, name=name, names=names, parameters=parameters, nbytes=nbytes, fidelity=first.fidelity + other.fidelity,
            faults=faults,
        )  # fmt: skip
    return first


class _Weights:
    """Layers by the share of their energy that is lost."""

    measure, tokens = "squared error", 0

    def __init__(self, before: Mapping[str, Value], after: Mapping[str, Value]) -> None:
        self.before, self.after = before, after

    def ranked(self, layers: Sequence[Layer]) -> tuple[list[Layer], float | None]:
        return sorted(layers, key=lambda layer: (not layer.is_broken, -layer.lost, layer.name)), None

    def treated(self, layers: Sequence[Layer], total: float | None) -> list[Layer]:
        """The layers with their remedies."""
        return [_with_remedies(layer, self._tried(layer), layer.lost, 0.0) for layer in layers]

    def _tried(self, layer: Layer) -> list[Remedy]:
        return [Remedy(_spec(jobs), what, _added_bytes(jobs, layer), _lost(jobs)) for what, jobs in self.candidates(layer)]

    def candidates(self, layer: Layer) -> Iterator[tuple[str, list[Job]]]:
        """What is tried: what it is, and the jobs of the layer's values."""
        values = [self.before[name] for name in layer.names]
        recipe = next((self.after[name].recipe for name in layer.names if self.after[name].recipe), None)
        for what, other in _others(recipe):
            try:
                jobs = [Job.casting(value, other) for value in values]
            except BrecciaError:  # it does not fit the shape
                continue
            if sum(job.nbytes for job in jobs) < sum(value.nbytes for value in values):
                yield what, jobs
        yield "keep", [Job.copying(value, "keep") for value in values]


class _OnText(_Weights):
    """Layers by the KL divergence of the model on a text."""

    def __init__(
        self, before: Mapping[str, Value], after: Mapping[str, Value], calibration: Calibration, path: Path, dialect: str | None
    ) -> None:
        super().__init__(before, after)
        self._calibration, self._path, self._dialect = calibration, path, dialect
        self._ids = calibration.ids(path)
        self._quantized: dict[str, Any] = {}

    def ranked(self, layers: Sequence[Layer]) -> tuple[list[Layer], float | None]:
        seen: dict[str, Any] = {}
        self._quantized = {name: _version(self.after[name]) for layer in layers for name in layer.names}
        variants = {("all", ""): self._quantized}
        for layer in layers:
            variants["alone", layer.name] = {name: self._quantized[name] for name in layer.names}
            variants["without", layer.name] = {n: v for n, v in self._quantized.items() if n not in layer.names}
        costs = self._costs(variants, seen.__setitem__)
        found = [
            replace(layer, alone=costs["alone", layer.name], without=costs["without", layer.name], **_inputs(layer, seen))
            for layer in layers
        ]
        return sorted(found, key=lambda one: (not one.is_broken, -(one.alone or 0.0), one.name)), costs["all", ""]

    def treated(self, layers: Sequence[Layer], total: float | None) -> list[Layer]:
        tried = {layer.name: list(self.candidates(layer)) for layer in layers}
        variants = {
            (layer.name, str(n)): {**self._quantized, **{job.name: _cast_version(job) for job in jobs}}
            for layer in layers
            for n, (_, jobs) in enumerate(tried[layer.name])
            if _spec(jobs) != "keep"
        }
        costs = self._costs(variants, None) if variants else {}
        done: list[Layer] = []
        for layer in layers:
            left = [costs.get((layer.name, str(n)), layer.without or 0.0) for n in range(len(tried[layer.name]))]
            remedies = [
                Remedy(_spec(jobs), what, _added_bytes(jobs, layer), cost)
                for (what, jobs), cost in zip(tried[layer.name], left, strict=True)
            ]
            done.append(_with_remedies(layer, remedies, total or 0.0, layer.without or 0.0))
        return done

    def _costs(self, variants: Mapping[tuple[str, str], Mapping[str, Any]], observe: Any) -> dict[tuple[str, str], float]:
        names = {str(n): key for n, key in enumerate(variants)}
        found = bridges.divergences(
            self._path, self._ids, {n: variants[key] for n, key in names.items()}, device=self._calibration.device,
            source_dialect=self._dialect, most=TOKENS, observe=observe,
        )  # fmt: skip
        self.measure, self.tokens = found.measure, found.tokens
        return {names[n]: math.inf if math.isnan(cost) else cost for n, cost in found.costs.items()}


def _others(recipe: ScalingRecipe | None) -> Iterator[tuple[str, ScalingRecipe]]:
    """Recipes to try in place of one, from few bytes to many."""
    if recipe is None:
        return
    best = _searching(recipe)
    yield "the same recipe, cast again" if best == recipe else "the same recipe, scales searched for", best
    name = "group_size" if hasattr(recipe, "group_size") else "block_k"
    finer = next((group for group in _FINER if group < (getattr(recipe, name, None) or 0)), None)
    if finer is not None:
        yield f"groups of {finer}", replace(best, **{name: finer})  # type: ignore[type-var]
    bits = recipe.format.element.bits
    for other in map(as_recipe, _WIDER):
        if other.format.element.bits > bits or (other.format.element.bits == bits and recipe.format.offset == "none"):
            yield other.spec, other


def _searching(recipe: ScalingRecipe) -> ScalingRecipe:
    """The recipe with a search for scales, if it can have one: the bytes stay as many."""
    if SEARCH not in choices_of(type(recipe), "scale_rule")[0]:
        return recipe
    try:
        return replace(recipe, scale_rule=SEARCH)  # type: ignore[type-var]
    except BrecciaError:  # some fields exclude the search
        return recipe


def _with_remedies(layer: Layer, remedies: Sequence[Remedy], now: float, kept: float) -> Layer:
    """The layer with what was tried. now: what is lost; kept: what is lost where the layer is kept."""
    ordered = tuple(sorted(remedies, key=lambda one: one.nbytes))
    most = now - _ENOUGH * (now - kept) if math.isfinite(now) else math.inf  # of what is left
    enough = (one for one in ordered if kept < now and one.left <= most and one.left < math.inf)
    return replace(layer, remedies=ordered, cheapest=next(enough, None))


def _spec(jobs: Sequence[Job]) -> str:
    return jobs[0].recipe.spec if jobs[0].recipe else "keep"


def _added_bytes(jobs: Sequence[Job], layer: Layer) -> int:
    return sum(job.nbytes for job in jobs) - layer.nbytes


def _lost(jobs: Sequence[Job]) -> float:
    """The share of the energy of some values that is lost: the mean, by their sizes."""
    sizes = [math.prod(job.value.shape) for job in jobs]
    return sum(lost(job) * count for job, count in zip(jobs, sizes, strict=True)) / max(1, sum(sizes))


def _version(value: Value) -> Any:
    """Makes the numbers of a value, in FP32."""

    def made() -> np.ndarray:
        numbers = value.numbers()
        parts = [numbers.values(slab).astype(np.float32).reshape(-1) for slab in slabs(numbers.shape, numbers.unit)]
        return np.concatenate(parts).reshape(value.shape)

    return made


def _cast_version(job: Job) -> Any:
    def made() -> np.ndarray:
        return np.concatenate([y.reshape(-1) for _, y in decoded(job)]).reshape(job.value.shape)

    return made


def _inputs(layer: Layer, seen: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a layer's inputs."""
    known = [seen[name] for name in layer.names if name in seen]
    if not known:
        return {}
    square, largest = known[0].square, known[0].largest
    mean = float(np.sqrt(square.mean()))
    if mean == 0:
        return {}
    median = float(np.sqrt(np.median(square)))
    return {"peak": float(largest.max()) / mean, "outliers": int((np.sqrt(square) >= _OUTLIER * median).sum()) if median else 0}
