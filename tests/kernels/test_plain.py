"""Smooth-AP in plain operators: the same loss and gradient as pair by pair, and one graph that a compiler fuses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fullrank.kernels.costs import TABLE
from fullrank.kernels.soft_ranks import smooth_ap_sums
from fullrank.losses import smooth_ap

# The compiler itself makes an instance of every autograd.Function, which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

TAU = 0.3
MOST_KERNELS = 8


def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU take the plain form wherever an accelerator would."""
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(plain_pairs=TABLE["accelerator"].plain_pairs))


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ties": lambda x: (x * 3).round() / 3,
    "infinite": lambda x: x.index_fill(1, torch.tensor([0]), math.inf),
    "two infinities": lambda x: x.index_fill(1, torch.tensor([0, 1]), math.inf),
    "minus infinity": lambda x: x.index_fill(1, torch.tensor([2]), -math.inf),
    "NaN": lambda x: x.index_fill(1, torch.tensor([3]), math.nan),
    "1e30": lambda x: x.index_fill(1, torch.tensor([4]), 1e30),
}


FAST = ["", "weights and members"]
SLOW = ["weights", "members", "weights of each class"]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("extra", [*FAST, *(pytest.param(extra, marks=pytest.mark.slow) for extra in SLOW)])
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("classes", [1, 3])
def test_plain_equals_direct(classes: int, kind: str, extra: str) -> None:
    numbers = torch.Generator().manual_seed(7)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        for rows in (5, 60):
            scores = SCORES[kind](torch.randn(classes, rows, generator=numbers, dtype=torch.float64)).to(dtype)
            positive = torch.rand(classes, rows, generator=numbers) < 0.2
            positive[0, 0] = True
            member = torch.rand(classes, rows, generator=numbers) < 0.7 if "members" in extra else None
            if member is not None:
                positive, scores = positive & member, torch.where(member, scores, 0.0)
            shape = (classes, rows) if "each class" in extra else (rows,)
            weight = torch.rand(shape, generator=numbers, dtype=dtype) if "weights" in extra else None
            found = []
            for method in ("direct", "plain"):
                own = scores.clone().requires_grad_()
                loss, valid = smooth_ap_sums(own, positive, member, weight, TAU, method)
                (gradient,) = torch.autograd.grad(loss.sum(), own)
                found.append((loss.detach(), valid, gradient))
            (loss, valid, gradient), (plain_loss, plain_valid, plain_gradient) = found
            assert torch.equal(valid, plain_valid)
            torch.testing.assert_close(plain_loss, loss, rtol=tolerance, atol=tolerance, equal_nan=True)
            undefined = loss.isnan()[:, None]
            members = torch.ones_like(positive) if member is None else member
            assert plain_gradient[undefined & members].isnan().all()
            gradient, plain_gradient = (each.masked_fill(undefined, 0.0) for each in (gradient, plain_gradient))
            largest = max(float(gradient.abs().max()), 1e-3)
            torch.testing.assert_close(plain_gradient, gradient, rtol=0, atol=tolerance * largest)


def test_the_pair_of_a_row_with_itself_does_not_count() -> None:
    """The control of the comparison: a loss that counts it differs."""
    scores, positive = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[True, False, True]])
    loss = smooth_ap_sums(scores, positive, None, None, TAU, "plain")[0]
    sigmoid = torch.sigmoid((scores - scores.T) / TAU)
    counted = 1 - ((1 + sigmoid @ positive[0].float()) / (1 + sigmoid.sum(1)))[positive[0]].mean()
    assert abs(loss.item() - counted.item()) > 0.01


def graph_of(function: Callable[..., Tensor], *args: object) -> list[str]:
    """Return the names of what the compiler sees in the forward of ``function``."""
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        for module in graph.modules():
            if isinstance(module, torch.fx.GraphModule):
                names.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return names


def call(logits: Tensor, targets: Tensor, temperature: float | None) -> Tensor:
    return smooth_ap(logits, targets, temperature, validate_args=False)


def rows(count: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(count)
    return torch.randn(count, 1, generator=numbers).requires_grad_(), torch.arange(count) % 7 == 0


@pytest.mark.slow
def test_the_compiler_sees_every_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("fullrank" in name for name in graph_of(call, *rows(100), 0.1)), "the control: one operator on the CPU"
    everywhere(monkeypatch)
    assert not any("fullrank" in name for name in graph_of(call, *rows(100), 0.1))
    assert any("fullrank" in name for name in graph_of(call, *rows(5000), 0.1)), "too many pairs"


@pytest.mark.full
def test_few_kernels_over_temperatures_and_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each outermost loop of the code for the CPU is a kernel of an accelerator."""
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True)

    def outcome(function: Callable[..., Tensor], count: int, temperature: float | None) -> tuple[Tensor, Tensor]:
        logits, targets = rows(count)
        loss = function(logits, targets, temperature)
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    expected = {args: outcome(call, *args) for args in ((100, 0.1), (130, 0.2))}
    everywhere(monkeypatch)
    codes: list[str] = []
    for args, (loss, gradient) in expected.items():
        (ours, slope), sources = run_and_get_code(outcome, compiled, *args)
        codes = codes or sources
        torch.testing.assert_close(ours, loss, rtol=2e-6, atol=0)
        torch.testing.assert_close(slope, gradient, rtol=0, atol=2e-6 * float(gradient.abs().max()))
    loops = sum(len(re.findall(r"^ {8}(?: {4})?for\(int64_t x0=.*\n", code, re.MULTILINE)) for code in codes)
    assert 0 < loops <= MOST_KERNELS, loops
