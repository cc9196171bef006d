"""A web server of one folder, which counts what it sends and may have faults."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Web:
    """folder: what it serves. ranges: whether it answers with parts of files. breaks: the answers after which it sends no whole
    one any more; None if it never does. sent: the bytes of files that it sent, by name.
    """

    folder: Path
    url: str = ""
    ranges: bool = True
    breaks: int | None = None
    sent: dict[str, int] = field(default_factory=dict[str, int])
    answers: int = 0


@contextmanager
def serving(folder: Path) -> Generator[Web]:
    """A server while the block runs."""
    web = Web(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = folder / self.path.strip("/")
            if path.is_dir():
                page = "".join(f'<a href="{one.name}">{one.name}</a>' for one in path.iterdir()).encode()
                self._head(200, len(page), "text/html")
                self.wfile.write(page if self.command == "GET" else b"")
                return
            if not path.is_file():
                self.send_error(404)
                return
            size = count = path.stat().st_size
            first = 0
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if web.ranges else None
            if asked is None or self.command == "HEAD":
                self._head(200, size, "application/octet-stream")
            else:
                first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
                count = last + 1 - first
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
                self._head(None, count, "application/octet-stream")
            if self.command == "GET":
                web.answers += 1
                if web.breaks is not None and web.answers > web.breaks:
                    count //= 2
                    self.close_connection = True
                web.sent[path.name] = web.sent.get(path.name, 0) + count
                with suppress(ConnectionError), path.open("rb") as file:  # the other side may have seen enough
                    file.seek(first)
                    self.wfile.write(file.read(count))

        def _head(self, code: int | None, size: int, kind: str) -> None:
            if code is not None:
                self.send_response(code)
            self.send_header("Content-Length", str(size))
            self.send_header("Content-Type", kind)
            self.end_headers()

        def log_message(self, format: str, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
