from . import nn as nn
from .container import from_tree as from_tree
from .container import to_tree as to_tree
from .exporting import export_function as export_function
from .loading import load_model as load_model
from .loading import save_model as save_model
from .quantizing import QuantizeSummary as QuantizeSummary
from .quantizing import quantize as quantize

__all__ = ["QuantizeSummary", "export_function", "from_tree", "load_model", "nn", "quantize", "save_model", "to_tree"]
