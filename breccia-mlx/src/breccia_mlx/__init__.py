"""Makes every recipe of breccia work on `mlx.core.array`, with codes as uint8. Imports nothing; see `plugin.py`."""
