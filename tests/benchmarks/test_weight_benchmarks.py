"""The benchmarks of quantized weights and of decoders: checks of products, records, goals and tables."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("breccia_triton")

import torch

import breccia
from breccia_triton.cuda import compiler

# ------------------------------------------------------------------------------------------------ what is measured


@pytest.fixture
def row(module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(a Row of a product of 70 rows, the product in FP64, notes). A graph is a list of calls, and takes a second for each."""
    arms = module("weight_arms")
    monkeypatch.setattr(arms, "graph_of", lambda calls, products: (calls, products))
    monkeypatch.setattr(arms, "timed", lambda graphs, rounds: {arm: [float(len(calls))] for arm, (calls, _) in graphs.items()})
    torch.manual_seed(0)
    x, w = torch.randn(70, 256).bfloat16(), breccia.cast(torch.randn(96, 256), "int4")
    values, notes = breccia.dequantize(w).double(), dict[str, str]()
    made = arms.Row(torch.empty(70, 96), arms.reference(x, values), 70, notes)
    return made, x.double() @ values.mT, notes


def test_errors_of_products_are_recorded_over_the_bound(row: Any) -> None:
    made, exact, notes = row
    made.add("breccia", [lambda: exact.bfloat16()])
    made.add("bf16", [lambda: None] * 3, check=False)
    times = made.times(1)
    assert 0.5 < times["breccia"]["error_over_bound"] <= 1  # the rounding to BF16 is the only error
    assert times["bf16"]["median_s"] == 3 and "error_over_bound" not in times["bf16"] and not notes


def test_a_wrong_product_is_noted_and_not_timed(row: Any) -> None:
    made, exact, notes = row
    made.add("breccia", [lambda: (1.03 * exact).bfloat16()])
    made.add("humming", [lambda: torch.full_like(exact, float("nan"))])
    made.add("triton", [lambda: 1 // 0])
    assert made.times(1) == {}
    assert "the relative error is 0.03" in notes["breccia M=70"] and "nan" in notes["humming M=70"]
    assert notes["triton M=70"].startswith("ZeroDivisionError")


def test_groups_of_rows_are_compared_with_their_own_weights(module) -> None:
    arms = module("weight_arms")
    torch.manual_seed(0)
    sizes, x = [3, 0, 5], torch.randn(8, 64).bfloat16()
    values = [torch.randn(32, 64).double() for _ in sizes]
    found = arms.grouped_reference(x, values, sizes)
    right = torch.cat([rows.double() @ w.mT for rows, w in zip(x.split(sizes), values, strict=True)])
    assert found.rows.tolist() == list(range(8)) and found.error_over_bound(right.bfloat16()) <= 1
    with pytest.raises(ValueError, match="the relative error is"):
        found.error_over_bound(right.roll(3, 0))


# ------------------------------------------------------------------------------------------------ tables


def taken(**seconds: float) -> dict[str, Any]:
    return {arm: {"min_s": s, "median_s": s, "max_s": s, "error_over_bound": 0.75} for arm, s in seconds.items()}


def test_goals_of_quantized_weights_are_microseconds_or_ratios_to_rivals(module) -> None:
    tables = module("weight_tables")
    rows = [
        {"format": "int4", "n": 8192, "k": 8192, "m": m, "times": taken(breccia=ours, humming=2e-5, bf16=3e-5)}
        for m, ours in ((1, 10.4e-6), (16, 14.5e-6), (128, 2e-5))
    ]
    cells = {row[0]: row[1:] for row in tables.goals({"rows": rows}).rows}
    assert cells["INT4, M = 1"] == ("≤ 10.5 µs", "10.40", "int4 1×8192×8192", "yes")
    assert cells["INT4, M = 16"][1:] == ("14.50", "int4 16×8192×8192", "no")
    assert cells["4 bits, M = 1"] == ("≥ 1.50 × humming", "1.92", "int4 1×8192×8192", "1 of 1; 2 not measured")
    assert cells["4 bits, M = 128"][1:] == ("1.50", "int4 128×8192×8192", "1 of 1; 2 not measured")
    assert cells["MXFP4, M = 1"] == ("≤ 12 µs", "not measured", "-", "-")


def test_the_largest_value_is_the_worst_where_it_may_be_at_most_so_large(module) -> None:
    judged = module("goals").judged
    every = {"a": 1.0, "b": 3.0, "c": None}
    assert judged("work", "goal", every, 2.0)[2:] == ("1.00 to 3.00", "a", "1 of 2; 1 not measured")
    assert judged("work", "goal", every, 3.0, at_most=True)[2:] == ("1.00 to 3.00", "b", "2 of 2; 1 not measured")


def test_bandwidth_is_a_share_of_what_a_copy_or_a_sum_reaches(module) -> None:
    made = {"format": "int4", "n": 8, "k": 16, "m": 1, "bytes": 2e9, "times": taken(breccia=1e-3)}
    table = module("weight_tables").bandwidth({"rows": [{**made, "memory": {"copy": 4e12, "sum": 3e12}}, {**made, "m": 4}]})
    assert table.rows == (("int4", "8×16", "2.00, 50 %; 0.75"),) and "4.00 TB/s" in table.note
    assert not module("weight_tables").bandwidth({"rows": [made]}).rows


def step(recipe: str, seconds: float, products: float, weights: int) -> dict[str, Any]:
    times = {"step": {"median_s": seconds}, "products": {"median_s": products}, "attention": {"median_s": 1e-4}}
    row = {
        "how": "graph",
        "model": "wide",
        "recipe": recipe,
        "batch": 1,
        "weight_bytes": weights,
        "tokens_per_second": 1 / seconds,
    }
    return row | times


def test_the_parts_of_a_step_say_how_fast_it_could_be_at_most(module) -> None:
    tables = module("decoder_tables")
    result = {"rows": [step("bf16", 1e-3, 6e-4, 2_000_000_000), step("int4", 5e-4, 1e-4, 500_000_000)]}
    assert tables.steps(result).rows == (
        ("bf16", "eager, a CUDA graph", "wide, 1", "1,000", "600", "100", "300", "3.33", "1.00×", "2.50×"),
        ("int4", "eager, a CUDA graph", "wide, 1", "500", "100", "100", "300", "5.00", "2.00×", "2.50×"),
    )
    cells = {row[0]: row[2:] for row in tables.goals(result).rows}
    assert cells["tokens per second, INT4 and NVFP4, wide"] == ("2.00", "int4, graph, wide, batch 1", "no")
    assert cells["bytes of weights, INT4 and NVFP4"] == ("0.25", "int4, graph, wide, batch 1", "yes")


@pytest.mark.long
@pytest.mark.skipif(compiler.missing() is not None, reason="no NVRTC")
def test_instructions_of_a_product_by_int4_are_counted(module) -> None:
    pytest.importorskip("triton")
    found = module("weight_sass").counted("int4")
    # For 8 codes the source has 4 packed subtractions, and 3 shifts and 4 operations of logic; a compiler may move some ahead.
    assert 3.5 <= found["instructions"]["packed"] <= 4 and 6 <= found["instructions"]["integer"] <= 7
    assert found["seconds"] >= 2 * 6 * 8192 * 8192 / 8 / (128 * 132 * 1.98e9)


# ------------------------------------------------------------------------------------------------ the decoder


@pytest.mark.long
def test_compiled_parts_of_a_decoder_give_the_tokens_of_the_whole_and_layers_share_one_graph(module) -> None:
    from torch._dynamo.utils import counters

    import breccia_torch

    torch.manual_seed(0)
    model = module("decoder_model").Decoder((3, 64, 4, 2, 128, 32), 2, 16).eval().requires_grad_(False)
    breccia_torch.quantize_(model, "int4,group_size=32", include=["lm_head.weight"])
    tokens, position = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def three() -> list[Any]:
        for layer in model.layers:
            layer.attention.keys.zero_()
            layer.attention.values.zero_()
        return [model(tokens + i, position + i) for i in range(3)]

    torch.compiler.reset()
    counters.clear()
    with torch.no_grad():
        expected = three()
        model.products()()
        model.attentions(tokens, position)()
        breccia_torch.enable_compile()
        model.compile_parts(backend="eager")
        assert all(map(torch.equal, three(), expected))
    assert counters["stats"]["unique_graphs"] == 3  # `first`, a layer, `last`
    torch.compiler.reset()
