"""The dialect of Quarry as a plug-in of one file: signed bytes with the last column first, and an FP32 step for each row.

A weight `up.weight` is stored as `up.bytes` and `up.steps`; config.json says `"quant_method": "quarry"`.
"""

import numpy as np

from breccia import Dialect, INT8Scaling, UnsupportedError, from_buffer, hookimpl
from breccia.backend import Entry, StoredForm, TensorGroup, ValueForm

api = 1


@hookimpl
def breccia_dialects():
    yield Dialect(
        "quarry",
        "Quarry",
        configs=({"quant_method": ("quarry",)},),
        groups=(TensorGroup({"bytes": ("I8",), "steps": ("F32",)}),),
        form="quarry_breccia:form",
        read="quarry_breccia:read",
        stored="quarry_breccia:stored",
        write="quarry_breccia:write",
        recipes=("int8",),
    )


def form(value):
    shape = value.entries["bytes"].shape
    value.need(len(shape) == 2, f"'bytes' has shape {list(shape)}; Quarry stores matrices.")
    value.need_shape("steps", (shape[0],))
    return ValueForm(INT8Scaling(), shape)


def read(value, form):
    steps = value["steps"]
    value.need(bool(np.isfinite(steps).all()), "'steps' has numbers that are not finite. Quantize the weight again.")
    codes = np.ascontiguousarray(value["bytes"][:, ::-1])
    return from_buffer(codes, steps[:, None], form.recipe, form.recipe.layout.fitted(form.shape))


def stored(form):
    if form.recipe != INT8Scaling() or len(form.shape) != 2 or form.is_transposed:
        raise UnsupportedError(f"Quarry stores matrices of recipe 'int8' with a step per row, not {form.recipe.spec!r}.")
    return StoredForm({"bytes": Entry("I8", form.shape), "steps": Entry("F32", form.shape[:1])})


def write(st, stored):
    return {"bytes": np.ascontiguousarray(st.data[:, ::-1]), "steps": st.scale[:, 0]}
