"""A second derivative through a compiled ranking loss raises. It must never be silently zero."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from loss_cases import FORMS, FUNCTIONS, OF_POOL, normal, slowly
from torch import Tensor
from torch._subclasses.fake_utils import CrossRefFakeMode

pytestmark = pytest.mark.slow

REFUSED = "a ranking loss: expected a first derivative, got a second one"
BOTH = ["smooth_ap", pytest.param("sigmoid_sums", marks=pytest.mark.full)]  # the kernels are registered alike
OTHERS = [name for name in OF_POOL if name != "smooth_ap"]


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """The functions share their code, of which the compiler keeps a few graphs alone."""
    torch._dynamo.reset()


def scores() -> Tensor:
    return normal(60, 3).requires_grad_()


@pytest.mark.parametrize("name", [*BOTH, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_a_penalty_on_the_gradient_of_a_compiled_loss_is_refused(name: str) -> None:
    leaf = scores()
    (expected,) = torch.autograd.grad(FUNCTIONS[name](leaf), leaf)
    value = torch.compile(FUNCTIONS[name], fullgraph=True, backend="eager")(leaf)
    (found,) = torch.autograd.grad(value, leaf, create_graph=True)
    assert found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match=REFUSED):
        (value + found.square().sum()).backward()


# Dynamo breaks the graph at `grad` and compiles the backward as well, at which it warns of its own use of tensors.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BOTH)
def test_a_penalty_inside_the_compiled_function_is_refused(name: str) -> None:
    def penalised(leaf: Tensor) -> Tensor:
        value = FUNCTIONS[name](leaf)
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        return value + gradient.square().sum()

    value = torch.compile(penalised, backend="eager")(scores())
    with pytest.raises(RuntimeError, match=REFUSED):
        value.backward()


@pytest.mark.parametrize("form", ["compiled", "compiled, backward", "eager"])
def test_a_penalty_asked_for_the_inputs_alone(form: str) -> None:
    """The gap that docs/reliability.md names: AOTAutograd leaves the penalty out when only the inputs are asked for.

    The backward of its graph saves nothing that leads to the inputs, so torch finds no path to them. ``backward()``,
    at which it raises an error of its own, and the loss that is not compiled raise.
    """
    leaf = scores()
    function = FUNCTIONS["smooth_ap"]
    if form != "eager":
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
    penalised = value + gradient.square().sum()
    if form == "compiled":
        assert torch.equal(torch.autograd.grad(penalised, leaf)[0], gradient)
    else:
        with pytest.raises(RuntimeError, match=rf"double backward|{REFUSED}"):
            penalised.backward() if form == "compiled, backward" else torch.autograd.grad(penalised, leaf)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the comparison reads
@pytest.mark.parametrize("name", [*slowly(FORMS, pytest.mark.full), "sigmoid_sums"])
def test_the_compiler_knows_the_shapes_and_dtypes_of_what_kernels_return(name: str) -> None:
    """Of forward and backward, each operator next to the one that stands for it."""
    leaf = scores()
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True), CrossRefFakeMode():
        FUNCTIONS[name](leaf).backward()


def test_a_compiled_loss_without_gradient_needs_none() -> None:
    with torch.no_grad():
        value = torch.compile(FUNCTIONS["smooth_ap"], fullgraph=True, backend="eager")(scores())
        assert torch.equal(value, FUNCTIONS["smooth_ap"](scores()))
    assert not value.requires_grad
