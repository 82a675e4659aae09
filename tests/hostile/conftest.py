"""Attacks on a server process: by a tenant on another one, and by peers without credentials.

Each module is the script of one kind of attacker. In the server of the fixture `site`, the tenant
"zeta" is the victim. The attacker has the credentials "acme-far" (engine) or "acme-reader" of the
tenant "acme", over TLS and without shared memory, or no credentials at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.auth_site import Site, make_site

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all attacks as slow, so that `make test-long` runs them."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Returns one server, shared by the attacks of a module; it must survive them."""
    made = make_site(tmp_path_factory.mktemp("t"), shared_memory=False)
    with made.server.start():
        yield made
        assert made.server.alive
        assert '"call failed"' not in made.server.log, "a defect, answered with INTERNAL"
