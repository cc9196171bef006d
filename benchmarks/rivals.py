"""What is timed against what: breccia, the older package that is also called breccia, torchao, a few lines of NumPy or torch.

On a CPU each runs in a process of its own: two packages of one name cannot meet, and no rival inherits another's heap or
caches. On a CUDA device all interleave, without the older package: clocks of a GPU depend on what ran just before.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import plain
from harness import HERE, refuse
from plain import TILES

OURS, STRAIGHTFORWARD, EAGER, OLD = "breccia", "ml_dtypes", "eager-torch", "breccia-0.1.3"
#: torchao as it is, and through torch.compile.
TORCHAO, TORCHAO_COMPILED = "torchao", "torchao-compiled"
#: On CUDA: the few lines of torch through torch.compile, and NVIDIA's library.
TORCH_COMPILED, TRANSFORMER_ENGINE = "torch-compiled", "transformer-engine"
#: Ours by other ways to the same bytes: NumPy alone, without compiled steps, and graphs of torch.
ON_NUMPY, COMPILED = "breccia-on-numpy", "breccia-compiled"
WAYS = (ON_NUMPY, COMPILED)
#: What runs against ours, by framework.
RIVALS = {
    "numpy": (ON_NUMPY, STRAIGHTFORWARD, OLD),
    "torch": (*WAYS, EAGER, TORCHAO, TORCHAO_COMPILED, OLD),
    "jax": (ON_NUMPY,),
    "cuda": (EAGER, TORCH_COMPILED, TRANSFORMER_ENGINE, TORCHAO, TORCHAO_COMPILED),
}
#: The module that makes the arrays of a framework.
MODULES = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy"}
OLD_VERSION = "0.1.3"
CACHE = HERE / ".rivals"

#: The recipes that all of them have, and the class that both packages call them by.
RECIPES = {
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
    "int4": "INT4Scaling",
}

#: Where a rival defines the stored scale as we do, so that its bytes must be ours. The older package rounds the exponent of
#: an E8M0 scale to nearest, and has no tensor scale in NVFP4. torchao's scale of INT4 is amax / 7.5.
SAME_SCALE = {name: tuple(RECIPES) for name in (STRAIGHTFORWARD, EAGER, *WAYS)}
SAME_SCALE |= {OLD: ("fp8_current", "fp8_block", "int4")}
SAME_SCALE |= dict.fromkeys((TORCHAO, TORCHAO_COMPILED), ("fp8_current", "fp8_block", "mxfp8", "nvfp4"))

#: Casts of the older package with many FP32 temporaries per element (as many as the element has codes, several times): timed
#: on a slab of rows and multiplied. For two of them it uses torch's own conversion where it has a tensor of torch.
SLAB_ROWS = 256
SLABS = {"numpy": ("fp8_current", "fp8_block", "mxfp8", "nvfp4"), "torch": ("mxfp8", "nvfp4")}

#: An array of NumPy or JAX, or a tensor of torch.
Array = Any


@dataclass(frozen=True)
class Rival:
    """How a rival casts and decodes `recipe` (a key of RECIPES). What `cast` returns is its own affair.

    Some cast further recipes, by spec. `cast` and the fields like it raise KeyError for a recipe that the rival does not have.
    """

    version: str
    cast: Callable[[str], Callable[[Array], Any]]
    dequantize: Callable[[Any], Array]
    scale: Callable[[Any], Array]
    #: A matrix as the rival takes it; its scales and what it decodes must be of that type.
    given: Callable[[np.ndarray], Array] = lambda x: x
    #: The recipes that it has.
    recipes: tuple[str, ...] = tuple(RECIPES)
    #: The recipes that it casts as a slab.
    slabs: tuple[str, ...] = ()
    #: `taller(cast, n)`: the same rows n times, to decode a full matrix of what was cast as a slab.
    taller: Callable[[Any, int], Any] | None = None
    #: Casts by other names of bench_gpu_casts.OPS, where the rival has kernels for them.
    others: Mapping[str, Callable[[str], Callable[[Array], Any]]] = field(default_factory=dict)
    #: What serves `op` of an operand (the matrix, or what `cast` returned), where there is a choice.
    kernel: Callable[[str, str, Any], str | None] = lambda op, recipe, operand: None


def straightforward() -> Rival:
    """The formats in a few lines of NumPy and ml_dtypes. The bytes are those of the formats: packed nibbles, stored scales."""
    made = plain.InNumPy()
    return Rival(version("ml_dtypes"), made.cast, made.dequantize, lambda cast: _codes(cast[2], np.uint8))


def plain_torch(device: str = "cpu", dtype: Any = None) -> Rival:
    """The formats in a few lines of plain torch, uncompiled. dtype: of decoded values (FP32)."""
    import torch

    made = plain.InTorch(device, dtype)

    def pair(recipe: str) -> Callable[[Array], Any]:
        along, down = made.cast(recipe), made.cast(recipe, -2)
        return lambda x: (along(x), down(x))

    def amax(recipe: str) -> Callable[[Array], Any]:
        return {"fp8_delayed": lambda x: x.abs().max().to(torch.float32)}[recipe]

    def recorded(recipe: str) -> Callable[[Array], Any]:
        cast, of = made.cast(recipe), amax(recipe)
        return lambda x: (cast(x), of(x))

    others = {"cast-axis-2": lambda recipe: made.cast(recipe, -2), "cast_pair": pair}
    others |= {"AmaxHistory.cast": recorded, "AmaxHistory.update": amax}
    scale = lambda cast: _codes(cast[2], torch.uint8)  # noqa: E731
    return Rival(torch.__version__, made.cast, made.dequantize, scale, torch.asarray, others=others)


def rival(name: str, framework: str = "numpy", device: str = "cpu", dtype: Any = None) -> Rival:
    """The rival of that name, ready in this process; packages are given arrays of `framework`.

    device, dtype: of torch tensors, and of values decoded from them (FP32).
    """
    made = {
        STRAIGHTFORWARD: straightforward,
        EAGER: lambda: plain_torch(device, dtype),
        TORCH_COMPILED: lambda: _compiled(plain_torch(device, dtype), dynamic=False),
        TRANSFORMER_ENGINE: lambda: transformer_engine(device, dtype),
        TORCHAO: torchao,
        TORCHAO_COMPILED: lambda: torchao_compiled(device),
        COMPILED: compiled,
        ON_NUMPY: lambda: packaged(OURS, "numpy", prefer="numpy"),
    }
    return made[name]() if name in made else packaged(name, framework)


def chosen(wanted: list[str], framework: str = "numpy") -> list[str]:
    """The rivals to run. Those not named run where they are at hand, and are announced where they are not."""
    there_are = RIVALS[framework]
    if unknown := [name for name in wanted if name not in (*there_are, "all", "none")]:
        refuse(f"--rivals takes {', '.join(there_are)}, all or none; got {unknown[0]!r}.")
    if wanted:
        return [name for name in there_are if name in wanted or "all" in wanted]
    why = {name: absence(name) for name in there_are}
    for name in filter(why.get, why):
        print(f"skipped {name}: {why[name]}", file=sys.stderr)
    return [name for name in there_are if not why[name]]


def packaged(name: str, framework: str, prefer: str = "") -> Rival:
    """The package `breccia` that this process imports, on arrays of `framework`. Exits unless it is the one of that name.

    prefer: the name of the kernels to ask for, up to the op.
    """
    given = {op: {"prefer": f"{prefer}.{op}"} if prefer else {} for op in ("cast", "dequantize")}
    package, xp = importlib.import_module("breccia"), importlib.import_module(MODULES[framework])
    done = importlib.import_module("jax").block_until_ready if framework == "jax" else lambda result: result
    found = package.__version__
    if (found == OLD_VERSION) != (name == OLD):
        sys.exit(f"rivals: this process was to time {name}, but `import breccia` gives {found}; look at PYTHONPATH.")

    def cast(recipe: str) -> Callable[[Array], Any]:
        chosen = getattr(package, RECIPES[recipe])()
        return lambda x: done(package.cast(x, chosen, **given["cast"]))

    def taller(st: Any, n: int) -> Any:
        scale = xp.tile(st.scale, (n, 1)) if st.scale.ndim else st.scale
        return dataclasses.replace(st, data=xp.tile(st.data, (n, 1)), scale=scale)

    def kernel(op: str, recipe: str, operand: Any) -> str | None:
        chosen = getattr(package, RECIPES[recipe])()
        operands = (operand, chosen) if op == "cast" else (operand,)
        winner = package.explain(op, *operands, **given[op]).winner
        return winner.name if winner else None

    def dequantize(st: Any) -> Array:
        return done(package.dequantize(st, **given["dequantize"]))

    rival = Rival(found, cast, dequantize, lambda st: _codes(st.scale, xp.uint8), xp.asarray)
    if name == OLD:
        return dataclasses.replace(rival, slabs=SLABS[framework], taller=taller)
    return dataclasses.replace(rival, kernel=kernel)


def compiled() -> Rival:
    """Ours on torch, each op a graph of its own."""

    return _compiled(packaged(OURS, "torch"))


def _compiled(rival: Rival, dynamic: bool | None = None) -> Rival:
    """The rival, its cast and its dequantize each a graph of torch. dynamic: as torch.compile takes it."""
    import torch

    # One function serves every recipe and shape here; by default Dynamo keeps 8 graphs of a function.
    torch._dynamo.config.recompile_limit = 64

    def wrapped(made: Callable[[str], Callable[[Array], Any]]) -> Callable[[str], Callable[[Array], Any]]:
        return lambda recipe: torch.compile(made(recipe), fullgraph=True, dynamic=dynamic)

    dequantize = torch.compile(rival.dequantize, fullgraph=True, dynamic=dynamic)
    others = {op: wrapped(made) for op, made in rival.others.items()}
    return dataclasses.replace(rival, cast=wrapped(rival.cast), dequantize=dequantize, others=others)


def _codes(scale: Array, byte: Any) -> Array:
    return scale.view(byte) if scale.dtype.itemsize == 1 else scale


def fetched_old() -> Path:
    target = old_folder()
    if target.is_dir():
        return target
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--target", f"{folder}/got", f"breccia=={OLD_VERSION}"], stdout=sys.stderr)
        if done.returncode:
            sys.exit(
                f"rivals: asked pip for breccia=={OLD_VERSION}, and it failed (its message is above). "
                f"Leave {OLD} out of --rivals, or install that version into {target.relative_to(HERE.parent)} yourself."
            )
        shutil.move(f"{folder}/got", target)
    return target


def old_folder() -> Path:
    return CACHE / f"breccia-{OLD_VERSION}"


def absence(name: str) -> str:
    """Why the rival cannot run without further ado; empty where it can."""
    if name == OLD and not old_folder().is_dir():
        return f"not fetched yet; --rivals {OLD} fetches it"
    if name == STRAIGHTFORWARD and find_spec("ml_dtypes") is None:
        return "ml_dtypes is not installed; pip install ml_dtypes"
    if name in (TORCHAO, TORCHAO_COMPILED) and find_spec("torchao") is None:
        return "torchao is not installed; pip install torchao"
    if name == TRANSFORMER_ENGINE and find_spec("transformer_engine") is None:
        return "transformer_engine is not installed; pip install transformer-engine[pytorch]"
    return ""


def torchao() -> Rival:
    """torchao's tensor classes, with the settings whose scales are those of our recipes. Its INT4 is one code per byte."""
    import torch
    from torchao import quantization as q
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    e4m3 = torch.float8_e4m3fn

    casts: dict[str, Callable[[Array], Any]] = {
        "fp8_current": lambda x: q.Float8Tensor.from_hp(x, e4m3, q.PerTensor()),
        "fp8_block": lambda x: q.Float8Tensor.from_hp(x, e4m3, q.PerBlock((1, 128))),
        "mxfp8": lambda x: MXTensor.to_mx(x, e4m3, 32, ScaleCalculationMode.RCEIL),
        "nvfp4": lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())),
        "int4": lambda x: q.IntxUnpackedToInt8Tensor.from_hp(x, (1, 128), torch.int4),
    }

    def dequantize(tensor: Any) -> Array:
        return tensor.dequantize()

    scale = lambda tensor: _codes(tensor.scale, torch.uint8)  # noqa: E731
    return Rival(version("torchao"), casts.__getitem__, dequantize, scale, torch.asarray)


def torchao_compiled(device: str) -> Rival:
    """torchao, its cast and its dequantize each a graph of torch. torch 2.13 cannot compile E8M0 scales for CPUs."""
    import torch

    if device == "cuda":
        return _compiled(torchao(), dynamic=False)
    torch._logging.set_logs(inductor=logging.ERROR)  # a traceback for each graph that it cannot cache
    return dataclasses.replace(_compiled(torchao()), recipes=tuple(recipe for recipe in RECIPES if recipe != "mxfp8"))


def transformer_engine(device: str, dtype: Any) -> Rival:
    """TransformerEngine's quantizers with the settings nearest to breccia's recipes.

    `internal`, as its own layers set it: results are plain storages, which cost less host time than its tensors.
    """
    import torch

    te: Any = importlib.import_module("transformer_engine.pytorch")
    e4m3 = te.DType.kFloat8E4M3
    scale, amax = torch.full((1,), 64.0, device=device), torch.zeros(1, device=device)
    blocks = partial(te.Float8BlockQuantizer, e4m3, force_pow_2_scales=False)
    made: dict[str, Callable[..., Any]] = {
        "fp8_current": partial(te.Float8CurrentScalingQuantizer, e4m3, torch.device(device)),
        "fp8_delayed": partial(te.Float8Quantizer, scale, amax, e4m3),
        "fp8_block": partial(blocks, block_scaling_dim=1),
        TILES: partial(blocks, block_scaling_dim=2),
    }
    if torch.cuda.get_device_capability() >= (10, 0):  # elsewhere its kernels fault, or print an error from each thread
        made |= {"mxfp8": partial(te.MXFP8Quantizer, e4m3), "nvfp4": te.NVFP4Quantizer}

    def quantizer(recipe: str, rowwise: bool = True, columnwise: bool = False) -> Any:
        found = made[recipe](rowwise=rowwise, columnwise=columnwise)
        found.internal = True
        return found

    def recorded(recipe: str) -> Any:
        return quantizer({"fp8_delayed": "fp8_delayed"}[recipe])  # its delayed casts always record the amax

    def dequantize(storage: Any) -> Array:
        return storage.dequantize(dtype=dtype)

    others = {"cast-axis-2": lambda recipe: quantizer(recipe, False, True), "AmaxHistory.cast": recorded}
    others["cast_pair"] = lambda recipe: quantizer(recipe, True, True)
    found, scale = version("transformer_engine"), lambda storage: storage._rowwise_scale_inv
    return Rival(found, quantizer, dequantize, scale, recipes=tuple(made), others=others)
