"""What the registered recipes are: their sizes, formats and fields, as `breccia recipes` lists them."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

from ..codecs import Codec
from ..declared import spelled
from ..dispatch.registry import Plugin, Registry
from ..formats import Block
from ..recipe_bases import ScalingRecipe
from ..recipe_fields import choices_of, each_of, implication_of
from ..tensors.grids import cast_nbytes

#: Rows and columns of the matrix that sizes are given for. Built-in blocks divide it, so it has no padding.
SIDE = 4096


@dataclass(frozen=True)
class Field:
    """One field of a recipe: its default, and the values it takes if it is an enumeration.

    value: of this recipe. needed: it has no default. type: its annotation, as "int | None". affects_bytes: is it part of the
        fingerprint? implies: the value that sets other fields where a spec does not give them, and those fields.
    """

    name: str
    type: str
    value: Any
    default: Any
    choices: tuple[Any, ...]
    needed: bool
    affects_bytes: bool
    implies: tuple[Any, dict[str, Any]]

    @property
    def takes(self) -> str:
        """The values it takes, as the command line spells them."""
        *others, last = [spelled(choice) for choice in self.choices] or [
            self.type.replace("None", "null").replace(" | ", " or ")
        ]
        taken = f"{', '.join(others)} or {last}" if others else f"only {last}" if self.choices else last
        value, implied = self.implies
        with_others = " and ".join(f"{name}={spelled(of)}" for name, of in implied.items())
        implying = " or ".join(map(spelled, each_of(value)))
        taken += f"; {implying} implies {with_others}" if implied else ""
        return taken if self.affects_bytes else f"{taken}; does not change the bytes"


@dataclass(frozen=True)
class Listed:
    """One recipe: its class, its plug-in, its fields, and an instance; None if a field has no default."""

    kind: type[ScalingRecipe]
    plugin: Plugin
    fields: tuple[Field, ...]
    recipe: ScalingRecipe | None

    @property
    def doc(self) -> str:
        """The docstring of the class."""
        return inspect.getdoc(self.kind) or ""

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring, on one line."""
        return " ".join(self.doc.partition("\n\n")[0].split())

    @property
    def bits_per_value(self) -> float | None:
        """Bits per value of a matrix of `SIDE` rows and columns; None without an instance."""
        return bits_per_value(self.recipe) if self.recipe else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`; what depends on fields without defaults is None."""
        fields = [dataclasses.asdict(f) for f in self.fields]
        return {
            "name": self.kind.name,
            "class": self.kind.__name__,
            "aliases": list(self.kind.aliases),
            "distribution": self.plugin.distribution,
            "version": self.plugin.version,
            "summary": self.summary,
            "source": self.kind.source,
            "spec": self.recipe and self.recipe.spec,
            "bits_per_value": self.bits_per_value,
            **(_format(self.recipe) if self.recipe else dict.fromkeys(("element", "scale", "global_scale", "offset"))),
            "fields": fields,
        }


def listed(declarations: Registry, kind: type[ScalingRecipe], recipe: ScalingRecipe | None = None) -> Listed:
    """The facts of a registered recipe class, with the fields of `recipe` or their defaults."""
    if recipe is None and not kind.needed_fields():
        recipe = kind()
    owner = next(p for p in declarations.plugins if f"recipes:{kind.name}" in p.declares)
    return Listed(kind, owner, tuple(_field(kind, f, recipe) for f in dataclasses.fields(kind)), recipe)  # type: ignore[arg-type]


def _field(owner: type[ScalingRecipe], f: dataclasses.Field[Any], recipe: ScalingRecipe | None) -> Field:
    default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    needed = default is dataclasses.MISSING
    default = None if needed else default
    value = getattr(recipe, f.name) if recipe else default
    kind = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
    choices = (False, True) if kind == "bool" else choices_of(owner, f.name)[0]
    affects = f.metadata.get("affects_bytes", True)
    return Field(f.name, kind, value, default, choices, needed, affects, implication_of(owner, f.name))


def bits_per_value(recipe: ScalingRecipe, side: int = SIDE) -> float:
    """Bits of codes, scales and zero-points per value of a `side` x `side` matrix, as `ScaledTensor.nbytes` counts them."""
    return 8 * cast_nbytes(recipe.format, recipe.layout.fitted((side, side)), (side, side)) / side**2


def covered(block: Block) -> str:
    """The elements that share a scale: "tensor", "row", or "1x128"."""
    match block:
        case (None, None):
            return "tensor"
        case (1, None):
            return "row"
        case (m, k):
            return "x".join("all" if side is None else str(side) for side in (m, k))


def _format(recipe: ScalingRecipe) -> dict[str, Any]:
    fmt = recipe.format

    def coded(codec: Codec) -> dict[str, Any]:
        return {"codec": codec.name, "bits": codec.bits}

    scale = {**coded(fmt.scale.codec), "block": list(fmt.scale.block), "convention": fmt.scale.convention}
    global_scale = fmt.global_scale and {**coded(fmt.global_scale.codec), "convention": fmt.global_scale.convention}
    rules = [rule.name for rule in recipe.rules]
    coarser = [{**coded(level.codec), "block": list(level.block)} for level in fmt.block_levels[:-1]]
    return {
        "element": coded(fmt.element),
        "alternative": fmt.alternative and coded(fmt.alternative),
        "scale": scale,
        "coarser_scales": coarser,
        "global_scale": global_scale,
        "offset": fmt.offset,
        "features": sorted(fmt.features),
        "rules": rules,
    }
