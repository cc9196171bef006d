"""GGUF files that breccia writes, against what the library gguf decodes and llama.cpp computes.

    BRECCIA_LLAMA=FOLDER python tests/dialects/written_gguf.py [FILE.gguf or FOLDER ...]

Files are rewritten: keys and bytes stay. Folders of models, or small random ones of each architecture, are written with each
recipe: the library decodes the values that breccia's own files have, under the names of its own map, with the rows of q and k
in the order that is written out here; and llama.cpp, where BRECCIA_LLAMA names it (see benchmarks/generators.py), chooses the
first tokens that transformers does with the decoded weights. Prints a line for each; exits with 1 where anything differs.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from written_record import record

import breccia
from breccia.bridges import convert, load_checkpoint
from breccia_bridges.gguf_keys import MODELS, SCALED

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
Q8_0, Q4_0, Q4_K = "int8,group_size=32,scale_dtype=fp16", "int4,group_size=32", "gguf,type=Q4_K"
RECIPES = {
    "fp32": "fp32",
    "Q8_0": Q8_0,
    "Q4_0": Q4_0,
    "Q4_K": Q4_K,
    "NVFP4": "nvfp4,two_level=false",
    "NVFP4 with a scale": "nvfp4",
}
_SMALL: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "dtype": "bfloat16"},
}
_EXPERTS = {"moe_intermediate_size": 256, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
#: What the config of a type has beside it.
_BESIDE: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 64, "sliding_window": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64, "sliding_window": 64, "num_hidden_layers": 7},  # the sixth attends to all
    "mixtral": {**_EXPERTS, "sliding_window": None},
    "mistral": {"sliding_window": None},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 256},
    "qwen3_moe": _EXPERTS,
}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}
PROMPTS = [[1, 5, 77, 300], [2, 9, 9, 250, 4], [*range(3, 60, 2)], [8], [11, 12], [400, 30, 2], [*range(300, 9, -9)], [50, 99]]


def rewritten(file: Path, new: Path) -> str:
    """Rewrite a file; says what differs."""
    convert(file, new, "none", dialect="gguf", force=True)
    before, after = ({key: _bits(one) for key, one in gguf.GGUFReader(path).fields.items()} for path in (file, new))
    tensors = [
        {one.name: (one.tensor_type, one.data.tobytes()) for one in gguf.GGUFReader(path).tensors} for path in (file, new)
    ]
    return "" if before == after and tensors[0] == tensors[1] else "keys or bytes differ"


def _bits(field: Any) -> tuple[Any, ...]:
    return field.types, [bytes(field.parts[n]) for n in field.data]


def small(kind: str, folder: Path, **more: Any) -> Path:
    """A random model of a type; its weights are large, so that one token is far ahead."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **_SMALL | _BESIDE.get(kind, {}) | more)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data * 3 if parameter.ndim > 1 else parameter.data + torch.randn_like(parameter.data) / 8
    model.save_pretrained(folder)
    return folder


def written(folder: Path, recipe: Any, work: Path, tokens: Callable[[Path, list[list[int]]], list[int]] | None) -> str:
    """Write a folder as GGUF; says what differs. tokens: the first one that llama.cpp chooses after each prompt."""
    file, own, dense = work / "model.gguf", work / "own", work / "dense"
    config = AutoConfig.from_pretrained(folder)
    if recipe == Q4_K and config.hidden_size % 256:  # which its blocks divide
        recipe = {"*down_proj*": Q4_K, "default": Q4_0}
    convert(folder, file, recipe, dialect="gguf", force=True)
    convert(folder, own, recipe, force=True)
    values = load_checkpoint(own)
    found = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(file).tensors}
    wrong = [name for name, value in values.items() if not _is_there(name, value, found, config)]
    if wrong:
        return f"{len(wrong)} of {len(values)} values differ: {wrong[:3]}"
    if tokens is None:
        return ""
    convert(own, dense, "fp32", force=True)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        best = [model(torch.tensor([prompt])).logits[0, -1].topk(2) for prompt in PROMPTS]
    # Programs round activations in other ways, which decides where two tokens are close.
    clear = sorted(range(len(PROMPTS)), key=lambda n: float(best[n].values[1] - best[n].values[0]))[: len(PROMPTS) // 2]
    theirs, chosen = [int(best[n].indices[0]) for n in clear], tokens(file, [PROMPTS[n] for n in clear])
    return "" if chosen == theirs else f"llama.cpp chooses {chosen}, transformers {theirs}"


def _is_there(name: str, value: Any, found: dict[str, np.ndarray], config: Any) -> bool:
    """Has the file a value, by the library's own map of names and the order of rows that llama.cpp has?"""
    number = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[MODELS[config.model_type].name]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    there = names.get_name(re.sub(r"experts\.\d+\.", "experts.", name), (".weight", ".bias")) or ""
    wanted = np.asarray(breccia.dequantize(value) if isinstance(value, breccia.ScaledTensor) else value, np.float32)
    one = found.get(there)
    if one is None:
        return False
    if experts := re.search(r"experts\.(\d+)\.", name):
        one = one[int(experts[1])]
    if (scale := found.get(there.removesuffix("weight") + "scale")) is not None:
        one = one * scale.reshape(-1)[int(experts[1]) if experts else 0]
    if MODELS[config.model_type].name == "llama" and re.search("[qk]_proj", name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        half = len(wanted) // heads // 2
        rows = itertools.product(range(heads), range(half), range(2))
        wanted = wanted[[(head * 2 + side) * half + pair for head, pair, side in rows]]
    if "gemma" in config.model_type and "norm" in name:
        wanted = wanted + np.float32(1)
    return np.array_equal(one.reshape(wanted.shape), wanted)


def by_llama_cpp(file: Path, prompts: list[list[int]]) -> list[int]:
    """The first token after each prompt, chosen in a process of its own, which a file that llama.cpp refuses may end."""
    command = [sys.executable, __file__, "--tokens", str(file), json.dumps(prompts)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return [-said.returncode] if said.returncode else json.loads(said.stdout)


def main() -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokens = by_llama_cpp if os.environ.get("BRECCIA_LLAMA") else None
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        work, given = Path(name), [Path(one) for one in sys.argv[1:]]
        folders = [one for one in given if one.is_dir()]
        if not given:
            folders += [small(kind, work / kind) for kind in MODELS]
            folders.append(small("llama", work / "llama3", rope_parameters=_LLAMA3))
        runs: list[tuple[str, str, Callable[[], str]]] = []
        for file in (one for one in given if one.is_file()):
            runs.append((file.name, "as it is", partial(rewritten, file, work / "again.gguf")))
        for folder, (title, recipe) in itertools.product(folders, RECIPES.items()):
            kind = AutoConfig.from_pretrained(folder).model_type
            if recipe != "nvfp4" or MODELS[kind].name in SCALED:
                runs.append((folder.name, title, partial(written, folder, recipe, work, tokens)))
        for name, title, run in runs:
            print(name, title, wrong := run() or "same", flush=True)
            if name == "llama":
                record("gguf", title, "gguf", "GGUFReader", "equal" if wrong == "same" else "not equal")
            failures += wrong != "same"
    return min(failures, 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tokens"]:
        sys.path.append(str(BENCHMARKS))
        model = importlib.import_module("generators").in_llama_cpp(Path(sys.argv[2]), 2)
        print([model.generate(prompt, 1).tokens[0] for prompt in json.loads(sys.argv[3])])
        sys.exit()
    sys.exit(main())
