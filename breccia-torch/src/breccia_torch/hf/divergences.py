"""What other weights cost a model of transformers: KL divergence from its own outputs on a text, for many choices at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from breccia import NonFiniteError, OptionError, bridges
from breccia.internal import size

from ..calibration.moments import watching
from .blocks import Arguments, Blocks
from .texts import PROGRAM, as_texts, check_device

#: Bytes for each logit of a text: those of the model, of a variant, and what they become.
_OF_LOGIT = 16
#: A value in place of the checkpoint's: makes its FP32 array. Variants that share the object share what it leads to.
Version = Callable[[], np.ndarray]
#: Some values in versions of their own.
Choice = frozenset[tuple[str, Version]]


@dataclass
class Inputs:
    """What is known of the inputs of a linear layer on a text.

    square: the mean of x² for each input, FP64. largest: the largest |x| of each. count: of tokens.
    """

    square: np.ndarray
    largest: np.ndarray
    count: int


class Divergences(NamedTuple):
    """What variants cost, by their names: the KL divergence per token from the model itself, in nats.

    measure: "kl"; or "output_error", the share of the last hidden state that is lost, for a model without logits. tokens: that
    it was measured on.
    """

    measure: str
    costs: dict[str, float]
    tokens: int


def divergences(
    source: Path,
    ids: np.ndarray,
    variants: Mapping[str, Mapping[str, Version]],
    *,
    device: str = "cpu",
    source_dialect: str | None = None,
    most: int | None = None,
    limit: int | None = None,
    observe: Callable[[str, Inputs], None] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Divergences:
    """Run a model with some of its weights replaced, in one pass over its blocks for all variants.

    source, ids, device: as in `calibrate`. variants: for each name, the versions of the values that differ from the checkpoint.
    most: tokens that the costs are measured on; all by default. limit: bytes of memory, beside what the process holds already;
    with less, costs are measured on fewer texts. observe: called with the name of a value and the inputs of its
    layer in the model itself, before a version of it is asked for; of linear layers.
    advance: called after each block.

    A block is in memory at a time, with the hidden states that differ: variants whose values are the same so far share one.
    Values that the model has no place for change nothing. Raises what `calibrate` raises of the model and the ids, OptionError
    for a limit that one text exceeds, and NonFiniteError for a model that itself has NaN or Inf on the text, naming the layer.
    """
    return _Pass(source, ids, variants, device, source_dialect, most, limit, observe).run(advance)


class _Pass:
    def __init__(
        self, source: Path, ids: np.ndarray, variants: Mapping[str, Mapping[str, Version]], device: str,
        source_dialect: str | None, most: int | None, limit: int | None, observe: Callable[[str, Inputs], None] | None,
    ) -> None:  # fmt: skip
        check_device(device)
        checkpoint = bridges.load_checkpoint(source, framework="torch", source_dialect=source_dialect)
        self.blocks, self.checkpoint, self.observe = Blocks(source, checkpoint, torch.device(device)), checkpoint, observe
        texts = as_texts(self.blocks.model, ids)
        self.texts = texts
        rows = len(texts) if most is None else max(1, most // texts.shape[1])
        self.measured = texts[: rows if limit is None else min(rows, self._rows(limit, len(variants)))]
        self.variants: dict[str, Choice] = {name: frozenset(values.items()) for name, values in variants.items()}
        self.places = {name: self._block_of(name) for values in variants.values() for name in values}

    def _rows(self, limit: int, variants: int) -> int:
        """The texts whose hidden states fit, one for each variant. Raises OptionError where not one does."""
        model, (count, length) = self.blocks.model, self.texts.shape
        embedding = model.get_input_embeddings()
        row = 4 * length * embedding.embedding_dim
        blocks = [sum(4 * p.numel() for p in block.parameters()) for block in self.blocks.blocks]
        inside = f"{self.blocks.path}."
        outer = max((4 * p.numel() for n, p in model.named_parameters() if not n.startswith(inside)), default=0)
        fixed = PROGRAM + (count + 1) * row + max(outer, max(blocks)) + _OF_LOGIT * length * embedding.num_embeddings
        needed = fixed + (variants + 1) * row
        if needed > limit:
            give = f"{math.ceil(needed / (64 << 20)) * 64}MiB"
            raise OptionError(
                f"measuring what {variants} choices cost takes about {size(needed)} of memory, and the limit "
                f"is {size(limit)}. Give max_memory={give!r} (--max-memory {give}), or shorter texts.",
                max_memory=limit,
            )
        return (limit - fixed) // ((variants + 1) * row)

    def _block_of(self, name: str) -> int | None:
        """The number of the block that has a value; -1 outside them, None for no place."""
        spot = self.blocks.spots.get(name)
        if spot is None:
            return None
        inside = (n for n, block in enumerate(self.blocks.names) if f"{spot.owner}.".startswith(f"{block}."))
        return next(inside, -1)

    def _within(self, choice: Choice, block: int) -> Choice:
        return frozenset(pair for pair in choice if self.places[pair[0]] == block)

    @torch.no_grad()
    def run(self, advance: Callable[[], None]) -> Divergences:
        outer = {name: self._within(choice, -1) for name, choice in self.variants.items()}
        states: dict[Choice, Tensor] = {}
        arguments: list[Arguments] = []
        for choice in dict.fromkeys((frozenset(), *outer.values())):
            with self._outside(choice):
                own = self.measured if choice else self.texts
                states[choice], arguments = self.blocks.embed(own)
                if not choice:
                    self._check(states[choice], self.blocks.model, "", lambda row: self.blocks.embed(self.texts[row : row + 1]))
        choices = dict(outer)
        for n in range(len(self.blocks.blocks)):
            inner = {name: self._within(choice, n) for name, choice in self.variants.items()}
            states = self._through(n, states, {(choices[name], inner[name]) for name in choices}, arguments[n])
            choices = {name: choices[name] | inner[name] for name in choices}
            advance()
        return self._compared(states, choices)

    def _through(self, n: int, states: dict[Choice, Tensor], wanted: set[tuple[Choice, Choice]], given: Arguments) -> Any:
        """The hidden states after a block. wanted: what was chosen before it, and in it."""
        name, block = self.blocks.names[n], self.blocks.blocks[n]
        self.blocks.fill(block, name)
        own = states[frozenset()]
        with self._observing(block, name):
            after: dict[Choice, Tensor] = {frozenset(): self._ran(n, own, given)}
        self._check(after[frozenset()], block, name, lambda row: self.blocks.run(n, own[row], given))
        by_inner: dict[Choice, list[Choice]] = {}
        for before, inner in wanted:
            if before or inner:
                by_inner.setdefault(inner, []).append(before)
        uses = Counter(before for before, _ in wanted)
        for inner, befores in by_inner.items():
            with self._replaced(inner):
                for before in befores:
                    uses[before] -= 1
                    hidden = own[: len(self.measured)] if not before else states[before] if uses[before] else states.pop(before)
                    after[before | inner] = self._ran(n, hidden, given)
        self.blocks.empty(block)
        return after

    def _ran(self, n: int, hidden: Tensor, given: Arguments) -> Tensor:
        return torch.stack([self.blocks.run(n, x, given) for x in hidden])

    def _check(self, found: Tensor, root: nn.Module, prefix: str, rerun: Callable[[int], Any]) -> None:
        """Raise NonFiniteError where what the model itself gives has NaN or Inf, naming the first layer that has.

        found: of each text. rerun: f(text) runs the modules below `root`, whose name is `prefix`, again.
        """
        finite = torch.isfinite(found).flatten(1).all(1)
        if bool(finite.all()):
            return
        layers: list[tuple[str, nn.Module]] = []

        def watch(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                outputs = output if isinstance(output, tuple) else (output,)
                floats = (each for each in outputs if isinstance(each, Tensor) and each.dtype.is_floating_point)
                if not layers and not all(bool(torch.isfinite(each).all()) for each in floats):
                    layers.append((name, module))

            return hook

        handles = [module.register_forward_hook(watch(name)) for name, module in root.named_modules(prefix=prefix) if name]
        try:
            rerun(int((~finite).nonzero()[0]))
        finally:
            for handle in handles:
                handle.remove()
        name, module = layers[0] if layers else (prefix, root)
        weights = [p for p in module.parameters(recurse=False) if p.device.type != "meta"]
        broken = not all(bool(torch.isfinite(p).all()) for p in weights)
        where = "in the weights" if broken else "on the text, first in the outputs"
        raise NonFiniteError(
            f"{self.blocks.source}, the original, has NaN or Inf {where} of {name or 'the model'}, so nothing can be measured "
            "against it. Repair it, or use weights alone: leave calibrate (--calibrate) out.",
            name=name,
        )

    def _replaced(self, choice: Choice) -> ExitStack:
        """Put versions into the block that is in memory, and its own values back at the end."""
        stack = ExitStack()
        for name, version in choice:
            spot = self.blocks.spots[name]
            part = spot.of(self.blocks.model, tuple(self.checkpoint.header(name).shape))
            stack.callback(part.copy_, part.clone())
            part.copy_(torch.from_numpy(version()))
        return stack

    def _outside(self, choice: Choice) -> ExitStack:
        """Fill modules outside the blocks when they are called, with these versions."""
        stack = ExitStack()
        self.blocks.replaced = {name: torch.from_numpy(version()) for name, version in choice}
        stack.callback(self.blocks.replaced.clear)
        stack.enter_context(self.blocks.outside())
        return stack

    def _observing(self, root: nn.Module, prefix: str) -> ExitStack:
        """Observe the inputs of linear layers that have a value of their own; told when all texts have run."""
        stack = ExitStack()
        if self.observe is None:
            return stack
        seen: dict[str, _Seen] = {}
        observers: dict[nn.Module, Callable[[Tensor], None]] = {}
        for name, module in root.named_modules(prefix=prefix):
            spots = self.blocks.spots_at(f"{name}.weight") if isinstance(module, nn.Linear) else []
            if len(spots) == 1 and spots[0].name in self.places:
                observers[module] = seen.setdefault(spots[0].name, _Seen()).add
        stack.callback(self._tell, seen)
        stack.enter_context(watching(observers))
        return stack

    def _tell(self, seen: Mapping[str, _Seen]) -> None:
        assert self.observe is not None
        for name, one in seen.items():
            if (inputs := one.inputs()) is not None:
                self.observe(name, inputs)

    def _compared(self, states: Mapping[Choice, Tensor], choices: Mapping[str, Choice]) -> Divergences:
        """Compare what the model returns for the hidden states after the last block."""
        outer = dict.fromkeys((frozenset(), *(self._within(choice, -1) for choice in states)))
        costs = dict.fromkeys(states, 0.0)
        measure, rows = "kl", len(self.measured)
        kept: list[Tensor] = []
        for choice in outer:
            own = [key for key in states if key and self._within(key, -1) == choice]
            with self._outside(choice):
                if not choice:  # the model itself, with all texts that its head is observed on
                    with self._observing(self.blocks.model, ""):
                        for n, output in enumerate(self.blocks.finish(self.texts, states[frozenset()])):
                            if n >= rows:
                                continue
                            measure, reference = _outputs(output)
                            self._check(
                                reference[None],
                                self.blocks.model,
                                "",
                                lambda _, n=n: list(self.blocks.finish(self.texts[n : n + 1], states[frozenset()][n : n + 1])),
                            )
                            if len(outer) > 1:
                                kept.append(reference)
                            for key in own:
                                costs[key] += self._cost(n, states[key], reference) / rows
                    continue
                for n in range(rows):
                    for key in own:
                        costs[key] += self._cost(n, states[key], kept[n]) / rows
        return Divergences(measure, {name: costs[choice] for name, choice in choices.items()}, self.measured.numel())

    def _cost(self, row: int, hidden: Tensor, reference: Tensor) -> float:
        (output,) = self.blocks.finish(self.measured[row : row + 1], hidden[row : row + 1])
        measure, found = _outputs(output)
        if measure == "kl":
            return float((reference.exp() * (reference - found)).sum(-1).mean(dtype=torch.float64))
        return float((found - reference).square().sum(dtype=torch.float64) / reference.square().sum(dtype=torch.float64))


class _Seen:
    """Sums over the inputs of a layer."""

    def __init__(self) -> None:
        self.square: Tensor | None = None
        self.largest: Tensor | None = None
        self.count = 0

    def add(self, x: Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1])
        if not len(rows):
            return
        square, largest = rows.double().square().sum(0), rows.abs().amax(0)
        self.square = square if self.square is None else self.square + square
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.count += len(rows)

    def inputs(self) -> Inputs | None:
        if self.square is None or self.largest is None:
            return None
        return Inputs((self.square / self.count).cpu().numpy(), self.largest.float().cpu().numpy(), self.count)


def _outputs(output: Any) -> tuple[str, Tensor]:
    """The measure of a model's outputs, and what it compares: log-probabilities, or the last hidden state."""
    logits = getattr(output, "logits", None)
    if logits is not None:
        return "kl", logits[0].float().log_softmax(-1)
    return "output_error", output.last_hidden_state[0].float()
