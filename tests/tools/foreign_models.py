"""Folders of whole models as other libraries write them, of any size: random Llamas, or weights that are given.

    python tests/tools/foreign_models.py FOLDER gptq    # a random model of SmolLM2-135M's shapes

A folder is what the library's own writer makes: config.json, an index and shards, and parts of one value may be in two shards.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import breccia
from breccia import Float8BlockScaling, INT4Scaling, MXFP4BlockScaling, NVFP4BlockScaling, ScaledTensor
from breccia_bridges.safetensors_writer import Writer

#: A dtype of a file, and an array of its bits.
Tensor = tuple[str, np.ndarray]

#: Columns that share a scale: they divide the 576 columns of SmolLM2.
GROUP = 64
#: config.json of SmolLM2-135M.
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}
#: The same with two small layers.
SMALL = SMOLLM2 | {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def llama(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of a Llama with tied embeddings, in FP32, under the names of transformers."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    cached = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    linear = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (cached, hidden),
        "self_attn.v_proj": (cached, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {
        name: rng.standard_normal(shape, np.float32) / 50 if len(shape) > 1 else rng.uniform(0.5, 1.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def is_quantized(name: str) -> bool:
    """Whether libraries quantize a weight of this name: those of projections, in experts too."""
    return name.removesuffix(".weight").endswith(("_proj", ".w1", ".w2", ".w3"))


class Kind(NamedTuple):
    """How a library stores a model.

    recipe: under which weights are cast. parts: from a cast weight to its tensors in the file, by the ends of their names.
    config: what config.json says. module: whether ends follow the name of the module, or that of the value.
    """

    recipe: Any
    parts: Callable[[ScaledTensor], dict[str, Tensor]]
    config: dict[str, Any]
    module: bool = True

    def takes(self, name: str) -> bool:
        """Whether a weight of this name is quantized; gpt-oss's are the parameters of its experts alone."""
        return is_quantized(name) and (self.module or not name.endswith(".weight"))


def _gptq(st: ScaledTensor) -> dict[str, Tensor]:
    """Version 1: zero-points minus one, of whole words."""
    rows, columns = st.shape
    zeros = np.ascontiguousarray(np.asarray(st.zero_point).T).reshape(-1, rows // 8, 8).astype(np.uint32)
    words = np.bitwise_or.reduce(zeros << np.arange(0, 32, 4, dtype=np.uint32), axis=-1) - np.uint32(0x11111111)
    return {
        "qweight": ("I32", np.ascontiguousarray(_words(st, np.int32).T)),
        "qzeros": ("I32", words.view(np.int32)),
        "scales": ("F16", np.ascontiguousarray(np.asarray(st.scale).T)),
        "g_idx": ("I32", (np.arange(columns) // GROUP).astype(np.int32)),
    }


def _words(st: ScaledTensor, dtype: type) -> np.ndarray:
    return np.ascontiguousarray(st.data).view(dtype)


def _pack_quantized(st: ScaledTensor) -> dict[str, Tensor]:
    """Codes plus 8."""
    return {
        "weight_packed": ("I32", (np.asarray(st.data) ^ np.uint8(0x88)).view(np.int32)),
        "weight_scale": ("F16", np.asarray(st.scale)),
        "weight_shape": ("I64", np.array(st.shape)),
    }


def _nvfp4(st: ScaledTensor) -> dict[str, Tensor]:
    return {
        "weight_packed": ("U8", np.asarray(st.data)),
        "weight_scale": ("F8_E4M3", np.asarray(st.scale)),
        "weight_global_scale": ("F32", np.asarray(st.global_scale).reshape(1)),
    }


def _mlx(st: ScaledTensor) -> dict[str, Tensor]:
    scale, biases = np.asarray(st.scale), np.asarray(st.zero_point)
    return {"weight": ("U32", _words(st, np.uint32)), "scales": ("BF16", scale), "biases": ("BF16", biases)}


def _fp8(st: ScaledTensor) -> dict[str, Tensor]:
    return {"weight": ("F8_E4M3", np.asarray(st.data)), "weight_scale_inv": ("F32", np.asarray(st.scale))}


def _gpt_oss(st: ScaledTensor) -> dict[str, Tensor]:
    data, scale = np.asarray(st.data), np.asarray(st.scale)
    return {"_blocks": ("U8", data.reshape(*scale.shape, 16)), "_scales": ("U8", scale)}


def _compressed_tensors(fmt: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": fmt, "weights": {"symmetric": True, "dynamic": False, **weights}}
    config = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "quantization_status": "compressed"}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": fmt, **config}}


_OF_MLX = {"group_size": GROUP, "bits": 4, "mode": "affine"}
_OF_GPTQ = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "checkpoint_format": "gptq"}
KINDS: dict[str, Kind] = {
    "gptq": Kind(
        INT4Scaling(group_size=GROUP, signed=False, symmetric=False),
        _gptq,
        {"quantization_config": {"quant_method": "gptq", **_OF_GPTQ}},
    ),
    "pack_quantized": Kind(
        INT4Scaling(group_size=GROUP),
        _pack_quantized,
        _compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
    ),
    "nvfp4": Kind(
        NVFP4BlockScaling(global_sense="divisor"),
        _nvfp4,
        _compressed_tensors("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "mlx": Kind(
        INT4Scaling(group_size=GROUP, signed=False, symmetric=False, offset="bias", scale_dtype="bfloat16"),
        _mlx,
        {"quantization": _OF_MLX, "quantization_config": _OF_MLX},
    ),
    "fp8_block": Kind(
        Float8BlockScaling(block_m=128),
        _fp8,
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}},
    ),
    "gpt_oss": Kind(MXFP4BlockScaling(), _gpt_oss, {"quantization_config": {"quant_method": "mxfp4"}}, module=False),
}


def write(
    path: Path,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    kind: str,
    *,
    shards: int = 1,
    embeddings: bool = False,
) -> dict[str, str]:
    """Write the folder of a model; returns the file of each tensor.

    weights: in FP32. Those that `Kind.takes` are cast (experts of gpt-oss from their parameters, (E, K, N)); the others are
        stored in BF16.
    config: of the model, without a quantization. embeddings: whether they are cast too, as MLX does.
    """
    how, tensors = KINDS[kind], dict[str, Tensor]()
    for name in sorted(weights):
        array = weights[name]
        if not how.takes(name) and not (embeddings and name.endswith("embed_tokens.weight")):
            tensors[name] = ("BF16", array.astype(ml_dtypes.bfloat16).view(np.uint16))
            continue
        st = breccia.cast(array if how.module else np.ascontiguousarray(array.swapaxes(-1, -2)), how.recipe)
        stem = name.removesuffix("weight") if how.module else name
        tensors |= {stem + end: tensor for end, tensor in how.parts(st).items()}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**config, **how.config}))
    names, files = list(tensors), dict[str, str]()
    for shard in range(shards):
        own = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        with Writer(path / file, {n: (tensors[n][0], tensors[n][1].shape) for n in own}, {"format": "pt"}) as writer:
            for name in own:
                writer.write(name, tensors[name][1])
        files |= dict.fromkeys(own, file)
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


if __name__ == "__main__":
    write(Path(sys.argv[1]), llama(SMOLLM2), SMOLLM2, sys.argv[2], shards=3)
