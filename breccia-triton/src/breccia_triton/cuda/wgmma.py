"""The text of `wgmma.cuh`: the tensor cores' instruction for FP8 operands in shared memory, which has no C++ form."""

from __future__ import annotations


def header(columns: int, a: str, w: str) -> str:
    """`multiply(d, a, w, add)`: D[64, columns] (+)= A[64, 32] W[columns, 32]^T by one warpgroup. a, w: "e4m3" or "e5m2".

    d: the accumulators of a thread. a, w: descriptors of operands in shared memory, K adjacent. add: 0 starts anew.
    """
    count = columns // 2
    registers = ",".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""__device__ __forceinline__ void multiply(float* d, unsigned long long a, unsigned long long w, int add) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.{a}.{w} {{{registers}}}, %{count}, %{count + 1}, p, 1, 1;\\n}}"
        : {operands} : "l"(a), "l"(w), "r"(add));
}}
"""
