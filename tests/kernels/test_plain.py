"""Smooth-AP in plain operators: the same loss and gradient as pair by pair, and one graph that a compiler fuses."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fullrank.kernels.costs import TABLE
from fullrank.losses import smooth_ap

# The compiler itself makes an instance of every autograd.Function, which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

MOST_KERNELS = 8


def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU take the plain form wherever an accelerator would."""
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(plain_pairs=TABLE["accelerator"].plain_pairs))


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


def call(logits: Tensor, targets: Tensor, temperature: float | None, weight: Tensor | None = None) -> Tensor:
    return smooth_ap(logits, targets, temperature, sample_weight=weight, validate_args=False)


def rows(count: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(count)
    return torch.randn(count, 1, generator=numbers).requires_grad_(), torch.arange(count) % 7 == 0


@pytest.mark.slow
def test_the_compiler_sees_every_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("fullrank" in name for name in graph_of(call, *rows(100), 0.1)), "the control: one operator on the CPU"
    everywhere(monkeypatch)
    for weight in (None, torch.arange(100.0) % 5):
        assert not any("fullrank" in name for name in graph_of(call, *rows(100), 0.1, weight))
    assert any("fullrank" in name for name in graph_of(call, *rows(5000), 0.1)), "too many pairs"


@pytest.mark.slow
def test_a_graph_of_weighted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have a weight of 0. The control: no weights."""
    weight, found = torch.arange(100.0) % 5, []
    torch._dynamo.reset()
    for function, given in ((call, weight), (torch.compile(call, fullgraph=True), weight), (call, None)):
        logits, targets = rows(100)
        loss = function(logits, targets, 0.1, given)
        found.append((loss.detach(), torch.autograd.grad(loss, logits)[0]))
        everywhere(monkeypatch)  # for the compiled one
    torch.testing.assert_close(found[1], found[0], rtol=2e-6, atol=2e-7)
    assert (found[2][0] - found[0][0]).abs() > 1e-3


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
