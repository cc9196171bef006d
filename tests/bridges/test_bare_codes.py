"""`load_safetensors` warns where it gives the codes of another program as plain arrays."""

from __future__ import annotations

import warnings
from pathlib import Path

import model_folders
import numpy as np
import pytest
from golden_dialects import EXPECTED, unpacked

import breccia
import breccia_bridges.bare_codes
from breccia.bridges import convert, load_checkpoint, load_safetensors, save_safetensors


def said(path: Path, **options: object) -> list[str]:
    """The messages of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_safetensors(path, **options)  # pyright: ignore[reportArgumentType]
    assert all(w.category is breccia.DialectWarning and w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("name", EXPECTED)
def test_codes_of_every_dialect_are_warned_of(name: str, tmp_path: Path) -> None:
    folder, _ = unpacked(name, tmp_path)
    (message,) = said(folder)
    assert "of another program" in message and "load_safetensors gives them as they are stored." in message
    assert "breccia.bridges.load_checkpoint " in message


def test_the_message_names_the_tensors_the_dialect_and_the_function(tmp_path: Path) -> None:
    folder, _ = unpacked("gptq_v1_int4_sym", tmp_path)
    (message,) = said(folder)
    names = "model.layers.0.mlp.down_proj.g_idx, model.layers.0.mlp.down_proj.qweight, model.layers.0.mlp.down_proj.qzeros"
    assert message == (
        f"{folder}: {names} and 5 more are codes and scales of another program (GPTQ), and load_safetensors gives them as they "
        "are stored. breccia.bridges.load_checkpoint gives the values under the names of the model."
    )


def test_for_a_dialect_that_is_recognized_only_the_way_out_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "model.safetensors"
    save_safetensors({"up.trellis": np.ones((2, 2, 32), np.int16)}, folder)
    with pytest.raises(breccia.UnsupportedError) as e:
        load_checkpoint(folder)
    (message,) = said(folder)
    assert message.endswith(f" breccia.bridges.load_checkpoint would decode them, but for this: {e.value}")


def test_a_path_is_warned_of_once(tmp_path: Path) -> None:
    folder, _ = unpacked("mlx_affine_4", tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            load_safetensors(folder)
    assert len(caught) == 1


def test_a_shard_alone_is_told_from_a_folder(tmp_path: Path) -> None:
    oss = model_folders.gpt_oss(layers=1, hidden=64, vocabulary=8, heads=2, kv_heads=1, head=32, experts=2, width=32)
    folder = oss.write(tmp_path / "model", 2)
    (message,) = said(folder / "model-00001-of-00002.safetensors")
    assert "load_checkpoint would decode them, but for this: " in message and "Give the folder of all shards" in message
    assert "(MXFP4, as gpt-oss)" in said(folder)[0]


@pytest.mark.filterwarnings("error")
def test_other_calls_are_silent(tmp_path: Path) -> None:
    folder, _ = unpacked("gptq_v1_int4_sym", tmp_path)
    assert set(load_safetensors(folder, names=["*norm*", "*embed*"])), "codes that are not loaded"
    load_checkpoint(folder)
    convert(folder, tmp_path / "ours", "none")
    load_safetensors(tmp_path / "ours")
    own = {"w": np.zeros((4, 32), np.int32), "mask": np.zeros((4, 4), np.uint8), "s": np.ones((4, 1), np.float32)}
    save_safetensors(own, tmp_path / "own.safetensors")
    load_safetensors(tmp_path / "own.safetensors")
    named = {"a.weight": np.zeros((4, 32), np.int8), "a.scale": np.ones((4, 1), np.float32)}
    save_safetensors(named, tmp_path / "named.safetensors")
    load_safetensors(tmp_path / "named.safetensors")  # of no program that is known


def test_where_no_dtype_is_that_of_codes_no_dialect_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = breccia.cast(np.ones((64, 32), np.float32), "nvfp4")
    save_safetensors({"w": w, "norm": np.ones((8, 8), np.float16), "ids": np.arange(9)}, tmp_path / "m.safetensors")
    monkeypatch.setattr(breccia_bridges.bare_codes, "recognized", None)  # calling it would raise
    assert said(tmp_path / "m.safetensors") == []
