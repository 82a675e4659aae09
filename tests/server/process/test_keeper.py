"""The process of `kvtier keeper`: its socket, its servers, and invalid messages."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest
from harness.command_line import kvtier
from harness.polling import stays, wait_until
from harness.signals import stop
from harness.store_server import WAIT_SECONDS, RunningKeeper, StoreServer, contents

from kvtier.server.process.descriptor_store import DescriptorStoreError, open_descriptor_store

HELLO = b"KVTIER-KEEPER=1"
MANY = 3000


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[RunningKeeper]:
    with RunningKeeper(tmp_path) as running:
        yield running


class _Raw:
    """A connection that sends bytes of its own."""

    def __init__(self, keeper: RunningKeeper, hello: bytes | None = HELLO) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(WAIT_SECONDS)
        self.socket.connect(str(keeper.path))
        self.greeting = b""
        if hello is not None:
            self.send(hello)
            self.greeting = self.receive()

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        self.socket.sendmsg([message], rights)

    def receive(self) -> bytes:
        """Returns a message without its descriptors; b"" at the end of the connection."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 4)
        except ConnectionResetError:
            return b""
        for descriptor in descriptors:
            os.close(descriptor)
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@contextlib.contextmanager
def _files(count: int) -> Iterator[list[int]]:
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(open(os.devnull, "rb")).fileno() for _ in range(count)]  # noqa: PTH123


class TestProcess:
    def test_it_imports_only_the_standard_library(self, tmp_path: Path) -> None:
        """The process has served a server before it lists its modules."""
        path = tmp_path / "keeper"
        code = (
            "import sys; from kvtier.server import cli\n"
            f"assert cli.main(['keeper', '--socket', {str(path)!r}]) == 0\n"
            "names = {name.partition('.')[0] for name in sys.modules} - {'kvtier', '__main__', '__mp_main__'}\n"
            "print(sorted(name for name in names - sys.stdlib_module_names if 'site-packages' in\n"
            "  (getattr(sys.modules[name], '__file__', None) or '')))"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            wait_until(path.exists)
            store = open_descriptor_store(path)
            assert store is not None
            assert store.take() == []
            store.close()
        finally:
            process.terminate()
            output, _ = process.communicate(timeout=WAIT_SECONDS)
        # Finders of editable installations are loaded at the start of each interpreter.
        assert not {"grpc", "google", "msgspec", "structlog", "torch", "asyncio"} & set(output.split("'"))
        assert [name for name in output.split("'")[1::2] if not name.startswith(("__editable__", "_distutils"))] == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_ends_it(self, keeper: RunningKeeper, number: int) -> None:
        """It removes its socket."""
        with keeper.start() as server:
            server.call("memory", "region", "text")
            keeper.process.send_signal(number)
            assert keeper.process.wait(WAIT_SECONDS) == 0
            assert server.call("memory", "region", "text").startswith("BrokenPipeError")
            assert server.call("forget", "region").startswith("BrokenPipeError")
        assert "ends: 1 descriptors are closed" in keeper.log
        assert not list(keeper.path.parent.glob("keeper*[!g]"))

    def test_the_end_of_its_terminal_does_not_end_it(self, keeper: RunningKeeper) -> None:
        keeper.process.send_signal(signal.SIGHUP)
        assert contents(keeper) == []

    def test_only_the_owner_can_connect(self, keeper: RunningKeeper) -> None:
        assert keeper.path.stat().st_mode & 0o777 == 0o600

    def test_a_second_keeper_is_refused(self, keeper: RunningKeeper) -> None:
        """The first one continues."""
        done = kvtier("keeper", "--socket", str(keeper.path), code=1)
        assert done.stderr == f"kvtier: error: unix:{keeper.path} is in use: another keeper listens there\n"
        assert contents(keeper) == []

    def test_the_socket_of_a_killed_keeper_is_replaced(self, tmp_path: Path) -> None:
        for _ in range(2):
            with RunningKeeper(tmp_path) as keeper:
                assert contents(keeper) == []
            assert keeper.path.exists()

    def test_another_file_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "keeper").write_text("a file")
        done = kvtier("keeper", "--socket", f"{tmp_path}/keeper", code=1)
        assert done.stderr == f"kvtier: error: unix:{tmp_path}/keeper: the file is not a socket\n"
        assert (tmp_path / "keeper").read_text() == "a file"

    def test_a_long_path_is_refused(self, tmp_path: Path) -> None:
        done = kvtier("keeper", "--socket", f"{tmp_path}/{'x' * 100}", code=2)
        assert done.stderr == "kvtier: error: --socket: must be a path of at most 100 bytes\n"

    @pytest.mark.parametrize("kind", ["broken", "closed", "full"])
    def test_an_unusable_standard_error_is_harmless(self, tmp_path: Path, kind: str) -> None:
        """No log line blocks or ends the process."""
        reader, writer = os.pipe()
        if kind == "broken":
            os.close(reader)
        if kind == "full":
            os.set_blocking(writer, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writer, bytes(4096))
            os.set_blocking(writer, True)
        prefix = ("sh", "-c", 'exec "$@" 2>&-', "sh") if kind == "closed" else ()
        try:
            with RunningKeeper(tmp_path, stderr=writer, prefix=prefix) as keeper:
                with keeper.start() as server:
                    server.call("memory", "region", "text")
                assert contents(keeper) == [["region", "text"]]
        finally:
            os.close(writer)
            if kind != "broken":
                os.close(reader)

    def test_the_limit_of_open_files_limits_descriptors(self, tmp_path: Path) -> None:
        """It raises its soft limit. If the hard limit is too low, it logs how many it keeps."""
        limited = ("sh", "-c", 'ulimit -Sn 64; ulimit -Hn 256; exec "$@"', "sh")
        with RunningKeeper(tmp_path, prefix=limited) as keeper:
            assert "keeps at most 192 descriptors: raise the hard limit" in keeper.log
            with keeper.start() as server:
                assert server.call("many", "region", MANY) == [192, "OSError", errno.ENOSPC]
            with keeper.start() as server:
                assert server.call("count") == 192

    def test_a_descriptor_that_it_cannot_receive_ends_the_warm_restart(self, keeper: RunningKeeper) -> None:
        """The next server must not believe that it knows all clients, so it gets nothing."""
        before = keeper.descriptors
        with keeper.start() as server:
            server.call("memory", "region", "text")
            wait_until(lambda: keeper.descriptors == before + 3)  # connection, process, memory
            soft, hard = resource.prlimit(keeper.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(keeper.process.pid, resource.RLIMIT_NOFILE, (3, hard))
            assert server.call("socket", "writer-1") is None
            wait_until(lambda: "server ignored" in keeper.log)
            assert server.call("socket", "writer-2").startswith("BrokenPipeError")
            resource.prlimit(keeper.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert contents(keeper) == []

    def test_a_stopped_keeper_delays_a_server_once(self, keeper: RunningKeeper) -> None:
        """The server waits for room in the queue once, and sends the rest when there is room."""
        with keeper.start() as server:
            server.call("memory", "old-1999", "text")
            keeper.process.send_signal(signal.SIGSTOP)
            server.call("forget_all", "old", 2000)
            assert server.call("memory", "region", "text").startswith("BlockingIOError")
            keeper.process.send_signal(signal.SIGCONT)
            wait_until(lambda: server.call("memory", "region", "text") is None)
        assert contents(keeper) == [["region", "text"]]


class TestServers:
    def test_a_second_server_is_refused(self, keeper: RunningKeeper) -> None:
        """The first one can continue. After its end the next one is admitted."""
        with keeper.start() as server:
            with pytest.raises(DescriptorStoreError) as refused:
                open_descriptor_store(keeper.path)
            assert str(refused.value) == (
                f"the keeper at {keeper.path} refuses: another server is connected (process {server.pid})"
            )
            assert server.call("memory", "region", "text") is None
        assert contents(keeper) == [["region", "text"]]

    def test_what_a_killed_server_had_sent_is_read(self, keeper: RunningKeeper) -> None:
        """The keeper is stopped, so all messages are queued when the server is killed.

        A full queue refuses further ones. The next server gets the others.
        """
        with keeper.start() as server, StoreServer({}) as following:
            stop(keeper.process.pid)
            accepted, error, _ = server.call("many", "region", MANY)
            assert error == "BlockingIOError"
            assert accepted > 100
            server.kill()
            following.begin("open", str(keeper.path))
            keeper.process.send_signal(signal.SIGCONT)
            assert following.result() == "KeeperStore"
            assert following.call("count") == accepted

    def test_unread_answers_of_a_killed_server_lose_nothing(self, keeper: RunningKeeper) -> None:
        """The kernel then reports a reset connection before the queued messages."""
        with keeper.start() as server:
            server.call("memory", "old", "text")
        with keeper.start() as server:
            server.call("ask_for_list")
            stop(keeper.process.pid)
            assert server.call("many", "new", 100) == [100]
            server.kill()
            keeper.process.send_signal(signal.SIGCONT)
        with keeper.start() as server:
            assert server.call("count") == 101

    def test_a_fork_of_a_killed_server_does_not_prevent_the_next(self, keeper: RunningKeeper) -> None:
        """The fork still has the connection open."""
        with keeper.start() as server:
            server.call("memory", "region", "text")
            child = server.call("fork")
        try:
            assert contents(keeper) == [["region", "text"]]
        finally:
            os.kill(child, signal.SIGKILL)

    def test_thousands_of_descriptors(self, keeper: RunningKeeper) -> None:
        """None is lost, and none leaks."""
        before = keeper.descriptors
        with keeper.start() as server:
            total = 0
            while total < MANY:  # the queue may be full
                accepted, *_ = server.call("many", "region", MANY - total)
                total += accepted
        with keeper.start() as server:
            assert server.call("count") == MANY
        with keeper.start() as server:
            assert server.call("forget", "region") is None
            assert server.call("take") == []
        wait_until(lambda: keeper.descriptors == before)

    def test_a_slow_reader_blocks_nothing(self, keeper: RunningKeeper) -> None:
        """The keeper refuses another server while its queue to the reader is full."""
        with keeper.start() as server:
            total = 0
            while total < MANY:  # the queue may be full
                total += server.call("many", "region", MANY - total)[0]
        with _Raw(keeper) as reader:
            assert f"FDSTORED={MANY}" in reader.greeting.decode()
            reader.send(b"FDLIST=1")
            with _Raw(keeper) as other:
                assert other.greeting.startswith(b"REFUSED=another server")
            with _files(1) as files:
                reader.send(b"FDSTORE=1\nFDNAME=late", files)
            messages = [reader.receive() for _ in range(MANY + 1)]
        assert set(messages[:-1]) == {b"FDSTORE=1\nFDNAME=region"}
        assert messages[-1] == b"END=1"
        with keeper.start() as server:
            assert server.call("count") == MANY + 1

    def test_descriptors_are_freed_if_no_server_returns(self, tmp_path: Path) -> None:
        """The time begins when the server is gone."""
        with RunningKeeper(tmp_path, "--forget-after", "0.1") as keeper:
            before = keeper.descriptors
            with keeper.start() as server:
                server.call("memory", "region", "text")
                wait_until(lambda: keeper.descriptors == before + 3)  # connection, process, memory
                stays(lambda: keeper.descriptors == before + 3, 0.5)
            wait_until(lambda: "forgotten: 1 descriptors" in keeper.log)
            wait_until(lambda: keeper.descriptors == before)
            assert contents(keeper) == []

    def test_the_log_has_a_line_per_event(self, keeper: RunningKeeper) -> None:
        with keeper.start() as server:
            server.call("memory", "region", "text")
            pid = server.pid
        wait_until(lambda: "server gone" in keeper.log)
        lines = [line.partition(" kvtier keeper: ")[2] for line in keeper.log.splitlines()]
        assert lines[0] == f"listens on unix:{keeper.path}; process {keeper.process.pid}"
        assert lines[-2:] == [
            f"server connected (process {pid}): 0 descriptors are kept",
            f"server gone (process {pid}): 1 descriptors are kept",
        ]

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
    def test_another_user_is_refused(self, keeper: RunningKeeper) -> None:
        """Also if the permissions of the socket allow a connection."""
        keeper.path.chmod(0o666)
        keeper.path.parent.chmod(0o755)
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                os.chdir(keeper.path.parent)  # this user may not search the folders above
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.connect("keeper")
                code = 0 if connection.recv(100) == b"REFUSED=it belongs to user 65534" else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert contents(keeper) == []


INVALID = {
    "empty": (b"", 0),
    "empty with a descriptor": (b"", 1),
    "binary": (b"\xff\0\x01", 1),
    "no key": (b"=1", 0),
    "no value": (b"FDSTORE", 1),
    "blank line": (b"FDSTORE=1\nFDNAME=a\n", 1),
    "repeated": (b"FDSTORE=1\nFDNAME=a\nFDNAME=b", 1),
    "unknown": (b"READY=1", 0),
    "unknown key": (b"FDSTORE=1\nFDNAME=a\nMAINPID=1", 1),
    "no descriptor": (b"FDSTORE=1\nFDNAME=a", 0),
    "two descriptors": (b"FDSTORE=1\nFDNAME=a", 2),
    "many descriptors": (b"FDSTORE=1\nFDNAME=a", 253),
    "no name": (b"FDSTORE=1", 1),
    "empty name": (b"FDSTORE=1\nFDNAME=", 1),
    "wrong name": (b"FDSTORE=1\nFDNAME=a/b", 1),
    "long name": (b"FDSTORE=1\nFDNAME=" + b"a" * 65, 1),
    "too long": (b"FDSTORE=1\nFDNAME=" + b"a" * 5000, 1),
    "wrong poll": (b"FDSTORE=1\nFDNAME=a\nFDPOLL=1", 1),
    "wrong value": (b"FDSTORE=0\nFDNAME=a", 1),
    "removal with a descriptor": (b"FDSTOREREMOVE=1\nFDNAME=old", 1),
    "removal without a name": (b"FDSTOREREMOVE=1", 0),
    "both": (b"FDSTORE=1\nFDSTOREREMOVE=1\nFDNAME=old", 1),
    "list with a name": (b"FDLIST=1\nFDNAME=a", 0),
    "list with a descriptor": (b"FDLIST=1", 1),
    "second hello": (HELLO, 0),
}


class TestInvalidMessages:
    @pytest.mark.parametrize("name", INVALID)
    def test_an_invalid_message_ends_the_service(self, keeper: RunningKeeper, name: str) -> None:
        """Later messages are ignored, everything is dropped, and one line is logged.

        The server believes that the keeper has one descriptor more, so the next server must not
        rely on the others.

        The process may still write to the region. So no other server is admitted until it is gone.
        """
        with keeper.start() as server:
            server.call("memory", "old", "text")
        wait_until(lambda: "server gone" in keeper.log)
        before = keeper.descriptors
        message, count = INVALID[name]
        with _files(count) as files, _Raw(keeper) as raw:
            raw.send(message, files)
            with contextlib.suppress(BrokenPipeError):
                for _ in range(10):
                    raw.send(b"FDSTORE=1\nFDNAME=late", files[:1] or [raw.socket.fileno()])
            wait_until(lambda: "server ignored" in keeper.log)
            wait_until(lambda: keeper.descriptors == before - 1 + 2)  # connection, process
            with _Raw(keeper) as other:
                assert other.greeting.startswith(b"REFUSED=another server is connected")
            with pytest.raises(BrokenPipeError):
                raw.send(b"FDLIST=1")
        assert contents(keeper) == []
        wait_until(lambda: keeper.log.count("server gone") == 3)
        assert keeper.descriptors == before - 1
        assert keeper.log.count("server ignored") == 1

    @pytest.mark.parametrize(
        ("hello", "reason"),
        [
            (b"", b"REFUSED=its first message is not a hello"),
            (b"\xff", b"REFUSED=its first message is not a hello"),
            (b"FDLIST=1", b"REFUSED=its first message is not a hello"),
            (HELLO + b"\nMORE=1", b"REFUSED=its first message is not a hello"),
            (b"KVTIER-KEEPER=2", b"REFUSED=the keeper speaks version 1 of the protocol, and the server another one"),
        ],
    )
    def test_a_wrong_hello_is_refused(self, keeper: RunningKeeper, hello: bytes, reason: bytes) -> None:
        with _Raw(keeper, hello) as raw:
            assert raw.greeting == reason
            assert raw.receive() == b""
        assert contents(keeper) == []

    def test_descriptors_of_a_hello_are_closed(self, keeper: RunningKeeper) -> None:
        before = keeper.descriptors
        with _files(1) as files, _Raw(keeper, None) as raw:
            raw.send(HELLO, files)
            assert raw.receive().startswith(b"REFUSED")
        wait_until(lambda: keeper.descriptors == before)

    def test_silent_connections_do_not_prevent_a_server(self, keeper: RunningKeeper) -> None:
        """If there are too many, the oldest ones are refused."""
        with contextlib.ExitStack() as opened:
            silent = [opened.enter_context(_Raw(keeper, None)) for _ in range(40)]
            with keeper.start() as server:
                assert server.call("memory", "region", "text") is None
            assert silent[0].receive() == b"REFUSED=too many connections without a hello"
        assert contents(keeper) == [["region", "text"]]

    @pytest.mark.slow
    def test_a_silent_connection_is_ended(self, keeper: RunningKeeper) -> None:
        with _Raw(keeper, None) as silent:
            assert silent.receive() == b"REFUSED=it has sent no hello"

    def test_more_descriptors_than_the_limit_are_refused(self, tmp_path: Path) -> None:
        """A server that does not count them is ignored after the limit, and loses all of them."""
        with RunningKeeper(tmp_path, "--max-descriptors", "3") as keeper:
            with _Raw(keeper) as raw, _files(1) as files:
                for _ in range(3):
                    raw.send(b"FDSTORE=1\nFDNAME=a\nFDPOLL=0", files)
                with contextlib.suppress(BrokenPipeError):
                    raw.send(b"FDSTORE=1\nFDNAME=a", files)
                wait_until(lambda: "more than 3 descriptors" in keeper.log)
            with keeper.start() as server:
                assert server.call("count") == 0

    def test_a_server_can_keep_its_own_connection(self, keeper: RunningKeeper) -> None:
        """The connection then never hangs up, but the end of the process is noticed."""
        code = (
            "import os, socket, sys\n"
            "connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
            "connection.connect(sys.argv[1])\n"
            "connection.send(b'KVTIER-KEEPER=1'); connection.recv(100)\n"
            "socket.send_fds(connection, [b'FDSTORE=1\\nFDNAME=loop'], [connection.fileno()])\n"
        )
        subprocess.run([sys.executable, "-c", code, str(keeper.path)], check=True, timeout=WAIT_SECONDS)
        with keeper.start() as server:
            assert server.call("memory", "region", "text") is None


@contextlib.contextmanager
def _false_keeper(path: Path, answers: Sequence[bytes]) -> Iterator[Path]:
    """Answers a hello with these messages, and closes the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                connection, _ = listener.accept()
                connection.recv(100)
                for answer in answers:
                    connection.send(answer)
                connection.close()
            os._exit(0)
    try:
        yield path
    finally:
        os.waitpid(child, 0)


class TestClient:
    def test_a_missing_keeper_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(DescriptorStoreError) as failed:
            open_descriptor_store(tmp_path / "none")
        assert str(failed.value) == (
            f"the keeper at {tmp_path}/none cannot be used: No such file or directory; is `kvtier keeper` running?"
        )

    def test_a_killed_keeper_is_named(self, tmp_path: Path) -> None:
        with RunningKeeper(tmp_path) as keeper:
            pass
        with pytest.raises(DescriptorStoreError, match=r"Connection refused; is `kvtier keeper` running\?$"):
            open_descriptor_store(keeper.path)

    @pytest.mark.parametrize(
        ("answers", "problem"),
        [
            ([], "it has closed the connection"),
            ([b"\xff"], "a message does not consist of"),
            ([b"READY=1"], "it does not speak version 1"),
            ([b"KVTIER-KEEPER=2\nFDSTOREMAX=1\nFDSTORED=0"], "it does not speak version 1"),
            ([b"KVTIER-KEEPER=1\nFDSTOREMAX=many\nFDSTORED=0"], "invalid literal"),
            ([b"KVTIER-KEEPER=1\nFDSTOREMAX=1"], "invalid literal"),
            ([b"x" * 5000], "a message is too long"),
        ],
    )
    def test_a_wrong_answer_is_an_error(self, tmp_path: Path, answers: list[bytes], problem: str) -> None:
        with (
            _false_keeper(tmp_path / "false", answers) as path,
            pytest.raises(DescriptorStoreError, match=f"cannot be used: {problem}") as failed,
        ):
            open_descriptor_store(path)
        assert "\n" not in str(failed.value)

    @pytest.mark.parametrize(
        "answers",
        [[], [b"FDSTORE=1\nFDNAME=a"], [b"\xff"], [b"FDSTORE=1\nFDNAME=A"], [b"END=2"]],
    )
    def test_a_wrong_list_is_an_error(self, tmp_path: Path, answers: list[bytes]) -> None:
        hello = b"KVTIER-KEEPER=1\nFDSTOREMAX=4\nFDSTORED=0"
        with _false_keeper(tmp_path / "false", [hello, *answers]) as path:
            store = open_descriptor_store(path)
            assert store is not None
            with pytest.raises(DescriptorStoreError):
                store.take()
            store.close()
