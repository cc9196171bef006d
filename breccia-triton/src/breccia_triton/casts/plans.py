"""Which calls the kernels support, from their facts. Imports neither torch nor Triton (for `explain`)."""

from __future__ import annotations

import math
from typing import Any

from breccia import Layout, ScalingRecipe
from breccia.backend import PLAIN, TENSOR, Block, Call, Shape, checks, packing
from breccia.internal import keeps_values, repeats

from ..facts import LARGE
from ..geometry import Tile, pair_of, tile_of
from ..plugin import STORAGES
from ..specs import Spec, spec_of
from ..tuning.choices import DEFAULT, Choice

#: Why JAX has no kernel for large arrays.
TOO_LARGE = f"positions in {LARGE} elements or more have 64 bits, and jax-triton passes integers of 32 bits"


def _refused_size(call: Call) -> str | None:
    """Why there is no kernel for an input of this size, or None."""
    if call.a.empty:
        return "the generic algorithm runs for an empty tensor"
    if call.framework == "jax" and math.prod(call.a.shape) >= LARGE:
        return TOO_LARGE
    return None


def accepts_cast(call: Call) -> str | None:
    """Why the generic algorithm would run, or None."""
    recipe = call.recipe
    assert recipe is not None
    if (why := _refused_size(call)) is not None:
        return why
    block, axis, rows, columns = _fitted(recipe, call.a.shape, int(call.option("axis", -1)))
    tiling = tiled(recipe, block, axis, rows, columns)
    if isinstance(tiling, str):
        return tiling
    storage = str(call.option("storage", PLAIN))
    return None if storage == PLAIN or writes(tiling[0], block, storage) else f"it does not write storage {storage!r} here"


def accepts_pair(call: Call) -> str | None:
    """Why there would be two casts, or None."""
    recipe = call.recipe
    assert recipe is not None
    if (why := accepts_cast(call)) is not None:
        return why
    block, _, rows, columns = _fitted(recipe, call.a.shape, -1)
    tiling = paired(recipe, block, rows, columns)
    return tiling if isinstance(tiling, str) else None


def accepts_requantize(call: Call) -> str | None:
    """Why values would not be cast in the kernel that decodes them, or None."""
    a, recipe = call.a, call.recipe
    assert a.recipe is not None and a.layout is not None and recipe is not None
    if call.option("require_exact"):
        return "require_exact reads values"
    if call.option("scale") is None and keeps_values(a.recipe, a.layout.plain, a.axis, recipe):
        repeated = call.framework == "torch" and repeats(a.recipe, a.layout, a.axis, recipe)
        plain = str(call.option("storage", PLAIN)) == a.layout.storage == PLAIN
        return None if repeated and plain else "codes are translated, and nothing is cast"
    if (why := accepts_dequantize(call)) is not None:
        return why
    block, axis, rows, columns = _fitted(recipe, a.shape, a.axis)
    tiling = tiled(recipe, block, axis, rows, columns)
    return tiling if isinstance(tiling, str) else None


def accepts_dequantize(call: Call) -> str | None:
    """Why the generic algorithm would run, or None."""
    a = call.a
    assert a.recipe is not None and a.layout is not None
    if (why := _refused_size(call)) is not None:
        return why
    spec = readable(a.recipe, a.layout)
    return spec if isinstance(spec, str) else None


def _fitted(recipe: ScalingRecipe, shape: Shape, axis: int) -> tuple[Block, int, int, int]:
    """(block, axis, rows, columns) of a cast."""
    fits = len(shape) > 1  # `explain` may not know the shape
    block = (checks.fitted_layout(recipe, shape, axis) if fits else recipe.layout.oriented(axis)).block(axis)
    rows, columns = (1, 1, *shape)[-2:]
    return block, axis, rows, columns


def readable(recipe: ScalingRecipe, layout: Layout) -> Spec | str:
    """The constants for a ScaledTensor as the input of a kernel, or why there are none."""
    if not layout.plain.in_order:
        return f"it does not read layout {type(layout.plain).__name__}"
    return spec_of(recipe, decoding=True)


def writes(spec: Spec, block: Block, storage: str) -> bool:
    """Whether the kernels write scales of these blocks in a storage other than plain"""
    return storage in STORAGES and block != TENSOR and (spec.scale.codec.bits == 8 or storage != "swizzle_128x4")


def paired(
    recipe: ScalingRecipe, block: Block, rows: int, columns: int, turned: bool = False, choice: Choice = DEFAULT
) -> tuple[Spec, Any] | str:  # fmt: skip
    """The constants of a cast in both orientations, and their tiles; or why there is no kernel for it."""
    tiles = pair_of(block, rows, columns, turned, choice)
    return _with_constants(recipe, block, tiles, tiles)


def tiled(
    recipe: ScalingRecipe, block: Block, axis: int, rows: int, columns: int, choice: Choice = DEFAULT, turned: bool = False
) -> tuple[Spec, Tile, str] | str:  # fmt: skip
    """The constants of a cast, its tile, and where the amax comes from (see `tile_of`); or why there is no kernel for it."""
    tile = tile_of(block, axis, rows, columns, choice, turned)
    constants = _with_constants(recipe, block, tile, (tile,))
    return constants if isinstance(constants, str) else (constants[0], *constants[1])


def _with_constants(recipe: ScalingRecipe, block: Block, tiling: Any, tiles: Any) -> tuple[Spec, Any] | str:
    """The constants of a cast and `tiling`, or why there is no kernel. tiling: a reason, or else `tiles` are its tiles."""
    spec = spec_of(recipe)
    if isinstance(spec, str):
        return spec
    if block != TENSOR and (block[1] or 0) % packing(recipe.format.element)[0]:
        return "blocks are not whole groups of packed codes"
    if isinstance(tiling, str):
        return tiling
    if spec.offset != "none" and any(source != "tile" for _, source in tiles):
        return f"blocks with a {spec.offset.replace('_', '-')} have to fit a tile"
    if spec.scale.window is not None and any(source != "tile" for _, source in tiles):
        return "blocks whose scale is searched for have to fit a tile"
    return spec, tiling
