"""breccia's folders in vLLM: `vllm serve FOLDER` runs what `breccia convert` wrote, since its config.json names "breccia".

vLLM 0.32 calls `register` in each of its processes, by the entry point "breccia" of the group vllm.general_plugins.
"""

from __future__ import annotations

import importlib


def register() -> None:
    """Tell vLLM of the quantization method "breccia"."""
    importlib.import_module(f"{__name__}.config")  # the class registers itself; vLLM is imported no sooner
