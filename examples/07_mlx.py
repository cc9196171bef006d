"""Quantize an MLX model in place with any recipe, save its weights, and load them.

python examples/07_mlx.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

import breccia
import breccia_mlx


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(100, 128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))


def main() -> None:
    mx.random.seed(0)
    net, ids = model(), mx.arange(12)
    before = net(ids)

    # Like mlx.nn.quantize: linear and embedding layers are replaced, in place.
    breccia_mlx.quantize(net, "nvfp4")
    print(net.layers[1].weight.tensor)
    print("outputs:", breccia.metrics(before, net(ids)))

    # Codes and scales are ordinary parameters. Their names contain the recipe, so codes are never misread.
    for name, array in tree_flatten(net.layers[1].parameters()):
        print(f"{name}: {array.dtype} {array.shape}")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.safetensors")
        net.save_weights(path)
        again = model()
        breccia_mlx.quantize(again, "nvfp4")
        again.load_weights(path)
        print("the loaded model gives the same outputs:", mx.array_equal(again(ids), net(ids)).item())


if __name__ == "__main__":
    main()
