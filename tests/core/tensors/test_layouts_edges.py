"""Layouts, scale levels and storages: their repr, their number, and refusal of undeclared ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import breccia
from breccia import (
    InStorage,
    Layout,
    LayoutError,
    MXFP8BlockScaling,
    NoKernelError,
    NVFP4BlockScaling,
    PerBlockMN,
    PerGroupIndex,
    ScaledTensor,
    UnknownNameError,
    UnsupportedError,
)
from breccia.codecs import E2M1, E4M3, F32
from breccia.dispatch import registry
from breccia.errors import RecipeError
from breccia.formats import TENSOR, Format, Level

X = np.linspace(-3, 3, 8 * 64, dtype=np.float32).reshape(8, 64)
MXFP8 = MXFP8BlockScaling()


def test_an_index_of_more_than_eight_entries_is_shown_by_its_first_eight() -> None:
    assert repr(PerGroupIndex((0, 1, 0, 1, 1, 1, 0, 0), 2)) == "PerGroupIndex(index=(0, 1, 0, 1, 1, 1, 0, 0) of 8, groups=2)"
    assert repr(PerGroupIndex((2,) * 9, 3)) == "PerGroupIndex(index=(2, 2, 2, 2, 2, 2, 2, 2, ...) of 9, groups=3)"
    assert repr(PerGroupIndex((1, 0), 2)) == "PerGroupIndex(index=(1, 0) of 2, groups=2)"


def test_a_format_has_one_global_level_at_most_and_one_of_blocks_or_more() -> None:
    tensor, block = Level(F32, TENSOR), Level(E4M3, (1, 16))
    assert Format(E2M1, (block,)).global_scale is None
    assert Format(E2M1, (tensor, block)).global_scale == tensor
    assert Format(E2M1, (tensor, Level(E4M3, (1, 32)), block)).block == (1, 32)
    for levels, said in (
        ((), "a format has one scale level or more.*; got 0"),
        ((tensor, tensor, block), "only the first level"),
    ):
        with pytest.raises(RecipeError, match=said):
            Format(E2M1, levels)


# -- undeclared layouts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spiral(PerBlockMN):
    """A layout that no plug-in declares. Nothing says that its scales are arranged like those of its base class."""

    name = "spiral"


@dataclass(frozen=True)
class Namesake(PerBlockMN):
    """A layout with the name of another class."""


def wrapped(layout: Layout) -> ScaledTensor:
    st = breccia.cast(X, MXFP8)
    return ScaledTensor.from_parts(st.data, st.scale, st.recipe, layout)


REFUSALS: dict[str, Callable[[Layout], Any]] = {
    "made": lambda layout: ScaledTensor(wrapped(layout).data, wrapped(layout).scale, MXFP8, layout),
    "made from buffers": lambda layout: breccia.from_buffer(wrapped(layout).data, wrapped(layout).scale, MXFP8, layout),
    "dequantized": lambda layout: breccia.dequantize(wrapped(layout)),
    "dequantized by the generic algorithm": lambda layout: breccia.dequantize(wrapped(layout), prefer="reference.dequantize"),
    "multiplied": lambda layout: breccia.matmul(wrapped(layout), X.T),
    "requantized": lambda layout: breccia.requantize(wrapped(layout), NVFP4BlockScaling()),
}


@pytest.mark.parametrize("refused", REFUSALS)
@pytest.mark.parametrize("layout", [Spiral(1, 32), Namesake(1, 32)], ids=lambda layout: type(layout).__name__)
def test_a_tensor_with_an_undeclared_layout_is_refused_by_name(layout: Layout, refused: str) -> None:
    with pytest.raises(UnsupportedError) as e:
        REFUSALS[refused](layout)
    assert str(e.value) == (
        f"no plug-in declares layout {type(layout).__name__}, so its scale order is unknown. Declare it through the "
        "hook breccia_layouts, or use one of per_block_k, per_block_mn, per_channel, per_group_index, per_tensor, stored."
    )
    assert e.value.found["layout"] == layout


def test_a_layout_that_a_plug_in_declares_is_used_for_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.registry().declared["breccia_layouts"], "spiral", Spiral)
    st = breccia.cast(X, MXFP8)
    spiral = ScaledTensor(st.data, st.scale, MXFP8, Spiral(1, 32))
    assert np.array_equal(breccia.dequantize(spiral), breccia.dequantize(st))
    assert Layout.from_json(spiral.layout.to_json()) == Spiral(1, 32)


def test_the_layout_below_a_storage_is_checked_too() -> None:
    st = breccia.cast(X, MXFP8).to_storage("transposed")
    with pytest.raises(UnsupportedError, match=r"^no plug-in declares layout Spiral,"):
        ScaledTensor(st.data, st.scale, MXFP8, InStorage(Spiral(1, 32), "transposed"))


def test_scales_in_a_storage_have_the_shape_that_it_gives_them() -> None:
    with pytest.raises(LayoutError, match="scales in storage 'transposed' have the shape it gives them; see st.to_plain"):
        InStorage(PerBlockMN(1, 32), "transposed").scale_shapes((4, 32))


def test_groups_by_index_follow_each_other() -> None:
    first, second = PerGroupIndex((1, 0), 2), PerGroupIndex((0, 0, 1), 2)
    assert first.followed_by(second) == PerGroupIndex((1, 0, 0, 0, 1), 2)


# -- storages by name ------------------------------------------------------------------------------------------------

STORED = breccia.cast(X, MXFP8).to_storage("swizzle_128x4")
UNKNOWN: dict[str, Callable[[], Any]] = {
    "to_storage": lambda: breccia.cast(X, MXFP8).to_storage("swizle_128x4"),
    "cast": lambda: breccia.cast(X, MXFP8, storage="swizle_128x4"),
    "cast_pair": lambda: breccia.cast_pair(X, MXFP8, storage="swizle_128x4"),
    "requantize": lambda: breccia.requantize(STORED, NVFP4BlockScaling(), storage="swizle_128x4"),
    "explain": lambda: breccia.explain("cast", X, MXFP8, storage="swizle_128x4"),
    "ScaledTensor": lambda: ScaledTensor(STORED.data, STORED.scale, MXFP8, InStorage(PerBlockMN(1, 32), "swizle_128x4")),
    "dequantize": lambda: breccia.dequantize(
        ScaledTensor.from_parts(STORED.data, STORED.scale, MXFP8, InStorage(PerBlockMN(1, 32), "swizle_128x4"))
    ),
}


@pytest.mark.parametrize("where", UNKNOWN)
def test_an_undeclared_storage_is_refused_with_the_nearest_name(where: str) -> None:
    with pytest.raises(UnknownNameError) as e:
        UNKNOWN[where]()
    assert str(e.value) == (
        "no storage 'swizle_128x4'; did you mean 'swizzle_128x4'? Known: column_major, interleaved, mma_16x128, "
        "padded_128x4, padded_1x4, swizzle_128x4, transposed."
    )
    assert e.value.found["name"] == "swizle_128x4"


def test_a_stored_tensor_reports_its_storage_and_converts_back_to_plain() -> None:
    st = breccia.cast(X, MXFP8)
    assert (st.storage, STORED.storage, STORED.to_plain().storage) == ("plain", "swizzle_128x4", "plain")
    assert st.to_plain() is st and st.to_storage("plain") is st and STORED.to_storage("swizzle_128x4") is STORED
    assert breccia.bytes_equal(STORED.to_plain(), st) and STORED.digest() == st.digest()
    assert np.array_equal(STORED.to_plain().scale, st.scale) and np.array_equal(STORED.to_plain().data, st.data)
    again = Layout.from_json(STORED.layout.to_json())
    assert again == STORED.layout and json.loads(STORED.layout.to_json())["name"] == "stored"
    assert STORED.layout.plain == st.layout and st.layout.plain == st.layout


def test_a_storage_wraps_exactly_one_plain_layout() -> None:
    with pytest.raises(RecipeError, match=r"^InStorage: layout must be a plain Layout, got InStorage\("):
        replace(STORED.layout, layout=STORED.layout)
    with pytest.raises(RecipeError, match=r"^InStorage: layout must be a plain Layout, got 'per_tensor'"):
        InStorage("per_tensor", "interleaved")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"^InStorage: storage must be str, got 5"):
        InStorage(PerBlockMN(1, 32), 5)  # type: ignore[arg-type]


def test_prefer_of_a_kernel_that_cannot_read_the_storage_raises_with_a_remedy() -> None:
    with pytest.raises(NoKernelError) as e:
        breccia.dequantize(STORED, prefer="numpy.dequantize")
    reason = "reads 'plain' storage, an operand is in 'swizzle_128x4'; st.to_storage('plain') converts it"
    assert f"      skipped: {reason}" in str(e.value).splitlines()
    plain = breccia.dequantize(STORED.to_storage("plain"), prefer="numpy.dequantize")
    assert np.array_equal(plain, breccia.dequantize(STORED)), "and it is one"


def test_prefer_of_a_kernel_that_cannot_write_the_storage_raises() -> None:
    with pytest.raises(NoKernelError) as e:
        breccia.cast(X, MXFP8, storage="swizzle_128x4", prefer="numpy.cast")
    assert "      skipped: writes 'plain' storage, not 'swizzle_128x4'" in str(e.value).splitlines()


OPS_ON_STORED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dequantize": (lambda: breccia.dequantize(STORED), lambda: breccia.dequantize(STORED.to_plain())),
    "requantize": (lambda: breccia.requantize(STORED, NVFP4BlockScaling()).digest(),
        lambda: breccia.requantize(STORED.to_plain(), NVFP4BlockScaling()).digest()),
    "matmul": (lambda: breccia.matmul(X, STORED.mT), lambda: breccia.matmul(X, STORED.to_plain().mT)),
    "cast_matmul": (lambda: breccia.cast_matmul(X, MXFP8, STORED.mT),
        lambda: breccia.cast_matmul(X, MXFP8, STORED.to_plain().mT)),
    "cast": (lambda: breccia.cast(X, MXFP8, storage="swizzle_128x4").to_plain().digest(),
        lambda: breccia.cast(X, MXFP8).digest()),
    "cast_pair": (lambda: [(st.storage, st.digest()) for st in breccia.cast_pair(X, MXFP8, storage="swizzle_128x4")],
        lambda: [("swizzle_128x4", st.digest()) for st in breccia.cast_pair(X, MXFP8)]),
}  # fmt: skip


@pytest.mark.parametrize("op", OPS_ON_STORED)
def test_every_op_reads_and_writes_storages_that_no_kernel_declares(op: str) -> None:
    stored, plain = OPS_ON_STORED[op]
    assert np.array_equal(stored(), plain())
