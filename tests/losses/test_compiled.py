"""Compiled losses: other temperatures and row counts, one graph or a break, a process group that comes later.

Each starts the compiler, so a loss is compiled once, with as many of its options as one call can have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullrank import losses

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]

CALLS = ((40, 0.5), (40, 0.25), (55, 0.1))  # rows, temperature: first one of them changes, then both


def weights(targets: Tensor) -> dict[str, Tensor]:
    """Return weights that differ from row to row."""
    return {"sample_weight": 0.5 + targets.abs().double()}


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "smooth_ap": lambda x, t, tau: losses.smooth_ap(x, t, tau, **weights(t)),
    "smooth_ap of (N,) and floats": lambda x, t, tau: losses.smooth_ap(x[:, 0], (t == 0).double()[:, None], tau),
    "smooth_ap automatic": lambda x, t, tau: losses.smooth_ap(x, t),
    "recall": lambda x, t, tau: losses.recall_at_quantile(x, t, 0.2, tau, **weights(t)),
    "pauc": lambda x, t, tau: losses.pauc_at_budget(
        x, t, beta=0.3, surrogate="trapezoid", n_knots=3, temperature=tau, quantile_interpolation="linear", **weights(t)
    ),
    "pauc pairwise": lambda x, t, tau: losses.pauc_at_budget(
        x, t, beta=0.3, temperature=tau, surrogate="pairwise", iid_mask=t != 1
    ),
    "pauc dro": lambda x, t, tau: losses.pauc_at_budget(x, t, dro_lambda=tau, iid_mask=t != 1, **weights(t)),
    "sigmoid_sums": lambda x, t, tau: losses.sigmoid_sums(x[:, 0], x[:, 1], x[:, 1:], tau).square().mean(),
    "sigmoid_focal": lambda x, t, tau: losses.sigmoid_focal(x[:, :1], t == 0, gamma=tau, **weights(t)),
    "softmax_focal": lambda x, t, tau: losses.softmax_focal(
        x, t.double()[:, None], alpha=[0.5, 1.0, 2.0], gamma=tau, label_smoothing=0.1, **weights(t)
    ),
    "causal_lm": lambda x, t, tau: losses.causal_lm_loss(x[None], t[None], num_items=100 * tau),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "SmoothAPLoss": lambda: losses.SmoothAPLoss(3),
    "RecallAtQuantileLoss": lambda: losses.RecallAtQuantileLoss(3, 0.2),
    "PAUCAtBudgetLoss": lambda: losses.PAUCAtBudgetLoss(3, beta=0.3),
    "SmoothAPLoss, queue": lambda: losses.SmoothAPLoss(3, queue_size=64),
    "SmoothAPLoss, draws": lambda: losses.SmoothAPLoss(3, max_pool_size=64),
    "RetrievalSmoothAPLoss": lambda: losses.RetrievalSmoothAPLoss(),
    "LossWarmupWrapper": lambda: losses.LossWarmupWrapper(
        losses.SoftmaxFocalLoss(), losses.SmoothAPLoss(3), warmup_epochs=1
    ),
    "SoftmaxFocalLoss": lambda: losses.SoftmaxFocalLoss(),
    "SigmoidFocalLoss": lambda: losses.SigmoidFocalLoss(),
    "CrossEntropyLoss": lambda: losses.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0]), label_smoothing=0.1),
    "BCEWithLogitsLoss": lambda: losses.BCEWithLogitsLoss(torch.tensor([0.5, 1.0, 2.0]), torch.tensor(2.0)),
}
# The modules that a graph cannot hold whole: they keep a state, or the number of operators depends on values.
BROKEN = ("SmoothAPLoss, queue", "SmoothAPLoss, draws", "RetrievalSmoothAPLoss", "LossWarmupWrapper")

# Each loss is compiled once in `make test`, two of them in test_forward_and_backward_are_traced; `make full` has all.
ONCE = {"pauc dro", "sigmoid_focal", "softmax_focal", "causal_lm", "SmoothAPLoss, queue"}
ONCE |= {"RetrievalSmoothAPLoss", "CrossEntropyLoss", "BCEWithLogitsLoss", "retrieval_smooth_ap", "indexes"}


def each(names: Iterable[str]) -> list[Any]:
    """Return the names as cases."""
    return [pytest.param(name, marks=[] if name in ONCE else [pytest.mark.full]) for name in names]


def rows(count: int, name: str = "") -> tuple[Tensor, Tensor]:
    """Return logits (count, 3) that require a gradient, and class indices or the targets of a focal loss."""
    numbers = torch.Generator().manual_seed(count)
    targets = torch.arange(count) % 3
    if name in ("SigmoidFocalLoss", "BCEWithLogitsLoss"):
        targets = nn.functional.one_hot(targets, 3).double()
    elif "focal" not in name.lower() and "causal" not in name:
        targets = targets.masked_fill(torch.arange(count) % 9 == 4, -100)
    return torch.randn(count, 3, generator=numbers).double().requires_grad_(), targets


def assert_same(compiled: Callable[..., Tensor], plain: Callable[..., Tensor], *given: Any) -> None:
    """The values and the gradients of the first argument are equal."""
    outcomes = []
    for function in (compiled, plain):
        value = function(*given)
        outcomes.append((value.detach(), torch.autograd.grad(value, given[0])[0]))
    torch.testing.assert_close(*outcomes, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", each(FUNCTIONS))
def test_functions_over_temperatures_and_row_counts(name: str, backend: str) -> None:
    """aot_eager traces what every backend is given, forward and backward, and takes three times as long."""
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend=backend)
    for count, temperature in CALLS[:: 2 if backend == "eager" else 1]:
        assert_same(compiled, FUNCTIONS[name], *rows(count, name), temperature)


@pytest.mark.parametrize("name", ["smooth_ap", "recall"])
def test_forward_and_backward_are_traced(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    assert_same(compiled, FUNCTIONS[name], *rows(40), 0.5)


@pytest.mark.full
def test_inductor_compiles_smooth_ap() -> None:
    torch._dynamo.reset()
    try:
        assert_same(torch.compile(FUNCTIONS["smooth_ap"], fullgraph=True), FUNCTIONS["smooth_ap"], *rows(24), 0.3)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        pytest.skip(f"inductor cannot build here: {error}")


@pytest.mark.parametrize("name", each(MODULES))
def test_modules_within_a_compiled_step(name: str) -> None:
    """With a queue that fills, temperatures that cool and batches of other sizes."""
    torch._dynamo.reset()
    plain, loss = MODULES[name](), MODULES[name]()
    compiled = torch.compile(
        lambda x, t: loss(x * 2, t) + x.square().mean(), backend="eager", fullgraph=name not in BROKEN
    )
    for count, temperature in CALLS:
        if hasattr(loss, "temperature"):
            loss.temperature = plain.temperature = temperature
        assert_same(compiled, lambda x, t: plain(x * 2, t) + x.square().mean(), *rows(count, name))


OUTSIDE: dict[str, Callable[..., Tensor]] = {
    "retrieval_smooth_ap": lambda x, t: losses.retrieval_smooth_ap(x, t),
    "indexes": lambda x, t: losses.smooth_ap(x[:, :1], t == 0, indexes=t),
}


@pytest.mark.parametrize("name", each([*BROKEN, *OUTSIDE]))
def test_fullgraph_of_what_runs_eagerly_says_so(name: str) -> None:
    torch._dynamo.reset()
    function = MODULES[name]() if name in MODULES else OUTSIDE[name]
    with pytest.raises(RuntimeError, match=r"so it runs eagerly\. Compile without fullgraph=True"):
        torch.compile(function, backend="eager", fullgraph=True)(*rows(12))


@pytest.mark.parametrize("name", ["SmoothAPLoss", "SoftmaxFocalLoss"])
def test_compiled_before_the_process_group_exists(name: str) -> None:
    """What was compiled without a process group must not be used with one: it does not communicate."""
    torch._dynamo.reset()
    compiled = torch.compile(MODULES[name](), backend="eager")
    compiled(*rows(12))
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(*rows(12))  # the control: nothing has changed, so nothing is compiled again
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with pytest.raises(torch._dynamo.exc.RecompileError, match="WORLD"):
                compiled(*rows(12))
        finally:
            dist.destroy_process_group()


def test_what_fits_in_a_graph() -> None:
    """A call that communicates with nobody: with a process group one of ``gather_distributed=False`` alone."""
    made = [losses.SoftmaxFocalLoss(gather_distributed=value) for value in (None, False, True)]
    assert [loss.fits_in_a_graph() for loss in made] == [True, True, False]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert [loss.fits_in_a_graph() for loss in made] == [False, True, False]
    finally:
        dist.destroy_process_group()
