"""`from_foreign` and `to_foreign`: quantized tensors of other libraries, by the classes that plug-ins declare."""

from __future__ import annotations

import sys
from typing import Any

from . import targets
from .dispatch.hookspecs import Foreign
from .dispatch.registry import registry
from .errors import UnknownNameError, UnsupportedError, suggestion
from .siblings import BRIDGES
from .tensors.pair import TensorPair
from .tensors.tensor import ScaledTensor, scaled


def from_foreign(obj: Any, **options: Any) -> ScaledTensor | TensorPair:
    """Convert another library's quantized tensor, bit by bit, by its class: `st = breccia.from_foreign(weight)`.

    options: those of the library's bridge; `breccia.bridges` has each as a function (`from_torchao`, ...).
    A ScaledTensor is returned as it is.

    Raises UnsupportedError for a class that no plug-in declares, and what the bridge raises (DialectError, ...).

        >>> import torch
        >>> from torchao.quantization import Int8WeightOnlyConfig, quantize_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        >>> quantize_(model, Int8WeightOnlyConfig())
        >>> breccia.from_foreign(model[0].weight)
        breccia.ScaledTensor('int8', shape=(32, 64), torch cpu, 8.5 bits per value)
    """
    tensor: Any = scaled(obj)
    if isinstance(tensor, ScaledTensor):
        return tensor
    return targets.load(library_of(obj.__class__).from_foreign)(obj, **options)


def to_foreign(st: ScaledTensor | TensorPair, library: str, **options: Any) -> Any:
    """Convert a tensor to another library's class: `breccia.to_foreign(st, "torchao")`.

    options: those of the library's bridge, which select the class and its attributes.

    Raises UnknownNameError for an undeclared library, UnsupportedError for one without a way back, ImportError if the library
    is not installed, and what the bridge raises (DialectError, ...).

        >>> import torch
        >>> w = breccia.cast(torch.ones(4, 64), "fp8_row")
        >>> tensor = breccia.to_foreign(w, "torchao", dtype=torch.bfloat16)
        >>> type(tensor).__name__, tensor.dtype, tensor.shape
        ('Float8Tensor', torch.bfloat16, torch.Size([4, 64]))
    """
    declared = registry().foreign.get(library)
    if declared is None:
        raise UnknownNameError(
            f"no installed plug-in declares the library {library!r}{suggestion(str(library), list(registry().foreign))}"
            f"{_absent()}",
            name=library,
            known=list(registry().foreign),
        )
    if declared.to_foreign is None:
        raise UnsupportedError(f"breccia reads tensors of {library} and has no way back to it.", library=library)
    if missing := [module for module in declared.requires if not targets.installed(module)]:
        raise ImportError(
            f"to_foreign(st, {library!r}) needs {', '.join(missing)}, which is not installed: pip install {declared.install}.",
            name=missing[0],
        )
    return targets.load(declared.to_foreign)(st if isinstance(st, TensorPair) else scaled(st), **options)


def library_of(kind: type) -> Foreign:
    """The declaration for objects of a class: that of its nearest base; of several, the one that names the deepest module.

    Raises UnsupportedError if there is none, or if two plug-ins declare the same class.
    """
    declarations = registry()
    known = declarations.foreign_types.get(kind)
    if known is not None:
        return known
    for base in kind.__mro__:
        ranked: dict[str, int] = {}
        for library in declarations.foreign.values():
            depths = [len(reference) for reference in library.classes if _names(reference, base)]
            if depths:
                ranked[library.name] = max(depths)
        best = [name for name, depth in ranked.items() if depth == max(ranked.values())]
        if len(best) > 1:
            raise UnsupportedError(
                f"{_title(base)} is declared by {' and '.join(best)}; block one of the two plug-ins with BRECCIA_BLOCK.",
                declared=best,
            )
        if best:
            declarations.foreign_types[kind] = declarations.foreign[best[0]]
            return declarations.foreign[best[0]]
    classes = [f"{reference} ({library.name})" for library in declarations.foreign.values() for reference in library.classes]
    raise UnsupportedError(
        f"from_foreign: no installed plug-in converts {_title(kind)}. Declared: {', '.join(sorted(classes)) or 'none'}. Pass "
        f"one of these, or wrap its buffers with breccia.from_buffer.{_absent()}",
        found=f"{kind.__module__}.{kind.__qualname__}",
    )


def _names(reference: str, kind: type) -> bool:
    module, _, name = reference.partition(":")
    return kind.__qualname__ == name and (kind.__module__ == module or kind.__module__.startswith(f"{module}."))


def _title(kind: type) -> str:
    """The class in messages, with the version of its library."""
    package = kind.__module__.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", None)
    return f"{kind.__module__}.{kind.__qualname__}" + (f" ({package} {version})" if version else "")


def _absent() -> str:
    active = any(p.distribution == BRIDGES.distribution and p.status == "active" for p in registry().plugins)
    return "" if active else f" breccia's own come with {BRIDGES.distribution}: {BRIDGES.remedy}."
