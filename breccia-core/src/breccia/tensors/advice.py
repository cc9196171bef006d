"""What to call in place of an array's attribute that ScaledTensor lacks."""

from __future__ import annotations

_VALUES = "its values are breccia.dequantize(st)"
_AS_FLOAT = (
    "codes have no other precision: values of that dtype are breccia.dequantize(st, out_dtype={!r}), another format is "
    "breccia.requantize(st, recipe)"
)
_FROZEN = "codes take no gradient: breccia.cast_ste(x, recipe) passes one through a cast"
_SHAPED = "st.reshape(...) changes leading axes, st.mT swaps the last two"

#: Attribute -> the calls to make.
ADVICE: dict[str, str] = {
    "numpy": f"{_VALUES}, which have the .numpy() of their framework; "
    "breccia.bridges.from_dlpack(breccia.bridges.to_dlpack(st), 'numpy') moves the codes",
    "tolist": _VALUES,
    "item": _VALUES,
    "cpu": "st.to('cpu') moves it",
    "cuda": "st.to('cuda') moves it",
    "astype": _AS_FLOAT.format("float16"),
    "type": _AS_FLOAT.format("float16"),
    "float": _AS_FLOAT.format("float32"),
    "half": _AS_FLOAT.format("float16"),
    "bfloat16": _AS_FLOAT.format("bfloat16"),
    "clone": "it is frozen; copy.deepcopy(st) copies its components",
    "copy": "it is frozen; copy.deepcopy(st) copies its components",
    "contiguous": "kernels take any strides; st.data and st.scale are its components",
    "detach": _FROZEN,
    "requires_grad": _FROZEN,
    "requires_grad_": _FROZEN,
    "grad": _FROZEN,
    "view": _SHAPED,
    "flatten": _SHAPED,
    "permute": _SHAPED,
    "transpose": _SHAPED,
    "swapaxes": _SHAPED,
    "t": _SHAPED,
    "squeeze": f"st[0] drops an axis; {_SHAPED}",
    "unsqueeze": f"a leading axis of one is st.reshape(1, *st.shape); {_SHAPED}",
    "block_until_ready": "jax.block_until_ready(st) waits for its components",
    "matmul": "the product is breccia.matmul(a, b)",
    "mean": _VALUES,
    "sum": _VALUES,
    "max": _VALUES,
    "min": _VALUES,
    "abs": _VALUES,
}
