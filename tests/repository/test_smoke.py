"""Each public loss once, forward and backward: seconds, to see that an installation works at all."""

import pytest
import torch

from fullrank import (
    LossWarmupWrapper,
    MemoryQueue,
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
    SoftmaxFocalLoss,
)

SCORES = [[3.0], [2.0], [1.0], [0.0]]


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        # Ranks 1 and 3, and 1 and 2 among the positives: AP = (1/1 + 2/3) / 2.
        (SmoothAPLoss(1, temperature=1e-3, queue_size=8), 1 / 6),
        # The threshold is the second score; one of two positives lies above.
        (RecallAtQuantileLoss(1, quantile=0.5, temperature=1e-3, queue_size=8), 1 / 2),
        # Both negatives are in the band, three of the four pairs are in order.
        (PAUCAtBudgetLoss(1, beta=1.0, surrogate="pairwise", tau_scale="band", temperature=1e-3, queue_size=8), 1 / 4),
    ],
    ids=["smooth_ap", "recall_at_quantile", "pauc_at_budget"],
)
def test_pooled_loss(loss, value):
    logits = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    result = loss(logits, torch.tensor([1, 0, 1, 0]))
    result.backward()
    # The sigmoid is a step to within exp(-1000) at this temperature.
    torch.testing.assert_close(result.item(), value, rtol=0, atol=1e-12)
    assert logits.grad.shape == logits.shape
    assert len(loss.queue) == 4


def test_sigmoid_focal():
    logits = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    SigmoidFocalLoss(alpha=0.25, gamma=2.0)(logits, torch.tensor([[1.0], [0.0]])).backward()
    # d/dx of -0.25 (1-p)^2 log p is -0.25 (2 p (1-p)^2 (-log p) + (1-p)^3), here at p = 1/2; the negative mirrors it.
    slope = 0.25 * (2 * 0.125 * torch.log(torch.tensor(2.0).double()) + 0.125)
    torch.testing.assert_close(logits.grad, torch.stack([-slope, 3 * slope])[:, None] / 2, rtol=1e-12, atol=0)


def test_softmax_focal_is_cross_entropy_at_gamma_zero():
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.0, 3.0]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([2, 1])
    loss = SoftmaxFocalLoss(gamma=0)(logits, targets)
    loss.backward()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets), rtol=1e-12, atol=0)
    assert logits.grad.abs().sum() > 0


def test_warmup_switches():
    loss = LossWarmupWrapper(SoftmaxFocalLoss(gamma=0), SmoothAPLoss(2, queue_size=8), warmup_steps=1)
    logits, targets = torch.tensor([[0.0, 1.0], [1.0, 0.0]], requires_grad=True), torch.tensor([1, 0])
    for step in range(2):
        loss.on_train_batch_start(step)
        loss(logits, targets).backward()
    assert not loss.in_warmup
    assert len(loss.main_loss.queue) == 2


def test_queue_keeps_the_last_rows():
    queue = MemoryQueue(capacity=2, num_classes=1)
    queue.enqueue(torch.tensor(SCORES), torch.tensor([1, 0, 1, 0]))
    assert sorted(queue.rows().logits[:, 0].tolist()) == [0.0, 1.0]
