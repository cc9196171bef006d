"""What bench_matmul.py measures: kinds of products, shapes, the plan of a run, and the names of its arms."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import rivals
from rivals import OLD, TRANSFORMER_ENGINE

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
#: Rivals that are kernels of breccia's table: the name of the kernel, and the kinds that it multiplies.
IN_TABLE = {HUMMING: ("humming.fp8_matmul", ("tiles", "row")), DEEP_GEMM: ("deep_gemm.fp8_matmul", ("tiles",))}
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
        else:
            try:
                found[name] = version(package)
            except PackageNotFoundError:  # a module without a package, such as a checkout
                found[name] = "of unknown version"
    if OLD in wanted or not (wanted or rivals.absence(OLD)):
        found[OLD] = rivals.OLD_VERSION
    else:
        absent[OLD] = "left out" if wanted else rivals.absence(OLD)
    return found, absent
