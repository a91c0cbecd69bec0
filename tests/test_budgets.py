"""A ratchet: how often each step waits for an accelerator, and how many kernels it launches.

The table of docs/accelerators.md holds the numbers. A change that makes a step cheaper lowers them there, so that the
next one cannot lose what it has won. The commit of a step that needs more says why.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device import DEVICE, count, only_simulated
from loss_cases import POOLED, normal
from scripts import imported, run_script
from torch import Tensor, nn

from fullrank.distributed import exchange
from fullrank.losses import SmoothAPLoss, SoftmaxFocalLoss

pytestmark = only_simulated

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "launches.py"

DOCS = SCRIPT.parents[1] / "docs" / "accelerators.md"
COUNTED_WITH = "2.13."  # another torch may run other operators in autograd, and fewer

LARGE = ["SmoothAP of many rows", "SmoothAP of many rows and classes"]  # seconds to count


def check(name: str, waits: int, launches: int, report: str) -> None:
    """Raise unless a step costs what the table says."""
    found, held = (waits, launches), TABLE[name]
    assert waits <= held[0], report
    assert launches <= held[1], report
    if torch.__version__.startswith(COUNTED_WITH):
        assert found == held, f"{name} costs {found}, less than {held}: lower the numbers in {DOCS.name}"


def table() -> dict[str, tuple[int, int]]:
    """Return waits and launches of each step as the page says."""
    lines = DOCS.read_text().partition("| step |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name.replace("`", ""): (int(waits), int(launches)) for name, _, waits, launches in cells}


TABLE = table()
launches = imported(SCRIPT)
OVER_RANKS = [*launches.OVER_RANKS, *launches.WINDOWS]


def test_every_step_is_in_the_table() -> None:
    assert [*launches.STEPS, *(f"over ranks: {name}" for name in OVER_RANKS)] == [*TABLE]


def mark_of(name: str) -> Any:
    """Return the mark of a step."""
    if name in LARGE:
        return pytest.mark.full
    return pytest.mark.slow if launches.STEPS[name].rows >= 100_000 else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark_of(name)) for name in launches.STEPS])
def test_a_step_costs_what_the_table_says(name: str) -> None:
    counts = launches.counts_of(launches.STEPS[name])
    check(name, counts.waits, counts.launches, counts.report())


def test_control_one_value_that_is_read_is_over_the_budget() -> None:
    class Curious(SmoothAPLoss):
        def compute_per_class(self, pool: object) -> object:
            assert float(pool.scores.detach().amax()) > 0
            return super().compute_per_class(pool)

    step = launches.STEPS["SmoothAP"]._replace(loss=lambda: Curious(1, temperature=0.1))
    counts = launches.counts_of(step)
    assert counts.waits == TABLE["SmoothAP"][0] + 1
    with pytest.raises(AssertionError):
        check("SmoothAP", counts.waits, counts.launches, counts.report())


def test_more_rows_launch_no_more() -> None:
    step = launches.STEPS["SmoothAP of more rows"]
    few, many = (launches.counts_of(step._replace(rows=rows)) for rows in (step.rows, 3 * step.rows))
    assert (few.waits, few.launches) == (many.waits, many.launches)


OF_CLASSES: dict[str, Callable[[int], nn.Module]] = {
    **{name: lambda c, form=loss.first: form.make(num_classes=c, queue_size=30) for name, loss in POOLED.items()},
    "focal with a list of weights": lambda c: SoftmaxFocalLoss([1.0] * c),
    "focal with a tensor of weights": lambda c: SoftmaxFocalLoss(torch.ones(c)),
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_more_classes_wait_no_more(name: str) -> None:
    waits = []
    for num_classes in (3, 50):
        loss, targets = OF_CLASSES[name](num_classes).to(DEVICE), (torch.arange(100) % num_classes).to(DEVICE)
        for seed in range(2):
            logits = normal(100, num_classes, seed=seed).to(DEVICE).requires_grad_()
            with count() as counts:
                loss(logits, targets).backward()
        waits.append(counts.waits)
    assert waits[0] == waits[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_steps_over_ranks_cost_what_the_table_says(tmp_path: Path, ranks: int) -> None:
    """Whatever the number of ranks."""
    done = run_script(SCRIPT, cwd=tmp_path, processes=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in OVER_RANKS:
        line = next(line for line in done.stdout.splitlines() if line.strip().startswith(f"{name}  "))
        waits, found = (int(cell) for cell in line.split()[-4:-2])
        check(f"over ranks: {name}", waits, found, line)


@pytest.mark.slow
def test_a_group_that_serves_the_host_too_reads_the_checksum_apart(tmp_path: Path) -> None:
    done = run_script(SCRIPT, "--mixed", "--lines", "SmoothAP of few rows, queue of 1,024", cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Counts(waits=2, ") == 2, done.stdout


def uneven(world_size: int) -> tuple[list[int], Tensor]:
    """Return the rows of each rank, and a padded block of them."""
    rows = [5 + rank % 3 for rank in range(world_size)]
    return rows, torch.arange(world_size * 8, dtype=torch.float32).view(world_size, 8)


@pytest.mark.parametrize("world_size", [2, 64])
def test_unpacking_launches_the_same_for_any_number_of_ranks(world_size: int) -> None:
    rows, padded = uneven(world_size)
    expected = torch.cat([padded[rank, :number] for rank, number in enumerate(rows)])
    gathered = padded.to(DEVICE).view(-1).view(torch.uint8)
    with count() as counts:
        ours = exchange._unpack_rows(gathered, padded[0], 0, rows)
    assert torch.equal(ours.cpu(), expected)
    assert (counts.waits, counts.launches) == (0, 1), counts.report()


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
