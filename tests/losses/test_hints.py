"""A ranking loss that is probably misused warns once, names the fix, and never warns about what is right."""

import copy
import logging
import pickle
import warnings
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fullrank import (
    HardNegativeCrossEntropyLoss,
    LossWarmupWrapper,
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
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


def texts_of(loss, steps, make_scores=draw, targets=None, add=None):
    """Train for some steps, and return the texts of the warnings."""
    targets = every(5) if targets is None else targets
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            scores = make_scores(step)
            value = loss(scores, targets)
            value = value if add is None else value + add(scores, targets)
            if value.requires_grad:
                value.backward()
    assert all(one.filename == __file__ for one in caught), "a warning points at the line that calls the loss"
    return [str(one.message) for one in caught]


def cross_entropy(scores, targets):
    return binary_cross_entropy_with_logits(scores[:, 0], targets.float())


NONE = torch.zeros(ROWS, dtype=torch.long)
MISUSES = {
    "no positive": (lambda **o: SmoothAPLoss(1, temperature=0.1, queue_size=0, **o), {"targets": NONE}, "sampler"),
    "small pool": (
        lambda **o: RecallAtQuantileLoss(1, quantile=0.004, temperature=1.0, queue_size=0, **o),
        {},
        "1/quantile = 250",
    ),
    "small band": (
        lambda **o: PAUCAtBudgetLoss(1, beta=0.004, surrogate="pairwise", queue_size=0, **o),
        {},
        "1/beta = 250",
    ),
    "lost positives": (lambda **o: SmoothAPLoss(1, temperature=1e-6, **o), {}, "temperature=1e-06"),
    "probabilities": (
        lambda **o: SmoothAPLoss(1, temperature=0.1, **o),
        {"make_scores": lambda s: draw(s).sigmoid()},
        "sigmoid",
    ),
    "two columns": (
        lambda **o: SmoothAPLoss(2, temperature=0.1, **o),
        {"make_scores": lambda s: draw(s, 2)},
        "num_classes=1",
    ),
    "negatives alone": (
        lambda **o: SmoothAPLoss(1, temperature=0.1, queue_size=1024, queue_keep="negatives", **o),
        {"targets": every(50)},
        "cross-entropy",
    ),
}


@pytest.mark.parametrize(("make", "steps", "fix"), MISUSES.values(), ids=MISUSES)
def test_a_misuse_warns_once_and_names_the_fix(make, steps, fix):
    (text,) = texts_of(make(), 40, **steps)
    assert fix in text
    assert text.startswith(("SmoothAPLoss: ", "RecallAtQuantileLoss: ", "PAUCAtBudgetLoss: "))


@pytest.mark.parametrize(("make", "steps", "fix"), MISUSES.values(), ids=MISUSES)
def test_nothing_warns_without_checks_or_in_eval(make, steps, fix):
    assert texts_of(make(validate_args=False), 40, **steps) == []
    assert texts_of(make().eval(), 40, **steps) == []


@pytest.mark.parametrize(
    ("loss", "steps"),
    [
        (SmoothAPLoss(1, temperature=0.1), {}),
        (SmoothAPLoss(1, temperature=0.1, queue_size=0), {"make_scores": lambda step: 10 * draw(step)}),
        (RecallAtQuantileLoss(1, quantile=0.05, temperature=0.1, queue_size=0), {}),
        (RecallAtQuantileLoss(1, quantile=0.004, temperature=0.1, queue_size=1024), {}),  # the queue is large enough
        (PAUCAtBudgetLoss(1, beta=0.05, surrogate="pairwise", queue_size=0), {}),
        (PAUCAtBudgetLoss(1, beta=0.004, queue_size=0), {}),  # the soft maximum has no band
        (
            SmoothAPLoss(2, temperature=0.1, multi_hot=True),
            {"make_scores": lambda s: draw(s, 2), "targets": draw(9, 2) > 1},
        ),
        (
            SmoothAPLoss(1, temperature=0.1, queue_size=1024, queue_keep="negatives"),
            {"targets": every(50), "add": cross_entropy},
        ),
    ],
    ids=[
        "queue",
        "wide scores",
        "recall",
        "recall with a queue",
        "pauc",
        "pauc dro",
        "two labels",
        "negatives and cross-entropy",
    ],
)
def test_right_use_does_not_warn(loss, steps):
    assert texts_of(loss, 40, **steps) == []


def test_a_network_before_its_training_may_score_between_0_and_1():
    assert texts_of(SmoothAPLoss(1), 1, make_scores=lambda step: 0.3 + 0.05 * draw(step)) == []


def test_a_small_last_batch_does_not_warn():
    loss = RecallAtQuantileLoss(1, quantile=0.02, temperature=1.0, queue_size=0)
    for rows in (ROWS, ROWS, 24) * 3:
        assert (
            texts_of(loss, 1, make_scores=lambda step, rows=rows: draw(step, rows=rows), targets=every(5, rows)) == []
        )


@pytest.mark.parametrize("is_control", [False, True])
def test_a_loss_of_weight_0_has_no_gradient_to_give(monkeypatch, is_control):
    """The control does not see by how much the loss was multiplied."""
    watch = Hints._watch_positives

    def blind(self, pool, per_class, temperature):
        watch(self, pool, per_class._replace(values=per_class.values.detach()), temperature)

    if is_control:
        monkeypatch.setattr(Hints, "_watch_positives", blind)
    loss = SmoothAPLoss(1, temperature=0.1)
    texts = []
    for _ in range(5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (0.0 * loss(draw(0), every(5))).backward()
        texts += [str(one.message) for one in caught]
    assert ["live positives had no gradient" in text for text in texts] == [True] * is_control


def test_a_pointwise_loss_needs_no_other():
    loss = HardNegativeCrossEntropyLoss(1, queue_size=1024, queue_keep="negatives")
    assert texts_of(loss, 40, make_scores=lambda step: draw(step) - 3, targets=every(50)) == []


def test_nineteen_calls_without_a_positive_do_not_warn():
    loss = SmoothAPLoss(1, temperature=0.1, queue_size=0)
    for targets in (NONE, every(5), NONE):
        assert texts_of(loss, 19, targets=targets) == []
    (text,) = texts_of(loss, 1, targets=NONE)
    assert "20 calls in a row" in text


def test_positives_that_are_ranked_well_need_no_gradient():
    loss = SmoothAPLoss(1, temperature=1e-4)
    scores = draw(0).detach() + 100.0 * every(5)[:, None]
    assert texts_of(loss, 10, make_scores=lambda step: scores.clone().requires_grad_()) == []


@pytest.mark.parametrize("is_control", [False, True])
def test_a_surrogate_without_a_temperature_does_not_blame_it(monkeypatch, is_control):
    """One positive of many is below all negatives, and has all the gradient."""
    targets = 1 - every(5)
    scores = 100.0 * targets[:, None]
    scores[1] = -1000.0
    if is_control:
        monkeypatch.setattr(PAUCAtBudgetLoss, "_width_of_step", RankingLoss._width_of_step)
    loss = PAUCAtBudgetLoss(1, queue_size=0)
    texts = texts_of(loss, 10, make_scores=lambda step: scores.clone().requires_grad_(), targets=targets)
    assert ["temperature=0.1 is too small" in text for text in texts] == [True] * is_control


def test_a_schedule_with_a_pointwise_loss_is_an_anchor():
    class Focal(SigmoidFocalLoss):
        def forward(self, inputs, targets):
            return super().forward(inputs, targets.float()[:, None])

    main = SmoothAPLoss(1, temperature=0.1, queue_size=1024, queue_keep="negatives")
    loss = LossWarmupWrapper(Focal(), main, warmup_steps=1, final_main_weight=0.9, temp_start=0.1, temp_end=0.1)

    def make_scores(step):
        loss.on_train_batch_start(step)
        return draw(step)

    assert texts_of(loss, 40, make_scores=make_scores, targets=every(50)) == []


@pytest.mark.parametrize("again", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_a_copy_of_a_loss_does_not_warn_again(again):
    loss = RecallAtQuantileLoss(1, quantile=0.004, temperature=1.0, queue_size=0)
    assert len(texts_of(loss, 3)) == 1
    assert texts_of(again(loss), 5) == []


class Late:
    """Stands for a device: what is copied from it arrives at the third question, and is nonsense before."""

    def __init__(self):
        self.copies, self.most_at_once = [], 0

    def start(self, values):
        host, left = torch.full_like(values, -1, dtype=torch.float64), iter([False, False])

        def has_arrived():
            done = next(left, True)
            if done:
                host.copy_(values)
                self.copies.remove(host_id)
            return done

        host_id = object()
        self.copies.append(host_id)
        self.most_at_once = max(self.most_at_once, len(self.copies))
        return Copy(has_arrived, host)


@pytest.mark.parametrize(("make", "steps", "fix"), MISUSES.values(), ids=MISUSES)
def test_values_that_arrive_late_give_the_same_hint(monkeypatch, make, steps, fix):
    late = Late()
    monkeypatch.setattr(hints, "start_copy", late.start)
    (text,) = texts_of(make(), 120, **steps)
    assert fix in text
    assert 1 <= late.most_at_once < 20, "what has arrived is read"


def test_control_nonsense_is_read_where_nothing_is_waited_for(monkeypatch):
    """A loss that is used rightly, of which every number is read as 0."""
    monkeypatch.setattr(hints, "start_copy", lambda values: Copy(lambda: True, torch.zeros_like(values)))
    assert "no class was valid" in texts_of(SmoothAPLoss(1, temperature=0.1), 40)[0]


@pytest.mark.parametrize(("make", "steps", "fix"), MISUSES.values(), ids=MISUSES)
def test_a_device_without_events_gives_no_hint_that_would_wait(monkeypatch, make, steps, fix):
    monkeypatch.setattr(hints, "start_copy", lambda values: None)
    texts = texts_of(make(), 40, **steps)
    assert len(texts) == (fix in ("1/quantile = 250", "1/beta = 250", "num_classes=1"))  # these read no value


def test_numbers_reach_the_host(device):
    values = torch.arange(3.0, device=device)
    copy_ = hints.start_copy(values)
    assert copy_ is not None
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    assert copy_.has_arrived()
    assert copy_.host.device.type == "cpu"
    assert copy_.host.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("make", "steps", "fix"), MISUSES.values(), ids=MISUSES)
def test_a_misuse_on_a_device_gives_the_same_hint(device, make, steps, fix):
    steps = dict(steps)
    draw_scores, targets = steps.pop("make_scores", draw), steps.pop("targets", every(5))
    leaves = [draw_scores(step).detach().to(device).requires_grad_() for step in range(60)]
    (text,) = texts_of(make().to(device), 60, leaves.__getitem__, targets.to(device), **steps)
    assert fix in text


# Of two ranks, how many of 100 rows are positives; whether cross-entropy is added; which ranks have a hint.
SHARES = {
    "all rows push": ((2, 2), False, [1, 1]),
    "next to cross-entropy": ((2, 2), True, [0, 0]),
    "positives on one rank, next to cross-entropy": ((0, 100), True, [0, 0]),
    "positives on one rank, a balanced pool": ((0, 100), False, [0, 0]),
    "no rows on one rank": ((4, None), False, [1, 0]),
}


def hints_over_ranks(rank, positives, add, queue_size, columns=True):
    """Train a loss with queued negatives on two ranks, and return how often each warned of a push.

    Without ``columns`` the scores are (N,): a difference of (N,) and (N, 1) would be (N, N).
    """
    loss = SmoothAPLoss(1, temperature=0.1, queue_size=queue_size, queue_keep="negatives")
    rows = 0 if positives[rank] is None else 100
    targets = (torch.arange(rows) < (positives[rank] or 0)).long()

    def make_scores(step):
        scores = draw(2 * step + rank, rows=rows)
        return scores if columns else scores[:, 0]

    def pointwise(scores, targets):
        return cross_entropy(scores.view(-1, 1), targets)

    texts = texts_of(loss, 40, make_scores, targets, pointwise if add else None)
    return sum("raises all scores together" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARES)
def test_a_push_is_measured_over_the_rows_of_all_ranks(pool_of_two, case):
    positives, add, expected = SHARES[case]
    queue_size = 20 if "balanced" in case else 1024
    assert pool_of_two(hints_over_ranks, positives, add, queue_size) == expected
    assert pool_of_two(hints_over_ranks, positives, add, queue_size, False) == expected


@pytest.mark.parametrize("name", ["small pool", "negatives alone", "probabilities"])
def test_scores_without_a_class_dimension_give_the_same_hints(name):
    make, steps, _ = MISUSES[name]
    make_scores = steps.get("make_scores", draw)
    columns, flat = (
        texts_of(make(), 40, **{**steps, "make_scores": scores})
        for scores in (make_scores, lambda step: make_scores(step)[:, 0])
    )
    assert flat == columns


def own_rows_alone(rank, *case):
    """Do what ``hints_over_ranks`` does, with the measure of one process."""

    def watch(self, logits, gathered):
        logits.register_hook(lambda gradient: self._measure_push(gradient.detach().double()))

    with mock.patch.object(Hints, "_watch_push", watch):
        return hints_over_ranks(rank, *case)


def test_control_a_push_of_the_own_rows_alone_blames_a_balanced_pool(pool_of_two):
    assert pool_of_two(own_rows_alone, (0, 100), False, 20) == [0, 1]


def without_gradients(rank):
    """Return the losses of three steps, the second of scores that ask for a gradient but under no_grad."""
    loss, found = SmoothAPLoss(1, temperature=0.1, queue_size=20, queue_keep="negatives"), []
    for step in range(3):
        with torch.set_grad_enabled(step != 1):
            found.append(loss(draw(2 * step + rank, rows=40), every(4, rows=40)))
    return [(value.item(), value.requires_grad) for value in found]


def test_a_forward_without_gradients_over_ranks_is_not_watched(pool_of_two):
    first, second = pool_of_two(without_gradients)
    assert first == second
    assert [requires_grad for _, requires_grad in first] == [True, False, True]


def as_errors(rank):
    """Train on two ranks, of which only the first has rows; return the hints logged, and what was raised."""
    texts, raised, log = [], None, logging.getLogger(hints.__name__)
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    log.addHandler(handler)
    loss = SmoothAPLoss(1, temperature=0.1, queue_size=1024, queue_keep="negatives")
    rows = 0 if rank else 100
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(40):
                loss(draw(2 * step + rank, rows=rows), (torch.arange(rows) < 4).long()).backward()
    except Exception as error:
        raised = repr(error)
    finally:
        log.removeHandler(handler)
    return sum("raises all scores together" in text for text in texts), raised


def test_a_hint_of_one_rank_stops_no_rank_where_warnings_are_errors(pool_of_two):
    """The other rank would wait for it in the next step."""
    assert pool_of_two(as_errors) == [(1, None), (0, None)]


def test_a_warning_does_not_change_the_loss():
    values = []
    for validate_args in (True, False):
        loss = RecallAtQuantileLoss(1, quantile=0.004, queue_size=0, temperature=1e-6, validate_args=validate_args)
        scores = draw(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = loss(scores, every(5))
            value.backward()
        values.append((value.detach(), scores.grad))
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
