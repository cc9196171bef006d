#!/usr/bin/env bash
# Runs the Triton kernels under compute-sanitizer on a machine with CUDA, torch and Triton, against built wheels:
#   pip wheel --no-deps -w .whl ./breccia-core ./breccia-torch ./breccia-triton && bash tests/gpu_sanitizer.sh .whl
# memcheck finds accesses outside of allocations, each of which torch then makes of its own; racecheck those of shared memory
# without a barrier between them.
set -euo pipefail
wheels=$(realpath "${1:?the folder of the wheels}")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --no-index --no-deps --target "$work/site" "$wheels"/*.whl
export PYTHONPATH=$work/site TRITON_CACHE_DIR=$work/kernels
python3 tests/gpu_sanitized.py # compiles them
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 python3 tests/gpu_sanitized.py &
done
failed=0
for job in $(jobs -p); do wait "$job" || failed=1; done
exit $failed
