"""The threads of breccia_native's compiled kernels; see pool.c."""

def add(count: int, threads: int) -> tuple[int, int]:
    """(The sum of range(count), how many threads added numbers). For tests: each number is taken once."""

def borrow(loop: int, threads: int) -> None:
    """From now on work on the threads of another library, by the addresses of two functions in C: a parallel loop, and one that
    says how many threads it uses (pool.c has their types). Where they are too few, in forked children and with addresses of 0,
    threads of the pool work.
    """

def size() -> int:
    """The threads that the pool has started."""
