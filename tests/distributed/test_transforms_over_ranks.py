"""Transforms of torch around a call over ranks: all ranks raise one sentence, whichever of them is inside one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from fault_calls import CALLS
from on_ranks import common_error, on_ranks
from torch import Tensor
from workers import error_of

import fullrank
from fullrank.distributed import header

# A gather of every kind, and the first loss of every kind.
NAMES = ["gather_rows", "all_gather_with_grad_reduce_scatter", "global_mean", "global_sum"]
NAMES += {call.form.loss.kind: name for name, call in reversed(CALLS.items()) if call.form}.values()


def dual(call: Callable[[Tensor], Tensor], x: Tensor) -> Any:
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


def call_of(name: str, subject: Any, rank: int, step: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    given = CALLS[name].arguments(torch.Generator().manual_seed(10 * step + rank), rank)
    first, rows = next(iter(given.items()))
    return lambda x: CALLS[name].objective(subject(**given | {first: x})), rows.detach()


def plain(call: Callable[[Tensor], Tensor], x: Tensor) -> list[float]:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(call(leaf), leaf)[0].flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("odd", [pytest.param(None, marks=pytest.mark.full), 1])
@pytest.mark.parametrize("transform", TRANSFORMS)
@on_ranks(2)
def test_a_transform_raises_one_sentence_on_every_rank(rank: int, transform: str, odd: int | None) -> None:
    """On rank ``odd``, or on every rank, before and after a clean step, which has the gradients without transforms."""
    where = "ranks 0, 1" if odd is None else f"rank {odd}"
    for name in NAMES:
        subject, clean = CALLS[name].make(), CALLS[name].make()
        head = f"{CALLS[name].heads[0]} failed on {where}: differentiation: expected backward() or torch.autograd.grad"
        for step in range(2):
            call, rows = call_of(name, subject, rank, step)
            run = TRANSFORMS[transform] if odd in (None, rank) else plain
            kind, text = common_error(partial(run, call, rows))
            assert kind == "RuntimeError", (name, step)
            assert text.startswith(head), (name, step, text)
            assert text.endswith(("as with gather_distributed=False.", "has a first derivative alone."))
            assert plain(call, rows) == plain(call_of(name, clean, rank, step)[0], rows)


@on_ranks(2)
def test_control_without_the_check_torch_raises(rank: int) -> None:
    call, rows = call_of("gather_rows", CALLS["gather_rows"].make(), rank, 0)
    unseen = dict.fromkeys(("func_transforms_are_active", "has_tangent"), lambda *_: False)
    with mock.patch.multiple(header, **unseen):
        for name in ("grad", "grad of grad", "vmap", "jvp"):
            text = error_of(lambda name=name: TRANSFORMS[name](call, rows))[1]
            assert text
            assert "differentiation: expected" not in text


@pytest.mark.slow
@on_ranks(2)
def test_compiled_losses_over_ranks_are_eager_ones(rank: int) -> None:
    """Also the third module of a class, whose attributes the compiler no longer takes for constants."""
    generator = torch.Generator().manual_seed(rank)
    for make in (
        fullrank.CrossEntropyLoss,
        partial(fullrank.CrossEntropyLoss, weight="balanced"),
        fullrank.SoftmaxFocalLoss,
        partial(fullrank.SmoothAPLoss, 3, temperature=0.5),
    ):
        for extra in range(4):
            compiled = torch.compile(make(), backend="aot_eager")
            for rows in (5 + rank + extra, 6 + rank + extra):
                inputs, targets = torch.randn(rows, 3, dtype=torch.float64, generator=generator), torch.arange(rows) % 3
                found, expected, alone = (
                    plain(partial(loss, targets=targets), inputs)
                    for loss in (compiled, make(), make(gather_distributed=False))
                )
                assert found == expected
                assert found != alone
