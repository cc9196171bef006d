from .cuda.named import block_scaled_matmul_triton as block_scaled_matmul_triton
from .cuda.named import scaled_matmul_triton as scaled_matmul_triton
from .tuning import configure as configure

__all__ = ["block_scaled_matmul_triton", "configure", "scaled_matmul_triton"]
