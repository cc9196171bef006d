"""`convert(..., exact=True)`: every value keeps its numbers, or nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from breccia import InexactError, exactness
from breccia.backend import NUMPY
from breccia.internal import abbreviated

from .dialect_writer import DialectWriter
from .jobs import CASTABLE, Job
from .measure import slabs


def exactly(jobs: Mapping[str, Job], writer: DialectWriter | None) -> dict[str, Job]:
    """The same jobs; values that only their own codes and scales let convert exactly are converted so, and not cast.

    Reads the values where the formats leave a choice. Raises InexactError, with the reason for each value that would change.
    """
    found = {name: _exact(job, writer) for name, job in jobs.items()}
    refused = {name: why for name, why in found.items() if isinstance(why, str)}
    if refused:
        raise InexactError(
            f"convert(exact=True): {len(refused)} of {len(jobs)} tensors would change: "
            f"{abbreviated([f'{name} ({why})' for name, why in refused.items()], 4)}. Leave exact=True (--exact) out to round "
            "them, exclude them, or choose a recipe that `breccia rosetta` calls exact.",
            tensors=refused,
        )
    return {name: job for name, job in found.items() if isinstance(job, Job)}


def _exact(job: Job, writer: DialectWriter | None) -> Job | str:
    """The job that changes no number of a value, or why there is none."""
    if job.way == "decode":
        dtype = job.described[0][job.name][0]
        return job if _is_decoded_exactly(job, dtype) else f"its values are not numbers of {dtype}"
    if job.way != "cast":
        return job
    recipe = job.recipe
    if job.value.recipe is None or recipe is None:
        return "it is not quantized in the source, and quantizing rounds"
    if job.among:
        return "layers that engines compute as one get one new scale"
    found = exactness(job.value.loaded(), recipe)
    if not found.exact:
        return f"{found.changed} of {found.size} values: {found.why}"
    return replace(Job.keeping_codes(job.value, recipe, writer), exactness=found)


def _is_decoded_exactly(job: Job, dtype: str) -> bool:
    """Whether the dtype has all values"""
    numbers, codec = job.value.numbers(), CASTABLE[dtype]
    for slab in slabs(numbers.shape, numbers.unit):
        x = np.ascontiguousarray(numbers.values(slab), np.float32)
        y = codec.read(NUMPY, NUMPY.store(codec.encode(NUMPY, x), NUMPY.storage(codec)))
        if not ((x.view(np.uint32) == y.view(np.uint32)) | (np.isnan(x) & np.isnan(y))).all():
            return False
    return True
