"""On which devices the Triton kernels run. Imports neither torch nor Triton (for `explain`)."""

from __future__ import annotations

from importlib.metadata import version

from breccia import Device
from breccia.backend import targets
from breccia.internal import install

#: The least compute capability whose instructions the kernels use.
LEAST = (8, 0)
#: The first version of jax-triton that passes operands in another way.
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
    if (why := available(device)) is None and not targets.installed("jax_triton"):
        return f"jax-triton is not installed; {install('breccia-triton[jax]')}"
    if why is None and (present := version("jax-triton")) and tuple(map(int, present.split(".")[:2])) >= JAX_TRITON:
        return f"jax-triton {present} passes operands in another way; {install('breccia-triton[jax]')}"
    return why
