"""Operands that no op computes on: every op refuses each with an error of breccia that says what it got."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import breccia

torch = pytest.importorskip("torch")
X = np.random.default_rng(0).standard_normal((64, 256), np.float32)
T = torch.from_numpy(X)
RECIPE, DELAYED = breccia.recipe("mxfp8"), breccia.recipe("fp8_delayed")


def nested(layout: Any) -> Any:
    return torch.nested.nested_tensor([torch.ones(4, 256), torch.ones(3, 256)], layout=layout)


def per_channel() -> Any:
    return torch.quantize_per_channel(T, torch.ones(64), torch.zeros(64), 0, torch.qint8)


def odd(kind: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental or deprecated, says torch of some
        return ODD[kind]()


ODD: dict[str, Callable[[], Any]] = {
    "list": X.tolist,
    "tuple": lambda: tuple(X.tolist()),
    "None": lambda: None,
    "text": lambda: "abc",
    "number": lambda: 1.5,
    "class": lambda: np.float32,
    "objects": lambda: np.empty((64, 256), object),
    "integers": lambda: X.astype(int),
    "complex": lambda: X.astype(np.complex64),
    "structured": lambda: np.zeros((64, 256), [("a", "f4")]),
    "dates": lambda: np.zeros((64, 256), "M8[s]"),
    "masked": lambda: np.ma.masked_array(X, X > 0),
    "0-D": lambda: torch.tensor(1.0),
    "float8": lambda: T.to(torch.float8_e4m3fn),
    "per-tensor quantized": lambda: torch.quantize_per_tensor(T, 0.1, 0, torch.qint8),
    "per-channel quantized": per_channel,
    "complex32": lambda: T.to(torch.complex32),
    "conjugate": lambda: T.to(torch.complex64).conj(),
    "sparse": T.to_sparse,
    "sparse rows": T.to_sparse_csr,
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
}


def ops(v: Any) -> dict[str, Callable[[], Any]]:
    """Every op, with `v` in place of each of its operands."""
    like: Any = T if isinstance(v, torch.Tensor) else X
    w, ends = breccia.cast(like, RECIPE), (torch if like is T else np).asarray([32, 64])
    experts = breccia.cast(like.reshape(2, 32, 256), RECIPE)
    return {
        "cast": lambda: breccia.cast(v, RECIPE),
        "cast along -2": lambda: breccia.cast(v, RECIPE, axis=-2),
        "stochastic": lambda: breccia.cast(v, "int4", axis=-2, rounding="stochastic", seed=1),
        "cast_pair": lambda: breccia.cast_pair(v, RECIPE),
        "cast_ste": lambda: breccia.cast_ste(v, RECIPE, axis=-2),
        "cast_ste_clipped": lambda: breccia.cast_ste_clipped(v, RECIPE, (-1.0, 1.0)),
        "matmul a": lambda: breccia.matmul(v, w.mT),
        "matmul b": lambda: breccia.matmul(w, v),
        "cast_matmul": lambda: breccia.cast_matmul(v, RECIPE, w.mT),
        "grouped a": lambda: breccia.grouped_matmul(v, experts.mT, ends),
        "grouped offsets": lambda: breccia.grouped_matmul(like, experts.mT, v),
        "dequantize": lambda: breccia.dequantize(v),
        "dequantize out": lambda: breccia.dequantize(w, out=v) if v is not None else breccia.dequantize(v),
        "requantize": lambda: breccia.requantize(v, RECIPE),
        "update": lambda: breccia.AmaxHistory(DELAYED).update(v),
        "AmaxHistory.cast": lambda: breccia.AmaxHistory(DELAYED).cast(v),
        "AmaxHistory.cast_pair": lambda: breccia.AmaxHistory(DELAYED).cast_pair(v),
        "explain": lambda: breccia.explain("cast", v, RECIPE) if hasattr(v, "dtype") else breccia.cast(v, RECIPE),
    }


@pytest.mark.parametrize("kind", ODD)
def test_every_op_refuses_it(kind: str) -> None:
    v = odd(kind)
    for name, call in ops(v).items():
        if (kind, name) in (("0-D", "update"), ("integers", "grouped offsets"), ("integers", "explain"), ("0-D", "explain")):
            continue  # they take it
        try:
            call()
        except breccia.BrecciaError as e:
            assert len(str(e)) > 20, (name, str(e))
        except Exception as e:
            raise AssertionError(f"{name} of {kind} raised {type(e).__name__}: {e}") from e
        else:
            assert name == "explain", f"{name} took {kind}"


#: A history's amaxes and scale -> what the message says.
HISTORIES: dict[str, tuple[Any, Any, str]] = {
    "two axes": (np.ones((2, 2), np.float32), 1.0, r"amaxes must have shape \(n,\); got \(2, 2\)"),
    "no axis": (np.ones((), np.float32), 1.0, r"amaxes must have shape \(n,\); got \(\)"),
    "FP16": (np.ones(2, np.float16), 1.0, "amaxes must be a float32 array, or .*; got an array of float16. Convert it"),
    "integers": (np.ones(2, np.int32), 1.0, "amaxes must be .*; got an array of int32"),
    "a list": ([1.0, 2.0], 1.0, "amaxes must be .*; got list"),
    "None": (None, 1.0, "amaxes must be .*; got NoneType"),
    "a scale of one axis": ((), np.ones(1, np.float32), r"scale must have shape \(\); got \(1,\)"),
    "an integer as scale": ((), np.ones((), np.int32), "scale must be a float32 array or a number; got an array of int32"),
    "True as scale": ((), True, "scale must be .*; got bool"),
    "text as scale": ((), "1", "scale must be .*; got str"),
    "no scale": ((), None, "scale must be .*; got NoneType"),
}


@pytest.mark.parametrize("x", [X, T], ids=["numpy", "torch"])
@pytest.mark.parametrize("kind", HISTORIES)
def test_a_history_of_anything_but_fp32_is_refused(kind: str, x: Any) -> None:
    """Bits of FP16 amaxes, say, would be read as others: a model's `.half()` converts its buffers."""
    amaxes, scale, message = HISTORIES[kind]
    if x is T:
        amaxes, scale = (torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in (amaxes, scale))
    history = breccia.AmaxHistory(DELAYED, amaxes, scale)
    for call in (history.update, history.cast, history.cast_pair):
        with pytest.raises(breccia.BrecciaError, match=f"AmaxHistory: {message}"):
            call(x)


def test_a_history_of_another_framework_or_device_is_refused_by_name() -> None:
    """As of a file that was loaded as arrays of NumPy."""
    for x, other, message in (
        (T, X, "x is a torch array and amaxes a numpy array; move both to one framework"),
        (X, T, "x is a numpy array and amaxes a torch array; move both to one framework"),
        (T.to("meta"), T, "x is on meta and amaxes on cpu; move both to one device"),
    ):
        history = breccia.AmaxHistory(DELAYED).update(other)
        for call in (history.update, history.cast, history.cast_pair):
            with pytest.raises(breccia.UnsupportedError, match=message):
                call(x)


@pytest.mark.parametrize("kind", ["nested", "sparse", "per-tensor quantized", "conjugate", "list", "text"])
def test_no_supplied_scale_is_one(kind: str) -> None:
    v = odd(kind)
    with pytest.raises(breccia.BrecciaError, match="scale"):
        breccia.cast(T if isinstance(v, torch.Tensor) else X, "fp8_current", scale=v)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: breccia.cast(X.tolist(), "mxfp8", axis=-2), "x must be an array of an installed framework (.*); got list"),
        (lambda: breccia.cast(T.to(torch.float8_e4m3fn), "mxfp8", axis=-2), "cast takes float32.*; got float8_e4m3fn. Convert"),
        (lambda: breccia.cast(odd("nested"), "mxfp8"), "nested tensor of 2 parts.*x.unbind.*to_padded_tensor"),
        (lambda: breccia.cast(odd("jagged"), "mxfp8"), "nested tensor of 2 parts"),
        (lambda: breccia.cast(odd("nested"), "mxfp8", axis=-2), "x is a torch array whose shape cannot be read"),
        (lambda: breccia.matmul(None, breccia.cast(X, "mxfp8").mT), "a must be an array"),
        (lambda: breccia.matmul(X, breccia.cast(X, "mxfp8").mT, out=np.zeros((64, 64))), "dtype float32; got .* float64"),
        (lambda: breccia.dequantize(breccia.cast(T, "mxfp8"), out=T.to_sparse()), "sparse tensor .torch.sparse_coo.*dense"),
        (lambda: breccia.metrics(T.to_sparse(), X), "sparse tensor .torch.sparse_coo.*dense"),
        (lambda: breccia.metrics(T.to("meta"), X), "meta device has no values"),
        (lambda: breccia.ScaledTensor(X, X, "mxfp8", breccia.PerTensor(), padding="1"), "padding"),
    ],
)
def test_the_message_says_what_to_do(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(breccia.BrecciaError, match=message):
        call()


# ------------------------------------------------------------------------------------------------ pickles and bundles


@pytest.mark.parametrize("value", [None, 3, "x", [], object(), np.ones((2, 2)), T])
def test_a_damaged_pickle_is_refused(value: Any) -> None:
    """Each field of a tensor and of its recipe is replaced, and the last ones are left out."""
    st = breccia.cast(X, "nvfp4")
    for thing in (st, breccia.cast(X, "int4,symmetric=False,signed=False"), st.recipe, st.layout):
        rebuild, fields = thing.__reduce_ex__(4)[:2]
        cases = [(*fields[:n], value, *fields[n + 1 :]) for n in range(len(fields))]
        if thing is st:
            cases += [fields[:n] for n in range(8)]
        for case in cases:
            try:
                rebuild(*case)
            except breccia.BrecciaError as e:
                assert str(e)
    assert pickle.loads(pickle.dumps(st)).digest() == st.digest()
    with pytest.raises(breccia.LayoutError, match=re.escape("the pickle of a ScaledTensor is damaged (ValueError: not enough")):
        st.__reduce_ex__(4)[0](st.data)
    with pytest.raises(breccia.RecipeError, match=re.escape("is damaged (TypeError: 'int' object is not iterable)")):
        st.recipe.__reduce_ex__(4)[0](type(st.recipe), 3)


@pytest.mark.parametrize("header", [b"{}", None, 3, ["{}"], {}])
def test_the_header_of_a_bundle_is_text(header: Any) -> None:
    bridges = pytest.importorskip("breccia_bridges.dlpack")
    with pytest.raises(breccia.BrecciaError, match=f"header of a bundle is JSON text.*got a {type(header).__name__}"):
        bridges.Bundle(header, data=X, scale=X)


def test_a_dot_general_differentiates_arrays_of_numpy() -> None:
    jax = pytest.importorskip("jax")
    from breccia_jax import DotGeneral

    dot, w = DotGeneral("mxfp8"), X[:32].T.copy()
    loss = jax.value_and_grad(lambda x, w: dot(x, w, (((1,), (0,)), ((), ()))).sum(), (0, 1))
    (value, found), (expected, wanted) = loss(X, w), loss(jax.numpy.asarray(X), jax.numpy.asarray(w))
    assert value == expected and all(map(np.array_equal, found, wanted))
