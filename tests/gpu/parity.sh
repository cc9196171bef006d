#!/usr/bin/env bash
# Counts the bytes in which a framework on CUDA differs from NumPy, on a machine with CUDA and that framework, against built
# wheels of breccia and of what its environment lacks:
#   pip wheel --no-deps -w .whl ./breccia-core ./breccia-torch ./breccia-jax
#   pip download --no-deps -d .whl ml_dtypes typer rich ...
#   bash tests/gpu/parity.sh .whl RESULTS [--framework jax] [other OPTIONS of benchmarks/bench_parity.py]
# Few values come first, so that a mistake shows within minutes. Tensors of more than 2^31 elements are cast on torch.
set -euo pipefail
wheels=$(realpath "${1:?the folder of the wheels}")
results=$(realpath -m "${2:?the folder of the results}")
beyond=(--beyond)
[[ " ${*:3} " == *" --framework jax "* ]] && beyond=()
cd "$(dirname "$0")/../.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install -q --no-index --no-deps --target "$site" "$wheels"/*.whl
export PYTHONPATH=$site PYTORCH_ALLOC_CONF=expandable_segments:True PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export XLA_PYTHON_CLIENT_PREALLOCATE=false # processes share the device
python3 benchmarks/bench_parity.py "${@:3}" --device cuda --values 100000 --turns 20 --recipes mxfp8
python3 benchmarks/bench_parity.py --device cuda "${beyond[@]}" --out "$results" "${@:3}"
