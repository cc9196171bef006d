from . import nn as nn
from .checkpoint import load_model as load_model
from .checkpoint import save_model as save_model
from .operators import enable_compile as enable_compile
from .quantize import quantize_ as quantize_
from .torchao import from_torchao_model_ as from_torchao_model_
from .torchao import to_torchao_model_ as to_torchao_model_
from .training.convert import convert_from_training_ as convert_from_training_
from .training.convert import convert_to_training_ as convert_to_training_
from .training.layer import end_of_step as end_of_step

__all__ = [
    "convert_from_training_",
    "convert_to_training_",
    "enable_compile",
    "end_of_step",
    "from_torchao_model_",
    "load_model",
    "nn",
    "quantize_",
    "save_model",
    "to_torchao_model_",
]
