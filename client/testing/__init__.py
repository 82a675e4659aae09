"""In-memory fake server for tests of code that uses a `Client`."""

from .fake_server import FakeServer

__all__ = ["FakeServer"]
