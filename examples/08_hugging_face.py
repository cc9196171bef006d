"""Convert a mixture-of-experts model of transformers and load it with `from_pretrained`, its weights still quantized.

The model is small and random, and nothing is downloaded. For a folder of your own, run
`breccia convert qwen qwen-nvfp4 --recipe nvfp4`.

python examples/08_hugging_face.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import breccia
import breccia_torch.hf  # noqa: F401  registers breccia with transformers
from breccia.bridges import convert
from breccia_torch.nn import ScaledWeight

CONFIG = Qwen3MoeConfig(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=64,
)


def main() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).eval()
    ids = torch.arange(16).reshape(1, 16)
    with tempfile.TemporaryDirectory() as temporary:
        dense, scaled = Path(temporary) / "qwen", Path(temporary) / "qwen-nvfp4"
        model.save_pretrained(dense)

        # Routers, embeddings, norms and the output head keep their precision. config.json names breccia and the recipe.
        report = convert(dense, scaled, "nvfp4")
        print(f"quantized {len(report.quantized)} tensors at {report.bits_per_parameter:.2f} bits per parameter")
        loaded = AutoModelForCausalLM.from_pretrained(scaled)

    mlp = loaded.model.layers[0].mlp
    print("experts:", mlp.experts.gate_up_proj)
    print("router:", mlp.gate)
    print(f"memory: {model.get_memory_footprint()} bytes -> {loaded.get_memory_footprint()} bytes")
    weights = [m.tensor for m in loaded.modules() if isinstance(m, ScaledWeight)]
    print(f"{len(weights)} weights are still quantized, such as {weights[0]}")
    with torch.no_grad():
        before, after = model(ids).logits, loaded(ids).logits
    print("logits:", breccia.metrics(before, after))


if __name__ == "__main__":
    main()
