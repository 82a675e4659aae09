"""Runs `kvtier` commands as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .fork_server import run_command

__all__ = ["json_output", "kvtier"]


def kvtier(
    *arguments: str,
    code: int | None = 0,
    environment: Mapping[str, str] | None = None,
    interpreter: Sequence[str] = (),
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a command and checks its exit code and that it prints no traceback.

    `code`: None permits each exit code. `interpreter` runs Python. Without it and without `more`,
    the command runs in a fork.
    """
    clean = {name: text for name, text in os.environ.items() if not name.startswith("KVTIER_")}
    clean |= environment or {}
    if interpreter or more:
        command = [*(interpreter or (sys.executable,)), "-m", "kvtier.server", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=clean, **more)
    else:
        done = run_command(arguments, environment=clean, timeout=60)
    assert code in (None, done.returncode), (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def json_output(*arguments: str, code: int = 0, **more: Any) -> Any:
    return json.loads(kvtier(*arguments, "--json", code=code, **more).stdout)
