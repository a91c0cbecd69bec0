"""Precision, recall and threshold over the review budget, and a plot of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class ReviewCurve(NamedTuple):
    """Precision and recall of a review of the rows with the highest scores, for each distinct score as the threshold.

    Four tensors (K,), float64, from the highest threshold to the lowest. A row at the threshold is reviewed.
    :meth:`RecallAtQuantile.review_curve` and :meth:`PAUCAtBudget.review_curve` return it.

    Example:
        >>> import torch
        >>> curve = ReviewCurve.of(torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([True, False, True, False]))
        >>> for values in curve:
        ...     print(values.tolist())
        [0.25, 0.5, 0.75, 1.0]
        [1.0, 0.5, 0.6666666666666666, 0.5]
        [0.5, 0.5, 1.0, 1.0]
        [4.0, 3.0, 2.0, 1.0]
    """

    budget: Tensor  # share of the rows that is reviewed; all shares are of the weight where rows have weights
    precision: Tensor  # share of the reviewed rows that are positives
    recall: Tensor  # share of the positives that are reviewed; NaN without a positive
    threshold: Tensor

    @staticmethod
    def of(scores: Tensor, positive: Tensor, weight: Tensor | None = None) -> ReviewCurve:
        """Return the curve of ``scores`` (M,), of which none is NaN, ``positive`` (M,), bool, and ``weight`` (M,)."""
        scores, order = scores.double().sort(descending=True)
        is_last = torch.ones_like(scores, dtype=torch.bool)  # of tied scores only the last is a threshold
        is_last[:-1] = scores[1:] != scores[:-1]
        mass = torch.ones_like(scores) if weight is None else weight[order].double()
        reviewed, caught = mass.cumsum(0), (mass * positive[order]).cumsum(0)
        budget, recall = reviewed / reviewed[-1:], caught / caught[-1:]
        return ReviewCurve(budget[is_last], (caught / reviewed)[is_last], recall[is_last], scores[is_last])

    def plot(self, ax: Any = None) -> Any:
        """Draw precision and recall, and the threshold on an axis of its own; return figure and axes, as torchmetrics.

        Args:
            ax: axes of matplotlib to draw on; the returned figure is None then. None makes a figure.
        """
        import matplotlib.pyplot as plt

        figure, ax = plt.subplots() if ax is None else (None, ax)
        budget, precision, recall, threshold = (values.cpu().numpy() for values in self)
        lines = [*ax.plot(budget, precision, label="precision"), *ax.plot(budget, recall, label="recall")]
        right = ax.twinx()
        lines += right.plot(budget, threshold, color="0.5", linestyle="--", label="threshold (right)")
        ax.set(xscale="log", ylim=(0, 1.05), xlabel="share of the rows that is reviewed", ylabel="precision, recall")
        right.set_ylabel("threshold")
        ax.legend(handles=lines, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
        return figure, ax
