"""`convert(..., max_shard_size=...)` cuts a checkpoint into files of a size, in order, with an index."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from program import Run
from safetensors import safe_open

import breccia
from breccia.bridges import convert, load_checkpoint, save_safetensors
from breccia_bridges.checkpoint import INDEX
from breccia_bridges.text import byte_count_of

RNG = np.random.default_rng(0)
WEIGHTS = {f"layers.{n}.mlp.weight": RNG.standard_normal((32, 64)).astype(np.float32) for n in range(6)}
#: Bytes of a matrix under mxfp8: a code per element, and a scale per 32 of them.
SIZE = 32 * 64 + 32 * 2


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    names = list(WEIGHTS)
    for n in range(2):
        save_safetensors({name: WEIGHTS[name] for name in names[3 * n : 3 * n + 3]}, folder / f"part-{n}.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def shards(folder: Path) -> dict[str, list[str]]:
    """The values of each file, by what its header lists."""
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as opened:
            found[file.name] = sorted({name.rpartition(".")[0] for name in opened.keys()})  # noqa: SIM118
    return found


@pytest.mark.parametrize(("limit", "of_each"), [(2 * SIZE, [2, 2, 2]), (4 * SIZE + 100, [4, 2]), (1, [1] * 6), ("1GB", [6])])
def test_values_are_cut_into_files_in_their_order(limit: int | str, of_each: list[int], source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = convert(source, out, "mxfp8", max_shard_size=limit)
    found = shards(out)
    count = len(of_each)
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)] if count > 1 else ["model.safetensors"]
    assert list(found) == names and list(map(len, found.values())) == of_each
    assert [name for listed in found.values() for name in listed] == list(WEIGHTS)
    assert (out / INDEX).exists() == (count > 1)
    if count > 1:
        index = json.loads((out / INDEX).read_text())
        assert {name.rpartition(".")[0]: file for name, file in index["weight_map"].items()} == {
            name: file for file, listed in found.items() for name in listed
        }
        assert index["metadata"]["total_size"] == report.bytes_out == 6 * SIZE
    loaded = load_checkpoint(out)
    for name, x in WEIGHTS.items():
        assert loaded[name].data.tobytes() == breccia.cast(x, "mxfp8").data.tobytes()


def test_a_single_file_is_not_cut(source: Path, tmp_path: Path, run: Run) -> None:
    with pytest.raises(
        breccia.OptionError, match=r"max_shard_size= .* is for a folder, and .*o\.safetensors is one file; leave"
    ):
        convert(source / "part-0.safetensors", tmp_path / "o.safetensors", "mxfp8", max_shard_size="5GB")
    assert run("convert", source, tmp_path / "out", "-r", "mxfp8", "--max-shard-size", "5kB")[0] == 0
    assert len(shards(tmp_path / "out")) == 3


def test_sizes_are_read_as_they_are_written() -> None:
    for text, count in {"5GB": 5 * 10**9, "512MiB": 512 << 20, "1.5 kB": 1500, "17": 17, 17: 17, "2TB": 2 * 10**12}.items():
        assert byte_count_of(text, "size") == count
    for wrong in ("", "GB", "5 apples", "-1", "0", 0, True, "5GBs"):
        with pytest.raises(
            breccia.OptionError, match=r'size=.* is no size; give bytes, or a number with a unit: "5GB" or "512MiB"'
        ):
            byte_count_of(wrong, "size")
