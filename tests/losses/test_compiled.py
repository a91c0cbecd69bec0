"""Compiled losses: other temperatures and row counts, one graph or a break, a process group that comes later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullrank import (
    HardNegativeCrossEntropyLoss,
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

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

CALLS = ((40, 0.5), (40, 0.25), (55, 0.1))  # rows, temperature: first one of them changes, then both
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "smooth_ap": lambda x, t, tau: smooth_ap(x[:, :1], t == 0, tau),
    "smooth_ap of (N,) and floats": lambda x, t, tau: smooth_ap(x[:, 0], (t == 0).double()[:, None], tau),
    "recall": lambda x, t, tau: recall_at_quantile(x, t, 0.2, tau),
    "recall linear": lambda x, t, tau: recall_at_quantile(x, t, 0.2, tau, quantile_interpolation="linear"),
    "pauc": lambda x, t, tau: pauc_at_budget(x, t, beta=0.3, surrogate="trapezoid", temperature=tau),
    "pauc linear": lambda x, t, tau: pauc_at_budget(
        x, t, beta=0.3, surrogate="trapezoid", temperature=tau, quantile_interpolation="linear"
    ),
    "hard negative": lambda x, t, tau: hard_negative_cross_entropy(x, t, 0.2) * tau,
    "pauc dro": lambda x, t, tau: pauc_at_budget(x, t, surrogate="dro", dro_lambda=tau),
    "pauc dro iqr": lambda x, t, tau: pauc_at_budget(x, t, surrogate="dro", tau_scale="iqr", dro_lambda=tau),
    "pauc pairwise": lambda x, t, tau: pauc_at_budget(x, t, beta=0.3, temperature=tau, surrogate="pairwise"),
    "sigmoid_sums": lambda x, t, tau: sigmoid_sums(x[:, 0], x[:, 1], x[:, 1:], tau).square().mean(),
    "sigmoid_focal": lambda x, t, tau: sigmoid_focal(x[:, 0], t / 3, gamma=tau),
    "sigmoid_focal of (N, 1) and (N,)": lambda x, t, tau: sigmoid_focal(x[:, :1], t == 0, gamma=tau),
    "softmax_focal of floats": lambda x, t, tau: softmax_focal(x, t.double()[:, None], gamma=tau),
    "softmax_focal": lambda x, t, tau: softmax_focal(x, t, gamma=tau, sample_weight=t + tau),
    "causal_lm": lambda x, t, tau: causal_lm_loss(x[None], t[None], num_items=100 * tau),
}
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "SmoothAPLoss": (lambda: SmoothAPLoss(3), lambda t: t),
    "RecallAtQuantileLoss": (lambda: RecallAtQuantileLoss(3, 0.2), lambda t: t),
    "PAUCAtBudgetLoss": (lambda: PAUCAtBudgetLoss(3, beta=0.3), lambda t: t),
    "SmoothAPLoss, queue": (lambda: SmoothAPLoss(3, queue_size=64), lambda t: t),
    "SmoothAPLoss, draws": (lambda: SmoothAPLoss(3, max_pool_size=64), lambda t: t),
    "HardNegativeCrossEntropyLoss": (lambda: HardNegativeCrossEntropyLoss(3), lambda t: t),
    "RetrievalSmoothAPLoss": (lambda: RetrievalSmoothAPLoss(), lambda t: t),
    "LossWarmupWrapper": (lambda: LossWarmupWrapper(SoftmaxFocalLoss(), SmoothAPLoss(3), warmup_epochs=1), lambda t: t),
    "SoftmaxFocalLoss": (lambda: SoftmaxFocalLoss(), lambda t: t),
    "SigmoidFocalLoss": (lambda: SigmoidFocalLoss(), lambda t: nn.functional.one_hot(t, 3)),
}
# The modules that a graph may hold whole, in one process and without a queue.
TRACED = (
    "SmoothAPLoss",
    "RecallAtQuantileLoss",
    "PAUCAtBudgetLoss",
    "HardNegativeCrossEntropyLoss",
    "SoftmaxFocalLoss",
    "SigmoidFocalLoss",
)


def rows(count: int) -> tuple[Tensor, Tensor]:
    """Return logits (count, 3) that require a gradient, and class indices."""
    numbers = torch.Generator().manual_seed(count)
    return torch.randn(count, 3, generator=numbers).double().requires_grad_(), torch.arange(count) % 3


def outcome(function: Callable[..., Tensor], *args: object) -> tuple[Tensor, Tensor]:
    """Return the value of a function of rows and its gradient."""
    value = function(*args)
    return value.detach(), torch.autograd.grad(value, args[0])[0]


# The compiler makes sizes dynamic when they change. From the first call on they are for one function of each kind.
DYNAMIC = ("smooth_ap", "recall linear", "pauc dro iqr", "softmax_focal", "RecallAtQuantileLoss", "SmoothAPLoss, queue")


def default_and_dynamic(names: Iterable[str]) -> list[Any]:
    """Return each name with ``dynamic=None``, and some with True."""
    found = [pytest.param(name, None, id=f"{name}-default") for name in names]
    return found + [pytest.param(name, True, id=f"{name}-dynamic") for name in names if name in DYNAMIC]


@pytest.mark.parametrize(("name", "dynamic"), default_and_dynamic(FUNCTIONS))
def test_functions_over_temperatures_and_row_counts(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    function = FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=dynamic)
    for count, temperature in CALLS[:: 2 if " " in name else 1]:  # of variants of a function fewer
        given = (*rows(count), temperature)
        for ours, plain in zip(outcome(compiled, *given), outcome(function, *given)):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)


def test_a_function_through_aot_autograd() -> None:
    """With dynamic sizes; tests/losses/test_loss_limits.py has every function."""
    torch._dynamo.reset()
    function = FUNCTIONS["smooth_ap"]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for count, temperature in CALLS:
        given = (*rows(count), temperature)
        for ours, plain in zip(outcome(compiled, *given), outcome(function, *given)):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "dynamic"), default_and_dynamic(MODULES))
def test_modules_with_default_settings(name: str, dynamic: bool | None) -> None:
    """Also within a compiled model, with a queue that fills, temperatures that cool and batches of other sizes."""
    torch._dynamo.reset()
    make, to_targets = MODULES[name]
    plain, loss = make(), make()

    def step(x: Tensor, targets: Tensor) -> Tensor:
        return loss(x * 2, targets) + x.square().mean()

    compiled = torch.compile(step, backend="eager", dynamic=dynamic, fullgraph=name in TRACED)
    for count, temperature in CALLS:
        x, targets = rows(count)[0], to_targets(rows(count)[1])
        if hasattr(loss, "temperature"):
            loss.temperature = plain.temperature = temperature
        value, gradient = outcome(lambda x, t: plain(x * 2, t) + x.square().mean(), x, targets)
        ours = outcome(compiled, x, targets)
        torch.testing.assert_close(ours[0], value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(ours[1], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in TRACED] + ["retrieval_smooth_ap", "indexes"])
def test_fullgraph_of_what_runs_eagerly_says_so(name: str) -> None:
    torch._dynamo.reset()
    x, targets = rows(12)
    other: dict[str, Callable[..., Tensor]] = {
        "retrieval_smooth_ap": retrieval_smooth_ap,
        "indexes": lambda x, t: smooth_ap(x[:, :1], t == 0, indexes=t),
    }
    function = MODULES[name][0]() if name in MODULES else other[name]
    with pytest.raises(RuntimeError, match=r"so it runs eagerly\. Compile without fullgraph=True"):
        torch.compile(function, backend="eager", fullgraph=True)(x, targets)


@pytest.mark.parametrize("name", ["SmoothAPLoss", "SoftmaxFocalLoss"])
def test_compiled_before_the_process_group_exists(name: str) -> None:
    """What was compiled without a process group must not be used with one: it does not communicate."""
    torch._dynamo.reset()
    compiled = torch.compile(MODULES[name][0](), backend="eager")
    compiled(*rows(12))
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(*rows(12))  # the control: nothing has changed, so nothing is compiled again
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with pytest.raises(torch._dynamo.exc.RecompileError, match="WORLD"):
                compiled(*rows(12))
        finally:
            dist.destroy_process_group()
