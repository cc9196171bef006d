"""Codes that become other codes in one pass, on every instruction set, against the generic algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import breccia
from breccia.arrays.frameworks import Device
from breccia.kernels.numpy import requantizing
from breccia_native import availability

if reason := availability.missing(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

from breccia_native import decoding, kernels, microkernels

#: Sources by how decoding.c makes their numbers, with blocks of rows, of squares, of whole rows, and of the whole tensor.
SOURCES = (
    *(
        "fp8_block,block_m=128",
        "fp8_block",
        "fp8_row",
        "fp8_current",
        "int8",
        "mxfp8",
        "mxfp6",
        "mxfp4",
        "nvfp4",
        "int4",
        "nf4",
    ),
    *("int4,signed=false,symmetric=false", "int4_bias"),
)
#: Rows that are parts of one chunk, several chunks, and several rows of one; stacks; rows that are no multiple of a block.
SHAPES = ((128, 512), (40, 7168), (100, 4112), (3, 64, 1024), (7, 16), (130, 272), (2, 9216))


@pytest.fixture(params=[decoding.use()[0], *(pytest.param(name, marks=pytest.mark.long) for name in decoding.use()[1:])])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels of one instruction set."""
    for module in (decoding, microkernels):
        module.use(request.param)
    yield request.param
    for module in (decoding, microkernels):
        module.use(module.use()[0])


def expect_same(found: breccia.ScaledTensor, expected: breccia.ScaledTensor) -> None:
    assert (found.recipe, found.layout, found.shape, found.padding) == (
        expected.recipe,
        expected.layout,
        expected.shape,
        expected.padding,
    )
    for part in ("data", "scale", "global_scale"):
        a, b = np.asarray(getattr(found, part)), np.asarray(getattr(expected, part))
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes(), part


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_codes_under_a_supplied_global_scale_get_the_bytes_of_the_generic_algorithm(
    source: str, shape: tuple[int, ...], instructions: str
) -> None:
    x = np.random.default_rng(len(source)).standard_normal(shape, np.float32)
    st = breccia.cast(x, source)
    for scale in (1e-3, 1.0, 2.0**-70):  # the last leaves scales that are not normal
        found = breccia.requantize(st, "nvfp4", scale=scale, prefer="native.requantize")
        expect_same(found, breccia.requantize(st, "nvfp4", scale=scale, prefer="reference.requantize"))


@pytest.mark.parametrize("value", [np.inf, np.nan, 2.0**120])
def test_numbers_that_are_not_usual_are_left_to_the_other_kernels(value: float, instructions: str) -> None:
    x = np.random.default_rng(3).standard_normal((64, 512), np.float32)
    x[5, 100] = value
    st = breccia.cast(x, "fp8_row")
    found = breccia.requantize(st, "nvfp4", scale=1e-3, prefer="native.requantize")
    expect_same(found, breccia.requantize(st, "nvfp4", scale=1e-3, prefer="reference.requantize"))


def test_one_pass_decodes_no_matrix_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    st = breccia.cast(np.random.default_rng(4).standard_normal((256, 1024), np.float32), "fp8_block,block_m=128")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("it decoded and cast")

    monkeypatch.setattr(requantizing.composites, "requantize", refuse)
    written = kernels.requantize(st, breccia.recipe("nvfp4"), breccia.backend.CastOptions(scale=1e-3))
    assert written.recipe.name == "nvfp4"


def test_calls_that_take_more_than_one_pass_say_why() -> None:
    st = breccia.cast(np.ones((4, 64), np.float32), "fp8_row")
    for options, said in (
        ({}, "it takes one pass only under a supplied scale; else the largest number has to be known first"),
        ({"scale": 1.0, "require_exact": True}, "it writes new tensors in plain storage, and compares nothing"),
        ({"scale": 1.0, "nonfinite": "raise"}, "it rounds to nearest, and does not look for NaN and Inf"),
    ):
        assert f"skipped: {said}" in str(breccia.explain("requantize", st, "nvfp4", **options))
    assert "skipped: 'mxfp4' has no scales of 8 bits under a global scale" in str(
        breccia.explain("requantize", st, "mxfp4", scale=1.0)
    )
    assert "skipped: blocks along columns are not adjacent in memory" in str(
        breccia.explain("requantize", st.mT, "nvfp4", scale=1.0)
    )


def test_blocks_of_codes_have_a_length_that_decoding_can_be_cut_by() -> None:
    st = breccia.cast(np.ones((4, 96), np.float32), "fp8_row")
    arguments = (
        st.data.view(np.uint8),
        8,
        np.zeros(256, np.float32),
        (0, 0, 0, 0, 0, 0.0),
        96,
        1,
        st.scale,
        b"",
        False,
        b"",
        b"",
    )
    matrix = decoding.matrix(*arguments, (0, False, 0, 0), (0, False, 0, 0), None, False, 96)
    fields, room = (0, 0, 0, 0, 0), np.zeros(512, np.uint8)
    with pytest.raises(ValueError, match=r"wanted aligned numbers in blocks of k = 48, room for a scale of each"):
        microkernels.blocks(matrix, 48, 32, 1.0, 1.0, fields, np.zeros(256, np.float32), fields, room[:8], room[:384])
    with pytest.raises(ValueError, match="wanted rows of codes of 1 to 8 bits"):
        decoding.matrix(*arguments, (0, False, 0, 0), (0, False, 0, 0), None, False, 95)
