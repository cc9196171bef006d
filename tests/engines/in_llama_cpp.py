"""What llama.cpp computes on a CPU: python in_llama_cpp.py JOBS; see jobs.py, and benchmarks/generators.py for its origin."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from jobs import done

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from generators import LlamaCpp


def log_probabilities(file: str, prompts: list[list[int]], ranks: int, dtype: str) -> np.ndarray:
    model, rows = LlamaCpp(Path(file), 1), []
    for prompt in prompts:
        model.clear()
        logits = model.logits(prompt).astype(np.float64)
        rows.append(logits - np.logaddexp.reduce(logits))
    return np.array(rows, np.float32)


done(sys.argv[1], log_probabilities)
