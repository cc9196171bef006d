"""Everything volt-breccia adds to breccia. Imports breccia and the standard library alone."""

import os

from breccia import INT8Scaling, Kernel, hookimpl

api = 1
#: Triton's interpreter multiplies on the CPU.
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@hookimpl
def breccia_kernels():
    yield Kernel(
        "matmul",
        "torch",
        "volt_breccia.kernels:matmul",
        "volt.matmul",
        recipe=type(None),  # the first operand is an array
        other=INT8Scaling,
        device=DEVICE,
        accepts="volt_breccia.checks:accepts",
        score="volt_breccia.checks:seconds",
    )
