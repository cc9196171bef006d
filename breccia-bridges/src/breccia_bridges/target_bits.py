"""`convert(..., target_bits=)`: a recipe for each tensor, so that all take at most so many bits, and lose the least."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from breccia import OptionError, Policy, ScalingRecipe, UnsupportedError
from breccia.backend import as_recipe
from breccia.internal import abbreviated, measuring, printable

from .announcements import CONFIG, read_object
from .beside import left_behind
from .conversion import Conversion
from .damage import Damages
from .dialect_writer import DialectWriter
from .dialects.writing import titled
from .fused import fused
from .jobs import Job, quantizing, selected
from .knapsack import Option, solve
from .mix import POLICY, Mix, policy_path
from .modules import is_table
from .remote_path import is_remote
from .source import Value
from .staging import write_text

#: What tensors are stored under without a list of recipes, in breccia's own files, from few bits to many. Scales are searched
#: for, as every entry but the asymmetric one allows.
LADDER = (
    "int3,group_size=32,scale_rule=mse",
    "int4,scale_rule=mse",
    "nvfp4,scale_rule=mse",
    "int4,group_size=32,offset=bias",
    "int5,group_size=32,scale_rule=mse",
    "mxfp6,scale_rule=mse",
    "mxfp8",
)
#: In a list of recipes: leave a tensor as it is.
KEEP = "keep"
#: The number of an expert in a name. Experts of a layer are one product, so they get one recipe.
_EXPERT, _EVERY = re.compile(r"\.experts\.\d+\."), ".experts.*."


@dataclass(frozen=True)
class Target:
    """Bits per parameter, and the recipes to choose among: specs; none for the default ones."""

    bits: float
    specs: tuple[str, ...]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, bits: Any, recipe: Any, include: Iterable[str], exclude: Iterable[str]) -> Target | None:
        """From what users give; None without a target. Raises OptionError for other values."""
        if bits is None:
            if isinstance(recipe, list):
                raise OptionError(
                    f"several recipes (--recipe) are for target_bits= (--target-bits), which chooses among them; got "
                    f"{recipe!r}. Give one, or a policy."
                )
            return None
        if isinstance(bits, bool) or not isinstance(bits, int | float) or not math.isfinite(bits) or bits <= 0:
            raise OptionError(
                f"target_bits (--target-bits) is a number of bits per parameter, such as 4.5; got {bits!r}.", target_bits=bits
            )
        if recipe is not None and (not isinstance(recipe, list | tuple) or len(set(map(str, recipe))) < 2):
            raise OptionError(
                f"target_bits= (--target-bits) chooses among recipes, and got {recipe!r}. Give a list (--recipe nvfp4 --recipe "
                "mxfp6), or none for the default one.",
                recipe=recipe,
            )
        return cls(float(bits), tuple(_spec(one) for one in recipe or ()), tuple(include), tuple(exclude))


def _spec(one: Any) -> str:
    return one.spec if isinstance(one, ScalingRecipe) else KEEP if one == KEEP else as_recipe(one).spec


@dataclass
class Group:
    """Values that get one recipe. jobs: for each, by recipes that it can have; "keep" is among them where it was given."""

    names: tuple[str, ...]
    jobs: dict[str, list[Job]] = field(default_factory=dict[str, list[Job]])

    @property
    def parameters(self) -> int:
        return sum(math.prod(job.value.shape) for job in next(iter(self.jobs.values())))

    def nbytes(self, spec: str) -> int:
        return sum(job.nbytes for job in self.jobs[spec])


def mixed(target: Target, work: Conversion, damages: Damages, memory: int) -> Mix:
    """The recipes under which the values of a checkpoint take at most `target.bits`, and lose the least. memory: bytes at most.

    Raises OptionError for a target that no choice meets, and for one that every choice stays below; UnsupportedError for a
    dialect whose tensors have one recipe, and for a value that it has no recipe for.
    """
    specs = _known(target, work.writer, damages)
    groups = _groups(target, work, specs)
    parameters = sum(group.parameters for group in groups)
    if not groups:
        raise OptionError(
            f"target_bits= (--target-bits): no tensor of {work.src} is quantized under any of {', '.join(specs)}; `breccia "
            "inspect` lists them."
        )
    if work.writer is not None:
        _check_mixes(work.writer, groups)
    limit = math.floor(target.bits * parameters / 8)
    _check_reach(target.bits, groups, parameters, limit)
    every = [job for group in groups for jobs in group.jobs.values() for job in jobs]
    with measuring.of_elements(work.estimates.slab(every, memory)):
        costs = damages.of(groups, target.bits)
    options = [
        [Option(group.nbytes(spec), cost[spec]) for spec in group.jobs] for group, cost in zip(groups, costs, strict=True)
    ]
    found = solve(options, limit)
    assert found is not None  # the cheapest of each fit
    chosen = [list(group.jobs)[n] for group, n in zip(groups, found, strict=True)]
    total = sum(group.nbytes(spec) for group, spec in zip(groups, chosen, strict=True))
    return Mix(
        _policy(target, work, groups, chosen),
        8 * total / parameters,
        parameters,
        sum(cost[spec] for cost, spec in zip(costs, chosen, strict=True)),
        _single(groups, costs, limit),
        damages.measure,
        Counter(spec for group, spec in zip(groups, chosen, strict=True) for _ in group.names),
    )


def _known(target: Target, writer: DialectWriter | None, damages: Damages) -> list[str]:
    """The recipes to choose among: those given; else the dialect's, or the ladder."""
    if target.specs:
        return list(dict.fromkeys(one if one == KEEP else damages.searched(as_recipe(one)).spec for one in target.specs))
    specs: list[str] = []
    for one in LADDER if writer is None else [recipe.spec for recipe in writer.recipes]:
        try:
            specs.append(damages.searched(as_recipe(one)).spec)
        except OptionError:  # a method that only weighs the search has no use for it
            continue
    return list(dict.fromkeys(specs))


def _groups(target: Target, work: Conversion, specs: Sequence[str]) -> list[Group]:
    """The values that any of the recipes quantizes, in groups."""
    source, writer, dropped = work.source, work.writer, dict.fromkeys(left_behind(work.source))
    under: dict[str, dict[str, Job]] = {}
    refusals: dict[str, UnsupportedError] = {}
    for spec in specs:
        if spec == KEEP:
            continue
        recipe = as_recipe(spec)
        _, chosen, _ = selected(source, Policy.of(recipe, target.include, target.exclude), dropped)
        for name in chosen:
            try:
                under.setdefault(name, {})[spec] = quantizing(source.values[name], recipe, writer)
            except UnsupportedError as e:
                refusals[name] = e
    for name, jobs in under.items():
        if not jobs:
            raise refusals[name]
        if KEEP in specs:
            jobs[KEEP] = _kept(source.values[name], source.dtype)
    groups = [Group(names) for names in _together(under, work).values()]
    for group in groups:
        common = [spec for spec in specs if all(spec in under[name] for name in group.names)]
        if not common:
            raise UnsupportedError(
                f"{printable(abbreviated(group.names))} are computed as one layer, and none of {', '.join(specs)} fits all. "
                "Exclude them (--exclude), or give other recipes (--recipe).",
                names=group.names,
            )
        group.jobs = {spec: [under[name][spec] for name in group.names] for spec in common}
    return groups


def _kept(value: Value, dtype: str) -> Job:
    return Job.decoding(value, dtype, KEEP) if value.is_scaled else Job.copying(value, KEEP)


def _together(names: Collection[str], work: Conversion) -> dict[str, tuple[str, ...]]:
    """Values that get one recipe: experts of a layer; under a dialect with a config, layers that engines compute as one; and an
    embedding that is tied to the output head.
    """
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        by_pattern.setdefault(_EXPERT.sub(_EVERY, name), []).append(name)
    owners = {pattern: pattern for pattern in by_pattern}
    joined = fused(by_pattern) if work.writer is not None and work.writer.dialect.config is not None else []
    config = read_object(work.src / CONFIG) if work.src.is_dir() else None
    if config and config.get("tie_word_embeddings"):
        joined.append([name for name in by_pattern if is_table(name) or name == "lm_head.weight"])
    for group in joined:
        owners |= dict.fromkeys(group, group[0])
    groups: dict[str, tuple[str, ...]] = {}
    for pattern, owner in owners.items():
        groups[owner] = (*groups.get(owner, ()), *by_pattern[pattern])
    return groups


def _check_mixes(writer: DialectWriter, groups: Sequence[Group]) -> None:
    """Raise UnsupportedError for a dialect that has one recipe for all tensors."""
    pairs = [
        {job.name: job.placed for job in (one, other) if job.placed}
        for first, second in pairwise(groups)
        for spec, (one, *_) in first.jobs.items()
        for another, (other, *_) in second.jobs.items()
        if spec != another
    ]
    for placed in pairs[:64]:
        try:
            writer.configs(placed, ())
            return
        except UnsupportedError:
            continue
    if pairs:
        raise UnsupportedError(
            f"target_bits= (--target-bits) gives tensors different recipes, and {titled(writer.dialect.name)} has one setting "
            "for all. Give one recipe (--recipe) instead, or a dialect that mixes: compressed_tensors, gguf or mlx.",
            dialect=writer.dialect.name,
        )


def _check_reach(bits: float, groups: Sequence[Group], parameters: int, limit: int) -> None:
    """Raise OptionError for a target below the fewest bits, and for one above the most."""
    ends = [[group.nbytes(spec) for spec in group.jobs] for group in groups]
    least, most = (8 * sum(map(of, ends)) / parameters for of in (min, max))
    specs = list(dict.fromkeys(spec for group in groups for spec in group.jobs))
    if sum(map(min, ends)) > limit:
        raise OptionError(
            f"target_bits={bits:g} (--target-bits) is below what the tensors take at least, {least:.3f} bits per parameter, "
            f"under {', '.join(specs)}. Give more bits, or a recipe with fewer (--recipe).",
            target_bits=bits,
            least=least,
        )
    if bits > most:
        raise OptionError(
            f"target_bits={bits:g} (--target-bits) is above what the tensors take at most, {most:.3f} bits per parameter, "
            f"under {', '.join(specs)}. Give fewer bits, or a recipe with more (--recipe): {KEEP!r} leaves tensors alone.",
            target_bits=bits,
            most=most,
        )


def _single(groups: Sequence[Group], costs: Sequence[Mapping[str, float]], limit: int) -> tuple[str, float] | None:
    """The one recipe that does the least damage in so many bytes; None if none fits."""
    common = [spec for spec in groups[0].jobs if all(spec in group.jobs for group in groups)]
    fits = [spec for spec in common if sum(group.nbytes(spec) for group in groups) <= limit]
    sums = {spec: sum(cost[spec] for cost in costs) for spec in fits}
    return min(sums.items(), key=lambda item: item[1], default=None)


def _policy(target: Target, work: Conversion, groups: Sequence[Group], chosen: Sequence[str]) -> dict[str, str]:
    """Rules that choose exactly this: the recipe of most parameters by default, and a rule for each group with another."""
    sums: Counter[str] = Counter()
    for group, spec in zip(groups, chosen, strict=True):
        sums[spec] += group.parameters * (spec != KEEP)
    default = max(sums, key=lambda spec: sums[spec])
    wanted = {name: spec for group, spec in zip(groups, chosen, strict=True) for name in group.names}
    rules: dict[str, str] = {}
    for group, spec in zip(groups, chosen, strict=True):
        if spec != default:
            rules |= {_EXPERT.sub(_EVERY, name): spec for name in group.names}
    dropped = dict.fromkeys(left_behind(work.source))
    _, taken, _ = selected(work.source, Policy.of({**rules, "default": default}), dropped)
    found = {name: one.recipe.spec for name, one in taken.items()}
    others = {name: wanted.get(name, KEEP) for name in {**found, **wanted} if found.get(name, KEEP) != wanted.get(name, KEEP)}
    return {**others, **rules, "default": default}


def check_policy_path(destination: Path, force: bool) -> None:
    """Raise FileExistsError where the policy would replace a file that is none of a conversion."""
    path = policy_path(destination)
    if is_remote(path) or not path.exists():
        return
    if path.is_dir() or not (force or path.read_bytes().startswith(POLICY.encode())):
        raise FileExistsError(
            f"{path} exists, where the policy of the conversion would be written; move it, or replace it: force=True (--force)."
        )


def write_policy(mix: Mix, source: Path, destination: Path, method: str) -> None:
    """Write the policy beside the destination; at a URL nothing is, and the report has it."""
    path = policy_path(destination)
    if not is_remote(path):
        by = f"calibrated by {method}" if method else "by squared error"
        write_text(path, mix.yaml(f"{source.name} at {mix.bits:.3f} bits per parameter, {by}"))
