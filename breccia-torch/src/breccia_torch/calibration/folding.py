"""AWQ for any recipe: scales of columns that are folded into the layer before (Lin et al., arXiv:2306.00978)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .moments import watching

#: Names of a layer whose outputs only reach the inputs of another, element by element, times what does not depend on them.
_PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"), ("w3", "w2"))
#: The largest change of a block's outputs, as a share of the largest one, that rounding in FP32 explains: its sums have a few
#: thousand terms, and some dozens of operations follow each other.
TOLERANCE = 2.0**-10


class Fold(NamedTuple):
    """Scales that can move from the columns of some linear layers into what computes their inputs.

    source: the name of a norm, or of a linear layer, in the model. layers: the names of those that read its output.
    """

    source: str
    layers: tuple[str, ...]


def folds(block: nn.Module, prefix: str, run: Callable[[], Any]) -> list[Fold]:
    """The folds of a block that its names and one run of it suggest; `fold` checks each by running the block.

    prefix: the block's name. Norms come first, whose output is the very tensor that layers read.
    """
    named = {f"{prefix}.{name}": module for name, module in block.named_modules() if name}
    outputs: dict[int, tuple[str, Tensor]] = {}
    readers: dict[str, list[str]] = {}
    norms = {m: name for name, m in named.items() if "Norm" in type(m).__name__ and getattr(m, "weight", None) is not None}
    names = {module: name for name, module in named.items() if isinstance(module, nn.Linear)}

    def observer(name: str) -> Callable[[Tensor], None]:
        def observe(x: Tensor) -> None:
            if id(x) in outputs:
                readers.setdefault(outputs[id(x)][0], []).append(name)

        return observe

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[id(output)] = norms[module], output  # the tensor stays, so that no other one gets its id

    handles = [module.register_forward_hook(keep) for module in norms]
    try:
        with watching({module: observer(name) for module, name in names.items()}):
            run()
    finally:
        for handle in handles:
            handle.remove()
    found = [Fold(source, tuple(layers)) for source, layers in readers.items()]
    return [*found, *_pairs({name: m for m, name in names.items()})]


def _pairs(layers: Mapping[str, nn.Linear]) -> Iterator[Fold]:
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition(".")
        for source, reader in _PAIRS:
            other = layers.get(f"{parent}.{source}")
            if leaf == reader and other is not None and other.out_features == layer.in_features and other.bias is None:
                yield Fold(f"{parent}.{source}", (name,))


def candidates(magnitude: Tensor, count: int) -> Iterator[Tensor]:
    """Scales for columns whose inputs have these mean magnitudes: powers of them from 0 to 1, around 1, FP32."""
    positive = magnitude.clamp(min=float(magnitude.max()) * 1e-4)
    for n in range(1, count):
        scales = positive ** (n / count)
        yield (scales / (scales.max() * scales.min()).sqrt()).float()


class Folded:
    """Scales that are folded into a source and its layers, in place. `undo` puts back what was there.

    dtype: of the source's weight in the file, to which it is rounded. What rounding changes goes into the scales, so that the
    product stays what it was. Norms multiply by their weight, or by one plus it (Gemma's): offset.
    """

    def __init__(
        self, source: nn.Module, layers: Sequence[nn.Module], scales: Tensor, dtype: torch.dtype, offset: float
    ) -> None:
        self._saved = [(module, module.weight.detach().clone()) for module in (source, *layers)]  # type: ignore[union-attr]
        weight: Tensor = source.weight.detach()  # type: ignore[union-attr]
        if isinstance(source, nn.Linear):
            self.scales = scales
            weight /= scales[:, None]
        else:
            new = ((weight + offset) / scales - offset).to(dtype).float()
            usable = ((weight + offset) / (new + offset) > 0) & torch.isfinite((weight + offset) / (new + offset))
            self.scales = torch.where(usable, (weight + offset) / (new + offset), 1)
            weight.copy_(torch.where(usable, new, weight))
        for layer in layers:
            layer.weight.detach().mul_(self.scales)  # type: ignore[union-attr]

    def undo(self) -> None:
        for module, weight in self._saved:
            module.weight.detach().copy_(weight)  # type: ignore[union-attr]


def change(before: Tensor, after: Tensor) -> float:
    """The largest change of an output, as a share of the largest output."""
    return float((after - before).abs().max() / before.abs().max().clamp(min=torch.finfo(torch.float32).tiny))
