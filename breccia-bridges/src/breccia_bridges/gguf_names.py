"""The tensors of GGUF files under the names, and with the rows and shapes, that transformers has.

llama.cpp renames tensors, and changes some: `ARCHITECTURES` says how, for those architectures whose models in transformers
consist of the same tensors, or of these tensors transposed or joined. Tensors of others, and what transformers lacks, keep
the names of the file. The same declarations say where a tensor of transformers is in a GGUF file that is written; a file that
is written from another one has its tensors as they are, neither transposed nor joined.

Names agree with the map of the library `gguf`, as a test shows. That map cannot take its place: it has up to twelve names of
other programs for one of GGUF, and does not say which architecture has which.

Source: gguf 0.19 (TensorNameMap), llama.cpp's conversion, transformers 5.23 (modeling_gguf_pytorch_utils).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np

from breccia import CorruptFileError, UnsupportedError

from .gguf_header import Header, TensorInfo
from .gguf_types import DECODED
from .safetensors_file import Shape, shown

#: What becomes of the array of a tensor.
Change = Callable[[np.ndarray], np.ndarray]
#: A tensor of another part of a model that was split, by its name; None where no part has it.
Elsewhere = Callable[[str], TensorInfo | None]

#: More experts than a model has: a small file could ask for any number of entries.
_MAX_EXPERTS = 4096
_ENDS = ("weight", "bias", "scale", "input_scale")
_STEM = re.compile(rf"(.+)\.({'|'.join(_ENDS)})")
_BLOCK = re.compile(r"(?<![^.])(blk\.)(\d{1,6})(?=\.)")
_LAYER = re.compile(r"(\.)(\d{1,6})(?=\.)")
_EXPERT = re.compile(r"(\.experts\.)(\d{1,6})(?=\.)")

_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
_PER_LAYER = {"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}
_LLAMA = _ATTENTION | _MLP | _BEFORE
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")}
_SHARED = {
    **{f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GPT_2 = {"output_norm": "transformer.ln_f", "output": "lm_head"}
_BLOOM = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_T5_MLP = {f"ffn_{x}": f"DenseReluDense.{w}" for x, w in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo"))}
_T5_NORM, _T5_MLP_NORM = {"attn_norm": "layer_norm"}, {"ffn_norm": "layer_norm"}
_T5_ATTENTION = {f"attn_{x}": f"SelfAttention.{x}" for x in "qkvo"} | {"attn_rel_b": "SelfAttention.relative_attention_bias"}
_T5_ACROSS = {f"cross_attn_{x}": f"EncDecAttention.{x}" for x in "qkvo"} | {"cross_attn_norm": "layer_norm"}
_T5 = {
    "token_embd": "shared",
    "output": "lm_head",
    **{f"{x}.output_norm": f"{y}.final_layer_norm" for x, y in (("enc", "encoder"), ("dec", "decoder"))},
    **{
        f"{x}.blk.{{}}.{ours}": f"{y}.block.{{}}.layer.{n}.{theirs}"
        for x, y, layers in (
            ("enc", "encoder", (_T5_ATTENTION | _T5_NORM, _T5_MLP | _T5_MLP_NORM)),
            ("dec", "decoder", (_T5_ATTENTION | _T5_NORM, _T5_ACROSS, _T5_MLP | _T5_MLP_NORM)),
        )
        for n, layer in enumerate(layers)
        for ours, theirs in layer.items()
    },
}
_MIXTRAL = {f"ffn_{x}_exps": f"block_sparse_moe.experts.{{}}.{w}" for x, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))}


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores the models of an architecture.

    layer: names in transformers' layers by those in GGUF's blocks. experts: the same of stacks, with {} for the number of the
        expert; each becomes a value of its own, as in checkpoints.
    permutes: whether rows of q and k are in pairs that are rotated together, (i, i + half) in transformers.
    shifts: whether 1 was added to the weights of norms.
    outside: the same of tensors outside of layers, and of layers whose names differ by more; {} is the number of the layer.
    layers: the name of the list of layers.
    whole: names with their ends, where these differ too, as of stacks of experts that are one value in transformers.
    transposed: the matrices of layers, or stacks of them, that are transposed in transformers.
    pairs: the second tensor by the first one of two stacks whose rows alternate in one value of transformers, which `whole`
        gives both as their name.
    with_second: names in layers of a model that has an `attn_norm_2`, where they are others than those in `layer`.
    """

    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict[str, str])
    permutes: bool = False
    shifts: bool = False
    outside: Mapping[str, str] = field(default_factory=lambda: _MODEL)
    layers: str = "model.layers"
    whole: Mapping[str, str] = field(default_factory=dict[str, str])
    transposed: tuple[str, ...] = ()
    pairs: Mapping[str, str] = field(default_factory=dict[str, str])
    with_second: Mapping[str, str] = field(default_factory=dict[str, str])

    def names(self, has_second: bool = False) -> dict[str, str]:
        """The names in transformers by those in GGUF, without ends, and with {} for the number of a layer."""
        layer = {**self.layer, **(self.with_second if has_second else {})}
        return {**self.outside, **{f"blk.{{}}.{ours}": f"{self.layers}.{{}}.{theirs}" for ours, theirs in layer.items()}}

    def of_experts(self) -> dict[str, str]:
        """The same of stacks of experts, with a second {} for the number of the expert."""
        return {f"blk.{{}}.{ours}": f"{self.layers}.{{}}.{theirs}" for ours, theirs in self.experts.items()}

    @property
    def has_experts(self) -> bool:
        """Are there names for stacks of experts?"""
        return bool(self.experts) or any("_exps." in ours for ours in self.whole)


ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture(_LLAMA, permutes=True),
    "bloom": Architecture(
        _BLOOM | {"ffn_norm": "post_attention_layernorm"},
        outside=_GPT_2
        | {"token_embd": "transformer.word_embeddings", "token_embd_norm": "transformer.word_embeddings_layernorm"},
        layers="transformer.h",
    ),
    "cohere2": Architecture(_LLAMA),
    "command-r": Architecture(_LLAMA | _OF_HEADS),
    "deci": Architecture(_LLAMA, permutes=True),
    "ernie4_5": Architecture(_LLAMA),
    "exaone4": Architecture(_ATTENTION | _MLP | _AFTER | _OF_HEADS),
    "falcon": Architecture(
        _BLOOM | {"attn_norm_2": "ln_attn"},
        outside=_GPT_2 | {"token_embd": "transformer.word_embeddings"},
        layers="transformer.h",
        with_second={"attn_norm": "ln_mlp"},
    ),
    "gemma": Architecture(_LLAMA, shifts=True),
    "gemma2": Architecture(_ATTENTION | _MLP | _AROUND, shifts=True),
    "gemma3": Architecture(_ATTENTION | _MLP | _AROUND | _OF_HEADS, shifts=True),
    "gemma4": Architecture(
        _ATTENTION
        | _MLP
        | _AROUND
        | _OF_HEADS
        | _PER_LAYER
        | {"ffn_gate_inp": "router.proj", "pre_ffw_norm_2": "pre_feedforward_layernorm_2"}
        | {f"post_ffw_norm_{n}": f"post_feedforward_layernorm_{n}" for n in (1, 2)},
        outside=_MODEL
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        whole={
            "blk.{}.layer_output_scale.weight": "model.layers.{}.layer_scalar",
            "blk.{}.ffn_gate_inp.scale": "model.layers.{}.router.scale",
            "blk.{}.ffn_gate_up_exps.weight": "model.layers.{}.experts.gate_up_proj",
            "blk.{}.ffn_down_exps.weight": "model.layers.{}.experts.down_proj",
            # Of NVFP4 it is the product with the scale of each expert, and the weights are without one.
            "blk.{}.ffn_down_exps.scale": "model.layers.{}.router.per_expert_scale",
        },
    ),
    "gpt-oss": Architecture(
        _ATTENTION
        | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        whole={"blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks"}
        | {
            f"blk.{{}}.ffn_{ours}_exps.{end}": f"model.layers.{{}}.mlp.experts.{theirs}{suffix}"
            for ours, theirs in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj"))
            for end, suffix in (("weight", ""), ("bias", "_bias"))
        },
        transposed=("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        pairs={"ffn_gate_exps": "ffn_up_exps"},
    ),
    "gpt2": Architecture(
        {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj"}
        | {"ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        outside=_GPT_2 | {"token_embd": "transformer.wte", "position_embd": "transformer.wpe"},
        layers="transformer.h",
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "granite": Architecture(_LLAMA, permutes=True),
    "lfm2": Architecture(
        _ATTENTION
        | {"attn_output": "self_attn.out_proj", "attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
        | {f"ffn_{x}": f"feed_forward.{w}" for x, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))}
        | {f"attn_{x}_norm": f"self_attn.{x}_layernorm" for x in "qk"}
        | {f"shortconv.{x}": f"conv.{x}" for x in ("conv", "in_proj", "out_proj")},
        outside={
            "token_embd": "model.embed_tokens",
            "token_embd_norm": "model.embedding_norm",  # llama.cpp's name for this norm, of the output
            "output": "lm_head",
        },
    ),
    "llama": Architecture(_LLAMA | {"ffn_gate_inp": "block_sparse_moe.gate"}, _MIXTRAL, permutes=True),
    "mamba": Architecture(
        {"attn_norm": "norm", "ssm_conv1d": "mixer.conv1d", "ssm_dt": "mixer.dt_proj"}
        | {f"ssm_{x}": f"mixer.{x}_proj" for x in ("in", "x", "out")},
        outside={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
        layers="backbone.layers",
        whole={"blk.{}.ssm_a": "backbone.layers.{}.mixer.A_log", "blk.{}.ssm_d": "backbone.layers.{}.mixer.D"},
    ),
    "minimax-m2": Architecture(
        _LLAMA | _OF_HEADS | {"ffn_gate_inp": "block_sparse_moe.gate"},
        _MIXTRAL,
        whole={"blk.{}.exp_probs_b.bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias"},
    ),
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
    "t5": Architecture({}, outside=_T5),
    "t5encoder": Architecture({}, outside=_T5),
}
#: Of these, q, k and v are one matrix: in transformers each head of k, and of v, follows the heads of q that attend to it.
_GROUPED = ("bloom", "falcon")
#: Weights of convolutions of single channels, which have an axis of length 1 in transformers.
_CHANNELS = ("shortconv.conv", "ssm_conv1d")


@dataclass(frozen=True)
class Placed:
    """A tensor, or that of one expert, or two whose rows alternate.

    shape: the logical one in transformers. stored: the one in the file, in elements. start, stop: its bytes in the file.
    change: what is done to its array. second: the tensor, of the same type and shape, whose rows follow those of `info` one by
        one. is_transposed: whether the value in transformers is the transpose, in its last two axes.
    """

    info: TensorInfo
    shape: Shape
    stored: Shape
    start: int
    stop: int
    change: Change | None = None
    second: TensorInfo | None = None
    is_transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes in the file, of both tensors if there are two."""
        return (self.stop - self.start) * (1 if self.second is None else 2)

    @property
    def is_coded(self) -> bool:
        """Are its blocks read as they are, along the last axis of the file's shape?"""
        return not self.info.type.dtype and self.info.type.name not in DECODED

    @property
    def stored_bytes(self) -> Shape:
        """The shape of its array in the file: of blocks, their bytes are the last axis."""
        kind = self.info.type
        return self.stored if kind.dtype else (*self.stored[:-1], self.stored[-1] // kind.length * kind.size)


def whole(info: TensorInfo) -> Placed:
    """A tensor as it is in the file."""
    return Placed(info, info.shape, info.shape, info.start, info.stop)


def alternated(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The rows, along the second axis, of two stacks of one shape: one of the first, one of the second."""
    return np.stack([first, second], axis=2).reshape(first.shape[0], 2 * first.shape[1], *first.shape[2:])


def nowhere(name: str) -> TensorInfo | None:
    """The `Elsewhere` of a model in one file."""


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


def placed(
    path: Path, header: Header, keys: Mapping[str, Any], elsewhere: Elsewhere = nowhere, *, joins: bool = True
) -> dict[str, Placed]:
    """The tensors of a file by their names in transformers.

    keys: those of the file that describes the model, which may be another part of it. elsewhere: a tensor of the other parts.
    joins: whether tensors are transposed, or rows of two joined, where transformers has them so; else these keep their names.

    Raises CorruptFileError, naming file and tensor, where a tensor is not what the keys say of the model, two tensors get one
    name, or a half of two is missing or of another shape; UnsupportedError where the halves are of two types, or experts that
    are one value have a scale each.
    """
    return Namer(path, keys, elsewhere, joins=joins).placed(header)


def why_unmapped(keys: Mapping[str, Any]) -> str:
    """Why the tensors of a model keep the names of its file; "" where they have those of transformers."""
    named, known = keys.get("general.architecture"), _known(keys)
    if known is not None:
        return ""
    of = f"of architecture {short(named)}" if named else "of a file that names no architecture"
    experts = " with experts" if isinstance(named, str) and named in ARCHITECTURES else ""
    return f"breccia does not map the tensors {of}{experts} to transformers' names, so that they keep GGUF's"


def _known(keys: Mapping[str, Any]) -> Architecture | None:
    """The architecture of a model; None where it, or where its experts, have no declaration."""
    name = keys.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    return None if known is None or (keys.get(f"{name}.expert_count") and not known.has_experts) else known


class Namer:
    """Names the tensors of a file whose keys say what the model is.

    path: where the keys are from. elsewhere, joins: as `placed` has them.
    """

    def __init__(self, path: Path, keys: Mapping[str, Any], elsewhere: Elsewhere = nowhere, *, joins: bool = True) -> None:
        self._path, self._keys, self._elsewhere, self._joins = path, keys, elsewhere, joins
        name = keys.get("general.architecture")
        self._name = name if isinstance(name, str) else ""
        self._known = _known(keys)
        self._names = self._known.names() if self._known else {}
        self._experts_of = self._known.of_experts() if self._known else {}

    def placed(self, header: Header) -> dict[str, Placed]:
        if self._known is not None and self._known.with_second and any(".attn_norm_2." in name for name in header.tensors):
            self._names = self._known.names(has_second=True)
        found: dict[str, Placed] = {}
        for info in header.tensors.values():
            if self._known is not None and info.name in FROM_CONFIG:
                continue
            for new, one in self._named(info, header):
                if new in found:
                    raise self._wrong(info, f"and {short(found[new].info.name)} are both {short(new)} in transformers")
                found[new] = one
        return found

    def place(self, name: str, shape: Shape) -> Place | None:
        """Where a tensor is in GGUF; None for a name that the architecture lacks, or whose value is transposed or in two there.

        shape: in transformers.

        Raises UnsupportedError for rows of q or k that are not of pairs in as many heads as the keys say.
        """
        if self._known is None:
            return None
        form, number = _numbered(_LAYER, name)
        form, expert = _numbered(_EXPERT, form)
        whole = _reversed(self._known.whole).get(form)
        if whole is not None:
            return self._place(whole.format(number), shape) if self._is_alone(whole) else None
        matched = _STEM.fullmatch(form)
        if matched is None:
            return None
        stem, end = matched.groups()
        names = _reversed(self._known.names() | self._known.names(has_second=True)) | _reversed(self._names)
        part = (names if expert is None else _reversed(self._experts_of)).get(stem)
        if part is None:
            return None
        found = f"{part.format(number)}.{end}"
        if not self._is_alone(found):
            return None
        return self._place(found, shape) if expert is None else Place(found, shape, expert)

    def _place(self, name: str, shape: Shape) -> Place:
        """The place of a tensor, with what llama.cpp does to it."""
        part, layer, end = _parted(name)
        place = Place(name, shape, needs_f32=len(shape) < 2 or part in (*_ROUTERS, *_CHANNELS, "ssm_a"))
        order = self._order(part, layer, end, shape)
        if order is not None:
            if order.count < 1 or not shape or shape[0] % order.count:
                raise UnsupportedError(
                    f"{shown(self._path)}: {part} of layer {layer} has shape {list(shape)}, and the model {order}. Correct the "
                    "config.",
                    shape=shape,
                )
            return place._replace(change=order.into_gguf)
        if self._shifts(part, end):
            return place._replace(change=_shifted)
        if part == "ssm_a":
            return place._replace(change=_exponentiated)
        if part in _CHANNELS and end == "weight" and len(shape) > 1 and shape[1] == 1:
            return place._replace(shape=(shape[0], *shape[2:]))
        return place._replace(shape=shape[1:]) if part == "ffn_gate_inp_shexp" and shape[:1] == (1,) else place

    def _is_alone(self, name: str) -> bool:
        """Is a tensor of that name neither transposed nor one of two in transformers?"""
        known, (part, _, end) = self._known, _parted(name)
        joined = (*known.pairs, *known.pairs.values()) if known is not None else ()
        return known is None or not (part in joined or (end == "weight" and part in known.transposed))

    def _named(self, info: TensorInfo, header: Header) -> Iterator[tuple[str, Placed]]:
        """The values of a tensor, each with its name in transformers."""
        one = whole(info)
        form, number = _numbered(_BLOCK, info.name)
        stem, _, end = form.rpartition(".")
        exact = self._known.whole.get(form) if self._known else None
        if not self._joins and not self._is_alone(info.name):
            yield info.name, one
        elif exact is not None:
            if (changed := self._with_second(self._changed(one), exact.format(number), header)) is not None:
                yield exact.format(number), self._transposed(changed)
        elif self._joins and self._known and end == "scale" and f"{stem}.weight" in self._known.whole:
            raise UnsupportedError(
                f"{shown(self._path)}: tensor {info.name!r} has a scale for each expert, for which "
                f"{self._known.whole[f'{stem}.weight'].format(number)!r}, their one value in transformers, has no place. "
                "Quantize the model to a type without such scales, or run it with llama.cpp.",
                name=info.name,
            )
        elif stem in self._experts_of and end in _ENDS and len(info.shape) == (3 if end == "weight" else 1):
            yield from self._experts(one, f"{self._experts_of[stem].format(number, '{}')}.{end}")
        elif stem in self._names and (number is None or end in _ENDS):
            yield f"{self._names[stem].format(number)}.{end}", self._transposed(self._changed(one))
        else:
            yield info.name, one

    def _changed(self, one: Placed) -> Placed:
        """The tensor, with what llama.cpp did to it taken back."""
        info = one.info
        part, layer, end = _parted(info.name)
        order = self._order(part, layer, end, info.shape)
        if order is not None:
            if order.count < 1 or not info.shape or info.shape[0] % order.count:
                raise self._wrong(info, f"has shape {list(info.shape)}, and by the keys of the file {order}")
            return replace(one, change=order.from_gguf)
        if self._shifts(part, end) or part == "ssm_a":
            if info.type.name != "F32":
                stored = "A of state spaces" if part == "ssm_a" else "the weights of norms"
                raise self._wrong(info, f"is {info.type.name}; llama.cpp stores {stored} as F32")
            return replace(one, change=_logarithm if part == "ssm_a" else _unshifted)
        if part in _CHANNELS and end == "weight" and len(info.shape) == 2:
            return replace(one, shape=(info.shape[0], 1, *info.shape[1:]), change=_with_channel)
        if part == "ffn_gate_inp_shexp" and len(info.shape) == 1:
            return replace(one, shape=(1, *info.shape), change=_as_row)
        return one

    def _transposed(self, one: Placed) -> Placed:
        """The tensor as it is in transformers, where that has the transpose."""
        part, _, end = _parted(one.info.name)
        if self._known is None or part not in self._known.transposed or end != "weight" or len(one.shape) < 2:
            return one
        return replace(one, shape=(*one.shape[:-2], one.shape[-1], one.shape[-2]), is_transposed=True)

    def _with_second(self, one: Placed, new: str, header: Header) -> Placed | None:
        """The tensor with the one whose rows alternate with its own; None for that one, which has no value of its own."""
        info, (part, _, end) = one.info, _parted(one.info.name)
        pairs = self._known.pairs if self._known is not None else {}
        is_second = part in pairs.values()
        if part not in pairs and not is_second:
            return one
        other = _reversed(pairs)[part] if is_second else pairs[part]
        name = info.name.replace(f".{part}.", f".{other}.")
        found = header.tensors.get(name) or self._elsewhere(name)
        if found is None:
            raise self._wrong(info, f"is a half of {new!r} in transformers, of which the other, {name!r}, is missing")
        if is_second:
            return None
        if found.shape != info.shape or len(info.shape) != (3 if end == "weight" else 2):
            raise self._wrong(
                info,
                f"has shape {list(info.shape)}, and {name!r} {list(found.shape)}; in transformers they are the halves of "
                f"{new!r}, of one shape, with an axis for the experts",
            )
        if found.type != info.type:
            raise UnsupportedError(
                f"{shown(self._path)}: tensor {info.name!r} is {info.type.name}, and {name!r} {found.type.name}; transformers "
                f"has both in {new!r}, which has one type. Quantize the model again, with one type for both.",
                name=info.name,
                types=(info.type.name, found.type.name),
            )
        return replace(one, shape=(info.shape[0], 2 * info.shape[1], *info.shape[2:]), second=found)

    def _shifts(self, part: str, end: str) -> bool:
        """Has GGUF the weights of a norm plus 1?"""
        return self._known is not None and self._known.shifts and "norm" in part and end == "weight"

    def _order(self, part: str, layer: int, end: str, shape: Shape) -> Pairs | Groups | None:
        """The order of rows that GGUF and transformers have differently."""
        if self._known is None or end not in ("weight", "bias"):
            return None
        if self._known.permutes and part in ("attn_q", "attn_k"):
            return Pairs(self._heads(layer, part))
        if self._name in _GROUPED and part == "attn_qkv":
            return Groups(self._heads(layer, "attn_q"), self._heads(layer, "attn_k"))
        return None

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


def _numbered(pattern: re.Pattern[str], name: str) -> tuple[str, int | None]:
    """A name with {} for its first number that a pattern finds, and that number."""
    found = pattern.search(name)
    return (name, None) if found is None else (f"{name[: found.start(2)]}{{}}{name[found.end(2) :]}", int(found[2]))


def _parted(name: str) -> tuple[str, int, str]:
    """A name in GGUF as that of a tensor in a layer, the number of the layer, and the end."""
    form, number = _numbered(_BLOCK, name)
    matched = _STEM.fullmatch(form)
    stem, end = matched.groups() if matched else (form, "")
    return stem.partition("blk.{}.")[2] or stem, number or 0, end


def _reversed(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in names.items()}


@dataclass(frozen=True)
class Pairs:
    """Rows of heads of q or k: GGUF has those beside each other that are rotated together, transformers i and i + half."""

    heads: int

    @property
    def count(self) -> int:
        """What divides the number of rows."""
        return 2 * self.heads

    def from_gguf(self, array: np.ndarray) -> np.ndarray:
        """The first rows of all pairs of a head, then the second ones."""
        pairs = array.reshape(self.heads, array.shape[0] // self.heads // 2, 2, *array.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)

    def into_gguf(self, array: np.ndarray) -> np.ndarray:
        """The rows of pairs beside each other: the inverse of `from_gguf`."""
        sides = array.reshape(self.heads, 2, array.shape[0] // self.heads // 2, *array.shape[1:])
        return np.ascontiguousarray(sides.swapaxes(1, 2)).reshape(array.shape)

    def __str__(self) -> str:
        return f"{self.heads} heads, of pairs of rows"


@dataclass(frozen=True)
class Groups:
    """Heads of q, k and v in one matrix: GGUF has all of q, then of k, then of v, transformers a head of k and v behind those
    of q that attend to it."""

    heads: int
    kv_heads: int

    @property
    def count(self) -> int:
        """What divides the number of rows; 0 where not as many heads of q attend to each of k."""
        return self.heads + 2 * self.kv_heads if self.kv_heads and self.heads % self.kv_heads == 0 else 0

    @property
    def _order(self) -> np.ndarray:
        """The heads of GGUF in the order of transformers."""
        q = np.arange(self.heads).reshape(self.kv_heads, -1)
        k = self.heads + np.arange(self.kv_heads).reshape(-1, 1)
        return np.concatenate([q, k, k + self.kv_heads], axis=1).reshape(-1)

    def from_gguf(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(self.count, -1, *array.shape[1:])[self._order].reshape(array.shape)

    def into_gguf(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(self.count, -1, *array.shape[1:])[np.argsort(self._order)].reshape(array.shape)

    def __str__(self) -> str:
        return f"{self.heads} heads of q and {self.kv_heads} of k and v"


def _shifted(array: np.ndarray) -> np.ndarray:
    """What llama.cpp has for the weights of a norm."""
    return array + np.float32(1)


def _unshifted(array: np.ndarray) -> np.ndarray:
    """The weights of a norm."""
    return array - np.float32(1)


def _as_row(array: np.ndarray) -> np.ndarray:
    return array.reshape(1, *array.shape)


def _with_channel(array: np.ndarray) -> np.ndarray:
    return array.reshape(array.shape[0], 1, *array.shape[1:])


def _exponentiated(array: np.ndarray) -> np.ndarray:
    """What llama.cpp has for the logarithms of state spaces."""
    return -np.exp(array)


def _logarithm(array: np.ndarray) -> np.ndarray:
    """The logarithms that are the parameter."""
    return np.log(-array)
