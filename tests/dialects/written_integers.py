"""Checkpoints of integers that breccia writes, against the values that the libraries' own loaders decode.

    python tests/dialects/written_integers.py [--model FOLDER] [--only GLOB]      # `make dialects` does it

Converts a small random Llama, or a model that transformers loads, to the recipes that GPTQ, AWQ, AutoRound, HQQ and quanto
hold, loads the result with the library, and compares its values with `breccia.dequantize` by ==: in FP32, or after rounding to
the dtype in which the library computes. Prints a line for each (dialect, recipe), and exits with 1 unless all are equal.

Runs on a CPU, in the environment of requirements.txt with the unpacked sources that make.py names.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from make import load, source_folder, stems

sys.path += [str(Path(__file__).resolve().parents[1] / "tools")]
from golden_dialects import read
from written_record import record

import breccia
from breccia.backend import registry
from breccia.bridges import convert

#: The values of a folder, by name, in the dtype in which the library computes them.
Loader = Callable[[Path], Iterator[tuple[str, torch.Tensor]]]


def gptqmodel(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """GPTQModel.load, in the dtype of the config; scales are widened to FP32 before its own function decodes."""
    if (source := str(source_folder("gptqmodel"))) not in sys.path:
        sys.path.append(source)
    loader = importlib.import_module("gptqmodel.models.loader")
    loader.load_hf_tokenizer = lambda *_, **__: None  # the folder has none
    library = importlib.import_module("gptqmodel")
    unpacking = importlib.import_module("gptqmodel.quantization.awq.utils.packing_utils")
    config = json.loads((folder / "config.json").read_text())
    is_awq = config["quantization_config"]["quant_method"] == "awq"
    backend = library.BACKEND.AWQ_TORCH if is_awq else library.BACKEND.TORCH
    model = library.GPTQModel.load(str(folder), backend=backend, device="cpu", dtype=getattr(torch, config["dtype"]))
    for name, module in model.model.named_modules():
        if not hasattr(module, "qweight"):
            continue
        module.scales = module.scales.float()
        if is_awq:
            parts = (module.qweight, module.qzeros, module.scales)
            yield name, unpacking.dequantize_gemm(*parts, module.bits, module.group_size).T
        else:
            yield name, module.dequantize_weight().T


def transformers(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """AutoModelForCausalLM with auto-round's layers; the product of a layer with the identity, with scales in FP32."""
    model = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(str(folder), device_map="cpu")
    for name, module in model.named_modules():
        if hasattr(module, "qweight"):
            module.scales = module.scales.float()
            yield name, module(torch.eye(module.infeatures)).T


def hqq(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """HQQLinear.load_state_dict of each layer, computing in the dtype that the config names, else in FP32."""
    linear = importlib.import_module("hqq.core.quantize").HQQLinear
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    dtype = getattr(torch, settings.get("compute_dtype", "float32"))
    tensors, _ = load(folder)
    for stem in stems(tensors, "W_q"):
        layer = linear(None, None, compute_dtype=dtype, device="cpu", initialize=False)
        layer.load_state_dict({key.removeprefix(stem): part for key, part in tensors.items() if key.startswith(stem)})
        layer.compute_dtype = layer.meta["compute_dtype"] = dtype
        layer.meta |= {part: layer.meta[part].to(dtype) for part in ("scale", "zero")}
        yield stem.removesuffix("."), layer.dequantize()


def quanto(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """QuantizedModelForCausalLM.from_pretrained."""
    library = importlib.import_module("optimum.quanto")
    model = library.QuantizedModelForCausalLM.from_pretrained(str(folder))._wrapped
    for name, module in model.named_modules():
        if isinstance(module, library.nn.QModuleMixin):
            yield name, module.weight.dequantize()


LOADERS: dict[str, tuple[str, str, Loader]] = {
    "gptq": ("gptqmodel", "GPTQModel.load", gptqmodel),
    "gptq_v2": ("gptqmodel", "GPTQModel.load", gptqmodel),
    "awq": ("gptqmodel", "GPTQModel.load", gptqmodel),
    "auto_round": ("auto-round", "AutoModelForCausalLM", transformers),
    "hqq": ("hqq", "HQQLinear.load_state_dict", hqq),
    "quanto": ("optimum-quanto", "QuantizedModelForCausalLM", quanto),
}


#: Policies with two recipes, which configs name by modules. AWQ has one for all.
MIXED: dict[str, dict[str, str]] = {
    name: {"*.mlp.*": second, "*_proj.weight": first}
    for name, first, second in (
        ("gptq", "int4,symmetric=false", "int8,symmetric=false,group_size=32,scale_dtype=fp16"),
        ("gptq_v2", "int,bits=3", "int8,symmetric=false,scale_dtype=fp16"),
        ("auto_round", "int4,symmetric=false", "int8,symmetric=false,group_size=32,scale_dtype=fp16"),
        ("hqq", "int4,symmetric=false,group_size=64,offset=float_zero_point", "int8,symmetric=false,offset=float_zero_point"),
        ("quanto", "int_rounded,bits=4", "int8,scale_dtype=bf16"),
    )
}


def small_llama(folder: Path) -> Path:
    """A model with random weights, whose rows are groups of 128."""
    library = importlib.import_module("transformers")
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = library.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    library.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(str(folder))
    return folder


def compared(folder: Path, loader: Loader) -> tuple[int, int, str]:
    """(values, those that differ, the dtype of the comparison)."""
    ours = {name.removesuffix(".weight"): stored for name, stored in read(folder).items()}
    theirs = dict(loader(folder))
    differing, dtypes = len(ours.keys() ^ theirs.keys()), set[str]()
    for name in ours.keys() & theirs.keys():
        value = torch.from_numpy(np.array(breccia.dequantize(ours[name].tensor()), np.float32))
        found = theirs[name].detach()
        dtypes.add(str(found.dtype).removeprefix("torch."))
        differing += not torch.equal(value.to(found.dtype), found)
    return len(ours), differing, ", ".join(sorted(dtypes))


def main() -> int:
    """Exits with 1 unless all values are equal."""
    parser = argparse.ArgumentParser(description="Compare what breccia writes with what the libraries decode.")
    parser.add_argument("--model", type=Path, help="a folder that transformers loads; by default a small random Llama")
    parser.add_argument("--only", default="*", help="names of dialects, as a glob")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        model = options.model or small_llama(Path(parent, "model"))
        failed = [
            (dialect, recipe)
            for dialect in LOADERS
            if fnmatch.fnmatch(dialect, options.only)
            for recipe in [*registry().dialects[dialect].recipes, *([MIXED[dialect]] if dialect in MIXED else [])]
            if not is_equal(model, dialect, recipe, Path(parent, "written"))
        ]
    print(f"{len(failed)} failed")
    return int(bool(failed))


def is_equal(model: Path, dialect: str, recipe: str | dict[str, str], folder: Path) -> bool:
    """Converts, compares and prints the outcome."""
    library, called, loader = LOADERS[dialect]
    try:
        convert(model, folder, recipe, dialect=dialect, force=True)
        count, differing, dtype = compared(folder, loader)
        equal, outcome = count > 0 == differing, f"{count - differing} of {count} equal in {dtype}"
    except Exception as e:
        equal, outcome = False, f"FAILED {type(e).__name__}: {e}"
    made = source_folder(library).name if library == "gptqmodel" else f"{library} {importlib.metadata.version(library)}"
    asked = recipe if isinstance(recipe, str) else " and ".join(recipe.values())
    record(dialect, asked, "" if library == "gptqmodel" else library, f"{made}: {called}", "equal" if equal else "not equal")
    print(f"{dialect:10} {asked:75} {made:21} {called:28} {outcome}", flush=True)
    return equal


if __name__ == "__main__":
    sys.exit(main())
