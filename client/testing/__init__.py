"""Fake server for tests of code that uses a `Client`: no process, no socket, no thread."""

from .fake_server import FakeServer

__all__ = ["FakeServer"]
