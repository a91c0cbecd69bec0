"""A ranking loss that is probably misused warns once, names the fix, and never warns about what is right."""

import copy
import pickle
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor

from fullrank import (
    InfoNCELoss,
    NDCGLoss,
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    RetrievalSmoothAPLoss,
    SmoothAPLoss,
    SupConLoss,
)
from fullrank.losses import RankingLoss, hints
from fullrank.losses.hints import Copy, Hints

ROWS = 200


def draw(seed: int, columns: int = 1, rows: int = ROWS) -> Tensor:
    """Return scores of unit spread that ask for a gradient."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def every(number: int, rows: int = ROWS) -> Tensor:
    """Return targets with one positive in ``number`` rows."""
    return (torch.arange(rows) % number == 0).long()


def texts_of(loss, steps, make_scores=draw, targets=None):
    """Train for some steps, and return the texts of the warnings."""
    targets = every(5) if targets is None else targets
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            scores = make_scores(step)
            value = loss(scores, targets)
            if value.requires_grad:
                value.backward()
    assert all(one.filename == __file__ for one in caught), "a warning points at the line that calls the loss"
    return [str(one.message) for one in caught]


EACH, NONE = torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.long)
AP, RECALL = (
    partial(SmoothAPLoss, 1, temperature=0.1),
    partial(RecallAtQuantileLoss, temperature=1.0, surrogate="sigmoid"),
)
BAND = partial(PAUCAtBudgetLoss, 1, surrogate="pairwise", queue_size=0)
# How a loss is made and called, and a part of the fix.
MISUSES = {
    "no positive": (partial(AP, queue_size=0), {"targets": NONE}, "BalancedBatchSampler"),
    "small pool": (partial(RECALL, quantile=0.004), {}, "10/quantile = 2500"),
    "less than ten rows": (partial(RECALL, quantile=9.9 / ROWS), {}, "10/quantile = 202"),
    "small band": (partial(BAND, beta=0.004), {}, "10/beta = 2500"),
    "quantile of numpy": (partial(RecallAtQuantileLoss, quantile=0.95), {}, "quantile=0.05"),
    "lost positives": (partial(AP, temperature=1e-6), {}, "temperature=1e-06"),
    "probabilities": (AP, {"make_scores": lambda s: draw(s).sigmoid()}, "sigmoid"),
    "two columns": (partial(SmoothAPLoss, 2, temperature=0.1), {"make_scores": lambda s: draw(s, 2)}, "num_classes=1"),
}
# A class whose scores are equal: in eval mode it is warned of too.
FLAT = {
    "make_scores": lambda s: (draw(s, 3).detach() * torch.tensor([0.0, 1, 1])).requires_grad_(),
    "targets": torch.arange(ROWS) % 3,
}
WARNED = MISUSES | {"flat": (partial(PAUCAtBudgetLoss, 3, beta=0.3, surrogate="trapezoid"), FLAT, "widen the band")}


@pytest.mark.parametrize(("make", "steps", "fix"), WARNED.values(), ids=WARNED)
def test_a_misuse_warns_once_and_names_the_fix(device, make, steps, fix):
    steps = dict(steps)
    draw_scores, targets = steps.pop("make_scores", draw), steps.pop("targets", every(5))
    leaves = [draw_scores(step).detach().to(device).requires_grad_() for step in range(40)]
    (text,) = texts_of(make().to(device), 40, leaves.__getitem__, targets.to(device), **steps)
    assert fix in text
    assert text.startswith(("SmoothAPLoss: ", "RecallAtQuantileLoss: ", "PAUCAtBudgetLoss: "))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "steps", "fix"), MISUSES.values(), ids=MISUSES)
def test_nothing_warns_without_checks_or_in_eval(make, steps, fix):
    assert texts_of(make(validate_args=False), 40, **steps) == []
    assert texts_of(make().eval(), 40, **steps) == []


def some_probabilities(calls):
    """Return what makes probabilities in these calls, and logits in the others."""
    return {"make_scores": lambda step: draw(step).sigmoid() if step + 1 in calls else draw(step)}


def rising(shift):
    """Return what makes the probabilities of a network that is untrained at first, moved by ``shift``."""
    return {"make_scores": lambda step: (0.1 * (step + 1) * draw(step)).sigmoid() + shift}


WELL_RANKED = {"make_scores": lambda step: (draw(0).detach() + 100.0 * every(5)[:, None]).requires_grad_()}
LATER = {*range(1, 33)}
# How a loss is made, how often and how it is called, and the number of warnings.
HISTORIES = {
    "queue": (AP, 40, {}, 0),
    "wide scores": (partial(AP, queue_size=0), 40, {"make_scores": lambda step: 10 * draw(step)}, 0),
    "recall": (partial(RECALL, quantile=0.05, temperature=0.1), 40, {}, 0),
    "recall above ten rows": (partial(RECALL, quantile=10 / ROWS, temperature=0.1), 40, {}, 0),
    "recall dro, which has no threshold": (partial(RecallAtQuantileLoss, quantile=0.004), 40, {}, 0),
    "recall in half of the rows": (partial(RECALL, quantile=0.5, temperature=0.1), 40, {}, 0),
    "recall with a queue": (partial(RECALL, quantile=0.01, temperature=0.1, queue_size=1024), 40, {}, 0),
    "pauc": (partial(BAND, beta=0.05), 40, {}, 0),
    "pauc dro, which has no band": (partial(PAUCAtBudgetLoss, 1, beta=0.004, queue_size=0), 40, {}, 0),
    "two labels": (
        partial(SmoothAPLoss, 2, temperature=0.1, multi_hot=True),
        40,
        {"make_scores": lambda s: draw(s, 2), "targets": draw(9, 2) > 1},
        0,
    ),
    "a network before its training": (AP, 1, {"make_scores": lambda step: 0.3 + 0.05 * draw(step)}, 0),
    "scores of an untrained network that are positive": (AP, 40, some_probabilities({1}), 0),
    "one batch of a long run": (AP, 40, some_probabilities({16}), 0),
    "three batches of a long run": (AP, 40, some_probabilities({8, 16, 32}), 0),
    "the first two calls": (AP, 40, some_probabilities({1, 2}), 1),
    "logits in three calls": (AP, 40, some_probabilities(LATER - {2, 3, 4}), 0),
    "logits in a call that is not looked at": (AP, 40, some_probabilities(LATER - {3}), 1),  # as 1, 2, 4, 8, ... are
    "probabilities of a network that learns": (AP, 40, rising(0.0), 1),
    "control: the same, lower": (AP, 40, rising(-0.6), 0),
    "19 positives, which may have no gradient": (partial(AP, temperature=1e-6), 2, {"targets": EACH < 19}, 0),
    "20 positives": (partial(AP, temperature=1e-6), 2, {"targets": EACH < 20}, 1),
    "positives that are ranked well": (partial(AP, temperature=1e-4), 10, WELL_RANKED, 0),
}


@pytest.mark.parametrize(("make", "calls", "steps", "number"), HISTORIES.values(), ids=HISTORIES)
def test_what_warns_and_what_is_right(make, calls, steps, number):
    assert len(texts_of(make(), calls, **steps)) == number


PAIRS = EACH // 2
# Loss, what it is called with after the scores or embeddings, and the same with a pair; a part of the fix.
PAIRLESS = {
    "SupCon": (SupConLoss, (EACH,), (PAIRS,), "several rows of each label (fullrank.data.MPerClassSampler)"),
    "Retrieval": (RetrievalSmoothAPLoss, (EACH,), (PAIRS,), "another one of its label and one of another label"),
    "Retrieval, one label": (RetrievalSmoothAPLoss, (NONE,), (PAIRS,), "fullrank.data.MPerClassSampler"),
    "NDCG, one row a query": (NDCGLoss, (EACH, EACH), (EACH, PAIRS), "rows of different relevance"),
    "NDCG, equal relevance": (NDCGLoss, (NONE + 3,), (EACH,), "a relevance above 0, look at the targets"),
    "NDCG, ignored": (NDCGLoss, (NONE.clone().index_fill(0, EACH[1:], -100),), (EACH,), "rows of different relevance"),
    "AP, one row a query": (
        SmoothAPLoss,
        (EACH % 2, EACH),
        (EACH % 2, PAIRS),
        "MPerClassSampler(indexes, m, batch_size)",
    ),
}


def call_of(loss, of_row):
    """Return a function that calls the loss on scores or embeddings."""
    is_of_embeddings = isinstance(loss, InfoNCELoss | SupConLoss | RetrievalSmoothAPLoss)
    if isinstance(loss, SmoothAPLoss):
        queries = {"indexes": of_row[1]} if len(of_row) > 1 else {}
        return lambda scores, _: loss(scores[:, 0], of_row[0], **queries)
    return lambda scores, _: loss(scores if is_of_embeddings else scores[:, 0], *of_row)


@pytest.mark.parametrize(("make", "alone", "paired", "fix"), PAIRLESS.values(), ids=PAIRLESS)
def test_batches_without_a_pair_warn_once(make, alone, paired, fix):
    """Control: one pair in the batch is enough."""
    for steps, of_row in ((19, alone), (45, paired)):
        loss = make()
        assert texts_of(call_of(loss, of_row), steps, lambda step: draw(step, 3)) == []
    loss = make()
    (text,) = texts_of(call_of(loss, alone), 45, lambda step: draw(step, 3))
    assert text.startswith(f"{make.__name__}: no ")
    assert "in 20 calls in a row, so the loss was 0" in text
    assert fix in text
    for quiet in (make(validate_args=False), make().eval()):
        assert texts_of(call_of(quiet, alone), 25, lambda step: draw(step, 3)) == []


@pytest.mark.parametrize("kind", ["SupCon", "Retrieval", "NDCG, one row a query", "AP, one row a query"])
@on_ranks()
def test_a_pair_over_the_ranks_is_a_pair(rank, kind):
    """Every rank warns if no rank has one; the control has the same labels on all ranks."""
    make, alone, _, fix = PAIRLESS[kind]
    for shift, number in ((rank * ROWS, 1), (0, 0)):
        differing = [(column + rank) % 2 for column in alone[:-1]]  # targets or relevances
        of_row = [*differing, alone[-1] + shift]
        texts = texts_of(call_of(make(), of_row), 25, lambda step: draw(100 * step + rank, 3))
        assert len(texts) == number
        assert all(fix in text for text in texts)


# Loss, what it is called with, and whether micro-batches may be averaged.
POOLED = {
    "AP": (AP, (every(5),), False),
    "AP per query": (SmoothAPLoss, (EACH % 2, PAIRS), True),
    "NDCG": (NDCGLoss, (EACH,), False),
    "NDCG per query": (NDCGLoss, (EACH, PAIRS), True),
    "SupCon": (SupConLoss, (PAIRS,), False),
    "Retrieval": (RetrievalSmoothAPLoss, (PAIRS,), False),
    "InfoNCE": (InfoNCELoss, (draw(1, 3).detach(),), False),
}


@pytest.mark.parametrize(("make", "of_row", "is_fine"), POOLED.values(), ids=POOLED)
@pytest.mark.parametrize("is_last", [True, False])
def test_micro_batches_of_accelerate_warn_once(monkeypatch, make, of_row, is_fine, is_last):
    stub = SimpleNamespace(GradientState=lambda: SimpleNamespace(sync_gradients=is_last))
    monkeypatch.setitem(sys.modules, "accelerate.state", stub)
    texts = texts_of(call_of(make(), of_row), 20, lambda step: draw(step, 3))
    assert len(texts) == (not is_last and not is_fine)
    assert all("use fullrank.pooled_backward for the micro-batches of a step" in text for text in texts)
    quiet = make(validate_args=False)
    assert texts_of(call_of(quiet, of_row), 20, lambda step: draw(step, 3)) == []


@pytest.mark.parametrize("kind", POOLED)
@on_ranks()
def test_rows_that_all_ranks_share_warn_once(rank, kind):
    """Also rows that torch has gathered; not rows of the ranks' own, equal rows, or with other targets.

    Not where they are the same in one call alone, and not where one rank has the same rows twice and the others none.
    """
    make, of_row, _ = POOLED[kind]
    world_size = dist.get_world_size()

    def gathered(step):
        own = draw(100 * step + rank, 3).detach()
        parts = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(parts, own)
        parts[rank] = own
        return torch.cat(parts).requires_grad_()

    gathered_columns = [column.repeat(world_size, *[1] * (column.ndim - 1)) for column in of_row]
    repeats = world_size if rank == 0 else 0
    blocks = [column.repeat(repeats, *[1] * (column.ndim - 1)) for column in of_row]
    other = [column.roll(rank, 0) for column in of_row]
    own = other if kind == "InfoNCE" else of_row  # keys are rows too
    cases = [
        (1, of_row, lambda step: draw(step, 3)),
        (1, gathered_columns, gathered),
        (0, own, lambda step: draw(100 * step + rank, 3)),
        (0, own, lambda step: (draw(step, 3) * 0 + 0.1).detach().requires_grad_()),
        (0, other, lambda step: draw(step, 3)),
        (0, own, lambda step: draw(step if step % 4 == 0 else 100 * step + rank, 3)),  # step 1 is looked at too
        (0, blocks, lambda step: draw(step, 3).detach().repeat(repeats, 1).requires_grad_()),
    ]
    for number, columns, make_scores in cases:
        # A score that is 0 everywhere is a hint of its own, and so is a pool without a positive.
        texts = [text for text in texts_of(call_of(make(), columns), 9, make_scores) if "the same rows" in text]
        assert len(texts) == number, (number, texts)
        assert all(f"every row is counted {world_size} times" in text for text in texts)
    assert texts_of(call_of(make(validate_args=False), of_row), 3, lambda step: draw(step, 3)) == []
    lone = make(group=dist.new_group([rank], use_local_synchronization=True), gradient_reduction=world_size)
    texts = texts_of(call_of(lone, own), 9, lambda step: draw(step, 3))
    assert not any("the same rows" in text for text in texts)


def test_a_small_last_batch_does_not_warn():
    loss = RecallAtQuantileLoss(1, quantile=0.05, temperature=1.0, surrogate="sigmoid")
    for rows in (ROWS, ROWS, 24) * 3:
        assert (
            texts_of(loss, 1, make_scores=lambda step, rows=rows: draw(step, rows=rows), targets=every(5, rows)) == []
        )


@pytest.mark.parametrize("is_control", [False, True])
def test_a_loss_of_weight_0_has_no_gradient_to_give(monkeypatch, is_control):
    """The control does not see by how much the loss was multiplied."""
    watch = Hints.watch_positives

    def blind(self, scores, positive, losses, *rest):
        watch(self, scores, positive, losses.detach(), *rest)

    if is_control:
        monkeypatch.setattr(Hints, "watch_positives", blind)
    loss = SmoothAPLoss(1, temperature=0.1)
    texts = []
    for _ in range(5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (0.0 * loss(draw(0), every(5))).backward()
        texts += [str(one.message) for one in caught]
    assert ["live positives had no gradient" in text for text in texts] == [True] * is_control


class Cut(torch.autograd.Function):
    """The identity, whose gradient is undefined."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("use", [Cut.apply, torch.clone])
def test_an_undefined_gradient_is_not_counted(use):
    """The control has a gradient."""
    loss = AP(temperature=1e-6)
    texts = texts_of(lambda *rows: use(loss(*rows)), 5)
    assert ["live positives had no gradient" in text for text in texts] == [True] * (use is torch.clone)


def test_nineteen_calls_without_a_positive_do_not_warn():
    loss = AP(queue_size=0)
    # A run without positives is seen from call 1, 2, 4, ..., 64 on.
    for steps, targets in ((19, NONE), (44, every(5)), (19, NONE)):
        assert texts_of(loss, steps, targets=targets) == []
    (text,) = texts_of(loss, 1, targets=NONE)
    assert "20 calls in a row" in text


@pytest.mark.parametrize("is_control", [False, True])
def test_a_surrogate_without_a_temperature_does_not_blame_it(monkeypatch, is_control):
    """One positive of many is below all negatives, and has all the gradient."""
    targets = 1 - every(5)
    scores = 100.0 * targets[:, None]
    scores[1] = -1000.0
    if is_control:
        monkeypatch.setattr(PAUCAtBudgetLoss, "_setting", RankingLoss._setting)
    loss = PAUCAtBudgetLoss(1, queue_size=0)
    texts = texts_of(loss, 10, make_scores=lambda step: scores.clone().requires_grad_(), targets=targets)
    assert ["temperature=0.1 is too small" in text for text in texts] == [True] * is_control


@pytest.mark.parametrize("again", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_a_copy_of_a_loss_does_not_warn_again(again):
    loss = RECALL(quantile=0.004)
    assert len(texts_of(loss, 3)) == 1
    assert texts_of(again(loss), 5) == []


def arrives_late(values):
    """Stand for a device: a copy arrives at the third question, and holds nonsense before."""
    host, left = torch.full_like(values, -1, dtype=torch.float64), iter([False, False])

    def has_arrived():
        done = next(left, True)
        if done:
            host.copy_(values)
        return done

    return Copy(has_arrived, host)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "steps", "fix"), WARNED.values(), ids=WARNED)
def test_values_that_arrive_late_give_the_same_hint(monkeypatch, make, steps, fix):
    monkeypatch.setattr(hints, "start_copy", arrives_late)
    (text,) = texts_of(make(), 60, **steps)
    assert fix in text


def test_control_nonsense_is_read_where_nothing_is_waited_for(monkeypatch):
    """A loss that is used rightly, of which every number is read as 0."""
    monkeypatch.setattr(hints, "start_copy", lambda values: Copy(lambda: True, torch.zeros_like(values)))
    loss = SmoothAPLoss(1, queue_size=64, temperature=0.1, queue_keep="negatives")
    assert "no class was valid" in texts_of(loss, 40)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "steps", "fix"), MISUSES.values(), ids=MISUSES)
def test_a_device_without_events_gives_no_hint_that_would_wait(monkeypatch, make, steps, fix):
    monkeypatch.setattr(hints, "start_copy", lambda values: None)
    texts = texts_of(make(), 40, **steps)
    assert len(texts) == (
        fix in ("10/quantile = 2500", "10/quantile = 202", "10/beta = 2500", "quantile=0.05", "num_classes=1")
    )  # these read no value
