"""What the workers run for the tests of faults: each call of ``fault_calls``, spoiled on each rank in turn."""

from __future__ import annotations

from typing import Any, NamedTuple

import gradient_cases
import torch
import torch.distributed as dist
from fault_calls import CALLS, Arguments, Call
from gradient_cases import Case
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves


class Outcome(NamedTuple):
    """What became of a step that one rank spoiled, and of the step after it."""

    error: str
    text: str
    state_is_unchanged: bool
    next_is_equal: bool  # to a run in which the spoiled step never happened


def spoil_each_rank(rank: int, name: str, group: str, kind: str) -> list[Outcome]:
    """Spoil the second of three steps, on each rank in turn; ``group`` is ``"bad"`` or ``"differ"``."""
    call = CALLS[name]
    change = getattr(call, group)[kind].change
    clean = _after(call, rank, None)
    outcomes = []
    for odd_rank in range(dist.get_world_size()):
        subject = call.make()
        take_step(call, subject, rank, 0)
        arguments = _arguments(call, rank, 1)
        before = _state(subject)
        error, text = _error_of(subject, arguments | change(arguments) if rank == odd_rank else arguments)
        unchanged = _state(subject) == before
        outcomes.append(Outcome(error, text, unchanged, take_step(call, subject, rank, 2) == clean))
    return outcomes


def step_in_between(rank: int, name: str) -> bool:
    """Return whether a step that is not spoiled leaves the next one as it was."""
    return _after(CALLS[name], rank, 1) == _after(CALLS[name], rank, None)


class Survived(NamedTuple):
    """A step with a value that is not finite on one rank."""

    value: float  # of the objective
    next_is_equal: bool  # to a run in which the row was ignored, or for calls without targets had never been
    shows: bool  # the control: a finite value in its place is not without consequences


def not_finite(rank: int, name: str, value: float) -> list[Survived]:
    """Put ``value`` into the first row of each rank in turn, in the second of three steps."""
    call = CALLS[name]
    has_queue = "logits" in _arguments(call, rank, 0)
    outcomes = []
    for odd_rank in range(dist.get_world_size()):
        is_odd = rank == odd_rank
        objective, bits = _with_first_element(call, rank, value if is_odd else None)
        _, finite = _with_first_element(call, rank, 0.5 if is_odd else None)
        if has_queue:
            reference = _with_first_element(call, rank, value if is_odd else None, ignore=is_odd)[1]
        else:
            reference = _after(call, rank, None)
        outcomes.append(Survived(objective, bits == reference, bits != finite))
    return outcomes


def _with_first_element(call: Call, rank: int, value: float | None, ignore: bool = False) -> tuple[float, list[bytes]]:
    """Return the objective of the second step, whose first element is ``value``, and the bits of the third step."""
    subject = call.make()
    take_step(call, subject, rank, 0)
    arguments = _arguments(call, rank, 1)
    first = next(iter(arguments))
    if value is not None:
        spoiled = arguments[first].detach().clone()
        spoiled.view(-1)[0] = value
        arguments[first] = spoiled.requires_grad_(arguments[first].requires_grad)
    if ignore:
        arguments["targets"] = arguments["targets"].index_fill(0, torch.tensor([0]), -100)
    objective = call.objective(subject(**arguments)).item()
    return objective, take_step(call, subject, rank, 2)


def run_out_of_data(rank: int, case: Case) -> float:
    """Train ranks with 3, 1 and 2 batches to the end, as docs/agreement.md says; return the worst gradient error."""
    world_size = dist.get_world_size()
    lengths = [3, 1, 2][:world_size]
    batches = []
    for index in range(lengths[rank]):
        step = gradient_cases.make_step(case, index)
        batches.append(gradient_cases.shard(step, _among(lengths, index, len(step.features)), rank))
    alone, loss = (gradient_cases.make_loss(case, local) for local in (True, False))
    model, whole_model = (gradient_cases.Scorer(gradient_cases.num_outputs(case)) for _ in range(2))
    wrapped = DistributedDataParallel(model)

    most = torch.tensor(len(batches))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    worst = 0.0
    for index in range(int(most)):
        batch = batches[index] if index < len(batches) else gradient_cases.shard(batches[0], [0], 0)  # no rows
        wrapped.zero_grad()
        loss(wrapped(batch.features), batch.targets).backward()
        whole_model.zero_grad()
        step = gradient_cases.make_step(case, index)
        alone(whole_model(step.features), step.targets).backward()
        spread, whole = (torch.cat(gradient_cases.flat_gradients(held)) for held in (model, whole_model))
        worst = max(worst, float((spread - whole).norm() / whole.norm()))
    return worst


def _among(lengths: list[int], index: int, count: int) -> list[int]:
    """Return the rows of each rank: ``count`` of them over the ranks that have a batch of this index."""
    counts = [count // 4 if length > index else 0 for length in lengths]
    counts[0] += count - sum(counts)  # rank 0 has every batch
    return counts


def _after(call: Call, rank: int, between: int | None) -> list[bytes]:
    subject = call.make()
    take_step(call, subject, rank, 0)
    if between is not None:
        take_step(call, subject, rank, between)
    return take_step(call, subject, rank, 2)


def _arguments(call: Call, rank: int, index: int) -> Arguments:
    return call.arguments(torch.Generator().manual_seed(10 * index + rank), rank)


def take_step(call: Call, subject: Any, rank: int, index: int) -> list[bytes]:
    """Take a step; return the bits of the objective, of the gradient and of the state."""
    arguments = _arguments(call, rank, index)
    value = call.objective(subject(**arguments))
    leaf = next(iter(arguments.values()))
    gradient = torch.autograd.grad(value, leaf)[0] if value.requires_grad else torch.zeros(())
    return [value.detach().numpy().tobytes(), gradient.numpy().tobytes(), *_state(subject)]


def _state(subject: Any) -> list[bytes]:
    """Return the bits of everything in the state of a module."""
    if not isinstance(subject, torch.nn.Module):
        return []
    leaves = tree_leaves(subject.state_dict())
    return [leaf.numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode() for leaf in leaves]


def _error_of(subject: Any, arguments: Arguments) -> tuple[str, str]:
    try:
        subject(**arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""
