"""A process that forks while objects of the client are in use; see `test_fork.py`.

Its arguments are endpoint, transport, and a CA and a token if the server needs them. Prints a line
of JSON: for each scenario a list of what went wrong.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
from harness.payloads import filled, is_payload, key_of, namespace_of, payload
from harness.polling import wait_until

from kvtier.client import AsyncClient, Client, ConversationClient, Credentials, ForkedClient, KVTierError, Timeouts
from kvtier.client.events.stream import EventStream
from kvtier.client.session import fork_guard

PART = 2048
BATCH = 4
_CHILD_SECONDS = 60
_ID = os.getpid()
"""Of the parent, for keys that no other run of the script uses."""
_WAIT_SECONDS = 30.0
_LOOP_FORKS = 3
_ATTEMPTS = 4


def main(endpoint: str, transport: Any, *access: str) -> None:
    credentials = Credentials(ca=access[0], token=access[1]) if access else Credentials()
    options = {
        "namespace": namespace_of(PART),
        "credentials": credentials,
        "timeouts": Timeouts(connect=60.0, call=60.0, transfer=60.0),
        "transport": transport,
    }
    found = {each.__name__: each(endpoint, options) for each in _SCENARIOS}
    print(json.dumps(found), flush=True)


def with_blocks(endpoint: str, options: Any) -> list[str]:
    """A fork in the `with` blocks of a lease, a read and a write. The child leaves them."""
    wrong = []
    with Client(endpoint, **options) as client:
        for leaves in (True, False):
            keys, new = _keys(f"read {leaves}"), _keys(f"write {leaves}")
            client.store(keys, _payloads(keys))
            session = client._transport.session
            with client.lookup(keys) as lease:
                pid, seen = -1, list[str]()
                try:
                    with client.read(lease, range(BATCH)) as reading:
                        try:
                            with client.write(new) as writing:
                                for view, key in zip(writing.views(), new, strict=True):
                                    view[:] = payload(key, PART)
                                pid = os.fork()
                                if pid == 0:
                                    signal.alarm(_CHILD_SECONDS)
                                    if not leaves:
                                        sys.exit(7)  # unwinds all blocks
                        except ForkedClient:
                            seen.append("write")
                        read = [np.array(view) for view in reading.views()]
                except ForkedClient:
                    seen.append("read")
            if pid == 0:
                gc.collect()
                sys.exit(5 if seen == ["write", "read"] else 6)
            wrong += _ending_of(pid, 5 if leaves else 7)
            wrong += [] if all(is_payload(*each) for each in zip(keys, read, strict=True)) else ["wrong bytes"]
            wrong += ["the session has ended"] if client._transport.session is not session else []
            wrong += _check(client, keys) + _check(client, new)
    return wrong


def held_locks(endpoint: str, options: Any) -> list[str]:
    """A fork while other threads hold every lock of every object."""
    with (
        Client(endpoint, **options) as client,
        ConversationClient(endpoint, credentials=options["credentials"]) as agent,
    ):
        keys = _keys("locks")
        client.store(keys, _payloads(keys))
        blocks = filled(BATCH, PART)
        with client.lookup(keys) as lease, client.read(lease, [0]), _all_locks_held():
            calls: list[Callable[[], object]] = [
                lambda: client.lookup(keys),
                lambda: client.store(keys, _payloads(keys)),
                lambda: client.load(keys, blocks),
                lambda: client.touch(lease.id),
                lambda: client.store([], []),
                client.status,
                client.wait_until_connected,
                agent.list,
            ]
            return _in_child(lambda: [*_all_refused(calls), *_closed(client, agent, lease)])


def kept_lease(endpoint: str, options: Any) -> list[str]:
    """Children end in all ways: the parent keeps its session, its lease and a running call."""
    wrong = []
    with Client(endpoint, **options) as client, Client(endpoint, **options) as writer:
        keys, late = _keys("kept"), _keys("late")
        client.store(keys, _payloads(keys))
        lease, session = client.lookup(keys), client._transport.session
        answers: list[Any] = []
        with writer.write(late) as writing:
            waiting = threading.Thread(target=lambda: answers.append(client.lookup(late, wait=_WAIT_SECONDS)))
            waiting.start()
            for ending in (os._exit, sys.exit, _exit_with_handlers(client, lease)):
                if (pid := os.fork()) == 0:
                    signal.alarm(_CHILD_SECONDS)
                    lease.release()
                    client.close()
                    ending(3)
                wrong += _ending_of(pid, 3)
            for view, key in zip(writing.views(), late, strict=True):
                view[:] = payload(key, PART)
        waiting.join()
        wrong += ["the waiting lookup failed"] if not answers or answers[0].prefix_hits != BATCH else []
        wrong += ["the lease has ended"] if client.touch(lease.id) else []
        wrong += ["the session has ended"] if client._transport.session is not session else []
        wrong += _check(client, late)
    return wrong


def own_clients(endpoint: str, options: Any) -> list[str]:
    """A child opens its own client, and its child cannot use either."""
    with Client(endpoint, **options) as client:
        client.store(_keys("own"), _payloads(_keys("own")))

        def child() -> list[str]:
            with Client(endpoint, **options) as own:
                keys = _keys("of the child")
                own.store(keys, _payloads(keys))
                wrong = _check(own, keys) + _check(own, _keys("own"))
                wrong += _in_child(lambda: _all_refused([lambda: own.lookup(keys), lambda: client.lookup(keys)]))
                return wrong + _check(own, keys)

        return _in_child(child) + _check(client, _keys("of the child"))


def started_processes(endpoint: str, options: Any) -> list[str]:
    """Programs inherit no descriptor. Workers of a pool get the error."""
    with Client(endpoint, **options) as client:
        keys = _keys("processes")
        client.store(keys, _payloads(keys))
        wrong = []
        listing = ["ls", "-l", "/proc/self/fd"]
        # Any `preexec_fn` makes Python fork and run the handlers, instead of vfork.
        for more in ({}, {"preexec_fn": int}):
            done = subprocess.run(listing, close_fds=False, capture_output=True, text=True, check=True, **more)  # type: ignore[call-overload]
            wrong += [f"inherited: {done.stdout}"] if "socket:" in done.stdout or "memfd:" in done.stdout else []
            wrong += _check(client, keys)
        _inherited.append(client)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            for outcome in pool.map(_lookup_inherited, range(4)):
                wrong += [] if outcome == "ForkedClient" else [f"in a pool: {outcome}"]
            try:
                pool.apply(_raise_inherited)
                wrong.append("the pool passed no error")
            except ForkedClient:
                pass
        return wrong + _check(client, keys)


def in_loop(endpoint: str, options: Any) -> list[str]:
    """A fork on an event loop while other tasks are in calls."""

    def leave(client: AsyncClient, keys: list[bytes]) -> None:
        refused = asyncio.run(_async_refused(client, keys))
        os._exit(4 if refused else 9)  # as children of `multiprocessing` do

    return asyncio.run(_fork_beside_calls(endpoint, options, _now, leave))


def beside_loop(endpoint: str, options: Any) -> list[str]:
    """A fork while the event loop runs on another thread. The child exits normally."""

    def leave(client: AsyncClient, keys: list[bytes]) -> None:
        sys.exit(4 if asyncio.run(_async_refused(client, keys)) else 9)

    with ThreadPoolExecutor(1) as thread:
        forks: SimpleQueue[Any] = SimpleQueue()

        def on_main_thread(fork: Callable[[], list[str]]) -> Any:
            forks.put((fork, asyncio.get_running_loop(), done := asyncio.get_running_loop().create_future()))
            return done

        running = thread.submit(lambda: asyncio.run(_fork_beside_calls(endpoint, options, on_main_thread, leave)))
        for _ in range(_LOOP_FORKS):
            fork, loop, done = forks.get()
            loop.call_soon_threadsafe(done.set_result, fork())
        return running.result()


async def _now(fork: Callable[[], list[str]]) -> list[str]:
    return fork()


async def _async_refused(client: AsyncClient, keys: list[bytes]) -> bool:
    try:
        await client.lookup(keys)
    except ForkedClient:
        await client.close()
        gc.collect()
        return True
    return False


async def _fork_beside_calls(
    endpoint: str, options: Any, run: Callable[..., Any], leave: Callable[..., None]
) -> list[str]:
    wrong = []
    async with AsyncClient(endpoint, **options) as client, AsyncClient(endpoint, **options) as writer:

        def fork() -> list[str]:
            if (pid := os.fork()) == 0:
                signal.alarm(_CHILD_SECONDS)
                leave(client, keys)
            return _ending_of(pid, 4)

        for number in range(_LOOP_FORKS):
            keys = _keys(f"loop {number} {run}")
            async with writer.write(keys) as writing:
                lookups = [asyncio.create_task(client.lookup(keys, wait=_WAIT_SECONDS)) for _ in range(3)]
                await asyncio.sleep(0.2)
                wrong += await run(fork)
                for view, key in zip(writing.views(), keys, strict=True):
                    view[:] = payload(key, PART)
            for lookup in lookups:
                found = await asyncio.wait_for(lookup, 2 * _WAIT_SECONDS)
                wrong += [] if found.prefix_hits == BATCH else [f"a lookup found {found.prefix_hits}"]
    return wrong


def event_stream(endpoint: str, options: Any) -> list[str]:
    """The parent's events continue.

    The first fork waits for the stream: beside a thread that opens a connection, gRPC's fork
    handlers ended one of 600 parents with SIGSEGV.
    """
    with Client(endpoint, **options) as client:
        client.wait_until_connected(60)
        changes: list[Any] = []
        stream = EventStream(
            client, changes.extend, lambda _: None, endpoint=endpoint, credentials=options["credentials"]
        )
        wrong = []
        for number in range(4):
            keys = _keys(f"events {number}")
            wrong += _in_child(lambda: _closed(stream, client)) if number else []
            client.store(keys, _payloads(keys))
            wait_until(lambda keys=keys: any(keys[0] in change.keys for change in changes))  # type: ignore[misc]
        stream.close()
        return wrong


def copies(endpoint: str, options: Any) -> list[str]:
    """Pickling or copying an object says why it cannot be done."""
    wrong = []
    with (
        Client(endpoint, **options) as client,
        ConversationClient(endpoint, credentials=options["credentials"]) as agent,
    ):
        lease = client.lookup(_keys("copies"))

        async def in_loop() -> AsyncClient:
            async with AsyncClient(endpoint, **options) as other:
                return other

        stream = EventStream(
            client, lambda _: None, lambda _: None, endpoint=endpoint, credentials=options["credentials"]
        )
        stream.close()
        for value in (client, agent, asyncio.run(in_loop()), stream, lease, client._operations._staging):
            for copying in (pickle.dumps, copy.copy, copy.deepcopy):
                try:
                    copying(value)
                except TypeError as error:
                    wrong += [] if "construct one in each process" in str(error) else [f"{type(value)}: {error}"]
                else:
                    if (value, copying) != (lease, copy.copy):  # it uses the same client
                        wrong.append(f"{copying.__name__} of {type(value).__name__}")
    return wrong


_SCENARIOS = (
    copies,
    with_blocks,
    held_locks,
    kept_lease,
    own_clients,
    started_processes,
    event_stream,
    in_loop,
    beside_loop,
)
_inherited: list[Client] = []


def _lookup_inherited(number: int) -> str:
    try:
        _inherited[0].lookup(_keys(f"{number}"))
    except KVTierError as error:
        return type(error).__name__
    return "no error"


def _raise_inherited() -> None:
    _inherited[0].lookup(_keys("none"))


def _keys(salt: str) -> list[bytes]:
    return [key_of(number, salt=f"{salt} {_ID}") for number in range(BATCH)]


def _payloads(keys: list[bytes]) -> list[Any]:
    return [payload(key, PART) for key in keys]


def _check(client: Client, keys: list[bytes]) -> list[str]:
    blocks = filled(BATCH, PART)
    hits = client.load(keys, blocks)
    right = all(is_payload(key, block) for key, block in zip(keys, blocks, strict=True))
    return [] if hits == BATCH and right else [f"{hits} hits, right bytes: {right}"]


def _all_refused(calls: list[Callable[[], object]]) -> list[str]:
    wrong = []
    for number, call in enumerate(calls):
        try:
            call()
        except ForkedClient:
            continue
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            wrong.append(f"call {number} raised {error!r}")
        else:
            wrong.append(f"call {number} raised nothing")
    return wrong


def _closed(*opened: Any) -> list[str]:
    for each in opened:
        (getattr(each, "close", None) or each.release)()
    gc.collect()
    return []


def _exit_with_handlers(client: Client, lease: Any) -> Callable[[int], Any]:
    def leave(code: int) -> None:
        atexit.register(client.close)
        atexit.register(lease.release)
        sys.exit(code)

    return leave


def _in_child(run: Callable[[], list[str]]) -> list[str]:
    """Runs a function in a forked child, which then exits normally; returns its result."""
    for _ in range(_ATTEMPTS):
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            signal.alarm(_CHILD_SECONDS)
            try:
                result = run()
            except SystemExit:  # of a child of this child
                raise
            except BaseException as error:  # noqa: BLE001 - reported to the parent
                result = [f"raised {error!r}"]
            os.write(writer, json.dumps(result).encode())
            sys.exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            output = file.read()
        wrong = _ending_of(pid, 0)
        if output:
            return [*json.loads(output), *wrong]
    return [f"{_ATTEMPTS} children have ended without a result"]


def _ending_of(pid: int, expected: int) -> list[str]:
    """Waits for the end of a child; returns a text for a wrong exit code.

    gRPC's own fork handlers start threads in the child, which aborted 7 of 200 children.
    """
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [] if code in (expected, -signal.SIGABRT, -signal.SIGSEGV) else [f"exit code {code} and not {expected}"]


@contextmanager
def _all_locks_held() -> Iterator[None]:
    """Another thread holds all locks of the guarded objects. The block forks at once."""
    locks = [
        value
        for each in list(fork_guard._guarded)
        for value in vars(each).values()
        if hasattr(value, "acquire") and hasattr(value, "_at_fork_reinit")
    ]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        held.set()
        done.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *sys.argv[3:])
