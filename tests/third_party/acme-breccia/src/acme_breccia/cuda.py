"""A CUDA kernel: FP8 codes and their scales of 1 x k blocks to FP32, on torch. Compiled when it is first used."""

from functools import cache

import torch

SOURCE = """
extern "C" __global__ void values(const unsigned char* codes, const float* scale, const float* table, float* out, int k) {
    const size_t block = blockIdx.x, start = block * k;
    for (int i = threadIdx.x; i < k; i += blockDim.x) out[start + i] = table[codes[start + i]] * scale[block];
}
"""
compiled = cache(lambda device: torch.cuda._compile_kernel(SOURCE, "values"))  # NVRTC, through torch
table = cache(lambda codec, device: torch.tensor([codec.value(c) for c in range(256)], dtype=torch.float32, device=device))


def accepts(call):
    m, k = call.a.layout.block(call.a.axis)
    if m != 1 or k is None or call.a.layout.partial or call.a.empty:
        return "its codes are not whole blocks of 1 x k"
    return "it only returns new FP32 arrays" if call.options else None


def dequantize(st, options):
    if st.axis == -2:
        return dequantize(st.mT, options).mT  # of the same memory
    values = torch.empty(st.shape, dtype=torch.float32, device=st.device)
    codes, scale = st.data.contiguous().view(torch.uint8), st.scale.contiguous()
    with torch.cuda.device(st.device):
        torch.cuda.set_device(st.device)  # the thread of a backward pass has no CUDA context yet
        arguments = (codes, scale, table(st.recipe.format.element, st.device), values, st.layout.block()[1])
        compiled(st.device)((scale.numel(), 1, 1), (128, 1, 1), arguments)  # a block of threads for each scale
    return values
