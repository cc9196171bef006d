"""Several ops in one graph, which makes recipes and layouts and finds equal ones outside itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import breccia

RECIPES = {spec: breccia.recipe(spec) for spec in ("mxfp8", "nvfp4", "fp8_block", "int4")}
#: Global, as Dynamo compares what it finds in globals with what a graph makes, unlike arguments.
WEIGHTS = {
    spec: breccia.cast(torch.randn(32, 128, generator=torch.Generator().manual_seed(n)), recipe)
    for n, (spec, recipe) in enumerate(RECIPES.items())
}
HISTORY = breccia.AmaxHistory("fp8_delayed")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def numbers(seed: int) -> Any:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def values(*found: Any) -> list[Any]:
    return [breccia.dequantize(st) for st in found]


def of_one_recipe(spec: str, x: Any) -> Any:
    """The recipe by name, the global one and that of a weight, in casts before the weight."""
    st, weight = breccia.cast(x, spec), WEIGHTS[spec]
    same = type(st.layout) is type(weight.layout), st.recipe == weight.recipe
    others = breccia.cast(x, RECIPES[spec]), breccia.cast(x, weight.recipe), breccia.cast(x, breccia.recipe(spec))
    return *values(st, *others, st.mT, st[:32], weight, weight.mT, weight[:16]), *same


@pytest.mark.long
@pytest.mark.parametrize("spec", RECIPES)
def test_a_graph_takes_a_weight_under_the_recipe_and_layout_of_a_cast_before(spec: str) -> None:
    def uses(x: Any) -> Any:
        return of_one_recipe(spec, x)

    *found, same_layout, same_recipe = compiled(uses)(numbers(1))
    *expected, _, _ = uses(numbers(1))
    assert all(map(torch.equal, found, expected)) and same_layout and same_recipe


@pytest.mark.long
def test_one_graph_has_the_values_and_gradients_of_several_ops_under_several_recipes() -> None:
    """Each op that has a gradient has its own array, so that no gradients are added in an order of the compiler."""

    def ops(x: Any, to_ste: Any, to_clip: Any, to_matmul: Any, to_cast: Any) -> Any:
        st = breccia.cast(x, "mxfp8")
        along, across = breccia.cast_pair(x, "mxfp8")
        delayed, history = HISTORY.cast(x)
        made = values(
            st, along, across, delayed, breccia.requantize(st, "fp8_block"), breccia.requantize(WEIGHTS["int4"], "mxfp8")
        )
        return (
            *made,
            history.scale,
            breccia.AmaxHistory("fp8_delayed").update(x).scale,  # type: ignore[arg-type]
            breccia.matmul(st, WEIGHTS["mxfp8"].mT),
            breccia.cast_ste(to_ste, "nvfp4"),
            breccia.cast_ste_clipped(to_clip, breccia.recipe("int4", group_size=16), clip="scale"),
            breccia.matmul(to_matmul, WEIGHTS["int4"].mT, "float16", bias=torch.ones(32)),
            breccia.cast_matmul(to_cast, "fp8_block", WEIGHTS["nvfp4"].mT),
        )

    inputs = [[numbers(n).requires_grad_(n > 0) for n in range(5)] for _ in range(2)]
    results = [function(*given) for function, given in zip((compiled(ops), ops), inputs, strict=True)]
    assert all(map(torch.equal, *results))
    for found in results:
        torch.stack([y.float().square().sum() for y in found[-4:]]).sum().backward()
    for one, other in zip(*(given[1:] for given in inputs), strict=True):
        assert one.grad.any() and torch.equal(one.grad, other.grad)


@pytest.mark.long
@pytest.mark.parametrize("spec", ["fp8_current", "fp8_delayed", "nvfp4"])
def test_a_graph_takes_a_scale_for_each_matrix(spec: str) -> None:
    """As of stacked experts; without it, these recipes compute one for the whole tensor."""
    x = torch.randn(2, 3, 32, 64)
    for scale in (torch.arange(1.0, 7.0).reshape(2, 3), torch.arange(1.0, 3.0), torch.tensor(2.0)):

        def parts(x: Any, scale: Any) -> tuple[Any, ...]:
            st = breccia.cast(x, spec, scale=scale)
            level = st.scale if st.global_scale is None else st.global_scale
            return (
                level * 1,
                breccia.dequantize(st),
                *(breccia.dequantize(one) for one in breccia.cast_pair(x, spec, scale=scale)),
            )

        for found, expected in zip(compiled(parts)(x, scale), parts(x, scale), strict=True):
            assert torch.equal(found, expected)
        operand = (x, breccia.recipe(spec).to_json(), -1, scale, "nearest", None, "propagate")
        torch.library.opcheck(torch.ops.breccia.cast, operand, test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("amaxes", "message"),
    [
        (np.ones(2, np.float32), "record_amax inside torch.compile takes a torch array, or .. for none"),
        ([1.0, 2.0], "record_amax inside torch.compile takes a torch array, or .. for none"),
        (torch.ones(2, dtype=torch.float16), "AmaxHistory: amaxes must be a float32 array.*got an array of float16"),
        (torch.ones(2, 2), r"AmaxHistory: amaxes must have shape \(n,\); got"),
    ],
    ids=["numpy", "list", "float16", "two axes"],
)
def test_a_graph_drops_no_history_that_it_cannot_take(amaxes: Any, message: str) -> None:
    def step(x: Any) -> Any:
        return breccia.AmaxHistory(breccia.DelayedScaling(), amaxes).update(x).amaxes

    with pytest.raises(Exception, match=message):
        compiled(step)(torch.ones(4, 32))


def test_a_graph_is_kept_where_an_equal_weight_replaces_a_global_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(x: Any) -> Any:
        return breccia.matmul(breccia.cast(x, "mxfp8"), WEIGHTS["mxfp8"].mT)

    fast = compiled(product)
    assert torch.equal(fast(numbers(1)), product(numbers(1)))
    monkeypatch.setitem(WEIGHTS, "mxfp8", breccia.cast(numbers(2)[:32], breccia.MXFP8BlockScaling()))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(fast(numbers(1)), product(numbers(1)))
