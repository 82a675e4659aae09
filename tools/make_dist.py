"""Builds the wheel and the sdist, checks their contents and installs the wheel (`make dist`).

    python tools/make_dist.py --output dist --work build/dist [--resolve]

Installs each extra into a new environment. Extras with engines and torch need gigabytes, so the
script only resolves their dependencies (`--resolve`). The exit code is 1 if a file of the package
is missing or occurs twice, if the client installs packages of the server, if a package index would
refuse the metadata, or if a client and a server of different environments do not work together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("client", "cuda", "protos", "server", "tiers")
NOT_SHIPPED = frozenset({"protos/baseline.binpb"})
"""Files that are needed only to build the package."""

ALL_OF_THE_SERVER = "server,encryption,events,mooncake,s3,tracing"
INSTALLED = ("", "server", "proxy", "server,proxy", ALL_OF_THE_SERVER)
"""Combinations of extras, each installed in a new environment; "" is the client alone."""

RESOLVED = ("torch", "transformers", "cuda", "vllm")
"""Extras whose dependencies are only resolved."""

DEVELOPMENT = ("dev", "test", "web")
"""Extras for a clone of the repository; its other targets install them."""

MAX_SECONDS = 600
ROUND_TRIP = ROOT / "tests" / "harness" / "round_trip.py"


class Wrong(Exception):
    """Error of the build, with a one-line message."""


@dataclass(frozen=True)
class Row:
    """Size and start times of one environment."""

    extra: str
    packages: int
    megabytes: float
    import_ms: float | None
    help_ms: float | None


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="directory of the wheel and the sdist")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "dist", help="directory of the environments")
    parser.add_argument(
        "--resolve", action="store_true", help="also resolve the dependencies of the extras that are not installed"
    )
    options = parser.parse_args()
    try:
        _make(options.output.absolute(), options.work.absolute(), resolve=options.resolve)
    except (Wrong, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _make(output: Path, work: Path, *, resolve: bool) -> None:
    for directory in (output, work / "environments"):
        shutil.rmtree(directory, ignore_errors=True)
    (work / "environments").mkdir(parents=True)
    wheel = build(output)
    check_contents(wheel, shipped_files())
    check_metadata(wheel)
    print(f"built {wheel.name} ({wheel.stat().st_size >> 10} KiB) and {next(output.glob('*.tar.gz')).name}")
    environments = {extra: install(wheel, extra, work / "environments") for extra in INSTALLED}
    check_client_is_lean(environments[""])
    _print([measure(extra, environment) for extra, environment in environments.items()])
    round_trip(server=environments["server"], client=environments[""])
    round_trip(server=environments[ALL_OF_THE_SERVER], client=environments[ALL_OF_THE_SERVER])
    print("a server of one environment has served a client of the other: shared memory, streams, durable blocks")
    for interpreter in other_interpreters():
        installed = install(wheel, "server", work / "environments", interpreter)
        round_trip(server=installed, client=installed)
        print(f"the same under {interpreter}")
    if resolve:
        for extra in RESOLVED:
            print(f"[{extra}] resolves to {_resolved(wheel, extra, environments[''])} packages (not installed)")


def build(output: Path) -> Path:
    """Builds the sdist, and the wheel from it; returns the wheel."""
    _run([sys.executable, "-m", "build", "--outdir", str(output), str(ROOT)])
    [wheel] = output.glob("*.whl")
    [sdist] = output.glob("*.tar.gz")
    _run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)])
    _run([sys.executable, "-m", "check_wheel_contents", str(wheel)])
    return wheel


def shipped_files() -> set[str]:
    """Returns the files that a wheel must have under `kvtier/`: the files that git tracks."""
    listed = _run(["git", "-C", str(ROOT), "ls-files", "--", *FOLDERS]).splitlines()
    own = _run(["git", "-C", str(ROOT / "src" / "kvtier"), "ls-files", "--", "*.py", "py.typed"]).splitlines()
    return {f"kvtier/{name}" for name in [*listed, *own] if name not in NOT_SHIPPED}


def check_contents(wheel: Path, expected: set[str]) -> None:
    """Raises `Wrong` unless the wheel has exactly these files, once each, and its licence."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"{wheel.name.rsplit('-', 3)[0]}.dist-info/"
    found = [name for name in names if not name.startswith(info)]
    if missing := sorted(expected - set(found)):
        raise Wrong(f"the wheel lacks {', '.join(missing)}: are they in package-data?")
    if doubled := sorted(name for name in set(found) if found.count(name) > 1 or name not in expected):
        raise Wrong(f"the wheel has unexpected or doubled files: {', '.join(doubled)}")
    if not any(name.startswith(f"{info}licenses/") for name in names):
        raise Wrong("the wheel has no licence")


def check_metadata(wheel: Path) -> None:
    """Raises `Wrong` if versions differ or a field of the metadata is missing."""
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/kvtier/__init__.py").read_text(), re.MULTILINE)
    if version is None or wheel.name.split("-")[1] != version[1]:
        raise Wrong(f"{wheel.name} does not have version {version and version[1]}")
    fields = metadata.PathDistribution(zipfile.Path(wheel, f"{wheel.name.rsplit('-', 3)[0]}.dist-info/")).metadata
    wanted = ("Summary", "License-Expression", "Requires-Python", "Description-Content-Type", "Classifier", "Keywords")
    if missing := [field for field in wanted if fields[field] is None]:
        raise Wrong(f"the metadata lacks {', '.join(missing)}")


def install(wheel: Path, extra: str, directory: Path, interpreter: str = sys.executable) -> Path:
    """Installs the wheel with an extra into a new environment; returns its interpreter."""
    place = directory / f"{extra.replace(',', '-') or 'client'}-{Path(interpreter).name}"
    if interpreter == sys.executable:
        venv.create(place, with_pip=True, clear=True)
    else:
        _run([interpreter, "-m", "venv", "--clear", str(place)])
    python = place / "bin" / "python"
    _run([str(python), *_PIP, "install", "--quiet", f"{wheel}[{extra}]" if extra else str(wheel)])
    _run([str(python), *_PIP, "check"])
    return python


def check_client_is_lean(client: Path) -> None:
    """Raises `Wrong` if the client alone installs a package that only an extra requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = {_name(text) for text in project["dependencies"]}
    extras = {_name(text) for texts in project["optional-dependencies"].values() for text in texts} - own - {"kvtier"}
    if installed := sorted(extras & set(_packages(client))):
        raise Wrong(f"the client alone installs {', '.join(installed)}")
    served = subprocess.run(
        [str(client.with_name("kvtier")), "serve"],
        env=_clean(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if served.returncode != 1 or served.stderr.count("\n") != 1 or "kvtier[server]" not in served.stderr:
        raise Wrong(f"without the server's packages, kvtier serve does not say what to do: {served.stderr}")


def measure(extra: str, python: Path) -> Row:
    """Returns size and start times of an environment: best of five.

    The interpreter's own start is subtracted from the time of the import.
    """
    packages = [name for name in _packages(python) if name not in ("pip", "setuptools")]
    size = sum(file.stat().st_size for file in _files(python) if not file.is_symlink() and "/pip" not in str(file))
    empty = _milliseconds([str(python), "-c", "pass"])
    imported = _milliseconds([str(python), "-c", "import kvtier.client"]) - empty
    helped = _milliseconds([str(python.with_name("kvtier")), "--help"])
    return Row(extra, len(packages), size / 1e6, imported, helped)


def round_trip(*, server: Path, client: Path) -> None:
    """Raises `Wrong` unless a client of one environment works with a server of another."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as directory, _serving(server, Path(directory)) as endpoint:
        done = subprocess.run(
            [str(client), str(ROUND_TRIP), endpoint],
            cwd=directory,
            env=_clean(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            raise Wrong(f"the client of {client} does not work with the server of {server}: {done.stdout}{done.stderr}")
        status = _run([str(server.with_name("kvtier")), "status", "--json", "--endpoint", endpoint])
        if not json.loads(status)["tiers"]:
            raise Wrong("kvtier status shows no tiers")


def other_interpreters() -> list[str]:
    """Returns other interpreters on `PATH` whose versions the classifiers list."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [found[1] for text in classifiers if (found := re.search(r":: Python :: (3\.\d+)$", text))]
    names = [f"python{version}" for version in versions if version != f"3.{sys.version_info.minor}"]
    return [name for name in names if shutil.which(name) and _answers(name)]


def _answers(name: str) -> bool:
    """Whether a command is a working interpreter, not a version manager's placeholder."""
    return subprocess.run([name, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def _serving(server: Path, directory: Path) -> Iterator[str]:
    endpoint = f"unix:{directory}/kvtier.sock"
    arguments = ["serve", "--listen", endpoint, "--data-dir", f"{directory}/data", "--region-size", "32MiB"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(server.with_name("kvtier")), *arguments], cwd=directory, env=_clean(), stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 30
        while "ready" not in (directory / "log").read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise Wrong(f"the server of {server} does not start: {(directory / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        yield endpoint
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(45)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    if code != 0:
        raise Wrong(f"the server of {server} ended with {code}")


def _resolved(wheel: Path, extra: str, python: Path) -> int:
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    flags = ["--dry-run", "--quiet", "--ignore-installed", "--report", "-"]
    answer = _run([str(python), *_PIP, "install", *flags, *constraints, f"{wheel}[{extra}]"])
    return len(json.loads(answer)["install"])


_PIP = ("-m", "pip", "--disable-pip-version-check")


def _packages(python: Path) -> list[str]:
    listed = _run([str(python), *_PIP, "list", "--format", "json"])
    return [_name(entry["name"]) for entry in json.loads(listed)]


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def _files(python: Path) -> Iterator[Path]:
    return (file for file in python.parent.parent.glob("lib/**/*") if file.is_file())


def _milliseconds(command: list[str]) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        _run(command)
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def _clean() -> dict[str, str]:
    """Returns the environment without variables that would make Python import the source tree."""
    return {name: text for name, text in os.environ.items() if not name.startswith(("KVTIER_", "PYTHON"))}


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, cwd="/", env=_clean(), capture_output=True, text=True, timeout=MAX_SECONDS, check=False
    )
    if done.returncode != 0:
        raise Wrong(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def _print(rows: list[Row]) -> None:
    print(f"{'installed':<48}{'packages':>9}{'size':>10}{'import kvtier.client':>22}{'kvtier --help':>15}")
    for row in rows:
        name = f"kvtier[{row.extra}]" if row.extra else "kvtier (client alone)"
        print(f"{name:<48}{row.packages:>9}{row.megabytes:>7.0f} MB{row.import_ms:>19.0f} ms{row.help_ms:>12.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
