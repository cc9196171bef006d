"""The threads of breccia_native's compiled kernels; see pool.c."""

def add(count: int, threads: int) -> tuple[int, int]:
    """(The sum of range(count), how many threads added numbers). For tests: each number is taken once."""

def size() -> int:
    """The threads that the pool has started."""
