"""Changed files of a disk tier: the server opens, checks and loads, and serves no wrong byte."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from kvtier.server.config.schema import TierConfig
from kvtier.server.tier_host.factory import open_tier
from kvtier.server.tier_host.offline_fsck import check_offline
from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, Outcome, TierError

from .tape import Tape, byte

__all__ = ["Disks", "seeds"]

_TYPES = ("lmdb", "disk")
_SIZE = 4 << 20
_BLOCKS = 24
_SECONDS = 30
_SPACE = NamespaceId(bytes(32))


def _content(number: int) -> bytes:
    return random.Random(number).randbytes(3000 + 700 * number)


def _name(number: int) -> bytes:
    return b"block-%04d" % number + bytes(4)


class Disks:
    """The target: an input chooses the bytes to change in a file.

    Each input runs in a child process, so there is no coverage feedback.
    """

    def __init__(self, directory: Path) -> None:
        logging.disable()  # damage is logged thousands of times
        self._directory = directory
        self._configs = {
            kind: TierConfig(type=kind, name=kind, path=directory / "now" / kind, size=_SIZE) for kind in _TYPES
        }
        for kind, config in self._configs.items():
            self._in_child(lambda config=config: _fill(config))  # type: ignore[misc]
            shutil.copytree(config.path, directory / "sound" / kind)

    def run(self, data: bytes) -> None:
        """Changes the files and uses them.

        Raises RuntimeError if a child crashes, hangs or loads wrong bytes.
        """
        tape = Tape(data)
        config = self._configs[_TYPES[tape.byte() % len(_TYPES)]]
        shutil.rmtree(config.path)
        shutil.copytree(self._directory / "sound" / config.type, config.path)
        files = sorted(path for path in config.path.rglob("*") if path.is_file())
        for _ in range(8):
            if not tape:
                break
            _change(files[tape.byte() % len(files)], tape)
        self._in_child(lambda: _live(config))

    def settle(self) -> str:
        return "nothing kept"

    def close(self) -> None: ...

    @staticmethod
    def _in_child(work: object) -> None:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                signal.alarm(_SECONDS)
                work()  # type: ignore[operator]
                code = 0
            except BaseException:  # noqa: BLE001 - the parent says that it was bad
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        if status:
            raise RuntimeError(f"a server with this store ends with {os.waitstatus_to_exitcode(status)}")


def _fill(config: TierConfig) -> None:
    tier = open_tier(config)
    list(tier.entries())
    blocks = [BlockBytes(_SPACE, _name(n), (memoryview(_content(n)),)) for n in range(_BLOCKS)]
    assert set(tier.store(blocks)) == {Outcome.DONE}
    tier.close()


def _change(path: Path, tape: Tape) -> None:
    how, at = tape.byte(), tape.number() | tape.number() << 16
    size = path.stat().st_size
    with path.open("r+b") as file:
        if how < 8:
            file.truncate(at % (2 * size + 1))
        elif size:
            # headers and indexes are at the start of pages
            file.seek(at % size if how & 1 else at % size // 4096 * 4096 + tape.byte())
            file.write(tape.piece() or bytes([how]))


def _live(config: TierConfig) -> None:
    check_offline(config, repair=False)
    try:
        tier = open_tier(config)
    except TierError:
        return
    try:
        listed = {entry.key: entry.nbytes for entry in tier.entries()}
        for number in range(_BLOCKS):
            content = _content(number)
            block = BlockBytes(_SPACE, _name(number), (memoryview(bytearray(len(content))),))
            [outcome] = tier.load([block])
            if outcome is Outcome.DONE and bytes(block.parts[0]) != content:
                raise AssertionError(f"block {number}: other bytes than were stored")
        for name in list(listed)[:4]:
            tier.remove([(_SPACE, name)])
        tier.store([BlockBytes(_SPACE, _name(99), (memoryview(_content(1)),))])
    finally:
        tier.close()
    check_offline(config, repair=True)


def seeds() -> Iterator[bytes]:
    """Changes at the start, in the middle and at the end of each file."""
    for kind in range(len(_TYPES)):
        yield byte(kind)
        for file in range(4):
            for how, at in ((0, 5000), (8, 0), (8, 4096), (9, 3 << 16), (9, 17)):
                yield bytes([kind, file, how]) + at.to_bytes(4, "little") + byte(16) + b"\4\0\xff\xff\0\1"
