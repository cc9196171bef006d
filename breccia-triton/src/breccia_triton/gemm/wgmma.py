"""The text of `wgmma.cuh`: the tensor cores' instruction for operands in shared memory, which has no C++ form."""

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
