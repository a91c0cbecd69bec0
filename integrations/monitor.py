"""What the integrations look for in a module: warm-up schedules, and values to log."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ..errors import warn
from ..losses import LossWarmupWrapper
from ..losses.base import CurrentTemperature
from ..losses.embeddings.pairs import PairLoss
from ..losses.pooled.base import RankingLoss
from ..losses.pooled.pool import PoolCounts


def find_schedules(module: object) -> list[LossWarmupWrapper]:
    """Return the warm-up schedules in ``module``, including itself; an empty list if it is not a module."""
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return [schedule for schedule in modules if isinstance(schedule, LossWarmupWrapper)]


class Monitor:
    """Watches the training calls of every loss in ``module``; its values are equal on every rank."""

    def __init__(self, module: nn.Module) -> None:
        self._losses = [(name, loss) for name, loss in module.named_modules() if isinstance(loss, CurrentTemperature)]
        if not self._losses:
            warn("LossMonitor: no loss in the module has a temperature, so that nothing is logged.")

    def start(self) -> None:
        for _, loss in self._losses:
            if isinstance(loss, RankingLoss):
                loss.pool_counts = PoolCounts()

    def stop(self) -> None:
        for _, loss in self._losses:
            if isinstance(loss, RankingLoss):
                loss.pool_counts = None

    def values(self) -> dict[str, Tensor | float]:
        """Return the values since :meth:`start`, each under the name of its loss in the module."""
        values: dict[str, Tensor | float] = {}
        for name, loss in self._losses:
            prefix = f"{name}/" if name else ""
            if (temperature := _temperature(loss)) is not None:
                values[f"{prefix}temperature"] = temperature
            counts = loss.pool_counts if isinstance(loss, RankingLoss) else None
            if counts is not None and counts.calls:
                values[f"{prefix}positives"], values[f"{prefix}without_positives"] = counts.sums / counts.calls
        return values


def _temperature(loss: CurrentTemperature) -> Tensor | float | None:
    """Return the temperature without waiting for the device; None if it takes a collective to read it."""
    if not isinstance(loss, PairLoss) or loss.logit_scale is None:
        return loss.current_temperature
    if hasattr(loss.logit_scale, "full_tensor"):
        return None
    return (-loss.logit_scale.detach().clamp_max(math.log(loss.max_logit_scale))).exp().reshape(())
