"""The preflight passes between two hosts: network namespaces of one machine, with a cable between them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.full


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[dict[str, str]]:
    hosts = {f"host{index}-{os.getpid()}": f"10.213.0.{1 + index}" for index in range(2)}
    made: list[str] = []
    try:
        for name in hosts:
            _run(f"ip netns add {name}")
            made.append(name)
        first, second = hosts
        _run(f"ip link add cable netns {first} type veth peer name cable netns {second}")
        for name, address in hosts.items():
            _run(f"ip -n {name} address add {address}/24 dev cable")
            for device in ("lo", "cable"):
                _run(f"ip -n {name} link set {device} up")
        yield hosts
    finally:
        for name in made:
            _run(f"ip netns delete {name}")


def start(name: str, rank: int, master: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
    environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    # The port is free: nothing else lives in these namespaces.
    environment |= {"MASTER_ADDR": master, "MASTER_PORT": "29500"}
    command += [sys.executable, "-m", "fullrank", "--device", "cpu"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_preflight_between_two_hosts() -> None:
    try:
        with two_hosts():
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"two network namespaces, which need root on Linux, could not be made: {error}")
    with two_hosts() as hosts:
        processes = [start(name, rank, min(hosts.values())) for rank, name in enumerate(hosts)]
        try:
            outputs = [process.communicate(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output
    report = outputs[0][0]
    assert re.search(r"\n(\d+) checks: \1 passed\.", report), report
    assert report.split(" hosts ")[1].split()[0] == "2"
