"""`kvtier token new`: makes a token, and what the file of tokens says of it."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from ..auth.tokens import TokensError, entry_text, hash_of, new_token, read_directory
from .console import EXIT_FAILURE, EXIT_USAGE, complain, print_line, refuse

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Prints a new token on standard output; its entry too, or appends it to the file that the options name."""
    if options.tenant is None and {"engine", "reader"} & set(options.role):
        return refuse(['--tenant is missing: engines and readers have one ("*" for any)'], EXIT_USAGE)
    token = new_token()
    name = options.name or "-".join(filter(None, [options.tenant, *options.role]))
    entry = entry_text(
        name, hash_of(token), options.tenant, list(dict.fromkeys(options.role)), shared_memory=options.shared_memory
    )
    if options.file is None:
        complain(["the token is on standard output, and nowhere else; this goes into the file of tokens:"])
        sys.stderr.write(f"\n{entry}\n")
    else:
        try:
            _append(Path(options.file), entry)
        except OSError as error:
            return refuse([f"{options.file}: cannot be written: {error.strerror}"], EXIT_FAILURE)
        except TokensError as error:
            return refuse([f"{error}"], EXIT_FAILURE)
        complain([f"{name}: its hash is in {options.file}; the token is on standard output, and nowhere else"])
    print_line(token)
    return 0


def _append(path: Path, entry: str) -> None:
    """Adds an entry to a file, which is its owner's alone if it is new. Any other keeps its owner and mode, or is left alone."""
    path = path.resolve()  # what a link leads to is replaced, not the link
    with _locked(path):
        read_directory(path)
        text = path.read_text(encoding="utf-8")
        # Written beside and moved: a server that looks meanwhile sees the old file or the new one.
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        opened = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(opened, "w", encoding="utf-8") as file:
                file.write(f"{text.rstrip()}\n\n{entry}" if text.strip() else entry)
            read_directory(beside)
            was = path.stat()  # the server that reads it may be another user's
            os.chown(beside, was.st_uid, was.st_gid)
            beside.chmod(stat.S_IMODE(was.st_mode))
            beside.replace(path)
        except BaseException:
            beside.unlink()
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Has others who add to a file wait. One that is not there is made, empty, and goes again if nothing comes of it.

    The file is its own lock: whoever may not read it cannot keep anybody waiting, and no other file is left lying about.
    """
    while True:
        descriptor, is_new = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is(path, descriptor):  # somebody had it before, and has moved another one to its place
                continue
            try:
                yield
            except BaseException:
                if is_new and _is(path, descriptor):
                    path.unlink()
                raise
            return
        finally:
            os.close(descriptor)


def _open(path: Path) -> tuple[int, bool]:
    """Opens a file to be locked; returns its descriptor, and whether it was made for that."""
    with contextlib.suppress(FileExistsError):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), True
    try:
        return os.open(path, os.O_RDWR), False  # over NFS, who may only read has no lock to himself
    except PermissionError:
        return os.open(path, os.O_RDONLY), False


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
