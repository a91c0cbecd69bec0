"""What a type checker knows about the calls of a loss: `make types` reads this file, and nothing runs it."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import assert_type

from fullrank import (
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    RetrievalSmoothAPLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
    SoftmaxFocalLoss,
)
from fullrank.large import ShardedLoss
from fullrank.losses import LossWithClasses, LossWithClassesAndStats, LossWithStats, pauc_at_budget, smooth_ap


def calls(x: Tensor, t: Tensor, flag: bool) -> None:
    for module in (SmoothAPLoss(1), RecallAtQuantileLoss(1), ShardedLoss(PAUCAtBudgetLoss(1, surrogate="trapezoid"))):
        assert_type(module(x, t), Tensor)
        assert_type(module(x, t, sample_weight=x), Tensor)
        assert_type(module(x, t, return_per_class=False), Tensor)
        assert_type(module(x, t, return_per_class=True), LossWithClasses)
        assert_type(module(x, t, return_per_class=flag), Tensor | LossWithClasses)
        assert_type(module(x, t, None, True), Tensor | LossWithClasses)
        assert_type(module.forward(x, t), Tensor)
    assert_type(SmoothAPLoss(1)(x, t, indexes=t), Tensor)
    assert_type(PAUCAtBudgetLoss(1)(x, t, indexes=t, return_diagnostics=True), LossWithStats)
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

    assert_type(smooth_ap(x, t, 0.1, "sum", -100, indexes=t), Tensor)
    assert_type(pauc_at_budget(x, t, 0.0, 0.1, "pairwise"), Tensor)

    assert_type(pauc.alpha, float)
    assert_type(pauc.temperature, float)
    pauc.temperature = 0.2
    pauc.gather_distributed = False


def wrong_calls(x: Tensor, t: Tensor) -> None:
    """Each line shows that the check can fail: mypy also complains about an `ignore` of what is no error."""
    SmoothAPLoss(1)(x, "targets")  # type: ignore[call-overload]
    SmoothAPLoss(1)(x, t, return_diagnostics=True)  # type: ignore[call-overload]
    smooth_ap(x, t, temperatur=0.1)  # type: ignore[call-arg]
    smooth_ap(x, t, return_per_class=True)  # type: ignore[call-arg]
    pauc_at_budget(x, t, surrogate="hinge")  # type: ignore[arg-type]
    SmoothAPLoss(1, quantile=0.1)  # type: ignore[call-arg]
    SmoothAPLoss(1, queue_kep="all")  # type: ignore[call-arg]
    ShardedLoss(SigmoidFocalLoss())  # type: ignore[arg-type]
    ShardedLoss(SmoothAPLoss(1))(x, t, indexes=t)  # type: ignore[call-overload]
    PAUCAtBudgetLoss(1, queue_keep="positives")  # type: ignore[arg-type]
    SigmoidFocalLoss(group="world")  # type: ignore[arg-type]
    _ = SmoothAPLoss(1)(x, t).per_class  # type: ignore[attr-defined]
    SmoothAPLoss(1)(x, t, return_per_class=True).backward()  # type: ignore[attr-defined]
