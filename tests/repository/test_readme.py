"""Every Python block of README.md runs: the first in this process, the recipe over ranks in two."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pages
import pytest
import torch
from pages import assert_printed
from scripts import run_script

import fullrank

block_with = partial(pages.block_with, "README.md")


def test_no_block_is_left_out() -> None:
    assert len(pages.blocks("README.md")) == 3


def test_the_added_line() -> None:
    names: dict = {}
    assert_printed(pages.output_of(block_with("# the added line"), names), "1.238")
    # Positives at places 2 of 4, 1 and 3 of 4, 1 of 4: AP of 1/2, 5/6 and 1.
    added = names["loss"] - torch.nn.CrossEntropyLoss()(names["logits"], names["targets"])
    assert added.item() == pytest.approx(1 - (1 / 2 + 5 / 6 + 1) / 3, abs=2e-2)
    assert names["logits"].grad.abs().sum() > 0


@pytest.mark.slow
def test_the_ddp_recipe(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(block_with("# train.py"), encoding="utf-8")
    done = run_script(script, cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss \d\.\d{4}, temperature \d\.\d\d\n", done.stdout), done.stdout


def test_the_window_of_token_sums(capsys: pytest.CaptureFixture[str]) -> None:
    """The gradient of the last step is that of one batch; over ranks tests/accumulation/test_accumulate.py holds it."""
    names: dict = {}
    exec(block_with("def train_epoch"), names)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5)).double()
    loader = []
    for length in (3, 9):
        tokens = torch.randint(0, 5, (2, length))
        loader.append({"input_ids": tokens, "labels": tokens})
    names["train_epoch"](model, loader, torch.optim.SGD(model.parameters(), lr=0.0))
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    sums = [fullrank.causal_lm_loss(model(batch["input_ids"]), batch["labels"], num_items=20) for batch in loader]
    total = sum(sums)
    total.backward()
    for mine, parameter in zip(found, model.parameters()):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=1e-14)
    assert float(capsys.readouterr().out) == pytest.approx(float(total.detach()), rel=1e-12)
