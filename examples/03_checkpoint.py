"""Convert a checkpoint, measure the loss of accuracy, load it; then write a file of scaled tensors of your own.

On the command line the first part is `breccia convert model model-nvfp4 --recipe nvfp4` and
`breccia compare model model-nvfp4`.

python examples/03_checkpoint.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import breccia
from breccia.bridges import compare, convert, load_safetensors, save_safetensors


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        # A folder as Hugging Face lays it out: config.json and safetensors files, here one with two tensors.
        dense, scaled = folder / "model", folder / "model-nvfp4"
        dense.mkdir()
        (dense / "config.json").write_text("{}")
        save_safetensors({"mlp.weight": normal(128, 256), "norm.weight": np.ones(256, np.float32)}, dense / "model.safetensors")

        # Matrices are quantized; embeddings, norms and output heads keep their precision.
        report = convert(dense, scaled, "nvfp4")
        print("quantized:", [t.name for t in report.quantized], f"at {report.bits_per_parameter:.2f} bits per parameter")
        print(f"kept: {report.reasons}")
        print(f"SQNR of the converted folder: {compare(dense, scaled).sqnr:.1f} dB")
        for name, tensor in load_safetensors(scaled).items():
            print(name, tensor if isinstance(tensor, breccia.ScaledTensor) else f"{tensor.dtype} {tensor.shape}")

        # A file of your own may mix recipes and plain arrays. Any safetensors reader opens it.
        tensors = {"a": breccia.cast(normal(64, 256), "nvfp4"), "b": breccia.cast(normal(256, 64), "int4,group_size=32")}
        path = folder / "own.safetensors"
        save_safetensors({**tensors, "norm": np.ones(64, np.float32)}, path, {"note": "scales travel with their codes"})

        # Mapped, not read: bytes come from the disk when they are touched. framework="torch" (jax, mlx) works the same.
        loaded = load_safetensors(path)
        for name, tensor in tensors.items():
            print(f"{name}: the same bytes after loading: {breccia.bytes_equal(loaded[name], tensor)}")
        del loaded  # the mapping, before its file goes


if __name__ == "__main__":
    main()
