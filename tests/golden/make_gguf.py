"""Small GGUF files, and the values that ggml decodes: run where the library gguf 0.19 and libggml-base.so are installed.

    GGML_BASE=.../libggml-base.so python tests/golden/make_gguf.py       # npm's @node-llama-cpp/linux-x64 has the library

`types.gguf` has a tensor of each type, quantized by ggml's C code (ggml_quantize_chunk). `llama-0000N-of-00002.gguf` is a layer
of a llama in two parts, whose rows of q and k are as llama.cpp's converter arranges them. `record.json` has, for each value of
each, its shape, its type in the file, and the SHA-256 of its values as FP32 bytes: of blocks as ggml's C code decodes them
(dequantize_row_*), under the names and in the order of rows that transformers has.

Another run writes the same bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from dialect_values import digest

HERE = Path(__file__).parent / "gguf"
TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    *("IQ4_NL", "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)
PLAIN = {"F64": "f8", "F32": "f4", "F16": "f2", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}
HIDDEN, MIDDLE, VOCABULARY, HEADS, KV_HEADS = 64, 96, 16, 4, 2


def library() -> Any:
    """ggml's C code."""
    loaded = ctypes.CDLL(os.environ["GGML_BASE"])
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    loaded.ggml_quantize_chunk.restype = ctypes.c_size_t
    loaded.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    return loaded


def quantized(values: np.ndarray, kind: str) -> np.ndarray:
    """Rows of blocks."""
    number = GGMLQuantizationType[kind]
    length, size = GGML_QUANT_SIZES[number]
    x = np.ascontiguousarray(values, np.float32)
    rows, columns = x.shape
    blocks = np.zeros((rows, columns // length * size), np.uint8)
    importance = np.ones(columns, np.float32)
    pointer = importance.ctypes.data if kind.startswith(("IQ1", "IQ2")) else None
    written = library().ggml_quantize_chunk(int(number), x.ctypes.data, blocks.ctypes.data, 0, rows, columns, pointer)
    if written != blocks.nbytes:
        raise RuntimeError(f"ggml_quantize_chunk wrote {written} bytes, not {blocks.nbytes}")
    return blocks


def decoded(blocks: np.ndarray, kind: str) -> np.ndarray:
    """The values of rows of blocks."""
    length, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    values = np.zeros((len(blocks), blocks.shape[1] // size * length), np.float32)
    function = getattr(library(), "dequantize_row_" + kind.lower().replace("_k", "_K"))
    function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function(np.ascontiguousarray(blocks).ctypes.data, values.ctypes.data, values.size)
    return values


def recorded(values: np.ndarray, kind: str) -> dict[str, Any]:
    return {"shape": list(values.shape), "type": kind, "sha256": digest(values)}


def weights(rows: int, columns: int, seed: int) -> np.ndarray:
    """Random numbers, of rows of different size, one of them zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-3, 4, (rows, 1)))
    x[rows // 2, :32] = 0
    return x.astype(np.float32)


def write_types() -> dict[str, Any]:
    """A tensor of each type."""
    record: dict[str, Any] = {}
    writer = GGUFWriter(str(HERE / "types.gguf"), "example")
    writer.add_array("example.words", ["one", "two"])
    for n, kind in enumerate(TYPES):
        blocks = quantized(weights(2, 256, n), kind)
        writer.add_tensor(f"{kind.lower()}.weight", blocks, raw_dtype=GGMLQuantizationType[kind])
        record[f"{kind.lower()}.weight"] = recorded(decoded(blocks, kind), kind)
    for n, (kind, dtype) in enumerate(PLAIN.items()):
        array = (weights(3, 32, 100 + n) * 4).astype(dtype)
        writer.add_tensor(f"{kind.lower()}.weight", array)
        record[f"{kind.lower()}.weight"] = recorded(array, kind)
    bits = (weights(3, 32, 200).view(np.uint32) >> 16).astype(np.uint16)
    writer.add_tensor("bf16.weight", bits.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    record["bf16.weight"] = recorded((bits.astype(np.uint32) << 16).view(np.float32), "BF16")
    finish(writer)
    return record


def write_llama() -> dict[str, Any]:
    """A layer of a llama, in two parts."""
    record: dict[str, Any] = {}
    writer = GGUFWriter(str(HERE / "llama.gguf"), "llama", split_max_tensors=7)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)

    def put(name: str, gguf_name: str, rows: int, columns: int, kind: str, heads: int = 0) -> None:
        blocks = quantized(weights(rows, columns, len(record)), kind)
        record[name] = recorded(decoded(blocks, kind), kind)
        writer.add_tensor(gguf_name, permuted(blocks, heads), raw_dtype=GGMLQuantizationType[kind])

    def put_plain(name: str, gguf_name: str, array: np.ndarray, heads: int = 0) -> None:
        record[name] = recorded(array, "F32")
        writer.add_tensor(gguf_name, permuted(array, heads))

    layer, norm = "model.layers.0.", np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32)
    half = HIDDEN // 2
    put("model.embed_tokens.weight", "token_embd.weight", VOCABULARY, HIDDEN, "Q8_0")
    put(f"{layer}self_attn.q_proj.weight", "blk.0.attn_q.weight", HIDDEN, HIDDEN, "Q4_0", HEADS)
    put(f"{layer}self_attn.k_proj.weight", "blk.0.attn_k.weight", half, HIDDEN, "Q4_1", KV_HEADS)
    put(f"{layer}self_attn.v_proj.weight", "blk.0.attn_v.weight", half, HIDDEN, "Q8_0")
    put_plain(f"{layer}self_attn.q_proj.bias", "blk.0.attn_q.bias", np.arange(HIDDEN, dtype=np.float32), HEADS)
    put(f"{layer}self_attn.o_proj.weight", "blk.0.attn_output.weight", HIDDEN, HIDDEN, "Q5_0")
    put_plain(f"{layer}input_layernorm.weight", "blk.0.attn_norm.weight", norm)
    put_plain(f"{layer}post_attention_layernorm.weight", "blk.0.ffn_norm.weight", norm * 2)
    put(f"{layer}mlp.gate_proj.weight", "blk.0.ffn_gate.weight", MIDDLE, HIDDEN, "Q4_1")
    put(f"{layer}mlp.up_proj.weight", "blk.0.ffn_up.weight", MIDDLE, HIDDEN, "Q5_1")
    put(f"{layer}mlp.down_proj.weight", "blk.0.ffn_down.weight", HIDDEN, MIDDLE, "IQ4_NL")
    put_plain("model.norm.weight", "output_norm.weight", norm / 2)
    writer.add_tensor("rope_freqs.weight", np.ones(HIDDEN // HEADS // 2, np.float32))
    finish(writer)
    return record


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter arranges those of q and k: pairs that are rotated together beside each other."""
    if not heads:
        return array
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    HERE.mkdir(exist_ok=True)
    record = {"library": "gguf 0.19.0, libggml-base of @node-llama-cpp/linux-x64 3.22.1"}
    record |= {"types": write_types(), "llama": write_llama()}
    (HERE / "record.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
