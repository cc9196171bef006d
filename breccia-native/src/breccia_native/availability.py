"""Was there a compiler, one that could compile each extension, when this distribution was built?"""

from __future__ import annotations

from importlib.util import find_spec


def missing(device: object) -> str | None:
    """Why the compiled microkernels cannot run, or None."""
    if any(find_spec(f"breccia_native.{name}") is None for name in ("microkernels", "decoding", "measuring", "searching")):
        return "breccia-native was built without a C compiler; install one and reinstall breccia-native"
    return None


def missing_products(device: object) -> str | None:
    """Why the compiled products cannot run, or None."""
    if any(find_spec(f"breccia_native.{name}") is None for name in ("products", "columns")):
        return "breccia-native was built without GCC or Clang; install one and reinstall breccia-native"
    return None


def missing_for_jax(device: object) -> str | None:
    """Why compiled functions of JAX cannot call the kernels, or None."""
    if find_spec("breccia_native.xla_calls") is None:
        return "breccia-native was built without a C compiler; install one and reinstall breccia-native"
    return missing(device) or missing_products(device)
