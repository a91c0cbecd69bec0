"""Which schedules a training has."""

from __future__ import annotations

from torch import nn

from ..losses import LossWarmupWrapper


def find_schedules(module: object) -> list[LossWarmupWrapper]:
    """Return the warm-up schedules in ``module``, itself included; none in what is no module."""
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return [found for found in modules if isinstance(found, LossWarmupWrapper)]
