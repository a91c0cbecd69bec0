"""The preflight passes between two hosts over a slow cable that loses packets.

The hosts are network namespaces of one machine. The cable is a thread that passes Ethernet frames between two TAP
devices, one in each namespace, because many kernels come without their network emulator.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.full

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_FRAME = 65536
_ADDRESSES = ("10.213.0.1", "10.213.0.2")


class Cable(NamedTuple):
    """What becomes of each frame."""

    delay: float  # seconds
    loss: float  # probability


def missing_right() -> str | None:
    """Return why two hosts cannot be made here, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a Linux feature"
    if os.geteuid() != 0:
        return "making a network namespace needs root"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    try:
        with _namespaces():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"a network namespace could not be made: {error}"


class Outcome(NamedTuple):
    """What the processes on the two hosts did, and how many frames the cable has passed and lost."""

    processes: list[subprocess.CompletedProcess[str]]
    passed: int
    lost: int


def run_on_two_hosts(arguments: Sequence[str], cable: Cable, timeout: float) -> Outcome:
    """Run ``python ARGUMENTS`` in one process on each of two hosts, with the variables that torchrun sets."""
    frames = {"passed": 0, "lost": 0}
    with _namespaces() as names, _joined(names, cable, frames):
        processes = [_start(name, rank, arguments) for rank, name in enumerate(names)]
        try:
            outputs = [process.communicate(timeout=timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
    done = [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs)
    ]
    return Outcome(done, **frames)


def _start(name: str, rank: int, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
    command += [sys.executable, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "tap"}
    environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    # The port is free: nothing else lives in these namespaces.
    environment |= {"MASTER_ADDR": _ADDRESSES[0], "MASTER_PORT": "29500"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    names = (f"host0-{os.getpid()}", f"host1-{os.getpid()}")
    made: list[str] = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        yield names
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)


@contextlib.contextmanager
def _joined(names: Sequence[str], cable: Cable, frames: dict[str, int]) -> Iterator[None]:
    """Give each namespace a TAP device, and pass frames between the two while the block runs."""
    ends = [_open_tap(name) for name in names]
    stop = threading.Event()
    relay = threading.Thread(target=_relay, args=(ends, cable, frames, stop), daemon=True)
    try:
        for name, address in zip(names, _ADDRESSES):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "tap")
            for device in ("lo", "tap"):
                _run("ip", "-n", name, "link", "set", device, "up")
        relay.start()
        yield
    finally:
        stop.set()
        if relay.is_alive():
            relay.join()
        for end in ends:
            os.close(end)


def _open_tap(name: str) -> int:
    """Return a new TAP device in the namespace; a thread of its own enters it and dies there."""
    opened: list[int] = []

    def enter() -> None:
        with open(f"/var/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", b"tap", _IFF_TAP | _IFF_NO_PI))
        opened.append(end)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if not opened:
        raise OSError(f"no TAP device in {name}")
    return opened[0]


def _relay(ends: Sequence[int], cable: Cable, frames: dict[str, int], stop: threading.Event) -> None:
    """Pass each frame to the other end after the delay, or never."""
    chance = random.Random(0)
    waiting: list[tuple[float, int, int, bytes]] = []
    order = 0
    while not stop.is_set():
        pause = min(0.1, max(0.0, waiting[0][0] - time.monotonic())) if waiting else 0.1
        for end in select.select(ends, [], [], pause)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(end, _FRAME)
                    fate = "lost" if chance.random() < cable.loss else "passed"
                    frames[fate] += 1
                    if fate == "passed":
                        other = ends[1 - ends.index(end)]
                        heapq.heappush(waiting, (time.monotonic() + cable.delay, order, other, frame))
                        order += 1
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, other, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a full device loses the frame, as a switch does
                os.write(other, frame)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def test_preflight_between_two_hosts() -> None:
    reason = missing_right()
    if reason is not None:
        pytest.skip(reason)
    outcome = run_on_two_hosts(["-m", "fullrank", "--device", "cpu"], Cable(delay=0.002, loss=0.01), timeout=240)
    for process in outcome.processes:
        assert process.returncode == 0, process.stdout + process.stderr
    report = outcome.processes[0].stdout
    assert "24 checks: 24 passed." in report, report
    assert report.split(" hosts ")[1].split()[0] == "2"
    # The cable was there, and it was bad.
    assert outcome.passed > 1000
    assert outcome.lost > 0
