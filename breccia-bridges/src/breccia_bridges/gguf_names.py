"""The tensors of GGUF files under the names, and with the rows and shapes, that transformers has.

llama.cpp renames tensors, and changes some: `ARCHITECTURES` says how, for those architectures whose models in transformers
consist of the same tensors. Tensors of others, and what transformers lacks, keep the names of the file. The same declarations
say where a tensor of transformers is in a GGUF file that is written.

Names agree with the map of the library `gguf`, as a test shows. That map cannot take its place: it has up to twelve names of
other programs for one of GGUF, and does not say which architecture has which.

Source: gguf 0.19 (TensorNameMap), llama.cpp's conversion, transformers 5.23 (modeling_gguf_pytorch_utils).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np

from breccia import CorruptFileError, UnsupportedError

from .gguf_header import Header, TensorInfo
from .safetensors_file import Shape, shown

#: What becomes of the array of a tensor.
Change = Callable[[np.ndarray], np.ndarray]

#: More experts than a model has: a small file could ask for any number of entries.
_MAX_EXPERTS = 4096
_ENDS = "(weight|bias|scale|input_scale)"
_BLOCK = re.compile(rf"blk\.(\d{{1,6}})\.(.+)\.{_ENDS}")
_LAYER = re.compile(rf"model\.layers\.(\d{{1,6}})\.(.+)\.{_ENDS}")
_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")

_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FROM_MODEL = {theirs: ours for ours, theirs in _MODEL.items()}
#: Matrices that programs need as F32, as they do vectors.
_ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")
#: Tensors that transformers computes from the config.
FROM_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_ATTENTION = {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {"attn_output": "self_attn.o_proj"}
_MLP = {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_AROUND = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_AFTER}
_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA = _ATTENTION | _MLP | _BEFORE
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")}
_SHARED = {
    **{f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_MIXTRAL = {f"ffn_{x}_exps": f"block_sparse_moe.experts.{{}}.{w}" for x, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))}


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores the models of an architecture.

    layer: names in transformers' layers by those in GGUF's blocks. experts: the same of stacks, with {} for the number of the
        expert; each becomes a value of its own, as in checkpoints.
    permutes: whether rows of q and k are in pairs that are rotated together, (i, i + half) in transformers.
    shifts: whether 1 was added to the weights of norms.
    """

    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict[str, str])
    permutes: bool = False
    shifts: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture(_LLAMA, permutes=True),
    "cohere2": Architecture(_LLAMA),
    "command-r": Architecture(_LLAMA | _OF_HEADS),
    "ernie4_5": Architecture(_LLAMA),
    "exaone4": Architecture(_ATTENTION | _MLP | _AFTER | _OF_HEADS),
    "gemma": Architecture(_LLAMA, shifts=True),
    "gemma2": Architecture(_ATTENTION | _MLP | _AROUND, shifts=True),
    "gemma3": Architecture(_ATTENTION | _MLP | _AROUND | _OF_HEADS, shifts=True),
    "granite": Architecture(_LLAMA, permutes=True),
    "llama": Architecture(_LLAMA | {"ffn_gate_inp": "block_sparse_moe.gate"}, _MIXTRAL, permutes=True),
    "nemotron": Architecture(_LLAMA, shifts=True),
    "olmo": Architecture(_LLAMA, permutes=True),
    "olmo2": Architecture(_ATTENTION | _MLP | _AFTER | _OF_HEADS),
    "olmoe": Architecture(_LLAMA | _OF_HEADS | _ROUTER, _EXPERTS),
    "phi3": Architecture(_LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "qwen2": Architecture(_LLAMA),
    "qwen2moe": Architecture(_LLAMA | _ROUTER | _SHARED, _EXPERTS),
    "qwen3": Architecture(_LLAMA | _OF_HEADS),
    "qwen3moe": Architecture(_LLAMA | _OF_HEADS | _ROUTER, _EXPERTS),
    "seed_oss": Architecture(
        _ATTENTION | _MLP | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    ),
    "smollm3": Architecture(_LLAMA, permutes=True),
    "stablelm": Architecture(_LLAMA),
    "starcoder2": Architecture(_LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}


@dataclass(frozen=True)
class Placed:
    """A tensor, or that of one expert.

    shape: the logical one in transformers. stored: the one in the file, in elements. start, stop: its bytes in the file.
    change: what is done to its array.
    """

    info: TensorInfo
    shape: Shape
    stored: Shape
    start: int
    stop: int
    change: Change | None = None

    @property
    def stored_bytes(self) -> Shape:
        """The shape of its array in the file: of blocks, their bytes are the last axis."""
        kind = self.info.type
        return self.stored if kind.dtype else (*self.stored[:-1], self.stored[-1] // kind.length * kind.size)


def whole(info: TensorInfo) -> Placed:
    """A tensor as it is in the file."""
    return Placed(info, info.shape, info.shape, info.start, info.stop)


class Place(NamedTuple):
    """Where a tensor of transformers is in GGUF.

    name: of the tensor there. shape: of its part of that tensor. expert: its number in a stack; None if there is no stack.
    change: what is done to its array. needs_f32: whether programs need its numbers as F32.
    """

    name: str
    shape: Shape
    expert: int | None = None
    change: Change | None = None
    needs_f32: bool = False


def placed(path: Path, header: Header, keys: Mapping[str, Any]) -> dict[str, Placed]:
    """The tensors of a file by their names in transformers.

    keys: those of the file that describes the model, which may be another part of it.

    Raises CorruptFileError, naming file and tensor, where a tensor is not what the keys say of the model, or two tensors get
    one name.
    """
    return Namer(path, keys).placed(header)


def why_unmapped(keys: Mapping[str, Any]) -> str:
    """Why the tensors of a model keep the names of its file; "" where they have those of transformers."""
    named = keys.get("general.architecture")
    if isinstance(named, str) and named in ARCHITECTURES:
        return ""
    of = f"of architecture {short(named)}" if named else "of a file that names no architecture"
    return f"breccia does not map the tensors {of} to transformers' names, so that they keep GGUF's"


class Namer:
    """Names the tensors of a file whose keys say what the model is. path: where the keys are from."""

    def __init__(self, path: Path, keys: Mapping[str, Any]) -> None:
        self._path, self._keys = path, keys
        name = keys.get("general.architecture")
        self._name = name if isinstance(name, str) else ""
        self._known = ARCHITECTURES.get(self._name)

    def placed(self, header: Header) -> dict[str, Placed]:
        found: dict[str, Placed] = {}
        for info in header.tensors.values():
            if self._known is not None and info.name in FROM_CONFIG:
                continue
            for new, one in self._named(info):
                if new in found:
                    raise self._wrong(info, f"and {short(found[new].info.name)} are both {short(new)} in transformers")
                found[new] = one
        return found

    def place(self, name: str, shape: Shape) -> Place | None:
        """Where a tensor is in GGUF; None for a name that the architecture does not have. shape: in transformers.

        Raises UnsupportedError for rows of q or k that are not of pairs in as many heads as the keys say.
        """
        if self._known is None:
            return None
        stem, _, end = name.rpartition(".")
        if stem in _FROM_MODEL:
            return self._place(_FROM_MODEL[stem], end, shape, 0, f"{_FROM_MODEL[stem]}.{end}")
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return None
        number, module, end = layer.groups()
        expert = _EXPERT.search(f".{module}")
        if expert is None:
            part = {theirs: ours for ours, theirs in self._known.layer.items()}.get(module)
            return None if part is None else self._place(part, end, shape, int(number), f"blk.{number}.{part}.{end}")
        joined = _EXPERT.sub(".experts.{}.", f".{module}")[1:]
        part = {theirs: ours for ours, theirs in self._known.experts.items()}.get(joined)
        return None if part is None else Place(f"blk.{number}.{part}.{end}", shape, int(expert[1]))

    def _place(self, part: str, end: str, shape: Shape, layer: int, name: str) -> Place:
        """The place of a tensor, with what llama.cpp does to it."""
        assert self._known is not None
        place = Place(name, shape, needs_f32=len(shape) < 2 or part in _ROUTERS)
        if self._known.permutes and part in ("attn_q", "attn_k") and end in ("weight", "bias"):
            heads = self._heads(layer, part)
            if heads < 1 or not shape or shape[0] % (2 * heads):
                raise UnsupportedError(
                    f"{shown(self._path)}: {part} of layer {layer} has shape {list(shape)}, and the model {heads} heads, of "
                    "pairs of rows. Correct the config.",
                    shape=shape,
                )
            return place._replace(change=partial(_permuted, heads))
        if self._known.shifts and "norm" in part and end == "weight":
            return place._replace(change=_shifted)
        return place._replace(shape=shape[1:]) if part == "ffn_gate_inp_shexp" and shape[:1] == (1,) else place

    def _named(self, info: TensorInfo) -> Iterator[tuple[str, Placed]]:
        """The values of a tensor, each with its name in transformers."""
        one = whole(info)
        stem, _, end = info.name.rpartition(".")
        block = _BLOCK.fullmatch(info.name)
        if self._known is None or (block is None and stem not in _MODEL):
            yield info.name, one
        elif block is None:
            yield f"{_MODEL[stem]}.{end}", self._changed(one, stem, end, 0)
        else:
            layer, part, end = block.groups()
            if part in self._known.experts and len(info.shape) == (3 if end == "weight" else 1):
                yield from self._experts(one, f"model.layers.{layer}.{self._known.experts[part]}.{end}")
            elif part in self._known.layer:
                yield f"model.layers.{layer}.{self._known.layer[part]}.{end}", self._changed(one, part, end, int(layer))
            else:
                yield info.name, one

    def _changed(self, one: Placed, part: str, end: str, layer: int) -> Placed:
        """The tensor, with what llama.cpp did to it taken back."""
        assert self._known is not None
        info = one.info
        if self._known.permutes and part in ("attn_q", "attn_k") and end in ("weight", "bias"):
            heads = self._heads(layer, part)
            if heads < 1 or not info.shape or info.shape[0] % (2 * heads):
                raise self._wrong(
                    info, f"has shape {list(info.shape)}, and by the keys of the file {heads} heads, of pairs of rows"
                )
            return replace(one, change=partial(_unpermuted, heads))
        if self._known.shifts and "norm" in part and end == "weight":
            if info.type.name != "F32":
                raise self._wrong(info, f"is {info.type.name}; llama.cpp stores the weights of norms as F32")
            return replace(one, change=_unshifted)
        if part == "ffn_gate_inp_shexp" and len(info.shape) == 1:
            return replace(one, shape=(1, *info.shape), change=_as_row)
        return one

    def _experts(self, stack: Placed, name: str) -> Iterator[tuple[str, Placed]]:
        """The tensors of single experts."""
        count, size = stack.shape[0], stack.stop - stack.start
        if not size or count > _MAX_EXPERTS:
            raise self._wrong(stack.info, f"has shape {list(stack.shape)}; it is of 1 to {_MAX_EXPERTS} experts")
        for n, start in enumerate(range(stack.start, stack.stop, size // count)):
            yield name.format(n), Placed(stack.info, stack.shape[1:], stack.shape[1:], start, start + size // count)

    def _heads(self, layer: int, part: str) -> int:
        """The number of heads in the q or k of a layer; 0 where the keys do not say it."""
        kinds = ("head_count_kv", "head_count") if part == "attn_k" else ("head_count",)
        counts = [self._keys.get(f"{self._name}.attention.{kind}") for kind in kinds]
        count = next((count for count in counts if count is not None), 0)
        if isinstance(count, tuple):
            count = count[layer] if layer < len(count) else 0
        return count if type(count) is int else 0

    def _wrong(self, info: TensorInfo, what: str) -> CorruptFileError:
        path = str(self._path)
        return CorruptFileError(
            f"{shown(path)}: tensor {short(info.name)} {what}. Download the file again.", path=path, name=info.name
        )


def _unpermuted(heads: int, array: np.ndarray) -> np.ndarray:
    """The first rows of all pairs of a head, then the second ones."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _permuted(heads: int, array: np.ndarray) -> np.ndarray:
    """The rows of pairs beside each other: the inverse of `_unpermuted`."""
    sides = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(sides.swapaxes(1, 2)).reshape(array.shape)


def _shifted(array: np.ndarray) -> np.ndarray:
    """What llama.cpp has for the weights of a norm."""
    return array + np.float32(1)


def _unshifted(array: np.ndarray) -> np.ndarray:
    """The weights of a norm."""
    return array - np.float32(1)


def _as_row(array: np.ndarray) -> np.ndarray:
    return array.reshape(1, *array.shape)
