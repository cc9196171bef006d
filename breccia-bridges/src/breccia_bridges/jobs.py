"""What becomes of each value of a checkpoint that is converted."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from breccia import (
    Codec,
    ErrorMetrics,
    Exactness,
    Policy,
    ScaledTensor,
    ScalingRecipe,
    UnsupportedError,
    requantize,
)
from breccia.backend import BF16, F16, F32, NUMPY, TENSOR, Chosen, Parameter, Rotation, choose, components
from breccia.internal import PRESETS, abbreviated, decided, keeps_parts, keeps_values, kind_in_file

from .beside import factors
from .calibrated import Calibrated
from .dialect_writer import DialectWriter, Placed
from .extremes import Extremes
from .fused import fused
from .gguf_types import NAMED, type_bytes
from .measure import Histogram
from .results import TensorReport
from .safetensors import Described, described_as, plan
from .safetensors_file import Shape, byte_count, read
from .slab_casts import SlabCasts
from .source import Source, Value

#: How the reason for keeping a tensor of a kind that keeps its precision starts; the kind follows.
BY_DEFAULT = "kept by default"
#: The dtypes of a file that can be quantized.
CASTABLE: dict[str, Codec] = {codec.name: codec for codec in (F32, F16, BF16)}


@dataclass(frozen=True, eq=False)
class Together:
    """Values that share one scale of the whole tensor."""

    values: tuple[Value, ...]

    @cached_property
    def _found(self) -> dict[Rotation | None, Extremes]:
        return {}

    def extremes(self, rotation: Rotation | None) -> Extremes:
        """Their smallest and largest elements, which are read once, as `rotation` rotates them."""
        if rotation not in self._found:
            self._found[rotation] = Extremes([value.numbers() for value in self.values], rotation)
        return self._found[rotation]


@dataclass(frozen=True)
class Job:
    """What becomes of a value: "copy" its bytes, "decode" it, "cast" it under a recipe, or "keep" its codes.

    reason: why it is not quantized; empty for one that is. described: its declaration in the new file.
    placed: how another library's dialect stores it. among: the values whose elements count for its scale of the whole tensor.
    exactness: what its own codes and scales let the recipe keep, where the formats leave a choice and it was asked.
    calibrated: the values that calibration or a merge chooses, if it was asked.
    """

    value: Value
    way: str
    reason: str
    recipe: ScalingRecipe | None
    described: Described
    placed: Placed | None = None
    among: Together | None = field(default=None, repr=False)
    exactness: Exactness | None = field(default=None, repr=False)
    calibrated: Calibrated | None = field(default=None, repr=False)

    @classmethod
    def copying(cls, value: Value, reason: str) -> Job:
        return cls(value, "copy", reason, None, ({value.name: (value.stored_as, value.shape)}, None))

    @classmethod
    def decoding(cls, value: Value, dtype: str, reason: str) -> Job:
        return cls(value, "decode", reason, None, ({value.name: (dtype, value.shape)}, None))

    @classmethod
    def casting(cls, value: Value, recipe: ScalingRecipe, writer: DialectWriter | None = None) -> Job:
        described = plan(value.name, value.shape, recipe)
        if writer is None:
            return cls(value, "cast", "", recipe, described)
        placed = writer.place(value.name, recipe, recipe.layout.fitted(value.shape), -1, value.shape)
        return cls(value, "cast", "", recipe, (placed.entries, None), placed)

    @classmethod
    def keeping_codes(cls, value: Value, recipe: ScalingRecipe, writer: DialectWriter | None = None) -> Job:
        layout = value.layout.plain
        if value.recipe is None or not keeps_parts(value.recipe, layout, value.axis, recipe):
            layout = recipe.layout.fitted(value.shape, value.axis)  # scales are repeated for its blocks
        if writer is None:
            return cls(value, "keep", "", recipe, described_as(value.name, recipe, layout, value.axis, value.shape))
        placed = writer.place(value.name, recipe, layout, value.axis, value.shape)
        return cls(value, "keep", "", recipe, (placed.entries, None), placed)

    @property
    def name(self) -> str:
        return self.value.name

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors in the new file."""
        return sum((type_bytes if part[0] in NAMED else byte_count)(*part) for part in self.described[0].values())

    def report(self, fidelity: ErrorMetrics | None = None, counts: Histogram | None = None) -> TensorReport:
        """What is known of the value before and after."""
        value = self.value
        stored_as = self.recipe.name if self.recipe else self.described[0][self.name][0]
        before = (value.name, value.shape, value.stored_as)
        return TensorReport(
            *before, stored_as, self.reason, value.nbytes, self.nbytes, fidelity, counts, self.recipe, self.way == "keep",
            self.way == "decode" and value.is_scaled, self.way == "cast" and value.is_scaled,
            self.exactness or self._by_formats(), self.calibrated and self.calibrated.records.get(self.name),
        )  # fmt: skip

    def _by_formats(self) -> Exactness | None:
        """What the recipe keeps of every value like this one; None where one of the two is plain."""
        value = self.value
        if value.recipe is None or self.recipe is None:
            return None
        return decided(value.recipe, value.layout.plain, value.axis, self.recipe)

    @property
    def chosen(self) -> ScaledTensor | np.ndarray | None:
        """What calibration or a merge has made of it; None for nothing."""
        return self.calibrated.get(self.name) if self.calibrated else None

    @property
    def is_changed(self) -> bool:
        """Are its values meant to be others than those of the source?

        A change is merged into it, or calibration has moved scales of its columns into the layer before, or such scales of
        another into its rows.
        """
        if self.calibrated is None:
            return False
        return (self.calibrated.is_stored and self.chosen is not None) or "folded_into" in self.calibrated.records.get(
            self.name, {}
        )

    def plain(self) -> np.ndarray:
        """The stored array of a value that is copied: as it is in the source, or as calibration has changed it."""
        chosen = self.chosen
        if not isinstance(chosen, np.ndarray):
            return self.value.plain()
        if self.calibrated is not None and self.calibrated.is_stored:
            return chosen
        codec = CASTABLE[self.value.stored_as]
        return NUMPY.store(codec.encode(NUMPY, chosen), NUMPY.storage(codec))

    def check_unchanged(self) -> None:
        """Raise CorruptFileError if a file that it reads was replaced or modified since it was opened."""
        values = (self.value, *(self.among.values if self.among else ()))
        files = [file for value in values for file in value.files.values()]
        for file in {id(file): file for file in files}.values():
            file.check_unchanged()

    def casts(self, unit: int = 1, importance: np.ndarray | None = None) -> SlabCasts:
        """The casts of its slabs, of a multiple of `unit` rows. importance: of each column, for a search of scales."""
        assert self.recipe is not None
        among = self.among and self.among.extremes(self.recipe.format.rotation)
        return SlabCasts(self.value.numbers(), self.recipe, among, importance, unit)

    def tensor(self) -> ScaledTensor:
        """A value that keeps its codes, or has those that a merge has chosen, under its recipe, in memory."""
        recipe, chosen = self.recipe, self.chosen
        assert self.way == "keep" and recipe is not None
        st = chosen if isinstance(chosen, ScaledTensor) else self.value.loaded()
        return st if st.recipe == recipe else requantize(st, recipe, require_exact=True)


def _not_castable(dtype: str, shape: Shape) -> str:
    """Why a tensor cannot be quantized; empty for a floating tensor of two axes or more."""
    if dtype not in CASTABLE:
        return f"{dtype} cannot be cast" if dtype.startswith("F") else "not floating"
    if math.prod(shape) == 0:
        return "empty"
    return "fewer than two axes" if len(shape) < 2 else ""


def _parameters(source: Source, dropped: Collection[str]) -> Iterator[Parameter]:
    """The values of a checkpoint, as a policy chooses among them."""
    for name, value in source.values.items():
        if name in dropped:
            continue
        dtype = source.dtype if value.is_scaled else value.stored_as
        shape = value.shape
        why = _not_castable(dtype, shape)
        axes, kind = (None, "linear") if why else ((len(shape) - 1,), kind_in_file(name, shape))
        yield Parameter(name, shape, byte_count(dtype, shape), kind, axes, why)


def check_factors(source: Source, jobs: Mapping[str, Job]) -> None:
    """Raise UnsupportedError for a value that leaves its dialect without a tensor that belongs to it in the model's code."""
    for name, factor in factors(source).items():
        if jobs[name].way != "keep" or jobs[name].placed is not None:
            raise UnsupportedError(
                f"{source.path}: the inputs of {name} are multiplied by {factor}, for which no other format has a place. "
                "Recipe 'none' keeps both; else convert the checkpoint that it was made from.",
                name=name,
            )


def selected(
    source: Source, policy: Policy, dropped: Collection[str]
) -> tuple[list[Parameter], dict[str, Chosen], dict[str, str]]:
    """The values of a checkpoint, those that a policy quantizes, and the reasons for the others."""
    parameters = list(_parameters(source, dropped))
    return parameters, *choose(parameters, policy, "convert", what="tensor", listed_by="`breccia inspect`")


def quantizing(value: Value, recipe: ScalingRecipe, writer: DialectWriter | None = None) -> Job:
    """A value under a recipe: with the codes that it has, where the recipe holds them; else cast."""
    keeps = value.recipe is not None and keeps_values(value.recipe, value.layout.plain, value.axis, recipe)
    return (Job.keeping_codes if keeps else Job.casting)(value, recipe, writer)


def by_policy(source: Source, policy: Policy, dropped: Collection[str], writer: DialectWriter | None = None) -> dict[str, Job]:
    """What becomes of each value under a policy. writer: of the dialect to write; None for breccia's own files."""
    parameters, chosen, left = selected(source, policy, dropped)
    jobs: dict[str, Job] = {}
    for parameter in parameters:
        name, value = parameter.name, source.values[parameter.name]
        reason = parameter.why or _by_default(left.get(name, ""), policy)
        recipe = chosen[name].recipe if name in chosen else None
        if recipe is not None:
            jobs[name] = quantizing(value, recipe, writer)
        elif value.recipe is not None and writer is not None and writer.file and writer.holds(value):
            jobs[name] = Job.keeping_codes(value, value.recipe, writer)  # each tensor of such a file has its own type
        elif value.is_scaled:
            jobs[name] = Job.decoding(value, source.dtype, f"{reason} and decoded to {source.dtype}")
        else:
            jobs[name] = Job.copying(value, reason)
    return jobs if writer is None or writer.file else _with_one_scale(jobs, writer)


def unchanged(source: Source, dense: str, dropped: Collection[str], writer: DialectWriter | None = None) -> dict[str, Job]:
    """What becomes of each value where nothing is quantized. dense: the dtype to decode to; none keeps the codes."""
    jobs: dict[str, Job] = {}
    for name, value in source.values.items():
        if name in dropped:
            continue
        if value.recipe is None:
            kind = value.container.decoded.get(value.largest)
            jobs[name] = Job.copying(value, f"decoded from {kind}" if kind else "not quantized in the source")
        elif dense:
            jobs[name] = Job.decoding(value, dense, f"decoded to {dense}")
        else:
            jobs[name] = Job.keeping_codes(value, value.recipe) if writer is None else _translated(value, writer)
    if writer is not None and not writer.file:
        _check_one_scale(jobs, writer)
    return jobs


def _by_default(reason: str, policy: Policy) -> str:
    return f"{BY_DEFAULT} ({reason})" if reason in PRESETS[policy.preset].keeps else reason


# ------------------------------------------------------------------------------------------------ another dialect


def _translated(value: Value, writer: DialectWriter) -> Job:
    """A value that keeps its codes and scales, or gets others of the same values, in a dialect.

    Raises UnsupportedError where the dialect has no recipe that holds the value whatever its codes are.
    """
    recipe = value.recipe
    assert recipe is not None
    writer.check_name(value.name)
    try:
        return Job.keeping_codes(value, recipe, writer)
    except UnsupportedError as e:
        refusal = e
    for other in writer.recipes:
        if keeps_values(recipe, value.layout.plain, value.axis, other):
            try:
                return Job.keeping_codes(value, other, writer)
            except UnsupportedError:  # of this shape or layout; another recipe may do
                continue
    closest = min(writer.recipes, key=lambda one: abs(one.format.element.bits - recipe.format.element.bits))
    nearest = refusal.found.get("nearest", closest.spec)
    raise UnsupportedError(
        f"{refusal} No recipe of {writer.dialect.title} has the same values. Give recipe={nearest!r} (--recipe), which "
        "decodes and quantizes again.",
        name=value.name,
        spec=recipe.spec,
    )


def _has_tensor_scale(job: Job) -> bool:
    return job.recipe is not None and job.recipe.format.levels[0].block == TENSOR


def _of_fused_layers(jobs: Mapping[str, Job]) -> list[list[str]]:
    """The values of layers that engines compute as one, under a recipe with a scale for the whole tensor."""
    return [
        group
        for group in fused(name for name, job in jobs.items() if _has_tensor_scale(job))
        if len({jobs[name].recipe for name in group}) == 1
    ]


def unlike_layers(jobs: Mapping[str, Job]) -> list[list[str]]:
    """The values of each layer that engines compute as one, where their recipes differ."""
    return [group for group in fused(jobs) if len({jobs[name].recipe for name in group}) > 1]


def _tensor_scales(jobs: Mapping[str, Job], group: list[str]) -> set[bytes]:
    """The different scales of whole tensors among values that keep their codes."""
    scales: set[bytes] = set()
    for name in group:
        st = jobs[name].value.tensor()
        parts = components(st)
        scales.add(np.asarray(read(parts.get("global_scale", parts["scale"]))).tobytes())
    return scales


def _with_one_scale(jobs: dict[str, Job], writer: DialectWriter) -> dict[str, Job]:
    """The same jobs, with one scale for the tensors of layers that engines compute as one."""
    for group in _of_fused_layers(jobs):
        if all(jobs[name].way == "keep" for name in group) and len(_tensor_scales(jobs, group)) == 1:
            continue
        together = Together(tuple(jobs[name].value for name in group))
        for name in group:
            job = jobs[name]
            again = job if job.way == "cast" else Job.casting(job.value, job.recipe, writer) if job.recipe else job
            jobs[name] = replace(again, among=together)
    return jobs


def _check_one_scale(jobs: Mapping[str, Job], writer: DialectWriter) -> None:
    """Raise UnsupportedError for layers that engines compute as one, whose tensors keep scales that differ."""
    for group in _of_fused_layers(jobs):
        if len(_tensor_scales(jobs, group)) > 1:
            spec = recipe.spec if (recipe := jobs[group[0]].recipe) else ""
            raise UnsupportedError(
                f"{abbreviated(group)} have scales of the whole tensor that differ, and engines compute them as one layer with "
                f"one scale. Give recipe={spec!r} (--recipe), which quantizes them again under one scale; or leave dialect="
                f"{writer.dialect.name!r} out.",
                names=group,
            )
