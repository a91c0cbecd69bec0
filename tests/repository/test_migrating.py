"""What docs/migrating.md says of other packages: a row for each line of it.

What the page says of this package alone is shown by the tests of the folders.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import loss_cases
import pages
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.testing import assert_close
from workers import error_of

import fullrank

pytestmark = pytest.mark.slow

PAGE = "migrating.md"
draw = partial(loss_cases.draw, 40, columns=3)


def peer(name: str) -> Any:
    """Return another package, or skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


# imbalanced-losses: the same constructors and calls, the same numbers in one process

RANKING = ["SmoothAPLoss", "RecallAtQuantileLoss", "PAUCAtBudgetLoss"]
# Defaults that differ on purpose; docs/migrating.md names them.
CHANGED = {
    **{(name, "queue_size"): 0 for name in RANKING},
    **{(name, "num_classes"): 1 for name in RANKING},
    ("SmoothAPLoss", "temperature"): None,
    ("RecallAtQuantileLoss", "temperature"): None,
    ("PAUCAtBudgetLoss", "surrogate"): "dro",
    ("PAUCAtBudgetLoss", "tau_scale"): None,
    ("LossWarmupWrapper", "temp_start"): None,
    ("LossWarmupWrapper", "temp_end"): None,
}


def test_every_name_and_argument_is_there() -> None:
    """Arguments have the same names, order and defaults; ours come after them, in a forward keyword-only."""
    for name in peer("imbalanced_losses").__all__:
        theirs, ours = getattr(peer("imbalanced_losses"), name), getattr(fullrank, name)
        expected, given = (inspect.signature(one).parameters for one in (theirs, ours))
        assert list(given)[: len(expected)] == list(expected)
        for parameter in expected.values():
            assert given[parameter.name].default == CHANGED.get((name, parameter.name), parameter.default)
            assert given[parameter.name].kind == parameter.kind
        if inspect.isclass(theirs):
            expected, given = (inspect.signature(one.forward).parameters for one in (theirs, ours))
            assert list(given)[: len(expected)] == list(expected)
            assert {parameter.kind for parameter in list(given.values())[len(expected) :]} <= {parameter.KEYWORD_ONLY}


def steps_of(module: Any, name: str, options: dict[str, Any], *, weighted: bool = False) -> list[Tensor]:
    """Return losses, per-class losses and gradients of six steps, the queue filling; thresholds have no gradient."""
    if module is fullrank:
        options = options | {"weighting": "positives"}
        if name != "SmoothAPLoss" and options.get("surrogate") != "pairwise":
            options |= {"threshold_gradient": False}
    loss = getattr(module, name)(queue_size=256, **options)
    if module is not fullrank:
        loss.double()  # its queue is a buffer of the module's dtype
    results, columns = [], options["num_classes"]
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        logits = torch.randn(40, columns, dtype=torch.float64, generator=generator, requires_grad=True)
        targets = torch.randint(0, max(2, columns), (40,), generator=generator)
        targets[::7] = -100
        iid_mask = torch.rand(40, generator=generator) > 0.2
        weight = torch.rand(40, dtype=torch.float64, generator=generator) if weighted else None
        value, *others = loss(logits, targets, iid_mask, True, sample_weight=weight)
        results += [value.detach(), *(other.detach() for other in others), torch.autograd.grad(value, logits)[0]]
    return results


PAUC = {"alpha": 0.05, "beta": 0.4, "quantile_interpolation": "linear"}
CASES = [("SmoothAPLoss", {"temperature": 0.3}), ("RecallAtQuantileLoss", {"temperature": 0.3, "quantile": 0.2})]
CASES += [
    ("PAUCAtBudgetLoss", PAUC | surrogate | {"tau_scale": scale, "pos_numerator": numerator, "budget_basis": basis})
    for surrogate in ({"surrogate": "trapezoid", "n_knots": 4}, {"surrogate": "pairwise"})
    for scale, numerator, basis in itertools.product(("iqr", "band"), ("pool", "live"), ("fpr", "population"))
]


@pytest.mark.parametrize("num_classes", [1, 4])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_same_numbers(name: str, options: dict[str, Any], num_classes: int) -> None:
    options = options | {"num_classes": num_classes}
    for weighted in (False, True):
        ours, theirs = (
            steps_of(module, name, options, weighted=weighted) for module in (fullrank, peer("imbalanced_losses"))
        )
        for a, b in zip(ours, theirs, strict=True):
            # Rounding: the same sums in another order.
            assert_close(a, b, rtol=1e-12, atol=1e-14, equal_nan=True)
    if "temperature" in options:  # the control
        other = steps_of(fullrank, name, options | {"temperature": 0.31}, weighted=True)
        assert not torch.allclose(other[0], theirs[0], rtol=1e-6)
        assert not torch.allclose(other[-1], theirs[-1], rtol=1e-6)


@pytest.mark.parametrize("name", loss_cases.SUMMED)
def test_same_focal_losses(name: str) -> None:
    loss = loss_cases.SUMMED[name]
    inputs, targets, weight = loss_cases.rows_of_elements(loss.kind)
    for form, reduction, given in itertools.product(loss.compared.values(), ["mean", "sum", "none"], (None, weight)):
        options = {**form.settings, "reduction": reduction}
        ours, theirs = (
            getattr(module, loss.module.__name__)(**options)(inputs, targets, sample_weight=given)
            for module in (fullrank, peer("imbalanced_losses"))
        )
        rounded = isinstance(options.get("alpha"), list)  # theirs are float32
        assert_close(ours, theirs, rtol=1e-7 if rounded else 1e-12, atol=1e-14)


@on_ranks(2)
def test_imbalanced_losses_on_two_ranks(rank: int) -> None:
    """The share of the gradient under DDP, the elements, whether both ranks draw alike, and the positives."""
    import imbalanced_losses

    logits, targets = draw(columns=1)
    logits, own, arguments = logits.detach(), slice(20 * rank, 20 * rank + 20), {"queue_size": 0, "temperature": 0.3}
    found = []
    for module in (fullrank, imbalanced_losses):
        weight, one = (torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
        module.SmoothAPLoss(1, **arguments)(weight * logits[own], targets[own]).backward()
        dist.all_reduce(weight.grad)
        whole = module.SmoothAPLoss(1, **arguments, gather_distributed=False)(one * logits, targets)
        share = round(float(weight.grad / 2 / gradient(whole, one)), 6)
        elements = module.SigmoidFocalLoss(reduction="none")(logits[own], targets[own, None].double())
        torch.manual_seed(rank)
        drawn = module.SmoothAPLoss(1, **arguments, max_pool_size=8)(logits[own], targets[own])
        alike = fullrank.all_gather_no_grad(drawn[None]).unique().numel() == 1
        counts = module.PAUCAtBudgetLoss(1, beta=0.5, surrogate="pairwise", queue_size=0)
        stats = counts(logits[own], targets[own], return_per_class=True, return_diagnostics=True)[3]
        found.append((share, len(elements), alike, int(stats["grad_pos_count"])))
    assert found == [(1, 20, True, int(targets.sum())), (0.5, 40, False, int(targets[own].sum()))]


def test_the_old_numbers() -> None:
    """What the block prints is what the defaults of the other package give."""
    theirs = peer("imbalanced_losses")
    ((code, printed),) = pages.printing_blocks(PAGE, "imbalanced-losses 0.6")
    losses = [getattr(theirs, name)(3) for name in ("SmoothAPLoss", "RecallAtQuantileLoss", "PAUCAtBudgetLoss")]
    names = pages.run_block(code, {})
    found = [float(loss(names["logits"], names["targets"])) for loss in losses]
    assert found == pytest.approx([float(number) for number in printed.split()], abs=1e-6)


def queue_in_eval(module: Any) -> bool:
    """Return whether the queue is ranked in eval mode."""
    loss = module.SmoothAPLoss(3, queue_size=64, temperature=0.3).double()
    loss(*draw(seed=1))
    alone = fullrank.SmoothAPLoss(3, temperature=0.3)(*draw())
    return not torch.isclose(loss.eval()(*draw()), alone, rtol=1e-3)


def queued_rows(module: Any) -> int:
    """Return the rows that enter, of 40 with five ignored and one that is not finite."""
    logits, targets = draw()
    targets[:5] = -100
    loss = module.SmoothAPLoss(3, queue_size=64, temperature=0.3)
    loss(logits.detach().index_fill(0, torch.tensor(5), torch.nan), targets)
    return len(loss.queue) if module is fullrank else int(loss.state_dict()["_queue._q_ptr"])


def saved_temperature(module: Any) -> float:
    loss, other = (module.SmoothAPLoss(1, queue_size=0, temperature=0.3) for _ in range(2))
    loss.temperature = 0.05
    other.load_state_dict(loss.state_dict())
    return other.temperature


def gather_of_both(module: Any) -> tuple[Any, Any]:
    losses = module.SoftmaxFocalLoss(gamma=0), module.SmoothAPLoss(3, queue_size=0)
    module.LossWarmupWrapper(*losses, warmup_steps=3, gather_distributed=False)
    return losses[0].gather_distributed, losses[1].gather_distributed


LINES: list[tuple[Callable[[Any], Any], Any, Any]] = [  # ours, theirs
    (lambda m: m.SmoothAPLoss(3)(draw()[0].bfloat16(), draw()[1]).dtype, torch.float32, torch.bfloat16),
    (queue_in_eval, False, True),
    (queued_rows, 34, 40),
    (saved_temperature, 0.05, 0.3),
    (gather_of_both, (False, False), (None, False)),
]
REFUSED: dict[str, Callable[[Any], Any]] = {
    "targets out of range": lambda m: m.SmoothAPLoss(3)(draw()[0], draw(columns=4)[1]),
    "targets of -1 and +1": lambda m: m.SmoothAPLoss(1)(draw()[0][:, :1], 2 * draw(columns=2)[1] - 1),
    "targets of a focal loss": lambda m: m.SigmoidFocalLoss()(draw()[0], draw()[0]),
    "alpha of the default": lambda m: m.PAUCAtBudgetLoss(1, alpha=0.1, beta=0.2),
    "a wrapper with nothing to do": lambda m: m.LossWarmupWrapper(nn.CrossEntropyLoss(), m.SmoothAPLoss(3)),
}


@pytest.mark.parametrize(("line", "ours", "theirs"), LINES)
def test_a_line_about_imbalanced_losses(line: Callable[[Any], Any], ours: Any, theirs: Any) -> None:
    assert (line(fullrank), line(peer("imbalanced_losses"))) == (ours, theirs)


@pytest.mark.filterwarnings("ignore:Binary mode")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_an_error_here_and_not_there(case: str) -> None:
    REFUSED[case](peer("imbalanced_losses"))
    with pytest.raises(ValueError, match="expected"):
        REFUSED[case](fullrank)


# transformers: tests/losses/test_causal_lm.py compares the losses


def test_the_lines_about_transformers() -> None:
    theirs = peer("transformers.loss.loss_utils").ForCausalLMLoss
    logits, labels = torch.zeros(1, 3, 4), torch.full((1, 3), -100)
    assert theirs(logits, labels, 4).isnan()
    assert fullrank.causal_lm_loss(logits, labels, 4) == 0
    for dtype, ours in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        given = torch.randn(1, 3, 4, dtype=dtype), torch.tensor([[0, 1, 2]]), 4
        found = fullrank.causal_lm_loss(*given), theirs(*given)
        assert [loss.dtype for loss in found] == [ours, torch.float32]
        assert_close(found[0].float(), found[1], rtol=1e-6, atol=0)
    outside = logits, torch.tensor([[0, 9, 1]])
    assert [error_of(lambda: fullrank.causal_lm_loss(*outside))[0]] == ["ValueError"]
    with pytest.raises(IndexError):
        theirs(*outside, 4)


# LibAUC: its gradient is written out


def test_the_partial_auc_of_libauc() -> None:
    """One step with ``gamma=1``, whose moving average is that of the batch alone; the control has another hardness."""
    scores, targets = draw(columns=1)
    positives, negatives = scores[targets == 1], scores[targets == 0]
    pairs = F.softplus(negatives.T - positives)  # [P, N], the logistic surrogate
    weights = (pairs / 0.5).exp().detach()
    expected = gradient((weights / weights.mean(dim=1, keepdim=True) * pairs).mean(), scores)
    for hardness, is_equal in ((0.5, True), (1.0, False)):
        ours = fullrank.PAUCAtBudgetLoss(num_classes=1, surrogate="dro", dro_lambda=hardness)(scores, targets)
        assert torch.allclose(gradient(ours, scores), expected, rtol=1e-9, atol=1e-12) == is_equal


# torch


def test_the_lines_about_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(6, 2, generator=generator), torch.tensor([[0.0], [1.0], [0.0], [1.0], [0.0], [0.0]])
    binary, odds = logits[:, :1], logits[:, 1:] - logits[:, :1]
    expected = F.binary_cross_entropy_with_logits(binary, labels, pos_weight=torch.tensor([19.0]))
    by_weight = fullrank.SigmoidFocalLoss(alpha=19 / 20, gamma=0, reduction="mean_weighted")(binary, labels)
    assert_close(by_weight, expected * 6 / (2 * 19 + 4), rtol=1e-6, atol=0)  # roundings of float32
    two = F.cross_entropy(logits, labels[:, 0].long())
    assert_close(two, F.binary_cross_entropy_with_logits(odds, labels), rtol=1e-6, atol=0)


# Contrastive losses in one process; benchmarks/gradient_scale.py has their gradients over processes, and
# tests/losses/test_contrast.py the formulas of open_clip and of lightly without a memory bank: the values of open_clip
# 3.3.0 and lightly 1.6.0 agreed with them up to rounding.


SUMS = {"rtol": 1e-12, "atol": 0}  # of float64, in another order


def pairs(number: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, number, 6, generator=generator, dtype=torch.float64)
    return first, second


def test_the_lines_about_pytorch_metric_learning() -> None:
    theirs = peer("pytorch_metric_learning.losses")
    generator = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(3, 24, 6, generator=generator, dtype=torch.float64), torch.arange(8).repeat(3)
    two_views = theirs.SelfSupervisedLoss(theirs.NTXentLoss(temperature=0.5))(*rows[0].split(12))
    views = torch.stack(rows[0].split(12), 1)
    assert_close(two_views, fullrank.SupConLoss(0.5)(views), **SUMS)
    several = theirs.NTXentLoss(temperature=0.5)(rows[0], labels)
    assert abs(several - fullrank.SupConLoss(0.5)(rows[0], labels)) > 1e-3
    of_two = theirs.SupConLoss(temperature=0.1)(rows[0], labels, ref_emb=rows[1], ref_labels=labels.flip(0))
    given = {"reference": rows[1], "reference_labels": labels.flip(0)}
    assert_close(of_two, fullrank.SupConLoss(0.1)(rows[0], labels, **given), **SUMS)
    assert abs(of_two - fullrank.SupConLoss(0.1)(rows[0], labels)) > 1e-3
    memory = theirs.CrossBatchMemory(theirs.SupConLoss(temperature=0.1), embedding_size=6, memory_size=48).double()
    loss = fullrank.SupConLoss(0.1, queue_size=24)
    for batch in rows:
        assert_close(memory(batch, labels), loss(batch, labels), **SUMS)


def test_the_memory_bank_of_lightly() -> None:
    first, second = pairs()
    ours = fullrank.InfoNCELoss(0.5, queue_size=12)
    bank = pairs(seed=1)
    ours(*bank)
    queries, keys, held = (F.normalize(rows, dim=1) for rows in (first, second, bank[1]))
    both = F.cross_entropy(queries @ torch.cat([keys, held]).T / 0.5, torch.arange(12))
    assert_close(ours(first, second), both, **SUMS)
    own = torch.cat([(queries * keys).sum(dim=1, keepdim=True), queries @ held.T], dim=1) / 0.5
    alone = F.cross_entropy(own, torch.zeros(12, dtype=torch.int64))  # theirs: keys of the batch are no negatives
    assert both - alone > 0.1


class Identity(nn.Sequential):
    """Stands for a model of sentence-transformers, a sequence of modules."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["input_ids"]}


def test_the_lines_about_sentence_transformers() -> None:
    theirs = peer("sentence_transformers.sentence_transformer.losses")
    columns = pairs()
    features = [{"input_ids": rows} for rows in columns]
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    for options, symmetric in (({}, False), (both, True)):
        loss = theirs.CachedMultipleNegativesRankingLoss(Identity(nn.Identity()), 10.0, mini_batch_size=5, **options)
        found = loss(features, None)
        assert_close(found, fullrank.InfoNCELoss(0.1, symmetric=symmetric)(*columns), **SUMS)
        assert abs(found - fullrank.InfoNCELoss(0.1, symmetric=not symmetric)(*columns)) > 1e-3
    other = pairs(seed=1)
    loss = theirs.CachedMultipleNegativesRankingLoss(Identity(nn.Identity()), 10.0, mini_batch_size=5)
    found = loss([*features, *({"input_ids": rows} for rows in other)], None)
    assert_close(found, fullrank.InfoNCELoss(0.1)(*columns, torch.stack(other, dim=1)), **SUMS)
    assert abs(found - fullrank.InfoNCELoss(0.1)(*columns)) > 1e-3
