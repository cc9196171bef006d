"""LoRA adapters in PEFT's format: of each layer, the low-rank matrix that is added to its weight.

Source: peft 0.21 (`LoraConfig`, `LoraLayer.get_delta_weight`, `get_peft_model_state_dict`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from breccia import CorruptFileError, NonFiniteError, UnsupportedError
from breccia.internal import abbreviated, parsed_json, printable, unique_keys

from .measure import FLOATING, FileTensor
from .safetensors_file import Container

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: "base_model.model.<layer>.lora_A.weight"; with an adapter's name before "weight" where PEFT has not removed it.
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
#: Values of `init_lora_weights` that leave the weights of the model as they are.
_INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")
#: Settings under which an adapter is more than a matrix for each layer, and what they are.
_OTHERS = {
    "use_dora": "DoRA also scales the columns of the weight",
    "modules_to_save": "these modules are trained whole, and replace those of the model",
    "lora_bias": "the bias of these layers is trained too",
    "layer_replication": "the model with the adapter has more layers than the checkpoint",
    "target_parameters": "the adapter changes parameters of experts, which are stacks of matrices",
    "trainable_token_indices": "rows of the embedding are trained too",
    "alora_invocation_tokens": "the adapter applies to a part of the tokens",
}
#: The only setting that begins so and is handled.
_SWITCH, _RANK_STABILIZED = "use_", "use_rslora"
_MERGE_IN_PEFT = "Merge it in PEFT into the model in high precision, and convert that."


@dataclass(frozen=True, eq=False)
class LowRank:
    """A change of a matrix, b @ a. a: (rank, columns); b: (rows, rank), times the scale of the adapter; both FP64."""

    a: np.ndarray
    b: np.ndarray

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.b), self.a.shape[1]

    @property
    def mT(self) -> LowRank:
        """The change of the transposed matrix."""
        return LowRank(self.b.T, self.a.T)

    def matrix(self) -> np.ndarray:
        """The change, FP32: products in FP64, rounded once."""
        return (self.b @ self.a).astype(np.float32)


@dataclass(frozen=True)
class Adapter:
    """An adapter. layers: the change of the weight of each layer, (out_features, in_features), by the layer's name.

    is_turned: whether weights are stored as (in_features, out_features).
    """

    path: Path
    layers: Mapping[str, LowRank]
    is_turned: bool

    @classmethod
    def open(cls, path: Path) -> Adapter:
        """Read the folder of an adapter.

        Raises FileNotFoundError for a folder without one, UnsupportedError for variants of LoRA that do more than add a
        low-rank matrix to weights (DoRA, modules_to_save, PiSSA, ...), CorruptFileError for matrices that do not fit their
        config or each other, and NonFiniteError for NaN or Inf in them.
        """
        missing = [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{path} lacks {' and '.join(missing)}; give the folder that PEFT's save_pretrained made of an adapter."
            )
        config = _config(path / CONFIG)
        factors: dict[str, dict[str, np.ndarray]] = {}
        for name, side, array in _matrices(path / WEIGHTS):
            factors.setdefault(name, {})[side] = array
        return cls(
            path, {name: _change(path, config, name, of) for name, of in factors.items()}, bool(config.get("fan_in_fan_out"))
        )


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config: Any = parsed_json(path.read_text(encoding="utf-8"), unique_keys)
    except ValueError as e:
        raise CorruptFileError(f"{path} is not readable ({e}); save the adapter again.") from e
    if not isinstance(config, Mapping) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, Mapping) else None
        raise UnsupportedError(f"{path}: peft_type is {kind!r}, and adapters of LORA are merged. {_MERGE_IN_PEFT}", found=kind)
    others = {key: value for key, value in config.items() if value and (key in _OTHERS or _is_unknown_switch(key))}
    for key, value in others.items():
        why = _OTHERS.get(key, "breccia does not know this variant of LoRA")
        raise UnsupportedError(f"{path}: {key}={value!r}: {why}. {_MERGE_IN_PEFT}", option=key)
    initial = config.get("init_lora_weights")
    if initial not in _INITIAL:
        raise UnsupportedError(
            f"{path}: init_lora_weights={initial!r}: this initialization changes the weights that the adapter is added to, so "
            "it does not fit those of the checkpoint. Save it with PEFT's path_initial_model_for_weight_conversion.",
            init_lora_weights=initial,
        )
    return config


def _is_unknown_switch(key: str) -> bool:
    return key.startswith(_SWITCH) and key != _RANK_STABILIZED


def _matrices(path: Path) -> list[tuple[str, str, np.ndarray]]:
    """(layer, "A" or "B", FP64 matrix) of each tensor of the file."""
    file = Container(path)
    parts = {key: _KEY.fullmatch(key) for key in file.entries}
    others = [key for key, found in parts.items() if found is None]
    if others or not parts:
        what = f"{abbreviated(others)}, which are no lora_A or lora_B of a linear layer" if others else "no tensor"
        raise UnsupportedError(f"{path} has {what}. {_MERGE_IN_PEFT}", names=others)
    matrices: list[tuple[str, str, np.ndarray]] = []
    for key, found in parts.items():
        assert found is not None
        entry = file.entries[key]
        if entry.dtype not in FLOATING or len(entry.shape) != 2:
            raise UnsupportedError(
                f"{path}: {printable(key)} is {entry.dtype} of shape {list(entry.shape)}, and adapters of linear layers have "
                f"floating matrices. {_MERGE_IN_PEFT}",
                name=key,
            )
        numbers = FileTensor(file.view(key).reshape(entry.shape), entry.dtype)
        array = numbers.values((slice(0, 1), slice(0, entry.shape[0])))[0].astype(np.float64)
        if not np.isfinite(array).all():
            raise NonFiniteError(f"{path}: {printable(key)} has NaN or Inf; the training has failed.", name=key)
        matrices.append((found["layer"], found["side"], array))
    return matrices


def _change(path: Path, config: Mapping[str, Any], layer: str, factors: Mapping[str, np.ndarray]) -> LowRank:
    if factors.keys() != {"A", "B"} or factors["A"].shape[0] != factors["B"].shape[1]:
        found = {f"lora_{side}": array.shape for side, array in sorted(factors.items())}
        raise CorruptFileError(
            f"{path}: {printable(layer)} has {found}, and needs lora_A of (rank, inputs) and lora_B of (outputs, rank). Save "
            "the adapter again.",
            name=layer,
        )
    rank = len(factors["A"])
    expected = _of_layer(config.get("rank_pattern"), layer, config.get("r"))
    alpha = _of_layer(config.get("alpha_pattern"), layer, config.get("lora_alpha"))
    if rank != expected or isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CorruptFileError(
            f"{path}: {printable(layer)} has rank {rank}, and its config says r={expected!r}, lora_alpha={alpha!r}. The two "
            "files are of different adapters.",
            name=layer,
        )
    scale = alpha / (math.sqrt(rank) if config.get(_RANK_STABILIZED) else rank)
    return LowRank(factors["A"], factors["B"] * scale)


def _of_layer(pattern: Mapping[str, Any] | None, layer: str, default: Any) -> Any:
    """The value of the first key of a pattern that matches a layer's name, as `peft.utils.get_pattern_key` finds it."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", layer):
            return value
    return default
