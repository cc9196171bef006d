"""The laws of the conformance kit for the Triton kernels of casts, in Triton's interpreter: on CUDA, test_conformance.py."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest
from marks import slow_but

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("breccia_triton")

import breccia  # noqa: E402
import breccia_torch.plugin  # noqa: E402
from breccia.arrays import frameworks  # noqa: E402
from breccia.dispatch import builtin, registry  # noqa: E402
from breccia.dispatch.registry import CORE, Plugin, Registry  # noqa: E402
from breccia.testing.kit import laws_of  # noqa: E402
from breccia.testing.laws import Law  # noqa: E402
from breccia.testing.places import place  # noqa: E402
from breccia_triton import plugin  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU Triton's kernels run in its interpreter"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

NAME = "interpreted"
OPS = ("cast", "cast_pair", "cast_ste", "dequantize", "requantize", "record_amax", "cast_and_record", "cast_pair_and_record")


@pytest.fixture
def laws() -> Iterator[list[Law]]:
    """The laws for the Triton kernels of casts, declared for tensors on the CPU."""
    found = [kernel for kernel in plugin.breccia_kernels() if kernel.framework == "torch" and kernel.name.startswith("triton.")]
    own = [kernel for kernel in found if kernel.op in OPS and kernel.kind == "kernel"]  # not those around other kernels
    kernels = [dataclasses.replace(kernel, device=None, available=None) for kernel in own]
    manifest = ModuleType("interpreted_manifest")
    vars(manifest).update({"api": 1, "breccia_kernels": breccia.hookimpl(lambda: kernels)})
    version = breccia.__version__
    frameworks.current = Registry(
        [
            (Plugin("core", CORE, version, builtin.__name__), lambda: builtin),
            (Plugin("torch", "breccia-torch", version, "breccia_torch.plugin"), lambda: breccia_torch.plugin),
            (Plugin(NAME, "interpreted-breccia", version, "interpreted_manifest"), lambda: manifest),
        ],
        {},
    )
    yield list(laws_of(NAME, places=(place("torch"),)))
    registry.reload()


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", slow_but({"fp8_block", "nvfp4"}, ("fp8_block", "fp8_current", "nvfp4", "mxfp6", "int4", "nf4"))
)
def test_the_kernels_of_casts_keep_the_laws_in_the_interpreter(recipe: str, laws: list[Law]) -> None:
    outcomes: Counter[str] = Counter()
    for law in laws:
        if law.kind == "kernels" and law.subject.endswith(f".{recipe}"):
            outcomes[law.subject.split(".")[1]] += kept(law)
    assert set(outcomes) == {op for op in OPS if "record" not in op} and all(outcomes.values())


@pytest.mark.long
def test_the_kernels_of_histories_keep_the_laws_in_the_interpreter(laws: list[Law]) -> None:
    mine = [law for law in laws if law.kind == "kernels" and "record" in law.subject and law.subject.endswith(".fp8_delayed")]
    assert sum(map(kept, mine)) >= 2


def kept(law: Law) -> bool:
    """Whether the law holds; False where it cannot be tested here. Raises AssertionError where it does not hold."""
    try:
        law.check()
    except pytest.skip.Exception:
        return False
    return True
