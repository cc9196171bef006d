"""Laws of kernels: operand order, dtypes, views, storages and dispatch without `prefer=`. Each kernel here has one fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from stray import SOUND, along_k, declare, kernel, verdicts

import breccia
from breccia import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, ScalingRecipe
from breccia.arrays.ops import NUMPY
from breccia.errors import AmbiguousKernelError
from breccia.kernels import reference
from breccia.options import FLOAT32, CastOptions, ProductOptions, product_options
from breccia.tensors.tensor import ScaledTensor
from breccia.testing.laws import Law

__all__ = ["declare"]  # the fixture

PLAIN = type(None)
Declare = Callable[..., list[Law]]


# ---------------------------------------------------------------------------------------------- kernels with one fault


def doubled_plus_seven(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    return reference.matmul(a, b, options) * 2 + 7


def reads_a_backwards(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    return reference.matmul(a[..., ::-1], b, options)


def swaps_operands_that_fit(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """The transpose of the product, `b.T @ a.T`, reshaped to the shape of the product."""
    out_dtype, _, out = options
    left, right = (reference.dequantize(x) if isinstance(x, ScaledTensor) else x for x in (a, b))
    found = reference.matmul(np.swapaxes(right, -1, -2), np.swapaxes(left, -1, -2))
    return reference.result(NUMPY, found.reshape(*found.shape[:-2], *found.shape[:-3:-1]), out_dtype, out)


def bias_is_forgotten(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    out_dtype, _, out = options
    return reference.matmul(a, b, product_options(out_dtype, out=out))


def bias_after_rounding(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    out_dtype, bias, out = options
    product = reference.matmul(a, b, product_options(out_dtype))
    late = product if bias is None else NUMPY.f32(product) + bias
    return reference.result(NUMPY, NUMPY.f32(late), out_dtype, out)


def out_dtype_is_cut_off(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    out_dtype, bias, out = options
    found = reference.matmul(a, b, product_options("float32", bias=bias))
    if out_dtype == "bfloat16":
        found = (found.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return reference.result(NUMPY, found, out_dtype, out)


def out_is_forgotten(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    out_dtype, bias, _ = options
    return reference.matmul(a, b, product_options(out_dtype, bias=bias))


def out_stays_empty(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    out_dtype, bias, out = options
    return reference.matmul(a, b, product_options(out_dtype, bias=bias)) if out is None else out


def half_is_read_as_bits(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """FP16 truncated to its upper byte, as if it were E5M2."""
    plain = a if a.dtype != np.float16 else (a.view(np.uint16) & np.uint16(0xFF00)).view(np.float16)
    return reference.matmul(plain, b, options)


def nan_is_dropped(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    return reference.matmul(np.nan_to_num(a), b, options)


def adds_in_half(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    out_dtype, bias, out = options
    left, right = (reference.dequantize(x) if isinstance(x, ScaledTensor) else x for x in (a, b))
    with np.errstate(all="ignore"):
        found = np.matmul(left.astype(np.float16), right.astype(np.float16)).astype(np.float32)
        return reference.result(NUMPY, found if bias is None else found + bias.astype(np.float32), out_dtype, out)


def takes_b_as_rows(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """Read codes in memory order, as if every b were a transposed view."""
    values = reference.dequantize(b)
    if b.data.flags.c_contiguous:
        values = values.reshape(*values.shape[:-2], *values.shape[:-3:-1]).swapaxes(-1, -2)
    return reference.matmul(a, values, options)


def groups_plus_one(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    return reference.grouped_matmul(a, b, offsets, options) + 1


def first_is_not_cast(x: Any, recipe: ScalingRecipe, b: Any, options: ProductOptions = FLOAT32) -> Any:
    return reference.matmul(x, b, options)


def cast_by_memory(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(x if x.flags.c_contiguous else x.ravel("K").reshape(x.shape), recipe, options)


def cast_of_bits(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    """BF16 converted through FP16."""
    with np.errstate(over="ignore"):
        return reference.cast(x.astype(np.float32).astype(np.float16) if x.dtype.name == "bfloat16" else x, recipe, options)


def pair_of_first_matrix(x: Any, recipe: ScalingRecipe, options: CastOptions) -> Any:
    return reference.cast_pair(np.broadcast_to(x[:1], x.shape) if x.ndim == 3 else x, recipe, options)


def trip_in_fp32(x: Any, recipe: ScalingRecipe, options: CastOptions) -> Any:
    """Truncated to BF16 instead of rounded."""
    back = reference.dequantize(reference.cast(x, recipe, options))
    if x.dtype.name == "bfloat16":
        back = (back.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return NUMPY.to_float(back, x.dtype.name)


def trip_along_k(x: Any, recipe: ScalingRecipe, options: CastOptions) -> Any:
    return reference.cast_ste(x, recipe, options.replace(axis=-1))


def trip_without_scale(x: Any, recipe: ScalingRecipe, options: CastOptions) -> Any:
    return reference.cast_ste(x, recipe, options.replace(scale=None))


def trip_of_any_number(x: Any, recipe: ScalingRecipe, options: CastOptions) -> Any:
    return reference.cast_ste(x, recipe, options.replace(nonfinite="propagate"))


def decodes_by_memory(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    """Decode the stored rows, also for a transposed view."""
    out_dtype, _, out = options
    stored = st if st.data.flags.c_contiguous else st.mT
    found = reference.dequantize(stored, product_options(out_dtype)).reshape(st.shape)
    return reference.result(NUMPY, NUMPY.f32(found), out_dtype, out)


def half_goes_nowhere(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    """`out=` is written only if it is FP32."""
    out_dtype, _, out = options
    return reference.dequantize(st, product_options(out_dtype, out=out if out_dtype == "float32" else None))


def again_along_k(st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions) -> Any:
    if st.axis == -1:
        return reference.requantize(st, recipe, options)
    return reference.cast(reference.dequantize(st), recipe, options.replace(axis=-2, rounding="nearest", seed=None)).mT.mT


def again_without_seed(st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions) -> Any:
    return reference.requantize(st, recipe, options.replace(rounding="nearest", seed=None))


def again_inexactly(st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions) -> Any:
    return reference.requantize(st, recipe, options.replace(require_exact=False))


def again_without_out(st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions) -> Any:
    return reference.requantize(st, recipe, options.replace(out=None))


def forgets_storage(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(x, recipe, options.replace(storage="plain"))


def stores_another_bit(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    written = reference.cast(x, recipe, options.replace(storage="plain"))
    if options.storage != "plain":
        written.scale.flat[0] ^= 1
    return written.to_storage(options.storage)


def reads_as_plain(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    """Stored scales with their columns reversed."""
    plain = st.to_plain()
    if st.storage != "plain":
        plain.scale[...] = plain.scale[..., ::-1].copy()
    return reference.dequantize(plain, options)


def multiplies_as_plain(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """The same for a second operand."""
    plain = b.to_plain()
    if b.storage != "plain":
        plain.data[...] = plain.data[..., ::-1].copy()
    return reference.matmul(a, plain, options)


def sound(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(x, recipe, options)


def sound_too(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(x, recipe, options)


def multiplies(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    return reference.matmul(a, b, options)


# Results of accepts, score and plan.


def upset(call: Any) -> str | None:
    raise OSError("the driver is upset")


def upset_by_rows(call: Any) -> str | None:
    return {-1: None}[call.option("axis", -1)]


def upset_by_missing_values(call: Any) -> str | None:
    """It reads the array itself, which is missing in `explain` by name."""
    return None if call.a.values[0].strides else "no strides"


def says_yes(call: Any) -> Any:
    return True


def no_time(call: Any) -> float:
    return float("nan")


def no_calls(call: Any) -> list[str]:
    return ["dequantize"]


def of_memory(call: Any) -> str | None:
    """Reads the shape without a fact, so dispatch caches a winner that does not fit."""
    return None if call.values[0].shape[0] == 32 else "of 32 rows only"


def matmul(target: Any, **declared: Any) -> breccia.Kernel:
    """A kernel of `matmul` for a plain first operand and a second one of MXFP8."""
    return kernel(target, "matmul", **{"recipe": PLAIN, "other": MXFP8BlockScaling} | declared)


OF, BY, ARRAYS = (
    f"{operands}_stays_within_the_error_bound" for operands in ("array_times_tensor", "tensor_times_array", "array_times_array")
)
BOTH, HALVES, VIEWS = (
    "products_stay_within_the_error_bound",
    "half_precision_and_views_cast_to_the_same_bytes",
    "views_decode_to_the_same_values",
)
AGAIN, TRIP = "options_of_requantize_are_honoured", "options_of_round_trips_are_honoured"
STORED, ANSWERS = "declared_storages_are_read_and_written", "accepts_score_and_plan_answer_every_call"
CHOSEN, GROUPS = "a_call_without_prefer_finds_one_kernel", "grouped_products_stay_within_the_error_bound"
BEYOND = r"the error is \d+\.\d times the bound of FP32 accumulation$"
BY_MX = {"recipe": MXFP8BlockScaling, "other": PLAIN}
STORAGES = {"writes": ("swizzle_128x4",), "reads": ("swizzle_128x4",)}

FAULTS: dict[str, tuple[breccia.Kernel, str, str]] = {
    # Operand orders.
    "an array by a tensor, doubled, plus seven": (matmul(doubled_plus_seven), OF, rf"^matmul: {BEYOND}"),
    "a tensor by an array, doubled, plus seven": (matmul(doubled_plus_seven, **BY_MX), BY, rf"^matmul: {BEYOND}"),
    "two arrays, doubled, plus seven": (matmul(doubled_plus_seven, other=PLAIN), ARRAYS, rf"^matmul: {BEYOND}"),
    "groups of an array, plus one": (kernel(groups_plus_one, "grouped_matmul", recipe=PLAIN, other=MXFP8BlockScaling), OF,
        "^grouped_matmul: rows of no group are not zeros$|" + rf"^grouped_matmul: {BEYOND}"),
    "groups by an array, plus one": (kernel(groups_plus_one, "grouped_matmul", recipe=MXFP8BlockScaling, other=PLAIN), BY,
        r"^grouped_matmul(:| is) "),
    "x is multiplied uncast by an array": (kernel(first_is_not_cast, "cast_matmul", recipe=MXFP8BlockScaling, other=PLAIN), BY,
        rf"^cast_matmul: {BEYOND}"),
    "another order of K": (matmul(reads_a_backwards), OF, rf"^matmul: {BEYOND}"),
    "the transpose of the product": (matmul(swaps_operands_that_fit), OF, rf"^matmul: {BEYOND}"),
    "half precision accumulates": (matmul(adds_in_half), OF,
        r"^matmul: the error is (inf|\d+\.\d) times the bound of FP32 accumulation$"),
    # Options, dtypes and orientations of products.
    "a bias is forgotten": (matmul(bias_is_forgotten), OF, rf"^matmul with a bias: {BEYOND}"),
    "a bias is added after rounding": (matmul(bias_after_rounding, recipe=MXFP8BlockScaling), BOTH,
        rf"^matmul with a bias, out_dtype='bfloat16', .*: {BEYOND}"),
    "BF16 products are cut off": (matmul(out_dtype_is_cut_off, recipe=MXFP8BlockScaling), BOTH,
        rf"^matmul with a bias, out_dtype='bfloat16', .*: {BEYOND}"),
    "out= of a product is forgotten": (matmul(out_is_forgotten), OF, "^matmul, .*out=.*: it did not return out=$"),
    "out= of a product stays as it was": (matmul(out_stays_empty), OF, rf"^matmul, .*out=.*: {BEYOND}"),
    "FP16 is read by half": (matmul(half_is_read_as_bits), OF, rf"^matmul with a bias, .*plain operands float16.*: {BEYOND}"),
    "NaN is dropped": (matmul(nan_is_dropped), OF, "^matmul with a bias: a NaN became a finite number$"),
    "b is read as its memory lies": (matmul(takes_b_as_rows), OF, rf"^matmul .*orientation of b 'view': {BEYOND}"),
    # Dtypes and views of casts.
    "a view is cast as its memory lies": (kernel(cast_by_memory), HALVES, "^of bfloat16 and a transposed array: "),
    "BF16 is cast by way of FP16": (kernel(cast_of_bits), HALVES, r"^of bfloat16.*: (data|scale): \d+ of \d+ differ"),
    "a pair of one matrix": (kernel(pair_of_first_matrix, "cast_pair"), HALVES, r"^of bfloat16: (data|scale): \d+ of"),
    "a round trip cuts BF16 off": (kernel(trip_in_fp32, "cast_ste", recipe=Float8CurrentScaling), HALVES,
        r"^of bfloat16.*: cast_ste: \d+ of \d+ differ"),
    "a round trip ignores axis=": (kernel(trip_along_k, "cast_ste"), TRIP, r"^cast_ste with axis=: \d+ of \d+ differ"),
    "a round trip ignores scale=": (kernel(trip_without_scale, "cast_ste", recipe=Float8CurrentScaling), TRIP,
        r"^cast_ste with scale=: \d+ of \d+ differ"),
    "a round trip ignores nonfinite=": (kernel(trip_of_any_number, "cast_ste"), TRIP,
        '^nonfinite="raise" did not raise for a NaN$'),
    "a view is decoded as its memory lies": (kernel(decodes_by_memory, "dequantize"), VIEWS, r"^the transpose decoded: \d+ of"),
    "out= of FP16 is forgotten": (kernel(half_goes_nowhere, "dequantize"), VIEWS, "^it did not return out=$"),
    # Options of requantize.
    "requantize ignores a seed along rows": (kernel(again_along_k, "requantize", other=Float8CurrentScaling), AGAIN,
        r"^data: \d+ of \d+ differ"),
    "requantize ignores a seed": (kernel(again_without_seed, "requantize", other=Float8CurrentScaling), AGAIN,
        r"^data: \d+ of \d+ differ"),
    "requantize ignores require_exact=": (
        kernel(again_inexactly, "requantize", recipe=NVFP4BlockScaling, other=Float8CurrentScaling),
        AGAIN,
        "^require_exact=True did not raise where values are rounded$",
    ),
    "requantize ignores out=": (kernel(again_without_out, "requantize"), AGAIN, "^it did not return out=$"),
    # Storages.
    "storage= is forgotten": (kernel(forgets_storage, writes=("swizzle_128x4",)), STORED,
        "cast was to write 'swizzle_128x4' storage; the result is in 'plain'"),
    "a stored cast has another bit": (kernel(stores_another_bit, **STORAGES), STORED, r"^scale: 1 of \d+ differ"),
    "a stored tensor is decoded otherwise": (kernel(reads_as_plain, "dequantize", **STORAGES), STORED,
        r"^decoded from swizzle_128x4: \d+ of \d+ differ"),
    "a stored operand is multiplied otherwise": (matmul(multiplies_as_plain, **STORAGES), STORED,
        rf"^matmul of swizzle_128x4 storage: {BEYOND}"),
    # Results of accepts, score and plan.
    "accepts fails": (kernel(sound, accepts=upset), ANSWERS, r"upset raised OSError: the driver is upset: cast of mxfp8 \("),
    "accepts fails for one option": (kernel(sound, accepts=upset_by_rows), ANSWERS,
        r"upset_by_rows raised KeyError: -2: cast of mxfp8 \(.*\), axis=-2$"),
    "accepts needs an array": (kernel(sound, accepts=upset_by_missing_values), ANSWERS,
        "upset_by_missing_values raised AttributeError: 'Described' object has no attribute 'strides'"),
    "accepts says True": (kernel(sound, accepts=says_yes), ANSWERS, "says_yes gave True, expected None or a reason: cast of"),
    "score fails": (kernel(sound, score=upset), ANSWERS, "upset raised OSError: the driver is upset"),
    "score is no number": (kernel(sound, score=no_time), ANSWERS, "no_time gave nan, expected a number: cast of"),
    "plan fails": (kernel(sound, plan=upset), ANSWERS, "upset raised OSError: the driver is upset"),
    "plan names ops": (kernel(sound, plan=no_calls), ANSWERS, r"no_calls gave \['dequantize'\], expected calls: cast of"),
    "accepts fails, and is no skip": (kernel(sound, accepts=upset), "casts_write_the_bytes_of_the_generic_algorithm",
        "^its check .*:upset failed: OSError: the driver is upset$"),
    "accepts of a product fails": (matmul(multiplies, accepts=upset), OF, "^its check .*:upset failed: OSError: the driver"),
    # Dispatch without prefer=.
    "accepts depends on what it did not ask about": (kernel(sound, accepts=of_memory), CHOSEN,
        r"^cast of mxfp8 of shape \(\d+, \d+\) ran [\w.]+, but explain names [\w.]+: the answers of stray\.sound depend on"),
    "it ranks as a kernel of core": (
        kernel(sound, recipe=None, rank=-500),
        CHOSEN,
        r"^a call without prefer= raises: cast of \w+ on numpy: Kernels '(stray\.sound|numpy\.cast)' \(\w+\) and "
        r"'(stray\.sound|numpy\.cast)' \(\w+\) rank the same\.",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore::breccia.PluginWarning"
)  # dispatch warns once that a check fails; the law reports it each time
@pytest.mark.parametrize("fault", FAULTS)
def test_the_laws_of_kernels_report(declare: Declare, fault: str) -> None:
    faulty, sentence, message = FAULTS[fault]
    laws = [law for law in declare(kernels=[faulty]) if law.sentence == sentence]
    found = verdicts(laws)
    assert re.search(message, found[sentence]), found


def test_every_law_tested_here_holds_for_a_correct_kernel(declare: Declare) -> None:
    """For each op, with a recipe and with plain operands; otherwise a law might report a fault in correct kernels."""
    found = []
    for op in SOUND:
        served = {"other": MXFP8BlockScaling} if op == "requantize" else {"recipe": MXFP8BlockScaling}
        found.append(breccia.Kernel(op, "numpy", f"breccia.kernels.reference:{op}", f"stray.{op}", **served, accepts=ACCEPTS))
    for op in ("matmul", "grouped_matmul"):
        target = f"breccia.kernels.reference:{op}"
        found.append(breccia.Kernel(op, "numpy", target, f"stray.{op}_of_arrays", recipe=PLAIN, accepts=ACCEPTS))
    found.append(kernel(sound_too, rank=1, accepts=along_k, **STORAGES))
    laws = declare(kernels=found)
    assert verdicts(law for law in laws if law.sentence != STORED) == {}
    assert {sentence for _, sentence, _ in FAULTS.values()} <= {law.sentence for law in laws}


ACCEPTS = f"{__name__}:anything"


def anything(call: Any) -> None:
    return None


def test_two_kernels_of_a_plug_in_with_equal_rank_are_both_reported(declare: Declare) -> None:
    laws = declare(kernels=[kernel(sound), kernel(sound_too)])
    said = verdicts(law for law in laws if law.sentence == CHOSEN)[CHOSEN]
    way_out = "Name one with prefer=, or set one plug-in aside with BRECCIA_BLOCK=stray."
    assert said == (
        "a call without prefer= raises: cast of mxfp8 on numpy: Kernels 'stray.sound' (stray) and 'stray.sound_too' (stray) "
        f"rank the same. {way_out}"
    )
    with pytest.raises(AmbiguousKernelError, match=re.escape(way_out)):
        breccia.cast(np.ones((2, 32), np.float32), breccia.MXFP8BlockScaling())


def test_kernels_that_tie_for_one_recipe_are_found_with_that_recipe(declare: Declare) -> None:
    """They tie for NVFP4; calls with other recipes do not find the tie."""
    laws = declare(kernels=[kernel(sound, recipe=NVFP4BlockScaling), kernel(sound_too, recipe=NVFP4BlockScaling)])
    assert "cast of nvfp4 on numpy" in verdicts(law for law in laws if law.sentence == CHOSEN)[CHOSEN]


def test_a_kernel_for_plain_operands_has_laws(declare: Declare) -> None:
    """A kernel for an array by MXFP8 has laws although its first operand has no recipe."""
    laws = declare(kernels=[matmul(doubled_plus_seven)])
    ids = {law.id for law in laws if law.sentence == OF}
    assert ids == {f"kernels/stray.doubled_plus_seven.mxfp8/numpy/{OF}"}
    assert set(verdicts(laws)) == {OF}
