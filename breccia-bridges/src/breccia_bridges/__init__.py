"""`breccia.bridges`: lossless ways to breccia's neighbours, and the converter. Imports nothing; see `plugin.py`."""
