"""Quantize a PyTorch model in place, save it, and load it into an empty model.

python examples/05_torch_model.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import breccia_torch


def model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(100, 128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).eval()


def main() -> None:
    torch.manual_seed(0)
    net, ids = model(), torch.arange(12)
    with torch.no_grad():
        before = net(ids)

        # Every nn.Linear becomes a ScaledLinear, whose weight is a ScaledTensor.
        print(breccia_torch.quantize_(net, "nvfp4"))
        print(net[1])
        print(net[1].weight.tensor)
        after = net(ids)
    print(f"cosine similarity of the outputs: {nn.functional.cosine_similarity(before.ravel(), after.ravel(), dim=0):.3f}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        breccia_torch.save_model(net, path)
        print(f"saved {path.stat().st_size} bytes")

        # The file names each layer's recipe. So it loads into a model as it was before quantize_, here one without memory.
        with torch.device("meta"):
            empty = model()
        breccia_torch.load_model(empty, path)
    with torch.no_grad():
        print("the loaded model gives the same outputs:", torch.equal(empty(ids), after))


if __name__ == "__main__":
    main()
