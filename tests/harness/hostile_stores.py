"""Stores on loopback that lie on command: a Redis server and an S3 server. For tests only."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, cast
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["HostileRedis", "HostileS3", "S3Handler", "running"]

Lie = Callable[[list[bytes]], Iterable[bytes] | None]


@contextlib.contextmanager
def running(server: socketserver.TCPServer) -> Iterator[None]:
    """Serves until the `with` block ends."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class HostileRedis(socketserver.ThreadingTCPServer):
    """`lie` gets each command. It returns the bytes of an answer, or None for the right one."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _RedisHandler)
        self.values: dict[bytes, bytes] = {}
        self.lie: Lie = lambda _: None
        self.commands: list[bytes] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def answer(self, command: list[bytes]) -> bytes:
        name = command[1] if len(command) > 1 else b""
        match command[0]:
            case b"INFO":
                return b"$17\r\ncluster_enabled:0\r\n"
            case b"EXISTS" | b"EXPIRE":
                return b":%d\r\n" % (name in self.values)
            case b"GET":
                value = self.values.get(name)
                return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
            case b"SET":
                self.values.setdefault(name, command[2])
        return b"+OK\r\n"


class _RedisHandler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = cast("HostileRedis", self.server)
        with contextlib.suppress(OSError, ValueError):
            while command := _command(cast("BinaryIO", self.rfile)):
                server.commands.append(command[0])
                lie = server.lie(command)
                for piece in [server.answer(command)] if lie is None else lie:
                    self.wfile.write(piece)


def _command(file: BinaryIO) -> list[bytes]:
    count = int(file.readline()[1:] or 0)
    arguments = []
    for _ in range(count):
        size = int(file.readline()[1:])
        arguments.append(file.read(size + 2)[:size])
    return arguments


class HostileS3(ThreadingHTTPServer):
    """`lie` gets each GET, and handles it if it returns True."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), S3Handler)
        self.objects: dict[str, bytes] = {}
        """By path without the bucket."""
        self.lie: Callable[[S3Handler], bool] = lambda _: False

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that end a connection."""


class S3Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def store(self) -> HostileS3:
        return cast("HostileS3", self.server)

    @property
    def query(self) -> dict[str, str]:
        """Parameters of a list; empty for an object."""
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}

    @property
    def object(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/").partition("/")[2]

    def do_PUT(self) -> None:
        self.store.objects[self.object] = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(200, b"", {"ETag": '"x"'})

    def do_GET(self) -> None:
        if self.store.lie(self):
            return
        if "list-type" in self.query:
            self.reply(200, self.listed())
            return
        found = self.store.objects.get(self.object)
        if found is None:
            self.reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        first, last = (int(each) for each in self.headers["Range"].removeprefix("bytes=").split("-"))
        piece = found[first : last + 1]
        if piece:
            where = {"Content-Range": f"bytes {first}-{first + len(piece) - 1}/{len(found)}"}
            self.reply(206, piece, where | {"ETag": '"x"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"})
        else:
            self.reply(416, b"")

    def listed(self, more: str = "") -> bytes:
        """Returns the answer to a list. `more` is XML that it contains, too."""
        query = self.query
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        found = sorted(path for path in self.store.objects if path.startswith(prefix) and path > after)
        if query.get("delimiter"):
            names = {path: path[len(prefix) :].partition("/") for path in found}
            folders = sorted({f"{prefix}{name}/" for name, slash, _ in names.values() if slash})
            parts = [f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders]
            parts += [_entry(path, len(self.store.objects[path])) for path in found if not names[path][1]]
        else:
            parts = [_entry(path, len(self.store.objects[path])) for path in found]
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(parts)}{more}</ListBucketResult>".encode()

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": f"{len(body)}"} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


def _entry(path: str, nbytes: int) -> str:
    return (
        f"<Contents><Key>{escape(path)}</Key><LastModified>2026-01-01T00:00:00Z</LastModified>"
        f"<ETag>x</ETag><Size>{nbytes}</Size></Contents>"
    )
