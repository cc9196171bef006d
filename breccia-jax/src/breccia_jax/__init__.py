"""breccia on JAX: its vocabulary and native float8 storage. Imports nothing; see `plugin.py`."""
