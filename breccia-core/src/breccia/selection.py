"""Which tensors of a model keep their precision: one answer for `breccia convert` and `quantize_`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from .errors import UnknownNameError, abbreviated

#: Kinds of tensors, and shell-style patterns of their names in Hugging Face's models. They are small, or their precision
#: affects every token; adapters are trained. Biases have tables that are added by position (T5's `relative_attention_bias`,
#: Swin's `relative_position_bias_table`, ViTDet's `rel_pos_h`, Transformer-XL's `pos_bias_u`); decays are exponentiated
#: (Mamba's `A_log`, RWKV's `time_decay`).
KEPT = {
    "embedding": ("*embed*", "wte.*", "*.wte.*", "wpe.*", "*.wpe.*", "shared.weight"),
    "bias": ("*bias", "*_bias.weight", "*bias_table", "*bias_[kuv]", "*rel_pos_[hw]"),
    "decay": ("*A_log", "*time_decay", "*time_first"),
    "norm": ("*norm*", "*Norm*", "*.ln_*"),
    "output head": ("lm_head*", "*.lm_head*"),
    "adapter": ("*lora_*",),
    "router": ("gate.weight", "*.gate.weight", "*router*", "*shared_expert_gate*"),
}

#: The reason for a tensor that a pattern excludes.
EXCLUDED = "excluded"


def kept_kind(name: str) -> str:
    """The kind of `KEPT` that the tensor of that name belongs to; empty if it is quantized by default.

    name: the full name of a tensor in a checkpoint or a model's state: "model.layers.0.mlp.gate.weight" is a router.
    """
    return next((kind for kind, patterns in KEPT.items() if matches(name, patterns)), "")


@dataclass(frozen=True)
class Selection:
    """Patterns of names to quantize, and not to quantize.

    They are shell-style globs over whole names. `exclude` beats `include`, which beats the default of `KEPT`.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def reason_to_keep(self, name: str) -> str:
        """`EXCLUDED`, or a kind of `KEPT`; empty if the tensor is to be quantized."""
        if matches(name, self.exclude):
            return EXCLUDED
        return "" if matches(name, self.include) else kept_kind(name)

    def check(self, names: Collection[str], what: str = "tensor", listed_by: str = "`breccia inspect`") -> None:
        """Raise UnknownNameError for patterns that match none of `names`: a misspelled one would change what is quantized."""
        check_patterns((*self.include, *self.exclude), names, what, listed_by)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Does any pattern select `name`? A pattern that is an exact name selects itself."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(
    patterns: Iterable[str], names: Collection[str], what: str = "tensor", listed_by: str = "`breccia inspect`"
) -> None:
    """Raise UnknownNameError for patterns that match none of `names`, which are names of a `what`."""
    unmatched = [pattern for pattern in dict.fromkeys(patterns) if not _matches_any(pattern, names)]
    if unmatched:
        messages = (f"the pattern {pattern!r} matches no {what}{_remedy(pattern, names, listed_by)}" for pattern in unmatched)
        raise UnknownNameError(" ".join(messages), patterns=unmatched)


def _remedy(pattern: str, names: Collection[str], listed_by: str) -> str:
    """What to do about a pattern that matches no name: the pattern with its unknown words replaced, if that matches one."""
    words = {word for name in names for word in name.split(".")}
    literals = [word for word in re.split(r"[.*?\[\],]+", pattern) if word and not any(word in known for known in words)]
    close = {word: near[0] for word in literals if (near := get_close_matches(word, sorted(words), n=1))}
    corrected = pattern
    for word, near in close.items():
        corrected = corrected.replace(word, near)
    if corrected != pattern and _matches_any(corrected, names):
        return f"; did you mean {corrected!r}?"
    if "," in pattern:
        return "; give each pattern separately."
    return f"; {listed_by} lists the names, such as {abbreviated(sorted(names))}."


def _matches_any(pattern: str, names: Iterable[str]) -> bool:
    return any(matches(name, [pattern]) for name in names)
