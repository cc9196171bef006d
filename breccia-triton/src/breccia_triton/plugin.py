"""Everything breccia-triton adds to breccia: kernels for framework "torch" on "cuda". Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import DelayedScaling, Kernel, hookimpl

api = 1

#: Each op with the module of its function, what it accepts, and whether it reads or writes storages of scales.
_KERNELS = (
    ("cast", "cast", "cast", False, True),
    ("cast_pair", "cast", "pair", False, True),
    ("cast_ste", "cast", "cast", False, False),
    ("cast_ste_clipped", "cast", "cast", False, False),
    ("record_amax", "cast", "cast", False, False),
    ("cast_and_record", "cast", "cast", False, False),
    ("dequantize", "decode", "dequantize", True, False),
    ("requantize", "cast", "requantize", True, True),
)


#: Storages of scales that the kernels read and write.
STORAGES = ("swizzle_128x4", "column_major", "transposed")


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    for op, module, accepts, reads, writes in _KERNELS:
        yield Kernel(
            op,
            "torch",
            f"breccia_triton.{module}:{op}",
            f"triton.{op}",
            recipe=DelayedScaling if "record" in op else None,
            device="cuda",
            available="breccia_triton.plans:available",
            accepts=f"breccia_triton.plans:accepts_{accepts}",
            reads=STORAGES if reads else (),
            writes=STORAGES if writes else (),
        )
