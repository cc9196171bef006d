"""Models that read the weight of a layer as a tensor: quantized weights give decoded values, and the models run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

import breccia
import breccia_torch
from breccia_torch.nn import ScaledLinear, ScaledWeight


class Block(nn.Module):
    """Reads the weights of its layers as Mamba, WavLM, MobileBERT and Bloom do."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.functional, self.turned, self.cut, self.asked = (nn.Linear(64, 64, bias=False) for _ in range(5))

    def forward(self, x: Any) -> Any:
        x = self.called(x) + functional.linear(x, self.functional.weight) + x @ self.turned.weight.t()
        x = x + torch.cat([functional.linear(x, self.cut.weight[:40]), functional.linear(x, self.cut.weight[40:])], -1)
        return self.asked(x.to(self.asked.weight.dtype))


READS: dict[str, Any] = {
    "w @ x": lambda w, x: w @ x.mT,
    "x @ w.t()": lambda w, x: x @ w.t(),
    "x @ w.T": lambda w, x: x @ w.T,
    "x @ w.mT": lambda w, x: x @ w.mT,
    "linear": lambda w, x: functional.linear(x, w),
    "einsum": lambda w, x: torch.einsum("nk,bk->nb", w, x),
    "slice": lambda w, x: functional.linear(x[:, :8], w[3:, :8]),
    "chunk": lambda w, x: torch.stack(w.chunk(2)),
    "unsqueeze": lambda w, x: w.unsqueeze(0) @ x.mT,
    "reshape": lambda w, x: w.reshape(64, 32),
    "cat": lambda w, x: torch.cat([w, x]),
    "detach": lambda w, x: w.detach(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_weight_read_as_a_tensor_gives_its_values(read: str, dtype: torch.dtype) -> None:
    linear = nn.Linear(64, 32, bias=False).to(dtype)
    x, held = torch.randn(5, 64, dtype=dtype), ScaledLinear.from_linear(linear, "int8").weight
    values = breccia.dequantize(held.tensor, out_dtype=dtype)
    found = READS[read](held, x)
    assert found.dtype == dtype and torch.equal(found, READS[read](values, x))
    assert torch.equal(held.decoded(), values) and held.decoded(torch.float16).dtype == torch.float16


def test_the_dtype_of_values_follows_the_model_and_stays_through_pickles() -> None:
    layer = ScaledLinear.from_linear(nn.Linear(64, 32), "int8")
    assert layer.weight.t().dtype == torch.float32
    assert layer.bfloat16().weight[0].dtype == torch.bfloat16
    again = torch.nn.Sequential(layer)
    assert ScaledWeight(layer.weight.tensor).dtype == torch.float32 and again.half()[0].weight.mT.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_reads_its_weights_is_quantized_whole_and_runs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block()).to(dtype), torch.randn(3, 64, dtype=dtype)
    expected = model(x)
    summary = breccia_torch.quantize_(model, "int8")
    assert len(summary.quantized) == 5 and not summary.left
    found = model(x)
    assert found.dtype == dtype
    assert functional.cosine_similarity(found.float().flatten(), expected.float().flatten(), 0) > 0.98


def test_such_a_model_compiles_whole() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block()), torch.randn(3, 64)
    breccia_torch.quantize_(model, "int8")
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))


def test_a_weight_left_of_the_product_stays_left_when_compiled() -> None:
    """TorchDynamo swaps the operands of `weight @ x`: it must not compute the other product in silence."""

    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)

        def forward(self, x: Any) -> Any:
            return self.layer.weight @ x

    model, x = nn.Sequential(Left()), torch.randn(64, 64)
    breccia_torch.quantize_(model, "int8")
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"multiply by weight\.decoded\(\)"):
        torch.compile(model, fullgraph=True, backend="eager")(x)


def test_a_file_with_such_weights_is_loaded_into_quantized_layers(tmp_path: Path) -> None:
    pytest.importorskip("breccia_bridges")
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    state = {name: breccia.cast(value, "int8") for name, value in model.state_dict().items()}
    breccia.bridges.save_safetensors(state, tmp_path / "model.safetensors")
    breccia_torch.load_model(model, tmp_path / "model.safetensors")
    assert all(type(layer) is ScaledLinear for layer in model[0].children())
    assert model(torch.randn(3, 64)).isfinite().all()
