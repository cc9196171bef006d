"""Checkpoints of rotated tensors: converted in slabs, kept in files, and refused where nothing undoes the rotation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import breccia
from breccia import UnsupportedError
from breccia.bridges import load_safetensors, save_safetensors
from breccia_bridges import slab_casts
from breccia_bridges.convert import convert
from breccia_bridges.measure import FileTensor

NAME = "model.layers.0.mlp.up_proj.weight"


def weight(rows: int = 40, columns: int = 160) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    x[:, 7] *= 20
    return x


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file({NAME: weight(), "model.norm.weight": np.ones(160, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("spec", ["nvfp4,rotation=16", "mxfp4,rotation=64,rotation_seed=5", "int4,group_size=32,rotation=32"])
def test_a_checkpoint_is_converted_to_the_bytes_of_a_cast_and_read_back(source: Path, spec: str) -> None:
    report = convert(source, source.parent / "out.safetensors", spec)
    st, x = load_safetensors(source.parent / "out.safetensors")[NAME], weight()
    assert breccia.bytes_equal(st, breccia.cast(x, spec)) and st.recipe == breccia.recipe(spec)
    noise = np.square(np.float64(x) - breccia.dequantize(st)).sum()
    expected = 10 * np.log10(np.square(np.float64(x)).sum() / noise)
    assert abs(report.sqnr - expected) < 1e-6  # sums in FP64, in another order


def test_slabs_under_a_global_scale_are_those_of_one_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The global scale is that of the whole rotated tensor."""
    x, recipe = weight(64, 128), breccia.recipe("nvfp4,rotation=64")

    def in_quarters(*_: object) -> list[tuple[slice, slice]]:
        return [(slice(0, 1), slice(n, n + 16)) for n in range(0, 64, 16)]

    monkeypatch.setattr(slab_casts, "slabs", in_quarters)
    pieces = slab_casts.SlabCasts(FileTensor(x, "F32"), recipe).cast()
    assert breccia.bytes_equal(slab_casts.assembled(pieces, recipe, x.shape), breccia.cast(x, recipe))


def test_a_file_keeps_the_rotation(tmp_path: Path) -> None:
    st = breccia.cast(weight(), "int4,rotation=128,rotation_seed=18446744073709551615")
    save_safetensors({"w": st}, tmp_path / "w.safetensors")
    again = load_safetensors(tmp_path / "w.safetensors")["w"]
    assert breccia.bytes_equal(again, st)
    np.testing.assert_array_equal(breccia.dequantize(again), breccia.dequantize(st))


def test_other_dialects_refuse_a_rotated_tensor_by_name(source: Path, tmp_path: Path) -> None:
    for dialect in ("compressed_tensors", "modelopt", "torchao"):
        with pytest.raises(
            UnsupportedError, match=rf"{NAME}: .*would not undo the rotation of nvfp4,rotation=16. Give recipe nvfp4"
        ):
            convert(source, tmp_path / "out.safetensors", "nvfp4,rotation=16", dialect=dialect)


def test_bridges_refuse_a_rotated_tensor() -> None:
    st = breccia.cast(torch.from_numpy(weight()), "mxfp4,rotation=32")
    for name in ("to_torchao", "to_compressed_tensors", "to_bitsandbytes"):
        with pytest.raises(UnsupportedError, match=rf'{name}: no other library undoes.*breccia.requantize\(st, "mxfp4"\)'):
            getattr(breccia.bridges, name)(st)


def test_calibration_refuses_a_rotated_recipe(source: Path) -> None:
    with pytest.raises(breccia.OptionError, match="the rotation of nvfp4,rotation=16 mixes them. Leave calibrate out"):
        convert(source, source.parent / "out.safetensors", "nvfp4,rotation=16", calibrate=np.zeros((1, 8), np.int64))
