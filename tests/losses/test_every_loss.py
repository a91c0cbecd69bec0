"""What holds for every loss, whatever its formula: ignored rows, NaN, nothing to average, half precision.

Every loss is a function of rows, of which it makes its arguments. The pooled losses have more properties in common, in
test_loss_properties.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import loss_cases as cases
import pytest
import torch
from bounds import MULTIPLE
from loss_cases import FAMILIES, FORMS, IGNORED, KINDS, LOSSES, SHARED, Argument, Form, Loss, holds, normal
from subjects import error
from torch import Tensor, nn
from torch.testing import assert_close

from fullrank import CrossEntropyLoss, InfoNCELoss, NDCGLoss, SupConLoss, losses
from fullrank.losses import causal_lm_loss, retrieval_smooth_ap, sigmoid_focal, sigmoid_sums, smooth_ap, softmax_focal

over_forms = pytest.mark.parametrize("name", [name for name, form in FORMS.items() if KINDS[form.loss.kind].ignores])


def make_rows(count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, targets of which a fifth is ignored, and queries."""
    targets = torch.arange(count) * 7 % 3
    return normal(count, 3), targets.masked_fill(torch.arange(count) % 5 == 2, IGNORED), torch.arange(count) % 4


@over_forms
def test_ignored_rows_are_removed_rows_whatever_they_hold(name: str) -> None:
    x, targets, queries = make_rows()
    kept = targets != IGNORED
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=x.dtype)[torch.arange(len(x)) % 4]
    poisoned = torch.where(kept[:, None], x, odd[:, None])
    loss, gradient = cases.step(FORMS[name].value, poisoned, targets, queries=queries)
    expected, slopes = cases.step(FORMS[name].value, x[kept], targets[kept], queries=queries[kept])
    assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    assert_close(gradient[kept], slopes, rtol=1e-12, atol=1e-14)
    assert bool(slopes.any())
    assert not gradient[~kept].any()


@over_forms
def test_a_nan_that_counts_is_not_hidden(name: str) -> None:
    x, targets, queries = make_rows()
    x[int((targets == 1).nonzero()[3]), 0] = math.nan
    if FORMS[name].settings.get("reduction") != "none":  # of which a NaN is left out
        loss, gradient = cases.step(FORMS[name].value, x, targets, queries=queries)
        assert loss.isnan()
        assert gradient[:, 0].isnan().any()
    if name == "recall":  # nor where the row has no gradient
        assert cases.step(FORMS[name].value, x, targets, threshold_gradient=False)[1][:, 0].isnan().any()
    if name == "retrieval":  # nor where no query is valid
        assert retrieval_smooth_ap(x[targets == 1], targets[targets == 1]).isnan()


NO_CLASS, FIRST, ZEROS = torch.full((6,), IGNORED), torch.zeros(6, dtype=torch.int64), torch.zeros(6)
# As functions of rows (6, 3), of which nothing counts.
NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f"{name}, ignored": lambda x, form=form: form.value(x, NO_CLASS)
        for name, form in FORMS.items()
        if KINDS[form.loss.kind].ignores
    },
    **{f"{name}, no rows": lambda x, form=form: form.value(x[:0], FIRST[:0]) for name, form in FORMS.items()},
    "queries, no positives": lambda x: smooth_ap(x[:, 0], FIRST, indexes=torch.arange(6) % 4),
    "queries, no negatives": lambda x: smooth_ap(x[:, 0], FIRST + 1, indexes=torch.arange(6) % 4),
    "retrieval, one row": lambda x: retrieval_smooth_ap(x[:1], FIRST[:1]),
    "retrieval, one label": lambda x: retrieval_smooth_ap(x, FIRST),
    "retrieval, each its own label": lambda x: retrieval_smooth_ap(x, torch.arange(6)),
    "softmax_focal, no class of weight": lambda x: softmax_focal(x, FIRST, [0.0, 1, 1], reduction="mean_weighted"),
    "softmax_focal, no weight": lambda x: softmax_focal(x, FIRST, reduction="mean_weighted", sample_weight=ZEROS),
    "sigmoid_focal, no class of weight": lambda x: sigmoid_focal(x, torch.ones(6, 3), 0.0, reduction="mean_weighted"),
    "sigmoid_focal, no weight": lambda x: sigmoid_focal(x, x * 0 > 0, reduction="mean_weighted", sample_weight=ZEROS),
    "cross_entropy, no class of weight": lambda x: CrossEntropyLoss(torch.tensor([0.0, 1, 1]))(x, FIRST),
    "cross_entropy, no probabilities": lambda x: CrossEntropyLoss()(x[:0], torch.zeros(0, 3)),
    "info_nce, one pair": lambda x: InfoNCELoss(symmetric=True)(x[:1], x[:1]),
    "sup_con, one row": lambda x: SupConLoss()(x[:1], FIRST[:1]),
    "ndcg, no relevance": lambda x: NDCGLoss()(x[:, 0], FIRST),
    "causal_lm, the first token alone": lambda x: causal_lm_loss(x[:, None], FIRST[:, None]),
    "causal_lm, no token of 0": lambda x: causal_lm_loss(x, NO_CLASS, num_items=0),
    "causal_lm, no token of 3": lambda x: causal_lm_loss(x, NO_CLASS, num_items=3),
    "causal_lm, no token of hidden states": lambda x: causal_lm_loss(x, NO_CLASS, weight=torch.eye(3, dtype=x.dtype)),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_average_gives_zero_and_zero_gradients(name: str) -> None:
    """Where torch gives NaN. Nothing divides 0 by 0 on the way."""
    x = normal(6, 3).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        value = NOTHING[name](x)
        (gradient,) = torch.autograd.grad(value, x)
    assert value.item() == pytest.approx(0.0, abs=1e-15)
    assert gradient.abs().max() <= 1e-15


@pytest.mark.parametrize(("dtype", "offset"), [(torch.bfloat16, 1000.0), (torch.float16, 0.0)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_half_precision_is_that_of_float32_rounded_once(name: str, dtype: torch.dtype, offset: float) -> None:
    if offset and name == "retrieval_automatic":
        pytest.skip("the spread of nearly equal cosines is a few roundings of float32")
    form = FORMS[name]
    # bfloat16 has steps of 4 at 1000: spread the scores, so that not all are ties.
    half = ((32 if offset else 2) * normal(60, 3) + offset).to(dtype)
    with holds("half", name):
        outcomes = [outcome(form, half.to(kind)) for kind in (dtype, torch.float32, torch.float64)]
        values, gradients = zip(*outcomes)
        assert values[0].dtype == torch.float32
        assert torch.equal(values[0], values[1])
        assert gradients[0].dtype == dtype
        assert torch.equal(gradients[0], gradients[1].to(dtype))
        # And float32 is close to float64: by 40 roundings of differences over a temperature of 0.1. Cosines of rows far
        # from zero cancel: there by a few times what one rounding of the rows changes.
        moved = half.double() * (1 + torch.finfo(torch.float32).eps * half.double().sin())
        changed = outcome(form, moved) if form.loss.kind in ("embeddings", "pairs") else outcomes[2]
        for one, other, exact in zip(outcomes[1], changed, outcomes[2]):
            assert error(one, exact) <= max(5e-6, MULTIPLE * error(other, exact)) < 1e-3


def outcome(form: Form, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of its first argument."""
    arguments = form.arguments(x, torch.arange(60) % 3)
    first = next(iter(arguments))
    arguments[first] = arguments[first].clone().requires_grad_()
    value = form.call(num_classes=3)(**arguments)
    value = value.nan_to_num().square().sum() if value.ndim else value
    return value.detach(), torch.autograd.grad(value, arguments[first])[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rank_sums_of_half_precision_do_not_saturate(dtype: torch.dtype, device: torch.device) -> None:
    # One positive below 4095 negatives: its precision is 1/4096. A sum in bfloat16 stops at 256.
    scores = torch.full((4096, 1), 1.0, dtype=dtype, device=device)
    targets = torch.zeros(4096, dtype=torch.int64, device=device)
    scores[7], targets[7] = -1.0, 1
    loss = smooth_ap(scores, targets, temperature=0.01)
    assert loss.dtype == torch.float32
    assert_close(1 - loss.item(), 1 / 4096, rtol=1e-3, atol=0)  # 1 - (1 - 1/4096) in float32
    weights = torch.ones(4096, 1, dtype=dtype, device=device)
    assert sigmoid_sums(scores[7], scores[:, 0], weights, 0.01).float().item() == pytest.approx(4096, rel=1e-2)


# --- the registry: no loss lacks a row, no argument an entry, and no reason to leave one out is out of date -----------


NO_LOSS = {"sigmoid_sums", "token_log_probs"}  # public in fullrank.losses, for losses of one's own


def public_losses() -> dict[str, object]:
    """Return the public functions, and the modules that are no base of another."""
    found = {name: getattr(losses, name) for name in losses.__all__ if name not in NO_LOSS}
    modules = [value for value in found.values() if inspect.isclass(value) and issubclass(value, nn.Module)]
    bases = {base for module in modules for base in module.__mro__[1:]}
    return {
        name: value
        for name, value in found.items()
        if inspect.isfunction(value) or (value in modules and value not in bases)
    }


def wrong(rows: dict[str, Loss]) -> dict[str, str]:
    """Return what the rows lack, and what in them is out of date, by name."""
    public, found = public_losses(), {}
    held = {value for row in rows.values() for value in (row.module, row.function) if value is not None}
    found |= {name: "has no row in tests/loss_cases.py" for name, value in public.items() if value not in held}
    found |= {value.__name__: "is not public" for value in held - {*public.values()}}
    for name, row in rows.items():
        known = row.arguments | row.of_function
        found |= {f"{name}.{one}": "has no entry in `own`" for one in row.arguments - SHARED.keys() - row.own.keys()}
        found |= {f"{name}.{one}": "is no argument" for one in row.own.keys() - known}
        for one in row.arguments & (SHARED.keys() | row.own.keys()):
            if row.argument(one).other is None and row.default(one) is not inspect.Parameter.empty:
                found[f"{name}.{one}"] = "expected another value"
        if (row.reference is None) != ("reference" in row.left_out):
            found[f"{name}, reference"] = "expected a definition in tests/reference.py, or a reason in `left_out`"
        for family, reason in row.left_out.items():
            if family.partition(" ")[0] not in FAMILIES:
                found[f"{name}, {family}"] = f"expected one of {', '.join(FAMILIES)}"
            elif not reason.endswith(".") or len(reason.split()) < 3:
                found[f"{name}, {family}"] = "expected a reason in one sentence"
    return found


def test_every_loss_has_a_row_and_every_argument_an_entry() -> None:
    """Whether the other reasons hold is shown where the tests of a family run: ``loss_cases.holds``."""
    assert wrong(LOSSES) == {}
    assert SHARED.keys() <= {one for row in LOSSES.values() for one in row.arguments | row.of_function}


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.module and loss.function])
def test_a_function_has_the_defaults_of_its_module(name: str) -> None:
    loss = LOSSES[name]
    of_module, of_function = (inspect.signature(call).parameters for call in (loss.module, loss.function))
    for argument in loss.arguments & loss.of_function:
        assert of_function[argument].default == of_module[argument].default, argument


RECALL, NDCG = LOSSES["recall"], LOSSES["ndcg"]


@pytest.mark.parametrize(
    ("name", "row", "text"),
    [
        ("NDCGLoss", None, "has no row in tests/loss_cases.py"),
        ("ndcg.top", replace(NDCG, own={"gain": NDCG.own["gain"]}), "has no entry in `own`"),
        ("ndcg.top", replace(NDCG, own={**NDCG.own, "top": Argument(bad=[0])}), "expected another value"),
        ("ndcg.share", replace(NDCG, own={**NDCG.own, "share": NDCG.own["gain"]}), "is no argument"),
        ("ndcg, reference", replace(NDCG, left_out={}), "expected a definition"),
        ("recall, reference", replace(RECALL, left_out={"reference": "It is compared elsewhere."}), "or a reason"),
        ("recall, speed", replace(RECALL, left_out={"speed": "It is a slow one."}), "expected one of reference, "),
        ("recall, graph", replace(RECALL, left_out={"graph": "no"}), "expected a reason in one sentence"),
    ],
)
def test_control_what_is_wrong_is_named(name: str, row: Loss | None, text: str) -> None:
    others = {key: value for key, value in LOSSES.items() if value not in (RECALL, NDCG)}
    rows = {"recall": RECALL, "ndcg": NDCG} if row is None else {"recall": RECALL, "ndcg": NDCG, row.name: row}
    if row is None:
        del rows["ndcg"]
    assert [(key, text in said) for key, said in wrong({**others, **rows}).items()] == [(name, True)]
