"""Makes every recipe of breccia work on `jax.Array`, with codes and 8-bit scales in JAX's float8 dtypes. Imports nothing; see `plugin.py`."""
