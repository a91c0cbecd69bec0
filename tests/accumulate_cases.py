"""What the worker processes run for the tests of accumulation: windows of uneven micro-batches against one process.

The model is a language model without attention. ``whole`` is the definition: all rows of all ranks in one process, one
sum of losses, one division by the number of terms. It calls nothing of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from collective_counter import CollectiveCounter
from meshes import init_device_mesh
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fullrank
from fullrank import accumulate, count_valid_tokens, discard_gradients_, sum_gradients_, windows
from fullrank.distributed.torch_private import fsdp_groups

VOCABULARY, WIDTH, LENGTH = 7, 6, 9
Batch = dict[str, Tensor]


class Model(nn.Module):
    """Embedding, one hidden layer, logits."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
            self.up = nn.Linear(WIDTH, 8, dtype=torch.float64)
            self.down = nn.Linear(8, VOCABULARY, dtype=torch.float64)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.embed(tokens))))


def make_batch(rank: int, index: int, empty: bool = False) -> Batch:
    """Return a micro-batch of two rows with 1 to 15 valid tokens, or with none; the first labels would count too."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    labels = tokens.clone()
    kept = [1 + (3 * rank + 5 * index) % (LENGTH - 1), (2 * rank + 7 * index) % LENGTH]  # valid tokens of the two rows
    for row, number in enumerate(kept):
        labels[row, 1 + number :] = -100
    if empty:
        labels[:] = -100
    return {"tokens": tokens, "labels": labels}


def make_window(layout: str, rank: int) -> list[Batch]:
    """Return the micro-batches of one rank."""
    if layout == "unequal":
        return [make_batch(rank, index) for index in range(1 + (2 * rank) % 3)]
    empty = {"uneven": rank == 0, "none": True}.get(layout, False)
    return [make_batch(rank, index, empty or (rank == 1 and index == 1)) for index in range(3)]


def sum_loss(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Return the sum of the causal losses."""
    logits, labels = model(batch["tokens"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def num_valid(batch: Batch) -> int:
    """Return the number of terms of ``sum_loss``."""
    return int((batch["labels"][:, 1:] != -100).sum())


class Result(NamedTuple):
    """A gradient of all parameters, flattened, and a loss."""

    gradient: Tensor
    loss: Tensor


def whole(model: nn.Module, batches: Sequence[Batch], total: float | None = None) -> Result:
    """One process, all rows: the definition."""
    model.zero_grad()
    loss = torch.stack([sum_loss(model, batch) for batch in batches]).sum()
    loss = loss / (total or max(sum(map(num_valid, batches)), 1))
    loss.backward()
    return Result(flat(model), loss.detach())


def flat(model: nn.Module) -> Tensor:
    """Return the gradients in the order of the parameters, whole ones of sharded ones."""
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return torch.cat([grad.reshape(-1) for grad in grads])


def error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error; absolute where zero is expected."""
    return float((found - expected).norm() / (expected.norm() or 1.0))


def wrap(model: nn.Module, kind: str) -> nn.Module:
    """Return ``model`` as data-parallel training would have it."""
    if kind == "plain":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    world_size = dist.get_world_size()
    shape, names = ((2, world_size // 2), ("replicas", "shards")) if kind == "hsdp" else ((world_size,), ("shards",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if kind == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicate(model.up, mesh=mesh)
        return replicate(model, mesh=mesh)
    fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def reduced(model: nn.Module, kind: str) -> Tensor:
    """Return the gradient after the reduction; a plain module's is added over the ranks by hand."""
    gradient = flat(model)
    if kind == "plain":
        dist.all_reduce(gradient)
    return gradient


def run_window(model: nn.Module, batches: Sequence[Batch], **options: Any) -> Tensor:
    """Accumulate one window and return its mean loss."""
    for step, batch in accumulate(model, batches, options.pop("count", count_valid_tokens), **options):
        step.backward(sum_loss(model, batch))
    return step.mean_loss()


def all_batches(layout: str) -> list[Batch]:
    """Return the micro-batches of all ranks."""
    return [batch for rank in range(dist.get_world_size()) for batch in make_window(layout, rank)]


def exactness(rank: int, kind: str, sync: str, dtype: str) -> dict[str, float]:
    """Return the errors of gradients and losses, for every layout of a window that this wrapper can take."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), kind)
    errors: dict[str, float] = {}
    free = kind in ("plain", "ddp", "replicate") and sync != "each"
    for layout in ["full", "uneven", "none"] + ["unequal"] * free:
        model.zero_grad()
        expected = whole(reference, all_batches(layout))
        loss = run_window(model, make_window(layout, rank), sync=sync)
        errors[layout] = error(reduced(model, kind), expected.gradient)
        errors[f"{layout} loss"] = error(loss, expected.loss)
        assert loss.dtype == kept
        assert loss.shape == ()
        if layout == "none":
            assert all(p.grad is not None for p in model.parameters())
            errors["none"] = float(flat(model).abs().max())
    errors |= _two_windows(rank, reference, model, kind, sync)
    return errors


def _two_windows(rank: int, reference: nn.Module, model: nn.Module, kind: str, sync: str) -> dict[str, float]:
    """Four micro-batches in windows of three: three and one."""
    errors: dict[str, float] = {}
    loader = [make_batch(rank, index) for index in range(4)]
    for number, window in enumerate(windows(loader, 3)):
        model.zero_grad()
        others = range(dist.get_world_size())
        start = 3 * number
        batches = [make_batch(other, index) for other in others for index in range(start, start + len(window))]
        expected = whole(reference, batches)
        loss = run_window(model, window, sync=sync)
        errors[f"window {number}"] = error(reduced(model, kind), expected.gradient)
        errors[f"window {number} loss"] = error(loss, expected.loss)
    assert len(window) == 1
    return errors


def forms(rank: int, kind: str, dtype: str) -> dict[str, float]:
    """Return the errors of every form of count and of step."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), kind)
    batches = make_window("uneven", rank)
    expected = whole(reference, all_batches("uneven"))
    total = sum(map(num_valid, all_batches("uneven")))
    renamed = [{"tokens": b["tokens"], "target_tokens": b["labels"][:, 1:]} for b in batches]
    rule = partial(count_valid_tokens, key=("labels", "target_tokens"), shift=False)

    def losses(run: Callable[[], Tensor]) -> float:
        model.zero_grad()
        loss = run()
        return max(error(reduced(model, kind), expected.gradient), error(loss, expected.loss))

    def in_a_loop(count: Any, call: Callable[[Any, Batch], None], of: Sequence[Batch] = batches) -> float:
        def run() -> Tensor:
            for step, batch in accumulate(model, of, count):
                call(step, batch)
            return step.mean_loss()

        return losses(run)

    def mean_by_hand(step: Any, batch: Batch) -> None:
        mask = batch["labels"][:, 1:] != -100  # 0 / 0 without a valid token, also in its backward
        logits = model(batch["tokens"])[:, :-1]
        terms = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none")
        step.backward((terms * mask.flatten()).sum() / mask.sum(), num_items=num_valid(batch))

    def torch_mean(step: Any, batch: Batch) -> None:
        logits, labels = model(batch["tokens"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        step.backward(F.cross_entropy(logits, labels), num_items=(labels != -100).sum())

    def shifted(step: Any, batch: Batch) -> None:
        labels = F.pad(batch["target_tokens"], (1, 0), value=-100)
        step.backward(sum_loss(model, {"tokens": batch["tokens"], "labels": labels}))

    def scaled(step: Any, batch: Batch) -> None:
        step.scale(sum_loss(model, batch)).backward()

    def plain(step: Any, batch: Batch) -> None:
        step.backward(sum_loss(model, batch))

    return {
        "function": in_a_loop(num_valid, plain),
        "function of tensors": in_a_loop(lambda batch: (batch["labels"][:, 1:] != -100).sum(), plain),
        "number": in_a_loop(total, plain),
        "tensor": in_a_loop(torch.tensor([float(total)]), plain),
        "window count": in_a_loop(count_valid_tokens(batches), plain),
        "keys": in_a_loop(rule, shifted, renamed),
        "mean by hand": in_a_loop(num_valid, mean_by_hand),
        "mean": in_a_loop(count_valid_tokens, torch_mean),
        "scale": in_a_loop(count_valid_tokens, scaled),
    }


def weighted(rank: int, kind: str, dtype: str) -> float:
    """Return the error with terms of unequal weight, and a count that is their mass."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), kind)
    weights = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(kept)

    def loss(of: nn.Module, batch: Batch) -> Tensor:
        logits, labels = of(batch["tokens"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        return F.cross_entropy(logits, labels, weight=weights, reduction="sum")

    def mass(batch: Batch) -> Tensor:
        labels = batch["labels"][:, 1:]
        return weights[labels[labels != -100]].sum()

    everything = all_batches("uneven")
    (sum(loss(reference, b) for b in everything) / sum(mass(b).double() for b in everything)).backward()
    for step, batch in accumulate(model, make_window("uneven", rank), mass):
        step.backward(loss(model, batch))
    return error(reduced(model, kind), flat(reference))


def scaler_errors(rank: int, kind: str, dtype: str) -> tuple[float, float]:
    """Return the error after a GradScaler, and the ratio of the scaled gradient to the true one."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step, batch in accumulate(model, make_window("uneven", rank), count_valid_tokens):
        scaler.scale(step.scale(sum_loss(model, batch))).backward()
    expected = whole(reference, all_batches("uneven")).gradient
    ratio = float(reduced(model, kind) @ expected / expected.norm() ** 2)
    scaler.unscale_(optimizer)
    return error(reduced(model, kind), expected), ratio


def half_errors(rank: int, dtype: str) -> tuple[float, float]:
    """Return the errors in half precision, of the accumulated gradient and of one process's, against float64."""
    kept = getattr(torch, dtype)
    true = whole(Model(torch.float64), all_batches("uneven")).gradient
    model, alone = wrap(Model(kept), "ddp"), Model(kept)
    loss = run_window(model, make_window("uneven", rank))
    assert loss.dtype == torch.float32
    return error(flat(model).double(), true), error(whole(alone, all_batches("uneven")).gradient.double(), true)


def naive(rank: int, way: str, dtype: str) -> float:
    """Return the error of what is widely done instead, under DDP."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), "ddp")
    batches, layout = make_window("full", rank), "full"
    expected = whole(reference, all_batches(layout)).gradient
    if way == "unshifted count":
        run_window(model, batches, count=partial(count_valid_tokens, shift=False))
        return error(flat(model), expected)
    for index, batch in enumerate(batches):
        with fullrank.maybe_no_sync(model, index, len(batches)):
            terms = max(num_valid(batch), 1) if way == "mean of means" else 2 * (LENGTH - 1)
            (sum_loss(model, batch) / terms / len(batches)).backward()
    return error(flat(model), expected)


def summed_then_pooled(rank: int, dtype: str) -> dict[str, float]:
    """Return errors of accumulation and of a pooled loss on one FSDP2 model, before and after ``sum_gradients_``."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), "fsdp")
    features = torch.randint(0, VOCABULARY, (24, 4), generator=torch.Generator().manual_seed(9))
    targets = (torch.arange(24) % 5 == 0).long()

    def scores(of: nn.Module, rows: slice) -> Tensor:
        return of(features[rows]).mean(dim=(1, 2))[:, None]

    def pooled(of: nn.Module, rows: slice, **options: Any) -> Tensor:
        of.zero_grad()
        fullrank.SmoothAPLoss(1, temperature=0.3, queue_size=0, **options)(scores(of, rows), targets[rows]).backward()
        return flat(of)

    world_size = dist.get_world_size()
    own = slice(24 * rank // world_size, 24 * (rank + 1) // world_size)
    expected = whole(reference, all_batches("uneven")).gradient
    expected_pooled = pooled(reference, slice(None), gather_distributed=False)
    errors = {}
    for reduction in ("mean", "sum"):
        if reduction == "sum":
            assert sum_gradients_(model) == 1.0
        model.zero_grad()
        run_window(model, make_window("uneven", rank))
        errors[f"accumulate, {reduction}"] = error(flat(model), expected)
        errors[f"pooled, {reduction}"] = error(pooled(model, own, gradient_reduction=reduction), expected_pooled)
    return errors


def aborted(rank: int, kind: str, sync: str, dtype: str, discard: bool) -> list[float]:
    """Return errors of the window after one that was left, in the middle or in front of the last backward."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), kind)
    batches, errors = make_window("full", rank), []
    expected = whole(reference, all_batches("full")).gradient
    for last in (0, 2):
        for index, (step, batch) in enumerate(accumulate(model, batches, count_valid_tokens, sync=sync)):
            loss = sum_loss(model, batch)
            if index == last == 2:
                break
            step.backward(loss)
            if index == last:
                break
        model.zero_grad()
        if discard:
            discard_gradients_(model)
        run_window(model, batches, sync=sync)
        errors.append(error(reduced(model, kind), expected))
        discard_gradients_(model)
    return errors


def aborted_in_different_places(rank: int) -> tuple[list[float], bool]:
    """Return errors of windows of unequal length after one that all left in their first micro-batch, and a control.

    For some ranks that was the last micro-batch too. DDP has a buffer, which it broadcasts in front of a forward. The
    control is whether DDP stood as the next window wants it without the discard.
    """
    batches = make_window("full", rank)[: rank + 1]
    reference = Model(torch.float64)
    inner = Model(torch.float64)
    inner.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
    model = wrap(inner, "ddp")
    everything = [batch for r in range(dist.get_world_size()) for batch in make_window("full", r)[: r + 1]]
    expected, errors = whole(reference, everything).gradient, []
    run_window(model, batches)
    for _ in accumulate(model, batches, count_valid_tokens):
        sum_loss(model, next(iter(batches)))
        break
    stood = bool(model.require_forward_param_sync)
    discard_gradients_(model)
    for _ in range(2):
        model.zero_grad()
        run_window(model, batches)
        errors.append(error(flat(model), expected))
    return errors, stood


def collectives(rank: int, kind: str, sync: str) -> list[dict[str, int]]:
    """Return the numbers of collectives in a window, and in the micro-batches of another but the last."""
    model = wrap(Model(torch.float32), kind)
    for _ in range(3):  # DDP arranges its buckets in the second
        with CollectiveCounter() as counter:
            run_window(model, make_window("full", rank), sync=sync)
    found = [dict(counter.counts)]
    with CollectiveCounter() as counter:
        loop = accumulate(model, make_window("full", rank), count_valid_tokens, sync=sync)
        for index, (step, batch) in enumerate(loop):
            step.backward(sum_loss(model, batch))
            if index == 1:
                found.append(dict(counter.counts))
    return found


def leaving(rank: int, kind: str, way: str) -> list[bool]:
    """Return whether the switches are as they were: in the second micro-batch, and after the loop was left there."""
    model = wrap(Model(torch.float32), kind)
    batches, before = make_window("full", rank), switches(model)
    within, loop = [], accumulate(model, batches, count_valid_tokens)
    try:
        for index, (step, batch) in enumerate(loop if way == "failed and kept" else accumulate(model, batches, 1.0)):
            if index == 1:
                within.append(switches(model) == before)
                if way == "failed and kept":
                    step.backward(sum_loss(model, batch).detach())  # nobody has a backward, so every rank raises
                elif way == "raised":
                    raise ValueError("inside")
                break
            step.backward(sum_loss(model, batch))
    except ValueError:
        pass
    return [*within, switches(model) == before]


def unequal_after_a_stray_forward(rank: int, dtype: str) -> float:
    """Return the error of a window of unequal micro-batches after a forward without a backward, discarded."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), "ddp")
    for _ in range(2):
        sum_loss(model, make_batch(rank, 0))
        discard_gradients_(model)
        run_window(model, make_window("unequal", rank))
    return error(flat(model), whole(reference, all_batches("unequal")).gradient)


class Exchange(torch.autograd.Function):
    """Send rows to the ranks that hold their expert, and the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
        ctx.sizes = sends, receives, group
        output = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), receives, sends, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sends, receives, group = ctx.sizes
        output = grad.new_empty(sum(sends), *grad.shape[1:])
        dist.all_to_all_single(output, grad.contiguous(), sends, receives, group=group)
        return output, None, None, None


class Experts(nn.Module):
    """Two experts, each token going to the one of its parity: both here, or one on each rank of ``group``."""

    def __init__(self, dtype: torch.dtype, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.outer = Model(dtype)
        held = (0, 1) if group is None else (dist.get_rank(group),)
        self.experts = nn.ModuleDict({str(index): Expert(dtype, index) for index in held})

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.outer.up(self.outer.embed(tokens)).flatten(0, 1)
        order = torch.argsort(tokens.flatten() % 2, stable=True)
        num_odd = int((tokens % 2).sum())
        mixed = self._run(hidden[order], [len(order) - num_odd, num_odd])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return self.outer.down(torch.tanh(mixed[back])).unflatten(0, tokens.shape)

    def _run(self, rows: Tensor, sends: list[int]) -> Tensor:
        if self.group is None:
            return torch.cat([self.experts[str(index)](part) for index, part in enumerate(rows.split(sends))])
        receives = torch.empty(2, dtype=torch.int64)
        dist.all_to_all_single(receives, torch.tensor(sends), group=self.group)
        (expert,) = self.experts.values()
        arrived = Exchange.apply(rows, sends, receives.tolist(), self.group)
        return Exchange.apply(expert(arrived), receives.tolist(), sends, self.group)


class Expert(nn.Module):
    """A linear map of its own."""

    def __init__(self, dtype: torch.dtype, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(50 + index)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64, generator=generator).to(dtype))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight


def expert_errors(rank: int, way: str, dtype: str) -> tuple[float, float] | str:
    """Return the errors of the dense part and of this rank's expert, or the text that is raised without a sum."""
    from torch.distributed.fsdp import fully_shard

    kept, world_size = getattr(torch, dtype), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "experts"))
    model = Experts(kept, mesh["experts"].get_group())
    (expert,) = model.experts.values()
    fully_shard(expert, mesh=mesh["data"])
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    options: dict[str, Any] = {}
    if way == "sum":
        sum_gradients_(model)
    elif way == "ep_size":
        expert.set_gradient_divide_factor(2.0)
        expert.set_force_sum_reduction_for_comms(True)
        options["multiplier"] = float(world_size)
    try:
        run_window(model, make_window("full", rank), **options)
    except ValueError as raised:
        return str(raised)
    reference = Experts(kept)
    whole(reference, all_batches("full"))
    own = reference.experts[str(dist.get_rank(model.group))].weight.grad
    return error(flat(model.outer), flat(reference.outer)), error(expert.weight.grad.full_tensor(), own)


def tensor_parallel_errors(rank: int, dtype: str) -> dict[str, float]:
    """Return the errors with two data ranks of two tensor-parallel ranks each, by the group the count is made over."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    kept = getattr(torch, dtype)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    reference = Model(kept)
    data_rank = mesh["data"].get_local_rank()
    expected = whole(reference, [b for other in range(2) for b in make_window("full", other)])
    errors = {}
    for name, group in (("wrapper", None), ("data mesh", mesh["data"]), ("world", dist.group.WORLD)):
        model = Model(kept)
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        loss = run_window(model, make_window("full", data_rank), group=group)
        errors[name] = error(flat(model), expected.gradient)
        errors[f"{name} loss"] = error(loss, expected.loss)
    errors |= _loss_parallel_errors(kept, mesh, make_window("full", data_rank), expected)
    return errors


def _loss_parallel_errors(dtype: torch.dtype, mesh: Any, batches: list[Batch], expected: Result) -> dict[str, float]:
    """Return the errors with logits sharded over the vocabulary, whose loss is a DTensor."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    model = Model(dtype)
    down = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    up = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], {"up": up, "down": down})
    fully_shard(model, mesh=mesh["data"])
    with loss_parallel():
        for step, batch in accumulate(model, batches, count_valid_tokens):
            logits, labels = model(batch["tokens"]), F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            step.backward(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
    return {
        "loss parallel": error(flat(model), expected.gradient),
        "loss parallel loss": error(step.mean_loss(), expected.loss),
    }


def context_parallel_error(rank: int, dtype: str, folded: bool) -> float:
    """Return the error with sequences cut over two ranks, inside the wrapper's mesh or added by hand afterwards."""
    from torch.distributed.fsdp import fully_shard

    kept = getattr(torch, dtype)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    data_rank, part = mesh["data"].get_local_rank(), mesh["context"].get_local_rank()
    model, reference = Model(kept), Model(kept)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)) if folded else mesh["data"])
    rule = partial(count_valid_tokens, shift=False)
    for step, batch in accumulate(model, _cut(make_window("full", data_rank), part), rule, group=mesh):
        logits = model(batch["tokens"])
        step.backward(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"))
    if not folded:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.to_local(), group=mesh["context"].get_group())
    return error(flat(model), whole(reference, [b for r in range(2) for b in make_window("full", r)]).gradient)


def _cut(batches: Sequence[Batch], part: int) -> list[Batch]:
    """Return one of two halves of every sequence, the labels shifted before the cut."""
    columns = slice(0, 5) if part == 0 else slice(5, None)
    shifted = [(b["tokens"], F.pad(b["labels"][:, 1:], (0, 1), value=-100)) for b in batches]
    return [{"tokens": tokens[:, columns], "labels": labels[:, columns]} for tokens, labels in shifted]


def pipeline_error(rank: int, schedule: str, dtype: str, loss_scale: str) -> float:
    """Return the error of this rank's stage of two, alone or with data-parallel copies of the pipeline under FSDP2."""
    from torch.distributed import pipelining
    from torch.distributed.fsdp import fully_shard

    kept, num_copies = getattr(torch, dtype), dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (num_copies, 2), mesh_dim_names=("data", "stages"))
    copy, index = mesh["data"].get_local_rank(), mesh["stages"].get_local_rank()
    full = Model(kept)
    part = nn.Sequential(full.embed, full.up) if index == 0 else nn.Sequential(nn.Tanh(), full.down)
    if num_copies > 1:
        fully_shard(part, mesh=mesh["data"])
    batches = make_window("full", copy)
    num_terms = count_valid_tokens(batches, group=mesh["data"])
    multiplier = float(num_copies)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return loss * multiplier / num_terms

    stage = pipelining.PipelineStage(part, index, 2, torch.device("cpu"), group=mesh["stages"].get_group())
    kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
    loop = kinds[schedule](stage, len(batches), loss_fn=loss_fn, scale_grads=loss_scale == "schedule")
    tokens, labels = (torch.cat([batch[key] for batch in batches]) for key in ("tokens", "labels"))
    loop.step(*[tokens] if index == 0 else [], target=labels if index == 1 else None)
    reference = Model(kept)
    whole(reference, [b for other in range(num_copies) for b in make_window("full", other)])
    own = nn.Sequential(reference.embed, reference.up) if index == 0 else nn.Sequential(reference.down)
    return error(flat(part), flat(own))


class Outcome(NamedTuple):
    """What one rank saw of a window that one rank spoils, and of the one after it."""

    kind: str
    text: str
    untouched: bool  # no gradient anywhere afterwards
    restored: bool
    next_error: float


def spoil(rank: int, kind: str, case: str, bad_rank: int, dtype: str = "float64") -> Outcome:
    """Run a window in which ``bad_rank`` (-1: every rank) does something wrong."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), kind)
    batches = make_window("full", rank)
    bad = rank == bad_rank or bad_rank < 0
    before, found = switches(model), ("nothing", "")
    try:
        run = _spoiled_opening if case in OPENINGS else _spoiled_loop
        run(model, batches, case, bad)
    except Exception as raised:
        found = type(raised).__name__, str(raised)
    untouched = all(parameter.grad is None for parameter in model.parameters())
    restored = switches(model) == before
    run_window(model, batches)
    return Outcome(*found, untouched, restored, error(reduced(model, kind), whole(reference, all_batches("full"))[0]))


def switches(model: nn.Module) -> list[Any]:
    """Return what says when gradients are reduced."""
    found: list[Any] = [
        m.require_backward_grad_sync for m in model.modules() if hasattr(m, "require_backward_grad_sync")
    ]
    return found + [(group.state.reduce_grads, group.state.all_reduce_grads) for group in fsdp_groups(model)]


OPENINGS: dict[str, Callable[[list[Batch]], dict[str, Any]]] = {
    "generator": lambda batches: {"micro_batches": iter(batches)},
    "one mapping": lambda batches: {"micro_batches": batches[0]},
    "no micro-batch": lambda batches: {"micro_batches": []},
    "unequal": lambda batches: {"micro_batches": batches[:2]},
    "unequal, each": lambda batches: {"micro_batches": batches[:2], "sync": "each"},
    "missing key": lambda batches: {"micro_batches": [{"tokens": batch["tokens"]} for batch in batches]},
    "float labels": lambda batches: {"micro_batches": [{"labels": batch["labels"].float()} for batch in batches]},
    "list of labels": lambda batches: {"micro_batches": [{"labels": batch["labels"].tolist()} for batch in batches]},
    "negative count": lambda batches: {"count": lambda batch: -1},
    "count with several elements": lambda batches: {"count": lambda batch: batch["labels"] != -100},
    "count that fails": lambda batches: {"count": lambda batch: batch["length"]},
    "count of no kind": lambda batches: {"count": "tokens"},
    "positional count": lambda batches: {"count": partial(count_valid_tokens, batches)},
    "group of the count": lambda batches: {"count": partial(count_valid_tokens, group=None)},
    "local count": lambda batches: {"count": 5 + dist.get_rank()},
    "another rule": lambda batches: {"count": partial(count_valid_tokens, shift=False)},
    "another sync": lambda batches: {"sync": "each"},
    "unknown sync": lambda batches: {"sync": "never"},
    "shard without FSDP": lambda batches: {"sync": "shard"},
    "another multiplier": lambda batches: {"multiplier": 7.0},
    "bad multiplier": lambda batches: {"multiplier": 0.0},
}


def _spoiled_opening(model: nn.Module, batches: list[Batch], case: str, bad: bool) -> None:
    options: dict[str, Any] = {"micro_batches": batches, "count": count_valid_tokens}
    if case == "unequal, each":
        options["sync"] = "each"
    if case == "local count":
        options["count"] = 5 + dist.get_rank()
    if bad:
        options |= OPENINGS[case](batches)
    micro_batches = options.pop("micro_batches")
    run_window(model, micro_batches, **options)


def _spoiled_loop(model: nn.Module, batches: list[Batch], case: str, bad: bool) -> None:
    """``case`` is a mistake and the micro-batch that it is made in."""
    mistake, _, place = case.rpartition(" in ")
    num_items = mistake in ("negative items", "too many items", "items that are text")
    for index, (step, batch) in enumerate(accumulate(model, batches, count_valid_tokens)):
        loss = sum_loss(model, batch)
        items = num_valid(batch)
        if bad and index == int(place):
            _MISTAKES[mistake](step, loss, items)
        elif num_items:
            step.backward(loss / max(items, 1), num_items=items)
        else:
            step.backward(loss)
    step.mean_loss()


def _twice(step: Any, loss: Tensor, items: int) -> None:
    step.backward(loss, num_items=None)
    step.backward(loss * 2)


_MISTAKES: dict[str, Callable[[Any, Tensor, int], Any]] = {
    "vector": lambda step, loss, items: step.backward(torch.stack([loss, loss])),
    "scaled vector": lambda step, loss, items: step.scale(torch.stack([loss, loss])).backward(),
    "number": lambda step, loss, items: step.backward(3.0),
    "no graph": lambda step, loss, items: step.backward(loss.detach()),
    "two calls": _twice,
    "no call": lambda step, loss, items: None,
    "scale alone": lambda step, loss, items: step.scale(loss),
    "negative items": lambda step, loss, items: step.backward(loss, num_items=-1),
    "negative items in a tensor": lambda step, loss, items: step.backward(loss, num_items=torch.tensor(-1)),
    "items that are text": lambda step, loss, items: step.backward(loss, num_items="3"),
    "too many items": lambda step, loss, items: step.backward(loss / max(items, 1), num_items=items + 1),
}


def counts(rank: int) -> dict[str, Any]:
    """Return counts over all ranks and over a mesh of this rank alone, and what bad arguments on one rank raise."""
    window, world_size = make_window("uneven", rank), dist.get_world_size()
    own = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("others", "own"))["own"]
    outcome: dict[str, Any] = {
        "found": count_valid_tokens(window),
        "expected": sum(map(num_valid, all_batches("uneven"))),
        "subgroup": count_valid_tokens(window, group=own),
        "expected subgroup": sum(map(num_valid, window)),
    }
    is_last = rank == world_size - 1
    try:
        count_valid_tokens(iter(window) if is_last else window)
    except TypeError as raised:
        outcome["bad"] = "TypeError", int(str(raised).partition("failed on rank ")[2].partition(":")[0])
    try:
        count_valid_tokens(window, shift=not is_last)
    except ValueError as raised:
        outcome["other rule"] = "ValueError", str(raised)
    return outcome
