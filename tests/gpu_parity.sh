#!/usr/bin/env bash
# Counts the bytes in which torch on CUDA differs from NumPy, on a machine with CUDA and torch, against built wheels of breccia
# and of what its environment lacks:
#   pip wheel --no-deps -w .whl ./breccia-core ./breccia-torch && pip download --no-deps -d .whl ml_dtypes typer rich ...
#   bash tests/gpu_parity.sh .whl RESULTS [OPTIONS of benchmarks/bench_parity.py]
# Few values come first, so that a mistake shows within a minute.
set -euo pipefail
wheels=$(realpath "${1:?the folder of the wheels}")
results=$(realpath -m "${2:?the folder of the results}")
cd "$(dirname "$0")/.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install -q --no-index --no-deps --target "$site" "$wheels"/*.whl
export PYTHONPATH=$site PYTORCH_ALLOC_CONF=expandable_segments:True PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
python3 benchmarks/bench_parity.py --device cuda --values 100000 --recipes mxfp8
python3 benchmarks/bench_parity.py --device cuda --beyond --out "$results" "${@:3}"
