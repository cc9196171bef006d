"""What breccia writes for bitsandbytes, read back; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialect_folders import floats, values
from written_folders import refusal_of, stored_of, written

import breccia
from breccia import OptionError, UnsupportedError
from breccia.backend import StoredForm, ValueForm, registry
from breccia_bridges.dialects.bitsandbytes import config, stored, write

W = np.random.default_rng(46).standard_normal((8, 256)).astype(np.float32)
BNB = registry().dialects["bitsandbytes"]
HEAD = {"lm_head.weight": floats("BF16", W)}


def form(spec: str, shape: tuple[int, ...] = (8, 256), **fields: Any) -> ValueForm:
    return ValueForm(breccia.recipe(spec), shape, **fields)


def config_of(activations: str | None = None, **specs: str) -> dict[str, Any]:
    forms = {module: stored(form(spec, dtype="F16")) for module, spec in specs.items()}
    return config(dict[str, StoredForm](forms), ("lm_head",), activations)["config.json"]["quantization_config"]


@pytest.mark.parametrize("spec", BNB.recipes)
def test_every_recipe_is_read_back(spec: str, tmp_path: Path) -> None:
    st = breccia.cast(W, spec)
    folder = written(tmp_path, "bitsandbytes", {"up.weight": st}, HEAD)
    found = values(folder)["up.weight"].tensor()
    assert np.array_equal(np.asarray(breccia.dequantize(found)), np.asarray(breccia.dequantize(st)))
    listed = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert listed["load_in_8bit"] is ("int8" in spec) and listed["llm_int8_skip_modules"] == ["lm_head"]


def test_weights_are_decoded_and_multiplied_in_the_dtype_of_the_model() -> None:
    assert config_of(up="nf4")["bnb_4bit_compute_dtype"] == "float16"
    assert stored(form("nf4", dtype="F32")).settings["state"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        ("nf4,block_size=16", "nf4,block_size=32"),
        ("nf4,scale_dtype=bf16", "nf4"),
        ("int4", "nf4,block_size=128"),
        ("int8", "bnb_int8,scale_dtype=fp32"),
        ("mxfp4", "nf4,block_size=32"),
    ],
)
def test_other_recipes_are_refused_with_the_nearest_one(spec: str, nearest: str) -> None:
    said = refusal_of(BNB, breccia.cast(W, spec))
    assert said.startswith("it holds NF4 and its own FP4 with an FP32 absmax per 32, 64, ")
    assert said.endswith(f"{breccia.recipe(spec).spec!r} is none of these. The nearest recipe for it is {nearest!r}.")


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (form("nf4", (8, 96)), "blocks of 64 do not divide shape 8x96. The nearest recipe for it is 'nf4,block_size=32'."),
        (form("bnb_int8,scale_dtype=fp32", (2, 8, 64)), "a weight of LLM.int8() is a matrix; this value has shape 2x8x64."),
        (
            form("nf4", is_transposed=True),
            "it has its blocks along the last axis; those of this value run along axis -2.",
        ),
        (form("nf4", (2, 128), layout=breccia.PerGroupIndex((0, 1) * 64, 2)), "this value has PerGroupIndex"),
    ],
)
def test_other_forms_are_refused(refused: ValueForm, said: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        stored(refused)
    assert said in str(caught.value)


def test_another_constant_is_refused() -> None:
    st = breccia.cast(W, "bnb_int8")
    with pytest.raises(
        UnsupportedError, match=r"multiplies absmax by 0\.00787.*; the scale of this tensor is .*scale_dtype=fp32'\."
    ):
        write(st, stored_of(BNB, st))


@pytest.mark.parametrize(
    ("activations", "specs", "said"),
    [
        (None, {"up": "nf4", "down": "bnb_fp4"}, "one type for all modules; got nf4 in up, fp4 in down. Give all the same"),
        (
            "int8",
            {"up": "nf4"},
            "activations='int8': layers of bitsandbytes (bitsandbytes) with these weights have 'none'. Leave it out",
        ),
        (
            "none",
            {"up": "bnb_int8,scale_dtype=fp32"},
            "activations='none': layers of bitsandbytes (bitsandbytes) with these weights have 'int8'.",
        ),
    ],
)
def test_configs_that_it_does_not_have_are_refused(activations: str | None, specs: dict[str, str], said: str) -> None:
    with pytest.raises((UnsupportedError, OptionError)) as caught:
        config_of(activations, **specs)
    assert said in str(caught.value)
