"""Laws of storages: they reorder bits and change none, on every framework."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ... import api
from ...errors import UnsupportedError
from ...kernels import reference
from ...recipes import ScalingRecipe
from ...tensors.equality import bytes_equal
from ...tensors.storage import Storage
from ...tensors.tensor import ScaledTensor
from .. import strategies
from ..compare import expect, expect_numbers, expect_tensor
from ..examples import special_rows, wide
from ..places import Place
from .law import Law, Subject, each
from .recipes import instances, moved


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the storages of a plug-in, with the recipes of all plug-ins."""
    recipes = list(dict.fromkeys([*strategies.defaults(), *instances(subject)]))
    checks = (to_plain_undoes_from_plain, storage_does_not_change_values_or_digests)
    for storage in subject.of("storages"):
        for place in subject.places:
            for recipe in recipes:
                yield from each("storages", f"{storage.name}.{recipe.spec}", checks, storage, recipe, place=place)


def to_plain_undoes_from_plain(storage: Storage, recipe: ScalingRecipe, place: Place) -> None:
    """For full and partial blocks, NaN scales and zeros, one matrix and several, with blocks along either axis."""
    for st in _tensors(storage, recipe):
        plain = moved(st, place)
        stored = plain.to_storage(storage.name)
        expect(stored.storage == storage.name, f"the storage of the result is {stored.storage!r}")
        expect(stored.shape == st.shape, f"shape is {stored.shape}, expected {st.shape}")
        expect_tensor(place, stored.to_plain(), st)
        expect_tensor(place, stored.mT.mT.to_plain(), st)
        expect_tensor(place, plain, st)


def storage_does_not_change_values_or_digests(storage: Storage, recipe: ScalingRecipe, place: Place) -> None:
    """Checks the digest, `bytes_equal`, decoded values and a slice."""
    for st in _tensors(storage, recipe):
        stored = moved(st, place).to_storage(storage.name)
        expect(stored.digest() == st.digest(), "its digest differs from that of the plain tensor")
        expect(bytes_equal(stored, st), "bytes_equal says that it differs from the plain tensor")
        expect_numbers("decoded", place, api.dequantize(stored), reference.dequantize(st))
        if st.ndim > 2:
            expect_tensor(place, stored[1], st[1])


def _tensors(storage: Storage, recipe: ScalingRecipe) -> list[ScaledTensor]:
    """The test tensors that the storage supports. Skips the test if it refuses all of them."""
    arrays = [special_rows(64), wide((3, 67), seed=1), np.stack([wide((5, 64), seed=2), np.zeros((5, 64), np.float32)])]
    tensors = [reference.cast(x, recipe) for x in arrays]
    supported: list[ScaledTensor] = []
    for st in [*tensors, *(st.mT for st in tensors)]:
        try:
            st.to_storage(storage.name)
        except UnsupportedError as e:
            reason = str(e)
        else:
            supported.append(st)
            continue
        expect(storage.name in reason, f"its refusal does not name it: {reason}")
    if not supported:
        pytest.skip(f"{storage.name} holds no tensor of {recipe.name!r}")
    return supported
