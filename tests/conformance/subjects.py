"""The model of the tests over ranks, the wrappers around it, and its gradient compared with that of one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from meshes import init_device_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fullrank
from fullrank.gradients.torch_private import count_unreduced, fsdp_groups

# float64: rounding of sums in another order. float32: the model's own products, added up over ranks instead of rows.
LIMITS = {"float64": 1e-12, "float32": 2e-6}

NUM_FEATURES, WIDTH, HIDDEN = 7, 6, 8  # a token is one of as many words as a row has features


class Model(nn.Module):
    """Embedding, one hidden layer, ``num_outputs`` logits; the same in every process.

    It takes tokens (..., integers), or rows of features (N, 7), of which a token is the one-hot case. ``middle`` comes
    after the hidden layer, ``buffers`` counts the forwards in a buffer, which DDP broadcasts, and with a ``loss`` the
    forward returns it and takes its further arguments.
    """

    def __init__(
        self,
        dtype: torch.dtype | str = torch.float64,
        num_outputs: int = NUM_FEATURES,
        *,
        seed: int = 0,
        middle: Iterable[nn.Module] = (),
        buffers: bool = False,
        loss: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_FEATURES, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.middle = nn.Sequential(*middle)
        self.down = nn.Linear(HIDDEN, num_outputs)
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 2)
        self.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        if buffers:
            self.register_buffer("forwards", torch.zeros(1))
        self.loss = loss

    def forward(self, rows: Tensor, *arguments: Any, **options: Any) -> Any:
        if hasattr(self, "forwards"):
            self.forwards += 1
        embedded = rows @ self.embed.weight if rows.is_floating_point() else self.embed(rows)
        logits = self.down(torch.tanh(self.middle(self.up(embedded))))
        return logits if self.loss is None else self.loss(logits, *arguments, **options)


class Headless(Model):
    """Returns hidden states; its last layer belongs to the loss."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.middle(self.up(self.embed(tokens))))


class TwoHeads(Model):
    """Predicts the next token, and the one after it."""

    def __init__(self, dtype: torch.dtype | str = torch.float64, **options: Any) -> None:
        super().__init__(dtype, **options)
        self.mtp = nn.Linear(HIDDEN, NUM_FEATURES, dtype=self.down.weight.dtype)
        with torch.no_grad():
            for number, parameter in enumerate(self.mtp.parameters()):
                parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).view_as(parameter))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.up(self.embed(tokens)))
        return self.down(hidden), self.mtp(hidden)


class _AddGradient(torch.autograd.Function):
    """Returns ``hidden``, and adds ``factor`` times the gradient of ``loss``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.tensor(ctx.factor, dtype=grad.dtype), None


class Router(nn.Module):
    factor = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        loss = 0.1 * hidden.square().sum()
        self.loss_sum = loss.detach()
        return _AddGradient.apply(hidden, loss, self.factor)


class Adapted(nn.Module):
    """A base and two linear layers on its logits, of which each call names one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Model()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.adapters = nn.ModuleList(nn.Linear(7, 7, dtype=torch.float64) for _ in range(2))

    def forward(self, tokens: Tensor, index: int) -> Tensor:
        logits = self.base(tokens)
        return logits + self.adapters[index](logits)


def mesh_of(kind: str) -> DeviceMesh:
    """Return the mesh of a wrapper over all ranks; ``hsdp`` may say its shape, where one dimension has one rank."""
    world_size = dist.get_world_size()
    if kind.startswith("hsdp"):
        shapes = {"hsdp": (2, world_size // 2), "hsdp (1, W)": (1, world_size), "hsdp (W, 1)": (world_size, 1)}
        return init_device_mesh("cpu", shapes[kind], mesh_dim_names=("replicas", "shards"))
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("shards",))


def wrap(model: nn.Module, kind: str, **options: Any) -> nn.Module:
    """Return ``model`` as data-parallel training would have it; ``summed`` is FSDP2 after ``sum_gradients_``.

    The sharded wrappers take the first linear layer apart, so that they have two groups of parameters.
    """
    if kind == "plain":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, **options)
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard

    manage = {"replicate": replicate}.get(kind, fully_shard)
    for layer in [module for module in list(model.modules())[1:] if isinstance(module, nn.Linear)][:1]:
        manage(layer, mesh=mesh_of(kind), **options)
    manage(model, mesh=mesh_of(kind), **options)
    if kind == "summed":
        fullrank.sum_gradients_(model)
    return model


def by_hand(model: nn.Module) -> Any:
    """Return the ``group`` that a plain model needs on several ranks, or None for a wrapped one."""
    wrapped = [m for m in model.modules() if isinstance(m, DistributedDataParallel) or hasattr(m, "_get_fsdp_state")]
    return dist.group.WORLD if dist.is_initialized() and not wrapped else None


def whole(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that may be sharded; collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient(of: nn.Module | Iterable[Tensor]) -> Tensor:
    """Return all gradients as one vector, zeros for a parameter without one; collective if sharded."""
    parameters = of.parameters() if isinstance(of, nn.Module) else of
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([whole(part).detach().reshape(-1) for part in parts])


def reduced(model: nn.Module) -> Tensor:
    """Return the gradient after the reduction; that of a plain module is added over the ranks by hand."""
    found = gradient(model)
    if by_hand(model) is not None:
        dist.all_reduce(found)
    return found


def has_gradients(model: nn.Module) -> bool:
    """Return whether any parameter has a gradient, or FSDP2 holds one back."""
    parameters = list(model.parameters())
    return count_unreduced(parameters) > 0 or any(parameter.grad is not None for parameter in parameters)


def switches(model: nn.Module) -> list[Any]:
    """Return what says when gradients are reduced."""
    found: list[Any] = [
        m.require_backward_grad_sync for m in model.modules() if hasattr(m, "require_backward_grad_sync")
    ]
    return found + [(group.state.reduce_grads, group.state.all_reduce_grads) for group in fsdp_groups(model)]


def with_gradient(grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device))
    parameter.grad = grad.clone()
    return parameter


def error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error; absolute where zero is expected."""
    return float((found - expected).norm() / (expected.norm() or 1.0))


def assert_exact(errors: dict[str, float], dtype: str) -> None:
    """Assert that every error is within the limit, naming those that are not."""
    assert errors
    assert {name: value for name, value in errors.items() if not value <= LIMITS[dtype]} == {}
