"""The table of costs: which device has which, what they decide, and the benchmark that measures them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripts import imported

from fullrank.kernels.bins import num_lanes
from fullrank.kernels.costs import TABLE, Costs, costs_of
from fullrank.kernels.spread import index_of_sample


def test_a_device_type_that_is_not_listed_is_an_accelerator():
    assert costs_of(torch.device("cpu")) is TABLE["cpu"]
    for name in ("cuda:1", "xpu", "meta"):
        assert costs_of(torch.device(name)) is TABLE["accelerator"]


def test_bins_take_over_when_their_cost_is_less_than_that_of_the_pairs():
    costs = TABLE["cpu"]._replace(pair=1.0, fixed=100.0, row=2.0, coarse_bin=10.0)
    assert costs.pairs_are_faster(num_pairs=119, num_rows=10)
    assert not costs.pairs_are_faster(num_pairs=121, num_rows=10)
    assert costs.pairs_are_faster(num_pairs=121, num_rows=10, num_bins=1)


def test_one_class_with_many_rows_is_added_up_in_several_tables() -> None:
    lanes = TABLE["cpu"].lanes
    for num_classes, num_rows, expected in ((1, 5 * lanes, 1), (1, 5 * lanes + 1, lanes), (2, 9 * lanes, 1)):
        assert num_lanes(torch.empty(num_classes, num_rows), 5) == expected


@pytest.mark.parametrize(("num_classes", "num_rows"), [(9000, 9), (2, 9000)])
def test_places_of_a_sample_are_on_the_device_of_the_scores(num_classes: int, num_rows: int) -> None:
    classes, rows = index_of_sample(num_classes, num_rows, torch.device("meta"))
    assert [index is not None and index.is_meta for index in (classes, rows)] == [num_classes > 64, num_rows > 64]


def test_the_entry_of_a_device_replaces_its_earlier_one() -> None:
    """The benchmark writes source, which has the measured constants for that type of device alone."""
    script, device = imported(Path(__file__).resolve().parents[2] / "benchmarks" / "costs.py"), torch.device("cuda", 1)
    source = script.SOURCE.read_text("utf-8")
    for pair in (1e-9, 2e-9):
        changed = TABLE["accelerator"]._replace(pair=pair)
        records = [
            {"constant": name, "in_use": getattr(TABLE["accelerator"], name), "measured": getattr(changed, name)}
            for name in Costs._fields
        ]
        source = script.with_entry(source, device, script.entry_of(device, records))
        names: dict[str, object] = {"__name__": "written"}
        exec(source, names)
        assert tuple(names["costs_of"](device)) == tuple(changed)  # type: ignore[operator]
        assert tuple(names["costs_of"](torch.device("xpu"))) == tuple(TABLE["accelerator"])  # type: ignore[operator]
    assert source.count('"cuda": Costs(') == 1
