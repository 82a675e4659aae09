"""The token file and the lines of the audit log, without a server."""

from __future__ import annotations

import os
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from harness.polling import wait_until

from kvtier.server.auth import audit_log as audit_module
from kvtier.server.auth.audit_log import AuditLog
from kvtier.server.auth.authenticator import Authenticator
from kvtier.server.auth.credential_files import FileError
from kvtier.server.auth.roles import CALLER, OWNER, Identity, Role
from kvtier.server.auth.tokens import TokenFile, format_entry, new_token, read_token_file, token_hash
from kvtier.server.commands import token as token_command
from kvtier.server.config.schema import AuthConfig, Config
from kvtier.server.refused import Refused


def read(path: Path, text: str) -> TokenFile:
    """Writes `text` to a token file and reads it."""
    file = path / "tokens.toml"
    file.write_text(text, encoding="utf-8")
    return read_token_file(file)


def test_an_entry_is_found_by_its_token_until_it_expires(tmp_path: Path) -> None:
    """A similar token, an empty one or the hash finds no entry."""
    token = new_token()
    entry = format_entry('a "name"', token_hash(token), "acme", ["engine", "admin"], shared_memory=True)
    token_file = read(tmp_path, f"{entry}expires = 1970-01-01T00:16:40Z\n")
    found = token_file.find_token(token, 999.0)
    assert (found.name, found.tenant, found.shared_memory) == ('a "name"', "acme", True)
    assert found.roles == {Role.ENGINE, Role.ADMIN}
    assert token_file.is_still_valid(found, 999.0)
    assert not token_file.is_still_valid(found, 1000.0)
    for other, now in ((token, 1000.0), (token[:-1], 0.0), (f"{token} ", 0.0), ("", 0.0), (token_hash(token), 0.0)):
        assert token_file.find_token(other, now) is None
    assert token_file.is_still_valid(OWNER, 0.0)


def test_every_byte_of_a_hash_counts(tmp_path: Path) -> None:
    """Entries are found by the first bytes of their hashes."""
    token = new_token()
    right = token_hash(token)
    wrong = right[:-1] + ("0" if right[-1] != "0" else "1")
    for text, found in ((right, True), (wrong, False)):
        token_file = read(tmp_path, format_entry("n", text, "acme", ["engine"], shared_memory=False))
        assert (token_file.find_token(token, 0.0) is not None) is found


def test_a_session_ends_if_the_tenant_of_its_entry_changes(tmp_path: Path) -> None:
    token = new_token()
    before = read(tmp_path, format_entry("n", token_hash(token), "acme", ["engine"], shared_memory=False))
    after = read(tmp_path, format_entry("n", token_hash(token), "zeta", ["engine"], shared_memory=False))
    identity = before.find_token(token, 0.0)
    assert identity is not None
    assert not after.is_still_valid(identity, 0.0)


SOUND = f'name = "n"\nhash = "{token_hash("t")}"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'[[tokens]]\n{SOUND}roles = ["engine"]', "an engine or reader needs a tenant"),
        (f'[[tokens]]\n{SOUND}roles = []\ntenant = "a"', "roles"),
        (
            f'[[tokens]]\n{SOUND}roles = ["root"]\ntenant = "a"',
            r"tokens, number 1: roles\[0\]: invalid enum value 'root'; valid roles are engine, reader,",
        ),
        (f'[[tokens]]\n{SOUND}roles = ["admin"]\ntennant = "a"', "unknown field `tennant`"),
        (
            '[[tokens]]\nname = "n"\nhash = "secret"\nroles = ["admin"]',
            "number 1: hash: must be sha256: and 64 hexadecimal digits",
        ),
        (f'[[tokens]]\n{SOUND}roles = ["admin"]\n[[tokens]]\n{SOUND}roles = ["admin"]', "listed twice"),
        ("tokens = 3", "tokens: expected `array`, got `integer`"),
        (
            f'[[tokens]]\n{SOUND}roles = ["admin"]\nexpires = 2030-01-01',
            "expires: expected `date and time`, got `date`",
        ),
        ("\x00", "is not TOML: "),
        ("tokens = " + "9" * 5000, "4300 digits"),
        ("[[certificates]]\n" * 2, "certificates, number 1: missing required field `name`"),
        ('[[certificates]]\nname = "engine-1"\nroles = ["admin"]', 'write the kind of the name, like "dns:'),
        ('[[certificates]]\nname = "spiffe://x/y"\nroles = ["admin"]', 'write the kind of the name, like "dns:'),
        ("[[token]]", ": unknown field `token`"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The error is one line that names the file and never contains the token."""
    with pytest.raises(FileError, match=message) as error:
        read(tmp_path, text)
    assert "\n" not in str(error.value)


def test_a_missing_or_too_large_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read: No such file"):
        read_token_file(tmp_path / "none")
    with pytest.raises(FileError, match="is larger than"):
        read(tmp_path, "#" * (5 << 20))


def test_repeated_refusals_are_combined_into_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line has the count of those left out; other callers are not affected.

    Memory stays bounded.
    """
    lines: list[dict[str, Any]] = []

    class Log:
        def info(self, _: str, **fields: Any) -> None:
            lines.append(fields)

    monkeypatch.setattr(audit_module, "_log", Log())
    now = [100.0]
    audit = AuditLog(logs_reads=False, clock=lambda: now[0])

    class Context:
        address = "ipv4:10.0.0.1:4711"

        def peer(self) -> str:
            return self.address

    context = Context()
    for _ in range(1000):
        audit.record_refusal("/kvtier.v1.CacheService/Lookup", context, "UNAUTHENTICATED")
    assert [line["who"] for line in lines] == ["ipv4:10.0.0.1"]
    now[0] += 11
    audit.record_refusal("/kvtier.v1.CacheService/Lookup", context, "UNAUTHENTICATED")
    assert lines[1]["left_out"] == 999
    eve = CALLER.set(Identity("eve", "acme", frozenset({Role.ENGINE}), shared_memory=False))
    audit.record_refusal("/kvtier.v1.AdminService/Fsck", context, "PERMISSION_DENIED")
    CALLER.reset(eve)
    assert lines[2] == {"who": "eve", "what": "/kvtier.v1.AdminService/Fsck", "outcome": "refused: PERMISSION_DENIED"}
    audit.record_refusal("/kvtier.v1.CacheService/Lookup", context, "INVALID_KEY")
    audit.record_call("/kvtier.v1.AdminService/GetStatus", "OK")
    audit.record_call("/kvtier.v1.CacheService/Lookup", "OK")
    audit.record_call("/kvtier.v1.AdminService/Fsck", "UNAUTHENTICATED")
    assert len(lines) == 3
    audit.record_call("/kvtier.v1.AdminService/Fsck", "OK")
    assert lines[3]["outcome"] == "OK"
    for number in range(5000):
        context.address = f"ipv4:10.{number >> 8}.{number & 255}.1:1"
        audit.record_refusal("/kvtier.v1.CacheService/Lookup", context, "UNAUTHENTICATED")
    assert len(audit._limit._kinds) <= 1025
    assert len(lines) < 1100


def test_a_file_is_read_once_its_mode_is_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of owner or mode leaves the contents as they are, and still causes a new read."""
    path, token, early = tmp_path / "tokens.toml", new_token(), new_token()
    path.write_text(format_entry("early", token_hash(early), "acme", ["engine"], shared_memory=False))
    who = Authenticator(Config(listen=(), region_size=0, data_dir=tmp_path, tiers=(), auth=AuthConfig(tokens=path)))
    path.write_text(format_entry("late", token_hash(token), "acme", ["engine"], shared_memory=False))
    with monkeypatch.context() as patched:

        def unreadable(_: Path) -> TokenFile:
            raise FileError("cannot be read")

        patched.setattr(who._file, "_read", unreadable)
        who.refresh()
    with pytest.raises(Refused):
        who.identify(token, [], is_local=False)
    assert who.identify(early, [], is_local=False).name == "early", "the tokens before stay valid"
    changed = path.stat().st_ctime_ns
    # The clock of the file system is coarse.
    wait_until(lambda: path.chmod(0o640) or path.stat().st_ctime_ns > changed)
    who.refresh()
    assert who.identify(token, [], is_local=False).name == "late"


def add_token(file: Path, name: str) -> int:
    """Adds a token to a file, as `kvtier token new` does; returns the exit code."""
    return token_command.run(Namespace(tenant=None, role=["admin"], name=name, shared_memory=False, file=str(file)))


@pytest.mark.parametrize("is_new", [False, True])
def test_tokens_added_concurrently_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_new: bool
) -> None:
    """A second writer waits until the first has replaced the file, also if the first creates it."""
    file = tmp_path / "tokens.toml"
    if not is_new:
        assert add_token(file, "earlier") == 0
    codes: list[int] = []
    second = threading.Thread(target=lambda: codes.append(add_token(file, "second")))
    check = token_command.read_token_file  # type: ignore[attr-defined]

    def checked(path: Path, *, trusted: bool) -> TokenFile:
        # the new file is being written, and the old text was read
        if path != file and not second.ident:
            second.start()
            second.join(0.3)  # without the lock the thread would end by then
        return check(path, trusted=trusted)

    monkeypatch.setattr(token_command, "read_token_file", checked)
    monkeypatch.setattr(os, "getpid", threading.get_native_id)
    codes.append(add_token(file, "first"))
    second.join()
    assert codes == [0, 0]
    names = {known.identity.name for known in read_token_file(file).tokens.values()}
    assert names == {"first", "second"} | (set() if is_new else {"earlier"})
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_addition_leaves_no_file(tmp_path: Path) -> None:
    """A new file is removed again; an existing empty file stays."""
    file = tmp_path / "tokens.toml"
    assert add_token(file, "n" * 257) == 1
    assert list(tmp_path.iterdir()) == []
    file.touch()
    assert add_token(file, "n" * 257) == 1
    assert list(tmp_path.iterdir()) == [file]
