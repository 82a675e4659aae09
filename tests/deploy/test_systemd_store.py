"""The store of descriptors of a real systemd."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.systemd import Systemd, unavailable_reason

UNIT = "store.service"

_SERVER = """
import os, signal, socket, sys
from kvtier.server.process.descriptor_store import open_descriptor_store
from kvtier.server.process.notify_socket import notify, notify_address

store = open_descriptor_store(None)
taken = sorted(store.take())
with open(sys.argv[1], "a") as report:
    for name, descriptor in taken:
        print(name, os.pread(descriptor, 50, 0).decode() if name == "region" else "", file=report)
notify(notify_address(os.environ), "READY=1")
if not taken:
    for name in ("region", "forgotten"):
        memory = os.memfd_create(name)
        os.write(memory, b"content")
        store.keep(name, memory)
    reader, writer = os.pipe()
    os.close(writer)
    store.keep("pipe", reader)
    connection, peer = socket.socketpair()
    store.keep("engine", connection.fileno(), until_hangup=True)
    store.forget("forgotten")
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


def test_descriptors_outlive_a_killed_service(tmp_path: Path) -> None:
    """The manager reads what the service had sent before SIGKILL, and drops ended connections.

    systemd 254 and later set FDSTORE. For earlier ones the unit sets it.
    """
    if reason := unavailable_reason():
        pytest.skip(f"systemd cannot run here: {reason}")
    units = tmp_path / "units"
    units.mkdir()
    (tmp_path / "server.py").write_text(_SERVER)
    (units / UNIT).write_text(
        "[Unit]\nDefaultDependencies=no\n[Service]\nType=notify\nRestart=on-failure\nRestartSec=1\n"
        "FileDescriptorStoreMax=8\nEnvironment=FDSTORE=8\n"
        f"ExecStart=/opt/kvtier/bin/python {tmp_path}/server.py {tmp_path}/report\n"
    )
    with Systemd(units, tmp_path / "systemd.log") as manager:
        manager.run("systemctl", "start", UNIT)
        manager.wait_for(UNIT, "NRestarts", "1")
        manager.wait_for(UNIT, "ActiveState", "active")
    assert (tmp_path / "report").read_text() == "pipe \nregion content\n"
