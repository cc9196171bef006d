"""TrainingRecipe: which tensors the three GEMMs of a linear layer multiply in training, the same for every framework.

The layer computes `y = x @ w.T` with x (M, K), w (N, K) and y, dy (M, N). Its GEMMs are

    output       y  = x @ w.T      contracts K: rows of x by rows of w
    grad_input   dx = dy @ w       contracts N: rows of dy by columns of w
    grad_weight  dw = dy.T @ x     contracts M: columns of dy by columns of x

so each of x, w and dy is quantized twice: its rows with blocks along the last axis, its columns with blocks along the one
before, either from the tensor or from the codes of its rows. Frameworks read `TrainingRecipe.operands` and cast what it says,
so that equal operands get equal codes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from .codecs import Minifloat
from .declared import settle
from .errors import BrecciaError, RecipeError, UnknownNameError, UnsupportedError, suggestion
from .json_text import parsed_json
from .locks import cached_property
from .options import ROUNDINGS
from .recipe_bases import ScalingRecipe, powers_of_two
from .recipes import DelayedScaling
from .rotations import ROTATIONS, Rotation
from .rules import EVEN, FLOOR
from .specs import as_recipe

#: The three GEMMs by name, in the order that a step computes them: for each operand its tensor and its contraction axis.
GEMMS: Mapping[str, tuple[tuple[str, int], tuple[str, int]]] = MappingProxyType(
    {
        "output": (("input", -1), ("weight", -1)),
        "grad_input": (("gradient", -1), ("weight", -2)),
        "grad_weight": (("gradient", -2), ("input", -2)),
    }
)
#: The tensors that are quantized: x, w and dy.
TENSORS = ("input", "weight", "gradient")
#: Where the rows and the columns of each tensor enter: a GEMM, and the operand of it.
USES: Mapping[str, tuple[tuple[str, int], tuple[str, int]]] = MappingProxyType(
    {
        "input": (("output", 0), ("grad_weight", 1)),
        "weight": (("output", 1), ("grad_input", 1)),
        "gradient": (("grad_input", 0), ("grad_weight", 0)),
    }
)
#: The seed of the signs of `hadamard`: fixed, so that every framework and every resumed run has the same.
HADAMARD_SEED = 0

_TILES = "fp8_block,block_m=128"
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # E4M3 for values and E5M2 for gradients: "hybrid" of TransformerEngine 2.x, and torchao 0.18's tensorwise recipe.
        "fp8_current": {"input": "fp8_current", "weight": "fp8_current", "gradient": "fp8_current,fp8_format=E5M2"},
        "fp8_delayed": {"input": "fp8_delayed", "weight": "fp8_delayed", "gradient": "fp8_delayed,fp8_format=E5M2"},
        "fp8_row": {"input": "fp8_row", "weight": "fp8_row", "gradient": "fp8_row"},
        # DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.3.2.
        "fp8_block": {"input": "fp8_block", "weight": _TILES, "gradient": "fp8_block"},
        # As fp8_block, but the columns of x in tiles: grad_weight then multiplies 1x128 by 128x128, the faster product.
        "fp8_tile": {"input": "fp8_block", "input_columns": _TILES, "weight": _TILES, "gradient": "fp8_block"},
        "mxfp8": {"input": "mxfp8", "weight": "mxfp8", "gradient": "mxfp8"},
        # Pretraining Large Language Models with NVFP4 (arXiv:2509.25149), section 4.
        "nvfp4": {
            "input": "nvfp4",
            "weight": "nvfp4,block_m=16",
            "gradient": "nvfp4",
            "gradient_rounding": "stochastic",
            "hadamard": 16,
        },
    }
)


class GemmOperand(NamedTuple):
    """One operand of a GEMM of a layer in training.

    tensor: "input", "weight" or "gradient": x (M, K), w (N, K) or dy (M, N).
    recipe: the recipe that it is cast under; None for high precision.
    axis: its contraction axis: -1, its rows have blocks, or -2, its columns have.
    rounding: "nearest" or "stochastic".
    rotation: what rotates it along the contraction axis before the cast; None for nothing.
    from_codes: whether it is a cast of the decoded rows; otherwise of the tensor.
    """

    tensor: str
    recipe: ScalingRecipe | None
    axis: int
    rounding: str = "nearest"
    rotation: Rotation | None = None
    from_codes: bool = False


@dataclass(frozen=True, repr=False, init=False)
class TrainingRecipe:
    """How a linear layer trains in low precision: what its three GEMMs multiply. A value: hashable, with a JSON form.

    Give the name of a preset: "fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "fp8_tile", "mxfp8" or "nvfp4"; or a
    recipe for each tensor; or a preset and the fields to change.

    input, weight, gradient: the recipes of x, w and dy, or their specs; None leaves the tensor in high precision.
    input_columns, weight_columns, gradient_columns: the recipes of the same tensors where a GEMM contracts their second last
        axis; by default those of their rows.
    gradient_rounding: "nearest" (default) or "stochastic", of dy in both GEMMs that it enters.
    hadamard: 16, 32, 64 or 128: before they are cast, both operands of grad_weight are rotated along M, in blocks of that many
        rows, by the Hadamard matrix with random signs of docs/spec/numerics.md, section 5.7, with the seed 0. This spreads
        outliers. The product stays the same: the matrix is orthogonal, and rows after the last whole block stay as they are in
        both. 0 (default), or an operand of grad_weight in high precision: no rotation.
    high_precision: GEMMs that multiply x, w and dy as they are: any of "output", "grad_input", "grad_weight".
    columns_from_codes: tensors whose columns are a cast of their decoded rows: any of "input", "weight", "gradient". This is
        the scaling-aware transpose of FP8-Flow-MoE (arXiv:2511.02302). Between scales that are powers of two, codes of one
        float codec move by their exponents: values that are normal numbers under the new scale stay, and smaller ones are
        rounded to its subnormal numbers.
    fast_accumulation: GEMMs whose sums may stay in the tensor cores of a GPU, which keep fewer bits than FP32, as with torch's
        `use_fast_accum=True`: any of "output", "grad_input", "grad_weight". Both operands have one scale for the tensor or for
        each row. TransformerEngine 2.x does so for "output". Devices and frameworks without such products accumulate in FP32;
        so do layers of experts for "output" and "grad_input".

    Raises UnknownNameError for an unknown preset or recipe; RecipeError for fields that contradict each other, for a recipe
    that casts cannot write, for delayed scaling with different recipes for rows and columns, which have one history, and for
    `columns_from_codes` or `fast_accumulation` of other scales or codecs.

        >>> recipe = breccia.TrainingRecipe("fp8_tile")
        >>> recipe.operands["grad_weight"][1].recipe.spec, recipe.operands["grad_weight"][1].axis  # x, along M
        ('fp8_block,block_m=128', -2)
        >>> breccia.TrainingRecipe("nvfp4", high_precision=("grad_weight",))
        TrainingRecipe('nvfp4', high_precision=('grad_weight',))
        >>> breccia.TrainingRecipe(input="mxfp8", weight="mxfp8", gradient="mxfp8") == breccia.TrainingRecipe("mxfp8")
        True
    """

    input: ScalingRecipe | None
    weight: ScalingRecipe | None
    gradient: ScalingRecipe | None
    input_columns: ScalingRecipe | None
    weight_columns: ScalingRecipe | None
    gradient_columns: ScalingRecipe | None
    gradient_rounding: str
    hadamard: int
    high_precision: tuple[str, ...]
    columns_from_codes: tuple[str, ...]
    fast_accumulation: tuple[str, ...]

    def __init__(
        self,
        preset: str | None = None,
        /,
        *,
        input: Any = None,
        weight: Any = None,
        gradient: Any = None,
        input_columns: Any = None,
        weight_columns: Any = None,
        gradient_columns: Any = None,
        gradient_rounding: str | None = None,
        hadamard: int | None = None,
        high_precision: tuple[str, ...] | None = None,
        columns_from_codes: tuple[str, ...] | None = None,
        fast_accumulation: tuple[str, ...] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "preset") and value is not None}
        base = {} if preset is None else dict(_preset(preset))
        for tensor in TENSORS:
            if tensor in given:  # a recipe for the rows replaces the preset's for the columns too
                base.pop(f"{tensor}_columns", None)
        settings: dict[str, Any] = {**_OPTIONS, **base, **given}
        for tensor in TENSORS:
            rows = _recipe(tensor, settings.get(tensor))
            columns = _recipe(f"{tensor}_columns", settings.get(f"{tensor}_columns", rows))
            object.__setattr__(self, tensor, rows)
            object.__setattr__(self, f"{tensor}_columns", columns)
        for name in ("gradient_rounding", "hadamard"):
            object.__setattr__(self, name, settings[name])
        for name in ("high_precision", "fast_accumulation"):
            object.__setattr__(self, name, _listed(name, settings[name], "GEMMs", tuple(GEMMS)))
        columns = _listed("columns_from_codes", settings["columns_from_codes"], "tensors", TENSORS)
        object.__setattr__(self, "columns_from_codes", columns)
        self._check()

    def _check(self) -> None:
        settle(self, "gradient_rounding", ROUNDINGS)
        settle(self, "hadamard", ROTATIONS)
        recipes = {f.name: getattr(self, f.name) for f in fields(self)[:6]}
        if not any(r is not None for r in recipes.values()):
            raise RecipeError(f"a TrainingRecipe needs a preset ({', '.join(PRESETS)}) or recipes: input=, weight=, gradient=.")
        for tensor in TENSORS:
            rows, columns = recipes[tensor], recipes[f"{tensor}_columns"]
            delayed = [type(r).__name__ for r in (rows, columns) if isinstance(r, DelayedScaling)]
            if delayed and rows != columns:
                raise RecipeError(
                    f"{tensor}: delayed scaling has one history for rows and columns, hence one recipe for both; got "
                    f"{tensor}={_spec(rows)!r} and {tensor}_columns={_spec(columns)!r}.",
                    tensor=tensor,
                )
        if self.hadamard and any(isinstance(r, DelayedScaling) for r in (self.input, self.gradient)):
            raise RecipeError(
                "hadamard changes the amax of columns, and delayed scaling has one history for rows and columns. "
                "Set hadamard=0."
            )
        if len(self.high_precision) == len(GEMMS):
            raise RecipeError("high_precision lists all three GEMMs, so nothing is quantized; leave the layer as it is.")
        for tensor in self.columns_from_codes:
            if why := _not_transposed(*self.uses(tensor)):
                raise RecipeError(
                    f"columns_from_codes lists {tensor!r}, and {why}. Leave it out, or choose a recipe such as 'mxfp8' or "
                    f"'fp8_block,power_of_two_scale=true' for {tensor}= and {tensor}_columns=.",
                    tensor=tensor,
                )
        for gemm in self.fast_accumulation:
            for operand in self.operands[gemm]:
                if why := _not_fast(operand):
                    raise RecipeError(
                        f"fast_accumulation lists {gemm!r}, and {why}. Leave it out, or choose a recipe such as 'fp8_current' "
                        "or 'fp8_row' for the operands of that GEMM.",
                        tensor=operand.tensor,
                    )

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __hash__(self) -> int:
        """Computed once: layers look up their casts by it."""
        return self._hash

    @cached_property
    def operands(self) -> Mapping[str, tuple[GemmOperand, GemmOperand]]:
        """What each GEMM multiplies: `GemmOperand`s by the names of `GEMMS`, in the order of the products above."""
        return MappingProxyType({gemm: (self._operand(gemm, 0), self._operand(gemm, 1)) for gemm in GEMMS})

    def _operand(self, gemm: str, n: int) -> GemmOperand:
        tensor, axis = GEMMS[gemm][n]
        if gemm in self.high_precision:
            return GemmOperand(tensor, None, axis)
        recipe = getattr(self, tensor if axis == -1 else f"{tensor}_columns")
        rounding = self.gradient_rounding if tensor == "gradient" and recipe is not None else "nearest"
        rotation = self._rotation if gemm == "grad_weight" else None
        return GemmOperand(tensor, recipe, axis, rounding, rotation, axis == -2 and tensor in self.columns_from_codes)

    def uses(self, tensor: str) -> tuple[GemmOperand, GemmOperand]:
        """The rows and the columns of "input", "weight" or "gradient", as the GEMMs multiply them."""
        rows, columns = USES[tensor]
        return self.operands[rows[0]][rows[1]], self.operands[columns[0]][columns[1]]

    @property
    def _rotation(self) -> Rotation | None:
        """Of both operands of grad_weight, or of neither: one alone would change their product."""
        both_cast = self.gradient_columns is not None and self.input_columns is not None
        return Rotation(self.hadamard, HADAMARD_SEED) if self.hadamard and both_cast else None

    @property
    def stochastic(self) -> bool:
        """Whether casts draw random numbers."""
        return any(operand.rounding == "stochastic" for pair in self.operands.values() for operand in pair)

    @property
    def delayed(self) -> Mapping[str, DelayedScaling]:
        """The tensors whose scale comes from earlier steps, with their recipes."""
        return {t: r for t in TENSORS if isinstance(r := getattr(self, t), DelayedScaling)}

    # -- text ------------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not at their default, ready for `json.dumps`; recipes as their `to_dict`."""
        listed: dict[str, Any] = {}
        for tensor in TENSORS:
            rows, columns = getattr(self, tensor), getattr(self, f"{tensor}_columns")
            listed[tensor] = None if rows is None else rows.to_dict()
            if columns != rows:
                listed[f"{tensor}_columns"] = None if columns is None else columns.to_dict()
        for name, default in _OPTIONS.items():
            if (value := getattr(self, name)) != default:
                listed[name] = [*value] if isinstance(default, tuple) else value
        return listed

    def to_json(self) -> str:
        """Canonical JSON of `to_dict`: sorted keys, no spaces. `from_json` reads it.

        >>> text = breccia.TrainingRecipe("fp8_block").to_json()
        >>> breccia.TrainingRecipe.from_json(text) == breccia.TrainingRecipe("fp8_block")
        True
        """
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_dict(cls, listed: Any) -> TrainingRecipe:
        """The recipe of `to_dict`. Raises RecipeError for anything else."""
        known = [f.name for f in fields(cls)]
        if not isinstance(listed, Mapping):
            raise RecipeError(f"a training recipe in JSON is an object with the fields {', '.join(known)}; got {listed!r:.80}.")
        settings = dict(cast("Mapping[str, Any]", listed))
        for key in settings:
            if key not in known:
                raise RecipeError(f"a training recipe has no field {key!r}{suggestion(key, known)}", field=key, known=known)
        for key in known[:6]:
            if isinstance(settings.get(key), Mapping):
                settings[key] = ScalingRecipe.from_json(json.dumps(settings[key]))
        settings |= {key: _ABSENT for key in known[:6] if key in settings and settings[key] is None}
        return cls(**settings)

    @classmethod
    def from_json(cls, text: str) -> TrainingRecipe:
        """The recipe that `to_json` wrote. Raises RecipeError for other text."""
        try:
            listed = parsed_json(text)
        except (ValueError, TypeError) as e:
            raise RecipeError(f"a training recipe in JSON is an object with its fields; this is not JSON ({e}).") from e
        return cls.from_dict(listed)

    @classmethod
    def of(cls, given: TrainingRecipe | str | Mapping[str, Any]) -> TrainingRecipe:
        """A training recipe from what users give in its place: itself, the name of a preset, JSON, or a mapping of fields."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            return cls.from_json(given) if given.lstrip().startswith("{") else cls(given)
        if isinstance(given, Mapping):
            return cls.from_dict(given)
        raise UnsupportedError(f"a TrainingRecipe or the name of a preset ({', '.join(PRESETS)}) is needed; got {given!r:.80}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingRecipe.from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        for name in PRESETS:
            plain = TrainingRecipe(name)
            changed = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != getattr(plain, f.name)}
            if not changed.keys() & {f.name for f in fields(self)[:6]}:
                return f"TrainingRecipe({', '.join([repr(name), *(f'{key}={value!r}' for key, value in changed.items())])})"
        listed = ((key, getattr(self, key) if key in _OPTIONS else _spec(getattr(self, key))) for key in self.to_dict())
        return f"TrainingRecipe({', '.join(f'{key}={value!r}' for key, value in listed)})"


#: The fields that are no recipes, and their defaults.
_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"gradient_rounding": "nearest", "hadamard": 0, "high_precision": (), "columns_from_codes": (), "fast_accumulation": ()}
)
#: Says that columns are left in high precision where rows are not, which None as an argument cannot.
_ABSENT = "none"


def _preset(name: Any) -> Mapping[str, Any]:
    if not isinstance(name, str):
        raise UnsupportedError(f"TrainingRecipe takes the name of a preset ({', '.join(PRESETS)}); got {name!r:.80}.")
    preset = PRESETS.get(name.lower())
    if preset is None:
        raise UnknownNameError(
            f"no training recipe {name!r}{suggestion(name, list(PRESETS))} Or give input=, weight=, gradient=.",
            name=name,
            known=list(PRESETS),
        )
    return preset


def _recipe(field: str, given: Any) -> ScalingRecipe | None:
    if given is None or given == _ABSENT:
        return None
    try:
        recipe = as_recipe(given)
    except BrecciaError as e:
        raise type(e)(f"TrainingRecipe, {field}=: {e}", **{**e.found, "field": field}) from e
    if recipe.decode_only:
        raise RecipeError(f"TrainingRecipe, {field}=: casts do not write {recipe.spec!r}: {recipe.decode_only}.", field=field)
    return recipe


def _listed(field: str, given: Any, of: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names of `known` that are given, in their order."""
    listed = (given,) if isinstance(given, str) else tuple(given)
    for name in listed:
        if name not in known:
            raise RecipeError(
                f"{field} lists {of}, and {name!r:.80} is not one{suggestion(str(name), list(known))}", **{field: given}
            )
    return tuple(name for name in known if name in listed)


def _not_transposed(rows: GemmOperand, columns: GemmOperand) -> str:
    """Why the columns cannot be cast from the codes of the rows without rounding normal numbers again; empty if they can."""
    if rows.recipe is None or columns.recipe is None:
        return f"its {'rows' if rows.recipe is None else 'columns'} are in high precision"
    if columns.rotation is not None:
        return "hadamard rotates its columns, which the codes of its rows are not; set hadamard=0"
    for of in (rows.recipe, columns.recipe):
        if not isinstance(of.format.element, Minifloat) or len(of.format.levels) > 1 or not powers_of_two(of):
            return f"{of.spec!r} has no float codes under scales that are powers of two"
    if rows.recipe.format.element != columns.recipe.format.element:
        return f"its rows are {rows.recipe.format.element.name} and its columns {columns.recipe.format.element.name}"
    if columns.recipe.rules[-1].name in (FLOOR.name, EVEN.name):
        return f"the scales of {columns.recipe.spec!r} may be too small for its largest values"
    return ""


def _not_fast(operand: GemmOperand) -> str:
    """Why the sums of a product with this operand cannot stay in tensor cores; empty if they can."""
    if operand.recipe is None:
        return f"its {operand.tensor} is in high precision"
    fmt = operand.recipe.format
    if not (isinstance(fmt.element, Minifloat) and fmt.element.bits == 8 and len(fmt.levels) == 1 and fmt.block[1] is None):
        return f"{operand.recipe.spec!r} of its {operand.tensor} is not FP8 with one scale for the tensor or for each row"
    return ""


def _spec(recipe: ScalingRecipe | None) -> str:
    return _ABSENT if recipe is None else recipe.spec
