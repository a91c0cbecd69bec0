"""Transforms of torch around the losses: they give the plain gradient, or raise one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fullrank import (
    LossWarmupWrapper,
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    RetrievalSmoothAPLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
    SoftmaxFocalLoss,
)
from fullrank.losses import (
    causal_lm_loss,
    hard_negative_cross_entropy,
    pauc_at_budget,
    recall_at_quantile,
    retrieval_smooth_ap,
    sigmoid_focal,
    sigmoid_sums,
    smooth_ap,
    softmax_focal,
)

# The warnings of the losses are tested elsewhere. The first use of forward mode makes torch warn of its own scripting.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*torch.jit.script:DeprecationWarning"),
]

ROWS = 40
BINARY, CLASSES = torch.arange(ROWS) % 4 == 0, torch.arange(ROWS) % 5
OFF = {"validate_args": False}


def meta(targets: Tensor, like: Tensor) -> Tensor:
    """Return the targets on the device of the logits."""
    return targets.to("meta") if like.is_meta else targets


def functional(name: str) -> Callable[[Tensor], Tensor]:
    """Return a pure function of logits (ROWS, 5), of which binary losses take the first column."""
    binary = {
        "smooth_ap": lambda x, t: smooth_ap(x, t, 0.5, **OFF),
        "recall": lambda x, t: recall_at_quantile(x, t, 0.3, 0.5, **OFF),
        "recall linear": lambda x, t: recall_at_quantile(x, t, 0.3, 0.5, quantile_interpolation="linear", **OFF),
        "pauc": lambda x, t: pauc_at_budget(x, t, beta=0.4, surrogate="trapezoid", temperature=0.5, **OFF),
        "pauc pairwise": lambda x, t: pauc_at_budget(x, t, beta=0.4, temperature=0.5, surrogate="pairwise", **OFF),
        "sigmoid_sums": lambda x, t: sigmoid_sums(x[:, 0], x[:, 0] * 2, torch.ones_like(x), 0.5).square().mean(),
        "sigmoid_focal": lambda x, t: sigmoid_focal(x, t[:, None], **OFF),
    }
    multi = {
        "smooth_ap of classes": lambda x, t: smooth_ap(x, t, 0.5, **OFF),
        "hard negative": lambda x, t: hard_negative_cross_entropy(x, t, 0.2, **OFF),
        "pauc dro": lambda x, t: pauc_at_budget(x, t, surrogate="dro", **OFF),
        "pauc dro pairs": lambda x, t: pauc_at_budget(x, t, surrogate="dro", dro_lambda=0.5, **OFF),
        "pauc of classes": lambda x, t: pauc_at_budget(x, t, beta=0.4, surrogate="pairwise", **OFF),
        "retrieval": lambda x, t: retrieval_smooth_ap(x, t, temperature=0.1),
        "queries": lambda x, t: (
            retrieval_smooth_ap(x, t, temperature=0.1, reduction="none").nan_to_num().square().sum()
        ),
        "softmax_focal": lambda x, t: softmax_focal(x, t, **OFF),
        "causal_lm": lambda x, t: causal_lm_loss(x[None], t[None], **OFF),
    }
    if name in binary:
        return lambda x: binary[name](x[:, :1], meta(BINARY, x))
    return lambda x: multi[name](x, meta(CLASSES, x))


POOLED = [
    "smooth_ap",
    "recall",
    "recall linear",
    "pauc",
    "pauc pairwise",
    "sigmoid_sums",
    "smooth_ap of classes",
    "pauc of classes",
    "retrieval",
    "queries",
]
SUMMED = ["sigmoid_focal", "softmax_focal", "causal_lm"]

MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "SmoothAPLoss": (lambda: SmoothAPLoss(1, temperature=0.5, **OFF), BINARY),
    "RecallAtQuantileLoss": (lambda: RecallAtQuantileLoss(1, 0.3, temperature=0.5, **OFF), BINARY),
    "PAUCAtBudgetLoss": (lambda: PAUCAtBudgetLoss(1, **OFF), BINARY),
    "trapezoid": (lambda: PAUCAtBudgetLoss(1, beta=0.4, surrogate="trapezoid", temperature=0.5, **OFF), BINARY),
    "max_pool_size": (lambda: PAUCAtBudgetLoss(5, beta=0.4, surrogate="pairwise", max_pool_size=30, **OFF), CLASSES),
    "RetrievalSmoothAPLoss": (lambda: RetrievalSmoothAPLoss(0.1), CLASSES),
    "SigmoidFocalLoss": (lambda: SigmoidFocalLoss(**OFF), BINARY[:, None]),
    "SoftmaxFocalLoss": (lambda: SoftmaxFocalLoss(**OFF), CLASSES),
    "LossWarmupWrapper": (
        lambda: LossWarmupWrapper(SoftmaxFocalLoss(**OFF), SmoothAPLoss(5, **OFF), warmup_epochs=1),
        CLASSES,
    ),
}


def logits(dtype: torch.dtype = torch.float64) -> Tensor:
    """Return (ROWS, 5) normal logits that require a gradient."""
    numbers = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return numbers.requires_grad_()


def plain_gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient by autograd."""
    leaf = logits()
    return torch.autograd.grad(function(leaf), leaf)[0]


@pytest.mark.parametrize("name", POOLED + SUMMED)
def test_func_grad_gives_the_plain_gradient(name: str) -> None:
    function = functional(name)
    leaf = logits().detach()
    gradient, value = torch.func.grad_and_value(function)(leaf)
    assert torch.equal(value, function(leaf))
    assert torch.equal(gradient, plain_gradient(function))
    _, pull = torch.func.vjp(function, leaf)
    assert torch.equal(pull(torch.ones_like(value))[0], gradient)


@pytest.mark.parametrize("name", MODULES)
def test_func_grad_through_a_module(name: str) -> None:
    make, targets = MODULES[name]
    columns = 1 if targets is BINARY or targets.ndim == 2 else 5
    plain = plain_gradient(lambda x: make()(x[:, :columns], targets))
    assert torch.equal(torch.func.grad(lambda x: make()(x[:, :columns], targets))(logits().detach()), plain)


@pytest.mark.parametrize("name", POOLED)
def test_a_second_derivative_through_func_is_refused(name: str) -> None:
    function = functional(name)
    with pytest.raises(RuntimeError, match="expected a first derivative, got a second one"):
        torch.func.grad(lambda x: torch.func.grad(function)(x).square().sum())(logits().detach())


@pytest.mark.parametrize("name", POOLED)
def test_forward_mode_is_refused_in_one_sentence(name: str) -> None:
    function, leaf = functional(name), logits().detach()
    tangent = torch.ones_like(leaf)
    with pytest.raises(RuntimeError, match="expected reverse-mode differentiation, got forward mode"):
        torch.func.jvp(function, (leaf,), (tangent,))
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="expected reverse-mode differentiation, got forward mode"),
    ):
        function(forward_ad.make_dual(leaf, tangent))


@pytest.mark.parametrize("name", SUMMED)
def test_forward_mode_of_the_summed_losses(name: str) -> None:
    function, leaf = functional(name), logits().detach()
    tangent = torch.cos(torch.arange(leaf.numel(), dtype=torch.float64)).view_as(leaf)
    _, slope = torch.func.jvp(function, (leaf,), (tangent,))
    torch.testing.assert_close(slope, (plain_gradient(function) * tangent).sum(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", POOLED)
def test_vmap_is_refused_in_one_sentence(name: str) -> None:
    function, batch = functional(name), torch.stack([logits().detach()] * 3)
    for transformed in (torch.vmap(function), torch.vmap(torch.func.grad(function))):
        with pytest.raises(RuntimeError, match=r"expected plain tensors, got a batch of torch\.vmap"):
            transformed(batch)


@pytest.mark.parametrize("name", SUMMED)
def test_vmap_of_the_summed_losses(name: str) -> None:
    function, batch = functional(name), torch.stack([logits().detach(), logits().detach() * 2])
    torch.testing.assert_close(torch.vmap(function)(batch), torch.stack([function(one) for one in batch]))


@pytest.mark.parametrize("name", POOLED + SUMMED)
def test_meta_tensors_have_shapes(name: str) -> None:
    function, leaf = functional(name), logits(torch.float32).detach().to("meta").requires_grad_()
    with FlopCounterMode(display=False):
        value = function(leaf)
        value.backward()
    assert value.is_meta
    assert value.shape == ()
    assert value.dtype == torch.float32
    assert leaf.grad is not None
    assert leaf.grad.is_meta
    assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("name", MODULES)
def test_meta_tensors_through_a_module(name: str) -> None:
    make, targets = MODULES[name]
    loss = make()
    leaf = torch.zeros(ROWS, 1 if targets is BINARY or targets.ndim == 2 else 5, device="meta", requires_grad=True)
    with FlopCounterMode(display=False):
        for _ in range(2):  # no row has entered a queue
            value = loss(leaf, targets.to("meta"))
        value.backward()
    assert value.is_meta
    assert value.shape == ()
    assert leaf.grad is not None
    assert leaf.grad.shape == leaf.shape


def test_queries_of_unknown_number_are_refused() -> None:
    scores, targets, indexes = torch.zeros(8, 1, device="meta"), *torch.zeros(2, 8, dtype=torch.long, device="meta")
    with pytest.raises(RuntimeError, match="indexes: expected a tensor with values"):
        smooth_ap(scores, targets, indexes=indexes)
