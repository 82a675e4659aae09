from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.bulk import Route
from harness.raw import RawSession


@pytest.fixture
def session(route: Route, request: pytest.FixtureRequest) -> Iterator[RawSession]:
    """A raw session of an engine of this test; the previous session may still be closing."""
    with route.session(request.module.NAMESPACE, request.node.name) as session:
        yield session
