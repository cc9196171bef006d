"""The checker reports what a library does otherwise, and the smallest input that shows it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import breccia
import breccia_vectors
from breccia.testing import vectors
from breccia_vectors import Case, NotSupported, ResultError, check, reducing
from breccia_vectors.comparing import RESULTS, items_of


def cast(case: Case, **fields: Any) -> dict[str, Any]:
    """The cast by breccia, under a recipe with other fields."""
    recipe = vectors.recipe_of({"name": case.format.recipe, "fields": {**case.format.fields, **fields}})
    options: dict[str, Any] = {"axis": case.axis, "rounding": case.rounding, "seed": case.seed}
    x = vectors.expanded(np.frombuffer(case.input, np.uint32 if case.dtype == "float32" else np.uint16), case.dtype)
    if case.supplied is not None:
        options["scale"] = np.asarray(case.array("supplied"))
        if case.stored("supplied")[1] == 16:
            raise NotSupported("supplied scales of 16 bits")
    if case.importance is not None:
        options["importance"] = np.asarray(case.array("importance"))
    if case.group_index is not None:
        index = breccia.PerGroupIndex(tuple(np.asarray(case.array("group_index")).tolist()), case.groups)
        options = {"axis": case.axis, "group_index": index}
    st = breccia.cast(x.reshape(case.shape), recipe, **options)
    parts = {name: getattr(st, name) for name in ("data", "scale", "zero_point", "global_scale")}
    decoded = breccia.dequantize(st)
    return {name: np.ascontiguousarray(part) for name, part in {**parts, "decoded": decoded}.items() if part is not None}


def with_rule(rule: str) -> Callable[[Case], dict[str, Any]]:
    return lambda case: cast(case, scale_rule=rule)


def itself(case: Case) -> Mapping[str, Any]:
    return {part: getattr(case, part) for part in RESULTS if getattr(case, part) is not None}


def one(name: str, edge: str) -> list[Case]:
    return [case for case in breccia_vectors.cases(name, edge=edge) if case.format.name == name]


# -- agreement -------------------------------------------------------------------------------------------------------


def test_every_case_agrees_with_itself() -> None:
    report = check(itself, lambda case: case.decoded, library="itself")
    stored = sum(case.decode_only for case in breccia_vectors.cases())
    assert report.agrees and len(report.agreed) == 2 * len(list(breccia_vectors.cases())) - stored
    assert str(report).startswith(f"itself: {len(report.agreed)} agree, 0 differ, 0 fail, 0 skipped\n")


@pytest.mark.parametrize("part", RESULTS)
def test_a_wrong_bit_in_any_part_is_found(part: str) -> None:
    name = "int4,group_size=16,signed=False,symmetric=False" if part == "zero_point" else "nvfp4"

    def wrong(case: Case) -> Mapping[str, Any]:
        changed = bytearray(getattr(case, part))
        changed[-1] ^= 4
        right = {name: raw for name, raw in itself(case).items() if {name, part} != {"codes", "data"}}
        return {**right, part: bytes(changed)}

    report = check(wrong, cases=one(name, "ordinary"), reduce=False)
    (found,) = report.differences
    shown = "codes" if part == "data" else part
    assert (found.part, found.wrong[shown]) == (shown, 1) and not report.agrees
    bits = found.case.stored(shown)[1]
    flipped = 0x40 if part == "data" else 4 << (bits - 8)  # data: the upper code of the byte
    assert found.wanted ^ found.found == (flipped >> 4 if part == "data" else flipped)


def test_padding_of_packed_codes_has_to_be_zero() -> None:
    (case,) = one("mxfp6", "ragged")
    data = bytearray(case.data)
    data[-1] |= 0x80  # 59 codes of 6 bits leave the last 6 of 360
    (found,) = check(lambda case: {"data": data}, cases=[case]).differences
    assert (found.part, found.index, found.wrong) == ("data", len(data) - 1, {"data": 1})


def test_decoded_numbers_compare_as_the_page_says() -> None:
    (case,) = one("mxfp8", "nan")
    nan = np.asarray(case.array("decoded")).copy().view(np.uint32)
    nan[nan == 0x7FC00000] = 0xFFFFFFFF
    assert check(None, lambda case: nan, cases=[case]).agrees  # any NaN
    sizes = ((case, np.abs(np.asarray(case.array("decoded")))) for case in breccia_vectors.cases("mxint8"))
    tiny = next(case for case, size in sizes if ((size > 0) & (size < 2.0**-126)).any())
    flushed = np.asarray(tiny.array("decoded")).copy()
    flushed[np.abs(flushed) < 2.0**-126] *= np.float32(0)
    assert not check(None, lambda case: flushed, cases=[tiny]).agrees
    assert check(None, lambda case: flushed, cases=[tiny], flushes_subnormals=True).agrees
    assert not check(None, lambda case: -flushed, cases=[tiny], flushes_subnormals=True).agrees


# -- adapters --------------------------------------------------------------------------------------------------------


def test_what_a_library_cannot_do_is_skipped_with_the_reason() -> None:
    def quantize(case: Case) -> Mapping[str, Any]:
        if case.axis != -1:
            raise NotSupported("blocks along the rows")
        return {"codes": case.codes}

    report = check(quantize, library="acme 1.2", cases=breccia_vectors.cases("mxfp4,scale_rule=floor"))
    assert [(s.case.edge, s.reason) for s in report.skipped] == [("axis=-2", "blocks along the rows")]
    assert report.agrees and "  quantize: 1 skipped: blocks along the rows" in str(report)


def test_an_exception_of_the_library_is_a_failure_and_the_check_goes_on() -> None:
    def quantize(case: Case) -> Mapping[str, Any]:
        if case.edge == "nan":
            raise RuntimeError("NaN is not implemented")
        return {"codes": case.codes}

    report = check(quantize, cases=breccia_vectors.cases("mxfp4,scale_rule=floor"))
    (failure,) = report.failures
    assert str(failure).endswith("in one block): quantize raised RuntimeError: NaN is not implemented")
    assert not report.agrees and len(report.agreed) == 16


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"scales": b""}, "scales returned; a result has global_scale, scale, zero_point, codes, data, decoded."),
        ({}, "nothing returned; return at least one of global_scale, scale"),
        ({"codes": b"\0"}, "codes has 1 bytes; 128 expected, for (2, 64) items of 8 bits."),
        ({"scale": [1, 2]}, "scale is a list without the buffer protocol"),
        ({"zero_point": b"\0"}, "zero_point returned, but this format has none; leave it out."),
    ],
)
def test_a_result_that_cannot_be_one_is_an_error_of_the_adapter(returned: Any, message: str) -> None:
    with pytest.raises(ResultError) as e:
        check(lambda case: returned, cases=one("mxfp4", "ordinary"))
    assert f"mxfp4 ordinary: {message}" in str(e.value)


def test_a_check_needs_an_adapter() -> None:
    with pytest.raises(TypeError, match="check got neither quantize nor dequantize: pass one of them."):
        check()


# -- the smallest input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", breccia_vectors.formats()[::7], ids=str)
def test_golden_bytes_hold_for_the_elements_that_a_reduction_keeps(format: breccia_vectors.Format) -> None:
    """breccia's cast of every reduced input has the bytes of the whole one, so that no reduction blames a right library."""

    def run(case: Case) -> Any:
        try:
            return items_of(case, cast(case))
        except NotSupported:
            return None

    for case in breccia_vectors.cases(format.name):
        if case.format == format and not case.decode_only and format.recipe != "two_codecs":
            count = math.prod(case.shape)
            for wrong in ({"scale": [0]}, {"codes": [0, count // 2, count - 1]}, {"global_scale": [0]}):
                if "global_scale" not in wrong or format.has_global_scale:
                    assert reducing.smallest(case, wrong, run, False) is None, case.name


def test_a_scale_that_differs_is_shown_by_one_element() -> None:
    """amax 6.2 of a block: rceil takes 2^1 as 6.2 > 6, floor 2^0 (numerics.md, section 5.2)."""
    (found,) = check(with_rule("floor"), cases=one("mxfp4", "ordinary")).differences
    small = found.smallest
    assert small is not None and (small.case.shape, len(small.kept), small.part) == ((1, 32), 1, "scale")
    (x,) = (abs(v) for v in small.case.array("input").cast("B").cast("f").tolist() if v)
    assert 6 < x < 8 and (small.wanted, small.found) == (128, 127)
    assert f"smallest input: float32 (1, 32), zeros but [0, {small.kept[0]}] = " in str(found)
    assert "there scale[0] is 0x7F, not 0x80 (1.0, not 2.0)" in str(found)


def test_a_code_that_differs_is_shown_by_two_elements() -> None:
    """A library that truncates codes: the element that differs, and the largest, which is exact."""

    def quantize(case: Case) -> Mapping[str, Any]:
        x = np.asarray(case.array("input"))
        found = cast(case)
        scales = np.exp2(np.asarray(found["scale"]).astype(np.float32) - 127).repeat(32, axis=-1)
        values = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = np.searchsorted(values, np.minimum(np.abs(x / scales), 6), side="right") - 1
        return {"codes": np.where(np.signbit(x), codes + 8, codes).astype(np.uint8), "scale": found["scale"]}

    (found,) = check(quantize, cases=one("mxfp4", "ties")).differences
    assert found.smallest is not None and found.smallest.part == "codes" and len(found.smallest.kept) <= 2
    assert found.smallest.wanted == found.smallest.found + 1


def test_a_library_that_depends_on_the_whole_block_is_shown_by_fewer_elements() -> None:
    """The scale is doubled where two elements at least are beyond half of the largest."""

    def quantize(case: Case) -> Mapping[str, Any]:
        found = cast(case)
        size = np.abs(np.asarray(case.array("input"))).reshape(*found["scale"].shape, 32)
        many = (size > size.max(-1, keepdims=True) / 2).sum(-1) >= 2
        return {"scale": found["scale"] + many.astype(np.uint8)}

    (found,) = check(quantize, cases=one("mxfp4", "ordinary")).differences
    assert found.smallest is not None and (len(found.smallest.kept), found.smallest.case.shape) == (2, (1, 32))


def test_a_bias_stays_where_the_other_elements_are_the_smallest() -> None:
    name = "int4,group_size=16,signed=False,scale_dtype=fp32,symmetric=False,offset=bias"

    def quantize(case: Case) -> Mapping[str, Any]:
        codes = bytearray(np.asarray(cast(case)["data"]).tobytes())
        codes[0] ^= 1
        return {"data": bytes(codes)}

    (found,) = check(quantize, cases=one(name, "ordinary")).differences
    small = found.smallest
    assert small is not None and len(small.kept) <= 3 and small.case.shape == (1, 16)
    x = np.asarray(small.case.array("input")).ravel()
    assert np.array([small.rest], np.uint32).view(np.float32) == x.min() != 0 and f"{x.min()!r}".split("(")[-1][:6] in str(
        found
    )


def test_nothing_smaller_is_claimed_without_proof() -> None:
    """A library that is wrong on the whole input only."""
    (whole,) = one("mxfp4", "ordinary")

    def quantize(case: Case) -> Mapping[str, Any]:
        codes = bytearray(case.codes)
        codes[0] ^= case.input == whole.input
        return {"codes": codes}

    (found,) = check(quantize, cases=[whole]).differences
    assert found.smallest is None and "smallest" not in str(found)


# -- reports ---------------------------------------------------------------------------------------------------------


def test_the_report_counts_by_format_and_its_json_has_every_difference() -> None:
    report = check(with_rule("floor"), library="acme 1.2", cases=breccia_vectors.cases("mxfp8", set=1))
    counts = report.counts()
    assert counts["quantize", "mxfp8,scale_rule=floor"]["differ"] == 0 < counts["quantize", "mxfp8"]["differ"]
    said = json.loads(report.json())
    assert said["library"] == "acme 1.2" and len(said["differences"]) == len(report.differences)
    first = next(d for d in said["differences"] if "smallest" in d)
    assert set(first["smallest"]) == {"dtype", "shape", "axis", "values", "rest", "part", "index", "wanted", "found"}
    listed = [line for line in str(report).splitlines() if line.startswith("quantize: 1:")]
    more = next(line for line in str(report).splitlines() if line.endswith("more of mxfp8"))
    assert more == f"  and {counts['quantize', 'mxfp8']['differ'] - 3} more of mxfp8" and len(listed) >= 3
