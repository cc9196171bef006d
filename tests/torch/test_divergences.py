"""KL divergences of many choices in one pass, against the model itself with the same weights; and what they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from calibration_models import IDS, model, saved

import breccia
from breccia import NonFiniteError, OptionError, bridges
from breccia.backend import components

INT4 = "int4,group_size=32"


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """No progress bars, and one thread: threads that wait for each other take longer than products of 64 rows."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)
    transformers.utils.logging.enable_progress_bar()


def versions(source: Path, spec: str) -> dict[str, Any]:
    """What the matrices of a model become, by their names."""
    checkpoint = bridges.load_checkpoint(source)
    casts = {
        name: breccia.dequantize(breccia.cast(np.array(checkpoint[name]), spec))
        for name in checkpoint
        if len(checkpoint.header(name).shape) == 2 and "position" not in name
    }
    return {name: lambda x=x: x for name, x in casts.items()}


def outputs(kind: str, changed: dict[str, Any]) -> torch.Tensor:
    """What the whole model computes of `IDS` with some of its weights replaced."""
    made = model(kind)
    state = made.state_dict()
    with torch.no_grad():
        for name, version in changed.items():
            state[name].copy_(torch.from_numpy(version()))
        found = made(torch.as_tensor(IDS))
    return found.logits.log_softmax(-1) if hasattr(found, "logits") else found.last_hidden_state


@pytest.mark.parametrize("kind", ["llama", "tied", pytest.param("gemma3", marks=pytest.mark.long)])
def test_a_divergence_is_that_of_the_whole_model_with_the_same_weights(kind: str, tmp_path: Path) -> None:
    source = saved(kind, tmp_path / "model")
    quantized = versions(source, INT4)
    names = [*list(quantized)[::4], "model.embed_tokens.weight"]
    variants = {f"alone {name}": {name: quantized[name]} for name in names}
    variants |= {f"without {name}": {n: v for n, v in quantized.items() if n != name} for name in names[:2]}
    variants |= {"all": quantized, "none": {}}
    seen: dict[str, Any] = {}
    found = bridges.divergences(source, IDS, variants, observe=seen.__setitem__)
    before = outputs(kind, {})
    assert found.measure == "kl" and found.costs["none"] == 0
    for name, changed in variants.items():
        after = outputs(kind, changed)
        expected = float((before.exp() * (before - after)).sum(-1).double().mean())
        # Sums in FP32 over 64 logits of about 4, in other batches: 2^-24 · 4 · 64 for each token.
        assert found.costs[name] == pytest.approx(expected, rel=1e-3, abs=2**-16)
    assert {name for name in quantized if "proj" in name} <= seen.keys()
    first = seen["model.layers.0.self_attn.q_proj.weight"]
    assert first.count == IDS.size and first.square.shape == first.largest.shape == (64,)


def test_a_model_without_logits_is_measured_by_its_last_hidden_state(tmp_path: Path) -> None:
    source = saved("bert", tmp_path / "model")
    quantized = {name: v for name, v in versions(source, INT4).items() if name.endswith("attention.output.dense.weight")}
    found = bridges.divergences(source, IDS, {"all": quantized})
    before, after = outputs("bert", {}), outputs("bert", quantized)
    shares = (after - before).square().sum((1, 2)) / before.square().sum((1, 2))
    assert found.measure == "output_error" and found.costs["all"] == pytest.approx(float(shares.mean()), rel=1e-3)


def test_fewer_tokens_and_less_memory_measure_the_first_texts(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "model")
    quantized = versions(source, INT4)
    first = bridges.divergences(source, IDS[:2], {"all": quantized}).costs["all"]
    assert bridges.divergences(source, IDS, {"all": quantized}, most=64).costs["all"] == first
    with pytest.raises(OptionError, match=r"measuring what 1 choices cost takes about .* Give max_memory='\d+MiB'") as e:
        bridges.divergences(source, IDS, {"all": quantized}, limit=64 << 20)
    give = int(str(e.value).partition("max_memory='")[2].partition("MiB")[0])
    assert bridges.divergences(source, IDS, {"all": quantized}, limit=give << 20, most=64).costs["all"] == first


def planted(source: Path, quantized: Path, name: str, fault: str, place: int) -> Path:
    checkpoint = bridges.load_checkpoint(quantized)
    values: dict[str, Any] = {each: checkpoint[each] for each in checkpoint}
    st = values[name]
    scale = np.array(components(st)["scale"])
    scale.reshape(-1)[place] *= 8 if fault == "times 8" else 0
    values[name] = breccia.ScaledTensor(st.data, scale, st.recipe, st.layout)
    path = quantized.parent / "planted.safetensors"
    bridges.save_safetensors(values, path, force=True)
    return path


def test_why_measures_each_layer_alone_and_all_but_it(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "model")
    bridges.convert(source, tmp_path / "q", INT4)
    name = "model.layers.1.self_attn.v_proj.weight"
    path = planted(source, tmp_path / "q/model.safetensors", name, "times 8", 9)
    result = bridges.why(source, path, calibrate=IDS, remedies=1)
    worst = result.layers[0]
    assert worst.name == name and result.measure == "kl" and result.tokens == IDS.size
    decoded = bridges.load_checkpoint(path)
    after = {each.name: (lambda n=each.name: breccia.dequantize(decoded[n])) for each in result.layers}
    measured = bridges.divergences(
        source, IDS, {"all": after, "alone": {name: after[name]}, "without": {n: v for n, v in after.items() if n != name}}
    ).costs
    assert (result.total, worst.alone, worst.without) == (measured["all"], measured["alone"], measured["without"])
    assert worst.peak and worst.outliers is not None
    kept = next(one for one in worst.remedies if one.recipe == "keep")
    assert kept.left == worst.without and worst.cheapest and worst.cheapest.nbytes == 0
    assert worst.cheapest.left < result.total - (result.total - kept.left) / 2


#: A value, the size that its elements get, and the message: NaN weights, and finite ones whose outputs overflow.
BROKEN = {
    "embedding": ("model.embed_tokens.weight", np.nan, "in the weights of model.embed_tokens,"),
    "linear": ("model.layers.1.mlp.down_proj.weight", np.nan, "in the weights of model.layers.1.mlp.down_proj,"),
    "overflow": ("model.layers.0.mlp.up_proj.weight", 3e38, "on the text, first in the outputs of model.layers.0.mlp.up_proj,"),
    "norm": ("model.norm.weight", np.inf, "in the weights of model.norm,"),
    "head": ("lm_head.weight", np.nan, "in the weights of lm_head,"),
}


@pytest.mark.parametrize("place", BROKEN)
def test_an_original_with_nan_is_refused_and_its_first_layer_named(place: str, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "model")
    bridges.convert(source, tmp_path / "q", INT4)
    name, size, said = BROKEN[place]
    checkpoint = bridges.load_checkpoint(source)
    values = {each: np.array(checkpoint[each]) for each in checkpoint}
    values[name] = np.copysign(np.float32(size), values[name])
    bridges.save_safetensors(values, source / "model.safetensors", force=True)
    with pytest.raises(
        NonFiniteError, match=rf"model, the original, has NaN or Inf {said} so nothing can be measured"
    ) as refused:
        bridges.why(source, tmp_path / "q", calibrate=IDS[:2])
    assert refused.value.found["name"] == name.removesuffix(".weight")


@pytest.mark.long
@pytest.mark.parametrize("fault", ["times 8", "zero"])
def test_why_names_a_planted_layer_twenty_times_of_twenty(fault: str, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "model")
    bridges.convert(source, tmp_path / "q", INT4)
    file = tmp_path / "q/model.safetensors"
    checkpoint = bridges.load_checkpoint(file)
    names = [name for name in checkpoint if isinstance(checkpoint[name], breccia.ScaledTensor)]
    named = 0
    for n in range(20):
        name = names[n % len(names)]
        path = planted(source, file, name, fault, place=6 * n)
        named += bridges.why(source, path, calibrate=IDS[:1], remedies=0).layers[0].name == name
    assert named == 20


@pytest.mark.long
def test_a_mix_by_divergences_costs_less_than_one_by_squared_errors(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "model")
    options: dict[str, Any] = {"target_bits": 4.5, "method": "importance"}
    recipes = ["mxfp4", "nvfp4", "mxfp6"]
    report = bridges.convert(source, tmp_path / "out", recipes, calibrate=IDS, **options)
    bridges.convert(source, tmp_path / "one", "nvfp4", calibrate=IDS, method="importance")
    assert report.mix and report.mix.measure == "KL divergence, nats per token" and report.mix.bits <= 4.5
    costs = {}
    for folder in ("out", "one"):
        values = bridges.load_checkpoint(tmp_path / folder)
        decoded = {t.name: (lambda n=t.name, v=values: breccia.dequantize(v[n])) for t in report.quantized}
        costs[folder] = bridges.divergences(source, IDS, {"all": decoded}).costs["all"]
    assert costs["out"] < costs["one"]
    bridges.convert(source, tmp_path / "again", dict(report.mix.rules), calibrate=IDS, method="importance")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
