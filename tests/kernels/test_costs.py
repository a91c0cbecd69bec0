"""The table of costs: which device has which, what they decide, and the benchmark that measures them."""

from __future__ import annotations

import torch

from fullrank.kernels.costs import TABLE, costs_of


def test_a_device_type_that_is_not_listed_is_an_accelerator():
    assert costs_of(torch.device("cpu")) is TABLE["cpu"]
    for name in ("cuda:1", "xpu", "meta"):
        assert costs_of(torch.device(name)) is TABLE["accelerator"]


def test_bins_take_over_when_their_cost_is_less_than_that_of_the_pairs():
    costs = TABLE["cpu"]._replace(pair=1.0, fixed=100.0, row=2.0, coarse_bin=10.0)
    assert costs.pairs_are_faster(num_pairs=119, num_rows=10)
    assert not costs.pairs_are_faster(num_pairs=121, num_rows=10)
    assert costs.pairs_are_faster(num_pairs=121, num_rows=10, num_bins=1)
