"""Arms of bench_matmul.py: the operands, and the products of breccia, torch, other libraries and BF16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import bench_gpu
from fp8_plan import (
    BF16,
    COLUMN_MAJOR,
    DECODED,
    DECODING,
    EXPERTS,
    HUMMING,
    IN_TABLE,
    KINDS,
    OURS,
    THROUGH_BF16,
    TORCH,
    TORCH_PLAIN,
    TORCH_ROWS,
)
from rivals import TRANSFORMER_ENGINE

Call = Callable[[], object]
Make = Callable[[], Call]
#: breccia's functions that `force` replaces.
_RULES: dict[str, Any] = {}


def operands(kind: str, m: int, n: int, k: int, device: str) -> tuple[Any, list[Any]]:
    """Return a, and enough copies of w to exceed the device's cache together."""
    import torch

    import breccia

    generator = torch.Generator(device).manual_seed(0)
    first, second = (breccia.recipe(spec) for spec in KINDS[kind])
    x = torch.randn(m, k, device=device, generator=generator, dtype=torch.bfloat16)
    lead = (EXPERTS,) if kind.startswith("grouped") else ()
    y = torch.randn(*lead, n, k, device=device, generator=generator, dtype=torch.bfloat16) * 0.02
    a, w = breccia.cast(x, first), breccia.cast(y, second)
    cache = torch.cuda.get_device_properties().L2_cache_size if device == "cuda" else 0
    copies = min(math.ceil(2 * cache / w.nbytes), 20)
    return a, [w, *(breccia.cast(y, second) for _ in range(copies - 1))]


def ends_of(m: int, device: Any) -> Any:
    """The row after each group, for groups of uneven sizes with m rows in total."""
    import torch

    shares = torch.arange(1, EXPERTS + 1, dtype=torch.float64).cumsum(0)
    return (shares / shares[-1] * m).to(torch.int32).to(device)


def makers(
    kind: str, a: Any, ws: list[Any], column_major: Any, tiles: list[str], rivals: Iterable[str], copiers: bool
) -> dict[str, Make]:
    """Functions by arm, each of which prepares a call and returns it.

    tiles: tiles of breccia's kernel to time besides the one that it chooses. copiers: also time kernels whose warps copy plain
    scales.
    """
    import torch

    import breccia

    fast = kind.endswith("fast")
    shape = (a.shape[0], ws[0].shape[-2])
    out = torch.empty(shape, device=a.data.device, dtype=torch.bfloat16)
    humming, _ = IN_TABLE[HUMMING]

    def by(kernel: str, left: Any = a, tile: str = "", copiers: bool | None = None) -> Make:
        def make() -> Call:
            force(tile, copiers)
            explained = breccia.explain("matmul", left, ws[0].mT, out_dtype="bfloat16", prefer=kernel)
            if explained.winner is None:  # report this kernel's reason alone, not the reasons of all kernels
                raise breccia.UnsupportedError(next(v.reason for v in explained.verdicts if v.kernel.name == kernel) or "")
            if kernel == humming:
                for w in ws:  # the first call rearranges the weight, which a CUDA graph cannot capture
                    breccia.matmul(left, w.mT, "bfloat16", out=out, prefer=kernel)
            return bench_gpu.rotating(lambda w: breccia.matmul(left, w, "bfloat16", out=out, prefer=kernel), [w.mT for w in ws])

        return make

    def bf16() -> Call:
        x = torch.randn(a.shape, device=a.data.device, dtype=torch.bfloat16)
        ys = [torch.randn(w.shape, device=a.data.device, dtype=torch.bfloat16) for w in ws[: max(1, len(ws) // 2)]]
        return bench_gpu.rotating(lambda y: torch.mm(x, y, out=out), [y.t() for y in ys])

    if kind.startswith("grouped"):
        return grouped_makers(kind, a, ws, out)
    if kind in DECODED:
        return {DECODING: by(THROUGH_BF16), BF16: bf16}
    ours = "cuda.fp8_matmul_fast" if fast else "cuda.fp8_matmul"
    found = {OURS: by(ours)}
    if kind == "mx":
        found[DECODING] = by(THROUGH_BF16)
    else:
        found[TORCH] = by("torch.scaled_mm" + ("_fast" if fast else ""))
    if column_major is not None:
        found[COLUMN_MAJOR] = by(ours, column_major)
        found[TORCH_PLAIN] = found.pop(TORCH)  # breccia's kernel for it, which copies plain scales
        found[TORCH] = lambda: torch_blocks(kind, column_major, ws, out)
    if TRANSFORMER_ENGINE in rivals and kind in ("tensor", "tensor fast", "tiles", "blocks"):
        found[TRANSFORMER_ENGINE] = lambda: transformer_engine(kind, a, ws, out)
    found |= {rival: by(name) for rival, (name, kinds) in IN_TABLE.items() if rival in rivals and kind in kinds}
    found |= {f"tile {name}": by(ours, tile=name) for name in tiles}
    if copiers and kind in ("tiles", "blocks", "mx"):
        found[f"{OURS}, copiers"] = by(ours, copiers=True)
        found |= {f"tile {name}, copiers": by(ours, tile=name, copiers=True) for name in tiles}
    return found | ({BF16: bf16} if kind in ("tiles", "mx") else {})


def force(name: str, copiers: bool | None) -> None:
    """Make breccia's kernel use the tile `name` in calls that are prepared from now on; "" restores its own choice.

    copiers: whether warps copy plain scales; None restores the kernel's own choice.
    """
    from breccia_triton.cuda import fp8_matmul, fp8_plans

    rule = _RULES.setdefault("copiers", fp8_plans.copiers)
    tiles = {tile.name: tile for tile in (*fp8_plans.TABLE, fp8_plans.short(fp8_plans.TABLE[0], 1))}
    chosen = fp8_plans.tile_of if not name else lambda *lengths: tiles[name]
    fp8_matmul.tile_of = chosen  # pyright: ignore[reportAttributeAccessIssue]
    fp8_plans.copiers = rule if copiers is None else lambda *of: copiers
    fp8_matmul.forget()


def column_major(a: Any) -> Any:
    """`a` with contiguous column-major scales. `to_storage` returns a view, which each call would copy."""
    import breccia

    st = a.to_storage("column_major")
    return breccia.ScaledTensor.from_parts(
        st.data, st.scale.contiguous(), st.recipe, st.layout, axis=st.axis, padding=st.padding
    )


def torch_blocks(kind: str, a: Any, ws: list[Any], out: Any) -> Call:
    """cuBLAS's blockwise product, called with scales in its own order, so that no copy of them is timed."""
    import torch
    from torch.nn.functional import ScalingType, scaled_mm

    from breccia_triton.cuda.scaled_mm import rows_adjacent

    scale = rows_adjacent(a.to_plain().scale)
    across = ScalingType.BlockWise128x128 if kind == "tiles" else ScalingType.BlockWise1x128
    scales = [w.scale.t() if kind == "tiles" else rows_adjacent(w.scale) for w in ws]
    pairs = list(zip([w.data.t() for w in ws], scales, strict=True))

    def call(pair: Any) -> object:
        return scaled_mm(
            a.data, pair[0], scale, ScalingType.BlockWise1x128, pair[1], across, output_dtype=torch.bfloat16
        )  # fmt: skip

    return bench_gpu.rotating(call, pairs)


def transformer_engine(kind: str, a: Any, ws: list[Any], out: Any) -> Call:
    """TransformerEngine's product of the same codes and scales: its own checks, and then cuBLAS."""
    import torch
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    import breccia

    left, *weights = (breccia.to_foreign(st, "transformer_engine") for st in (a, *ws))
    precise = not kind.endswith("fast")

    def call(w: Any) -> object:
        return general_gemm(w, left, out_dtype=torch.bfloat16, out=out, use_split_accumulator=precise)[0]

    return bench_gpu.rotating(call, weights)


def grouped_makers(kind: str, a: Any, ws: list[Any], out: Any) -> dict[str, Make]:
    """Products of uneven groups. torch supports only row scales, so it multiplies the matrices of tiles with row scales."""
    import torch

    import breccia

    ends = ends_of(a.shape[0], a.data.device)

    def ours() -> Call:
        def call(w: Any) -> object:
            return breccia.grouped_matmul(a, w, ends, "bfloat16", out=out, prefer="cuda.fp8_grouped_matmul")

        return bench_gpu.rotating(call, [w.mT for w in ws])

    def theirs() -> Call:
        rows = kind == "grouped row"
        left, rights = (a, ws) if rows else operands("grouped row", *out.shape, a.shape[-1], a.data.device.type)
        scale = left.scale.reshape(-1)

        def call(w: Any) -> object:
            scales = w.scale.reshape(EXPERTS, -1)
            return torch._scaled_grouped_mm(
                left.data, w.data.mT, scale, scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=False
            )  # fmt: skip

        return bench_gpu.rotating(call, rights)

    return {OURS: ours, TORCH if kind == "grouped row" else TORCH_ROWS: theirs}
