"""Folders that other libraries quantized, and the models that torch and transformers make of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import foreign_models
import numpy as np
import torch
import transformers
from foreign_models import KINDS, SMALL, SMOLLM2
from transformers import AutoConfig, AutoModelForCausalLM

import breccia
from breccia import ScaledTensor
from breccia.bridges import load_checkpoint
from breccia_torch.nn import ScaledWeight

#: How a Llama may be stored.
LLAMAS = [kind for kind, how in KINDS.items() if how.module]
_MOE: dict[str, Any] = {
    **{key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    "intermediate_size": 192,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32,
}
#: Models with experts, and how they are stored. transformers renames Mixtral's.
EXPERTS: dict[str, tuple[Any, str]] = {
    "qwen3_moe": (
        transformers.Qwen3MoeConfig(
            **_MOE, moe_intermediate_size=64, num_experts=12, num_experts_per_tok=2, decoder_sparse_step=1
        ),
        "nvfp4",
    ),
    "mixtral": (transformers.MixtralConfig(**_MOE, num_local_experts=4, num_experts_per_tok=2), "gptq"),
    "gpt_oss": (transformers.GptOssConfig(**_MOE, num_local_experts=4, num_experts_per_tok=2), "gpt_oss"),
}


def llama_folder(path: Path, kind: str, **options: Any) -> Path:
    """A new folder of a small random Llama."""
    foreign_models.write(path / kind, foreign_models.llama(SMALL), SMALL, kind, **options)
    return path / kind


def experts_folder(path: Path, name: str) -> Path:
    """A new folder of a small random model of `EXPERTS`."""
    torch.manual_seed(0)
    config, kind = EXPERTS[name]
    AutoModelForCausalLM.from_config(config).save_pretrained(path / "dense")
    weights = {n: t.float().numpy() for n, t in load_checkpoint(path / "dense", framework="torch").items()}
    written = json.loads((path / "dense" / "config.json").read_text())
    foreign_models.write(path / "scaled", weights, written, kind, shards=2)
    return path / "scaled"


def smollm2_loaded(way: str, kind: str, path: Path) -> tuple[Path, dict[str, int]]:
    """A new folder of SmolLM2's size in shards, and what tests/tools/loading_memory.py says of loading it."""
    foreign_models.write(path / "m", foreign_models.llama(SMOLLM2), SMOLLM2, kind, shards=3)
    foreign_models.write(path / "m-small", foreign_models.llama(SMALL), SMALL, kind, shards=3)
    command = [sys.executable, str(Path(__file__).with_name("loading_memory.py")), way, str(path / "m")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return path / "m", json.loads(done.stdout)


def config_of(path: Path) -> Any:
    """The config of a folder, without what transformers would quantize by."""
    return AutoConfig.from_pretrained(path, quantization_config=None)


def on_meta(path: Path) -> Any:
    """A model of a folder's config, without values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(path)).eval()


def assert_holds(model: Any, path: Path) -> None:
    """The model has the values of the files, decoded by NumPy, and the weights of its linear layers are still quantized."""
    held = {name: module for name, module in model.named_modules() if isinstance(module, ScaledWeight)}
    checkpoint = load_checkpoint(path)
    assert checkpoint.dialects and set(held) == {name for name in checkpoint if checkpoint.header(name).recipe is not None}
    for name, value in checkpoint.items():
        if isinstance(value, ScaledTensor):
            assert held[name].recipe == value.recipe
            assert np.array_equal(breccia.dequantize(held[name].tensor).numpy(), breccia.dequantize(value)), name
        elif not name.endswith("input_scale"):
            found = model.get_parameter(name)
            assert torch.equal(found, torch.from_numpy(value.astype(np.float32)).to(found.dtype)), name
