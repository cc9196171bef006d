"""Digests of bytes that were written: two functions, and conversions that go on where only one of them is there."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from breccia.bridges import convert, save_safetensors
from breccia_bridges import digests, jobs, safetensors_writer, staged_writer
from breccia_bridges.digests import Hash
from breccia_bridges.staging import staging_folder

RAW = np.arange(1 << 20, dtype=np.uint8).data


class Stop(Exception):
    """Ends a conversion; no error of breccia."""


@contextmanager
def library(is_installed: bool) -> Generator[None]:
    """With or without xxhash."""
    if is_installed:
        pytest.importorskip("xxhash")
    with pytest.MonkeyPatch.context() as patch:
        if not is_installed:
            patch.setitem(sys.modules, "xxhash", None)
        digests.xxh3.cache_clear()
        try:
            yield
        finally:
            digests.xxh3.cache_clear()


def test_without_the_library_digests_are_sha256() -> None:
    with library(False):
        found = Hash.best()
        assert not found.is_quick and found.of([RAW[:9], RAW[9:]]) == hashlib.sha256(RAW).hexdigest()
        assert Hash.like("xxh3_128:00") is None
        again = Hash.like(hashlib.sha256(b"").hexdigest())
        assert again is not None and again.of([RAW]) == found.text


def test_with_the_library_they_are_xxh3_and_those_of_sha256_are_known_again() -> None:
    with library(True):
        import xxhash

        found = Hash.best()
        assert found.is_quick and found.of([RAW[:9], RAW[9:]]) == f"xxh3_128:{xxhash.xxh3_128_hexdigest(RAW)}"
        for text in (found.text, hashlib.sha256(RAW).hexdigest()):
            again = Hash.like(text)
            assert again is not None and again.of([RAW]) == text


@pytest.mark.parametrize("is_quick", [False, True], ids=["sha256", "xxh3"])
def test_a_digest_is_of_all_pieces_in_order(is_quick: bool) -> None:
    with library(is_quick):
        hashing = staged_writer.Thread()
        digest = staged_writer.Digest(hashing)
        for piece in (RAW[:3], RAW[3 : 1 << 19], RAW[1 << 19 :]):  # short ones and one that a thread may have
            digest.update(piece)
        assert digest.text == Hash.best().of([RAW])
        hashing.close()


@pytest.mark.parametrize("gguf", [False, True], ids=["safetensors", "gguf"])
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True), (False, False)])
def test_a_conversion_goes_on_with_and_without_the_library(
    before: bool, after: bool, gguf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has digests of a library that is gone is written again; the rest stays. The bytes are the same."""
    rng = np.random.default_rng(0)
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"]
    source = tmp_path / "m"
    source.mkdir()
    save_safetensors({name: rng.standard_normal((64, 64), np.float32) for name in names}, source / "model.safetensors")
    options: dict[str, Any] = {}
    if gguf:
        pytest.importorskip("gguf")
        options = {"dialect": "gguf"}
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 10}
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128, **sizes}
        (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    recipe, out = ("q4_0", tmp_path / "out.gguf") if gguf else ("nvfp4", tmp_path / "out")
    real, cast, calls = jobs.Job.casts, list[str](), 0

    def advance(name: str, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Stop

    def casts(self: jobs.Job, *arguments: Any) -> Any:
        cast.append(self.name)
        return real(self, *arguments)

    with library(before):
        whole = tmp_path / f"whole{out.suffix}"
        convert(source, whole, recipe, **options)
        with pytest.raises(Stop):
            convert(source, out, recipe, advance=advance, **options)
    text = (staging_folder(out) / "journal").read_text()
    assert text.count('"written"') == 3 and ("xxh3_128:" in text) == before
    monkeypatch.setattr(jobs.Job, "casts", casts)
    with library(after), pytest.warns(UserWarning, match="3 tensors are written"):
        convert(source, out, recipe, **options)
    assert cast == (names if before and not after else names[3:])
    for path in [out] if gguf else sorted(out.iterdir()):
        assert path.read_bytes() == (whole if gguf else whole / path.name).read_bytes()
    assert not staging_folder(out).exists()


def test_what_was_read_ahead_is_read_again_after_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with staged_writer.opened_again(path, bytes(8), 100) as file:
        safetensors_writer.write_at(file, memoryview(b"x" * 20), 10)
        assert staged_writer.has_digest(file, 10, 20, Hash.best().of([b"x" * 20]))
        assert not staged_writer.has_digest(file, 11, 20, Hash.best().of([b"x" * 20]))
