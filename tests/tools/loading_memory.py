"""The peak of resident memory while a model loads, in a process of its own.

    python tests/tools/loading_memory.py torch FOLDER

prints, in bytes, by how much loading raises the peak, what the loaded model holds, its quantized weights, and its largest
tensor. Another folder beside it, FOLDER-small, is of the same dialect: loading that first imports everything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def resident(line: str) -> int:
    """A line of /proc/self/status ("VmRSS", "VmHWM"), in bytes."""
    (found,) = (text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(f"{line}:"))
    return int(found.split()[1]) * 1024


def measured(load: Callable[[Path], Any], folder: Path) -> dict[str, int]:
    """What loading a folder takes at its peak, and what the model then holds."""
    load(folder.with_name(f"{folder.name}-small"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    model = load(folder)
    peak = resident("VmHWM") - before
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"}
    quantized = [t.nbytes for m in model.modules() if type(m).__name__ == "ScaledWeight" for t in m.buffers()]
    sizes = [t.nbytes for t in tensors.values()]
    return {"peak": peak, "held": sum(sizes), "quantized": sum(quantized), "largest": max(sizes)}


def by_torch(folder: Path) -> Any:
    import torch
    from foreign_torch import on_meta

    import breccia_torch

    torch.set_num_threads(1)
    model = on_meta(folder)
    breccia_torch.load_model(model, folder)
    return model


def by_transformers(folder: Path) -> Any:
    import torch
    import transformers
    from foreign_torch import config_of

    from breccia_torch.hf import BrecciaConfig

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config_of(folder), quantization_config=BrecciaConfig()
    )


if __name__ == "__main__":
    print(json.dumps(measured({"torch": by_torch, "transformers": by_transformers}[sys.argv[1]], Path(sys.argv[2]))))
