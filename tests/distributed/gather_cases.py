"""What the worker processes run for the tests of gathers, groups and agreement."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import nullcontext
from typing import Any
from unittest import mock

import gradient_cases
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from gradient_cases import Case
from meshes import init_device_mesh
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fullrank
from fullrank import losses
from fullrank.distributed import header
from fullrank.distributed.header import Checksum, Offer, agree_on


def rows_of(rank: int, count: int, dtype: str, trailing: tuple[int, ...]) -> Tensor:
    """Return rows that tell their rank and position."""
    values = torch.arange(count * max(1, torch.Size(trailing).numel())) % 5 + 10 * rank
    values = values[: count * torch.Size(trailing).numel()].reshape(count, *trailing)
    return values % 2 == 0 if dtype == "bool" else values.to(getattr(torch, dtype))


def gather_all_kinds(rank: int, counts: list[int], dtype: str, trailing: tuple[int, ...]) -> bool:
    """Return True when both gathers give the rows of all ranks in rank order, contiguous input or not."""
    world_size = dist.get_world_size()
    expected = torch.cat([rows_of(r, counts[r], dtype, trailing) for r in range(world_size)])
    own = rows_of(rank, counts[rank], dtype, trailing)
    strided = torch.stack([own, own], dim=-1)[..., 0]
    results = [fullrank.all_gather_no_grad(own), fullrank.all_gather_with_grad(strided)]
    return all(r.dtype == own.dtype and torch.equal(r, expected) for r in results)


def gather_together(rank: int, counts: list[int]) -> tuple[bool, int, list[str]]:
    """Gather four row-aligned tensors and a None at once; return correctness, the collectives, and their operators."""
    kinds = [("float32", (3,)), ("int64", ()), ("bool", ()), ("float64", (2, 2))]
    own = [rows_of(rank, counts[rank], dtype, trailing) for dtype, trailing in kinds]
    with CollectiveCounter() as counter:
        gathered = fullrank.gather_rows(own[0], own[1], None, own[2], own[3])
    world_size = dist.get_world_size()
    right = gathered[2] is None
    for result, (dtype, trailing) in zip((gathered[0], gathered[1], gathered[3], gathered[4]), kinds):
        right &= torch.equal(result, torch.cat([rows_of(r, counts[r], dtype, trailing) for r in range(world_size)]))
    return right, counter.total, sorted(counter.counts)


def backward_of_gather(rank: int, counts: list[int], reduction: str | int, backward: str) -> tuple[list, list, int]:
    """Return this rank's gradient, what it should be, and the collectives in backward.

    Rank r's loss is sum_i (r + 1) (i + 1) y_i with ``reduce_scatter``, and the same with r = 0 on every rank if local.
    """
    world_size = dist.get_world_size()
    own = torch.randn(counts[rank], 2, dtype=torch.float64, requires_grad=True)
    gathered = fullrank.all_gather_with_grad(own, gradient_reduction=reduction, backward=backward)
    slope = torch.arange(1, sum(counts) + 1, dtype=torch.float64)[:, None]
    factor = rank + 1 if backward == "reduce_scatter" else 1
    loss = (gathered * slope * factor).sum()
    with CollectiveCounter() as counter:
        loss.backward()
    first = sum(counts[:rank])
    scale = {"mean": world_size, "sum": 1}.get(reduction, reduction)
    if backward == "reduce_scatter":
        scale = scale / world_size * sum(range(1, world_size + 1))
    expected = (slope * scale).expand(-1, 2)[first : first + counts[rank]]
    assert own.grad is not None
    return own.grad.tolist(), expected.tolist(), counter.total


def half_precision_reduce_scatter(rank: int) -> tuple[list, str]:
    """Return the gradient of a bf16 gather whose sum over ranks only float32 holds: 256 + 1."""
    own = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = fullrank.all_gather_with_grad(own, backward="reduce_scatter")
    gathered.backward(torch.full_like(gathered, 256.0 if rank == 0 else 1.0))
    assert own.grad is not None
    return own.grad.float().tolist(), str(own.grad.dtype)


class CopyCounter(TorchDispatchMode):
    """Context in which ``copied`` adds up the elements that copying operators write."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("copy_", "clone", "cat", "_to_copy", "constant_pad_nd", "fill_", "zero_"):
            self.copied += result.numel()
        return result


def copied_elements(rank: int, counts: list[int]) -> tuple[int, list[int]]:
    """Return the elements copied by a gather of (N, 8) rows, and the sizes of its collectives in bytes."""
    own = torch.ones(counts[rank], 8)
    with CollectiveCounter() as counter, CopyCounter() as copies:
        fullrank.all_gather_no_grad(own)
    return copies.copied, counter.sizes


def world_mean(rank: int, total: list[float], count: list[float], as_tensor: bool) -> tuple[float, float, int, int]:
    """Return the global mean, the gradient of this rank's total, and the collectives forward and backward."""
    own = torch.tensor(total[rank], dtype=torch.float64, requires_grad=True)
    number = torch.tensor(count[rank]) if as_tensor else count[rank]
    with CollectiveCounter() as forward:
        mean = fullrank.global_mean(own, number)
    with CollectiveCounter() as backward:
        mean.backward()
    assert own.grad is not None
    return mean.item(), own.grad.item(), forward.total, backward.total


def mean_of_two_dtypes(rank: int) -> tuple[str, str]:
    """Return the error of a global mean of float32 on rank 0 and bfloat16 on the others."""
    total = torch.tensor(1 / 3, dtype=torch.float32 if rank == 0 else torch.bfloat16)
    return _error_of(lambda: fullrank.global_mean(total, 3))


def losses_made_on_meta(rank: int) -> list[float]:
    """Return the differences to losses made on the CPU, in two steps and after a reset of the queue."""
    with torch.device("meta"):
        made = fullrank.SmoothAPLoss(2, queue_size=16, temperature=0.1)
    usual = fullrank.SmoothAPLoss(2, queue_size=16, temperature=0.1)
    generator, differences = torch.Generator().manual_seed(rank), []
    for step in range(3):
        logits = torch.randn(4 + rank, 2, generator=generator)
        targets = torch.arange(4 + rank) % 2
        differences.append(float(made(logits, targets) - usual(logits, targets)))
        if step == 1:
            for loss in (made, usual):
                loss.reset_queue()
    return [*differences, float(len(usual.queue) - len(made.queue))]


def mean_over_unequal_shards(rank: int, convention: str) -> float:
    """Return the gradient error of a DDP model under a global mean, or under the mean of each rank's mean."""
    case = Case("smooth_ap")
    step = gradient_cases.make_step(case, 0)
    world_size = dist.get_world_size()
    counts = gradient_cases.split(step.features.shape[0], world_size, 0)
    model = gradient_cases.Scorer(1)
    (model(step.features) ** 2).mean().backward()
    whole = torch.cat(gradient_cases.flat_gradients(model))
    model.zero_grad()
    own = gradient_cases.shard(step, counts, rank)
    wrapped = DistributedDataParallel(model)
    squares = wrapped(own.features) ** 2
    if convention == "fullrank":
        fullrank.global_mean(squares.sum(), squares.numel()).backward()
    else:
        squares.mean().backward()
    return float((torch.cat(gradient_cases.flat_gradients(model)) - whole).norm() / whole.norm())


def gradient_over_groups(rank: int, form: str) -> float:
    """Return the gradient error of SmoothAP over half of the four ranks, or over a mesh; DDP has the same group."""
    case = Case("smooth_ap", queue_size=32)
    if form == "subgroup":
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = process_group = halves[rank % 2]
    else:
        shape, names = ((4,), ("data",)) if form == "mesh" else ((2, 2), ("replicate", "shard"))
        group = init_device_mesh("cpu", shape, mesh_dim_names=names)
        process_group = dist.group.WORLD
    place, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    worst = 0.0
    losses = [gradient_cases.make_loss(case, local=True), gradient_cases.make_loss(case, local=False, group=group)]
    model = gradient_cases.Scorer(1)
    wrapped = DistributedDataParallel(model, process_group=process_group)
    for index in range(3):
        # Each sub-group trains on batches of its own.
        step = gradient_cases.make_step(case, index + 10 * (rank % 2 if form == "subgroup" else 0))
        own = gradient_cases.shard(step, gradient_cases.split(step.features.shape[0], size, index), place)
        model.zero_grad()
        losses[0](model(step.features), step.targets).backward()
        whole = torch.cat(gradient_cases.flat_gradients(model))
        model.zero_grad()
        losses[1](wrapped(own.features), own.targets).backward()
        spread = torch.cat(gradient_cases.flat_gradients(model))
        worst = max(worst, float((spread - whole).norm() / whole.norm()))
    return worst


def outsider(rank: int) -> str:
    """Return the error of a rank that is not in the group it passes."""
    group = dist.new_group([0])
    if rank == 0:
        return str(fullrank.all_gather_no_grad(torch.ones(2), group=group).shape)
    try:
        fullrank.all_gather_no_grad(torch.ones(2), group=group)
    except ValueError as error:
        return str(error)
    return "no error"


def collectives_of_losses(rank: int) -> dict[str, tuple[int, int]]:
    """Return the collectives of one call, forward and backward, for every loss, with all optional arguments."""
    counts = {}
    for name in ("smooth_ap", "recall", "pauc_trapezoid", "pauc_pairwise", "softmax_focal", "sigmoid_focal"):
        for world in ("whole", "lone"):
            group = None if world == "whole" else [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
            case = Case(name, weighted=True)
            loss = gradient_cases.make_loss(case, local=False, group=group)
            step = gradient_cases.make_step(case, 0)
            logits = torch.randn(step.features.shape[0], gradient_cases.num_outputs(case), requires_grad=True)
            with CollectiveCounter() as forward:
                value = loss(logits, step.targets, sample_weight=step.weight)
            with CollectiveCounter() as backward:
                value.backward()
            counts[f"{name} {world}"] = (forward.total, backward.total)
    return counts


def broadcasts_with_a_large_queue(rank: int, queue_size: int) -> tuple[int, int]:
    """Return the bytes broadcast in a DDP forward with the loss, and a queue of this size, inside the module."""
    loss = fullrank.SmoothAPLoss(num_classes=1, queue_size=queue_size, temperature=0.5)
    model = DistributedDataParallel(gradient_cases.Scorer(1, loss).float())
    features, targets = torch.randn(8, gradient_cases.NUM_FEATURES), torch.tensor([0, 1] * 4)
    for _ in range(3):  # DDP settles its buckets in the first steps
        model(features, targets).backward()
    with CollectiveCounter() as counter:
        model(features, targets).backward()
    broadcasts = sum(number for name, number in counter.counts.items() if "broadcast" in name)
    return broadcasts, max(counter.sizes)


def copies_and_pickles(rank: int) -> list[Any]:
    """Return what a deep copy and a pickle of a loss with an explicit group do."""
    group = dist.new_group(list(range(dist.get_world_size())))
    loss = fullrank.SmoothAPLoss(num_classes=1, queue_size=8, group=group, temperature=0.5)
    logits, targets = torch.tensor([[0.1 * rank], [0.3]]), torch.tensor([0, 1])
    first = loss(logits, targets).item()
    twin = copy.deepcopy(loss)
    loaded = pickle.loads(pickle.dumps(loss))
    again = [module(logits, targets).item() for module in (loss, twin, loaded)]
    return [first, again, twin.group is group, loaded.group is None, len(twin.queue)]


def detection(rank: int) -> list[Any]:
    """Return what gather_distributed=None, False and True do, changed between the calls of one loss."""
    loss = fullrank.SmoothAPLoss(num_classes=1, queue_size=0, temperature=0.5)
    logits, targets = torch.tensor([[0.3 - rank], [0.1]]), torch.tensor([1, 0])
    values = []
    for setting in (None, False, True, None):
        loss.gather_distributed = setting
        values.append(loss(logits, targets).item())
    return values


# --- agreement ---------------------------------------------------------------------------------------------------


def agree_on_totals(rank: int) -> tuple[list[int], list[list[float]]]:
    """Return the row counts and the totals that the ranks tell each other, of every kind that a caller may pass."""
    totals = [torch.tensor([rank + 0.1], dtype=torch.float64, requires_grad=True), 3]
    totals += [torch.tensor(0.5, dtype=torch.bfloat16), -(2**60)]
    checksum = Checksum(torch.tensor(-(2**62), dtype=torch.int64), "queue", "")
    offer = Offer(None, rows=2**40 + rank, totals=totals, checksum=checksum)
    agreement = agree_on("a call", dist.group.WORLD, lambda: offer)
    return list(agreement.rows), agreement.totals.tolist()


class _Speechless:
    def __repr__(self) -> str:
        raise OSError("no text")


def agree_on_nonsense(rank: int, kind: str) -> tuple[str, str]:
    """Let rank 1 pass a total or a fact that no header can be made of; return the error."""
    nonsense: dict[str, Any] = {
        "meta": {"totals": [torch.ones((), device="meta")]},
        "two elements": {"totals": [torch.ones(2)]},
        "text": {"totals": ["x"]},
        "repr": {"facts": {"fact": _Speechless()}},
    }
    return _error_of(
        lambda: agree_on("a call", dist.group.WORLD, lambda: Offer(None, **nonsense[kind] if rank == 1 else {}))
    )


CALLED = {"smooth_ap": "SmoothAPLoss", "softmax_focal": "SoftmaxFocalLoss", "gather": "all_gather_no_grad"}


def different_calls(rank: int, names: list[str]) -> tuple[str, str]:
    """Let rank 1 make the second of two calls, and the others the first."""
    logits, targets = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    calls: dict[str, Any] = {
        "smooth_ap": lambda: fullrank.SmoothAPLoss(num_classes=2)(logits, targets),
        "softmax_focal": lambda: fullrank.SoftmaxFocalLoss()(logits, targets),
        "gather": lambda: fullrank.all_gather_no_grad(logits),
    }
    return _error_of(calls[names[rank == 1]])


def call_after_disagreement(rank: int) -> list[float]:
    """Gather the ranks' numbers after they have disagreed."""
    different_calls(rank, ["gather", "softmax_focal"])
    return fullrank.all_gather_no_grad(torch.tensor([float(rank)])).tolist()


def known_groups(rank: int) -> list[bool]:
    """Return whether a group is not known, then known, and no longer known once it is gone."""
    group = dist.new_group([0, 1])
    before = len(header._BACKENDS)
    fullrank.all_gather_no_grad(torch.ones(1), group)
    known = [group in header._BACKENDS, len(header._BACKENDS) == before + 1]
    dist.barrier(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return [*known, len(header._BACKENDS) > before]


def _error_of(call: Any) -> tuple[str, str]:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "none", ""


def inside_checkpoint(rank: int, reentrant: bool, name: str) -> tuple[str, str]:
    """Return the error of a communicating call that activation checkpointing runs again in backward."""
    from torch.utils.checkpoint import checkpoint

    calls = {
        "smooth_ap": fullrank.SmoothAPLoss(num_classes=1, queue_size=8, temperature=0.5),
        "focal": lambda x, y: fullrank.SigmoidFocalLoss()(x, y[:, None].to(x)),
        "gather": lambda x, y: fullrank.all_gather_with_grad(x).square().sum(),
        "global_mean": lambda x, y: fullrank.global_mean(x.square().sum(), 4),
    }
    logits, targets = torch.randn(4, 1, requires_grad=True), torch.tensor([0, 1, 0, 1])
    value = checkpoint(calls[name], logits, targets, use_reentrant=reentrant)
    return _error_of(value.backward)


def odd_tensors(rank: int) -> bool:
    """Return True when conjugated, negated and in-place changed tensors are gathered like any other."""
    values = torch.tensor([[1 + 2j, 3 - 1j]])
    plain = values.conj().clone().resolve_conj()
    right = torch.equal(fullrank.all_gather_no_grad(values.conj())[:1], plain)
    right &= torch.equal(fullrank.all_gather_no_grad(values.conj().imag)[:1], plain.imag)
    for count in (2, 2 + rank):  # equal and uneven shards: the result may be changed in place either way
        own = torch.ones(count, 2, requires_grad=True)
        gathered = fullrank.all_gather_with_grad(own)
        gathered *= 2
        gathered.sum().backward()
        right &= bool((own.grad == 2 * dist.get_world_size()).all())
    return right


def identity_at_world_size_one(rank: int) -> bool:
    """Return True when a gather over a group of one returns the very same objects."""
    group = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    own, targets = torch.ones(2, 1), torch.zeros(2)
    pair = fullrank.gather_rows(own, targets, group=group)
    return (
        fullrank.all_gather_with_grad(own, group) is own
        and fullrank.all_gather_no_grad(own, group) is own
        and pair[0] is own
        and pair[1] is targets
    )


POOLED = ("smooth_ap", "recall", "pauc_trapezoid", "pauc_pairwise")


def autocast_errors(
    rank: int, names: tuple[str, ...] = POOLED, guarded: bool = True, count: int = 3000
) -> dict[str, float]:
    """Return how far autocast moves each loss and its gradient, on a pool that half precision cannot sum.

    Args:
        rank: this rank.
        names: the losses, as in ``gradient_cases``.
        guarded: False makes the losses blind to autocast, which is the control.
        count: rows of each rank; few are summed pair by pair, many by bins.
    """
    errors = {}
    for name in names:
        case = Case(name, queue_size=0)
        outcomes = []
        for enabled in (False, True):
            loss = gradient_cases.make_loss(case, local=False)
            generator = torch.Generator().manual_seed(rank)
            logits = torch.randn(count, gradient_cases.num_outputs(case), generator=generator, requires_grad=True)
            targets = (torch.rand(count, generator=generator) < 0.1).long()
            targets = targets[:, None] if name == "sigmoid_focal" else targets
            blind = nullcontext() if guarded else mock.patch.object(torch, "is_autocast_enabled", return_value=False)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), blind:
                value = loss(logits, targets)
                value.backward()
            assert logits.grad is not None
            outcomes.append(torch.cat([value.detach().reshape(1), logits.grad.flatten() * 100]))
        errors[name] = float((outcomes[0] - outcomes[1]).norm() / outcomes[0].norm())
    return errors


def sharded_gradients(rank: int, form: str, inside: bool) -> float:
    """Return the gradient error of SmoothAP under FSDP2 or HSDP as they come, against one process."""
    from torch.distributed.fsdp import fully_shard

    case = Case("smooth_ap", queue_size=32, dtype="float64")
    world_size = dist.get_world_size()
    if form == "fsdp2":
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    losses = [gradient_cases.make_loss(case, local=True), gradient_cases.make_loss(case, local=False)]
    whole_model = gradient_cases.Scorer(1)
    model = fully_shard(gradient_cases.Scorer(1, losses[1] if inside else None), mesh=mesh)
    worst = 0.0
    for index in range(3):
        step = gradient_cases.make_step(case, index)
        counts = gradient_cases.split(step.features.shape[0], world_size, index)
        own = gradient_cases.shard(step, counts, rank)
        whole_model.zero_grad()
        model.zero_grad()
        losses[0](whole_model(step.features), step.targets).backward()
        value = model(own.features, own.targets) if inside else losses[1](model(own.features), own.targets)
        value.backward()
        whole = torch.cat(gradient_cases.flat_gradients(whole_model))
        spread = torch.cat([p.grad.full_tensor().reshape(-1) for p in model.parameters()])
        worst = max(worst, float((spread - whole).norm() / whole.norm()))
    return worst


def rank_zero_validates_alone(rank: int, wrapped: bool) -> list[float]:
    """Return training losses around a validation that only rank 0 runs."""
    main = fullrank.SmoothAPLoss(num_classes=2, queue_size=8, temperature=0.5, max_pool_size=6)
    loss: Any = fullrank.LossWarmupWrapper(fullrank.SoftmaxFocalLoss(gamma=0), main) if wrapped else main
    generator = torch.Generator().manual_seed(rank)
    values = []
    for step in range(4):
        if wrapped:
            loss.on_train_batch_start(step)
        logits, targets = torch.randn(6, 2, generator=generator), torch.randint(0, 2, (6,), generator=generator)
        values.append(loss(logits, targets).item())
        if rank == 0:
            loss.eval()
            loss.gather_distributed = False
            loss(torch.randn(9, 2), torch.randint(0, 2, (9,)))
            loss.gather_distributed = None
            loss.train()
    return values


def synchronized(rank: int, spoil: bool) -> tuple[str, str]:
    """Return what assert_synchronized says after gathered steps, and after one rank's queue was changed."""
    loss = fullrank.RecallAtQuantileLoss(num_classes=1, quantile=0.3, queue_size=8, temperature=0.5)
    loss(torch.tensor([[0.1 * rank], [0.5]]), torch.tensor([0, 1]))
    if spoil and rank == 1:
        loss.queue.enqueue(torch.tensor([[9.0]]), torch.tensor([0]))
    return _error_of(loss.queue.assert_synchronized)


def wrapper_on_rank_0(rank: int) -> tuple[float, float]:
    """Validate on rank 0 alone, through the warm-up wrapper; return its value and that of rank 0's rows by themselves.

    Before and after it all ranks take a step together, in the blend, so that both losses communicate.
    """
    torch.manual_seed(rank)
    warmup, main = fullrank.SigmoidFocalLoss(alpha=-1, gamma=0), fullrank.SmoothAPLoss(num_classes=1, queue_size=0)
    loss = fullrank.LossWarmupWrapper(warmup, main, warmup_steps=0, blend_steps=5)
    loss.on_train_batch_start(0)
    logits, targets = torch.randn(6, 1), torch.tensor([0, 1, 0, 0, 1, 0])[:, None]
    together = float(loss(logits, targets))
    value = expected = 0.0
    if rank == 0:
        loss.eval()
        loss.gather_distributed = False
        assert warmup.gather_distributed is False
        assert main.gather_distributed is False
        value = float(loss(logits, targets))
        weight, ap = loss.main_weight, losses.smooth_ap(logits, targets, main.temperature)
        expected = float((1 - weight) * losses.sigmoid_focal(logits, targets, -1, 0) + weight * ap)
        loss.gather_distributed = None
        assert loss.gather_distributed is None
        loss.train()
    assert float(loss(logits, targets)) == together  # gathered again, on every rank
    return value, expected


def generations(rank: int, folder: str, answers: Any) -> None:
    """Answer with the losses without, with, without and again with a process group, and the error of a stale group."""
    loss = fullrank.SmoothAPLoss(num_classes=1, queue_size=0, temperature=0.5)
    other = fullrank.SmoothAPLoss(num_classes=1, queue_size=0, temperature=0.5)
    logits, targets = torch.tensor([[0.3 - rank], [0.1]]), torch.tensor([1, 0])
    values, stale = [], ""
    for generation in range(2):
        values.append(loss(logits, targets).item())
        store = f"file://{folder}/store{generation}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        values.append(loss(logits, targets).item())
        if generation == 0:
            other.group = dist.new_group([0, 1])
            other(logits, targets)
        else:
            stale = _error_of(lambda: other(logits, targets))[1]
        dist.barrier()
        dist.destroy_process_group()
    answers.put((values, stale))
