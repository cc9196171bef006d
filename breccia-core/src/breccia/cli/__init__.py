"""The program `breccia`."""
