"""`python -m fuzz --seconds N`: runs all targets; exits with 1 if a target finds something."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# "memory" begins with the inputs that "calls" has found.
PARTS = {"calls": 0.45, "memory": 0.2, "disks": 0.2, "parsers": 0.15}
_LATE_SECONDS = 180.0


def main() -> int:
    """Runs the targets and prints the directory of their findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long in all (300)")
    parser.add_argument("--target", choices=PARTS, help="only this one")
    parser.add_argument("inputs", nargs="*", help="only run these inputs, of --target")
    options = parser.parse_args()
    found, finished = [], []
    for name, part in PARTS.items():
        if options.target not in (None, name):
            continue
        seconds = options.seconds * (1.0 if options.target else part)
        # Short, because a socket's path in it must be short.
        directory = Path(tempfile.mkdtemp(prefix=f"kvf-{name}-"))
        if name == "memory" and (corpus := next((each / "corpus" for each in finished), None)):
            shutil.copytree(corpus, directory / "corpus")
        command = [sys.executable, "-m", "fuzz.target", name, str(seconds), str(directory), *options.inputs]
        try:
            code = subprocess.run(command, check=False, timeout=seconds + _LATE_SECONDS).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code:
            kept = [str(path) for path in directory.iterdir() if path.is_file()]
            print(f"fuzz {name}: FOUND something (code {code}): {', '.join(kept) or directory}", flush=True)
            found.append(name)
        else:
            finished.append(directory)
    for directory in finished:
        shutil.rmtree(directory)
    return 1 if found else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
