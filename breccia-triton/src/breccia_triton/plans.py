"""Which calls the kernels support, from their facts. Imports neither torch nor Triton (for `explain`)."""

from __future__ import annotations

from breccia import Device, ScalingRecipe
from breccia.backend import TENSOR, Block, Call, checks, packing, targets

from .geometry import Tile, tile_of
from .specs import Spec, spec_of

#: The least compute capability whose instructions the kernels use.
_LEAST = (8, 0)


def available(device: Device) -> str | None:
    """Why the kernels cannot run on a device, or None."""
    if not targets.installed("triton"):
        return "triton is not installed; pip install triton"
    if device.capability and tuple(device.capability) < _LEAST:
        return f"it needs compute capability {'.'.join(map(str, _LEAST))}; {device} has {'.'.join(map(str, device.capability))}"
    return None


def accepts_cast(call: Call) -> str | None:
    """Why the generic algorithm would run, or None."""
    recipe = call.recipe
    assert recipe is not None
    if call.a.empty:
        return "the generic algorithm runs for an empty tensor"
    shape, axis = call.a.shape, int(call.option("axis", -1))
    fits = len(shape) > 1  # `explain` may not know the shape
    block = (checks.fitted_layout(recipe, shape, axis) if fits else recipe.layout.oriented(axis)).block(axis)
    rows, columns = (1, 1, *shape)[-2:]
    found = tiled(recipe, block, axis, rows, columns)
    return found if isinstance(found, str) else None


def tiled(recipe: ScalingRecipe, block: Block, axis: int, rows: int, columns: int) -> tuple[Spec, Tile, str] | str:
    """The constants of a cast, its tile, and where the amax comes from (see `tile_of`); or why there is no kernel for it."""
    spec = spec_of(recipe)
    if isinstance(spec, str):
        return spec
    if block != TENSOR and (block[1] or 0) % packing(recipe.format.element)[0]:
        return "blocks are not whole groups of packed codes"
    found = tile_of(block, axis, rows, columns)
    if isinstance(found, str):
        return found
    tile, source = found
    if spec.offset != "none" and source != "tile":
        return f"blocks with a {spec.offset.replace('_', '-')} have to fit a tile"
    return spec, tile, source
