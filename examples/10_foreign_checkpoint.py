"""Open a checkpoint that another library quantized: inspect it, load a weight, keep its codes, decode it, quantize it anew.

The folder is small, in the format of GPTQ, and written here by hand. On the command line it is `breccia inspect gptq` and
`breccia convert gptq kept --recipe none`; for one of another library nothing changes.

python examples/10_foreign_checkpoint.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

import breccia
from breccia.bridges import compare, convert, load_checkpoint, save_safetensors

BITS = np.arange(8, dtype=np.uint32) * 4


def gptq(folder: Path, q: np.ndarray, scales: np.ndarray) -> Path:
    """A folder with one weight of 4-bit codes q (K, N), and a scale for each 128 of a column; the zero is 8."""
    k, n = q.shape
    words = (q.reshape(k // 8, 8, n).astype(np.uint32) << BITS[None, :, None]).sum(1, dtype=np.uint32)
    folder.mkdir()
    tensors = {
        "model.layers.0.mlp.up_proj.qweight": words.view(np.int32),
        "model.layers.0.mlp.up_proj.qzeros": np.full((k // 128, n // 8), 0x77777777, np.int32),  # stored minus one
        "model.layers.0.mlp.up_proj.scales": scales,
        "model.layers.0.mlp.up_proj.g_idx": (np.arange(k) // 128).astype(np.int32),
        "model.norm.weight": np.ones(k, np.float16),
    }
    save_safetensors(tensors, folder / "model.safetensors")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    (folder / "config.json").write_text(json.dumps({"dtype": "float16", "quantization_config": config}))
    return folder


def main() -> None:
    rng = np.random.default_rng(0)
    q, scales = rng.integers(0, 16, (256, 64)), rng.uniform(0.01, 0.02, (2, 64)).astype(np.float16)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = gptq(folder / "gptq", q, scales)

        # Values have the names of the model, and are read one by one; framework="torch" (jax, mlx) gives its tensors.
        checkpoint = load_checkpoint(source)
        print("dialects:", checkpoint.dialects)
        for name in checkpoint:
            header = checkpoint.header(name)  # nothing else is read for it
            print(name, header.shape, header.dtype or header.recipe.spec)
        weight = checkpoint["model.layers.0.mlp.up_proj.weight"]
        print(weight)
        by_hand = ((q - 8.0).reshape(2, 128, 64) * scales.astype(np.float64)[:, None]).reshape(256, 64).T
        print("decoded as GPTQ does:", np.array_equal(breccia.dequantize(weight), by_hand.astype(np.float32)))
        del weight  # the mapping, before its file goes

        # The same codes in breccia's files; decoded; and quantized again under a recipe that does not hold them.
        for recipe in ("none", "bf16", "mxfp8"):
            report = convert(source, folder / recipe, recipe)
            kept, size = len(report.codes_kept), report.bytes_out
            print(f"--recipe {recipe}: {size} bytes, codes of {kept} kept; {compare(source, folder / recipe).verdict}")


if __name__ == "__main__":
    main()
