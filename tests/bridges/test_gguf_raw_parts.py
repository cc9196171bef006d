"""GGUF files that were cut at any byte, which are refused with a word on how to join them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gguf_models import llama

import breccia
from breccia.bridges import convert, load_checkpoint


def cut(folder: Path, *names: str) -> list[Path]:
    """The bytes of a model in files of these names, and no file of the model."""
    whole = llama(folder, "small.gguf")
    data = whole.read_bytes()
    whole.unlink()
    size = -(-len(data) // len(names))
    for n, name in enumerate(names):
        (folder / name).write_bytes(data[n * size : (n + 1) * size])
    return [folder / name for name in names]


NAMES = [
    [f"small.gguf.part{n:02}" for n in range(4)],
    [f"small.gguf.part{n}of3" for n in (1, 2, 3)],
    [f"small.gguf-split-{x}" for x in "abc"],
    [f"small.gguf.a{x}" for x in "abc"],
    [f"small.gguf{n:03}" for n in range(3)],
    [f"small.gguf.part-{n}" for n in range(1, 12)],
]


@pytest.mark.parametrize("names", NAMES)
def test_parts_are_refused_with_a_command_that_joins_them(tmp_path: Path, names: list[str]) -> None:
    parts = cut(tmp_path, *names)
    for given in (parts[0], parts[-1], tmp_path):
        with pytest.raises(breccia.UnsupportedError, match="none of which can be read alone. Join them") as e:
            load_checkpoint(given)
        assert f"is one of {len(names)} parts into which small.gguf was cut" in str(e.value)
    command = str(e.value).partition("give that file: ")[2].removesuffix(".")
    assert command.startswith("cat small.gguf") and command.endswith(" > small.gguf")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert len(load_checkpoint(tmp_path)) == 20


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_missing_part_is_named(tmp_path: Path, names: list[str], lost: int) -> None:
    parts = cut(tmp_path, *names)
    parts[lost].unlink()
    wanted = names[lost] if names[lost] != "small.gguf.part-1" else "small.gguf.part-0, small.gguf.part-1"
    for given in (parts[-1], tmp_path):
        with pytest.raises(breccia.CorruptFileError) as e:
            load_checkpoint(given)
        assert f"is a part of small.gguf, of which {wanted} " in str(e.value)
        assert "into the same folder, and join all parts: cat small.gguf" in str(e.value)


@pytest.mark.parametrize("names", NAMES[:1] + NAMES[2:])
def test_a_missing_last_part_is_found_by_the_header(tmp_path: Path, names: list[str]) -> None:
    parts = cut(tmp_path, *names)
    parts[-1].unlink()
    count = len(names) - 1
    said = rf"is a part of small\.gguf; with all {count} parts joined, .* the file is truncated\..* The last one is missing"
    with pytest.raises(breccia.CorruptFileError, match=said):
        convert(parts[0], tmp_path / "out", "none")
    assert not (tmp_path / "out").exists()


def test_the_last_of_a_known_number_is_named(tmp_path: Path) -> None:
    parts = cut(tmp_path, *NAMES[1])
    parts[-1].unlink()
    with pytest.raises(breccia.CorruptFileError, match=r"of which small\.gguf\.part3of3 is missing\. Download it"):
        load_checkpoint(parts[0])


def test_a_single_part_with_everything_is_read(tmp_path: Path) -> None:
    (part,) = cut(tmp_path, "small.gguf.part00")
    assert len(load_checkpoint(part)) == 20


def test_a_number_in_the_name_of_a_whole_file_is_no_part(tmp_path: Path) -> None:
    whole = llama(tmp_path).rename(tmp_path / "small.gguf.2024")
    assert len(load_checkpoint(whole)) == 20


def test_a_command_quotes_names(tmp_path: Path) -> None:
    cut(tmp_path, "a b.gguf.part1", "a b.gguf.part2")
    with pytest.raises(breccia.UnsupportedError, match=r"cat 'a b\.gguf\.part'\* > 'a b\.gguf'"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["small.gguf.bak", "small.gguf.xz", "small.gguf.tmp", "small.gguf.q", "small.gguf_5"])
def test_other_names_are_no_parts(tmp_path: Path, name: str) -> None:
    whole = llama(tmp_path)
    whole.rename(tmp_path / name)
    assert len(load_checkpoint(tmp_path / name)) == 20
    (tmp_path / name).write_bytes(b"other")
    with pytest.raises(breccia.UnsupportedError, match=r"is neither a \.safetensors nor a \.gguf file"):
        convert(tmp_path / name, tmp_path / "out", "none")
