from .container import register as register
from .trees import combine as combine
from .trees import dequantize as dequantize
from .trees import partition as partition
from .trees import quantize as quantize

__all__ = ["combine", "dequantize", "partition", "quantize", "register"]
