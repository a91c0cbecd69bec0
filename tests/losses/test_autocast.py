"""Autocast around a loss changes no bit of it: what a loss sums over a pool, half precision cannot hold."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import gradient_cases
import pytest
import torch
from gradient_cases import Case
from workers import WorkerPool

POOLED = ("smooth_ap", "recall", "pauc_trapezoid", "pauc_pairwise", "pauc_dro", "hard_negative")


def autocast_errors(
    rank: int, names: tuple[str, ...] = POOLED, guarded: bool = True, count: int = 3000
) -> dict[str, float]:
    """Return how far autocast moves each loss and its gradient, on a pool that half precision cannot sum.

    Args:
        rank: this rank.
        names: the losses, as in ``gradient_cases``.
        guarded: False makes the losses blind to autocast, which is the control.
        count: rows of each rank; few are summed pair by pair, many by bins.
    """
    errors = {}
    for name in names:
        case = Case(name, queue_size=0)
        outcomes = []
        for enabled in (False, True):
            loss = gradient_cases.make_loss(case, local=False)
            generator = torch.Generator().manual_seed(rank)
            logits = torch.randn(count, gradient_cases.num_outputs(case), generator=generator, requires_grad=True)
            targets = (torch.rand(count, generator=generator) < 0.1).long()
            targets = targets[:, None] if name == "sigmoid_focal" else targets
            blind = nullcontext() if guarded else mock.patch.object(torch, "is_autocast_enabled", return_value=False)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), blind:
                value = loss(logits, targets)
                value.backward()
            assert logits.grad is not None
            outcomes.append(torch.cat([value.detach().reshape(1), logits.grad.flatten() * 100]))
        errors[name] = float((outcomes[0] - outcomes[1]).norm() / outcomes[0].norm())
    return errors


FOCAL = ("softmax_focal", "sigmoid_focal")


@pytest.mark.parametrize("count", [60, 3000], ids=["pairs", "bins"])
def test_no_bit_is_changed(pool_of_two: WorkerPool, count: int) -> None:
    for errors in pool_of_two(autocast_errors, POOLED + FOCAL, True, count):
        assert set(errors) == {*POOLED, *FOCAL}
        assert set(errors.values()) == {0.0}, errors


@pytest.mark.parametrize("count", [60, 3000], ids=["pairs", "bins"])
def test_control_losses_blind_to_autocast_are_off(pool_of_two: WorkerPool, count: int) -> None:
    """The losses whose sums are matrix products, which is what autocast rounds."""
    for errors in pool_of_two(autocast_errors, ("recall", "pauc_trapezoid"), False, count):
        assert min(errors.values()) > 1e-4, errors
