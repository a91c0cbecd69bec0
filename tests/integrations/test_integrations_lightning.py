"""PyTorch Lightning: the recipes of docs/recipes/lightning.md train as one process does."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import integration_cases as cases
import pytest
import torch
from on_ranks import gathered, slow_but
from pages import blocks, run_block
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from workers import WorkerPool, error_of

import fullrank

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
ADAM = partial(torch.optim.AdamW, lr=1e-2)
EPOCHS = 3


def row_loader(number: int = 64, size: int = 8) -> DataLoader[Any]:
    """Return a loader that Lightning deals out over the ranks by a sampler of its own."""
    features, targets = cases.make_rows(number)
    return DataLoader(TensorDataset(features.double(), targets), batch_size=size)


def make_trainer(**options: Any) -> Any:
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


def trained(rank: int, definitions: str, training: str, folder: str) -> tuple[float, float]:
    """Return the errors of parameters and last loss; assert the metrics and what LossMonitor logs, if it does."""
    encoder, reference = cases.make_encoder().double(), cases.make_encoder().double()
    names = run_block(definitions, {"encoder": encoder})
    loss_fn = cases.alone(deepcopy(names["model"].loss_fn if "model" in names else names["loss_fn"]))
    features, targets = cases.make_rows(64)
    rows = features.double(), targets
    recorder = make_recorder()
    names |= {"train_loader": row_loader(), "val_loader": row_loader(), "quiet": QUIET, "recorder": recorder}
    training = training.replace('accelerator="cpu",', 'accelerator="cpu", **quiet,')
    before, first = cases.flat(encoder), cases.average_precision(encoder, *rows)
    found = run_block(training.replace('"outputs"', repr(folder)).replace("stop, ", "stop, recorder, "), names)
    epochs = [cases.dealt(64, 8, epoch) for epoch in range(EPOCHS)]
    expected, losses, _ = cases.train(reference, cases.of_rows(loss_fn, reference, *rows), epochs, make_optimizer=ADAM)
    logged = found["trainer"].callback_metrics["loss"]
    errors = cases.change(encoder, before, expected), cases.worst([logged], losses[-1:])
    if max(errors) <= LIMIT:
        values = [first, *recorder.values]
        assert values[0] < values[1]  # the first epoch improves the metric
        assert values[-1] == pytest.approx(cases.average_precision(reference, *rows), rel=1e-6)
        assert float(found["best"].best_model_score) == pytest.approx(max(values[1:]))
    if max(errors) <= LIMIT and isinstance(loss_fn, fullrank.CombinedLoss):
        counts = [int(targets[chosen].sum()) for chosen in epochs[-1]]  # of all ranks, in the last epoch
        logged = {name: float(value) for name, value in found["trainer"].callback_metrics.items() if "/" in name}
        assert logged["loss_fn.losses.ap/positives"] == pytest.approx(sum(counts) / len(counts))
        assert logged["loss_fn.losses.ap/without_positives"] == counts.count(0) / len(counts)
        assert 0.01 < logged["loss_fn.losses.ap/temperature"] < 1
    return errors


def resumed(rank: int, definition: str, folder: str, at: int, keeps_loss: bool) -> tuple[list[str], float]:
    """Return what differs between a training of 16 steps and one that resumes at a step, and the temperature then."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from fullrank.integrations.lightning import LossSchedule

    def trained(path: str | None = None) -> Any:
        model = run_block(definition, {"encoder": cases.make_encoder().double()})["model"]
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=at, save_top_k=-1, save_on_train_epoch_end=False)
        options = {"enable_checkpointing": path is None, "callbacks": [LossSchedule()] + [keep] * (path is None)}
        make_trainer(max_epochs=4, **options).fit(model, row_loader(), ckpt_path=path)
        return model

    through = trained()
    path = Path(folder) / f"step={at}.ckpt"
    saved = torch.load(path, weights_only=True)
    temperature = saved["state_dict"]["loss_fn.saved_temperature"].item()
    if not keeps_loss:
        fresh = run_block(definition, {"encoder": cases.make_encoder()})["warm"].main_loss.state_dict(
            prefix="loss_fn.main_loss."
        )
        saved["state_dict"].update(fresh)
        path = path.with_name(f"without-{rank}.ckpt")
        torch.save(saved, path)
    again = trained(str(path))
    states = through.state_dict(), again.state_dict()
    assert states[0].keys() == states[1].keys()
    names = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    return names, temperature


def windowed(rank: int, kind: str, definition: str, options: dict[str, Any]) -> tuple[float, float]:
    """Return the errors of parameters and last loss after epochs of windows of two micro-batches and of one."""
    number, size, epochs = {"tokens": (40, 4, 2), "rows": (48, 8, 3), "pairs": (48, 8, 1)}[kind]
    names, rows = run_block(definition, {}), cases.make_tokens(number)
    if kind == "tokens":
        model, reference = names["Writer"](cases.make_writer(), 2), cases.make_writer()
        loss = cases.of_tokens(reference, rows)
    elif kind == "rows":
        (features, targets), encoder = cases.make_rows(number), cases.make_encoder().double()
        reference = cases.make_encoder().double()
        model, rows = names["WindowRanker"](encoder, 2), TensorDataset(features.double(), targets)
        loss = cases.of_rows(cases.loss_alone(), reference, *rows.tensors)
    else:
        views = cases.make_rows(2 * number)[0].double().split(number)
        model, rows = names["Contrast"](cases.make_encoder(3), 2).double(), TensorDataset(*views)
        learned = cases.alone(fullrank.InfoNCELoss(symmetric=True, learn_temperature=True))
        reference = nn.ModuleList([cases.make_encoder(3), learned]).double()

        def loss(epoch: int, step: int, rows: list[int]) -> Tensor:
            return learned(*(reference[0](view[rows]) for view in views))

    before, trainer = cases.flat(model), make_trainer(max_epochs=epochs, **options)
    trainer.fit(model, DataLoader(rows, batch_size=size))
    windows = [windows_of(cases.dealt(number, size, epoch)) for epoch in range(epochs)]
    expected, losses, _ = cases.train(reference, loss, windows, max_norm=1.0)
    assert trainer.global_step == len(losses)
    assert len(set(gathered(repr(cases.flat(model).tolist())))) == 1
    return cases.change(model, before, expected), cases.worst([trainer.callback_metrics["loss"]], losses[-1:])


def hints_of(rank: int, definition: str, options: dict[str, Any]) -> list[str]:
    from fullrank.integrations.lightning import LossMonitor, LossSchedule

    names = run_block(definition, {})
    model = names["Ranker"](cases.make_encoder().double(), names["loss_fn"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_epochs=2, callbacks=[LossSchedule(), LossMonitor()], **options).fit(model, row_loader())
    return [str(one.message) for one in caught if "pooled_backward" in str(one.message)]


def refused(rank: int, kind: str, definition: str) -> str:
    return error_of(lambda: windowed(rank, kind, definition, {}))[1]


def windows_of(batches: list[list[int]]) -> list[list[int]]:
    """Return windows of two global batches; in rank order, as a queue that drops some rows must drop the same."""
    windows = [batches[start : start + 2] for start in range(0, len(batches), 2)]
    return [[row for half in (0, 1) for rows in window for row in share(rows, half)] for window in windows]


def share(rows: list[int], rank: int) -> list[int]:
    half = len(rows) // 2
    return rows[rank * half : (rank + 1) * half]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs the extra `integrations`"),
]
FRAMEWORK = ["pytorch_lightning", "lightning.pytorch"]

LIMIT = 1e-6  # of what the training has changed
DEFINITION, TRAINING, CLIPPED, WARM, WRITER, WINDOW_RANKER, CONTRAST = blocks("recipes/lightning.md")
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


TRAININGS = {
    "ranker": (DEFINITION, TRAINING),
    "pytorch_lightning": [block.replace("lightning.pytorch", "pytorch_lightning") for block in (DEFINITION, TRAINING)],
    "warm-up": (WARM_RANKER, WARM_TRAINING),
}
CONTROLS = {
    "without the callback the warm-up never ends": (WARM_RANKER, WARM_TRAINING.replace("stop, LossSchedule()", "stop")),
    "losses of single ranks": (
        DEFINITION.replace("num_classes=1", "num_classes=1, gather_distributed=False"),
        TRAINING,
    ),
}


@pytest.mark.parametrize("name", slow_but(("ranker", "warm-up"), TRAININGS | CONTROLS, pytest.mark.full))
def test_it_trains_as_one_process(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    if name == "pytorch_lightning" and importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    assert len(set(map(str, TRAININGS.values()))) == 3
    errors = [*map(max, workers(trained, *(TRAININGS | CONTROLS)[name], str(tmp_path)))]
    assert min(errors) > 0.01 if name in CONTROLS else max(errors) <= LIMIT
    assert name in CONTROLS or {path.name for path in tmp_path.iterdir()} == {"best.ckpt", "last.ckpt"}


def test_a_pooled_loss_of_each_micro_batch_warns_once(workers: WorkerPool) -> None:
    """Controls: one micro-batch a step, and a loss that is not pooled."""
    pointwise = DEFINITION.replace(', "ap": SmoothAPLoss(num_classes=1)', "")
    assert pointwise != DEFINITION
    two: dict[str, Any] = {"accumulate_grad_batches": 2}
    for definition, options, number in ((DEFINITION, two, 1), (DEFINITION, {}, 0), (pointwise, two, 0)):
        for texts in workers(hints_of, definition, options):
            assert len(texts) == number
            assert all(text.startswith("SmoothAPLoss: accumulate_grad_batches is greater than 1") for text in texts)


def test_a_single_callback_is_taken_by_both_packages() -> None:
    """A Trainer wraps a callback that is not in a list only if it is an instance of the class of its own package."""
    from fullrank.integrations.lightning import LossSchedule

    for package in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            assert isinstance(LossSchedule(), importlib.import_module(package).Callback)


@pytest.mark.parametrize(
    ("step", "keeps_loss"),
    [
        (12, True),
        pytest.param(8, True, marks=pytest.mark.full),
        pytest.param(12, False, marks=pytest.mark.full),  # the control: without the queue
    ],
)
def test_a_resumed_training_is_the_same_bit_for_bit(
    workers: WorkerPool, tmp_path: Path, step: int, keeps_loss: bool
) -> None:
    """At the ends of epochs, the first that of the blend; Lightning then begins the next epoch without its hook."""
    for differing, temperature in workers(resumed, WARM_RANKER, str(tmp_path), step, keeps_loss):
        assert differing == [] if keeps_loss else "encoder.0.weight" in differing
        assert 0.2 < temperature < 1.0  # it stands within its decay


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, in what Lightning calls
@pytest.mark.parametrize("limit", [1e-3, None])
def test_the_recipe_clips_by_the_norm_of_the_whole_model(monkeypatch: pytest.MonkeyPatch, limit: float | None) -> None:
    """Without a limit, the control, the norm is not changed."""
    from lightning.pytorch import Trainer

    norms: list[tuple[float, float]] = []

    def spy(model: nn.Module, max_norm: float | None) -> Tensor:
        norm = clip(model, max_norm)
        norms.append((norm.item(), fullrank.total_grad_norm(model).item()))
        return norm

    clip = fullrank.clip_grad_norm_
    monkeypatch.setattr(fullrank, "clip_grad_norm_", spy)
    names = run_block(CLIPPED, run_block(DEFINITION, {"encoder": cases.make_encoder().double()}))
    model = names["ClippedRanker"](names["encoder"], names["loss_fn"])
    options = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "max_steps": 2, **QUIET}
    Trainer(gradient_clip_val=limit, **options).fit(model, row_loader(), row_loader())
    assert len(norms) == 2
    for before, after in norms:
        assert before > 1e-2
        assert after == pytest.approx(before if limit is None else limit, rel=1e-3)


ALONE = CONTRAST.replace("learn_temperature=True", "learn_temperature=True, gather_distributed=False")
WINDOWS: dict[str, tuple[Any, ...]] = {
    "tokens": ("tokens", WRITER, {}),
    "rows": ("rows", WINDOW_RANKER, {}),
    "pairs": ("pairs", WINDOW_RANKER + CONTRAST, {}),
}
WRONG_WINDOWS: dict[str, tuple[Any, ...]] = {
    "the pairs of one rank": ("pairs", WINDOW_RANKER + ALONE, {}),
    "a mean of means": ("tokens", AUTOMATIC, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
}


@pytest.mark.parametrize(
    "name", [*WINDOWS, "the pairs of one rank", pytest.param("a mean of means", marks=pytest.mark.full)]
)
def test_windows_train_as_one_process(workers: WorkerPool, name: str) -> None:
    """The parameters of the pairs include a learned temperature. The last two are controls."""
    for parameters, loss in workers(windowed, *(WINDOWS | WRONG_WINDOWS)[name]):
        if name in WINDOWS:
            assert parameters <= (1e-12 if name == "pairs" else LIMIT)
            assert loss <= LIMIT  # Lightning logs float32
        else:
            assert parameters > 0.01


@pytest.mark.parametrize(
    ("kind", "past"),
    [
        ("rows", WINDOW_RANKER.replace("forward=self.trainer.model", "forward=self")),
        ("tokens", WRITER.replace("self.manual_backward(step.scale(", "(step.backward(")),
    ],
    ids=["a forward that DDP does not see", "a backward that Lightning does not prepare"],
)
def test_what_bypasses_the_wrapper_is_refused(workers: WorkerPool, kind: str, past: str) -> None:
    for text in workers(refused, kind, past):
        assert "a tensor from the forward of the DDP module" in text


def verified(rank: int, definition: str) -> list[tuple[str, float]]:
    """Return what VerifyStep reports of the recipe and of a loss of own rows, and how the training then differs."""
    from fullrank.integrations.lightning import VerifyStep

    found = []
    for loss_fn in (fullrank.SmoothAPLoss(1), fullrank.SmoothAPLoss(1, gather_distributed=False)):
        verify, trained = VerifyStep(), []
        for callbacks in ([verify], []):
            model = run_block(definition, {})["Ranker"](cases.make_encoder().double(), deepcopy(loss_fn))
            make_trainer(max_steps=2, callbacks=callbacks).fit(model, row_loader())
            trained.append(cases.flat(model.encoder))
        assert verify.report is not None
        found.append((verify.report.verdict, float((trained[1] - trained[0]).abs().max())))
    return found


def test_verify_step(workers: WorkerPool) -> None:
    """The first step is verified, and the training is the same as without."""
    for found in workers(verified, DEFINITION):
        assert found == [("exact", 0.0), ("direction", 0.0)]
