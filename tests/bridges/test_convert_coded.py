"""Codes that are quantized again: the bytes of a cast of the decoded whole, whatever the slabs, threads and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import breccia
from breccia.bridges import convert, load_safetensors, save_safetensors
from breccia.internal import measuring
from breccia.kernels import reference
from breccia_bridges import slab_casts

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = breccia.get_num_threads()
    breccia.set_num_threads(request.param)
    yield request.param
    breccia.set_num_threads(before)


def expected(st: breccia.ScaledTensor, recipe: str) -> list[bytes]:
    """The components of a cast by the generic algorithm."""
    whole = breccia.cast(reference.dequantize(st), recipe, prefer="reference.cast")
    return [np.asarray(part).tobytes() for part in breccia.backend.components(whole).values()]


@pytest.mark.parametrize("slab", [1 << 12, 1 << 15, 1 << 20])
@pytest.mark.parametrize(
    ("source", "shape"),
    [("fp8_block,block_m=128", (400, 512)), ("fp8_row", (3, 40, 320)), ("fp8_current", (200, 304)), ("mxfp8", (96, 512))],
)
def test_codes_become_nvfp4_with_the_bytes_of_a_cast_of_the_whole(
    source: str, shape: tuple[int, ...], slab: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(slab).standard_normal(shape, np.float32)
    st = breccia.cast(x, source)
    save_safetensors({NAME: st}, tmp_path / "a.safetensors")
    monkeypatch.setattr(measuring, "SLAB", slab)
    for verify in ("full", "none"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "nvfp4", include=[NAME], verify=verify, force=True)
        found = load_safetensors(tmp_path / "b.safetensors")[NAME]
        assert isinstance(found, breccia.ScaledTensor)
        assert [np.asarray(part).tobytes() for part in breccia.backend.components(found).values()] == expected(st, "nvfp4")


def test_a_value_with_nan_has_the_bytes_of_a_cast_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((64, 512), np.float32)
    x[20, 300] = np.nan
    st = breccia.cast(x, "fp8_row")
    save_safetensors({NAME: st}, tmp_path / "a.safetensors")
    monkeypatch.setattr(measuring, "SLAB", 1 << 12)
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "nvfp4")
    found = load_safetensors(tmp_path / "b.safetensors")[NAME]
    assert [np.asarray(part).tobytes() for part in breccia.backend.components(found).values()] == expected(st, "nvfp4")


def test_without_a_kernel_that_takes_one_pass_the_bytes_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    st = breccia.cast(np.random.default_rng(0).standard_normal((400, 512), np.float32), "fp8_block,block_m=128")
    save_safetensors({NAME: st}, tmp_path / "a.safetensors")
    monkeypatch.setattr(measuring, "SLAB", 1 << 15)
    files: list[bytes] = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(slab_casts.FileTensor, "takes_one_pass", lambda *_: False)
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "nvfp4", force=True)
        files.append((tmp_path / "b.safetensors").read_bytes())
    assert files[0] == files[1]
