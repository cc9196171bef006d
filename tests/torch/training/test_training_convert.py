"""convert_to_training_: which layers of a model train in low precision, and what stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import breccia_torch
from breccia import OptionError, TrainingRecipe, UnknownNameError, UnsupportedError
from breccia_torch.nn import TrainingLinear
from breccia_torch.training import measuring, operands


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.odd = nn.Linear(64, 128), nn.Linear(128, 64, bias=False), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) + self.odd(x).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(64, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def test_linear_layers_are_replaced_and_the_summary_says_why_others_are_not() -> None:
    model = Model()
    summary = breccia_torch.convert_to_training_(model, "fp8_block", exclude=["blocks.1.up.*"])
    assert summary.chosen == ("blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.down.weight")
    assert repr(summary).splitlines() == [
        "3 layers train under TrainingRecipe('fp8_block'): blocks.0.up.weight, blocks.0.down.weight, blocks.1.down.weight",
        "left in high precision (embedding): embedding.weight",
        "left in high precision (10 x 64 has a side that is no multiple of 16): blocks.0.odd.weight, blocks.1.odd.weight",
        "left in high precision (excluded): blocks.1.up.weight",
        "left in high precision (output head): lm_head.weight",
    ]
    assert [name for name, m in model.named_modules() if isinstance(m, TrainingLinear)] == [
        name.removesuffix(".weight") for name in summary.chosen
    ]
    assert model.blocks[0].up.name == "blocks.0.up" and summary.recipe == TrainingRecipe("fp8_block")


def test_parameters_modes_hooks_and_states_stay() -> None:
    model = Model().eval()
    called: list[str] = []
    model.blocks[0].up.register_forward_hook(lambda *_: called.append("up"))
    model.blocks[0].down.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    breccia_torch.convert_to_training_(model, "fp8_block")
    assert all(p is before[name] for name, p in model.named_parameters()) and len(before) == len(list(model.parameters()))
    assert not any(m.training for m in model.modules())
    model(torch.randint(32, (16,)))
    assert called == ["up"]
    model.load_state_dict(state)  # the recipe has no state, so checkpoints of the plain model fit
    assert not model.blocks[0].down.weight.requires_grad


def test_tied_weights_stay_tied_and_are_cast_once() -> None:
    model = Model()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    breccia_torch.convert_to_training_(model, "mxfp8")
    assert model.blocks[1].up.weight is model.blocks[0].up.weight
    model(torch.randint(32, (16,))).sum().backward()
    assert model.blocks[0].up.weight.grad is not None


def test_a_head_tied_to_the_embedding_is_converted_when_asked() -> None:
    model = Model()
    model.lm_head.weight = model.embedding.weight
    summary = breccia_torch.convert_to_training_(model, "mxfp8", include=["lm_head*"])
    assert "lm_head.weight" in summary.chosen and model.lm_head.weight is model.embedding.weight
    model(torch.randint(32, (16,))).sum().backward()
    assert model.embedding.weight.grad is not None


def test_a_layer_in_two_places_stays_one_layer() -> None:
    model = Model()
    model.blocks[1] = model.blocks[0]
    breccia_torch.convert_to_training_(model, "mxfp8")
    assert isinstance(model.blocks[0].up, TrainingLinear) and model.blocks[1].up is model.blocks[0].up


def test_a_function_and_a_size_choose_layers() -> None:
    model = Model()
    summary = breccia_torch.convert_to_training_(model, "mxfp8", lambda module, name: name.endswith("head"))
    assert summary.chosen == ("lm_head.weight",) and summary.left["blocks.0.up.weight"] == "left out by filter_fn"
    model = Model()
    summary = breccia_torch.convert_to_training_(model, "mxfp8", include=["lm_head*"], min_size=64 * 128)
    assert len(summary.chosen) == 4 and summary.left["lm_head.weight"] == "smaller than min_size=8192"


def test_two_conversions_give_two_recipes() -> None:
    model = Model()
    breccia_torch.convert_to_training_(model, "nvfp4", exclude=["blocks.0.*", "*.odd.*"])
    summary = breccia_torch.convert_to_training_(model, "mxfp8")
    assert summary.left["blocks.1.up.weight"] == "trains in low precision already"
    assert {m.recipe for m in model.modules() if isinstance(m, TrainingLinear)} == {
        TrainingRecipe("nvfp4"),
        TrainingRecipe("mxfp8"),
    }


def test_layers_that_are_more_than_linear_are_left() -> None:
    model = nn.Sequential(nn.MultiheadAttention(64, 4), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].forward = lambda x: x
    model[1].__dict__["forward"] = lambda x: x
    summary = breccia_torch.convert_to_training_(model, "mxfp8")
    assert summary.chosen == ("2.weight",)
    assert summary.left["1.weight"] == "its layer has a forward of its own"
    assert "is a subclass of nn.Linear" in summary.left["0.out_proj.weight"]


def test_auto_leaves_layers_that_are_slower_than_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {(64, 128): 1.2, (128, 64): 0.91}
    monkeypatch.setattr(measuring, "speed", lambda layer, recipe: speeds[layer.in_features, layer.out_features])
    summary = breccia_torch.convert_to_training_(Model(), "mxfp8")
    assert summary.chosen == ("blocks.0.up.weight", "blocks.1.up.weight")
    assert summary.left["blocks.0.down.weight"] == "measured 0.91 x the speed of BF16 on this device"


def test_cpus_are_not_measured() -> None:
    assert measuring.speed(nn.Linear(64, 64), TrainingRecipe("mxfp8")) is None


@pytest.mark.parametrize(
    ("model", "arguments", "error", "says"),
    [
        (nn.Linear(64, 64), {}, UnsupportedError, r"TrainingLinear.from_linear\(layer, recipe\)"),
        ("model", {}, UnsupportedError, "replaces layers of a model; got a str"),
        (nn.Sequential(nn.ReLU()), {}, OptionError, "no parameter is chosen"),
        (Model(), {"min_size": "large"}, OptionError, "min_size is 'auto' or a number of elements >= 0; got 'large'"),
        (Model(), {"min_size": -1}, OptionError, "got -1"),
        (Model(), {"include": ["block.*"]}, UnknownNameError, "'block.*' matches no weight of a linear layer"),
        (Model(), {"filter_fn": lambda *_: True, "exclude": ["*"]}, OptionError, "not both"),
        (Model(), {"recipe": "fp8_tiles"}, UnknownNameError, "did you mean 'fp8_tile'"),
    ],
)
def test_bad_input_is_named(model: Any, arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        breccia_torch.convert_to_training_(model, **({"recipe": "mxfp8"} | arguments))


def test_a_second_conversion_says_that_there_is_nothing_left() -> None:
    model = Model()
    breccia_torch.convert_to_training_(model, "mxfp8")
    with pytest.raises(OptionError, match="4 layers train in low precision already"):
        breccia_torch.convert_to_training_(model, "mxfp8")


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_delayed", "nvfp4"])
def test_a_model_that_is_converted_back_is_the_plain_one(recipe: str) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    summary = breccia_torch.convert_to_training_(model, recipe)
    assert breccia_torch.convert_from_training_(model) == summary.chosen
    assert not any(isinstance(m, TrainingLinear) for m in model.modules()) and type(model.blocks[0].up) is nn.Linear
    assert repr(model) == repr(plain) and list(model.state_dict()) == list(plain.state_dict())
    assert vars(model.blocks[0].up).keys() == vars(plain.blocks[0].up).keys()
    tokens = torch.randint(32, (16,))
    for each in (plain, model):
        each(tokens).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_training_goes_on_with_the_same_optimizer_and_layers() -> None:
    model = Model()
    breccia_torch.convert_to_training_(model, "fp8_delayed")
    layers, parameters = [model.blocks[0].up, model.blocks[1].down], list(model.parameters())
    called: list[str] = []
    layers[0].register_forward_hook(lambda *_: called.append("up"))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randint(32, (16,))).square().mean().backward()
        optimizer.step()

    step()
    breccia_torch.convert_from_training_(model)
    before = layers[0].weight.detach().clone()
    step()
    assert called == ["up", "up"] and layers == [model.blocks[0].up, model.blocks[1].down]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not torch.equal(layers[0].weight, before)
    breccia_torch.convert_to_training_(model, "mxfp8")  # another recipe
    assert model.blocks[0].up.recipe == TrainingRecipe("mxfp8")
    step()
    assert called == ["up"] * 3


def test_a_compiled_model_compiles_again_when_it_is_converted_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    plain = copy.deepcopy(model)
    breccia_torch.convert_to_training_(model, "nvfp4")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(32, 64)
    assert not torch.equal(compiled(x), plain(x))
    breccia_torch.convert_from_training_(model)
    assert torch.equal(compiled(x), plain(x))


def test_some_layers_are_converted_back_and_states_are_broadcast_no_more() -> None:
    model = Model()
    breccia_torch.convert_to_training_(model, "fp8_delayed")
    ignored = set(model._ddp_params_and_buffers_to_ignore)
    assert breccia_torch.convert_from_training_(model, lambda _, name: name.startswith("blocks.0")) == (
        "blocks.0.up.weight",
        "blocks.0.down.weight",
    )
    assert isinstance(model.blocks[1].up, TrainingLinear)
    left = set(model._ddp_params_and_buffers_to_ignore)
    assert left == {name for name in ignored if name.startswith("blocks.1")} != ignored


def test_casts_of_a_weight_that_is_converted_back_are_let_go() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    breccia_torch.convert_to_training_(model, "fp8_block")
    model(torch.randn(16, 64))
    assert id(model[0].weight) in operands._weights
    breccia_torch.convert_from_training_(model)
    assert id(model[0].weight) not in operands._weights


def test_errors_of_converting_back() -> None:
    model = Model()
    with pytest.raises(OptionError, match="convert_from_training_: Model has no layer of convert_to_training_\\."):
        breccia_torch.convert_from_training_(model)
    breccia_torch.convert_to_training_(model, "fp8_block")
    with pytest.raises(OptionError, match="has no layer of convert_to_training_ that filter_fn chooses\\."):
        breccia_torch.convert_from_training_(model, lambda *_: False)
    with pytest.raises(UnsupportedError, match="takes a model; got a int"):
        breccia_torch.convert_from_training_(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    class Wrapped(TrainingLinear):
        """As parametrizations and fully_shard make a class of a layer."""

    model.blocks[1].up.__class__ = Wrapped
    wanted = "blocks\\.1\\.up is a Wrapped, not a TrainingLinear\\. Undo what made it one .*, or leave it out with filter_fn\\."
    with pytest.raises(UnsupportedError, match=wanted):
        breccia_torch.convert_from_training_(model)
    model.blocks[1].up.__class__ = TrainingLinear
    model.blocks[1].down.forward = model.blocks[1].down.forward
    with pytest.raises(UnsupportedError, match="blocks\\.1\\.down has a forward of its own.*Remove it first"):
        breccia_torch.convert_from_training_(model)
    assert isinstance(model.blocks[0].up, TrainingLinear)  # nothing was changed


def test_all_names_of_a_layer_that_stands_in_several_places_are_returned() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64)})
    model["b"] = model["a"]
    summary = breccia_torch.convert_to_training_(model, "fp8_block")
    assert (
        breccia_torch.convert_from_training_(model, lambda _, name: name == "b") == summary.chosen == ("a.weight", "b.weight")
    )
    assert type(model["a"]) is nn.Linear and model["b"] is model["a"]
