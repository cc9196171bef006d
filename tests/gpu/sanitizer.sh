#!/usr/bin/env bash
# Runs kernels of breccia-triton under compute-sanitizer on a machine with CUDA, torch and Triton, against built wheels:
#   pip wheel --no-deps -w .whl ./breccia-core ./breccia-torch ./breccia-triton platformdirs && bash tests/gpu/sanitizer.sh .whl
# Further arguments name groups of jobs of tests/gpu/sanitized.py: casts, fp8, grouped, weights, bf16, registers. Default: all.
# memcheck finds accesses outside of allocations, each of which torch then makes of its own; racecheck those of shared memory
# without a barrier between them. TOOLS names other tools. Each job runs in processes of its own, JOBS of them in parallel.
set -euo pipefail
wheels=$(realpath "${1:?the folder of the wheels}")
shift
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --no-index --no-deps --target "$work/site" "$wheels"/*.whl
export PYTHONPATH=$work/site TRITON_CACHE_DIR=$work/kernels XDG_CACHE_HOME=$work/cubins
checked() {
    local started=$SECONDS
    python3 tests/gpu/sanitized.py "$1" || return 1 # compiles the kernels, which is slower under the tools
    echo "without a tool: $((SECONDS - started)) s"
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in ${TOOLS:-memcheck racecheck}; do
        started=$SECONDS
        compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 python3 tests/gpu/sanitized.py "$1" || return 1
        echo "$tool: $((SECONDS - started)) s"
    done
}
groups=()
for group in "$@"; do groups+=(--group "$group"); done
mapfile -t jobs < <(python3 tests/gpu/sanitized.py "${groups[@]}")
processes=()
for job in "${jobs[@]}"; do
    while (($(jobs -rp | wc -l) >= ${JOBS:-12})); do sleep 0.2; done
    checked "$job" >"$work/log.${#processes[@]}" 2>&1 &
    processes+=($!)
done
failed=0
for i in "${!processes[@]}"; do
    wait "${processes[i]}" || failed=1
    echo "== ${jobs[i]}" && tail -12 "$work/log.$i"
done
exit $failed
