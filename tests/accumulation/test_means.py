"""A loss that is a mean of several terms is refused where a sum is expected; a mean of one term is a sum."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from gradient_cases import forced
from on_ranks import common_error, on_ranks
from subjects import by_hand, wrap
from torch import Tensor, nn

import fullrank
from fullrank import accumulate
from fullrank.large import ShardedLoss

CLASSES = torch.tensor([0, 2, 1, 2])
BINARY = torch.tensor([1, 0, 0, 1])
OF_ROWS: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda x, **options: F.cross_entropy(x, CLASSES, **options),
    "binary cross-entropy": lambda x, **options: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), **options),
    "mse_loss": lambda x, **options: F.mse_loss(x, torch.zeros_like(x), **options),
    "CrossEntropyLoss": lambda x, **options: fullrank.CrossEntropyLoss(**options)(x, CLASSES),
    "SoftmaxFocalLoss": lambda x, **options: fullrank.SoftmaxFocalLoss(**options)(x, CLASSES),
    "SmoothAPLoss": lambda x, **options: fullrank.SmoothAPLoss(3, **options)(x, CLASSES),
    "CombinedLoss": lambda x, **options: fullrank.CombinedLoss({"ap": fullrank.SmoothAPLoss(3, **options)})(x, CLASSES),
    "LossWarmupWrapper": lambda x, **options: fullrank.LossWarmupWrapper(
        nn.CrossEntropyLoss(**options), fullrank.SmoothAPLoss(3, **options), final_main_weight=0.5
    ).eval()(x, CLASSES),
    "global_mean": lambda x, reduction="mean": (
        x.square().sum() if reduction == "sum" else fullrank.global_mean(x.square().sum(), 4)
    ),
    "causal_lm_loss": lambda x, **options: fullrank.causal_lm_loss(x, CLASSES, **options),
    "causal_lm_loss, hidden": lambda x, **options: fullrank.causal_lm_loss(x, CLASSES, weight=torch.eye(3), **options),
    "balanced": lambda x, **options: fullrank.BCEWithLogitsLoss(class_weight="balanced", **options)(x[:, 0], BINARY),
    "NDCGLoss": lambda x, **options: fullrank.NDCGLoss(**options)(x[:, 0], CLASSES),
    "InfoNCELoss": lambda x, **options: fullrank.InfoNCELoss(**options)(x, x.detach().roll(1, 1)),
    "RetrievalSmoothAPLoss": lambda x, **options: fullrank.RetrievalSmoothAPLoss(**options)(x, BINARY),
}
OF_POOLS = {"SmoothAPLoss", "CombinedLoss", "LossWarmupWrapper", "balanced", "NDCGLoss", "InfoNCELoss"}
OF_POOLS |= {"RetrievalSmoothAPLoss"}
WITHOUT_SUM = {"balanced", "InfoNCELoss"}


@pytest.mark.parametrize("name", ["ndcg", "smooth ap"])
def test_whole_queries_are_terms(name: str) -> None:
    """A mean over queries is one of terms: with their number it is the mean of the window, to the last bits."""
    model = nn.Linear(3, 1).double()
    rows, targets = torch.randn(12, 3, dtype=torch.float64), torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 1])
    indexes = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])

    def mean(part: slice) -> Tensor:
        loss = fullrank.NDCGLoss(0.1) if name == "ndcg" else fullrank.SmoothAPLoss(1, temperature=0.1)
        return loss(model(rows[part])[:, 0], targets[part], indexes=indexes[part])

    expected = torch.autograd.grad(mean(slice(None)), list(model.parameters()))
    parts = [slice(0, 3), slice(3, 12)]
    for step, part in accumulate(model, parts, lambda part: len(indexes[part].unique())):
        step.backward(mean(part), num_items=len(indexes[part].unique()))
    means = [torch.autograd.grad(mean(part), list(model.parameters())) for part in parts]
    for parameter, gradient, *of_parts in zip(model.parameters(), expected, *means):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)
        if parameter.ndim > 1:  # the bias moves all scores alike
            assert not torch.allclose(sum(of_parts) / 2, gradient, rtol=1e-2)  # the control: a mean of means


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_mean_is_refused_and_a_sum_is_not(name: str) -> None:
    model, loss = nn.Linear(3, 3), OF_ROWS[name]
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    texts = [r"got a mean\. .*\"sum\", or pass num_items=", r"got a mean\. .*\"sum\", or pass loss \* n"]
    texts = [r"got the mean of a loss that compares its rows.*Use pooled_backward"] * 2 if name in OF_POOLS else texts
    for change in (lambda mean: mean, lambda mean: mean / 2, lambda mean: mean.double() / 2.0):
        for verb in ("backward", "scale"):
            for step, batch in accumulate(model, [rows], len):
                with pytest.raises(ValueError, match=f"micro-batch 0: .*{texts[0]}"):
                    getattr(step, verb)(change(loss(model(batch))))
        with pytest.raises(ValueError, match=f"loss_sum: .*{texts[1]}"):
            fullrank.DeferredMean(model).backward(change(loss(model(rows))), len(rows))
    assert all(parameter.grad is None for parameter in model.parameters())
    for step, batch in accumulate(model, [rows] * 3, len) if name not in WITHOUT_SUM else ():
        step.backward(loss(model(batch), reduction="sum") / 4)
    if name in OF_POOLS:  # the mean of two such losses is not that of all rows
        for factor in (1, 4):
            for step, batch in accumulate(model, [rows] * 2, len):
                with pytest.raises(ValueError, match=f"micro-batch 0: .*{texts[0]}"):
                    step.backward(factor * loss(model(batch)) + model(batch).sum(), num_items=4)
                break
        return
    for step, batch in accumulate(model, [rows] * 2, len):
        step.backward(loss(model(batch)), num_items=4)
    for step, batch in accumulate(model, [rows] * 2, len):
        step.backward(loss(model(batch)) * 4)
    deferred = fullrank.DeferredMean(model)
    model.zero_grad()
    deferred.backward(loss(model(rows)) * 4, 4)
    deferred.finish()


@pytest.mark.parametrize("kinds", [*itertools.product(("mean", "sum"), repeat=2)], ids="-".join)
def test_a_blend_of_a_mean_and_a_sum_is_a_mean(kinds: tuple[str, str]) -> None:
    model, rows = nn.Linear(3, 3), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    parts = fullrank.SoftmaxFocalLoss(reduction=kinds[0]), fullrank.SmoothAPLoss(3, reduction=kinds[1])
    loss = fullrank.LossWarmupWrapper(*parts, final_main_weight=0.5).eval()
    for step, batch in accumulate(model, [rows], len):
        with pytest.raises(ValueError, match=r"got (a|the) mean") if "mean" in kinds else nullcontext():
            step.backward(loss(model(batch), CLASSES))


def test_a_mean_of_one_term_is_a_sum() -> None:
    """A sequence may be the term, and its loss a mean over its tokens; so may a micro-batch."""
    model, rows = nn.Linear(3, 3), torch.randn(4, 3)
    for batches, count in (([rows, rows], 2), ([rows[None], rows[None]], len), ([rows[:1]], 7.0)):
        for step, batch in accumulate(model, batches, count):
            step.backward(model(batch)[..., :1].square().mean())
    deferred = fullrank.DeferredMean(model)
    model.zero_grad()
    for number in (1, torch.tensor(1)):
        deferred.backward(model(rows).mean(), number)
    assert deferred.finish() == 2


def test_a_graph_with_many_paths_is_read_once() -> None:
    """Sixty sums of a loss with itself have 2^60 paths."""
    model, rows = nn.Linear(3, 3), torch.randn(4, 3)
    for step, batch in accumulate(model, [rows], len):
        loss = model(batch).square().sum()
        for _ in range(60):
            loss = 0.5 * (loss + loss)
        step.backward(loss)


@on_ranks(2)
def test_a_loss_over_the_rows_of_all_ranks_is_refused(rank: int) -> None:
    """In each step, whatever is said of its terms."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    rows = torch.randn(2, 5, 3)[rank, : 4 - rank]
    targets = (rows[:, :1] > 0).float()
    total, mean = (fullrank.BCEWithLogitsLoss(reduction=name) for name in ("sum", "mean"))
    both = fullrank.CombinedLoss({"bce": mean, "ap": fullrank.SmoothAPLoss()})
    retrieval = fullrank.RetrievalSmoothAPLoss()
    large = ShardedLoss(fullrank.SmoothAPLoss(temperature=2.0, reduction="sum"))

    def sharded(rows: Tensor, targets: Tensor) -> Tensor:
        with forced("moments"):
            return large(rows, targets)

    def ranked(rows: Tensor, targets: Tensor) -> Tensor:
        return retrieval(rows, targets[:, 0].long())

    text = (
        "expected the sum over this rank's terms, got a loss over the rows of all ranks. Set gather_distributed=False"
    )
    refused = (total, None), (mean, len(rows)), (mean, None), (both, len(rows)), (both, None), (ranked, None)
    balanced = fullrank.BCEWithLogitsLoss(class_weight="balanced")
    refused += (sharded, None), (balanced, len(rows)), (balanced, None)
    for loss, num_items in refused:

        def window(loss: Callable[[Tensor, Tensor], Tensor] = loss, num_items: int | None = num_items) -> None:
            for step, batch in accumulate(model, [rows], len):
                step.backward(2 * loss(model(batch), targets), num_items=num_items)

        def call(loss: Callable[[Tensor, Tensor], Tensor] = loss) -> None:
            fullrank.DeferredMean(model).backward(loss(model(rows), targets) * len(rows), len(rows))

        for verb in (window, call, window, call):
            with pytest.raises(ValueError, match=text):
                verb()
        assert all(parameter.grad is None for parameter in model.parameters())
    mean(model(rows), targets).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    for loss, count in ((mean, 2), (total, len)):  # one term on each rank, the same; a sum of the own terms
        model.zero_grad()
        for step, batch in accumulate(model, [rows], count):
            step.backward(loss(model(batch), targets))
        found = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # sums of float32
        total.gather_distributed = False


DIVIDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # the losses of a micro-batch, and which of them count
    "masked": lambda x, mask: (x * mask).sum() / mask.sum(),
    "clamped": lambda x, mask: (x * mask).sum() / mask.sum().clamp(min=1),
    "number": lambda x, mask: ((x * mask).sum() / int(mask.sum())).double(),
    "reciprocal": lambda x, mask: (x * mask).sum() * mask.sum().reciprocal(),
    "one divisor": lambda x, mask: (x * mask).sum() / 3,  # may have any reason: the control
    "a divisor with a gradient": lambda x, mask: (x * mask).sum() / mask.sum().requires_grad_(),
    "undone": lambda x, mask: (x * mask).sum() / mask.sum() * mask.sum(),
}


@pytest.mark.parametrize("kind", ["plain", "ddp"])
@pytest.mark.parametrize("name", DIVIDED)
@on_ranks(2)
def test_a_sum_divided_by_its_own_count_is_a_mean(rank: int, name: str, kind: str) -> None:
    """Of one rank, in windows 1 and 2; with its number of terms it is exact."""
    model, loss = wrap(nn.Linear(3, 1), kind), DIVIDED[name]
    rows, counts = torch.randn(3, 6, 3), [[2, 5, 6], [4, 6, 3]]
    masks = [(torch.arange(6) < number).float() for number in counts[rank]]

    def run(means: bool) -> None:
        batches = list(zip(rows, masks))
        for step, (batch, mask) in accumulate(model, batches, lambda batch: batch[1].sum(), group=by_hand(model)):
            losses = model(batch)[:, 0].square()
            if means:
                step.backward(loss(losses, mask), num_items=mask.sum())
            else:
                step.backward(loss(losses, mask) if rank else (losses * mask).sum())

    for _ in range(2):
        kind_of_error, text = common_error(partial(run, False))
        if name in ("one divisor", "a divisor with a gradient", "undone"):
            assert kind_of_error == "none", text
            continue
        assert kind_of_error == "ValueError"
        wanted = "on rank 1: loss of micro-batch 1: expected the sum over its terms, got one divided by the number of"
        assert wanted in text
        assert "or pass num_items=" in text
    assert common_error(partial(run, True)) == ("none", "")
