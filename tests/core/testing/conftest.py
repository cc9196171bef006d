"""Fixtures of the tests of the conformance kit."""

from stray import declare

__all__ = ["declare"]
