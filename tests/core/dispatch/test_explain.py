"""`breccia.explain` with names as operands: recipes, and `array` for an unquantized array."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

import breccia
from breccia import MXFP8BlockScaling, UnsupportedError
from breccia_native.availability import missing_products

#: Whether the compiled products were not built.
NO_PRODUCTS = missing_products("cpu") is not None
X = np.ones((128, 256), np.float32)
W = breccia.cast(X, MXFP8BlockScaling())


@pytest.mark.parametrize(
    ("op", "named", "given", "call"),
    [
        ("matmul", ("array", "mxfp8"), (X, W.mT), "matmul of array and mxfp8"),
        ("matmul", ("mxfp8", "array"), (W, X.T), "matmul of mxfp8 and array"),
        ("matmul", ("array", "array"), (X, X.T), "matmul of array and array"),
        ("grouped_matmul", ("array", "mxfp8"), (X, W.mT), "grouped_matmul of array and mxfp8"),
        ("cast_matmul", ("array", "mxfp8", "array"), (X, MXFP8BlockScaling(), X.T), "cast_matmul of mxfp8 and array"),
        ("cast", ("array", "mxfp8"), (X, MXFP8BlockScaling()), "cast of mxfp8"),
        ("cast_ste", ("array", "mxfp8"), (X, MXFP8BlockScaling()), "cast_ste of mxfp8"),
    ],
)
def test_array_stands_for_a_plain_operand(op: str, named: tuple[str, ...], given: tuple[object, ...], call: str) -> None:
    found, expected = breccia.explain(op, *named), breccia.explain(op, *given)
    assert found.call == expected.call == call
    assert found.winner is not None and found.winner == expected.winner


def test_array_stands_for_a_plain_operand_next_to_a_tensor() -> None:
    assert breccia.explain("matmul", "array", W.mT).call == "matmul of array and mxfp8"
    assert breccia.explain("matmul", X, "mxfp8").call == "matmul of array and mxfp8"


@pytest.mark.together
def test_array_stands_for_a_plain_operand_of_a_named_framework() -> None:
    found = breccia.explain("matmul", "array", "nvfp4", on="torch")
    assert (found.call, found.framework) == ("matmul of array and nvfp4", "torch")
    winner, step = ("composite.matmul", "dequantize of nvfp4") if NO_PRODUCTS else ("torch.cpu.matmul", found.call)
    assert found.winner is not None and found.winner.name == winner
    assert [one.call for one in found.plan] == [step]


@pytest.mark.parametrize(("op", "operands"), [("dequantize", ("array",)), ("requantize", ("array", "mxfp8"))])
def test_an_op_that_accepts_no_array_says_so(op: str, operands: tuple[str, ...]) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"^{op} takes a ScaledTensor; name its recipe, as in explain\('{op}', 'mxfp8'\)"
    ):
        breccia.explain(op, *operands)


def test_array_is_refused_as_an_output_recipe() -> None:
    with pytest.raises(
        UnsupportedError, match=re.escape("explain('cast', ...) takes x, recipe; x may be left out; its recipe is a")
    ):
        breccia.explain("cast", "array")


def test_the_command_line_accepts_array_too() -> None:
    words = ("explain", "matmul", "array", "nvfp4", "--json")
    run = subprocess.run([sys.executable, "-m", "breccia", *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["call"], found["winner"]) == ("matmul of array and nvfp4", "numpy.matmul" if NO_PRODUCTS else "native.matmul")
