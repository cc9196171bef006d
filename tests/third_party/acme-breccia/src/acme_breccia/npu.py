"""The kernel of Acme's NPU, and why it cannot run, or None. Loaded when a call asks for it, never before."""

from importlib.util import find_spec


def missing(device):
    return None if find_spec("acme_npu") else "acme_npu, the driver of Acme's NPU, is not installed"


def cast(x, recipe, options):
    import acme_npu

    return acme_npu.cast(x, recipe, options)
