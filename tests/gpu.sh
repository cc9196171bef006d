#!/usr/bin/env bash
# Runs the GPU suite on a machine with CUDA, torch or JAX, and pytest, against built wheels and nothing else of this repository:
#   pip wheel --no-deps -w .whl ./breccia-core ./breccia-torch ./breccia-jax ./breccia-bridges ./breccia-triton && bash tests/gpu.sh .whl
set -euo pipefail
wheels=$(realpath "${1:?the folder of the wheels}")
cd "$(dirname "$0")/.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install -q --no-index --no-deps --target "$site" "$wheels"/*.whl
export PYTHONPATH=$site XLA_PYTHON_CLIENT_PREALLOCATE=false # torch and JAX share the device
mapfile -t files < <(grep -lE "on_cuda|mark\.gpu" tests/test_*.py) # others may need what is not there
python3 -m pytest -p no:cacheprovider -q -m gpu "${files[@]}" "${@:2}"
