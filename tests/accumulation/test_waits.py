"""Windows on an accelerator: what travels with the headers unread is still checked, and the gradient is exact.

On the simulated device, in a group that serves it alone, like one of NCCL. How often the host waits is in
tests/test_budgets.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from device import only_simulated
from scripts import run_script

pytestmark = only_simulated

SCRIPT = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/conformance"]
import torch, torch.distributed as dist
from device import DEVICE, count, init_process_group
from batches import all_batches, make_window, num_valid, one_process, sum_loss
from subjects import Model, error, gradient
from fullrank import DeferredMean, accumulate, all_reduce_grads_, causal_lm_loss, count_valid_tokens

init_process_group()
rank, world = dist.get_rank(), dist.group.WORLD
model = Model().to(DEVICE)

def on_device(layout):
    return [{{key: value.to(DEVICE) for key, value in batch.items()}} for batch in make_window(layout, rank)]

def run(batches, count=count_valid_tokens, use=lambda step, index, loss, batch: step.backward(loss), **options):
    model.zero_grad()
    for index, (step, batch) in enumerate(accumulate(model, batches, count, group=world, **options)):
        use(step, index, sum_loss(model, batch), batch)
    all_reduce_grads_(model, world)
    return step

def attempt(name, call):
    try:
        outcome = call()
    except (ValueError, RuntimeError) as error:
        outcome = f"{{type(error).__mro__[-4].__name__}} {{error}}"
    print(f"{{name}}: {{outcome}}")

for layout in ("full", "uneven", "none", "full"):
    step = run(on_device(layout), each=layout == "full")
    expected = one_process(Model(), all_batches(layout))
    errors = error(gradient(model).cpu(), expected.gradient), error(step.mean_loss().cpu(), expected.loss)
    print("exact", *[found <= 1e-12 for found in errors])

def valid(batch):
    return (batch["labels"][:, 1:] != -100).sum()

def spoiled(batch):
    return valid(batch) - (1000 if rank else 0)

def with_items(number):
    def use(step, index, loss, batch):
        items = valid(batch)
        step.backward(loss / items.clamp_min(1), num_items=items - number * rank * (index == 0))
    return use

def inside(step, index, loss, batch):
    if rank:
        loss.backward(retain_graph=True)
    step.backward(loss)

attempt("negative count", lambda: run(on_device("full"), spoiled))
attempt("counted by hand", lambda: run(on_device("full"), valid).mean_loss().isfinite().item())
attempt("negative items", lambda: run(on_device("full"), use=with_items(1000)))
attempt("other items", lambda: run(on_device("full"), use=with_items(1)))
attempt("right items", lambda: run(on_device("full"), use=with_items(0)).mean_loss().isfinite().item())
fresh = model
model = Model().to(DEVICE)
attempt("backward inside", lambda: run(on_device("full"), use=inside))
model = fresh

for late in (False, True):  # a label is out of range, from the beginning or from after the count on
    batches = on_device("full")
    if not late:
        batches[1]["labels"][0, 1] = 99
    for index, (step, batch) in enumerate(accumulate(model, batches, count_valid_tokens, group=world)):
        if late and index == 1:
            batch["labels"][0, 1] = 99
        logits = torch.zeros(*batch["labels"].shape, 7, device=DEVICE)
        with count() as counts:
            try:
                causal_lm_loss(logits, batch["labels"], reduction="sum")
                outcome = "fine"
            except ValueError as error:
                outcome = str(error)
        print("labels", late, index, "waits", counts.waits, outcome)
        step.backward(model(batch["tokens"]).sum())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("waits")
    script = folder / "waits.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).resolve().parents[1])))
    done = run_script(script, cwd=folder, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_gradient_and_the_mean_are_those_of_one_process(printed: list[str]) -> None:
    assert printed.count("exact True True") == 8
    assert not any("exact" in line and "False" in line for line in printed)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("negative count", "failed on rank 1: count of micro-batch 0: expected a finite number >= 0, got -"),
        ("counted by hand", "True"),
        ("negative items", "failed on rank 1: num_items of micro-batch 0: expected a finite number >= 0, got -"),
        ("other items", "failed on rank 1: num_items of micro-batch 0: expected "),
        ("right items", "True"),
        ("backward inside", "failed on rank 1: loss of micro-batch 0: expected gradients that have not changed since"),
    ],
)
def test_a_bad_number_is_seen_on_every_rank(printed: list[str], name: str, text: str) -> None:
    found = [line.partition(": ")[2] for line in printed if line.startswith(f"{name}: ")]
    assert len(found) == 2
    assert found[0] == found[1]
    assert text in found[0]


def test_labels_that_were_counted_are_not_read_again(printed: list[str]) -> None:
    """But those whose range does not fit are, and those that have changed since the count."""
    lines = [line for line in printed if line.startswith("labels")]
    bad = "labels: expected token indices in [0, 7) or ignore_index=-100, got 99."
    for late, index in [(late, index) for late in (False, True) for index in range(3)]:
        found = [line for line in lines if line.startswith(f"labels {late} {index} waits")]
        assert len(found) == 2
        is_bad = index == 1
        assert all((bad in line) == is_bad for line in found), found
        assert all(("waits 0 fine" in line) == (late and not is_bad) for line in found), found
