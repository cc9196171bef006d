"""One library's products on the CPU, in a process of its own: what bench_matmul_cpu.py starts and asks in turn.

Weights are (N, K), N = K = size; every arm rotates over copies of its own, of 256 MiB in all, so that none stays in a cache.
ONNX Runtime's MatMulNBits needs `pip install onnxruntime onnx`; for ggml, run `bash benchmarks/ggml_build.sh FOLDER` and set
BRECCIA_GGML=FOLDER.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import HERE, Call, normal, timed

#: By arm, what makes its call from activations (M, K) in FP32.
Arms = dict[str, Callable[[np.ndarray], Call]]

RECIPES = ("int4", "int4,group_size=32", "mxfp4", "nvfp4", "nf4", "mxfp8", "fp8_block", "mxfp6", "int8")
ROTATED, READ, COPIES = 256 << 20, 64 << 20, 64


def rotated(make: Callable[[int], Any], nbytes: int) -> Callable[[], Any]:
    """Copies of a weight, each time the next. `make` gets the number of a copy."""
    copies = itertools.cycle([make(n) for n in range(min(max(ROTATED // nbytes, 2), COPIES))])
    return lambda: next(copies)


def weight(size: int) -> np.ndarray:
    return normal((size, size), 0) * np.float32(0.02)


def read(size: int, threads: int) -> Arms:
    """The sum of 64 MiB: what a product that reads its weight once cannot exceed."""
    import torch

    torch.set_num_threads(threads)
    blocks = rotated(lambda n: torch.full((READ // 4,), float(n)), READ)
    return {"read": lambda x: lambda: blocks().sum()}


def multiply_adds(size: int, threads: int) -> Arms:
    """As many FP32 multiply-adds as a product has, in registers: what one that sums in FP32 cannot exceed."""
    flags = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "multiply_adds.so")
        subprocess.run(["cc", *flags, str(HERE / "multiply_adds.c"), "-o", str(library)], check=True)
        run = ctypes.CDLL(str(library)).multiply_adds
    run.restype, run.argtypes = ctypes.c_float, (ctypes.c_long, ctypes.c_int)
    return {"multiply-adds": lambda x: lambda: run(len(x) * size * size, threads)}


def numpy(size: int, threads: int) -> Arms:
    w = weight(size)
    full = rotated(lambda n: w + np.float32(n), w.nbytes)
    return {"NumPy FP32": lambda x: lambda: x @ full().T}


def in_torch(size: int, threads: int) -> Arms:
    import torch

    torch.set_num_threads(threads)
    w, linear = torch.from_numpy(weight(size)), torch.nn.functional.linear
    full, half = rotated(lambda n: w.clone(), 4 * w.numel()), rotated(lambda n: w.bfloat16(), 2 * w.numel())
    arms: Arms = {
        "F.linear FP32": lambda x: (lambda y: lambda: linear(y, full()))(torch.from_numpy(x)),
        "F.linear BF16": lambda x: (lambda y: lambda: linear(y, half()))(torch.from_numpy(x).bfloat16()),
    }
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (size, size), dtype=torch.int32), 1)
    scales = torch.ones(size // 128, size, 2, dtype=torch.bfloat16)
    int4 = rotated(lambda n: codes.clone(), size * size // 2)
    arms["torch int4"] = lambda x: (lambda y: lambda: product(y, int4(), 128, scales))(torch.from_numpy(x).bfloat16())

    def dynamic(n: int) -> Any:
        layer = torch.nn.Sequential(torch.nn.Linear(size, size, bias=False))
        return torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear}, dtype=torch.qint8)

    int8 = rotated(dynamic, size * size)
    arms["torch dynamic int8"] = lambda x: (lambda y: lambda: int8()(y))(torch.from_numpy(x))
    return arms


def breccia(size: int, threads: int) -> Arms:
    import torch

    import breccia as ours

    torch.set_num_threads(threads)
    ours.set_num_threads(threads)
    w, arms = torch.from_numpy(weight(size)), dict[str, Any]()

    def arm(copies: Callable[[], Any], dtype: str, prefer: str | None) -> Callable[[np.ndarray], Call]:
        def made(x: np.ndarray) -> Call:
            y = torch.from_numpy(x).to(getattr(torch, dtype))
            return lambda: ours.matmul(y, copies().mT, prefer=prefer)

        return made

    for name in RECIPES:
        copies = rotated(lambda n, name=name: ours.cast(w, name), int(ours.cast(w, name).data.nbytes))
        arms[name] = arm(copies, "float32", None)
        if name in ("int4", "nvfp4", "mxfp8"):
            arms[f"{name}, BF16 x"] = arm(copies, "bfloat16", None)
        if name in ("int4", "int4,group_size=32", "mxfp4", "nvfp4", "int8"):
            arms[f"{name}, INT8 mode"] = arm(copies, "float32", "torch.cpu.matmul_int8")
    return arms


def onnxruntime(size: int, threads: int) -> Arms:
    """MatMulNBits. Each copy has contents of its own, since ONNX Runtime shares equal initializers."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    rng = np.random.default_rng(0)

    def session(level: int) -> Any:
        block = 32
        codes = rng.integers(0, 256, (size, size // block, block // 2), dtype=np.uint8)
        scales = rng.uniform(0.01, 0.02, size * size // block).astype(np.float32)
        node = helper.make_node(
            "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft",
            K=size, N=size, bits=4, block_size=block, accuracy_level=level,
        )  # fmt: skip
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["m", size]) for name in "xy")
        graph = helper.make_graph(
            [node], "g", [x], [y], [numpy_helper.from_array(codes, "w"), numpy_helper.from_array(scales, "s")]
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    found: Arms = {}
    for name, level in (("ONNX Runtime 4 bit, FP32 x", 1), ("ONNX Runtime 4 bit, int8 x", 4)):
        sessions = rotated(lambda n, level=level: session(level), size * size // 2)
        found[name] = lambda x, sessions=sessions: lambda: sessions().run(None, {"x": x})
    return found


def mlx(size: int, threads: int) -> Arms:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    w = mx.array(weight(size))
    found: Arms = {}
    for name, given in (("MLX mxfp4", {"mode": "mxfp4", "group_size": 32}), ("MLX affine 4 bit", {"group_size": 64})):
        parts = mx.quantize(w, bits=4, **given)
        mx.eval(parts)

        def made(x: np.ndarray, parts: Any = parts, given: Any = given) -> Call:
            y = mx.array(x)
            return lambda: mx.eval(mx.quantized_matmul(y, *parts, transpose=True, bits=4, **given))

        found[name] = made
    return found


class _Params(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


#: Types of ggml's weights by name: their number, and whether ggml repacks them on x86-64.
_GGML = {"Q4_0": (2, True), "Q8_0": (8, False), "Q4_K": (12, True), "MXFP4": (39, True), "NVFP4": (40, False)}


def ggml(size: int, threads: int) -> Arms:
    """ggml's own products, with weights repacked for this processor where ggml does so.

    The environment variable BRECCIA_GGML has the folder of its libraries.
    """
    folder = Path(os.environ["BRECCIA_GGML"])
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)

    def function(library: Any, name: str, result: Any, *arguments: Any) -> Any:
        found = getattr(library, name)
        found.restype, found.argtypes = result, arguments
        return found

    pointer, number, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    init = function(base, "ggml_init", pointer, _Params)
    matrix = function(base, "ggml_new_tensor_2d", pointer, pointer, whole, number, number)
    row_size = function(base, "ggml_row_size", ctypes.c_size_t, whole, number)
    quantize = function(base, "ggml_quantize_chunk", ctypes.c_size_t, whole, pointer, pointer, number, number, number, pointer)
    product = function(base, "ggml_mul_mat", pointer, pointer, pointer, pointer)
    new_graph = function(base, "ggml_new_graph", pointer, pointer)
    expand = function(base, "ggml_build_forward_expand", None, pointer, pointer)
    allocate = function(base, "ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer)
    set_tensor = function(base, "ggml_backend_tensor_set", None, pointer, pointer, ctypes.c_size_t, ctypes.c_size_t)
    compute = function(base, "ggml_backend_graph_compute", whole, pointer, pointer)
    plain = function(base, "ggml_backend_cpu_buffer_type", pointer)()
    backend = function(cpu, "ggml_backend_cpu_init", pointer)()
    function(cpu, "ggml_backend_cpu_set_n_threads", None, pointer, whole)(backend, threads)
    repacked = function(cpu, "_Z35ggml_backend_cpu_repack_buffer_typev", pointer)()

    def context() -> Any:
        return init(_Params(64 << 20, None, True))

    w = np.ascontiguousarray(weight(size))
    found: Arms = {}
    for name, (kind, repacks) in _GGML.items():
        length = row_size(kind, size) * size
        codes = np.empty(length, np.uint8)
        quantize(kind, w.ctypes.data, codes.ctypes.data, 0, size, size, None)
        for way, buffers in (("", plain), (" repacked", repacked))[: 1 + repacks]:
            held = context()
            tensors = [matrix(held, kind, size, size) for _ in range(min(max(ROTATED // length, 2), COPIES))]
            if not allocate(held, buffers):
                continue
            for tensor in tensors:
                set_tensor(tensor, codes.ctypes.data, 0, length)

            def made(x: np.ndarray, tensors: Any = tensors) -> Call:
                scratch = context()
                given = matrix(scratch, 0, size, len(x))
                results = [product(scratch, tensor, given) for tensor in tensors]
                graphs = []
                for result in results:
                    graph = new_graph(scratch)
                    expand(graph, result)
                    graphs.append(graph)
                allocate(scratch, plain)
                set_tensor(given, np.ascontiguousarray(x).ctypes.data, 0, x.nbytes)
                turn = rotated(lambda n: graphs[n % len(graphs)], ROTATED // max(len(graphs), 1))
                return lambda: compute(backend, turn())

            found[f"ggml {name}{way}"] = made
    return found


#: Seconds of calls before the one that is timed: longer than the turn of a thread.
AWAKE = 0.01
LIBRARIES: dict[str, Callable[[int, int], Arms]] = {
    "read": read,
    "multiply-adds": multiply_adds,
    "torch": in_torch,
    "numpy": numpy,
    "breccia": breccia,
    "onnxruntime": onnxruntime,
    "ggml": ggml,
    "mlx": mlx,
}


#: In the process of a library: its arms, and their calls at the number of rows that was asked for last.
ARMS: Arms = {}
CALLS: dict[str, Call] = {}


def prepared(library: str, size: int, threads: int, rows: int) -> list[str]:
    """Prepare the calls of a library at a number of rows, and return their arms."""
    ARMS.update(ARMS or LIBRARIES[library](size, threads))
    x = normal((rows, size), rows)
    CALLS.update({name: make(x) for name, make in ARMS.items()})
    return list(CALLS)


def seconds_of(arm: str) -> float:
    """Seconds of a call that follows others, for AWAKE seconds: threads that slept begin on any processor, and late."""
    call, start = CALLS[arm], time.perf_counter()
    call()
    while time.perf_counter() - start < AWAKE:
        call()
    return timed(call)[0]
