"""Rare positives in a table: torchrun --standalone --nproc-per-node 2 start_rare.py; started again, it resumes."""

from pathlib import Path

import torch
import torch.distributed as dist
from torchmetrics.functional.classification import binary_average_precision

from fullrank import BCEWithLogitsLoss, CombinedLoss, SmoothAPLoss, verify_step
from fullrank.data import BalancedBatchSampler


def step(model, batch):  # forward and backward, without the optimizer
    loss = loss_fn(model(rows[0, batch]), targets[0, batch])
    loss.backward()
    return loss


dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
rows = torch.randn(2, 6000, 8)  # your data: to train on, and to validate with
targets = (rows[..., 0] + rows[..., 1] + torch.randn(2, 6000) > 3.5).long()
network, size = torch.nn.Linear(8, 1), dist.get_world_size()
model, optimizer = torch.nn.parallel.DistributedDataParallel(network), torch.optim.Adam(network.parameters(), lr=3e-3)
loss_fn = CombinedLoss({"weighted": BCEWithLogitsLoss(class_weight="balanced"), "ap": SmoothAPLoss(queue_size=512)})
sampler = BalancedBatchSampler(targets[0], 128 // size, positives=8 // size)  # of each process
verify_step(step, model, torch.tensor(next(iter(sampler)))).check()
parts = {"network": network, "optimizer": optimizer, "loss": loss_fn, "sampler": sampler}
states = torch.load("rare.pt", weights_only=True) if Path("rare.pt").exists() else {"history": []}
history = states.pop("history")
for name, state in states.items():
    parts[name].load_state_dict(state)  # on every process, before set_epoch
while len(history) < 8 and max(history[-3:], default=0) == max(history, default=0):  # the best is one of the last 3
    sampler.set_epoch(len(history))
    for batch in sampler:
        optimizer.zero_grad()
        loss = step(model, torch.tensor(batch))
        optimizer.step()
        sampler.advance()
    score = [float(binary_average_precision(network(rows[1])[:, 0], targets[1])) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(score, src=0)  # the first process has validated; all stop, or none
    history += score
    if dist.get_rank() == 0:
        torch.save({"history": history} | {name: part.state_dict() for name, part in parts.items()}, "rare.pt")
        print(f"epoch {len(history)}: loss {loss:.3f}, average precision {history[-1]:.3f}")
dist.destroy_process_group()
