"""Callbacks of Lightning, of both its distributions, ``lightning`` and ``pytorch_lightning``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..errors import Words, expected, warn
from ..losses.base import HoldsQueue
from ..preflight import StepReport, verify_step
from .monitor import Monitor, find_schedules

# The Callback class of each installed distribution. A Trainer accepts a single callback only if it is an instance of
# the class of its own distribution.
_NAMES = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}
_CALLBACKS = tuple(import_module(name).Callback for package, name in _NAMES.items() if find_spec(package) is not None)
if not _CALLBACKS:
    fix = "Run `pip install lightning`, or install fullrank with its extra `integrations`."
    raise ImportError(expected("fullrank.integrations.lightning", "PyTorch Lightning", Words("none"), fix))

if TYPE_CHECKING:
    _Callback = object
else:
    # A subclass of each, so that the Trainer of either distribution accepts it.
    _Callback = type("_Callback", _CALLBACKS, {})


_WARNED: WeakSet[Any] = WeakSet()


def _warn_of_accumulation(trainer: Any, pl_module: Any) -> None:
    """Warn once if Lightning averages a pooled loss in ``pl_module`` over micro-batches."""
    if not pl_module.automatic_optimization or trainer.accumulate_grad_batches <= 1 or pl_module in _WARNED:
        return
    loss = next((loss for loss in pl_module.modules() if isinstance(loss, HoldsQueue)), None)
    if loss is not None:
        _WARNED.add(pl_module)
        warn(
            f"{type(loss).__name__}: accumulate_grad_batches is greater than 1, so each call compares the rows of one "
            "micro-batch alone, and the losses are averaged or added up. That is not the loss of all rows: use "
            "fullrank.pooled_backward for the micro-batches of a step (in a LightningModule with manual optimization), "
            "or larger batches and accumulate_grad_batches=1."
        )


class LossSchedule(_Callback):
    """Pass the epoch and the step to every :class:`~fullrank.LossWarmupWrapper` in the LightningModule.

    Equal to calling ``on_train_epoch_start(trainer.current_epoch)`` and ``on_train_batch_start(trainer.global_step)``
    of each wrapper before each batch. ``global_step`` counts the steps of all optimizers, not micro-batches. It
    warns once of a pooled loss with ``accumulate_grad_batches`` > 1, and so does :class:`LossMonitor`.

    Example:
        >>> LossSchedule().state_key
        'LossSchedule'
    """

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        _warn_of_accumulation(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for schedule in find_schedules(pl_module):
            # Not in the hook of the epoch, which Lightning skips after a restart from the last step of an epoch.
            schedule.on_train_epoch_start(trainer.current_epoch)
            schedule.on_train_batch_start(trainer.global_step)


class LossMonitor(_Callback):
    """Log the temperature of every loss in the LightningModule, and the positives in its pool.

    For a loss that is the attribute ``loss_fn`` of the module:

    - ``loss_fn/temperature``: its ``current_temperature``. One that is learned and sharded by FSDP2 is left out.
    - ``loss_fn/positives``: the number in the pool of a call, averaged over the classes and this epoch's calls so far.
    - ``loss_fn/without_positives``: the share of this epoch's training calls so far without a positive, or without a
      negative, so that the loss was 0; with several classes or queries, the share of these.

    Only losses that rank logits and targets, such as :class:`~fullrank.SmoothAPLoss`, have the last two. The values are
    equal on every rank, without a collective.

    Example:
        >>> LossMonitor().state_key
        'LossMonitor'
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._monitor = Monitor(pl_module)
        self._monitor.start()  # a resumed trainer may skip its epoch hook

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        _warn_of_accumulation(trainer, pl_module)
        self._monitor.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log_dict(self._monitor.values(), batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._monitor.stop()


class VerifyStep(_Callback):
    """Compare the gradients of the first training step with those of one process: :func:`~fullrank.verify_step`.

    In the first ``on_train_batch_start`` it runs ``training_step`` of the batch, as Lightning would, and the backward,
    and prints the report on rank 0. For automatic optimization without ``accumulate_grad_batches``; otherwise call
    ``verify_step`` yourself.

    Args:
        check: raise on every rank unless the gradients are exact.
        **options: of :func:`~fullrank.verify_step`, such as ``build_model`` under FSDP2.

    Attributes:
        report: the report; None before the first step.
    """

    def __init__(self, *, check: bool = False, **options: Any) -> None:
        self.report: StepReport | None = None
        self._check, self._options = check, options

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.report is not None:
            return

        def step(model: Any, batch: Any) -> Any:
            module = getattr(model, "module", model)
            quiet = dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None)
            quiet["forward"] = module.training_step
            module.__dict__.update(quiet)
            try:  # the forward of the wrapper runs training_step, as in Lightning
                result = model(batch, batch_idx)
            finally:
                for name in quiet:
                    del module.__dict__[name]
            loss = result["loss"] if isinstance(result, Mapping) else result
            loss.backward()
            return loss

        self.report = verify_step(step, trainer.strategy.model, batch, **self._options)
        if trainer.is_global_zero:
            print(self.report)
        if self._check:
            self.report.check()
