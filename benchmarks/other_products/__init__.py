"""Products of other libraries, the rivals of breccia's kernels: humming-kernels, torch's INT4, DeepGEMM.

None of them is known to keep all of the contract of products: docs/kernels/other-libraries.md. They are called here alone.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from breccia import ScaledTensor, UnsupportedError
from breccia.backend import Call, product_options, registry, targets

from . import plans

#: Each product: its function, the module that it calls and how to install it, and what it multiplies.
PRODUCTS = {
    "humming.fp8_matmul": ("humming_products:fp8_matmul", "humming", "pip install humming-kernels", plans.accepts_humming_fp8),
    "humming.weight_only": ("humming_products:weight_only", "humming", "pip install humming-kernels", plans.accepts_humming),
    "torch.int4": ("torch_int4:int4pack_matmul", "torch", "pip install torch", plans.accepts_int4),
    "deep_gemm.fp8_matmul": (
        "deep_gemm_products:deep_gemm_matmul", "deep_gemm", "see github.com/deepseek-ai/DeepGEMM", plans.accepts_deep_gemm,
    ),
}  # fmt: skip


def refused(name: str, a: Any, b: ScaledTensor, out_dtype: str = "bfloat16") -> str | None:
    """Why a product does not multiply these operands, or None."""
    _, module, remedy, accepts = PRODUCTS[name]
    if find_spec(module) is None:
        return f"{module} is not installed; {remedy}"
    known = registry()
    return accepts(
        Call(known.operation("matmul"), "torch", (a, b, None, product_options(out_dtype), known.frameworks["torch"]))
    )


def matmul(name: str, a: Any, b: ScaledTensor, out_dtype: str = "bfloat16", bias: Any = None, out: Any = None) -> Any:
    """`breccia.matmul` by a product. Raises UnsupportedError where it does not multiply the operands."""
    if (why := refused(name, a, b, out_dtype)) is not None:
        raise UnsupportedError(f"matmul: {name}: {why}")
    return targets.load(f"{__name__}.{PRODUCTS[name][0]}")(a, b, product_options(out_dtype, bias, out))
