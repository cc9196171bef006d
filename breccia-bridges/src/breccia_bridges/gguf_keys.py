"""The keys of a GGUF file that is written: those of another one, or what config.json and the tokenizer of a model say.

The library `gguf` packs them, and has the numbers of types of files. Keys of models: llama.cpp's conversion, as of gguf 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from breccia import UnsupportedError
from breccia.internal import install

from .announcements import CONFIG, read_object
from .gguf_tokenizer import add_tokenizer
from .remote_path import is_remote

#: Keys of a GGUF file that are not copied: those of its own header, and of a model in several files.
_OF_FILE = ("GGUF.", "split.")
_QUANTIZATION_VERSION = 2


class Model(NamedTuple):
    """A type of models in transformers. name: of the architecture in GGUF. more: keys beside those of `_KEYS`.

    full: of so many layers the last one attends to everything, which programs take for granted; 0 if all do.
    """

    name: str
    more: tuple[str, ...] = ()
    full: int = 0


_EXPERTS = ("expert_count", "expert_used_count")
_GEMMA = ("attention.sliding_window",)
_CAPPED = ("attn_logit_softcapping", "final_logit_softcapping")
#: By `model_type` of config.json.
MODELS: dict[str, Model] = {
    "gemma": Model("gemma"),
    "gemma2": Model("gemma2", (*_GEMMA, *_CAPPED), 2),
    "gemma3_text": Model("gemma3", _GEMMA, 6),
    "llama": Model("llama"),
    "mistral": Model("llama"),
    "mixtral": Model("llama", _EXPERTS),
    "qwen2": Model("qwen2"),
    "qwen2_moe": Model("qwen2moe", (*_EXPERTS, "expert_feed_forward_length", "expert_shared_feed_forward_length")),
    "qwen3": Model("qwen3"),
    "qwen3_moe": Model("qwen3moe", (*_EXPERTS, "expert_feed_forward_length")),
}
#: Architectures in which llama.cpp multiplies by the scale of a tensor of NVFP4; in others it reads none.
SCALED = ("llama", "qwen3", "qwen3moe")
_KEYS = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count"),
)
#: Names in config.json, of which a model has one, by the keys of GGUF.
_IN_CONFIG: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size",),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "rope.dimension_count": ("head_dim",),
    "rope.freq_base": ("rope_theta",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
_FLOATS = ("attention.layer_norm_rms_epsilon", "rope.freq_base", *_CAPPED)


def library() -> Any:
    """The library gguf. Raises UnsupportedError where it is not installed."""
    try:
        import gguf
    except ImportError as e:
        raise UnsupportedError(f"the library gguf writes the keys of GGUF files: {install('breccia-bridges[gguf]')}.") from e
    return gguf


def copied_keys(path: Path) -> Any:
    """The library's writer with all keys of a file, bit for bit, except empty arrays, which mean what no key means."""
    gguf = library()
    if is_remote(path):
        raise UnsupportedError(
            f"{path} is a URL, and the library gguf copies the keys of a file on a disk. Download it, and give its path.",
            path=str(path),
        )
    fields = gguf.GGUFReader(path).fields
    named = fields.get("general.architecture")
    out = gguf.GGUFWriter(None, named.contents() if named else "unknown")
    out.kv_data[0].clear()  # keys keep their order
    kinds = gguf.GGUFValueType
    for key, field in fields.items():
        if key.startswith(_OF_FILE):
            continue
        kind, *items = field.types
        texts = [bytes(field.parts[n]) for n in field.data]
        if key == "general.alignment":
            out.add_custom_alignment(field.contents())
        elif kind is kinds.STRING:
            out.add_key_value(key, texts[0], kind)
        elif kind is not kinds.ARRAY:
            out.add_key_value(key, field.contents(), kind)
        elif items and texts:
            out.add_key_value(key, texts if items[-1] is kinds.STRING else field.contents(), kind, items[-1])
    return out


def file_type(out: Any, sizes: Iterable[tuple[str, int]]) -> None:
    """Set the key that says which type most bytes of matrices have. sizes: types with bytes."""
    gguf, total = library(), dict[str, int]()
    for name, nbytes in sizes:
        total[name] = total.get(name, 0) + nbytes
    most = max(total, key=lambda name: total[name], default="F32")
    known = gguf.LlamaFileType.__members__
    names = (f"ALL_{most}", f"MOSTLY_{most}", f"MOSTLY_{most}_S", f"MOSTLY_{most}_MOE", "GUESSED")
    out.kv_data[0].pop("general.file_type", None)
    out.kv_data[0].pop("general.quantization_version", None)
    out.add_quantization_version(_QUANTIZATION_VERSION)
    out.add_file_type(next(known[name] for name in names if name in known))


def made_keys(folder: Path) -> tuple[Any, dict[str, np.ndarray], list[str]]:
    """The library's writer with the keys of a folder of transformers; tensors that follow from the config; what is missing.

    Raises UnsupportedError for a folder without a config, for types of models without a declaration, and for what a config
    says that programs of GGUF do not compute.
    """
    config = read_object(folder / CONFIG) if folder.is_dir() else None
    if config is None:
        raise UnsupportedError(
            f"{folder} has no {CONFIG}, which says what the model is, and a GGUF file has to. Give the folder of the model, or "
            "leave dialect='gguf' out.",
            path=str(folder),
        )
    kind = config.get("model_type")
    model = MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise UnsupportedError(
            f"{folder / CONFIG} says model_type={kind!r}; breccia writes GGUF files of {', '.join(MODELS)}. Convert this one "
            "with llama.cpp's convert_hf_to_gguf.py, and then its file with breccia.",
            path=str(folder),
        )
    out = library().GGUFWriter(None, model.name)
    out.add_type("model")
    out.add_name(folder.resolve().name)
    settings = _Settings(folder, config, model)
    settings.check()
    for key in (*_KEYS, *model.more):
        value = settings.get(key)
        (out.add_float32 if key in _FLOATS else out.add_uint32)(f"{model.name}.{key}", value)
    computed = settings.add_rope(out)
    missing = add_tokenizer(out, folder, settings.get("vocab_size"))
    return out, computed, missing


class _Settings:
    """What a config says in terms of GGUF."""

    def __init__(self, folder: Path, config: Mapping[str, Any], model: Model) -> None:
        self._path, self._model = folder / CONFIG, model
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        rope = rope.get("full_attention", rope) if isinstance(rope, dict) else {}
        self._rope: Mapping[str, Any] = rope if isinstance(rope, dict) else {}
        known = {name: value for name, value in config.items() if value is not None}
        self._config = {"rope_theta": self._rope.get("rope_theta", 10000.0), **known}
        self._share = self.get("embedding_length") // max(1, self.get("attention.head_count"))
        self._config.setdefault("head_dim", self._share)

    def get(self, key: str) -> Any:
        """The value of a key. Raises UnsupportedError if the config does not say it."""
        names = _IN_CONFIG[key]
        value = next((self._config[name] for name in names if self._config.get(name) is not None), None)
        if type(value) is not int and not (key in _FLOATS and type(value) is float):
            raise self._refusal(f"says {names[0]}={value!r}, and GGUF needs a number for {self._model.name}.{key}")
        return value

    def check(self) -> None:
        """Refuse what programs compute in another way than the config says."""
        full, layers = self._model.full, self._config.get("layer_types", [])
        every = range(len(layers)) if isinstance(layers, list) else ()
        if layers != ["full_attention" if not full or n % full == full - 1 else "sliding_attention" for n in every]:
            raise self._refusal(f"has layer_types other than those of every {self._model.name} in llama.cpp")
        scalar, dim = self._config.get("query_pre_attn_scalar"), self._config["head_dim"]
        if scalar not in (None, dim, self._share):
            raise self._refusal(f"has query_pre_attn_scalar={scalar!r}, for which llama.cpp takes the size of heads, {dim}")
        if self._config.get("use_sliding_window"):
            raise self._refusal("has use_sliding_window=true, which llama.cpp does not compute")

    def add_rope(self, out: Any) -> dict[str, np.ndarray]:
        """Add the keys of rotary embeddings; returns the tensor of their factors if they have any."""
        kind = self._rope.get("rope_type", self._rope.get("type", "default"))
        if kind == "default":
            return {}
        if kind == "llama3":
            return {"rope_freqs.weight": self._factors()}
        if kind not in ("linear", "yarn"):
            raise self._refusal(f"has rotary embeddings of type {kind!r}; breccia writes default, linear, yarn and llama3")
        out.add_string(f"{out.arch}.rope.scaling.type", kind)
        out.add_float32(f"{out.arch}.rope.scaling.factor", self._number("factor"))
        if kind == "yarn":
            length = int(self._number("original_max_position_embeddings"))
            out.add_uint32(f"{out.arch}.rope.scaling.original_context_length", length)
        return {}

    def _factors(self) -> np.ndarray:
        """What llama3 divides frequencies by: 1 for short waves, `factor` for long ones, between them what lies between."""
        dim, base = self._config["head_dim"], float(self.get("rope.freq_base"))
        context, factor = self._number("original_max_position_embeddings"), self._number("factor")
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        turns = context / (2 * math.pi * base ** (np.arange(0, dim, 2) / dim))
        share = np.clip((turns - low) / (high - low), 0, 1)
        return (1 / ((1 - share) / factor + share)).astype(np.float32)

    def _number(self, name: str) -> float:
        value = self._rope.get(name)
        if not isinstance(value, int | float):
            raise self._refusal(f"has rotary embeddings without {name}")
        return float(value)

    def _refusal(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{self._path} {what}. Correct it, or leave dialect='gguf' out.", path=str(self._path))
