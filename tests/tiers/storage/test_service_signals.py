"""Start of child processes: what they can import, and the signals that they block."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from kvtier.tiers.storage.service_signals import SERVICE_SIGNALS, start_module

_SHOWN = """
import json, os, signal, sys
import kvtier.tiers.secondary_tier
print(json.__file__, *sys.argv[1:], os.read(int(sys.argv[1]), 9), sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""


def test_a_child_imports_neither_from_the_current_directory_nor_gets_the_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may be able to write to the directory in which the server was started."""
    for folder, name, text in (("path", "shown", _SHOWN), ("here", "shown", "0/0"), ("here", "json", "0/0")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.chdir(tmp_path / "here")
    reader, writer = os.pipe()
    try:
        os.write(writer, b"inherited")
        child = start_module("shown", [str(reader), "two"], [reader], stdout=subprocess.PIPE)
        output, errors = child.communicate(timeout=60)
    finally:
        os.close(reader)
        os.close(writer)
    assert errors == b""
    origin, *rest = output.decode().split(" ", 3)
    assert not origin.startswith(str(tmp_path))
    assert rest == [str(reader), "two", f"{b'inherited'} {sorted(SERVICE_SIGNALS)}\n"]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
