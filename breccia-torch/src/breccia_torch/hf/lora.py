"""LoRA adapters of peft over quantized layers. Importing `breccia_torch.hf` imports this module where peft is installed.

from peft import LoraConfig, get_peft_model
import breccia_torch.hf

model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
"""

from __future__ import annotations

import warnings
from functools import wraps
from typing import Any

try:
    from peft.tuners import tuners_utils  # pyright: ignore
    from peft.tuners.lora import Linear, LoraModel  # pyright: ignore
    from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge  # pyright: ignore
except ImportError as e:
    raise ImportError(f"breccia_torch.hf.lora needs peft: pip install peft ({e}).", name=e.name, path=e.path) from e

import breccia
from breccia import ScaledTensor, UnsupportedError
from breccia.internal import once

from ..nn import ScaledLinear

#: Initializations that do not read the weight of the layer.
_INITIAL = (True, False, "gaussian", "orthogonal")
#: What selects all linear layers of a model, in peft.
_ALL = "all-linear"


@once
def teach_peft() -> None:
    """Let peft put LoRA layers over ScaledLinears, and select them by target_modules="all-linear"."""
    create, select = LoraModel._create_new_module, tuners_utils._maybe_include_all_linear_layers

    @wraps(create)
    def create_new_module(lora_config: Any, adapter_name: str, target: Any, **options: Any) -> Any:
        layer = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(layer, ScaledLinear):
            return LoraScaledLinear(target, adapter_name, config=lora_config, **options)
        return create(lora_config, adapter_name, target, **options)

    @wraps(select)
    def include_all_linear_layers(peft_config: Any, model: Any) -> Any:
        targets = getattr(peft_config, "target_modules", None)
        every = isinstance(targets, str) and targets.lower() == _ALL
        config = select(peft_config, model)
        if every:
            head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            layers = {name for name, m in model.named_modules() if isinstance(m, ScaledLinear) and m is not head}
            config.target_modules = {*config.target_modules, *layers}
        return config

    LoraModel._create_new_module = staticmethod(create_new_module)
    tuners_utils._maybe_include_all_linear_layers = include_all_linear_layers


def register(config: Any) -> Any:
    """Return the LoraConfig. Since `breccia_torch.hf` teaches peft, configs need no registration any more.

    Raises UnsupportedError for variants of LoRA that read the weight (DoRA, PiSSA and the like) or train the bias.
    """
    _check(config)
    return config


def _check(config: Any) -> None:
    initial = config.init_lora_weights
    if not any(initial is known or initial == known for known in _INITIAL):
        raise UnsupportedError(
            f"init_lora_weights={initial!r} reads the weight in high precision; over a quantized layer, use one of {_INITIAL}.",
            init_lora_weights=initial,
        )
    for name in ("use_dora", "lora_bias"):
        if getattr(config, name, False):
            raise UnsupportedError(f"{name}=True is not supported over a quantized layer; leave it out.", option=name)


class LoraScaledLinear(Linear):  # pyright: ignore[reportUntypedBaseClass]
    """peft's LoRA layer over a ScaledLinear, whose weight stays as it is.

    `merge` casts the sum of the decoded weight and the adapters under the weight's recipe, which rounds again; `unmerge`
    restores the weight of before, byte for byte.
    """

    def __init__(self, base_layer: Any, adapter_name: str, **options: Any) -> None:
        super().__init__(base_layer, adapter_name, **options)
        self.fan_in_fan_out = self.get_base_layer().contraction == -2
        self._unmerged: ScaledTensor | None = None

    def update_layer(self, adapter_name: str, *arguments: Any, **options: Any) -> None:
        _check(options["config"])
        super().update_layer(adapter_name, *arguments, **options)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters to the weight. Raises NonFiniteError for a NaN or Inf in the sum where `safe_merge` is set."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        weight = self.get_base_layer().weight
        unmerged = weight.tensor if self._unmerged is None else self._unmerged
        values = breccia.dequantize(unmerged)
        for name in (*self.merged_adapters, *names):
            values += self.get_delta_weight(name)
        if safe_merge and not values.isfinite().all():
            raise breccia.NonFiniteError(f"the weight with adapters {names} has a NaN or Inf; the adapters seem to be broken.")
        weight.take(breccia.cast(values, unmerged.recipe, axis=unmerged.axis).to_storage(unmerged.storage))
        self._unmerged = unmerged
        self.merged_adapters += names

    def unmerge(self) -> None:
        """Restore the weight of before the first merge."""
        if self._unmerged is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        weight = self.get_base_layer().weight
        weight.take(self._unmerged.to(weight.device))
        self.merged_adapters = []
        self._unmerged = None


teach_peft()
