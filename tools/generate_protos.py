"""Generator of the stubs in `protos/v1/` from `protos/kvtier/v1/*.proto`. Needs grpcio-tools.

    python tools/generate_protos.py [--out DIR | --check]

grpcio-tools 1.78 generates stubs for protobuf 6.31. All protobuf runtimes from 6.33 to 7.x can
import these stubs, because a runtime refuses only stubs for a newer protobuf.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "protos"
PACKAGE = "kvtier/v1"

INIT = '"""Generated messages and stubs of `kvtier.v1`; see `protos/kvtier/v1` for the contract."""\n'


def generate(out: Path) -> None:
    """Writes messages, stubs and type stubs into `out`. Their imports are relative."""
    out.mkdir(parents=True, exist_ok=True)
    staging = out / "_staging"
    well_known = Path(protoc.__file__).parent / "_proto"
    staging.mkdir()
    names = sorted(path.name for path in (SOURCES / PACKAGE).glob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{SOURCES}",
            f"-I{well_known}",
            f"--python_out={staging}",
            f"--pyi_out={staging}",
            f"--grpc_python_out={staging}",
            *(f"{PACKAGE}/{name}" for name in names),
        ]
    )
    if status != 0:
        raise SystemExit(status)
    for path in sorted((staging / PACKAGE).iterdir()):
        text = re.sub(r"^from kvtier\.v1 import", "from . import", path.read_text(), flags=re.MULTILINE)
        (out / path.name).write_text(text)
        path.unlink()
    (staging / PACKAGE).rmdir()
    (staging / "kvtier").rmdir()
    staging.rmdir()
    (out / "__init__.py").write_text(INIT)
    # For a file without a service, protoc writes a module without content.
    for path in out.glob("*_pb2_grpc.py"):
        if "class " not in path.read_text():
            path.unlink()


def stale(committed: Path) -> list[str]:
    """Returns the names of files in `committed` that differ from newly generated ones."""
    with tempfile.TemporaryDirectory() as fresh_dir:
        fresh = Path(fresh_dir)
        generate(fresh)
        wanted = {path.name: path.read_text() for path in fresh.iterdir()}
    there = {path.name: path.read_text() for path in committed.glob("*.py*")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def import_all(committed: Path) -> None:
    """Imports all stubs with the protobuf runtime of this environment (6.33). The tests use 7.x."""
    sys.path.insert(0, str(ROOT / "src"))
    for path in sorted(committed.glob("*_pb2*.py")):
        importlib.import_module(f"kvtier.protos.v1.{path.stem}")


def main() -> int:
    """Generates, or checks that generating would change nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=SOURCES / "v1")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if the stubs are stale or cannot be imported"
    )
    options = parser.parse_args()
    if not options.check:
        generate(options.out)
        return 0
    names = stale(options.out)
    if names:
        print(f"stale in {options.out.name}/ (run `make generate`): {', '.join(names)}")
        return 1
    import_all(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
