"""gpt-oss: MXFP4 experts, packed here, read exactly; the model's parameter is the transpose of the stored matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from packed_words import checkpoint, decoded, values

import breccia

RNG = np.random.default_rng(8)
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
CONFIG = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def experts() -> tuple[dict[str, Any], np.ndarray]:
    """Tensors of 2 experts (24, 96), and their values."""
    codes, scales = RNG.integers(0, 16, (2, 24, 96)), RNG.integers(100, 140, (2, 24, 3)).astype(np.uint8)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).astype(np.uint8).reshape(2, 24, 3, 16)
    factors = np.exp2(scales.astype(np.float32) - 127)
    tensors = {
        f"{EXPERTS}_blocks": blocks,
        f"{EXPERTS}_scales": scales,
        f"{EXPERTS}_bias": np.ones((2, 24), ml_dtypes.bfloat16),
    }
    return tensors, E2M1[codes] * np.repeat(factors, 32, -1)


@pytest.mark.parametrize("config", [CONFIG, None])
def test_experts_are_read_exactly_and_transposed(config: Any, tmp_path: Path) -> None:
    tensors, expected = experts()
    stored = values(checkpoint(tmp_path / "m", tensors, config))
    assert list(stored) == [EXPERTS], "the bias is a plain tensor"
    assert stored[EXPERTS].shape == (2, 96, 24) and stored[EXPERTS].form.shape == (2, 24, 96)
    st = stored[EXPERTS].tensor()
    assert st.recipe == breccia.MXFP4BlockScaling() and st.shape == (2, 96, 24) and st.axis == -2
    assert (decoded(stored[EXPERTS]) == expected.swapaxes(-1, -2)).all()
    assert st.mT.data.tobytes() == tensors[f"{EXPERTS}_blocks"].tobytes()
    assert st.mT.scale.tobytes() == tensors[f"{EXPERTS}_scales"].tobytes()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"_blocks": np.ones((2, 24, 48), np.uint8)},
            "'_blocks' has shape [2, 24, 48]; it is (experts, N, K / 32, 16), 32",
        ),
        ({"_scales": np.ones((2, 24, 2), np.uint8)}, "'_scales' has shape [2, 24, 2]; its other parts need [2, 24, 3]."),
        ({"_scales": np.full((2, 24, 3), 255, np.uint8)}, "'_scales' has 144 scales that are not finite; the first is nan"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    tensors = experts()[0] | {f"{EXPERTS}{end}": part for end, part in changes.items()}
    stored = values(checkpoint(tmp_path / "m", tensors, CONFIG))[EXPERTS]
    with pytest.raises(breccia.DialectError) as caught:
        stored.tensor()
    assert said in str(caught.value) and f"{EXPERTS} (MXFP4, as gpt-oss): " in str(caught.value)


def test_blocks_without_scales_are_refused(tmp_path: Path) -> None:
    tensors = experts()[0]
    del tensors[f"{EXPERTS}_scales"]
    with pytest.raises(breccia.CorruptFileError, match=f"'{EXPERTS}_blocks' is a part of MXFP4, as gpt-oss without the others"):
        values(checkpoint(tmp_path / "m", tensors, CONFIG))
