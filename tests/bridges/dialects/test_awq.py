"""AWQ as gemm: packed here, read exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_words import checkpoint, decoded, values, words

import breccia

RNG = np.random.default_rng(6)
UP = "model.layers.0.mlp.up_proj"
#: The columns of a word from its lowest bits up.
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Matrix:
    """A matrix (N, K) as AWQ has it, and its values."""

    def __init__(self, group: int = 32, n: int = 40, k: int = 96) -> None:
        self.codes = RNG.integers(0, 16, (k, n))
        self.zeros = RNG.integers(0, 16, (k // group, n))
        self.scales = RNG.uniform(0.001, 0.1, (k // group, n)).astype(np.float16)
        self.group = group

    def tensors(self, **changes: Any) -> dict[str, Any]:
        parts = {"qweight": interleaved(self.codes), "qzeros": interleaved(self.zeros), "scales": self.scales} | changes
        return {f"{UP}.{end}": part for end, part in parts.items()}

    @property
    def expected(self) -> np.ndarray:
        zeros, scales = (np.repeat(part, self.group, 0) for part in (self.zeros, self.scales.astype(np.float32)))
        return ((self.codes - zeros).astype(np.float32) * scales).T


def interleaved(codes: np.ndarray, bits: int = 4) -> np.ndarray:
    return words(codes.reshape(len(codes), -1, 8)[..., ORDER].reshape(codes.shape), bits)


def config(**settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"} | settings}


def test_codes_scales_and_zero_points_are_read_exactly(tmp_path: Path) -> None:
    matrix = Matrix()
    stored = values(checkpoint(tmp_path / "m", matrix.tensors(), config()))
    assert list(stored) == [f"{UP}.weight"]
    st = stored[f"{UP}.weight"].tensor()
    assert st.recipe == breccia.INT4Scaling(group_size=32, signed=False, symmetric=False)
    assert st.shape == (40, 96) and st.layout == breccia.PerBlockK(32)
    assert st.scale.tobytes() == matrix.scales.T.tobytes() and (st.zero_point == matrix.zeros.T).all()
    assert (decoded(stored[f"{UP}.weight"]) == matrix.expected).all()


def test_the_first_word_is_as_the_definition_says(tmp_path: Path) -> None:
    """Word 0x76543210 has code 1 second, which is column 2."""
    qweight = np.full((32, 1), 0x76543210, np.int32)
    tensors = {"qweight": qweight, "qzeros": np.zeros((1, 1), np.int32), "scales": np.ones((1, 8), np.float16)}
    folder = checkpoint(tmp_path / "m", {f"{UP}.{end}": part for end, part in tensors.items()}, config())
    assert decoded(values(folder)[f"{UP}.weight"])[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(
    "files",
    [
        {"config": config(group_size=-1)},
        {"config": {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 96}}},
        {"config": {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 96, "checkpoint_format": "gemm"}}},
        {"quant_config": {"zero_point": True, "q_group_size": 96, "w_bit": 4, "version": "GEMM"}},
        {},
    ],
)
def test_configs_of_every_kind_and_none(files: dict[str, Any], tmp_path: Path) -> None:
    matrix = Matrix(96)
    stored = values(checkpoint(tmp_path / "m", matrix.tensors(), **files))[f"{UP}.weight"]
    assert stored.dialect.name == "awq" and (decoded(stored) == matrix.expected).all()


def test_an_odd_number_of_columns_is_padded(tmp_path: Path) -> None:
    matrix = Matrix(33, k=33)
    stored = values(checkpoint(tmp_path / "m", matrix.tensors(), config(group_size=-1)))[f"{UP}.weight"]
    assert stored.tensor().shape == (40, 33) and (decoded(stored) == matrix.expected).all()


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({}, {"bits": 8}, "the config has bits=8, but the shapes of 'qweight' and 'scales' are those of 4 bits."),
        ({}, {"group_size": 64}, "'scales' has 3 groups; 96 columns in groups of 64 need 2."),
        ({"qzeros": np.ones((3, 4), np.int32)}, {}, "'qzeros' has shape [3, 4]; its other parts need [3, 5]."),
        ({"scales": np.ones((3, 36), np.float16)}, {}, "'scales' has 36 columns; 5 words of 'qweight' fit no such number"),
        ({"scales": np.ones(40, np.float16)}, {}, "are matrices; they have shapes [96, 5], [3, 5], [40]."),
        ({"scales": np.full((3, 40), np.inf, np.float16)}, {}, "'scales' has 120 scales that are not finite; the first is inf"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    stored = values(checkpoint(tmp_path / "m", Matrix().tensors(**changes), config(**settings)))[f"{UP}.weight"]
    with pytest.raises(breccia.DialectError) as caught:
        stored.tensor()
    assert said in str(caught.value) and f"{UP}.weight (AWQ): " in str(caught.value)


def test_other_widths_and_versions_are_refused_by_name(tmp_path: Path) -> None:
    codes = RNG.integers(0, 256, (96, 40))
    tensors = Matrix().tensors(qweight=interleaved(codes, 8), qzeros=interleaved(codes[:3], 8))
    stored = values(checkpoint(tmp_path / "m", tensors, config(bits=8)))[f"{UP}.weight"]
    with pytest.raises(breccia.UnsupportedError, match="it has 8 bits; AWQ as gemm has 4. Convert the checkpoint that it was"):
        stored.tensor()
    with pytest.raises(breccia.UnsupportedError, match="is 'awq' with version 'gemv'.* known: AWQ \\('awq'\\)"):
        values(checkpoint(tmp_path / "n", Matrix().tensors(), config(version="gemv")))
