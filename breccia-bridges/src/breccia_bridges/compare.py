"""Compare two checkpoints tensor by tensor, in any mixture of dialects."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from breccia import UnsupportedError
from breccia.internal import abbreviated, measuring

from .measure import histogram, measure
from .remote_path import path_of
from .results import EQUAL, Advance, Report, TensorReport, no_progress
from .safetensors_file import read
from .source import Source, Value
from .text import spelled


def compare(
    reference: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    *,
    histograms: bool = False,
    advance: Advance | None = None,
    source_dialect: str | tuple[str | None, str | None] | None = None,
) -> Report:
    """Measure the tensors of `candidate` against those of the same name in `reference`.

    Each is a `.safetensors` file or a folder of them: plain, quantized by breccia, or in any dialect that breccia reads, in any
    mixture. Scaled tensors are compared by the FP32 values of `dequantize`. Tensors with equal bytes, and non-floating ones,
    are listed with the reason why they were not measured.

    source_dialect: the dialect of what other programs quantized, where files and configs leave a choice: of both, or a pair of
        that of the reference and that of the candidate; None for one that leaves no choice.
    histograms: count the elements of compared tensors by value, in both.
    advance: called with a tensor's name and its bytes in the reference.

    Raises FileNotFoundError for a missing checkpoint, CorruptFileError for a file that breaks its format, DialectError for
    values that do not follow their dialect, UnsupportedError if the two have no name in common and for dialects that breccia
    does not read.

        >>> x = np.array([[0.125, 1.0, 3.0, 6.0]], np.float32)
        >>> breccia.bridges.save_safetensors({"w": x}, tmp / "before.safetensors")
        >>> st = breccia.cast(x, "mxfp4")
        >>> breccia.bridges.save_safetensors({"w": st}, tmp / "after.safetensors")
        >>> report = breccia.bridges.compare(tmp / "before.safetensors", tmp / "after.safetensors")
        >>> [(tensor.name, tensor.stored_as, tensor.fidelity.max_error) for tensor in report.tensors]
        [('w', 'mxfp4', 0.125)]
    """
    of_reference, of_candidate = source_dialect if isinstance(source_dialect, tuple) else (source_dialect, source_dialect)
    sources = Source.open(path_of(reference), of_reference), Source.open(path_of(candidate), of_candidate)
    before, after = (source.values for source in sources)
    common = [name for name in before if name in after]
    if not common:
        here, there = (abbreviated(names) or "none at all" for names in (before, after))
        raise UnsupportedError(
            f"{reference} and {candidate} have no tensor in common ({here}; {there}); compare checkpoints of one model."
        )
    report = Report(
        str(reference),
        str(candidate),
        missing=[name for name in before if name not in after],
        added=[name for name in after if name not in before],
    )
    for name in common:
        report.tensors.append(_compared(before[name], after[name], histograms))
        (advance or no_progress)(name, before[name].nbytes)
    for source in sources:
        source.check_unchanged()
    return report


def _compared(x: Value, y: Value, histograms: bool) -> TensorReport:
    recipe = y.recipe
    report = TensorReport(x.name, x.shape, x.stored_as, y.stored_as, _why_not(x, y), x.nbytes, y.nbytes, recipe=recipe)
    if report.reason:
        return report
    a, b = x.numbers(), y.numbers()
    return replace(report, fidelity=measure(a, b), histogram=histogram(a, b) if histograms else None)


def _why_not(x: Value, y: Value) -> str:
    """Why two tensors are not measured; empty if they are."""
    if x.shape != y.shape:
        return f"shapes differ: {spelled(x.shape)} and {spelled(y.shape)}"
    if same_bytes(x, y):
        return EQUAL
    unknown = [t.stored_as for t in (x, y) if not t.is_readable]
    if not unknown:
        return ""
    coded = unknown[0].startswith("F")
    return f"differ, and {f'breccia finds no scales for {unknown[0]}' if coded else f'{unknown[0]} is not floating'}"


def same_bytes(x: Value, y: Value) -> bool:
    """Are all components and configs equal?"""
    forms = [value.stored and value.stored.reading for value in (x, y)]
    if x.config != y.config or forms[0] != forms[1] or x.stored_as != y.stored_as or x.files.keys() != y.files.keys():
        return False
    pairs = [(file, y.files[part], part) for part, file in x.files.items()]
    if any(here.entries[part].nbytes != there.entries[part].nbytes for here, there, part in pairs):
        return False
    return all(_same(here.view(part), there.view(part)) for here, there, part in pairs)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = (array.reshape(-1).view(np.uint8) for array in (a, b))
    step = measuring.SLAB
    return all(np.array_equal(read(a[i : i + step]), read(b[i : i + step])) for i in range(0, a.size, step))
