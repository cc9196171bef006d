"""Families of transformers' models: `quantize_` and `convert` take the same weights, and the quantized model runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("breccia_bridges")

import torch
from families import FAMILIES, FIRST, inputs, made
from marks import long_but
from torch.nn import functional
from transformers import AutoModel
from transformers.core_model_loading import revert_weight_conversion

import breccia_torch
import breccia_torch.hf  # registers with transformers
from breccia.bridges import convert
from breccia_torch.nn import ScaledLinear, ScaledWeight

pytestmark = [
    pytest.mark.together,
    pytest.mark.usefixtures("no_progress_bars"),
    pytest.mark.filterwarnings("ignore"),  # of transformers
]


def saved_names(model: Any) -> dict[str, set[str]]:
    """The names under which `save_pretrained` stores each parameter: those of experts become several."""
    return {name: set(revert_weight_conversion(model, {name: p.detach()})) for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", long_but(FIRST, FAMILIES))
def test_quantize_and_convert_take_the_same_weights_and_the_model_runs(family: str, tmp_path: Path) -> None:
    model, given = made(family), inputs(family)
    with torch.no_grad():
        expected = model(**given).last_hidden_state
    model.save_pretrained(tmp_path / "dense")
    names = saved_names(model)
    report = convert(tmp_path / "dense", tmp_path / "small", "int8", dry_run=True)
    summary = breccia_torch.quantize_(model, "int8")
    assert {t.name for t in report.quantized} == {saved for name in summary.quantized for saved in names[name]}
    assert summary.quantized
    with torch.no_grad():
        found = model(**given).last_hidden_state
    # INT8 weights have an SQNR over 30 dB; a layer of random values in its place would give a cosine near 0
    assert functional.cosine_similarity(found.flatten(), expected.flatten(), 0) > 0.9


@pytest.mark.parametrize("family", ["bloom", "jamba", "mamba", "wavlm", "mobilebert", "granitemoe"])
def test_models_that_read_their_weights_load_what_convert_wrote(family: str, tmp_path: Path) -> None:
    model = made(family)
    model.save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "small", "int8")
    breccia_torch.quantize_(model, "int8")
    found, given = AutoModel.from_pretrained(tmp_path / "small").eval(), inputs(family)
    layers = [{name for name, m in each.named_modules() if isinstance(m, ScaledLinear)} for each in (found, model)]
    assert layers[0] == layers[1] != set()
    values, expected = (
        {name: m.decoded() for name, m in each.named_modules() if isinstance(m, ScaledWeight)} for each in (found, model)
    )
    assert values.keys() == expected.keys() and all(torch.equal(values[name], expected[name]) for name in expected)
    with torch.no_grad():
        # Experts stored in parts are multiplied by another kernel. At most 256 FP32 products in another order: 256 * 2**-24
        torch.testing.assert_close(found(**given).last_hidden_state, model(**given).last_hidden_state, rtol=1.6e-5, atol=1.6e-5)
