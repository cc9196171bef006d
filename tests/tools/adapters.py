"""LoRA adapters in PEFT's format, made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def factors(rows: int, columns: int, rank: int = 4, seed: int = 0, size: float = 0.0004) -> tuple[np.ndarray, np.ndarray]:
    """(lora_A, lora_B) of a layer; the change is zero in the first quarter of the columns, and in the first eight rows."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((rank, columns)), size * rng.standard_normal((rows, rank))
    a[:, : columns // 4], b[:8] = 0, 0
    return a.astype(np.float32), b.astype(np.float32)


def saved(folder: Path, layers: Mapping[str, tuple[np.ndarray, np.ndarray]], **config: Any) -> Path:
    """The folder of an adapter. layers: (lora_A, lora_B) by the names of layers."""
    folder.mkdir(exist_ok=True)
    tensors = {
        f"base_model.model.{name}.lora_{side}.weight": array
        for name, both in layers.items()
        for side, array in zip("AB", both, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    rank = len(next(iter(layers.values()))[0])
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "use_rslora": False, "modules_to_save": None, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
