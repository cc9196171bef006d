"""Makes every recipe of breccia work on `torch.Tensor`, with codes and 8-bit scales in torch's float8 dtypes. Imports nothing; see `plugin.py`."""
