"""What MLX-LM computes: python in_mlx_lm.py JOBS; see jobs.py."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from jobs import done
from mlx_lm.utils import load_model


def log_probabilities(folder: str, prompts: list[list[int]], ranks: int, dtype: str) -> np.ndarray:
    model, _ = load_model(Path(folder))
    logits = model(mx.array(prompts))[:, -1].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, -1, keepdims=True))


done(sys.argv[1], log_probabilities)
