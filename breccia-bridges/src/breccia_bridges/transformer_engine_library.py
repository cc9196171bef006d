"""Names of TransformerEngine, which are imported when one of its tensors or recipes is built."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FILES = {
    "Float8Tensor": "float8_tensor",
    "Float8BlockwiseQTensor": "float8_blockwise_tensor",
    "MXFP8Tensor": "mxfp8_tensor",
    "NVFP4Tensor": "nvfp4_tensor",
}


def modules(name: str) -> tuple[str, ...]:
    """Where a class and its quantizer may be, by the class's name."""
    return (
        f"transformer_engine.pytorch.tensor.{_FILES[name]}",
        "transformer_engine.pytorch.tensor",
        "transformer_engine.pytorch",
    )


def load(name: str) -> Any:
    """A tensor class. Raises ImportError, naming what is missing."""
    return find(name, modules(name))


def find(name: str, modules: tuple[str, ...]) -> Any:
    """An attribute of the first module that has it. Raises ImportError, naming what is missing."""
    failure: Exception | None = None
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError, OSError, RuntimeError) as e:  # its compiled library may fail to load
            failure = failure or e
    raise ImportError(
        f"to_transformer_engine needs TransformerEngine 2.x, whose {name} cannot be imported "
        f"({type(failure).__name__}: {failure}): "
        "pip install 'transformer-engine[pytorch]', on Linux with CUDA; or pass like=, one of its tensors.",
        name="transformer_engine",
    ) from failure
