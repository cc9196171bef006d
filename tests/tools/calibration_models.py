"""Small models of transformers with random weights, token ids for them, and what their layers get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 2, "max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2 = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
_SLIDING = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
#: The class of a model, and its config.
MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig(**SIZES)),
    "tied": ("LlamaForCausalLM", transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig(**SIZES, **_EXPERTS)),
    "gemma3": ("Gemma3ForCausalLM", transformers.Gemma3TextConfig(**SIZES, **_SLIDING)),
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config(**_GPT2)),
    "bert": ("BertModel", transformers.BertConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"})),
}
IDS = np.random.default_rng(0).integers(0, 64, (6, 32))


def model(kind: str, seed: int = 0) -> Any:
    """A model whose norms are not all ones."""
    torch.manual_seed(seed)
    name, config = MODELS[kind]
    made = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter).exp())
    return made


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The folder of a model."""
    model(kind).to(dtype).save_pretrained(folder)
    return folder


def outputs(kind: str, folder: Path) -> torch.Tensor:
    """What a model computes of `IDS` with the weights of a checkpoint, decoded."""
    import breccia_torch

    made = model(kind)
    breccia_torch.load_model(made, folder)
    with torch.no_grad():
        found = made(torch.as_tensor(IDS))
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def share(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The error of outputs, as a share of them."""
    return float((found - expected).norm() / expected.norm())
