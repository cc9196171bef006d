"""The texts of `wgmma.cuh`: the tensor cores' instruction of a warpgroup, which has no C++ form."""

from __future__ import annotations


def header(columns: int, a: str, w: str) -> str:
    """`multiply(d, a, w, add)`: D[64, columns] (+)= A[64, k] W[columns, k]^T by one warpgroup, k elements of 32 bytes.

    a, w: "e4m3" or "e5m2", or both "bf16". d: the accumulators of a thread. a, w: descriptors of operands in shared memory,
    K adjacent. add: 0 starts anew.
    """
    count = columns // 2
    registers = ",".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    # Only 16-bit operands may have K apart in memory: two more numbers say that they do not.
    k, order = (16, ", 0, 0") if a == "bf16" else (32, "")
    return f"""__device__ __forceinline__ void multiply(float* d, unsigned long long a, unsigned long long w, int add) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k{k}.f32.{a}.{w} {{{registers}}}, "
        "%{count}, %{count + 1}, p, 1, 1{order};\\n}}"
        : {operands} : "l"(a), "l"(w), "r"(add));
}}
"""


def header_for_registers(batch: int) -> str:
    """`wgmma(d, a, x, add)`: D[64, batch] (+)= A[64, 16] (registers) B[16, batch] (shared memory), by one warpgroup."""
    count = batch // 2
    registers = ",".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ",".join(f"%{count + i}" for i in range(4))
    return f"""__device__ __forceinline__ void wgmma(float* d, const u32* a, u64 x, int add) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{batch}k16.f32." INPUTS " {{{registers}}}, {{{a}}}, %{count + 4}, p, 1, 1, 0;\\n}}"
        : {operands} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add));
}}
"""
