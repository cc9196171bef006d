"""What pickles, torch.save and safetensors files hold of tensors, layers and histories."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

import breccia
from breccia import AmaxHistory, ScaledTensor
from breccia_torch.nn import ScaledExperts, ScaledWeight


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def read(stored: bytes) -> Any:
    return torch.load(io.BytesIO(stored), weights_only=True)


def stack(spec: str) -> ScaledTensor:
    return breccia.cast(torch.randn(32, 64, 256), spec)


ONE: dict[str, Callable[[ScaledTensor], ScaledTensor]] = {
    "matrix": lambda st: st[3],
    "transposed": lambda st: st[3].mT,
    "rows": lambda st: st[3, :32],
    "group": lambda st: st[2:4],
}


@pytest.mark.parametrize("one", ONE)
@pytest.mark.parametrize("spec", ["nvfp4", "fp8_block", "int4,signed=false,symmetric=false"])
def test_a_part_of_a_stack_is_stored_without_the_rest(spec: str, one: str) -> None:
    whole = stack(spec)
    part = ONE[one](whole)
    for stored, back in ((pickle.dumps(part), pickle.loads), (saved(part), read)):
        assert len(stored) < part.nbytes + 8000 < whole.nbytes
        assert breccia.bytes_equal(back(stored), part)
    assert breccia.bytes_equal(copy.deepcopy(part), part)
    weight = ScaledExperts(part, torch.float32) if part.ndim == 3 else ScaledWeight(part)
    assert len(pickle.dumps(weight)) < part.nbytes + 8000
    assert breccia.bytes_equal(pickle.loads(pickle.dumps(weight)).tensor, part)


def test_views_of_all_of_a_tensor_are_stored_once() -> None:
    st = breccia.cast(torch.randn(64, 256), "fp8_block")
    assert len(saved([st, st.mT])) < 1.5 * st.nbytes


def histories() -> dict[str, AmaxHistory]:
    recipe = breccia.DelayedScaling("E5M2", amax_history_len=3, margin=1)
    updated = AmaxHistory(recipe).update(torch.randn(4, 8)).update(torch.randn(4, 8) * 9)
    of_numpy = AmaxHistory(recipe).update(np.ones((4, 8), np.float32))
    return {"updated": updated, "fresh": AmaxHistory(recipe), "of_numpy": of_numpy}


def same(a: AmaxHistory, b: AmaxHistory) -> bool:
    x = torch.arange(32.0).reshape(4, 8)
    for each in (a, b):
        assert isinstance(each, AmaxHistory)
    (left, after), (right, then) = a.cast(x), b.cast(x)
    return a.recipe == b.recipe and breccia.bytes_equal(left, right) and torch.equal(after.amaxes, then.amaxes)


@pytest.mark.parametrize("name", ["updated", "fresh"])
def test_a_history_is_saved_and_read_with_weights_only(name: str) -> None:
    history = histories()[name]
    assert same(read(saved({"history": history}))["history"], history)
    assert same(pickle.loads(pickle.dumps(history)), history)


def test_histories_in_a_safetensors_file_are_histories_again(tmp_path: Path) -> None:
    bridges = pytest.importorskip("breccia_bridges").__name__ and breccia.bridges
    known, st = histories(), breccia.cast(torch.randn(4, 64), "nvfp4")
    bridges.save_safetensors({"w": st, "layers": {"0": known}}, tmp_path / "state.safetensors", {"step": "7"})
    found = bridges.load_safetensors(tmp_path / "state.safetensors", framework="torch")
    assert breccia.bytes_equal(found["w"], st) and len(found) == 4
    for name in ("updated", "fresh"):
        assert same(found[f"layers.0.{name}"], known[name])
    assert found["layers.0.of_numpy"].amaxes.tolist() == known["of_numpy"].amaxes.tolist()
    nested = bridges.load_safetensors(tmp_path / "state.safetensors", nested=True)
    assert isinstance(nested["layers"]["0"]["updated"], AmaxHistory)
    from safetensors.torch import load_file

    assert load_file(tmp_path / "state.safetensors")["layers.0.updated.amaxes"].shape == (2,)
    with pytest.raises(breccia.UnsupportedError, match="'h' is stored as h.scale, which another tensor has"):
        bridges.save_safetensors({"h": known["updated"], "h.scale": torch.ones(1)}, tmp_path / "other.safetensors")


def test_damaged_histories_in_a_file_are_an_error_that_names_it(tmp_path: Path) -> None:
    pytest.importorskip("breccia_bridges")
    from safetensors.torch import save_file

    file = tmp_path / "damaged.safetensors"
    save_file({"h.amaxes": torch.ones(2), "h.scale": torch.ones(())}, file, {"breccia_histories": '{"h": {"name": "nvfp4"}}'})
    with pytest.raises(breccia.CorruptFileError, match="damaged.safetensors: the metadata 'breccia_histories' cannot be read"):
        breccia.bridges.load_safetensors(file)
