"""`load_model` of checkpoints that other libraries quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import foreign_models
import torch
from foreign_torch import LLAMAS, assert_holds, config_of, experts_folder, llama_folder, on_meta, smollm2_loaded
from golden_dialects import ACROSS, EXPECTED, REFUSED, unpacked
from hf_models import logits
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import breccia
import breccia_torch
from breccia.backend import components
from breccia.bridges import load_checkpoint
from breccia_torch.nn import ScaledConv1D, ScaledExperts, ScaledLinear, ScaledWeight
from breccia_torch.values import empty

READ = [name for name, expected in EXPECTED.items() if not expected.startswith(REFUSED)]

pytestmark = [
    pytest.mark.together,
    pytest.mark.usefixtures("no_progress_bars"),
    pytest.mark.filterwarnings("ignore"),  # of transformers and what it imports
]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if kind != "fp8_block" else []) for kind in LLAMAS]
)
def test_a_sharded_folder_loads_with_the_values_that_numpy_decodes(kind: str, tmp_path: Path) -> None:
    path = llama_folder(tmp_path, kind, shards=6)
    found = on_meta(path)
    assert breccia_torch.load_model(found, path) == ([], [])
    assert_holds(found, path)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    made = AutoModelForCausalLM.from_config(config_of(path)).eval()
    breccia_torch.load_model(made, path)
    breccia_torch.save_model(made, tmp_path / "again.safetensors")
    again = AutoModelForCausalLM.from_config(config_of(path)).eval()
    assert breccia_torch.load_model(again, tmp_path / "again.safetensors") == ([], [])
    assert torch.equal(logits(made), logits(again))


def test_experts_become_stacks_of_their_codes(tmp_path: Path) -> None:
    path = experts_folder(tmp_path, "qwen3_moe")
    found, checkpoint = on_meta(path), load_checkpoint(path)
    assert breccia_torch.load_model(found, path) == ([], [])
    experts = {name: m for name, m in found.named_modules() if isinstance(m, ScaledExperts)}
    assert len(experts) == 4
    for name, weight in experts.items():
        module, _, leaf = name.rpartition(".")
        projections = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
        for expert in range(len(weight)):
            each = [checkpoint[f"{module}.{expert}.{projection}.weight"] for projection in projections]
            expected = np.concatenate([breccia.dequantize(st) for st in each])
            assert np.array_equal(weight.decoded(torch.float32)[expert].numpy(), expected)


def test_experts_of_gpt_oss_are_transposed_as_the_model_has_them(tmp_path: Path) -> None:
    path = experts_folder(tmp_path, "gpt_oss")
    found, checkpoint = on_meta(path), load_checkpoint(path)
    assert breccia_torch.load_model(found, path) == ([], [])
    experts = {name: m for name, m in found.named_modules() if isinstance(m, ScaledExperts)}
    assert len(experts) == 4 and {m.axis for m in experts.values()} == {-2}
    for name, weight in experts.items():
        assert np.array_equal(weight.decoded(torch.float32).numpy(), breccia.dequantize(checkpoint[name]))


def model_of(checkpoint: Any, beside: list[str]) -> nn.Module:
    """A model on the meta device for a checkpoint: linear layers for quantized matrices, else parameters, save for `beside`."""
    root = nn.Module()
    for name in (name for name in checkpoint if name not in beside):
        *path, leaf = name.split(".")
        shape = checkpoint.header(name).shape
        is_linear = leaf == "weight" and len(shape) == 2
        module = root
        for part in path[:-1] if is_linear else path:
            module.add_module(part, module._modules.get(part) or nn.Module())
            module = module.get_submodule(part)
        if is_linear:
            module.add_module(path[-1], nn.Linear(shape[1], shape[0], bias=False, device="meta"))
        else:
            module.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
    return root.eval()


@pytest.mark.parametrize("name", [name for name in READ if name not in ("modelopt_int4_awq", ACROSS)])
def test_every_dialect_loads_with_the_values_that_numpy_decodes(name: str, tmp_path: Path) -> None:
    path, _ = unpacked(name, tmp_path)
    checkpoint = load_checkpoint(path)
    scaled = [value for value in checkpoint if checkpoint.header(value).recipe is not None]
    beside = [v for v in checkpoint if v not in scaled and f"{v.rpartition('.')[0]}.weight" in scaled]
    model = model_of(checkpoint, beside)
    assert breccia_torch.load_model(model, path) == ([], beside)
    layers = {value: m.weight for value, m in model.named_modules() if isinstance(m, ScaledLinear)}
    matrices = [v for v in scaled if v.endswith(".weight") and len(checkpoint.header(v).shape) == 2]
    assert {f"{value}.weight" for value in layers} == set(matrices)
    for value in (value for value in checkpoint if value not in beside):
        expected = checkpoint[value]
        weight = layers.get(value.removesuffix(".weight"))
        found = model.get_parameter(value).detach() if weight is None else breccia.dequantize(weight.tensor)
        is_scaled = isinstance(expected, breccia.ScaledTensor)
        values = breccia.dequantize(expected) if is_scaled else np.asarray(expected, np.float32)
        assert np.array_equal(found.numpy(), values, equal_nan=True), value
        assert weight is None or weight.recipe == expected.recipe


@pytest.mark.parametrize("name", READ)
def test_headers_tell_the_components_of_every_value(name: str, tmp_path: Path) -> None:
    path, _ = unpacked(name, tmp_path)
    checkpoint = load_checkpoint(path, framework="torch")
    for value in checkpoint:
        found, header = checkpoint[value], checkpoint.header(value)
        if header.recipe is not None:
            promised = empty(header)
            assert promised.layout == found.layout and promised.axis == found.axis and promised.padding == found.padding
            described = [{n: (tuple(p.shape), p.dtype) for n, p in components(st).items()} for st in (promised, found)]
            assert described[0] == described[1]


@pytest.mark.parametrize("name", ["modelopt_fp8", "modelopt_nvfp4"])
def test_scales_of_inputs_are_unexpected_and_no_error(name: str, tmp_path: Path) -> None:
    path, _ = unpacked(name, tmp_path)
    found = on_meta(path)
    missing, unexpected = breccia_torch.load_model(found, path)
    assert not missing and len(unexpected) == 7 and all(one.endswith("_proj.input_scale") for one in unexpected)
    assert_holds(found, path)
    assert all(m.activation is None for m in found.modules() if isinstance(m, ScaledLinear))


def test_groups_across_the_rows_of_a_linear_layer_are_refused(tmp_path: Path) -> None:
    path, _ = unpacked(ACROSS, tmp_path)
    checkpoint = load_checkpoint(path)
    message = r"_proj\.weight has blocks along axis -2 in the file; those of a linear layer run along the last one"
    with pytest.raises(breccia.ShapeError, match=message):
        breccia_torch.load_model(model_of(checkpoint, []), path)


def test_weights_whose_layer_multiplies_its_inputs_are_refused(tmp_path: Path) -> None:
    path, _ = unpacked("modelopt_int4_awq", tmp_path)
    message = r"the inputs of model\.layers\.0\.\S+\.weight are multiplied by \S+\.pre_quant_scale, for which a quantized layer"
    with pytest.raises(breccia.UnsupportedError, match=message):
        breccia_torch.load_model(on_meta(path), path, strict=False)


def test_a_conv1d_takes_the_transpose_of_what_others_store_as_of_linear_layers(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    foreign_models.write(tmp_path / "m", {"c_proj.weight": w}, {}, "gptq")
    value = np.asarray(breccia.dequantize(load_checkpoint(tmp_path / "m")["c_proj.weight"]))
    model = nn.ModuleDict({"c_proj": Conv1D(64, 64)}).eval()
    breccia_torch.load_model(model, tmp_path / "m", strict=False)
    layer = model["c_proj"]
    assert isinstance(layer, ScaledConv1D) and np.array_equal(layer.weight.decoded().numpy(), value.T)
    again = nn.ModuleDict({"c_proj": Conv1D(64, 64)}).eval()
    breccia_torch.save_model(model, tmp_path / "ours.safetensors")
    breccia_torch.load_model(again, tmp_path / "ours.safetensors")
    assert np.array_equal(again["c_proj"].weight.decoded().numpy(), value.T)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_layer_with_tensors_of_its_own_keeps_them_and_its_weight_is_decoded(kind: str, tmp_path: Path) -> None:
    """ModelOpt's names, which a model may have places for."""
    weight = torch.ones(64, 64).to(torch.float8_e4m3fn)
    factor = torch.arange(64.0)
    save_torch(
        {"up.weight": weight, "up.weight_scale": torch.tensor(0.5), "up.pre_quant_scale": factor},
        tmp_path / "model.safetensors",
    )
    said = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    layer = nn.Linear(64, 64, bias=False)
    if kind == "buffer":
        layer.register_buffer("pre_quant_scale", torch.zeros(64))
    else:
        layer.pre_quant_scale = nn.Parameter(torch.zeros(64))
    model = nn.ModuleDict({"up": layer})
    assert breccia_torch.load_model(model, tmp_path) == ([], [])
    assert model["up"] is layer and torch.equal(layer.state_dict()["pre_quant_scale"], factor)
    assert torch.equal(layer.weight.detach(), torch.full((64, 64), 0.5))


def test_tied_weights_of_a_foreign_file_are_compared(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((2, 64, 64), np.float32)
    tied = nn.ModuleDict({"q_proj": nn.Linear(64, 64, bias=False), "k_proj": nn.Linear(64, 64, bias=False)}).eval()
    tied["k_proj"].weight = tied["q_proj"].weight
    foreign_models.write(tmp_path / "two", {"q_proj.weight": w[0], "k_proj.weight": w[1]}, {}, "gptq")
    with pytest.raises(
        breccia.ShapeError, match=r"the model ties q_proj\.weight and k_proj\.weight, but they differ in the file"
    ):
        breccia_torch.load_model(tied, tmp_path / "two")
    foreign_models.write(tmp_path / "same", {"q_proj.weight": w[0], "k_proj.weight": w[0]}, {}, "gptq")
    assert breccia_torch.load_model(tied, tmp_path / "same") == ([], [])
    assert tied["q_proj"].weight is tied["k_proj"].weight and isinstance(tied["q_proj"].weight, ScaledWeight)


def test_one_value_under_the_names_of_a_tied_weight_is_no_conflict(tmp_path: Path) -> None:
    """NaNs in the same places, and a wider dtype under one of the names."""
    w = torch.arange(64.0).reshape(8, 8)
    w[0, 0] = np.nan
    tied = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    tied["b"].weight = tied["a"].weight
    save_torch({"a.weight": w, "b.weight": w.double()}, tmp_path / "m.safetensors")
    assert breccia_torch.load_model(tied, tmp_path / "m.safetensors") == ([], [])
    assert torch.equal(tied["b"].weight.detach().nan_to_num(7), w.nan_to_num(7))
    save_torch({"a.weight": w, "b.weight": w + 1}, tmp_path / "n.safetensors")
    with pytest.raises(breccia.ShapeError, match=r"ties a\.weight and b\.weight, but they differ"):
        breccia_torch.load_model(tied, tmp_path / "n.safetensors")


class Experts(nn.Module):
    """Of 2 experts, as transformers has them: (in_features, out_features) where transposed."""

    def __init__(self, *names: str, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        for name in names:
            rows, columns = (128 if name == "gate_up_proj" else 64), 64
            shape = (2, columns, rows) if is_transposed else (2, rows, columns)
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def single_experts(path: Path, kind: str, *projections: str) -> dict[str, np.ndarray]:
    """Write a folder of square projections of 2 experts, and return what NumPy decodes."""
    rng = np.random.default_rng(0)
    names = [f"experts.{expert}.{projection}.weight" for expert in range(2) for projection in projections]
    weights = {name: rng.standard_normal((64, 64), np.float32) for name in names}
    if kind == "plain":
        path.mkdir()
        save_file(weights, path / "model.safetensors")
    elif kind == "ours":
        path.mkdir()
        scaled = {name: breccia.cast(w, "mxfp8") for name, w in weights.items()}
        breccia.bridges.save_safetensors(scaled, path / "model.safetensors")
    else:
        foreign_models.write(path, weights, {}, kind)
    values = load_checkpoint(path)
    return {n: breccia.dequantize(v) if isinstance(v, breccia.ScaledTensor) else v for n, v in values.items()}


@pytest.mark.parametrize("kind", ["plain", "ours", "gptq"])
def test_single_experts_are_stacked_as_a_transposed_module_has_them(kind: str, tmp_path: Path) -> None:
    values = single_experts(tmp_path / "m", kind, "down_proj")
    for is_transposed in (False, True):
        model = nn.ModuleDict({"experts": Experts("down_proj", is_transposed=is_transposed)})
        assert breccia_torch.load_model(model, tmp_path / "m") == ([], [])
        held: Any = model["experts"].down_proj
        found = held.detach() if isinstance(held, nn.Parameter) else held.decoded()
        assert isinstance(held, nn.Parameter) or held.axis == (-2 if is_transposed else -1)
        for expert in range(2):
            expected = values[f"experts.{expert}.down_proj.weight"]
            assert np.array_equal(found[expert].numpy(), expected.T if is_transposed else expected)


def test_gate_and_up_are_not_stacked_into_a_transposed_module(tmp_path: Path) -> None:
    single_experts(tmp_path / "m", "plain", "gate_proj", "up_proj")
    model = nn.ModuleDict({"experts": Experts("gate_up_proj", is_transposed=True)})
    message = (
        r"experts\.gate_up_proj is transposed in the model, and the file has gate_proj and up_proj of each expert: their order"
    )
    unchanged(model, tmp_path / "m", breccia.UnsupportedError, message, strict=False)


def test_only_parameters_of_modules_of_experts_are_stacked(tmp_path: Path) -> None:
    single_experts(tmp_path / "m", "plain", "down_proj")
    other = nn.Module()
    other.register_parameter("down_proj", nn.Parameter(torch.zeros(2, 64, 64)))
    unchanged(
        nn.ModuleDict({"experts": other}), tmp_path / "m", breccia.UnknownNameError, r"missing: experts\.down_proj; unexp"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq", "nvfp4", "mlx", "fp8_block"])
def test_a_model_of_smollm2s_size_loads_in_the_memory_that_it_then_takes(kind: str, tmp_path: Path) -> None:
    path, took = smollm2_loaded("torch", kind, tmp_path)
    assert took["peak"] <= took["held"] + took["largest"], took
    # Every quantized value is read once, and plain tensors stay mapped. The rest is for Python's objects, and less than what
    # holding all codes twice (55 MB more) or decoding them (212 MB of BF16) takes.
    assert took["peak"] <= took["quantized"] + 2**24, took
    found = on_meta(path)
    breccia_torch.load_model(found, path)
    assert_holds(found, path)


# -- what is refused -------------------------------------------------------------------------------------------------


def unchanged(model: Any, path: Path, kind: type[Exception], message: str, **options: Any) -> None:
    """Loading raises, and the model is as before."""
    modules, state = dict(model.named_modules()), {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(kind, match=message):
        breccia_torch.load_model(model, path, **options)
    assert dict(model.named_modules()) == modules and all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("strict", [True, False])
def test_factors_of_the_inputs_of_single_experts_are_refused(strict: bool, tmp_path: Path) -> None:
    """ModelOpt's, in the layout of its FP8 weights."""
    tensors: dict[str, Any] = {}
    for name in (
        f"experts.{expert}.{projection}" for expert in range(2) for projection in ("gate_proj", "up_proj", "down_proj")
    ):
        tensors[f"{name}.weight"] = torch.ones(64, 64).to(torch.float8_e4m3fn)
        tensors |= {f"{name}.weight_scale": torch.tensor(0.5), f"{name}.pre_quant_scale": torch.full((64,), 3.0)}
    save_torch(tensors, tmp_path / "model.safetensors")
    said = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    model = nn.ModuleDict({"experts": Experts("gate_up_proj", "down_proj")})
    message = r"the inputs of experts\.0\.\w+_proj\.weight are multiplied by experts\.0\.\w+_proj\.pre_quant_scale"
    unchanged(model, tmp_path, breccia.UnsupportedError, message, strict=strict)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_codes_without_scales_do_not_become_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    codes = torch.ones(64, 64).to(dtype)
    save_torch({"up.weight": codes}, tmp_path / "m.safetensors")
    model = nn.ModuleDict({"up": nn.Linear(64, 64, bias=False)})
    message = r"m\.safetensors: up\.weight is \w+ of shape 64x64, without scales that breccia knows, and the model has floats"
    unchanged(model, tmp_path / "m.safetensors", breccia.DialectError, message)
    breccia_torch.quantize_(model, "mxfp8")
    unchanged(model, tmp_path / "m.safetensors", breccia.DialectError, message)
    holds = nn.ModuleDict({"up": nn.Linear(64, 64, bias=False)})
    holds["up"].weight = nn.Parameter(torch.zeros(64, 64).to(dtype), requires_grad=False)
    assert breccia_torch.load_model(holds, tmp_path / "m.safetensors") == ([], [])
    assert torch.equal(holds["up"].weight.view(torch.uint8), codes.view(torch.uint8))


def test_codes_without_scales_are_not_stacked(tmp_path: Path) -> None:
    save_torch(
        {f"experts.{e}.down_proj.weight": torch.ones(64, 64, dtype=torch.int8) for e in range(2)}, tmp_path / "m.safetensors"
    )
    model = nn.ModuleDict({"experts": Experts("down_proj")})
    unchanged(model, tmp_path / "m.safetensors", breccia.DialectError, r"experts\.0\.down_proj\.weight is I8 of shape 64x64")


def test_an_unknown_dialect_is_named(tmp_path: Path) -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(64, 64)})
    foreign_models.write(tmp_path / "m", {"q_proj.weight": np.ones((64, 64), np.float32)}, {}, "gptq")
    unchanged(model, tmp_path / "m", breccia.UnknownNameError, "gptk.*did you mean 'gptq'", source_dialect="gptk")


def test_two_possible_dialects_are_named_and_the_caller_chooses(tmp_path: Path) -> None:
    path, model = llama_folder(tmp_path, "gptq"), AutoModelForCausalLM.from_config(config_of(tmp_path / "gptq"))
    expected = on_meta(path)
    breccia_torch.load_model(expected, path)
    (path / "config.json").unlink()
    both = r"as GPTQ \('gptq'\) and GPTQ version 2 \('gptq_v2'\).*Give source_dialect="
    unchanged(model, path, breccia.DialectError, both)
    assert breccia_torch.load_model(model, path, source_dialect="gptq") == ([], [])
    name = "model.layers.1.mlp.down_proj"
    assert breccia.bytes_equal(model.get_submodule(name).weight.tensor, expected.get_submodule(name).weight.tensor)


def spoiled(tmp_path: Path) -> Path:
    """A folder in which the scales of the last layer are NaN."""
    weights = {f"{n}_proj.weight": np.random.default_rng(0).standard_normal((64, 64), np.float32) for n in "kqv"}
    files = foreign_models.write(tmp_path / "m", weights, {}, "gptq", shards=3)
    file = tmp_path / "m" / files["v_proj.scales"]
    tensors = load_file(file)
    save_file(tensors | {"v_proj.scales": np.full_like(tensors["v_proj.scales"], np.nan)}, file)
    return tmp_path / "m"


def test_a_value_that_cannot_be_read_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = nn.ModuleDict({f"{n}_proj": nn.Linear(64, 64, bias=False) for n in "kqv"})
    unchanged(
        model, spoiled(tmp_path), breccia.DialectError, r"v_proj\.weight \(GPTQ\): 'scales' has 64 scales that are not fin"
    )


def test_shapes_are_checked_before_any_value_is_read(tmp_path: Path) -> None:
    """The value that would fail to be read comes first."""
    path = spoiled(tmp_path)
    model = nn.ModuleDict({"v_proj": nn.Linear(64, 64, bias=False), "q_proj": nn.Linear(32, 64, bias=False)})
    message = r"q_proj\.weight has shape \(64, 64\) in the file and \(64, 32\) in the model"
    unchanged(model, path, breccia.ShapeError, message, strict=False)
    model = nn.ModuleDict({"v_proj": nn.Linear(64, 64, bias=False), "gone": nn.Linear(32, 64, bias=False)})
    message = r"this ModuleDict: missing: gone\.weight; unexpected: k_proj\.weight, q_proj\.weight"
    unchanged(model, path, breccia.UnknownNameError, message)


def test_experts_of_which_some_are_quantized_are_refused_before_any_value_is_read(tmp_path: Path) -> None:
    path = experts_folder(tmp_path, "qwen3_moe")
    config = json.loads((path / "config.json").read_text())
    weights = {n: t.float().numpy() for n, t in load_checkpoint(tmp_path / "dense", framework="torch").items()}
    name = "model.layers.0.mlp.experts.3.gate_proj.weight"
    foreign_models.write(tmp_path / "some", {n: w for n, w in weights.items() if n != name}, config, "nvfp4")
    breccia.bridges.save_safetensors({name: torch.from_numpy(weights[name])}, tmp_path / "some" / "other.safetensors")
    found = on_meta(path)
    with pytest.raises(breccia.UnsupportedError, match="gate_up_proj: 23 of 24 tensors of its experts are quantized"):
        breccia_torch.load_model(found, tmp_path / "some")
    assert not any(isinstance(m, ScaledWeight) for m in found.modules())
