"""The table of costs: which device has which, what they decide, and the benchmark that measures them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from scripts import run_script

from fullrank.kernels.costs import TABLE, Costs, costs_of

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "costs.py"


def test_a_device_type_that_is_not_listed_is_an_accelerator():
    assert costs_of(torch.device("cpu")) is TABLE["cpu"]
    for name in ("cuda:1", "xpu", "meta"):
        assert costs_of(torch.device(name)) is TABLE["accelerator"]


def test_bins_take_over_when_their_cost_is_less_than_that_of_the_pairs():
    costs = TABLE["cpu"]._replace(pair=1.0, fixed=100.0, row=2.0, coarse_bin=10.0)
    assert costs.pairs_are_faster(num_pairs=119, num_rows=10)
    assert not costs.pairs_are_faster(num_pairs=121, num_rows=10)
    assert costs.pairs_are_faster(num_pairs=121, num_rows=10, num_bins=1)


@pytest.mark.full
def test_the_benchmark_prints_an_entry_that_can_be_pasted(tmp_path):
    done = run_script(BENCHMARK, "--quick", "--out", tmp_path, cwd=tmp_path, limit_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    entry = re.search(r'"cpu": (Costs\(.*?\n    \)),', done.stdout, re.DOTALL)
    assert entry is not None, done.stdout
    assert isinstance(eval(entry[1], {"Costs": Costs}), Costs)
    constants = json.loads((tmp_path / "costs.json").read_text())["constants"]
    assert [one["constant"] for one in constants] == list(Costs._fields)
    assert {one["constant"]: one["in_use"] for one in constants} == TABLE["cpu"]._asdict()
