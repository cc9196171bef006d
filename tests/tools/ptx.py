"""The PTX instructions of the Triton kernels in NumPy, so that Triton's interpreter runs the branches for NVIDIA GPUs too.

Semantics from NVIDIA's PTX ISA 8.8, sections 9.7.3 to 9.7.5 and 9.7.9.7. `rcp.approx` is correctly rounded here, which only
makes its refinement easier: the GPU tests check that one on every number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Array = np.ndarray
_F32, _U32, _I32 = np.float32, np.uint32, np.int32


def emulate(monkeypatch: Any) -> None:
    """Let the interpreter run inline PTX of 32-bit registers, and `tl.fma` with one rounding."""
    monkeypatch.setattr(tl, "inline_asm_elementwise", _inline)
    monkeypatch.setattr(tl, "fma", _fma)
    # min.f32 and max.f32 return the other operand for NaN, as NumPy's minimum and maximum do not.
    monkeypatch.setattr(InterpreterBuilder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin))
    monkeypatch.setattr(InterpreterBuilder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax))


def _inline(
    asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int, _semantic: Any = None
) -> Any:  # fmt: skip
    if pack != 1:
        raise NotImplementedError(f"pack={pack}: {asm}")
    kinds = [kind.strip() for kind in constraints.split(",")][1:]
    given = [_values(a).astype(_F32 if kind == "f" else _I32) for a, kind in zip(args, kinds, strict=True)]
    given = [np.ascontiguousarray(a) for a in np.broadcast_arrays(*given)]
    registers = {f"${n + 1}": a for n, a in enumerate(given)}
    for statement in asm.strip("{} ").split(";"):
        name, _, rest = statement.strip().partition(" ")
        if name and name != ".reg":
            target, *operands = (part.strip() for part in rest.split(","))
            read = [registers[o] if o in registers else np.full(given[0].shape, int(o, 0), _I32) for o in operands]
            with np.errstate(all="ignore"):
                registers[target] = _run(name, read)
    found = np.ascontiguousarray(registers["$0"])
    return _tensor(found.view(_F32 if dtype == tl.float32 else _I32), dtype, args)


def _fma(x: Any, y: Any, z: Any, _semantic: Any = None) -> Any:
    a, b, c = (_values(v).astype(np.float64) for v in (x, y, z))
    with np.errstate(all="ignore"):
        # The product is exact in FP64, and its sum with FP32 rounds twice at most where the first rounding was exact.
        return _tensor(np.ascontiguousarray((a * b + c).astype(_F32)), tl.float32, [x, y, z])


def _values(a: Any) -> Array:
    return np.asarray(a.handle.data if hasattr(a, "handle") else getattr(a, "value", a))


def _tensor(found: Array, dtype: Any, like: list[Any]) -> Any:
    block = any(hasattr(a, "type") and a.type.is_block() for a in like)
    return tl.core.tensor(TensorHandle(found, dtype), tl.block_type(dtype, list(found.shape)) if block else dtype)


def _run(name: str, x: list[Array]) -> Array:
    """One instruction."""
    if name == "prmt.b32":
        return _bytes_chosen(*x)
    if name == "abs.bf16x2":
        return (x[0] & 0x7FFF7FFF).astype(_I32)
    if "bf16x2" in name:
        return _in_halves(name, x)
    f = [a.view(_F32) for a in x]
    match name:
        case "abs.f32":
            return np.abs(f[0])
        case "mul.ftz.f32":
            return _flushed(_flushed(f[0]) * _flushed(f[1]))
        case "sub.ftz.f32":
            return _flushed(_flushed(f[0]) - _flushed(f[1]))
        case "rcp.approx.ftz.f32":
            return _flushed(_F32(1) / _flushed(f[0]))
        case "fma.rn.sat.f32":
            v = (f[0].astype(np.float64) * f[1] + f[2]).astype(_F32)
            return np.where(np.isnan(v), _F32(0), np.clip(v, 0, 1)).astype(_F32)
        case _:
            raise NotImplementedError(name)


def _flushed(a: Array) -> Array:
    """FTZ: subnormal numbers are zeros of their sign."""
    return np.where(np.abs(a) < 2.0**-126, np.copysign(_F32(0), a), a).astype(_F32)


def _bytes_chosen(a: Array, b: Array, selector: Array) -> Array:
    """prmt.b32 without sign replication, for one selector."""
    both = a.view(_U32).astype(np.uint64) | (b.view(_U32).astype(np.uint64) << np.uint64(32))
    chosen, found = int(selector.flat[0]), np.zeros_like(both)
    for n in range(4):
        place = np.uint64(8 * ((chosen >> (4 * n)) & 7))
        found |= ((both >> place) & np.uint64(255)) << np.uint64(8 * n)
    return found.astype(_U32).view(_I32)


def _in_halves(name: str, x: list[Array]) -> Array:
    """An instruction on two BF16 numbers in each register."""
    found: list[Array] = []
    for shift, mask in ((16, 0xFFFFFFFF), (0, 0xFFFF0000)):
        a = [((w.view(_U32) << _U32(shift)) & _U32(mask)).view(_F32) for w in x]
        if name.startswith("fma.rn"):
            v = _to_bf16(a[0].astype(np.float64) * a[1] + a[2])
            found.append(np.where(np.isnan(v), v, np.maximum(v, 0)).astype(_F32) if "relu" in name else v)
        else:
            smaller, nan = name.startswith("min."), ".NaN." in name
            operation = (np.minimum if nan else np.fmin) if smaller else (np.maximum if nan else np.fmax)
            found.append(operation(a[0], a[1]))
    low, high = (np.where(np.isnan(h), _U32(0x7FFF), np.ascontiguousarray(h).view(_U32) >> _U32(16)) for h in found)
    return (low | (high << _U32(16))).view(_I32)


def _to_bf16(v: Array) -> Array:
    """FP64 rounded to BF16, to nearest, ties to even; as FP32."""
    exponent = np.maximum(np.frexp(np.abs(v))[1] - 8, -133)
    rounded = np.ldexp(np.rint(np.ldexp(np.abs(v), -exponent)), exponent)
    rounded = np.where(np.isnan(v), np.nan, np.where(rounded >= 2.0**128, np.inf, rounded))
    return np.copysign(rounded, v).astype(_F32)
