"""Save scaled tensors to a safetensors file that any safetensors reader opens, and load them back mapped.

python examples/03_checkpoint_with_scale.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import breccia
from breccia.bridges import load_safetensors, save_safetensors


def main() -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "attention.weight": breccia.cast(rng.standard_normal((64, 256)).astype(np.float32), breccia.NVFP4BlockScaling()),
        "mlp.weight": breccia.cast(rng.standard_normal((256, 64)).astype(np.float32), breccia.INT4Scaling(group_size=32)),
        "norm.weight": np.ones(64, np.float32),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_safetensors(tensors, path, {"note": "scales travel with their codes"})
        print(f"wrote {path.stat().st_size} bytes")

        # Mapped, not read: bytes come from the disk when they are touched. framework="torch" (jax, mlx) works the same.
        loaded = load_safetensors(path)
        for name, tensor in loaded.items():
            print(name, tensor if isinstance(tensor, breccia.ScaledTensor) else f"{tensor.dtype} {tensor.shape}")

        for name in ("attention.weight", "mlp.weight"):
            same = np.array_equal(breccia.dequantize(loaded[name]), breccia.dequantize(tensors[name]))
            print(f"{name}: decodes to the same values: {same}")


if __name__ == "__main__":
    main()
