"""`kvtier token new`: creates a token and its entry for the token file."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from ..auth.credential_files import FileError
from ..auth.tokens import format_entry, new_token, read_token_file, token_hash
from .console import EXIT_FAILURE, EXIT_USAGE, complain, print_line, refuse

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Prints a new token and its entry, or appends the entry to --file."""
    if options.tenant is None and {"engine", "reader"} & set(options.role):
        return refuse(['--tenant is missing: engines and readers need one ("*" for any)'], EXIT_USAGE)
    token = new_token()
    name = options.name or "-".join(filter(None, [options.tenant, *options.role]))
    entry = format_entry(
        name, token_hash(token), options.tenant, list(dict.fromkeys(options.role)), shared_memory=options.shared_memory
    )
    if options.file is None:
        complain(["the token is printed on standard output only; add this entry to the token file:"])
        sys.stderr.write(f"\n{entry}\n")
    else:
        try:
            _append(Path(options.file), entry)
        except OSError as error:
            return refuse([f"{options.file}: cannot be written: {error.strerror}"], EXIT_FAILURE)
        except FileError as error:
            return refuse([f"{error}"], EXIT_FAILURE)
        complain([f"{name}: the hash is in {options.file}; the token is printed on standard output only"])
    print_line(token)
    return 0


def _append(path: Path, entry: str) -> None:
    """Adds an entry to a file. A new file gets mode 0600; an existing file keeps owner and mode."""
    path = path.resolve()  # a symbolic link stays: the rename replaces the target of the link
    with _locked(path):
        read_token_file(path, trusted=False)  # the file of the server's user, if root runs this
        text = path.read_text(encoding="utf-8")
        # Write a temporary file and rename it, so that a server never reads half of the contents.
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(opened, "w", encoding="utf-8") as file:
                file.write(f"{text.rstrip()}\n\n{entry}" if text.strip() else entry)
            read_token_file(temporary, trusted=False)
            was = path.stat()  # the server may run as another user
            os.chown(temporary, was.st_uid, was.st_gid)
            temporary.chmod(stat.S_IMODE(was.st_mode))
            temporary.replace(path)
        except BaseException:
            temporary.unlink()
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks the file against concurrent additions. Creates a missing file.

    If the `with` block raises, a file that this call created is removed again. The lock is on the
    file itself, so no lock file remains, and only users that can read the file can lock it.
    """
    while True:
        descriptor, is_new = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_same(path, descriptor):  # another process has replaced the file
                continue
            try:
                yield
            except BaseException:
                if is_new and _is_same(path, descriptor):
                    path.unlink()
                raise
            return
        finally:
            os.close(descriptor)


def _open(path: Path) -> tuple[int, bool]:
    """Opens the file for locking; returns the descriptor, and whether the file was created."""
    with contextlib.suppress(FileExistsError):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), True
    try:
        return os.open(path, os.O_RDWR), False  # NFS grants exclusive locks only to writers
    except PermissionError:
        return os.open(path, os.O_RDONLY), False


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
