from . import oracle as oracle
from . import strategies as strategies
from . import vectors as vectors
from .kit import Law as Law
from .kit import conformance as conformance

__all__ = ["Law", "conformance", "oracle", "strategies", "vectors"]

def __dir__() -> list[str]: ...
