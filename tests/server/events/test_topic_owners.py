"""Owners of the addresses that engines declare."""

from __future__ import annotations

import pytest

from kvtier.server.events.topic_owners import KEEP_SECONDS, MAX_ADDRESSES, TopicOwners, is_address

A, B = b"a" * 16, b"b" * 16


def test_the_first_tenant_has_the_address() -> None:
    """Also with other capitals; sessions of the same tenant share it."""
    owners = TopicOwners()
    assert owners.update([("Host:1", A), ("host:1", B), ("host:1", A)], 0.0) == {("host:1", A)}
    assert owners.update([("host:1", B), ("host:1", A)], 1.0) == {("host:1", A)}, "the order does not matter later"


def test_an_address_is_kept_while_the_engine_restarts() -> None:
    owners = TopicOwners()
    owners.update([("host:1", A)], 0.0)
    assert owners.update([("host:1", B)], KEEP_SECONDS - 1) == set()
    assert owners.update([("host:1", B), ("host:1", A)], KEEP_SECONDS - 0.5) == {("host:1", A)}
    assert owners.update([("host:1", B)], 2 * KEEP_SECONDS - 1) == set()
    assert owners.update([("host:1", B)], 2 * KEEP_SECONDS) == {("host:1", B)}
    assert owners.update([("host:1", A)], 2 * KEEP_SECONDS + 1) == set()


def test_a_tenant_has_a_limited_number_of_addresses() -> None:
    """Those that it uses stay; of the others, the one that was used first is dropped."""
    owners = TopicOwners()
    many = [(f"h:{number}", A) for number in range(MAX_ADDRESSES + 10)]
    assert owners.update([*many, ("z:1", B)], 0.0) == {*many[:MAX_ADDRESSES], ("z:1", B)}
    assert owners.update(many[5:], 1.0) == set(many[5 : MAX_ADDRESSES + 5])
    assert owners.update([("h:0", B)], 2.0) == {("h:0", B)}, "dropped before, so that the tenant got another one"


@pytest.mark.parametrize("text", ["", "a@b", "a b", "a\n", "ä:1", "\x7f", "x" * 257])
def test_what_is_no_address(text: str) -> None:
    assert not is_address(text)
    assert TopicOwners().update([(text, A)], 0.0) == set()


@pytest.mark.parametrize("text", ["10.0.0.1:8000", "[fe80::1%eth0]:1", "Pod-1.svc.example", "x" * 256])
def test_what_is_an_address(text: str) -> None:
    assert is_address(text)
