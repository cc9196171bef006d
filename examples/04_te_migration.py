"""Continue in breccia what TransformerEngine began: an FP8 weight in both orientations, and the amax history.

TransformerEngine is not needed: a stand-in with the attributes of its class holds buffers that PyTorch makes here, with the
arithmetic of TransformerEngine's delayed scaling. The bridge reads attributes, so the library's own tensors convert alike.

python examples/04_te_migration.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import breccia
from breccia.bridges import from_te_recipe, from_transformer_engine

LENGTH, E4M3_MAX = 4, torch.tensor(448.0)


class Float8Tensor:
    """A stand-in with the attributes of TransformerEngine's class."""

    def __init__(
        self, data: Any, fp8_scale_inv: Any, fp8_dtype: Any, data_transpose: Any = None, quantizer: Any = None
    ) -> None:
        self._data, self._scale_inv, self._fp8_dtype, self._quantizer = data, fp8_scale_inv, fp8_dtype, quantizer
        self._transpose, self._transpose_invalid = data_transpose, data_transpose is None


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

    # TransformerEngine's tensor: codes as bytes, the reciprocal of the scale, and the transposed codes for a backward pass.
    data = (x * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    theirs = Float8Tensor(data, 1 / scale, SimpleNamespace(name="kFloat8E4M3"), data.mT.contiguous())

    # Its recipe in breccia, by role; the tensor itself, whose bytes are shared; and both of its orientations.
    settings = {"margin": 0, "amax_history_len": LENGTH, "amax_compute_algo": "max", "scaling_factor_compute_algo": None}
    kind = type("DelayedScaling", (SimpleNamespace,), {})
    recipe = from_te_recipe(kind(fp8_format=SimpleNamespace(name="HYBRID"), **settings), role="weight")
    st = from_transformer_engine(theirs, recipe)
    print(st)
    print(breccia.metrics(x, st))
    print("the same memory:", st.data.data_ptr() == theirs._data.data_ptr())
    values = data.view(torch.float8_e4m3fn).float() * theirs._scale_inv
    print("decodes to TransformerEngine's values:", torch.equal(breccia.dequantize(st), values))
    rows, columns = from_transformer_engine(theirs, recipe, usage="both")
    print("both orientations decode alike:", torch.equal(breccia.dequantize(rows), breccia.dequantize(columns)))

    # And back: the class, dtype and quantizer are those of `like`.
    made = breccia.to_foreign(breccia.TensorPair(rows, columns), "transformer_engine", like=theirs)
    print("the same buffers return:", made._data.data_ptr() == data.data_ptr())

    # The history moves too: amax values, oldest first. Training continues with the scales that TransformerEngine would use.
    history = breccia.AmaxHistory(recipe, amaxes=amax_history[1:], scale=st.scale).update(x)
    _, scale = te_update(amax_history, x)
    print("the next scale is TransformerEngine's:", torch.equal(history.scale, 1 / scale[0]))
    print(breccia.cast(following, recipe, scale=history.scale))


if __name__ == "__main__":
    main()
