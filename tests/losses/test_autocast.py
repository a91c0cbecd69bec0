"""Autocast around a loss changes no bit of it: what a loss sums over a pool, half precision cannot hold."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import gradient_cases
import pytest
import torch
from gradient_cases import Case
from torch import Tensor, nn
from workers import WorkerPool

NAMES = ("smooth_ap", "recall", "pauc_trapezoid", "pauc_pairwise", "pauc_dro", "hard_negative")
NAMES += ("softmax_focal", "sigmoid_focal", "queries", "retrieval")
# The losses whose sums are matrix products, which is what autocast rounds.
OF_PRODUCTS = ("recall", "pauc_trapezoid", "retrieval")


def rows(name: str, rank: int, count: int) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    """Return a loss with logits, targets and keywords, on a pool that half precision cannot sum."""
    generator, case = torch.Generator().manual_seed(rank), Case(name, queue_size=0)
    loss, columns = gradient_cases.make_loss(case, local=False), gradient_cases.num_outputs(case)
    logits = torch.randn(count, columns, generator=generator)
    if name == "retrieval":
        return loss, logits, torch.randint(0, 40, (count,), generator=generator), {}
    targets = (torch.rand(count, generator=generator) < 0.1).long()
    options = {"indexes": torch.randint(0, 9, (count,), generator=generator)} if name == "queries" else {}
    return loss, logits, targets[:, None] if name == "sigmoid_focal" else targets, options


def autocast_errors(rank: int, names: tuple[str, ...], guarded: bool, count: int) -> dict[str, float]:
    """Return how far autocast moves each loss and its gradient; without ``guarded`` the losses are blind to it."""
    errors = {}
    for name in names:
        outcomes = []
        for enabled in (False, True):
            loss, logits, targets, options = rows(name, rank, 600 if name == "retrieval" and count > 600 else count)
            blind = nullcontext() if guarded else mock.patch.object(torch, "is_autocast_enabled", return_value=False)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), blind:
                leaf = logits.requires_grad_()
                value = loss(leaf, targets, **options)
                (gradient,) = torch.autograd.grad(value, leaf)
            outcomes.append(torch.cat([value.detach().reshape(1), gradient.flatten() * 100]))
        errors[name] = float((outcomes[0] - outcomes[1]).norm() / outcomes[0].norm())
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.full)], ids=["pairs", "bins"])
def test_no_bit_is_changed(pool_of_two: WorkerPool, count: int) -> None:
    for errors in pool_of_two(autocast_errors, NAMES, True, count):
        assert set(errors) == set(NAMES)
        assert set(errors.values()) == {0.0}, errors
    for errors in pool_of_two(autocast_errors, OF_PRODUCTS, False, count):  # the control
        assert min(errors.values()) > 2e-5, errors
