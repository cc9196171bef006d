"""Siblings: the contents of breccia's own distributions, so that errors can name a missing one and its remedy.

The only place in core that lists them. Nothing here imports them; tests/core/dispatch/test_registry.py compares it with
their manifests.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

#: The distribution this file belongs to.
CORE = "breccia-core"


def install(requirement: str, *options: str) -> str:
    """The pip command that installs one of breccia's distributions with its extras, from this git clone if it is one."""
    clone = Path(__file__).parents[3]
    if not (clone / CORE / "pyproject.toml").is_file():
        return shlex.join(["pip", "install", *options, requirement])
    return shlex.join(["pip", "install", *options, "-e", str(clone / requirement)])


@dataclass(frozen=True)
class Sibling:
    """One of breccia's distributions other than core.

    purpose: what it adds. arrays: top-level packages whose arrays it supports, as the framework with the plug-in's name.
    commands: the names it declares. kernels: the modules its kernels run on.
    """

    distribution: str
    purpose: str
    arrays: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()

    @property
    def plugin(self) -> str:
        """The name of its entry point."""
        return self.distribution.removeprefix("breccia-")

    @property
    def remedy(self) -> str:
        """The command that installs it."""
        return install(self.distribution)


TRITON = Sibling(
    "breccia-triton",
    "kernels for NVIDIA GPUs, on PyTorch and JAX",
    kernels=("torch", "triton"),
)
BRIDGES = Sibling(
    "breccia-bridges",
    "other libraries' tensors, checkpoints, and the commands for them",
    commands=("compare", "convert", "diff", "inspect", "merge", "why"),
)
SIBLINGS = (
    Sibling("breccia-torch", "PyTorch tensors, layers and operators", arrays=("torch",)),
    Sibling("breccia-jax", "JAX arrays, and Flax and Equinox layers", arrays=("jax", "jaxlib")),
    Sibling("breccia-mlx", "MLX arrays and layers", arrays=("mlx",)),
    Sibling("breccia-native", "compiled kernels for CPUs", kernels=("numpy",)),
    TRITON,
    BRIDGES,
)


@dataclass(frozen=True)
class Extra:
    """An extra of one of breccia's distributions: the modules it installs, and the features that need them."""

    name: str
    modules: tuple[str, ...]
    purpose: str

    @property
    def remedy(self) -> str:
        """The command that installs it."""
        return install(self.name)


ML_DTYPES = Extra("breccia-core[ml-dtypes]", ("ml_dtypes",), "bfloat16 and float8 arrays in NumPy")
YAML = Extra("breccia-core[yaml]", ("yaml",), "policies in YAML files")
TESTING = Extra("breccia-core[testing]", ("pytest", "hypothesis"), "the conformance kit")
EXTRAS = (
    Extra("breccia-core[cli]", ("typer", "rich", "packaging"), "the `breccia` command"),
    ML_DTYPES,
    YAML,
    TESTING,
    Extra("breccia-bridges[report]", ("jinja2",), "--report of convert and compare"),
    Extra(
        "breccia-bridges[remote]", ("aiohttp", "fsspec", "platformdirs"), "checkpoints at URLs: s3://, gs://, hf://, https://"
    ),
    Extra("breccia-bridges[gguf]", ("gguf",), "types IQ1 to IQ3 of GGUF files"),
    Extra("breccia-bridges[ray]", ("ray",), "convert --engine ray: files on many machines"),
    Extra("breccia-bridges[xxhash]", ("xxhash",), "digests of what convert writes in less time"),
)


@dataclass(frozen=True)
class ConflictingDistribution:
    """Breccia 0.1, an older code base that installs into the same package: the problem and its remedy."""

    text: str
    remedy: str


def unrelated() -> ConflictingDistribution | None:
    """The distribution `breccia` before 0.2, if it is installed. If both install into one folder, neither works.

    From 0.2 on, `breccia` depends on breccia-core and holds the same files.
    """
    try:
        older_distribution = distribution("breccia")
    except PackageNotFoundError:
        return None
    if any(need.startswith(CORE) for need in older_distribution.requires or ()):
        return None
    ours, theirs = Path(__file__).parent, Path(str(older_distribution.locate_file("breccia")))
    mixed = theirs.resolve() == ours.resolve()
    where = "in the same folder as breccia-core, each overwriting the other" if mixed else f"as well, in {theirs}"
    return ConflictingDistribution(
        f"the older, unrelated distribution `breccia` {older_distribution.version} is installed {where}",
        f"pip uninstall breccia; {install(CORE, '--force-reinstall', '--no-deps')}",
    )
