"""breccia on PyTorch: its vocabulary and native float8 storage. Imports nothing; see `plugin.py`."""
