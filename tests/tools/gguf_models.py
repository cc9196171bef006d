"""A small llama in GGUF, with quantized weights as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf_bytes import ARRAY, F32, NUMBERS, STRING, U32, Tensor, gguf, key

HIDDEN, MIDDLE, VOCABULARY, HEADS, KV_HEADS = 64, 96, 40, 4, 2


def blocks(rng: np.random.Generator, name: str, rows: int, columns: int, kind: str) -> Tensor:
    """A tensor of random blocks of 32 whose scales, and biases, are small. kind: Q4_0, Q4_1 or Q8_0."""
    size, floats = {"Q4_0": (18, 1), "Q4_1": (20, 2), "Q8_0": (34, 1)}[kind]
    data = rng.integers(0, 256, (rows, columns // 32, size), np.uint8)
    scales = rng.uniform(-0.02, 0.02, (rows, columns // 32, floats)) / (16 if kind == "Q8_0" else 1)
    data[..., : 2 * floats] = scales.astype(np.float16).view(np.uint8)
    return Tensor(name, (columns, rows), NUMBERS[kind], data.tobytes())


def norm(rng: np.random.Generator, name: str) -> Tensor:
    return Tensor(name, (HIDDEN,), NUMBERS["F32"], rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32).tobytes())


def keys(architecture: str = "llama") -> list[bytes]:
    """What the file says of the model, with a vocabulary of single characters."""
    numbers = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": MIDDLE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HIDDEN // HEADS,
        "vocab_size": VOCABULARY,
    }
    floats = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0}
    words = ["<unk>", "<s>", "</s>", *(chr(ord("!") + n) for n in range(VOCABULARY - 3))]
    return [
        key("general.architecture", STRING, architecture),
        key("general.name", STRING, "small"),
        *(key(f"{architecture}.{name}", U32, number) for name, number in numbers.items()),
        *(key(f"{architecture}.{name}", F32, number) for name, number in floats.items()),
        key("tokenizer.ggml.model", STRING, "llama"),
        key("tokenizer.ggml.tokens", ARRAY, (STRING, words)),
        key("tokenizer.ggml.scores", ARRAY, (F32, [float(-n) for n in range(VOCABULARY)])),
        key("tokenizer.ggml.token_type", ARRAY, (5, [2, 3, 3, *([1] * (VOCABULARY - 3))])),
        *(key(f"tokenizer.ggml.{name}_token_id", U32, n) for n, name in enumerate(("unknown", "bos", "eos"))),
    ]


def tensors(tied: bool = True) -> list[Tensor]:
    """Those of a model of two layers."""
    rng = np.random.default_rng(7)
    half, found = HIDDEN // 2, [blocks(rng, "token_embd.weight", VOCABULARY, HIDDEN, "Q8_0")]
    for n in range(2):
        block = f"blk.{n}."
        found += [norm(rng, f"{block}{name}.weight") for name in ("attn_norm", "ffn_norm")]
        found += [
            blocks(rng, f"{block}{name}.weight", rows, columns, kind)
            for name, rows, columns, kind in (
                ("attn_q", HIDDEN, HIDDEN, "Q4_0"),
                ("attn_k", half, HIDDEN, "Q4_1"),
                ("attn_v", half, HIDDEN, "Q8_0"),
                ("attn_output", HIDDEN, HIDDEN, "Q4_0"),
                ("ffn_gate", MIDDLE, HIDDEN, "Q4_1"),
                ("ffn_up", MIDDLE, HIDDEN, "Q4_0"),
                ("ffn_down", HIDDEN, MIDDLE, "Q4_1"),
            )
        ]
    found.append(norm(rng, "output_norm.weight"))
    return found if tied else [*found, blocks(rng, "output.weight", VOCABULARY, HIDDEN, "Q8_0")]


def llama(folder: Path, name: str = "small.gguf", *, tied: bool = True) -> Path:
    """The file of a model."""
    (folder / name).write_bytes(gguf(keys(), tensors(tied)))
    return folder / name


def split_llama(folder: Path) -> list[Path]:
    """A model in two files, as llama-gguf-split writes it. Its output is in the second one."""
    all_of = tensors(tied=False)
    paths: list[Path] = []
    for n, part in enumerate((all_of[:9], all_of[9:])):
        says = [key("split.no", 2, n), key("split.count", 2, 2), key("split.tensors.count", 5, len(all_of))]
        paths.append(folder / f"small-{n + 1:05}-of-00002.gguf")
        paths[-1].write_bytes(gguf([*(keys() if n == 0 else ()), *says], part))
    return paths
