"""Compiled microkernels for breccia's casts on the CPU. Imports nothing; see `plugin.py`."""
