"""Faults in tiers outside of the core, in codecs, and in memory of host and devices."""

from __future__ import annotations

from harness.planting import Fault

__all__ = ["STORAGE_FAULTS"]

_COPIES = "cuda/device/copies.py"
_EXPORTS = "cuda/device/exports.py"
_REGION = "cuda/host/region.py"
_LMDB = "tiers/lmdb/tier.py"
_DISK = "tiers/disk/store.py"
_FRAMES = "protos/wire/socket_frames.py"

STORAGE_FAULTS = (
    Fault("events of a driver are not destroyed", _COPIES, "        self._driver.destroy_event(event)\n", ""),
    Fault(
        "memory of an engine is closed during copies",
        _COPIES,
        "            self._idle.wait_for(lambda: not self._running)\n",
        "",
    ),
    Fault(
        "an error leaves a batch in flight",
        _COPIES,
        "                for event in in_flight:\n",
        "                for event in in_flight[:1]:\n",
    ),
    Fault(
        "blocks outside of their allocation are accepted",
        _EXPORTS,
        "                    or run.end(layout.num_blocks) > self.allocations[run.buffer].nbytes\n",
        "",
    ),
    Fault(
        "an allocation is closed with its first user",
        "cuda/device/handles.py",
        "            if users > 1:\n",
        "            if users > 2:\n",
    ),
    Fault(
        "the last memory of the host is allocated",
        _REGION,
        "if available is not None and length + _KEEP_FREE_BYTES > available:",
        "if available is not None and length > available:",
    ),
    Fault(
        "the descriptor of an invalid region stays open",
        "cuda/host/shared_memory.py",
        "        address = _map_aligned(size_bytes, ranges)\n    except BaseException:\n        close_all(fds)\n",
        "        address = _map_aligned(size_bytes, ranges)\n    except BaseException:\n",
    ),
    Fault(
        "the rest of a partly sent piece is sent from its start",
        "cuda/host/socket_io.py",
        "            if sent:\n                left[0] = left[0][sent:]\n",
        "",
    ),
    Fault(
        "each piece has the whole deadline",
        "cuda/host/socket_io.py",
        "if not 0.9 * limit < left <= limit:",
        "if left > limit or limit == math.inf:",
    ),
    Fault(
        "a call has the deadline of an earlier one",
        "cuda/host/socket_io.py",
        "if not 0.9 * limit < left <= limit:",
        "if not 0.9 * limit < left:",
    ),
    Fault(
        "a transfer crosses a pinned chunk",
        "cuda/host/pinning.py",
        "stop = min(end, (offset // PIN_CHUNK_BYTES + 1) * PIN_CHUNK_BYTES)",
        "stop = min(end, offset + PIN_CHUNK_BYTES)",
    ),
    Fault(
        "an error of the copying helper is lost",
        "cuda/host/copy.py",
        "        if job.error is not None:\n            raise job.error\n        return True",
        "        return True",
    ),
    Fault(
        "a full LMDB tier cannot remove blocks",
        _LMDB,
        "            self._keep_reserve(txn)\n",
        "",
    ),
    Fault(
        "a corrupt block stays in LMDB",
        _LMDB,
        "return Outcome.CORRUPT if self._remove([name]) else Outcome.FAILED",
        "return Outcome.CORRUPT",
    ),
    Fault(
        "replaced blocks keep their chunks",
        "tiers/lmdb/blocks.py",
        "            delete_block(store, txn, name, cursor)\n            txn.put(",
        "            txn.put(",
    ),
    Fault(
        "a failed write keeps its pages",
        _DISK,
        "            if isinstance(error, (OSError, lmdb.MapFullError)):\n",
        "            if False:\n",
    ),
    Fault(
        "blocks beside an unreadable one fail with it",
        "tiers/disk/slabs.py",
        "                again |= numbers\n",
        "                pass\n",
    ),
    Fault(
        "a short read counts as a whole one",
        "tiers/disk/slab_file.py",
        "            if done == nbytes:\n",
        "            if done:\n",
    ),
    Fault(
        "an unreadable block ends the load of the others",
        _LMDB,
        "                outcomes[names[at][0]] = Outcome.FAILED\n                at += 1\n",
        "                outcomes[names[at][0]] = Outcome.FAILED\n                at = len(names)\n",
    ),
    Fault("a replaced block keeps its pages", _DISK, "        self._free(space, replaced)\n", ""),
    Fault(
        "a block is in the index before it is on the disk",
        _DISK,
        "            if self._power:\n                self.slabs.sync()\n",
        "",
    ),
    Fault(
        "a drop removes a block that was replaced meanwhile",
        _DISK,
        "        if self.index.get([name]) != [packed]:\n            return False\n",
        "",
    ),
    Fault(
        "pages of corrupt blocks are reused",
        _DISK,
        "        if quarantine:\n",
        "        if False:\n",
    ),
    Fault(
        "a checksum does not cover the sizes of parts",
        "tiers/storage/checksum.py",
        '        state.update(len(part).to_bytes(8, "little"))\n',
        "",
    ),
    Fault(
        "MQ forgets the uses of evicted blocks",
        "tiers/eviction/mq.py",
        "        self._ghosts[item.name] = (state.uses, state.last)\n        self._ghosts.move_to_end(item.name)\n",
        "",
    ),
    Fault(
        "the eviction history is twice as long",
        "tiers/stats/tenant_records.py",
        "while self._count > self._most:",
        "while self._count > 2 * self._most:",
    ),
    Fault("a damaged head of a frame is accepted", _FRAMES, "if xxhash.xxh32_intdigest(fields) != check or ", "if "),
    Fault(
        "the default socket may be longer than the kernel allows",
        "protos/endpoint.py",
        'if not runtime.startswith("/") or len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:',
        'if not runtime.startswith("/"):',
    ),
)
