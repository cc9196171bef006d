"""Quantized weights where a model reads them as tensors, as Mamba's mixers multiply by the weight of a layer that they own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class ReadAsTensor:
    """Functions of torch, indexing, `@` and views take the decoded values. Each use decodes anew.

    Functions decode in the dtype of their other floating arguments, the rest in `dtype`.
    """

    dtype: torch.dtype

    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as one plain tensor in `dtype`, by default the weight's."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SWAPPED and torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(  # pyright: ignore[reportPrivateUsage]
                "the order of the operands of `weight @ x` is lost; multiply by weight.decoded()"
            )
        arguments = args, kwargs or {}
        others = (x.dtype for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.is_floating_point())
        dtype = next(others, None)

        def plain(x: Any) -> Any:
            return x.decoded(dtype) if isinstance(x, ReadAsTensor) else x

        args, kwargs = tree_map(plain, arguments)
        return func(*args, **kwargs)

    def __matmul__(self, other: Tensor) -> Tensor:
        return torch.matmul(self, other)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def __getitem__(self, index: Any) -> Tensor:
        return self.decoded()[index]

    @property
    def T(self) -> Tensor:
        return self.decoded().T

    @property
    def mT(self) -> Tensor:
        return self.decoded().mT


#: What TorchDynamo (2.11 to 2.13) calls for `a @ b` where a is no tensor, as `b.matmul(a)`: nothing tells the two apart.
_SWAPPED = (Tensor.matmul, Tensor.__matmul__)


def _view(name: str) -> Callable[..., Any]:
    def view(self: ReadAsTensor, *arguments: Any, **options: Any) -> Any:
        return getattr(self.decoded(), name)(*arguments, **options)

    view.__name__ = name
    view.__doc__ = f"`torch.Tensor.{name}` of the values."
    return view


for _name in ("t", "transpose", "permute", "unsqueeze", "reshape", "view", "flatten", "chunk", "split", "detach", "clone"):
    setattr(ReadAsTensor, _name, _view(_name))
