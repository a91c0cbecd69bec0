"""The check of saved queues that comes before anything of a loss is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .memory_queue import MemoryQueue


def check_saved_queues(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Raise ValueError if ``state_dict`` has another kind of queue than ``module``: a hook before ``load_state_dict``.

    Modules are loaded from the outside in: a queue that refuses its state would leave the losses around it with the
    temperature and the schedule of the checkpoint.
    """
    for name, queue in module.named_modules():
        key = f"{prefix}{name}._extra_state"
        if isinstance(queue, MemoryQueue) and key in state_dict:
            queue.check_saved(state_dict[key])
