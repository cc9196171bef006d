"""FP64 references of products, which the benchmarks check before they time a product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Rows of a product that are checked, in all columns.
CHECKED = 64
#: A product with a larger relative error is wrong, for random data and a BF16 result.
WRONG = 0.02
#: Unit roundoff of BF16 (8 significant bits), to which a product is rounded once.
UNIT = 2.0**-8


@dataclass(frozen=True)
class Reference:
    """Rows of a product in FP64. rows: their indices. allowed: the contract's bound of the error of sums, before rounding."""

    rows: Any
    exact: Any
    allowed: Any

    def error_over_bound(self, found: Any) -> float:
        """The largest error of `found`, as a multiple of the bound of docs/spec/numerics.md, section 9.

        found: the whole product in BF16. Its sums are within `allowed` of the exact ones, and rounding changes each by at most
        UNIT times its magnitude. Raises ValueError for a wrong product.
        """
        error = found[self.rows].double() - self.exact
        relative = (error.norm() / self.exact.norm()).item()
        if not relative < WRONG:
            raise ValueError(f"the relative error is {relative:.3g}")
        return (error.abs() / (self.allowed * (1 + UNIT) + UNIT * self.exact.abs())).max().item()


def reference(a: Any, w: Any, ends: Any = None) -> Reference:
    """The reference of a (M, K) times the transpose of w (N, K), for randomly chosen rows.

    ends: the row after each group, for grouped products with w (E, N, K). Rows after the last group are not chosen.
    """
    import torch

    import breccia
    from breccia.kernels import bounds

    k, device = a.shape[-1], a.data.device
    count = a.shape[0] if ends is None else int(ends[-1])
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:CHECKED].sort().values.to(device)
    x = breccia.dequantize(a)[rows].double()
    groups = [(x, w)]
    if ends is not None:
        experts = torch.searchsorted(ends.to(rows.dtype), rows, right=True).tolist()
        groups = [(x[[i for i, e in enumerate(experts) if e == expert]], w[expert]) for expert in sorted(set(experts))]
    products = [(left @ right, left.abs() @ right.abs()) for left, right in ((u, values_of(v)) for u, v in groups)]
    exact, magnitude = (torch.cat(parts) for parts in zip(*products, strict=True))
    in_tensor_cores = bounds.in_tensor_cores(a.recipe, w.recipe, device.type)
    return Reference(rows, exact, bounds.accumulated(magnitude, k, k, in_tensor_cores))


def values_of(w: Any) -> Any:
    """The values of a weight (N, K) in FP64, transposed."""
    import breccia

    return breccia.dequantize(w).double().t()
