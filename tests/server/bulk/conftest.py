from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.bulk import Route, wait_for_bulk

from kvtier.client import Client


@pytest.fixture
def client(route: Route, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client whose streams use the bulk process."""
    with route.client(request.module.NAMESPACE) as client:
        wait_for_bulk(client)
        yield client
