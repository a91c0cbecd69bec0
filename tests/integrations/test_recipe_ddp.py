"""docs/recipes/ddp.md and ray.md: the scripts train as one process does, resume, and print what the page says."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from integration_cases import alone, average_precision, change, dealt, flat, make_encoder, of_rows, within_group
from integration_cases import train as train_alone
from on_ranks import on_ranks
from pages import PAGES, assert_printed, block_with, blocks, output_of, printing_blocks, run_block
from scripts import run_script
from torch import Tensor, nn
from torch.utils.data import TensorDataset

pytestmark = pytest.mark.slow

_, DEFINITIONS, BALANCED, MAIN, BEST = blocks("recipes/ddp.md")
LIMIT = 1e-6  # of what the training has changed; in float64, since Adam blows up the rounding of small gradients
SIZE = 16


def make_network() -> nn.Module:
    return make_encoder(num_inputs=8).double()


def make_rows(number: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(number, 8, generator=generator, dtype=torch.float64)
    return features, (features[:, :1] + 0.5 * torch.randn(number, 1, generator=generator) > 1).long()


def queued(names: dict[str, Any]) -> nn.Module:
    ap = names["SmoothAPLoss"](num_classes=1, queue_size=64)
    return names["CombinedLoss"]({"ce": names["BCEWithLogitsLoss"](), "ap": ap})


@pytest.mark.parametrize("is_control", [False, pytest.param(True, marks=pytest.mark.full)])
@on_ranks(2)
def test_it_trains_validates_and_resumes_as_one_process(rank: int, tmp_path: Path, is_control: bool) -> None:
    """Not without the state of the loss. The control trains with other batches."""
    epoch = "sampler.set_epoch(epoch + 1)" if is_control else "sampler.set_epoch(epoch)"
    names = run_block(DEFINITIONS.replace("sampler.set_epoch(epoch)", epoch), {})
    train, val = make_rows(96, 0), make_rows(75, 1)

    def job(place: str, epochs: int, forgets: bool = False) -> tuple[nn.Module, list[float]]:
        (tmp_path / place).mkdir(exist_ok=True)
        network, loss_fn, sets = make_network(), queued(names), (TensorDataset(*train), TensorDataset(*val))
        if forgets:
            loss_fn.load_state_dict = lambda *args: None
        history = names["fit"](network, loss_fn, *sets, tmp_path / place, epochs=epochs, batch_size=SIZE)
        torch.distributed.barrier()  # the files are there
        return network, history

    (network, history), reference = job("through", 2), make_network()
    epochs = [dealt(96, SIZE, epoch) for epoch in range(2)]
    adam = partial(torch.optim.AdamW, lr=1e-2)
    expected, *_ = train_alone(reference, of_rows(alone(queued(names)), reference, *train), epochs, make_optimizer=adam)
    wrong = change(network, flat(make_network()), expected)
    assert wrong > 1e-3 if is_control else wrong <= LIMIT
    assert history[0] < history[1]  # the first epoch improves the metric
    assert is_control or history[-1] == pytest.approx(average_precision(reference, *val), rel=LIMIT)
    assert {path.name for path in (tmp_path / "through").iterdir()} == {"last.pt", "best.pt"}
    for forgets in (False, True):
        job(f"killed {forgets}", 1)
        again, continued = job(f"killed {forgets}", 2, forgets)
        assert torch.equal(flat(network), flat(again)) != forgets
        assert forgets or history == continued


@pytest.mark.full
@on_ranks(2)
def test_the_script_prints_what_the_page_says(rank: int, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    out = output_of(within_group(DEFINITIONS + MAIN + BEST, str(tmp_path)), names)
    if rank == 0:
        assert_printed(out, next(text for _, text in printing_blocks("recipes/ddp.md") if text))
    else:
        assert out == ""
    best, history = average_precision(names["network"], *names["make_rows"](8000, seed=1).tensors), names["history"]
    assert history[0] < history[1]
    assert best == pytest.approx(max(history), rel=LIMIT)


@on_ranks(2)
def test_the_two_lines_for_balanced_batches(rank: int, tmp_path: Path) -> None:
    """Every batch has as many positives; the targets are floats (N,)."""
    imported, *lines = BALANCED.replace("positives=8", "positives=5").strip().splitlines()
    swapped = re.sub(
        r"    sampler = .*\n    loader = .*\n", "".join(f"    {line}\n" for line in lines if line), DEFINITIONS
    )
    train, val = (TensorDataset(x, y[:, 0].double()) for x, y in (make_rows(96, 0), make_rows(75, 1)))
    names = run_block(f"{imported}\n{swapped}", {"all_targets": train.tensors[1]})
    loss_fn, counts = queued(names), set()
    loss_fn.register_forward_pre_hook(lambda module, args: counts.add(int(args[1].sum())))
    history = names["fit"](make_network(), loss_fn, train, val, tmp_path, epochs=2, batch_size=SIZE)
    assert counts == {5}
    assert history[0] < history[1]


# The loop of the short script, in a TorchTrainer of ray and on two nodes

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


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: the extra `ray`")
def test_the_loop_of_the_script_in_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control compares the rows of each process alone."""
    assert loop(SCRIPT) == loop(SHORT)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("trainer = ", LOCAL + "trainer = "), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = float(done.stdout.splitlines()[-1])
    assert found == pytest.approx(loss_of(SHORT, tmp_path, 2), rel=2e-6)  # float32
    alone = SHORT.replace("SmoothAPLoss(", "SmoothAPLoss(gather_distributed=False, ")
    assert found != pytest.approx(loss_of(alone, tmp_path, 2), rel=1e-3)


@pytest.mark.full
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
