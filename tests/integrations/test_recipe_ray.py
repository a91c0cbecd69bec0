"""docs/recipes/ray.md: the loop of ddp.md trains in a TorchTrainer, and on two nodes, as under torchrun."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from pages import PAGES, block_with, blocks
from scripts import run_script

pytestmark = pytest.mark.full

(SCRIPT,) = blocks("recipes/ray.md")
SHORT = block_with("recipes/ddp.md", "# short.py")
# A small store and two processors; nothing leaves the machine.
LOCAL = (
    "ray.init(address='local', num_cpus=2, num_gpus=0, object_store_memory=80 * 2**20, include_dashboard=False, "
    "_node_ip_address='127.0.0.1', log_to_driver=False)\n"
)


def loop(script: str) -> str:
    found = re.search(r"^( *)for step in range\(60\):\n(?:\1 .*\n)+", script, re.MULTILINE)
    assert found is not None
    return dedent(found[0])


def loss_of(script: str, folder: Path, processes: int) -> float:
    path = folder / "short.py"
    path.write_text(script.replace("{loss.item():.4f}", "{loss.item()!r}"), encoding="utf-8")
    done = run_script(path, cwd=folder, processes=processes)
    assert done.returncode == 0, done.stderr
    return float(re.match(r"loss ([\d.]+),", done.stdout)[1])  # type: ignore[index]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: the extra `ray`")
def test_the_loop_of_the_script_in_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control compares the rows of each process alone."""
    assert loop(SCRIPT) == loop(SHORT)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("trainer = ", LOCAL + "trainer = "), encoding="utf-8")
    command = [sys.executable, str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = float(done.stdout.splitlines()[-1])
    assert found == pytest.approx(loss_of(SHORT, tmp_path, 2), rel=2e-6)  # float32
    alone = SHORT.replace("SmoothAPLoss(", "SmoothAPLoss(gather_distributed=False, ")
    assert found != pytest.approx(loss_of(alone, tmp_path, 2), rel=1e-3)


def test_the_loop_of_the_script_on_two_nodes(tmp_path: Path) -> None:
    """Two agents of torchrun on this machine, with one process each."""
    (line,) = re.findall(r"^torchrun .*", PAGES["recipes/ray.md"], re.MULTILINE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = line.replace("node0:29500", f"127.0.0.1:{port}").replace("--nproc-per-node 8", "--nproc-per-node 1")
    assert here != line
    (tmp_path / "train.py").write_text(SHORT.replace("{loss.item():.4f}", "{loss.item()!r}"), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *shlex.split(here)[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = [subprocess.Popen(command, **options) for _ in range(2)]  # type: ignore[call-overload]
    outputs = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    (printed,) = [out for out, _ in outputs if out]  # the first of all processes prints
    found = float(re.match(r"loss ([\d.]+),", printed)[1])  # type: ignore[index]
    assert found == pytest.approx(loss_of(SHORT, tmp_path, 2), rel=2e-6)
    assert found != pytest.approx(loss_of(SHORT, tmp_path, 1), rel=1e-3)  # the control: one process
