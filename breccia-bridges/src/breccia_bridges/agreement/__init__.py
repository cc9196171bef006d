"""Neighbours: other libraries that write formats of ours, each adapted in a file of its own. For the agreement table alone.

An adapter declares: what its library writes, and which setting of ours stands beside it. `table` compares.
Adapters re-label bytes into our order (docs/spec/numerics.md, section 2) and compute nothing. Importing one imports no
neighbour; its functions do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from breccia import ScalingRecipe
from breccia.backend import NUMPY, Codec, pack

#: One module of this package each, in the order of the table.
ADAPTERS = ("torchao", "transformer_engine", "compressed_tensors", "mlx", "qwix", "gguf", "torch", "jax", "ml_dtypes")

#: Causes that several neighbours share.
DIVIDED = "Codes are x / scale; ours are x times the reciprocal of the scale."
TIES = "Ties go towards zero, and negative elements that round to zero become +0; ours go to even codes and −0 stays."
TO_INF = "Finite numbers that round beyond 57344 become Inf; ours saturate."
TO_NAN = "Finite numbers that round beyond 448 become NaN; ours saturate."


@dataclass(frozen=True)
class Written:
    """What a library makes of an FP32 matrix.

    data: codes in our packing. decoded: FP32, by the library's own decoding.
    scale, global_scale, zero_point: as stored, of any dtype; None where there is none, or none in our sense.
    """

    data: np.ndarray
    decoded: np.ndarray
    scale: np.ndarray | None = None
    global_scale: np.ndarray | None = None
    zero_point: np.ndarray | None = None


@dataclass(frozen=True)
class Ours:
    """What of ours is compared: a recipe, or a codec alone. cause: why theirs differ, in a sentence; empty where none does."""

    writes: ScalingRecipe | Codec
    cause: str = ""


@dataclass(frozen=True)
class Quantizer:
    """A way in which a neighbour writes one format.

    name: as its users would call it. write: FP32 matrix (rows, columns) to `Written`; may raise.
    default: our recipe of that format at its default (but for sizes of groups). closest: our nearest setting; None where
    that is the default. recorded: the matrices there are outputs of, by name, where the library itself is not run.
    """

    name: str
    write: Callable[[np.ndarray], Written]
    default: Ours
    closest: Ours | None = None
    recorded: Callable[[], dict[str, np.ndarray]] | None = None

    @property
    def settings(self) -> dict[str, Ours]:
        """What of ours stands beside it, by name, the closest last."""
        return {"default": self.default} | ({"closest": self.closest} if self.closest else {})


@dataclass(frozen=True)
class Neighbour:
    """A library: its name, how to ask for its version (None where it is not installed), and its quantizers."""

    name: str
    version: Callable[[], str | None]
    quantizers: tuple[Quantizer, ...]


def installed(distribution: str) -> Callable[[], str | None]:
    """A `Neighbour.version` that asks for the distribution of that name."""

    def found() -> str | None:
        try:
            return version(distribution)
        except PackageNotFoundError:
            return None

    return found


def neighbours() -> list[Neighbour]:
    """All that are declared, installed or not."""
    return [n for adapter in ADAPTERS for n in import_module(f"{__name__}.{adapter}").NEIGHBOURS]


def packed(codes: Any, codec: Codec) -> np.ndarray:
    """Codes one per item, of any integer dtype, as the bytes we store: the low `codec.bits` of each, in our order."""
    whole = np.asarray(codes).astype(np.int32) & ((1 << codec.bits) - 1)
    return pack(NUMPY, whole, codec)
