"""PyTorch Lightning: the recipes of docs/recipes/lightning.md train as one process does."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integration_cases import (
    change,
    dealt,
    flat,
    gathered,
    make_encoder,
    make_rows,
    make_tokens,
    make_writer,
    own_pool,
    token_mean,
    train,
)
from pages import blocks, run_block
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from workers import WorkerPool, error_of

import fullrank
from fullrank.data import BalancedBatchSampler

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
ADAM = partial(torch.optim.AdamW, lr=1e-2)
EPOCHS = 3


def row_loader(number: int = 64, size: int = 8) -> DataLoader[Any]:
    """Return a loader that Lightning deals out over the ranks by a sampler of its own."""
    features, targets = make_rows(number)
    return DataLoader(TensorDataset(features.double(), targets), batch_size=size)


def make_trainer(**options: Any) -> Any:
    """Return a Trainer of two gloo processes."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo")
    options = {"enable_checkpointing": False, **QUIET, **options}
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)


def make_recorder() -> Any:
    """Return a callback of both packages that keeps the metric of each validation."""
    from fullrank.integrations.lightning import LossSchedule

    class Recorder(LossSchedule.__base__):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.values: list[float] = []

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                self.values.append(float(trainer.callback_metrics["val_ap"]))

    return Recorder()


def average_precision(encoder: Any, rows: tuple[Tensor, Tensor]) -> float:
    """Return that of scikit-learn."""
    with torch.no_grad():
        return float(average_precision_score(rows[1].numpy(), encoder(rows[0].double()).numpy()))


def trained(
    rank: int, definitions: str, training: str, folder: str
) -> tuple[float, float, list[float], float, float, dict[str, float]]:
    """Return the errors of parameters and last loss, the metric of each epoch with the one before, and its reference.

    The last number is that of the checkpoint that was kept as the best; after it comes what LossMonitor logs.
    """
    encoder, reference = make_encoder().double(), make_encoder().double()
    names = run_block(definitions, {"encoder": encoder})
    loss_fn = deepcopy(names["model"].loss_fn if "model" in names else names["loss_fn"])
    for module in loss_fn.modules():
        if hasattr(module, "gather_distributed"):
            module.gather_distributed = False
    rows = make_rows(64)
    recorder = make_recorder()
    names |= {"train_loader": row_loader(), "val_loader": row_loader(), "quiet": QUIET, "recorder": recorder}
    training = training.replace('accelerator="cpu",', 'accelerator="cpu", **quiet,')
    before, first = flat(encoder), average_precision(encoder, rows)
    found = run_block(training.replace('"outputs"', repr(folder)).replace("stop, ", "stop, recorder, "), names)
    started = set()

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        if isinstance(loss_fn, fullrank.LossWarmupWrapper):
            if epoch not in started:
                loss_fn.on_train_epoch_start(epoch)
                started.add(epoch)
            loss_fn.on_train_batch_start(step)
        return loss_fn(reference(rows[0][chosen].double()), rows[1][chosen])

    epochs = [dealt(64, 8, epoch) for epoch in range(EPOCHS)]
    expected, losses, _ = train(reference, loss, epochs, make_optimizer=ADAM)
    last = float(found["trainer"].callback_metrics["loss"])
    errors = change(encoder, before, expected), abs(last / losses[-1] - 1)
    values = [first, *recorder.values]
    logged = {name: float(value) for name, value in found["trainer"].callback_metrics.items() if "/" in name}
    return *errors, values, average_precision(reference, rows), float(found["best"].best_model_score), logged


def resumed(rank: int, definition: str, folder: str, at: int, keeps_loss: bool) -> tuple[list[str], float]:
    """Return what differs between a training of 16 steps and one that resumes at a step, and the temperature then."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from fullrank.integrations.lightning import LossSchedule

    def trained(path: str | None = None) -> Any:
        model = run_block(definition, {"encoder": make_encoder().double()})["model"]
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=at, save_top_k=-1, save_on_train_epoch_end=False)
        options = {"enable_checkpointing": path is None, "callbacks": [LossSchedule()] + [keep] * (path is None)}
        make_trainer(max_epochs=4, **options).fit(model, row_loader(), ckpt_path=path)
        return model

    through = trained()
    path = Path(folder) / f"step={at}.ckpt"
    saved = torch.load(path, weights_only=True)
    temperature = saved["state_dict"]["loss_fn._extra_state"]["temperature"]
    if not keeps_loss:
        fresh = run_block(definition, {"encoder": make_encoder()})["warm"].main_loss.state_dict(
            prefix="loss_fn.main_loss."
        )
        saved["state_dict"].update(fresh)
        path = path.with_name(f"without-{rank}.ckpt")
        torch.save(saved, path)
    again = trained(str(path))
    for model in (through, again):
        model.loss_fn.gather_queue()
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
    encoder, reference = make_encoder().double(), make_encoder().double()
    before = flat(encoder)
    model = run_block(definition, {})["WindowRanker"](encoder, 2)
    trainer = make_trainer(max_epochs=3)
    trainer.fit(model, row_loader(48))
    features, targets = make_rows(48)
    loss_fn = fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.5, gather_distributed=False)

    def loss(epoch: int, step: int, rows: list[int]) -> Tensor:
        return loss_fn(reference(features[rows].double()), targets[rows])

    expected, losses, _ = train(reference, loss, [windows_of(dealt(48, 8, epoch)) for epoch in range(3)], max_norm=1.0)
    return change(encoder, before, expected), abs(float(trainer.callback_metrics["loss"]) / losses[-1] - 1)


def contrasted(rank: int, definition: str) -> tuple[float, float]:
    """Return the errors of parameters and last loss for pairs, after a window of 2 micro-batches and one of 1."""
    first, second = make_rows(48)[0].double(), make_rows(96)[0][48:].double()
    model = run_block(definition, {})["Contrast"](make_encoder(3), 2).double()
    reference = nn.ModuleList([make_encoder(3), fullrank.InfoNCELoss(symmetric=True, learn_temperature=True)]).double()
    before = flat(model)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(model, DataLoader(TensorDataset(first, second), batch_size=8))
    reference[1].gather_distributed = False

    def loss(epoch: int, step: int, rows: list[int]) -> Tensor:
        return reference[1](reference[0](first[rows]), reference[0](second[rows]))

    expected, losses, _ = train(reference, loss, [windows_of(dealt(48, 8, 0))], max_norm=1.0)
    return change(model, before, expected), abs(float(trainer.callback_metrics["loss"]) / losses[-1] - 1)


def balanced(rank: int, definition: str, options: dict[str, Any]) -> tuple[set[int], int, int, int]:
    """Return the positives of the batches, how many orders two epochs have, the batches of one, and the last epoch."""
    features, targets = make_rows(64)
    rows = TensorDataset(features.double(), targets)
    sampler = BalancedBatchSampler(targets, 8, positives=3)
    names = run_block(definition, {})
    seen: list[tuple[int, tuple[float, ...]]] = []

    class Watched(names["Ranker"]):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((int(batch[1].sum()), tuple(batch[0][:, 0].tolist())))
            return super().training_step(batch, batch_idx)

    model = Watched(make_encoder().double(), names["loss_fn"])
    make_trainer(max_epochs=2, **options).fit(model, DataLoader(rows, batch_sampler=sampler))
    half = len(seen) // 2
    orders = {tuple(order for _, order in part) for part in (seen[:half], seen[half:])}
    return {positives for positives, _ in seen}, len(orders), half, sampler.epoch


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
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs the extra `integrations`"),
]

LIMIT = 1e-6  # of what the training has changed
DEFINITION, TRAINING, WARM, WRITER, WINDOW_RANKER, CONTRAST = blocks("recipes/lightning.md")
QUEUE = ("SmoothAPLoss(num_classes=1)", "SmoothAPLoss(num_classes=1, queue_size=64)")
WARM_RANKER = DEFINITION + WARM.replace(*QUEUE)
WINDOW_RANKER = WINDOW_RANKER.replace(QUEUE[0], "SmoothAPLoss(num_classes=1, queue_size=64, temperature=0.5)")
WARM_TRAINING = TRAINING.replace("model = Ranker(encoder, loss_fn)\n", "")
# What one writes without manual optimization.
AUTOMATIC = """
import torch
from lightning.pytorch import LightningModule

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
    yield from own_pool("pytorch_lightning", "lightning.pytorch")


@pytest.mark.parametrize("package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.full)])
def test_the_ranker_trains_as_one_process(workers: WorkerPool, tmp_path: Path, package: str) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"needs {package}")
    blocks = [block.replace("lightning.pytorch", package) for block in (DEFINITION, TRAINING)]
    assert all(package in block for block in blocks)
    targets = make_rows(64)[1]
    counts = [int(targets[rows].sum()) for rows in dealt(64, 8, EPOCHS - 1)]  # of all ranks, in the last epoch
    for parameters, loss, values, expected, best, logged in workers(trained, *blocks, str(tmp_path)):
        assert logged["loss_fn.losses.ap/positives"] == pytest.approx(sum(counts) / len(counts))
        assert logged["loss_fn.losses.ap/without_positives"] == counts.count(0) / len(counts)
        assert 0.01 < logged["loss_fn.losses.ap/temperature"] < 1
        assert parameters <= LIMIT
        assert loss <= LIMIT
        assert values[0] < values[1]  # the first epoch improves the metric
        assert values[-1] == pytest.approx(expected, rel=1e-6)
        assert best == pytest.approx(max(values[1:]))
    assert {path.name for path in tmp_path.iterdir()} == {"best.ckpt", "last.ckpt"}


def test_the_warm_up_trains_as_one_process(workers: WorkerPool, tmp_path: Path) -> None:
    assert WARM_TRAINING != TRAINING
    for parameters, loss, *_ in workers(trained, WARM_RANKER, WARM_TRAINING, str(tmp_path)):
        assert max(parameters, loss) <= LIMIT


@pytest.mark.full
def test_control_without_the_callback_the_warmup_never_ends(workers: WorkerPool, tmp_path: Path) -> None:
    without = WARM_TRAINING.replace("stop, LossSchedule()", "stop")
    assert without != WARM_TRAINING
    for _, loss, *_ in workers(trained, WARM_RANKER, without, str(tmp_path)):
        assert loss > 0.1


@pytest.mark.full
def test_control_losses_of_single_ranks_are_another_training(workers: WorkerPool, tmp_path: Path) -> None:
    alone = DEFINITION.replace("num_classes=1", "num_classes=1, gather_distributed=False")
    assert alone != DEFINITION
    for parameters, *_ in workers(trained, alone, TRAINING, str(tmp_path)):
        assert parameters > 0.01


def test_a_single_callback_is_taken_by_both_packages() -> None:
    """A Trainer wraps a callback that is not in a list only if it is an instance of the class of its own package."""
    from fullrank.integrations.lightning import LossSchedule

    for package in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            assert isinstance(LossSchedule(), importlib.import_module(package).Callback)


@pytest.mark.parametrize("form", ["gathered", "sharded"])
@pytest.mark.parametrize("step", [pytest.param(8, marks=pytest.mark.full), 12])
def test_a_resumed_training_is_the_same_bit_for_bit(workers: WorkerPool, tmp_path: Path, step: int, form: str) -> None:
    """At the ends of epochs, the first that of the blend; Lightning then begins the next epoch without its hook."""
    ranker = WARM_RANKER.replace("queue_size=64", f"queue_size=64, pool={form!r}")
    for differing, temperature in workers(resumed, ranker, str(tmp_path), step, True):
        assert differing == []
        assert 0.2 < temperature < 1.0  # it stands within its decay


@pytest.mark.full
def test_control_resumed_without_the_queue(workers: WorkerPool, tmp_path: Path) -> None:
    for differing, _ in workers(resumed, WARM_RANKER, str(tmp_path), 12, False):
        assert "/encoder.0.weight" in differing


def test_windows_train_as_one_process(workers: WorkerPool) -> None:
    for errors in workers(accumulated, WRITER, {}):
        assert max(errors) <= LIMIT


@pytest.mark.full
def test_control_accumulate_grad_batches_is_a_mean_of_means(workers: WorkerPool) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    for parameters, _ in workers(accumulated, AUTOMATIC, options):
        assert parameters > 0.05


def test_pooled_windows_train_as_one_process(workers: WorkerPool) -> None:
    for errors in workers(window_ranked, WINDOW_RANKER):
        assert max(errors) <= LIMIT


def test_pooled_pairs_train_as_one_process(workers: WorkerPool) -> None:
    """The parameters include a learned temperature. The control compares the pairs of one rank."""
    alone = CONTRAST.replace("learn_temperature=True", "learn_temperature=True, gather_distributed=False")
    assert alone != CONTRAST
    for (parameters, loss), (wrong, _) in zip(*(workers(contrasted, WINDOW_RANKER + one) for one in (CONTRAST, alone))):
        assert parameters <= 1e-12
        assert loss <= LIMIT  # Lightning logs float32
        assert wrong > 0.01


@pytest.mark.full
def test_lightning_keeps_balanced_batches(workers: WorkerPool) -> None:
    for found in workers(balanced, DEFINITION, {"use_distributed_sampler": False}):
        assert found == ({3}, 2, 4, 1)  # three positives in each batch, another order in each of two epochs


def test_a_forward_that_ddp_does_not_see_is_refused(workers: WorkerPool) -> None:
    past = WINDOW_RANKER.replace("forward=self.trainer.model", "forward=self")
    assert past != WINDOW_RANKER
    for text in workers(refused, "window_ranked", past):
        assert "a tensor from the forward of the DDP module" in text


def test_a_backward_that_lightning_does_not_prepare_is_refused(workers: WorkerPool) -> None:
    past = WRITER.replace("self.manual_backward(step.scale(", "(step.backward(")
    assert past != WRITER
    for text in workers(refused, "accumulated", past, {}):
        assert "a tensor from the forward of the DDP module" in text


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_save_of_weights_alone_warns_of_the_rows_of_one_rank(weights_only: bool) -> None:
    from fullrank.integrations.lightning import LossSchedule

    loss, schedule = fullrank.SmoothAPLoss(queue_size=8, pool="sharded"), LossSchedule()
    loss.queue.take_place(0, 2)
    loss.queue.enqueue(torch.zeros(2, 1), torch.tensor([0, 1]), None, None, [2, 2], num_rows=4, mark=(0.0, 0.0))
    model, saver = nn.ModuleDict({"loss": loss}), SimpleNamespace(save_weights_only=weights_only)
    schedule.setup(SimpleNamespace(checkpoint_callbacks=[saver]), model, "fit")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.state_dict()
    assert ["only the queued rows of rank 0" in str(one.message) for one in caught] == [True] * weights_only
    schedule.teardown(None, model, "fit")
    with pytest.warns(UserWarning, match="only the queued rows of rank 0"):
        model.state_dict()
