"""What transformers computes on a CPU: python in_transformers.py JOBS; see jobs.py."""

from __future__ import annotations

import sys

import numpy as np
import torch
from jobs import done
from transformers import AutoModelForCausalLM


def log_probabilities(folder: str, prompts: list[list[int]], ranks: int, dtype: str) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor(prompts)).logits[:, -1].float(), -1).numpy()


done(sys.argv[1], log_probabilities)
