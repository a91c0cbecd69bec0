"""A type checker knows what each call of a loss returns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch
from torch import Tensor
from typing_extensions import assert_type

from fullrank import (
    PAUCAtBudgetLoss, RecallAtQuantileLoss, RetrievalSmoothAPLoss, SigmoidFocalLoss, SmoothAPLoss, SoftmaxFocalLoss,
)
from fullrank.losses import (
    LossWithClasses, LossWithClassesAndStats, LossWithStats, pauc_at_budget, recall_at_quantile, smooth_ap,
)


def calls(x: Tensor, t: Tensor, flag: bool) -> None:
    loss = SmoothAPLoss(1)(x, t)
    loss.backward()
    loss_fn = SmoothAPLoss(num_classes=1)
    loss, per_class, valid = loss_fn(x, t, return_per_class=True)
    per_class.tolist()
    valid.all()

    for module in (SmoothAPLoss(1), RecallAtQuantileLoss(1)):
        assert_type(module(x, t), Tensor)
        assert_type(module(x, t, sample_weight=x), Tensor)
        assert_type(module(x, t, return_per_class=False), Tensor)
        assert_type(module(x, t, return_per_class=True), LossWithClasses)
        assert_type(module(x, t, return_per_class=flag), Tensor | LossWithClasses)
        assert_type(module(x, t, None, True), Tensor | LossWithClasses)
        assert_type(module.forward(x, t), Tensor)
    assert_type(SmoothAPLoss(1)(x, t, indexes=t), Tensor)
    assert_type(SmoothAPLoss(1)(x, t, indexes=t, return_per_class=True), LossWithClasses)

    pauc = PAUCAtBudgetLoss(1)
    assert_type(pauc(x, t), Tensor)
    assert_type(pauc(x, t, return_per_class=True), LossWithClasses)
    assert_type(pauc(x, t, return_diagnostics=True), LossWithStats)
    assert_type(pauc(x, t, return_per_class=True, return_diagnostics=True), LossWithClassesAndStats)
    assert_type(pauc(x, t, return_diagnostics=True).stats["tau_eff"], Tensor)
    assert_type(
        pauc(x, t, return_per_class=flag, return_diagnostics=flag),
        Tensor | LossWithClasses | LossWithStats | LossWithClassesAndStats,
    )

    assert_type(SigmoidFocalLoss()(x, x), Tensor)
    assert_type(SoftmaxFocalLoss()(x, t, sample_weight=x), Tensor)
    assert_type(RetrievalSmoothAPLoss()(x, t), Tensor)

    assert_type(smooth_ap(x, t, 0.1), Tensor)
    assert_type(smooth_ap(x, t, 0.1, "sum", -100, indexes=t), Tensor)
    assert_type(recall_at_quantile(x, t, 0.1), Tensor)
    assert_type(pauc_at_budget(x, t, 0.0, 0.1, "pairwise"), Tensor)

    assert_type(pauc.alpha, float)
    assert_type(pauc.temperature, float)
    pauc.temperature = 0.2
    pauc.gather_distributed = False
"""

WRONG = {
    'SmoothAPLoss(1)(torch.ones(1, 1), "targets")': "call-overload",
    "SmoothAPLoss(1)(torch.ones(1, 1), torch.ones(1), return_diagnostics=True)": "call-overload",
    "smooth_ap(torch.ones(1, 1), torch.ones(1), temperatur=0.1)": "call-arg",
    "smooth_ap(torch.ones(1, 1), torch.ones(1), return_per_class=True)": "call-arg",
    'pauc_at_budget(torch.ones(1, 1), torch.ones(1), surrogate="hinge")': "arg-type",
    "SmoothAPLoss(1, quantile=0.1)": "call-arg",
    'SmoothAPLoss(1, pool="spread")': "arg-type",
    'RecallAtQuantileLoss(1, pol="sharded")': "call-arg",
    'PAUCAtBudgetLoss(1, queue_keep="positives")': "arg-type",
    'SigmoidFocalLoss(group="world")': "arg-type",
    "SmoothAPLoss(1)(torch.ones(1, 1), torch.ones(1)).per_class": "attr-defined",
    "SmoothAPLoss(1)(torch.ones(1, 1), torch.ones(1), return_per_class=True).backward()": "attr-defined",
}


def test_the_types_of_calls(tmp_path: Path) -> None:
    """Right calls have the expected types. Each wrong line is an error, which shows that the check can fail."""
    start = PROGRAM.count("\n") + 1
    (tmp_path / "program.py").write_text(PROGRAM + "".join(f"{line}\n" for line in WRONG), encoding="utf-8")
    settings = [f"--config-file={ROOT / 'pyproject.toml'}", "--no-warn-unused-configs", "--no-error-summary"]
    # The link and the cache of `make types`: analysing torch and the package takes most of the time.
    link = ROOT / ".venv" / "typecheck"
    if not link.is_dir():
        link = tmp_path
        (link / "fullrank").symlink_to(ROOT, target_is_directory=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            *settings,
            "--cache-dir",
            str(ROOT / ".mypy_cache"),
            str(tmp_path / "program.py"),
        ],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": str(link)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    found = re.findall(r"program\.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    expected = {(str(start + number), code) for number, code in enumerate(WRONG.values())}
    assert set(found) == expected, done.stdout
