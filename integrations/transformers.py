"""The Trainer of transformers: losses over the window of all ranks. This module does not import transformers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..accumulation import pooled_backward
from ..distributed.global_mean import local_mean
from ..distributed.group import is_initialized, resolve_group
from ..errors import Words, expected, warn
from ..losses import causal_lm_loss
from ..losses.base import CurrentTemperature
from ..preflight import StepReport, verify_step
from .monitor import Monitor, find_schedules


def causal_lm_loss_func(
    outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | float | None = None
) -> Tensor:
    """Sum the cross-entropies of the next tokens and divide by the tokens of the window: a ``compute_loss_func``.

    Equal to ``causal_lm_loss(outputs.logits, labels, num_items=num_items_in_batch)``. With
    ``average_tokens_across_devices=True``, the default, the Trainer counts the labels of all micro-batches and ranks,
    and multiplies the loss by the number of ranks, by which DDP divides. For models whose ``loss_type`` is that of a
    causal model, the count leaves out the first label of each row, as the loss does.

    Args:
        outputs: outputs of the model, with the logits under ``logits`` or as the first item.
        labels: (N, T), -100 where a token does not count; not shifted.
        num_items_in_batch: the count of the Trainer. None, as in a call by hand, gives the mean of this call.

    Raises:
        ValueError: without labels, which the Trainer would not count either.

    Example:
        >>> causal_lm_loss_func({"logits": torch.zeros(1, 3, 4)}, torch.tensor([[0, 2, -100]]), torch.tensor(2))
        tensor(0.6931)
    """
    if labels is None:
        fix = "Give the data set a column of that name: the Trainer counts its tokens."
        raise ValueError(expected("labels", "those of the batch", labels, fix))
    return causal_lm_loss(_logits(outputs), labels, num_items=num_items_in_batch)


class LinearLossMixin:
    """A mixin for ``transformers.Trainer``: the loss of a causal model in training, without its logits.

    Write ``class LinearTrainer(LinearLossMixin, Trainer)``. Equal to the Trainer with
    ``compute_loss_func=causal_lm_loss_func``, in the memory of :func:`~fullrank.causal_lm_loss` with ``weight``. While
    the model is training, its head returns that loss in the place of logits: FSDP2 has gathered the weight there.

    Args:
        *args, **kwargs: arguments of the Trainer, without ``compute_loss_func``.

    Raises:
        TypeError: for a model whose ``get_output_embeddings()`` is no plain ``nn.Linear``, such as one with an adapter.
        ValueError: for a model that changes its logits after the head, as by a soft cap.
    """

    # Attributes of the Trainer.
    accelerator: Any
    compute_loss_func: Callable[..., Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        trainer: Any = super()
        trainer.__init__(*args, compute_loss_func=causal_lm_loss_func, **kwargs)  # with one, the Trainer counts tokens
        self._unchanged_head: nn.Module | None = None  # whose output was seen to be that of the model

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loss of one batch as the Trainer does."""
        trainer: Any = super()
        labels = inputs.get("labels")
        if labels is None or not model.training:
            return trainer.compute_loss(model, inputs, *args, **kwargs)
        unwrapped, sums = self.accelerator.unwrap_model(model), list[Tensor]()
        head = unwrapped.get_output_embeddings() if hasattr(unwrapped, "get_output_embeddings") else None
        without = "Pass compute_loss_func=causal_lm_loss_func to a Trainer without the mixin."
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise TypeError(expected("model.get_output_embeddings()", "an nn.Linear", head, without))

        def loss_sum(hidden: Tensor) -> Tensor:
            total = causal_lm_loss(hidden, labels, weight=head.weight, bias=head.bias, reduction="sum")
            sums.append(total.detach())
            return total

        def divided(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | float | None = None) -> Tensor:
            total = _logits(outputs)
            if head is not self._unchanged_head:
                if not (len(sums) == 1 and torch.allclose(total, sums[0], rtol=0.0, atol=0.0, equal_nan=True)):
                    raise ValueError(expected("model", "one that returns what its head does", Words("others"), without))
                if 0 < total < torch.inf:  # 0, of a batch without labels, is 0 after any soft cap, and NaN is NaN
                    self._unchanged_head = head
            count = (labels[..., 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
            return local_mean(total, count)

        head.forward, self.compute_loss_func = loss_sum, divided  # type: ignore[assignment]
        try:
            return trainer.compute_loss(model, inputs, *args, **kwargs)
        finally:
            del head.forward
            self.compute_loss_func = causal_lm_loss_func


class _Callback:
    """A callback of the Trainer that does nothing; it has no base class, so that transformers is not imported."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class LossState(_Callback):
    """A callback of the Trainer that saves the state of a loss in its checkpoints, and loads it on resume.

    Rank 0 saves ``loss.state_dict()`` in the folder of each checkpoint, and every rank loads it before a resumed
    training. :class:`PooledLossMixin` has one with the Trainer's folders. Without the mixin, the folder of a
    checkpoint is ``output_dir/checkpoint-STEP``, in a hyperparameter search ``output_dir/NAME/checkpoint-STEP`` if you
    pass ``hp_name=``; otherwise a warning says that the state is not saved. The file contains the step and a key of the
    run, and so does ``trainer_state.json``: a file that does not belong to the checkpoint is not loaded.

    Args:
        loss: a module with ``state_dict`` and ``load_state_dict``: a loss with a queue, or a schedule.
        name: name of the file in the folder of a checkpoint, a different one for each loss of a Trainer.
        resume_from: the folder that you pass to ``train(resume_from_checkpoint=...)``. Leave it None for ``train()``,
            and for the last checkpoint in ``output_dir``, as with ``train(resume_from_checkpoint=True)``.

    Raises:
        FileNotFoundError: when the training resumes from a checkpoint without the file.
        ValueError: when the file was saved at another step or by another run than the checkpoint.

    Example:
        >>> from fullrank import SmoothAPLoss
        >>> callback = LossState(SmoothAPLoss(num_classes=1, queue_size=64))
        >>> callback.name
        'fullrank_loss.pt'
    """

    def __init__(self, loss: nn.Module, name: str = "fullrank_loss.pt", resume_from: str | Path | None = None) -> None:
        self.loss, self.name, self.resume_from = loss, name, resume_from
        self.save_to: str | Path | None = None  # the folder of the next checkpoint, if the mixin knows it
        self._key = f"fullrank {name}"  # under which trainer_state.json has the key of the run

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state next to the weights that the Trainer has just written."""
        folder, self.save_to = self.save_to or self._checkpoint_folder(args, state), None
        if not args.should_save:
            return
        if folder is None or not Path(folder).is_dir():
            warn(
                f"LossState: the state of the loss is not saved, because {folder or 'the folder of the trial'} is not "
                "there. Use PooledLossMixin, which knows the folder, or pass hp_name= to hyperparameter_search."
            )
            return
        path = Path(folder) / self.name
        saved = {"global_step": state.global_step, "run": self._run_key(state), "loss": self.loss.state_dict()}
        torch.save(saved, path.with_suffix(".unfinished"))
        path.with_suffix(".unfinished").replace(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the state if the training does not start at step 0, and make a key of the run for its checkpoints."""
        if state.global_step > 0 or self.resume_from is not None:
            self._load(args, state)
        # A new key: the checkpoints of a resumed training are not those of the run that it resumes.
        state.stateful_callbacks[self._key] = {"run": uuid.uuid4().hex}

    def _load(self, args: Any, state: Any) -> None:
        folder = self.resume_from or self._checkpoint_folder(args, state)
        path = None if folder is None else Path(folder) / self.name
        without = "To continue with a new state of the loss, remove the callback."
        if path is None or not path.exists():
            fix = f"Pass the folder that the training resumes from, LossState(resume_from=...). {without}"
            what = f"the state of the loss in {path or 'the folder of the checkpoint'}"
            raise FileNotFoundError(expected("LossState", what, Words("no such file"), fix))
        saved = torch.load(path, map_location="cpu", weights_only=True)
        fix = f"Pass LossState(resume_from=...) the folder that train(resume_from_checkpoint=...) gets. {without}"
        if saved.get("global_step") != state.global_step:
            got = Words(f"that of step {saved.get('global_step')} in {path}")
            raise ValueError(expected("LossState", f"the state of the loss at step {state.global_step}", got, fix))
        if saved["run"] != self._run_key(state):
            got = Words(f"that of another run in {path}")
            raise ValueError(expected("LossState", "the state of the run that the training resumes", got, fix))
        self.loss.load_state_dict(saved["loss"])

    def _run_key(self, state: Any) -> str | None:
        """Return the key of the run that wrote, or writes, the checkpoint of ``state``."""
        return state.stateful_callbacks.get(self._key, {}).get("run")

    @staticmethod
    def _checkpoint_folder(args: Any, state: Any) -> Path | None:
        """Return the folder of a checkpoint in ``output_dir``; None if it is unknown, in a trial without a name."""
        folder = Path(args.output_dir)
        if state.trial_params is not None:
            if state.trial_name is None:
                return None
            folder /= state.trial_name
        return folder / f"checkpoint-{state.global_step}"


class LossMonitor(_Callback):
    """A callback of the Trainer that logs the temperature of every loss in a module, and the positives in its pool.

    The names and values are those of :class:`fullrank.integrations.lightning.LossMonitor`, without the name of the loss
    if ``loss`` is that loss itself; a mean is over the training calls since the last log. They join the ``loss`` in
    ``log_history`` and in all later callbacks, so this one must be the first, as :class:`PooledLossMixin` makes it:
    ``trainer.callback_handler.callbacks.insert(0, LossMonitor(loss))``.

    Args:
        loss: a loss, or a module that contains losses.

    Example:
        >>> from types import SimpleNamespace
        >>> from fullrank import SmoothAPLoss
        >>> logs, state = {"loss": 1.0}, SimpleNamespace(log_history=[{"loss": 1.0, "step": 1}])
        >>> LossMonitor(SmoothAPLoss(temperature=0.5)).on_log(None, state, None, logs=logs)
        >>> logs, state.log_history
        ({'loss': 1.0, 'temperature': 0.5}, [{'loss': 1.0, 'step': 1, 'temperature': 0.5}])
    """

    def __init__(self, loss: nn.Module) -> None:
        self._monitor = Monitor(loss)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.start()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **kwargs: Any) -> None:
        """Add the values to the logs of training, and restart the counts."""
        if "loss" in logs:
            values = {name: float(value) for name, value in self._monitor.values().items()}
            logs.update(values)
            state.log_history[-1].update(values)
            self._monitor.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.stop()


class PooledLossMixin:
    """A mixin for ``transformers.Trainer``: one pooled loss over the window, all micro-batches of all ranks.

    Write ``class RankingTrainer(PooledLossMixin, Trainer)``. With ``gradient_accumulation_steps`` > 1,
    :func:`~fullrank.pooled_backward` back-propagates the window in the last of its micro-batches, and its loss is
    logged. The mixin passes epoch and step to a :class:`~fullrank.LossWarmupWrapper` in ``pooled_loss``. If that is a
    module, a :class:`LossState` saves its queue, temperature and schedule with each checkpoint and loads them on
    resume, and a :class:`LossMonitor` logs its temperature and its positives, if it has any.

    Args:
        pooled_loss: called as ``pooled_loss(logits, labels)``, or as ``pooled_loss(*logits.unbind(1))`` if the batches
            have no ``labels``, such as an :class:`~fullrank.InfoNCELoss` of embeddings (N, 2, D). From a third column
            on they are hard negatives, several as one argument (N, K, D). It returns a scalar, the same on every rank.
            Parameters that it learns must be parameters of the model too.
        *args, **kwargs: arguments of the Trainer. ``compute_loss_func`` is not used.

    Raises:
        ValueError: when the process group has several ranks and the Trainer counts one, as under torchrun on CPUs
            without ``use_cpu=True``: nothing would average the gradients.
        RuntimeError: for a window of several micro-batches under DeepSpeed or Megatron, which have their own backward.
    """

    # Attributes of the Trainer.
    accelerator: Any
    args: Any
    state: Any
    _prepare_inputs: Callable[..., Mapping[str, Any]]

    def __init__(self, *args: Any, pooled_loss: Callable[..., Tensor], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if is_initialized() and self.args.world_size == 1 < resolve_group(None).size():
            what = f"{resolve_group(None).size()}, the ranks of the process group"
            fix = "Under torchrun on CPUs pass TrainingArguments(use_cpu=True); otherwise no gradient is averaged."
            raise ValueError(expected("world_size of the TrainingArguments", what, self.args.world_size, fix))
        self.pooled_loss = pooled_loss
        self._pooled_window: list[Mapping[str, Any]] = []
        self._pooled_state: LossState | None = None
        if isinstance(pooled_loss, nn.Module):
            self._pooled_state, trainer = LossState(pooled_loss), cast(Any, self)
            trainer.add_callback(self._pooled_state)
            if any(isinstance(loss, CurrentTemperature) for loss in pooled_loss.modules()):
                trainer.callback_handler.callbacks.insert(0, LossMonitor(pooled_loss))  # before those that write logs

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; the state of the loss comes from the same checkpoint."""
        if self._pooled_state is not None:
            if resume_from_checkpoint is True:
                from transformers.trainer_utils import get_last_checkpoint

                last = get_last_checkpoint(self.args.output_dir)
                resume_from_checkpoint = True if last is None else last  # the Trainer raises if there is none
            folder = resume_from_checkpoint
            self._pooled_state.resume_from = None if isinstance(folder, bool) else folder
        trainer: Any = super()
        return trainer.train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save the model as the Trainer does; a checkpoint gets the state of the loss in the same folder."""
        if self._pooled_state is not None:
            self._pooled_state.save_to = output_dir
        trainer: Any = super()
        trainer.save_model(output_dir, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of one batch of all ranks; with ``return_outputs`` also the outputs of the model."""
        outputs = self._outputs_of(model, inputs)
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
        for schedule in find_schedules(self.pooled_loss):
            schedule.on_train_epoch_start(int(self.state.epoch or 0))
            schedule.on_train_batch_start(self.state.global_step)
        if len(window) == 1:
            trainer: Any = super()
            return trainer.training_step(model, window[0], num_items_in_batch)
        if self.accelerator.distributed_type in ("DEEPSPEED", "MEGATRON_LM"):
            got, fix = Words(f"{len(window)} micro-batches"), "Set gradient_accumulation_steps=1."
            raise RuntimeError(expected("window", f"1 under {self.accelerator.distributed_type}", got, fix))
        model.train()
        return pooled_backward(
            model,
            [self._prepare_inputs(batch) for batch in window],
            forward=lambda batch: _logits(self._outputs_of(model, batch)),
            loss=lambda scores, batches: self._evaluate_loss(model, scores, batches),
            scaler=self.accelerator.scaler,
        )

    _label_column = "labels"

    def _outputs_of(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Return the outputs of the model, called without labels so that it computes no loss of its own."""
        return model(**{name: value for name, value in inputs.items() if name != self._label_column})

    def _evaluate_loss(self, model: nn.Module, scores: Tensor, batches: list[Mapping[str, Any]]) -> Tensor:
        if isinstance(self.pooled_loss, nn.Module):
            self.pooled_loss.train(model.training)  # rows enter the queue in training mode only
        if self._label_column in batches[0]:
            return self.pooled_loss(scores, torch.cat([batch[self._label_column] for batch in batches]))
        if scores.shape[1] > 3:  # several negatives of each row
            return self.pooled_loss(scores[:, 0], scores[:, 1], scores[:, 2:])
        return self.pooled_loss(*scores.unbind(dim=1))


def verify_training_step(trainer: Any, micro_batches: list[Any], **options: Any) -> StepReport:
    """Compare the gradients of a step of the Trainer with those of one process: :func:`~fullrank.verify_step`.

    Runs ``training_step`` over one window as ``train`` does. Call it before ``train``, on every rank.

    Args:
        trainer: a ``transformers.Trainer`` or a subclass.
        micro_batches: of this rank, as the data collator makes them; as many as ``gradient_accumulation_steps``.
        **options: of :func:`~fullrank.verify_step`, such as ``join=pad_tokens(-100)`` or ``build_model``.

    Example::

        batches = [next(iterator) for _ in range(args.gradient_accumulation_steps)]  # of trainer.get_train_dataloader()
        print(verify_training_step(trainer, batches))
    """
    from accelerate.state import PartialState  # type: ignore[import-untyped]

    accelerator = trainer.accelerator

    def step(model: nn.Module, batches: list[Any]) -> float:
        ranks = torch.distributed.get_world_size() if is_initialized() else 1
        states = [(state, state.num_processes) for state in (PartialState(), accelerator.state)]
        try:
            for state, _ in states:
                state.num_processes = ranks  # one, where verify_step runs the step on one process
            samples, number = trainer.get_batch_samples(iter(batches), len(batches), trainer.args.device)
            trainer.current_gradient_accumulation_steps = len(samples)
            losses = []
            for place, inputs in enumerate(samples, 1):
                accelerator.sync_gradients = place == len(samples)
                with nullcontext() if place == len(samples) else accelerator.no_sync(model):
                    losses.append(float(trainer.training_step(model, inputs, number)))
            return sum(losses)
        finally:
            for state, processes in states:
                state.num_processes = processes

    # Not trainer.model_wrapped, which is wrapped inside train() only.
    model = trainer.model if accelerator.num_processes == 1 else accelerator.prepare_model(trainer.model)
    try:
        return verify_step(step, model, micro_batches, **options)
    finally:
        accelerator.free_memory()  # train() prepares the model again


def _logits(outputs: Any) -> Tensor:
    return outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
