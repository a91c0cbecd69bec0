"""Transforms and autocast around the losses: the plain gradient, bit for bit, or one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import gradient_cases
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from gradient_cases import Case
from loss_cases import CLASSES, FUNCTIONS, normal
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fullrank import losses

# The warnings of the losses are tested elsewhere. The first use of forward mode makes torch warn of its own scripting.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*torch.jit.script"),
]

# Those that torch differentiates itself; the others have kernels with a first derivative in reverse mode alone.
SUMMED = ["sigmoid_focal", "softmax_focal", "causal_lm"]
OTHERS = ["pauc_dro", "pauc_dro_tilted", "pauc_dro_band"]
WITH_KERNELS = [name for name in FUNCTIONS if name not in (*SUMMED, *OTHERS)]
OFF = {"validate_args": False}
BINARY = (CLASSES == 0).long()
MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "SmoothAPLoss": (lambda: losses.SmoothAPLoss(1, temperature=0.5, **OFF), BINARY),
    "SmoothAPLoss, automatic": (lambda: losses.SmoothAPLoss(1, **OFF), BINARY),
    "RecallAtQuantileLoss": (lambda: losses.RecallAtQuantileLoss(1, 0.3, **OFF), BINARY),
    "PAUCAtBudgetLoss": (lambda: losses.PAUCAtBudgetLoss(1, **OFF), BINARY),
    "trapezoid": (lambda: losses.PAUCAtBudgetLoss(1, beta=0.4, surrogate="trapezoid", temperature=0.5, **OFF), BINARY),
    "max_pool_size": (
        lambda: losses.PAUCAtBudgetLoss(3, beta=0.4, surrogate="pairwise", max_pool_size=30, **OFF),
        CLASSES,
    ),
    "RetrievalSmoothAPLoss": (lambda: losses.RetrievalSmoothAPLoss(0.1), CLASSES),
    "SigmoidFocalLoss": (lambda: losses.SigmoidFocalLoss(**OFF), BINARY[:, None]),
    "SoftmaxFocalLoss": (lambda: losses.SoftmaxFocalLoss(**OFF), CLASSES),
    "LossWarmupWrapper": (
        lambda: losses.LossWarmupWrapper(
            losses.SoftmaxFocalLoss(**OFF), losses.SmoothAPLoss(3, **OFF), warmup_epochs=1
        ),
        CLASSES,
    ),
}
over_functions = pytest.mark.parametrize("name", FUNCTIONS)
over_kernels = pytest.mark.parametrize("name", WITH_KERNELS)
over_summed = pytest.mark.parametrize("name", SUMMED)
over_modules = pytest.mark.parametrize("name", MODULES)


def gradient_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the gradient by autograd."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


@over_functions
def test_func_grad_gives_the_plain_gradient(name: str) -> None:
    function, x = FUNCTIONS[name], normal(60, 3)
    gradient, value = torch.func.grad_and_value(function)(x)
    assert torch.equal(value, function(x))
    assert torch.equal(gradient, gradient_of(function, x))
    _, pull = torch.func.vjp(function, x)
    assert torch.equal(pull(torch.ones_like(value))[0], gradient)


@over_modules
def test_func_grad_and_meta_tensors_through_a_module(name: str) -> None:
    make, targets = MODULES[name]
    x = normal(60, 1 if targets is BINARY or targets.ndim == 2 else 3)
    expected = gradient_of(lambda x: make()(x, targets), x)
    assert torch.equal(torch.func.grad(lambda x: make()(x, targets))(x), expected)
    loss, leaf = make(), x.float().to("meta").requires_grad_()
    with FlopCounterMode(display=False):
        for _ in range(2):  # no row has entered a queue
            value = loss(leaf, targets.to("meta"))
        value.backward()
    assert value.is_meta
    assert value.shape == ()
    assert leaf.grad is not None
    assert leaf.grad.shape == leaf.shape
    assert getattr(loss, "current_temperature", None) == getattr(loss, "temperature", None)


@over_functions
def test_meta_tensors_have_shapes(name: str) -> None:
    leaf = normal(60, 3).float().to("meta").requires_grad_()
    with FlopCounterMode(display=False):
        value = FUNCTIONS[name](leaf)
        value.backward()  # type: ignore[no-untyped-call]
    assert (value.is_meta, value.shape, value.dtype) == (True, (), torch.float32)
    assert leaf.grad is not None
    assert (leaf.grad.is_meta, leaf.grad.shape) == (True, leaf.shape)


@over_kernels
def test_what_a_kernel_cannot_do_is_refused_in_one_sentence(name: str) -> None:
    """Second derivatives, forward mode and vmap."""
    function, x = FUNCTIONS[name], normal(60, 3)
    with pytest.raises(RuntimeError, match="expected a first derivative, got a second one"):
        torch.func.grad(lambda x: torch.func.grad(function)(x).square().sum())(x)
    forward = "expected reverse-mode differentiation, got forward mode"
    with pytest.raises(RuntimeError, match=forward):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=forward):
        function(forward_ad.make_dual(x, torch.ones_like(x)))
    for transformed in (torch.vmap(function), torch.vmap(torch.func.grad(function))):
        with pytest.raises(RuntimeError, match=r"expected plain tensors, got a batch of torch\.vmap"):
            transformed(torch.stack([x] * 3))


@pytest.mark.parametrize("loss", [losses.SupConLoss(), losses.InfoNCELoss()])
def test_the_contrastive_losses_refuse_transforms_in_one_process_too(loss: nn.Module) -> None:
    x, other = normal(8, 4), CLASSES[:8] if isinstance(loss, losses.SupConLoss) else normal(8, 4) + 1
    with pytest.raises(RuntimeError, match=r"expected backward\(\) or torch\.autograd\.grad, got a transform"):
        torch.func.grad(lambda x: loss(x, other))(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="got a transform"):
        loss(forward_ad.make_dual(x, torch.ones_like(x)), other)


@over_summed
def test_forward_mode_and_vmap_of_the_summed_losses(name: str) -> None:
    function, x = FUNCTIONS[name], normal(60, 3)
    tangent = torch.cos(torch.arange(x.numel(), dtype=torch.float64)).view_as(x)
    _, slope = torch.func.jvp(function, (x,), (tangent,))
    torch.testing.assert_close(slope, (gradient_of(function, x) * tangent).sum(), rtol=1e-12, atol=1e-14)
    batch = torch.stack([x, x * 2])
    torch.testing.assert_close(torch.vmap(function)(batch), torch.stack([function(one) for one in batch]))


def test_queries_of_unknown_number_are_refused() -> None:
    x, targets, indexes = torch.zeros(8, 1, device="meta"), *torch.zeros(2, 8, dtype=torch.long, device="meta")
    with pytest.raises(RuntimeError, match="indexes: expected a tensor with values"):
        losses.smooth_ap(x, targets, indexes=indexes)


# Autocast: what a loss sums over a pool, half precision cannot hold

AUTOCAST = ["smooth_ap", "recall", "pauc_trapezoid", "pauc_pairwise", "pauc_dro"]
AUTOCAST += ["softmax_focal", "sigmoid_focal", "queries", "retrieval"]
OF_PRODUCTS = ["recall", "pauc_trapezoid", "retrieval"]  # losses whose sums are matrix products, which autocast rounds


def pool_of(name: str, rank: int, count: int) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    """Return a loss with logits, targets and keywords, on a pool that half precision cannot sum."""
    generator, case = torch.Generator().manual_seed(rank), Case(name, queue_size=0)
    loss, columns = gradient_cases.make_loss(case, local=False), gradient_cases.num_outputs(case)
    logits = torch.randn(count, columns, generator=generator)
    if name == "retrieval":
        return loss, logits, torch.randint(0, 40, (count,), generator=generator), {}
    targets = (torch.rand(count, generator=generator) < 0.1).long()
    options = {"indexes": torch.randint(0, 9, (count,), generator=generator)} if name == "queries" else {}
    return loss, logits, targets[:, None] if name == "sigmoid_focal" else targets, options


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.full)], ids=["pairs", "bins"])
@on_ranks(2)
def test_no_bit_is_changed_by_autocast(rank: int, count: int) -> None:
    """Of losses and gradients; the control are losses that are blind to it."""
    for name, is_guarded in [*((name, True) for name in AUTOCAST), *((name, False) for name in OF_PRODUCTS)]:
        outcomes = []
        for enabled in (False, True):
            loss, logits, targets, options = pool_of(name, rank, min(count, 600) if name == "retrieval" else count)
            blind = mock.patch.object(torch, "is_autocast_enabled", return_value=False)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), nullcontext() if is_guarded else blind:
                leaf = logits.requires_grad_()
                value = loss(leaf, targets, **options)
                (gradient,) = torch.autograd.grad(value, leaf)
            outcomes.append(torch.cat([value.detach().reshape(1), gradient.flatten() * 100]))
        error = float((outcomes[0] - outcomes[1]).norm() / outcomes[0].norm())
        assert error == 0.0 if is_guarded else error > 2e-5, (name, error)
