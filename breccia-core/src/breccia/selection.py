"""Which tensors of a model keep their precision by default: one answer for `breccia convert` and `quantize_`."""

from __future__ import annotations

from fnmatch import fnmatchcase

#: Kinds of tensors, and shell-style patterns of their names in Hugging Face's models. They are small, or their precision
#: affects every token.
KEPT = {
    "embedding": ("*embed*", "wte.*", "*.wte.*", "wpe.*", "*.wpe.*", "shared.weight"),
    "bias": ("*bias",),
    "norm": ("*norm*", "*Norm*", "*.ln_*"),
    "output head": ("lm_head*", "*.lm_head*"),
    "router": ("gate.weight", "*.gate.weight", "*router*", "*shared_expert_gate*"),
}


def kept_kind(name: str) -> str:
    """The kind of `KEPT` that the tensor of that name belongs to; empty if it is quantized by default.

    name: the full name of a tensor in a checkpoint or a model's state: "model.layers.0.mlp.gate.weight" is a router.
    """
    return next((kind for kind, patterns in KEPT.items() if any(fnmatchcase(name, p) for p in patterns)), "")
