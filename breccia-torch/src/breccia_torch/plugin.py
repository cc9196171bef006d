"""Everything breccia-torch adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Framework, Kernel, hookimpl

api = 1
#: What to do instead of passing a DTensor.
_SHARDED = "breccia does not compute on sharded tensors yet: quantize before distributing, or pass x.to_local()."


@hookimpl
def breccia_frameworks() -> Iterable[Framework]:
    ops = "breccia_torch.ops"
    return [
        Framework(
            "torch",
            "torch",
            ("Tensor",),
            f"{ops}:TORCH",
            refuses=(("distributed.tensor.DTensor", _SHARDED),),
            devices=f"{ops}:devices",
            container="breccia_torch.container:register",
            frontend="breccia_torch.frontend",
            opaque=f"{ops}:opaque",
            capability=f"{ops}:capability",
            traced="breccia_torch.graphs",
        )
    ]


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    plan = "breccia.kernels.plans:plan_on_numpy"
    for op, module in (("cast", "numpy.plan"), ("dequantize", "plans")):
        accepts = f"breccia.kernels.{module}:accepts_{op}"
        yield Kernel(op, "torch", f"breccia_torch.cpu:{op}", f"torch.cpu.{op}", device="cpu", accepts=accepts, plan=plan)
    target = "breccia_torch.cpu:grouped_matmul"
    yield Kernel("grouped_matmul", "torch", target, "torch.cpu.grouped_matmul", device="cpu", plan=plan)
