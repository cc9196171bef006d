"""The benchmarks of a CUDA device: `python benchmarks/bench_gpu.py casts --help`, and so on for each of them.

A GPU lowers its clock under load, so all samples of a row are interleaved. `--device cpu` tries a benchmark without a GPU:
the host's clock replaces CUDA events.
"""

from bench_coded import coded
from bench_gpu_backward import backward
from bench_gpu_casts import casts
from bench_gpu_gpt import gpt
from bench_gpu_host import host
from bench_gpu_jax import jax
from bench_gpu_quantize import quantize
from bench_gpu_training import training
from bench_matmul import main as matmul
from bench_weight_only import main as weight_only
from harness.commands import run

if __name__ == "__main__":
    run(
        backward=backward,
        casts=casts,
        coded=coded,
        gpt=gpt,
        host=host,
        jax=jax,
        quantize=quantize,
        matmul=matmul,
        training=training,
        weight_only=weight_only,
    )
