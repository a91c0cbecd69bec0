"""Moving from imbalanced-losses: torchrun --standalone --nproc-per-node 2 start_moving.py; install both."""

import imbalanced_losses
import torch
import torch.distributed as dist

from fullrank import SmoothAPLoss, verify_step


class Model(torch.nn.Linear):
    def __init__(self, loss_fn):
        super().__init__(8, 1)
        self.loss_fn = loss_fn


def step(model, batch):  # as it was: forward and backward, without the optimizer
    features, targets = batch
    loss = getattr(model, "module", model).loss_fn(model(features), targets)
    loss.backward()
    return loss


def make_rows(number, seed):  # your data: of this process
    features = torch.randn(number, 9, generator=torch.Generator().manual_seed(seed))[rank::size]
    return features[:, :8], (features[:, :2].sum(dim=1) + features[:, 8] > 2.5).long()


dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
rank, size, reports = dist.get_rank(), dist.get_world_size(), []
shared = {"num_classes": 1, "queue_size": 256, "temperature": 0.1}
old = Model(imbalanced_losses.SmoothAPLoss(**shared))
new = Model(SmoothAPLoss(**shared, weighting="positives"))  # the one line that changes
keys = new.load_state_dict(old.state_dict(), strict=False)  # an old checkpoint: its queue is left out, and refills
assert all("queue" in key for key in keys.missing_keys + keys.unexpected_keys)
for model in (old, new):
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    reports.append(verify_step(step, wrapped, make_rows(128, seed=0)))
optimizer = torch.optim.Adam(new.parameters(), lr=1e-2)
for number in range(100):
    optimizer.zero_grad()
    loss = step(wrapped, make_rows(128, seed=1 + number))
    optimizer.step()
print(f"before: {reports[0]}\n\nafter: {reports[1]}\nloss {loss:.3f}\n" * (rank == 0), end="")
dist.destroy_process_group()
