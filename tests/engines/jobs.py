"""The work of an engine's process: models to load, and prompts to run.

JOBS is a JSON file, [[a model's path, ranks, dtype, [[token, ...], ...], a result's path], ...]. A result is an array of FP32
log-probabilities of the token after each prompt, shape (prompts, vocabulary), in NumPy's format; beside it, a text file has the
error of an engine that does not load the model. All prompts are equally long.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np


def done(path: str, log_probabilities: Callable[[str, list[list[int]], int, str], np.ndarray]) -> None:
    """Run the jobs of a file. ranks: processes that share each layer (tensor parallelism). dtype: of the engine."""
    for model, ranks, dtype, prompts, result in json.loads(Path(path).read_text()):
        try:
            rows = log_probabilities(model, prompts, ranks, dtype)
        except Exception:
            Path(result).with_suffix(".txt").write_text(traceback.format_exc())
        else:
            np.save(result, rows)
