"""Checkpoints that are written by a script, for bench_convert_large.py, and what a process takes while it converts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import breccia
from breccia_bridges.safetensors_writer import Writer

#: Rows and columns of the weights of DeepSeek-V3: of its first layers, of an expert, and of attention. Source: its config.json.
HIDDEN, DENSE, EXPERT, EXPERTS, VOCABULARY = 7168, 18432, 2048, 256, 129280
ATTENTION = {
    "q_a_proj": (1536, HIDDEN),
    "q_b_proj": (24576, 1536),
    "kv_a_proj_with_mqa": (576, HIDDEN),
    "kv_b_proj": (32768, 512),
    "o_proj": (HIDDEN, 16384),
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
SIDE = 128
#: Bytes of a file of the source.
SHARD = 4_300_000_000
_GB = 1e9
#: Seconds between two readings of a process's memory.
_PAUSE = 0.005


def _feed_forward(stem: str, width: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield f"{stem}.gate_proj.weight", (width, HIDDEN)
    yield f"{stem}.up_proj.weight", (width, HIDDEN)
    yield f"{stem}.down_proj.weight", (HIDDEN, width)


def _layers() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of the weights of DeepSeek-V3 after its embedding: a layer without experts, and layers with them."""
    for n in range(1000):
        stem = f"model.layers.{n}"
        for end in ("input_layernorm", "post_attention_layernorm"):
            yield f"{stem}.{end}.weight", "BF16", (HIDDEN,)
        for name, shape in ATTENTION.items():
            yield f"{stem}.self_attn.{name}.weight", "F8_E4M3", shape
        if n == 0:
            parts = [*_feed_forward(f"{stem}.mlp", DENSE)]
        else:
            yield f"{stem}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)
            every = (f"{stem}.mlp.{name}" for name in ("shared_experts", *(f"experts.{e}" for e in range(EXPERTS))))
            parts = [part for of in every for part in _feed_forward(of, EXPERT)]
        for name, shape in parts:
            yield name, "F8_E4M3", shape


def shapes(gigabytes: float, shrink: int = 1) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each tensor of a checkpoint of about that size, its embedding a tenth of it at most.

    shrink: by what all sides are divided, to try the script.
    """

    def side(length: int) -> int:
        return length if shrink == 1 or length == 1 else max(SIDE, length // shrink // SIDE * SIDE)

    rows = min(VOCABULARY, max(SIDE, int(gigabytes * _GB / 10 / 2 / side(HIDDEN)) // SIDE * SIDE))
    found: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("BF16", (rows, side(HIDDEN)))}
    size = 2 * rows * side(HIDDEN)
    for name, dtype, shape in _layers():
        if size >= gigabytes * _GB:
            break
        shape = tuple(map(side, shape))
        found[name] = dtype, shape
        size += int(np.prod(shape)) * (1 if dtype == "F8_E4M3" else 2)
        if dtype == "F8_E4M3":
            grid = tuple(-(-length // SIDE) for length in shape)
            found[f"{name}_scale_inv"] = "F32", grid
            size += 4 * int(np.prod(grid))
    return found


def deepseek(folder: Path, gigabytes: float, shrink: int = 1) -> int:
    """Write a checkpoint of DeepSeek-V3's shapes: FP8 in blocks of 128 x 128, cast from normal numbers. Returns its bytes."""
    rng = np.random.default_rng(0)
    tensors = shapes(gigabytes, shrink)
    files: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = 0
    for name, (dtype, shape) in tensors.items():
        if size > SHARD and not name.endswith("_scale_inv"):
            files.append({})
            size = 0
        files[-1][name] = dtype, shape
        size += int(np.prod(shape)) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
    normal = rng.standard_normal((2048, 2048), np.float32) * np.float32(0.02)
    codes = np.tile(breccia.cast(normal, "fp8_block,block_m=128").data.reshape(-1), 5).view(np.uint8)
    bf16 = np.tile(normal.astype(ml_dtypes.bfloat16).reshape(-1), 3).view(np.uint8)
    folder.mkdir(parents=True)
    where: dict[str, str] = {}
    for n, listed in enumerate(files, 1):
        path = folder / f"model-{n:05}-of-{len(files):05}.safetensors"
        where |= dict.fromkeys(listed, path.name)
        with Writer(path, listed, {"format": "pt"}) as writer:
            for name, (dtype, shape) in listed.items():
                if dtype == "F32":
                    writer.write(name, rng.uniform(1e-5, 1e-3, shape).astype(np.float32))
                    continue
                left, pool = int(np.prod(shape)) * (1 if dtype == "F8_E4M3" else 2), codes if dtype == "F8_E4M3" else bf16
                with writer.stream(name) as put:
                    while left:
                        start = 2 * int(rng.integers(0, normal.size // 2))
                        piece = pool[start : start + min(left, 1 << 24)]
                        put(piece)
                        left -= piece.size
    size = sum(path.stat().st_size for path in folder.iterdir())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}))
    config = {"model_type": "deepseek_v3", "torch_dtype": "bfloat16", "quantization_config": FP8}
    (folder / "config.json").write_text(json.dumps(config))
    return size


# -- small models that other converters read -----------------------------------------------------------------------------


def _llama(gigabytes: float, width: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a Llama's weights in BF16, by transformers' names."""
    layer = 2 * (4 * width * width + 3 * width * 4 * width)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (SIDE * 2, width), "model.norm.weight": (width,)}
    for n in range(max(1, round(gigabytes * _GB / layer))):
        stem = f"model.layers.{n}"
        shapes |= {f"{stem}.self_attn.{x}_proj.weight": (width, width) for x in "qkvo"}
        shapes |= {f"{stem}.mlp.{x}_proj.weight": (4 * width, width) for x in ("gate", "up")}
        shapes[f"{stem}.mlp.down_proj.weight"] = width, 4 * width
        shapes |= {f"{stem}.{x}_layernorm.weight": (width,) for x in ("input", "post_attention")}
    return {**shapes, "lm_head.weight": (SIDE * 2, width)}


def llama(folder: Path, gigabytes: float, width: int = 2048) -> int:
    """Write a Llama in BF16, of normal numbers, with a tokenizer of 256 words, as Hugging Face has it. Returns its bytes."""
    rng = np.random.default_rng(0)
    found = _llama(gigabytes, width)
    layers = sum(name.endswith("q_proj.weight") for name in found)
    folder.mkdir(parents=True)
    with Writer(folder / "model.safetensors", {name: ("BF16", shape) for name, shape in found.items()}, {"format": "pt"}) as w:
        for name, shape in found.items():
            numbers = rng.standard_normal(shape, np.float32) * np.float32(0.02)
            w.write(name, (numbers + (len(shape) == 1)).astype(ml_dtypes.bfloat16))
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "vocab_size": SIDE * 2}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64, "max_position_embeddings": 2048}
    words = ["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(SIDE * 2 - 3))]
    files: dict[str, Any] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            **sizes,
            **heads,
        },
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(words)}, "unk_token": "<unk>"},
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return (folder / "model.safetensors").stat().st_size


#: Parts of the names of transformers, and of GGUF.
_OF_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "_proj": "",
}


def gguf(path: Path, gigabytes: float, width: int = 2048) -> int:
    """Write the same in GGUF, matrices in BF16 and vectors in FP32. Returns its bytes."""
    import gguf as library

    rng = np.random.default_rng(0)
    found = _llama(gigabytes, width)
    writer = library.GGUFWriter(path, "llama")
    writer.add_block_count(sum(name.endswith("q_proj.weight") for name in found))
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(4 * width)
    writer.add_head_count(width // 64)
    writer.add_head_count_kv(width // 64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(library.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(SIDE * 2 - 3))])
    writer.add_token_scores([-float(n) for n in range(SIDE * 2)])
    writer.add_token_types([2, 3, 3, *[1] * (SIDE * 2 - 3)])
    for name, shape in found.items():
        for part, other in _OF_GGUF.items():
            name = name.replace(part, other)
        numbers = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        if len(shape) == 1:
            writer.add_tensor(name, numbers + 1)
        else:
            bits = numbers.astype(ml_dtypes.bfloat16).view(np.uint8)
            writer.add_tensor(name, bits, raw_dtype=library.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.stat().st_size


def larger(path: Path, like: Path, width: int, layers: int) -> None:
    """Write a Llama in GGUF with the tokenizer and the types of tensors of another file, of normal numbers.

    It has the proportions of Llama 3.2 1B: heads of 64, a quarter as many for keys and values, and feed-forward layers four
    times as wide. All layers have the same numbers.
    """
    import gguf as library

    reader = library.GGUFReader(like)
    changed = {
        "llama.block_count": layers,
        "llama.embedding_length": width,
        "llama.feed_forward_length": 4 * width,
        "llama.attention.head_count": width // 64,
        "llama.attention.head_count_kv": width // 256,
        "llama.rope.dimension_count": 64,
    }
    writer = library.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, changed.get(name, field.contents()), field.types[0], inner)
    rng = np.random.default_rng(0)
    keys = width // 4
    shapes = {"attn_q": (width, width), "attn_k": (keys, width), "attn_v": (keys, width), "attn_output": (width, width)}
    shapes |= {"ffn_gate": (4 * width, width), "ffn_up": (4 * width, width), "ffn_down": (width, 4 * width)}
    for tensor in reader.tensors:
        block, _, part = tensor.name.rpartition("blk.")[2].partition(".")
        if block.isdecimal() and int(block):
            continue  # layers are those of the first
        name = part.removesuffix(".weight") if block.isdecimal() else tensor.name.removesuffix(".weight")
        if len(tensor.shape) == 1:
            stored = np.ones(width, np.float32)
        else:
            shape = shapes.get(name, (int(tensor.shape[1]), width))
            numbers = rng.standard_normal(shape, np.float32) * np.float32(0.02)
            stored = library.quants.quantize(numbers, tensor.tensor_type)
        for n in range(layers if block.isdecimal() else 1):
            own = f"blk.{n}.{part}" if block.isdecimal() else tensor.name
            writer.add_tensor(own, stored, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- processes ---------------------------------------------------------------------------------------------------------


class Spent(NamedTuple):
    """Seconds of the clock and of the processors, and the memory of a process that is no page of a file, at each moment."""

    seconds: float
    cpu: float
    moments: list[tuple[float, int]]

    @property
    def peak(self) -> int:
        return max((size for _, size in self.moments), default=0)


def spent(command: list[str], cores: int | None = None, watch: bool = False) -> Spent:
    """Run a program, on so many cores. Raises RuntimeError with what it said, if it fails."""
    allowed = sorted(os.sched_getaffinity(0))[:cores] if cores else None
    moments: list[tuple[float, int]] = []
    before, start = os.times(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            stdout=said,
            stderr=subprocess.STDOUT,
            preexec_fn=(lambda: os.sched_setaffinity(0, allowed)) if allowed else None,
        )
        while watch and process.poll() is None:
            moments.append((time.perf_counter() - start, anonymous(process.pid)))
            time.sleep(_PAUSE)
        process.wait()
        taken, after = time.perf_counter() - start, os.times()
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{Path(command[0]).name} failed with status {process.returncode}: {said.read()[-600:].strip()}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Spent(taken, cpu, moments)


def anonymous(pid: int) -> int:
    """RssAnon + RssShmem of a process, in bytes; 0 where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(1024 * int(kilobytes) for kilobytes in re.findall(r"^(?:RssAnon|RssShmem):\s*(\d+) kB$", status, re.MULTILINE))
