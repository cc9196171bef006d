"""The names of tensors of GGUF files against transformers' models: each parameter of a model has its GGUF name, and back."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_bytes import NUMBERS, STRING, U32, Tensor, gguf, key

from breccia_bridges.gguf_file import GGUFFile
from breccia_bridges.gguf_names import ARCHITECTURES

transformers = pytest.importorskip("transformers")
library = pytest.importorskip("gguf")

#: Model types of transformers by architectures of GGUF, where they are not the same.
TYPES = {"command-r": "cohere", "deci": "llama", "gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 48,
    "pad_token_id": 0,
}
_FUSED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


#: Those with tensors that llama.cpp changes by more than rows, in test_gguf_architectures.py.
OTHERS = ("bloom", "falcon", "gemma4", "gpt-oss", "gpt2", "lfm2", "mamba", "minimax-m2", "t5", "t5encoder")


def test_what_transformers_reads_has_names() -> None:
    """It spells some architectures with other characters, and has names of its own for two: Mistral's is llama, UMT5's t5."""
    known = {name.replace("-", "").replace("_", "") for name in ARCHITECTURES} | {"mistral", "umt5"}
    read = {*transformers.integrations.GGUF_CONFIG_MAPPING} - {"general", "tokenizer"}
    assert {name for name in read if name.replace("_", "") not in known} == set()


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES} - {*OTHERS}))
def test_parameters_of_a_model_get_their_names_back(architecture: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(TYPES.get(architecture, architecture), **SIZES)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    number = next(number for number, name in library.MODEL_ARCH_NAMES.items() if name == architecture)
    names = library.get_tensor_name_map(number, 2)
    tied = model.all_tied_weights_keys
    wanted = [name for name in model.state_dict() if name not in tied and not _FUSED.fullmatch(name)]
    tensors = []
    for name in wanted:
        stem, _, end = name.rpartition(".")
        theirs = names.get_name(stem)
        assert theirs is not None, name
        shape = tuple(model.state_dict()[name].shape)
        tensors.append(Tensor(f"{theirs}.{end}", shape[::-1], NUMBERS["F32"], bytes(4 * int(np.prod(shape)))))
    heads = [("head_count", 4), ("head_count_kv", config.num_key_value_heads)]
    keys = [key(f"{architecture}.attention.{name}", U32, number) for name, number in heads]
    (tmp_path / "m.gguf").write_bytes(gguf([key("general.architecture", STRING, architecture), *keys], tensors))
    assert list(GGUFFile(tmp_path / "m.gguf").entries) == wanted
