"""On which devices the Triton kernels run. Imports no Triton (for `explain`), and torch only for products that XLA calls."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from breccia import BrecciaError, Device, ScalingRecipe
from breccia.backend import Call, targets
from breccia.internal import install

#: The least compute capability whose instructions the kernels use.
LEAST = (8, 0)
#: The first version of jax-triton that passes operands in another way than the kernels' launches do.
JAX_TRITON = (0, 4)


def available(device: Device) -> str | None:
    """Why the kernels cannot run on a device, or None."""
    if not targets.installed("triton"):
        return "triton is not installed; pip install triton"
    if device.capability and tuple(device.capability) < LEAST:
        return f"it needs compute capability {'.'.join(map(str, LEAST))}; {device} has {'.'.join(map(str, device.capability))}"
    return None


def available_to_jax(device: Device) -> str | None:
    """Why the kernels cannot run on JAX arrays of a device, or None."""
    if (why := available(device)) is not None:
        return why
    if not targets.installed("jax_triton"):
        return f"jax-triton is not installed; {install('breccia-triton[jax]')}"
    release = re.match(r"(\d+)\.(\d+)", present := _version("jax-triton"))
    if release is not None and (int(release[1]), int(release[2])) >= JAX_TRITON:
        return f"it needs jax-triton below 0.4, and {present} is installed; pip install 'jax-triton<0.4'"
    return None


def missing_for_xla() -> str | None:
    """Why XLA cannot call torch's kernels, or None: breccia-native passes XLA's memory and stream to torch."""
    if not targets.installed("breccia_native.xla_calls"):
        return f"breccia-native is not installed, or was built without a C compiler; {install('breccia-native')}"
    import_module("torch")  # a process of JAX has not imported it, and its build and its measurements count
    return None


def refused_by_xla(call: Call) -> str | None:
    """Why a program of XLA cannot hold the operands of a product of torch, or None: it keeps their recipes as text."""
    for name, operand in (("a", call.a), ("b", call.b)):
        if operand is None or operand.recipe is None:
            continue
        try:
            ScalingRecipe.from_json(operand.recipe.to_json())
        except BrecciaError as e:
            return f"{name}: XLA keeps recipes as text, and cannot read this one: {e}"
    return None


def _version(distribution: str) -> str:
    """The version of a distribution; "" of a module without one."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
