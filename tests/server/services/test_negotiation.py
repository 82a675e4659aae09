"""Negotiation over the wire: configured rules, votes in the answer, and the end of a request."""

from pathlib import Path

from harness.payloads import key_of, namespace_of, payload
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, DurableStatus, OffloadPolicy

RULES = """
[[tiers]]
type = "lmdb"
name = "archive"
size = "64MiB"
rules = [
  { policy = "request_level", why = "long prompts", min_prompt_tokens = 1000 },
  { policy = "request_level", why = "urgent", min_priority = 5, kv_transfer_params = { keep = "yes" } },
  { policy = "request_level", why = "a customer's", tenant = "acme" },
]
"""


def test_the_answer_has_the_votes_of_the_rules(tmp_path: Path) -> None:
    """B3.3: the answer has each tier's vote; configured rules replace the default one."""
    with (
        ServerProcess(tmp_path, config=RULES).start() as server,
        Client(server.endpoint, namespace=namespace_of(MIB)) as client,
    ):
        client.wait_until_connected(60)
        votes = {
            "short": client.begin_request("short", prompt_tokens=10),
            "long": client.begin_request("long", prompt_tokens=1000),
            "urgent": client.begin_request("urgent", priority=5, kv_transfer_params={"keep": "yes"}),
            "remote": client.begin_request("remote", kv_transfer_params={"do_remote_decode": True}),
        }
        assert {name: lease.policy for name, lease in votes.items()} == {
            "short": OffloadPolicy.BLOCK_LEVEL,
            "long": OffloadPolicy.REQUEST_LEVEL,
            "urgent": OffloadPolicy.REQUEST_LEVEL,
            "remote": OffloadPolicy.REQUEST_LEVEL,
        }
        assert [(vote.tier, vote.why) for vote in votes["urgent"].votes] == [
            ("archive", "urgent"),
            ("lmdb", "the default"),
        ]
        assert [(vote.tier, vote.policy) for vote in votes["remote"].votes] == [
            ("archive", OffloadPolicy.BLOCK_LEVEL),
            ("lmdb", OffloadPolicy.REQUEST_LEVEL),
        ]


def test_a_rule_for_a_tenant_applies_to_its_sessions(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, config=RULES).start() as server:
        whys = {}
        for tenant in ("", "acme", "other"):
            with Client(server.endpoint, namespace=namespace_of(MIB, tenant=tenant)) as client:
                client.wait_until_connected(60)
                whys[tenant] = client.begin_request("short", prompt_tokens=10).votes[0].why
    assert whys == {"": "the default", "acme": "a customer's", "other": "the default"}


def test_finish_waits_until_a_request_is_settled(tmp_path: Path) -> None:
    """B3.12: with a wait, all blocks that a tier insisted on are durable afterwards."""
    keys = [key_of(number) for number in range(12)]
    with (
        ServerProcess(tmp_path).start() as server,
        Client(server.endpoint, namespace=namespace_of(MIB)) as client,
    ):
        client.begin_request("r", kv_transfer_params={"do_remote_decode": True})
        client.store(keys, [payload(key, MIB) for key in keys], request_id="r")
        outcome = client.finish_request("r", wait=30)
        assert (outcome.settled, outcome.incomplete_blocks) == (True, 0)
        assert set(client.flush(keys, wait=0)) == {DurableStatus.DURABLE}
