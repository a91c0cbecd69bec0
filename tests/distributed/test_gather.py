"""The gathers: rows of all ranks in rank order, gradients of the own rows at the right scale, few collectives."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gradient_cases
import pytest
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from gradient_cases import Case
from loss_cases import FORMS, SUMMED, slowly
from meshes import group_of, init_device_mesh
from on_ranks import on_ranks, slow_but
from subjects import NUM_FEATURES, Model, error
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from workers import WorkerPool, error_of

import fullrank

UNEVEN = {2: [3, 5], 3: [4, 0, 2]}
DTYPES = ["bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]
FEW = ["bool", "int64", "bfloat16", "float32"]  # of the fast tests


def layouts() -> list[list[int]]:
    world_size = dist.get_world_size()
    return [UNEVEN[world_size], [3] * world_size, [0] * world_size]


def rows_of(rank: int, count: int, dtype: str, trailing: tuple[int, ...]) -> Tensor:
    """Return rows whose values encode their rank and position."""
    values = torch.arange(count * torch.Size(trailing).numel()) % 5 + 10 * rank
    values = values.reshape(count, *trailing)
    return values % 2 == 0 if dtype == "bool" else values.to(getattr(torch, dtype))


def rows_of_all(counts: list[int], dtype: str, trailing: tuple[int, ...]) -> Tensor:
    return torch.cat([rows_of(rank, count, dtype, trailing) for rank, count in enumerate(counts)])


@pytest.mark.parametrize("dtype", slow_but(FEW, DTYPES))
@on_ranks()
def test_every_dtype_and_shape_in_rank_order(rank: int, dtype: str) -> None:
    """Contiguous or not, with gradient or without; after the header at first, then in the room behind it."""
    gathers = fullrank.all_gather_no_grad, fullrank.all_gather_with_grad
    for counts, gather in itertools.product(layouts(), gathers):
        group = dist.new_group()
        for trailing in ((0,), (), (1,), (3,), (2, 3)):
            own = rows_of(rank, counts[rank], dtype, trailing)
            strided = torch.stack([own, own], dim=-1)[..., 0]
            for given in (own, strided, own):
                found = gather(given, group)
                assert found.dtype == own.dtype
                assert torch.equal(found, rows_of_all(counts, dtype, trailing)), (counts, trailing)
        dist.destroy_process_group(group)


@pytest.mark.parametrize("reduction", ["mean", "sum", 6])
@pytest.mark.parametrize("backward", ["local", "reduce_scatter"])
@on_ranks()
def test_backward_scale(rank: int, reduction: str | int, backward: str) -> None:
    """Rank r's loss is sum_i (r + 1) (i + 1) y_i with ``reduce_scatter``, and sum_i (i + 1) y_i if local."""
    world_size, is_local = dist.get_world_size(), backward == "local"
    for counts, several in itertools.product(layouts(), (False, True)):
        own = torch.randn(counts[rank], 2, dtype=torch.float64, requires_grad=True)
        options: Any = {"gradient_reduction": reduction, "backward": backward}
        if several:
            _, gathered = fullrank.gather_rows(own.detach(), own, **options)
        else:
            gathered = fullrank.all_gather_with_grad(own, **options)
        slope = torch.arange(1, sum(counts) + 1, dtype=torch.float64)[:, None]
        with CollectiveCounter() as counter:
            (gathered * slope * (1 if is_local else rank + 1)).sum().backward()
        scale = {"mean": world_size, "sum": 1}.get(reduction, reduction)
        scale *= 1 if is_local else sum(range(1, world_size + 1)) / world_size
        first = sum(counts[:rank])
        torch.testing.assert_close(
            own.grad, (slope * scale).expand(-1, 2)[first : first + counts[rank]], rtol=0, atol=0
        )
        assert counter.total == (0 if is_local else 1)


@on_ranks(2)
def test_reduce_scatter_adds_half_precision_in_float32(rank: int) -> None:
    own = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = fullrank.all_gather_with_grad(own, backward="reduce_scatter")
    gathered.backward(torch.full_like(gathered, 256.0 if rank == 0 else 1.0))
    assert own.grad.dtype == torch.bfloat16
    assert own.grad.tolist() == [[256.0]]  # 257 is not a bf16 number


@pytest.mark.parametrize("backward", ["local", "reduce_scatter"])
@on_ranks(2)
def test_rows_keep_their_dtype_under_autocast(rank: int, backward: Any) -> None:
    """Where rows travel with the header and where not; the control joins them as autocast would."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for count, _ in itertools.product((3, 20000), range(2)):
            own = rows_of(rank, count, "float16", (2,)).requires_grad_()
            rows = fullrank.gather_rows(own, backward=backward)[0]
            (torch.arange(len(rows))[:, None] % 7 * rows.float()).sum().backward()
            expected = rows_of_all([count] * 2, "float32", (2,)).half()
            assert (rows.dtype, torch.equal(rows, expected)) == (torch.float16, True)
            slope = 2 * (torch.arange(2 * count) % 7)[count * rank :][:count, None].expand(-1, 2)
            assert torch.equal(own.grad, slope.half())
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.cat([expected])


@pytest.mark.parametrize(
    "name", slowly(name for name, form in FORMS.items() if form.loss.is_pooled or form.loss in SUMMED.values())
)
@on_ranks(2)
def test_collectives_of_the_losses(rank: int, name: str) -> None:
    """Forward and backward, with all optional arguments; from the second call on one; a group of one has none."""
    lone, both = [group_of(0), group_of(1)][rank], dist.new_group()  # which has no room yet
    for group, expected in ((both, 2 if FORMS[name].loss.is_pooled else 1), (both, 1), (lone, 0)):
        case = Case(name, weighted=True)
        loss, step = gradient_cases.make_loss(case, local=False, group=group), gradient_cases.make_step(case, 0)
        logits = torch.randn(step.features.shape[0], gradient_cases.num_outputs(case), requires_grad=True)
        with CollectiveCounter() as forward:
            value = gradient_cases.OfRows(case, loss)(logits, step.targets, sample_weight=step.weight)
        with CollectiveCounter() as backward:
            value.backward()
        assert (forward.total, backward.total) == (expected, 0)
    dist.destroy_process_group(both)


@on_ranks(2)
def test_conjugates_negatives_and_changes_in_place(rank: int) -> None:
    values = torch.tensor([[1 + 2j, 3 - 1j]])
    plain = values.conj().clone().resolve_conj()
    assert torch.equal(fullrank.all_gather_no_grad(values.conj())[:1], plain)
    assert torch.equal(fullrank.all_gather_no_grad(values.conj().imag)[:1], plain.imag)
    # Equal and uneven shards, that fit behind the header in the second step or never: the result may change in place.
    for count, width in itertools.product((2, 2 + rank), (2, 2**14)):
        group = dist.new_group()
        for create_graph in (False, True):
            own = torch.ones(count, width, requires_grad=True)
            gathered, (other,) = fullrank.all_gather_with_grad(own, group), fullrank.gather_rows(own, group=group)
            for rows in (gathered, other):
                rows *= 2
                (found,) = torch.autograd.grad(rows.sum(), own, create_graph=create_graph)
                assert bool((found == 4).all())
        dist.destroy_process_group(group)


VERBS: dict[str, Callable[..., Tensor]] = {  # a value of the rows of all ranks, which is not linear in them
    "gather_rows": lambda x, **given: fullrank.gather_rows(x, **given)[0].pow(3).sum(),
    "all_gather_with_grad": lambda x, **given: fullrank.all_gather_with_grad(x, **given).pow(3).sum(),
    "all_gather_with_grad, reduce_scatter": lambda x, **given: (
        fullrank.all_gather_with_grad(x, backward="reduce_scatter", **given).pow(3).sum()
    ),
    "global_mean": lambda x, **given: fullrank.global_mean(x.pow(3).sum(), len(x), **given),
    "global_sum": lambda x, **given: fullrank.global_sum(x.pow(3).sum(dim=0), **given).square().sum(),
}


@pytest.mark.parametrize("name", VERBS)
@on_ranks()
def test_a_second_derivative_is_refused(rank: int, name: str) -> None:
    """It would be multiplied by k twice. A penalty raises also where only the rows are asked for."""
    own = torch.arange(1.0, 4.0 + rank, dtype=torch.float64)[:, None].requires_grad_()
    value = VERBS[name](own)
    value = value.square() if name == "global_mean" else value  # whose backward is linear in the rest
    (expected,) = torch.autograd.grad(value, own, retain_graph=True)
    (found,) = torch.autograd.grad(value, own, create_graph=True)
    assert torch.equal(found, expected)
    penalty = found.square().sum()
    for kind, text in (
        error_of(lambda: torch.autograd.grad(penalty, own, allow_unused=True, retain_graph=True)),
        error_of(lambda: torch.autograd.grad(own.sum() + penalty, own, retain_graph=True)),
        error_of(penalty.backward),
    ):
        assert kind == "RuntimeError"
        assert text.startswith(f"{name.split(',')[0]}: expected a first derivative, got a second one."), text


LEARNED = {"info_nce learned": {"learn_temperature": True}, "siglip learned": {"learn": True}}


def slopes(name: str, x: Tensor, part: slice, **options: Any) -> list[Tensor]:
    """Return the value of a verb or loss for a part of the rows, and its gradients of these and of what it learns."""
    rows, learned = x[part].clone().requires_grad_(), list[Tensor]()
    if name in VERBS:
        value = VERBS[name](rows, **options)
    else:
        form = FORMS[name.removesuffix(" learned")]
        loss = form.make(num_classes=x.shape[1], **options, **LEARNED.get(name, {})).double()
        targets, queries = (torch.arange(len(x))[part] % number for number in (2, 3))
        value, learned = loss(**form.arguments(rows, targets, queries)).nansum(), [*loss.parameters()]
    return [value.detach(), *torch.autograd.grad(value, [rows, *learned])]


SCALED = [*VERBS, *LEARNED, *(name for name, form in FORMS.items() if form.loss.module and form.is_first)]


@pytest.mark.parametrize("name", slow_but((*VERBS, "smooth_ap", "info_nce learned"), SCALED))
@on_ranks(4)
def test_the_scale_in_groups_of_a_larger_job(rank: int, name: str) -> None:
    """Each row of docs/gradient-scale.md: the wrapper has four ranks, of which the gather has 4, 2 or 1."""
    ends = [0, 6, 15, 22, 30]  # of the rows of each rank
    columns = 2 if name in VERBS else FORMS[name.removesuffix(" learned")].columns
    x = torch.randn(ends[-1], columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for size, of_mesh in ((4, mesh), (2, mesh["shard"]), (2, None), (1, None)):
        groups = [group_of(*range(first, first + size)) for first in range(0, 4, size)]
        group, first = of_mesh or groups[rank // size], ends[rank // size * size]
        lone = [group_of(member) for member in range(4)][rank]
        whole = slice(first, ends[rank // size * size + size])
        of_pool = {"gather_distributed": False} if name not in VERBS else {"group": lone}
        value, of_rows, *of_learned = slopes(name, x, whole, **of_pool)
        of_own = of_rows[ends[rank] - first : ends[rank + 1] - first]
        for reduction, scale in (("mean", size), ("sum", 1), (4, 4)):
            options = {"group": group, "gradient_reduction": reduction}
            found = slopes(name, x, slice(*ends[rank : rank + 2]), **options)
            right = [value, scale * of_own, *(min(1, scale / size) * slope for slope in of_learned)]
            assert max(map(error, found, right)) <= 1e-12, (size, reduction)
            assert scale == 1 or error(found[1], of_own) >= 0.5  # the control
            is_same = fullrank.all_gather_with_grad(x, **options) is x
            assert is_same == (size == 1 and scale == 1)


@on_ranks(2)
def test_a_rank_outside_the_group_raises(rank: int) -> None:
    for group in (dist.new_group([0]), DeviceMesh("cpu", [0])):
        if rank == 0:
            assert fullrank.all_gather_no_grad(torch.ones(2), group=group).shape == (2,)
        else:
            for call in (partial(fullrank.all_gather_no_grad, torch.ones(2)), fullrank.SmoothAPLoss):
                text = error_of(partial(call, group=group))[1]
                assert text.startswith("group: expected a group with this rank in it, got 'one without rank 1'."), text


@on_ranks(2)
def test_a_queue_adds_no_broadcast(rank: int) -> None:
    """In the forward of DDP, of which the loss is a part. The group is new: its headers have no room yet."""
    group = dist.new_group()
    for queue_size in (16, 100_000):
        loss = fullrank.SmoothAPLoss(num_classes=1, queue_size=queue_size, temperature=0.5, group=group)
        model = DistributedDataParallel(Model(num_outputs=1, loss=loss).float(), process_group=group)
        for _ in range(4):  # DDP settles its buckets in the first steps
            with CollectiveCounter() as counter:
                model(torch.randn(8, NUM_FEATURES), torch.tensor([0, 1] * 4)).backward()
        assert not any("broadcast" in name for name in counter.counts)
        assert max(counter.sizes) < 1000


@on_ranks(2)
def test_copies_share_the_group_and_pickles_drop_it(rank: int) -> None:
    group = dist.new_group([0, 1])
    loss = fullrank.SmoothAPLoss(num_classes=1, queue_size=8, group=group, temperature=0.5)
    logits, targets = torch.tensor([[0.1 * rank], [0.3]]), torch.tensor([0, 1])
    first = loss(logits, targets).item()
    twin, loaded = copy.deepcopy(loss), pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(loss))))
    alone = pickle.loads(pickle.dumps(fullrank.SmoothAPLoss(num_classes=1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = [module(logits, targets).item() for module in (alone, loss, twin, loaded)][1:]
    assert ["lost its process group" in str(warning.message) for warning in caught] == [True]
    assert again[0] == again[1] == again[2] != first  # the queue holds the first step's rows
    assert twin.group is group
    assert loaded.group is None
    assert len(twin.queue) == 8


def generations(rank: int, folder: str) -> tuple[list[float], str]:
    """Return the losses without, with, without and again with a process group, and the error of a stale group."""
    dist.destroy_process_group()  # that of the pool
    loss = fullrank.SmoothAPLoss(num_classes=1, queue_size=0, temperature=0.5)
    other = fullrank.SmoothAPLoss(num_classes=1, queue_size=0, temperature=0.5)
    logits, targets = torch.tensor([[0.3 - rank], [0.1]]), torch.tensor([1, 0])
    values = []
    for generation in range(2):
        values.append(loss(logits, targets).item())
        store = f"file://{folder}/store{generation}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        values.append(loss(logits, targets).item())
        if generation == 0:
            other.group = dist.new_group([0, 1])
            other(logits, targets)
            dist.barrier()
            dist.destroy_process_group()
    return values, error_of(lambda: other(logits, targets))[1]


@pytest.mark.slow
def test_a_process_group_that_was_destroyed_is_found_again(tmp_path: Path) -> None:
    """Local before there is one, gathered with one, local without, gathered with the next."""
    pool = WorkerPool(2)
    results = pool(generations, str(tmp_path))
    pool.close()
    for values, stale in results:
        assert values[0] == values[2]  # local
        assert values[1] == values[3]  # gathered
        assert values[0] != values[1]
        assert "It was destroyed" in stale


@pytest.mark.parametrize("reduction", ["mean", "sum", 6])
def test_a_gather_without_process_group_returns_its_input(reduction: str | int) -> None:
    """Arguments are checked all the same."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    for backward in ("local", "reduce_scatter"):
        options: Any = {"gradient_reduction": reduction, "backward": backward}
        assert fullrank.all_gather_with_grad(x, **options) is x
        first, none, second = fullrank.gather_rows(x, None, y, **options)
        assert (first is x, none, second is y) == (True, None, True)
    assert fullrank.all_gather_no_grad(x) is x
    for wrong, text in (({"backward": "all"}, "backward: expected"), ({"gradient_reduction": 0}, "gradient_reduction")):
        with pytest.raises(ValueError, match=text):
            fullrank.gather_rows(x, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tensor 1: expected 2 rows"):
        fullrank.gather_rows(x, torch.ones(3))


def test_global_mean_without_process_group_divides() -> None:
    total = torch.tensor(6.0, requires_grad=True)
    fullrank.global_mean(total, torch.tensor(4)).backward()
    assert total.grad == 0.25
    assert fullrank.global_sum(total) is total
    for call in (partial(fullrank.global_mean, total, 1), partial(fullrank.global_sum, total)):
        with pytest.raises(ValueError, match="gradient_reduction: expected 'mean', 'sum' or the number"):
            call(gradient_reduction=0)
