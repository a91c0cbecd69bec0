"""The Trainer of transformers: the recipes of docs/recipes/trainer.md train as one process does."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import integration_cases as cases
import pytest
import torch
import torch.distributed as dist
from loss_cases import normal
from on_ranks import slow_but
from pages import blocks, run_block
from subjects import error, gradient
from torch import Tensor, nn
from workers import WorkerPool, error_of

import fullrank
from fullrank.integrations.transformers import (
    LinearLossMixin,
    LossMonitor,
    LossState,
    PooledLossMixin,
    causal_lm_loss_func,
)

pytestmark = pytest.mark.slow
FRAMEWORK = ["accelerate", "transformers.modeling_utils", "transformers.trainer"]

EPOCHS = 2


def make_model(kind: str) -> nn.Module:
    """Return a causal model, or a BERT with one score; without dropout, which draws other masks for other batches."""
    import transformers as hf

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=11, max_position_embeddings=8, **sizes))
        if kind == "bert":
            dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=11, num_labels=1, **sizes, **dropout))
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=11, **sizes, **dropout, **ends))


def make_arguments(folder: str, **options: Any) -> Any:
    """Return arguments that keep the order of the rows, log each step and write nothing."""
    from transformers import TrainingArguments

    cases.reset_accelerate()
    defaults = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": cases.SIZE,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(folder, **{**defaults, **options})
    assert arguments.world_size == 2
    return arguments


def log_of(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def trained(rank: int, kind: str, recipe: str, folder: str, options: dict[str, Any]) -> tuple[float, float, float]:
    """Return the errors of parameters, losses and gradient norms after windows of 2, 2 and 1 micro-batches."""
    model, reference = make_model(kind), make_model(kind)
    rows = [{"input_ids": row["tokens"], "labels": row["labels"]} for row in cases.make_tokens(40)]
    rows = pooled_rows() if kind == "bert" else rows
    before, scores = cases.flat(model), lambda tokens: reference(input_ids=tokens).logits
    names = {"model": model, "arguments": make_arguments(folder, **options), "dataset": rows}
    trainer = run_block(recipe, names)["trainer"]
    loss_fn: Any = cases.token_mean
    if kind == "bert":
        is_scheduled = isinstance(getattr(trainer, "pooled_loss", None), fullrank.LossWarmupWrapper)
        loss_fn = make_schedule(gather_distributed=False) if is_scheduled else cases.loss_alone()
    windows = [cases.windows_of(40, options.get("gradient_accumulation_steps", 2))] * EPOCHS
    loss = cases.of_rows(loss_fn, scores, *columns_of(rows))
    expected, losses, norms = cases.train(reference, loss, windows, max_norm=1.0)
    logged = cases.worst(log_of(trainer, "loss"), losses), cases.worst(log_of(trainer, "grad_norm"), norms)
    return cases.change(model, before, expected), *logged


def columns_of(rows: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([row["input_ids"] for row in rows]), torch.stack([row["labels"] for row in rows])


def contrasted(rank: int, script: str, folder: str) -> tuple[float, float, float]:
    """Return the errors of parameters, losses and last temperature for pairs, windows as in ``causal``, in float64."""
    images, texts = normal(2, 40, 5, seed=3)
    pairs = [{"images": image, "texts": text} for image, text in zip(images, texts)]
    encoders = [nn.ModuleList([cases.make_encoder(3), cases.make_encoder(3)]).double() for _ in range(2)]
    learned = fullrank.InfoNCELoss(symmetric=True, learn_temperature=True, gather_distributed=False).double()
    reference = nn.ModuleList([*encoders[1], learned])
    before = torch.cat([parameter.reshape(-1) for parameter in reference.parameters()]).detach()

    names = run_block(DEFINITIONS, {}) | {"pairs": pairs}
    names["TrainingArguments"] = lambda _, **rest: make_arguments(folder, **rest)
    names |= {"image_encoder": encoders[0][0], "text_encoder": encoders[0][1]}
    script = script.replace("learn_temperature=True)", "learn_temperature=True).double()")
    trainer = run_block(script, names)["trainer"]

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        return learned(reference[0](images[chosen]), reference[1](texts[chosen]))

    expected, losses, _ = cases.train(reference, loss, [cases.windows_of(40)] * EPOCHS, max_norm=1.0)
    model = trainer.model
    found = torch.cat([cases.flat(model.image), cases.flat(model.text), model.logit_scale.detach()])
    last = cases.worst(log_of(trainer, "temperature")[-1:], [learned.temperature])
    return error(found - before, expected - before), cases.worst(log_of(trainer, "loss"), losses), last


def make_schedule(**options: Any) -> fullrank.LossWarmupWrapper:
    """Return a schedule that warms up for one epoch of three steps, and then cools."""
    main = fullrank.SmoothAPLoss(1, queue_size=64)
    warmup = fullrank.BCEWithLogitsLoss()
    times = {"warmup_epochs": 1, "temp_start": 1.0, "temp_end": 0.2, "temp_decay_steps": 2}
    return fullrank.LossWarmupWrapper(warmup, main, **times, **options)


def pooled_rows() -> list[dict[str, Tensor]]:
    """Return 40 rows of tokens; positive are those with several of the highest tokens."""
    rows = cases.make_tokens(40)
    return [{"input_ids": row["tokens"], "labels": (row["tokens"] > 7).sum()[None].gt(2).long()} for row in rows]


def counting_one_rank(rank: int, folder: str, use_cpu: bool) -> str:
    """Return the error of a Trainer that runs under torchrun on CPUs, with ``use_cpu`` or without."""
    from transformers import Trainer, TrainingArguments

    class RankingTrainer(PooledLossMixin, Trainer):  # type: ignore[misc]
        pass

    before = os.environ.pop("ACCELERATE_USE_CPU")
    cases.reset_accelerate()
    try:
        arguments = TrainingArguments(folder, use_cpu=use_cpu, report_to=[])
        given = {"model": make_model("bert"), "args": arguments, "pooled_loss": fullrank.SmoothAPLoss(1)}
        return error_of(lambda: RankingTrainer(**given))[1]
    finally:
        os.environ["ACCELERATE_USE_CPU"] = before
        cases.reset_accelerate()


def fitted(rank: int, script: str, folder: str) -> None:
    """Train, validate and resume with the script of the page, as one process does."""
    rows = pooled_rows()
    options = "num_classes=1, queue_size=64, temperature=0.5"
    names = run_block(DEFINITIONS.replace("num_classes=1", options), {})

    def job(place: str, script: str, forgets: bool = False) -> Any:
        dist.barrier()  # the files of the last job are there
        options: dict[str, Any] = {"eval_on_start": True, "save_only_model": False}
        found = {**names, "model": make_model("bert"), "train_rows": rows, "val_rows": rows}
        found["loss_fn"] = deepcopy(names["loss_fn"])
        options |= {
            "per_device_train_batch_size": cases.SIZE,
            "learning_rate": 0.5,
        }  # so that windows are uneven
        found["TrainingArguments"] = lambda _, **rest: make_arguments(f"{folder}/{place}", **rest | options)
        if forgets:
            found["loss_fn"].load_state_dict = lambda *args: None
        return run_block(script, found)["trainer"]

    reference, loss_fn = make_model("bert"), cases.alone(deepcopy(names["loss_fn"]))
    tokens, labels = columns_of(rows)
    expected: list[float] = []
    pools: list[float] = []  # positives of the pool of each step
    past: list[float] = []  # targets that have entered the queue

    def validate() -> None:
        expected.append(
            cases.average_precision(lambda tokens: reference.eval()(input_ids=tokens).logits, tokens, labels)
        )

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        if step == 3:
            validate()
        own = labels[chosen].flatten().tolist()
        pools.append(sum(past[-64:] + own))
        past.extend(own)
        return loss_fn(reference.train()(input_ids=tokens[chosen]).logits, labels[chosen])

    validate()
    cases.train(reference, loss, [cases.windows_of(40)] * EPOCHS, max_norm=1.0)
    validate()

    last = script.replace("load_best_model_at_end=True", "load_best_model_at_end=False")
    last = re.sub(r"    callbacks=.*\n", "", last)
    trainer = job("through", last)
    history, positives = log_of(trainer, "eval_ap"), log_of(trainer, "losses.ap/positives")
    assert type(trainer.callback_handler.callbacks[0]) is LossMonitor  # those that write logs come after it
    assert cases.change(trainer.model, cases.flat(make_model("bert")), cases.flat(reference)) <= LIMIT
    assert positives == pools
    assert history == pytest.approx(expected, rel=1e-6)
    assert history[0] < history[1]  # the first epoch improves the metric
    best = Path(job("best", script).state.best_model_checkpoint).name
    assert best == f"checkpoint-{3 * (1 + (history[2] > history[1]))}"
    job("killed", last.replace("num_train_epochs=2", "num_train_epochs=1"))
    again = last.replace("train()", f"train(resume_from_checkpoint={f'{folder}/killed/checkpoint-3'!r})")
    for forgets in (False, True):  # the control: without the state it is another training
        assert torch.equal(cases.flat(trainer.model), cases.flat(job("killed", again, forgets).model)) != forgets
    dist.barrier()
    if rank == 0:
        Path(folder, "killed", "checkpoint-3", "fullrank_loss.pt").unlink()
    with pytest.raises(FileNotFoundError, match="expected the state of the loss in"):
        job("killed", again)


if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    pytest.skip("needs the extra `integrations`", allow_module_level=True)
if int(version("transformers").partition(".")[0]) < 5:
    pytest.skip("needs transformers 5, which takes Python 3.11", allow_module_level=True)

LIMIT = 1e-6  # float32, of what the training has changed
CAUSAL, LINEAR, DEFINITIONS, SCRIPT, CONTRAST = blocks("recipes/trainer.md")
POOLED = (
    DEFINITIONS
    + """
loss_fn = SmoothAPLoss(num_classes=1, queue_size=64, temperature=0.5)
trainer = RankingTrainer(model=model, args=arguments, train_dataset=dataset, pooled_loss=loss_fn)
trainer.train()
"""
)
UNTYPED = re.sub(r"model\.loss_type = .*\n", "", CAUSAL)
POOLED_FUNC = """
from transformers import Trainer

from fullrank import SmoothAPLoss

loss_fn = SmoothAPLoss(num_classes=1, queue_size=64, temperature=0.5)


def own_func(outputs, labels, num_items_in_batch=None):
    return loss_fn(outputs.logits, labels)


trainer = Trainer(model=model, args=arguments, train_dataset=dataset, compute_loss_func=own_func)
trainer.train()
"""
SCHEDULED = POOLED.replace(
    "loss_fn = SmoothAPLoss(num_classes=1, queue_size=64, temperature=0.5)",
    "from test_integrations_transformers import make_schedule\n\nloss_fn = make_schedule()",
)
RIGHT: dict[str, tuple[Any, ...]] = {
    "llama": ("llama", CAUSAL, {}),
    "gpt2 without logits, tied": ("gpt2", LINEAR, {}),
    "llama without its loss_type": ("llama", UNTYPED, {}),
    "pooled, one micro-batch": ("bert", POOLED, {"gradient_accumulation_steps": 1}),
    "pooled by a schedule": ("bert", SCHEDULED, {}),
}
# With the least errors of parameters, losses and gradient norms.
WRONG: dict[str, tuple[tuple[Any, ...], tuple[float, float, float]]] = {
    "gpt2 as it comes counts the first labels": (("gpt2", UNTYPED, {}), (0.1, 0.1, 0.1)),
    "counts of single ranks": (("llama", CAUSAL, {"average_tokens_across_devices": False}), (0.05, 0, 0)),
    "a pooled loss as function: the sum of two pools": (("bert", POOLED_FUNC, {}), (0, 1.8, 0.9)),
}


FAST = ("llama", "gpt2 without logits, tied", "pooled by a schedule")


@pytest.mark.parametrize("name", slow_but(FAST, RIGHT | WRONG, pytest.mark.full))
def test_windows_train_as_one_process(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    """What is widely done is the control."""
    (kind, recipe, options), least = (RIGHT[name], ()) if name in RIGHT else WRONG[name]
    for errors in workers(trained, kind, recipe, str(tmp_path), options):
        assert max(errors) <= LIMIT or name in WRONG, errors
        assert all(found > bound for found, bound in zip(errors, least)), errors


def test_it_trains_validates_and_resumes_as_one_process(workers: WorkerPool, tmp_path: Path) -> None:
    workers(fitted, SCRIPT, str(tmp_path))


def test_pooled_pairs_train_as_one_process(workers: WorkerPool, tmp_path: Path) -> None:
    """The parameters include a learned temperature. The control compares the pairs of one rank."""
    alone = CONTRAST.replace("learn_temperature=True", "gather_distributed=False, learn_temperature=True")
    assert alone != CONTRAST
    both = (workers(contrasted, script, str(tmp_path)) for script in (CONTRAST, alone))
    for (parameters, *logged), (wrong, *_) in zip(*both):
        assert parameters <= 1e-12, (parameters, logged)
        assert max(logged) <= LIMIT  # the Trainer logs float32
        assert wrong > 0.01


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the Trainer counts the ranks without use_cpu")
def test_a_trainer_that_counts_one_rank_is_refused(workers: WorkerPool, tmp_path: Path) -> None:
    for text in workers(counting_one_rank, str(tmp_path), False):
        assert "expected 2, the ranks of the process group, got 1. Under torchrun on CPUs pass" in text
    assert workers(counting_one_rank, str(tmp_path), True) == [""] * 2


def make_run(folder: Path) -> tuple[Any, Any]:
    state = SimpleNamespace(global_step=0, trial_params=None, trial_name=None, stateful_callbacks={})
    return SimpleNamespace(output_dir=str(folder), should_save=True), state


def test_the_callback_in_a_hyperparameter_search(tmp_path: Path) -> None:
    (args, state), callback = make_run(tmp_path), LossState(fullrank.SmoothAPLoss(1))
    callback.on_train_begin(args, state, None)
    state.global_step, state.trial_params = 5, {"learning_rate": 1.0}
    with pytest.warns(UserWarning, match="pass hp_name= to hyperparameter_search"):
        callback.on_save(args, state, None)
    state.trial_name = "large"
    with pytest.warns(UserWarning, match=r"because .*large/checkpoint-5 is not there\. Use PooledLossMixin"):
        callback.on_save(args, state, None)
    (tmp_path / "large" / "checkpoint-5").mkdir(parents=True)
    callback.on_save(args, state, None)
    assert [path.name for path in tmp_path.glob("large/checkpoint-5/*")] == ["fullrank_loss.pt"]


def test_a_state_of_another_step_is_refused(tmp_path: Path) -> None:
    args, state = make_run(tmp_path)
    callback = LossState(fullrank.SmoothAPLoss(1), resume_from=tmp_path / "checkpoint-5")
    with pytest.raises(FileNotFoundError, match=r"got no such file\. Pass the folder"):
        callback.on_train_begin(args, state, None)
    callback.resume_from = None
    callback.on_train_begin(args, state, None)
    state.global_step = 5
    (tmp_path / "checkpoint-5").mkdir()
    callback.on_save(args, state, None)
    key = {**state.stateful_callbacks}
    callback.on_train_begin(args, state, None)  # from here on it is another run
    with pytest.raises(ValueError, match="got that of another run in"):
        callback.on_train_begin(args, state, None)
    state.stateful_callbacks = key
    callback.on_train_begin(args, state, None)
    callback.resume_from, state.global_step = tmp_path / "checkpoint-5", 0
    with pytest.raises(ValueError, match="expected the state of the loss at step 0, got that of step 5"):
        callback.on_train_begin(args, state, None)


def test_the_callback_does_nothing_in_other_events() -> None:
    callback = LossState(torch.nn.Linear(1, 1))
    assert callback.on_some_event_of_a_later_version(None, None, None) is None
    with pytest.raises(AttributeError, match="no attribute 'loss_of'"):
        callback.loss_of  # noqa: B018


def test_outputs_may_be_a_tuple() -> None:
    value = causal_lm_loss_func((torch.zeros(1, 3, 4), None), torch.tensor([[0, 2, -100]]))
    assert value.item() == pytest.approx(math.log(4))


def test_without_labels_the_error_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="labels: expected those of the batch, got None"):
        causal_lm_loss_func({"logits": torch.zeros(1, 3, 4)}, None)


class Inputs:
    """What :class:`LinearLossMixin` needs of a Trainer."""

    accelerator = SimpleNamespace(unwrap_model=lambda model: model)

    def __init__(self, compute_loss_func: Any) -> None:
        self.compute_loss_func = compute_loss_func

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        labels = inputs.pop("labels")
        return self.compute_loss_func(model(**inputs), labels, num_items_in_batch=num_items_in_batch)


class LinearInputs(LinearLossMixin, Inputs):
    """Of a Trainer with the mixin."""


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_training_step_without_logits(kind: str) -> None:
    """The loss and the gradients are those with logits; the head is multiplied by nothing but a block of rows."""
    batch, outcomes = token_batches(0)[0], []
    for trainer, number in itertools.product((LinearInputs(), Inputs(causal_lm_loss_func)), (None, torch.tensor(40))):
        model, shapes = make_model(kind), []
        model.lm_head.register_forward_hook(lambda head, given, found, shapes=shapes: shapes.append(found.shape))
        loss = trainer.compute_loss(model.train(), dict(batch), num_items_in_batch=number)
        loss.backward()
        assert shapes == [() if isinstance(trainer, LinearLossMixin) else (4, 6, 11)]
        outcomes.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for linear, usual in zip(outcomes[:2], outcomes[2:]):
        torch.testing.assert_close(linear, usual, rtol=1e-5, atol=1e-6)
    assert not torch.isclose(outcomes[0][0], outcomes[1][0])
    trainer = LinearInputs()
    with mock.patch.object(torch, "allclose", wraps=torch.allclose) as compare:
        for _ in range(2):
            trainer.compute_loss(model, dict(batch))
    assert compare.call_count == 1  # the second step does not wait to compare again
    model.eval()
    assert trainer.compute_loss(model, dict(batch)) == Inputs(causal_lm_loss_func).compute_loss(model, dict(batch))
    assert model.lm_head(torch.zeros(1, 16)).shape == (1, 11)


def sharded_step(rank: int, kind: str, has_own_head: bool) -> tuple[float, float]:
    """Return the errors of a step under FSDP2 that shards again after each forward, and of each rank by itself."""
    from torch.distributed.fsdp import fully_shard

    model, reference = make_model(kind).double().train(), make_model(kind).double()
    batches = [token_batches(of)[0] for of in range(2)]
    number = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    for batch in batches:
        Inputs(causal_lm_loss_func).compute_loss(reference, dict(batch), num_items_in_batch=number).backward()
    if has_own_head:
        fully_shard(model.lm_head)
    fully_shard(model, reshard_after_forward=True)
    errors = []
    for divisor in (number, None):
        model.zero_grad()
        (2 * LinearInputs().compute_loss(model, dict(batches[rank]), num_items_in_batch=divisor)).backward()
        errors.append(error(gradient(model), gradient(reference)))
    return errors[0], errors[1]


@pytest.mark.parametrize(("kind", "has_own_head"), [("llama", False), ("llama", True), ("gpt2", False)])
def test_a_step_without_logits_under_fsdp(workers: WorkerPool, kind: str, has_own_head: bool) -> None:
    for found, of_own_tokens in workers(sharded_step, kind, has_own_head):
        assert found <= 1e-12 < 0.1 < of_own_tokens


def test_heads_that_the_linear_form_does_not_take() -> None:
    import transformers as hf

    class Capped(hf.LlamaForCausalLM):
        def forward(self, **given: Any) -> Any:
            outputs = super().forward(**given)
            outputs.logits = 2 * torch.tanh(outputs.logits / 2)
            return outputs

    class Adapter(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) + 1

    batch, adapted, trainer = token_batches(0)[0], make_model("llama"), LinearInputs()
    capped, no_labels = Capped(adapted.config).train(), torch.full_like(batch["labels"], -100)
    assert trainer.compute_loss(capped, batch | {"labels": no_labels}) == 0  # which tells nothing about the head
    with pytest.raises(
        ValueError, match=r"model: expected one that returns what its head does, got others\. Pass comp"
    ):
        trainer.compute_loss(capped, dict(batch))
    adapted.lm_head.weight.data.fill_(torch.nan)
    assert LinearInputs().compute_loss(adapted.train(), dict(batch)).isnan()
    adapted.lm_head = Adapter(16, 11)
    for model in (adapted.train(), make_model("bert").train()):
        with pytest.raises(TypeError, match=r"get_output_embeddings\(\): expected an nn\.Linear, got "):
            LinearInputs().compute_loss(model, dict(batch))


@pytest.mark.parametrize(("columns", "shapes"), [(2, [(5, 7)] * 2), (3, [(5, 7)] * 3), (4, [(5, 7)] * 2 + [(5, 2, 7)])])
def test_a_loss_is_called_with_the_columns(columns: int, shapes: list[tuple[int, ...]]) -> None:
    """One negative of each row is a tensor of rows, as the others; several have a dimension of their own."""
    found: list[Tensor] = []
    trainer = PooledLossMixin(pooled_loss=lambda *rows: found.extend(rows))
    trainer._evaluate_loss(torch.nn.Linear(1, 1), torch.arange(5.0 * columns * 7).view(5, columns, 7), [{}])
    assert [tuple(rows.shape) for rows in found] == shapes


class BareTrainer:
    """What the constructor of the mixin reads of a Trainer."""

    def __init__(self) -> None:
        self.args, self.callback_handler = SimpleNamespace(world_size=1), SimpleNamespace(callbacks=[])
        self.add_callback = self.callback_handler.callbacks.append


def test_a_loss_without_anything_to_log_has_no_monitor() -> None:
    make = type("BareRankingTrainer", (PooledLossMixin, BareTrainer), {})
    for loss, kinds in (
        (fullrank.SmoothAPLoss(), [LossMonitor, LossState]),
        (fullrank.CrossEntropyLoss(), [LossState]),
    ):
        assert [type(one) for one in make(pooled_loss=loss).callback_handler.callbacks] == kinds


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


def verified(rank: int, folder: str) -> dict[str, tuple[str, str]]:
    """Return what ``verify_training_step`` finds of four ways to divide by tokens, whose number differs by rank."""
    from transformers import Trainer

    from fullrank.integrations.transformers import verify_training_step

    def own_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    batches = [{name: column[rank :: 2 - rank] for name, column in batch.items()} for batch in token_batches(rank)]
    found = {}
    for name, options, loss in (
        ("the default", {}, None),
        ("fullrank", {}, causal_lm_loss_func),
        ("tokens of each rank", {"average_tokens_across_devices": False}, None),
        ("an own mean", {}, own_mean),
    ):
        arguments = make_arguments(folder, **options)
        trainer = Trainer(make_model("llama"), arguments, train_dataset=[0], compute_loss_func=loss)
        report = verify_training_step(trainer, batches)
        found[name] = report.verdict, " ".join(report.causes)
        assert trainer.accelerator.num_processes == 2
    return found


def token_batches(rank: int) -> list[dict[str, Tensor]]:
    """Return two micro-batches of tokens; the second rank ignores more of them."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(1, 11, (2, 4, 6), generator=generator)
    is_ignored = torch.rand(tokens.shape, generator=generator) < 0.3 + 0.3 * rank
    return [{"input_ids": x, "labels": x.masked_fill(y, -100)} for x, y in zip(tokens, is_ignored)]


def test_verify_training_step(workers: WorkerPool, tmp_path: Path) -> None:
    for found in workers(verified, str(tmp_path)):
        assert {name: verdict for name, (verdict, _) in found.items()} == {
            "the default": "exact",
            "fullrank": "exact",
            "tokens of each rank": "direction",
            "an own mean": "direction",
        }
        assert found["tokens of each rank"][1].startswith("A mean of means")
