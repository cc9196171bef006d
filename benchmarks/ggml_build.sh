#!/usr/bin/env bash
# Builds ggml from the source distribution of llama-cpp-python, for bench_matmul_cpu.py:
#   bash benchmarks/ggml_build.sh FOLDER && BRECCIA_GGML=FOLDER python benchmarks/bench_matmul_cpu.py
# Needs CMake and a C++ compiler. Downloads about 70 MB, builds for this processor, and leaves the libraries in FOLDER.
set -euo pipefail
folder=$(realpath -m "${1:?the folder of the libraries}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# `:all:` would build CMake too, which its build needs.
python3 -m pip download -q --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 -d "$work"
tar -xzf "$work"/*.tar.gz -C "$work"
source=("$work"/*/vendor/llama.cpp/ggml)
touch "${source[0]}/ggml.pc.in" # the distribution leaves it out, and its absence ends the configuration
options=(-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF)
cmake -S "${source[0]}" -B "$work/build" "${options[@]}"
cmake --build "$work/build" --parallel
mkdir -p "$folder"
cp -L "$work"/build/src/libggml*.so* "$folder"
