"""Folders of whole models in shards, as tests/tools/foreign_models.py writes them for every framework's loader."""

from __future__ import annotations

from pathlib import Path

import foreign_models
import numpy as np
import pytest

import breccia
from breccia.bridges import load_checkpoint


@pytest.mark.parametrize("kind", [kind for kind, how in foreign_models.KINDS.items() if how.module])
def test_a_sharded_model_decodes_to_what_was_quantized(kind: str, tmp_path: Path) -> None:
    weights = foreign_models.llama(foreign_models.SMALL)
    files = foreign_models.write(tmp_path / "m", weights, foreign_models.SMALL, kind, shards=6)
    checkpoint = load_checkpoint(tmp_path / "m")
    assert set(checkpoint) == set(weights) and len(set(files.values())) == 6
    stems = {(name.rpartition(".")[0], file) for name, file in files.items()}
    assert len(stems) > len({stem for stem, _ in stems}), "no value is spread over shards"
    for name, w in weights.items():
        st = checkpoint[name]
        assert isinstance(st, breccia.ScaledTensor) == foreign_models.is_quantized(name)
        if foreign_models.is_quantized(name):
            expected = breccia.dequantize(breccia.cast(w, foreign_models.KINDS[kind].recipe))
            assert np.array_equal(breccia.dequantize(st), expected)


def test_experts_of_gpt_oss_are_parameters_of_the_model(tmp_path: Path) -> None:
    name, w = "model.layers.0.mlp.experts.down_proj", np.random.default_rng(0).standard_normal((2, 64, 96), np.float32)
    foreign_models.write(tmp_path / "m", {name: w}, {}, "gpt_oss")
    expected = breccia.dequantize(breccia.cast(w, "mxfp4", axis=-2))
    assert np.array_equal(breccia.dequantize(load_checkpoint(tmp_path / "m")[name]), expected)
