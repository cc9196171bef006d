#!/usr/bin/env bash
# Runs the Triton kernels under compute-sanitizer on a machine with CUDA, torch and Triton, against built wheels:
#   pip wheel --no-deps -w .whl ./breccia-core ./breccia-torch ./breccia-triton platformdirs && bash tests/gpu_sanitizer.sh .whl
# memcheck finds accesses outside of allocations, each of which torch then makes of its own; racecheck those of shared memory
# without a barrier between them. Each recipe has its own processes, side by side.
set -euo pipefail
wheels=$(realpath "${1:?the folder of the wheels}")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --no-index --no-deps --target "$work/site" "$wheels"/*.whl
export PYTHONPATH=$work/site TRITON_CACHE_DIR=$work/kernels
checked() {
    python3 tests/gpu_sanitized.py "$1" || return 1 # compiles the kernels, which is slower under the tools
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck racecheck; do
        compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 python3 tests/gpu_sanitized.py "$1" || return 1
    done
}
jobs=()
mapfile -t recipes < <(python3 tests/gpu_sanitized.py)
for recipe in "${recipes[@]}"; do
    checked "$recipe" >"$work/log.${#jobs[@]}" 2>&1 &
    jobs+=($!)
done
failed=0
for i in "${!jobs[@]}"; do
    wait "${jobs[i]}" || failed=1
    echo "== ${recipes[i]}" && tail -12 "$work/log.$i"
done
exit $failed
