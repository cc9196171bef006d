"""PyTorch for breccia: importing this loads nothing of torch; `import breccia` finds the plug-in by itself."""

from __future__ import annotations


def enable_compile() -> None:
    """Let `torch.compile` take the verbs of breccia whole, `fullgraph=True` and dynamic batches included.

    Call it once, before a function that calls them is compiled. It loads Dynamo, which takes a second, so it is not done for
    everybody.
    """
    from .operators import register

    register()


__all__ = ["enable_compile"]
