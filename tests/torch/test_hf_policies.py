"""Several recipes in one model of transformers: converted folders, `quantize_`, and models quantized while they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("breccia_bridges")

import torch
from hf_models import logits
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import breccia
import breccia_torch
from breccia.bridges import convert
from breccia_torch.hf import BrecciaConfig
from breccia_torch.nn import ScaledWeight

pytestmark = [
    pytest.mark.together,
    pytest.mark.usefixtures("no_progress_bars"),
    pytest.mark.filterwarnings("ignore"),  # of transformers
]

POLICY = {"*.mlp.*": "nvfp4", "*.o_proj.*": "keep", "default": "mxfp8"}


def saved(folder: Path) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def recipes(model: nn.Module) -> dict[str, str]:
    return {name: m.recipe.name for name, m in model.named_modules() if isinstance(m, ScaledWeight)}


def by_convert(folder: Path) -> Any:
    saved(folder / "dense")
    convert(folder / "dense", folder / "small", POLICY)
    return AutoModelForCausalLM.from_pretrained(folder / "small")


def by_loading(folder: Path) -> Any:
    saved(folder / "dense")
    return AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=BrecciaConfig(breccia.Policy.of(POLICY)))


def by_a_file(folder: Path) -> Any:
    pytest.importorskip("yaml")
    saved(folder / "dense")
    (folder / "policy.yaml").write_text("".join(f'"{pattern}": {rule}\n' for pattern, rule in POLICY.items()))
    config = BrecciaConfig(folder / "policy.yaml", modules_to_not_convert=["q_proj"])
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=config)
    assert not any("q_proj" in name for name in recipes(model))
    return model


@pytest.mark.parametrize("way", [by_convert, by_loading, by_a_file])
def test_each_weight_has_the_recipe_of_the_policy_and_the_model_is_saved_whole(
    way: Callable[[Path], Any], tmp_path: Path
) -> None:
    expected, model = saved(tmp_path / "other"), way(tmp_path)
    breccia_torch.quantize_(expected, POLICY)
    wanted = {name: recipe for name, recipe in recipes(expected).items() if way is not by_a_file or "q_proj" not in name}
    assert recipes(model) == wanted and set(wanted.values()) == {"nvfp4", "mxfp8"}
    if way is not by_a_file:
        assert torch.equal(logits(model), logits(expected))
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert recipes(again) == wanted and torch.equal(logits(again), logits(model))


def test_two_names_of_one_parameter_with_two_recipes_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    model["b"].weight = model["a"].weight
    message = (
        r"^quantize_: a\.weight and b\.weight are one parameter, and the policy has nvfp4 for the first and mxfp8 for the "
        r"second\. Give both one recipe, or untie them: b\.weight = nn\.Parameter\(b\.weight\.clone\(\)\)\.$"
    )
    with pytest.raises(breccia.OptionError, match=message):
        breccia_torch.quantize_(model, {"a.*": "nvfp4", "b.*": "mxfp8"})
    assert breccia_torch.quantize_(model, {"a.*": "nvfp4", "b.*": "nvfp4"}).recipe.name == "nvfp4"


def test_contracted_axes_in_a_policy_for_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        breccia.OptionError, match=r"the rule of 'lm_head\*' has blocks along axes \(0,\); files have them along"
    ):
        convert(tmp_path, tmp_path / "out", {"lm_head*": ("nvfp4", 0)})


def test_a_preset_stands_in_the_place_of_a_recipe() -> None:
    assert BrecciaConfig("int4-except-attention").recipe == breccia.recipe("int4")
    model = nn.ModuleDict({name: nn.Linear(256, 256) for name in ("self_attn", "mlp")})
    summary = breccia_torch.quantize_(model, "int4-except-attention")
    assert summary.quantized == ("mlp.weight",) and summary.left == {"self_attn.weight": "excluded"}
    with pytest.raises(
        breccia.OptionError, match=r"a function chooses the parameters, and so do the patterns of the preset 'nvfp4"
    ):
        breccia_torch.quantize_(nn.Sequential(nn.Linear(64, 64)), "nvfp4-mlp", filter_fn=lambda layer, name: True)
