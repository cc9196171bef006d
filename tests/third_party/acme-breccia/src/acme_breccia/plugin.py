"""Everything acme-breccia adds to breccia. Imports breccia and the standard library alone."""

from dataclasses import dataclass

from breccia import Bridge, Float8BlockScaling, Format, Integer, Kernel, Level, ScalingRecipe, hookimpl
from breccia.backend import F16

api = 1
INT6 = Integer("INT6", 6, None, "Acme NPU manual, section 3", signed=True)


@dataclass(frozen=True)
class Acme6Scaling(ScalingRecipe):
    """Six-bit integers, four in three bytes; 64 along K share an FP16 scale."""

    name = "acme6"
    source = "Acme NPU manual, section 3"
    format = Format(INT6, (Level(F16, (1, 64)),))


@hookimpl
def breccia_recipes():
    return [Acme6Scaling]


@hookimpl
def breccia_kernels():
    npu, cuda, fp8 = "acme_breccia.npu", "acme_breccia.cuda", Float8BlockScaling
    yield Kernel("cast", "torch", f"{npu}:cast", "acme.cast", recipe=Acme6Scaling, available=f"{npu}:missing")
    yield Kernel("dequantize", "torch", f"{cuda}:dequantize", "acme.dequantize", fp8, device="cuda", accepts=f"{cuda}:accepts")


@hookimpl
def breccia_bridges():
    return [Bridge(name, f"acme_breccia.bridge:{name}") for name in ("to_acme", "from_acme")]
