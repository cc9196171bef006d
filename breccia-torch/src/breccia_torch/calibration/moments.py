"""What calibration knows of the inputs of linear layers: their number, and their second moment in FP64."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from breccia import NonFiniteError

#: What reads the inputs of a layer: f(x), of shape (..., K).
Observer = Callable[[Tensor], None]


class Moments:
    """The sums over tokens of x xᵀ and |x|, in FP64, in the order of the tokens' sequences.

    x: the inputs of a layer, of shape (..., in_features). `second` has shape (in_features, in_features).
    """

    def __init__(self, name: str, columns: int, device: Any) -> None:
        self.name, self.count = name, 0
        self.second = torch.zeros(columns, columns, dtype=torch.float64, device=device)
        self.magnitude = torch.zeros(columns, dtype=torch.float64, device=device)

    @property
    def mean_square(self) -> Tensor:
        """The mean of x² for each column: its importance."""
        return self.second.diagonal() / max(1, self.count)

    def add(self, x: Tensor, product: Tensor) -> None:
        """Count the rows of `x`. product: their sum of x xᵀ. Raises NonFiniteError, naming the layer."""
        if not bool(torch.isfinite(product.diagonal()).all()):
            raise NonFiniteError(
                f"calibration: the inputs of {self.name} have NaN or Inf, after {self.count} tokens. Find the layer before it "
                "whose weights are broken (`breccia inspect`), or leave this one out (--exclude).",
                name=self.name,
            )
        self.count += x.shape[0]
        self.second += product
        self.magnitude += x.abs().sum(0, dtype=torch.float64)

    def scaled(self, scales: Tensor) -> Moments:
        """The moments of inputs that are divided by `scales`, of shape (in_features,)."""
        other = Moments(self.name, 0, self.second.device)
        other.count, by = self.count, scales.double()
        other.second, other.magnitude = self.second / by[:, None] / by, self.magnitude / by
        return other


class Products:
    """x xᵀ in FP64 of the inputs of one run: layers that read the same tensor share it."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def observer(self, moments: Moments) -> Observer:
        def observe(x: Tensor) -> None:
            if self._last is None or self._last[0] is not x:
                rows = x.detach().reshape(-1, x.shape[-1])
                precise = rows.double()
                self._last = x, rows, precise.T @ precise
            if self._last[1].shape[0]:
                moments.add(*self._last[1:])

        return observe

    def clear(self) -> None:
        self._last = None


@contextmanager
def watching(observers: Mapping[nn.Module, Observer]) -> Generator[None]:
    """Let observers read the inputs of linear layers."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        observers[module](inputs[0])

    handles = [module.register_forward_pre_hook(hook) for module in observers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
