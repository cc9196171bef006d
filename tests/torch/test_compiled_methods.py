"""Methods, views and joins of ScaledTensors inside `torch.compile(fullgraph=True)`, with nothing enabled beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import breccia
from breccia import ScaledTensor

#: Packed codes under two levels, tiles of several rows, groups with zero-points, one scale.
SPECS = ("nvfp4", "fp8_block,block_m=4,block_k=16", "int4,group_size=16,signed=false,symmetric=false", "fp8_current")

#: Methods that return tensors, of a tensor of shape (8, 64).
VIEWS: dict[str, Callable[[ScaledTensor], Any]] = {
    "mT": lambda st: st.mT,
    "T": lambda st: st.T,
    "rows": lambda st: st[4:],
    "columns": lambda st: st[..., 16:48],
    "last rows": lambda st: st[-4:, :],
    "of a transpose": lambda st: st.mT[16:32],
    "split": lambda st: st.split([4, 4]),
    "split along columns": lambda st: st.split(32, axis=-1),
    "reshape": lambda st: st.reshape(1, 1, 8, 64),
    "leading": lambda st: st.reshape(1, 8, 64)[0],
    "select leading": lambda st: st.reshape(1, 8, 64).select(0, [0, 0]),
    "gather leading": lambda st: st.reshape(1, 8, 64).select(0, torch.tensor([-1, 0])),
    "stack": lambda st: breccia.stack([st, st]),
    "concat": lambda st: breccia.concat([st, st]),
    "to": lambda st: st.to("cpu"),
    "to_plain": lambda st: st.to_plain(),
    "from_buffer": lambda st: breccia.from_buffer(*whole(st)),
    "values": lambda st: (st.dequantize(), st.mT.dequantize(out_dtype=torch.bfloat16)),
    "metadata": lambda st: (st.shape, st.ndim, st.size, st.nbytes, st.dtype, st.storage, st.framework, len(st), st.device.type),
}
#: Those of rows, where blocks are one row high.
ROWS: dict[str, Callable[[ScaledTensor], Any]] = {
    "row": lambda st: st[1].dequantize(),
    "iteration": lambda st: [row.dequantize() for row in st],
    "select": lambda st: st.select(0, [5, -1]),
    "gather": lambda st: st.select(0, torch.tensor([2, -8, 7])),
    "one of a tensor": lambda st: st.select(0, torch.tensor(3)).dequantize(),
    "every other": lambda st: st[::2],
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def whole(st: ScaledTensor) -> tuple[Any, ...]:
    return st.data, st.scale, st.recipe, st.layout, st.zero_point, st.global_scale, st.axis


def numbers(n: int = 8, k: int = 64) -> Any:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n))


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, ScaledTensor):
        return breccia.bytes_equal(a, b) and (a.layout, a.axis, a.padding) == (b.layout, b.axis, b.padding)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return len(a) == len(b) and all(map(alike, a, b)) if isinstance(a, list | tuple) else a == b


def methods(spec: str) -> dict[str, Any]:
    return VIEWS | (ROWS if spec.startswith(("nvfp4", "int4")) else {})


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="eager", **options)


@pytest.mark.long
@pytest.mark.parametrize("spec", SPECS)
def test_every_method_of_a_tensor_that_a_graph_makes_or_gets_is_traced(spec: str) -> None:
    found = methods(spec)

    def of_numbers(x: Any) -> Any:
        st = breccia.cast(x, spec)
        return [method(st) for method in found.values()]

    def of_tensor(st: ScaledTensor) -> Any:
        return [method(st) for method in found.values()]

    function, operand = (of_numbers, numbers()) if spec in SPECS[:2] else (of_tensor, breccia.cast(numbers(), spec))
    for name, got, expected in zip(found, compiled(function)(operand), function(operand), strict=True):
        assert alike(got, expected), name


def test_a_chain_of_views_is_traced_by_itself() -> None:
    def chain(x: Any) -> Any:
        st = breccia.cast(x, "nvfp4")
        return st, st[2:].mT.dequantize(), st.T

    assert alike(compiled(chain)(numbers()), chain(numbers()))


def test_a_graph_keeps_the_layout_of_a_transposed_column_of_elements() -> None:
    """A tile one row high, which is no block along K: `PerBlockMN(4, 1).mT`."""

    def chain(x: Any) -> Any:
        st = breccia.cast(x, breccia.Float8BlockScaling(block_m=4, block_k=1))
        return st.mT, st.mT.dequantize(), st.mT.mT, st.mT.mT.dequantize(), breccia.matmul(x.mT, st.mT.mT)

    expected = chain(numbers())
    assert expected[0].layout == breccia.PerBlockMN(4, 1).mT and alike(compiled(chain)(numbers()), expected)
    assert alike(compiled(lambda st: st.dequantize())(expected[0]), expected[1])


def test_views_follow_the_sizes_of_a_dynamic_batch() -> None:
    def halves(x: Any) -> Any:
        first, second = breccia.cast(x, "mxfp8").split(x.shape[0] // 2)
        return first.mT.dequantize(), second[1:].dequantize()

    fast = compiled(halves)
    for n in (8, 12, 20):
        assert alike(fast(numbers(n)), halves(numbers(n)))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda st: st.to_storage("transposed"), r"to_storage\('transposed'\) is not supported inside torch.compile"),
        (lambda st: st[:, 3:], "axis 1 .* is stored in units of 16 elements"),
        (lambda st: breccia.concat([st, st * 1 if st is None else other(st)]), "concat inside torch.compile: .*numbers"),
        (lambda st: breccia.from_buffer(st.data, st.scale[:2], *whole(st)[2:]), "scale.shape must be"),
    ],
)
def test_what_a_graph_cannot_do_is_an_error_of_breccia(call: Any, error: str) -> None:
    with pytest.raises(Exception, match=error):
        compiled(lambda x: call(breccia.cast(x, "nvfp4")))(numbers())


def other(st: ScaledTensor) -> ScaledTensor:
    """The same codes under another global scale."""
    return ScaledTensor(st.data, st.scale, st.recipe, st.layout, st.zero_point, st.global_scale + 1, st.axis)


def test_gradients_pass_through_products_with_views() -> None:
    st, x, y = breccia.cast(numbers(), "nvfp4"), numbers(3).requires_grad_(), numbers(3).requires_grad_()

    def loss(x: Any, st: ScaledTensor) -> Any:
        return (breccia.matmul(x, st[4:].mT) ** 2).sum()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(x, st).backward()
    loss(y, st).backward()
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
