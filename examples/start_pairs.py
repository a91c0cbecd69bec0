"""Two towers, a learned scale and hard negatives: torchrun --standalone --nproc-per-node 2 start_pairs.py."""

import torch
import torch.distributed as dist

from fullrank import InfoNCELoss, verify_step
from fullrank.metrics import EmbeddingRecall


class TwoTowers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.images, self.texts = torch.nn.Linear(24, 16), torch.nn.Linear(24, 16)
        self.contrast = InfoNCELoss(symmetric=True, learn_temperature=True)  # inside, DDP reduces its slope

    def forward(self, images, texts, negatives):
        return self.contrast(self.images(images), self.texts(texts), self.texts(negatives))


def step(model, batch):  # forward and backward, without the optimizer
    loss = model(*batch)
    loss.backward()
    return loss


def make_pairs(number, seed):  # your data: of this process, images, their texts, and texts that are nearly right
    images, *noise = torch.randn(3, number, 24, generator=torch.Generator().manual_seed(seed))[:, rank::size]
    return images, images.roll(1, 1) + noise[0] / 2, images.roll(1, 1) + noise[1]


dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(TwoTowers())
report = verify_step(step, model, make_pairs(64, seed=2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for number in range(100):
    optimizer.zero_grad()
    loss = step(model, make_pairs(128, seed=3 + number))
    optimizer.step()
recall, (images, texts, _) = EmbeddingRecall(k=1), make_pairs(500, seed=1)
recall.update(model.module.images(images), references=model.module.texts(texts))
found, temperature = recall.compute(), model.module.contrast.temperature  # recall over the pairs of all processes
print(f"{report}\nloss {loss:.3f}, temperature {temperature:.5f}, recall {found:.2f}\n" * (rank == 0), end="")
dist.destroy_process_group()
