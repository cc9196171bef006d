"""Check a library's casts against the golden vectors, bit by bit.

An adapter is one function, or two:

    def quantize(case: Case) -> Mapping[str, Buffer]: ...   # case.input -> codes and scales, and what they decode to
    def dequantize(case: Case) -> Buffer: ...               # case.codes, case.scale, ... -> FP32

    report = breccia_vectors.check(quantize, dequantize, library="acme 1.2")
    print(report)

**What `quantize` gets.** A `Case`: `case.format` (element codec, levels of scales, scale rules), `case.dtype`, `case.shape`,
`case.axis`, `case.rounding`, `case.seed`, `case.edge`, and `case.input`: bytes of FP32, FP16 or BF16 in C order.
`case.array("input")` is the same as a memoryview with a shape, so that `numpy.asarray(case.array("input"))` is the array (FP16
and BF16 as `uint16` bit patterns), and `case.supplied` the codes of the scale that the cast is given. It reads inputs and
options only: while a difference is reduced, the results in a case are not those of its input.

**What it returns.** A mapping with any of these; what is missing is not compared:

    codes         one code per byte (uint8), in the shape of the input
    data          the codes packed as spec/formats.md says, instead of `codes`
    scale         codes of the scales of blocks, as the case stores them: `case.stored("scale")` is (shape, bits)
    zero_point    zero-points or biases, in the same order
    global_scale  the FP32 scale of the tensor, 4 bytes
    decoded       what the library's own codes and scales decode to: FP32, in the shape of the input

Each is an object with the buffer protocol (bytes, bytearray, memoryview, array.array, a NumPy array) that has the bytes in C
order, little-endian; its own shape and item type do not matter. Parts with a size other than expected raise ResultError.

**What `dequantize` gets and returns.** The same case; it decodes the expected `case.codes` (or `case.data`), `case.scale`,
`case.zero_point` and `case.global_scale`, and returns FP32 in the shape of the input. So decoding is checked where the codes
of a cast differ, too, and for formats that nothing casts to (`case.decode_only`).

**What it cannot do** it says: `raise NotSupported("blocks along the rows")`. The case counts as skipped, with that reason.
Any other exception counts as a failure of the library, and the check goes on; ResultError, a mistake of the adapter, ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from . import reducing
from .comparing import Items, NotSupported, ResultError, differing, expected, items_of
from .reports import Difference, Failure, Report, Skipped
from .sets import Case
from .sets import cases as every_case

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

Quantize = Callable[[Case], "Mapping[str, Buffer]"]
Dequantize = Callable[[Case], "Buffer"]


def check(
    quantize: Quantize | None = None,
    dequantize: Dequantize | None = None,
    *,
    library: str = "library",
    cases: Iterable[Case] | None = None,
    flushes_subnormals: bool = False,
    reduce: bool = True,
) -> Report:
    """Run an adapter on the cases, by default all, and report which of them agree bit for bit.

    quantize, dequantize: the adapter; one of them may be left out. library: its name and version, for the report.
    flushes_subnormals: let a signed zero stand for a decoded FP32 subnormal, as XLA has it on CPUs.
    reduce: look for the smallest input that shows each difference, with more calls of `quantize`.

    Raises ResultError for a result that cannot be one of the case, TypeError without an adapter.
    """
    if quantize is None and dequantize is None:
        raise TypeError("check got neither quantize nor dequantize: pass one of them.")
    report = Report(library)
    for case in every_case() if cases is None else cases:
        if quantize is not None and not case.decode_only:
            _check(report, "quantize", case, quantize, flushes_subnormals, reduce)
        if dequantize is not None:
            _check(report, "dequantize", case, _decoding(dequantize), flushes_subnormals, False)
    return report


def _decoding(dequantize: Dequantize) -> Quantize:
    return lambda case: {"decoded": dequantize(case)}


def _check(report: Report, operation: str, case: Case, run: Quantize, flushes: bool, reduce: bool) -> None:
    try:
        found = items_of(case, run(case))
    except ResultError:
        raise
    except NotSupported as e:
        report.skipped.append(Skipped(case, operation, str(e)))
        return
    except Exception as e:  # of any library
        report.failures.append(Failure(case, operation, f"{type(e).__name__}: {e}"))
        return
    record(report, operation, case, found, flushes, (lambda other: _again(run, other)) if reduce else None)


def record(
    report: Report, operation: str, case: Case, found: Items, flushes: bool, run: Callable[[Case], Items | None] | None
) -> None:
    """Add what was found for a case to the report. run: the library, for smaller inputs."""
    wrong = differing(case, found, flushes)
    if not wrong:
        report.agreed.append((operation, case, tuple(found)))
        return
    part, places = next(iter(wrong.items()))
    small = reducing.smallest(case, wrong, run, flushes) if run is not None else None
    counts = {name: len(of) for name, of in wrong.items()}
    item = {"wanted": expected(case, part)[places[0]], "found": found[part][places[0]]}
    report.differences.append(Difference(case, operation, counts, part, places[0], smallest=small, **item))


def _again(run: Quantize, case: Case) -> Items | None:
    """What a library returns for a smaller input; None if it raises."""
    try:
        return items_of(case, run(case))
    except Exception:  # it does not take this shape, or returns one that does not fit it
        return None
