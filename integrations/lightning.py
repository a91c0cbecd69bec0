"""PyTorch Lightning: the schedules of the losses follow the trainer."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import Words, expected
from .schedules import find_schedules


def _find_callback() -> Any:
    """Return the base class of callbacks, from whichever of Lightning's two distributions is installed."""
    for distribution, name in (("pytorch_lightning", "pytorch_lightning"), ("lightning", "lightning.pytorch")):
        if find_spec(distribution) is not None:
            return import_module(name).Callback
    fix = "Run `pip install pytorch-lightning`, or install fullrank with its extra `integrations`."
    raise ImportError(expected("fullrank.integrations.lightning", "PyTorch Lightning", Words("none"), fix))


_Callback: Any = _find_callback()


class LossSchedule(_Callback):
    """Tell every :class:`~fullrank.LossWarmupWrapper` in the LightningModule the epoch and the step.

    Equal to calling ``on_train_epoch_start(trainer.current_epoch)`` and ``on_train_batch_start(trainer.global_step)``
    of each in the hooks of the same names, the former also where a resumed trainer leaves its hook out.
    ``global_step`` counts optimizer steps, so the micro-batches of one window have the same one; with several
    optimizers it counts the steps of all.

    The losses, attributes of the LightningModule, are saved and restored with it: queue, temperature, schedule.

    Example:
        >>> LossSchedule().state_key
        'LossSchedule'
    """

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the epoch of every schedule."""
        for schedule in find_schedules(pl_module):
            schedule.on_train_epoch_start(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Set the optimizer step of every schedule."""
        for schedule in find_schedules(pl_module):
            # Resumed from a checkpoint of an epoch's last step, Lightning leaves out that hook of the epoch it begins.
            schedule.on_train_epoch_start(trainer.current_epoch)
            schedule.on_train_batch_start(trainer.global_step)
