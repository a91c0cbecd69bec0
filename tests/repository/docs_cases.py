"""What the worker processes run for the pages of docs/: a block of a page, against one process with all rows."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import torch.distributed as dist
from meshes import init_device_mesh
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fullrank


def make_network() -> nn.Module:
    """Return a small network, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_rows(number: int) -> tuple[Tensor, Tensor]:
    """Return features (N, 5) and targets (N,), about a third positive."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(number, 5, generator=generator, dtype=torch.float64)
    return features, (features[:, 0] > 0.4).long()


def run(block: str, **names: Any) -> dict[str, Any]:
    """Execute a block on ``names``, and return them with what it defines."""
    with contextlib.redirect_stdout(io.StringIO()):
        exec(block, names)
    return names


def gradients(network: nn.Module) -> Tensor:
    """Return the whole gradient."""
    parts = [parameter.grad for parameter in network.parameters()]
    return torch.cat([(part.full_tensor() if hasattr(part, "full_tensor") else part).reshape(-1) for part in parts])


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max())


def own_rows(rank: int, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return this rank's part; the parts differ in size."""
    size, world_size = len(rows[0]), dist.get_world_size()
    bounds = [size * r * (r + 1) // (world_size * (world_size + 1)) for r in range(world_size + 1)]
    return tuple(part[bounds[rank] : bounds[rank + 1]] for part in rows)


def smooth_ap(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of the page in one process."""
    return fullrank.losses.smooth_ap(scores, targets, temperature=0.1)


def squared_margin(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of one's own of the page, pair by pair."""
    pairs = [(1 - p + n).clamp_min(0) ** 2 for p in scores[targets == 1] for n in scores[targets == 0]]
    return torch.stack(pairs).mean()


def one_step(rank: int, block: str, loss: str, wrapped: bool = False) -> tuple[float, float]:
    """Return the errors of loss and gradient of a block that takes one step with ``network`` on this rank's rows."""
    rows = make_rows(36)
    features, targets = own_rows(rank, rows)
    network, reference = make_network(), make_network()
    mesh = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")) if dist.get_world_size() == 4 else None
    )
    names = {"features": features, "targets": targets, "mesh": mesh}
    found = run(block, network=DistributedDataParallel(network) if wrapped else network, **names)
    expected = globals()[loss](reference(rows[0]), rows[1])
    expected.backward()
    return error(found["loss"], expected), error(gradients(network), gradients(reference))


def validation(rank: int, block: str) -> tuple[float | None, float, int, bool]:
    """Return the validation loss and what it has to be, and after a training step the rows queued, and the mode."""
    features, targets = own_rows(rank, make_rows(36))
    network = make_network()
    loss_fn = fullrank.SmoothAPLoss(num_classes=1, temperature=0.1, queue_size=64)
    found = run(block, network=network, features=features, targets=targets, loss_fn=loss_fn)
    value = found.get("validation_loss")
    expected = float(smooth_ap(network(features), targets))
    loss_fn(network(features), targets)
    return None if value is None else float(value), expected, len(loss_fn.queue), loss_fn.training


def different_steps(rank: int, block: str) -> tuple[int, float]:
    """Return the steps of ranks with 3 and 1 batches, and the error of the gradients of all of them."""
    features, targets = make_rows(48)
    parts = {(0, 0): slice(0, 14), (0, 1): slice(14, 24), (0, 2): slice(24, 36), (1, 0): slice(36, 48)}
    loader = [(features[part], targets[part]) for (owner, _), part in parts.items() if owner == rank]
    network, reference = make_network(), make_network()
    loss_fn = fullrank.SmoothAPLoss(num_classes=1, temperature=0.1, queue_size=16)
    names = {"torch": torch, "dist": dist, "loader": loader, "loss_fn": loss_fn}
    found = run(block, model=DistributedDataParallel(network), **names)
    alone = fullrank.SmoothAPLoss(num_classes=1, temperature=0.1, queue_size=16, gather_distributed=False)
    for step in range(3):
        rows = torch.cat([torch.arange(48)[part] for (_, at), part in parts.items() if at == step])
        alone(reference(features[rows]), targets[rows]).backward()
    return int(found["steps"]), error(gradients(network), gradients(reference))


def draw_gradients(model: nn.Module, seed: int) -> None:
    """Give every parameter a gradient, far above a norm of 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = 3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def norm_of(*models: nn.Module) -> Tensor:
    """Return the norm of all gradients of ``models``."""
    return torch.cat([gradients(model) for model in models]).norm()


def clipped_fsdp(rank: int, block: str) -> float:
    """Return the error of the gradient of FSDP2, clipped by the block, against torch's clipping of the whole."""
    from torch.distributed.fsdp import fully_shard

    features, targets = make_rows(20)
    model, reference = make_network(), make_network()
    fully_shard(model)
    for network in (model, reference):
        (100 * network(features)[:, 0] * targets).sum().backward()
    run(block, model=model)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    return error(gradients(model), gradients(reference))


def clipped_experts(rank: int, block: str) -> float:
    """Return the error of the clipped gradients of a dense layer, copied, and of experts, one per rank."""
    experts = [nn.Linear(4, 4).double() for _ in range(2)]
    dense = nn.Linear(4, 4).double()
    for seed, layer in enumerate((dense, *experts)):
        draw_gradients(layer, seed)
    model = nn.Module()
    model.dense, model.experts = dense, experts[rank]
    expected = gradients(model) / (norm_of(dense, *experts) + 1e-6)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    run(block, model=model, mesh=mesh, clip_grad_norm_=fullrank.clip_grad_norm_)
    return error(gradients(model), expected)


def clipped_stages(rank: int, block: str, tied: bool) -> float:
    """Return the error of the clipped gradients of two stages, which share a layer if ``tied``."""
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double() for _ in range(2)]
    for seed, layer in enumerate((*stages[0], *stages[1])):
        draw_gradients(layer, seed)
    parts = [*stages[0], *stages[1]]
    if tied:  # the last layer of the second stage is the first of the first
        draw_gradients(stages[1][1], 0)
        parts.pop()
    stage = stages[rank]
    expected = gradients(stage) / (norm_of(*parts) + 1e-6)
    counted_once = list(stage.parameters()) if rank == 0 or not tied else list(stage[0].parameters())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    names = {"torch": torch, "clip_grad_norm_": fullrank.clip_grad_norm_, "counted_once": counted_once}
    run(block, stage=stage, mesh=mesh, **names)
    return error(gradients(stage), expected)
