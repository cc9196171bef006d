"""How far a merged checkpoint is from the change that was wanted: KL divergence per token, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from breccia import NonFiniteError, UnsupportedError, bridges
from breccia.internal import abbreviated

from .blocks import Blocks
from .texts import as_texts

#: Tokens whose distributions are compared at a time, in FP64.
_AT_A_TIME = 64


@torch.no_grad()
def merge_divergence(
    source: Path,
    merged: Path,
    ids: np.ndarray,
    changes: Mapping[str, Callable[[], np.ndarray]],
    *,
    source_dialect: str | None = None,
) -> tuple[float, float]:
    """KL divergence per token, from a model with `changes`, of the source without them and of `merged`, in nats.

    source, merged: the folders of a model of transformers, or GGUF files. ids: token ids, as `breccia.bridges.calibrate` takes
    them. changes: by names of values, what is added to the decoded value of the source, FP32 of its shape.

    Three models run in FP32, each with the weights of one block in memory. Raises what `calibrate` raises, UnsupportedError
    for a change outside the model's blocks, and NonFiniteError for outputs with NaN or Inf.
    """
    before, after = _opened(source, source_dialect), _opened(merged, source_dialect)
    outside = [name for name in changes if not any(_is_in(before, name, block) for block in before.names)]
    if outside:
        raise UnsupportedError(
            f"KL divergence is measured of changes inside the blocks of a model; {abbreviated(outside)} lie outside of them. "
            "Leave calibrate= (--calibrate) out.",
            names=outside,
        )
    texts = as_texts(before.model, ids)
    models: list[tuple[Blocks, Mapping[str, Any]]] = [(before, changes), (before, {}), (after, {})]
    hidden = [_hidden(blocks, texts, of) for blocks, of in models]
    sums = [0.0, 0.0]
    with ExitStack() as stack:
        for blocks in (before, after):
            stack.enter_context(blocks.outside())
        outputs = (_log_probabilities(blocks, texts, states) for (blocks, _), states in zip(models, hidden, strict=True))
        for wanted, *others in zip(*outputs, strict=True):
            sums = [total + _divergence(wanted, other) for total, other in zip(sums, others, strict=True)]
    without, found = (total / texts.numel() for total in sums)
    if not math.isfinite(without + found):
        raise NonFiniteError(
            f"calibrate (--calibrate): the outputs of {source}, or of it with the change, have NaN or Inf on the text. Find "
            "the layer whose weights are broken (`breccia inspect`), or leave calibrate out.",
            name=str(source),
        )
    return without, found


def _divergence(p: Tensor, q: Tensor) -> float:
    """The sum over tokens of the KL divergence of q from p, of log-probabilities (tokens, vocabulary).

    By terms that are never negative, p (q/p - 1 - log q/p): those of p log p/q cancel, and leave rounding errors.
    """
    total = 0.0
    for one, other in zip(p.split(_AT_A_TIME), q.split(_AT_A_TIME), strict=True):
        ratio = other.double() - one
        total += float((one.double().exp() * (ratio.expm1() - ratio)).sum())
    return total


def _opened(path: Path, dialect: str | None) -> Blocks:
    return Blocks(path, bridges.load_checkpoint(path, framework="torch", source_dialect=dialect), torch.device("cpu"))


def _is_in(blocks: Blocks, name: str, block: str) -> bool:
    spot = blocks.spots.get(name)
    return spot is not None and f"{spot.owner}.".startswith(f"{block}.")


def _hidden(blocks: Blocks, texts: Tensor, changes: Mapping[str, Callable[[], np.ndarray]]) -> Tensor:
    """The outputs of the last block, with changes added to its weights."""
    with blocks.outside():
        hidden, arguments = blocks.embed(texts)
    for n, (name, block) in enumerate(zip(blocks.names, blocks.blocks, strict=True)):
        blocks.fill(block, name)
        for value, change in changes.items():
            if _is_in(blocks, value, name):
                matrix = torch.from_numpy(change())
                blocks.spots[value].of(blocks.model, tuple(matrix.shape)).add_(matrix)
        for row in range(len(hidden)):
            hidden[row] = blocks.run(n, hidden[row], arguments[n])
        blocks.empty(block)
    return hidden


def _log_probabilities(blocks: Blocks, texts: Tensor, hidden: Tensor) -> Iterator[Tensor]:
    """Of the tokens that follow each token of each text, (length, vocabulary). The blocks are inside `outside()`."""
    for returned in blocks.finish(texts, hidden):
        logits = getattr(returned, "logits", None)
        if logits is None:
            raise UnsupportedError(f"{type(blocks.model).__name__} has no output head, so no distribution of tokens.")
        yield logits[0].log_softmax(-1)
