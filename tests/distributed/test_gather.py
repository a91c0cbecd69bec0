"""The gathers: rows of all ranks in rank order, gradients of the own rows at the right scale, few collectives."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import gradient_cases
import pytest
import torch
import torch.distributed as dist
from batches import part_of, split
from collective_counter import CollectiveCounter
from gradient_cases import Case
from meshes import init_device_mesh
from subjects import NUM_FEATURES, Model, error, gradient
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from workers import WorkerPool, error_of, process_context

import fullrank


def rows_of(rank: int, count: int, dtype: str, trailing: tuple[int, ...]) -> Tensor:
    """Return rows whose values encode their rank and position."""
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


COUPLED = {  # a value that depends on the rows of all ranks, and is not linear in them
    "gather_rows": lambda x: fullrank.gather_rows(x)[0].pow(3).sum(),
    "all_gather_with_grad": lambda x: fullrank.all_gather_with_grad(x).pow(3).sum(),
    "all_gather_with_grad, reduce_scatter": lambda x: (
        fullrank.all_gather_with_grad(x, backward="reduce_scatter").pow(3).sum()
    ),
    "global_mean": lambda x: fullrank.global_mean(x.pow(3).sum(), len(x)).square(),
}


def second_derivative(rank: int, name: str) -> tuple[bool, list[tuple[str, str]]]:
    """Return whether ``create_graph`` leaves the first derivative as it is, and the errors of penalties on it."""
    own = torch.arange(1.0, 4.0 + rank, dtype=torch.float64)[:, None].requires_grad_()
    value = COUPLED[name](own)
    (expected,) = torch.autograd.grad(value, own, retain_graph=True)
    (found,) = torch.autograd.grad(value, own, create_graph=True)
    penalty = found.square().sum()
    errors = [
        error_of(lambda: torch.autograd.grad(penalty, own, allow_unused=True, retain_graph=True)),
        error_of(lambda: torch.autograd.grad(own.sum() + penalty, own, retain_graph=True)),
        error_of(penalty.backward),
    ]
    return torch.equal(found, expected), errors


def penalty_on_a_plain_gather(rank: int) -> tuple[float, float]:
    """Return the gradient of a penalty through a gather without the guard, and the right one: the control."""
    own = torch.full((1, 1), 1.0 + rank, dtype=torch.float64, requires_grad=True)
    gathered = torch.cat([own if r == rank else torch.full_like(own, 1.0 + r) for r in range(dist.get_world_size())])
    gathered.register_hook(lambda grad: grad * dist.get_world_size())  # k = W, differentiated once more
    (found,) = torch.autograd.grad(gathered.pow(2).sum(), own, create_graph=True)
    (second,) = torch.autograd.grad(found.sum(), own)
    return second.item(), 2.0 * dist.get_world_size()  # k times the second derivative, which the wrapper divides by W


def mean_of_two_dtypes(rank: int) -> tuple[str, str]:
    """Return the error of a global mean of float32 on rank 0 and bfloat16 on the others."""
    total = torch.tensor(1 / 3, dtype=torch.float32 if rank == 0 else torch.bfloat16)
    return error_of(lambda: fullrank.global_mean(total, 3))


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
    model = Model(num_outputs=1)
    wrapped = DistributedDataParallel(model, process_group=process_group)
    for index in range(3):
        # Each sub-group trains on batches of its own.
        step = gradient_cases.make_step(case, index + 10 * (rank % 2 if form == "subgroup" else 0))
        own = part_of(step, split(step.features.shape[0], size, index), place)
        model.zero_grad()
        losses[0](model(step.features), step.targets).backward()
        whole = gradient(model)
        model.zero_grad()
        losses[1](wrapped(own.features), own.targets).backward()
        worst = max(worst, error(gradient(model), whole))
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
    model = DistributedDataParallel(Model(num_outputs=1, loss=loss).float())
    features, targets = torch.randn(8, NUM_FEATURES), torch.tensor([0, 1] * 4)
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
            stale = error_of(lambda: other(logits, targets))[1]
        dist.barrier()
        dist.destroy_process_group()
    answers.put((values, stale))


UNEVEN = {2: [3, 5], 3: [4, 0, 2]}
DTYPES = ["bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_in_rank_order(pool: WorkerPool, dtype: str) -> None:
    for counts in (UNEVEN[pool.world_size], [3] * pool.world_size, [0] * pool.world_size):
        for trailing in ((), (1,), (3,), (2, 3), (0,)):
            assert all(pool(gather_all_kinds, counts, dtype, trailing)), (counts, trailing)


def test_row_aligned_tensors_travel_together(pool: WorkerPool) -> None:
    for counts in (UNEVEN[pool.world_size], [4] * pool.world_size, [0] * pool.world_size):
        for right, collectives, operators in pool(gather_together, counts):
            assert right
            assert collectives == 2  # the header and one payload, also for 0 rows
            assert operators == ["_allgather_base_.default"]


@pytest.mark.parametrize("reduction", ["mean", "sum", 6])
@pytest.mark.parametrize("backward", ["local", "reduce_scatter"])
def test_backward_scale(pool: WorkerPool, reduction: str | int, backward: str) -> None:
    for counts in (UNEVEN[pool.world_size], [3] * pool.world_size, [0] * pool.world_size):
        for found, expected, collectives in pool(backward_of_gather, counts, reduction, backward):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
            assert collectives == (1 if backward == "reduce_scatter" else 0)


def test_reduce_scatter_adds_half_precision_in_float32(pool_of_two: WorkerPool) -> None:
    for found, dtype in pool_of_two(half_precision_reduce_scatter):
        assert found == [[256.0]]  # 257 is not a bf16 number
        assert dtype == "torch.bfloat16"


def test_equal_rows_are_neither_padded_nor_copied(pool_of_two: WorkerPool) -> None:
    for copied, sizes in pool_of_two(copied_elements, [1000, 1000]):
        assert copied < 100  # the header's words
        assert sizes == [64, 32_000]
    for copied, sizes in pool_of_two(copied_elements, [1000, 999]):  # the control: padded and trimmed
        assert copied >= 2 * 8_000
        assert sizes == [64, 32_000]


def test_world_size_one_is_the_identity(pool_of_two: WorkerPool) -> None:
    for forward_backward in pool_of_two(collectives_of_losses):
        assert all(counts == (0, 0) for name, counts in forward_backward.items() if name.endswith("lone"))


def test_collectives_of_the_losses(pool_of_two: WorkerPool) -> None:
    for counts in pool_of_two(collectives_of_losses):
        whole = {name.removesuffix(" whole"): value for name, value in counts.items() if name.endswith("whole")}
        assert {name: value for name, value in whole.items() if "focal" in name} == {
            "softmax_focal": (1, 0),
            "sigmoid_focal": (1, 0),
        }
        pooled = {name: value for name, value in whole.items() if "focal" not in name}
        assert len(pooled) == 4
        assert set(pooled.values()) == {(2, 0)}


def test_conjugates_negatives_and_changes_in_place(pool_of_two: WorkerPool) -> None:
    assert pool_of_two(odd_tensors) == [True, True]


@pytest.mark.parametrize("name", COUPLED)
def test_a_second_derivative_is_refused(pool: WorkerPool, name: str) -> None:
    """It would be multiplied by k twice. A penalty raises also where only the rows are asked for."""
    for is_equal, errors in pool(second_derivative, name):
        assert is_equal
        for kind, text in errors:
            assert kind == "RuntimeError"
            assert text.startswith(f"{name.split(',')[0]}: expected a first derivative, got a second one.")


def test_control_a_factor_in_the_backward_counts_twice(pool: WorkerPool) -> None:
    for found, right in pool(penalty_on_a_plain_gather):
        assert found == right * pool.world_size


def test_global_mean(pool: WorkerPool) -> None:
    world_size = pool.world_size
    totals, counts = [3.0, 5.0, 1.0][:world_size], [2, 0, 7][:world_size]
    expected = sum(totals) / sum(counts)
    for as_tensor in (False, True):
        for mean, slope, forward, backward in pool(world_mean, totals, counts, as_tensor):
            assert mean == pytest.approx(expected, rel=1e-15)
            assert slope == pytest.approx(world_size / sum(counts), rel=1e-15)
            assert (forward, backward) == (1, 0)


def test_global_mean_of_two_dtypes_is_refused(pool_of_two: WorkerPool) -> None:
    """The ranks would return two numbers."""
    first, second = pool_of_two(mean_of_two_dtypes)
    assert first == second
    assert first[0] == "ValueError"
    assert "dtype: torch.float32 on rank 0, torch.bfloat16 on rank 1" in first[1]


def test_losses_made_on_meta(pool_of_two: WorkerPool) -> None:
    """The queue is empty until its first rows determine its device."""
    for differences in pool_of_two(losses_made_on_meta):
        assert differences == [0.0] * 4


def test_global_mean_of_nothing_is_zero(pool_of_two: WorkerPool) -> None:
    for mean, slope, _, _ in pool_of_two(world_mean, [0.0, 0.0], [0, 0], False):
        assert mean == 0.0
        assert slope == 2.0  # finite: the total is an empty sum, whose own gradient is zero


@pytest.mark.parametrize("form", ["subgroup", "mesh", "mesh of two dimensions"])
def test_groups_and_meshes(pool_of_four: WorkerPool, form: str) -> None:
    assert max(pool_of_four(gradient_over_groups, form)) <= 1e-12


def test_a_rank_outside_the_group_raises(pool_of_two: WorkerPool) -> None:
    inside, outside = pool_of_two(outsider)
    assert inside == "torch.Size([2])"
    assert outside.startswith("group: expected a group with this rank in it, got 'one without rank 1'.")


def test_a_queue_of_ten_million_rows_adds_no_broadcast(pool_of_two: WorkerPool) -> None:
    small = pool_of_two(broadcasts_with_a_large_queue, 16)
    large = pool_of_two(broadcasts_with_a_large_queue, 10_000_000)
    assert small == large
    assert all(broadcasts == 0 and largest < 1000 for broadcasts, largest in large)


def test_copies_share_the_group_and_pickles_drop_it(pool_of_two: WorkerPool) -> None:
    for first, again, shares, dropped, queued in pool_of_two(copies_and_pickles):
        assert again[0] == again[1] == again[2]
        assert again[0] != first  # the queue holds the first step's rows
        assert shares
        assert dropped
        assert queued == 8 or queued == 4


def test_detection_and_its_override_between_steps(pool_of_two: WorkerPool) -> None:
    first, second = pool_of_two(detection)
    assert first[0] == second[0] == first[2] == second[2] == first[3] == second[3]
    assert first[1] != second[1]


@pytest.mark.slow
def test_a_process_group_that_was_destroyed_is_found_again(tmp_path: Path) -> None:
    """Local before there is one, gathered with one, local without, gathered with the next."""
    context = process_context()
    answers = context.Queue()
    workers = [context.Process(target=generations, args=(r, str(tmp_path), answers)) for r in range(2)]
    for worker in workers:
        worker.start()
    results = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=20)
    for values, stale in results:
        assert values[0] == values[2]  # local
        assert values[1] == values[3]  # gathered
        assert values[0] != values[1]
        assert "It was destroyed" in stale


def test_global_mean_of_integers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"total: expected a floating-point tensor, got an int64 tensor"):
        fullrank.global_mean(torch.tensor([3]), 2)


@pytest.mark.parametrize("call", [fullrank.all_gather_with_grad, fullrank.all_gather_no_grad, fullrank.gather_rows])
def test_a_gather_without_process_group_raises(call: object) -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        call(torch.ones(2))  # type: ignore[operator]


def test_global_mean_without_process_group_divides() -> None:
    total = torch.tensor(6.0, requires_grad=True)
    fullrank.global_mean(total, torch.tensor(4)).backward()
    assert total.grad == 0.25


@pytest.mark.parametrize("bad", ["median", 0, -1, 1.5, True, None])
def test_unknown_gradient_reduction(bad: object) -> None:
    with pytest.raises(ValueError, match="gradient_reduction: expected 'mean', 'sum' or the number"):
        fullrank.SmoothAPLoss(1, gradient_reduction=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradient_reduction"):
        fullrank.global_mean(torch.tensor(1.0), 1, gradient_reduction=bad)  # type: ignore[arg-type]
