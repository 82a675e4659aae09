"""Requests to the metrics port."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPMessage

__all__ = ["get", "get_raw"]


def get_raw(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, HTTPMessage, bytes]:
    """Returns status, headers and body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Returns status, content type and text."""
    status, answered, body = get_raw(port, path, method, **headers)
    return status, answered["Content-Type"], body.decode()
