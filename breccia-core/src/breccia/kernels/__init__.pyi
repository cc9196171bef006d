from . import numpy as numpy
from . import reference as reference
from . import triton as triton

__all__ = ["numpy", "reference", "triton"]
