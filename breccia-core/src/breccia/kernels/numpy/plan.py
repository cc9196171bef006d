"""Per-recipe preparation, and the casts that these kernels decline."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.ops import NUMPY, Array
from ...codecs import F32, Minifloat, PowerOfTwo
from ...formats import TENSOR
from ...fp32 import F32_INF, f32_bits
from ...layouts import Layout, Shape
from ...recipes import ScalingRecipe
from ...rules import Divide, Inverse, Linear, Rule, Search
from ...tensors.grids import packing
from ...tensors.tensor import ScaledTensor
from .. import checks
from ..plans import k_last, scattered
from .codes import NEAREST, PLAIN, IntegerCodes, code_writer, pack_codes
from .pieces import block_sides, unit_of
from .scales import LARGE, GlobalScale, Scales
from .searching import Searching
from .workspace import F4, MAGNITUDE_BITS, U1, U2, U4, chunk_size, remembered

if TYPE_CHECKING:
    from ...dispatch.call import Call
    from .codes import Dither, Microkernels


#: FP32 bits of `LARGE`.
_LARGE_BITS = f32_bits(LARGE)


class Plan:
    """Derived from a recipe once: the writers of its codes and scales, or the generic algorithm as fallback."""

    def __init__(self, recipe: ScalingRecipe, microkernels: Microkernels) -> None:
        self.recipe, self.fmt, self.microkernels = recipe, recipe.format, microkernels
        fmt, fine = self.fmt, recipe.rules[-1]
        self.count, self.bits, self.block = packing(fmt.element)[0], fmt.element.bits, fmt.scale.block
        self.storage = NUMPY.storage(fmt.element)
        level = fmt.global_scale
        #: Whether the generic algorithm takes whole tensors, not chunks
        self.unsupported = sys.byteorder != "little"
        if level is not None:
            self.unsupported |= type(recipe.rules[0]) is not Linear or level.codec != F32 or fmt.scale.block == TENSOR
        multiplies = type(fine).scaled in (Rule.scaled, Inverse.scaled)
        #: Whether codes are computed by division. Only microkernels do so; without them, the generic algorithm.
        self.divides = type(fine).scaled is Divide.scaled
        known = fmt.offset == "none" and (multiplies or self.divides) and type(fmt.scale.codec) in (Minifloat, PowerOfTwo)
        #: Whether scales are searched for, and how microkernels do; without them, the generic algorithm.
        self.searches = isinstance(fine, Search)
        self.search = Searching.of(recipe, code_writer(fmt.element), microkernels.search) if self.searches else None
        known &= not self.searches or self.search is not None
        self.codes = code_writer(fmt.element) if known else None
        #: The integer codes of a recipe with an offset, where microkernels write them.
        self.shifted: IntegerCodes | None = None
        compiled = microkernels.extremes is not None and microkernels.shifted is not None and not self.searches
        if compiled and fmt.offset != "none" and multiplies and type(fmt.scale.codec) is Minifloat and level is None:
            writer = code_writer(fmt.element)
            if isinstance(writer, IntegerCodes) and not writer.codec.fraction_bits:
                self.shifted = writer
        #: The FP32 numbers of its codes.
        self.numbers: Array = np.array(fmt.element.table if self.shifted else (), U4).view(F4)
        #: The writer of codes from unscaled numbers.
        written = microkernels.divided if self.divides else microkernels.scaled
        self.scaled = None if written is None or self.codes is None else written(self.codes)
        #: Whether that packs codes.
        self.packs = self.scaled is not None and microkernels.packs and fmt.element.bits == 4
        #: Whether codes are computed here, not by the generic algorithm.
        self.fast = self.codes is not None and (not self.divides or (self.scaled is not None and level is None))
        self.scales = None if self.codes is None and self.shifted is None else Scales(recipe, len(fmt.levels) - 1, microkernels)
        own = level is not None and level.convention == "multiplier" and not self.unsupported
        self.global_scales = Scales(recipe, 0, microkernels) if own else None
        #: Whether microkernels read 16-bit numbers as they are
        self.narrow = microkernels.load is not None and (self.scaled is not None or self.shifted is not None)
        self._layouts: dict[Any, Layout] = {}
        #: Whether blocks are runs within a row, so that short arrays need the fewest calls
        self.plain = (
            known and not self.divides and not self.unsupported and (fmt.scale.block == TENSOR or fmt.scale.block[0] == 1)
        ) and (level is None or own)
        self.plain |= self.shifted is not None and fmt.scale.block != TENSOR and fmt.scale.block[0] == 1
        self.plain &= not self.searches

    def short(self, x: Array) -> ScaledTensor | None:
        """`cast` of small, contiguous FP32 `x` with whole blocks and normal numbers; None for others."""
        scales, writer, shape = self.scales, self.codes, x.shape
        if not self.plain or scales is None:
            return None
        block, size, columns, microkernels = self.block, x.size, shape[-1], self.microkernels
        k = block[1] or (size if block == TENSOR else columns)
        if (block != TENSOR and columns % k) or columns % self.count or k % self.count:
            return None
        flat = x.reshape(-1)
        if writer is None:
            codes = np.empty(size, U1)
            scales_and_offsets = self.offsets(flat, k, codes, NEAREST)
            if scales_and_offsets is None:
                return None
            blocks = *shape[:-1], -1
            stored, offset = (part.reshape(blocks) for part in scales_and_offsets)
            return ScaledTensor.from_parts(self._packed(codes, shape, k), stored, self.recipe, self.layout(shape, -1), offset)
        if microkernels.amax is None:
            amax = np.maximum.reduce(x.reshape(-1, k).view(U4) & MAGNITUDE_BITS, axis=1)
        else:
            amax = np.empty(size // k, U4)
            microkernels.amax(flat, k, amax)
        global_scale = divisor = None
        if self.global_scales is not None:
            tensor_scales = self.global_scales.fast_path(np.maximum.reduce(amax, keepdims=True), None)
            if tensor_scales is None:
                return None
            global_scale = tensor_scales[0].reshape(())
            divisor = GlobalScale(tensor_scales[0][0], scales, global_scale)
        block_scales = scales.fast_path(amax, divisor)
        if block_scales is None:
            return None
        stored, inverse = block_scales
        if self.scaled is not None:
            codes = np.empty(size, U1)
            self.scaled(flat, inverse, k, codes, NEAREST)
        else:
            codes = writer.few(x.reshape(-1, k) * inverse[:, None])
            if scales.values is not None and not inverse.all():
                codes[inverse == 0] = writer.zero
        data = self._packed(codes, shape, k)
        stored = stored.reshape(() if block == TENSOR else (*shape[:-1], -1))
        return ScaledTensor.from_parts(data, stored, self.recipe, self.layout(shape, -1), None, global_scale)

    def _packed(self, codes: Array, shape: Shape, k: int) -> Array:
        """Codes, one a byte, as data of the logical `shape`."""
        if self.bits == 8:
            return codes.reshape(shape).view(self.storage)
        data = np.empty((*shape[:-1], shape[-1] * self.bits // 8), U1)
        if self.microkernels.pack(codes, self.bits, data):
            return data
        if self.bits == 4:
            pairs = codes.reshape(*shape[:-1], -1).view(U2)
            return (pairs | (pairs >> 4)).astype(U1)
        pack_codes(codes.reshape(-1, k), self.bits, data.reshape(-1, k * self.bits // 8), np.empty(codes.size, U1))
        return data

    def offsets(
        self, source: Array, k: int, codes: Array, dither: Dither, accepted: Array | None = None, across: int = 0
    ) -> tuple[Array, Array] | None:
        """(stored scales, zero-points or biases) of blocks of `k` numbers, and `codes`; None where numbers are not normal.

        accepted: int32 codes of supplied scales. across: unless 0, numbers are rows of as many, and blocks are columns.
        """
        scales, microkernels, fmt, writer = self.scales, self.microkernels, self.fmt, self.shifted
        extremes, shifted = microkernels.extremes, microkernels.shifted
        assert scales is not None and writer is not None and extremes is not None and shifted is not None
        low, high = np.empty(source.size // k, F4), np.empty(source.size // k, F4)
        rows = {"across": across} if across else {}
        extremes(source, k, low, high, **rows)
        amax = np.maximum(low.view(U4) & MAGNITUDE_BITS, high.view(U4) & MAGNITUDE_BITS)
        zeroed = fmt.offset == "zero_point"
        if zeroed:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
        block_scales, most = None, np.maximum.reduce(amax)
        if accepted is not None:
            block_scales = scales.slow_path(amax, accepted, None)
            if most >= _LARGE_BITS or block_scales[1].max() > LARGE or not block_scales[1].all():
                return None
        elif most < F32_INF:
            block_scales = scales.fast_path((high - low).view(U4), None)
        if block_scales is None:
            return None
        stored, inverse = block_scales
        nothing = np.zeros(low.size, F4)
        if zeroed:
            offset = writer.few(-low * inverse)
            before, after = nothing, self.numbers.take(offset)
        else:
            offset, before, after = *scales.nearest(low), nothing
        shifted(writer, source, inverse, before, after, k, codes, dither, **rows)
        return stored, offset

    def layout(self, shape: Shape, axis: int) -> Layout:
        """`checks.fitted_layout`, cached by what it depends on."""
        return remembered(self._layouts, (axis, len(shape), shape[-2:]), checks.fitted_layout, self.recipe, shape, axis)


_plans: dict[object, Plan] = {}


def plan_of(recipe: ScalingRecipe, microkernels: Microkernels = PLAIN) -> Plan:
    """The cached plan of a recipe."""
    key = recipe.interned_key if microkernels is PLAIN else (recipe.interned_key, microkernels)
    return remembered(_plans, key, Plan, recipe, microkernels)


def accepts_cast(call: Call) -> str | None:
    """Why `cast` without microkernels would pass the whole array to the generic algorithm, or None."""
    if call.option("rounding") == "stochastic":
        return "stochastic rounding is the generic algorithm's"
    return accepts_compiled_cast(call)


def accepts_native_cast(call: Call) -> str | None:
    """`accepts_compiled_cast`, except for recipes whose scales microkernels do not search for: they would add nothing."""
    reason, recipe = accepts_compiled_cast(call), call.a.recipe
    if reason is not None or recipe is None or not isinstance(recipe.rules[-1], Search):
        return reason
    if Searching.of(recipe, code_writer(recipe.format.element), _search) is not None:
        return None
    return "its search does not take this format, so the generic algorithm searches, in chunks"


def _search(*arguments: Any) -> None:
    """Stands for a microkernel that searches."""


def accepts_compiled_cast(call: Call) -> str | None:
    """`accepts_cast` with microkernels, which also round stochastically."""
    assert call.a.recipe is not None
    plan = plan_of(call.a.recipe)
    if plan.unsupported or (plan.codes is None and plan.fmt.scale.block == TENSOR):
        return f"{call.a.recipe.name!r} as declared has no fast form here"
    if call.a.empty:
        return "an empty array is the generic algorithm's"
    block = plan.fmt.scale.block
    axis: int = call.option("axis", -1)
    by_chunks = plan.codes is None or plan.codes.zero or plan.fmt.global_scale is not None
    m, k = block
    small = m is not None and k is not None and m * k * plan.count <= chunk_size()  # then the shape need not be read
    if by_chunks and block != TENSOR and not small and call.a.ndim > 1:
        shape = k_last(call.a.shape, axis)
        m, k = block_sides(block, shape)
        unit = unit_of(k, shape[-1], plan.count)
        if m * unit > chunk_size():
            return (
                f"blocks of {m} x {unit} are larger than a chunk, and {call.a.recipe.name!r} as declared has no form for them"
            )
    padded = plan.fmt.offset == "none" and call.option("rounding") != "stochastic"  # by rows of zeros, to whole blocks
    if not padded and call.a.ndim > 2 and scattered(k_last(call.a.shape, axis), block, (), True):
        return "many small matrices are faster all at once"
    return None
