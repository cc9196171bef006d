"""Everything breccia-torch adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Bridge, Framework, Kernel, hookimpl

api = 1
#: What kernels that decode know of formats besides one scale for a block.
KNOWS = ("coded_scales",)
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
        accepts, knows = f"breccia.kernels.{module}:accepts_{op}", KNOWS if op == "dequantize" else ("scale_search",)
        name, target = f"torch.cpu.{op}", f"breccia_torch.cpu:{op}"
        yield Kernel(op, "torch", target, name, device="cpu", accepts=accepts, plan=plan, knows=knows)
    target = "breccia_torch.cpu:grouped_matmul"
    yield Kernel("grouped_matmul", "torch", target, "torch.cpu.grouped_matmul", device="cpu", plan=plan, knows=KNOWS)


@hookimpl
def breccia_bridges() -> Iterable[Bridge]:
    needs = ("torch", "transformers")
    return [
        Bridge(name, f"breccia_torch.hf.{target}", needs, "'breccia-torch[hf]'")
        for name, target in (
            ("calibrate", "calibrating:calibrate"),
            ("merge_divergence", "merge_divergence:merge_divergence"),
            ("divergences", "divergences:divergences"),
        )
    ]
