"""GPTQ versions 1 and 2: packed here, read exactly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from packed_words import checkpoint, decoded, values, words

import breccia

RNG = np.random.default_rng(5)
UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"


def minus_one(zeros: np.ndarray, bits: int) -> np.ndarray:
    """Words of zero-points minus one: of 2, 4 and 8 bits subtracted from whole words, of 3 bits from each code."""
    if bits == 3:
        return words((zeros - 1) % 8, 3)
    ones = sum(1 << i for i in range(0, 32, bits))
    whole = [(int(word) - ones) % 2**32 for word in words(zeros, bits, np.uint32).reshape(-1)]
    return np.array(whole, np.uint32).view(np.int32).reshape(len(zeros), -1)


class Matrix:
    """A matrix (N, K) as GPTQ has it, and its values."""

    def __init__(self, bits: int, group: int, n: int = 64, k: int = 96, version: int = 1, dtype: Any = np.float16) -> None:
        groups = -(-k // group)
        self.index = np.arange(k) // group
        self.codes = RNG.integers(0, 1 << bits, (k, n))
        self.zeros = RNG.integers(0, 1 << bits, (groups, n))
        self.zeros[:, ::5] = 0
        self.scales = RNG.uniform(0.001, 0.1, (groups, n)).astype(dtype)
        self.bits, self.version = bits, version

    def tensors(self, module: str = UP, **changes: Any) -> dict[str, Any]:
        parts = {
            "qweight": np.ascontiguousarray(words(self.codes.T, self.bits).T),
            "qzeros": minus_one(self.zeros, self.bits) if self.version == 1 else words(self.zeros, self.bits),
            "scales": self.scales,
            "g_idx": self.index.astype(np.int32),
        } | changes
        return {f"{module}.{end}": part for end, part in parts.items() if part is not None}

    @property
    def expected(self) -> np.ndarray:
        scale = self.scales.astype(np.float32)[self.index]
        return ((self.codes - self.zeros[self.index]).astype(np.float32) * scale).T


def config(bits: int = 4, group: int = 32, **settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "gptq", "bits": bits, "group_size": group, **settings}}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_width_is_read_exactly(bits: int, version: int, tmp_path: Path) -> None:
    matrix = Matrix(bits, 32, version=version)
    folder = checkpoint(tmp_path / "m", matrix.tensors(), config(bits, checkpoint_format="gptq" if version == 1 else "gptq_v2"))
    stored = values(folder)
    assert list(stored) == [f"{UP}.weight"], "plain tensors are no values"
    st = stored[f"{UP}.weight"].tensor()
    kind = {4: breccia.INT4Scaling, 8: breccia.INT8Scaling}.get(bits, partial(breccia.INTScaling, bits))
    assert st.recipe == kind(group_size=32, signed=False, scale_dtype="fp16", symmetric=False)
    assert st.data.tobytes() == words(matrix.codes.T, bits).tobytes(), "the stream of bits that the file has"
    assert st.layout == breccia.PerBlockK(32) and st.shape == (64, 96)
    assert st.scale.tobytes() == matrix.scales.T.tobytes() and (st.zero_point == matrix.zeros.T).all()
    assert (decoded(stored[f"{UP}.weight"]) == matrix.expected).all()


def test_a_zero_point_of_zero_borrows_from_the_next_one_in_version_1(tmp_path: Path) -> None:
    """0x80F10030 has the zero-points 0, 3, 0, 0, 1, 15, 0 and 8; 0x11111111 is subtracted from the word."""
    matrix = Matrix(4, 32, 8, 32)
    qzeros = np.array([[0x80F10030 - 0x11111111]], np.uint32).view(np.int32)
    folder = checkpoint(tmp_path / "m", matrix.tensors(qzeros=qzeros), config())
    assert values(folder)[f"{UP}.weight"].tensor().zero_point[:, 0].tolist() == [0, 3, 0, 0, 1, 15, 0, 8]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_scales_stay_in_their_dtype(dtype: Any, tmp_path: Path) -> None:
    matrix = Matrix(4, 32, dtype=dtype)
    stored = values(checkpoint(tmp_path / "m", matrix.tensors(), config()))[f"{UP}.weight"]
    st = stored.tensor()
    assert st.recipe.format.scale.codec.dtype == np.dtype(dtype).name and st.scale.tobytes() == matrix.scales.T.tobytes()
    assert (decoded(stored) == matrix.expected).all()


@pytest.mark.parametrize(("size", "group"), [(-1, 96), (64, 64)])
def test_a_group_may_be_all_columns_and_the_last_one_partial(size: int, group: int, tmp_path: Path) -> None:
    matrix = Matrix(4, group)
    stored = values(checkpoint(tmp_path / "m", matrix.tensors(), config(group=size)))[f"{UP}.weight"]
    assert stored.tensor().layout == breccia.PerBlockK(group, partial=group == 64)
    assert (decoded(stored) == matrix.expected).all()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_columns_in_groups_out_of_order_are_a_group_index(bits: int, tmp_path: Path) -> None:
    matrix = Matrix(bits, 32)
    matrix.index = RNG.permutation(matrix.index)
    stored = values(checkpoint(tmp_path / "m", matrix.tensors(), config(bits, desc_act=True)))[f"{UP}.weight"]
    assert stored.form.layout == breccia.PerGroupIndex(tuple(matrix.index.tolist()), 3)
    assert stored.tensor().layout == stored.form.layout and (decoded(stored) == matrix.expected).all()


def test_columns_in_order_are_blocks_whatever_desc_act_says(tmp_path: Path) -> None:
    matrix = Matrix(4, 32)
    folder = checkpoint(tmp_path / "m", matrix.tensors(g_idx=matrix.index), config(desc_act=True))
    assert values(folder)[f"{UP}.weight"].form.layout is None, "g_idx may be I64"
    folder = checkpoint(tmp_path / "n", matrix.tensors(g_idx=None), config(desc_act=False))
    assert (decoded(values(folder)[f"{UP}.weight"]) == matrix.expected).all(), "and absent"


def test_dynamic_changes_settings_of_modules(tmp_path: Path) -> None:
    """The first pattern that matches the beginning of a name counts; "+:" is optional."""
    wide, narrow = Matrix(8, 48), Matrix(2, 32)
    dynamic = {
        "+:^model.layers.0.*down": {"bits": 8, "group_size": 48},
        "-:.*lm_head": {},
        "layers": {"bits": 3},
        ".*down_proj": {"bits": 3},
    }
    folder = checkpoint(tmp_path / "m", wide.tensors(DOWN) | narrow.tensors(UP), config(2, dynamic=dynamic))
    stored = values(folder)
    assert (decoded(stored[f"{DOWN}.weight"]) == wide.expected).all() and (
        decoded(stored[f"{UP}.weight"]) == narrow.expected
    ).all()


def test_a_module_that_dynamic_excludes_is_not_quantized(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", Matrix(4, 32).tensors(), config(dynamic={"-:.*up_proj": {}}))
    with pytest.raises(breccia.CorruptFileError, match=f"config leaves {UP} as it is, but the files have {UP}.qweight"):
        _ = values(folder)[f"{UP}.weight"].form


def test_the_version_is_in_one_of_two_keys_and_1_if_it_is_in_none(tmp_path: Path) -> None:
    for i, (keys, version) in enumerate(
        [({}, 1), ({"format": "gptq"}, 1), ({"format": "gptq_v2"}, 2), ({"checkpoint_format": "gptq_p", "format": "gptq_p"}, 2)]
    ):
        matrix = Matrix(4, 32, version=version)
        folder = checkpoint(tmp_path / str(i), matrix.tensors(), config(**keys))
        assert (decoded(values(folder)[f"{UP}.weight"]) == matrix.expected).all(), keys
    matrix = Matrix(4, 32, version=2)
    quantize_config = config(checkpoint_format="gptq_v2")["quantization_config"]
    del quantize_config["quant_method"]
    folder = checkpoint(tmp_path / "q", matrix.tensors(), quantize_config=quantize_config)
    assert (decoded(values(folder)[f"{UP}.weight"]) == matrix.expected).all()


def test_without_a_config_the_version_is_asked_for_and_the_shapes_say_the_rest(tmp_path: Path) -> None:
    for bits in (2, 3, 4, 8):
        matrix = Matrix(bits, 32)
        if bits == 3:
            matrix.index = RNG.permutation(matrix.index)
        folder = checkpoint(tmp_path / str(bits), matrix.tensors(g_idx=None if bits == 2 else matrix.index.astype(np.int32)))
        with pytest.raises(breccia.DialectError) as caught:
            values(folder)
        both = (
            "has two readings, as GPTQ ('gptq') and GPTQ version 2 ('gptq_v2'), and no config says which. Give source_dialect="
        )
        assert f"{UP}.weight {both}" in str(caught.value)
        stored = values(folder, "gptq")[f"{UP}.weight"]
        assert stored.form.recipe.format.scale.block == (1, 32) and (decoded(stored) == matrix.expected).all()


def test_without_a_config_tensors_that_no_dialect_has_are_refused_for_each_reason(tmp_path: Path) -> None:
    parts = {"qweight": (12, 64), "qzeros": (3, 9), "scales": (3, 64)}
    folder = checkpoint(
        tmp_path / "m",
        {f"{UP}.{end}": np.zeros(shape, np.float16 if end == "scales" else np.int32) for end, shape in parts.items()},
    )
    with pytest.raises(breccia.DialectError, match="no dialect fits") as caught:
        values(folder)
    for said in (
        "(GPTQ",
        "64 zero-points in a row of 9 words",
        "(AWQ): 'qzeros' has shape [3, 9]",
        "(AutoRound): the config has no",
    ):
        assert said in str(caught.value)


def refusal(tmp_path: Path, tensors: dict[str, Any], settings: Any, source_dialect: str | None = None) -> str:
    stored = values(checkpoint(tmp_path / "m", tensors, settings), source_dialect)[f"{UP}.weight"]
    with pytest.raises(breccia.DialectError) as caught:
        stored.tensor()
    assert caught.value.found["name"] == f"{UP}.weight" and f"{UP}.weight (GPTQ" in str(caught.value)
    return str(caught.value)


ORDER = np.arange(96, dtype=np.int32)[::-1] // 32


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({}, {"bits": 8}, "the config has bits=8, but the shapes of 'qzeros' and 'scales' are those of 4 bits. Download"),
        ({}, {"bits": "4"}, "bits is an integer; the config has '4'."),
        ({}, {"group_size": 64}, "'scales' has 3 groups; 96 columns in groups of 64 need 2. Check group_size in the config"),
        ({}, {"group_size": 0}, "group_size is -1 or at least 1; the config has 0."),
        ({"scales": np.ones((3, 32), np.float16)}, {}, "'qweight' has shape [12, 64]; its other parts need [12, 32]."),
        ({"qzeros": np.ones((2, 8), np.int32)}, {}, "'qzeros' has shape [2, 8]; its other parts need [3, 8]."),
        ({"qzeros": np.ones((3, 5), np.int32)}, {}, "64 zero-points in a row of 5 words, and 12 rows of words, fit no width"),
        ({"scales": np.ones(64, np.float16)}, {}, "are matrices; they have shapes [12, 64], [3, 8], [64]."),
        ({"scales": np.full((3, 64), np.nan, np.float16)}, {}, "'scales' has 192 scales that are not finite; the first is nan"),
        ({"g_idx": np.zeros(95, np.int32)}, {}, "'g_idx' has shape [95]; its other parts need [96]."),
        ({"g_idx": np.full(96, 3, np.int32)}, {}, "'g_idx' numbers groups 0 to 2; it has 3 to 3."),
        ({"g_idx": np.full(96, -1, np.int32)}, {}, "'g_idx' numbers groups 0 to 2; it has -1 to -1."),
        ({"g_idx": np.ones(96, np.float16)}, {}, "'g_idx' is F16; it is I32 or I64."),
        (
            {"g_idx": ORDER},
            {"desc_act": False},
            "has desc_act false, but 'g_idx' does not count groups of 32 in order",
        ),
        (
            {"g_idx": None},
            {"desc_act": True},
            "the config has desc_act, but no file has 'g_idx'. Download",
        ),
        ({}, {"checkpoint_format": "gptq", "format": "gptq_v2"}, "checkpoint_format and format are the same; the config has {"),
        ({}, {"dynamic": ["a"]}, "dynamic is an object of objects by patterns; the config has ['a']."),
        (
            {},
            {"dynamic": {"(": {}}},
            "the pattern '(' of dynamic is not a regular expression (missing ), ",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, Matrix(4, 32).tensors(**changes), config(**settings))


def test_without_a_config_and_an_index_groups_are_equally_long(tmp_path: Path) -> None:
    matrix = Matrix(4, 48)
    stored = values(checkpoint(tmp_path / "n", matrix.tensors(g_idx=None)), "gptq")[f"{UP}.weight"]
    assert (decoded(stored) == matrix.expected).all()
    text = refusal(tmp_path, Matrix(4, 20).tensors(g_idx=None), None, "gptq")
    assert (
        "'scales' has 5 groups for 96 columns, and no config says how long a group is. Give the folder with config.json."
        in text
    )


@pytest.mark.parametrize(
    ("bits", "settings"), [(5, {}), (6, {}), (7, {"checkpoint_format": "gptq_p"}), (3, {"checkpoint_format": "gptq_p"})]
)
def test_codes_in_planes_are_refused_by_name(bits: int, settings: dict[str, Any], tmp_path: Path) -> None:
    matrix = Matrix(bits, 32, version=2)
    stored = values(checkpoint(tmp_path / "m", matrix.tensors(), config(bits, **settings)))[f"{UP}.weight"]
    widths = "2, 4, 8" if bits in (3, 7) else "2, 3, 4, 8"
    said = rf"it has {bits} bits, which gptqmodel packs in planes; breccia reads {widths} bits. Convert the checkpoint that it"
    with pytest.raises(breccia.UnsupportedError, match=said):
        stored.tensor()


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", Matrix(4, 32).tensors(), config(checkpoint_format="marlin"))
    with pytest.raises(breccia.UnsupportedError, match="is 'gptq' with checkpoint_format 'marlin'.* known: GPTQ \\('gptq'\\)"):
        values(folder)


def test_a_value_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", Matrix(4, 32).tensors() | {f"{DOWN}.qweight": np.ones((4, 32), np.int32)}, config())
    with pytest.raises(breccia.CorruptFileError, match=f"'{DOWN}.qweight' is a part of GPTQ without the others: no file has"):
        values(folder)
