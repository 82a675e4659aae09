"""Fixtures: a server with TLS, tokens and tenants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.auth_site import Site, make_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Returns one server, shared by the tests of a module."""
    made = make_site(tmp_path_factory.mktemp("t"))
    with made.server.start():
        yield made
        assert '"call failed"' not in made.server.log, "a defect, answered with INTERNAL"
