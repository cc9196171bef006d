"""The `breccia` command line."""
