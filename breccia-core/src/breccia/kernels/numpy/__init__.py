"""NumPy kernels: the bytes of the generic algorithm, in few passes over chunks that stay in cache.

An array, K last, is cut into chunks of whole blocks, and each chunk goes through the same steps in per-thread buffers
: magnitudes, amax per block, scales, one multiplication per element, codes by an FP32 addition that rounds in
hardware, packing. Codecs, rules and offsets without a fast path use `reference` chunk by chunk.

Blocks are (m, k): k elements along K by m rows. A block larger than a chunk takes two passes, amax first.
"""

from __future__ import annotations

from .casting import cast
from .decoding import dequantize
from .products import group_bounds, grouped_matmul, matmul
from .requantizing import requantize

__all__ = ["cast", "dequantize", "group_bounds", "grouped_matmul", "matmul", "requantize"]
