"""convert_to_training_ of transformers' modules of experts: their Parameters stay, and their grouped GEMMs are quantized."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import breccia
import breccia_torch
from breccia import ScaledTensor
from breccia.kernels import bounds
from breccia_torch.quantize import parameters_of
from breccia_torch.training.experts import ParameterExperts

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.long

_SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
CONFIGS: dict[str, Any] = {
    "mixtral": lambda: transformers.MixtralConfig(**_SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, num_key_value_heads=2, head_dim=16, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2
    ),
}
LEAVES = ("gate_up_proj", "down_proj")


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())


def exact(x: Any) -> Tensor:
    return (breccia.dequantize(x) if isinstance(x, ScaledTensor) else x.detach()).double()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_delayed"])
def test_each_expert_has_the_gradient_of_its_operands(name: str, recipe: str) -> None:
    model, plain = made(name), made(name)
    before = dict(model.named_parameters())
    summary = breccia_torch.convert_to_training_(model, recipe)
    stem = "model.layers.0.mlp.experts"
    assert {f"{stem}.{leaf}" for leaf in LEAVES} <= {*summary.chosen}
    assert {key: id(p) for key, p in model.named_parameters()} == {key: id(p) for key, p in before.items()}
    assert {key for key in model.state_dict() if ".state." not in key} == {*plain.state_dict()}
    experts: list[Any] = [m for m in model.modules() if isinstance(m, ParameterExperts)]
    assert [layer.owner[1] for layer in experts] == [*LEAVES]

    seen: dict[str, tuple[Any, ...]] = {}

    def keep(layer: Any, inputs: tuple[Tensor, Tensor], y: Tensor) -> None:
        def with_gradient(dy: Tensor) -> None:
            seen[layer.owner[1]] = inputs[0].detach(), dy, inputs[1]

        y.register_hook(with_gradient)

    for layer in experts:
        layer.register_forward_hook(keep)
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    model(tokens, labels=tokens).loss.backward()
    for layer in experts:
        x, dy, offsets = seen[layer.owner[1]]
        gradients, inputs = layer.gemm_operands(x, dy, offsets)["grad_weight"]
        for found, a, b in zip(layer.weight.grad, gradients, inputs, strict=True):
            left, right = exact(a), exact(b)
            k = left.shape[-1]
            # docs/spec/numerics.md, section 9: the error of sums of k products in FP32.
            assert ((found.double() - left @ right).abs() <= bounds.accumulated(left.abs() @ right.abs(), k, k)).all()
        rows = [end - start for start, end in pairwise([0, *offsets.tolist()])]
        assert sum(rows) == 2 * tokens.numel()


def test_the_state_of_experts_moves_is_saved_and_copied() -> None:
    model = made("mixtral")
    breccia_torch.convert_to_training_(model, "fp8_delayed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(of: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses: list[float] = []
        for n in steps:
            tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(n))
            loss = of(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    train(model, optimizer, range(2))
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    twin: Any = copy.deepcopy(model)
    experts: Any = twin.model.layers[0].mlp.experts
    assert experts.gate_up_proj_training.owner[0] is experts
    assert experts.gate_up_proj_training.state.draws[1] == 2
    rest = train(model, optimizer, range(2, 4))
    for other in (twin, made("mixtral")):
        if other is not twin:
            breccia_torch.convert_to_training_(other, "fp8_delayed")
            other.load_state_dict(saved["model"])
        resumed = torch.optim.AdamW(other.parameters(), lr=1e-3)
        resumed.load_state_dict(copy.deepcopy(saved["optimizer"]))  # it keeps the tensors that it is given
        assert train(other, resumed, range(2, 4)) == rest


def test_transposed_experts_and_those_converted_before_are_left_with_the_reason() -> None:
    model = made("mixtral")
    experts: Any = model.model.layers[0].mlp.experts  # type: ignore[union-attr]
    breccia_torch.convert_to_training_(model, "fp8_block", include=["*.gate_up_proj"], exclude=["*self_attn*", "*.down_proj"])
    experts.is_transposed = True
    with pytest.raises(breccia.OptionError) as e:
        breccia_torch.convert_to_training_(model, "fp8_block", exclude=["*self_attn*"])
    assert "MixtralExperts stores its experts transposed" in str(e.value)
    assert "trains in low precision already" in str(e.value)


def test_experts_in_training_are_not_quantized() -> None:
    model = made("mixtral")
    breccia_torch.convert_to_training_(model, "fp8_delayed", exclude=["*self_attn*"])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (found,) = [p for p in parameters_of(model) if p.name == name]
    assert found.why == "gate_up_proj of MixtralExperts trains in low precision"
    wanted = f"quantize_: {name} trains in low precision; call breccia_torch.convert_from_training_(model) first."
    with pytest.raises(breccia.UnsupportedError, match=re.escape(wanted)):
        breccia_torch.quantize_(model, "int8", filter_fn=lambda module, name: "experts" in name)


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_that_are_converted_back_multiply_their_parameters(name: str) -> None:
    model, plain = made(name), made(name)
    summary = breccia_torch.convert_to_training_(model, "fp8_delayed")
    breccia_torch.convert_from_training_(model, lambda _, name: name.endswith("down_proj"))
    assert model.config._experts_implementation == "breccia"  # the other experts still train
    left = {name for name in summary.chosen if not name.endswith("down_proj")}
    assert {*breccia_torch.convert_from_training_(model)} == left
    assert model.config._experts_implementation == plain.config._experts_implementation
    assert [*model.state_dict()] == [*plain.state_dict()]
    tokens = torch.randint(64, (2, 16))
    for each in (model, plain):
        each(input_ids=tokens, labels=tokens).loss.backward()
    for (key, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, msg=key)  # other orders of sums
    breccia_torch.quantize_(model, "int8", filter_fn=lambda module, name: "experts" in name)
