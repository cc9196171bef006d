from . import nn as nn
from .checkpoint import load_model as load_model
from .checkpoint import save_model as save_model
from .operators import enable_compile as enable_compile
from .quantize import quantize_ as quantize_

__all__ = ["enable_compile", "load_model", "nn", "quantize_", "save_model"]
