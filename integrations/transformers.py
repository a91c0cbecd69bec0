"""The Trainer of transformers: losses over the window of all ranks. This module does not import transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..accumulation import pooled_backward
from ..errors import Words, expected
from ..losses import RankingLoss, causal_lm_loss
from .schedules import find_schedules


def causal_lm_loss_func(
    outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | float | None = None
) -> Tensor:
    """Sum the cross-entropies of the next tokens and divide by the tokens of the window: a ``compute_loss_func``.

    Equal to ``causal_lm_loss(outputs.logits, labels, num_items=num_items_in_batch)``.

    The Trainer counts the labels of all micro-batches and ranks. It multiplies the loss by the number of ranks, by
    which DDP divides. Both need ``average_tokens_across_devices=True``, the default. For models whose ``loss_type`` is
    that of a causal model, the count leaves out the first label of each row, as the loss does.

    Args:
        outputs: outputs of the model, with the logits under ``logits`` or in the first place.
        labels: (N, T), -100 where a token does not count; not shifted.
        num_items_in_batch: the count of the Trainer. None, as in a call by hand, gives the mean of this call.

    Raises:
        ValueError: without labels. The Trainer has no count then either.

    Example:
        >>> causal_lm_loss_func({"logits": torch.zeros(1, 3, 4)}, torch.tensor([[0, 2, -100]]), torch.tensor(2))
        tensor(0.6931)
    """
    if labels is None:
        fix = "Give the data set a column of that name: the Trainer counts its tokens."
        raise ValueError(expected("labels", "those of the batch", labels, fix))
    return causal_lm_loss(_logits(outputs), labels, num_items=num_items_in_batch)


class LossState:
    """A callback of the Trainer that saves the state of a loss in its checkpoints, and loads it on resume.

    Equal to saving ``loss.state_dict()`` in the folder of the checkpoint whenever the Trainer writes one, and to
    ``loss.load_state_dict`` on every rank before the first step of a resumed training. :class:`PooledLossMixin` has one
    already.

    Args:
        loss: a module with ``state_dict`` and ``load_state_dict``: a loss with a queue, or a schedule.
        name: name of the file in the folder of a checkpoint.

    Raises:
        FileNotFoundError: when the training resumes from a checkpoint without the file. The text says what to do.

    Distributed:
        Rank 0 writes, every rank reads. No collective, except that a sharded queue is gathered before it is saved.

    Example:
        >>> from fullrank import SmoothAPLoss
        >>> callback = LossState(SmoothAPLoss(num_classes=1, queue_size=64))
        >>> callback.name
        'fullrank_loss.pt'
    """

    resume_from: str | None = None  # the folder that train() resumes from, if the mixin knows it

    def __init__(self, loss: nn.Module, name: str = "fullrank_loss.pt") -> None:
        self.loss, self.name = loss, name

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state next to the weights that the Trainer has just written."""
        for module in self.loss.modules():
            if isinstance(module, RankingLoss):
                module.gather_queue()
        if args.should_save:
            path = self._checkpoint(args, state) / self.name
            torch.save(self.loss.state_dict(), path.with_suffix(".unfinished"))
            path.with_suffix(".unfinished").replace(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the state, if the training does not start at step 0."""
        if state.global_step == 0:
            return
        given = self.resume_from or args.resume_from_checkpoint
        path = (Path(given) if isinstance(given, str) else self._checkpoint(args, state)) / self.name
        if not path.exists():
            fix = "Copy the file there, or remove the callback to continue with a new state of the loss."
            raise FileNotFoundError(
                expected("LossState", f"the state of the loss in {path}", Words("no such file"), fix)
            )
        self.loss.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    @staticmethod
    def _checkpoint(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Do nothing in the other events. There is no base class to inherit from without importing transformers."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The other events of a callback."""


class PooledLossMixin:
    """A mixin for ``transformers.Trainer``: one pooled loss over the window, all micro-batches of all ranks.

    Write ``class RankingTrainer(PooledLossMixin, Trainer)`` to use it. The Trainer changes the loss of a
    ``compute_loss_func`` in two ways: it multiplies it by the number of ranks, and adds it up over micro-batches
    instead of averaging it. The pooled loss is changed in neither way. With ``gradient_accumulation_steps`` > 1,
    :func:`~fullrank.pooled_backward` back-propagates the window in the last of its micro-batches. The logged loss is
    that of the window.

    The mixin passes epoch and step to a :class:`~fullrank.LossWarmupWrapper` in ``pooled_loss``. If ``pooled_loss`` is
    a module, a :class:`LossState` saves its queue, temperature and schedule with each checkpoint, and loads them when
    ``train(resume_from_checkpoint=...)`` resumes.

    Args:
        pooled_loss: called as ``pooled_loss(logits, labels)``; returns a scalar, the same on every rank.
        *args, **kwargs: arguments of the Trainer. ``compute_loss_func`` is not used.

    Raises:
        RuntimeError: for a window of several micro-batches under DeepSpeed or Megatron, which have their own backward.
    """

    # Attributes of the Trainer.
    accelerator: Any
    args: Any
    state: Any
    _prepare_inputs: Callable[..., Mapping[str, Any]]

    def __init__(self, *args: Any, pooled_loss: Callable[[Tensor, Tensor], Tensor], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pooled_loss = pooled_loss
        self._pooled_window: list[Mapping[str, Any]] = []
        self._pooled_epoch = -1
        self._pooled_state = LossState(pooled_loss) if isinstance(pooled_loss, nn.Module) else None
        if self._pooled_state is not None:
            trainer: Any = self
            trainer.add_callback(self._pooled_state)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, and tell the state of the loss which checkpoint it resumes from."""
        if self._pooled_state is not None:
            self._pooled_state.resume_from = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        trainer: Any = super()
        return trainer.train(resume_from_checkpoint, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of one batch of all ranks; with ``return_outputs`` also the outputs of the model."""
        outputs = model(**_without_labels(inputs))
        loss = self._evaluate_loss(model, _logits(outputs), [inputs])
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Store the micro-batch. With the last one of the window, back-propagate the loss and return it."""
        self._pooled_window.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        window, self._pooled_window = self._pooled_window, []
        epoch, schedules = int(self.state.epoch or 0), find_schedules(self.pooled_loss)
        for schedule in schedules:
            if epoch != self._pooled_epoch:
                schedule.on_train_epoch_start(epoch)
            schedule.on_train_batch_start(self.state.global_step)
        self._pooled_epoch = epoch
        if len(window) == 1:
            trainer: Any = super()
            return trainer.training_step(model, window[0], num_items_in_batch)
        if self.accelerator.distributed_type in ("DEEPSPEED", "MEGATRON_LM"):
            found, fix = Words(f"{len(window)} micro-batches"), "Set gradient_accumulation_steps=1."
            raise RuntimeError(expected("window", f"1 under {self.accelerator.distributed_type}", found, fix))
        model.train()
        return pooled_backward(
            model,
            [self._prepare_inputs(batch) for batch in window],
            forward=lambda batch: _logits(model(**_without_labels(batch))),
            loss=lambda scores, batches: self._evaluate_loss(model, scores, batches),
            scaler=self.accelerator.scaler,
        )

    def _evaluate_loss(self, model: nn.Module, scores: Tensor, batches: list[Mapping[str, Any]]) -> Tensor:
        if isinstance(self.pooled_loss, nn.Module):
            self.pooled_loss.train(model.training)  # rows enter the queue in training mode only
        return self.pooled_loss(scores, torch.cat([batch["labels"] for batch in batches]))


def _logits(outputs: Any) -> Tensor:
    return outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]


def _without_labels(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs without labels, with which the model would compute its own loss."""
    return {name: value for name, value in inputs.items() if name != "labels"}
