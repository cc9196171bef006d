"""Blocks of GGUF that breccia writes: those that it has read, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from golden_dialects import GOLDEN

import breccia
from breccia import ScaledTensor
from breccia.backend import Entry, StoredForm, StoredValue, ValueForm
from breccia_bridges.dialects.gguf import KINDS, form, read, stored, write
from breccia_bridges.gguf_file import GGUFFile
from breccia_bridges.gguf_types import TYPES

FOLDER = GOLDEN.parent / "gguf"
_BY_NAME = {one.name: one for one in TYPES.values()}


def value_of(kind: str, blocks: np.ndarray, **beside: np.ndarray) -> StoredValue:
    """A tensor of blocks. blocks: (..., rows, bytes)."""
    one = _BY_NAME[kind]
    end = "weight" if beside else ""
    arrays = {end: blocks, **beside}
    entries = {name: Entry("F32", array.shape) for name, array in beside.items()}
    entries[end] = Entry(kind, (*blocks.shape[:-1], blocks.shape[-1] // one.size * one.length))
    return StoredValue("w", entries, {}, arrays.__getitem__)


def tensor_of(value: StoredValue) -> ScaledTensor:
    return read(value, form(value))


def form_of(st: ScaledTensor) -> ValueForm:
    return ValueForm(st.recipe, tuple(st.shape), st.layout)


def written(st: ScaledTensor) -> tuple[StoredForm, dict[str, np.ndarray]]:
    how = stored(form_of(st))
    return how, write(st, how)


def random_rows(kind: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Rows of blocks of any bytes whose scales are finite. shape: the last axis in blocks."""
    rng, one = np.random.default_rng(seed), KINDS[kind]
    blocks = rng.integers(0, 256, (*shape, _BY_NAME[kind].size), np.uint8)
    for part in (one.scale, one.bias):
        if part is not None and part.dtype == "F16":
            scales = rng.integers(0, 1 << 16, (*shape, 1), np.uint16)
            scales[(scales & 0x7C00) == 0x7C00] &= 0x83FF  # NaN and Inf become subnormals
            blocks[..., part.field] = scales.view(np.uint8)
        elif part is not None:
            blocks[..., part.field] %= 0xFF if part.dtype == "E8M0" else 0x7F
    if kind == "TQ1_0":
        numbers = rng.integers(0, 243, (*shape, 52), np.uint16)
        numbers[..., 48:] = rng.integers(0, 81, (*shape, 4)) * 3  # the last bytes have four digits
        blocks[..., :52] = (numbers * 256 + 242) // 243
    return blocks.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("shape", [(1,), (3, 2), (2, 3, 1), (700, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_is_written_byte_for_byte(kind: str, shape: tuple[int, ...]) -> None:
    rows = random_rows(kind, *shape)
    how, arrays = written(tensor_of(value_of(kind, rows)))
    elements = (*shape[:-1], shape[-1] * _BY_NAME[kind].length)
    assert how == StoredForm({"": Entry(kind, elements)})
    assert arrays[""].dtype == np.uint8 and arrays[""].shape == rows.shape
    assert arrays[""].tobytes() == rows.tobytes()


@pytest.mark.parametrize("file", ["types.gguf", "llama-00001-of-00002.gguf", "llama-00002-of-00002.gguf"])
def test_what_ggml_has_quantized_is_written_byte_for_byte(file: str) -> None:
    kinds = set()
    opened = GGUFFile(FOLDER / file)
    for name, one in opened.placed.items():
        if one.info.type.name in KINDS and one.change is None:
            blocks = opened.read(name)
            how, arrays = written(tensor_of(value_of(one.info.type.name, blocks)))
            assert how.entries[""].dtype == one.info.type.name
            assert arrays[""].tobytes() == blocks.tobytes(), name
            kinds.add(one.info.type.name)
    assert kinds == {*KINDS} if file == "types.gguf" else kinds


def test_a_scale_of_a_tensor_of_nvfp4_is_beside_it() -> None:
    rows, scale = random_rows("NVFP4", 4, 2), np.array([0.3], np.float32)
    how, arrays = written(tensor_of(value_of("NVFP4", rows, scale=scale)))
    assert how == StoredForm({"weight": Entry("NVFP4", (4, 128)), "scale": Entry("F32", (1,))})
    assert arrays["weight"].tobytes() == rows.tobytes() and arrays["scale"].tobytes() == scale.tobytes()


def test_bytes_that_are_read_as_others_are_written_as_those() -> None:
    """TQ1_0: 13 of 256 bytes are no digits of base 3, and the last 4 bytes have no fifth digit. NVFP4: 0x7F decodes as 0."""
    every = np.zeros((5, 54), np.uint8)
    every[:, :52] = np.resize(np.arange(256, dtype=np.uint8), (5, 52))
    st = tensor_of(value_of("TQ1_0", every))
    back = written(st)[1][""]
    np.testing.assert_array_equal(tensor_of(value_of("TQ1_0", back)).data, st.data)
    changed = back[:, :48] != every[:, :48]
    assert len({*every[:, :48][changed].tolist()}) == 13
    nvfp4 = np.full((1, 36), 0x11, np.uint8)
    nvfp4[0, :4] = (0x7F, 0x38, 0, 0x7E)
    assert written(tensor_of(value_of("NVFP4", nvfp4)))[1][""][0, :4].tolist() == [0, 0x38, 0, 0x7E]


@pytest.mark.parametrize(
    "spec", ["int8,group_size=32,scale_dtype=fp16", "gguf,type=Q4_K", "mxfp4", "nvfp4", "int4,group_size=32"]
)
def test_the_library_decodes_what_was_cast(spec: str) -> None:
    library = pytest.importorskip("gguf")
    x = np.random.default_rng(1).standard_normal((5, 512)).astype(np.float32)
    st = breccia.cast(x, spec)
    how, arrays = written(st)
    end = next(iter(how.entries))
    theirs = library.dequantize(arrays[end], library.GGMLQuantizationType[how.entries[end].dtype])
    if "scale" in arrays:
        theirs = theirs * arrays["scale"]
    np.testing.assert_array_equal(np.asarray(breccia.dequantize(st), np.float32), theirs)


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        ("int8", "int8,group_size=32,scale_dtype=fp16"),
        ("int4,group_size=64", "int4,group_size=32"),
        ("int4,group_size=32,scale_dtype=fp32", "int4,group_size=32"),
        ("nf4", "int4,group_size=32"),
        ("mxfp8", "int8,group_size=32,scale_dtype=fp16"),
    ],
)
def test_a_format_that_gguf_lacks_is_refused_with_the_nearest_one(spec: str, nearest: str) -> None:
    said = rf"GGUF has no type for '{breccia.recipe(spec).spec}'; the nearest recipe that it has is '{nearest}'"
    with pytest.raises(breccia.UnsupportedError, match=said):
        stored(ValueForm(breccia.recipe(spec), (64, 256)))


def test_parts_of_blocks_are_refused() -> None:
    with pytest.raises(
        breccia.UnsupportedError, match=r"Q4_K has whole blocks of 256 .* divide .* \[8, 96\].*int8,group_size=32"
    ):
        stored(ValueForm(breccia.recipe("gguf,type=Q4_K"), (8, 96)))
    with pytest.raises(
        breccia.UnsupportedError, match=r"Q8_0 has whole blocks of 32 .* divide .* \[8, 100\]. .*'bf16' or 'fp16'"
    ):
        stored(ValueForm(breccia.recipe("int8,group_size=32,scale_dtype=fp16"), (8, 100)))


def test_other_layouts_and_columns_are_refused() -> None:
    recipe = breccia.recipe("int4,group_size=32")
    index = breccia.PerGroupIndex(tuple(k % 2 for k in range(64)), 2)
    with pytest.raises(breccia.UnsupportedError, match=r"Q4_0 has the scales of blocks in their order; .*PerGroupIndex"):
        stored(ValueForm(recipe, (8, 64), index))
    with pytest.raises(
        breccia.UnsupportedError, match="blocks run down the columns of the weight; those of GGUF run along rows"
    ):
        stored(ValueForm(recipe, (64, 64), is_transposed=True))


def test_what_readers_refuse_is_not_written() -> None:
    nan = np.array([[np.nan, 1]], np.float16)
    for spec, parts, said in (
        ("int4,group_size=32", {"scale": nan}, "1 of its scales is NaN or Inf"),
        (
            "nvfp4,two_level=false",
            {"scale": np.array([[0x38, 0x7F, 0xB8, 0]], np.uint8)},
            "2 of its scales are NaN or Inf, or neg",
        ),
        ("nvfp4", {"global_scale": np.float32(np.inf)}, "one finite scale of a tensor of NVFP4"),
    ):
        st = breccia.cast(np.ones((1, 64), np.float32), spec)
        with pytest.raises(breccia.UnsupportedError, match=said):
            written(replace(st, **parts))
    ternary = tensor_of(value_of("TQ2_0", np.full((1, 66), 0xFF, np.uint8) & np.uint8(0x3B)))
    renamed = replace(ternary, recipe=breccia.recipe("gguf,type=TQ1_0"))
    with pytest.raises(breccia.UnsupportedError, match=r"bytes have codes of 2, for which TQ1_0 has no place; .*TQ2_0"):
        written(renamed)


def test_a_stack_of_experts_with_one_scale_is_refused() -> None:
    with pytest.raises(
        breccia.UnsupportedError, match=r"\[2, 4, 64\] is a stack, and GGUF has a scale of NVFP4 for each of its"
    ):
        written(breccia.cast(np.ones((2, 4, 64), np.float32), "nvfp4"))
