"""Checkpoints that `convert(..., dialect=)` writes, opened by the libraries' own loaders: do they decode the same values?

    python tests/dialects/written_live.py [--only GLOB] [--dtype bfloat16]      # in the environment of requirements.txt

For each dialect and recipe, it converts a small random Llama, and loads it with `mlx_lm.load` or transformers'
`from_pretrained`. It prints the class of the library's layers, whether they decode every weight to the FP32 values that breccia
has for it, bit for bit, and what came of the model's logits. Values that a library gives in BF16 are compared after the same
rounding. Exits with 1 if any differs.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import numpy as np  # noqa: E402
import torch  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from dialect_values import to_bf16  # noqa: E402
from golden_dialects import read  # noqa: E402
from written_record import record  # noqa: E402

import breccia  # noqa: E402
from breccia.backend import registry  # noqa: E402
from breccia.bridges import convert  # noqa: E402

IDS = list(range(1, 128, 5))
#: More recipes than a dialect lists: blocks in two directions, and whole rows in more than one class.
OTHERS = {"torchao": ("fp8_block,block_m=128", "fp8_row,fp8_format=E4M3FNUZ", "int8,signed=false,symmetric=false")}


class Layer(NamedTuple):
    """A quantized layer that a library loaded.

    kind: the library's class. values: what it decodes, as FP32; None where it has no decoder on a CPU. rounded: to BF16.
    """

    kind: str
    values: np.ndarray | None
    rounded: bool = False


class Opened(NamedTuple):
    """Its layers, by the names of their modules, and what computes its logits."""

    layers: dict[str, Layer]
    logits: Callable[[], np.ndarray]


def make_source(folder: Path, dtype: str) -> None:
    """A random Llama of two layers, with a tokenizer of numbers."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizers = importlib.import_module("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(128)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1").save_pretrained(folder)


# ------------------------------------------------------------------------------------------------ what opens it


def by_mlx(folder: Path, _: str) -> Opened:
    """`mlx_lm.load`."""
    mx = importlib.import_module("mlx.core")
    model, _ = importlib.import_module("mlx_lm").load(str(folder))
    layers: dict[str, Layer] = {}
    for name, layer in model.named_modules():
        if "scales" in layer:
            options = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
            # Mode "affine" computes in the dtype of the scales.
            parts = [layer[part].astype(mx.float32) for part in ("scales", "biases") if part in layer]
            values = mx.dequantize(layer.weight, *(parts if len(parts) > 1 else [layer.scales]), **options, dtype=mx.float32)
            layers[name] = Layer(f"{type(layer).__name__} {layer.mode}", np.array(values))
    return Opened(layers, lambda: np.array(model(mx.array([IDS])).astype(mx.float32)))


def by_transformers(folder: Path, dtype: str) -> Opened:
    """`AutoModelForCausalLM.from_pretrained`."""
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=getattr(torch, dtype))

    def logits() -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([IDS])).logits.float().numpy()

    modules = {name: decoded(module) for name, module in model.named_modules() if hasattr(module, "weight")}
    return Opened({name: layer for name, layer in modules.items() if layer}, logits)


def decoded(module: Any) -> Layer | None:
    """A module with a quantized weight; None for others."""
    bnb = importlib.import_module("bitsandbytes.functional")
    weight, kind = module.weight, type(module.weight).__name__
    if kind == "Int4Tensor":
        return Layer(kind, None)
    if type(weight).__module__.startswith("torchao"):
        values = weight.dequantize(*([] if kind == "IntxUnpackedToInt8Tensor" else [torch.float32]))
    elif kind == "Params4bit":
        values = bnb.dequantize_4bit(weight.data, weight.quant_state)
    elif kind == "Int8Params":
        values = bnb.int8_vectorwise_dequant(weight.data, weight.SCB)
    else:
        return None
    return Layer(kind, values.float().numpy(), values.dtype == torch.bfloat16)


LOADERS: dict[str, tuple[str, Callable[[Path, str], Opened]]] = {
    "mlx": ("mlx_lm.load", by_mlx),
    "bitsandbytes": ("from_pretrained", by_transformers),
    "torchao": ("from_pretrained", by_transformers),
}


# ------------------------------------------------------------------------------------------------ comparing


def checked(source: Path, folder: Path, dialect: str, spec: str, dtype: str) -> tuple[str, str, str]:
    """(the library's class, whether it decodes the same values, what came of its logits) of a conversion."""
    convert(source, folder, spec, dialect=dialect, force=True)
    ours = {name.removesuffix(".weight"): stored.tensor() for name, stored in read(folder).items()}
    opened = LOADERS[dialect][1](folder, dtype)
    kinds = " ".join(sorted({layer.kind for layer in opened.layers.values()}))
    try:
        logits = opened.logits()
        ran = "logits" if np.isfinite(logits).all() else "logits not finite"
    except Exception as e:
        ran = f"no logits: {type(e).__name__} {str(e).splitlines()[0][:80]}"
    if not ours or opened.layers.keys() != ours.keys():
        return kinds, f"DIFFERENT: other layers: {sorted(opened.layers.keys() ^ ours.keys())[:4]}", ran
    for name, layer in opened.layers.items():
        values = np.asarray(breccia.dequantize(ours[name]), np.float32)
        values = to_bf16(values) if layer.rounded else values
        if layer.values is None:
            return kinds, "opened, no decoder", ran
        if values.shape != layer.values.shape or not np.array_equal(values.view(np.uint32), layer.values.view(np.uint32)):
            return kinds, f"DIFFERENT: {name}", ran
    rounded = any(layer.rounded for layer in opened.layers.values())
    return kinds, f"equal, {len(ours)} layers{' in BF16' if rounded else ''}", ran


def main() -> int:
    """Exits with 1 if a library decodes other values."""
    parser = argparse.ArgumentParser(description="Open what breccia converts with the libraries' own loaders.")
    parser.add_argument("--only", default="*", help="names of dialects, as a glob")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the model")
    options = parser.parse_args()
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        make_source(source, options.dtype)
        for dialect in fnmatch.filter(LOADERS, options.only):
            for spec in (*registry().dialects[dialect].recipes, *OTHERS.get(dialect, ())):
                try:
                    said = checked(source, Path(folder) / "written", dialect, spec, options.dtype)
                except Exception as e:
                    said = ("", f"DIFFERENT: {type(e).__name__}: {e}", "")
                differ += said[1].startswith("DIFFERENT")
                kinds, equal, ran = said
                library = {"mlx": "mlx-lm"}.get(dialect, dialect)
                record(dialect, spec, library, LOADERS[dialect][0], equal.partition(",")[0].replace("DIFFERENT", "not equal"))
                print(f"{dialect:13} {spec:62} {LOADERS[dialect][0]:16} {kinds:24} {equal:26} {ran}", flush=True)
    print(f"{differ} differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
