"""The contract of every loss, as tables: what is refused and in which words, what warns, which forms of inputs are one.

Each loss has a row in loss_cases.py, with the values that its arguments refuse. What is refused of rows is in
conformance/refusals.py.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from loss_cases import FORMS, IGNORED, LOSSES, NAN, POOLED, Form, Loss, Settings, on_devices
from on_ranks import on_ranks
from refusals import BINARY, LOGITS, ONES, TARGETS, Refusal, T, V, ends, refused_rows
from torch import Tensor, nn
from workers import error_of

import fullrank.metrics
from fullrank import losses
from fullrank.losses import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    InfoNCELoss,
    LossWarmupWrapper,
    NDCGLoss,
    RetrievalSmoothAPLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
    SoftmaxFocalLoss,
    SupConLoss,
    causal_lm_loss,
    sigmoid_focal,
    smooth_ap,
    softmax_focal,
)
from fullrank.losses.base import GroupOptions
from fullrank.losses.pooled.base import PoolOptions

TOKENS, NEXT = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)


# --- what is refused -------------------------------------------------------------------------------------------------


def refusals(loss: Loss, is_module: bool) -> Iterator[tuple[Form, Refusal]]:
    """Yield what a module or a pure function refuses, with the form that is changed."""
    for argument in loss.arguments if is_module else loss.of_function:
        entry = loss.argument(argument)
        for error, values in ((V, entry.bad), (T, entry.wrong)):
            yield from ((loss.form_with(argument), Refusal(error, argument, {argument: bad})) for bad in values)
    for argument, changes, given in loss.together:
        if is_module or changes.keys() <= loss.of_function:
            yield loss.first, Refusal(V, argument, changes, given)
    for values in refused_rows(loss, is_module):
        yield from ((loss.first, refusal) for refusal in values)


def refused(refusal: Refusal) -> Any:
    """Return a context in which the error of a refusal is raised, with a message of the one form of all."""
    return pytest.raises(refusal.error, match=f"^{refusal.pattern}")


def state_of(module: nn.Module) -> object:
    """Return all that a call of a loss may change."""
    if not isinstance(module, losses.RankingLoss):
        return None
    return module.queue.position, int(module.queue.checksum), module._num_draws, getattr(module, "temperature", None)


def check_refused(form: Form, refusal: Refusal, is_module: bool) -> None:
    call = form.arguments(LOGITS, TARGETS, BINARY)
    if not is_module:
        with refused(refusal):
            form.loss.function(**{**call, **form.settings, **refusal.changes})
        return
    kept = form._replace(settings={}) if form.loss.parts else form  # a schedule changes what fits
    if refusal.changes.keys() <= form.loss.arguments:
        with refused(refusal):
            form.loss.module(**{**kept.given(num_classes=3, queue_size=8), **refusal.changes})
        return
    module = form.make(num_classes=3, queue_size=8)
    module(**call)
    before = state_of(module)
    with refused(refusal):
        module(**{**call, **refusal.changes})
    assert state_of(module) == before


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_refused(name: str) -> None:
    """The message has the one form of all messages, and a refused call leaves the loss as it was."""
    loss = LOSSES[name]
    for is_module in [is_module for is_module in (True, False) if (loss.module if is_module else loss.function)]:
        cases = [*refusals(loss, is_module)]
        assert len(cases) > 3
        for case in cases:
            try:
                check_refused(*case, is_module)
            except (Exception, pytest.fail.Exception) as failure:
                raise AssertionError(f"of {case}, {is_module=}: {failure}") from failure


SUMS = {"queries": torch.ones(3), "keys": torch.ones(5), "weights": torch.ones(5, 1), "temperature": 1.0}


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        *(("temperature", {"temperature": bad}) for bad in (0.0, -1.0, NAN, 5e-324)),
        ("method", {"method": "fast"}),
        *(("queries, keys, weights", {"weights": bad}) for bad in (torch.ones(5), torch.ones(4, 1))),
        *(("queries, keys, weights", {"queries": bad}) for bad in (torch.ones(2, 3), torch.tensor(1.0))),
    ],
    ids=str,
)
def test_what_the_sums_of_sigmoids_refuse(argument: str, changes: dict[str, Any]) -> None:
    with refused(Refusal(V, argument, changes)):
        losses.sigmoid_sums(**{**SUMS, **changes})


@pytest.mark.parametrize("name", POOLED)
def test_what_is_refused_at_the_forward(name: str) -> None:
    form = POOLED[name].first
    hot = form.make(num_classes=3, queue_size=8, multi_hot=True)
    for targets, given in ((TARGETS, r"\(8,\)"), (torch.full((8, 3), 2), "2"), (torch.full((8, 3), 0.5), r"0\.5")):
        with pytest.raises(ValueError, match=rf"^targets: expected .+, got .*{given}"):
            hot(LOGITS, targets)
    assert len(hot.queue) == 0
    trusting = form.make(num_classes=3, queue_size=8, validate_args=False)
    trusting(LOGITS, ends(TARGETS, 7))  # values are not looked at
    with pytest.raises(ValueError, match=r"^targets: expected"):  # metadata always is
        trusting(LOGITS, TARGETS[:3])


@pytest.mark.parametrize("name", [n for n, loss in LOSSES.items() if "gather_distributed" in loss.arguments])
def test_gathering_without_a_process_group_is_refused(name: str) -> None:
    form = LOSSES[name].first
    call = form.arguments(LOGITS, TARGETS, BINARY)
    module = form.make(num_classes=3, gather_distributed=True)
    with pytest.raises(RuntimeError, match=r"^gather_distributed=True: expected .+, got None"):
        module(**call)
    for value in (None, False):  # may be changed between steps
        module.gather_distributed = value
        assert bool(module(**call).isfinite())
    with pytest.raises(TypeError, match=r"^gather_distributed: expected .+, got 'yes'"):
        module.gather_distributed = "yes"


def in_warmup(main: nn.Module) -> LossWarmupWrapper:
    """Return a wrapper that uses the cross-entropy of torch."""
    return LossWarmupWrapper(nn.CrossEntropyLoss(), main, warmup_steps=1).eval()


# what a message advises: the call
ADVICE: dict[str, Callable[[], object]] = {
    r"weight: expected shape \(3,\), one weight per class": lambda: CrossEntropyLoss(ONES)(LOGITS, TARGETS),
    "ignore_index is not supported for floating point": lambda: CrossEntropyLoss(ignore_index=2)(LOGITS, LOGITS * 0),
    r"broadcast to \(8, 3\).*sample_weight": lambda: BCEWithLogitsLoss(ONES)(LOGITS, LOGITS * 0),
    r"pos_weight: .* broadcast to \(8, 3\)": lambda: BCEWithLogitsLoss(None, LOGITS[None])(LOGITS, LOGITS * 0),
    r"got .*\(8, 3\)\. Flatten leading dimensions; for": lambda: SmoothAPLoss(2)(LOGITS, BINARY),
    r"Pass float\(temperature\)\.": lambda: SmoothAPLoss(3, temperature=torch.tensor(0.1)),
    "max_pool_size: expected None in a call with indexes, got 100": lambda: SmoothAPLoss(1, max_pool_size=100)(
        LOGITS[:, :1], BINARY, indexes=TARGETS
    ),
    r"0, 1 or ignore_index=-100, got 0\.3.* SigmoidFocalLoss for soft": lambda: smooth_ap(ONES, ONES * 0.3),
    r"got -1\.0\. Use \(targets > 0\)\.long\(\) for targets of -1 and \+1": lambda: smooth_ap(ONES, -ONES),
    r"got -1\. Use \(targets > 0\)\.long\(\).* ignore_index=-1": lambda: smooth_ap(ONES, -ONES.long()),
    r"got 2\. Use .*positives, num_classes=C": lambda: smooth_ap(ONES, 2 * ONES.long()),
    r"got 2\. Use \(targets > 0\)\.long\(\) if all but 0 are positives\.$": lambda: smooth_ap(
        LOGITS, 2 * LOGITS.long() ** 0, multi_hot=True
    ),
    r"got nan\. Rows without a label .*nan_to_num\(-100\)": lambda: smooth_ap(ONES, ONES * NAN),
    r"got 2\.0\. Use .*num_classes=C": lambda: smooth_ap(ONES, ONES * 2),
    "holds the indices of 257 classes, got a bfloat16 tensor.*Keep class indices as integers": lambda: smooth_ap(
        torch.zeros(3, 257), torch.zeros(3, dtype=torch.bfloat16)
    ),
    "at least two classes in dim 1.*For one logit use SigmoidFocalLoss": lambda: softmax_focal(
        LOGITS[:, :1], TARGETS * 0
    ),
    r"at least two classes .*one logit is always 0. Use BCEWithLogitsLoss\(": lambda: in_warmup(SmoothAPLoss(1))(
        LOGITS[:, :1], BINARY
    ),
    r"targets: expected class indices in \[0, 2\).*got 0\.5": lambda: in_warmup(SmoothAPLoss(2))(
        LOGITS[:, :2], BINARY * 0.5
    ),
    r"logits: expected a tensor, got a tuple of length 1\. Index it: logits\[0\]\.": lambda: smooth_ap((ONES,), ONES),
    'num_items: expected None with reduction="sum".*, got 3': lambda: causal_lm_loss(
        TOKENS, NEXT, reduction="sum", num_items=3
    ),
    "got the keyword num_item. Use num_items": lambda: causal_lm_loss(TOKENS, NEXT, num_item=3),
    "Use ignore_index": lambda: causal_lm_loss(TOKENS, NEXT, ignore_idx=3),
    "^SmoothAPLoss: got an unexpected keyword argument 'nope'$": lambda: SmoothAPLoss(nope=3),
    r"quantile: .* got 5\. 5 % is 0\.05\.$": lambda: losses.RecallAtQuantileLoss(quantile=5),
    r"alpha, beta: .*\(0\.0, 5\)\. 5 % is 0\.05\.$": lambda: losses.PAUCAtBudgetLoss(beta=5),
    "class_weight: expected None next to weight, got 'balanced'": lambda: CrossEntropyLoss(
        ONES, class_weight="balanced"
    ),
    "class_weight: expected one of 'balanced', got 'equal'": lambda: CrossEntropyLoss("equal"),
    r"^SmoothAPLoss\.forward\(\) missing 1 required .* 'targets'$": lambda: SmoothAPLoss()(ONES),
    r"^Own\.forward\(\) missing 1 required .* 'targets'$": lambda: type("Own", (SmoothAPLoss,), {})()(ONES),
    r"^BCEWithLogitsLoss\.forward\(\) got an unexpected .* 'weights'$": lambda: BCEWithLogitsLoss()(
        ONES, ONES, weights=ONES
    ),
    r"^InfoNCELoss\.forward\(\) missing 1 required .* 'keys'$": lambda: InfoNCELoss()(LOGITS),
    r"indexes: .*Use torch\.as_tensor\(numpy\.unique\(indexes, return_inverse=True\)\[1\]\)": lambda: SmoothAPLoss()(
        ONES, BINARY, indexes=["a", "b"] * 4
    ),
    r"labels: .*as_tensor\(numpy\.unique\(labels, return_inverse=True\)\[1\]\)": lambda: SupConLoss()(
        LOGITS, numpy.array(["a", "b"] * 4)
    ),
    "at most 1000 with exponential gain": lambda: NDCGLoss(gain="exponential")(ONES, TARGETS + 2000),
    r"argument 'sel'$": lambda: SmoothAPLoss(sel=3),
    r"keys: expected shape .*If these are labels, use SupConLoss": lambda: InfoNCELoss()(LOGITS, TARGETS),
    r"keys: expected shape .*got a float32.*SupConLoss": lambda: InfoNCELoss()(LOGITS, TARGETS.float()),
    r"flatten\(0, 1\) and labels.repeat_interleave\(1\) if": lambda: RetrievalSmoothAPLoss()(LOGITS[:, None], TARGETS),
    r"\(8, 0, 3\)\. Use embeddings.flatten\(0, 1\)": lambda: SupConLoss()(LOGITS[:, None][:, :0], TARGETS),
    r"labels: expected shape \(4,\).*one label per row": lambda: SupConLoss()(LOGITS.view(4, 2, 3), TARGETS),
    r"queue_size: expected 0 with several labels a row, got 7": lambda: SupConLoss(queue_size=7)(LOGITS, LOGITS > 0),
    "reference_labels: expected as many columns as labels, got a bool": lambda: SupConLoss()(
        LOGITS, TARGETS, reference=LOGITS, reference_labels=LOGITS > 0
    ),
    r"shape \(N, D\) or \(N, V, D\), got .*flatten\(2\) if dim 1 is views, else": lambda: SupConLoss()(
        LOGITS.view(4, 2, 3, 1), TARGETS[:4]
    ),
    "^RetrievalSmoothAPLoss: too many positional arguments$": lambda: RetrievalSmoothAPLoss(0.1, "sum", -1, None, 5),
}


@pytest.mark.parametrize("text", ADVICE)
def test_messages_say_what_to_do(text: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
        ADVICE[text]()


# By the kind of a loss, or its name: an argument, and values that only validation refuses. All take weights too.
UNCHECKED: dict[str, tuple[str, Tensor]] = {
    "scores": ("targets", ends(TARGETS, 7)),
    "queries": ("targets", ends(BINARY, 7)),
    "grades": ("relevance", ends(TARGETS.double(), -0.5)),
    "elements": ("targets", LOGITS - 1),
    "cross_entropy": ("targets", LOGITS - 1),  # shares of the classes
}


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if "validate_args" in form.loss.arguments])
def test_values_are_not_looked_at_without_validation(name: str) -> None:
    """In the module and the pure function: a target that is out of range, and a weight."""
    form = FORMS[name]
    given = form.arguments(LOGITS, TARGETS, BINARY)
    row = UNCHECKED.get(form.loss.name) or UNCHECKED.get(form.loss.kind)
    for argument, bad in [("sample_weight", ends(ONES, -1.0)), *([row] if row else [])]:
        for is_module in {True, not (form.is_function and "validate_args" in form.loss.of_function)}:
            trusting, checking = (form.call(is_module, num_classes=3, validate_args=way) for way in (False, True))
            assert isinstance(trusting(**{**given, argument: bad}), Tensor)
            with pytest.raises(ValueError, match=f"^(\\w+, )?{argument}: expected "):
                checking(**{**given, argument: bad})


def test_labels_of_a_language_model_are_not_looked_at_without_validation() -> None:
    labels = NEXT.clone()
    labels[:, 0] = 99  # is no target
    causal_lm_loss(TOKENS, labels)
    labels[:, 1] = 99
    with pytest.raises(IndexError):  # left to torch
        causal_lm_loss(TOKENS, labels, validate_args=False)


@pytest.mark.parametrize("odd", [-1, 2])
@pytest.mark.parametrize("name", POOLED)
def test_targets_of_one_class_are_0_and_1(name: str, odd: int) -> None:
    """Also in later calls, with the ignored value among them; unchecked, every value but 0 is a positive."""
    form, logits, targets = POOLED[name].first, LOGITS.reshape(24, 1), torch.tensor([0, 1, 0, 1] * 6)
    loss, changed = form.make(num_classes=1), torch.where(targets == 1, odd, 0)
    for call in range(4):
        wrong = changed.index_fill(0, torch.tensor([0]), -100 if call % 2 else 0)
        with pytest.raises(ValueError, match=rf"^targets: expected 0, 1 or ignore_index=-100, got {odd}\."):
            loss(logits, wrong)
        loss(logits, targets)
    with pytest.raises(ValueError, match="targets: expected 0, 1"):
        form.loss.function(logits, changed, **form.settings)
    unchecked = form.make(num_classes=1, validate_args=False)(logits, changed)
    assert torch.equal(unchecked, form.call()(logits, targets))


# --- which forms are one ---------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """How targets are given: in which dtype, and whether those of one dimension are a column."""

    dtype: torch.dtype
    column: bool = False

    def of(self, targets: Tensor) -> Tensor:
        """Return ``targets`` in this form; classes are no bools, and one column of multi-hot targets may be flat."""
        if self.dtype != torch.bool or bool(((targets == 0) | (targets == 1)).all()):
            targets = targets.to(self.dtype)
        if targets.ndim == 1:
            return targets[:, None] if self.column else targets
        return targets[:, 0] if targets.shape[1] == 1 and not self.column else targets


GIVEN = {
    "(N, 1)": Given(torch.int64, column=True),
    "int8": Given(torch.int8),
    "float32": Given(torch.float32),
    "float64, (N, 1)": Given(torch.float64, column=True),
    "float16": Given(torch.float16),
    "bfloat16": Given(torch.bfloat16),
    "bool": Given(torch.bool),
    "bool, (N, 1)": Given(torch.bool, column=True),
}


def binary_rows(device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """Return logits (60, 1) and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 1, generator=generator, dtype=torch.float64)
    targets = (torch.rand(60, generator=generator) < 0.3).long()
    targets[::7] = IGNORED
    return logits.to(device), targets.to(device)


def cases_of(name: str, device: torch.device) -> list[tuple[Callable[..., Tensor], Tensor, Tensor]]:
    """Return losses with scores, and with targets that are integers of one dimension (of two if multi-hot)."""
    logits, some = binary_rows(device)
    plain, several = some.clamp_min(0), logits.reshape(20, 3)
    classes = torch.arange(20, device=device) % 3
    classes[::9] = IGNORED
    form = LOSSES[name].first
    make = form.make
    if not form.loss.is_pooled:
        rows = (logits, plain) if form.loss.kind == "elements" else (several, classes)
        return [(loss, *rows) for loss in (make(), *[form.call()] * form.is_function)]
    hot = (several > 0).long().masked_fill(several > 1.5, IGNORED)
    return [
        (make(num_classes=1, queue_size=80), logits, some),
        (make(num_classes=1, queue_size=80), logits, plain),
        (form.call(), logits, some),
        (form.call(), logits, plain),
        (make(num_classes=3), several, classes),
        (make(num_classes=3, multi_hot=True), several, hot),
        (make(num_classes=1, multi_hot=True), logits, plain[:, None]),
    ]


def answers(loss: Callable[..., Tensor], logits: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the loss, the gradient in one shape, and the checksum of the queue afterwards."""
    logits = logits.clone().requires_grad_()
    value = loss(logits, targets)
    value.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape
    queue = getattr(loss, "queue", None)
    return [value.detach(), logits.grad.flatten(), *([] if queue is None else [queue.checksum.clone()])]


OF_TARGETS = [(n,) for n, loss in LOSSES.items() if loss.kind in ("scores", "classes", "elements")]


@pytest.mark.parametrize(("name", "device"), on_devices(OF_TARGETS, OF_TARGETS[:1]), indirect=["device"])
def test_targets_and_scores_of_every_form_are_those_of_integers(name: str, device: torch.device) -> None:
    """Scores of one class may lack the dimension of the classes."""
    for loss, scores, targets in cases_of(name, device):
        twin, fresh = loss, copy.deepcopy(loss)
        alone = scores[:, 0] if scores.shape[1] == 1 else scores
        expected = [answers(twin, scores, targets) for _ in range(2)]  # the second step has a queue
        for form, given in GIVEN.items():
            loss = copy.deepcopy(fresh)
            for step in expected:
                for mine, other in zip(answers(loss, alone, given.of(targets)), step):
                    assert torch.equal(mine, other), form
        # The control: other labels give another loss.
        assert not torch.equal(copy.deepcopy(twin)(scores, targets.roll(1, 0)), twin(scores, targets))


def test_forms_of_pixels_elements_and_labels() -> None:
    logits, targets = binary_rows()
    assert torch.equal(RetrievalSmoothAPLoss()(LOGITS, TARGETS[:, None]), RetrievalSmoothAPLoss()(LOGITS, TARGETS))
    images, pixels = logits.reshape(5, 3, 4), (torch.arange(20) % 3).reshape(5, 4)
    assert torch.equal(softmax_focal(images, pixels[..., None].double()), softmax_focal(images, pixels))
    for given in (logits, logits[:, 0]):
        assert sigmoid_focal(given, targets.clamp_min(0), reduction="none").shape == given.shape


@on_ranks(2)
def test_ranks_may_give_their_rows_in_other_forms(rank: int) -> None:
    logits, targets = binary_rows()
    own = slice(0, 20) if rank == 0 else slice(20, 60)
    clean, bad = targets.clamp_min(0)[own], targets[own].float()
    bad[3] = 0.25 if rank else 1.0
    other = (logits[own], targets[own].float()) if rank else (logits[own, 0], targets[own, None])
    loss, twin = (SmoothAPLoss(1, temperature=0.3, queue_size=30) for _ in range(2))
    expected = answers(loss, logits[own], targets[own])
    assert all(map(torch.equal, answers(twin, *other), expected))
    assert fullrank.all_gather_no_grad(expected[0][None]).unique().numel() == 1
    focal = SigmoidFocalLoss()
    assert torch.equal(focal(logits[own], clean[:, None]), focal(logits[own], clean.float() if rank else clean))
    error, text = error_of(lambda: SmoothAPLoss(1)(logits[own], bad))
    assert error == "ValueError"
    assert "rank 1: targets: expected 0, 1 or ignore_index=-100, got 0.25." in text


def test_floats_cost_no_wait_and_three_launches(simulated_device: Any) -> None:
    logits, targets = binary_rows(simulated_device.DEVICE)
    costs = []
    for given in (targets.clamp_min(0), targets.clamp_min(0).float()):
        loss = SmoothAPLoss(1, temperature=0.1)
        loss(logits, given)
        with simulated_device.count() as counts:
            loss(logits, given)
        costs.append((counts.waits, counts.launches))
    integers, floats = costs
    assert floats[0] == integers[0]
    assert floats[1] <= integers[1] + 3


# --- what is said about the arguments --------------------------------------------------------------------------------

PUBLIC = {
    name: getattr(module, name)
    for module in (losses, fullrank.metrics)
    for name in module.__all__
    if name != "sigmoid_sums" and not hasattr(getattr(module, name), "_fields")  # fields of a result have comments
}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_in_the_signature_and_the_docstring(name: str) -> None:
    public = PUBLIC[name]
    parameters = inspect.signature(public).parameters.values()
    section = inspect.cleandoc(public.__doc__).split("Args:\n")[1].split("\n\n")[0]
    heads = re.findall(r"^    ([*\w].*?):", section, re.MULTILINE)
    described = {argument for head in heads for argument in head.split(", ")}
    assert described == {f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name for p in parameters}
    if issubclass(public if inspect.isclass(public) else object, nn.Module) and public.__module__.startswith(
        "fullrank.losses"
    ):
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters)


def test_what_a_subclass_passes_on_is_all_that_the_base_takes() -> None:
    group = inspect.signature(losses.DistributedLoss).parameters.keys() - {"gather_distributed"}
    assert GroupOptions.__annotations__.keys() == group
    pooled = inspect.signature(losses.RankingLoss).parameters.values()
    assert PoolOptions.__annotations__.keys() == {p.name for p in pooled if p.kind is p.KEYWORD_ONLY}


def test_repr_shows_the_schedule_and_the_temperature() -> None:
    """Other settings are compared by the processes: tests/distributed/test_drift.py."""
    assert "warmup_steps=3" in repr(LossWarmupWrapper(SoftmaxFocalLoss(), SmoothAPLoss(3), warmup_steps=3))
    assert "temperature=0.2" in repr(SmoothAPLoss(1, temperature=0.2))
    assert "temperature=None\n" in repr(SmoothAPLoss(1))


FIXED = {"num_classes", "queue_size", "queue_keep", "multi_hot", "symmetric", "directions"}  # as in the constructor
# What is taken as it is when it is assigned, or cannot be assigned.
AS_GIVEN = {"name", "num_features", "function", "learn", "learn_temperature", "class_weight", "weight", "pos_weight"}


def refused_later(loss: Loss) -> Iterator[tuple[Settings, str, Any]]:
    """Yield settings, and an argument with a value that is refused when it is assigned to a loss with them."""
    fixed = FIXED | {"ignore_index"} if "queue_size" in loss.arguments else FIXED
    for name in sorted(loss.arguments - AS_GIVEN):
        entry = loss.argument(name)
        others = [entry.other] if name in fixed else []
        values = [bad for bad in [*entry.bad, *entry.wrong, *others] if bad is not None or name != "temperature"]
        yield from ((loss.form_with(name).settings, name, bad) for bad in values)
    for names, changes, _ in loss.together if loss.is_pooled else ():  # values that do not go together
        rest, name = dict(changes), names.partition(",")[0]
        if len(rest) <= 2:
            value = rest.pop(name)
            yield rest, name, value


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.module and not loss.parts])
def test_an_attribute_is_checked_when_it_is_assigned(name: str) -> None:
    """Also the second time; what is refused changes nothing. The control: the value that it has."""
    row = LOSSES[name]
    for settings, argument, bad in refused_later(row):
        loss = row.module(**Form(row, settings).given(num_classes=4, queue_size=8))
        for _ in range(2):
            before = getattr(loss, argument)
            with pytest.raises((TypeError, ValueError), match=rf"\b{argument}\b.*: expected"):
                setattr(loss, argument, bad)
            assert getattr(loss, argument) == before
            setattr(loss, argument, before)


def test_two_losses_cannot_share_a_queue() -> None:
    first, second = (kind(queue_size=4, num_features=2) for kind in (SupConLoss, InfoNCELoss))
    with pytest.raises(ValueError, match=r"queue: expected MemoryQueue\(.*, as in the constructor, got MemoryQueue"):
        second.queue = first.queue
    assert second.queue is not first.queue
