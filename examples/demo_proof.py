"""The proof of the demo: the gradient over several processes against the gradient of one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from demo_report import count
from torch import Tensor, nn

from fullrank import all_gather_no_grad
from fullrank.losses import RankingLoss


class Proof(NamedTuple):
    """Relative differences from the gradient that one process gets with all rows: norm of difference / norm."""

    fullrank: float
    detached: float
    local: float


def prove(
    losses: Mapping[str, nn.Module],
    models: tuple[nn.Module, nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    rows: tuple[Tensor, Tensor],
    own: slice,
) -> dict[str, Proof]:
    """Return the proof of each loss.

    Args:
        losses: by label, called with logits (N, C) and targets (N,).
        models: the model, and a second one whose scores fill the memory queues in place of scores from earlier steps.
        wrap: makes a model data-parallel.
        rows: inputs and targets of the full batch, the same on every process.
        own: the rows of this process.
    """
    inputs, targets = rows[0].double(), rows[1]
    model, past = (copy.deepcopy(one).double() for one in models)
    with torch.no_grad():
        past_logits = past(inputs)
    proofs = {}
    for label, loss in losses.items():
        for part in loss.modules():
            if isinstance(part, RankingLoss) and part.queue_size:
                part.queue.enqueue(past_logits, targets)
        proofs[label] = _compare(model, loss, (inputs, targets), own, wrap)
    return proofs


def _compare(
    model: nn.Module,
    loss: nn.Module,
    rows: tuple[Tensor, Tensor],
    own: slice,
    wrap: Callable[[nn.Module], nn.Module],
) -> Proof:
    inputs, targets = rows
    local_loss = _without_gather(loss)
    truth = _gradient(copy.deepcopy(model), lambda net: copy.deepcopy(local_loss)(net(inputs), targets))
    attempts: tuple[Callable[[nn.Module], Tensor], ...] = (
        # fullrank: the unchanged loss, on this process's rows.
        lambda net: copy.deepcopy(loss)(net(inputs[own]), targets[own]),
        # The usual way: gather detached rows, put the own rows back, then the loss of one process.
        lambda net: copy.deepcopy(local_loss)(_gather_detached(net(inputs[own]), own), targets),
        # No gather: the loss of the own rows alone.
        lambda net: copy.deepcopy(local_loss)(net(inputs[own]), targets[own]),
    )
    found = [_gradient(wrap(copy.deepcopy(model)), attempt) for attempt in attempts]
    return Proof(*(_largest((one - truth).norm() / truth.norm()) for one in found))


def _without_gather(loss: nn.Module) -> nn.Module:
    """Return a copy of ``loss`` that does not gather."""
    loss = copy.deepcopy(loss)
    for part in loss.modules():
        if hasattr(part, "gather_distributed"):
            part.gather_distributed = False
    return loss


def _gather_detached(logits: Tensor, own: slice) -> Tensor:
    """Return the rows of all processes; only the own rows carry gradient."""
    if not dist.is_initialized():
        return logits
    everyone = all_gather_no_grad(logits.detach())
    return torch.cat([everyone[: own.start], logits, everyone[own.stop :]])


def _gradient(model: nn.Module, objective: Callable[[nn.Module], Tensor]) -> Tensor:
    """Return the gradient of all parameters as one vector, after the reduction of ``model``, if it has one."""
    objective(model).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def _largest(value: Tensor) -> float:
    """Return the largest ``value`` of all processes; NaN counts as infinite."""
    value = value.nan_to_num(nan=torch.inf, posinf=torch.inf)
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def print_proof(proofs: Mapping[str, Proof], sizes: Sequence[int], queue_size: int, highest: float) -> None:
    """Print the table of the proof, for processes with ``sizes`` rows."""
    over = f"{count(len(sizes), 'process', 'processes')} ({' + '.join(map(str, sizes))} rows)"
    print(
        f"\nGradient over {over} against one process with all rows, in float64:\n"
        f"norm of difference / norm; the ranking losses with a filled queue of {count(queue_size, 'row')}\n"
    )
    print(f"  {'loss':<28}{'fullrank':>12}{'detached gather':>19}{'no gather':>13}")
    for label, proof in proofs.items():
        print(f"  {label:<28}{proof.fullrank:>12.1e}{proof.detached:>19.3f}{proof.local:>13.3f}")
    print("\n  detached gather: rows gathered without gradient, the own rows put back, DDP averages")
    print("  no gather: the loss of each process's own rows, DDP averages, as with the losses of torch")
    if len(sizes) == 1:
        print("  One process holds all rows: there is nothing to gather and the proof is trivial. Start with torchrun.")
    elif all(proof.fullrank <= highest for proof in proofs.values()):
        print(f"  The promise is at most {highest:.0e}: kept.")
    else:
        print(f"  The promise is at most {highest:.0e}: BROKEN. The exit status is 1.")
