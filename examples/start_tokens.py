"""A language model under FSDP2 with two losses: torchrun --standalone --nproc-per-node 2 start_tokens.py."""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fullrank import accumulate, causal_lm_loss, clip_grad_norm_, count_valid_tokens, verify_step


class Model(torch.nn.Module):  # predicts the next token, and the one after it
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = torch.nn.Embedding(32, 48), torch.nn.Linear(48, 48), torch.nn.Linear(48, 64)

    def forward(self, tokens):
        hidden = checkpoint(self.body, self.embed(tokens.clamp_min(0)), use_reentrant=False)  # the losses are outside
        return {name: part.clone() for name, part in zip(COUNTS, self.head(hidden.relu()).chunk(2, dim=-1))}


def step(model, micro_batches):  # forwards and backwards, without the optimizer
    for window, batch in accumulate(model, micro_batches, COUNTS):
        logits = model(batch["next"])
        losses = {name: causal_lm_loss(logits[name], batch[name], reduction="sum") for name in COUNTS}
        window.backward(losses, weights={"next": 1.0, "after": 0.3})
    return window.mean_loss()


def make_window(seed):  # your data: micro-batches of this process, with padding of -100
    start, length = torch.randint(8, 24, (2, 8, 1), generator=torch.Generator().manual_seed(seed))
    labels = ((start + 5 * torch.arange(24)) % 32).masked_fill(torch.arange(24) >= length, -100)[rank::size]
    return [{"next": rows, "after": rows.roll(-1, 1).index_fill(1, LAST, -100)} for rows in labels.split(3)]


COUNTS = {name: partial(count_valid_tokens, key=name) for name in ("next", "after")}
dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size, LAST = dist.get_rank(), dist.get_world_size(), torch.tensor([23])
torch.manual_seed(0)
model = fully_shard(Model())
report = verify_step(step, model, make_window(seed=0), build_model=Model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for number in range(20):
    optimizer.zero_grad()
    loss = step(model, make_window(seed=1 + number))
    norm = clip_grad_norm_(model, 1.0)
    optimizer.step()
print(f"{report}\nloss {loss:.3f}, norm {norm:.3f}\n" * (rank == 0), end="")
dist.destroy_process_group()
