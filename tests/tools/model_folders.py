"""Sharded folders as today's models are published in them: names, dtypes, configs and indexes; small, or of full size in sparse
files.

Names are those of DeepSeek-V4's own files, gpt-oss, Kimi-K2, and of what ModelOpt, compressed-tensors and mlx-lm write for
transformers' models.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from breccia_bridges.safetensors_file import byte_count

#: A dtype of a file, a shape, and what the bytes are: "codes", "scales", "weights", or numbers of their own.
Stored = tuple[str, tuple[int, ...], Any]


@dataclass
class Model:
    """The tensors of a checkpoint by name, in the order of the shards, and the JSON files beside them."""

    config: dict[str, Any]
    tensors: dict[str, Stored] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, dtype: str, *shape: int, of: Any = "weights") -> None:
        self.tensors[name] = dtype, shape, of

    def dense(self, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
        """Tensors of no dialect."""
        for name, shape in shapes.items():
            self.add(name, dtype, *shape)

    def write(self, path: Path, shards: int, *, sparse: bool = False) -> Path:
        """Write the folder. Each shard but the last ends with the codes of a value whose scales are in the next one.

        sparse: files of full size that hold only numbers of their own, such as shapes.
        """
        path.mkdir()
        names, files = list(self.tensors), {}
        kinds = [of if isinstance(of, str) else "numbers" for _, _, of in self.tensors.values()]
        codes = [n for n, kind in enumerate(kinds, 1) if kind == "codes"]
        cuts = [0, *(codes[len(codes) * n // shards] for n in range(1, shards)), len(names)]
        for n in range(shards):
            own, file = names[cuts[n] : cuts[n + 1]], f"model-{n + 1:05}-of-{shards:05}.safetensors"
            files |= dict.fromkeys(own, file)
            _write(path / file, {name: self.tensors[name] for name in own}, sparse)
        total = sum(byte_count(dtype, shape) for dtype, shape, _ in self.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        for name, listed in {"config": self.config, "model.safetensors.index": index, **self.files}.items():
            (path / f"{name}.json").write_text(json.dumps(listed, indent=2))
        return path


def _write(path: Path, tensors: Mapping[str, Stored], sparse: bool) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, _) in tensors.items():
        start, end = end, end + byte_count(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text, rng = json.dumps(header).encode(), np.random.default_rng(0)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for dtype, shape, of in tensors.values():
            if sparse and isinstance(of, str):
                file.seek(byte_count(dtype, shape), os.SEEK_CUR)
            else:
                file.write(_contents(rng, dtype, shape, of))
        file.truncate(8 + len(text) + end)


def _contents(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], of: Any) -> bytes:
    if not isinstance(of, str):
        return np.asarray(of, np.int32).tobytes()
    if of == "weights":
        return _floats(rng.standard_normal(shape, np.float32), dtype).tobytes()
    if of == "scales":
        return _floats(rng.uniform(1 / 64, 1 / 8, shape).astype(np.float32), dtype).tobytes()
    codes = rng.integers(0, 256, byte_count(dtype, shape), np.uint8)
    if dtype == "F8_E4M3":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    return codes.tobytes()


def _floats(array: np.ndarray, dtype: str) -> np.ndarray:
    """Positive floats, or for F32 and BF16 any, in a dtype of a file."""
    exponents = (array.view(np.uint32) >> 23).astype(np.uint8)
    kinds = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    return exponents if dtype in ("U8", "F8_E8M0") else array.astype(kinds[dtype])


# ------------------------------------------------------------------------------------------------ DeepSeek-V4


def deepseek_v4(
    *, layers: int, hash_layers: int, hidden: int, vocabulary: int, heads: int, head: int, q_rank: int, o_rank: int,
    o_groups: int, experts: int, per_token: int, width: int, hyper: int,
) -> Model:  # fmt: skip
    """Experts in FP4, other matrices in FP8, all scales E8M0; in each layer one shared expert and `hyper` connections.

    width: of an expert. The first `hash_layers` layers choose experts by a table of tokens.
    """
    model = Model(
        {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_hash_layers": hash_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 1,
            "head_dim": head,
            "q_lora_rank": q_rank,
            "o_lora_rank": o_rank,
            "o_groups": o_groups,
            "n_routed_experts": experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": per_token,
            "moe_intermediate_size": width,
            "hc_mult": hyper,
            "vocab_size": vocabulary,
            "dtype": "bfloat16",
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128],
            },
        }
    )

    def fp8(name: str, rows: int, columns: int) -> None:
        model.add(f"{name}.weight", "F8_E4M3", rows, columns, of="codes")
        model.add(f"{name}.scale", "F8_E8M0", -(-rows // 128), -(-columns // 128), of="scales")

    def fp4(name: str, rows: int, columns: int) -> None:
        model.add(f"{name}.weight", "I8", rows, columns // 2, of="codes")
        model.add(f"{name}.scale", "F8_E8M0", rows, columns // 32, of="scales")

    model.dense({"embed.weight": (vocabulary, hidden)})
    for n in range(layers):
        at = f"layers.{n}"
        fp8(f"{at}.attn.wq_a", q_rank, hidden)
        fp8(f"{at}.attn.wq_b", heads * head, q_rank)
        fp8(f"{at}.attn.wkv", head, hidden)
        fp8(f"{at}.attn.wo_a", o_groups * o_rank, heads * head // o_groups)
        fp8(f"{at}.attn.wo_b", hidden, o_groups * o_rank)
        norms = {"attn.q_norm": q_rank, "attn.kv_norm": head, "attn_norm": hidden, "ffn_norm": hidden}
        model.dense({f"{at}.{norm}.weight": (size,) for norm, size in norms.items()})
        model.dense({f"{at}.attn.attn_sink": (heads,)}, "F32")
        for part in ("attn", "ffn"):
            rows = (2 + hyper) * hyper
            shapes = {"fn": (rows, hyper * hidden), "base": (rows,), "scale": (3,)}
            model.dense({f"{at}.hc_{part}_{end}": shape for end, shape in shapes.items()}, "F32")
        model.dense({f"{at}.ffn.gate.weight": (experts, hidden)})
        if n < hash_layers:
            table = np.arange(vocabulary * per_token).reshape(vocabulary, per_token) % experts
            model.add(f"{at}.ffn.gate.tid2eid", "I32", vocabulary, per_token, of=table)
        else:
            model.dense({f"{at}.ffn.gate.bias": (experts,)}, "F32")
        for name, store in [*((f"experts.{e}", fp4) for e in range(experts)), ("shared_experts", fp8)]:
            store(f"{at}.ffn.{name}.w1", width, hidden)
            store(f"{at}.ffn.{name}.w2", hidden, width)
            store(f"{at}.ffn.{name}.w3", width, hidden)
    model.dense({"norm.weight": (hidden,), "head.weight": (vocabulary, hidden)})
    return model


# ------------------------------------------------------------------------------------------------ gpt-oss


def _attention(model: Model, at: str, hidden: int, heads: int, kv_heads: int, head: int) -> dict[str, tuple[int, int]]:
    """The shapes of the four matrices of attention; the norms of a layer are added."""
    model.dense({f"{at}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")})
    shapes = {"q_proj": (heads * head, hidden), "k_proj": (kv_heads * head, hidden), "v_proj": (kv_heads * head, hidden)}
    return {f"{at}.self_attn.{name}": shape for name, shape in {**shapes, "o_proj": (hidden, heads * head)}.items()}


def gpt_oss(
    *, layers: int, hidden: int, vocabulary: int, heads: int, kv_heads: int, head: int, experts: int, width: int
) -> Model:
    """Experts in MXFP4, all of a layer in two tensors, gate and up interleaved."""
    model = Model(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "hidden_size": hidden,
            "intermediate_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "num_local_experts": experts,
            "vocab_size": vocabulary,
            "quantization_config": {
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
                "quant_method": "mxfp4",
            },
        }
    )
    model.dense({"model.embed_tokens.weight": (vocabulary, hidden)})
    for n in range(layers):
        at = f"model.layers.{n}"
        for name, (rows, columns) in {
            "gate_up_proj": (2 * width, hidden),
            "down_proj": (hidden, width),
        }.items():
            experts_at = f"{at}.mlp.experts.{name}"
            model.dense({f"{experts_at}_bias": (experts, rows)})
            model.add(f"{experts_at}_blocks", "U8", experts, rows, columns // 32, 16, of="codes")
            model.add(f"{experts_at}_scales", "U8", experts, rows, columns // 32, of="scales")
        model.dense({f"{at}.mlp.router.weight": (experts, hidden), f"{at}.mlp.router.bias": (experts,)})
        for name, shape in _attention(model, at, hidden, heads, kv_heads, head).items():
            model.dense({f"{name}.weight": shape, f"{name}.bias": shape[:1]})
        model.dense({f"{at}.self_attn.sinks": (heads,)})
    model.dense({"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)})
    return model


# ------------------------------------------------------------------------------------------------ Kimi


def _mlp(at: str, hidden: int, width: int) -> dict[str, tuple[int, int]]:
    """The shapes of the three matrices of an MLP, or of an expert."""
    return {f"{at}.gate_proj": (width, hidden), f"{at}.up_proj": (width, hidden), f"{at}.down_proj": (hidden, width)}


def kimi(
    *, layers: int, dense_layers: int, hidden: int, vocabulary: int, heads: int, q_rank: int, kv_rank: int, nope: int,
    rope: int, value: int, experts: int, width: int, dense_width: int,
) -> Model:  # fmt: skip
    """Routed experts in INT4, groups of 32, one expert per name; everything else in BF16."""
    model = Model(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "hidden_size": hidden,
            "intermediate_size": dense_width,
            "moe_intermediate_size": width,
            "num_hidden_layers": layers,
            "first_k_dense_replace": dense_layers,
            "num_attention_heads": heads,
            "q_lora_rank": q_rank,
            "kv_lora_rank": kv_rank,
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": value,
            "n_routed_experts": experts,
            "n_shared_experts": 1,
            "vocab_size": vocabulary,
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "config_groups": {
                    "group_0": {
                        "input_activations": None,
                        "output_activations": None,
                        "targets": ["Linear"],
                        "weights": {
                            "actorder": None,
                            "block_structure": None,
                            "dynamic": False,
                            "group_size": 32,
                            "num_bits": 4,
                            "observer": "minmax",
                            "observer_kwargs": {},
                            "strategy": "group",
                            "symmetric": True,
                            "type": "int",
                        },
                    }
                },
                "format": "pack-quantized",
                "ignore": [
                    "lm_head",
                    "re:.*self_attn.*",
                    "re:.*shared_experts.*",
                    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                ],
                "kv_cache_scheme": None,
                "quant_method": "compressed-tensors",
                "quantization_status": "compressed",
            },
        }
    )
    model.dense({"model.embed_tokens.weight": (vocabulary, hidden)})
    for n in range(layers):
        at = f"model.layers.{n}"
        model.dense({f"{at}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")})
        matrices = {
            "q_a_proj": (q_rank, hidden),
            "q_b_proj": (heads * (nope + rope), q_rank),
            "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
            "kv_b_proj": (heads * (nope + value), kv_rank),
            "o_proj": (hidden, heads * value),
        }
        norms = {"q_a_layernorm": (q_rank,), "kv_a_layernorm": (kv_rank,)}
        model.dense({f"{at}.self_attn.{name}.weight": shape for name, shape in {**matrices, **norms}.items()})
        if n < dense_layers:
            model.dense({f"{name}.weight": shape for name, shape in _mlp(f"{at}.mlp", hidden, dense_width).items()})
            continue
        model.dense({f"{at}.mlp.gate.weight": (experts, hidden)})
        model.dense({f"{at}.mlp.gate.e_score_correction_bias": (experts,)}, "F32")
        shared = _mlp(f"{at}.mlp.shared_experts", hidden, width)
        model.dense({f"{name}.weight": shape for name, shape in shared.items()})
        for e in range(experts):
            for name, (rows, columns) in _mlp(f"{at}.mlp.experts.{e}", hidden, width).items():
                model.add(f"{name}.weight_packed", "I32", rows, columns // 8, of="codes")
                model.add(f"{name}.weight_scale", "BF16", rows, columns // 32, of="scales")
                model.add(f"{name}.weight_shape", "I32", 2, of=(rows, columns))
    model.dense({"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)})
    return model


# ------------------------------------------------------------------------------------------------ Llamas


def _llama(model_type: str, layers: int, hidden: int, vocabulary: int, heads: int, kv_heads: int, head: int) -> dict[str, Any]:
    return {
        "architectures": [f"{model_type.title()}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _nvfp4(model: Model, name: str, rows: int, columns: int, codes: str, second: str, shape: tuple[int, ...]) -> None:
    model.add(f"{name}.{codes}", "U8", rows, columns // 2, of="codes")
    model.add(f"{name}.weight_scale", "F8_E4M3", rows, columns // 16, of="scales")
    model.add(f"{name}.{second}", "F32", *shape, of="scales")


def modelopt(*, layers: int, hidden: int, vocabulary: int, heads: int, kv_heads: int, head: int, width: int) -> Model:
    """MLPs in NVFP4 and attention in FP8 with one scale, both with a scale of inputs; a cache in FP8."""
    layers_of: dict[str, Any] = {}
    listed = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "model.embed_tokens"],
        "quantized_layers": layers_of,
    }
    model = Model(_llama("llama", layers, hidden, vocabulary, heads, kv_heads, head))
    model.dense({"model.embed_tokens.weight": (vocabulary, hidden)})
    for n in range(layers):
        at = f"model.layers.{n}"
        for name, (rows, columns) in _attention(model, at, hidden, heads, kv_heads, head).items():
            model.add(f"{name}.weight", "F8_E4M3", rows, columns, of="codes")
            model.add(f"{name}.weight_scale", "F32", of="scales")
            model.add(f"{name}.input_scale", "F32", of="scales")
            layers_of[name] = {"quant_algo": "FP8"}
        for name in ("k_proj.k_scale", "v_proj.v_scale"):
            model.add(f"{at}.self_attn.{name}", "F32", of="scales")
        for name, (rows, columns) in _mlp(f"{at}.mlp", hidden, width).items():
            _nvfp4(model, name, rows, columns, "weight", "weight_scale_2", ())
            model.add(f"{name}.input_scale", "F32", of="scales")
            layers_of[name] = {"quant_algo": "NVFP4", "group_size": 16}
    model.dense({"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)})
    producer = {"name": "modelopt", "version": "0.47.0"}
    model.config["quantization_config"] = {**listed, "producer": producer, "quant_method": "modelopt"}
    model.files["hf_quant_config"] = {"producer": producer, "quantization": listed}
    return model


def compressed_tensors(*, layers: int, hidden: int, vocabulary: int, heads: int, kv_heads: int, head: int, width: int) -> Model:
    """Two groups: attention in block FP8, MLPs in NVFP4."""
    model = Model(_llama("llama", layers, hidden, vocabulary, heads, kv_heads, head))
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128]}
    nvfp4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    model.config["quantization_config"] = {
        "config_groups": {
            "group_0": {
                "targets": [r"re:.*self_attn\.(q|k|v|o)_proj$"],
                "weights": {**fp8, "dynamic": False},
                "input_activations": {**fp8, "block_structure": None, "strategy": "group", "group_size": 128, "dynamic": True},
                "format": "float-quantized",
            },
            "group_1": {
                "targets": [r"re:.*mlp\.(gate|up|down)_proj$"],
                "weights": {**nvfp4, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"},
                "input_activations": {**nvfp4, "dynamic": "local"},
                "format": "nvfp4-pack-quantized",
            },
        },
        "format": "mixed-precision",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    model.dense({"model.embed_tokens.weight": (vocabulary, hidden)})
    for n in range(layers):
        at = f"model.layers.{n}"
        for name, (rows, columns) in _attention(model, at, hidden, heads, kv_heads, head).items():
            model.add(f"{name}.weight", "F8_E4M3", rows, columns, of="codes")
            model.add(f"{name}.weight_scale", "BF16", -(-rows // 128), -(-columns // 128), of="scales")
        for name, (rows, columns) in _mlp(f"{at}.mlp", hidden, width).items():
            _nvfp4(model, name, rows, columns, "weight_packed", "weight_global_scale", (1,))
            model.add(f"{name}.input_global_scale", "F32", 1, of="scales")
    model.dense({"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)})
    return model


def mlx(*, layers: int, hidden: int, vocabulary: int, heads: int, kv_heads: int, head: int, experts: int, width: int) -> Model:
    """Embedding, head, attention and stacked experts in 4 bits, groups of 64; v_proj and down_proj in 6, routers in 8."""
    quantization: dict[str, Any] = {"group_size": 64, "bits": 4, "mode": "affine"}
    model = Model({**_llama("qwen3_moe", layers, hidden, vocabulary, heads, kv_heads, head), "num_experts": experts})
    model.config |= {"moe_intermediate_size": width, "quantization": quantization, "quantization_config": quantization}

    def affine(name: str, *shape: int, bits: int = 4) -> None:
        *lead, columns = shape
        model.add(f"{name}.weight", "U32", *lead, columns * bits // 32, of="codes")
        for part in ("scales", "biases"):
            model.add(f"{name}.{part}", "BF16", *lead, columns // 64, of="scales")
        if bits != 4:
            quantization[name] = {"group_size": 64, "bits": bits}

    affine("model.embed_tokens", vocabulary, hidden)
    for n in range(layers):
        at = f"model.layers.{n}"
        for name, shape in _attention(model, at, hidden, heads, kv_heads, head).items():
            affine(name, *shape, bits=6 if name.endswith("v_proj") else 4)
        model.dense({f"{at}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")})
        affine(f"{at}.mlp.gate", experts, hidden, bits=8)
        for name, shape in _mlp(f"{at}.mlp.switch_mlp", hidden, width).items():
            affine(name, experts, *shape, bits=6 if name.endswith("down_proj") else 4)
    affine("lm_head", vocabulary, hidden)
    model.dense({"model.norm.weight": (hidden,)})
    return model
