"""What layers in training carry from step to step: histories and counters, and when they move."""

from __future__ import annotations

import copy
import io
import math
import warnings
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from two_layers import Model, made

import breccia
import breccia_torch
from breccia import AmaxHistory, DelayedScaling, TrainingRecipe, UnsupportedError
from breccia.training import GEMMS
from breccia_torch.nn import TrainingLinear
from breccia_torch.training import state as steps

STATEFUL = ("fp8_delayed", "nvfp4")


@pytest.fixture(autouse=True)
def seeded() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def batch(n: int) -> Tensor:
    return torch.randn(48, 32, generator=torch.Generator().manual_seed(n)) * (n + 1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    losses: list[float] = []
    for n in range(first, first + count):
        loss = (model(batch(n)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def equal(a: nn.Module, b: nn.Module) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in mine)


# -------------------------------------------------------------------------------------------------- delayed scaling


def test_the_first_step_has_the_amax_of_each_tensor() -> None:
    layer = TrainingLinear(32, 64, recipe="fp8_delayed")
    x, dy = batch(3), torch.randn(48, 64)
    for (a, b), names in zip(layer.gemm_operands(x, dy).values(), (("x", "w"), ("dy", "w"), ("dy", "x")), strict=True):
        for operand, name in zip((a, b), names, strict=True):
            tensor = {"x": x, "w": layer.weight, "dy": dy}[name]
            largest = {"x": 448.0, "w": 448.0, "dy": 57344.0}[name]
            # The FP32 rule of docs/spec/numerics.md, section 5: amax by the codec's largest value, rounded once.
            assert operand.scale.item() == (tensor.detach().abs().max() / torch.tensor(largest)).item()


def test_later_scales_are_those_of_amax_history() -> None:
    """Against `AmaxHistory`, which the core tests hold to the specification; a step of two passes has its largest amax."""
    recipe = DelayedScaling(amax_history_len=3)
    layer = TrainingLinear(32, 64, recipe=TrainingRecipe(input=recipe, weight=recipe, gradient=recipe))
    histories = {"x": AmaxHistory(recipe), "w": AmaxHistory(recipe), "dy": AmaxHistory(recipe)}
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    for n in (1, 5, 2, 0, 0):
        passes = [(batch(n), torch.randn(48, 64) * (7 - n)), (batch(n + 1), torch.randn(48, 64))]
        weight = layer.weight.detach().clone()
        for x, dy in passes:
            layer(x).backward(dy)
        optimizer.step()
        values = {"x": [x for x, _ in passes], "w": [weight], "dy": [dy for _, dy in passes]}
        histories = {name: h.update(torch.cat([v.flatten() for v in values[name]])) for name, h in histories.items()}
        x, dy = batch(9), torch.randn(48, 64)
        operands = layer.gemm_operands(x, dy)
        found = {"x": operands["output"][0], "w": operands["output"][1], "dy": operands["grad_weight"][0]}
        for name, history in histories.items():
            assert found[name].scale.item() == history.scale.item()
    assert layer.state.amaxes[0].view(torch.float32).tolist() == histories["x"].amaxes.tolist()


def test_a_tensor_without_an_amax_takes_its_own_until_it_has_one() -> None:
    """Also at steps at whose end nothing is read to the host."""
    layer = TrainingLinear(32, 64, recipe="fp8_delayed")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    dy = torch.randn(48, 64)
    for n in range(6):
        layer(batch(1)).backward(torch.zeros(48, 64))
        optimizer.step()
        scales = [operand.scale.item() for operand in layer.gemm_operands(batch(n), dy)["grad_input"]]
        expected = [(of.abs().max() / torch.tensor(largest)).item() for of, largest in ((dy, 57344.0), (layer.weight, 448.0))]
        assert scales == expected
    layer(batch(1)).backward(3 * dy)
    optimizer.step()
    assert layer.gemm_operands(batch(1), dy)["grad_input"][0].scale.item() == ((3 * dy).abs().max() / 57344.0).item()


def test_amaxes_that_give_no_scale_stay_out_of_the_history() -> None:
    """A history of one step, and a gradient of FP32 subnormals: the scale of the step before stays."""
    recipe = breccia.TrainingRecipe("fp8_delayed", gradient="fp8_delayed,fp8_format=E5M2,amax_history_len=1")
    layer = TrainingLinear(32, 64, recipe=recipe)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    dy = torch.randn(48, 64)
    for gradient in (dy, torch.full((48, 64), 1e-40), dy):
        layer(batch(1)).backward(gradient)
        optimizer.step()
        scale = layer.gemm_operands(batch(1), dy)["grad_input"][0].scale.item()
        assert scale == (dy.abs().max() / 57344.0).item()


def test_histories_on_several_lengths_and_recipes_move_together() -> None:
    """Against layers that step alone."""
    short, long = (
        TrainingRecipe(input=r, weight=r, gradient="fp8_row") for r in (DelayedScaling(amax_history_len=2), "fp8_delayed")
    )
    layers = [TrainingLinear(32, 32, recipe=recipe, seed=0) for recipe in (short, long, short)]
    alone = copy.deepcopy(layers)
    optimizer = torch.optim.SGD([layer.weight for layer in layers], lr=0.0)
    for n in (3, 1, 0):
        for layer in (*layers, *alone):
            layer(batch(n)).sum().backward()
        optimizer.step()
        for layer in alone:
            torch.optim.SGD(layer.parameters(), lr=0.0).step()
        assert all(equal(a, b) and torch.equal(a.state.scales, b.state.scales) for a, b in zip(layers, alone, strict=True))
    assert [(layer.state.amaxes[0] != 0).sum().item() for layer in layers] == [2, 3, 2]


class Count(TorchDispatchMode):
    """How many operations are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(recipe: str, layers: int) -> tuple[int, int]:
    """(of forward and backward, of the optimizer's step) in the third step of a chain of layers."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    breccia_torch.convert_to_training_(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    passes, step = Count(), Count()
    for n in range(3):
        passes, step = Count(), Count()
        with passes:
            model(batch(n)).sum().backward()
        with step:
            optimizer.step()
    return passes.count, step.count


def test_delayed_scaling_adds_few_operations() -> None:
    (few, few_steps), (many, many_steps) = (operations("fp8_delayed", layers) for layers in (2, 6))
    current = operations("fp8_current", 6)[0] - operations("fp8_current", 2)[0]
    # Of each of x, w and dy: a norm and a view. Of w: a number in place of NaN, a maximum. Of x and dy together: their amaxes
    # in one tensor, the same as for w, whether that of dy is finite, and a product with that.
    assert many - few == current + 4 * (3 * 2 + 2 + 5)
    # Every layer selects its counter of steps; the rest is the same for any number of layers.
    assert many_steps - few_steps == 4 and few_steps < 90


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("frozen", [False, True])
def test_amaxes_of_a_gpu_are_those_of_a_cpu(frozen: bool) -> None:
    """Kernels that cast and record in one read give the same histories, also of gradients that are not finite."""
    torch.manual_seed(0)
    here = TrainingLinear(64, 96, recipe="fp8_delayed", seed=0)
    here.weight.requires_grad_(not frozen)  # else only the rows of x are cast
    there = copy.deepcopy(here).cuda()
    for n in range(4):
        for factor in (1.0, torch.inf, 0.5)[: 1 + n]:
            x, dy = batch(n)[:, :32].repeat(1, 2) * (n + 1), torch.randn(len(batch(n)), 96) * factor
            for layer in (here, there):
                mine = x.detach().to(layer.weight.device).requires_grad_()
                layer(mine).backward(dy.to(layer.weight.device))
        assert torch.equal(there.state.pending.cpu(), here.state.pending)
        for layer in (here, there):
            breccia_torch.end_of_step(layer)
        assert torch.equal(there.state.amaxes.cpu(), here.state.amaxes) and here.state.amaxes.any()
        assert torch.equal(there.state.scales.cpu(), here.state.scales)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_in_a_graph_is_recorded_once(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers cast its rows and its columns apart there; eager ones hold the columns."""
    noted: list[Any] = []
    note = steps.note_weight
    monkeypatch.setattr(steps, "note_weight", lambda how, amax: noted.append(amax) or note(how, amax))
    monkeypatch.setattr(steps, "in_graphs", lambda weight: True)
    layer = TrainingLinear(32, 64, recipe="fp8_delayed")
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    call(batch(1).requires_grad_()).sum().backward()
    assert [amax is None for amax in noted] == ([False, True] if compiled else [False])
    assert layer.state.pending.view(torch.float32)[1] == layer.weight.abs().max()


@pytest.mark.parametrize("high_precision", list(combinations(GEMMS, 2)), ids="+".join)
def test_amaxes_are_recorded_where_two_gemms_stay_in_high_precision(high_precision: tuple[str, ...]) -> None:
    layer = TrainingLinear(32, 64, bias=False, recipe=TrainingRecipe("fp8_delayed", high_precision=high_precision))
    x, dy = batch(0).requires_grad_(), torch.randn(48, 64)
    layer(x).backward(dy)
    pending = layer.state.pending.view(torch.float32)
    assert pending[0] == x.abs().max()
    assert torch.allclose(layer.weight.grad, dy.T @ x.detach(), rtol=0.1, atol=0.1 * dy.norm())
    layer.weight.requires_grad_(False)
    layer(x).backward(dy)


def test_an_infinite_input_leaves_the_amaxes_of_other_batches() -> None:
    layer = TrainingLinear(32, 64, recipe="fp8_delayed")
    first, dy = batch(0), torch.randn(48, 64)
    layer(first).backward(dy)
    for fault in (torch.inf, torch.nan):
        other = batch(1)
        other[0, 0] = fault
        layer(other).backward(dy / 2)
    assert layer.state.pending.view(torch.float32)[[0, 2]].tolist() == [first.abs().max(), dy.abs().max()]


def test_buffers_follow_a_state_of_another_device() -> None:
    """`assign=True` moves those that are saved."""
    layer = TrainingLinear(32, 64, recipe="fp8_delayed", device="meta")
    other = TrainingLinear(32, 64, recipe="fp8_delayed")
    other(batch(1)).sum().backward()
    breccia_torch.end_of_step(other)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert other.state.amaxes.is_meta and other.state.pending.is_meta and other.state.scales.is_meta


def test_evaluation_records_nothing() -> None:
    layer = TrainingLinear(32, 64, recipe="fp8_delayed")
    layer.weight.requires_grad_(False)
    with torch.no_grad():
        layer(batch(1))
    assert layer.state.pending[0] == layer.state.pending[2] == 0


# ---------------------------------------------------------------------------------------------------------- draws


def drawn(layer: TrainingLinear, x: Tensor, dy: Tensor) -> Tensor:
    """The codes of the gradient in the next backward pass."""
    return layer.gemm_operands(x, dy)["grad_input"][0].data


def test_draws_differ_between_layers_steps_and_passes_and_are_those_of_gemm_operands() -> None:
    model = made("nvfp4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, dy = batch(1), torch.randn(48, 64)
    seen = [drawn(model.inner, x, dy)]
    for _ in range(2):
        for _ in range(2):
            operands = model.inner.gemm_operands(x, dy)
            model.inner.weight.grad = None
            model.inner(x).backward(dy)
            assert torch.equal(model.inner.weight.grad, breccia.matmul(*operands["grad_weight"]))
            seen.append(drawn(model.inner, x, dy))
        optimizer.step()
        seen.append(drawn(model.inner, x, dy))
    other = TrainingLinear.from_linear(nn.Linear(32, 64), "nvfp4", name="other", seed=7)
    seen.append(drawn(other, x, dy))
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_seeds_are_the_outputs_of_splitmix64() -> None:
    """The first outputs from the seed 1234567 as Rosetta Code's task "Pseudo-random numbers/Splitmix64" lists them."""
    layer = TrainingLinear(16, 16, recipe="nvfp4", seed=1234567)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for output in (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821):
        low, high = steps.next_seed(layer.context).tolist()
        assert (high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF == output
        layer(torch.randn(16, 16)).sum().backward()
        assert steps.next_seed(layer.context).tolist() == [low, high + 1]  # of a second pass in the step
        optimizer.step()


def test_words_follow_from_a_loaded_state_and_begin_again_with_a_step() -> None:
    """At once, not at the next pass: a CUDA graph that is replayed reads them."""
    layer, other = (TrainingLinear(16, 16, recipe="nvfp4", seed=seed) for seed in (1, 2))
    first = layer.state.words.tolist()
    assert first == steps.next_seed(layer.context).tolist() != other.state.words.tolist()
    layer(torch.randn(16, 16)).sum().backward()
    assert layer.state.words.tolist() == [first[0], first[1] + 1]
    breccia_torch.end_of_step(layer, taken=False)
    assert layer.state.words.tolist() == first
    other.load_state_dict(layer.state_dict())
    assert other.state.words.tolist() == first
    layer.state.reset(2)
    assert layer.state.words.tolist() == TrainingLinear(16, 16, recipe="nvfp4", seed=2).state.words.tolist()


def test_ranks_draw_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = TrainingLinear(16, 16, recipe="nvfp4", seed=1), list[list[int]]()
    for rank in (0, 1, 2, 0):
        monkeypatch.setattr(steps, "_rank", lambda rank=rank: rank)
        seen.append(steps.next_seed(layer.context).tolist())
    assert seen[0] == seen[3] and len({tuple(words) for words in seen}) == 3


def test_stochastic_gradients_have_the_right_mean() -> None:
    layer, x, dy = TrainingLinear(32, 64, recipe="nvfp4"), batch(1), torch.randn(48, 64)
    rounds, total = 200, torch.zeros(48, 64)
    for _ in range(rounds):
        total += layer.gemm_operands(x, dy)["grad_input"][0].dequantize()
        steps.count_pass(layer.context, layer.weight)
    # Codes are at most 2 scales apart, and a scale is amax / 6: the standard deviation of a draw is at most half of that, amax
    # / 6, and that of the mean amax / 6 / sqrt(rounds). Six of these, for 3072 values. The scale in E4M3 may be 2^-4 too small
    # for the largest values, which saturate.
    amax = dy.abs().max()
    bound = 6 * amax / 6 / math.sqrt(rounds) + amax * 2.0**-4
    assert ((total / rounds - dy).abs() <= bound).all()
    nearest = breccia.cast(dy, "nvfp4").dequantize()
    assert ((nearest - dy).abs() > bound).any()  # so the bound tells the two apart


def test_the_same_seed_gives_the_same_training() -> None:
    for recipe in STATEFUL:
        first, second = made(recipe), made(recipe)
        a, b = (train(m, torch.optim.SGD(m.parameters(), lr=1e-3), 0, 3) for m in (first, second))
        assert a == b and equal(first, second)


# ------------------------------------------------------------------------------------------------- saving and resuming


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_resumed_run_is_bit_identical(recipe: str) -> None:
    model = made(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 0, 3)
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    rest = train(model, optimizer, 3, 3)
    resumed = made(recipe)
    resumed_optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-3)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    assert train(resumed, resumed_optimizer, 3, 3) == rest and equal(model, resumed)


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_lost_state_is_noticed(recipe: str) -> None:
    """The planted fault of the test above: without the state, the losses differ."""
    model = made(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train(model, optimizer, 0, 3)
    saved = {key: value for key, value in model.state_dict().items() if ".state." not in key}
    rest = train(model, optimizer, 3, 3)
    resumed = made(recipe)
    with pytest.raises(RuntimeError, match=r"Missing key.*inner.state.draws"):
        resumed.load_state_dict(saved)
    resumed.load_state_dict(saved, strict=False)
    assert train(resumed, torch.optim.SGD(resumed.parameters(), lr=1e-3), 3, 3) != rest


@pytest.mark.parametrize("recipe", STATEFUL)
def test_the_state_survives_changes_of_precision_copies_and_pickling(recipe: str) -> None:
    model = made(recipe)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), 0, 3)
    before = {key: value.clone() for key, value in model.state_dict().items() if ".state." in key}
    assert before and all(value.any() for value in before.values())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model).bfloat16(), copy.deepcopy(model).half().float(), torch.load(file, weights_only=False)):
        after = other.state_dict()
        assert all(torch.equal(after[key], value) and after[key].dtype == value.dtype for key, value in before.items())
        optimizer = torch.optim.SGD(other.parameters(), lr=1e-3)
        dtype = other.inner.weight.dtype
        other(batch(1).to(dtype)).sum().backward()
        optimizer.step()  # copies and pickles are known to the hook, too
        assert other.inner.state.draws[1] == 4


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_state_on_meta_begins_where_it_gets_memory(recipe: str) -> None:
    """`to_empty` gives other layers memory with whatever it held before; the state of a layer begins as a new one."""
    with torch.device("meta"):
        model = Model()
    breccia_torch.convert_to_training_(model, recipe)
    assert model(torch.ones(4, 32, device="meta")).shape == (4, 32)
    fresh = made(recipe)
    assigned = copy.deepcopy(model)
    model.to_empty(device="cpu")
    for name, value in fresh.state_dict().items():
        if ".state." in name:
            assert torch.equal(model.state_dict()[name], value)
    with torch.no_grad():
        for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
            p.copy_(q)
    losses = [train(each, torch.optim.SGD(each.parameters(), lr=1e-3), 0, 3) for each in (model, fresh)]
    assert losses[0] == losses[1] and equal(model, fresh)
    assigned.load_state_dict(copy.deepcopy(fresh.state_dict()), assign=True)
    losses = [train(each, torch.optim.SGD(each.parameters(), lr=1e-3), 3, 2) for each in (assigned, fresh)]
    assert losses[0] == losses[1] and equal(assigned, fresh)


def test_distributed_checkpoints_have_the_state(tmp_path: Any) -> None:
    from torch.distributed import checkpoint

    model = made("fp8_delayed")
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), 0, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
        other = made("fp8_delayed")
        state = other.state_dict()
        checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state)
    assert equal(model, other)


# --------------------------------------------------------------------------------------------------- when it moves


def poisoned(where: str) -> Any:
    """A pass whose loss is NaN: by its input, by the loss of a batch of large numbers, or the same without a backward pass."""

    def run(model: Any) -> None:
        x = batch(2) * 100
        if where == "input":
            x[0, 0] = torch.nan
        loss = model(x).mean() * torch.nan
        assert loss.isnan()
        if where != "no backward pass":
            loss.backward()
        model.zero_grad()

    return run


def overflowed(model: Any) -> None:
    """A pass in which the gradient of the last layer overflows, and others stay finite."""
    layer_of: list[Any] = [model.outer.register_full_backward_hook(lambda *_: (torch.full((48, 64), 3.0),))]
    y = model(batch(2) * 100)
    y.backward(torch.full_like(y, torch.inf))
    layer_of[0].remove()
    model.zero_grad()


def trained_and_twin(recipe: str) -> tuple[Any, Any]:
    model = made(recipe)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), 0, 2)
    return model, copy.deepcopy(model)


def as_if_nothing_had_been(model: Any, twin: Any) -> bool:
    losses = [train(each, torch.optim.SGD(each.parameters(), lr=1e-3), 3, 2) for each in (model, twin)]
    return losses[0] == losses[1] and equal(model, twin)


@pytest.mark.parametrize("recipe", STATEFUL)
@pytest.mark.parametrize("where", ["input", "loss", "no backward pass"])
def test_a_skipped_step_moves_nothing(recipe: str, where: str) -> None:
    model, twin = trained_and_twin(recipe)
    poisoned(where)(model)
    assert equal(model, twin)
    if recipe == "fp8_delayed" or where == "no backward pass":  # random numbers are drawn once, also for a skipped step
        assert as_if_nothing_had_been(model, twin)


@pytest.mark.parametrize("recipe", STATEFUL)
@pytest.mark.parametrize("skipped", [poisoned("loss"), overflowed], ids=["NaN", "overflow in one layer"])
def test_end_of_step_forgets_a_step_that_is_not_taken(recipe: str, skipped: Any) -> None:
    model, twin = trained_and_twin(recipe)
    skipped(model)
    breccia_torch.end_of_step(model, taken=False)
    assert equal(model, twin) and as_if_nothing_had_been(model, twin)


def test_overflow_in_one_layer_leaves_the_amaxes_of_others() -> None:
    """What the test above makes forgotten."""
    model, twin = trained_and_twin("fp8_delayed")
    overflowed(model)
    assert equal(model, twin) and not as_if_nothing_had_been(model, twin)


def test_a_forward_pass_alone_records_nothing_of_its_input() -> None:
    model, twin = trained_and_twin("fp8_delayed")
    model(batch(9) * 1000)  # with gradients enabled, as in a test of the model that forgot to disable them
    assert as_if_nothing_had_been(model, twin)


def test_a_fused_step_that_a_scaler_skips_moves_nothing() -> None:
    model = made("fp8_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(batch(1)).sum().backward()
    before = copy.deepcopy(model)
    optimizer.found_inf = torch.ones(())  # as GradScaler gives it to fused optimizers
    steps._stepped(optimizer)
    assert equal(model, before)


def test_only_layers_of_the_optimizer_move_and_frozen_ones_with_any() -> None:
    model = made("fp8_delayed")
    third = TrainingLinear(32, 32, recipe="fp8_delayed")
    third.requires_grad_(False)
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=1e-3)
    third(model(batch(1))).sum().backward()
    optimizer.step()
    assert [layer.state.draws[1].item() for layer in (model.inner, model.outer, third)] == [1, 0, 1]


def test_layers_without_a_backward_pass_stay() -> None:
    model = made("fp8_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.inner(batch(1)).sum().backward()
    optimizer.step()
    assert model.inner.state.draws[1] == 1 and model.outer.state.draws[1] == 0
    assert not model.outer.state.amaxes.any()


def test_manual_loops_end_steps_themselves_and_are_warned_otherwise() -> None:
    model = made("fp8_delayed")
    message = "has changed between two backward passes, and no step has ended.*breccia_torch.end_of_step"

    def update() -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(1e-3 * p.grad)

    model(batch(1)).sum().backward()
    update()
    with pytest.warns(UserWarning, match=message):
        model(batch(1)).sum().backward()
    breccia_torch.end_of_step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(batch(1)).sum().backward()
            model(batch(2)).sum().backward()  # accumulation
            update()
            breccia_torch.end_of_step(model)
    assert model.inner.state.draws[1] == 3


def test_end_of_step_notices_weights_written_through_data() -> None:
    model = made("fp8_block")
    before = model(batch(1))
    for p in model.parameters():
        p.data.mul_(2.0)
    breccia_torch.end_of_step(model)
    assert not torch.equal(model(batch(1)), before)


def test_end_of_step_and_the_optimizer_end_one_step() -> None:
    model = made("fp8_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(batch(1)).sum().backward()
    breccia_torch.end_of_step(model)
    optimizer.step()
    assert model.inner.state.draws[1] == 1 and (model.inner.state.amaxes[0] != 0).sum() == 1


def test_end_of_step_needs_a_layer_in_training() -> None:
    with pytest.raises(UnsupportedError, match="Model has no layer in training; breccia_torch.convert_to_training_"):
        breccia_torch.end_of_step(Model())


def test_new_parameters_forget_the_state() -> None:
    layer = TrainingLinear(32, 64, recipe="fp8_delayed")
    layer(batch(1)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1e-3).step()
    layer.reset_parameters()
    assert not layer.state.amaxes.any() and layer.state.draws[1] == 0
