"""Dispatch: which kernel runs for a call, in what order candidates are tried, and what `explain` reports."""

from __future__ import annotations

import copy
import inspect
import linecache
import pickle
import subprocess
import sys
import timeit
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import breccia
from breccia import (
    AmbiguousKernelError,
    Kernel,
    KernelError,
    NoKernelError,
    PluginError,
    PluginWarning,
    UnknownNameError,
    UnsupportedError,
    api,
    targets,
)
from breccia.arrays.frameworks import Device, framework_of
from breccia.dispatch import registry
from breccia.dispatch.call import Call
from breccia.dispatch.explanation import Explanation, Verdict
from breccia.dispatch.facts import Described
from breccia.dispatch.kernel import CONTRACT
from breccia.dispatch.table import Table
from breccia.kernels import reference
from breccia.operations import OPERATIONS
from breccia.options import DEFAULT, FLOAT32, CastOptions
from breccia.recipes import Float8CurrentScaling, INT4Scaling, MXFP8BlockScaling, NVFP4BlockScaling, ScalingRecipe
from breccia.siblings import install

MXFP8, NVFP4, CURRENT = MXFP8BlockScaling(), NVFP4BlockScaling(), Float8CurrentScaling()
X = np.ones((64, 96), np.float32)
HERE = __name__

asked: list[Any] = []


@pytest.fixture(autouse=True)
def reset_records(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    monkeypatch.setattr("breccia.dispatch.table._reported", set[tuple[str, str]]())


# -- kernels and checks used in the declarations below -------------------------------------------------------------------


def one() -> str:
    return "one"


def two() -> str:
    return "two"


class Suite:
    """Kernels may be attributes of a class, or be defined conditionally."""

    if sys.version_info:

        @staticmethod
        def three() -> str:
            return "three"


FOUR: Callable[[], str] = lambda: "four"  # noqa: E731


def yes(fact: Any) -> None:
    asked.append(fact)


def no(fact: Any) -> str:
    asked.append(fact)
    return "no Acme NPU: torch.acme is absent"


def broken(fact: Any) -> None:
    raise RuntimeError(f"driver of {fact if isinstance(fact, Device) else fact.device} crashed")


def aligned(call: Call) -> str | None:
    asked.append(call)
    return None if call.a.aligned[1] >= 32 else f"K is a multiple of {call.a.aligned[1]} only, not of 32"


def kernel(name: str, function: str = "one", **fields: Any) -> Kernel:
    fields = {"op": "cast", "framework": "numpy", "plugin": "acme"} | fields
    return Kernel(target=f"{HERE}:{function}", name=name, **fields)


def cast(table: Table, recipe: ScalingRecipe = MXFP8, x: Any = X, prefer: Any = None, framework: str = "numpy") -> str:
    """Call the kernel that is chosen for a cast; it returns the name of its function."""
    return table.choose(OPERATIONS["cast"], framework, x, None, recipe, DEFAULT, prefer).function()


def explanation_of(
    table: Table, op: str, a: Any, b: Any = None, new: Any = None, prefer: Any = None, device: str = ""
) -> Explanation:
    """The explanation of op(a, b) on NumPy, with `new` as the output recipe."""
    return table.explain(Call(registry.registry().operation(op), "numpy", (a, b, new, FLOAT32, None)), prefer, device)


def explained(table: Table, recipe: ScalingRecipe = MXFP8, x: Any = X, prefer: Any = None) -> str:
    return str(explanation_of(table, "cast", x, None, recipe, prefer))


def on(device: Any, shape: tuple[int, ...] = (64, 96)) -> Any:
    """An array that reports `device` as its device."""
    return SimpleNamespace(shape=shape, dtype=np.dtype("float32"), device=device)


# -- order ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        ({"recipe": MXFP8BlockScaling, "rank": -5}, {"recipe": ScalingRecipe, "rank": 9}),
        ({"recipe": MXFP8BlockScaling, "rank": -5}, {"rank": 9}),
        ({"rank": 2}, {"rank": 1}),
        ({"rank": 1}, {"rank": 1, "opt_in": True}),
        ({"recipe": MXFP8BlockScaling, "rank": 1}, {"recipe": MXFP8BlockScaling}),
    ],
)
def test_the_more_specific_kernel_wins_then_the_higher_rank(winner: Any, loser: Any) -> None:
    a, b = kernel("z.first", "one", **winner), kernel("a.second", "two", **loser)
    assert cast(Table([a, b])) == cast(Table([b, a])) == "one"


@dataclass(frozen=True)
class Family(MXFP8BlockScaling):
    """A subclass of the MXFP8 recipe."""

    name = "family"


def test_an_exact_recipe_wins_over_its_base_class_and_that_over_any_recipe() -> None:
    exact = kernel("exact", "one", recipe=Family, rank=-9)
    family = kernel("family", "two", recipe=MXFP8BlockScaling)
    any_recipe = kernel("any", "FOUR", rank=9)
    assert cast(Table([any_recipe, family, exact]), Family()) == "one"
    assert cast(Table([any_recipe, family]), Family()) == "two"
    assert cast(Table([any_recipe, exact]), MXFP8) == "four", "a subclass's kernel does not serve its base"
    assert cast(Table([any_recipe, family, exact]), NVFP4) == "four"
    every = kernel("every", "one", recipe=ScalingRecipe, rank=9)
    assert cast(Table([every, family]), Family()) == "two", "the base of all recipes is no family"


def test_a_kernel_for_any_framework_runs_on_each() -> None:
    table = Table([kernel("generic", "one", framework="*"), kernel("torch", "two", framework="torch", rank=1)])
    assert cast(table) == "one"
    assert cast(table, framework="torch") == "two"
    with pytest.raises(NoKernelError):
        cast(Table([kernel("torch", framework="torch")]))


def test_a_kernel_preferred_by_name_wins_over_a_better_one() -> None:
    table = Table([kernel("exact", "one", recipe=MXFP8BlockScaling, rank=9), kernel("plain", "two", rank=-9)])
    assert cast(table) == "one"
    assert cast(table, prefer="plain") == cast(table, prefer=["plain"]) == "two"
    assert cast(table, prefer=("plain", "exact")) == "two", "the first name counts first"
    assert cast(table, prefer=("exact", "plain")) == "one"
    assert cast(table, prefer=()) == cast(table) == "one"


def test_a_tie_is_an_error_that_names_both_kernels_and_both_remedies() -> None:
    a, b = kernel("a.cast", plugin="acme"), kernel("b.cast", plugin="bolt")
    messages: set[str] = set()
    for kernels in ([a, b], [b, a]):
        with pytest.raises(AmbiguousKernelError) as e:
            cast(Table(kernels))
        messages.add(str(e.value))
        assert e.value.found["kernels"] == ("a.cast", "b.cast")
    assert messages == {
        "cast of mxfp8 on numpy: Kernels 'a.cast' (acme) and 'b.cast' (bolt) rank the same. Name one with prefer=, or set one "
        "plug-in aside with BRECCIA_BLOCK=bolt."
    }
    assert cast(Table([a, b]), prefer="b.cast") == "one"
    assert cast(Table([a])) == "one"


def test_explain_reports_a_tie() -> None:
    explanation = explanation_of(Table([kernel("a.cast"), kernel("b.cast", "two")]), "cast", X, None, MXFP8)
    assert explanation.winner is None
    assert [v.reason for v in explanation.verdicts] == ["ranks the same as b.cast", "ranks the same as a.cast"]
    assert str(explanation).endswith(explanation.fault) and "BRECCIA_BLOCK=acme" in explanation.fault


def test_a_tie_on_one_device_is_found_after_a_call_on_another() -> None:
    """The kernel without conditions wins on the CPU; this result is not cached for the device where two kernels tie."""
    table = Table([kernel("any"), kernel("npu", "two", device="npu")])
    assert cast(table) == cast(table) == "one"
    with pytest.raises(AmbiguousKernelError, match="'any' .* and 'npu'"):
        cast(table, x=on("npu"))


def test_a_tie_below_the_winner_is_allowed() -> None:
    table = Table([kernel("best", rank=1), kernel("a", "two"), kernel("b", "two")])
    assert cast(table) == "one"
    assert "a  " in explained(table)


# -- operands ------------------------------------------------------------------------------------------------------------


def scaled(recipe: ScalingRecipe, shape: tuple[int, int] = (64, 96)) -> breccia.ScaledTensor:
    return breccia.cast(np.ones(shape, np.float32), recipe)


def matmul(table: Table, a: Any, b: Any) -> str:
    return table.choose(OPERATIONS["matmul"], "numpy", a, b).function()


def test_matmul_distinguishes_scaled_tensors_from_arrays() -> None:
    none = type(None)
    table = Table(
        [
            kernel("generic", "FOUR", op="matmul", rank=-1),
            kernel("both", "one", op="matmul", recipe=MXFP8BlockScaling, other=MXFP8BlockScaling),
            kernel("weight", "two", op="matmul", recipe=none, other=MXFP8BlockScaling),
            kernel("scaled", "Suite.three", op="matmul", recipe=ScalingRecipe, other=ScalingRecipe),
        ]
    )
    st, other = scaled(MXFP8), scaled(CURRENT)
    assert matmul(table, st, st) == "one"
    assert matmul(table, X, st) == "two"
    assert matmul(table, st, other) == "three"
    assert matmul(table, st, X) == matmul(table, X, X) == "four", "a raw array is of no recipe's family"


def test_an_array_with_an_attribute_recipe_is_not_a_scaled_tensor() -> None:
    table = Table([kernel("raw", "one", op="matmul", recipe=type(None), other=type(None))])
    records = np.zeros(4, [("recipe", "f4")]).view(np.recarray)
    assert matmul(table, records, records) == "one"


def test_requantize_is_chosen_by_the_old_and_the_new_recipe() -> None:
    table = Table([kernel("direct", op="requantize", recipe=NVFP4BlockScaling, other=MXFP8BlockScaling)])
    assert table.choose(OPERATIONS["requantize"], "numpy", scaled(NVFP4), None, MXFP8).function() == "one"
    with pytest.raises(NoKernelError, match="^requantize of mxfp8 to nvfp4 on numpy\n"):
        table.choose(OPERATIONS["requantize"], "numpy", scaled(MXFP8), None, NVFP4)


def test_dequantize_is_chosen_by_the_recipe_of_its_tensor() -> None:
    table = Table([kernel("nvfp4", op="dequantize", recipe=NVFP4BlockScaling)])
    assert table.choose(OPERATIONS["dequantize"], "numpy", scaled(NVFP4)).function() == "one"
    with pytest.raises(NoKernelError, match="^dequantize of mxfp8 on numpy\n"):
        table.choose(OPERATIONS["dequantize"], "numpy", scaled(MXFP8))


# -- conditions ----------------------------------------------------------------------------------------------------------


class Place:
    """A stand-in for a framework's device object: hashable, with the given attributes."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_available_is_called_once_per_device_with_its_number() -> None:
    table = Table([kernel("fast", "two", available=f"{HERE}:yes", rank=1), kernel("slow")])
    first, second = Place(type="npu", index=0), Place(type="npu", index=1)
    for device in ("cpu", first, "cpu", second, Place(type="npu", index=0)):
        for recipe in (MXFP8, NVFP4, CURRENT):
            for rows in (1, 2, 3):
                assert cast(table, recipe, on(device, (rows, 32))) == "two"
    assert asked == [Device("cpu"), Device("npu", 0), Device("npu", 1)]


def second_only(device: Device) -> str | None:
    asked.append(device)
    return None if device.index == 1 else f"{device} is too old"


def test_a_kernel_available_on_one_device_runs_only_there() -> None:
    table = Table([kernel("fast", "two", available=f"{HERE}:second_only", rank=1), kernel("slow")])
    for _ in range(2):
        assert [cast(table, x=on(Place(type="npu", index=n))) for n in (0, 1, 2)] == ["one", "two", "one"]
    assert asked == [Device("npu", 0), Device("npu", 1), Device("npu", 2)]
    assert "skipped: npu:2 is too old" in explained(table, x=on(Place(type="npu", index=2)))
    assert len(asked) == 3, "nor does explain ask again"


def test_a_kernel_for_another_device_is_skipped() -> None:
    table = Table([kernel("fast", "two", device="npu", rank=1), kernel("slow")])
    assert cast(table) == "one"
    assert cast(table, x=on("npu")) == "two"
    assert cast(table) == "one"
    assert "skipped: runs on npu, the data is on cpu" in explained(table)


@pytest.mark.parametrize(
    ("device", "function"),
    [
        ("cuda", "two"),
        ("cuda:1", "two"),
        (Place(type="cuda", index=1), "two"),  # torch
        (Place(platform="gpu"), "two"),  # JAX
        (Place(device_set={Place(platform="gpu")}), "two"),  # JAX, an array over several devices
        ("cpu", "one"),
        (Place(type="mps"), "one"),
        (Place(), "one"),
        (None, "one"),  # MLX, and traced JAX arrays
    ],
)
def test_the_kind_of_a_device_is_read_for_every_framework(device: Any, function: str) -> None:
    table = Table([kernel("gpu", "two", device="cuda", rank=1), kernel("slow")])
    assert cast(table, x=on(device)) == function


def test_the_number_of_a_device_is_read_for_every_framework() -> None:
    spellings: list[tuple[Any, int | None]] = [
        (Place(type="cuda", index=1), 1),  # torch
        (Place(platform="gpu", id=3), 3),  # JAX
        (Place(device_set={Place(platform="gpu", id=2)}), 2),
        ("cuda:1", 1),
        ("cuda", None),
        (Place(type="cuda", index=None), None),
        (Place(type="cuda"), None),
    ]
    for device, number in spellings:
        cast(Table([kernel("k", accepts=f"{HERE}:yes")]), x=on(device))
        assert asked[-1].device == Device("cuda", number), device
    cast(Table([kernel("k", accepts=f"{HERE}:yes")]), x=on(Place(platform="cpu", id=5)))
    assert asked[-1].device == Device("cpu"), "a CPU has no number"


def test_a_check_that_raises_excludes_only_its_kernel() -> None:
    kernels = [kernel("slow"), kernel("a", available=f"{HERE}:broken", rank=1), kernel("b", accepts=f"{HERE}:broken", rank=2)]
    kernels.append(kernel("c", accepts=f"{HERE}:absent", rank=3))
    kernels.append(kernel("d", available="module_of_nobody:check", rank=4))
    table = Table(kernels)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cast(table) == "one"
        text = explained(table)
        assert cast(table, x=X[:32]) == cast(Table(kernels)) == "one"
    assert [w.category for w in caught] == [PluginWarning] * 4, "one for each kernel, however often it is asked"
    faults = {
        "a": f"its check {HERE}:broken failed: RuntimeError: driver of cpu crashed",
        "b": f"its check {HERE}:broken failed: RuntimeError: driver of cpu crashed",
        "c": f"its check {HERE}:absent failed: PluginError: target '{HERE}:absent': {HERE} has no 'absent'; correct the "
        "declaration",
        "d": "its check module_of_nobody:check failed: ModuleNotFoundError: No module named 'module_of_nobody'",
    }
    assert sorted(str(w.message) for w in caught) == [
        f"kernel {name!r} of plug-in 'acme': {fault}. BRECCIA_BLOCK=acme sets the plug-in aside."
        for name, fault in faults.items()
    ]
    assert text.count(f"skipped: its check {HERE}:broken failed: RuntimeError: driver of cpu crashed") == 2
    assert f"its check {HERE}:absent failed: PluginError: target '{HERE}:absent': {HERE} has no 'absent'" in text
    assert "its check module_of_nobody:check failed: ModuleNotFoundError: No module named 'module_of_nobody'" in text


@pytest.mark.parametrize(
    ("target", "cause", "chained"),
    [
        ("module_of_nobody:cast", "ModuleNotFoundError: No module named 'module_of_nobody'", ModuleNotFoundError),
        (f"{HERE}:absent", f"target '{HERE}:absent': {HERE} has no 'absent'; correct the declaration", PluginError),
        ("kernels_that_crash:cast", "RuntimeError: no driver", RuntimeError),
        ("kernels_that_leave:cast", "SystemExit: bye", SystemExit),
    ],
)
def test_a_winner_that_cannot_be_loaded_is_reported_with_its_plug_in_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, cause: str, chained: type[BaseException]
) -> None:
    (tmp_path / "kernels_that_crash.py").write_text("raise RuntimeError('no driver')")
    (tmp_path / "kernels_that_leave.py").write_text("raise SystemExit('bye')")
    monkeypatch.syspath_prepend(str(tmp_path))
    table = Table([kernel("slow"), replace(kernel("fast", rank=1), target=target)])
    for _ in range(2):  # the failure is not cached as a function
        with pytest.raises(PluginError) as e:
            cast(table)
        assert str(e.value) == (
            f"kernel 'fast' of plug-in 'acme' cannot be loaded: {cause}. Install what it needs, or set its plug-in aside with "
            "BRECCIA_BLOCK=acme."
        )
        assert isinstance(e.value.__cause__, chained)
        assert e.value.found == {"target": target}
    assert cast(table, prefer="slow") == "one"
    core = Table([replace(kernel("fast", plugin="core"), target=target)])
    with pytest.raises(PluginError, match=r"Install what it needs\.$"):
        cast(core)


def test_an_opt_in_kernel_runs_only_when_named() -> None:
    table = Table([kernel("keeps"), kernel("fast", "two", opt_in=True, rank=9, recipe=MXFP8BlockScaling)])
    assert cast(table) == "one"
    assert "opt-in: it does not follow the contract of cast; name it with prefer='fast'" in explained(table)
    assert cast(table, prefer="fast") == "two"
    assert cast(table) == "one", "naming it once does not change later calls"
    assert cast(Table(table.kernels, prefer=["fast"])) == "two", "BRECCIA_PREFER names it too"
    alone = Table([kernel("fast", opt_in=True)])
    with pytest.raises(NoKernelError, match="opt-in: it does not follow the contract"):
        cast(alone)


# -- prefer --------------------------------------------------------------------------------------------------------------


def test_preferring_an_unknown_kernel_is_an_error_with_a_suggestion() -> None:
    table = Table([kernel("acme.cast"), kernel("acme.cast_fast", "two")])
    for ask in (cast, explained):
        with pytest.raises(
            UnknownNameError, match=r"^prefer='acme.cst': no such kernel; did you mean 'acme.cast'\? Known: acme.cast, "
        ) as e:
            ask(table, prefer="acme.cst")
        assert e.value.found["name"] == "acme.cst"


def test_preferring_an_unavailable_kernel_is_an_error_with_the_reason() -> None:
    table = Table([kernel("slow"), kernel("npu", "two", available=f"{HERE}:no", rank=1)])
    assert cast(table) == "one"
    with pytest.raises(NoKernelError) as e:
        cast(table, prefer="npu")
    assert "skipped: no Acme NPU: torch.acme is absent" in str(e.value)
    assert "skipped: prefer= names npu" in str(e.value)
    assert e.value.found == {"op": "cast", "prefer": ("npu",)}
    assert cast(table, prefer=("npu", "slow")) == "one", "of several names the first that can"


def test_preferring_a_kernel_of_another_op_is_an_error_with_its_op() -> None:
    table = Table([kernel("slow"), kernel("mm", op="matmul", framework="torch", recipe=NVFP4BlockScaling)])
    with pytest.raises(NoKernelError, match="skipped: it is declared for matmul of nvfp4 and any on torch"):
        cast(table, prefer="mm")


def test_the_environment_preference_falls_back_if_the_kernel_cannot_run() -> None:
    kernels = [kernel("slow"), kernel("npu", "two", available=f"{HERE}:no", rank=1), kernel("fast", "FOUR", rank=2)]
    assert cast(Table(kernels, prefer=["slow"])) == "one"
    assert cast(Table(kernels, prefer=["npu"])) == "four"
    assert cast(Table(kernels, prefer=["absent", "slow"])) == "one"
    assert cast(Table(kernels, prefer=["slow"]), prefer="fast") == "four", "the argument comes before the environment"
    assert "slow comes first (preferred by name)" in explained(Table(kernels, prefer=["slow"]))


# -- explain -------------------------------------------------------------------------------------------------------------


def test_an_explanation_lists_the_winner_first_and_then_each_other_kernel_with_its_reason() -> None:
    table = Table(
        [
            kernel("a.generic", "one", rank=-1),
            kernel("b.family", "two", rank=5),
            kernel("c.exact", "Suite.three", recipe=MXFP8BlockScaling),
            kernel("d.npu", "FOUR", available=f"{HERE}:no", recipe=MXFP8BlockScaling, rank=3),
            kernel("e.other", "one", recipe=NVFP4BlockScaling),
        ]
    )
    where = {name: f"{__file__}:{line}" for name, line in lines().items()}
    assert explained(table) == "\n".join(
        [
            "cast of mxfp8 on numpy",
            f" -> c.exact    acme       {where['three']}",
            f"    d.npu      acme       {where['FOUR']}",
            "      skipped: no Acme NPU: torch.acme is absent",
            f"    b.family   acme       {where['two']}",
            "      skipped: c.exact comes first (declared for this recipe)",
            f"    a.generic  acme       {where['one']}",
            "      skipped: c.exact comes first (declared for this recipe)",
        ]
    )


def lines() -> dict[str, int]:
    """Function name -> line of its definition in this file."""
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    starts = {"one": "def one(", "two": "def two(", "three": "        def three(", "FOUR": "FOUR:"}
    return {name: 1 + next(i for i, line in enumerate(source) if line.startswith(start)) for name, start in starts.items()}


def test_explain_says_why_a_kernel_cannot_be_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels_that_do_not_parse.py").write_text("def (")
    monkeypatch.syspath_prepend(str(tmp_path))
    unlocated = {
        "module_of_nobody:f": "module_of_nobody:f (no Python source found)",
        "module_of_nobody.part:f": "module_of_nobody.part:f (no Python source found)",
        "math:sqrt": "math:sqrt (no Python source found)",
        f"{HERE}:nothing": f"{__file__} (no definition of nothing)",
        "kernels_that_do_not_parse:f": "kernels_that_do_not_parse:f (invalid syntax (<unknown>, line 1))",
    }
    for target, text in unlocated.items():
        declared = replace(kernel("k", rank=-1), target=target)
        assert explained(Table([kernel("winner"), declared])).splitlines()[2] == f"    k       acme       {text}"


def test_the_no_kernel_error_is_the_text_of_explain() -> None:
    table = Table([kernel("npu", device="npu"), kernel("other", recipe=NVFP4BlockScaling)])
    with pytest.raises(NoKernelError) as e:
        cast(table)
    assert str(e.value) == explained(table)
    assert "skipped: runs on npu, the data is on cpu" in str(e.value)
    assert str(e.value).endswith(
        "No kernel runs for this call. `breccia plugins` shows what is installed and what was set aside."
    )
    with pytest.raises(NoKernelError, match=r"^cast of mxfp8 on numpy\n  No kernel runs for this call\."):
        cast(Table([]))


#: Every name that `explain` takes.
OPS = [name for op in OPERATIONS.values() for name in (op.name, *op.aliases)]
DELAYED = breccia.DelayedScaling()
ST, MXFP4_ST = scaled(MXFP8), scaled(breccia.MXFP4BlockScaling())
CALLS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "cast": ((X, MXFP8), ("mxfp8",)),
    "cast_pair": ((X, MXFP8), ("mxfp8",)),
    "cast_ste": ((X, MXFP8), (MXFP8,)),
    "cast_ste_clipped": ((X, MXFP8), ("mxfp8",)),
    "record_amax": ((X, DELAYED), ("fp8_delayed",)),
    "cast_and_record": ((X, DELAYED), (DELAYED,)),
    "cast_pair_and_record": ((X, DELAYED), (DELAYED,)),
    "dequantize": ((ST,), ("mxfp8",)),
    "requantize": ((ST, NVFP4), ("mxfp8", "nvfp4")),
    "matmul": ((ST, ST.mT), ("mxfp8", MXFP8)),
    "cast_matmul": ((X, MXFP8, ST.mT), (MXFP8, "mxfp8")),
    "grouped_matmul": ((ST, breccia.stack([ST, ST]).mT), ("mxfp8", "mxfp8")),
}


def test_every_op_has_a_row_in_the_table_below() -> None:
    assert set(CALLS) == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_explain_gives_the_same_for_operands_and_their_names(op: str) -> None:
    by_value = breccia.explain(op, *CALLS[op][0])
    by_name = breccia.explain(op, *CALLS[op][1], on="numpy")
    assert by_value.winner is not None
    assert by_name.winner == by_value.winner
    assert str(by_name).splitlines()[0] == str(by_value).splitlines()[0]
    assert by_name.running == by_value.running, "the kernels that it calls are the same too"
    chosen = registry.registry().table.choose(registry.registry().operation(op), "numpy", *_parts(op), options_of(op))
    assert chosen.function is targets.load(by_value.winner.target), "and the call goes where explain says"


def _parts(op: str) -> tuple[Any, Any, ScalingRecipe | None]:
    values = list(CALLS[op][0])
    new = (
        values.pop(1)
        if op == "cast_matmul"
        else values.pop()
        if op.startswith("cast") or op in ("requantize", "record_amax")
        else None
    )
    return (*values, None)[0], (*values, None)[1], new


def options_of(op: str) -> Any:
    """The options of a call without any."""
    return registry.registry().operation(op).default or DEFAULT


def verdicts_of(explanation: Explanation) -> Iterator[Verdict]:
    """All verdicts, including those of nested plans."""
    yield from explanation.verdicts
    for step in explanation.plan:
        yield from verdicts_of(step)


@pytest.mark.together
@pytest.mark.parametrize("on_framework", ["numpy", "torch", "jax", "mlx"])
@pytest.mark.parametrize("op", OPS)
def test_explain_gives_the_line_of_the_definition(op: str, on_framework: str) -> None:
    explanation = breccia.explain(op, *CALLS[op][1], on=on_framework)
    for verdict in verdicts_of(explanation):
        file, _, line = verdict.location.rpartition(":")
        name = verdict.kernel.target.rpartition(".")[2].rpartition(":")[2]
        text = linecache.getline(file, int(line))
        assert text.lstrip().startswith((f"def {name}(", f"class {name}", f"{name} =", f"{name}:")), verdict


def test_explain_locates_the_generic_algorithm_as_inspect_does() -> None:
    explanation = breccia.explain("cast", X, NVFP4, prefer="reference.cast")
    assert explanation.winner is not None and explanation.winner.name == "reference.cast"
    line = inspect.getsourcelines(reference.cast)[1]
    assert explanation.verdicts[0].location == f"{inspect.getsourcefile(reference.cast)}:{line}"


@pytest.mark.together
def test_explain_accepts_names_with_or_without_a_framework() -> None:
    assert str(breccia.explain("cast", "nvfp4")).startswith("cast of nvfp4 on numpy\n -> ")
    assert str(breccia.explain("matmul", "fp8_block", "int4", on="torch")).startswith("matmul of fp8_block and int4 on torch\n")
    assert str(breccia.explain("matmul", X, ST)).startswith("matmul of array and mxfp8 on numpy\n")
    assert str(breccia.explain("requantize", ST, INT4Scaling())).startswith("requantize of mxfp8 to int4 on numpy\n")


def facts_of(operand: Any) -> tuple[Any, ...]:
    return operand.recipe, operand.dtype, operand.ndim, operand.layout, operand.axis, operand.aligned


def test_checks_get_an_example_operand_for_a_named_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    current = registry.registry()
    monkeypatch.setattr(current, "table", Table([kernel("k", op="matmul", accepts=f"{HERE}:yes")]))
    breccia.explain("matmul", NVFP4, MXFP8)
    (call,) = asked
    assert (call.op, call.framework, call.device, call.recipe, call.options) == ("matmul", "numpy", Device("cpu"), None, {})
    assert facts_of(call.a) == (NVFP4, "uint8", 2, NVFP4.layout, -1, (256, 256))
    assert facts_of(call.b) == (MXFP8, "float8_e4m3fn", 2, MXFP8.layout, -2, (256, 256))  # `w.mT`
    assert call.a.contiguous and call.a.storage == "plain" and call.a.address_alignment == call.a.row_alignment == 256


def test_checks_get_a_matrix_if_explain_is_given_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a recipe in place of a tensor; casts of a single number are not the usual case."""
    current = registry.registry()
    monkeypatch.setattr(current, "table", Table([kernel("k", accepts=f"{HERE}:yes")]))
    breccia.explain("cast", NVFP4)
    assert facts_of(asked[0].a) == (NVFP4, "float32", 2, None, -1, (256, 256))


def test_explain_accepts_a_device_by_name() -> None:
    kernels = [kernel("gpu", "two", device="cuda", available=f"{HERE}:yes", rank=1), kernel("slow")]
    explanation = explanation_of(Table(kernels), "cast", Described(device=Device("cuda")), None, MXFP8, device="cuda")
    assert explanation.winner is kernels[0] and explanation.device == "cuda"
    assert str(explanation).startswith("cast of mxfp8 on numpy:cuda\n -> gpu ")
    assert asked == [Device("cuda")]
    explanation = explanation_of(Table(kernels), "cast", Described(), None, MXFP8)
    assert explanation.winner is kernels[1] and explanation.device == ""
    assert str(explanation).startswith("cast of mxfp8 on numpy\n -> slow ")


# -- plans: what a kernel calls ------------------------------------------------------------------------------------------


def caller(op: str, name: str, plan: str, **fields: Any) -> Kernel:
    return kernel(name, op=op, plan=f"{HERE}:{plan}", **fields)


def to_bits(call: Call) -> Iterator[Call]:
    """The plan of a requantize that decodes and casts."""
    yield call.makes("dequantize", call.a)
    yield call.makes("cast", call.a.described()._replace(recipe=None, dtype="float32"), recipe=call.recipe)


def elsewhere(call: Call) -> Iterator[Call]:
    yield call.makes(call.op, call.a, recipe=call.recipe, framework="torch")


def test_explain_shows_a_plan_below_its_kernel_in_call_order() -> None:
    table = Table(
        [
            caller("requantize", "acme.requantize", "to_bits"),
            caller("dequantize", "acme.dequantize", "elsewhere"),
            kernel("acme.cast", "two"),
            kernel("acme.other", "FOUR", rank=-1),
            kernel("bolt.dequantize", "Suite.three", op="dequantize", framework="torch"),
        ]
    )
    explanation = explanation_of(table, "requantize", ST, None, NVFP4)
    where = {name: f"{__file__}:{line}" for name, line in lines().items()}
    assert str(explanation) == "\n".join(
        [
            "requantize of mxfp8 to nvfp4 on numpy",
            f" -> acme.requantize  acme       {where['one']}",
            f"      calls dequantize of mxfp8 on numpy: acme.dequantize {where['one']}",
            f"        calls dequantize of mxfp8 on torch: bolt.dequantize {where['three']}",
            f"      calls cast of nvfp4 on numpy: acme.cast {where['two']}",
        ]
    )
    assert explanation.running == "acme.requantize (acme.dequantize (bolt.dequantize), acme.cast)"
    dequantize, cast_step = explanation.plan
    assert [v.kernel.name for v in cast_step.verdicts] == ["acme.cast", "acme.other"]
    assert (dequantize.running, cast_step.running) == ("acme.dequantize (bolt.dequantize)", "acme.cast")
    assert (explanation.fault, cast_step.plan, dequantize.plan[0].plan) == ("", (), ())


def test_explain_marks_a_step_of_a_plan_without_a_kernel() -> None:
    table = Table([caller("requantize", "acme.requantize", "to_bits"), kernel("acme.cast", "two", device="npu")])
    explanation = explanation_of(table, "requantize", ST, None, NVFP4)
    missing = "No kernel runs for this call. `breccia plugins` shows what is installed and what was set aside."
    assert str(explanation).splitlines()[2:] == [
        f"      calls dequantize of mxfp8 on numpy: {missing}",
        f"      calls cast of nvfp4 on numpy: {missing}",
    ]
    assert explanation.winner is not None and [step.winner for step in explanation.plan] == [None, None]


def test_explain_shows_no_plan_for_a_losing_kernel_or_without_one() -> None:
    loser = caller("requantize", "acme.requantize", "to_bits", rank=-1)
    explanation = explanation_of(Table([loser, kernel("leaf", op="requantize")]), "requantize", ST, None, NVFP4)
    assert (explanation.running, explanation.plan) == ("leaf", ()) and "calls" not in str(explanation)
    nothing = explanation_of(Table([]), "requantize", ST, None, NVFP4)
    assert (nothing.running, nothing.plan) == ("", ())


def crashes(call: Call) -> Iterator[Call]:
    raise RuntimeError("no plan today")
    yield call


@pytest.mark.parametrize("plan", [f"{HERE}:crashes", f"{HERE}:absent", "module_of_nobody:plan"])
def test_explain_works_if_a_plan_fails(plan: str) -> None:
    """A plan is third-party code, like a check; its failure must not hide which kernel runs."""
    table = Table([replace(kernel("acme.requantize", op="requantize"), plan=plan)])
    with pytest.warns(PluginWarning, match=r"^kernel 'acme\.requantize' of plug-in 'acme': "):
        explanation = explanation_of(table, "requantize", ST, None, NVFP4)
    assert explanation.winner is not None and explanation.winner.name == "acme.requantize" and explanation.plan == ()


def only(*names: str) -> Table:
    """A table of the registered kernels with these names."""
    return Table([k for k in registry.registry().table.kernels if k.name in names])


#: Op -> (operands for `explain`, the nested kernels with core alone).
COMPOSITES: dict[str, tuple[tuple[Any, ...], str]] = {
    "requantize": (("mxfp4", "nvfp4"), "composite.requantize (numpy.dequantize, numpy.cast)"),
    "matmul": (("mxfp8", "nvfp4"), "composite.matmul (numpy.dequantize, numpy.dequantize)"),
    "grouped_matmul": (("mxfp8", "nvfp4"), "composite.grouped_matmul (numpy.dequantize, numpy.dequantize)"),
    "cast_pair": (("mxfp8",), "composite.cast_pair (numpy.cast, numpy.cast)"),
    "cast_matmul": (
        ("mxfp8", "nvfp4"),
        "composite.cast_matmul (numpy.cast, composite.matmul (numpy.dequantize, numpy.dequantize))",
    ),
    "cast_ste": (("mxfp8",), "composite.cast_ste (numpy.cast, numpy.dequantize)"),
    "cast_ste_clipped": (("mxfp8",), "composite.cast_ste (numpy.cast, numpy.dequantize)"),
}


def core_of_numpy() -> Table:
    """The composite kernels and NumPy's leaf kernels, without plug-ins."""
    return only("numpy.cast", "numpy.dequantize", *(f"composite.{op}" for op in COMPOSITES))


@pytest.mark.parametrize("op", COMPOSITES)
def test_explain_shows_which_kernels_a_composite_calls(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setattr(registry.registry(), "table", core_of_numpy())
    operands, running = COMPOSITES[op]
    explanation = breccia.explain(op, *operands)
    assert explanation.running == running
    calls = [line.split(":")[0].strip() for line in str(explanation).splitlines() if "calls" in line]
    assert len(calls) == running.count("numpy.") + running.count("composite.") - 1


def test_an_unquantized_array_needs_no_dequantize_in_a_product() -> None:
    table = core_of_numpy()
    assert explanation_of(table, "matmul", X, ST.mT).running == "composite.matmul (numpy.dequantize)"
    assert explanation_of(table, "matmul", ST, np.ones((96, 4), np.float32)).running == "composite.matmul (numpy.dequantize)"


@pytest.mark.parametrize(
    ("old", "new"),
    [("mxfp4", "mxfp8"), ("fp8_block,block_m=128", "fp8_block"), ("int4,group_size=128", "fp8_block"), ("nvfp4", "nvfp4")],
)
def test_a_requantize_that_only_renames_codes_calls_no_kernel(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """The pairs in the docstring of `breccia.requantize`: scales are kept, and no values are computed."""
    monkeypatch.setattr(registry.registry(), "table", core_of_numpy())
    explanation = breccia.explain("requantize", old, new)
    assert (explanation.running, explanation.plan) == ("composite.requantize", ())
    assert breccia.explain("requantize", old, new, scale=1.0).running != "composite.requantize", "unless a scale is given"


def test_a_plan_passes_the_options_of_the_call_on() -> None:
    """Of core's kernels only the generic algorithm rounds stochastically; `numpy.cast` declines such calls."""
    table = [k for k in registry.registry().table.kernels if k.plugin == "core"]
    stochastic = CastOptions(rounding="stochastic", seed=1)

    def running(op: str, a: Any, new: Any, options: Any) -> str:
        return Table(table).explain(Call(registry.registry().operation(op), "numpy", (a, None, new, options, None))).running

    assert running("requantize", MXFP4_ST, NVFP4, DEFAULT) == "composite.requantize (numpy.dequantize, numpy.cast)"
    assert running("requantize", MXFP4_ST, NVFP4, stochastic) == "composite.requantize (numpy.dequantize, reference.cast)"
    assert running("cast_pair", X, MXFP8, stochastic) == "composite.cast_pair (reference.cast, reference.cast)"
    assert running("cast_ste", X, MXFP8, stochastic) == "composite.cast_ste (reference.cast, numpy.dequantize)"
    explained = breccia.explain("requantize", "mxfp4", "nvfp4", rounding="stochastic", seed=1, prefer="composite.requantize")
    assert explained.running.endswith(("reference.cast)", "native.cast)"))  # compiled kernels round so, too


def noted(call: Call) -> None:
    asked.append((call.op, call.options, call.a.recipe, call.a.shape))


#: Op -> the calls that its composite makes for an operand of shape (64, 96): op, options, recipe and shape of a.
STEPS: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "requantize": (lambda: breccia.requantize(ST, NVFP4), [("dequantize", {}, MXFP8, (64, 96)), ("cast", {}, NVFP4, (64, 96))]),
    "requantize of a transpose": (lambda: breccia.requantize(ST.mT, NVFP4),
        [("dequantize", {}, MXFP8, (96, 64)), ("cast", {"axis": -2}, NVFP4, (96, 64))]),
    "requantize that renames, and refuses NaN": (lambda: breccia.requantize(MXFP4_ST, MXFP8, nonfinite="raise"),
        [("dequantize", {}, MXFP4_ST.recipe, (64, 96))]),
    "requantize that is to be exact": (lambda: breccia.requantize(ST, NVFP4, require_exact=True),
        [("dequantize", {}, MXFP8, (64, 96)), ("cast", {}, NVFP4, (64, 96)), ("dequantize", {}, NVFP4, (64, 96))]),
    "cast_pair": (lambda: breccia.cast_pair(X, MXFP8),
        [("cast", {}, MXFP8, (64, 96)), ("cast", {"axis": -2}, MXFP8, (64, 96))]),
    "cast_ste": (lambda: breccia.cast_ste(X.astype(np.float16), MXFP8, axis=-2),
        [("cast", {"axis": -2}, MXFP8, (64, 96)), ("dequantize", {"out_dtype": "float16"}, MXFP8, (64, 96))]),
    "cast_matmul": (
        lambda: breccia.cast_matmul(X, MXFP8, ST.mT, "bfloat16"),
        [
            ("cast", {}, MXFP8, (64, 96)),
            ("matmul", {"out_dtype": "bfloat16"}, MXFP8, (64, 96)),
            ("dequantize", {}, MXFP8, (64, 96)),
            ("dequantize", {}, MXFP8, (96, 64)),
        ],
    ),
    "cast into a storage": (lambda: breccia.cast(X, MXFP8, axis=-2, storage="interleaved"),
        [("cast", {"axis": -2}, MXFP8, (64, 96))]),
}  # fmt: skip


@pytest.mark.parametrize("op", STEPS)
def test_a_kernel_makes_the_calls_of_its_plan(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """The leaf kernels are checked with the same arguments in the call and in its explanation."""
    composed = [k for k in registry.registry().table.kernels if k.name.startswith(("composite.", "storage."))]
    noting = {"accepts": f"{HERE}:noted"}
    leaves = [replace(k, **noting) for k in registry.registry().table.kernels if k.name.startswith("reference.")]
    leaves = [k for k in leaves if k.op in ("cast", "dequantize")]
    watched = [replace(k, **noting) if k.op == "matmul" else k for k in composed]
    current = registry.registry()
    monkeypatch.setattr(current, "table", Table([*leaves, *watched], frameworks=current.frameworks))
    call, steps = STEPS[op]
    call()
    assert asked == steps
    asked.clear()
    operands, options = EXPLAINED[op]
    breccia.explain(op.split()[0], *operands, **options)
    assert asked == steps


def stored(call: Call) -> None:
    asked.append((call.op, call.a.dtype))


def test_a_plan_has_the_dtype_of_the_stored_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy has no float8: codes are uint8 there, both in a call and in its explanation."""
    leaf = Kernel(
        "dequantize", "*", "breccia.kernels.reference.decoding:dequantize", "leaf", accepts=f"{HERE}:stored", traces=True
    )
    current = registry.registry()
    table = Table([*only("composite.cast_ste", "reference.cast").kernels, leaf], frameworks=current.frameworks)
    monkeypatch.setattr(current, "table", table)
    breccia.cast_ste(X, MXFP8)
    assert asked == [("dequantize", "uint8")]
    breccia.explain("cast_ste", X, MXFP8)
    assert asked == [("dequantize", "uint8")] * 2


EXPLAINED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "requantize": ((ST, NVFP4), {}),
    "requantize of a transpose": ((ST.mT, NVFP4), {}),
    "requantize that renames, and refuses NaN": ((MXFP4_ST, MXFP8), {"nonfinite": "raise"}),
    "requantize that is to be exact": ((ST, NVFP4), {"require_exact": True}),
    "cast_pair": ((X, MXFP8), {}),
    "cast_ste": ((X.astype(np.float16), MXFP8), {"axis": -2}),
    "cast_matmul": ((X, MXFP8, ST.mT), {"out_dtype": "bfloat16"}),
    "cast into a storage": ((X, MXFP8), {"axis": -2, "storage": "interleaved"}),
}


# -- options of explain --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "operands", "options"),
    [
        ("cast", (X, MXFP8), {"axis": 1}),
        ("cast", (X, MXFP8), {"axis": -1, "rounding": "nearest", "seed": None, "storage": "plain"}),
        ("requantize", (ST, NVFP4), {"require_exact": False}),
        ("matmul", (ST, ST.mT), {"out_dtype": "float32"}),
        ("matmul", (ST, ST.mT), {"out_dtype": np.float32}),
        ("dequantize", (ST,), {"out_dtype": "float32", "out": None}),
    ],
)
def test_explain_ignores_options_at_their_default(
    monkeypatch: pytest.MonkeyPatch, op: str, operands: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """In any spelling, as in the call itself."""
    current = registry.registry()
    monkeypatch.setattr(current, "table", Table([kernel("k", op=op, accepts=f"{HERE}:plain_only")]))
    breccia.explain(op, *operands, **options)
    assert asked == [{}]


@pytest.mark.parametrize("spelling", ["float16", np.float16, np.dtype("float16")])
def test_explain_accepts_every_spelling_of_an_option(monkeypatch: pytest.MonkeyPatch, spelling: Any) -> None:
    current = registry.registry()
    monkeypatch.setattr(current, "table", Table([kernel("k", op="dequantize", accepts=f"{HERE}:plain_only")]))
    breccia.explain("dequantize", ST, out_dtype=spelling)
    assert asked == [{"out_dtype": "float16"}]


@pytest.mark.parametrize(
    ("op", "operands", "options"),
    [
        ("cast_ste_clipped", (X, MXFP8), {"clip": "scale"}),
        ("cast_ste_clipped", (X, MXFP8), {"clip_min": -1.0, "clip_max": 2.0, "rounding": "stochastic", "seed": 3}),
        ("requantize", (ST, NVFP4), {"require_exact": True}),
        ("cast_matmul", (X, MXFP8, ST.mT), {"bias": np.ones(64, np.float32)}),
        ("grouped_matmul", (ST, breccia.stack([ST, ST]).mT), {"out_dtype": "bfloat16"}),
    ],
)
def test_explain_takes_every_keyword_option_of_its_op(op: str, operands: tuple[Any, ...], options: dict[str, Any]) -> None:
    assert breccia.explain(op, *operands, **options).winner is not None


@pytest.mark.parametrize(("op", "operands"), [("cast", (X, MXFP8)), ("matmul", (ST, ST.mT)), ("requantize", (ST, NVFP4))])
def test_explain_refuses_an_option_that_the_op_does_not_have(op: str, operands: tuple[Any, ...]) -> None:
    with pytest.raises(breccia.BrecciaError, match="roundign"):
        breccia.explain(op, *operands, roundign="nearest")


@pytest.mark.together
def test_explain_suggests_names_for_unknown_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"^no op 'casts'; did you mean 'cast'\? Known: cast, "):
        breccia.explain("casts", "mxfp8")
    with pytest.raises(UnknownNameError, match=r"^no recipe 'mxfp9'; did you mean 'mxfp8'\? Known: bnb_fp4, bnb_int8, "):
        breccia.explain("cast", "mxfp9")
    with pytest.raises(UnknownNameError, match=r"^no framework 'trch'; did you mean 'torch'\? Known: jax, mlx, numpy, torch"):
        breccia.explain("cast", "mxfp8", on="trch")
    with pytest.raises(
        UnsupportedError, match=r"^explain\('cast', \.\.\.\) takes x, recipe; x may be left out; its recipe is a"
    ):
        breccia.explain("cast", X)
    with pytest.raises(UnknownNameError, match=r"^prefer='referenc.cast': no such kernel; did you mean 'reference.cast'\?"):
        breccia.cast(X, MXFP8, prefer="referenc.cast")


@pytest.mark.together
def test_an_array_of_an_unknown_framework_is_an_error_with_its_type() -> None:
    with pytest.raises(
        UnsupportedError, match=r"^x must be an array of an installed framework \(numpy, .*\); got list\. Convert it"
    ):
        breccia.cast([[1.0]], MXFP8)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_array_subclasses_with_other_arithmetic_are_refused_with_a_remedy() -> None:
    for _ in range(2):  # the first of a type, and the next
        with pytest.raises(
            UnsupportedError, match=r"^x is a numpy\.matrix, not a plain numpy array\. Pass np\.asarray\(x\)\.$"
        ):
            breccia.cast(np.matrix(X), MXFP8)
        with pytest.raises(
            UnsupportedError,
            match=r"^x is a numpy\.ma\S*\.MaskedArray, not a plain numpy array\. "
            r"Choose a value for its masked elements: pass x\.filled\(value\)\.$",
        ) as e:
            breccia.cast(np.ma.masked_array(X, X > 0), MXFP8)
        assert e.value.found["found"].endswith("MaskedArray")
    with pytest.raises(UnsupportedError, match=r"^b is a numpy\.matrix"):
        breccia.matmul(X, np.matrix(X.T))
    assert framework_of(np.zeros(4).view(np.recarray)).name == "numpy", "other subclasses are arrays"


def test_refused_types_are_not_imported_for_the_check() -> None:
    script = "breccia.cast(x, breccia.MXFP8BlockScaling())\nimport sys\nprint('numpy.ma' in sys.modules)"
    lazy = "import sys, numpy\nprint('numpy.ma' in sys.modules)"
    assert run(script).stdout == subprocess.run([sys.executable, "-c", lazy], capture_output=True, text=True).stdout


@pytest.mark.together
@pytest.mark.parametrize(("module", "plugin"), [("torch", "torch"), ("jaxlib._jax", "jax"), ("mlx.core", "mlx")])
def test_an_array_whose_plug_in_is_missing_names_it(monkeypatch: pytest.MonkeyPatch, module: str, plugin: str) -> None:
    array = type("Array", (), {"__module__": module})()
    monkeypatch.setenv("BRECCIA_BLOCK", plugin)
    registry.reload()
    try:
        with pytest.raises(UnsupportedError) as e:
            breccia.cast(array, MXFP8)
    finally:
        monkeypatch.undo()
        registry.reload()
    assert str(e.value).endswith(
        f"; got {module}.Array. Install its plug-in: {install(f'breccia-{plugin}')}. It is installed but blocked: named in "
        "BRECCIA_BLOCK."
    )


def test_all_kernels_declare_the_contract_of_this_version() -> None:
    assert all(k.contract == CONTRACT for k in registry.registry().table.kernels)


# -- results and errors of a kernel --------------------------------------------------------------------------------------

#: What the kernel `answering` does; tests replace it.
answer: Callable[..., Any] = one


def answering(*arguments: Any) -> Any:
    return answer(*arguments)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Register a kernel of plug-in `acme` that wins for an op on NumPy and calls a given function."""

    def put(op: str, function: Callable[..., Any], plugin: str = "acme") -> None:
        current = registry.registry()
        recipe = breccia.DelayedScaling if op.endswith(("record", "amax")) else None
        fast = kernel(f"acme.{op}", "answering", op=op, plugin=plugin, rank=9, recipe=recipe)
        declared = current.declared["breccia_kernels"].values()
        monkeypatch.setattr(sys.modules[HERE], "answer", function)
        monkeypatch.setattr(current, "table", Table([*declared, fast], frameworks=current.frameworks))

    return put


def blamed(op: str) -> str:
    """The part of an error message that names the kernel `answering`."""
    line = inspect.getsourcelines(answering)[1]
    return f"kernel 'acme.{op}' of plug-in 'acme' ({__file__}:{line}); BRECCIA_BLOCK=acme sets that plug-in aside."


W = breccia.stack([ST, ST]).mT  # (2, 96, 64)
ENDS = np.array([10, 64], np.int32)
RUNS: dict[str, Callable[[], Any]] = {
    "cast": lambda: breccia.cast(X, MXFP8),
    "cast_pair": lambda: breccia.cast_pair(X, MXFP8),
    "dequantize": lambda: breccia.dequantize(ST),
    "requantize": lambda: breccia.requantize(ST, NVFP4),
    "matmul": lambda: breccia.matmul(ST, ST.mT),
    "cast_matmul": lambda: breccia.cast_matmul(X, MXFP8, ST.mT),
    "grouped_matmul": lambda: breccia.grouped_matmul(ST, W, ENDS),
    "cast_ste": lambda: breccia.cast_ste(X, MXFP8),
    "record_amax": lambda: api.record_amax(X, DELAYED, (), 1.0),
    "cast_and_record": lambda: api.cast_and_record(X, DELAYED, (), 1.0),
    "cast_pair_and_record": lambda: api.cast_pair_and_record(X, DELAYED, (), 1.0),
}
OTHER_SHAPE, PAIR = scaled(MXFP8, (32, 96)), breccia.cast_pair(X, MXFP8)
#: (op, what the kernel returns, why that is refused).
REFUSED: list[tuple[str, Any, str]] = [
    ("cast", None, "cast returns a ScaledTensor, not NoneType."),
    ("cast", X, "cast returns a ScaledTensor, not ndarray."),
    ("cast", (ST, ST), "cast returns a ScaledTensor, not tuple."),
    ("cast", scaled(NVFP4), f"cast was to write {MXFP8!r}; the result has {NVFP4!r}."),
    ("cast", OTHER_SHAPE, "cast of shape (64, 96) gave a tensor of shape (32, 96)."),
    ("cast", ST.mT, "cast of shape (64, 96) gave a tensor of shape (96, 64)."),
    ("cast_pair", (scaled(NVFP4), PAIR[1]), f"cast_pair was to write {MXFP8!r}; the result has {NVFP4!r}."),
    ("cast_pair", (PAIR[0], OTHER_SHAPE), "cast_pair of shape (64, 96) gave a tensor of shape (32, 96)."),
    ("cast_pair", (PAIR[0], X), "cast_pair returns a ScaledTensor, not ndarray."),
    ("dequantize", None, "dequantize returns an array, not NoneType."),
    ("dequantize", 1.0, "dequantize returns an array, not float."),
    ("dequantize", ST, "dequantize returns an array, not ScaledTensor."),
    ("dequantize", X.T, "dequantize gives shape (64, 96); got (96, 64)."),
    ("dequantize", X.astype(np.float64), "dequantize was asked for float32; got float64."),
    ("requantize", ST, f"requantize was to write {NVFP4!r}; the result has {MXFP8!r}."),
    ("requantize", scaled(NVFP4, (32, 96)), "requantize of shape (64, 96) gave a tensor of shape (32, 96)."),
    ("requantize", X, "requantize returns a ScaledTensor, not ndarray."),
    ("matmul", np.ones((64, 96), np.float32), "matmul gives shape (64, 64); got (64, 96)."),
    ("matmul", np.ones((64, 64), np.float16), "matmul was asked for float32; got float16."),
    ("matmul", np.float32(1), "matmul gives shape (64, 64); got ()."),
    ("cast_matmul", np.ones((1, 64, 64), np.float32), "cast_matmul gives shape (64, 64); got (1, 64, 64)."),
    ("cast_matmul", ST, "cast_matmul returns an array, not ScaledTensor."),
    ("grouped_matmul", np.ones((2, 64, 64), np.float32), "grouped_matmul gives shape (64, 64); got (2, 64, 64)."),
    ("grouped_matmul", np.ones((64, 64), np.int32), "grouped_matmul was asked for float32; got int32."),
    ("cast_ste", ST, "cast_ste returns an array, not ScaledTensor."),
    ("cast_ste", X.astype(np.float16), "cast_ste was asked for float32; got float16."),
    ("cast_ste", X[:32], "cast_ste gives shape (64, 96); got (32, 96)."),
]


@pytest.mark.parametrize(("op", "returned", "why"), REFUSED, ids=[f"{op}-{why}" for op, _, why in REFUSED])
def test_an_invalid_result_is_refused_with_the_kernel_and_plug_in(
    answers: Callable[..., None], op: str, returned: Any, why: str
) -> None:
    answers(op, lambda *arguments: returned)
    with pytest.raises(KernelError) as e:
        RUNS[op]()
    assert str(e.value) == f"{why} It came from {blamed(op)}"
    assert e.value.found == {"kernel": f"acme.{op}", "plugin": "acme"}


@pytest.mark.parametrize("returned", [None, ST, PAIR[:1], (*PAIR, ST), (PAIR[1], PAIR[0]), (PAIR[0], PAIR[0])])
def test_an_invalid_pair_is_refused_with_the_kernel_and_plug_in(answers: Callable[..., None], returned: Any) -> None:
    """A valid pair has two tensors: blocks along the last axis, then along the one before it."""
    answers("cast_pair", lambda *arguments: returned)
    with pytest.raises(KernelError, match="BRECCIA_BLOCK=acme"):
        breccia.cast_pair(X, MXFP8)


SQUARE = np.ones((64, 64), np.float32)


@pytest.mark.parametrize(
    ("returned", "options"),
    [
        (breccia.cast(SQUARE, MXFP8, axis=-1), {"axis": -2}),
        (breccia.cast(SQUARE, MXFP8, axis=-2), {}),
        (breccia.cast(SQUARE, MXFP8, storage="transposed"), {}),
    ],
    ids=["blocks along the last axis", "blocks along the other axis", "a storage that was not requested"],
)
def test_a_tensor_with_another_axis_or_storage_than_requested_is_refused(
    answers: Callable[..., None], returned: Any, options: dict[str, Any]
) -> None:
    answers("cast", lambda *arguments: returned)
    with pytest.raises(KernelError, match="BRECCIA_BLOCK=acme"):
        breccia.cast(SQUARE, MXFP8, **options)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_results_must_have_the_requested_dtype(answers: Callable[..., None], dtype: str) -> None:
    answers("dequantize", lambda st, options: np.ones(st.shape, "float32"))
    if dtype == "float32":
        assert breccia.dequantize(ST, out_dtype=dtype).dtype == np.float32
    else:
        with pytest.raises(KernelError, match=r"^dequantize was asked for float16; got float32\."):
            breccia.dequantize(ST, out_dtype=dtype)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((4, 32), (32, 5), (4, 5)),
        ((2, 1, 4, 32), (3, 32, 5), (2, 3, 4, 5)),
        ((4, 32), (3, 32, 5), (3, 4, 5)),
        ((0, 4, 32), (1, 32, 5), (0, 4, 5)),
        ((3, 0, 32), (32, 5), (3, 0, 5)),
    ],
)
def test_the_shape_of_a_product_follows_from_broadcasting(
    answers: Callable[..., None], left: Any, right: Any, expected: Any
) -> None:
    a, b = np.ones(left, np.float32), np.ones(right, np.float32)
    answers("matmul", lambda *arguments: np.ones(expected, np.float32))
    assert breccia.matmul(a, b).shape == expected == np.matmul(a, b).shape
    answers("matmul", lambda *arguments: np.ones((*expected, 1), np.float32))
    with pytest.raises(KernelError, match="matmul gives shape "):
        breccia.matmul(a, b)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_valid_result_is_returned_unchanged(answers: Callable[..., None], op: str) -> None:
    results: list[Any] = []

    def generic(*arguments: Any) -> Any:
        results.append(getattr(reference, op)(*arguments))
        return results[-1]

    answers(op, generic)
    found, (result,) = RUNS[op](), results
    if op == "cast_pair":  # as a TensorPair
        assert found.rowwise is result[0] and found.columnwise is result[1]
    else:
        assert found is result


def test_a_result_may_have_an_equal_recipe_object(answers: Callable[..., None]) -> None:
    answers("cast", lambda x, recipe, options: reference.cast(x, MXFP8BlockScaling(), options))
    assert breccia.cast(X, MXFP8BlockScaling()).recipe == MXFP8


def test_results_of_core_kernels_are_not_checked_on_every_call(answers: Callable[..., None]) -> None:
    answers("cast", lambda *arguments: "as it is", plugin="core")
    assert breccia.cast(X, MXFP8) == "as it is"


def fails(*arguments: Any) -> Any:
    raise ValueError("device lost")


@pytest.mark.parametrize("op", OPERATIONS)
def test_an_error_in_a_kernel_gets_a_note_with_its_name(answers: Callable[..., None], op: str) -> None:
    answers(op, fails)
    with pytest.raises(ValueError, match="device lost") as e:
        RUNS[op]()
    assert type(e.value) is ValueError and str(e.value) == "device lost"
    assert e.value.__notes__ == [f"This was raised inside {blamed(op)}"]


def test_an_error_in_nested_kernels_gets_a_note_for_each_from_the_inside(answers: Callable[..., None]) -> None:
    answers("dequantize", fails)
    with pytest.raises(ValueError, match="device lost") as e:
        breccia.cast_ste(X, MXFP8)
    inner, outer = e.value.__notes__
    assert inner == f"This was raised inside {blamed('dequantize')}"
    assert outer.startswith("This was raised inside kernel 'composite.cast_ste' of plug-in 'core' (")
    assert outer.endswith(").") and "BRECCIA_BLOCK" not in outer


def test_a_breccia_error_gets_no_note(answers: Callable[..., None]) -> None:
    def refuses(*arguments: Any) -> Any:
        raise breccia.ShapeError("too long")

    answers("cast", refuses)
    with pytest.raises(breccia.ShapeError, match=r"^too long$") as e:
        breccia.cast(X, MXFP8)
    assert not hasattr(e.value, "__notes__")


# -- through a plug-in, and the environment ---------------------------------------------------------------------------------

MANIFEST = """
from breccia import Kernel, MXFP8BlockScaling, hookimpl
api = 1
@hookimpl
def breccia_kernels():
    return [Kernel("cast", "numpy", "acme_kernels:cast", "acme.cast", recipe=MXFP8BlockScaling, accepts="acme_kernels:even")]
"""
KERNELS = """
from breccia.kernels import reference

calls = []

def even(call):
    return None if call.a.aligned[1] >= 2 else f"K must be even"

def cast(x, recipe, options):
    calls.append(options)
    return reference.cast(x, recipe, options)
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A plug-in on disk with a kernel, removed after the test."""
    info = tmp_path / "acme_breccia-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-breccia\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[breccia]\nacme = acme_manifest\n")
    (tmp_path / "acme_manifest.py").write_text(MANIFEST)
    (tmp_path / "acme_kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.reload()
    yield tmp_path
    monkeypatch.undo()
    for name in ("acme_manifest", "acme_kernels"):
        sys.modules.pop(name, None)
    registry.reload()


def test_a_kernel_of_a_plug_in_runs_for_the_calls_that_it_accepts(acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "acme_kernels" not in sys.modules
    st = breccia.cast(X, MXFP8, axis=-2)
    calls = sys.modules["acme_kernels"].calls
    assert [c.axis for c in calls] == [-2]
    breccia.cast(X[:, :33], MXFP8)
    breccia.cast(X, NVFP4)
    breccia.cast(X, MXFP8, prefer="reference.cast")
    assert len(calls) == 1
    assert str(breccia.explain("cast", X, MXFP8)).splitlines()[1].split() == [
        "->",
        "acme.cast",
        "acme",
        f"{acme}/acme_kernels.py:9",
    ]
    monkeypatch.setenv("BRECCIA_BLOCK", "acme")
    registry.reload()
    blocked = breccia.cast(X, MXFP8, axis=-2)
    assert len(calls) == 1
    assert np.array_equal(blocked.data, st.data) and np.array_equal(blocked.scale, st.scale)


def run(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    head = "import numpy as np, breccia\nx = np.ones((2, 32), np.float32)\n"
    done = subprocess.run([sys.executable, "-c", head + script], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_the_trace_prints_the_kernel_of_every_call_to_standard_error() -> None:
    script = "for _ in range(2): st = breccia.cast(x, breccia.MXFP8BlockScaling())\nbreccia.matmul(st, st.mT, prefer='{0}')"
    traced = run(script.format("reference.matmul"), BRECCIA_TRACE="1", BRECCIA_PREFER="reference.cast")
    assert traced.stderr.splitlines() == [
        "breccia: cast of mxfp8 on numpy (cpu) -> reference.cast",
        "breccia: cast of mxfp8 on numpy (cpu) -> reference.cast",
        "breccia: matmul of mxfp8 and mxfp8 on numpy (cpu) -> reference.matmul",
    ]
    assert traced.stdout == ""
    for off in ({}, {"BRECCIA_TRACE": "0"}, {"BRECCIA_TRACE": ""}):
        assert run(script.format("reference.matmul"), **off).stderr == ""


def test_the_trace_prints_a_kernel_before_those_that_it_calls() -> None:
    script = "for _ in range(2): breccia.cast_ste(x, breccia.MXFP8BlockScaling())"
    traced = run(script, BRECCIA_TRACE="1", BRECCIA_PREFER="reference.cast, reference.dequantize, composite.cast_ste")
    assert (
        traced.stderr.splitlines()
        == [
            "breccia: cast_ste of mxfp8 on numpy (cpu) -> composite.cast_ste",
            "breccia: cast of mxfp8 on numpy (cpu) -> reference.cast",
            "breccia: dequantize of mxfp8 on numpy (cpu) -> reference.dequantize",
        ]
        * 2
    )


def test_the_environment_preference_falls_back_in_a_real_process() -> None:
    script = "breccia.cast(x, breccia.MXFP8BlockScaling())\nprint(breccia.explain('cast', x, 'mxfp8').winner.name)"
    assert run(script, BRECCIA_PREFER="kernel.of_nobody, reference.cast").stdout == "reference.cast\n"


# -- cost ----------------------------------------------------------------------------------------------------------------


def test_equal_declarations_share_an_interned_key_that_is_not_pickled() -> None:
    """Dispatch compares recipes and layouts by this key on every call with conditions."""
    one, other, different = MXFP8BlockScaling(), MXFP8BlockScaling(), MXFP8BlockScaling("E5M2")
    assert one.interned_key is other.interned_key and one.interned_key is not different.interned_key
    assert Family().interned_key is not one.interned_key, "of another class"
    assert one.layout.interned_key is other.layout.interned_key
    for copied in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert "interned_key" not in vars(copied) and copied == one and copied.interned_key is one.interned_key
    assert one.to_dict() == MXFP8BlockScaling().to_dict() and repr(one) == repr(MXFP8BlockScaling())


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("op", ["cast", "dequantize", "requantize", "matmul"])
@pytest.mark.parametrize("conditional", [False, True], ids=["unconditional", "conditional"])
def test_dispatch_costs_less_than_two_microseconds(conditional: bool, op: str, framework: str) -> None:
    """The lookup of framework and kernel for a call in `breccia.dispatch.calls`.

    The limit of 2 µs was set on a core where one step of the loop below (build a key of four components, look it up) takes
    120 ns: 16 steps. The ratio expresses that limit on slower and busier machines too.
    """
    table = registry.registry().table
    if conditional:  # a kernel whose checks read every fact of the call
        fast = kernel("fast", op=op, framework=framework, recipe=MXFP8BlockScaling, accepts=f"{HERE}:aligned", rank=9)
        table = Table([*table.kernels, fast], frameworks=registry.registry().frameworks)
    x: Any = X if framework == "numpy" else pytest.importorskip("torch").ones(64, 96)
    st = breccia.cast(x, MXFP8)
    weight = st.mT
    lookup = {("cast", MXFP8BlockScaling, type(None), "numpy"): 1}

    def step() -> int | None:
        return lookup.get(("cast", type(MXFP8), type(None), "numpy"))

    calls: dict[str, Callable[[], Any]] = {
        "cast": lambda: table.choose(OPERATIONS["cast"], framework_of(x).name, x, None, MXFP8, DEFAULT),
        "dequantize": lambda: table.choose(OPERATIONS["dequantize"], framework_of(st.data).name, st),
        "requantize": lambda: table.choose(OPERATIONS["requantize"], framework_of(st.data).name, st, None, NVFP4, DEFAULT),
        "matmul": lambda: table.choose(OPERATIONS["matmul"], framework_of(st.data).name, st, weight),
    }
    dispatched = calls[op]
    winner = dispatched().kernel
    assert (winner.name == "fast") is conditional
    assert dispatched().function is targets.load(winner.target)
    rounds = [(timeit.timeit(step, number=5_000), timeit.timeit(dispatched, number=5_000)) for _ in range(60)]  # interleaved
    unit, cost = (min(times) for times in zip(*rounds, strict=True))
    assert cost < 16 * unit, f"{cost / unit:.1f} steps"


def plain_only(call: Call) -> str | None:
    asked.append(call.options)
    return None if not call.options else f"plain casts only, not {sorted(call.options)}"


def generic(x: Any, recipe: ScalingRecipe, options: CastOptions) -> breccia.ScaledTensor:
    """A cast that records its call."""
    asked.append("called")
    return reference.cast(x, recipe, options)


def test_accepts_gets_the_options_that_differ_from_their_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel accepts only casts without options; every other cast goes to the generic algorithm."""
    current = registry.registry()
    fast = kernel("test.fast", "generic", accepts=f"{HERE}:plain_only")
    monkeypatch.setattr(current, "table", Table([*current.table.kernels, fast], frameworks=current.frameworks))
    x = np.ones((4, 32), np.float32)
    breccia.cast(x, MXFP8)
    assert asked == [{}, "called"]
    asked.clear()
    for options in ({"axis": -2}, {"rounding": "stochastic", "seed": 1}, {"nonfinite": "raise"}):
        assert isinstance(breccia.cast(x, MXFP8, **options), breccia.ScaledTensor)
    st = breccia.cast(x, MXFP8, scale=np.zeros((4, 1), np.uint8))
    breccia.cast(x, MXFP8, out=st)
    assert asked == [
        {"axis": -2},
        {"rounding": "stochastic", "seed": True},
        {"nonfinite": "raise"},
        {"scale": True},
        {"out": True},
    ]


def test_options_are_compared_with_their_default_by_value() -> None:
    """Options read from a file or a command line are not the same objects as the defaults in the source."""
    spelled = {"rounding": "".join(["near", "est"]), "nonfinite": "".join(["propa", "gate"])}
    call = Call(OPERATIONS["cast"], "numpy", (X, None, MXFP8, CastOptions(axis=-2, **spelled), None))
    assert call.options == {"axis": -2}


def test_matmul_refuses_operands_on_two_devices() -> None:
    torch = pytest.importorskip("torch")
    a = torch.ones(4, 32)
    with pytest.raises(TypeError, match="a is on cpu and b on meta; move both to one device. Nothing is copied"):
        breccia.matmul(a, torch.ones(32, 4, device="meta"))


@pytest.mark.together
def test_an_impossible_device_for_a_framework_is_refused() -> None:
    with pytest.raises(breccia.UnsupportedError, match=r"^numpy arrays are on cpu only; got on='numpy:cuda'\.$"):
        breccia.explain("cast", "nvfp4", on="numpy:cuda")
    assert breccia.explain("cast", "nvfp4", on="numpy:cpu").winner is not None
    assert breccia.explain("cast", "nvfp4", on="torch:cuda").winner is not None, "whether this machine has one or not"
