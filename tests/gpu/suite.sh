#!/usr/bin/env bash
# Runs the GPU suite on a machine with CUDA, torch or JAX, and pytest, against built wheels and nothing else of this repository:
#   pip wheel --no-deps -w .whl ./breccia-core ./breccia-torch ./breccia-jax ./breccia-bridges ./breccia-triton platformdirs &&
#     bash tests/gpu/suite.sh .whl
# More arguments go to pytest. JOBS processes share the tests, and the GPU: most of the time goes into compiling kernels.
set -euo pipefail
wheels=$(realpath "${1:?the folder of the wheels}")
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --no-index --no-deps --target "$work/site" "$wheels"/*.whl
export PYTHONPATH=$work/site XLA_PYTHON_CLIENT_PREALLOCATE=false # torch and JAX share the device
mapfile -t files < <(grep -rlE "on_cuda|mark\.gpu" --include "test_*.py" tests) # others may need what is not there
pytest=(python3 -m pytest -p no:cacheprovider -q -m gpu)
"${pytest[@]}" --collect-only "${files[@]}" "${@:2}" | grep :: >"$work/tests"
split -n "r/${JOBS:-12}" "$work/tests" "$work/part."
failed=0
for part in "$work"/part.*; do
    "${pytest[@]}" "@$part" >"$part.log" 2>&1 &
done
for part in $(jobs -p); do wait "$part" || failed=1; done
for log in "$work"/part.*.log; do
    if grep -qE "failed|error" <(tail -1 "$log"); then cat "$log"; else tail -1 "$log"; fi
done
exit $failed
