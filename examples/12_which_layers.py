"""Find the layers that quantization hurts, and give each tensor a recipe of its own, in as many bytes as one recipe takes.

The model is small and random, with a layer of outliers, and nothing is downloaded. For a model of your own, run
`breccia why llama llama-int4 --calibrate text.txt` and `breccia convert llama llama-mixed --target-bits 4.5`.

python examples/12_which_layers.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from breccia.bridges import convert, why

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
#: The layer whose weights get a few columns of outliers.
PLANTED = "model.layers.1.mlp.down_proj.weight"


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
        model.get_parameter(PLANTED)[:, ::128] *= 30  # one in each group of INT4
    model.save_pretrained(folder)


def main() -> None:
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (8, 64))  # in place of a text
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        dense, one, mixed = (folder / name for name in ("llama", "llama-int4", "llama-mixed"))
        save_model(dense)

        # One recipe for all. `why` quantizes each layer alone, and measures what the model's outputs lose.
        report = convert(dense, one, "int4", calibrate=ids, method="importance")
        found = why(dense, one, calibrate=ids, remedies=1)
        print(f"int4: {report.bits_per_parameter:.3f} bits per parameter, KL divergence {found.total:.3f} nats per token")
        for layer in found.layers[:3]:
            print(f"  {layer.name}: {layer.alone:.3f} alone, {100 * layer.lost:.1f} % of its energy is lost")
        worst = found.layers[0]
        print("the worst layer is the one with outliers:", worst.name == PLANTED)
        for remedy in worst.remedies:
            cheapest = " (the cheapest that helps)" if remedy == worst.cheapest else ""
            print(f"  {remedy.what}: {remedy.nbytes:+} bytes, {remedy.left:.3f} left{cheapest}")

        # As many bits by the same method, but a recipe for each tensor. The choice is also written, as a policy.
        report = convert(dense, mixed, target_bits=report.bits_per_parameter, calibrate=ids, method="importance")
        assert report.mix is not None
        counts = ", ".join(f"{count} {spec}" for spec, count in report.mix.counts.items())
        print(f"mixed: {report.mix.bits:.3f} bits per parameter, {counts}")
        left = why(dense, mixed, calibrate=ids, remedies=0).total
        print(f"mixed: KL divergence {left:.3f} nats per token")
        print("the mix loses less than half of it, in no more bytes:", left < found.total / 2)
        print((folder / "llama-mixed.policy.yaml").read_text())


if __name__ == "__main__":
    main()
