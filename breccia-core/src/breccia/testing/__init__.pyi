from . import oracle as oracle
from . import strategies as strategies
from . import vectors as vectors
from .kit import conformance as conformance
from .laws import Law as Law

__all__ = ["Law", "conformance", "oracle", "strategies", "vectors"]
