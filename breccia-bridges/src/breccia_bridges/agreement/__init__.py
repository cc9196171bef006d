"""Adapters of other libraries that write breccia's formats, one per file. Used only by the agreement table.

An adapter declares what its library writes, and which breccia settings to compare; `table` compares.
Adapters only reorder bytes into breccia's order (docs/spec/numerics.md, section 2) and compute nothing. Importing an adapter
imports no other library; its functions do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from breccia import Codec, ScalingRecipe
from breccia.backend import NUMPY, pack

#: One module of this package each, in the order of the table.
ADAPTERS = ("torchao", "transformer_engine", "compressed_tensors", "mlx", "qwix", "gguf", "torch", "jax", "ml_dtypes")

#: Causes that several libraries share.
DIVIDED = "Codes are x / scale; breccia's are x times the reciprocal of the scale."
TIES = (
    "Ties go towards zero, and negative elements that round to zero become +0; in breccia ties go to even codes and −0 is kept."
)
TO_INF = "Finite numbers that round beyond 57344 become Inf; in breccia they saturate."
TO_NAN = "Finite numbers that round beyond 448 become NaN; in breccia they saturate."


@dataclass(frozen=True)
class Written:
    """The result of quantizing an FP32 matrix with a library.

    data: codes in breccia's packing. decoded: FP32, by the library's own decoding.
    scale, global_scale, zero_point: as stored, of any dtype; None if absent, or of another scale convention.
    """

    data: np.ndarray
    decoded: np.ndarray
    scale: np.ndarray | None = None
    global_scale: np.ndarray | None = None
    zero_point: np.ndarray | None = None


@dataclass(frozen=True)
class Setting:
    """A recipe of breccia (or only a codec) to compare with. cause: why the bytes differ, in a sentence; empty if none do."""

    writes: ScalingRecipe | Codec
    cause: str = ""


@dataclass(frozen=True)
class Quantizer:
    """One way in which a library writes a format.

    name: as its users call it. write: FP32 matrix (rows, columns) to `Written`; may raise.
    default: breccia's recipe of that format at its defaults (except group sizes). closest: the setting with the most equal
    bytes; None if that is the default. recorded: the input matrices of recorded outputs, by name, if the library is not run.
    """

    name: str
    write: Callable[[np.ndarray], Written]
    default: Setting
    closest: Setting | None = None
    recorded: Callable[[], dict[str, np.ndarray]] | None = None

    @property
    def settings(self) -> dict[str, Setting]:
        """The breccia settings to compare with, by name, the closest last."""
        return {"default": self.default} | ({"closest": self.closest} if self.closest else {})


@dataclass(frozen=True)
class Library:
    """A library: its name, a function that gives its version (None if not installed), and its quantizers."""

    name: str
    version: Callable[[], str | None]
    quantizers: tuple[Quantizer, ...]


def installed(distribution: str) -> Callable[[], str | None]:
    """A `Library.version` that asks for the distribution of that name."""

    def installed_version() -> str | None:
        try:
            return version(distribution)
        except PackageNotFoundError:
            return None

    return installed_version


def libraries() -> list[Library]:
    """All declared libraries, installed or not."""
    return [library for adapter in ADAPTERS for library in import_module(f"{__name__}.{adapter}").LIBRARIES]


def packed(codes: Any, codec: Codec) -> np.ndarray:
    """Pack codes, one per item of any integer dtype, into breccia's bytes: the low `codec.bits` of each."""
    masked = np.asarray(codes).astype(np.int32) & ((1 << codec.bits) - 1)
    return pack(NUMPY, masked, codec)
