"""Adapters by which other libraries' own quantizers run the vectors, a module for each library.

An adapter moves numbers into the library's order and back, and rounds none; those of bare dtypes apply the scale. A format of
the vectors belongs to an adapter if it has the library's element codec, blocks, scale convention and, where one exists, its
scale rule. The modules need NumPy, from `breccia-vectors[adapters]`; their functions import the library. To run some:

    python -m breccia_vectors.adapters torchao mlx
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from ..checking import check
from ..reports import Report
from ..sets import Case, cases


@dataclass(frozen=True)
class Adapter:
    """One quantizer of a library. name: as its users call it. formats: the `Format.name` of what it runs.

    quantize, dequantize: as `breccia_vectors.check` takes them.
    """

    name: str
    formats: tuple[str, ...]
    quantize: Callable[[Case], Mapping[str, Any]] | None = None
    dequantize: Callable[[Case], Any] | None = None


@dataclass(frozen=True)
class Library:
    """name: as it is written. distribution: as pip installs it. module: of this package.

    flushes_subnormals: signed zeros may stand for FP32 subnormals, as on XLA.
    """

    name: str
    distribution: str
    module: str
    flushes_subnormals: bool = False

    @property
    def version(self) -> str | None:
        """The installed version without its local part; None if it is not installed."""
        try:
            return version(self.distribution).partition("+")[0]
        except PackageNotFoundError:
            return None

    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters of the library, whether it is installed or not."""
        return import_module(f"{__name__}.{self.module}").ADAPTERS


#: In the order of the page.
LIBRARIES = (
    Library("torchao", "torchao", "torchao"),
    Library("compressed-tensors", "compressed-tensors", "compressed_tensors"),
    Library("ModelOpt", "nvidia-modelopt", "modelopt"),
    Library("MLX", "mlx", "mlx"),
    Library("gguf", "gguf", "gguf"),
    Library("qwix", "qwix", "qwix", flushes_subnormals=True),
    Library("bitsandbytes", "bitsandbytes", "bitsandbytes"),
    Library("optimum-quanto", "optimum-quanto", "quanto"),
    Library("PyTorch", "torch", "torch"),
    Library("JAX", "jax", "jax", flushes_subnormals=True),
    Library("ml_dtypes", "ml-dtypes", "ml_dtypes"),
)


class NotInstalled(ImportError):
    """A library that is to be run is not installed; the message says how to install it."""


def run(library: Library, only: Iterable[str] = (), *, reduce: bool = False) -> Iterator[tuple[Adapter, Report]]:
    """Each adapter of a library with its report. only: `Format.name`s, by default all that the adapter declares.

    Raises NotInstalled.
    """
    if library.version is None:
        raise NotInstalled(f"{library.name} is not installed: pip install {library.distribution}")
    if find_spec("numpy") is None:
        raise NotInstalled("NumPy is not installed, which adapters need: pip install 'breccia-vectors[adapters]'")
    for adapter in library.adapters():
        wanted = set(adapter.formats) & set(only) if only else set(adapter.formats)
        chosen = [case for case in cases() if case.format.name in wanted]
        options = {"reduce": reduce, "flushes_subnormals": library.flushes_subnormals}
        name = f"{library.name} {library.version}, {adapter.name}"
        yield adapter, check(adapter.quantize, adapter.dequantize, library=name, cases=chosen, **options)
