"""Ops as declarations: what follows from one, and which are refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

import breccia
from breccia import Kernel, hookimpl, targets
from breccia.dispatch import builtin, calls, registry
from breccia.dispatch.registry import Plugin, Registry
from breccia.operations import OPERATIONS, Kind, Operation, Result
from breccia.options import DEFAULT, FLOAT32, CastOptions

SOUND = Operation(
    "acme_cast", (("x", Kind.ARRAY), ("recipe", Kind.RECIPE)), (Result(tensor=True),), "acme:cast", options=("axis",)
)


def declaring(*declared: Operation | Kernel) -> ModuleType:
    """A manifest of those."""
    manifest = ModuleType("acme_manifest")

    @hookimpl
    def breccia_operations() -> list[Any]:
        return [value for value in declared if isinstance(value, Operation)]

    @hookimpl
    def breccia_kernels() -> list[Any]:
        return [value for value in declared if isinstance(value, Kernel)]

    vars(manifest).update(api=1, breccia_operations=breccia_operations, breccia_kernels=breccia_kernels)
    return manifest


def with_plugin(*declared: Operation | Kernel) -> tuple[Registry, list[str]]:
    """A registry of core and one more plug-in, and what it warned of."""
    messages: list[str] = []
    core = Plugin("core", registry.CORE, "0", builtin.__name__), lambda: builtin
    acme = Plugin("acme", "acme-breccia", "0", "acme_manifest"), lambda: declaring(*declared)
    return Registry([core, acme], {}, messages.append), messages


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "a name with a dash": ({"name": "acme-cast"}, "op 'acme-cast': its name is a function's, like 'swiglu_cast'."),
    "a recipe first": (
        {"arguments": (("recipe", Kind.RECIPE), ("x", Kind.ARRAY))},
        "op 'acme_cast': its first argument is an operand: Kind.ARRAY, TENSOR or EITHER.",
    ),
    "two recipes": (
        {"arguments": (("x", Kind.ARRAY), ("recipe", Kind.RECIPE), ("other", Kind.RECIPE))},
        "op 'acme_cast': it has at most one recipe to write, and at least one result.",
    ),
    "no result": ({"results": ()}, "it has at most one recipe to write, and at least one result."),
    "a tensor under no recipe": (
        {"arguments": (("x", Kind.ARRAY),)},
        "a result is a ScaledTensor, so one argument is Kind.RECIPE.",
    ),
    "an unknown option": ({"options": ("axsi",)}, "it takes an option 'axsi'; did you mean 'axis'?"),
    "an option of products": ({"options": ("axis", "bias")}, "it takes an option 'bias'"),
    "no reference": ({"reference": ""}, "it needs a reference, the function that defines its results."),
    "a reference to a file": (
        {"reference": "acme.py"},
        "op 'acme_cast': reference: an object reference is written 'package.module:attribute'; got 'acme.py'.",
    ),
    "a derivative of codes": ({"derivative": "acme:derivative"}, "a derivative is that of one array, and the op takes options"),
    "arguments without kinds": ({"arguments": ("x", "recipe")}, "op 'acme_cast': arguments must be tuple["),
}


@pytest.mark.parametrize("fault", INVALID)
def test_an_invalid_op_sets_its_plugin_aside(fault: str) -> None:
    changes, message = INVALID[fault]
    found, (warning,) = with_plugin(replace(SOUND, **changes))
    assert warning.startswith("breccia plug-in 'acme' (acme-breccia 0) is set aside: ") and message in warning
    assert "acme_cast" not in found.operations and set(found.operations) == set(OPERATIONS)


def test_a_sound_op_has_a_kernel_for_any_framework() -> None:
    found, warnings = with_plugin(SOUND)
    assert not warnings and found.operation("acme_cast") == SOUND and found.operation("acme_cast").plugin == "acme"
    kernels = [kernel.name for kernel in found.table.kernels if kernel.op == "acme_cast"]
    assert kernels == ["reference.acme_cast"]
    stored, _ = with_plugin(replace(SOUND, options=("axis", "storage")))
    names = {kernel.name: kernel.target for kernel in stored.table.kernels if kernel.op == "acme_cast"}
    assert names["storage.acme_cast"] == "breccia.kernels.storages:acme_cast"


@pytest.mark.parametrize("name", ["matmul", "cast_ste_clipped"])
def test_an_op_cannot_take_the_name_or_alias_of_another(name: str) -> None:
    _, (warning,) = with_plugin(replace(SOUND, name=name))
    assert f"breccia_operations: the name '{name}' is taken by plug-in 'core'; choose another." in warning


def test_a_kernel_of_an_unknown_op_is_refused_with_a_suggestion() -> None:
    _, (warning,) = with_plugin(Kernel("matmull", "numpy", "acme:matmul", "acme.matmul"))
    assert "kernel 'acme.matmul': no op 'matmull'; did you mean 'matmul'?" in warning


def test_a_kernel_may_be_of_an_op_that_its_own_plugin_declares() -> None:
    found, warnings = with_plugin(SOUND, Kernel("acme_cast", "numpy", "acme:fast", "acme.fast"))
    assert not warnings and "acme.fast" in [kernel.name for kernel in found.table.kernels]


def test_a_kernel_of_an_alias_is_one_of_the_op() -> None:
    found, warnings = with_plugin(Kernel("cast_ste_clipped", "numpy", "acme:trip", "acme.trip"))
    assert not warnings
    assert [kernel.op for kernel in found.table.kernels if kernel.name == "acme.trip"] == ["cast_ste"]


#: Of core's ops: casts, position of the recipe and of the second operand, scaled operands, stores, product, joint, options.
FACTS: dict[str, tuple[bool, int | None, int | None, set[str], bool, bool, str, Any]] = {
    "cast": (True, 1, None, set(), True, False, "", DEFAULT),
    "cast_pair": (True, 1, None, set(), True, False, "", DEFAULT),
    "dequantize": (False, None, None, {"st"}, False, False, "", FLOAT32),
    "requantize": (False, 1, None, {"st"}, True, False, " to ", DEFAULT),
    "matmul": (False, None, 1, {"a", "b"}, False, True, " and ", FLOAT32),
    "cast_matmul": (True, 1, 2, {"b"}, False, True, " and ", FLOAT32),
    "grouped_matmul": (False, None, 1, {"a", "b"}, False, True, " and ", FLOAT32),
    "cast_ste": (True, 1, None, set(), False, False, "", DEFAULT),
    "record_amax": (True, 1, None, set(), False, False, "", None),
    "cast_and_record": (True, 1, None, set(), True, False, "", DEFAULT),
    "cast_pair_and_record": (True, 1, None, set(), True, False, "", DEFAULT),
}


def test_what_follows_from_the_declarations_of_cores_ops() -> None:
    found = {
        name: (op.casts, op.target, op.second, set(op.scaled), op.stores, op.product, op.joint, op.default)
        for name, op in OPERATIONS.items()
    }
    assert found == FACTS


def functions() -> Iterator[Any]:
    for name, op in OPERATIONS.items():
        yield pytest.param(op, op.reference, id=f"{name}-reference")
        if op.composite is not None:
            yield pytest.param(op, op.composite, id=f"{name}-composite")


@pytest.mark.parametrize(("op", "target"), list(functions()))
def test_references_and_composites_take_the_arguments_of_the_op(op: Operation, target: str) -> None:
    """What they take besides has a default: what they are composed of, and random words in place of a seed."""
    parameters = list(inspect.signature(targets.load(target)).parameters.values())
    expected = [name for name, _ in op.arguments] + ["options"] * bool(op.options)
    assert [parameter.name for parameter in parameters[: len(expected)]] == expected
    assert all(parameter.default is not parameter.empty for parameter in parameters[len(expected) :])


@pytest.mark.parametrize("op", OPERATIONS)
def test_public_functions_take_the_options_of_the_op(op: str) -> None:
    """Besides `prefer`. Those of histories are methods."""
    function = getattr(breccia, op, None)
    if function is None:
        assert op in ("record_amax", "cast_and_record", "cast_pair_and_record")
        return
    by_core = {"prefer", "group_index"}  # no kernel receives them
    taken = set(inspect.signature(function).parameters) - {*by_core, *(name for name, _ in OPERATIONS[op].arguments)}
    assert taken == set(OPERATIONS[op].options) - set(OPERATIONS[op].derivative_options)


def test_options_of_a_derivative_do_not_reach_kernels() -> None:
    op, clipped = OPERATIONS["cast_ste"], CastOptions(axis=-2, clip="scale")
    assert op.for_kernels(clipped).given() == {"axis": -2} and not op.is_straight(clipped)
    assert op.for_kernels(CastOptions(clip=(-1.0, 1.0))) is DEFAULT
    assert op.for_kernels(DEFAULT) is DEFAULT and op.is_straight(DEFAULT)


def test_the_function_of_an_op_says_its_arguments() -> None:
    assert calls.cast_pair.__name__ == "cast_pair" and calls.cast_pair.__doc__ == "The op cast_pair: x, recipe, options."
    with pytest.raises(AttributeError, match=r"has no attribute 'cast_par': no op 'cast_par'; did you mean 'cast_pair'\?"):
        calls.cast_par  # noqa: B018
