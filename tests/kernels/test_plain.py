"""Smooth-AP in plain operators: the same loss and gradient as pair by pair, and one graph that a compiler fuses."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fullrank.kernels.costs import TABLE
from fullrank.kernels.smooth_ap.sums import smooth_ap_sums
from fullrank.losses import smooth_ap

# The compiler itself makes an instance of every autograd.Function, which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

MOST_KERNELS = 8
LIMIT = 5e-7  # a quarter of the promise: a sigmoid far from 0 alone has 3e-7


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
    assert not any("fullrank" in name for name in graph_of(call, *rows(100), 0.1, torch.arange(100.0) % 5))
    assert any("fullrank" in name for name in graph_of(call, *rows(5000), 0.1)), "too many pairs"


@pytest.mark.full
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


def by_products(scores: Tensor, positive: Tensor, weight: Tensor | None, key_weight: Tensor | None) -> Tensor:
    """Return the gradient of the definition at temperature 1, by matrix products in the dtype of ``scores``."""
    leaf = scores.clone().requires_grad_()
    own, keys = positive.to(leaf.dtype), torch.ones_like(leaf) if key_weight is None else key_weight
    above = (leaf - leaf[:, None]).sigmoid() * (1 - torch.eye(len(leaf), dtype=leaf.dtype))
    r, n = above @ (keys * own) + keys, above @ (keys * (1 - own))
    share = own if weight is None else own * weight
    return torch.autograd.grad((share * n / (r + n)).sum() / share.sum(), leaf)[0]


@pytest.mark.parametrize("weighting", [None, "rows", "positives"])
def test_the_error_is_far_within_the_promise(weighting: str | None) -> None:
    """Tied scores, whose rounding errors have one sign, and weights from 6e-6 to 1.

    The control: the same sums in float32.
    """
    numbers = torch.Generator().manual_seed(0)
    scores, drawn = torch.randn(1500, generator=numbers).round(decimals=1), torch.rand(1500, generator=numbers)
    positive, skewed = drawn < 0.02, torch.exp(12 * (torch.rand(1500, generator=numbers) - 1))
    weight = None if weighting is None else skewed
    key_weight = weight if weighting == "rows" else None

    def error(gradient: Tensor) -> float:
        return float((gradient - exact).norm() / exact.norm())

    exact = by_products(*(None if one is None else one.double() for one in (scores, positive, weight, key_weight)))
    rows = [None if one is None else one[None] for one in (scores, positive, weight, key_weight)]
    leaf = rows[0].requires_grad_()
    loss, _ = smooth_ap_sums(leaf, rows[1], None, rows[2], 1.0, "plain", key_weight=rows[3])
    assert (
        error(torch.autograd.grad(loss.sum(), leaf)[0][0])
        <= LIMIT
        < error(by_products(scores.detach(), positive, weight, key_weight))
    )


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_a_cuda_graph_replays_a_step(temperature: float) -> None:
    """On other rows than those that were captured; the control: theirs are not the same."""

    def step(logits: Tensor, targets: Tensor) -> list[Tensor]:
        loss = call(logits, targets, temperature)
        return [loss.detach(), *torch.autograd.grad(loss, logits)]

    captured, targets = rows(4096)
    logits, targets = captured.detach().cuda().requires_grad_(), targets.cuda()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        first = step(logits, targets)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        found = step(logits, targets)
    with torch.no_grad():
        logits.copy_(logits.flip(0).sin())
    graph.replay()
    for ours, theirs, before in zip(found, step(logits, targets), first):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # the first that inductor itself makes
def test_inductor_compiles_it_for_cuda() -> None:
    torch._dynamo.reset()
    found = []
    for function in (call, torch.compile(call, fullgraph=True, mode="reduce-overhead")):
        for _ in range(3):  # the first steps warm up and capture
            logits, targets = rows(1000)
            leaf = logits.detach().cuda().requires_grad_()
            loss = function(leaf, targets.cuda(), 0.1)
            found.append((loss.detach().clone(), torch.autograd.grad(loss, leaf)[0].clone()))
    torch.testing.assert_close(found[5], found[0], rtol=2e-6, atol=1e-8)
