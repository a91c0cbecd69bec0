"""What the worker processes run for the recipes of the Trainer, with tiny models that nobody has trained."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import AcceleratorState
from integration_accelerate_cases import SIZE, windows_of
from integration_cases import change, flat, make_tokens, run_block, token_mean, train
from torch import Tensor, nn

import fullrank

EPOCHS = 2


def make_model(kind: str) -> nn.Module:
    """Return a causal model, or a BERT with one score; without dropout, which draws other masks for other batches."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "llama":
            return LlamaForCausalLM(LlamaConfig(vocab_size=11, max_position_embeddings=8, **sizes))
        if kind == "bert":
            dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return BertForSequenceClassification(BertConfig(vocab_size=11, num_labels=1, **sizes, **dropout))
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=11, **sizes, **dropout, **ends))


def make_arguments(folder: str, **options: Any) -> Any:
    """Return arguments that keep the order of the rows, log each step and write nothing."""
    from transformers import TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    defaults = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": SIZE,
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
    """Return what the Trainer has logged in each step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def worst(found: list[float], expected: list[float]) -> float:
    """Return the largest relative error."""
    assert len(found) == len(expected)
    return max(abs(a / b - 1) for a, b in zip(found, expected))


def causal(rank: int, recipe: str, folder: str, kind: str, options: dict[str, Any]) -> tuple[float, float, float]:
    """Return the errors of parameters, losses and gradient norms after windows of 2, 2 and 1 micro-batches."""
    rows = [{"input_ids": row["tokens"], "labels": row["labels"]} for row in make_tokens(40)]
    model, reference = make_model(kind), make_model(kind)
    before = flat(model)
    names = {"model": model, "arguments": make_arguments(folder, **options), "dataset": rows}
    trainer = run_block(recipe, names)["trainer"]

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        tokens, labels = (torch.stack([rows[row][key] for row in chosen]) for key in ("input_ids", "labels"))
        return token_mean(reference(input_ids=tokens).logits, labels)

    expected, losses, norms = train(reference, loss, [windows_of(40)] * EPOCHS, max_norm=1.0)
    logged = worst(log_of(trainer, "loss"), losses), worst(log_of(trainer, "grad_norm"), norms)
    return change(model, before, expected), *logged


def pooled(rank: int, recipe: str, folder: str, options: dict[str, Any]) -> tuple[float, float, float]:
    """Return the errors of parameters, losses and gradient norms for SmoothAP, windows as in ``causal``."""
    rows = pooled_rows()
    model, reference = make_model("bert"), make_model("bert")
    before = flat(model)
    names = {"model": model, "arguments": make_arguments(folder, **options), "dataset": rows}
    trainer = run_block(recipe, names)["trainer"]
    loss_fn = one_process(trainer.pooled_loss if hasattr(trainer, "pooled_loss") else None)
    per_epoch = windows_of(len(rows), options.get("gradient_accumulation_steps", 2))

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        if isinstance(loss_fn, fullrank.LossWarmupWrapper):
            if step % len(per_epoch) == 0:
                loss_fn.on_train_epoch_start(epoch)
            loss_fn.on_train_batch_start(step)
        tokens, labels = (torch.stack([rows[row][key] for row in chosen]) for key in ("input_ids", "labels"))
        return loss_fn(reference(input_ids=tokens).logits, labels)

    expected, losses, norms = train(reference, loss, [per_epoch] * EPOCHS, max_norm=1.0)
    logged = worst(log_of(trainer, "loss"), losses), worst(log_of(trainer, "grad_norm"), norms)
    return change(model, before, expected), *logged


def one_process(like: Any) -> Any:
    """Return the loss of one process: that of the recipe, or a schedule like ``like``."""
    if isinstance(like, fullrank.LossWarmupWrapper):
        return make_schedule(gather_distributed=False)
    return fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.5, gather_distributed=False)


def make_schedule(**options: Any) -> fullrank.LossWarmupWrapper:
    """Return a schedule that warms up for one epoch of three steps, and then cools."""
    main = fullrank.SmoothAPLoss(1, queue_size=64)
    warmup = fullrank.SigmoidFocalLoss(alpha=-1, gamma=0)
    times = {"warmup_epochs": 1, "temp_start": 1.0, "temp_end": 0.2, "temp_decay_steps": 2}
    return fullrank.LossWarmupWrapper(warmup, main, **times, **options)


def pooled_rows() -> list[dict[str, Tensor]]:
    """Return 40 rows of tokens; positive are those with several of the highest tokens."""
    rows = make_tokens(40)
    return [{"input_ids": row["tokens"], "labels": (row["tokens"] > 7).sum()[None].gt(2).long()} for row in rows]


def evaluated(rank: int, folder: str) -> tuple[float, float, int]:
    """Return the loss of an evaluation, that of one process, and the rows that have entered the queue."""
    from transformers import Trainer

    from fullrank.integrations.transformers import PooledLossMixin

    class RankingTrainer(PooledLossMixin, Trainer):  # type: ignore[misc]
        pass

    rows, model = pooled_rows(), make_model("bert")
    loss_fn = fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.5)
    arguments = make_arguments(folder, per_device_eval_batch_size=20)
    trainer = RankingTrainer(model=model, args=arguments, pooled_loss=loss_fn)
    found = trainer.evaluate(rows)["eval_loss"]
    tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
    model.eval()
    expected = one_process(None)(model(input_ids=tokens).logits, labels)
    return found, float(expected), len(loss_fn.queue)
