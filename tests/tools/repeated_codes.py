"""A table codec in which several codes stand for one number."""

from __future__ import annotations

from breccia import Lookup

#: The lowest number has three codes, zero three, the largest two, and 0.25 two. Some nearest codes are both even or both odd.
REPEATED = Lookup(
    "REPEATED", 4, None, "this test", (0.25, 1.5, -2.0, 0.0, -0.5, -2.0, 0.5, 2.0, 0.0, -2.0, 1.0, 2.0, 0.25, 0.0, -1.25, 0.125)
)
