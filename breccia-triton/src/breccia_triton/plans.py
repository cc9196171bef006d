"""Which calls the kernels support, from their facts. Imports neither torch nor Triton (for `explain`)."""

from __future__ import annotations

from breccia import Device
from breccia.backend import TENSOR, Call, checks, packing, targets

from .geometry import tile_of
from .specs import spec_of

#: The modules that kernels run on.
_NEEDS = ("triton",)
#: The least compute capability whose instructions the kernels use.
_LEAST = (8, 0)


def available(device: Device) -> str | None:
    """Why the kernels cannot run on a device, or None."""
    missing = [module for module in _NEEDS if not targets.installed(module)]
    if missing:
        return f"{', '.join(missing)} is not installed; pip install {' '.join(missing)}"
    if device.capability and tuple(device.capability) < _LEAST:
        return f"it needs compute capability {'.'.join(map(str, _LEAST))}; {device} has {'.'.join(map(str, device.capability))}"
    return None


def accepts_cast(call: Call) -> str | None:
    """Why the generic algorithm would run, or None."""
    recipe = call.recipe
    assert recipe is not None
    spec = spec_of(recipe)
    if isinstance(spec, str):
        return spec
    if call.a.empty:
        return "the generic algorithm runs for an empty tensor"
    shape, axis = call.a.shape, int(call.option("axis", -1))
    fits = len(shape) > 1  # `explain` may not know the shape
    block = (checks.fitted_layout(recipe, shape, axis) if fits else recipe.layout.oriented(axis)).block(axis)
    if block != TENSOR and (block[1] or 0) % packing(recipe.format.element)[0]:
        return "blocks are not whole groups of packed codes"
    rows, columns = (1, 1, *shape)[-2:]
    found = tile_of(block, axis, rows, columns)
    if isinstance(found, str):
        return found
    if spec.offset != "none" and found[1] != "tile":
        return f"blocks with a {spec.offset.replace('_', '-')} have to fit a tile"
    return None
