"""Which calls the kernel takes, and how long it needs. Imports neither torch nor Triton, so that `explain` stays fast."""

import math


def accepts(call):
    weight = call.b
    if call.a.dtype != "float16":
        return f"activations are {call.a.dtype}; it multiplies float16"
    if weight.layout is None or not weight.shape:  # `explain` of recipes alone
        return None
    if weight.ndim != 2 or weight.axis != -2 or weight.layout.block(-2) != (1, None):
        return "the weight has to be w.mT of a matrix with one scale for each row"
    return "the generic algorithm runs for empty operands" if call.a.empty or weight.empty else None


def seconds(call):
    """The estimated time: operations at 200 TFLOP/s, or the weight's bytes at 3 TB/s. Measure your own."""
    if not call.a.shape or not call.b.shape:
        return 1e-5
    (k, n), m = call.b.shape[-2:], math.prod(call.a.shape[:-1])
    return 5e-6 + max(2 * m * n * k / 200e12, n * k / 3e12)
