"""What the worker processes run for the recipes of docs: each against plain torch in one process.

The frameworks run in pools of their own, as they keep state of the process, and under the environment that a launcher
would give them. The process group is that of the pool; each framework takes one that it finds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from subjects import error, whole
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from fullrank import LossWarmupWrapper, SmoothAPLoss

SIZE = 4  # rows of a micro-batch

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}


def within_group(script: str, folder: str) -> str:
    """Return a script that runs in the process group of a worker, and writes into ``folder``."""
    lines = re.sub(r"^dist\.(init|destroy)_process_group.*\n", "", script, flags=re.MULTILINE)
    assert lines.count("process_group") == 0
    return lines.replace('"outputs', f'"{folder}')


def launch(rank: int, module: str) -> None:
    """Set the environment that torchrun sets, and import a module of the framework."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in ranks.items()} | OFFLINE | {"TORCHELASTIC_RUN_ID": "test"})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ACCELERATE_USE_CPU="true")
    import_module(module)


def flat(model: nn.Module) -> Tensor:
    """Return all parameters, one after another; collective if they are sharded."""
    return torch.cat([whole(parameter).detach().reshape(-1) for parameter in model.parameters()])


def change(model: nn.Module, before: Tensor, expected: Tensor) -> float:
    """Return the error of what training has changed: a small step would hide in the parameters."""
    return error(flat(model) - before, expected - before)


def worst(found: Sequence[Any], expected: Sequence[float]) -> float:
    assert len(found) == len(expected) > 0
    return max(abs(float(a) / b - 1) for a, b in zip(found, expected))


def alone(loss_fn: nn.Module) -> Any:
    """Return a loss whose parts are all kept to this process."""
    for module in loss_fn.modules():
        if hasattr(module, "gather_distributed"):
            module.gather_distributed = False
    return loss_fn


def loss_alone() -> nn.Module:
    """Return the loss of most recipes in one process."""
    return SmoothAPLoss(1, queue_size=64, temperature=0.5, gather_distributed=False)


def average_precision(model: nn.Module, features: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        return float(average_precision_score(targets.numpy(), model(features).numpy()))


def reset_accelerate() -> None:
    """Forget the Accelerator of an earlier training."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


SGD = partial(torch.optim.SGD, lr=0.5)


# Rows with one score, for the pooled losses.


def make_encoder(num_outputs: int = 1, num_inputs: int = 5) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(num_inputs, 8), nn.Tanh(), nn.Linear(8, num_outputs))


def make_rows(number: int) -> tuple[Tensor, Tensor]:
    """Return features (N, 5) and targets (N, 1), one in five positive."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(number, 5, generator=generator)
    noise = torch.randn(number, generator=generator)
    return features, (features[:, 0] - features[:, 1] + noise > 1.4).long()[:, None]


def dealt(number: int, size: int, epoch: int, world_size: int = 2) -> list[list[int]]:
    """Return the rows of each global batch of an epoch in rank order, as torch's DistributedSampler deals them out."""
    samplers = [DistributedSampler(range(number), world_size, rank) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    own = [list(sampler) for sampler in samplers]
    steps = number // (size * world_size)
    return [[row for rows in own for row in rows[step * size : (step + 1) * size]] for step in range(steps)]


def windows_of(number: int, size: int = 2) -> list[list[int]]:
    """Return the rows of windows of ``size`` micro-batches per rank, in rank order: Accelerate deals out batches."""
    batches = [list(range(start, start + SIZE)) for start in range(0, number, SIZE)]
    windows = [batches[start : start + 2 * size] for start in range(0, len(batches), 2 * size)]
    return [[row for rank in (0, 1) for batch in window[rank::2] for row in batch] for window in windows]


# The loss of the epoch, the step since the first epoch began, and the rows.
Loss = Callable[[int, int, list[int]], Tensor]


def train(
    model: nn.Module,
    loss: Loss,
    epochs: list[list[list[int]]],
    max_norm: float = float("inf"),
    make_optimizer: Callable[..., torch.optim.Optimizer] = SGD,
) -> tuple[Tensor, list[float], list[float]]:
    """Take a step of one process for each list of rows; return the parameters, the losses and the gradient norms."""
    optimizer = make_optimizer(model.parameters())
    losses: list[float] = []
    norms: list[float] = []
    for epoch, steps in enumerate(epochs):
        for rows in steps:
            optimizer.zero_grad()
            value = loss(epoch, len(losses), rows)
            value.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            losses.append(float(value))
    return flat(model), losses, norms


def of_rows(loss_fn: Any, model: Any, *columns: Tensor) -> Loss:
    """Return a loss of the model's output for the first column and of the others; a schedule gets epoch and step."""
    begun = set()

    def loss(epoch: int, step: int, rows: list[int]) -> Tensor:
        if isinstance(loss_fn, LossWarmupWrapper):
            if epoch not in begun:
                loss_fn.on_train_epoch_start(epoch)
                begun.add(epoch)
            loss_fn.on_train_batch_start(step)
        return loss_fn(model(columns[0][rows]), *(column[rows] for column in columns[1:]))

    return loss


# Rows of tokens, for the summed losses.

VOCABULARY, LENGTH = 11, 8


def make_writer() -> nn.Module:
    """Return a language model without attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))


def make_tokens(number: int) -> list[dict[str, Tensor]]:
    """Return rows of very different numbers of valid tokens; the first label would count too."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for index in range(number):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[2 + (5 * index) % (LENGTH - 1) if index % 4 else 2 :] = -100
        rows.append({"tokens": tokens, "labels": labels})
    return rows


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def of_tokens(model: Any, rows: list[dict[str, Tensor]]) -> Loss:
    tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
    return of_rows(token_mean, model, tokens, labels)
