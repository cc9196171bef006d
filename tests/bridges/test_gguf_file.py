"""The headers of GGUF files: what is read, and every way in which a file can be damaged."""

from __future__ import annotations

import os
import re
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_bytes import ARRAY, F32, NUMBERS, STRING, U32, U64, Tensor, gguf, key, string

import breccia
from breccia.bridges import load_checkpoint, load_safetensors
from breccia_bridges.gguf_file import GGUFFile

_FLOATS = np.arange(8, dtype=np.float32)
_W = Tensor("w.weight", (4, 2), 0, _FLOATS.tobytes())


def written(folder: Path, data: bytes, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 1, 4096])
def test_a_file_has_the_tensors_that_were_written(tmp_path: Path, version: int, alignment: int) -> None:
    tensors = [_W, Tensor("v.bias", (3,), 24, b"\x01\x02\xff"), Tensor("s", (), 12 + 16, struct.pack("<d", 0.1))]
    file = GGUFFile(written(tmp_path, gguf([], tensors, version=version, alignment=alignment)))
    assert file.header.version == version
    assert {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()} == {
        "w.weight": ("F32", (2, 4)),
        "v.bias": ("I8", (3,)),
        "s": ("F64", ()),
    }
    np.testing.assert_array_equal(file.read("w.weight"), _FLOATS.reshape(2, 4))
    np.testing.assert_array_equal(file.array("v.bias"), np.array([1, 2, -1], np.int8))
    assert file.read("s")[()] == 0.1


def test_keys_have_the_values_of_all_types(tmp_path: Path) -> None:
    numbers = {0: 200, 1: -2, 2: 60000, 3: -300, 4: 2**31, 5: -(2**31), 6: 0.5, 7: True, 10: 2**63, 11: -(2**63), 12: 0.1}
    keys = [key(f"k{kind}", kind, content) for kind, content in numbers.items()]
    keys += [key("text", STRING, "übung"), key("few", ARRAY, (U32, [1, 2, 3])), key("none", ARRAY, (F32, []))]
    keys += [key("many", ARRAY, (U32, range(5000))), key("words", ARRAY, (STRING, ["a", "", "bc"]))]
    found = GGUFFile(written(tmp_path, gguf(keys))).header.keys
    assert found == {
        **{f"k{kind}": content for kind, content in numbers.items()},
        **{"text": "übung", "few": (1, 2, 3), "none": (), "many": 5000, "words": 3},
    }


def test_an_empty_file_of_the_format_has_no_values(tmp_path: Path) -> None:
    assert dict(load_checkpoint(written(tmp_path, gguf()))) == {}


def test_a_tensor_without_elements_is_read(tmp_path: Path) -> None:
    file = GGUFFile(written(tmp_path, gguf([], [Tensor("a", (0, 4), 0), Tensor("b", (32, 0), NUMBERS["Q4_0"]), _W])))
    assert file.read("a").shape == (4, 0)
    assert dict(load_checkpoint(file.path))["b"].shape == (0, 32)


_HOSTILE = "\x1b[31mred\u202e"
_BIG = 2**64 - 1

DAMAGED: dict[str, tuple[bytes, type[breccia.BrecciaError], str]] = {
    "empty": (b"", breccia.CorruptFileError, "its header ends at byte 24 of a file of 0 bytes: the file is truncated"),
    "magic": (gguf(magic=b"GGML"), breccia.CorruptFileError, "it starts with b'GGML', not b'GGUF'"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), breccia.UnsupportedError, "is a big-endian GGUF file"),
    "version 1": (gguf(version=1), breccia.UnsupportedError, "has version 1 of GGUF; breccia reads 2 and 3"),
    "version 4": (gguf(version=4), breccia.UnsupportedError, "has version 4 of GGUF"),
    "huge count of tensors": (
        gguf(counts=(_BIG, 0)),
        breccia.CorruptFileError,
        f"it should have {_BIG} tensors, for which the 8",
    ),
    "huge count of keys": (gguf(counts=(0, _BIG)), breccia.CorruptFileError, f"it should have {_BIG} keys, for which the 8"),
    "a key too few": (
        gguf([key("k", U32, 1)], counts=(0, 3), alignment=1),
        breccia.CorruptFileError,
        "the name of key 2 ends at byte",
    ),
    "a key twice": (gguf([key("k", U32, 1)] * 2), breccia.CorruptFileError, "the key 'k' is there twice"),
    "a long name of a key": (
        gguf([string("k", _BIG)], counts=(0, 1)),
        breccia.CorruptFileError,
        "the name of key 0 ends at byte",
    ),
    "a key that is no text": (
        gguf([key(b"\xff", U32, 1)]),
        breccia.CorruptFileError,
        "the name of key 0 is not UTF-8 (byte 0xff",
    ),
    "a type of keys": (gguf([string("k") + struct.pack("<I", 13)]), breccia.CorruptFileError, "the value of 'k' has type 13"),
    "a long text": (
        gguf([string("k") + struct.pack("<I", STRING) + string("x", 2**62)]),
        breccia.CorruptFileError,
        "the value of 'k' ends at byte",
    ),
    "a long array": (
        gguf([string("k") + struct.pack("<IIQ", ARRAY, U64, 2**61)]),
        breccia.CorruptFileError,
        f"it should have {2**61} numbers in the value of 'k'",
    ),
    "a long array of texts": (
        gguf([string("k") + struct.pack("<IIQ", ARRAY, STRING, 2**60)]),
        breccia.CorruptFileError,
        f"it should have {2**60} strings in the value of 'k'",
    ),
    "a text of an array": (
        gguf([string("k") + struct.pack("<IIQ", ARRAY, STRING, 1) + string("x", 2**62)]),
        breccia.CorruptFileError,
        "the value of 'k' ends at byte",
    ),
    "an array of arrays": (gguf([key("k", ARRAY, (ARRAY, [(U32, [1])]))]), breccia.CorruptFileError, "is an array of arrays"),
    "deep arrays": (
        gguf([string("k") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000]),
        breccia.CorruptFileError,
        "the value of 'k' is an array of arrays",
    ),
    "a type of an array": (
        gguf([string("k") + struct.pack("<IIQ", ARRAY, 77, 0)]),
        breccia.CorruptFileError,
        "the value of 'k' is an array of type 77",
    ),
    "alignment": (gguf([key("general.alignment", U32, 24)]), breccia.CorruptFileError, "is a power of two; found 24"),
    "alignment 0": (gguf([key("general.alignment", U32, 0)]), breccia.CorruptFileError, "is a power of two; found 0"),
    "alignment as text": (gguf([key("general.alignment", STRING, "x")]), breccia.CorruptFileError, "a power of two; found 'x'"),
    "a tensor twice": (gguf([], [_W, _W]), breccia.CorruptFileError, "tensor 'w.weight' is there twice"),
    "a tensor too few": (gguf([], [_W], counts=(2, None), alignment=1), breccia.CorruptFileError, "name of a tensor ends at"),
    "a name that is no text": (gguf([], [Tensor(b"\xc3(", (1,), 0, bytes(4))]), breccia.CorruptFileError, "is not UTF-8"),
    "five axes": (gguf([], [Tensor("w", (1,) * 5, 0, bytes(4))]), breccia.CorruptFileError, "tensor 'w' has 5 axes"),
    "a huge number of axes": (
        gguf([], [Tensor("w", (1,), 0, bytes(4))]).replace(struct.pack("<IQ", 1, 1), struct.pack("<IQ", 2**32 - 1, 1)),
        breccia.CorruptFileError,
        "tensor 'w' has 4294967295 axes",
    ),
    "an unknown type": (
        gguf([], [Tensor("w", (32,), 99, bytes(99))]),
        breccia.UnsupportedError,
        "tensor 'w' has type 99, which",
    ),
    "a removed type": (gguf([], [Tensor("w", (32,), 4, bytes(99))]), breccia.UnsupportedError, "tensor 'w' has type 4, which"),
    "a shape that overflows": (
        gguf([], [Tensor("w", (2**32, 2**32), 0)]),
        breccia.CorruptFileError,
        f"tensor 'w' of shape [{2**32}, {2**32}] needs more than",
    ),
    "axes that overflow without elements": (
        gguf([], [Tensor("w", (2**40, 2**40, 0), 0)]),
        breccia.CorruptFileError,
        "needs more than",
    ),
    "a shape that wraps to 4": (
        gguf([], [Tensor("w", (2**63, 2**2), 0, bytes(16))]),
        breccia.CorruptFileError,
        "needs more than",
    ),
    "blocks that do not divide": (
        gguf([], [Tensor("w", (48, 2), NUMBERS["Q4_0"], bytes(54))]),
        breccia.CorruptFileError,
        "tensor 'w' is Q4_0, blocks of 32 elements, which do not divide its rows of 48",
    ),
    "super-blocks that do not divide": (
        gguf([], [Tensor("w", (128, 2), NUMBERS["Q4_K"], bytes(144))]),
        breccia.CorruptFileError,
        "tensor 'w' is Q4_K, blocks of 256 elements, which do not divide its rows of 128",
    ),
    "an offset that is not aligned": (
        gguf([], [Tensor("w", (4,), 0, bytes(64), 4)]),
        breccia.CorruptFileError,
        "tensor 'w' starts at 4, which 32 does not divide",
    ),
    "beyond the file": (
        gguf([], [Tensor("w", (4,), 0, bytes(16), 32)]),
        breccia.CorruptFileError,
        "tensor 'w' ends at byte 112 of a file of 80 bytes: the file is truncated",
    ),
    "an offset that overflows": (
        gguf([], [Tensor("w", (4,), 0, bytes(16), 2**64 - 32)]),
        breccia.CorruptFileError,
        "tensor 'w' ends at byte",
    ),
    "an overlap": (
        gguf([], [_W, Tensor("v", (4,), 0, bytes(16), 0)]),
        breccia.CorruptFileError,
        "tensors 'v' and 'w.weight' overlap",
    ),
    "a hole": (gguf([], [_W, Tensor("v", (4,), 0, bytes(96), 64)]), breccia.CorruptFileError, "bytes 160 to 192 belong to no"),
    "hostile names": (gguf([], [Tensor(_HOSTILE, (4,), 0, bytes(4))]), breccia.CorruptFileError, r"\x1b[31mred\u202e"),
    "a hostile key": (gguf([key(_HOSTILE, U32, 1)] * 2), breccia.CorruptFileError, r"\x1b[31mred\u202e"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    data, kind, said = DAMAGED[name]
    path = written(tmp_path, data)
    before = time.process_time()
    for call in (GGUFFile, load_checkpoint):
        with pytest.raises(kind, match=re.escape(said)) as caught:
            call(path)
        assert "m.gguf" in str(caught.value)
        assert str(caught.value).isprintable()
    assert time.process_time() - before < 1
    with pytest.raises(breccia.BrecciaError):
        breccia.bridges.convert(path, tmp_path / "out", "none")
    assert sorted(os.listdir(tmp_path)) == ["m.gguf"]


@pytest.mark.parametrize("size", range(0, 330, 7))
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    keys = [key("general.architecture", STRING, "llama"), key("words", ARRAY, (STRING, ["one", "two"]))]
    whole = gguf(keys, [_W, Tensor("v", (32,), NUMBERS["Q4_0"], bytes(18))])
    assert len(whole) > 240
    path = written(tmp_path, whole[: min(size, len(whole) - 1)])
    with pytest.raises(breccia.CorruptFileError):
        load_checkpoint(path)


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, gguf([], [_W]))
    file = GGUFFile(path)
    view = file.view("w.weight")
    path.write_bytes(gguf([], [_W]) + b"\0")
    with pytest.raises(breccia.CorruptFileError, match="it was replaced or modified"):
        file.read("w.weight")
    with pytest.raises(breccia.CorruptFileError, match="it was replaced or modified"):
        breccia_read(view)


def breccia_read(view: np.ndarray) -> np.ndarray:
    from breccia_bridges.safetensors_file import read

    return read(view)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises((breccia.CorruptFileError, breccia.UnsupportedError)):
        load_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(breccia.CorruptFileError, match="it is a pipe or a device"):
        GGUFFile(tmp_path / "m.gguf")


def test_a_file_of_another_name_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = written(tmp_path, gguf([], [_W]), "sha256-0123")
    assert list(load_checkpoint(path)) == ["w.weight"]
    named = written(tmp_path, gguf([], [_W]), "m.safetensors")
    for call in (load_checkpoint, load_safetensors):
        with pytest.raises(breccia.UnsupportedError, match=r"is a GGUF file, not one of safetensors\. Name it \.gguf"):
            call(named)


def test_load_safetensors_says_what_reads_gguf(tmp_path: Path) -> None:
    written(tmp_path, gguf([], [_W]))
    with pytest.raises(breccia.UnsupportedError, match=r"only m\.gguf of llama\.cpp, .*load_checkpoint and convert do"):
        load_safetensors(tmp_path)
    with pytest.raises(breccia.UnsupportedError, match="is a GGUF file"):
        load_safetensors(tmp_path / "m.gguf")


def test_a_folder_with_several_models_asks_for_one(tmp_path: Path) -> None:
    for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf"):
        written(tmp_path, gguf([], [_W]), name)
    with pytest.raises(breccia.UnsupportedError, match=r"contains 2 GGUF models: a-Q4_K_M\.gguf, a-Q8_0\.gguf; give the path"):
        load_checkpoint(tmp_path)
    assert list(load_checkpoint(tmp_path / "a-Q8_0.gguf")) == ["w.weight"]


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to(tmp_path / "absent")
    with pytest.raises((breccia.BrecciaError, OSError)):
        load_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------------------ split models


def part(number: int, count: int, tensors: list[Tensor], total: int, **more: Any) -> bytes:
    keys = [key("split.no", 2, number), key("split.count", 2, count), key("split.tensors.count", 5, total)]
    return gguf([*keys, *more.get("keys", ())], tensors)


def split(folder: Path, total: int = 2) -> list[Path]:
    """A model in two parts."""
    second = Tensor("v.weight", (4,), 0, bytes(16))
    return [
        written(folder, part(0, 2, [_W], total), "m-00001-of-00002.gguf"),
        written(folder, part(1, 2, [second], total), "m-00002-of-00002.gguf"),
    ]


def test_each_part_of_a_model_stands_for_all(tmp_path: Path) -> None:
    files = split(tmp_path)
    for given in (tmp_path, files[0], files[1], files):
        assert list(load_checkpoint(given)) == ["w.weight", "v.weight"]


def test_a_missing_part_is_refused_by_name(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    second.unlink()
    for given in (tmp_path, first):
        with pytest.raises(breccia.CorruptFileError, match=r"in 2 files, of which m-00002-of-00002\.gguf is missing"):
            load_checkpoint(given)
    split(tmp_path)
    first.unlink()
    with pytest.raises(breccia.CorruptFileError, match=r"of which m-00001-of-00002\.gguf is missing"):
        load_checkpoint(tmp_path)
    second.rename(tmp_path / "other-00002-of-00003.gguf")
    with pytest.raises(breccia.CorruptFileError, match=r"other-00001-of-00003\.gguf, other-00003-of-00003\.gguf are missing"):
        load_checkpoint(tmp_path)


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    with pytest.raises(breccia.CorruptFileError, match="is part 2 of 2 of a model by its header, and 1 of 2 by its name"):
        load_checkpoint(tmp_path)
    alone = tmp_path / "alone.gguf"
    first.rename(alone)
    with pytest.raises(breccia.CorruptFileError, match="is part 2 of 2 of a model by its header, and 1 of 1 by its name"):
        load_checkpoint(alone)
    written(tmp_path, gguf(), "n-00003-of-00002.gguf")
    with pytest.raises(breccia.CorruptFileError, match="there is no part 00003 of 00002"):
        load_checkpoint(tmp_path / "n-00003-of-00002.gguf")


def test_parts_with_other_tensors_are_refused(tmp_path: Path) -> None:
    split(tmp_path, total=3)
    with pytest.raises(breccia.CorruptFileError, match="says that the model has 3 tensors; its parts have 2"):
        load_checkpoint(tmp_path)
    split(tmp_path, total=2)[1].write_bytes(part(1, 2, [_W], 2))
    with pytest.raises(breccia.CorruptFileError, match=r"tensor 'w\.weight' is in both"):
        load_checkpoint(tmp_path)
