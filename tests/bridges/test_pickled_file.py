"""Checkpoints of torch.save: tensors are mapped, torchao's have the parts of its safetensors files, and no program runs."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_dialects import EXPECTED, unpacked
from program import Run
from safetensors import safe_open

import breccia
from breccia import CorruptFileError, UnsupportedError
from breccia.bridges import compare, convert, load_checkpoint, load_safetensors
from breccia_bridges.inspection import inspected
from breccia_bridges.pickled_file import PickledFile
from breccia_bridges.safetensors_file import Container

torch = pytest.importorskip("torch")
W = torch.ones(2, 2)
TORCHAO = [name for name in EXPECTED if name.startswith("torchao_")]


def state() -> dict[str, Any]:
    """Tensors of many dtypes and shapes."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    return {
        "w": x,
        "parameter": torch.nn.Parameter(x.to(torch.bfloat16)),
        "transposed": x.T,
        "part": x[1:3, ::2],
        "tied": x,
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4, dtype=torch.float16),
        "mask": x > 0,
        "fp8": x.to(torch.float8_e4m3fn),
        "e8m0": torch.tensor([1.0, 4.0]).to(torch.float8_e8m0fnu),
        "complex": torch.complex(x, x),
        "words": torch.tensor([1, 2**31], dtype=torch.uint32),
    }


def folder(path: Path, tensors: Any, name: str = "pytorch_model.bin", **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    torch.save(tensors, path / name)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_tensors_are_those_of_a_safetensors_file(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "m.bin")
    stock = importlib.import_module("safetensors.torch")
    stock.save_file({name: t.detach().contiguous().clone() for name, t in state().items()}, tmp_path / "m.safetensors")
    found, expected = PickledFile(tmp_path / "m.bin"), Container(tmp_path / "m.safetensors")
    assert found.names == list(state()) and set(found.entries) == set(expected.entries)
    for name, entry in expected.entries.items():
        own = found.entries[name]
        assert (own.dtype, own.shape, own.nbytes) == (entry.dtype, entry.shape, entry.nbytes)
        for array in (found.view(name), found.read(name), found.array(name)):
            assert array.dtype == expected.read(name).dtype and array.shape == expected.read(name).shape
            assert array.tobytes() == expected.read(name).tobytes()


def test_tensors_that_torch_negates_or_conjugates_when_it_reads_them_have_their_values(tmp_path: Path) -> None:
    x = torch.complex(W, torch.arange(4.0).reshape(2, 2))
    tensors = {"negated": torch._neg_view(W), "conjugated": x.conj(), "both": x.clone().conj().imag}
    torch.save(tensors, tmp_path / "m.pt")
    file = PickledFile(tmp_path / "m.pt")
    for name, tensor in tensors.items():
        assert np.array_equal(file.read(name), tensor.resolve_conj().resolve_neg().numpy())


def test_what_torch_raises_when_a_tensor_is_read_is_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": W}, tmp_path / "m.pt")
    file = PickledFile(tmp_path / "m.pt")

    def damaged(self: Any) -> Any:
        raise RuntimeError("no such storage")

    monkeypatch.setattr(torch.Tensor, "contiguous", damaged)
    with pytest.raises(CorruptFileError, match=r"m\.pt: torch\.load cannot read it \(RuntimeError: no such storage\)"):
        file.view("w")


def test_tensors_are_mapped_and_writing_to_them_does_not_change_the_file(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "m.bin")
    before, file = (tmp_path / "m.bin").read_bytes(), PickledFile(tmp_path / "m.bin")
    view = file.view("w")
    assert np.shares_memory(view, file.view("tied")) and not np.shares_memory(view, file.read("w"))
    with open("/proc/self/maps") if sys.platform == "linux" else open(os.devnull) as maps:
        assert sys.platform != "linux" or any(str(tmp_path / "m.bin") in line for line in maps)
    view[:] = 7
    assert (tmp_path / "m.bin").read_bytes() == before


def rebuilt(name: str, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A golden checkpoint of torchao, and its tensors as torchao's classes."""
    pytest.importorskip("torchao")
    source, _ = unpacked(name, tmp_path)
    support = importlib.import_module("torchao.prototype.safetensors.safetensors_support")
    with safe_open(source / "model.safetensors", "pt") as file:
        tensors, left = support.unflatten_tensor_state_dict({k: file.get_tensor(k) for k in file.keys()}, file.metadata())  # noqa: SIM118
    assert not left
    return source, tensors


@pytest.mark.parametrize("name", TORCHAO)
def test_torchao_s_tensors_are_those_of_its_safetensors_files(name: str, tmp_path: Path) -> None:
    source, tensors = rebuilt(name, tmp_path)
    config = json.loads((source / "config.json").read_text())
    pickled = folder(tmp_path / "pickled", tensors, **config)
    expected, found = load_checkpoint(source), load_checkpoint(pickled)
    assert set(found) == set(expected) and found.dialects == ["torchao"]
    for value, st in expected.items():
        if isinstance(st, breccia.ScaledTensor):
            assert breccia.bytes_equal(found[value], st) and found[value].recipe == st.recipe
        else:
            assert found[value].tobytes() == st.tobytes()
    assert inspected(pickled).kinds == inspected(source).kinds
    report = convert(pickled, tmp_path / "out", "none")
    assert len(report.codes_kept) == len(report.quantized) > 0
    assert compare(source, tmp_path / "out").verdict.startswith("equal: ")
    assert not list((tmp_path / "out").glob("*.bin"))


@pytest.mark.long
def test_torchao_is_imported_for_a_file_that_needs_it(tmp_path: Path) -> None:
    _, tensors = rebuilt("torchao_mxfp8", tmp_path)
    pickled = folder(tmp_path / "pickled", tensors)
    code = (
        f"import breccia, sys; c = breccia.bridges.load_checkpoint({str(pickled)!r}); "
        "print(c.dialects, 'torchao' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "['torchao'] True\n", done.stderr
    torch.save({"w": torch.ones(2)}, pickled / "pytorch_model.bin")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[] False\n", done.stderr


def sharded(path: Path) -> Path:
    """Two files and their index."""
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    folder(path, {"a.weight": torch.ones(64, 64)}, names[0])
    folder(path, {"b.weight": torch.full((32, 64), 2.0), "norm.weight": torch.ones(64)}, names[1])
    index = {"weight_map": {"a.weight": names[0], "b.weight": names[1], "norm.weight": names[1]}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return path


def test_a_sharded_folder_is_converted_to_safetensors_with_an_index(tmp_path: Path, run: Run) -> None:
    source = sharded(tmp_path / "source")
    (source / "training_args.bin").write_bytes(b"of another kind")
    report = convert(source, tmp_path / "out", "mxfp8")
    assert {t.name for t in report.quantized} == {"a.weight", "b.weight"}
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert float(np.asarray(load_safetensors(tmp_path / "out")["b.weight"].dequantize()).max()) == 2
    code, out, _ = run("inspect", source)
    assert code == 0 and "3 tensors, 0 of them scaled" in out
    assert set(load_checkpoint(source)) == {"a.weight", "b.weight", "norm.weight"}
    whole = folder(tmp_path / "whole", {"a.weight": torch.ones(64, 64)})
    convert(whole, tmp_path / "one", "mxfp8")
    assert {file.name for file in (tmp_path / "one").iterdir()} == {"config.json", "model.safetensors"}
    convert(whole / "pytorch_model.bin", tmp_path / "one.safetensors", "nvfp4")
    assert load_safetensors(tmp_path / "one.safetensors")["a.weight"].recipe.name == "nvfp4"


def test_an_index_that_the_files_contradict_is_refused(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    torch.save({"b.weight": torch.ones(32, 64)}, source / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(CorruptFileError, match=r"tensor 'norm.weight' is in .*00002.bin by the index, but in no file in fact"):
        convert(source, tmp_path / "out", "mxfp8")
    (source / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(CorruptFileError, match=r"index.json names pytorch_model-00001-of-00002.bin, which the folder lacks"):
        load_checkpoint(source)


def test_safetensors_files_come_first(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    breccia.bridges.save_safetensors({"only": np.ones(3, np.float32)}, source / "model.safetensors")
    assert list(load_checkpoint(source)) == ["only"]


class _Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)  # pyright: ignore[reportDeprecated]


def test_no_program_in_a_pickle_runs(tmp_path: Path, run: Run) -> None:
    marker, attack = tmp_path / "ran", _Attack(f"{sys.executable} -c \"open(r'{tmp_path / 'ran'}', 'w')\"")
    pickle.loads(pickle.dumps(attack))
    assert marker.exists(), "the attack works"
    marker.unlink()
    source = folder(tmp_path / "source", {"w": torch.ones(4, 32), "x": attack}, quantization_config={"quant_method": "torchao"})
    calls: list[Callable[[], Any]] = [
        lambda: load_checkpoint(source),
        lambda: inspected(source),
        lambda: convert(source, tmp_path / "out", "none"),
        lambda: compare(source, source),
        lambda: load_checkpoint(source / "pytorch_model.bin"),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError) as e:
            call()
        said = f"{source / 'pytorch_model.bin'}: torch.load(weights_only=True) refuses it (Trying to load unsupported GLOBAL "
        assert str(e.value).startswith(said) and "A pickle can run any program, so breccia reads tensors alone." in str(e.value)
    code, _, err = run("convert", source, tmp_path / "out", "-r", "none")
    assert code == 1 and "A pickle can run any program" in err
    (source / "pytorch_model.bin").write_bytes(pickle.dumps({"w": attack}))
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin is no zip archive, which torch\.save writes since PyTorch"):
        load_checkpoint(source)
    assert not marker.exists() and not (tmp_path / "out").exists()


def packed(path: Path) -> None:
    """The file with its records compressed."""
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in records.items():
            archive.writestr(name, text)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def without_storages(path: Path) -> None:
    """The file without the bytes of tensors."""
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in records.items():
            if "/data/" not in name:
                archive.writestr(name, text)


@pytest.mark.parametrize(
    ("tensors", "damage", "error", "message"),
    [
        ([W], None, UnsupportedError, "is no state dict, tensors by name: it holds a list. Save the state dict alone, with"),
        ({"step": 3}, None, UnsupportedError, "tensors by name: under 'step' it has a int."),
        ({"model": {"w": W}}, None, UnsupportedError, "tensors by name: under 'model' it has a dict."),
        ({3: W}, None, UnsupportedError, "tensors by name: under 3 it has a Tensor."),
        ({"w": W.to_sparse()}, None, UnsupportedError, "w is torch.float32, torch.sparse_coo, on 'cpu'; safetensors has no"),
        ({"w": W.to("meta")}, None, UnsupportedError, "w is torch.float32, torch.strided, on 'meta'; safetensors has no"),
        (
            {"w": torch.ones(1, 4).expand(10**9, 4)}, None, UnsupportedError,
            "w has 16000000000 bytes, of which the file repeats 16; a small file can ask for any memory in this way. If you",
        ),
        ({"w": W}, cut, UnsupportedError, "is no zip archive, which torch.save writes since PyTorch 1.6, or is truncated."),
        ({"w": W}, packed, UnsupportedError, "is compressed, which torch.save does not do, so that it cannot be mapped."),
        ({"w": W}, without_storages, CorruptFileError, "torch.load cannot read it (RuntimeError: PytorchStreamReader failed"),
    ],
)  # fmt: skip
def test_files_that_are_not_state_dicts_are_refused(
    tensors: Any, damage: Callable[[Path], None] | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    torch.save(tensors, tmp_path / "m.pt")
    if damage is not None:
        damage(tmp_path / "m.pt")
    with pytest.raises(error) as e:
        load_checkpoint(tmp_path / "m.pt")
    assert str(tmp_path / "m.pt") in str(e.value) and message in str(e.value)


def test_other_subclasses_of_tensor_are_named(tmp_path: Path) -> None:
    two_tensor = importlib.import_module("torch.testing._internal.two_tensor").TwoTensor
    torch.save({"buffer": torch.nn.Buffer(W)}, tmp_path / "m.pt")
    assert list(load_checkpoint(tmp_path / "m.pt")) == ["buffer"], "a buffer is a plain tensor"
    torch.save({"w": two_tensor(W, W)}, tmp_path / "m.pt")
    with pytest.raises(UnsupportedError, match="refuses it .*TwoTensor"):
        load_checkpoint(tmp_path / "m.pt")
    with torch.serialization.safe_globals([two_tensor]), pytest.raises(UnsupportedError) as e:
        load_checkpoint(tmp_path / "m.pt")
    assert "m.pt: w is a torch.testing._internal.two_tensor.TwoTensor, which breccia does not read. If you trust" in str(
        e.value
    )


def test_clashes_and_changes_are_found(tmp_path: Path) -> None:
    _, tensors = rebuilt("torchao_int8", tmp_path)
    name = next(name for name, t in tensors.items() if type(t) is not torch.Tensor)
    stem, _, leaf = name.rpartition(".")
    torch.save({**tensors, f"{stem}._{leaf}_qdata": torch.ones(2)}, tmp_path / "clash.pt")
    with pytest.raises(
        CorruptFileError, match="a part of a tensor of torchao and another tensor would both be .*_weight_qdata"
    ):
        load_checkpoint(tmp_path / "clash.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    file = PickledFile(tmp_path / "m.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(CorruptFileError, match="it was replaced or modified since its header was read"):
        file.read("w")
    with pytest.raises(breccia.UnknownNameError, match="has no tensor 'v'"):
        file.view("v")


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tensors = rebuilt("torchao_int8", tmp_path)
    source = folder(tmp_path / "source", tensors)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchao.prototype.safetensors", None)
        with pytest.raises(UnsupportedError) as e:
            load_checkpoint(source)
    assert f"{source / 'pytorch_model.bin'} has tensors of torchao, and torchao is not installed, or too old (" in str(e.value)
    assert str(e.value).endswith("): pip install -U torchao.")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(UnsupportedError) as e:
            inspected(source)
    assert (
        str(e.value)
        == f"{source / 'pytorch_model.bin'} is a file of torch.save, and torch is not installed: pip install torch."
    )


def test_load_safetensors_names_what_reads_the_folder(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    with pytest.raises(UnsupportedError) as e:
        load_safetensors(source)
    both = "pytorch_model-00001-of-00002.bin, pytorch_model-00002-of-00002.bin"
    assert str(e.value) == (
        f"folder {source} contains no .safetensors file, only {both} of torch.save, which load_safetensors does not read; "
        "breccia.bridges.load_checkpoint and convert do."
    )
    (source / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(UnsupportedError) as e:
        load_checkpoint(source)
    assert "and no pytorch_model.bin, but pytorch_model-00001-of-00002.bin, pytorch_model-00002-of-00002.bin; give the" in str(
        e.value
    )
    (source / "pytorch_model-00001-of-00002.bin").unlink()
    assert set(load_checkpoint(source)) == {"b.weight", "norm.weight"}
    (source / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(UnsupportedError, match=r"contains no \.safetensors file\.$"):
        load_checkpoint(source)
