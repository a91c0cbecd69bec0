"""A ranking loss that is probably misused warns once, names the fix, and never warns about what is right."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor
from workers import forget_hints

from fullrank import (
    InfoNCELoss,
    NDCGLoss,
    PAUCAtBudgetLoss,
    RetrievalSmoothAPLoss,
    SmoothAPLoss,
    SupConLoss,
)
from fullrank.losses import hints
from fullrank.losses.hints import Copy

ROWS = 40


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


NONE = torch.zeros(ROWS, dtype=torch.long)
AP = partial(SmoothAPLoss, 1, temperature=0.1)
# How a loss is made and called, and a part of the fix.
MISUSES = {
    "no positive": (partial(AP, queue_size=0), {"targets": NONE}, "BalancedBatchSampler"),
    "probabilities": (AP, {"make_scores": lambda s: draw(s).sigmoid()}, "sigmoid"),
    "two columns": (partial(SmoothAPLoss, 2, temperature=0.1), {"make_scores": lambda s: draw(s, 2)}, "num_classes=1"),
}
AT_ONCE = "num_classes=1", "widen the band"  # the fixes of what one call tells
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
    assert text.startswith(("SmoothAPLoss: ", "PAUCAtBudgetLoss: "))
    forget_hints()
    if device.type == "cpu" and "PAUC" not in text:  # the control: without checks, and in eval mode
        for quiet in (make(validate_args=False), make().eval()):
            assert texts_of(quiet, 25, leaves.__getitem__, targets) == []


@pytest.mark.parametrize(("make", "steps", "fix"), WARNED.values(), ids=WARNED)
def test_a_loss_that_is_made_in_every_step_warns_once(make, steps, fix):
    """The control: losses of other names."""
    names = iter(range(1000))
    for options, number in ((dict, 1), (lambda: {"name": str(next(names))}, 40 * (fix in AT_ONCE))):
        texts = texts_of(lambda *rows, options=options: make(**options())(*rows), 40, **steps)
        assert [fix in text for text in texts] == [True] * number


QUEUES = {
    "AP": (partial(AP, queue_size=ROWS), (every(5),)),
    "SupCon": (partial(SupConLoss, queue_size=ROWS), (torch.arange(ROWS) // 2,)),
    "InfoNCE": (partial(InfoNCELoss, queue_size=ROWS), (torch.randn(ROWS, 3),)),
    "Retrieval": (partial(RetrievalSmoothAPLoss, queue_size=ROWS), (torch.arange(ROWS) // 2,)),
}


def test_keys_that_are_the_queries_warn_once():
    """The control: equal keys, which may be another view without dropout."""
    (text,) = texts_of(lambda rows, _: InfoNCELoss()(rows, rows), 3, lambda step: draw(step, 3))
    assert text.startswith("InfoNCELoss: the queries are the keys: ")
    forget_hints()
    assert texts_of(lambda rows, _: InfoNCELoss()(rows, rows.clone()), 3, lambda step: draw(step, 3)) == []


@pytest.mark.parametrize(("kind", "calls"), [*((kind, 1) for kind in QUEUES), ("AP", 8)])
def test_a_queue_that_is_made_in_every_step_warns_once(kind, calls):
    """The control: no queue, and a queue for more calls than those of a step."""
    make, of_row = QUEUES[kind]

    def texts(calls, **options):
        forget_hints()
        losses = []

        def call(scores, _):
            losses.append(losses[-1] if len(losses) % calls else make(**options))
            return call_of(losses[-1], of_row)(scores, None)

        return texts_of(call, 21 * calls, lambda step: draw(step, 3))

    (text,) = texts(calls)
    assert "a loss with a queue was constructed 20 times in a row" in text
    assert texts(calls, queue_size=0) == []
    assert calls == 1 or texts(9) == []


@pytest.mark.parametrize(("make", "of_row"), QUEUES.values(), ids=QUEUES)
def test_training_in_eval_mode_with_a_queue_warns_once(make, of_row):
    """The control: no backward, 19 steps, an empty queue, no queue, a queue that eval mode uses, or train mode."""

    def texts(steps=30, *, trained=True, use=lambda value: value, mode=torch.enable_grad, **options):
        forget_hints()
        queue_in_eval = options.pop("queue_in_eval", False)
        loss = make(**options)
        loss.queue_in_eval = queue_in_eval
        calls = [loss.train, lambda: call_of(loss, of_row)(draw(9, 3), None)][: 2 * trained]
        for call in calls:
            call()
        loss.eval()
        return texts_of(mode()(lambda *rows: use(call_of(loss, of_row)(*rows))), steps, lambda step: draw(step, 3))

    (text,) = texts()
    assert "20 steps in a row were trained in eval mode" in text
    assert texts(20) == texts(use=torch.detach) == texts(trained=False) == texts(queue_in_eval=True) == []
    assert texts(queue_size=0) == texts(validate_args=False) == texts(mode=torch.no_grad) == []


RIGHT_USES = {
    "queue": (partial(AP, queue_size=64), {}),
    "wide scores": (partial(AP, queue_size=0), {"make_scores": lambda step: 10 * draw(step)}),
    "two labels": (
        partial(SmoothAPLoss, 2, temperature=0.1, multi_hot=True),
        {"make_scores": lambda s: draw(s, 2), "targets": draw(9, 2) > 1},
    ),
}


@pytest.mark.parametrize(("make", "steps"), RIGHT_USES.values(), ids=RIGHT_USES)
def test_right_use_does_not_warn(make, steps):
    assert texts_of(make(), 40, **steps) == []


EACH = torch.arange(ROWS)
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
        forget_hints()
        loss = make()
        assert texts_of(call_of(loss, of_row), steps, lambda step: draw(step, 3)) == []
    forget_hints()
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
        forget_hints()
        differing = [(column + rank) % 2 for column in alone[:-1]]  # targets or relevances
        of_row = [*differing, alone[-1] + shift]
        texts = texts_of(call_of(make(), of_row), 20, lambda step: draw(100 * step + rank, 3))
        texts = [text for text in texts if "the labels on every rank" not in text]
        assert len(texts) == number
        assert all(fix in text for text in texts)


# Loss, and what it is called with.
POOLED = {
    "AP": (AP, (every(5),)),
    "NDCG per query": (NDCGLoss, (EACH, PAIRS)),
    "SupCon": (SupConLoss, (PAIRS,)),
    "Retrieval": (RetrievalSmoothAPLoss, (PAIRS,)),
    "InfoNCE": (InfoNCELoss, (draw(1, 3).detach(),)),
}


@pytest.mark.parametrize("kind", POOLED)
@on_ranks()
def test_rows_that_all_ranks_share_warn_once(rank, kind):
    """Also rows that torch has gathered; not rows of the ranks' own, equal rows, or with other targets.

    Not where they are the same in one call alone, and not where one rank has the same rows twice and the others none.
    """
    make, of_row = POOLED[kind]
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
        forget_hints()
        # A score that is 0 everywhere is a hint of its own, and so is a pool without a positive.
        texts = [text for text in texts_of(call_of(make(), columns), 5, make_scores) if "the same rows" in text]
        assert len(texts) == number, (number, texts)
        assert all(f"every row is counted {world_size} times" in text for text in texts)
    assert texts_of(call_of(make(validate_args=False), of_row), 3, lambda step: draw(step, 3)) == []
    lone = make(group=dist.new_group([rank], use_local_synchronization=True), gradient_reduction=world_size)
    forget_hints()
    texts = texts_of(call_of(lone, own), 5, lambda step: draw(step, 3))
    assert not any("the same rows" in text for text in texts)


def calls_with_candidates(rank, seed, count):
    """Return the calls of embeddings (N, D) with more candidates, of ``count`` rows of this rank, by argument."""
    rows = draw(seed, 3, count).detach()
    others = draw(100 + seed + rank, 3, len(PAIRS[rank:])).detach()  # keys and guides of the ranks' own, uneven
    labels = torch.arange(count)
    among = {"reference": rows, "reference_labels": labels}
    return {
        "negatives": (InfoNCELoss, lambda loss, x: loss(x[rank:], others, rows)),
        "reference": (SupConLoss, lambda loss, x: loss(x[rank:], PAIRS[rank:], **among)),
        "reference of queries": (RetrievalSmoothAPLoss, lambda loss, x: loss(x[rank:], PAIRS[rank:], **among)),
        "mask": (InfoNCELoss, lambda loss, x: loss(x[:count], draw(9 + rank, 3, count).detach(), mask=(rows, rows))),
    }


@pytest.mark.parametrize("what", ["negatives", "reference", "reference of queries", "mask"])
@on_ranks()
def test_candidates_that_all_ranks_share_warn_once(rank, what):
    """The control: other ones on each rank, in another call, or another number of them."""

    def texts(seed, count=ROWS):
        forget_hints()
        loss, step = calls_with_candidates(rank, 0, 2)[what][0](), iter(range(100))
        call = lambda x, _: calls_with_candidates(rank, seed(next(step)), count)[what][1](loss, x)  # noqa: E731
        return texts_of(call, 5, lambda step: draw(100 * step + rank, 3))

    (text,) = texts(lambda step: 0)
    assert f"ranks passed the same {what.split()[0]}, so" in text
    assert texts(lambda step: 1000 + step + 50 * rank) == texts(lambda step: 0, ROWS - rank) == []
    assert texts(lambda step: 0 if step % 4 == 0 else 1000 + step + 50 * rank) == []


# Loss, and how it is called with labels (N,) of the embeddings (N, D).
LABELLED = {
    "SupCon": (SupConLoss, lambda loss, x, labels: loss(torch.stack([x, x.roll(1, 1)], 1), labels)),
    "SupCon, one view": (SupConLoss, lambda loss, x, labels: loss(x, labels)),
    "InfoNCE": (InfoNCELoss, lambda loss, x, labels: loss(x, x.roll(1, 1), labels=labels)),
    "Retrieval": (RetrievalSmoothAPLoss, lambda loss, x, labels: loss(x, labels)),
}


@pytest.mark.parametrize("kind", LABELLED)
@on_ranks()
def test_labels_that_number_the_rows_of_each_rank_warn_once(rank, kind):
    """On uneven ranks. The control: the numbers of a data set, classes, in another call, and one rank alone."""
    make, call = LABELLED[kind]
    count = 24 - 5 * rank
    own = torch.arange(count)
    lone = partial(make, group=dist.new_group([rank], use_local_synchronization=True), gradient_reduction=3)
    cases = [
        (1, make, lambda step: own),
        (0, make, lambda step: own + 24 * rank),
        (0, make, lambda step: own if rank else own // 2),
        (0, make, lambda step: own if step % 4 == 0 else own + 24 * rank),
        (0, partial(make, validate_args=False), lambda step: own),
        (0, lone, lambda step: own),
    ]
    for number, make_loss, labels in cases:
        forget_hints()
        loss, step = make_loss(), iter(range(100))
        texts = texts_of(
            lambda x, _, loss=loss, step=step, labels=labels: call(loss, x, labels(next(step))),
            5,
            lambda step: draw(100 * step + rank, 3, count),
        )
        texts = [text for text in texts if "the labels on every rank are 0, 1, 2, ..." in text]
        assert len(texts) == number


@pytest.mark.parametrize(
    ("inside", "number"),
    [
        ({1}, 0),  # an untrained network whose scores happen to be positive
        ({16}, 0),  # a batch of a long run
        ({8, 16, 32}, 0),
        ({1, 2}, 1),
        ({*range(1, 33)} - {2, 3, 4}, 0),
        ({*range(1, 33)} - {3}, 1),  # calls 1, 2, 4, 8, ... are looked at
    ],
)
def test_logits_between_0_and_1_in_some_calls_are_no_probabilities(inside, number):
    """The scores of the other calls are logits."""
    texts = texts_of(AP(), 40, lambda step: draw(step).sigmoid() if step + 1 in inside else draw(step))
    assert len(texts) == number


def test_probabilities_of_a_network_that_is_untrained_at_first_warn_later():
    """The control: the same scores, lower by 0.6."""
    for shift, number in ((0.0, 1), (-0.6, 0)):
        texts = texts_of(AP(), 40, lambda step, shift=shift: (0.1 * (step + 1) * draw(step)).sigmoid() + shift)
        assert len(texts) == number


def test_nineteen_calls_without_a_positive_do_not_warn():
    loss = AP(queue_size=0)
    # A run without positives is seen from call 1, 2, 4, ..., 64 on.
    for steps, targets in ((19, NONE), (44, every(5)), (19, NONE)):
        assert texts_of(loss, steps, targets=targets) == []
    (text,) = texts_of(loss, 1, targets=NONE)
    assert "20 calls in a row" in text


@pytest.mark.parametrize("again", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_a_copy_of_a_loss_does_not_warn_again(again):
    loss = AP()
    assert len(texts_of(loss, 3, lambda step: draw(step).sigmoid())) == 1
    assert texts_of(again(loss), 5, lambda step: draw(step).sigmoid()) == []


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
    assert len(texts) == (fix == "num_classes=1")  # it reads no value
