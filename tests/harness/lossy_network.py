"""Two network namespaces with a slow or lossy link, whose tunnel packets this process relays.

This works on kernels without `tc netem`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

__all__ = ["LossyNetwork", "unavailable_reason"]

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_MTU = 9000
_QUEUE_PACKETS = 1000
"""Length of the queue of each direction, as in a router."""


def unavailable_reason() -> str | None:
    """Why no such link can be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    if not shutil.which("ip") or not Path("/dev/net/tun").exists():
        return "there is no ip, or no /dev/net/tun"
    probe = f"kvtp{os.getpid() % 100_000}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=60, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


class LossyNetwork:
    """A link with `delay` seconds each way and a fraction `loss` of lost packets.

    `spaces` are the two hosts, at `addresses`.
    """

    def __init__(self, subnet: str) -> None:
        """Makes both hosts. `subnet` is the first three numbers of their addresses."""
        self.delay = 0.0
        self.loss = 0.0
        self._down_until = 0.0
        self._random = random.Random(7)
        self._closing = threading.Event()
        number = os.getpid() % 100_000
        self.spaces = (f"kvts{number}", f"kvtc{number}")
        self.addresses = (f"{subnet}.1", f"{subnet}.2")
        self._ends = [
            self._make_host(space, f"kt{side}{number}", address)
            for side, (space, address) in enumerate(zip(self.spaces, self.addresses, strict=True))
        ]
        self._thread = threading.Thread(target=self._relay, name="far-link", daemon=True)
        self._thread.start()

    def down(self, seconds: float) -> None:
        """Loses every packet for this time."""
        self._down_until = time.monotonic() + seconds

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for end, space in zip(self._ends, self.spaces, strict=True):
            os.close(end)
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", space)

    @staticmethod
    def _make_host(space: str, device: str, address: str) -> int:
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN_NO_PI))
        _ip("netns", "add", space)
        _ip("link", "set", device, "netns", space)
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
        _ip("-n", space, "link", "set", device, "mtu", str(_MTU), "up")
        _ip("-n", space, "link", "set", "lo", "up")
        return end

    def _relay(self) -> None:
        waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
        while not self._closing.is_set():
            now = time.monotonic()
            heads = [queue[0][0] for queue in waiting if queue]
            readable, _, _ = select.select(self._ends, [], [], max(0.0, min([0.1, *(due - now for due in heads)])))
            for side, end in enumerate(self._ends):
                if end in readable:
                    self._receive_packets(end, waiting[side])
            now = time.monotonic()
            for side, queue in enumerate(waiting):
                while queue and queue[0][0] <= now:
                    with contextlib.suppress(OSError):
                        os.write(self._ends[1 - side], queue.popleft()[1])

    def _receive_packets(self, end: int, queue: deque[tuple[float, bytes]]) -> None:
        for _ in range(64):
            try:
                packet = os.read(end, 65536)
            except OSError:  # no packet is available
                return
            now = time.monotonic()
            lost = now < self._down_until or self._random.random() < self.loss
            if not lost and len(queue) < _QUEUE_PACKETS:
                queue.append((now + self.delay, packet))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)
