from .container import register as register
from .trees import dequantize as dequantize
from .trees import quantize as quantize

__all__ = ["dequantize", "quantize", "register"]
