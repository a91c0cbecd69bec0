"""PyTorch Lightning: the recipes of docs/integrations.md train as one process does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import integration_lightning_cases as cases
import pytest
from integration_cases import blocks, own_pool
from workers import WorkerPool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_lightning") is None, reason="needs the extra `integrations`"
)

LIMIT = 1e-6  # float32, of what the training has changed
DEFINITION, TRAINING = blocks("Pooled")
(WRITER,) = blocks("Sums over micro-batches")
(WINDOW_RANKER,) = blocks("Pooled, over micro-batches")
# What one writes without manual optimization.
AUTOMATIC = """
import torch
from pytorch_lightning import LightningModule

from fullrank import causal_lm_loss


class Writer(LightningModule):
    def __init__(self, network, window_size):
        super().__init__()
        self.network = network

    def training_step(self, batch, batch_idx):
        loss = causal_lm_loss(self.network(batch["tokens"]), batch["labels"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)
"""


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    yield from own_pool("pytorch_lightning")


def test_the_ranker_trains_as_one_process(workers: WorkerPool) -> None:
    for parameters, loss in workers(cases.scheduled, DEFINITION, TRAINING):
        assert parameters <= LIMIT
        assert loss <= LIMIT


def test_control_without_the_callback_the_warmup_never_ends(workers: WorkerPool) -> None:
    without = TRAINING.replace("callbacks=[LossSchedule()]", "callbacks=[]")
    assert without != TRAINING
    for parameters, loss in workers(cases.scheduled, DEFINITION, without):
        assert parameters > 0.1
        assert loss > 0.1


def test_control_losses_of_single_ranks_are_another_training(workers: WorkerPool) -> None:
    alone = DEFINITION.replace("temp_decay_steps=8,", "temp_decay_steps=8, gather_distributed=False,")
    assert alone != DEFINITION
    for parameters, _ in workers(cases.scheduled, alone, TRAINING):
        assert parameters > 0.01


@pytest.mark.parametrize("step", [8, 12])
def test_a_resumed_training_is_the_same_bit_for_bit(workers: WorkerPool, tmp_path: Path, step: int) -> None:
    """At the ends of epochs, the first that of the blend; Lightning then begins the next epoch without its hook."""
    for differing, temperature in workers(cases.resumed, DEFINITION, str(tmp_path), step, True):
        assert differing == []
        assert 0.2 < temperature < 1.0  # it stands within its decay


def test_control_resumed_without_the_queue(workers: WorkerPool, tmp_path: Path) -> None:
    for differing, _ in workers(cases.resumed, DEFINITION, str(tmp_path), 12, False):
        assert "/encoder.0.weight" in differing


def test_windows_train_as_one_process(workers: WorkerPool) -> None:
    for errors in workers(cases.accumulated, WRITER, {}):
        assert max(errors) <= LIMIT


def test_control_accumulate_grad_batches_is_a_mean_of_means(workers: WorkerPool) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    for parameters, _ in workers(cases.accumulated, AUTOMATIC, options):
        assert parameters > 0.05


def test_pooled_windows_train_as_one_process(workers: WorkerPool) -> None:
    for errors in workers(cases.window_ranked, WINDOW_RANKER):
        assert max(errors) <= LIMIT


def test_control_a_forward_that_ddp_does_not_see(workers: WorkerPool) -> None:
    past = WINDOW_RANKER.replace("self.trainer.model(batch[0])", "self(batch[0])")
    assert past != WINDOW_RANKER
    for parameters, _ in workers(cases.window_ranked, past):
        assert parameters > 0.01
