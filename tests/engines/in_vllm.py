"""What vLLM computes on a CPU: python in_vllm.py JOBS; see jobs.py."""

from __future__ import annotations

import os
import sys

#: Each rank has a core of its own; without ranks, the model is in this process.
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}

import numpy as np
from jobs import done


def log_probabilities(folder: str, prompts: list[list[int]], ranks: int, dtype: str) -> np.ndarray:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(ranks > 1))
    from vllm import LLM, SamplingParams

    given = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": dtype, "max_model_len": 128, "max_num_seqs": 4}
    llm = LLM(model=folder, max_logprobs=-1, tensor_parallel_size=ranks, **given)
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    rows = []
    for result in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], one, use_tqdm=False):
        (found,) = result.outputs[0].logprobs
        rows.append([found[token].logprob for token in range(len(found))])
    return np.array(rows, np.float32)


if __name__ == "__main__":  # the processes of ranks import this file again
    done(sys.argv[1], log_probabilities)
