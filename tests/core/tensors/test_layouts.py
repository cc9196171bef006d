"""Layouts of blocks: one layout for equal blocks, whichever class was called, in memory, text, files and pickles."""

from __future__ import annotations

import base64
import copy
import dataclasses
import inspect
import pickle
from typing import Any, ClassVar

import numpy as np
import pytest

import breccia
from breccia import (
    Float8BlockScaling,
    Format,
    InStorage,
    Layout,
    Level,
    MXFP8BlockScaling,
    PerBlockK,
    PerBlockMN,
    PerChannel,
    PerGroupIndex,
    PerTensor,
    RecipeError,
    ScaledTensor,
    UnsupportedError,
)
from breccia.codecs import E4M3, F32
from breccia.dispatch import registry
from breccia.layouts import Blocks
from breccia.tensors.metadata import Metadata

#: Layouts with the class that is printed, and their JSON.
EVERY: dict[Layout, str] = {
    PerTensor(): '{"fields":{},"name":"per_tensor"}',
    PerChannel(): '{"fields":{},"name":"per_channel"}',
    PerBlockK(): '{"fields":{"block_size":128,"partial":false},"name":"per_block_k"}',
    PerBlockK(48, True): '{"fields":{"block_size":48,"partial":true},"name":"per_block_k"}',
    PerBlockMN(): '{"fields":{"block_size":32,"partial":false},"name":"per_block_k"}',
    PerBlockMN(64, 128): '{"fields":{"block_m":64,"block_n":128,"partial":false},"name":"per_block_mn"}',
    PerBlockMN(32, 1, partial=True): '{"fields":{"block_m":32,"block_n":1,"partial":true},"name":"per_block_mn"}',
}


# -- one layout for equal blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("k", [1, 32])
def test_a_tile_one_row_high_is_a_block_along_k(k: int, partial: bool) -> None:
    rows, tile = PerBlockK(k, partial), PerBlockMN(1, k, partial)
    assert rows == tile and hash(rows) == hash(tile) and rows.interned_key is tile.interned_key
    assert repr(tile) == repr(rows) == f"PerBlockK(block_size={k}, partial={partial})" and tile.spec == rows.spec
    for each in (rows, tile):
        assert isinstance(each, PerBlockK) and isinstance(each, PerBlockMN) and isinstance(each, Blocks)
        assert (each.block_m, each.block_n, each.block_size) == (1, k, k)
        assert [each.block(axis) for axis in (-1, -2, -3)] == [(1, k)] * 3
        assert each.mT == each.oriented(-2) == each.canonical(-2) == rows


def test_other_blocks_are_instances_of_one_class() -> None:
    kinds = (PerTensor, PerChannel, PerBlockK, PerBlockMN)
    found = {
        layout: [kind for kind in kinds if isinstance(layout, kind)]
        for layout in (PerTensor(), PerChannel(), PerBlockMN(128, 128), PerBlockMN(32, 1), PerBlockMN(32, 1).mT)
    }
    assert list(found.values()) == [[PerTensor], [PerChannel], [PerBlockMN], [PerBlockMN], [PerBlockMN]]
    assert len(found) == 5 and all(isinstance(layout, Blocks) for layout in found)
    assert issubclass(PerBlockK, PerBlockMN) and not issubclass(PerBlockMN, PerBlockK)
    match PerBlockK(32):
        case PerBlockMN(1, n):
            assert n == 32
        case _:
            pytest.fail("a block along K is a tile one row high")


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_a_layout_round_trips_through_repr_json_and_pickle(layout: Layout) -> None:
    assert layout.to_json() == EVERY[layout]
    assert eval(repr(layout)) == Layout.from_json(EVERY[layout]) == layout
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout
    fields = {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)}  # type: ignore[arg-type]
    assert type(layout)(**fields) == layout
    assert layout.plain.in_order


def test_json_with_a_tile_one_row_high_is_read() -> None:
    text = '{"fields":{"block_m":1,"block_n":32,"partial":false},"name":"per_block_mn"}'
    assert Layout.from_json(text) == PerBlockMN.from_json(text) == PerBlockK(32)
    assert PerBlockMN.from_json(PerBlockK(32).to_json()) == PerBlockK(32)
    assert dataclasses.replace(PerBlockMN(4, 32), block_m=1) == PerBlockK(32)


def test_the_constructor_of_tiles_checks_what_it_was_given() -> None:
    assert list(inspect.signature(PerBlockMN).parameters) == ["block_m", "block_n", "partial"]
    with pytest.raises(UnsupportedError, match="^PerBlockMN has no field 'blok_m'; did you mean 'block_m'"):
        PerBlockMN(blok_m=1)  # type: ignore[call-arg]
    with pytest.raises(RecipeError, match="^block_n must be > 0, got 0"):
        PerBlockMN(1, 0)
    with pytest.raises(RecipeError, match="^PerBlockMN: block_m must be int, got True"):
        PerBlockMN(True, 32)
    with pytest.raises(RecipeError, match="^PerBlockMN: partial must be bool, got 1"):
        PerBlockMN(1, 32, 1)  # type: ignore[arg-type]


# -- tiles one row high across K -------------------------------------------------------------------------------------

TALL = Float8BlockScaling(block_m=2, block_k=1)
X = np.arange(-12, 12, dtype=np.float32).reshape(4, 6)
#: The JSON of a transposed tensor in earlier files.
ACROSS = '{"fields":{"block_m":1,"block_n":2,"partial":false},"name":"per_block_mn"}'


def test_the_transpose_of_a_column_of_elements_is_no_block_along_k() -> None:
    layout = PerBlockMN(2, 1).mT
    assert layout != PerBlockK(2) and not isinstance(layout, PerBlockK)
    assert layout.mT == PerBlockMN(2, 1) and layout.mT.canonical(-2) == layout.canonical(-1) == PerBlockK(2)
    assert layout.block(-2) == (2, 1) and layout.canonical(-2) is layout
    assert repr(layout) == "PerBlockMN(block_m=2, block_n=1, partial=False).mT" and eval(repr(layout)) == layout
    assert pickle.loads(pickle.dumps(layout)) == copy.copy(layout) == layout and layout.to_json() == ACROSS
    odd = layout.fitted((6, 5), -2)
    assert odd == PerBlockMN(2, 1, partial=True).mT and odd.fitted((6, 4), -2) == layout


@pytest.mark.parametrize("given", [PerBlockMN(2, 1).mT, PerBlockMN(1, 2), PerBlockK(2)], ids=str)
def test_the_recipe_says_whether_a_tile_one_row_high_runs_along_k(given: Layout) -> None:
    st, along = breccia.cast(X, TALL).mT, breccia.cast(X, Float8BlockScaling(block_k=2), axis=-2)
    assert st.layout == PerBlockMN(2, 1).mT and breccia.cast(X.T, TALL, axis=-2).digest() == st.digest()
    assert ScaledTensor(st.data, st.scale, TALL, given, axis=-2).digest() == st.digest()
    if given == PerBlockK(2):
        again = ScaledTensor(along.data, along.scale, along.recipe, given, axis=-2)
        assert again.layout == PerBlockK(2) and again.digest() == along.digest()


def test_a_transposed_tensor_keeps_its_layout_in_metadata_and_storages() -> None:
    st = breccia.cast(X, TALL).mT
    assert ACROSS in Metadata.of(st).to_json() and Metadata.from_json(Metadata.of(st).to_json()) == Metadata.of(st)
    stored = st.to_storage("transposed")
    assert Metadata.from_json(Metadata.of(stored).to_json()) == Metadata.of(stored) and stored.to_plain().layout == st.layout
    rows = InStorage(PerBlockK(2), "transposed", stored.layout.matrix, stored.layout.data_axes)
    assert ScaledTensor(stored.data, stored.scale, TALL, rows, axis=-2).layout == stored.layout
    assert pickle.loads(pickle.dumps(stored)).digest() == stored.digest()


# -- layouts of plug-ins ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Spiral(PerBlockMN):
    """Scales in another order than the base class, which says nothing about them."""

    name: ClassVar[str] = "spiral"


@dataclasses.dataclass(frozen=True)
class Ordered(Spiral):
    """Scales in the order of blocks."""

    name: ClassVar[str] = "ordered"
    in_order: ClassVar[bool] = True


@pytest.mark.parametrize("kind", [Spiral, Ordered])
def test_kernels_read_layouts_that_say_they_are_in_order(monkeypatch: pytest.MonkeyPatch, kind: type[Spiral]) -> None:
    monkeypatch.setitem(registry.registry().declared["breccia_layouts"], kind.name, kind)
    layout = kind(1, 32)
    assert type(layout) is type(layout.mT) is kind and layout.mT == kind(32, 1) and layout != PerBlockK(32)
    assert Layout.from_json(layout.to_json()) == eval(repr(layout)) == pickle.loads(pickle.dumps(layout)) == layout
    written = breccia.cast(np.ones((4, 64), np.float32), MXFP8BlockScaling())
    st = ScaledTensor(written.data, written.scale, written.recipe, layout)
    why = {v.kernel.name: v.reason for v in breccia.explain("dequantize", st, prefer="numpy.dequantize").verdicts}
    assert ("does not support layout Spiral" in str(why["numpy.dequantize"])) == (kind is Spiral)
    assert np.array_equal(breccia.dequantize(st), breccia.dequantize(written))


# -- what earlier versions wrote -------------------------------------------------------------------------------------

#: Pickled by the commit before layouts were one class: the layouts of `LOADED`, and a level whose convention was `sense`.
DECLARATIONS = (
    "gASVTgMAAAAAAABdlCiMEGJyZWNjaWEuZGVjbGFyZWSUjAdyZWJ1aWx0lJOUjA9icmVjY2lhLmxheW91dHOUjAlQZXJUZW5zb3KUk5R9lIaUUpRo"
    "A2gEjApQZXJDaGFubmVslJOUfZSGlFKUaANoBIwJUGVyQmxvY2tLlJOUfZQojApibG9ja19zaXpllEsgjAdwYXJ0aWFslIl1hpRSlGgDaBB9lCho"
    "EkswaBOIdYaUUpRoA2gEjApQZXJCbG9ja01OlJOUfZQojAdibG9ja19tlEsBjAdibG9ja19ulEsgaBOJdYaUUpRoA2gafZQoaBxLAWgdSyBoE4h1"
    "hpRSlGgDaBp9lChoHEsgaB1LAWgTiXWGlFKUaANoGn2UKGgcS0BoHUuAaBOJdYaUUpRoA2gafZQoaBxLgGgdS4BoE4h1hpRSlGgDaASMBlN0b3Jl"
    "ZJSTlH2UKIwGbGF5b3V0lGgDaBB9lChoEksgaBOJdYaUUpSMB3N0b3JhZ2WUjA1zd2l6emxlXzEyOHg0lIwGbWF0cml4lCmMCWRhdGFfYXhlc5RL"
    "AHWGlFKUaANoLX2UKGgvaANoGn2UKGgcSwFoHUsgaBOJdYaUUpRoM4wLaW50ZXJsZWF2ZWSUaDVLBEtAhpRoNksDdYaUUpRoA2gEjA1QZXJHcm91"
    "cEluZGV4lJOUfZQojAVpbmRleJQoSwBLAUsASwF0lIwGZ3JvdXBzlEsCdYaUUpSMD2JyZWNjaWEuZm9ybWF0c5SMBUxldmVslJOUKYGUfZQojAVj"
    "b2RlY5SMDmJyZWNjaWEuY29kZWNzlIwJTWluaWZsb2F0lJOUKYGUfZQojARuYW1llIwDRjMylIwEYml0c5RLIIwFZHR5cGWUjAdmbG9hdDMylIwG"
    "c291cmNllIwXSUVFRSA3NTQtMjAxOSwgYmluYXJ5MzKUjA1leHBvbmVudF9iaXRzlEsIjA1tYW50aXNzYV9iaXRzlEsXjARiaWFzlEt/jAdsYXJn"
    "ZXN0lEdH7///4AAAAIwDbmFulEoAAMB/jANpbmaUSgAAgH+MCXNjYWxlX21pbpRHOBAAAAAAAACMBnNpZ25lZJSIdWKMBWJsb2NrlEsBSxCGlIwF"
    "c2Vuc2WUjARhbWF4lHViZS4="
)
LOADED: list[Any] = [
    PerTensor(),
    PerChannel(),
    PerBlockK(32),
    PerBlockK(48, True),
    PerBlockMN(1, 32),
    PerBlockMN(1, 32, True),
    PerBlockMN(32, 1),
    PerBlockMN(64, 128),
    PerBlockMN(128, 128, True),
    InStorage(PerBlockK(32), "swizzle_128x4"),
    InStorage(PerBlockMN(1, 32), "interleaved", (4, 64), 3),
    PerGroupIndex((0, 1, 0, 1), 2),
    Level(F32, (1, 16), "amax"),
]
#: `breccia.cast(X, TALL).mT`, pickled by that commit, and its digest there.
TENSOR = (
    "gASVUAIAAAAAAACMFmJyZWNjaWEudGVuc29ycy50ZW5zb3KUjAhyZXN0b3JlZJSTlCiMFm51bXB5Ll9jb3JlLm11bHRpYXJyYXmUjAxfcmVjb25z"
    "dHJ1Y3SUk5SMBW51bXB5lIwHbmRhcnJheZSTlEsAhZRDAWKUh5RSlChLAUsGSwSGlGgGjAVkdHlwZZSTlIwCdTGUiYiHlFKUKEsDjAF8lE5OTkr/"
    "////Sv////9LAHSUYohDGP7+/v7+/vb18/Hu6ABobnFzdX5+fn5+fpR0lGJoBWgISwCFlGgKh5RSlChLAUsGSwKGlGgPjAJmNJSJiIeUUpQoSwOM"
    "ATyUTk5OSv////9K/////0sAdJRiiEMwt23bPJIkyTxu27Y8SZKkPCVJkjwAAIA8t21bPAAAgDwlSZI8SZKkPG7btjySJMk8lHSUYowQYnJlY2Np"
    "YS5kZWNsYXJlZJSMB3JlYnVpbHSUk5SMD2JyZWNjaWEucmVjaXBlc5SMEkZsb2F0OEJsb2NrU2NhbGluZ5STlH2UKIwKZnA4X2Zvcm1hdJSMBEU0"
    "TTOUjAdibG9ja19rlEsBjAdibG9ja19tlEsCjBJwb3dlcl9vZl90d29fc2NhbGWUiYwKc2NhbGVfcnVsZZSMBmxpbmVhcpR1hpRSlGgkjA9icmVj"
    "Y2lhLmxheW91dHOUjApQZXJCbG9ja01OlJOUfZQoaCxLAYwHYmxvY2tfbpRLAowHcGFydGlhbJSJdYaUUpROTkr+////SwAojAV1aW50OJSMB2Zs"
    "b2F0MzKUTk50lHSUUpQu"
)
DIGEST = "e474d9fcad184bd9f9ee6a8b3b7e209cba673296f493f66abf1a6e3af10d7747"


def test_pickles_of_an_earlier_version_load() -> None:
    assert pickle.loads(base64.b64decode(DECLARATIONS)) == LOADED
    st = pickle.loads(base64.b64decode(TENSOR))
    assert st.layout == PerBlockMN(2, 1).mT and st.digest() == breccia.cast(X, TALL).mT.digest() == DIGEST


def test_earlier_names_remain() -> None:
    assert breccia.Stored is breccia.backend.Stored is breccia.layouts.Stored is InStorage and InStorage.name == "stored"
    level = Level(F32, (1, 16), sense="amax")
    assert level == Level(F32, (1, 16), "amax") and level.sense == level.convention == "amax"
    assert dataclasses.replace(level, convention="divisor").sense == "divisor" and pickle.loads(pickle.dumps(level)) == level
    assert repr(level).endswith("block=(1, 16), convention='amax')")
    fmt = Format(E4M3, (Level(F32, (None, None), "divisor"), Level(E4M3, (1, 16))))
    assert fmt.fingerprint() == "15c7f88790d09922509a196448a46a4e9d94ac0387b9ffe865683e80ccd81918"
