"""The tokenizer of a model in the keys of a GGUF file, from the tokenizer.json of transformers.

llama.cpp has two kinds: "gpt2", BPE of bytes, whose splitting of text has a name there; and "llama", pieces with scores and
tokens for single bytes. The library `gguf` reads merges, special tokens and chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .announcements import read_object

#: The types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: llama.cpp's names of what splits text before BPE: by the regular expression, or by the steps where there is none.
_SPLITTERS: dict[Any, str] = {
    _WORDS % r"\p{N}{1,3}": "llama-bpe",
    _WORDS % r"\p{N}": "qwen2",
    ("Digits", "ByteLevel"): "smollm",
    ("ByteLevel",): "gpt-2",
}


def add_tokenizer(out: Any, folder: Path, size: int) -> list[str]:
    """Add the tokenizer of a folder to the library's writer; returns what could not be added, with the reason.

    size: of the vocabulary, by the config. Without a tokenizer, programs take ids of tokens.
    """
    tokenizer = read_object(folder / "tokenizer.json")
    why = "there is no tokenizer.json" if tokenizer is None else _add(out, folder, tokenizer, size)
    if not why:
        return []
    out.add_tokenizer_model("no_vocab")
    return [f"the file has no tokenizer: {why}. Programs can be given the ids of tokens."]


def _add(out: Any, folder: Path, tokenizer: Mapping[str, Any], size: int) -> str:
    """Add the keys; returns why not, if they are not known."""
    from gguf import SpecialVocab

    model: Mapping[str, Any] = tokenizer.get("model") or {}
    if model.get("type") != "BPE":
        return f"tokenizer.json has a model {model.get('type')!r}, and breccia writes those of type 'BPE'"
    of_pieces = bool(model.get("byte_fallback"))
    splitter = "default" if of_pieces else _splitter(tokenizer.get("pre_tokenizer") or {})
    if splitter is None:
        return "tokenizer.json splits text in a way for which breccia knows no name of llama.cpp"
    tokens, kinds = _tokens(tokenizer, size, of_pieces)
    if len(tokens) > size:
        return f"tokenizer.json has {len(tokens)} tokens, and the model {size}"
    out.add_tokenizer_model("llama" if of_pieces else "gpt2")
    out.add_tokenizer_pre(splitter)
    out.add_token_list(tokens)
    if of_pieces:
        out.add_token_scores(_scores(model, tokens))
        out.add_add_space_prefix(_has_prefix(tokenizer))
    out.add_token_types(kinds)
    SpecialVocab(folder, load_merges=not of_pieces, n_vocab=size).add_to_gguf(out, quiet=True)
    return ""


def _splitter(given: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of what splits text, if it has one."""
    steps = given["pretokenizers"] if given.get("type") == "Sequence" else [given]
    for step in steps:
        if step.get("type") == "Split":
            return _SPLITTERS.get((step.get("pattern") or {}).get("Regex"))
    plain = all(step.get("individual_digits", True) and step.get("use_regex", True) for step in steps)
    return _SPLITTERS.get(tuple(step.get("type") for step in steps)) if plain else None


def _tokens(tokenizer: Mapping[str, Any], size: int, of_pieces: bool) -> tuple[list[str], list[int]]:
    """All tokens by their ids, and their types; ids without a token are unused."""
    model = tokenizer["model"]
    found = {number: (text, _kind(text, model, of_pieces)) for text, number in model["vocab"].items()}
    for one in tokenizer.get("added_tokens") or ():
        text = one["content"].replace(_SPACE, " ") if of_pieces and not one.get("special") else one["content"]
        found[one["id"]] = (text, _CONTROL if one.get("special") else _USER)
    listed = [found.get(n, (f"[PAD{n}]", _UNUSED)) for n in range(max(size, 1 + max(found, default=0)))]
    return [text for text, _ in listed], [kind for _, kind in listed]


def _kind(text: str, model: Mapping[str, Any], of_pieces: bool) -> int:
    if of_pieces and re.fullmatch("<0x[0-9A-F]{2}>", text):
        return _BYTE
    return _UNKNOWN if of_pieces and text == model.get("unk_token") else _NORMAL


def _scores(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Scores by which pieces are joined in the order of the merges: the earlier, the higher."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model.get("merges") or ()):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _has_prefix(tokenizer: Mapping[str, Any]) -> bool:
    """Is a space put before the text?"""
    normalizer, splitter = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    prepends = any(step.get("type") == "Prepend" for step in steps)
    return prepends or (splitter.get("type") == "Metaspace" and splitter.get("prepend_scheme", "always") != "never")
