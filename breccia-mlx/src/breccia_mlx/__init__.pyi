from . import nn as nn
from .container import from_tree as from_tree
from .container import to_tree as to_tree
from .nn import quantize as quantize

__all__ = ["from_tree", "nn", "quantize", "to_tree"]
