"""``rapidformer report --live``: the page on this machine alone, with the runs as they are now."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rapidformer.errors import RapidformerError
from rapidformer.report.page import build_content, render_page, to_script

_HOST = "127.0.0.1"
_NAMES = (_HOST, "localhost")
PORT = 8642


def build_server(sources: Sequence[Path], port: int | None) -> ThreadingHTTPServer:
    """A server for the page; without a port, the usual one or, if that is taken, any."""
    handler = partial(PageHandler, lambda: build_content(sources))
    try:
        return ThreadingHTTPServer((_HOST, PORT if port is None else port), handler)
    except OSError as reason:
        if port is None and reason.errno == errno.EADDRINUSE:
            return ThreadingHTTPServer((_HOST, 0), handler)
        raise RapidformerError(f"--port {port}: {reason.strerror}. Choose another one.") from None
    except OverflowError:
        raise RapidformerError(f"--port {port}: must be between 0 and 65535.") from None


class PageHandler(BaseHTTPRequestHandler):
    """Answers with the page, or with what it shows now."""

    def __init__(self, read: Callable[[], dict[str, Any]], *connection: Any) -> None:
        self.read = read
        super().__init__(*connection)

    def do_GET(self) -> None:
        # Another website must not read the page by giving its own name to this address.
        if self.headers.get("Host", "").partition(":")[0] not in _NAMES:
            self.send_error(403)
            return
        path = self.path.partition("?")[0]
        try:
            if path == "/":
                self.answer("text/html", render_page(self.read(), is_live=True))
            elif path == "/content.json":
                self.answer("application/json", to_script(self.read()))
            else:
                self.send_error(404)
        except ConnectionError:
            self.close_connection = True
        except (RapidformerError, OSError) as error:  # the folder is being replaced, or is gone
            self.send_error(503, explain=str(error))

    def answer(self, kind: str, text: str) -> None:
        data = text.encode("utf-8")
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """The terminal is the user's."""
