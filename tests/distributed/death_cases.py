"""Ranks that die, leave or fall silent, in processes of their own: a group that has lost a rank is of no more use."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import fault_cases
import gradient_cases
import torch
import torch.distributed as dist
from fault_calls import CALLS
from torch.nn.parallel import DistributedDataParallel

import fullrank
from fullrank.distributed import collectives

LIMIT_S = 60  # no process may live longer; the timeouts of the groups are a fraction of it
DOOMED = 1  # the rank that dies or falls silent


class Fate(NamedTuple):
    """How a process ended: its exit code, and the class and text of its error and where it was raised, if it told."""

    exit_code: int | None
    error: str = ""
    text: str = ""
    trace: str = ""


def run_group(world_size: int, timeout_s: float, scenario: Callable[..., None], *arguments: Any) -> list[Fate]:
    """Run ``scenario(rank, *arguments)`` in new processes of one gloo group; one that hangs is killed at the limit."""
    can_fork = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if can_fork else "spawn")
    if can_fork:
        # Imported once for all of the processes; the compiler, because the first gather imports it.
        context.set_forkserver_preload(["torch._dynamo", "fullrank"])
    with tempfile.TemporaryDirectory(prefix="fullrank-") as folder:
        common = (world_size, timeout_s, folder, scenario, arguments)
        processes = [context.Process(target=_live, args=(rank, *common), daemon=True) for rank in range(world_size)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        return [_fate(process.exitcode, _report(folder, rank)) for rank, process in enumerate(processes)]


def _report(folder: str, rank: int) -> Path:
    return Path(folder, f"error{rank}")


def _fate(exit_code: int | None, report: Path) -> Fate:
    return Fate(exit_code, *report.read_text().split("\0")) if report.exists() else Fate(exit_code)


def _live(
    rank: int, world_size: int, timeout_s: float, folder: str, scenario: Callable[..., None], arguments: Any
) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timeout
    )
    try:
        scenario(rank, *arguments)
    except Exception as error:
        content = "\0".join([type(error).__name__, str(error), traceback.format_exc()])
        # Renamed into place: whoever waits for the report must not read half of it.
        part = _report(folder, rank).with_suffix(".part")
        part.write_text(content)
        part.rename(_report(folder, rank))
    if scenario in SILENT and rank == DOOMED:
        _outlive([_report(folder, other) for other in range(world_size) if other != rank])
    os._exit(0)  # the group is broken: nothing can be torn down in order


def _outlive(reports: list[Path]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and not all(report.exists() for report in reports):
        time.sleep(0.05)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_collective(name: str, number: int) -> None:
    """Let this process die where it would enter the ``number``-th collective from now on."""
    entered = 0
    original = getattr(collectives, name)

    def collective(*arguments: Any) -> None:
        nonlocal entered
        entered += 1
        if entered == number:
            _die()
        original(*arguments)

    setattr(collectives, name, collective)


def killed_in_forward(rank: int, name: str, number: int) -> None:
    """Take a step of ``name``; in the next, one rank dies in front of the ``number``-th collective."""
    call = CALLS[name]
    subject = call.make()
    fault_cases.take_step(call, subject, rank, 0)
    if rank == DOOMED:
        _die_in_collective("all_gather_flat", number)
    fault_cases.take_step(call, subject, rank, 1)


def killed_in_reduce_scatter(rank: int) -> None:
    """One rank dies in the backward of ``all_gather_with_grad(backward="reduce_scatter")``."""
    rows = torch.ones(3, 2, requires_grad=True)
    gathered = fullrank.all_gather_with_grad(rows, backward="reduce_scatter")
    if rank == DOOMED:
        _die_in_collective("reduce_scatter_flat", 1)
    gathered.sum().backward()


def killed_in_backward(rank: int) -> None:
    """One rank dies in the backward of a DDP model, before its gradients are reduced."""
    model = DistributedDataParallel(gradient_cases.Scorer(1))
    loss = fullrank.SmoothAPLoss(num_classes=1, temperature=0.3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(2):
        features = torch.randn(8, gradient_cases.NUM_FEATURES, dtype=torch.float64, generator=generator)
        logits = model(features)
        if step == 1 and rank == DOOMED:
            logits.register_hook(lambda gradient: _die())
        loss(logits, torch.tensor([0, 1] * 4)).backward()


def killed_among_reasons(rank: int) -> None:
    """Rank 0 has bad input, and another dies before the reasons are exchanged."""
    loss = fullrank.SmoothAPLoss(num_classes=1, temperature=0.3)
    if rank == DOOMED:
        dist.all_gather_object = lambda *arguments, **options: _die()
    loss(torch.randn(4, 1), torch.tensor([0, 1, 0, 1])[: 3 if rank == 0 else 4])


def fewer_steps(rank: int) -> None:
    """One rank has a step less than the others, and does nothing after it."""
    loss = fullrank.SmoothAPLoss(num_classes=1, temperature=0.3)
    for _ in range(1 if rank == DOOMED else 2):
        loss(torch.randn(4, 1), torch.tensor([0, 1, 0, 1]))


def fewer_steps_then_gone(rank: int) -> None:
    """One rank has a step less than the others, and ends."""
    fewer_steps(rank)


def validates_alone(rank: int) -> None:
    """All ranks but one validate without ``gather_distributed=False``."""
    loss = fullrank.RecallAtQuantileLoss(num_classes=1, temperature=0.3)
    loss(torch.randn(4, 1), torch.tensor([0, 1, 0, 1]))
    if rank != DOOMED:
        loss.eval()
        loss(torch.randn(4, 1), torch.tensor([0, 1, 0, 1]))


SILENT = (fewer_steps, validates_alone)  # here the rank that does nothing stays alive until the others have ended
