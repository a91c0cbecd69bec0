"""Clip the gradient of a model under five kinds of parallelism by the norm that one process would compute.

Usage:  torchrun --standalone --nproc-per-node 8 examples/clip_five_dimensions.py

Eight ranks form a mesh of two pipeline stages, two data ranks and two tensor ranks. Each stage is a block:

    dense layers   tensor parallelism over "tp", FSDP2 over "data"       TP, shard
    experts        one on each rank of "tp", copied over "data" by HSDP  EP, replicate
    two blocks     one on each rank of "pp"                              PP

The norm counts each element once. The reference is the same model in one process with the whole batch.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullrank import clip_grad_norm_, total_grad_norm

WIDTH, ROWS = 6, 8
MAX_NORM = 0.1
HIGHEST_DIFFERENCE = 1e-13  # relative, float64: ranks add gradients in a different order than one process


class Experts(nn.Module):
    """Two experts: the rows with an even index go to the first, the others to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ModuleDict({str(index): nn.Linear(WIDTH, WIDTH) for index in range(2)})
        self.mesh: DeviceMesh | None = None

    def keep_one(self, mesh: DeviceMesh) -> None:
        """Hold only the expert of this rank of ``mesh``."""
        self.mesh = mesh
        del self.held[str(1 - mesh.get_local_rank())]

    def forward(self, x: Tensor) -> Tensor:
        """Return what the expert of each row makes of it. All ranks of the mesh have the same rows."""
        if self.mesh is not None:  # an identity, whose backward adds the gradients of the ranks
            x = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        place = torch.arange(len(x)) % 2
        output = torch.zeros_like(x)
        for index, expert in self.held.items():
            output = output + expert(x) * (place == int(index))[:, None]
        if self.mesh is not None:  # the sum over the ranks, whose backward is an identity
            output = (
                DTensor.from_local(output, self.mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()
            )
        return output


class Block(nn.Module):
    """A residual block: a norm, two dense layers, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Return rows of the same shape."""
        hidden = self.down(torch.tanh(self.up(self.norm(x))))
        return x + hidden + self.experts(hidden)


def spread(block: Block, mesh: DeviceMesh) -> None:
    """Divide a block over the data and tensor ranks of its stage."""
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    block.experts.keep_one(mesh["tp"])
    # The same ranks under other names: an expert has copies over "copies", and "own" is this rank alone.
    view = init_device_mesh("cpu", (2, 2, 2, 1), mesh_dim_names=("pp", "copies", "ep", "own"))
    for expert in block.experts.held.values():
        fully_shard(expert, mesh=view["copies", "own"])
    fully_shard(block, mesh=mesh["data"])


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over rows and columns."""
    return (output - target).square().mean()


def make_models() -> tuple[Block, nn.Sequential, DeviceMesh]:
    """Return this rank's block and the model of one process, with the gradients of the whole batch, and the mesh."""
    torch.manual_seed(0)
    alone = nn.Sequential(Block(), Block()).double()
    rows, targets = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    loss_of(alone(rows), targets).backward()

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "data", "tp"))
    stage, part = mesh["pp"].get_local_rank(), mesh["data"].get_local_rank()
    block = copy.deepcopy(alone[stage])
    block.zero_grad()
    spread(block, mesh)
    pipeline = PipelineStage(block, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(pipeline, n_microbatches=2, loss_fn=loss_of)  # the mean over the micro-batches
    rows, targets = rows.chunk(2)[part], targets.chunk(2)[part]
    schedule.step(*[rows] if stage == 0 else [], target=targets if stage == 1 else None)
    return block, alone, mesh


def groups_of(block: Block, mesh: DeviceMesh) -> Callable[[Tensor], Any]:
    """Return what says that the ranks of tp hold different experts; no placement says so."""
    experts = set(block.experts.parameters())
    return lambda parameter: mesh["tp"].get_group() if parameter in experts else None


def largest_difference(block: Block, expected: Block) -> float:
    """Return the largest difference of a gradient on this rank from that of one process."""
    wanted = dict(expected.named_parameters())
    pairs = [(parameter.grad.full_tensor(), wanted[name].grad) for name, parameter in block.named_parameters()]
    return max(float((found - right).abs().max()) for found, right in pairs)


def describe(name: str, parameter: DTensor) -> str:
    """Return the placements of a parameter, as text."""
    names = parameter.device_mesh.mesh_dim_names or ()
    places = ", ".join(f"{dim} {type(place).__name__}" for dim, place in zip(names, parameter.placements))
    return (
        f"{name:22} {tuple(parameter.shape)!s:8} {places}{', a different one on each rank of tp' * ('experts' in name)}"
    )


def same_on_all_ranks(norm: Tensor) -> bool:
    """Return whether every rank holds the same bits."""
    gathered = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, norm)
    return all(torch.equal(other, norm) for other in gathered)


def demonstrate() -> bool:
    """Print the norm with and without each group; return whether ours is correct."""
    block, alone, mesh = make_models()
    show = print if dist.get_rank() == 0 else lambda *_: None
    for name, parameter in block.named_parameters():
        show(describe(name, parameter))

    inf, groups, stages = float("inf"), groups_of(block, mesh), mesh["pp"]
    right_inf = torch.nn.utils.get_total_norm([parameter.grad for parameter in alone.parameters()], inf)
    right = torch.nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
    try:
        total_grad_norm(block, across=stages)
        without_experts = "not noticed"
    except RuntimeError as error:  # experts that differ look like copies that should be equal
        without_experts = f"{type(error).__name__}: {str(error).partition(': ')[2].partition(',')[0]}"
    without_stages = total_grad_norm(block, shard_groups=groups)
    norm_inf = total_grad_norm(block, inf, shard_groups=groups, across=stages)
    norm = clip_grad_norm_(block, MAX_NORM, shard_groups=groups, across=stages)
    off = largest_difference(block, alone[mesh["pp"].get_local_rank()])
    is_same = same_on_all_ranks(norm)

    show(f"\n{'norm':26}{'p = 2':20}p = inf")
    show(f"{'one process':26}{right.item():<20.15f}{right_inf.item():.15f}")
    show(f"{'fullrank':26}{norm.item():<20.15f}{norm_inf.item():.15f}")
    show(f"{'  without shard_groups':26}{without_experts}")
    show(f"{'  without across':26}{without_stages.item():.15f}")
    show(f"same bits on all ranks: {is_same}. Clipped gradients, largest difference: {off:.0e}")
    worst = max(abs(norm / right - 1).item(), abs(norm_inf / right_inf - 1).item(), off)
    return is_same and worst <= HIGHEST_DIFFERENCE


def main() -> int:
    """Run on the eight processes that torchrun started; return the exit status."""
    # FSDP2 warns about views, which nothing modifies here.
    warnings.simplefilter("ignore", UserWarning)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    try:
        if dist.get_world_size() != 8:
            raise SystemExit(f"--nproc-per-node: expected 8, got {dist.get_world_size()}")
        status = 0 if demonstrate() else 1
        dist.barrier()  # gloo may abort a rank that leaves while another rank still communicates
        return status
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
