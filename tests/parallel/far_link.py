"""A link between two network namespaces whose packets take a while: two TUN devices, and a thread for each direction.

The kernel's own `netem` does the same, where it is compiled in.
"""

import fcntl
import os
import queue
import struct
import subprocess
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

SET_DEVICE, TUN, NO_HEADER = 0x400454CA, 0x0001, 0x1000
"""Of <linux/if_tun.h>: the call that makes a device, and its flags."""

PACKET = 65536
"""The most bytes of a packet."""


@contextmanager
def far_link(names: list[str], addresses: list[str], delay: float) -> Generator[None]:
    """Make two network namespaces with a link between them, the device `far` in each.

    Args:
        delay: seconds each way.

    Raises:
        OSError: this process may not make devices or namespaces; the message says which.
    """
    ends: list[int] = []
    try:
        for end, name in enumerate(names):
            ends.append(_device(device := f"far-{os.getpid() % 10000}-{end}"))
            _ip("netns", "add", name)
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "link", "set", device, "name", "far")
            _ip("-n", name, "addr", "add", addresses[end], "peer", addresses[1 - end], "dev", "far")
            for each in ("lo", "far"):
                _ip("-n", name, "link", "set", each, "up")
        for one, other in (ends, ends[::-1]):
            packets: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            for target, fd in ((_read, one), (_write, other)):
                threading.Thread(target=target, args=(fd, packets, delay), daemon=True).start()
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        for fd in ends:
            os.close(fd)


def _device(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, SET_DEVICE, struct.pack("16sH", name.encode(), TUN | NO_HEADER))
    return fd


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _read(fd: int, packets: "queue.SimpleQueue[tuple[float, bytes]]", delay: float) -> None:
    try:
        while True:
            packets.put((time.monotonic() + delay, os.read(fd, PACKET)))
    except OSError:  # the link is gone
        packets.put((0.0, b""))


def _write(fd: int, packets: "queue.SimpleQueue[tuple[float, bytes]]", delay: float) -> None:
    while True:
        due, packet = packets.get()
        if not packet:
            return
        time.sleep(max(due - time.monotonic(), 0.0))
        try:
            os.write(fd, packet)
        except OSError:
            return
