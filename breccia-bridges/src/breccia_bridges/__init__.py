"""`breccia.bridges`: lossless conversions to and from other libraries, and the converter. Imports nothing; see `plugin.py`."""
