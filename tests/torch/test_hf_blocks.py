"""A model that runs block by block computes what the whole model does, and only one block's weights are in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calibration_models import IDS, MODELS, model, saved

from breccia import UnknownNameError, UnsupportedError
from breccia.bridges import load_checkpoint, save_safetensors
from breccia_torch.calibration.folding import Folded, folds
from breccia_torch.hf.blocks import Blocks

pytestmark = pytest.mark.usefixtures("no_progress_bars")


def opened(folder: Path) -> Blocks:
    return Blocks(folder, load_checkpoint(folder, framework="torch"), torch.device("cpu"))


def last_norm(made: Any) -> Any:
    inner = getattr(made, made.base_model_prefix, made)
    return getattr(inner, "norm", getattr(inner, "ln_f", lambda x: x))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if kind not in ("llama", "qwen3_moe") else []) for kind in MODELS]
)
@torch.no_grad()
def test_blocks_compute_what_the_model_does(kind: str, tmp_path: Path) -> None:
    blocks, made = opened(saved(kind, tmp_path / "m")), model(kind)
    ids = torch.as_tensor(IDS[:2])
    expected = made(ids, output_hidden_states=True).hidden_states[-1]
    with blocks.outside():
        hidden, arguments = blocks.embed(ids)
    for n, (name, block) in enumerate(zip(blocks.names, blocks.blocks, strict=True)):
        assert all(p.device.type == "meta" for p in blocks.model.parameters())
        blocks.fill(block, name)
        hidden = torch.stack([blocks.run(n, row, arguments[n]) for row in hidden])
        blocks.empty(block)
    found = last_norm(made)(hidden)
    # Sums of at most 96 FP32 products in another order, some dozens of them after each other.
    assert float((found - expected).abs().max()) <= 96 * 32 * 2.0**-24 * float(expected.abs().max())


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "m")
    checkpoint = load_checkpoint(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    save_safetensors({n: checkpoint[n] for n in checkpoint if n != name}, folder / "model.safetensors", force=True)
    blocks = opened(folder)
    with pytest.raises(UnknownNameError, match=r"lacks model.layers.1.mlp.up_proj.weight, which LlamaForCausalLM has. Check"):
        blocks.fill(blocks.blocks[1], blocks.names[1])


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "m")
    (folder / "config.json").unlink()
    with pytest.raises(
        UnsupportedError, match=r"has no config.json that describes it to transformers. Give the model's folder"
    ):
        opened(folder)


@torch.no_grad()
def test_scales_are_folded_where_the_block_computes_the_same_after_it(tmp_path: Path) -> None:
    blocks = opened(saved("llama", tmp_path / "m"))
    with blocks.outside():
        hidden, arguments = blocks.embed(torch.as_tensor(IDS[:1]))
    block, name = blocks.blocks[0], blocks.names[0]
    blocks.fill(block, name)

    def run() -> torch.Tensor:
        return blocks.run(0, hidden[0], arguments[0])

    found, before = folds(block, name, run), run()
    assert {(fold.source.rpartition(".")[2], len(fold.layers)) for fold in found} == {
        ("input_layernorm", 3), ("post_attention_layernorm", 2), ("v_proj", 1), ("up_proj", 1),
    }  # fmt: skip
    scales = torch.rand(64) * 8 + 0.1
    for fold in found:
        layers = [blocks.model.get_submodule(layer) for layer in fold.layers]
        folded = Folded(
            blocks.model.get_submodule(fold.source), layers, torch.rand(layers[0].in_features) + 0.1, torch.bfloat16, 0.0
        )
        assert (folded.scales != 1).any()
    # As above; what rounding the norm to BF16 changes is in the scales.
    assert float((run() - before).abs().max()) <= 96 * 32 * 2.0**-24 * float(before.abs().max())
    wrong = Folded(blocks.model.get_submodule(f"{name}.input_layernorm"), [], scales, torch.float32, 0.0)
    assert float((run() - before).abs().max()) > 2.0**-10 * float(before.abs().max())
    wrong.undo()
    assert float((run() - before).abs().max()) <= 96 * 32 * 2.0**-24 * float(before.abs().max())
