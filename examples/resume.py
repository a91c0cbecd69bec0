"""A DDP job that is killed, restarted by torchrun, and ends bit for bit with the weights of a job that never stopped.

Run it once without interruption, then once with a rank that is killed:

    torchrun --standalone --nproc-per-node 2 examples/resume.py --folder outputs/through
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py --folder outputs/killed --kill-at 47

Both print the same digests. With `--forget loss` (or another part of the checkpoint) the second run continues without
that part, and only the digests show that it has become a different training.

Adam's momenta, the queue and the schedule of the loss, the position in the epoch and the masks of dropout continue as
they were; the steps after the last checkpoint are repeated. To use this in your own training, copy `ResumableSampler`,
`RandomState`, `join`, `settle`, `save` and `load`. From `train`, copy the generator of the loader, the dict `parts`,
the lines after `optimizer.step()`, and the `else` of the loop over an epoch. docs/checkpointing.md covers
torch.distributed.checkpoint, FSDP2 and another number of ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fullrank import BCEWithLogitsLoss, LossWarmupWrapper, SmoothAPLoss

PARTS = ("model", "optimizer", "loss", "sampler", "random")


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler that can resume in the middle of an epoch.

    It counts its position in rows over all ranks, so that another number of ranks can resume. The training loop
    advances it after each step, because the loader requests indices ahead, before the model has trained on them.
    """

    num_rows_done = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.num_rows_done // self.num_replicas, None)

    def __len__(self) -> int:
        return super().__len__() - self.num_rows_done // self.num_replicas

    def start_epoch(self, epoch: int) -> None:
        """Go to the first row of ``epoch``, which has its own shuffle."""
        self.set_epoch(epoch)
        self.num_rows_done = 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the rows of it that are done."""
        return {"epoch": self.epoch, "num_rows_done": self.num_rows_done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.start_epoch(state["epoch"])
        self.num_rows_done = state["num_rows_done"]


class RandomState:
    """torch's generators of every rank: dropout draws different masks on each.

    If your data use the generators of Python or numpy, add their states, as numbers and tensors.
    """

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Return the generators of all ranks, in rank order; a collective call."""
        mine = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            mine["cuda"] = torch.cuda.get_rng_state()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        return {device: [states[device] for states in ranks] for device in mine}

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        """Restore this rank's generators; with another number of ranks they stay unchanged."""
        if len(state["cpu"]) != dist.get_world_size():
            return
        torch.set_rng_state(state["cpu"][dist.get_rank()])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"][dist.get_rank()])


def join() -> None:
    """Join the process group of this attempt.

    torchrun keeps one store over its restarts, and the addresses of dead ranks stay in it. A rank that reads them
    before the new ones are written fails to connect, or waits. So each attempt uses its own prefix for the keys. The
    number of the attempt is the same on all ranks of one machine only; on several machines, set
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun.
    """
    store, rank, world_size = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def settle(model: DistributedDataParallel, features: Tensor) -> None:
    """Let DDP choose its buckets before the first step, with any batch; call it before :func:`load`.

    After its first backward, DDP rebuilds its buckets. With three or more ranks this changes the order in which it adds
    their gradients, so the first step after a restart would differ by rounding from the same step of an uninterrupted
    job.
    """
    model(features).sum().backward()
    model.zero_grad()


def save(path: Path, step: int, parts: Mapping[str, Any]) -> None:
    """Write a checkpoint; every rank calls it. Whenever the job dies, ``path`` is the complete old or new file."""
    checkpoint = {"step": step, **{name: part.state_dict() for name, part in parts.items()}}
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())  # otherwise the new name may reach the disk before the contents
        unfinished.replace(path)


def load(path: Path, parts: Mapping[str, Any], forget: str | None = None) -> int:
    """Restore what :func:`save` wrote, on every rank, and return the next step; 0 without a checkpoint."""
    if not path.exists():
        return 0
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        if name != forget:
            part.load_state_dict(checkpoint[name])
    return checkpoint["step"]


def make_rows() -> TensorDataset:
    """Return 1,000 rows of 16 features; about one in ten is a positive."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1000, 16, generator=generator)
    noise = torch.randn(1000, generator=generator)
    return TensorDataset(features, (features[:, :4].sum(dim=1) + noise > 3).long())


def make_model() -> nn.Module:
    """Return a network with dropout: the same weights on every rank, different masks on each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    torch.manual_seed(1 + dist.get_rank())
    return model


def make_loss() -> LossWarmupWrapper:
    """Return average precision with a queue, after 20 steps of cross-entropy and a blend of 10."""
    return LossWarmupWrapper(
        BCEWithLogitsLoss(),
        SmoothAPLoss(num_classes=1, queue_size=256),
        warmup_steps=20,
        blend_steps=10,
        temp_start=1.0,
        temp_end=0.2,
        temp_decay_steps=100,
    )


def train(options: argparse.Namespace) -> tuple[nn.Module, LossWarmupWrapper]:
    """Train, starting from the checkpoint if there is one, and return the model and the loss."""
    rows, model, loss = make_rows(), make_model(), make_loss()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = ResumableSampler(rows)
    # A separate generator, because the loader draws a seed whenever it starts, and it starts once more after a restart.
    loader = DataLoader(rows, options.batch_size, sampler=sampler, generator=torch.Generator())
    parts = {"model": model, "optimizer": optimizer, "loss": loss, "sampler": sampler, "random": RandomState()}
    settle(wrapped, rows[: options.batch_size][0])
    path = options.folder / "checkpoint.pt"
    step = load(path, parts, options.forget)
    if dist.get_rank() == 0:
        print(f"starts with step {step}", flush=True)
    while step < options.steps:
        for features, targets in loader:
            loss.on_train_batch_start(step)
            value = loss(wrapped(features), targets[:, None])
            if step == options.kill_at:
                die_once()
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            step, sampler.num_rows_done = step + 1, sampler.num_rows_done + len(targets) * dist.get_world_size()
            if step % options.save_every == 0:
                save(path, step, parts)
            if step == options.steps:
                break
        else:
            sampler.start_epoch(sampler.epoch + 1)
    return model, loss


def die_once() -> None:
    """Kill the last rank, as the kernel does when memory runs out; only in the first attempt, not after a restart."""
    if dist.get_rank() == dist.get_world_size() - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the bits of ``tensors``."""
    contents = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors.items():
        contents.update(f"{name} {tuple(tensor.shape)}".encode())
        contents.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return contents.hexdigest()


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Train with checkpoints, and resume from the last one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps in all")
    parser.add_argument("--batch-size", type=int, default=24, help="rows per rank and step")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/resume"), help="folder of the checkpoint, shared by all ranks"
    )
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill the last rank in this step, once")
    parser.add_argument("--forget", choices=PARTS, help="leave this part of the checkpoint out when loading")
    return parser.parse_args()


def main() -> None:
    """Train and print digests of the final weights and the queue."""
    options = parse_options()
    join()
    try:
        model, loss = train(options)
        if dist.get_rank() == 0:
            queue = loss.main_loss.queue.rows()
            print(f"weights {digest(model.state_dict())}")
            print(f"queue   {digest({'logits': queue.logits, 'targets': queue.targets})}, {len(queue.targets)} rows")
        dist.barrier()  # gloo may abort a rank that leaves while another rank still communicates
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
