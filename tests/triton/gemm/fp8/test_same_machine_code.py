"""The comparison of machine code between revisions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from compiling import compiled_with_log
from fp8_variants import fp8_variants, title
from same_machine_code import ARCHITECTURE, compared, machine_code, registers, sections

from breccia_triton.gemm.fp8 import matmul as fp8_matmul
from breccia_triton.gemm.fp8 import plans as fp8_plans
from breccia_triton.launch import compiler


def test_variants_that_are_not_the_same_have_titles_of_their_own() -> None:
    found = {title(variant): variant for variant in fp8_variants()}
    assert len(found) == len(set(fp8_variants()))
    first = fp8_plans.TABLE[0]
    assert title(fp8_plans.GemmVariant(first)) == first.name
    assert title(fp8_plans.GemmVariant(first, fp8_plans.BLOCKS, pieces=4)) == f"{first.name}, scales=2, pieces=4"


def test_differences_and_variants_of_one_revision_are_reported() -> None:
    identical, said = compared({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"})
    assert identical == 1
    assert said == ["differs: b", "only in the first: c", "only in the second: d"]


@pytest.mark.long
def test_comments_leave_machine_code_as_it_is_and_instructions_do_not() -> None:
    if reason := compiler.missing():
        pytest.skip(reason)
    variant = fp8_plans.GemmVariant(fp8_plans.TABLE[7], out="float32", staged=False)
    source = fp8_matmul.source_of(variant.tile.columns, variant.codecs)

    def code(text: str, variant: fp8_plans.GemmVariant = variant) -> str:
        options = compiler.options_of(ARCHITECTURE, variant.macros)
        return machine_code(compiler.nvrtc().compile(replace(source, text=text), options)[0])

    expected = code(source.text)
    made, log = compiled_with_log(source, variant.macros, ARCHITECTURE)
    assert registers(sections(made)[".nv.info"]) == [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert code("// a line more\n" + source.text) == expected
    changed = re.sub(r"x \*= r0 \* c;", "x *= r0 * c * 2.f;", source.text)
    assert changed != source.text and code(changed) != expected
    assert code(source.text, replace(variant, promote=False)) != expected
