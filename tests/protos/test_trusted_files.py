"""The rule which files other users can change."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.protos import trusted_files
from kvtier.protos.credentials import Credentials, CredentialsError
from kvtier.protos.endpoint import Endpoint
from kvtier.protos.trusted_files import UntrustedFileError, check_trusted, mode_of_readable, read_trusted

FOREIGN = 4711

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Returns a file that only its owner can write, in two directories of the same owner."""
    directory = tmp_path / "outer" / "inner"
    directory.mkdir(parents=True)
    for path in (directory, directory.parent):
        path.chmod(0o755)
    made = directory / "file"
    made.write_text("content")
    made.chmod(0o644)
    return made


def refusal(path: Path) -> str:
    with pytest.raises(UntrustedFileError) as refused:
        read_trusted(path)
    problem = refused.value.strerror or ""
    assert "\n" not in problem
    return problem


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o444, 0o755])
def test_a_file_that_only_its_owner_writes_is_read(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert read_trusted(file) == b"content"
    assert read_trusted(file, 3) == b"con"
    assert mode_of_readable(file) == (mode if mode & 4 else None)


@pytest.mark.parametrize("mode", [0o666, 0o602, 0o646])
def test_a_file_that_every_user_may_write_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert refusal(file) == f"{file} has mode {mode:04o}, so every user can change it: chmod go-w {file}"


@pytest.mark.parametrize("level", [0, 1])
def test_a_directory_that_every_user_may_write_is_refused(file: Path, level: int) -> None:
    """At each level of the path, because its entries can be replaced."""
    directory = file.parents[level]
    directory.chmod(0o777)
    assert refusal(file).startswith(f"{directory} has mode 0777")


def test_a_sticky_directory_protects_its_entries(file: Path) -> None:
    file.parent.chmod(0o1777)
    assert read_trusted(file) == b"content"


@root_only
def test_an_entry_of_another_user_is_refused_in_a_sticky_directory(file: Path) -> None:
    file.parent.chmod(0o1777)
    os.chown(file, FOREIGN, 0)
    assert refusal(file) == f"{file} belongs to user {FOREIGN}, who can change it: chown {file}"


@root_only
def test_a_directory_of_another_user_is_refused(file: Path) -> None:
    os.chown(file.parents[1], FOREIGN, 0)
    assert refusal(file).startswith(f"{file.parents[1]} belongs to user {FOREIGN}")


@root_only
@pytest.mark.parametrize("is_directory", [False, True])
def test_a_foreign_group_may_not_write(file: Path, is_directory: bool) -> None:  # noqa: FBT001
    path = file.parent if is_directory else file
    os.chown(path, 0, FOREIGN)
    path.chmod(0o775)
    assert refusal(file).startswith(f"{path} has mode 0775, so group {FOREIGN} can change it")
    path.chmod(0o755)
    assert read_trusted(file) == b"content"


@root_only
@pytest.mark.parametrize(("is_private", "is_refused"), [(True, False), (False, True)])
def test_the_own_group_may_write_if_it_has_no_other_members(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_private: bool,  # noqa: FBT001
    is_refused: bool,  # noqa: FBT001
) -> None:
    """Distributions with a group per user create files that the group may write."""
    os.chown(file, 0, FOREIGN)
    file.chmod(0o664)
    monkeypatch.setattr(os, "getegid", lambda: FOREIGN)
    users = [] if is_private else [type("User", (), {"pw_gid": FOREIGN, "pw_uid": 7})]
    monkeypatch.setattr(trusted_files.pwd, "getpwall", lambda: users)  # type: ignore[attr-defined]
    if is_refused:
        refusal(file)
    else:
        assert read_trusted(file) == b"content"


@root_only
@pytest.mark.parametrize("is_own", [True, False])
def test_a_further_group_of_the_process_may_write(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_own: bool,  # noqa: FBT001
) -> None:
    """Kubernetes gives a volume to `fsGroup`, which is a further group of the container."""
    os.chown(file.parent, 0, FOREIGN)
    file.parent.chmod(0o2775)
    monkeypatch.setattr(os, "getgroups", lambda: [FOREIGN] if is_own else [])
    if is_own:
        assert read_trusted(file) == b"content"
        monkeypatch.setattr(trusted_files, "_is_private", lambda _: False)
    refusal(file)


def test_a_user_of_an_access_list_may_not_write(file: Path) -> None:
    """The mode then shows the mask of the list as the rights of the group."""
    entries = [(1, 6, 0xFFFFFFFF), (2, 6, FOREIGN), (4, 4, 0xFFFFFFFF), (16, 6, 0xFFFFFFFF), (32, 0, 0xFFFFFFFF)]
    text = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(file, "system.posix_acl_access", text)
    except OSError:
        pytest.skip("the file system has no access lists")
    assert "users of its access list can change it" in refusal(file)


def test_the_layout_of_a_kubernetes_secret_is_read(file: Path) -> None:
    """Links to a directory with a time in its name. The mount's own directory has mode 0777."""
    volume = file.parents[1] / "volume"
    data = volume / "..2026_11_27"
    data.mkdir(parents=True, mode=0o755)
    (data / "token").write_text("content")
    (data / "token").chmod(0o644)
    (volume / "..data").symlink_to("..2026_11_27")
    (volume / "token").symlink_to("..data/token")
    assert read_trusted(volume / "token") == b"content"
    volume.chmod(0o1777)
    assert read_trusted(volume / "token") == b"content"


@root_only
def test_a_read_only_mount_protects_the_entries_of_a_directory(file: Path) -> None:
    """Kubernetes mounts a ConfigMap read-only, with a directory of mode 0777."""
    script = f"""
        mount -t tmpfs -o mode=0777 tmpfs {file.parent} && echo content > {file.parent}/new &&
        mount -o remount,ro {file.parent} &&
        {sys.executable} -c "from kvtier.protos.trusted_files import *; print(read_trusted('{file.parent}/new'))"
    """
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("no mounts here")
    assert done.stdout.strip() == r"b'content\n'", done.stderr


def test_the_target_of_a_link_is_checked_with_its_path(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    relative = tmp_path / "relative"
    relative.symlink_to("outer/../outer/inner/./file")
    assert read_trusted(link) == read_trusted(relative) == b"content"
    file.parent.chmod(0o777)
    for each in (link, relative):
        assert refusal(each).startswith(f"{file.parent} has mode 0777")


def test_the_directory_of_a_link_is_checked(file: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(file)
    (tmp_path / "open").chmod(0o777)
    assert refusal(tmp_path / "open" / "link").startswith(f"{tmp_path / 'open'} has mode 0777")


@root_only
def test_a_link_of_another_user_is_refused(file: Path, tmp_path: Path) -> None:
    """In a sticky directory its owner can replace the link."""
    link = tmp_path / "link"
    link.symlink_to(file)
    os.chown(link, FOREIGN, 0, follow_symlinks=False)
    assert refusal(link).startswith(f"{link} belongs to user {FOREIGN}")


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        check_trusted(tmp_path / "a")


def test_a_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trusted(tmp_path / "none")


def test_the_output_of_a_command_is_read() -> None:
    """`--config <(command)` names a pipe."""
    reader, writer = os.pipe()
    os.write(writer, b"content")
    os.close(writer)
    try:
        assert read_trusted(f"/dev/fd/{reader}") == b"content"
    finally:
        os.close(reader)


def test_a_file_that_is_replaced_between_opening_and_check_is_opened_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content that is read is the content of the file that was checked."""
    check, attempts = trusted_files.check_trusted, []

    def replaced(path: Path) -> os.stat_result:
        if not attempts:
            other = file.with_name("other")
            other.write_text("new")
            other.replace(file)
        attempts.append(path)
        return check(path)

    monkeypatch.setattr(trusted_files, "check_trusted", replaced)
    assert read_trusted(file) == b"new"
    assert len(attempts) == 2


def test_a_client_refuses_a_token_that_other_users_can_write(file: Path) -> None:
    """Otherwise it would store its blocks for the tenant of another user's token."""
    file.chmod(0o666)
    with pytest.raises(CredentialsError, match=r"token_file .* has mode 0666, so every user can change it"):
        Credentials(token_file=str(file)).channel(Endpoint(path="/s"))
    with pytest.raises(CredentialsError, match="has mode 0666"):
        Credentials(token_file=str(file)).socket_token()


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
def test_a_client_refuses_tls_files_that_other_users_can_write(file: Path, name: str) -> None:
    """With another CA, another user's server could answer."""
    open_file = file.with_name("open")
    open_file.write_text("x")
    open_file.chmod(0o666)
    paths = {"ca": str(file), "cert": str(file), "key": str(file)} | {name: str(open_file)}
    with pytest.raises(CredentialsError, match="has mode 0666"):
        Credentials(**paths).socket_context("kvtier")


def test_a_client_keeps_its_token_if_the_new_one_is_not_trusted(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    credentials = Credentials(token_file=str(file))
    assert credentials.socket_token() == "content"
    file.write_text("planted")
    file.chmod(0o666)
    assert [credentials.socket_token() for _ in range(3)] == ["content"] * 3
    assert sum("previous token stays in use" in line for line in caplog.messages) == 1
    file.chmod(0o600)
    assert credentials.socket_token() == "planted"


def test_the_check_is_thread_safe(file: Path) -> None:
    """Threads of gRPC read certificates."""
    read: list[bytes] = []
    threads = [threading.Thread(target=lambda: read.append(read_trusted(file))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [b"content"] * 8
