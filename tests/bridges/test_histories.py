"""Amax histories in safetensors files: read by their names, and refused where the file contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import breccia
from breccia import AmaxHistory
from breccia.bridges import convert, load_safetensors, save_safetensors

X = np.ones((4, 32), np.float32)
HISTORY = AmaxHistory(breccia.DelayedScaling(amax_history_len=4)).update(X * 3)
#: The arrays of a history "h" of three steps.
PARTS: dict[str, Any] = {"h.amaxes": np.arange(1, 4, dtype=np.float32), "h.scale": np.array(2, np.float32)}


def declared(name: str = "h") -> dict[str, str]:
    return {"breccia_histories": json.dumps({name: HISTORY.recipe.to_dict()})}


def test_a_history_is_chosen_by_its_name_or_by_that_of_an_array(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_safetensors({"layer": {"h": HISTORY, "w": X}}, path)
    for names in (["layer.h"], ["*.h"], "layer.h*"):
        found = load_safetensors(path, names=names)
        assert list(found) == ["layer.h"] and found["layer.h"].recipe == HISTORY.recipe
        assert found["layer.h"].amaxes.tolist() == [3] and float(found["layer.h"].scale) == float(HISTORY.scale)
    assert load_safetensors(path, names=["layer.h.scale"]).keys() == {"layer.h.scale"}
    with pytest.raises(breccia.UnknownNameError, match=r"such as .*layer\.h"):
        load_safetensors(path, names=["layer.x"])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"h": X}, r"the file has a tensor of this name, too\."),
        (
            {"h.amaxes": np.ones((2, 2), np.float32)},
            r"its amaxes have shape \(n,\), n <= 4, and its scale \(\); found \(2, 2\) and",
        ),
        ({"h.amaxes": np.ones(5, np.float32)}, r"n <= 4, and its scale \(\); found \(5,\) and \(\)\."),
        ({"h.amaxes": np.ones((), np.float32)}, r"found \(\) and \(\)\."),
        ({"h.scale": np.ones(1, np.float32)}, r"found \(3,\) and \(1,\)\."),
        ({"h.amaxes": np.ones(3, np.int32)}, r"its amaxes and its scale are float32; found int32 and float32\."),
        ({"h.scale": np.ones((), np.float64)}, r"found float32 and float64\."),
    ],
)
def test_arrays_that_are_no_history_are_refused(tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file({**PARTS, **tensors}, path, declared())
    with pytest.raises(breccia.CorruptFileError, match=rf"f\.safetensors: history 'h': .*{message}"):
        load_safetensors(path)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[1]", '{"h": NaN}', '{"h": {"name": "mxfp8", "fields": {}}}', '{"h": 1, "h": 2}', "[" * 100_000]
    + [json.dumps({"h": {"name": "fp8_delayed", "fields": {"margin": margin}}}) for margin in (float("nan"), [], 1e999, None)],
)
def test_metadata_that_is_no_histories_is_refused_by_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file(PARTS, path, {"breccia_histories": text})
    with pytest.raises(breccia.CorruptFileError, match=r"f\.safetensors: the metadata 'breccia_histories' cannot be read: "):
        load_safetensors(path)


def test_arrays_without_their_history_and_the_reverse_are_plain(tmp_path: Path) -> None:
    """A file of a part of a checkpoint, say."""
    path = tmp_path / "f.safetensors"
    save_file({"h.amaxes": PARTS["h.amaxes"]}, path, declared())
    assert load_safetensors(path).keys() == {"h.amaxes"}
    save_file(PARTS, path, declared(name="g"))
    assert load_safetensors(path).keys() == PARTS.keys()


def test_the_key_of_histories_is_reserved(tmp_path: Path) -> None:
    with pytest.raises(breccia.UnsupportedError, match="extra_metadata key 'breccia_histories' is reserved for amax histories"):
        save_safetensors({"h": HISTORY}, tmp_path / "f.safetensors", {"breccia_histories": "{}"})


def test_a_conversion_keeps_histories(tmp_path: Path) -> None:
    save_safetensors({"h": HISTORY, "w": X}, tmp_path / "f.safetensors")
    convert(tmp_path / "f.safetensors", tmp_path / "g.safetensors", "mxfp8")
    found = load_safetensors(tmp_path / "g.safetensors")
    assert found.keys() == {"h", "w"} and found["h"].amaxes.tolist() == [3]
