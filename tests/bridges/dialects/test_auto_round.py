"""AutoRound: packed here as GPTQ or AWQ, by packing_format, and read exactly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_words import checkpoint, decoded, values, words

import breccia

RNG = np.random.default_rng(7)
UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"
AS_STORED, MINUS_ONE, AWQ = "auto_round", "auto_round:auto_gptq", "auto_round:auto_awq"


class Matrix:
    """A matrix (64, 96) in groups of 32 as AutoRound has it, and its values."""

    def __init__(self, bits: int, packing: str, module: str = UP) -> None:
        self.codes, self.zeros = RNG.integers(0, 1 << bits, (96, 64)), RNG.integers(1, 1 << bits, (3, 64))
        self.scales = RNG.uniform(0.001, 0.1, (3, 64)).astype(np.float16)
        if packing in (AWQ, "auto_round:awq"):
            order = np.arange(64).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
            qweight, qzeros = words(self.codes[:, order], bits), words(self.zeros[:, order], bits)
        else:
            qweight = np.ascontiguousarray(words(self.codes.T, bits).T)
            qzeros = words(self.zeros - (packing in (MINUS_ONE, "auto_round:gptq")), bits)
        self.tensors: dict[str, Any] = {
            f"{module}.qweight": qweight,
            f"{module}.qzeros": qzeros,
            f"{module}.scales": self.scales,
        }

    @property
    def expected(self) -> np.ndarray:
        zeros, scales = (np.repeat(part, 32, 0) for part in (self.zeros, self.scales.astype(np.float32)))
        return ((self.codes - zeros).astype(np.float32) * scales).T


def config(bits: int, packing: str | None, **settings: Any) -> dict[str, Any]:
    own = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "data_type": "int"}
    return {"quantization_config": own | ({"packing_format": packing} if packing else {}) | settings}


@pytest.mark.parametrize(
    ("packing", "bits"),
    [
        *((packing, bits) for packing in (AS_STORED, MINUS_ONE) for bits in range(2, 9)),
        *((AWQ, bits) for bits in range(4, 8)),
        *((f"auto_round:{name}", 4) for name in ("gptqmodel", "gptq", "awq")),
    ],
)
def test_every_width_of_every_packing_is_read_exactly(packing: str, bits: int, tmp_path: Path) -> None:
    matrix = Matrix(bits, packing)
    stored = values(checkpoint(tmp_path / "m", matrix.tensors, config(bits, packing)))
    assert list(stored) == [f"{UP}.weight"]
    st = stored[f"{UP}.weight"].tensor()
    kind = {4: breccia.INT4Scaling, 8: breccia.INT8Scaling}.get(bits, partial(breccia.INTScaling, bits))
    assert st.recipe == kind(group_size=32, signed=False, scale_dtype="fp16", symmetric=False)
    assert st.data.tobytes() == words(matrix.codes.T, bits).tobytes()
    assert (st.zero_point == matrix.zeros.T).all() and st.scale.tobytes() == matrix.scales.T.tobytes()
    assert (decoded(stored[f"{UP}.weight"]) == matrix.expected).all()


@pytest.mark.parametrize("key", [DOWN, ".*down_proj.*", r".*mlp\.down"])
def test_extra_config_changes_settings_of_modules(key: str, tmp_path: Path) -> None:
    """An exact name counts before patterns, and these in their order; one of nothing is none."""
    wide, narrow = Matrix(8, AS_STORED, DOWN), Matrix(3, AS_STORED)
    extra = {".*layers.0.mlp.*": {}, key: {"bits": 8}, ".*mlp.*": {"bits": 3}, "lm_head": {"bits": 16}}
    folder = checkpoint(tmp_path / "m", wide.tensors | narrow.tensors, config(4, AS_STORED, extra_config=extra))
    stored = values(folder)
    assert (decoded(stored[f"{DOWN}.weight"]) == wide.expected).all()
    assert (decoded(stored[f"{UP}.weight"]) == narrow.expected).all()


def test_a_module_of_16_bits_is_not_quantized(tmp_path: Path) -> None:
    settings = config(4, AS_STORED, extra_config={UP: {"bits": 16}})
    stored = values(checkpoint(tmp_path / "m", Matrix(4, AS_STORED).tensors, settings))[f"{UP}.weight"]
    with pytest.raises(breccia.CorruptFileError, match=f"config leaves {UP} as it is, but the files have {UP}.qweight"):
        stored.tensor()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {},
            "'qzeros' has 1 codes 15, of zero-points minus one. AutoRound reads them as 16, gptqmodel as 0. Give",
        ),
        (
            {"packing_format": None},
            "the config has no packing_format, which says whether 'qzeros' has zero-points minus one.",
        ),
        ({"extra_config": {UP: 8}}, "extra_config is an object of objects by modules; the config has {'model.layers.0"),
        ({"extra_config": {"(": {"bits": 8}}}, "the key '(' of extra_config is not a regular expression (missing ), unterm"),
        ({"bits": 3}, "the config has bits=3, but the shapes of 'qzeros' and 'scales' are those of 4 bits."),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    matrix = Matrix(4, MINUS_ONE)
    matrix.tensors[f"{UP}.qzeros"] = words(np.pad([15], (0, 191)).reshape(3, 64), 4)
    folder = checkpoint(tmp_path / "m", matrix.tensors, config(**{"bits": 4, "packing": MINUS_ONE} | settings))
    stored = values(folder)[f"{UP}.weight"]
    with pytest.raises(breccia.DialectError) as caught:
        stored.tensor()
    assert said in str(caught.value) and f"{UP}.weight (AutoRound): " in str(caught.value)


def test_without_packing_format_the_dialect_is_given(tmp_path: Path) -> None:
    for name, packing in (("gptq", MINUS_ONE), ("gptq_v2", AS_STORED), ("awq", AWQ)):
        matrix = Matrix(4, packing)
        stored = values(checkpoint(tmp_path / name, matrix.tensors, config(4, None)), name)
        assert (decoded(stored[f"{UP}.weight"]) == matrix.expected).all()


def test_weights_for_activations_of_8_bits_are_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", Matrix(4, AS_STORED).tensors, config(4, AS_STORED, act_bits=8))
    with pytest.raises(breccia.UnsupportedError, match="act_bits=8: AutoRound quantizes such weights twice, and no recipe"):
        values(folder)[f"{UP}.weight"].tensor()


def test_other_packings_are_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", Matrix(4, AS_STORED).tensors, config(4, "auto_round:fp8_static"))
    with pytest.raises(
        breccia.UnsupportedError, match="is 'auto-round' with packing_format 'auto_round:fp8_static'.* known: A"
    ):
        values(folder)
    stored = values(checkpoint(tmp_path / "n", Matrix(4, AWQ).tensors, config(4, AS_STORED)))[f"{UP}.weight"]
    with pytest.raises(breccia.DialectError, match="'qweight' has shape \\[96, 8\\]; its other parts need \\[96, 64\\]"):
        stored.tensor()
