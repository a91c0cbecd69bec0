"""A second derivative through a compiled ranking loss raises. It must never be silently zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fullrank.losses import pauc_at_budget, recall_at_quantile, sigmoid_sums, smooth_ap

pytestmark = pytest.mark.slow

SIZE = 24
TARGETS = torch.arange(SIZE) % 4 == 0
KEYS, WEIGHTS = torch.linspace(-1, 1, 7, dtype=torch.float64), torch.ones(7, 2, dtype=torch.float64)

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "smooth_ap": lambda scores: smooth_ap(scores, TARGETS, temperature=0.3),
    "recall": lambda scores: recall_at_quantile(scores, TARGETS, quantile=0.3, temperature=0.3),
    "pauc": lambda scores: pauc_at_budget(scores, TARGETS, beta=0.5, surrogate="trapezoid"),
    "pauc_pairwise": lambda scores: pauc_at_budget(scores, TARGETS, beta=0.5, surrogate="pairwise"),
    "pauc_dro": lambda scores: pauc_at_budget(scores, TARGETS, surrogate="dro"),
    "sigmoid_sums": lambda scores: sigmoid_sums(scores[:, 0], KEYS, WEIGHTS, 0.3).sum(),
}


def scores() -> Tensor:
    """Return (SIZE, 1) scores that require a gradient."""
    numbers = torch.randn(SIZE, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return numbers.requires_grad_()


@pytest.mark.parametrize("name", LOSSES)
def test_a_penalty_on_the_gradient_of_a_compiled_loss_is_refused(name: str) -> None:
    leaf = scores()
    (expected,) = torch.autograd.grad(LOSSES[name](leaf), leaf)
    value = torch.compile(LOSSES[name], fullgraph=True, backend="eager")(leaf)
    (found,) = torch.autograd.grad(value, leaf, create_graph=True)
    assert found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="a ranking loss: expected a first derivative, got a second one"):
        (value + found.square().sum()).backward()


# Dynamo breaks the graph at `grad` and compiles the backward as well, at which it warns of its own use of tensors.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["smooth_ap", "sigmoid_sums"])
def test_a_penalty_inside_the_compiled_function_is_refused(name: str) -> None:
    def penalised(leaf: Tensor) -> Tensor:
        value = LOSSES[name](leaf)
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        return value + gradient.square().sum()

    value = torch.compile(penalised, backend="eager")(scores())
    with pytest.raises(RuntimeError, match="a ranking loss: expected a first derivative, got a second one"):
        value.backward()


@pytest.mark.parametrize("name", ["smooth_ap", "sigmoid_sums"])
def test_aot_autograd_refuses_a_second_derivative_itself(name: str) -> None:
    """AOTAutograd, which inductor uses too, raises an error of its own."""
    leaf = scores()
    value = torch.compile(LOSSES[name], fullgraph=True, backend="aot_eager")(leaf)
    (found,) = torch.autograd.grad(value, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        found.square().sum().backward()


@pytest.mark.parametrize("name", ["smooth_ap", "sigmoid_sums"])
@pytest.mark.parametrize("form", ["compiled", "compiled, backward", "eager"])
def test_a_penalty_asked_for_the_inputs_alone(name: str, form: str) -> None:
    """The gap that docs/reliability.md names: AOTAutograd leaves the penalty out when only the inputs are asked for.

    The backward of its graph saves nothing that leads to the inputs, so torch finds no path to them. ``backward()``
    and the loss that is not compiled raise.
    """
    leaf = scores()
    function = LOSSES[name] if form == "eager" else torch.compile(LOSSES[name], fullgraph=True, backend="aot_eager")
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
    penalised = value + gradient.square().sum()
    if form == "compiled":
        assert torch.equal(torch.autograd.grad(penalised, leaf)[0], gradient)
    else:
        with pytest.raises(RuntimeError, match=r"double backward|expected a first derivative, got a second one"):
            penalised.backward() if form == "compiled, backward" else torch.autograd.grad(penalised, leaf)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_loss_without_gradient_needs_none(backend: str) -> None:
    with torch.no_grad():
        value = torch.compile(LOSSES["smooth_ap"], fullgraph=True, backend=backend)(scores())
        assert torch.equal(value, LOSSES["smooth_ap"](scores()))
    assert not value.requires_grad
