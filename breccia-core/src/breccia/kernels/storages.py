"""Every op on plain tensors, for storages that no kernel reads or writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import calls
from ..dispatch.registry import registry
from ..operations import Operation
from ..options import PLAIN, CastOptions
from ..tensors.tensor import ScaledTensor
from . import reference


def on_plain_tensors(op: Operation) -> Callable[..., Any]:
    """The op as a kernel of any storage: operands are converted to plain storage, and results to the one that is asked for."""

    def kernel(*arguments: Any) -> Any:
        plain = [x.to_plain() if isinstance(x, ScaledTensor) else x for x in arguments]
        options = op.options_of(arguments)
        if not op.stores or not isinstance(options, CastOptions):
            return getattr(calls, op.name)(*plain)
        plain[-1] = options.replace(storage=PLAIN, out=None)
        result = getattr(calls, op.name)(*plain)
        if isinstance(result, ScaledTensor):
            return reference.assigned(options.out, result.to_storage(options.storage))
        return tuple(x.to_storage(options.storage) if isinstance(x, ScaledTensor) else x for x in result)

    return kernel


def __getattr__(name: str) -> Callable[..., Any]:
    """The kernel of the op of that name."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return on_plain_tensors(registry().operation(name))
