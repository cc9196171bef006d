"""Recipes by name or spec, as users, files and the command line write them: "nvfp4", "fp8_block,block_m=128"."""

from __future__ import annotations

from typing import Any

from . import targets
from .codecs import Integer, Minifloat
from .errors import RecipeError, UnknownNameError, UnsupportedError
from .json_text import parsed_json
from .recipe_bases import ScalingRecipe, check_recipe
from .recipe_fields import with_implied
from .tracing import traced_by_framework

#: Specs that are remembered.
_REMEMBERED = 256
#: Names for specs: integers by width, and GGUF's types.
SHORTHANDS = {
    **{f"int{bits}": f"int,bits={bits}" for bits in (1, 2, 3, 5, 6, 7)},
    "q4_0": "int4,group_size=32",
    "q4_1": "int4,group_size=32,offset=bias",
    "q5_0": "int,bits=5,group_size=32",
    "q5_1": "int,bits=5,group_size=32,offset=bias",
    "q8_0": "int8,group_size=32,scale_dtype=fp16",
    **{f"q{bits}_k": f"gguf,type=Q{bits}_K" for bits in (2, 3, 4, 5, 6)},
    **{name.lower(): f"gguf,type={name}" for name in ("IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0")},
}
#: GGUF's types whose codes are entries of tables of vectors, which no recipe holds, with a shorthand of about as many bits.
DECODED_TYPES = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s"), "q2_k"),
    **dict.fromkeys(("iq3_xxs", "iq3_s"), "q3_k"),
}


@traced_by_framework
def as_recipe(given: ScalingRecipe | str) -> ScalingRecipe:
    """A recipe itself, or the recipe with that name or spec, as `breccia.recipe` reads it.

    A spec is read once for each set of plug-ins. Raises what `breccia.recipe` raises, and UnsupportedError for other types.
    """
    if not isinstance(given, str):
        check_recipe(given)
        return given
    known: dict[str, ScalingRecipe] = targets.load(targets.REGISTRY)().specs
    parsed_recipe = known.get(given)
    if parsed_recipe is None:
        if len(known) >= _REMEMBERED:
            known.clear()
        parsed_recipe = known[given] = recipe(given)
    return parsed_recipe


@traced_by_framework
def recipe(spec: str, **fields: Any) -> ScalingRecipe:
    """The recipe with this name, from any plug-in, with the given fields.

    spec: a name ("nvfp4") or class name, in any case, or with fields as the command line spells them:
        "fp8_block,block_m=128,power_of_two_scale=true". Fields that others require need not be given: "int4,symmetric=false"
        has unsigned codes, and "int4,offset=bias" is asymmetric. Shorthands stand for a name with fields: "int3" for
        "int,bits=3", and "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k" to "q6_k", "iq4_nl", "iq4_xs", "tq1_0" and "tq2_0"
        for the formats of GGUF's types, of which the last four are only decoded.
    Raises UnknownNameError with a suggestion, or RecipeError for a field.

        >>> breccia.recipe("mxfp8")
        MXFP8BlockScaling(fp8_format='E4M3', block_size=32, scale_rule='rceil')
        >>> breccia.recipe("fp8_block,block_m=128").block_m
        128
        >>> breccia.recipe("fp8_block", block_m=128).spec
        'fp8_block,block_m=128'
        >>> breccia.recipe("q5_0").spec
        'int,bits=5,group_size=32'
    """
    if not isinstance(spec, str):
        raise UnsupportedError(f"recipe() takes a recipe's name, got {spec!r}.")
    name, own = _parsed(spec)
    declarations = targets.load(targets.REGISTRY)()
    known: dict[str, type[ScalingRecipe]] = declarations.recipes
    spelled = next((n for n, c in known.items() if name.lower() in map(str.lower, (n, c.__name__, *c.aliases))), None)
    if spelled is None and name.lower() in SHORTHANDS:
        spelled, shorthand = _parsed(SHORTHANDS[name.lower()])
        fields = shorthand | fields
    asked = str((fields | own).get("type", "") if spelled == "gguf" else name).lower()
    if spelled in (None, "gguf") and asked in DECODED_TYPES:
        raise UnknownNameError(
            f"{asked.upper()} is a type of GGUF files whose tensors breccia decodes: its codes are entries of tables of "
            f"vectors, and no recipe holds them. A recipe of about as many bits is {DECODED_TYPES[asked]!r}.",
            name=asked,
            known=[DECODED_TYPES[asked]],
        )
    if spelled is None and (element_recipes := [n for n, c in known.items() if name.lower() in _element_names(c)]):
        raise UnknownNameError(
            f"{name!r} is an element format, not a recipe; its recipes differ in their scales: {', '.join(element_recipes)}.",
            name=name,
            known=element_recipes,
        )
    kind: type[ScalingRecipe] = declarations.look_up("breccia_recipes", spelled or name, "recipe")
    return kind.with_fields(with_implied(kind, fields | own))


def _parsed(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and the fields of a spec."""
    name, *settings = (part.strip() for part in spec.split(","))
    fields: dict[str, Any] = {}
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"recipe {spec!r}: fields are written name=value; got {setting!r}.", setting=setting)
        fields[field.strip()] = _field_value(value.strip())
    return name, fields


def _element_names(of: type[ScalingRecipe]) -> tuple[str, ...]:
    """Common names of a recipe's element format; empty if it depends on fields without defaults."""
    if of.needed_fields():
        return ()
    element = of().format.element
    kind = "fp" if isinstance(element, Minifloat) else "int" if isinstance(element, Integer) else ""
    return element.name.lower(), f"{kind}{element.bits}", f"float{element.bits}" if kind == "fp" else ""


def _field_value(text: str) -> Any:
    """`text` as a number or bool if it spells one, else unchanged."""
    try:
        return parsed_json(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
