"""Ops as declarations: everything that dispatch, frontends, compilers, `explain` and the conformance kit know about one.

A plug-in declares its own through the hook `breccia_operations`; `call_operation` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from . import targets
from .errors import PluginError, suggestion
from .locks import cached_property
from .options import DEFAULT, FLOAT32, CastOptions, ProductOptions
from .recipes import DelayedScaling, ScalingRecipe


class Kind(Enum):
    """What an argument of an op is.

    ARRAY: a floating array. TENSOR: a ScaledTensor. EITHER: one of these. RECIPE: the recipe to write.
    BESIDE: an array that no kernel is chosen by, such as group ends; the empty tuple stands for an absent one.
    NUMBER: likewise, an array of shape () or a number.
    """

    ARRAY = "array"
    TENSOR = "tensor"
    EITHER = "either"
    RECIPE = "recipe"
    BESIDE = "beside"
    NUMBER = "number"


@dataclass(frozen=True)
class Result:
    """One result of an op: a ScaledTensor under the recipe to write (`tensor`), or an array.

    shape: object reference of f(*arguments) -> the logical shape; None for that of the first argument.
    dtype: of an array: the name of a dtype, "first" for that of the first argument, or "option" for the option `out_dtype`.
    axis: of a ScaledTensor: its contraction axis; None for the option `axis`, or that of the first argument without one.
    """

    tensor: bool = False
    shape: str | None = None
    dtype: str = "float32"
    axis: int | None = None

    def shape_of(self, arguments: tuple[Any, ...]) -> tuple[int, ...]:
        """The logical shape for these arguments."""
        return tuple(arguments[0].shape) if self.shape is None else tuple(targets.load(self.shape)(*arguments))


#: Options of an op that casts to one tensor.
CASTING = ("axis", "scale", "rounding", "seed", "nonfinite", "storage", "out", "importance")


@dataclass(frozen=True)
class Operation:
    """An op: its arguments, its results, and the functions that define it.

    arguments: names and kinds, in the order that the op, its kernels and its reference take them. The first is an operand.
        After these they take the options, one `CastOptions` or `ProductOptions`, if the op has any.
    results: what it returns; a tuple if there are several.
    reference: object reference of the function that defines the results, on arrays of any framework, in backend primitives
        (`breccia.backend.Ops`) and other ops (`breccia.backend.calls`). It runs where no kernel does.
    options: names of the fields of CastOptions or of ProductOptions that it takes.
    recipe: the class of recipes that it writes.
    derivative: object reference of f(by, direction, n, *arguments, options), for ops that compute each element of an array
        from the elements at its place: the direction times the partial derivative by argument n. It serves gradients and
        tangents. by: has the ops as functions, which it calls; else it uses backend primitives. None: the results are
        constants to gradients, as codes are.
    derivative_options: those of its options that the derivative alone depends on: kernels and the reference do not get them.
        Where all of them are at their default, the direction passes through unchanged, and no operand is kept for it.
    validate: object reference of f(*arguments, options), which raises typed errors for arguments that do not fit together.
    composite: object reference of a function that replaces the reference in calls, and calls other ops.
    plan: object reference of f(call) -> the calls of other ops by the composite or the reference, for `explain`.
    examples: object reference of f() -> tuples of NumPy arguments, for the conformance kit, which compares kernels with the
        reference on them; ScaledTensors and recipes are passed as they are.
    laws: object reference of a tuple of functions f(operation, place), further tests for the kit.
    aliases: other names, for `explain` and for kernels.
    passes_storages: the composite or the reference takes operands, and writes results, in any storage.
    """

    name: str
    arguments: tuple[tuple[str, Kind], ...]
    results: tuple[Result, ...]
    reference: str
    options: tuple[str, ...] = ()
    recipe: type = ScalingRecipe
    derivative: str | None = None
    derivative_options: tuple[str, ...] = ()
    validate: str | None = None
    composite: str | None = None
    plan: str | None = None
    examples: str | None = None
    laws: str | None = None
    aliases: tuple[str, ...] = ()
    passes_storages: bool = False
    plugin: str = field(default="", compare=False)

    # -- what follows from the arguments -----------------------------------------------------------------------------

    @cached_property
    def target(self) -> int | None:
        """The position of the recipe to write; None if the op writes none."""
        return next((n for n, (_, kind) in enumerate(self.arguments) if kind is Kind.RECIPE), None)

    @cached_property
    def second(self) -> int | None:
        """The position of the second operand that kernels are chosen by; None if there is only one."""
        chosen_by = (Kind.ARRAY, Kind.TENSOR, Kind.EITHER)
        return next((n for n, (_, kind) in enumerate(self.arguments) if n and kind in chosen_by), None)

    @cached_property
    def casts(self) -> bool:
        """Whether its first operand is an array that it casts: its recipe comes first in the key of the table."""
        return self.target is not None and self.arguments[0][1] is Kind.ARRAY

    @cached_property
    def scaled(self) -> dict[str, int]:
        """Positions by name of the operands that may be ScaledTensors."""
        return {name: n for n, (name, kind) in enumerate(self.arguments) if kind in (Kind.TENSOR, Kind.EITHER)}

    @cached_property
    def joint(self) -> str:
        """What joins the two recipes of a call in messages; empty where there is one."""
        return " to " if self.target is not None and not self.casts else " and " if self.second is not None else ""

    # -- what follows from the options -------------------------------------------------------------------------------

    @cached_property
    def default(self) -> CastOptions | ProductOptions | None:
        """Its options at their default; None if it has none."""
        return None if not self.options else FLOAT32 if "out_dtype" in self.options else DEFAULT

    @property
    def stores(self) -> bool:
        """Whether the storage of its result can be chosen."""
        return "storage" in self.options

    @property
    def product(self) -> bool:
        """Whether it multiplies two matrices."""
        return "out_dtype" in self.options and self.second is not None

    def is_straight(self, options: Any) -> bool:
        """Whether the direction passes through unchanged."""
        return bool(self.derivative_options) and self.for_kernels(options) is options

    def for_kernels(self, options: CastOptions) -> CastOptions:
        """The options without those of the derivative."""
        if all(getattr(options, name) is getattr(DEFAULT, name) for name in self.derivative_options):
            return options
        kernel_options = options.replace(**{name: getattr(DEFAULT, name) for name in self.derivative_options})
        return kernel_options if kernel_options.given() else DEFAULT

    def with_defaults(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with the default options where these are left out."""
        return arguments if self.default is None or len(arguments) > len(self.arguments) else (*arguments, self.default)

    def options_of(self, arguments: tuple[Any, ...]) -> Any:
        """The options among all arguments; `DEFAULT` for an op without."""
        return arguments[-1] if self.options else DEFAULT

    def axis_of(self, result: Result, arguments: tuple[Any, ...]) -> int:
        """The contraction axis of a result that is a ScaledTensor."""
        if result.axis is not None:
            return result.axis
        return arguments[-1].axis if "axis" in self.options else arguments[0].axis

    def check(self) -> None:
        """Raise PluginError if the declaration is invalid."""
        what = f"op {self.name!r}"
        targets.check_fields(self, what)
        if not self.name.isidentifier() or self.name.startswith("_"):
            raise PluginError(f"{what}: its name is a function's, like 'swiglu_cast'.")
        if not self.arguments or self.arguments[0][1] not in (Kind.ARRAY, Kind.TENSOR, Kind.EITHER):
            raise PluginError(f"{what}: its first argument is an operand: Kind.ARRAY, TENSOR or EITHER.")
        if sum(kind is Kind.RECIPE for _, kind in self.arguments) > 1 or not self.results:
            raise PluginError(f"{what}: it has at most one recipe to write, and at least one result.")
        if any(result.tensor for result in self.results) and self.target is None:
            raise PluginError(f"{what}: a result is a ScaledTensor, so one argument is Kind.RECIPE.")
        known = ProductOptions._fields if "out_dtype" in self.options else tuple(f.name for f in fields(CastOptions))
        for name in self.options:
            if name not in known:
                raise PluginError(f"{what}: it takes an option {name!r}{suggestion(name, list(known))}")
        if not self.reference:
            raise PluginError(f"{what}: it needs a reference, the function that defines its results.")
        if self.derivative is not None and (len(self.results) != 1 or self.results[0].tensor or self.default is not DEFAULT):
            raise PluginError(f"{what}: a derivative is that of one array, and the op takes options of a cast.")
        for name in ("reference", "derivative", "validate", "composite", "plan", "examples", "laws"):
            if (target := getattr(self, name)) is not None:
                targets.check(target, f"{what}: {name}")


def _generic(module: str, name: str) -> str:
    return f"breccia.kernels.reference.{module}:{name}"


def _operation(name: str, arguments: Mapping[str, Kind], results: tuple[Result, ...], module: str, **more: Any) -> Operation:
    """An op of core: its reference is the generic algorithm; it has a composite if it has a plan."""
    composite = f"breccia.kernels.composites:{name}" if "plan" in more else None
    if arguments.get("x") is Kind.ARRAY:
        more.setdefault("validate", f"{_CHECKS}:check_cast_operand")
    if "plan" in more:
        more["plan"] = f"breccia.kernels.plans:{more['plan']}"
    return Operation(name, tuple(arguments.items()), results, _generic(module, name), composite=composite, **more)


_CHECKS = "breccia.kernels.checks"
_CAST = {"x": Kind.ARRAY, "recipe": Kind.RECIPE}
_FACTORS = {"a": Kind.EITHER, "b": Kind.EITHER}
_RECORDED = {**_CAST, "amaxes": Kind.BESIDE, "scale": Kind.NUMBER}
_HISTORY = (Result(shape=f"{_CHECKS}:history_shape"), Result(shape=f"{_CHECKS}:scalar_shape"))
_PRODUCT = (Result(shape=f"{_CHECKS}:product_shape", dtype="option"),)
_ROUND_TRIP = ("axis", "scale", "rounding", "seed", "nonfinite")

_DECLARED = (
    _operation("cast", _CAST, (Result(tensor=True),), "casting", options=CASTING),
    _operation(
        "cast_pair",
        _CAST,
        (Result(tensor=True, axis=-1), Result(tensor=True, axis=-2)),
        "composed",
        options=("rounding", "seed", "nonfinite", "scale", "storage"),
        plan="plan_of_cast_pair",
    ),
    _operation("dequantize", {"st": Kind.TENSOR}, (Result(dtype="option"),), "decoding", options=("out_dtype", "out")),
    _operation(
        "requantize",
        {"st": Kind.TENSOR, "recipe": Kind.RECIPE},
        (Result(tensor=True),),
        "requantizing",
        options=("scale", "rounding", "seed", "nonfinite", "require_exact", "storage", "out"),
        plan="plan_of_requantize",
    ),
    _operation(
        "matmul",
        _FACTORS,
        _PRODUCT,
        "products",
        options=("out_dtype", "bias", "out"),
        validate=f"{_CHECKS}:check_product",
        plan="plan_of_products",
    ),
    _operation(
        "cast_matmul",
        {**_CAST, "b": Kind.EITHER},
        (Result(shape=f"{_CHECKS}:cast_product_shape", dtype="option"),),
        "products",
        options=("out_dtype", "bias"),
        validate=f"{_CHECKS}:check_cast_product",
        plan="plan_of_cast_matmul",
        passes_storages=True,
    ),
    _operation(
        "grouped_matmul",
        {**_FACTORS, "offsets": Kind.BESIDE},
        (Result(shape=f"{_CHECKS}:grouped_shape", dtype="option"),),
        "products",
        options=("out_dtype", "out"),
        validate=f"{_CHECKS}:check_grouped_product",
        plan="plan_of_products",
    ),
    _operation(
        "cast_ste",
        _CAST,
        (Result(dtype="first"),),
        "composed",
        options=(*_ROUND_TRIP, "clip"),
        derivative_options=("clip",),
        plan="plan_of_round_trips",
        derivative="breccia.kernels.composites:passed_through",
        aliases=("cast_ste_clipped",),
    ),
    _operation("record_amax", _RECORDED, _HISTORY, "recording", recipe=DelayedScaling, validate=f"{_CHECKS}:check_recorded"),
    _operation(
        "cast_and_record",
        _RECORDED,
        (Result(tensor=True), *_HISTORY),
        "recording",
        options=("axis", "rounding", "seed", "nonfinite", "storage", "out"),
        recipe=DelayedScaling,
        validate=f"{_CHECKS}:check_recorded",
        plan="plan_of_cast_and_record",
        passes_storages=True,
    ),
    _operation(
        "cast_pair_and_record",
        _RECORDED,
        (Result(tensor=True, axis=-1), Result(tensor=True, axis=-2), *_HISTORY),
        "recording",
        options=("rounding", "seed", "nonfinite", "storage"),
        recipe=DelayedScaling,
        validate=f"{_CHECKS}:check_recorded",
        plan="plan_of_cast_pair_and_record",
        passes_storages=True,
    ),
)
#: The ops of core by name. docs/spec/numerics.md specifies them.
OPERATIONS = {op.name: op for op in _DECLARED}
