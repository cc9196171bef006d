"""Products of two FP8 tensors on a CUDA device: kinds of scales, the plan of shapes, operands, and the arms of bench_matmul.py.

Every arm is a function that prepares a call: breccia's kernels, those of other libraries, and BF16.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import other_products
import torch
from harness import version_of
from harness.device import Call, Make, Reference, beyond_cache, reference, rotating
from rivals import TRANSFORMER_ENGINE

import breccia
from breccia.kernels import bounds

#: Kinds of scales, with the recipes of a and w.
KINDS = {
    "tiles": ("fp8_block", "fp8_block,block_m=128"),
    "row": ("fp8_row", "fp8_row"),
    "tensor": ("fp8_current", "fp8_current"),
    "blocks": ("fp8_block", "fp8_block"),
    "mx": ("mxfp8", "mxfp8"),
    "mxfp4": ("mxfp4", "mxfp4"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "row fast": ("fp8_row", "fp8_row"),
    "tensor fast": ("fp8_current", "fp8_current"),
    "grouped row": ("fp8_row", "fp8_row"),
    "grouped tiles": ("fp8_block", "fp8_block,block_m=128"),
}
#: Kinds that only the kernel through BF16 multiplies, and the name of that kernel. It multiplies kind "mx" too.
DECODED, THROUGH_BF16 = ("mxfp4", "nvfp4"), "triton.matmul_bf16"
#: Kinds that the kernel of fp8_matmul.cu multiplies, with its names for the scales of a and w.
PAIRS = {
    "tiles": ("1x128", "128x128"),
    "row": ("row", "row"),
    "tensor": ("tensor", "tensor"),
    "blocks": ("1x128", "1x128"),
    "mx": ("1x32", "1x32"),
}

#: Shapes MxNxK: large products, products of few rows, and those between.
LARGE = ("4096x7168x16384", "4096x4096x4096", "8192x8192x8192", "4096x2112x7168", "4096x24576x1536")
FEW = ("128x7168x16384", "64x7168x16384", "128x7168x2048", "1x7168x16384", "16x7168x16384", "32x7168x2048")
MIDDLE = ("256x7168x7168", "512x7168x7168", "1024x7168x7168", "2048x7168x7168")
#: N and K of the sweep over M, and the values of M. The weight is larger than the L2 cache.
SWEPT, ROWS = (7168, 16384), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SWEEP = tuple(f"{m}x{SWEPT[0]}x{SWEPT[1]}" for m in ROWS)
#: The default plan: groups of shapes, with the kinds to measure at each shape.
PLAN: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (LARGE, tuple(KINDS)),
    (FEW, tuple(PAIRS)),
    (FEW[:2], ("grouped row", "grouped tiles")),
    (MIDDLE, (*PAIRS, *DECODED)),
    (SWEEP, ("tensor", "row", "tiles", "blocks")),
)

#: Names of arms: breccia's kernels, torch's products, and BF16. TORCH_ROWS is torch's grouped product with row scales, which is
#: compared with breccia's of tiles.
OURS, COLUMN_MAJOR, DECODING = "breccia", "breccia, column-major scales", "breccia, through BF16"
TORCH, TORCH_PLAIN, TORCH_ROWS, BF16 = "torch", "torch, plain scales", "torch, row scales", "bf16"
HUMMING, DEEP_GEMM = "humming", "deep_gemm"
#: Libraries that are timed if they are installed: the module to look for, and the package.
RIVALS = {
    TRANSFORMER_ENGINE: ("transformer_engine", "transformer_engine"),
    HUMMING: ("humming", "humming-kernels"),
    DEEP_GEMM: ("deep_gemm", "deep_gemm"),
}
#: Rivals in `other_products`: the name of the product, and the kinds that it multiplies.
PRODUCTS = {HUMMING: ("humming.fp8_matmul", ("tiles", "row")), DEEP_GEMM: ("deep_gemm.fp8_matmul", ("tiles",))}
#: The number of groups in grouped products. Groups differ in their number of rows.
EXPERTS = 8


def planned(kinds: list[str] | None, shapes: list[str] | None) -> list[tuple[str, str]]:
    """(shape, kind) of every row: the default plan, or every kind at the given shapes; restricted to the given kinds."""
    plan = [(tuple(shapes), tuple(KINDS))] if shapes else PLAN
    every = [(shape, kind) for some, chosen in plan for shape in some for kind in chosen]
    return [row for row in dict.fromkeys(every) if not kinds or row[1] in kinds]


def chosen_rivals(wanted: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """(versions of the rivals that run, the reason for each that does not). By default all installed ones run."""
    found, absent = dict[str, str](), dict[str, str]()
    for name, (module, package) in RIVALS.items():
        if wanted and name not in wanted:
            absent[name] = "left out"
        elif find_spec(module) is None:
            absent[name] = f"{package} is not installed"
        else:  # a checkout is a module without a package
            found[name] = version_of(package) or "of unknown version"
    return found, absent


def operands(kind: str, m: int, n: int, k: int, device: str) -> tuple[Any, list[Any]]:
    """Return a, and enough copies of w to exceed the device's cache together."""
    generator = torch.Generator(device).manual_seed(0)
    first, second = (breccia.recipe(spec) for spec in KINDS[kind])
    x = torch.randn(m, k, device=device, generator=generator, dtype=torch.bfloat16)
    lead = (EXPERTS,) if kind.startswith("grouped") else ()
    y = torch.randn(*lead, n, k, device=device, generator=generator, dtype=torch.bfloat16) * 0.02
    a, w = breccia.cast(x, first), breccia.cast(y, second)
    return a, [w, *(breccia.cast(y, second) for _ in range(min(beyond_cache(w.nbytes, device), 20) - 1))]


def ends_of(m: int, device: Any) -> Any:
    """The row after each group, for groups of uneven sizes with m rows in total."""
    shares = torch.arange(1, EXPERTS + 1, dtype=torch.float64).cumsum(0)
    return (shares / shares[-1] * m).to(torch.int32).to(device)


def expected(kind: str, a: Any, w: Any) -> Reference:
    """The reference of a product, under the bound of the contract for these recipes and this device."""
    m, device = a.shape[0], a.data.device
    grouped = kind.startswith("grouped")
    ends = ends_of(m, device) if grouped else torch.tensor([m], device=device)
    cores = bounds.in_tensor_cores(a.recipe, w.recipe, device.type)
    return reference(
        lambda rows: breccia.dequantize(a)[rows].double(),
        lambda group: breccia.dequantize(w[group] if grouped else w).double(),
        ends,
        lambda magnitude, k: bounds.accumulated(magnitude, k, k, cores),
    )


def makers(kind: str, a: Any, ws: list[Any], libraries: Iterable[str]) -> dict[str, Make]:
    """Functions by arm, each of which prepares a call and returns it."""
    fast = kind.endswith("fast")
    shape = (a.shape[0], ws[0].shape[-2])
    out = torch.empty(shape, device=a.data.device, dtype=torch.bfloat16)

    def by(kernel: str, left: Any = a) -> Make:
        def make() -> Call:
            explained = breccia.explain("matmul", left, ws[0].mT, out_dtype="bfloat16", prefer=kernel)
            if explained.winner is None:  # report this kernel's reason alone, not the reasons of all kernels
                raise breccia.UnsupportedError(next(v.reason for v in explained.verdicts if v.kernel.name == kernel) or "")
            return rotating(lambda w: breccia.matmul(left, w, "bfloat16", out=out, prefer=kernel), [w.mT for w in ws])

        return make

    def theirs(product: str) -> Make:
        def make() -> Call:
            for w in ws:  # the first call of humming rearranges the weight, which a CUDA graph cannot capture
                other_products.matmul(product, a, w.mT, out=out)
            return rotating(lambda w: other_products.matmul(product, a, w, out=out), [w.mT for w in ws])

        return make

    def bf16() -> Call:
        x = torch.randn(a.shape, device=a.data.device, dtype=torch.bfloat16)
        ys = [torch.randn(w.shape, device=a.data.device, dtype=torch.bfloat16) for w in ws[: max(1, len(ws) // 2)]]
        return rotating(lambda y: torch.mm(x, y, out=out), [y.t() for y in ys])

    if kind.startswith("grouped"):
        return grouped_makers(kind, a, ws, out)
    if kind in DECODED:
        return {DECODING: by(THROUGH_BF16), BF16: bf16}
    ours = "cuda.fp8_matmul_fast" if fast else "cuda.fp8_matmul"
    found: dict[str, Make] = {OURS: by(ours)}
    if kind == "mx":
        found[DECODING] = by(THROUGH_BF16)
    elif kind in ("tiles", "blocks"):
        turned = column_major(a)
        found[COLUMN_MAJOR] = by(ours, turned)
        found[TORCH_PLAIN] = by("torch.scaled_mm")  # breccia's kernel for it, which copies plain scales
        found[TORCH] = lambda: torch_blocks(kind, turned, ws)
    else:
        found[TORCH] = by("torch.scaled_mm" + ("_fast" if fast else ""))
    if TRANSFORMER_ENGINE in libraries and kind in ("tensor", "tensor fast", "tiles", "blocks"):
        found[TRANSFORMER_ENGINE] = lambda: transformer_engine(kind, a, ws, out)
    found |= {rival: theirs(name) for rival, (name, kinds) in PRODUCTS.items() if rival in libraries and kind in kinds}
    return found | ({BF16: bf16} if kind in ("tiles", "mx") else {})


def column_major(a: Any) -> Any:
    """`a` with contiguous column-major scales. `to_storage` returns a view, which each call would copy."""
    st = a.to_storage("column_major")
    return breccia.ScaledTensor.from_parts(
        st.data, st.scale.contiguous(), st.recipe, st.layout, axis=st.axis, padding=st.padding
    )


def torch_blocks(kind: str, a: Any, ws: list[Any]) -> Call:
    """cuBLAS's blockwise product, called with scales in its own order, so that no copy of them is timed."""
    from torch.nn.functional import ScalingType, scaled_mm

    from breccia_triton.gemm.scaled_mm.scaled_mm import rows_adjacent

    scale = rows_adjacent(a.to_plain().scale)
    across = ScalingType.BlockWise128x128 if kind == "tiles" else ScalingType.BlockWise1x128
    scales = [w.scale.t() if kind == "tiles" else rows_adjacent(w.scale) for w in ws]
    pairs = list(zip([w.data.t() for w in ws], scales, strict=True))

    def call(pair: Any) -> object:
        return scaled_mm(
            a.data, pair[0], scale, ScalingType.BlockWise1x128, pair[1], across, output_dtype=torch.bfloat16
        )  # fmt: skip

    return rotating(call, pairs)


def transformer_engine(kind: str, a: Any, ws: list[Any], out: Any) -> Call:
    """TransformerEngine's product of the same codes and scales: its own checks, and then cuBLAS."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    left, *weights = (breccia.to_foreign(st, "transformer_engine") for st in (a, *ws))
    options = {"out_dtype": torch.bfloat16, "out": out, "use_split_accumulator": not kind.endswith("fast")}
    return rotating(lambda w: general_gemm(w, left, **options)[0], weights)


def grouped_makers(kind: str, a: Any, ws: list[Any], out: Any) -> dict[str, Make]:
    """Products of uneven groups. torch supports only row scales, so it multiplies the matrices of tiles with row scales."""
    ends = ends_of(a.shape[0], a.data.device)

    def ours() -> Call:
        options = {"out": out, "prefer": "cuda.fp8_grouped_matmul"}
        return rotating(lambda w: breccia.grouped_matmul(a, w, ends, "bfloat16", **options), [w.mT for w in ws])

    def theirs() -> Call:
        rows = kind == "grouped row"
        left, rights = (a, ws) if rows else operands("grouped row", *out.shape, a.shape[-1], a.data.device.type)
        scale = left.scale.reshape(-1)

        def call(w: Any) -> object:
            scales = w.scale.reshape(EXPERTS, -1)
            return torch._scaled_grouped_mm(
                left.data, w.data.mT, scale, scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=False
            )  # fmt: skip

        return rotating(call, rights)

    return {OURS: ours, TORCH if kind == "grouped row" else TORCH_ROWS: theirs}
