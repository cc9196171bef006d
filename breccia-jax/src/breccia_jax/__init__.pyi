from .checkpoints import assembled as assembled
from .container import register as register
from .delayed import advance as advance
from .delayed import histories as histories
from .dot_general import DotGeneral as DotGeneral
from .meshes import shardings as shardings
from .trees import combine as combine
from .trees import dequantize as dequantize
from .trees import partition as partition
from .trees import quantize as quantize
from .trees import to_storage as to_storage
from .weights import ScaledWeight as ScaledWeight

__all__ = [
    "DotGeneral",
    "ScaledWeight",
    "advance",
    "assembled",
    "combine",
    "dequantize",
    "histories",
    "partition",
    "quantize",
    "register",
    "shardings",
    "to_storage",
]
