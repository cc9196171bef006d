"""Quantize, look, multiply: the first five minutes with breccia on NumPy.

python examples/01_quickstart.py
"""

from __future__ import annotations

import numpy as np

import breccia


def main() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 256)).astype(np.float32)

    # FP8 codes with one FP32 scale per 128 elements along K. A name stands for a recipe with its default fields.
    st = breccia.cast(x, "fp8_block")
    print(st)
    print(f"{x.nbytes} bytes -> {st.nbytes} bytes")
    print(breccia.metrics(x, st))

    # Codes and scales are plain arrays of the framework. `dequantize` returns FP32 again.
    print("codes", st.data.dtype, st.data.shape, "scales", st.scale.dtype, st.scale.shape)
    print("largest error", np.abs(breccia.dequantize(st) - x).max())

    # A weight stored N x K has its blocks along the contraction axis: multiply by its transpose, a free view. The operands
    # of a product may follow different recipes.
    w = breccia.cast(rng.standard_normal((64, 256)).astype(np.float32), "nvfp4")
    print("x @ w.mT:", breccia.matmul(st, w.mT).shape, w.mT)

    # A recipe is a class with fields, and a string can set them too.
    print(breccia.recipe("fp8_block,block_m=128") == breccia.Float8BlockScaling(block_m=128))

    # Another recipe for the same tensor, and the reason a kernel was chosen.
    print(breccia.requantize(st, "mxfp8"))
    print(breccia.explain("cast", x, "mxfp8"))


if __name__ == "__main__":
    main()
