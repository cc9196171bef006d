"""PyTorch: `Tensor.to` of the eight-bit floating dtypes, on a CPU."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import numpy as np

from .dtypes import adapter


def _encode(dtype: str, x: np.ndarray) -> np.ndarray:
    import torch

    return torch.from_numpy(x).to(getattr(torch, dtype)).view(torch.uint8).numpy()


def _decode(dtype: str, codes: np.ndarray) -> np.ndarray:
    import torch

    return torch.from_numpy(np.array(codes)).view(getattr(torch, dtype)).to(torch.float32).numpy()


ADAPTERS = (adapter("Tensor.to", _encode, _decode, "E4M3", "E5M2"),)
