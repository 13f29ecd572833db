"""A web server in this process that serves bytes by ranges, rightly or in one of several wrong ways."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Serves `contents` by name. The path of a request is /WAY/NAME.

    Attributes:
        requests: GET requests so far, by way.
        listing: what it answers where a list is asked for, as Azure is.
        release: set at the end, for answers that stand still.
        stands_still: ways whose answers stand still from now on.
    """

    daemon_threads = True

    def __init__(self, contents: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.contents, self.requests, self.release = contents, Counter[str](), threading.Event()
        self.tags = dict.fromkeys(contents, '"one"')
        self.listing = b""
        self.stands_still = set[str]()

    def url(self, way: str, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{way}/{name}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "comp=list" in self.path:
            return self._answer(200, self.server.listing)
        _, way, name = self.path.split("/", 2)
        content, is_head = self.server.contents.get(name), self.command == "HEAD"
        if not is_head:
            self.server.requests[way] += 1
        number = self.server.requests[way]
        if content is None or way in ("404", "403"):
            return self._answer(404 if content is None else int(way), b"")
        if not is_head and (way == "500" or (way == "500_twice" and number <= 2)):
            return self._answer(500, b"")
        tag = None if way == "untagged" else self.server.tags[name]
        if way != "ignores_match" and self.headers.get("If-Match") not in (None, tag):
            return self._answer(412, b"")
        asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if not asked or way == "ignores_range":
            return self._answer(200, content, tag)
        first, last = int(asked[1]), min(int(asked[2]) + 1, len(content))
        body, said = content[first:last], f"bytes {first}-{last - 1}/{len(content)}"
        if way == "short_honest":
            last -= 1
            body, said = body[:-1], f"bytes {first}-{last - 1}/{len(content)}"
        if way == "short_false":
            body = body[:-1]
        if way == "other_range":
            body, said = content[first - 1 : last - 1], f"bytes {first - 1}-{last - 2}/{len(content)}"
        self._answer(206, body, tag, said, way)
        return None

    def _answer(self, status: int, body: bytes, tag: str | None = '"one"', said: str = "", way: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
        if tag is not None:
            self.send_header("ETag", tag)
        if said:
            self.send_header("Content-Range", said)
        self.end_headers()
        if self.command == "HEAD":
            return
        if way == "stalls" or way in self.server.stands_still:
            self.wfile.write(body[: len(body) // 2])
            self.server.release.wait()
            self.close_connection = True
            return
        if way == "trickles":
            for at in range(len(body)):
                if self.server.release.wait(0.2):
                    return
                self.wfile.write(body[at : at + 1])
                self.wfile.flush()
        if way == "cut" or (way == "cut_once" and self.server.requests[way] == 1):
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)


@contextmanager
def serving(contents: dict[str, bytes]) -> Iterator[Server]:
    """A server of these contents, until the block ends."""
    server = Server(contents)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
