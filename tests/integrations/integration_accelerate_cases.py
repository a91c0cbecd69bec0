"""What the worker processes run for the recipes of Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from integration_cases import (
    change,
    flat,
    make_encoder,
    make_rows,
    make_tokens,
    make_writer,
    run_block,
    token_mean,
    train,
)
from torch import Tensor
from torch.utils.data import DataLoader

import fullrank

SIZE = 4  # rows of a micro-batch


def make_accelerator(**options: Any) -> Any:
    """Return an Accelerator of two gloo processes."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, **options)
    assert accelerator.num_processes == 2
    return accelerator


def windows_of(number: int, size: int = 2) -> list[list[int]]:
    """Return the rows of windows of ``size`` micro-batches per rank, in rank order: Accelerate deals out batches."""
    batches = [list(range(start, start + SIZE)) for start in range(0, number, SIZE)]
    windows = [batches[start : start + 2 * size] for start in range(0, len(batches), 2 * size)]
    return [[row for rank in (0, 1) for batch in window[rank::2] for row in batch] for window in windows]


def summed(rank: int, recipe: str, options: dict[str, Any]) -> tuple[float, float]:
    """Return the errors of parameters and last gradient norm after windows of 2, 2 and 1 micro-batches."""
    rows, model, reference = make_tokens(40), make_writer(), make_writer()
    before = flat(model)
    names = {"accelerator": make_accelerator(**options), "model": model, "loader": DataLoader(rows, batch_size=SIZE)}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.5)
    found = run_block(recipe, names)

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        tokens, labels = (torch.stack([rows[row][key] for row in chosen]) for key in ("tokens", "labels"))
        return token_mean(reference(tokens), labels)

    expected, _, norms = train(reference, loss, [windows_of(40)], max_norm=1.0)
    return change(model, before, expected), abs(float(found["norm"]) / norms[-1] - 1)


def pooled(rank: int, recipe: str) -> tuple[float, float, float]:
    """Return the errors of parameters, last gradient norm and last loss for SmoothAP with a queue."""
    features, targets = make_rows(48)
    rows = [{"features": features[row], "targets": targets[row]} for row in range(48)]
    model, reference = make_encoder(), make_encoder()
    before = flat(model)
    names = {"accelerator": make_accelerator(), "model": model, "loader": DataLoader(rows, batch_size=SIZE)}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.5)
    found = run_block(recipe, names)
    loss_fn = fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.5, gather_distributed=False)

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        return loss_fn(reference(features[chosen]), targets[chosen])

    expected, losses, norms = train(reference, loss, [windows_of(48)], max_norm=1.0)
    errors = abs(float(found["norm"]) / norms[-1] - 1), abs(float(found["loss"]) / losses[-1] - 1)
    return change(model, before, expected), *errors


def checkpointed(rank: int, folder: str) -> tuple[float, float]:
    """Return the loss of a batch before its rows entered the queue, and after the state of then was loaded."""
    accelerator = make_accelerator()
    loss_fn = fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.5)
    accelerator.register_for_checkpointing(loss_fn)
    features, targets = (part[24 * rank : 24 * rank + 24] for part in make_rows(48))
    encoder = make_encoder()
    loss_fn(encoder(features), targets)
    accelerator.save_state(folder)
    torch.distributed.barrier()
    value = loss_fn(encoder(features + 1), targets)
    loss_fn.reset_queue()
    accelerator.load_state(folder)
    return float(value), float(loss_fn(encoder(features + 1), targets))
