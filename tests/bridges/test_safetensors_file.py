"""The safetensors container: refused files, memory mapping, and atomic writes."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import breccia
from breccia_bridges import safetensors_file as module
from breccia_bridges.safetensors_file import DTYPES, Container, Entry, byte_count
from breccia_bridges.safetensors_writer import Writer


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a file with that header: an object for JSON, or bytes as they are."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


FOUR = bytes(range(4))

#: Defect -> (file, what its message says).
DEFECTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes long; a safetensors file starts with 8 bytes"),
    "shorter than a length": (b"\x02\0\0\0", "4 bytes long"),
    "header beyond 100 MB": (file_of(b"{}", length=100_000_001), "header is 100000001 bytes long; the limit is 100000000"),
    "length of garbage": (b"PK\x03\x04garbage, more of it", "the limit is 100000000. It is not a safetensors file"),
    "header beyond the file": (file_of(b"{}", length=3), "the header should be 3 bytes long, but 2 bytes follow"),
    "empty header": (file_of(b""), "starts with '{'; found ''"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not UTF-8 (byte 0xff at position 2)"),
    "not JSON": (file_of(b'{"a": }'), "the header is not JSON (Expecting value"),
    "JSON truncated": (file_of(b'{"a": [1, 2'), "the header is not JSON"),
    "JSON, then more": (file_of(b"{} {}"), "the header is not JSON (Extra data"),
    "JSON too deep": (file_of(b'{"a":' + b"[" * 200_000), "the header is not JSON"),
    "an integer of 5000 digits": (file_of(b'{"a":' + b"9" * 5000 + b"}"), "the header is not JSON"),
    "a list": (file_of([1, 2]), "starts with '{'; found '[1, 2]'"),
    "leading spaces": (file_of(b"  {}"), "starts with '{'"),
    "a name twice": (file_of(b'{"a": 1, "a": 2}'), "the key 'a' twice in one object"),
    "a field twice": (file_of(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), "the key 'dtype' twice"),
    "metadata not an object": (file_of({"__metadata__": ["x"]}), "__metadata__ is an object of strings; found ['x']"),
    "metadata of numbers": (file_of({"__metadata__": {"k": 3}}), "__metadata__ holds strings; 'k' is 3"),
    "entry not an object": (file_of({"a": 5}), "tensor 'a' is an object with dtype, shape and data_offsets; found 5"),
    "no dtype": (file_of({"a": {"shape": [4], "data_offsets": [0, 4]}}, FOUR), "tensor 'a' is an object with dtype"),
    "unknown dtype": (file_of({"a": entry("F33")}, FOUR), "no safetensors dtype 'F33'; did you mean 'F32'?"),
    "dtype not a string": (file_of({"a": entry(["U8"])}, FOUR), "no safetensors dtype ['U8']"),
    "negative extent": (file_of({"a": entry(shape=[-4])}, FOUR), "a shape is a list of integers >= 0; got [-4]"),
    "extent not whole": (file_of({"a": entry(shape=[4.0])}, FOUR), "integers >= 0; got [4.0]"),
    "extent a bool": (file_of({"a": entry(shape=[True, 4])}, FOUR), "integers >= 0; got [True, 4]"),
    "shape not a list": (file_of({"a": entry(shape=4)}, FOUR), "integers >= 0; got 4"),
    "shape overflows": (file_of({"a": entry(shape=[2**62, 2**62])}, FOUR), "needs more than 9223372036854775807 bytes"),
    "empty shape overflows": (file_of({"a": entry(shape=[0, 2**62, 2**62], offsets=[0, 0])}), "needs more than"),
    "65 axes": (file_of({"a": entry(shape=[1] * 65, offsets=[0, 1])}, b"x"), "at most 64 axes; got 65"),
    "half a byte": (file_of({"a": entry("F4", [3], [0, 1])}, b"x"), "F4 (4 bits each) is not a multiple of 8 bits"),
    "one offset": (file_of({"a": entry(offsets=[0])}, FOUR), "data_offsets are two integers >= 0; found [0]"),
    "offsets negative": (file_of({"a": entry(offsets=[-1, 3])}, FOUR), "two integers >= 0; found [-1, 3]"),
    "offsets bools": (file_of({"a": entry(shape=[1], offsets=[False, True])}, b"x"), "two integers >= 0; found [False, True]"),
    "offsets reversed": (file_of({"a": entry(offsets=[4, 0])}, FOUR), "end before they start; found [4, 0]"),
    "past the end": (file_of({"a": entry()}, FOUR[:3]), "ends at byte 4 of the data, which has 3 bytes: the file is truncated"),
    "too few bytes": (
        file_of({"a": entry("F32", [2])}, FOUR),
        "F32 of shape [2] is 8 bytes; data_offsets [0, 4] hold 4",
    ),
    "overlap": (
        file_of({"a": entry(), "b": entry(offsets=[2, 6])}, FOUR + b"xx"),
        "tensors 'a' and 'b' overlap (byte 2 of the data is before 4)",
    ),
    "the same bytes twice": (file_of({"a": entry(), "b": entry()}, FOUR), "tensors 'a' and 'b' overlap"),
    "hole at the start": (file_of({"a": entry(offsets=[1, 5])}, FOUR + b"x"), "bytes 0 to 1 of the data belong to no tensor"),
    "hole between": (
        file_of({"a": entry(), "b": entry(offsets=[6, 10])}, bytes(10)),
        "bytes 4 to 6 of the data belong to no tensor",
    ),
    "trailing bytes": (
        file_of({"a": entry()}, FOUR + b"x"),
        "1 bytes after the last tensor belong to none (it ends at 4 of 5)",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_broken_file_is_refused_by_name_with_what_was_found(defect: str, tmp_path: Path) -> None:
    raw, message = DEFECTS[defect]
    path = tmp_path / "broken.safetensors"
    path.write_bytes(raw)
    with pytest.raises(breccia.CorruptFileError) as refused:
        Container(path)
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"{path}: ")
    assert refused.value.found["path"] == str(path)
    assert any(remedy in str(refused.value) for remedy in ("the file again", "write it again", "download it again"))


def test_a_missing_file_and_a_directory_raise_the_usual_os_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
        Container(tmp_path / "absent.safetensors")
    with pytest.raises(IsADirectoryError):
        Container(tmp_path)


def valid_file() -> bytes:
    header = {
        "__metadata__": {"schema": "1"},
        "a": entry("F32", [2, 3], [0, 24]),
        "b": entry("F8_E4M3", [5], [24, 29]),
        "empty": entry("U8", [0, 3], [29, 29]),
    }
    return file_of(header, bytes(29))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(0, len(valid_file())),
    flips=st.lists(st.tuples(st.integers(0, len(valid_file()) - 1), st.integers(1, 255)), max_size=4),
)
@example(cut=len(valid_file()), flips=[])
def test_a_damaged_file_loads_or_is_refused_as_corrupt_and_nothing_else(
    cut: int, flips: list[tuple[int, int]], tmp_path: Path
) -> None:
    raw = bytearray(valid_file())
    for position, mask in flips:
        raw[position] ^= mask
    path = tmp_path / "f.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(raw[:cut])
    try:
        opened = Container(path)
    except breccia.CorruptFileError:
        return
    for name in opened.entries:
        opened.array(name).tobytes()


def test_a_valid_file_opens(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(valid_file())
    opened = Container(str(path))
    assert opened.path == path
    assert opened.metadata == {"schema": "1"}
    assert opened.entries == {
        "a": Entry("F32", (2, 3), 0, 24),
        "b": Entry("F8_E4M3", (5,), 24, 29),
        "empty": Entry("U8", (0, 3), 29, 29),
    }
    assert opened.array("empty").shape == (0, 3)
    with pytest.raises(breccia.UnknownNameError, match=r"f\.safetensors has no tensor 'emty'; did you mean 'empty'\?"):
        opened.array("emty")


def test_null_in_place_of_metadata_is_no_metadata(tmp_path: Path) -> None:
    """MLX 0.32 writes it."""
    path = tmp_path / "null"
    path.write_bytes(file_of({"__metadata__": None, "x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"ab"))
    found = Container(path)
    assert found.metadata == {} and found.array("x").tobytes() == b"ab"


def test_arrays_are_mapped_copy_on_write_and_the_file_never_changes(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    with Writer(path, {"a": ("F32", (3,))}) as w:
        w.write("a", np.arange(3, dtype=np.float32))
    before = path.read_bytes()
    first = Container(path)
    a = first.array("a")
    a[:] = 7
    assert first.array("a").tolist() == [7, 7, 7]  # one mapping: a view of the same pages
    assert Container(path).array("a").tolist() == [0, 1, 2]
    assert path.read_bytes() == before


def test_unaligned_tensors_are_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    x = np.array([1.5, -2.0], np.float32)
    path.write_bytes(file_of({"u": entry(shape=[1], offsets=[0, 1]), "x": entry("F32", [2], [1, 9])}, b"u" + x.tobytes()))
    assert Container(path).array("x").tolist() == [1.5, -2.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 4), (), (0, 3), (1,)])
def test_every_dtype_and_shape_comes_back_with_its_bytes(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    bits, numpy = DTYPES[dtype]
    if bits < 8:
        shape = (*shape, 4)
    raw = np.random.default_rng(3).integers(0, 2, byte_count(dtype, shape), np.uint8).tobytes()
    path = tmp_path / "f.safetensors"
    with Writer(path, {"pad": ("U8", (3,)), "x": (dtype, shape)}) as w:
        w.write("x", raw)
        w.write("pad", b"abc")
    x = Container(path).array("x")
    assert x.tobytes() == raw
    assert x.dtype == numpy
    assert x.shape == (shape if bits >= 8 else (len(raw),))
    assert x.flags.aligned


# ------------------------------------------------------------------------------------------------ the writer


def test_tensors_are_laid_out_by_descending_item_size_and_listed_as_given(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    given = {"b": ("U8", (3,)), "h": ("F16", (1,)), "w": ("F32", (1,)), "z": ("F64", ()), "c": ("I8", (2,))}
    with Writer(path, given, {"k": "vé"}) as w:
        for name in ("c", "z", "b", "w", "h"):
            w.write(name, bytes(w.entries[name].nbytes))
    opened = Container(path)
    assert list(opened.entries) == list(given)
    assert sorted(given, key=lambda name: opened.entries[name].start) == ["z", "w", "h", "b", "c"]
    assert opened.metadata == {"k": "vé"}
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert length % 8 == 0


def test_arrays_of_any_strides_and_byte_order_are_written_little_endian_in_c_order(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with Writer(path, {"t": ("F32", (3, 2)), "big": ("F32", (2, 3)), "zero": ("F32", ())}) as w:
        w.write("t", x.T)
        w.write("big", x.astype(">f4"))
        w.write("zero", np.array(2.5, np.float32))
    opened = Container(path)
    assert opened.array("t").tolist() == x.T.tolist()
    assert opened.array("big").tolist() == x.tolist()
    assert opened.array("zero").tolist() == 2.5


def test_an_exception_midway_leaves_nothing_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), Writer(path, {"a": ("U8", (4,))}, force=True) as w:
        w.write("a", FOUR)
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["f.safetensors"]
    assert path.read_bytes() == b"old"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), Writer(tmp_path / "f.safetensors", {"a": ("U8", (4,))}) as w:
        w.write("a", FOUR)
    assert os.listdir(tmp_path) == []


def test_a_tensor_not_written_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    with (
        pytest.raises(breccia.BrecciaError, match=r"is not written: 1 of 2 declared tensors were not given: \['b'\]"),
        Writer(path, {"a": ("U8", (4,)), "b": ("U8", (4,))}) as w,
    ):
        w.write("a", FOUR)
    assert os.listdir(tmp_path) == []


def test_invalid_writes_are_refused_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    writer = Writer(path, {"alpha": ("F32", (2,))})
    with pytest.raises(breccia.BrecciaError, match=r"written inside `with Writer\(\.\.\.\) as w:`"):
        writer.write("alpha", bytes(8))
    with writer as w:
        with pytest.raises(breccia.UnknownNameError, match="no tensor 'alhpa' is declared; did you mean 'alpha'"):
            w.write("alhpa", bytes(8))
        with pytest.raises(breccia.ShapeError, match=r"declared F32 of shape \(2,\), 8 bytes; got 12 bytes"):
            w.write("alpha", np.zeros(3, np.float32))
        w.write("alpha", bytes(8))
        with pytest.raises(breccia.BrecciaError, match="'alpha' is already written; write each tensor once"):
            w.write("alpha", bytes(8))
    assert list(Container(path).entries) == ["alpha"]


def test_an_existing_file_is_kept_without_force_and_replaced_with_it(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError, match=r"f\.safetensors exists; choose another name, or replace it: force=True"):
        Writer(path, {})
    with Writer(path, {}, force=True):
        assert path.read_bytes() == b"old"
    assert Container(path).entries == {}


def test_a_file_created_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    with pytest.raises(FileExistsError), Writer(path, {}):
        path.write_bytes(b"another's")
    assert path.read_bytes() == b"another's"
    assert os.listdir(tmp_path) == ["f.safetensors"]


def test_writing_to_a_directory_or_into_a_missing_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="it is a directory; give the name of a file"):
        Writer(tmp_path, {}, force=True)
    with (
        pytest.raises(FileNotFoundError, match=r"there is no directory .*absent; create it first"),
        Writer(tmp_path / "absent/f", {}),
    ):
        pass


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_the_files_mode_follows_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with Writer(tmp_path / "f", {}):
            pass
    finally:
        os.umask(old)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("tensors", "metadata", "kind", "message"),
    [
        ({"a": ("F31", (1,))}, {}, breccia.UnknownNameError, "tensor 'a': no safetensors dtype 'F31'; did you mean 'F32'"),
        ({"a": ("F32", (-1,))}, {}, breccia.ShapeError, "tensor 'a': a shape is a list of integers >= 0"),
        ({"a": ("F6_E2M3", (2,))}, {}, breccia.ShapeError, "is not a multiple of 8 bits"),
        ({3: ("F32", (1,))}, {}, breccia.UnsupportedError, r"a tensor's name must be a str, got 3 \(int\)"),
        ({"__metadata__": ("F32", (1,))}, {}, breccia.UnsupportedError, "is the format's own key"),
        ({"\ud800": ("F32", (1,))}, {}, breccia.UnsupportedError, "has a lone surrogate"),
        ({}, {"k": 3}, breccia.UnsupportedError, "metadata 'k' must be a str, got 3"),
        ({}, {3: "k"}, breccia.UnsupportedError, "a metadata key must be a str, got 3"),
        ({}, {"k": "x" * 100_000_000}, breccia.UnsupportedError, "readers accept 100000000"),
    ],
)
def test_undeclarable_tensors_are_refused_before_a_file_is_created(
    tensors: Any, metadata: Any, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        Writer(tmp_path / "f", tensors, metadata)
    assert os.listdir(tmp_path) == []


def test_big_endian_hosts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(valid_file())
    monkeypatch.setattr(sys, "byteorder", "big")
    for open_it in (lambda: Container(tmp_path / "f"), lambda: Writer(tmp_path / "g", {})):
        with pytest.raises(breccia.UnsupportedError, match="little-endian and this host is big-endian"):
            open_it()


def test_a_large_array_is_written_zero_copy(tmp_path: Path) -> None:
    import tracemalloc

    x = np.ones(1 << 22, np.float32)
    tracemalloc.start()
    try:
        with Writer(tmp_path / "f", {"x": ("F32", x.shape)}) as w:
            tracemalloc.reset_peak()
            w.write("x", x)
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes // 8


# ------------------------------------------------------------------------------------------------ stock readers


def test_stock_numpy_and_torch_readers_read_the_same_bytes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    stock = pytest.importorskip("safetensors")
    x = np.random.default_rng(5).standard_normal((3, 7)).astype(np.float32)
    codes = np.arange(21, dtype=np.uint8).reshape(3, 7)
    tensors = {
        "u": ("U8", (3, 7)),
        "x": ("F32", (3, 7)),
        "f8": ("F8_E4M3", (3, 7)),
        "one": ("I64", ()),
        "none": ("F16", (0, 2)),
    }
    path = tmp_path / "f.safetensors"
    with Writer(path, tensors, {"k": "v"}) as w:
        for name, value in {"u": codes, "x": x, "f8": codes, "one": np.array(9), "none": b""}.items():
            w.write(name, value)
    with stock.safe_open(path, framework="numpy") as f:
        assert f.metadata() == {"k": "v"}
        assert f.get_tensor("x").tobytes() == x.tobytes()
        assert f.get_tensor("u").tobytes() == codes.tobytes()
        assert (f.get_tensor("one").item(), f.get_tensor("none").shape) == (9, (0, 2))
    with stock.safe_open(path, framework="pt") as f:
        assert set(f.keys()) == set(tensors)
        assert f.get_tensor("f8").dtype == torch.float8_e4m3fn
        assert f.get_tensor("f8").view(torch.uint8).numpy().tobytes() == codes.tobytes()
        assert f.get_tensor("x").numpy().tobytes() == x.tobytes()


def test_files_of_stock_torch_open_here_with_equal_bytes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    stock = pytest.importorskip("safetensors.torch")
    path = tmp_path / "f.safetensors"
    x = torch.linspace(-3, 3, 15).reshape(3, 5)
    dtypes = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16", "float16"]
    newer = ("float8_e4m3fnuz", "float8_e5m2fnuz")  # the oldest safetensors does not write them
    dtypes += [name for name in newer if getattr(torch, name) in stock._SIZE]
    tensors = {name: x.abs().to(getattr(torch, name)) for name in dtypes}
    tensors |= {"zero": torch.tensor(2.5), "empty": torch.zeros(0, 4), "bools": x > 0, "longs": torch.arange(3)}
    stock.save_file(tensors, path, {"made": "by stock"})
    opened = Container(path)
    assert opened.metadata == {"made": "by stock"}
    for name, tensor in tensors.items():
        array = opened.array(name)
        assert array.shape == tuple(tensor.shape)
        assert array.tobytes() == bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    assert opened.array("bfloat16").dtype == np.uint16
    assert opened.array("float8_e8m0fnu").dtype == np.uint8


def test_the_file_is_mapped_when_an_array_is_asked_for_and_unmapped_with_the_last_one(tmp_path: Path) -> None:
    with Writer(tmp_path / "a.safetensors", {"w": ("F32", (4,)), "v": ("F32", (4,))}) as w:
        w.write("w", np.arange(4, dtype=np.float32))
        w.write("v", np.zeros(4, np.float32))
    opened = Container(tmp_path / "a.safetensors")
    assert opened._map is None
    first, second = opened.array("w"), opened.array("v")
    held = opened._map
    assert held is not None and held() is not None
    del first
    assert held() is not None
    second[0] = 7.0  # this process's copy
    del second
    assert held() is None
    assert opened.array("v").tolist() == [0.0] * 4


@pytest.mark.parametrize("change", ["replaced", "written to"])
def test_a_file_that_changed_after_its_header_was_read_is_not_read_on(tmp_path: Path, change: str) -> None:
    for name in "ab":
        with Writer(tmp_path / name, {"w": ("U8", (4,))}) as w:
            w.write("w", name.encode() * 4)
    opened = Container(tmp_path / "a")
    held = opened.array("w")
    if change == "replaced":
        (tmp_path / "b").replace(tmp_path / "a")
        assert bytes(held) == b"aaaa" == bytes(opened.array("w")), "what is mapped stays as it was"
    else:
        os.utime(tmp_path / "a", ns=(1, 1))
    del held
    with pytest.raises(
        breccia.CorruptFileError, match=r"a: it was replaced or modified since its header was read. Open it again"
    ):
        opened.array("w")


@pytest.mark.skipif(sys.platform != "linux", reason="sparse files, and a limit on memory, as Linux has them")
def test_a_file_larger_than_memory_can_be_mapped(tmp_path: Path) -> None:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 2
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "a.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert Container(tmp_path / "a.safetensors").array("w")[size - 1] == 0
