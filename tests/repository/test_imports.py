"""The three tiers of loading, each in a fresh interpreter with every distribution installed."""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib.metadata import distributions

import pytest
from fresh import printed
from paths import ROOT

FRAMEWORKS = {"torch", "jax", "mlx"}
#: The packages of all distributions except core.
SIBLINGS = {path.parent.name.replace("-", "_") for path in ROOT.glob("breccia-*/pyproject.toml")} - {"breccia_core"}
#: Those that are plug-ins.
PLUGINS = SIBLINGS - {"breccia_vectors"}
HEAVY = {"numpy", *FRAMEWORKS, "triton", "tensorflow", "safetensors", "torchao", "ml_dtypes", "typer", "rich", "pytest"}


@cache
def loaded(code: str) -> frozenset[str]:
    """Modules that `code` loads in a fresh interpreter."""
    script = f"import sys\nstart = set(sys.modules)\n{code}\nimport json\nprint(json.dumps(sorted(set(sys.modules) - start)))"
    return frozenset(json.loads(printed(script, flags=("-W", "error")).splitlines()[-1]))


def roots(modules: frozenset[str]) -> set[str]:
    """Top-level names outside the standard library."""
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names


def test_every_distribution_is_installed() -> None:
    """Otherwise the tests below would not cover all of them."""
    assert {"breccia_core", *SIBLINGS} <= {d.name.replace("-", "_") for d in distributions()}


def test_importing_breccia_loads_only_the_standard_library() -> None:
    modules = loaded("import breccia")
    assert roots(modules) == {"breccia"}
    assert {name for name in modules if name.startswith("breccia")} == {"breccia"}


def test_declarations_load_no_dependency() -> None:
    """Recipes, layouts and errors are plain values: a configuration file that names one stays light."""
    modules = loaded("import breccia\nbreccia.MXFP8BlockScaling()\nbreccia.PerBlockK(32)\nbreccia.ShapeError")
    assert roots(modules) == {"breccia"}


def test_importing_the_bridges_loads_no_other_library_and_builds_no_registry() -> None:
    modules = loaded(
        "import breccia.bridges, breccia.kernels.triton, breccia.dispatch.registry\n"
        "assert breccia.arrays.frameworks.current is None"
    )
    assert not roots(modules) & HEAVY
    assert not {name for name in modules if name.startswith("breccia_")}


#: Modules that declare what a manifest lists; tests/repository/test_arrows.py says what they may import.
DECLARATIONS = {"breccia_bridges.recipes", "breccia_bridges.dialects", "breccia_bridges.dialects.declared"}


def test_first_use_of_the_registry_loads_only_manifests() -> None:
    modules = loaded(f"import breccia\nassert len(breccia.plugins()) >= {1 + len(PLUGINS)}")
    assert not roots(modules) & HEAVY
    ours = {name for name in modules if name.partition(".")[0] in SIBLINGS}
    assert ours == PLUGINS | {f"{name}.plugin" for name in PLUGINS} | DECLARATIONS


@pytest.mark.parametrize("package", sorted(PLUGINS))
def test_a_manifest_loads_breccia_and_of_its_own_package_what_it_declares(package: str) -> None:
    modules = loaded(f"import {package}.plugin\nassert {package}.plugin.api == 1")
    assert roots(modules) <= {"breccia", "pluggy", package}
    declared = {name for name in DECLARATIONS if name.partition(".")[0] == package}
    assert {name for name in modules if name.partition(".")[0] == package} == {package, f"{package}.plugin"} | declared


def test_listing_the_bridges_loads_no_other_library() -> None:
    modules = loaded("import breccia.bridges, breccia.kernels.triton\ndir(breccia.bridges)\ndir(breccia.kernels.triton)")
    assert not roots(modules) & HEAVY


def test_explain_by_name_imports_no_kernel_and_no_framework() -> None:
    modules = loaded('import breccia\nassert "torch" in str(breccia.explain("matmul", "mxfp8", "mxfp8", on="torch"))')
    assert not roots(modules) & HEAVY
    assert "breccia.kernels.reference" not in modules


CAST = "import breccia\nst = breccia.cast({array}, breccia.NVFP4BlockScaling())\nbreccia.dequantize(st)"


@pytest.mark.parametrize(
    ("framework", "array"),
    [
        ("numpy", "__import__('numpy').ones((2, 64), 'float32')"),
        pytest.param("torch", "__import__('torch').ones((2, 64))", marks=pytest.mark.long),
        pytest.param("jax", "__import__('jax').numpy.ones((2, 64))", marks=pytest.mark.long),
        ("mlx", "__import__('mlx.core').core.ones((2, 64))"),
    ],
)
def test_a_cast_loads_the_framework_of_its_array_and_no_other(framework: str, array: str) -> None:
    modules = loaded(CAST.format(array=array))
    assert framework in roots(modules)
    assert not roots(modules) & (FRAMEWORKS - {framework})
    siblings = {f"breccia_{name}" for name in FRAMEWORKS - {framework}}
    assert not {name for name in modules if name.startswith(tuple(f"{s}." for s in siblings)) and not name.endswith(".plugin")}


def test_a_numpy_cast_loads_no_third_party_package_except_numpy() -> None:
    modules = loaded(CAST.format(array="__import__('numpy').ones((2, 64), 'float32')"))
    assert roots(modules) - SIBLINGS == {"breccia", "numpy", "pluggy"}
    assert not modules & {"breccia.kernels.audit", "breccia.cli.main", "breccia.kernels.triton"}, (
        "what is for a few is loaded by those"
    )


def test_transferring_a_tensor_loads_only_its_two_frameworks() -> None:
    code = CAST.format(array="__import__('numpy').ones((2, 64), 'float32')")
    modules = loaded(f"{code}\nimport breccia.bridges\nbreccia.bridges.from_dlpack(breccia.bridges.to_dlpack(st), 'mlx')")
    assert {"numpy", "mlx"} <= roots(modules)
    assert not roots(modules) & {"torch", "jax", "safetensors"}


@pytest.mark.long
def test_a_first_product_does_not_import_sympy() -> None:
    """Torch's own function for broadcast shapes does, which takes two seconds."""
    modules = loaded(
        "import os\nos.environ['TRITON_INTERPRET'] = '1'\n"
        "import torch, breccia\nfrom breccia.backend import product_options\n"
        "from breccia_triton.gemm.fused.matmul import fused_matmul\n"
        "x, w = torch.randn(2, 16, 64).bfloat16(), breccia.cast(torch.randn(32, 64), 'int4,group_size=32')\n"
        "assert fused_matmul(x, w.mT, product_options('bfloat16')).shape == (2, 16, 32)\n"
        "assert breccia.matmul(x, w.mT).shape == (2, 16, 32)"
    )
    assert "breccia_triton.gemm.fused.matmul" in modules and "sympy" not in modules
