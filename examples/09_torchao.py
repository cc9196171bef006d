"""A model that torchao quantized runs in breccia with the same bits, is multiplied and saved there, and returns to torchao.

python examples/09_torchao.py
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

import breccia
import breccia_torch


def main() -> None:
    warnings.simplefilter("ignore")  # torchao warns of CUDA kernels that it cannot load
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    quantize_(model, Int8WeightOnlyConfig(version=2))
    x = torch.randn(8, 256)
    expected, theirs = model(x), model[0].weight

    # One tensor: the bridge is found by its class, and options of torchao's class come from `like=`.
    st = breccia.from_foreign(theirs)
    print(st)
    print("the same floats:", torch.equal(breccia.dequantize(st), theirs.dequantize()))
    back = breccia.to_foreign(st, "torchao", like=theirs)
    print("the same bytes after a return:", torch.equal(back.qdata, theirs.qdata) and torch.equal(back.scale, theirs.scale))

    # A whole model, in place: its linear layers become breccia's, with the same codes and scales.
    print("converted:", ", ".join(breccia_torch.from_torchao_model_(model)))
    print(model[0])
    print("the same outputs:", torch.allclose(model(x), expected, rtol=1e-4, atol=1e-4))

    # What breccia has and torchao has not: a sub-byte format with an error report, here from the same weights.
    smaller = breccia.requantize(st, breccia.NVFP4BlockScaling())
    print(breccia.metrics(breccia.dequantize(st), smaller))

    breccia_torch.to_torchao_model_(model)
    print("back in torchao:", type(model[0].weight).__name__, torch.allclose(model(x), expected, rtol=1e-4, atol=1e-4))


if __name__ == "__main__":
    main()
