"""PyTorch Lightning: the recipes of docs/integrations.md train as one process does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_cases import (
    blocks,
    change,
    dealt,
    flat,
    gathered,
    make_encoder,
    make_rows,
    make_tokens,
    make_writer,
    own_pool,
    run_block,
    token_mean,
    train,
)
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from workers import WorkerPool, error_of

import fullrank

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def row_loader(number: int = 64, size: int = 8) -> DataLoader[Any]:
    """Return a loader that Lightning deals out over the ranks by a sampler of its own."""
    return DataLoader(TensorDataset(*make_rows(number)), batch_size=size)


def make_trainer(**options: Any) -> Any:
    """Return a Trainer of two gloo processes."""
    from pytorch_lightning import Trainer
    from pytorch_lightning.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo")
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, **QUIET | options)


def scheduled(rank: int, definition: str, training: str) -> tuple[float, float]:
    """Return the errors of parameters and last loss after four epochs: warm-up, blend, ranking loss."""
    encoder, reference = make_encoder(), make_encoder()
    names = run_block(definition, {"encoder": encoder, "loader": row_loader()})
    loss_fn = names["Ranker"](reference).loss_fn
    loss_fn.gather_distributed = False
    names["Trainer"] = partial(names["Trainer"], **QUIET)
    before = flat(encoder)
    last = run_block(training, names)["trainer"].callback_metrics["loss"]
    features, targets = make_rows(64)
    started = set()

    def loss(epoch: int, step: int, rows: list[int]) -> Tensor:
        if epoch not in started:
            loss_fn.on_train_epoch_start(epoch)
            started.add(epoch)
        loss_fn.on_train_batch_start(step)
        return loss_fn(reference(features[rows]), targets[rows])

    expected, losses, _ = train(reference, loss, [dealt(64, 8, epoch) for epoch in range(4)])
    return change(encoder, before, expected), abs(float(last) / losses[-1] - 1)


def resumed(rank: int, definition: str, folder: str, at: int, keeps_loss: bool) -> tuple[list[str], float]:
    """Return what differs between a training of 16 steps and one that resumes at a step, and the temperature then."""
    from pytorch_lightning.callbacks import ModelCheckpoint

    from fullrank.integrations.lightning import LossSchedule

    def trained(encoder: Any, path: str | None = None) -> Any:
        model = run_block(definition, {})["Ranker"](encoder)
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=at, save_top_k=-1, save_on_train_epoch_end=False)
        options = {"enable_checkpointing": path is None, "callbacks": [LossSchedule()] + [keep] * (path is None)}
        make_trainer(max_epochs=4, **options).fit(model, row_loader(), ckpt_path=path)
        return model

    through = trained(make_encoder())
    path = Path(folder) / f"step={at}.ckpt"
    saved = torch.load(path, weights_only=True)
    temperature = saved["state_dict"]["loss_fn._extra_state"]["temperature"]
    if not keeps_loss:
        fresh = run_block(definition, {})["Ranker"](make_encoder()).loss_fn.main_loss.state_dict(
            prefix="loss_fn.main_loss."
        )
        saved["state_dict"].update(fresh)
        path = path.with_name(f"without-{rank}.ckpt")
        torch.save(saved, path)
    again = trained(make_encoder(), str(path))
    states = [flatten(model.state_dict()) for model in (through, again)]
    assert states[0].keys() == states[1].keys()
    names = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    return names, temperature


def flatten(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return every number of a nested state as a tensor, under its path."""
    if isinstance(state, dict):
        return {k: v for name, part in state.items() for k, v in flatten(part, f"{prefix}/{name}").items()}
    if isinstance(state, (bool, int, float, Tensor)):
        return {prefix: torch.as_tensor(state)}
    return {}


def accumulated(rank: int, definition: str, options: dict[str, Any]) -> tuple[float, float]:
    """Return the errors of parameters and last loss after two epochs of windows: two of 2 micro-batches, one of 1."""
    rows, size, epochs = make_tokens(40), 4, 2
    network, reference = make_writer(), make_writer()
    before = flat(network)
    model = run_block(definition, {})["Writer"](network, 2)
    trainer = make_trainer(max_epochs=epochs, **options)
    trainer.fit(model, DataLoader(rows, batch_size=size))
    windows = [windows_of(dealt(40, size, epoch)) for epoch in range(epochs)]

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        tokens, labels = (torch.stack([rows[row][key] for row in chosen]) for key in ("tokens", "labels"))
        return token_mean(reference(tokens), labels)

    expected, losses, _ = train(reference, loss, windows, max_norm=1.0)
    assert trainer.global_step == len(losses)
    assert len(set(gathered(repr(flat(network).tolist())))) == 1
    return change(network, before, expected), abs(float(trainer.callback_metrics["loss"]) / losses[-1] - 1)


def window_ranked(rank: int, definition: str) -> tuple[float, float]:
    """Return the errors of parameters and last loss for a pooled loss over windows of 2 and 1 micro-batches."""
    encoder, reference = make_encoder(), make_encoder()
    before = flat(encoder)
    model = run_block(definition, {})["WindowRanker"](encoder, 2)
    trainer = make_trainer(max_epochs=3)
    trainer.fit(model, row_loader(48))
    features, targets = make_rows(48)
    loss_fn = fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.5, gather_distributed=False)

    def loss(epoch: int, step: int, rows: list[int]) -> Tensor:
        return loss_fn(reference(features[rows]), targets[rows])

    expected, losses, _ = train(reference, loss, [windows_of(dealt(48, 8, epoch)) for epoch in range(3)])
    return change(encoder, before, expected), abs(float(trainer.callback_metrics["loss"]) / losses[-1] - 1)


def refused(rank: int, name: str, *args: Any) -> str:
    """Return the error that a training raises."""
    return error_of(lambda: globals()[name](rank, *args))[1]


def windows_of(batches: list[list[int]]) -> list[list[int]]:
    """Return windows of two global batches; in rank order, as a queue that drops some rows must drop the same."""
    windows = [batches[start : start + 2] for start in range(0, len(batches), 2)]
    return [[row for half in (0, 1) for rows in window for row in share(rows, half)] for window in windows]


def share(rows: list[int], rank: int) -> list[int]:
    """Return the rows of one rank of a global batch."""
    half = len(rows) // 2
    return rows[rank * half : (rank + 1) * half]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="needs the extra `integrations`"),
]

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
    for parameters, loss in workers(scheduled, DEFINITION, TRAINING):
        assert parameters <= LIMIT
        assert loss <= LIMIT


def test_control_without_the_callback_the_warmup_never_ends(workers: WorkerPool) -> None:
    without = TRAINING.replace("callbacks=[LossSchedule()]", "callbacks=[]")
    assert without != TRAINING
    for parameters, loss in workers(scheduled, DEFINITION, without):
        assert parameters > 0.1
        assert loss > 0.1


def test_control_losses_of_single_ranks_are_another_training(workers: WorkerPool) -> None:
    alone = DEFINITION.replace("temp_decay_steps=8,", "temp_decay_steps=8, gather_distributed=False,")
    assert alone != DEFINITION
    for parameters, _ in workers(scheduled, alone, TRAINING):
        assert parameters > 0.01


@pytest.mark.parametrize("step", [8, 12])
def test_a_resumed_training_is_the_same_bit_for_bit(workers: WorkerPool, tmp_path: Path, step: int) -> None:
    """At the ends of epochs, the first that of the blend; Lightning then begins the next epoch without its hook."""
    for differing, temperature in workers(resumed, DEFINITION, str(tmp_path), step, True):
        assert differing == []
        assert 0.2 < temperature < 1.0  # it stands within its decay


def test_control_resumed_without_the_queue(workers: WorkerPool, tmp_path: Path) -> None:
    for differing, _ in workers(resumed, DEFINITION, str(tmp_path), 12, False):
        assert "/encoder.0.weight" in differing


def test_windows_train_as_one_process(workers: WorkerPool) -> None:
    for errors in workers(accumulated, WRITER, {}):
        assert max(errors) <= LIMIT


def test_control_accumulate_grad_batches_is_a_mean_of_means(workers: WorkerPool) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    for parameters, _ in workers(accumulated, AUTOMATIC, options):
        assert parameters > 0.05


def test_pooled_windows_train_as_one_process(workers: WorkerPool) -> None:
    for errors in workers(window_ranked, WINDOW_RANKER):
        assert max(errors) <= LIMIT


def test_a_forward_that_ddp_does_not_see_is_refused(workers: WorkerPool) -> None:
    past = WINDOW_RANKER.replace("self.trainer.model(batch[0])", "self(batch[0])")
    assert past != WINDOW_RANKER
    for text in workers(refused, "window_ranked", past):
        assert "a tensor from the forward of the DDP module" in text


def test_a_backward_that_lightning_does_not_prepare_is_refused(workers: WorkerPool) -> None:
    past = WRITER.replace("self.manual_backward(step.scale(", "(step.backward(")
    assert past != WRITER
    for text in workers(refused, "accumulated", past, {}):
        assert "a tensor from the forward of the DDP module" in text
