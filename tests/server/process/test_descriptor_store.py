"""Stores of descriptors: what all of them do, and systemd's. `test_keeper.py` tests the keeper."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.polling import wait_until
from harness.store_server import FakeSystemd, RunningKeeper, contents

from kvtier.server.process.descriptor_store import open_descriptor_store

Site = FakeSystemd | RunningKeeper
LIMIT = 8


@pytest.fixture(params=["keeper", "systemd"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A store with at most 8 descriptors, which servers can use one after the other."""
    store = (
        FakeSystemd(tmp_path, LIMIT)
        if request.param == "systemd"
        else RunningKeeper(tmp_path, "--max-descriptors", str(LIMIT))
    )
    with store:
        yield store


class TestAnyStore:
    def test_an_empty_store_has_nothing(self, site: Site) -> None:
        assert contents(site) == []

    def test_memory_outlives_a_killed_server(self, site: Site) -> None:
        """The names may repeat. The next server reads the same bytes, as does the one after it."""
        with site.start() as server:
            for name, text in (("region", "first"), ("region", "second"), ("index-1", "third")):
                assert server.call("memory", name, text) is None
        expected = [["index-1", "third"], ["region", "first"], ["region", "second"]]
        assert contents(site) == expected
        assert contents(site) == expected

    def test_descriptors_are_taken_once(self, site: Site) -> None:
        """The second call returns nothing, so that no descriptor has two owners."""
        with site.start() as server:
            server.call("memory", "region", "text")
        with site.start() as server:
            assert server.call("take") == [["region", "text"]]
            assert server.call("take") == []

    def test_forgotten_descriptors_are_gone(self, site: Site) -> None:
        """`forget` drops all descriptors with the name, also those of an earlier server."""
        with site.start() as server:
            for name in ("old", "old", "other"):
                server.call("memory", name, name)
        with site.start() as server:
            server.call("take")
            server.call("memory", "old", "new")
            assert server.call("forget", "old") is None
            assert server.call("forget", "unknown") is None
        assert contents(site) == [["other", "other"]]

    def test_a_hang_up_drops_a_connection(self, site: Site) -> None:
        """With `until_hangup` the store drops it by itself, while a server runs and later."""
        with site.start() as server:
            for name in ("early", "late"):
                server.call("socket", name)
            server.call("memory", "region", "text")
            server.call("hang_up", "early")
        # The end of the server has closed the other end of the second connection.
        wait_until(lambda: contents(site) == [["region", "text"]])

    def test_a_connection_stays_while_its_peer_lives(self, site: Site) -> None:
        with site.start() as server:
            server.call("socket", "engine")
            child = server.call("fork")  # has the other end
        try:
            assert contents(site) == [["engine", "socket"]]
        finally:
            os.kill(child, 9)
        wait_until(lambda: contents(site) == [])

    def test_an_ended_pipe_stays(self, site: Site) -> None:
        """Without `until_hangup` the store keeps a descriptor that has hung up."""
        with site.start() as server:
            server.call("ended_pipe", "events")
            server.call("socket", "engine")
        wait_until(lambda: contents(site) == [["events", "pipe"]])

    def test_a_full_store_refuses(self, site: Site) -> None:
        """Descriptors of an earlier server count. `forget` makes room."""
        with site.start() as server:
            server.call("memory", "old", "text")
            assert server.call("many", "new", LIMIT) == [LIMIT - 1, "OSError", errno.ENOSPC]
        with site.start() as server:
            assert server.call("many", "more", 1) == [0, "OSError", errno.ENOSPC]
            assert len(server.call("take")) == LIMIT
            assert server.call("many", "more", 1) == [0, "OSError", errno.ENOSPC]
            server.call("forget", "new")
            assert server.call("many", "more", LIMIT) == [LIMIT - 1, "OSError", errno.ENOSPC]
        assert len(contents(site)) == LIMIT

    def test_a_connection_that_ended_counts_until_it_is_forgotten(self, site: Site) -> None:
        with site.start() as server:
            for number in range(LIMIT):
                server.call("socket", f"engine-{number}")
                server.call("hang_up", f"engine-{number}")
            assert server.call("many", "region", 1) == [0, "OSError", errno.ENOSPC]
            server.call("forget", "engine-0")
            assert server.call("many", "region", 1) == [1]

    def test_many_names_are_forgotten_at_once(self, site: Site) -> None:
        """The queue of the store has room for fewer messages, so the server waits for room."""
        with site.start() as server:
            server.call("memory", "old-1999", "text")
        with site.start() as server:
            server.call("take")
            server.call("forget_all", "old", 2000)
            assert server.call("memory", "region", "text") is None
        assert contents(site) == [["region", "text"]]

    @pytest.mark.parametrize("name", ["", "Region", "a_b", "a b", "a\n", "a:b", "é", "x" * 65])
    def test_other_names_are_refused(self, site: Site, name: str) -> None:
        with site.start() as server:
            for call in (["memory", name, "text"], ["forget", name]):
                assert server.call(*call).startswith("ValueError: not a name of a descriptor")
            assert server.call("memory", "x" * 64, "text") is None

    def test_close_keeps_the_descriptors(self, site: Site) -> None:
        """`close` is idempotent."""
        with site.start() as server:
            server.call("memory", "region", "text")
            assert [server.call("close"), server.call("close")] == [None, None]
            if isinstance(site, RunningKeeper):
                assert contents(site) == [["region", "text"]]
        assert contents(site) == [["region", "text"]]


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[FakeSystemd]:
    with FakeSystemd(tmp_path) as manager:
        yield manager


class TestSystemd:
    def test_messages_are_those_of_sd_notify(self, systemd: FakeSystemd) -> None:
        with systemd.start() as server:
            server.call("memory", "region", "text")
            server.call("socket", "engine")
            server.call("forget", "region")
        systemd.settle()
        assert systemd.messages == [
            "FDSTORE=1\nFDNAME=region\nFDPOLL=0",
            "FDSTORE=1\nFDNAME=engine",
            "FDSTOREREMOVE=1\nFDNAME=region",
        ]

    def test_an_absent_manager_is_an_error_of_the_call(self, tmp_path: Path) -> None:
        store = open_descriptor_store(None, {"NOTIFY_SOCKET": f"{tmp_path}/none", "FDSTORE": "1"})
        assert store is not None
        with open(os.devnull) as file, pytest.raises(FileNotFoundError):  # noqa: PTH123
            store.keep("region", file.fileno())
        with pytest.raises(FileNotFoundError):
            store.forget("region")

    @pytest.mark.parametrize(
        "environment",
        [
            {},
            {"NOTIFY_SOCKET": "/n"},
            {"FDSTORE": "4096"},
            {"NOTIFY_SOCKET": "/n", "FDSTORE": "0"},
            {"NOTIFY_SOCKET": "/n", "FDSTORE": "-1"},
            {"NOTIFY_SOCKET": "/n", "FDSTORE": "many"},
            {"NOTIFY_SOCKET": "vsock:2:1", "FDSTORE": "4096"},
        ],
    )
    def test_without_a_store_there_is_none(self, environment: dict[str, str]) -> None:
        assert open_descriptor_store(None, environment) is None

    @pytest.mark.parametrize("count", ["", "none", "-3", "0", "1e3", "9" * 5000])
    def test_an_invalid_count_is_ignored(self, count: str) -> None:
        variables = {"NOTIFY_SOCKET": "/n", "FDSTORE": "4", "LISTEN_PID": f"{os.getpid()}", "LISTEN_FDS": count}
        store = open_descriptor_store(None, variables)
        assert store is not None
        assert store.take() == []

    @pytest.mark.parametrize("pid", ["", "1", "self", "-1", "9" * 5000])
    def test_descriptors_of_another_process_are_ignored(self, pid: str) -> None:
        variables = {"NOTIFY_SOCKET": "/n", "FDSTORE": "4", "LISTEN_PID": pid, "LISTEN_FDS": "100"}
        store = open_descriptor_store(None, variables)
        assert store is not None
        assert store.take() == []

    @pytest.mark.parametrize(
        ("names", "taken"),
        [
            ("", []),
            ("region", []),
            ("region:index:more", []),
            ("region:", [["region", "a"]]),
            ("region:kvtier.socket", [["region", "a"]]),
            ("region:region", [["region", "a"], ["region", "b"]]),
        ],
    )
    def test_descriptors_without_a_valid_name_are_not_taken(
        self, systemd: FakeSystemd, names: str, taken: list[list[str]]
    ) -> None:
        """They count, because systemd may have them in the store."""
        with systemd.start() as server:
            for text in "ab":
                server.call("memory", "region", text)
        with systemd.start(LISTEN_FDNAMES=names, FDSTORE="2") as server:
            assert server.call("take") == taken
            assert server.call("many", "region", 1) == [0, "OSError", errno.ENOSPC]

    def test_a_count_above_the_open_descriptors_is_harmless(self, systemd: FakeSystemd) -> None:
        """Numbers that are not open are ignored."""
        with systemd.start() as server:
            server.call("memory", "region", "text")
        names = ":".join(["region", *["gone"] * 5000])
        with systemd.start(LISTEN_FDNAMES=names, LISTEN_FDS="5001") as server:
            assert server.call("take") == [["region", "text"]]
