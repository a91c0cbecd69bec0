"""Clip the gradient of a model under tensor parallelism and FSDP2 by the norm that one process would compute.

Usage:  torchrun --standalone --nproc-per-node 4 examples/clip_mixed_mesh.py

Four ranks form a mesh of two by two: FSDP2 over "dp", tensor parallelism over "tp". Some parameters are sharded over
both, some over dp alone, and one is a plain tensor that no wrapper manages. The reference is the same model in one
process with the whole batch. torch's own function gets the same gradients for comparison.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import get_total_norm

from fullrank import clip_grad_norm_, total_grad_norm

MAX_NORM = 0.1
HIGHEST_DIFFERENCE = 1e-13  # relative, float64: ranks add gradients in a different order than one process


class Scale(nn.Module):
    """Multiplies every feature by a learned factor."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Network(nn.Module):
    """A residual block between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 14), nn.Linear(14, 8)
        self.head, self.scale = nn.Linear(8, 3), Scale(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        hidden = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        return self.scale(self.head(hidden))


def spread(model: Network, mesh: DeviceMesh) -> None:
    """Split up and down over tp; shard everything but the factor over dp."""
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"], ignored_params=set(model.scale.parameters()))


def make_models() -> tuple[Network, Network]:
    """Return the model over the ranks and the one in a single process, with the gradients of the whole batch."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone, rows = Network().double(), torch.randn(8, 6, dtype=torch.float64)
    model = copy.deepcopy(alone)
    spread(model, mesh)
    alone(rows).square().mean().backward()
    model(rows.chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
    # No wrapper reduces this gradient, so average it by hand before computing the norm.
    grad = model.scale.factor.grad
    dist.all_reduce(grad, group=mesh["dp"].get_group())
    grad /= mesh["dp"].size()
    return model, alone


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Return the local tensor of every gradient on this rank."""
    grads = (parameter.grad for parameter in model.parameters())
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def full_gradient(model: nn.Module) -> Tensor:
    """Return the gradient of all parameters as one vector, on every rank."""
    grads = (parameter.grad for parameter in model.parameters())
    return torch.cat([(grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten() for grad in grads])


@contextmanager
def restored(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield copies of this rank's gradients, and restore them afterwards."""
    before = [grad.clone() for grad in local_gradients(model)]
    yield before
    for grad, copied in zip(local_gradients(model), before):
        grad.copy_(copied)


def attempt(model: nn.Module, parameters: Iterable[Tensor], foreach: bool | None) -> str:
    """Return what torch's function does with ``parameters``, as text."""
    with restored(model) as before:
        try:
            text = f"{torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=foreach)}"
        except RuntimeError as error:
            text = f"RuntimeError: {str(error).partition(',')[0]}"
        scaled = sum(not torch.equal(*pair) for pair in zip(local_gradients(model), before))
    return f"{text}\n    after {scaled} of {len(before)} gradients have been scaled"


def clip_each_mesh(model: nn.Module) -> str:
    """Let torch clip the parameters of each mesh separately, which avoids its errors; return the remaining norm."""
    by_mesh: dict[object, list[Tensor]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    with restored(model):
        for parameters in by_mesh.values():
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        return f"norm {total_grad_norm(model).item():.3f} after clipping to {MAX_NORM}"


def same_on_all_ranks(norm: Tensor) -> bool:
    """Return whether every rank holds the same bits."""
    gathered = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, norm)
    return all(torch.equal(other, norm) for other in gathered)


def describe(parameter: Tensor) -> str:
    """Return the placements of a parameter, as text."""
    if not isinstance(parameter, DTensor):
        return "plain"
    names = parameter.device_mesh.mesh_dim_names or ()
    return ", ".join(f"{name} {type(place).__name__}" for name, place in zip(names, parameter.placements))


def demonstrate() -> bool:
    """Print the result of every way to clip the same gradients; return whether ours is correct."""
    model, alone = make_models()
    show = print if dist.get_rank() == 0 else lambda *_: None
    for name, parameter in model.named_parameters():
        show(f"{name:13} {tuple(parameter.shape)!s:8} {describe(parameter)}")

    layers = [*model.up.parameters(), *model.down.parameters(), *model.scale.parameters()]
    show("\ntorch.nn.utils.clip_grad_norm_ of these gradients")
    show(f"  all parameters: {attempt(model, model.parameters(), None)}")
    show(f"  all parameters, foreach=False: {attempt(model, model.parameters(), False)}")
    show(f"  up, down and scale, foreach=False: {attempt(model, layers, False)}")
    show(f"  the parameters of each mesh separately: {clip_each_mesh(model)}")

    inf = float("inf")
    right_inf = get_total_norm([parameter.grad for parameter in alone.parameters()], inf)
    right = torch.nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
    norm_inf = total_grad_norm(model, inf)
    norm = clip_grad_norm_(model, MAX_NORM)
    expected = full_gradient(alone)
    difference = ((full_gradient(model) - expected).norm() / expected.norm()).item()
    is_same = same_on_all_ranks(norm)
    show(f"\n{'norm':26}{'p = 2':20}p = inf")
    show(f"{'one process':26}{right.item():<20.15f}{right_inf.item():.15f}")
    show(f"{'fullrank':26}{norm.item():<20.15f}{norm_inf.item():.15f}")
    show(f"same bits on all ranks: {is_same}. Clipped gradients, relative difference: {difference:.0e}")
    off = max(abs(norm / right - 1).item(), abs(norm_inf / right_inf - 1).item(), difference)
    return is_same and off <= HIGHEST_DIFFERENCE


def main() -> int:
    """Run on the four processes that torchrun started; return the exit status."""
    # FSDP2 warns about views, which nothing modifies here, and DTensor about a mesh that torch's clipping reduces over.
    warnings.simplefilter("ignore", UserWarning)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    try:
        if dist.get_world_size() != 4:
            raise SystemExit(f"--nproc-per-node: expected 4, got {dist.get_world_size()}")
        status = 0 if demonstrate() else 1
        dist.barrier()  # gloo may abort a rank that leaves while another rank still communicates
        return status
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
