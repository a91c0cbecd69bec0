"""The warm-up schedules in a training."""

from __future__ import annotations

from torch import nn

from ..losses import LossWarmupWrapper


def find_schedules(module: object) -> list[LossWarmupWrapper]:
    """Return the warm-up schedules in ``module``, including itself; an empty list if it is not a module."""
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return [found for found in modules if isinstance(found, LossWarmupWrapper)]
