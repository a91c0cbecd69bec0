"""Transforms of torch around a call over ranks: refused on every rank, whichever rank is inside one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import Words, expected
from .header import Agreement, Offer, agree_on
from .torch_private import func_transforms_are_active, has_tangent, outside_func_transforms

T = TypeVar("T")


def agree_untransformed(call: str, ranks: ProcessGroup, bring: Callable[[], Offer[T]]) -> Agreement[T]:
    """Do what :func:`agree_on` does, but raise on all ranks when one of them is inside a transform of ``torch.func``.

    The rank inside it makes its header outside of it, because only plain tensors can travel.
    """

    def refuse() -> Offer[T]:
        raise _transformed()

    if not func_transforms_are_active():
        return agree_on(call, ranks, bring)
    with outside_func_transforms():
        return agree_on(call, ranks, refuse)


def check_no_tangents(*tensors: Tensor | None) -> None:
    """Raise RuntimeError when one of ``tensors`` is a dual tensor of forward-mode differentiation."""
    if any(map(has_tangent, tensors)):
        raise _transformed()


def _transformed() -> RuntimeError:
    what = "backward() or torch.autograd.grad around a call over ranks"
    found = Words("a transform: torch.func, torch.vmap or forward mode")
    fix = "Transforms work where nothing is gathered, as with gather_distributed=False."
    return RuntimeError(expected("differentiation", what, found, fix))
