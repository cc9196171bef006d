"""TransformerEngine's recipes, which cover inputs, weights and gradients, and breccia's recipes of one of them.

Classes are recognized by name, so TransformerEngine is needed only to build its recipes. Source: TransformerEngine 2.20.
"""

from __future__ import annotations

from typing import Any

from breccia import (
    DelayedScaling,
    DialectError,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    OptionError,
    ScalingRecipe,
)
from breccia.backend import E4M3, E5M2

from .transformer_engine_library import find
from .wrapping import attribute, title


def from_te_recipe(recipe: Any, role: str = "weight") -> ScalingRecipe:
    """The recipe of the tensors that a TransformerEngine recipe quantizes in one role: "input", "weight" or "grad".

    A TransformerEngine recipe covers all roles: HYBRID is E4M3 for inputs and weights and E5M2 for gradients; 128 x 128 tiles
    are for weights. Its further settings (amax reduction, Hadamard transforms, 2-D NVFP4 blocks) have no counterpart here.

    Raises DialectError for recipes and settings that breccia has no recipe for.

        >>> from transformer_engine.common.recipe import Format, MXFP8BlockScaling
        >>> breccia.bridges.from_te_recipe(MXFP8BlockScaling(fp8_format=Format.HYBRID), role="grad")
        MXFP8BlockScaling(fp8_format='E5M2', block_size=32, scale_rule='rceil')
    """
    if role not in ("input", "weight", "grad"):
        raise OptionError(f'role is "input", "weight" or "grad"; got {role!r}.', role=role)
    name = type(recipe).__name__
    fp8_format = str(getattr(attribute(recipe, "fp8_format"), "name", ""))
    fmt = ("E5M2" if role == "grad" else "E4M3") if fp8_format == "HYBRID" else fp8_format
    margin = getattr(recipe, "margin", 0)
    if fmt not in ("E4M3", "E5M2"):
        raise DialectError(
            f"{title(recipe)} has fp8_format {fp8_format or 'without a name'}, which no recipe has.", found=fp8_format
        )
    if name == "DelayedScaling":
        algorithm = attribute(recipe, "amax_compute_algo")
        if algorithm != "max" or attribute(recipe, "scaling_factor_compute_algo") is not None:
            raise DialectError(
                f"{title(recipe)} has amax_compute_algo {algorithm!r}; breccia.AmaxHistory takes the maximum, and the "
                f"standard scale."
            )
        length = attribute(recipe, "amax_history_len")
        return DelayedScaling(fmt, amax_history_len=length, margin=margin, scale_rule="te")
    if margin:
        raise DialectError(f"{title(recipe)} has margin={margin}, which only DelayedScaling has here.", margin=margin)
    if name == "Float8CurrentScaling":
        if getattr(recipe, "use_power_2_scales", False):
            raise DialectError(
                f"{title(recipe)} rounds its scales to powers of two, which Float8CurrentScaling does not do here."
            )
        return Float8CurrentScaling(fmt, scale_rule="te")
    if name == "Float8BlockScaling":
        side = {"input": "x", "weight": "w", "grad": "grad"}[role]
        rows = 128 if attribute(recipe, f"{side}_block_scaling_dim") == 2 else 1
        powers = not getattr(recipe, "use_f32_scales", False)
        return Float8BlockScaling(fmt, block_m=rows, power_of_two_scale=powers, scale_rule="te")
    if name == "MXFP8BlockScaling":
        return MXFP8BlockScaling(fmt)
    if name == "NVFP4BlockScaling":
        if getattr(recipe, "row_scaled_activation", False) or getattr(recipe, "nvfp4_4over6", "none") != "none":
            raise DialectError(f"{title(recipe)} has row-scaled activations or 4over6 blocks, which no recipe has.")
        return NVFP4BlockScaling(global_sense="amax")
    raise DialectError(
        f"{title(recipe)} has no counterpart; known are Delayed, Float8Current, Float8Block, MXFP8Block and NVFP4."
    )


def to_te_recipe(recipe: ScalingRecipe, *, grad: ScalingRecipe | None = None) -> Any:
    """TransformerEngine's recipe for inputs and weights under `recipe`, and gradients under `grad` (by default the same).

    E4M3 with E5M2 gradients is HYBRID. `Float8BlockScaling` is always tiles for weights and blocks for the others there, so
    `block_m` says only the role.

    Raises ImportError without TransformerEngine, DialectError for recipes that it has no counterpart for, among them E5M2 for
    inputs and weights.

        >>> weights, grads = breccia.MXFP8BlockScaling("E4M3"), breccia.MXFP8BlockScaling("E5M2")
        >>> breccia.bridges.to_te_recipe(weights, grad=grads).fp8_format.name
        'HYBRID'
    """
    module = "transformer_engine.common.recipe"
    grad = grad or recipe
    if type(grad) is not type(recipe):
        raise DialectError(
            f"a TransformerEngine recipe is of one kind for all roles; got {recipe!r} and {grad!r}.", recipe=grad
        )
    kinds = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)
    if not isinstance(recipe, kinds) or recipe.format.rotation is not None:
        raise DialectError(f"TransformerEngine has no counterpart of {recipe!r}.", recipe=recipe)
    build = find(type(recipe).__name__, (module,))
    if any(fmt.element not in (E4M3, E5M2) and fmt.scale.codec != E4M3 for fmt in (recipe.format, grad.format)):
        raise DialectError(
            f"TransformerEngine has FP8 in E4M3 and E5M2, and NVFP4 with E4M3 scales; got {recipe!r}, and {grad!r} for "
            "gradients. Pass recipes of these formats.",
            recipe=recipe,
        )
    if isinstance(recipe, NVFP4BlockScaling):
        return build()
    assert not isinstance(grad, NVFP4BlockScaling)
    formats = (recipe.fp8_format, grad.fp8_format)  # pyright: ignore[reportAttributeAccessIssue]
    name = formats[0] if formats[0] == formats[1] else "HYBRID"
    if name == "HYBRID" and formats != ("E4M3", "E5M2"):
        raise DialectError(
            f"TransformerEngine has E4M3 with E5M2 gradients (HYBRID), or one format; got {formats}.", found=formats
        )
    if name == "E5M2":
        raise DialectError(
            f"TransformerEngine has no recipe with E5M2 inputs and weights; got {recipe!r}. Pass the recipe of the weights, "
            "and this one as grad=.",
            recipe=recipe,
        )
    options: dict[str, Any] = {"fp8_format": getattr(find("Format", (module,)), name)}
    if isinstance(recipe, DelayedScaling):
        options |= {"margin": recipe.margin, "amax_history_len": recipe.amax_history_len}
    if isinstance(recipe, Float8BlockScaling):
        options["use_f32_scales"] = not recipe.power_of_two_scale
    return build(**options)
