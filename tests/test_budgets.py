"""A ratchet: how often each step waits for an accelerator, and how many kernels it launches; see docs/accelerators.md.

A change that makes a step cheaper lowers the number here. One that needs more has to say why.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from device import DEVICE, count
from scripts import run_script
from torch import Tensor

from fullrank.distributed import payload
from fullrank.losses import SmoothAPLoss

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "launches.py"

# Waits and launches of forward and backward.
BUDGETS = {
    "SmoothAP": (1, 40),
    "SmoothAP, nothing checked": (0, 49),
    "SmoothAP of more rows": (2, 111),
    "SmoothAP, automatic temperature": (3, 119),
    "SmoothAP, queue of 1,024": (2, 171),
    "SmoothAP of many rows": (2, 111),
    "SmoothAP of classes": (3, 88),
    "SmoothAP of many rows and classes": (3, 135),
    "Recall": (2, 79),
    "pAUC, trapezoid": (2, 137),
    "pAUC, pairwise": (3, 246),
    "pAUC, dro": (2, 188),
    "hard negatives": (1, 64),
    "softmax focal": (1, 47),
}
OVER_RANKS = {"SmoothAP, queue of 1,024": (3, 200), "softmax focal": (2, 52)}


@pytest.fixture(scope="module")
def launches() -> ModuleType:
    """The benchmark that counts."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("launches", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        sys.modules["launches"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


def test_every_step_has_a_budget(launches: ModuleType) -> None:
    assert set(launches.STEPS) == set(BUDGETS)
    assert set(launches.OVER_RANKS) == set(OVER_RANKS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if "many rows" in name else ()) for name in BUDGETS],
)
def test_a_step_is_within_its_budget(launches: ModuleType, name: str) -> None:
    waits, most = BUDGETS[name]
    counts = launches.counts_of(launches.STEPS[name])
    assert counts.waits <= waits, counts.report()
    assert counts.launches <= most, counts.report()


def test_control_one_value_that_is_read_is_over_the_budget(launches: ModuleType) -> None:
    class Curious(SmoothAPLoss):
        def compute_per_class(self, pool: object) -> object:
            assert float(pool.scores.detach().amax()) > 0
            return super().compute_per_class(pool)

    step = launches.STEPS["SmoothAP"]._replace(loss=lambda: Curious(1, temperature=0.1))
    assert launches.counts_of(step).waits == BUDGETS["SmoothAP"][0] + 1


def test_more_rows_launch_no_more(launches: ModuleType) -> None:
    step = launches.STEPS["SmoothAP of more rows"]
    few, many = (launches.counts_of(step._replace(rows=rows)) for rows in (step.rows, 3 * step.rows))
    assert (few.waits, few.launches) == (many.waits, many.launches)


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_over_ranks_are_within_their_budget(tmp_path: Path, processes: int) -> None:
    done = run_script(SCRIPT, cwd=tmp_path, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, (waits, most) in OVER_RANKS.items():
        line = next(line for line in done.stdout.splitlines() if line.strip().startswith(name))
        found_waits, found = (int(cell) for cell in line.split()[-4:-2])
        assert found_waits <= waits, line
        assert found <= most, line


def uneven(world_size: int) -> tuple[list[int], Tensor]:
    """Return the rows of each rank, and a padded block of them."""
    rows = [5 + rank % 3 for rank in range(world_size)]
    return rows, torch.arange(world_size * max(rows), dtype=torch.float32).view(world_size, -1)


@pytest.mark.parametrize("world_size", [2, 64])
def test_unpacking_launches_the_same_for_any_number_of_ranks(world_size: int) -> None:
    rows, padded = uneven(world_size)
    expected = torch.cat([padded[rank, :number] for rank, number in enumerate(rows)])
    with count() as counts:
        places = payload.padded_places(rows, DEVICE)
        ours = payload._unpack(padded.to(DEVICE, non_blocking=True), rows, places)
    assert torch.equal(ours.cpu(), expected)
    assert (counts.waits, counts.launches) == (0, 7), counts.report()


def test_control_unpacking_rank_by_rank_launches_more() -> None:
    def launched(unpack: Callable[[Tensor, list[int]], Tensor], world_size: int) -> int:
        rows, padded = uneven(world_size)
        with count() as counts:
            unpack(padded.to(DEVICE, non_blocking=True), rows)
        return counts.launches

    def by_rank(padded: Tensor, rows: list[int]) -> Tensor:
        output = padded.new_empty(sum(rows))
        for part, (rank, number) in zip(output.split(rows), enumerate(rows)):
            part.copy_(padded[rank, :number])
        return output

    assert launched(by_rank, 64) > launched(by_rank, 2) + 60
