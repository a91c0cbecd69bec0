"""docs/recipes/loop.md: mixed precision, skipped steps, TensorBoard, heads, a sweep. docs/integrations.md: metrics."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import own
from integration_cases import average_precision, change, flat, make_encoder, make_rows
from on_ranks import on_ranks
from pages import blocks, output_of, run_block
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import error_of

import fullrank
from fullrank.metrics import PAUCAtBudget, RecallAtQuantile

pytestmark = pytest.mark.slow

SCALER, SKIP, TENSORBOARD, HEADS, SWEEP = blocks("recipes/loop.md")
STEPS = 20


@on_ranks(2)
def test_a_step_is_skipped_on_all_ranks(rank: int) -> None:
    """A good step is that of one process; a bad one says so and changes nothing."""
    names = run_block(SKIP, {})
    features, targets = make_rows(64)
    mine = own(features, targets)
    network, reference = make_encoder(), make_encoder()
    before = flat(network)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_fn = fullrank.SmoothAPLoss(1)
    good = names["step_if_finite"](model, optimizer, loss_fn(model(mine[0]), mine[1]))
    fullrank.SmoothAPLoss(1, gather_distributed=False)(reference(features), targets).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    found = change(network, before, flat(reference))
    kept = flat(network)
    bad = mine[0] * (torch.inf if rank == 1 else 1)
    fine = names["step_if_finite"](model, optimizer, loss_fn(model(bad), mine[1]))
    assert (good, fine, torch.equal(kept, flat(network))) == (True, False, True)
    assert found <= 1e-6


CLIPPED = SCALER.replace("    scaler.unscale_(optimizer)\n", "")


@pytest.mark.parametrize("is_control", [False, pytest.param(True, marks=pytest.mark.full)])
@on_ranks(2)
def test_mixed_precision(rank: int, is_control: bool) -> None:
    """In float32 and in float16. The control clips a gradient with its scale, so that its steps are too small."""
    in_half = run_block(CLIPPED if is_control else SCALER, {})
    in_full = run_block(
        SCALER.replace('torch.autocast("cpu", torch.float16)', 'torch.autocast("cpu", enabled=False)'), {}
    )
    features, targets = make_rows(64)
    mine = own(features, targets)
    # The sum of two halves is rounded elsewhere than the whole.
    for names, limit in ((in_full, 1e-6), (in_half, torch.inf if is_control else 1e-2)):
        network, reference = make_encoder(), make_encoder()
        before = flat(network)
        for model, loss_fn, rows in (
            (DistributedDataParallel(network), fullrank.SmoothAPLoss(1), mine),
            (reference, fullrank.SmoothAPLoss(1, gather_distributed=False), (features, targets)),
        ):
            names["train_step"](model, torch.optim.SGD(model.parameters(), lr=0.5), loss_fn, *rows)
        assert change(network, before, flat(reference)) <= limit
    network = make_encoder()
    model, loss_fn = DistributedDataParallel(network), fullrank.SmoothAPLoss(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = average_precision(network, features, targets)
    for _ in range(STEPS):
        in_half["train_step"](model, optimizer, loss_fn, *mine)
    last = average_precision(network, features, targets)
    assert abs(last - first) < 0.02 if is_control else first < last
    before, scale, bad = flat(network), in_half["scaler"].get_scale(), mine[0].clone()
    bad[0, 0] = torch.inf if rank == 1 else bad[0, 0]
    in_half["train_step"](model, optimizer, loss_fn, bad, mine[1])
    assert torch.equal(before, flat(network))
    assert in_half["scaler"].get_scale() < scale


@on_ranks(2)
def test_two_heads_are_those_of_one_process(rank: int) -> None:
    """Ranks that call them in another order raise."""
    names, weights = run_block(HEADS, {}), {"click": 1.0, "sale": 0.5}
    network = names["TwoHeads"](nn.Sequential(nn.Linear(5, 8), nn.Tanh()), 8).double()
    model, (features, targets) = DistributedDataParallel(network), make_rows(64)
    labels = {"click": targets, "sale": (features[:, 2:3] > 1).long()}
    part = slice(0, 40) if rank == 0 else slice(40, 64)
    batch = features[part].double(), {name: label[part] for name, label in labels.items()}
    loss_fn = names["LossOfHeads"](weights)
    fullrank.verify_step(lambda model, batch: loss_fn(model(batch[0]), batch[1]).backward(), model, batch).check()
    other = names["LossOfHeads"](dict(reversed(weights.items())) if rank else weights)
    assert "name" in error_of(lambda: other(model(batch[0]), batch[1]))[1]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the extra `tensorboard`")
def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names: dict[str, Any] = {"rank": 0}
    run_block(TENSORBOARD.replace("outputs/runs/first", str(tmp_path)), names)
    loss_fn = fullrank.SmoothAPLoss(num_classes=3)
    targets = torch.arange(40) % 2
    found = loss_fn(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), targets, return_per_class=True)
    names["log"](7, found.loss, found.per_class, loss_fn)
    names["writer"].close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/temperature", "class/0", "class/1"}
    assert events.Scalars("train/loss")[0].value == pytest.approx(float(found.loss))
    assert events.Scalars("train/loss")[0].step == 7
    silent = run_block(TENSORBOARD.replace("outputs/runs/first", str(tmp_path)), {"rank": 1})
    silent["log"](7, found.loss, found.per_class, loss_fn)


def test_the_sweep_says_when_the_range_is_too_small() -> None:
    names: dict[str, Any] = {}
    run_block(SWEEP, names)
    assert names["sweep"](lambda rate: -abs(rate - 0.01))[0] == 0.01
    out = output_of("best, _ = sweep(lambda rate: rate)", names)
    assert "0.03, is at the end" in out


# docs/integrations.md

(METRICS,) = blocks("integrations.md")


def metric_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 3, (90,), generator=generator)
    logits = 4 * torch.randn(90, 3, generator=generator)
    logits[torch.arange(90), targets] += 3
    logits[:2] += 20  # float32 makes 1 of their sigmoid
    return logits, targets


def references(scores: Tensor, targets: Tensor) -> dict[str, float]:
    """Return scikit-learn's macro average precision, and our metrics of one process on the logits as they are."""
    one_hot = np.eye(3)[targets.numpy()]
    found = {"ap": average_precision_score(one_hot, scores.double().numpy(), average="macro")}
    for name, metric in (("recall", RecallAtQuantile(3, 0.1)), ("pauc", PAUCAtBudget(3, beta=0.2))):
        metric.update(scores, targets)
        found[name] = float(metric.compute())
    return found


WRONG = {"softmax": "logits", "float32": "logits.sigmoid()"}  # the controls: other scores, which rank otherwise


@pytest.mark.parametrize("control", [None, *WRONG])
@on_ranks(2)
def test_metrics_with_the_losses(rank: int, control: str | None) -> None:
    """Rank 0 has 50 of the rows in three batches, rank 1 40 in two."""
    logits, targets = metric_rows()
    starts = ((0, 10, 30, 50), (50, 55, 90))[rank]
    batches = [(logits[start:end], targets[start:end]) for start, end in pairwise(starts)]
    recipe = METRICS if control is None else METRICS.replace("logits.double().sigmoid()", WRONG[control])
    assert (recipe == METRICS) == (control is None)
    found = {name: float(value) for name, value in run_block(recipe, {"batches": batches})["values"].items()}
    expected = references(logits, targets)
    if control is None:
        assert found == pytest.approx(expected, rel=1e-6)
    else:
        assert found["ap"] != pytest.approx(expected["ap"], rel=1e-4)


def test_without_lightning_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    monkeypatch.delitem(sys.modules, "fullrank.integrations.lightning", raising=False)
    with pytest.raises(ImportError, match="its extra `integrations`"):
        importlib.import_module("fullrank.integrations.lightning")
