"""Continue in breccia what TransformerEngine began: an FP8 tensor, its scale, and the amax history of delayed scaling.

TransformerEngine is not needed: PyTorch makes the buffers here, with the arithmetic of TransformerEngine's delayed scaling.
docs/migration.md has the corresponding names of its other formats.

python examples/04_transformer_engine.py
"""

from __future__ import annotations

import torch

import breccia

LENGTH, E4M3_MAX = 4, torch.tensor(448.0)


def te_update(amax_history: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of TransformerEngine with the algorithm "max": the history after `x`, and the scale for the next tensor.

    Index 0 takes the newest amax. Then all move one place forward, the newest to the end, and index 0 is free again.
    """
    amax_history[0] = x.abs().max()
    scale = E4M3_MAX / amax_history.max()
    amax_history = torch.roll(amax_history, -1)
    amax_history[0] = 0
    return amax_history, scale.reshape(1)


def main() -> None:
    torch.manual_seed(0)
    *seen, x, following = [size * torch.randn(64, 256) for size in (3, 1, 2, 1, 1.5, 1)]
    amax_history, scale = torch.zeros(LENGTH), torch.ones(1)
    for tensor in seen:
        amax_history, scale = te_update(amax_history, tensor)

    # What a Float8Tensor of TransformerEngine stores: codes as bytes, and the reciprocal of the scale.
    data = (x * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    scale_inv = 1 / scale

    # `scale_inv` multiplies the codes, as breccia's scales do. A scale per tensor has shape () here. No byte is copied.
    recipe = breccia.DelayedScaling(amax_history_len=LENGTH, scale_rule="te")
    st = breccia.from_buffer(data, scale_inv.reshape(()), recipe, breccia.PerTensor())
    print(st)
    print(breccia.metrics(x, st))
    print("the same memory:", st.data.data_ptr() == data.data_ptr())
    values = data.view(torch.float8_e4m3fn).float() * scale_inv
    print("decodes to TransformerEngine's values:", torch.equal(breccia.dequantize(st), values))

    # The history moves too: amax values, oldest first. Training continues with the scales that TransformerEngine would use.
    history = breccia.AmaxHistory(recipe, amaxes=amax_history[1:], scale=scale_inv.reshape(())).update(x)
    _, scale = te_update(amax_history, x)
    print("the next scale is TransformerEngine's:", torch.equal(history.scale, 1 / scale[0]))
    print(breccia.cast(following, recipe, scale=history.scale))


if __name__ == "__main__":
    main()
