"""A conversion in a process of its own, with the peak of its memory: `anonymous.py SOURCE DESTINATION [OPTION]...`.

The options are those of `breccia convert`, which has two threads, whatever the machine has. Prints the peak of RssAnon +
RssShmem, in bytes, read every millisecond.
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path


def anonymous() -> int:
    """The memory of this process that is no page of a file, in bytes."""
    status = Path("/proc/self/status").read_text()
    return sum(1024 * int(kilobytes) for kilobytes in re.findall(r"^(?:RssAnon|RssShmem):\s*(\d+) kB$", status, re.MULTILINE))


def main(words: list[str]) -> int:
    peak, ended = anonymous(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, anonymous())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    import breccia
    from breccia.cli.main import run

    breccia.set_num_threads(2)
    try:
        run(["convert", *words, "--json"])
    except SystemExit as e:
        if e.code:
            raise
    ended.set()
    watching.join()
    return peak


if __name__ == "__main__":
    print(main(sys.argv[1:]), file=sys.stderr)
