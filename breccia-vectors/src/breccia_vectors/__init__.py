"""Golden vectors of block-scaled formats: inputs, and every byte that a cast to them has to write.

    for case in breccia_vectors.cases("mxfp4", edge="ties"): ...
    print(breccia_vectors.check(quantize, library="acme 1.2"))

Data and checkers without any dependency; `python -m breccia_vectors --help` has them as commands.
"""

from .checking import check
from .comparing import NotSupported, ResultError
from .reducing import Smallest
from .reports import Difference, Failure, Report, Skipped
from .sets import EDGES, SPEC, Case, Codec, Format, Level, cases, formats, sets

__version__ = "0.2.0"
__all__ = [
    "EDGES", "SPEC", "Case", "Codec", "Difference", "Failure", "Format", "Level", "NotSupported", "Report", "ResultError",
    "Skipped", "Smallest", "cases", "check", "formats", "sets",
]  # fmt: skip
