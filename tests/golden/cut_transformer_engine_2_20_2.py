"""Cuts the golden tiles of TransformerEngine out of a recording of its quantizers on a GPU (README.md beside the tiles).

    python tests/golden/cut_transformer_engine_2_20_2.py transformer_engine-2.20.2-h200.safetensors

Of each 256 x 512 input it takes the 128 x 128 tile that holds the largest magnitude: its scales per tensor, per 1 x 128 and per
128 x 128 are those of the whole. Needs torch, which reads bfloat16.
"""

from __future__ import annotations

import hashlib
import lzma
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save
from safetensors.torch import load_file

TARGET = Path(__file__).parent / "transformer_engine_2_20_2" / "tiles.safetensors.xz"
RECORDED = "6611a6583fe07333ef3c1629ec1bb9e244efe4a7b0807675c9942d830d0e383e"
SIDE = 128


def main(path: Path) -> None:
    """Write the tiles of the recording at `path`."""
    if hashlib.sha256(path.read_bytes()).hexdigest() != RECORDED:
        raise SystemExit(f"{path} is not the recording that these tiles are from, of SHA-256 {RECORDED}.")
    recorded = load_file(path)
    tiles: dict[str, np.ndarray] = {}
    for name in sorted(name for name in recorded if name.endswith(".input")):
        start, x = name.removesuffix("input"), recorded[name]
        row, column = np.unravel_index(int(x.float().abs().argmax()), x.shape)
        i, j = int(row) // SIDE, int(column) // SIDE
        here = slice(i * SIDE, (i + 1) * SIDE), slice(j * SIDE, (j + 1) * SIDE)
        for key in (key for key in recorded if key.startswith(start)):
            found = recorded[key]
            if key.endswith("scale_inv"):
                if "block1d" in key:  # stored (K / 128, M)
                    found = found[j, here[0]]
                found = found[i, j] if "block2d" in key else found
            else:
                found = found[here]
            found = found.view(torch.uint16) if found.dtype == torch.bfloat16 else found
            tiles[key] = np.ascontiguousarray(found.numpy())
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_bytes(lzma.compress(save(tiles), preset=9))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
