"""Commands with unusual surroundings: closed streams, other encodings, users without a home."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from harness.command_line import kvtier
from harness.server_process import ServerProcess

from kvtier.client.engines import file_digests
from kvtier.protos.credentials import Credentials
from kvtier.protos.endpoint import EndpointError, client_endpoint, parse_endpoint
from kvtier.server import cli
from kvtier.server.config.loader import load
from kvtier.server.config.schema import ConfigError

COMMANDS = (
    *("--help", "--version", "top --help", "config", "config --json", "config --reference", "completion bash"),
    *("status", "doctor --no-disk-test --only socket", "token new", "fleet status --servers 127.0.0.1:1"),
)
"""Each prints something without a server."""
SHELL = {
    "closed output": ">&-",
    "full output": ">/dev/full",
    "closed errors": "2>&-",
    "closed input": "<&-",
    "all closed": "<&- >&- 2>&-",
    "reader gone": "| true",
    "errors to a reader that is gone": "2>&1 | true",
}


def shell(line: str, redirection: str = "", environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Runs `kvtier LINE` in a shell. Returns the exit code, standard output and standard error."""
    command = f"set -o pipefail; {sys.executable} -m kvtier.server {line} {redirection}"
    clean = {name: text for name, text in os.environ.items() if not name.startswith("KVTIER_")}
    clean |= {"XDG_RUNTIME_DIR": "/nonexistent", **(environment or {})}
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False, timeout=60, env=clean)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


@pytest.mark.parametrize("how", SHELL)
@pytest.mark.parametrize("line", ["--help", "config", "status"])
def test_closed_streams_cause_at_most_one_line(line: str, how: str) -> None:
    """No command ends with a traceback; it fails if its output is lost."""
    code, _, errors = shell(line, SHELL[how])
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert len(errors.splitlines()) <= 1, errors
    if how in ("closed output", "full output") and line != "status":
        assert code == 1
        assert "kvtier: error: the output cannot be written: " in errors
    elif how in ("closed errors", "closed input"):
        assert code == (2 if line == "status" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.parametrize("how", ["closed output", "all closed", "reader gone"])
def test_each_command_survives_closed_streams(line: str, how: str) -> None:
    code, _, errors = shell(line, SHELL[how])
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert code in (0, 1, 2, 120 if how == "reader gone" else 0, 141 if how == "reader gone" else 0)


@pytest.mark.parametrize("line", ["--help", "config"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_other_encodings_of_a_terminal(line: str, encoding: str) -> None:
    """Characters that the terminal lacks are escaped."""
    code, output, errors = shell(line, environment={"PYTHONIOENCODING": encoding})
    assert (code, errors) == (0, "")
    assert output


def test_status_on_an_ascii_terminal(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        server.start()
        environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        for command in ("status", "tiers", "sessions", "doctor --no-disk-test", "top --once --interval 0.1"):
            code, output, errors = shell(f"{command} --endpoint {server.endpoint}", environment=environment)
            assert code in (0, 1), errors
            assert not errors
            assert output.isascii()


def test_paths_that_are_not_utf8() -> None:
    """They are refused in one line if a text of a message or a socket must have them.

    With an ASCII terminal, and in a fork, whose terminal has UTF-8.
    """
    for line, code in {
        "status --endpoint unix:/tmp/$'\\xff'.sock": 2,
        "serve --listen unix:/tmp/$'\\xff'.sock": 78,
        "config --config /tmp/$'\\xff'": 78,
        "config --data-dir /tmp/$'\\xff'": 78,
        "status --ca /tmp/$'\\xff' --endpoint 127.0.0.1:1": 1,
        "status --token-file /tmp/$'\\xff'": 1,
        "size /tmp/$'\\xff'": 1,
        "fleet status --file /tmp/$'\\xff'": 2,
        "completion $'\\xff'": 2,
        "explain $'\\xff'": 2,
        "leases --endpoint $'\\xff':1": 2,
    }.items():
        found, _, errors = shell(line, environment={"PYTHONIOENCODING": "ascii"})
        assert "Traceback" not in errors, errors
        assert found == code, (line, errors)
        words = line.replace("$'\\xff'", "\udcff").split()
        kvtier(*words, code=code, environment={"XDG_RUNTIME_DIR": "/nonexistent"})


class TestNoHome:
    @pytest.fixture(autouse=True)
    def _no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets this process run as a user without HOME and without an entry in passwd."""

        def unknown(_: int) -> None:
            raise KeyError("getpwuid(): uid not found")

        monkeypatch.setattr(pwd, "getpwuid", unknown)
        for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            monkeypatch.delenv(name, raising=False)

    def test_config_names_the_remedy(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["config"]) == 78
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1
        assert "data_dir" in said
        assert "HOME" in said

    def test_a_data_dir_suffices(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["config", "--data-dir", f"{tmp_path}"]) == 0
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("variable", ["KVTIER_CA", "KVTIER_CERT", "KVTIER_TOKEN_FILE", "KVTIER_ENDPOINT"])
    def test_home_in_a_path(
        self, variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("KVTIER_ENDPOINT", "127.0.0.1:1")
        monkeypatch.setenv(variable, "unix:~/s" if variable == "KVTIER_ENDPOINT" else "~/file")
        monkeypatch.setenv("KVTIER_KEY", "~/key")
        assert cli.main(["status"]) == (2 if variable == "KVTIER_ENDPOINT" else 1)
        assert len(capsys.readouterr().err.splitlines()) == 1

    def test_an_engine_computes_digests_without_a_cache(self, tmp_path: Path) -> None:
        """The digests of the model's files are not kept, and the engine starts."""
        path = tmp_path / "file"
        path.write_bytes(b"content")
        assert file_digests.digest_of_file(path) == file_digests.digest_of_file(path)


BLANK = ("\n", "\r\n", " ", "\t\n")


@pytest.mark.parametrize("blank", BLANK)
def test_blanks_around_a_variable_are_ignored(blank: str, tmp_path: Path) -> None:
    """Values that were read from a file with a line end, as in a container."""
    for text in ("unix:/tmp/x.sock", "127.0.0.1:7450", "[::1]:7450"):
        assert client_endpoint(environ={"KVTIER_ENDPOINT": text + blank}) == parse_endpoint(text)
    assert client_endpoint(environ={"KVTIER_ENDPOINT": blank}) == client_endpoint(environ={})
    credentials = Credentials.from_environment({"KVTIER_TOKEN": "abc" + blank, "KVTIER_CA": "/ca.pem" + blank})
    assert (credentials.token, credentials.ca) == ("abc", "/ca.pem")
    config = tmp_path / "kvtier.toml"
    config.write_text('log.level = "error"')
    variables = {
        "KVTIER_CONFIG": f"{config}{blank}",
        "KVTIER_DATA_DIR": f"{tmp_path}/data{blank}",
        "KVTIER_REGION_SIZE": f"32MiB{blank}",
        "KVTIER_INSECURE": f"true{blank}",
        "KVTIER_LISTEN": f"127.0.0.1:1{blank}",
        "KVTIER_METRICS": f"127.0.0.1:2{blank}",
        "KVTIER_TIERS": f"none{blank}",
    }
    found = load(environ=variables).config
    assert found.data_dir == tmp_path / "data"
    assert (found.region_size, found.insecure, found.listen) == (32 << 20, True, ("127.0.0.1:1",))
    assert (found.metrics, found.tiers, found.log.level) == ("127.0.0.1:2", (), "error")


@pytest.mark.parametrize("text", ["unix:/tmp/a\nb", "unix:/tmp/a\x1bb", "a\nb:1", "a\x7fb:1", "127.0.0.1:1\n"])
def test_control_characters_in_an_endpoint_are_refused(text: str) -> None:
    with pytest.raises(EndpointError) as refused:
        parse_endpoint(text)
    assert f"{refused.value}".isprintable()


@pytest.mark.parametrize("place", ["missing", ".", "unreadable", "binary", "fifo/x"])
def test_a_configuration_that_cannot_be_read(place: str, tmp_path: Path) -> None:
    path = tmp_path / place
    if place == "binary":
        path.write_bytes(bytes(range(256)))
    elif place == "unreadable":
        path.symlink_to(path)
    with pytest.raises(ConfigError) as refused:
        load(file=path, environ={})
    assert len(refused.value.problems) == 1
    assert f"{refused.value}".startswith(f"{path}: ")


def test_ctrl_c_ends_a_command_silently() -> None:
    with tempfile.TemporaryFile() as errors:
        command = [
            sys.executable,
            "-m",
            "kvtier.server",
            "fleet",
            "top",
            "--servers",
            "127.0.0.1:1",
            "--interval",
            "1",
        ]
        # A background job ignores the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
            signal.signal(signal.SIGINT, before)
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        errors.seek(0)
        assert b"Traceback" not in errors.read()
