"""The Trainer of transformers: the recipes of docs/integrations.md train as one process does."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from integration_cases import blocks, own_pool
from workers import WorkerPool

from fullrank.integrations.transformers import PooledLossMixin, causal_lm_loss_func

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    pytest.skip("needs the extra `integrations`", allow_module_level=True)
if int(version("transformers").partition(".")[0]) < 5:
    pytest.skip("needs transformers 5, which takes Python 3.11", allow_module_level=True)

import integration_transformers_cases as cases

LIMIT = 1e-6  # float32, of what the training has changed
(CAUSAL,) = blocks("Causal models")
(POOLED,) = blocks("Pooled losses in the Trainer")
# What the Trainer does by itself.
OWN_LOSS = CAUSAL.replace(", compute_loss_func=causal_lm_loss_func", "")
UNTYPED = re.sub(r"model\.loss_type = .*\n", "", CAUSAL)
MEAN = """
from transformers import Trainer

from fullrank import causal_lm_loss


def mean_loss(outputs, labels, num_items_in_batch=None):
    return causal_lm_loss(outputs.logits, labels)


trainer = Trainer(model=model, args=arguments, train_dataset=dataset, compute_loss_func=mean_loss)
trainer.train()
"""
POOLED_FUNC = """
from transformers import Trainer

from fullrank import SmoothAPLoss

loss_fn = SmoothAPLoss(num_classes=1, queue_size=64, temperature=0.5)


def pooled_func(outputs, labels, num_items_in_batch=None):
    return loss_fn(outputs.logits, labels)


trainer = Trainer(model=model, args=arguments, train_dataset=dataset, compute_loss_func=pooled_func)
trainer.train()
"""
SCHEDULED = POOLED.replace(
    "loss_fn = SmoothAPLoss(num_classes=1, queue_size=64, temperature=0.5)",
    "from integration_transformers_cases import make_schedule\n\nloss_fn = make_schedule()",
)


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    yield from own_pool("accelerate", "transformers.modeling_utils", "transformers.trainer")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("recipe", [CAUSAL, OWN_LOSS], ids=["function", "of_the_model"])
def test_causal_models_train_as_one_process(workers: WorkerPool, tmp_path: Path, recipe: str, kind: str) -> None:
    for errors in workers(cases.causal, recipe, str(tmp_path), kind, {}):
        assert max(errors) <= LIMIT


@pytest.mark.parametrize(("kind", "exact"), [("llama", True), ("gpt2", False)])
def test_control_gpt2_as_it_comes_counts_the_first_labels(
    workers: WorkerPool, tmp_path: Path, kind: str, exact: bool
) -> None:
    assert UNTYPED != CAUSAL
    for errors in workers(cases.causal, UNTYPED, str(tmp_path), kind, {}):
        assert max(errors) <= LIMIT if exact else min(errors) > 0.1


@pytest.mark.parametrize("recipe", [CAUSAL, OWN_LOSS], ids=["function", "of_the_model"])
def test_control_counts_of_single_ranks(workers: WorkerPool, tmp_path: Path, recipe: str) -> None:
    options = {"average_tokens_across_devices": False}
    for parameters, *_ in workers(cases.causal, recipe, str(tmp_path), "llama", options):
        assert parameters > 0.05


def test_control_a_mean_is_off_by_ranks_times_micro_batches(workers: WorkerPool, tmp_path: Path) -> None:
    for parameters, loss, norm in workers(cases.causal, MEAN, str(tmp_path), "llama", {}):
        assert parameters > 0.05
        assert loss > 2  # 2 x 2 times the loss
        assert norm > 2


@pytest.mark.parametrize("steps", [1, 2], ids=["one", "two"])
def test_pooled_losses_train_as_one_process(workers: WorkerPool, tmp_path: Path, steps: int) -> None:
    for errors in workers(cases.pooled, POOLED, str(tmp_path), {"gradient_accumulation_steps": steps}):
        assert max(errors) <= LIMIT


def test_the_schedule_of_a_pooled_loss(workers: WorkerPool, tmp_path: Path) -> None:
    assert SCHEDULED != POOLED
    for errors in workers(cases.pooled, SCHEDULED, str(tmp_path), {}):
        assert max(errors) <= LIMIT


@pytest.mark.parametrize(("steps", "factor"), [(1, 2), (2, 4)], ids=["one", "two"])
def test_control_a_pooled_loss_as_function(workers: WorkerPool, tmp_path: Path, steps: int, factor: int) -> None:
    """Twice by the ranks; with two micro-batches also the sum of two pools, about twice."""
    for _, loss, norm in workers(cases.pooled, POOLED_FUNC, str(tmp_path), {"gradient_accumulation_steps": steps}):
        assert loss > 0.7 * factor - 1
        assert norm > 0.9


def test_evaluation_is_the_loss_of_one_process(workers: WorkerPool, tmp_path: Path) -> None:
    for found, expected, queued in workers(cases.evaluated, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-6)
        assert queued == 0


def test_without_labels_the_error_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="labels: expected those of the batch, got None"):
        causal_lm_loss_func({"logits": torch.zeros(1, 3, 4)}, None)


class DeepSpeedTrainer(PooledLossMixin):
    """What the mixin reads of a Trainer under DeepSpeed, which is no test dependency."""

    accelerator = SimpleNamespace(sync_gradients=False, distributed_type="DEEPSPEED")
    args = SimpleNamespace(device="cpu")
    state = SimpleNamespace(epoch=0.0, global_step=0)


def test_a_backward_that_is_not_torchs_is_refused() -> None:
    trainer = DeepSpeedTrainer(pooled_loss=torch.nn.functional.mse_loss)
    trainer.training_step(torch.nn.Linear(1, 1), {})
    trainer.accelerator = SimpleNamespace(sync_gradients=True, distributed_type="DEEPSPEED")
    with pytest.raises(RuntimeError, match="expected 1 under DEEPSPEED, got 2 micro-batches"):
        trainer.training_step(torch.nn.Linear(1, 1), {})
