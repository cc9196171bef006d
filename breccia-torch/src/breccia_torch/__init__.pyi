from . import nn as nn
from .checkpoint import load_model as load_model
from .checkpoint import save_model as save_model
from .operators import enable_compile as enable_compile
from .quantize import quantize_ as quantize_
from .torchao import from_torchao_model_ as from_torchao_model_
from .torchao import to_torchao_model_ as to_torchao_model_

__all__ = ["enable_compile", "from_torchao_model_", "load_model", "nn", "quantize_", "save_model", "to_torchao_model_"]
