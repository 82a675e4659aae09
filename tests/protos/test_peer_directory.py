"""Which servers the directory of peers permits, and what happens if names change or fail."""

from __future__ import annotations

import socket

import pytest

from kvtier.protos.endpoint import EndpointError
from kvtier.protos.peer_directory import PeerDirectory


class _Names:
    """Injected resolver and clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.found: dict[str, list[str]] = {}
        self.asked: list[str] = []

    def resolve(self, host: str) -> list[str]:
        self.asked.append(host)
        if host not in self.found:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self.found[host]

    def directory(self, *entries: str) -> PeerDirectory:
        return PeerDirectory(entries, keep_seconds=300, resolve_name=self.resolve, clock=lambda: self.now)


def _dialled(directory: PeerDirectory, name: str) -> tuple[str, str] | None:
    found = directory.find(name)
    return None if found is None else (str(found), found.tls_name or found.host)


def test_only_listed_addresses_are_permitted() -> None:
    """The port counts too. Different texts of one address are equal."""
    directory = _Names().directory("10.0.0.1:7450", "[fd00::1]:7450")
    assert _dialled(directory, "10.0.0.1:7450") == ("10.0.0.1:7450", "10.0.0.1")
    assert _dialled(directory, "[fd00:0:0::1]:7450") == ("[fd00::1]:7450", "fd00::1")
    for other in ("10.0.0.1:22", "10.0.0.2:7450", "169.254.169.254:80", "unix:/tmp/s", "10.0.0.1", "", "a:b", "é:1"):
        assert directory.find(other) is None
    assert len(directory) == 2


def test_a_name_stands_for_all_its_addresses() -> None:
    """The connection goes to an address that was resolved, and the certificate has the name."""
    names = _Names()
    names.found["kv.site"] = ["10.0.0.9", "10.0.0.8"]
    directory = names.directory("kv.site:7450")
    assert directory.find("10.0.0.8:7450") is None  # not resolved yet
    directory.refresh()
    assert _dialled(directory, "10.0.0.8:7450") == ("10.0.0.8:7450", "kv.site")
    assert _dialled(directory, "10.0.0.9:7450") == ("10.0.0.9:7450", "kv.site")
    assert _dialled(directory, "KV.Site.:7450") == ("10.0.0.8:7450", "kv.site")
    assert directory.find("10.0.0.8:7451") is None


def test_a_name_of_a_caller_is_never_resolved() -> None:
    names = _Names()
    names.found["evil.site"] = ["10.0.0.8"]
    directory = names.directory("10.0.0.8:7450")
    directory.refresh()
    assert directory.find("evil.site:7450") is None
    assert names.asked == []


def test_addresses_follow_the_name() -> None:
    names = _Names()
    names.found["kv.site"] = ["10.0.0.8"]
    directory = names.directory("kv.site:7450")
    directory.refresh()
    names.found["kv.site"] = ["10.0.0.9"]
    directory.refresh()
    assert directory.find("10.0.0.8:7450") is None
    assert directory.find("10.0.0.9:7450") is not None


def test_a_name_that_cannot_be_resolved_keeps_its_addresses_for_a_time() -> None:
    names = _Names()
    names.found["kv.site"] = ["10.0.0.8"]
    directory = names.directory("kv.site:7450")
    directory.refresh()
    del names.found["kv.site"]
    names.now += 299
    directory.refresh()
    assert directory.find("10.0.0.8:7450") is not None
    names.now += 1
    assert directory.find("10.0.0.8:7450") is None
    assert len(directory) == 0
    names.found["kv.site"] = ["10.0.0.8"]
    directory.refresh()
    assert directory.find("10.0.0.8:7450") is not None


def test_the_system_resolves_names() -> None:
    """A real name of the loopback, on the thread of the directory."""
    directory = PeerDirectory(["localhost:7450"])
    directory.refresh()
    assert _dialled(directory, "127.0.0.1:7450") == ("127.0.0.1:7450", "localhost")
    directory.close()


@pytest.mark.parametrize("entry", ["unix:/tmp/s", "kv.site", "kv.site:0", "kv.site:x", ""])
def test_an_entry_names_host_and_port(entry: str) -> None:
    with pytest.raises(EndpointError):
        PeerDirectory([entry])
