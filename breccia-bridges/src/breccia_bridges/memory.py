"""The memory that each value takes while it is converted, from headers alone, and the limit of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from breccia import OptionError, ScalingRecipe
from breccia.backend import TENSOR, threads
from breccia.internal import printable

from .jobs import Job
from .measure import slabs
from .text import size

#: What the program takes before it converts anything, with the libraries that it imports, and for each value of a checkpoint.
_PROGRAM, _OF_VALUE = 128 << 20, 8 << 10
#: Bytes per element of a slab while it is cast or measured: FP32 and FP64 copies of it, its decoded values, and their limits.
_OF_SLAB = 64
#: The same of a slab that each further thread measures: FP32 copies of it and of its decoded values, and what it is read from.
_OF_THREAD = 12
#: Copies of a value's tensors that are there at once where it is taken whole: the pieces of the cast, what they are joined to,
#: and what the dialect makes of that; or what is read, and what is made of it.
_COPIES = 3
#: Bytes per element of codes that a dialect takes apart, where they are less than a byte, to pack them into words of 32 bits.
_OF_CODE = 4
#: Bytes per element while codes get another format, which is done on whole tensors.
_OF_NEW_CODE = 12
_MIB = 1 << 20


def needed(job: Job) -> int:
    """The bytes that a value takes at most while it is converted and verified."""
    value, recipe = job.value, job.recipe
    if job.way == "copy":
        return 0
    elements = math.prod(value.shape)
    whole = _COPIES * value.nbytes if value.stored is not None or job.way == "keep" else 0
    if recipe is not None and (job.placed is not None or job.way == "keep"):
        whole += _COPIES * job.nbytes
        if job.way == "keep" and value.recipe != recipe:
            whole += _OF_NEW_CODE * elements
        elif job.placed is not None and recipe.format.element.bits < 8:
            whole += _OF_CODE * elements
    return whole + (_OF_SLAB + _OF_THREAD * (threads.get_num_threads() - 1)) * _slab(job)


def _slab(job: Job) -> int:
    """The elements of the largest slab."""
    shape = job.value.shape
    units = [_rows(recipe, shape[-2] if len(shape) > 1 else 1) for recipe in (job.value.recipe, job.recipe) if recipe]
    matrices, rows = next(slabs(shape, 1, *units))
    return (matrices.stop - matrices.start) * (rows.stop - rows.start) * shape[-1] if shape else 1


def _rows(recipe: ScalingRecipe, rows: int) -> int:
    block = recipe.layout.block()
    return 1 if block == TENSOR else max(1, block[0] or rows)


def check_memory(jobs: Sequence[Job], limit: int) -> None:
    """Raise OptionError where a value, with the program and what it knows of all values, takes more than `limit` bytes."""
    largest = max(jobs, key=needed, default=None)
    if largest is None:
        return
    takes = _PROGRAM + _OF_VALUE * len(jobs) + needed(largest)
    if takes <= limit:
        return
    give = f"{math.ceil(takes / _MIB / 64) * 64}MiB"
    raise OptionError(
        f"the conversion takes about {size(takes)} of memory while it converts {printable(largest.name)}, and the limit is "
        f"{size(limit)}. Give max_memory={give!r} (--max-memory {give}), or exclude it.",
        name=largest.name,
        max_memory=limit,
        needed=takes,
    )
