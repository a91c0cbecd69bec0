"""What the worker processes run for the tests of accumulation: windows of uneven micro-batches against one process.

The model is a language model without attention. ``whole`` is the definition: all rows of all ranks in one process, one
sum of losses, one division by the number of terms. It calls nothing of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshes import init_device_mesh
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fullrank import accumulate, count_valid_tokens
from fullrank.distributed.torch_private import fsdp_groups

# float64: rounding of sums in another order. float32: the model's own products, added up over ranks instead of rows.
LIMITS = {"float64": 1e-12, "float32": 2e-6}

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


def assert_exact(errors: dict[str, float], dtype: str) -> None:
    """Assert that every error is within the limit, naming those that are not."""
    assert errors
    assert {name: value for name, value in errors.items() if not value <= LIMITS[dtype]} == {}


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

        options = {"mesh": mesh}
        if torch.__version__ < (2, 10):  # still a prototype, which took a mesh of replicas and shards
            shape, names = (world_size, 1), ("replicas", "shards")
            options = {"device_mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
        replicate(model.up, **options)
        return replicate(model, **options)
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


def _cut(batches: Sequence[Batch], part: int) -> list[Batch]:
    """Return one of two halves of every sequence, the labels shifted before the cut."""
    columns = slice(0, 5) if part == 0 else slice(5, None)
    shifted = [(b["tokens"], F.pad(b["labels"][:, 1:], (0, 1), value=-100)) for b in batches]
    return [{"tokens": tokens[:, columns], "labels": labels[:, columns]} for tokens, labels in shifted]


def switches(model: nn.Module) -> list[Any]:
    """Return what says when gradients are reduced."""
    found: list[Any] = [
        m.require_backward_grad_sync for m in model.modules() if hasattr(m, "require_backward_grad_sync")
    ]
    return found + [(group.state.reduce_grads, group.state.all_reduce_grads) for group in fsdp_groups(model)]
