"""The modules of a model that keep their precision, as configs name them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from breccia.internal import kept_kind

from .results import TensorReport

#: Modules that look rows up in a matrix; other names with "embed" are those of linear layers: "time_embed.linear_1".
_TABLE = re.compile(r"(.*\.)?(\w*embeddings?|embed(_tokens\w*|_in|_positions)?|wte|wpe|shared)")


def is_table(name: str) -> bool:
    """Whether a value is the matrix of an embedding, by its name."""
    return kept_kind(name) == "embedding" and _TABLE.fullmatch(name.removesuffix(".weight")) is not None


def modules_kept(tensors: Iterable[TensorReport], floating: tuple[str, ...]) -> list[str]:
    """The names of modules with a matrix that keeps its precision, except embeddings."""
    names = [t.name for t in tensors if not t.quantized and len(t.shape) > 1 and t.parameters and t.stored_as in floating]
    return sorted(name.removesuffix(".weight") for name in names if not is_table(name))


def tied_heads(names: Collection[str]) -> list[str]:
    """The output head of a model whose files have none: it is the matrix of the embedding, and libraries must not quantize it.

    names: of the values of a checkpoint. Of models without an embedding, nothing follows.
    """
    has_head = any(kept_kind(name) == "output head" for name in names)
    return ["lm_head"] if not has_head and any(map(is_table, names)) else []
