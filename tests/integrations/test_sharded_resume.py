"""Jobs with ``pool="sharded"`` and a queue that go on in new processes, in as many as before and in more."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integration_cases import make_encoder, make_rows, own_pool
from torch import Tensor, nn
from torch.utils.data import DataLoader
from workers import WorkerPool

import fullrank

STEPS, SAVED, ROWS = 6, 3, 12  # of a job; when it saves; of all ranks in a step


def own_rows(step: int) -> tuple[Tensor, Tensor]:
    """Return the rows of this rank. In rank order those of a step are the same for any number of ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = slice(ROWS * step + ROWS * rank // world_size, ROWS * step + ROWS * (rank + 1) // world_size)
    features, targets = make_rows(ROWS * STEPS)
    return features.double()[own], targets[own]


def by_accelerate(loss_fn: Any, folder: str, resumes: bool, lr: float) -> None:
    """Take the steps as the recipe for Accelerate does."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True), make_encoder().double()
    assert accelerator.num_processes == dist.get_world_size()
    accelerator.register_for_checkpointing(loss_fn)
    accelerator.register_save_state_pre_hook(lambda *_: loss_fn.gather_queue())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr))
    if resumes:
        accelerator.load_state(f"{folder}/last")
    for step in range(SAVED if resumes else 0, STEPS):
        features, targets = own_rows(step)
        optimizer.zero_grad()
        accelerator.backward(loss_fn(model(features), targets))
        optimizer.step()
        if step + 1 == SAVED:
            accelerator.save_state(f"{folder}/last")


def by_lightning(loss_fn: Any, folder: str, resumes: bool, lr: float) -> None:
    """Take the steps as the recipe for Lightning does."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from fullrank.integrations.lightning import LossSchedule

    class Ranker(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.loss_fn, self.monitored = make_encoder().double(), loss_fn, loss_fn  # under two names

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            features, targets = own_rows(self.trainer.global_step)
            return self.loss_fn(self.encoder(features), targets)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr)

    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1, save_on_train_epoch_end=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=STEPS,
        callbacks=[LossSchedule()] if resumes else [LossSchedule(), keep],
        enable_checkpointing=not resumes,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Ranker(), DataLoader(range(SAVED)), ckpt_path=f"{folder}/step={SAVED}.ckpt" if resumes else None)


class Scorer(nn.Module):
    """A model as the Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = make_encoder().double()

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        """Return one logit for each row."""
        return {"logits": self.encoder(features)}


def by_trainer(loss_fn: Any, folder: str, resumes: bool, lr: float) -> None:
    """Take the steps as the recipe for the Trainer does; Accelerate deals out its batches in rank order."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    from fullrank.integrations.transformers import PooledLossMixin

    AcceleratorState._reset_state(reset_partial_state=True)

    class RankingTrainer(PooledLossMixin, Trainer):  # type: ignore[misc]
        pass

    arguments = TrainingArguments(
        folder,
        num_train_epochs=1,
        per_device_train_batch_size=ROWS // dist.get_world_size(),
        learning_rate=lr,
        lr_scheduler_type="constant",
        optim="sgd",
        train_sampling_strategy="sequential",
        save_steps=SAVED,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    features, targets = make_rows(ROWS * STEPS)
    rows = [{"features": features[row].double(), "labels": targets[row]} for row in range(ROWS * STEPS)]
    trainer = RankingTrainer(model=Scorer(), args=arguments, train_dataset=rows, pooled_loss=loss_fn)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resumes else None)


def losses_of(rank: int, framework: str, folder: str, resumes: bool, lr: float, forgets: bool = False) -> list[float]:
    """Return the losses of the steps that a job takes, from its beginning or from its checkpoint."""
    values: list[float] = []
    loss_fn = fullrank.SmoothAPLoss(1, queue_size=64, pool="sharded")
    loss_fn.register_forward_hook(lambda module, given, value: values.append(value.item()))
    if forgets:
        loss_fn.load_state_dict = lambda *args: None  # type: ignore[assignment, misc]
    {"accelerate": by_accelerate, "lightning": by_lightning, "transformers": by_trainer}[framework](
        loss_fn, folder, resumes, lr
    )
    dist.barrier()  # the files are there
    assert len(loss_fn.queue) < loss_fn.queue.num_held  # a part of the rows
    return values


pytestmark = [pytest.mark.slow]


@pytest.fixture(params=[pytest.param(2, id="W2"), pytest.param(3, id="W3", marks=pytest.mark.full)], scope="module")
def pools(request: pytest.FixtureRequest) -> Iterator[tuple[WorkerPool, WorkerPool]]:
    """Two processes for the job, and others for what goes on."""
    first, second = own_pool("torch"), own_pool("torch", world_size=request.param)
    yield next(first), next(second)
    for pool in (first, second):
        next(pool, None)


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_a_job_goes_on_with_the_same_losses(
    framework: str, pools: tuple[WorkerPool, WorkerPool], tmp_path: Path
) -> None:
    """In as many processes while the weights change; in more with weights that stay, as DDP rounds in another order."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip("needs the extra `integrations`")
    first, second = pools
    lr = 0.5 if second.world_size == 2 else 0.0
    through, other = first(losses_of, framework, str(tmp_path), False, lr)
    assert through == other
    assert len(through) == STEPS
    assert len(set(through)) == STEPS
    for values in second(losses_of, framework, str(tmp_path), True, lr):
        assert values == through[SAVED:]
    if framework == "accelerate":  # the control: the same steps without the state of the loss
        for values in second(losses_of, framework, str(tmp_path), True, lr, True):
            assert values[1:] != through[SAVED + 1 :]
            assert values[0] != through[SAVED]
