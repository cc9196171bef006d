"""Siblings: what breccia's own distributions bring, so that what is missing can be named with its remedy.

The one place in core that knows them. Nothing here imports or needs them; tests/test_registry.py holds it to their manifests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sibling:
    """A distribution of ours beside core.

    arrays: top-level packages whose arrays it serves, as the framework named like its plug-in.
    bridges, commands: the names it declares. kernels: the modules its kernels run on.
    """

    distribution: str
    arrays: tuple[str, ...] = ()
    bridges: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()

    @property
    def plugin(self) -> str:
        """The name of its entry point."""
        return self.distribution.removeprefix("breccia-")

    @property
    def remedy(self) -> str:
        """What to type where it is missing."""
        return f"pip install {self.distribution}"


TRITON = Sibling("breccia-triton", kernels=("torch", "triton"))
BRIDGES = Sibling(
    "breccia-bridges",
    bridges=("from_deepseek_v3", "load_safetensors", "save_safetensors", "to_deepseek_v3"),
    commands=("convert", "inspect"),
)
SIBLINGS = (
    Sibling("breccia-torch", arrays=("torch",)),
    Sibling("breccia-jax", arrays=("jax", "jaxlib")),
    Sibling("breccia-mlx", arrays=("mlx",)),
    TRITON,
    BRIDGES,
)
