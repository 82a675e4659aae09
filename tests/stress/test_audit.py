"""The audit of a server finds each violation that is planted in it or in the journal."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.client import Client, DurableStatus
from stress.audit import Auditor
from stress.durable_ledger import Entry, Journal
from stress.plan import Plan
from stress.server_runs import StressServer
from stress.shape import LEDGER, MIB, STRANGER, Dataset
from stress.test_verdict import good
from stress.verdict import checks_of, passed
from stress.watch import Watch

SOUND = range(40)
"""Blocks that are begun, stored and acknowledged."""
DOCUMENT = "0"


@contextlib.contextmanager
def running_server() -> Iterator[StressServer]:
    with tempfile.TemporaryDirectory(prefix="kvt-") as directory:
        server = StressServer(Path(directory), Plan(1, "lmdb", kills=1), MIB, Watch())
        server.start()
        try:
            yield server
        finally:
            server.server.close()


def store(server: StressServer, numbers: Sequence[int], *, dataset: Dataset = LEDGER, damaged: bool = False) -> None:
    """Stores blocks of the document in both tiers."""
    keys = [key for number in numbers for key in dataset.keys(DOCUMENT, number, 1)]
    data = [LEDGER.payload(key, 0).copy() for key in keys]
    if damaged:
        data[-1][77] ^= 1
    with Client(server.server.endpoint, namespace=dataset.namespace) as client:
        client.wait_until_connected(60)
        client.begin_request("r", keys, kv_transfer_params={"do_remote_decode": True})
        client.store(keys, data, request_id="r")
        assert client.finish_request("r", wait=60).settled
        assert set(client.flush(keys, wait=60)) == {DurableStatus.DURABLE}


def journal(directory: Path, *, begun: int, acknowledged: Sequence[int]) -> list[Entry]:
    lines = [f"<{begun}", *map(str, acknowledged)]
    (directory / f"{DOCUMENT}-0.durable_ledger").write_text("".join(f"{line}\n" for line in lines))
    return Journal(directory).read().done


def audit(endpoint: str, directory: Path, acknowledged: Sequence[Entry]) -> Auditor:
    auditor = Auditor(endpoint, random.Random(1), directory, "lmdb", "disk")
    auditor.begin(acknowledged)
    assert auditor.wait(60)
    return auditor


def failed_checks(auditor: Auditor) -> list[str]:
    """What the verdict names after this audit; the other facts are those of a good run."""
    facts = good()
    facts.wrong, facts.unknown, facts.missing = auditor.wrong, auditor.unknown, auditor.missing
    facts.failures = auditor.failures
    checks = checks_of(facts)
    failed = [check.name for check in checks if check.ok is False]
    assert passed(checks) == (not failed)
    return failed


Found = Callable[[Auditor], int]

PLANTED: dict[str, tuple[str, Found]] = {
    "wrong byte": ("wrong blocks", lambda auditor: len(auditor.wrong)),
    "listed although never stored": ("blocks present that were never stored", lambda auditor: len(auditor.unknown)),
    "found in another namespace": ("blocks present that were never stored", lambda auditor: len(auditor.unknown)),
    "lost": ("durable blocks lost", lambda auditor: len(auditor.missing)),
}


def test_a_sound_server_passes(tmp_path: Path) -> None:
    """Also after a SIGKILL: every block is listed, and read back from the large tier."""
    acknowledged = journal(tmp_path, begun=len(SOUND), acknowledged=SOUND)
    with running_server() as server:
        store(server, SOUND)
        server.server.kill()
        server.start()
        auditor = audit(server.server.endpoint, tmp_path, acknowledged)
    assert failed_checks(auditor) == []
    assert auditor.audited == auditor.listed == len(SOUND)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_violation_is_named(planted: str, tmp_path: Path) -> None:
    """A wrong byte, a block that was never stored, and a lost block: each fails its check."""
    known = SOUND[:-1] if planted == "listed although never stored" else SOUND
    acknowledged = journal(tmp_path, begun=len(known), acknowledged=known)
    with running_server() as server:
        store(server, SOUND[:-1] if planted == "lost" else SOUND, damaged=planted == "wrong byte")
        if planted == "found in another namespace":
            store(server, SOUND[:1], dataset=STRANGER)
        auditor = audit(server.server.endpoint, tmp_path, acknowledged)
    check, found = PLANTED[planted]
    assert failed_checks(auditor) == [check]
    assert found(auditor) > 0


def test_an_audit_that_cannot_be_made_is_a_failure(tmp_path: Path) -> None:
    """No answer is not the same as no finding."""
    acknowledged = journal(tmp_path, begun=1, acknowledged=[0])
    assert failed_checks(audit("no endpoint", tmp_path, acknowledged)) == ["failures"]
