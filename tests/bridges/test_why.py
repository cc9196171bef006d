"""`breccia why`: planted faults are named first, remedies are measured, and the report says what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program import Run

import breccia
from breccia import OptionError, UnsupportedError
from breccia.backend import components
from breccia.bridges import convert, load_checkpoint, save_safetensors, why

INT4 = "int4,group_size=32"
NAMES = [f"layers.{n}.{kind}.weight" for n in range(5) for kind in ("q_proj", "o_proj", "up_proj", "down_proj")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    # Tails that trained weights have: blocks differ in their largest element, and so in their error.
    values = {name: draw.standard_t(4, (16, 96)).astype(np.float32) for name in NAMES}
    save_safetensors({**values, "norm.weight": np.ones(64, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def quantized(model: Path, tmp_path: Path) -> Path:
    convert(model, tmp_path / "int4.safetensors", INT4)
    return tmp_path / "int4.safetensors"


def planted(quantized: Path, name: str, fault: str, place: int) -> Path:
    """The checkpoint with one block of one value times 8, or with a scale of zero."""
    checkpoint = load_checkpoint(quantized)
    values: dict[str, Any] = {each: checkpoint[each] for each in checkpoint}
    st = values[name]
    scale = np.array(components(st)["scale"])
    scale.reshape(-1)[place] *= 8 if fault == "times 8" else 0
    values[name] = breccia.ScaledTensor(st.data, scale, st.recipe, st.layout)
    path = quantized.with_name("planted.safetensors")
    save_safetensors(values, path, force=True)
    return path


@pytest.mark.parametrize("fault", ["times 8", "zero"])
def test_a_planted_block_is_named_twenty_times_of_twenty(fault: str, model: Path, quantized: Path) -> None:
    named = 0
    for n, name in enumerate(NAMES):
        result = why(model, planted(quantized, name, fault, place=2 * n), remedies=0)
        named += result.layers[0].name == name and not result.layers[1].is_broken
    assert named == 20


def test_what_is_wrong_is_counted_by_blocks(model: Path, quantized: Path) -> None:
    worst = why(model, planted(quantized, NAMES[3], "zero", 5)).layers[0]
    assert worst.faults and (worst.faults.blocks, worst.faults.dead, worst.faults.broken) == (16 * 3, 1, 1)
    assert worst.findings == [
        "1 block of 48 broken: nothing of the values is left",
        "1 block dead: a scale of zero, or codes that are all zero",
    ]
    assert worst.cheapest and worst.cheapest.nbytes == 0 and worst.cheapest.recipe == f"{INT4},scale_rule=mse"
    others = why(model, quantized).layers
    assert len(others) == 20 and not any(layer.is_broken or layer.findings for layer in others)


def test_nan_that_the_model_has_not_comes_first(model: Path, quantized: Path) -> None:
    checkpoint = load_checkpoint(quantized)
    values: dict[str, Any] = {each: checkpoint[each] for each in checkpoint}
    st = values[NAMES[6]]
    scale = np.array(components(st)["scale"])
    scale.reshape(-1)[0] = np.nan
    values[NAMES[6]] = breccia.ScaledTensor(st.data, scale, st.recipe, st.layout)
    save_safetensors(values, quantized, force=True)
    result = why(model, quantized)
    assert result.layers[0].name == NAMES[6] and result.layers[0].findings[0] == "32 elements became NaN or Inf"
    assert result.layers[0].cheapest and np.isfinite(result.layers[0].cheapest.left)
    assert result.to_dict()["layers"][0]["lost"] is None
    json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_that_the_original_has_itself_is_said(value: float, model: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(model)
    values = {each: np.array(checkpoint[each]) for each in checkpoint}
    values[NAMES[6]][3, 40] = value
    save_safetensors(values, model, force=True)
    convert(model, tmp_path / "q.safetensors", INT4)
    worst, *others = why(model, tmp_path / "q.safetensors").layers
    assert worst.name == NAMES[6]
    assert worst.findings[:2] == ["the original has NaN or Inf, 1 element", "31 elements became NaN or Inf"]
    assert len(others) == 19 and not any(layer.findings for layer in others)


def test_without_a_text_layers_are_in_the_order_of_the_energy_that_they_lose(model: Path, tmp_path: Path) -> None:
    policy = {NAMES[0]: "int,bits=2,group_size=32", NAMES[9]: "int,bits=3,group_size=32", "default": "mxfp8"}
    convert(model, tmp_path / "mixed.safetensors", policy)
    result = why(model, tmp_path / "mixed.safetensors")
    assert [layer.name for layer in result.layers[:2]] == [NAMES[0], NAMES[9]]
    assert result.total is None and result.measure == "squared error" and result.layers[0].alone is None
    x, st = load_checkpoint(model)[NAMES[9]], load_checkpoint(tmp_path / "mixed.safetensors")[NAMES[9]]
    expected = breccia.metrics(np.array(x), st)
    assert result.layers[1].lost == expected.noise / expected.signal
    remedies = {one.recipe: one for one in result.layers[1].remedies}
    again = breccia.cast(np.array(x), "mxfp6")
    found = breccia.metrics(np.array(x), again)
    # The same sums in FP64, added in another order.
    assert remedies["mxfp6"].left == pytest.approx(found.noise / found.signal, rel=1e-12)
    assert remedies["mxfp6"].nbytes == again.nbytes - st.nbytes and remedies["keep"].left == 0
    enough = [one for one in result.layers[1].remedies if one.left <= result.layers[1].lost / 2]
    assert result.layers[1].cheapest == min(enough, key=lambda one: one.nbytes)
    assert not result.layers[4].remedies, "three layers by default"


def test_experts_of_a_layer_are_one(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    names = [f"layers.{n}.experts.{e}.up_proj.weight" for n in range(2) for e in range(4)]
    values = {name: draw.normal(size=(64, 64)).astype(np.float32) for name in names}
    save_safetensors(values, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "q.safetensors", "mxfp4")
    result = why(tmp_path / "model.safetensors", tmp_path / "q.safetensors")
    assert {layer.name for layer in result.layers} == {f"layers.{n}.experts.*.up_proj.weight" for n in range(2)}
    assert all(len(layer.names) == 4 and layer.parameters == 4 * 64 * 64 for layer in result.layers)


def test_equal_checkpoints_have_nothing_to_rank(model: Path) -> None:
    result = why(model, model)
    assert result.layers == () and result.verdict == "no tensor differs"


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"remedies": -1}, OptionError, r"remedies \(--remedies\) is the number of layers to try remedies for; got -1"),
        ({"remedies": True}, OptionError, r"got True"),
        ({"device": "cuda"}, OptionError, r"device='cuda' \(--device\) is for calibration: give calibrate="),
        ({"calibrate": np.ones(4)}, OptionError, r"token ids: integers"),
        ({"quantized": "other"}, UnsupportedError, r"have no tensor in common"),
    ],
)
def test_what_cannot_be_done_is_refused(
    options: dict[str, Any], error: type[Exception], said: str, model: Path, quantized: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"quantized": quantized, **options}
    if given["quantized"] == "other":
        given["quantized"] = tmp_path / "other.safetensors"
        save_safetensors({"x": np.ones((4, 4), np.float32)}, given["quantized"])
    with pytest.raises(error, match=said):
        why(model, **given)


def test_the_command_prints_the_ranking_and_says_that_weights_alone_were_read(model: Path, quantized: Path, run: Run) -> None:
    path = planted(quantized, NAMES[4], "times 8", 3)
    code, out, err = run("why", model, path, "--top", "2", "--remedies", "1")
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("weights alone: layers are ranked by the share of their energy that is lost"), err
    assert lines[2].endswith(NAMES[4]) and "18 of 20 tensors not shown; --top 20 shows all" in out
    assert "cheapest" in out and f"verdict: {NAMES[4]}: " in out and "1 block of 48 broken" in out
    code, out, _ = run("why", model, path, "--json")
    found = json.loads(out)
    assert code == 0 and found["layers"][0]["name"] == NAMES[4] and found["layers"][0]["broken_blocks"] == 1
    assert len(found["layers"]) == 20 and found["total"] is None


def test_the_report_shows_the_ranking_above_what_compare_shows(model: Path, quantized: Path, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("jinja2", reason="jinja2 comes with breccia-bridges[report]")
    path = planted(quantized, NAMES[4], "zero", 3)
    code, out, err = run("why", model, path, "--report", tmp_path / "why.html")
    assert code == 0 and out.endswith(f"report: {tmp_path / 'why.html'}\n"), err
    page = (tmp_path / "why.html").read_text(encoding="utf-8")
    assert page.index("What each layer costs") < page.index("Tensor by tensor") and "Remedies for" in page
    # Its own verdict first, before that of compare.
    said = json.loads(run("why", model, path, "--json")[1])["verdict"]
    assert page.partition('role="note">\n<p>')[2].startswith(f"{said}</p>") and page.count(said) == 1
    assert "What quantization costs model.safetensors" in page and "Without it" not in page
    code, _, err = run("why", model, path, "--report", path)
    assert code == 1 and "a report is an HTML page" in err
