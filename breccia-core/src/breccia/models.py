"""Models: which parameters are quantized, how, and why the others are not; for all frameworks and `breccia convert`.

A framework lists its parameters as `Parameter`s, asks `choose`, and replaces what it returns. `QuantizeSummary` is what users
see of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import BrecciaError, OptionError, UnsupportedError, abbreviated
from .kernels.checks import fitted_layout
from .layouts import Shape
from .policies import (
    CONVOLUTION,
    EXCLUDED,
    NO_MATRIX,
    NO_RULE,
    PRESETS,
    Policy,
    WeightRule,
    check_patterns,
    kept_kind,
    matches,
    of_names,
)
from .recipes import ScalingRecipe
from .tensors.grids import cast_nbytes
from .training import TrainingRecipe

#: The reason for parameters that take no fewer bytes under the recipe: their rows are much shorter than a block.
GROWS = "would not shrink"
#: Tokens of the pieces that a text for calibration is cut into, at most.
TEXT_LENGTH = 512


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model, without its values.

    name: its path, joined by dots, as in files. shape, nbytes: in high precision.
    kind: one of `breccia.policies.KINDS`, which its layer or its shape tells, whatever its name; its name may tell another.
    axes: its contracted axes, which are consecutive; None where nothing tells them.
    why: the reason why it cannot be quantized, as far as the framework knows; empty if it can.
    layer: the object of the framework that owns it.
    """

    name: str
    shape: Shape
    nbytes: int
    kind: str = "linear"
    axes: tuple[int, ...] | None = None
    why: str = ""
    layer: Any = None


def kind_in_file(name: str, shape: Shape) -> str:
    """The kind of a stored tensor of two axes or more, which has no layer: by its shape, and whether it is of experts."""
    if len(shape) == 2:
        return "linear"
    return "experts" if len(shape) == 3 and any(part in name for part in ("expert", "moe", "_exps")) else NO_MATRIX


class Chosen(NamedTuple):
    """How a parameter is quantized: its recipe, and its contracted axes, from the first to the last."""

    recipe: ScalingRecipe
    axes: tuple[int, ...]


def choose(
    parameters: Iterable[Parameter],
    policy: Policy,
    caller: str,
    *,
    select: Callable[[Parameter], str] | None = None,
    what: str = "parameter of two axes",
    listed_by: str = "the model's tree",
) -> tuple[dict[str, Chosen], dict[str, str]]:
    """The parameters to quantize by name, and the reasons for the others.

    parameters: all floating ones of two axes or more. select: returns the reason to leave a parameter, empty to quantize it
        under the policy's default, in place of kinds and patterns; what cannot be quantized is then the caller's to refuse.
    caller, what, listed_by: the function, the parameters and their list in errors.

    Raises UnknownNameError for a pattern that matches no name; UnsupportedError for a pattern with a recipe that matches only
    parameters that cannot be quantized; OptionError for a pattern that decides nothing, since others before it match the same
    names, for contracted axes that are not consecutive, and for
    `select` beside a policy with patterns. Where none is chosen, `none_chosen` is the error.
    """
    listed = list(parameters)
    if select is not None and policy.has_patterns:
        raise OptionError(f"{caller}: a function chooses the parameters, and so do the patterns of {policy.source}; give one.")
    if select is None:
        _check(policy, listed, caller, what, listed_by)
    chosen: dict[str, Chosen] = {}
    left: dict[str, str] = {}
    for p in listed:
        rule, reason = _ruled(p, policy) if select is None else (policy.default, select(p))
        if rule is not None and not reason:
            axes = p.axes if rule.axes is None else _consecutive(p, rule.axes, caller)
            if axes is None or (select is None and rule.axes is None):
                reason = p.why
            if axes is not None and not reason and select is None and _grows(p, rule.recipe, axes):
                reason = GROWS
            if axes is not None and not reason:
                chosen[p.name] = Chosen(rule.recipe, axes)
                continue
        left[p.name] = reason
    return chosen, left


def none_chosen(caller: str, left: Mapping[str, str], hint: str = "", what: str = "parameter of two axes") -> OptionError:
    """The error of a call that would quantize nothing: the reasons for all parameters that there are."""
    reasons = "; ".join(f"{why}: {names}" for why, names in by_reason(left)) or f"the model has no floating {what}"
    return OptionError(f"{caller}: no parameter is chosen: {reasons}{hint}.", left=left)


def _ruled(p: Parameter, policy: Policy) -> tuple[WeightRule | None, str]:
    """The rule of a parameter, and the reason to leave it."""
    kinds = kept_kind(p.name), p.kind
    pattern = policy.deciding(p.name, kinds)
    if pattern is not None:
        rule = next(rule for known, rule in policy.rules if known == pattern)
        return rule, EXCLUDED if rule is None else ""
    pattern, rule = policy.preset_rule(p.name, kinds)
    if pattern is None and rule is None:
        return None, NO_RULE
    for kind in kinds:
        if kind in PRESETS[policy.preset].keeps and not (p.why and kind in (NO_MATRIX, CONVOLUTION)):  # a reason says more
            return None, kind
    return rule, EXCLUDED if rule is None else ""


def _check(policy: Policy, parameters: list[Parameter], caller: str, what: str, listed_by: str) -> None:
    """Raise the errors of `choose` about patterns."""
    rules = dict(reversed(policy.rules))
    globs = of_names(rules)
    check_patterns(globs, [p.name for p in parameters], what, listed_by)
    deciding = {p.name: policy.deciding(p.name, (kept_kind(p.name), p.kind)) for p in parameters}
    for pattern in reversed(globs):
        matched = [p for p in parameters if matches(p.name, (pattern,))]
        earlier = {deciding[p.name] for p in matched} - {None}
        contradicted = pattern not in earlier and any(rules[other] != rules[pattern] for other in earlier if other)
        if contradicted and rules[pattern] is not policy.default:  # `exclude=` beats `include=`, whose rule is the default
            others = " and ".join(map(repr, sorted(filter(None, earlier))))
            raise OptionError(
                f"{caller}: the pattern {pattern!r} decides nothing: {others} before it "
                f"{'match' if len(earlier) > 1 else 'matches'} {abbreviated(p.name for p in matched)}, too, and the first "
                f"pattern that matches decides. Put {pattern!r} first.",
                pattern=pattern,
            )
        rule = rules[pattern]
        if rule is not None and rule.axes is None and all(p.why for p in matched):
            reasons = "; ".join(f"{why}: {names}" for why, names in by_reason({p.name: p.why for p in matched}))
            raise UnsupportedError(
                f"{caller}: the pattern {pattern!r} matches only parameters that cannot be quantized: {reasons}.",
                pattern=pattern,
            )


def _consecutive(p: Parameter, axes: tuple[int, ...], caller: str) -> tuple[int, ...]:
    ndim = len(p.shape)
    indices = tuple(sorted(a + ndim if a < 0 else a for a in axes))
    if not indices or indices[0] < 0 or indices[-1] >= ndim or indices != tuple(range(indices[0], indices[-1] + 1)):
        raise OptionError(
            f"{caller}: {p.name} has {ndim} axes; its contracted axes are consecutive ones of them, got {axes}.",
            name=p.name,
            axes=axes,
        )
    return indices


def _grows(p: Parameter, recipe: ScalingRecipe, axes: tuple[int, ...]) -> bool:
    axis, lead, matrix, _ = matrix_of(p.shape, axes)
    try:
        layout = fitted_layout(recipe, matrix[lead:], axis)
        return cast_nbytes(recipe.format, layout, matrix[lead:], axis) * math.prod(matrix[:lead]) >= p.nbytes
    except BrecciaError:  # raised with the parameter's name by the cast
        return False


def matrix_of(shape: Shape, axes: tuple[int, ...]) -> tuple[int, int, Shape, Shape]:
    """A parameter as matrices whose contracted axes are one.

    Returns (the axis of blocks, the number of leading axes, the shape, the axes of the parameter that its last two stand for).
    """
    first, after = axes[0], axes[-1] + 1
    k = math.prod(shape[first:after])
    if after == len(shape):  # rows, each contracted
        rows = max(first - 1, 0)
        return -1, rows, (*shape[:first], k) if first else (1, k), shape[rows:]
    return -2, first, (*shape[:first], k, math.prod(shape[after:])), shape[first:]


# ------------------------------------------------------------------------------------------------ what users see


@dataclass(frozen=True, repr=False)
class QuantizeSummary:
    """What was quantized. Printing it shows the numbers, the recipes and the reasons.

    chosen: (recipe, contracted axes) by name. left: reasons by name, for every other parameter of two axes or more.
    bytes_before, bytes_after: of all parameters and buffers of the model, shared ones counted once.
    """

    chosen: Mapping[str, Chosen]
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int

    @property
    def taken(self) -> Mapping[str, Chosen]:
        """Deprecated: `chosen`."""
        return self.chosen

    @property
    def quantized(self) -> tuple[str, ...]:
        """The names of the quantized parameters."""
        return tuple(self.chosen)

    @property
    def recipe(self) -> ScalingRecipe:
        """The recipe of all of them. Raises OptionError if they have several."""
        first, *others = dict.fromkeys(each.recipe for each in self.chosen.values())
        if others:
            listed = ", ".join(recipe.spec for recipe in (first, *others))
            raise OptionError(f"the parameters have several recipes: {listed}; `chosen` has that of each.")
        return first

    def lines(self) -> Iterator[str]:
        """The lines of its repr."""
        yield (
            f"{len(self.chosen)} parameters quantized; the model has {size(self.bytes_after)}, before {size(self.bytes_before)}"
        )
        how = {name: _how(each) for name, each in self.chosen.items()}
        for each, names in by_reason(how, 5):
            yield f"{each}: {names}"
        for reason, names in by_reason(self.left, 5):
            yield f"left in high precision ({reason}): {names}"

    def __repr__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True, repr=False)
class TrainingSummary:
    """Which layers train in low precision. Printing it shows the number, the recipe and the reasons for the others.

    chosen: the names of their weights. left: reasons by name, for every other parameter of two axes or more.
    """

    recipe: TrainingRecipe
    chosen: tuple[str, ...]
    left: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        """The lines of its repr."""
        yield f"{len(self.chosen)} layers train under {self.recipe!r}: {abbreviated(self.chosen, 5)}"
        for reason, names in by_reason(self.left, 5):
            yield f"left in high precision ({reason}): {names}"

    def __repr__(self) -> str:
        return "\n".join(self.lines())


def _how(chosen: Chosen) -> str:
    axes = chosen.axes
    return f"{chosen.recipe.spec}, blocks along {'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"


def by_reason(reasons: Mapping[str, str], shown: int = 3) -> Iterator[tuple[str, str]]:
    """Each reason with its names: the first few, and the number of the others."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return ((reason, abbreviated(of, shown)) for reason, of in names.items())


def size(count: int) -> str:
    """Bytes as people read them: "1.25 GB"."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB") if count >= 1e6 else (1e3, "kB")
    return f"{count / unit:.2f} {name}"
