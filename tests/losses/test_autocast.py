"""Autocast around a loss changes no bit of it: what a loss sums over a pool, half precision cannot hold."""

from __future__ import annotations

import gather_cases
import pytest
from gather_cases import POOLED
from workers import WorkerPool

FOCAL = ("softmax_focal", "sigmoid_focal")


@pytest.mark.parametrize("count", [60, 3000], ids=["pairs", "bins"])
def test_no_bit_is_changed(pool_of_two: WorkerPool, count: int) -> None:
    for errors in pool_of_two(gather_cases.autocast_errors, POOLED + FOCAL, True, count):
        assert set(errors) == {*POOLED, *FOCAL}
        assert set(errors.values()) == {0.0}, errors


@pytest.mark.parametrize("count", [60, 3000], ids=["pairs", "bins"])
def test_control_losses_blind_to_autocast_are_off(pool_of_two: WorkerPool, count: int) -> None:
    """The losses whose sums are matrix products, which is what autocast rounds."""
    for errors in pool_of_two(gather_cases.autocast_errors, ("recall", "pauc_trapezoid"), False, count):
        assert min(errors.values()) > 1e-4, errors
