"""A dialect that a plug-in declares in one file (tests/third_party/quarry-breccia): everywhere where checkpoints are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_file_plugins import installed, source_of
from safetensors.numpy import save_file

import breccia
from breccia import targets
from breccia.backend import registry
from breccia.bridges import compare, convert, load_checkpoint, load_safetensors
from breccia.testing.kit import laws_of
from breccia.testing.laws.dialects import what_it_writes_is_recognized_and_read_byte_for_byte
from breccia_bridges.inspection import inspected

W = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def quarry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module of the plug-in, which is installed for these tests."""
    with installed("quarry", tmp_path_factory.mktemp("quarry")) as module:
        yield module


@pytest.fixture
def source(quarry: Any, tmp_path: Path) -> Path:
    """A folder with a weight of Quarry and a plain one."""
    st = breccia.cast(W, "int8")
    folder = tmp_path / "quarry"
    folder.mkdir()
    stored = quarry.stored(breccia.backend.ValueForm(st.recipe, st.shape))
    tensors = {f"up.{end}": array for end, array in quarry.write(st, stored).items()}
    save_file(tensors | {"norm.weight": np.ones(64, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "quarry"}}))
    return folder


def test_its_file_is_short() -> None:
    assert len((source_of("quarry") / "quarry_breccia.py").read_text(encoding="utf-8").splitlines()) <= 60


def test_it_is_read_by_everything_that_reads_checkpoints(source: Path, tmp_path: Path) -> None:
    st = breccia.cast(W, "int8")
    assert breccia.bytes_equal(load_checkpoint(source)["up.weight"], st)
    assert [d["name"] for d in inspected(source).dialects] == ["quarry"]
    report = convert(source, tmp_path / "out", "none")
    assert [t.name for t in report.codes_kept] == ["up.weight"] and compare(source, tmp_path / "out").verdict.startswith(
        "equal"
    )
    assert breccia.bytes_equal(load_safetensors(tmp_path / "out")["up.weight"], st)
    (source / "config.json").unlink()
    assert load_checkpoint(source).dialects == ["quarry"], "the names and dtypes of its tensors show it"


def test_its_errors_name_the_file_the_tensor_and_the_dialect(source: Path, tmp_path: Path) -> None:
    save_file({"up.bytes": np.zeros((32, 64), np.int8), "up.steps": np.ones(31, np.float32)}, source / "model.safetensors")
    for call in (lambda: load_checkpoint(source), lambda: convert(source, tmp_path / "out", "none")):
        with pytest.raises(breccia.DialectError, match=r"model.safetensors: up.weight \(Quarry\): 'steps' has shape \[31\]"):
            call()
    save_file({"up.bytes": np.zeros((32, 64), np.int8)}, source / "model.safetensors")
    with pytest.raises(breccia.CorruptFileError, match=r"'up.bytes' is a part of Quarry without the others: no file has 'up.s"):
        load_checkpoint(source)


def test_it_keeps_the_laws_of_dialects(quarry: Any) -> None:
    laws = [law for law in laws_of("quarry") if law.kind == "dialects"]
    kept = []
    for law in laws:
        try:
            law.check()
            kept.append(law.sentence)
        except pytest.skip.Exception:
            pass
    assert set(kept) == {law.sentence for law in laws} and len(kept) == 5


@pytest.mark.parametrize("fault", ["the rows are reversed", "NaN is read", "another recipe is said"])
def test_a_faulty_dialect_breaks_a_law(fault: str, quarry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, form = quarry.read, quarry.form
    if fault == "the rows are reversed":
        monkeypatch.setattr(quarry, "read", lambda value, f: read(value, f)[::-1])
    elif fault == "NaN is read":
        monkeypatch.setattr(quarry, "read", lambda value, f: read(_Finite(value), f))
    else:
        four = breccia.INT4Scaling()
        monkeypatch.setattr(quarry, "form", lambda value: breccia.backend.ValueForm(four, form(value).shape))
    targets.load.cache_clear()
    broken = []
    for law in [law for law in laws_of("quarry") if law.kind == "dialects"]:
        try:
            law.check()
        except pytest.skip.Exception:
            pass
        except AssertionError:
            broken.append(law.sentence)
    wanted = {"the rows are reversed": "what_it_writes", "NaN is read": "scales_that", "another recipe is said": "what_it"}
    targets.load.cache_clear()
    assert any(sentence.startswith(wanted[fault]) for sentence in broken), broken


@pytest.mark.parametrize("of_a_layer", [{"bits": 8}, None])
def test_the_laws_ask_for_the_settings_of_a_layer(of_a_layer: Any, quarry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`form` gets what the dialect's `settings` make of a config, as it does when a checkpoint is read."""
    asked: list[Any] = []
    form = quarry.form
    monkeypatch.setattr(
        quarry, "settings", lambda config: lambda layer: asked.append((config, layer)) or of_a_layer, raising=False
    )
    monkeypatch.setattr(quarry, "form", lambda value: asked.append(value.settings) or form(value))
    dialect = replace(registry().dialects["quarry"], settings="quarry_breccia:settings")
    targets.load.cache_clear()
    try:
        law = partial(what_it_writes_is_recognized_and_read_byte_for_byte, dialect, breccia.INT8Scaling())
        if of_a_layer is None:
            with pytest.raises(AssertionError, match="settings of .*quarry.* are None for a layer, expected a mapping"):
                law()
        else:
            law()
            assert asked[0] == ({"quant_method": "quarry"}, "layer") and asked[-1] == of_a_layer
    finally:
        targets.load.cache_clear()


@pytest.mark.parametrize("missing", [{"stored": None}, {"write": None}, {"recipes": ()}])
def test_functions_that_write_come_together(missing: dict[str, Any], quarry: Any) -> None:
    with pytest.raises(
        breccia.PluginError, match="stored and write are given together, with read and the recipes|form and read"
    ):
        replace(registry().dialects["quarry"], **missing, remedy="Convert the original.").check()


def test_a_file_of_its_own_is_for_a_dialect_that_is_written(quarry: Any) -> None:
    only_read = replace(registry().dialects["quarry"], stored=None, write=None, recipes=(), file="quarry_breccia:Plan")
    with pytest.raises(breccia.PluginError, match="dialect 'quarry': file is for a dialect with write"):
        only_read.check()


def test_names_of_parts_and_of_values_are_inverse() -> None:
    group = breccia.backend.TensorGroup({"_qdata": ()}, value="", prefix="_")
    assert group.stem("up.weight") == "up._weight" and group.named("up._weight") == "up.weight"
    group = breccia.backend.TensorGroup({"scales": ()})
    assert group.stem("up.weight") == "up." and group.named("up.") == "up.weight"
    assert group.stem("up.bias") is None


class _Finite:
    """A value whose scales are finite whatever the file says."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)

    def __getitem__(self, end: str) -> Any:
        array = self._value[end]
        return np.nan_to_num(array) if array.dtype.kind == "f" else array
