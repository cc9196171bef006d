"""`convert(..., target_bits=)`: the least squared error in so many bits, a policy that repeats it, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program import Run

import breccia
from breccia import OptionError, UnknownNameError, UnsupportedError
from breccia.bridges import compare, convert, save_safetensors
from breccia_bridges.target_bits import LADDER

SHAPES = {
    "model.layers.0.self_attn.q_proj.weight": (64, 128),
    "model.layers.0.self_attn.k_proj.weight": (32, 128),
    "model.layers.0.mlp.down_proj.weight": (128, 256),
    "model.embed_tokens.weight": (50, 128),
}
QUANTIZED = [name for name in SHAPES if "embed" not in name]
RECIPES = ["int3,group_size=32", "int4,group_size=32", "mxfp8"]


@pytest.fixture
def values() -> dict[str, np.ndarray]:
    """Tensors whose errors differ at equal bits: with one, two and three degrees of freedom, tails are heavier."""
    draw = np.random.default_rng(0)
    return {name: draw.standard_t(n + 3, shape).astype(np.float32) for n, (name, shape) in enumerate(SHAPES.items())}


@pytest.fixture
def source(values: dict[str, np.ndarray], tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_safetensors(values, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    return folder


def lost(x: np.ndarray, st: breccia.ScaledTensor) -> float:
    """The share of the energy of `x` that is lost, times the square root of its size."""
    found = breccia.metrics(x, st)
    return found.noise / found.signal * math.sqrt(x.size)


@pytest.mark.parametrize("bits", [3.6, 4.5, 5.5, 8.0])
def test_no_other_choice_of_recipes_loses_less_in_as_many_bits(
    bits: float, values: dict[str, np.ndarray], source: Path, tmp_path: Path
) -> None:
    report = convert(source, tmp_path / "out", RECIPES, target_bits=bits)
    found = {t.name: t.recipe.spec for t in report.tensors if t.recipe}
    cast = {(name, spec): breccia.cast(values[name], spec) for name in QUANTIZED for spec in RECIPES}
    parameters = sum(math.prod(SHAPES[name]) for name in QUANTIZED)
    totals = {
        choice: (
            sum(lost(values[name], cast[name, spec]) for name, spec in zip(QUANTIZED, choice, strict=True)),
            8 * sum(cast[name, spec].nbytes for name, spec in zip(QUANTIZED, choice, strict=True)) / parameters,
        )
        for choice in itertools.product(RECIPES, repeat=len(QUANTIZED))
    }
    best = min((choice for choice, (_, size) in totals.items() if size <= bits), key=lambda choice: totals[choice][0])
    assert found == {name: breccia.recipe(spec).spec for name, spec in zip(QUANTIZED, best, strict=True)}
    assert report.mix and report.bits_per_parameter == report.mix.bits == totals[best][1] <= bits
    assert report.mix.damage == pytest.approx(totals[best][0], rel=1e-9)  # sums in FP64, in another order


def test_the_policy_beside_the_output_writes_the_same_bytes(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    report = convert(source, tmp_path / "out", target_bits=4.6)
    path = tmp_path / "out.policy.yaml"
    assert path.read_text().startswith("# A policy of `breccia convert --target-bits`: model at 4.")
    convert(source, tmp_path / "again", str(path))
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    assert report.mix and breccia.Policy.of(dict(report.mix.rules)).default
    convert(source, tmp_path / "third", dict(report.mix.rules))
    assert (tmp_path / "third/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_a_mix_loses_less_than_any_one_recipe_in_its_bits(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", target_bits=4.5)
    assert report.mix and report.mix.single and report.mix.damage < report.mix.single[1]
    assert set(report.mix.counts) <= {breccia.recipe(spec).spec for spec in LADDER} and report.mix.bits <= 4.5
    assert report.to_dict()["target"]["policy"] == report.mix.rules


def test_patterns_choose_what_is_mixed_and_keep_leaves_tensors(source: Path, tmp_path: Path) -> None:
    report = convert(
        source, tmp_path / "out", ["mxfp4", "mxfp8", "keep"], target_bits=20, include=["*embed*"], exclude=["*q_proj*"]
    )
    kept = {t.name for t in report.kept}
    assert "model.layers.0.self_attn.q_proj.weight" in kept and report.mix and report.mix.bits <= 20
    mixed = sum(t.bytes_out for t in report.tensors if "q_proj" not in t.name)
    assert report.mix.parameters == sum(math.prod(shape) for name, shape in SHAPES.items() if "q_proj" not in name)
    assert mixed * 8 / report.mix.parameters == report.mix.bits
    assert "keep" in report.mix.counts and "keep" in report.mix.rules.values()
    again = convert(source, tmp_path / "again", dict(report.mix.rules))
    assert {t.name: t.stored_as for t in again.tensors} == {t.name: t.stored_as for t in report.tensors}


@pytest.mark.parametrize("dialect", ["compressed_tensors", None])
def test_layers_that_engines_compute_as_one_get_one_recipe_where_the_dialect_is_for_engines(
    dialect: str | None, source: Path, tmp_path: Path
) -> None:
    recipes = ["int4,group_size=32,scale_dtype=bf16", "int8,group_size=32,scale_dtype=bf16"]
    report = convert(source, tmp_path / "out", recipes, target_bits=5.7, dialect=dialect)
    specs = {t.name.split(".")[-2]: t.recipe.spec for t in report.tensors if t.recipe}
    # 5.59 bits: 8.5 of the 12,288 parameters of query and key, 4.5 of the other 32,768.
    assert (specs["q_proj"] == specs["k_proj"]) or dialect is None
    assert not report.unlike_layers and len(set(specs.values())) == 2


def test_experts_of_a_layer_get_one_recipe_and_one_rule(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    shapes = {f"model.layers.{n}.mlp.experts.{e}.up_proj.weight": (64, 64) for n in range(2) for e in range(12)}
    values = {name: (draw.standard_t(2, shape) if ".3." in name else draw.normal(size=shape)) for name, shape in shapes.items()}
    save_safetensors({name: x.astype(np.float32) for name, x in values.items()}, tmp_path / "m.safetensors")
    report = convert(tmp_path / "m.safetensors", tmp_path / "o.safetensors", ["mxfp4", "mxfp8"], target_bits=6.25)
    specs = {n: {t.stored_as for t in report.tensors if f"layers.{n}." in t.name} for n in range(2)}
    assert sorted(spec for each in specs.values() for spec in each) == ["mxfp4", "mxfp8"]
    assert report.mix and len(report.mix.rules) == 2 and any("experts.*." in pattern for pattern in report.mix.rules)
    assert (tmp_path / "o.policy.yaml").exists()


def test_a_quantized_source_keeps_codes_that_a_recipe_holds(values: dict[str, np.ndarray], tmp_path: Path) -> None:
    first = QUANTIZED[0]
    save_safetensors({**values, first: breccia.cast(values[first], "mxfp4")}, tmp_path / "m.safetensors")
    report = convert(tmp_path / "m.safetensors", tmp_path / "o.safetensors", ["mxfp4", "mxfp8"], target_bits=6.0)
    assert next(t for t in report.tensors if t.name == first).codes_kept
    again = compare(tmp_path / "m.safetensors", tmp_path / "o.safetensors")
    assert first in {t.name for t in again.kept}, "the same bytes"


def test_a_dry_run_chooses_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    report = convert(source, tmp_path / "out", target_bits=4.5, dry_run=True)
    assert report.mix and report.mix.bits <= 4.5 and sorted(tmp_path.rglob("*")) == before


def test_a_file_that_is_no_policy_of_a_conversion_stays(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.policy.yaml"
    path.write_text("default: mxfp4\n")
    with pytest.raises(FileExistsError, match=r"out.policy.yaml exists, where the policy .* would be written; move it, or"):
        convert(source, tmp_path / "out", target_bits=4.5)
    assert path.read_text() == "default: mxfp4\n" and not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", target_bits=4.5, force=True)
    assert "default: mxfp4\n" not in path.read_text()
    convert(source, tmp_path / "out", target_bits=4.5, force=True)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"target_bits": 3}, OptionError, r"target_bits=3 .*below what .* at least, 3\.500 bits .*Give more bits"),
        ({"target_bits": 9}, OptionError, r"target_bits=9 .*above what .* at most, 8\.250 bits .*'keep' leaves"),
        ({"target_bits": float("nan")}, OptionError, r"target_bits \(--target-bits\) is a number of bits .*; got nan"),
        ({"target_bits": float("inf")}, OptionError, r"is a number of bits per parameter, such as 4.5; got inf"),
        ({"target_bits": -4}, OptionError, r"is a number of bits per parameter, such as 4.5; got -4"),
        ({"target_bits": True}, OptionError, r"is a number of bits per parameter, such as 4.5; got True"),
        ({"target_bits": "4.5"}, OptionError, r"is a number of bits per parameter, such as 4.5; got '4.5'"),
        ({"recipe": "mxfp4"}, OptionError, r"chooses among recipes, and got 'mxfp4'. Give a list \(--recipe nvfp4 --recipe"),
        ({"recipe": ["mxfp4"]}, OptionError, r"chooses among recipes, and got \['mxfp4'\]"),
        ({"recipe": {"default": "mxfp4"}}, OptionError, r"chooses among recipes, and got \{'default'"),
        ({"recipe": ["mxfp4", "nvpf4"]}, UnknownNameError, r"nvpf4"),
        ({"recipe": ["mxfp4", "nvfp4"], "target_bits": None}, OptionError, r"several recipes \(--recipe\) are for target_"),
        ({"exact": True}, OptionError, r"exact=True \(--exact\) changes no value, and target_bits= .* quantizes: use one"),
        ({"exclude": ["*"]}, OptionError, r"no tensor of .* is quantized under any of"),
        ({"exclude": ["*nothing*"]}, UnknownNameError, r"matches no tensor"),
        ({"dialect": "deepseek_v3"}, UnsupportedError, r"different recipes, and .* has one setting for all"),
        ({"max_memory": "16MiB"}, OptionError, r"Give max_memory="),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    options: dict[str, Any], error: type[Exception], said: str, source: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"recipe": None, "target_bits": 4.5, **options}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=said):
        convert(source, tmp_path / "out", **given)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_shows_what_was_chosen_and_where_the_policy_is(source: Path, tmp_path: Path, run: Run) -> None:
    words = ("convert", source, tmp_path / "out", "--target-bits", "4.6", "-r", "mxfp4", "-r", "mxfp6", "-r", "mxfp8")
    code, out, err = run(*words)
    text = " ".join(out.split())
    assert code == 0 and "bits per parameter; squared error, predicted:" in text, err
    assert "under mxfp4 alone" in text and "out.policy.yaml; as --recipe it chooses the same" in text
    code, out, _ = run(*words, "--force", "--json")
    target = json.loads(out)["target"]
    assert code == 0 and target["single"]["recipe"] == "mxfp4" and target["damage"] < target["single"]["damage"]
    assert sum(target["tensors"].values()) == 3 and target["measure"] == "squared error"
    code, _, err = run("convert", source, tmp_path / "other", "--target-bits", "many")
    assert code == 2 and "--target-bits" in err
    code, _, err = run("convert", source, tmp_path / "other", "-r", "mxfp4", "-r", "mxfp8")
    assert code == 1 and "several recipes (--recipe) are for target_bits=" in err
