"""What the worker processes run for the tests of accumulation, under older names; see tests/conformance."""

from __future__ import annotations

import torch
import torch.distributed as dist
from batches import (  # noqa: F401
    LENGTH,
    Batch,
    Result,
    all_batches,
    make_batch,
    make_window,
    num_valid,
    sum_loss,
)
from batches import halves as _cut  # noqa: F401
from batches import one_process as whole  # noqa: F401
from experts import Experts  # noqa: F401
from subjects import LIMITS, Model, assert_exact, by_hand, error, switches  # noqa: F401
from subjects import NUM_FEATURES as VOCABULARY  # noqa: F401
from subjects import gradient as flat
from subjects import wrap as _wrap
from torch import Tensor, nn
from verbs import run_window  # noqa: F401


def Counting(dtype: torch.dtype) -> Model:
    """Return a model that also counts its forwards in a buffer, which DDP broadcasts."""
    return Model(dtype, buffers=True)


def wrap(model: nn.Module, kind: str) -> nn.Module:
    """Return ``model`` as data-parallel training would have it."""
    return _wrap(model, "fsdp2" if kind == "fsdp" else kind)


def reduced(model: nn.Module, kind: str) -> Tensor:
    """Return the gradient after the reduction; a plain module's is added over the ranks by hand."""
    gradient = flat(model)
    if kind == "plain":
        dist.all_reduce(gradient)
    return gradient
