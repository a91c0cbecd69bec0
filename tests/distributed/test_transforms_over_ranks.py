"""Transforms of torch around a call over ranks: all ranks raise one sentence, whichever of them is inside one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from on_ranks import on_ranks
from torch import Tensor
from workers import error_of

import fullrank
from fullrank.distributed import header

TARGETS = torch.arange(6) % 3 // 2


def make_calls() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return every kind of differentiable call over ranks, of rows (6, 1)."""
    smooth_ap = fullrank.SmoothAPLoss(1, queue_size=32, temperature=0.5)
    sharded = fullrank.SmoothAPLoss(1, queue_size=32, temperature=0.5, pool="sharded")
    focal, retrieval = fullrank.SigmoidFocalLoss(), fullrank.RetrievalSmoothAPLoss(0.1)
    return {
        "gather_rows": lambda x: fullrank.gather_rows(x)[0].square().sum(),  # type: ignore[union-attr]
        "all_gather_with_grad": lambda x: fullrank.all_gather_with_grad(x, backward="reduce_scatter").square().sum(),
        "global_mean": lambda x: fullrank.global_mean(x.square().sum(), 3),
        "SmoothAPLoss": lambda x: smooth_ap(x, TARGETS),
        "SmoothAPLoss of a sharded pool": lambda x: sharded(x, TARGETS),
        "SigmoidFocalLoss": lambda x: focal(x, TARGETS[:, None].double()),
        "RetrievalSmoothAPLoss": lambda x: retrieval(torch.cat([x, x.square()], 1), TARGETS),
    }


def dual(call: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """Call with a dual tensor."""
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda call, x: torch.func.grad(call)(x),
    "grad of grad": lambda call, x: torch.func.grad(lambda y: torch.func.grad(call)(y).sum())(x),
    "vmap": lambda call, x: torch.vmap(call)(torch.stack([x, x])),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "functionalize": lambda call, x: torch.func.functionalize(call)(x),
    "dual tensors": dual,
}


def rows_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def plain(call: Callable[[Tensor], Tensor], x: Tensor) -> list[float]:
    """Return the gradient by autograd."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(call(leaf), leaf)[0].flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("odd", [pytest.param(None, marks=pytest.mark.full), 1])
@pytest.mark.parametrize("transform", TRANSFORMS)
@on_ranks(2)
def test_a_transform_raises_one_sentence_on_every_rank(rank: int, transform: str, odd: int | None) -> None:
    """On rank ``odd``, or on every rank, before and after a clean step, which has the gradients without transforms."""
    where = "ranks 0, 1" if odd is None else f"rank {odd}"
    calls, clean = make_calls(), make_calls()
    for name, call in calls.items():
        for step in range(2):
            run = TRANSFORMS[transform] if odd in (None, rank) else plain
            kind, text = error_of(lambda run=run, call=call, step=step: run(call, rows_of(rank, step)))
            head = f"{name.split()[0]} failed on {where}: differentiation: expected backward() or torch.autograd.grad"
            assert kind == "RuntimeError", (name, step)
            assert text.startswith(head), (name, step, text)
            assert text.endswith("as with gather_distributed=False.")
            assert plain(call, rows_of(rank, step)) == plain(clean[name], rows_of(rank, step))


@on_ranks(2)
def test_control_without_the_check_torch_raises(rank: int) -> None:
    call, rows = make_calls()["gather_rows"], rows_of(rank, 0)
    unseen = dict.fromkeys(("func_transforms_are_active", "has_tangent"), lambda *_: False)
    with mock.patch.multiple(header, **unseen):
        for name in ("grad", "grad of grad", "vmap", "jvp"):
            text = error_of(lambda name=name: TRANSFORMS[name](call, rows))[1]
            assert text
            assert "gather_distributed=False" not in text
