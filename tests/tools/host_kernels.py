"""CUDA C++ sources of breccia-triton compiled as C++ for the host, and kernels that stand in for loaded ones.

The sources run as they are; what they do by PTX instructions is replaced by weight_only_host.cpp and fp8_matmul_host.cpp.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from breccia_triton.gemm.fp8 import plans as fp8_plans
from breccia_triton.gemm.weight_only import plans as weight_plans
from breccia_triton.launch.driver import MovableMap, TensorMap, writing

HERE = Path(__file__).parent

#: One-line functions of the header, and what replaces their bodies on the host.
_REPLACED = {
    "u32 sub2": "return host_sub2(a, b);",
    "u32 mul2": "return host_mul2(a, b);",
    "u32 fma2": "return host_fma2(a, b, c);",
    "float of_f16": "return host_of_f16(h);",
    "u16 to_bf16": "return host_to_bf16(f);",
    "u32 to_bf16x2": "return (u32)host_to_bf16(a) << 16 | host_to_bf16(b);",
    "u16 to_f16": "return host_to_f16(f);",
    "uint4 load_16": "return host_load<uint4>(a);",
    "float2 load_floats": "return host_load<float2>(a);",
    "u32 load_4": "return host_load<u32>(a);",
    "u32 load_2": "return host_load<u16>(a);",
    "u32 load_1": "return host_load<u8>(a);",
}


_OPTIONS = ("-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fPIC", "-pthread")


@functools.cache
def _header() -> str:
    """A folder with host_fibers.hpp compiled, which takes half of the time of a source that includes it."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = ["g++", *_OPTIONS, "-x", "c++-header", str(HERE / "host_fibers.hpp"), "-o", f"{folder}/host_fibers.hpp.gch"]
    subprocess.run(command, capture_output=True, check=False)  # a compiler that takes none compiles the text each time
    return folder


def built(text: str, macros: Iterable[tuple[str, int | str]], folder: Path, name: str) -> Any:
    """The library of a C++ text, compiled in a folder under a name. Skips the test where the compiler is too old."""
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text)
    first = [f"-I{_header()}"] if "host_fibers.hpp" in text else []
    folders = weight_plans.SOURCES, weight_plans.SOURCES.parent, HERE  # of headers
    options = ["-shared", *first, *(f"-I{folder}" for folder in folders), *(f"-D{key}={value}" for key, value in macros)]
    command = ["g++", *_OPTIONS, *options, str(source), "-o", str(library)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if "_Float16" in found.stderr:
        pytest.skip("the C++ compiler has no _Float16")
    assert found.returncode == 0, found.stderr[:3000]
    return ctypes.CDLL(str(library))


def decoding_text() -> str:
    """weight_only.cuh, after what it needs on the host."""
    text = (weight_plans.SOURCES / "weight_only.cuh").read_text(encoding="utf-8")
    for start, body in _REPLACED.items():
        text, count = re.subn(rf"(__forceinline__ {start}\([^)]*\) \{{).*\}}", rf"\1 {body} }}", text)
        assert count == 1, start
    text = text.replace("template <u32 TABLE> __device__ __forceinline__ u32 lop3(u32 a, u32 b, u32 c) { u32 d;", _LOP3)
    return (HERE / "weight_only_host.cpp").read_text(encoding="utf-8") + text.replace("#pragma once", "")


_LOP3 = (
    "template <u32 TABLE> __device__ __forceinline__ u32 lop3(u32 a, u32 b, u32 c) "
    "{ return TABLE == 0xEA ? (a & b) | c : (a & b) ^ c; u32 d;"
)


# -- the pass that decodes to memory, and the launch over rows with flags ------------------------------------------------

_DECODING = """
extern "C" int decode(int blocks, int turns, const Weight* w, u16* y, float* scales, int N, int K, int pitch, int levels,
                      int per_block) {
    static u8 origin;
    host_memory = &origin;
    blockDim = {WARPS * 32, 1};
    state = (u64)(N + K);
    entry = [=] { weight_only_decode(*w, y, scales, N, K, pitch, levels, per_block); };
    for (int i = 0; i < blocks * turns; i++) if (!run_cluster({i % blocks, i / blocks}, 1, WARPS * 32, 0)) return 1;
    return 0;
}
extern "C" int mend(int blocks, int turns, const Weight* w, const u16* x, const void* bias, void* y,
                    int M, int N, int K, int ldx, int ldy) {
    blockDim = {1, 1}; gridDim = {blocks, turns}; threadIdx = {0, 0};
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (blockIdx.y = 0; blockIdx.y < turns; blockIdx.y++) weight_only_mend(*w, x, bias, y, M, N, K, ldx, ldy);
    return 0;
}
"""


_ACROSS = """
extern "C" int across(int blocks, int turns, const Weight* w, u16* y, int* flags, int first, int N, int K, int per_block) {
    static u8 origin;
    host_memory = &origin;
    blockDim = {WARPS * 32, 1};
    state = (u64)(N + K);
    entry = [=] { weight_only_across(*w, y, flags, first, N, K, per_block); };
    for (int i = 0; i < blocks * turns; i++) if (!run_cluster({i % blocks, i / blocks}, 1, WARPS * 32, 0)) return 1;
    return 0;
}
extern "C" int across_mend(int blocks, int turns, const Weight* w, const u16* x, void* y, const int* flags,
                           int M, int N, int K, int ldx, int ldy) {
    blockDim = {1, 1}; gridDim = {blocks, turns}; threadIdx = {0, 0}; blockIdx = {0, 0};
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) weight_only_across_mend(*w, x, y, flags, M, N, K, ldx, ldy);
    return 0;
}
"""


@functools.cache
def _decoding(macros: tuple[tuple[str, int], ...], folder: Path) -> Any:
    name, entries = ("across", _ACROSS) if "COPIES" in dict(macros) else ("decode", _DECODING)
    source = re.sub(r"#include .*", "", (weight_plans.SOURCES / f"weight_only_{name}.cu").read_text(encoding="utf-8"))
    text = '#include "host_fibers.hpp"\n' + decoding_text() + source + entries
    return built(text, macros, folder, f"{name}-" + "-".join(f"{value}" for _, value in macros))


class Decoding:
    """Stands in for a kernel of weight_only_decode.cu or weight_only_across.cu. entry: its name."""

    def __init__(self, entry: str, macros: dict[str, int], folder: Path) -> None:
        self.run = getattr(_decoding(tuple(sorted(macros.items())), folder), entry.removeprefix("weight_only_"))

    def prepare(self, grid: Any, threads: int, values: Any, slots: Any, *rest: Any) -> Any:
        weight, *others = values
        return _launch(slots, lambda: self.run(*grid[:2], ctypes.byref(weight), *others))


def _launch(slots: Any, run: Callable[[], Any]) -> Any:
    def checked() -> None:
        assert not run(), "a deadlock, or a broken rule of the instructions"

    return SimpleNamespace(run=writing(slots, ["checked()"], checked=checked))


# -- the product ---------------------------------------------------------------------------------------------------------

_PRODUCT = """
extern "C" int run(const TensorMap* maps, const Args* args, int count, u32 shared, int seed) {
    gridDim.x = count; state = (u64)seed;
    entry = [=] { fp8_matmul(maps[0], maps[1], maps[2], maps[3], maps[4], maps[5], *args); };
    for (int i = 0; i < count; i += CLUSTER) if (!run_cluster({i, 0}, CLUSTER, NWG * 128 + 128, shared)) return 1;
    return 0;
}
"""


def product_text(changes: Iterable[tuple[str, str]] = ()) -> str:
    """fp8_matmul.cu for the host. changes: (text of the source, what replaces it), for planted mistakes."""
    text = fp8_plans.SOURCE.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    head, rest = re.split(r"// -+ PTX\n", text)
    _, rest = re.split(r"(?=// -+ tiles\n)", rest)
    assert "asm" not in head + rest, "an instruction outside of its section"
    shared = "extern __shared__ __align__(1024) u8 smem[];"
    assert shared in rest
    rest = rest.replace(shared, "u8* const smem = fiber->block->memory;")
    instructions = (HERE / "fp8_matmul_host.cpp").read_text(encoding="utf-8")
    return '#include "host_fibers.hpp"\n' + re.sub(r'#include "(ptx|wgmma).*', "", head) + instructions + rest + _PRODUCT


@functools.cache
def _product(macros: tuple[tuple[str, int], ...], changes: tuple[tuple[str, str], ...], folder: Path) -> Any:
    name = f"product-{len(list(folder.iterdir()))}"
    return built(product_text(changes), macros, folder, name)


class Product:
    """Stands in for the kernel of a variant of fp8_matmul.cu. clusters: that run at a time. seed: of the order of threads."""

    def __init__(self, variant: Any, folder: Path, changes: tuple[tuple[str, str], ...] = (), seed: int = 0) -> None:
        self.variant, self.seed = variant, seed
        self.run = _product(tuple(sorted(variant.macros.items())), changes, folder).run

    def clusters(self, threads: int, cluster: int) -> int:
        return 2

    def prepare(self, grid: Any, threads: int, values: Any, slots: Any, *rest: Any) -> Any:
        *maps, args = values
        assert threads == self.variant.tile.threads and len(maps) == 6
        room = (ctypes.c_uint8 * (64 + 6 * 128))()
        start = -ctypes.addressof(room) % 64
        place = ctypes.c_void_p(ctypes.addressof(room) + start)

        def run() -> Any:
            for i, each in enumerate(maps):
                made = each.map if isinstance(each, MovableMap) else each
                ctypes.memmove(ctypes.addressof(room) + start + 128 * i, ctypes.addressof(made), 128)
            return self.run(place, ctypes.byref(args), grid[0], self.variant.shared, self.seed)

        return _launch(slots, run)


class Driver:
    """Tensor maps as the stand-ins read them (`HostMap`)."""

    address_word = None

    @staticmethod
    def encoder(dtype: str, shape: Any, strides: Any, box: Any, swizzle: int = 0, promotion: int = 128) -> Any:
        item = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}[dtype]

        def encoded(address: int) -> TensorMap:
            bytes_ = (stride * item for stride in reversed(strides))
            made = struct.pack("<Q2Q3I3III", address, *bytes_, *reversed(shape), *reversed(box), item, swizzle)
            return TensorMap.from_buffer_copy(made.ljust(128, b"\0"))

        return encoded
