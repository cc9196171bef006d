"""Volt's kernels for breccia."""
