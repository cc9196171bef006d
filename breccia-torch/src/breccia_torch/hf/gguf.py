"""GGUF files in `from_pretrained(folder, gguf_file=..., quantization_config=BrecciaConfig())`.

transformers makes the config of the keys of the file, and asks its own quantizer, which is for GGUF alone, for the state;
breccia's gives it that of the values that it reads.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_utils
from transformers.utils import logging

from breccia import UnsupportedError
from breccia.internal import abbreviated

logger = logging.get_logger(__name__)

#: The dtypes of plain tensors that are the model's, where `dtype` is "auto", by the names in a file.
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


def watch(config_class: type) -> None:
    """Let transformers load a GGUF file under a config of that class, which it refuses for every method but its own."""
    module: Any = modeling_utils
    original = module.get_hf_quantizer

    @wraps(original)
    def get_hf_quantizer(config: Any, quantization_config: Any, *arguments: Any, gguf_file: str | None = None) -> Any:
        if isinstance(quantization_config, config_class):
            gguf_file = None
        return original(config, quantization_config, *arguments, gguf_file=gguf_file)

    module.get_hf_quantizer = get_hf_quantizer


def dtype_of(checkpoint: Any) -> torch.dtype:
    """The dtype of a model by its plain tensors: a half one where the model has one beside norms, else FP32."""
    headers = (checkpoint.header(name) for name in checkpoint)
    stored = [header.dtype for header in headers if header.dtype is not None and len(header.shape) > 1]
    return next((_HALVES[dtype] for dtype in stored if dtype in _HALVES), torch.float32)


def check_config(model: Any, checkpoint: Any) -> None:
    """Check that the config that transformers has made is that of the file, in what it does not read.

    Raises UnsupportedError where the tensors have no names of transformers, where it ties weights that differ, and where it has
    no experts, and the file does; warns where it has no scaling of rotary frequencies.
    """
    if checkpoint.unmapped:
        raise UnsupportedError(
            f"{checkpoint.unmapped}, and no weight of {type(model).__name__} would be read. Load the original model with "
            "BrecciaConfig(recipe), or this file without a quantization_config."
        )
    experts = [name for name in checkpoint if ".experts." in name]
    if experts and not any(".experts." in name for name in model.state_dict()):
        raise UnsupportedError(
            f"the file has experts ({abbreviated(experts)}), and the config that transformers makes of it has none. Pass "
            "config= with that of the original model.",
            names=experts,
        )
    if model.config.tie_word_embeddings and "lm_head.weight" in checkpoint:
        raise UnsupportedError(
            "the config has tie_word_embeddings, but the files have an lm_head.weight of their own, which transformers does "
            "not see in a later part of a model that was split. Pass config=AutoConfig.from_pretrained(..., gguf_file=..., "
            "tie_word_embeddings=False).",
            name="lm_head.weight",
        )
    rope = getattr(model.config, "rope_parameters", None) or {}
    if checkpoint.left_out and rope.get("rope_type", "default") == "default":
        logger.warning(
            "The file has %s, which scale rotary frequencies, and transformers' config of it does not say so. Pass config= "
            "with the rope_parameters of the original model.",
            abbreviated(checkpoint.left_out),
        )


def state_of(checkpoint: Any) -> dict[str, Any]:
    """The tensors of a checkpoint, none of them read yet; an empty tensor for each part of a quantized value."""
    state: dict[str, Any] = {}
    for name in checkpoint:
        header = checkpoint.header(name)
        parts = header.parts if header.recipe is not None else ()
        state |= dict.fromkeys(parts, torch.empty(0)) if parts else {name: _Unread(checkpoint, name)}
    return state


class _Unread:
    """A plain tensor, which is read where transformers takes a slice of it, as a slice of a safetensors file."""

    def __init__(self, checkpoint: Any, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name
        self.shape = checkpoint.header(name).shape

    def get_dtype(self) -> str:
        return self._checkpoint.header(self._name).dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self._checkpoint[self._name][index]
