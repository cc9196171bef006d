"""Marks: what config.json says of a model of transformers, in whichever way it came to hold quantized layers.

Two methods of PreTrainedModel are wrapped, for all models. `save_pretrained` marks a model that holds quantized layers.
The loading of weights refuses files with quantized weights and no mark, for which transformers would make random layers.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import modeling_utils

from breccia import ScalingRecipe, UnsupportedError, bridges
from breccia.backend import targets
from breccia.internal import abbreviated, once

from ..nn import STATE, ScaledLinear, ScaledWeight

#: The quantizer of breccia, and what gives it to a model.
_QUANTIZER = "breccia_torch.hf.quantizer:BrecciaHfQuantizer"
_ATTACH = "breccia_torch.hf.quantizer:attach"


@once
def watch() -> None:
    """Wrap the two methods."""
    model: Any = modeling_utils.PreTrainedModel
    save, load = model.save_pretrained, model._load_pretrained_model

    @wraps(save)
    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *arguments: Any, **options: Any) -> Any:
        if not any(isinstance(module, ScaledWeight) for module in self.modules()):
            return save(self, save_directory, *arguments, **options)
        mark(self)
        result = save(self, save_directory, *arguments, **options)
        bridges.refuse_in_transformers(save_directory)  # tells transformers without this module to refuse the folder
        return result

    @wraps(load)
    def load_pretrained(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any, **named: Any) -> Any:
        quantizer = getattr(load_config, "hf_quantizer", None)
        if not isinstance(quantizer, targets.load(_QUANTIZER)):
            for file in checkpoint_files or ():
                refuse_unmarked(file)
        return load(model, state_dict, checkpoint_files, load_config, *rest, **named)

    model.save_pretrained, model._load_pretrained_model = save_pretrained, staticmethod(load_pretrained)


def mark(model: Any) -> None:
    """Give the model the quantizer and the `quantization_config` of the quantized layers that it holds.

    Raises UnsupportedError for a model that another library has quantized, too.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not isinstance(quantizer, targets.load(_QUANTIZER)):
        method = getattr(quantizer.quantization_config, "quant_method", type(quantizer).__name__)
        raise UnsupportedError(
            f"save_pretrained: the model holds layers of breccia, and is quantized by {getattr(method, 'value', method)}; "
            "config.json names one method. Save it with breccia_torch.save_model."
        )
    targets.load(_ATTACH)(model)


def fields_of(model: nn.Module) -> dict[str, Any]:
    """The fields of the BrecciaConfig of a model that holds quantized layers: the recipes that most of them have."""
    recipes: Counter[ScalingRecipe] = Counter()
    inputs: dict[str, ScalingRecipe | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, ScaledWeight):
            recipes[module.recipe] += 1
        elif isinstance(module, ScaledLinear):
            inputs[name] = module.activation
    usual = Counter(inputs.values()).most_common(1)[0][0] if inputs else None
    others = {name: recipe for name, recipe in inputs.items() if recipe != usual}
    return {"recipe": recipes.most_common(1)[0][0], "activation": usual, "activations": others or None}


def refuse_unmarked(file: str | os.PathLike[str]) -> None:
    """Raise UnsupportedError if a safetensors file, whose config.json names no method, has weights that breccia quantized."""
    if Path(file).suffix != ".safetensors":
        return
    with safe_open(file, framework="pt") as opened:
        names = list(opened.keys())
        described = "breccia_version" in (opened.metadata() or {})
    known = set(names)
    ours = [n.removesuffix(".data") for n in names if n.endswith(".data") and f"{n.removesuffix('data')}scale" in known]
    if ours and (described or any(f"{name}.{STATE}" in known for name in ours)):
        raise UnsupportedError(
            f"{file} has weights that breccia quantized ({abbreviated(ours)}), and the config.json beside it has no "
            "quantization_config: transformers would make random layers. Load the file with breccia_torch.load_model, and save "
            "the model again.",
            file=os.fspath(file),
        )
