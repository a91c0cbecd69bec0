"""Transforms and autocast around the losses: the plain gradient, bit for bit, or one sentence that says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from loss_cases import CLASSES, FORMS, FUNCTIONS, OF_POOL, holds, normal, slowly
from on_ranks import on_ranks
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from workers import error_of

from fullrank.kernels import native

# The warnings of the losses are tested elsewhere. The first use of forward mode makes torch warn of its own scripting.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*torch.jit.script"),
]

FULL = pytest.mark.full
over_functions = pytest.mark.parametrize("name", [*slowly(FORMS, FULL), "sigmoid_sums"])
NO_TRANSFORM = r"expected backward\(\) or torch\.autograd\.grad, got a transform"


def gradient_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


def check_gradient(function: Callable[[Tensor], Tensor]) -> None:
    """Assert that torch.func gives the value and the gradient of autograd, bit for bit."""
    x = normal(60, 3)
    gradient, value = torch.func.grad_and_value(function)(x)
    assert torch.equal(value, function(x))
    assert torch.equal(gradient, gradient_of(function, x))
    _, pull = torch.func.vjp(function, x)
    assert torch.equal(pull(torch.ones_like(value))[0], gradient)


def check_meta(function: Callable[[Tensor], Tensor]) -> None:
    """Assert that value and gradient have the shapes that they have elsewhere."""
    leaf = normal(60, 3).float().to("meta").requires_grad_()
    with FlopCounterMode(display=False):
        for _ in range(2):
            value = function(leaf)
        value.backward()  # type: ignore[no-untyped-call]
    assert (value.is_meta, value.shape, value.dtype) == (True, (), torch.float32)
    assert leaf.grad is not None
    assert (leaf.grad.is_meta, leaf.grad.shape) == (True, leaf.shape)


def module_of(name: str) -> Callable[[Tensor], Tensor]:
    """Return the module of a loss that is a pure function too, as a function of scores."""
    return lambda x: FORMS[name].value(x, CLASSES.to(x.device), as_module=True, validate_args=False)


MODULES = [name for name, form in FORMS.items() if form.is_first and form.is_function and form.loss.module]
over_both = pytest.mark.parametrize(
    ("name", "function"),
    [
        *(pytest.param(*name.values, FUNCTIONS[name.values[0]], marks=name.marks) for name in slowly(FORMS, FULL)),
        ("sigmoid_sums", FUNCTIONS["sigmoid_sums"]),
        *(pytest.param(name, module_of(name), id=f"{name} module") for name in MODULES),
    ],
)


@over_both
def test_func_grad_gives_the_plain_gradient(name: str, function: Callable[[Tensor], Tensor]) -> None:
    # C computes all of NDCG outside of transforms, with other roundings: see test_ndcg.py.
    library = {} if name.startswith("ndcg") else native.FUNCTIONS
    with holds("func", name, rf"{NO_TRANSFORM}|^assert"), mock.patch.object(native, "FUNCTIONS", library):
        check_gradient(function)


@over_both
def test_meta_tensors_have_shapes(name: str, function: Callable[[Tensor], Tensor]) -> None:
    with holds("meta", name, "expected a tensor with values"):
        check_meta(function)


@pytest.mark.parametrize("name", slowly(OF_POOL, FULL))
def test_a_queue_and_a_drawn_pool_of_meta_tensors(name: str) -> None:
    """No row enters the queue, and no temperature is found."""
    loss = FORMS[name].make(num_classes=3, queue_size=8, max_pool_size=30, validate_args=False)
    check_meta(lambda x: loss(x, CLASSES.to("meta")))
    assert len(loss.queue) == 0
    assert loss.current_temperature == getattr(loss, "temperature", None)


def second_derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the squared gradient, and the same by differences."""
    slope, gradient = (lambda x: torch.func.grad(function)(x).square().sum()), gradient_of(function, x)
    ends = [gradient_of(function, x + sign * 1e-4 * gradient) for sign in (1, -1)]
    return torch.func.grad(slope)(x), (ends[0] - ends[1]) / 1e-4


def dual_tensors(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Any, Tensor]:
    """Return the slope along x by forward mode, and the same from the gradient."""
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent
    return slope, (gradient_of(function, x) * x).sum()


FORWARD, BATCH = "expected reverse-mode differentiation, got forward mode", "expected plain tensors, got a batch of "
# What is found, what is right, and how it is refused.
TRANSFORMS: dict[Callable[..., tuple[Any, Tensor]], str] = {
    second_derivative: "expected a first derivative, got a second one",
    dual_tensors: FORWARD,
    lambda f, x: (torch.func.jvp(f, (x,), (x.cos(),))[1], (gradient_of(f, x) * x.cos()).sum()): FORWARD,
    lambda f, x: (torch.vmap(f)(torch.stack([x, 2 * x])), torch.stack([f(x), f(2 * x)])): BATCH,
    lambda f, x: (torch.vmap(torch.func.grad(f))(x[None]), gradient_of(f, x)[None]): BATCH,
}


@over_functions
def test_what_a_kernel_cannot_do_is_refused_in_one_sentence(name: str) -> None:
    """What it does not refuse is right; torch can do everything with the losses that it differentiates itself."""
    outcomes = []
    with holds("transforms", name):
        for transform, sentence in TRANSFORMS.items():
            found: list[Tensor] = []
            kind, text = error_of(lambda t=transform, found=found: found.extend(t(FUNCTIONS[name], normal(60, 3))))
            assert kind == "none" or re.search(f"{sentence}|{NO_TRANSFORM}", text), text
            if kind == "none":
                rtol, atol = (1e-5, 1e-9) if transform is second_derivative else (1e-12, 1e-14)
                torch.testing.assert_close(*found, rtol=rtol, atol=atol)
            outcomes.append(kind)
        if name in FORMS and FORMS[name].loss.kind in ("classes", "elements", "tokens"):
            assert {*outcomes} == {"none"}


@pytest.mark.parametrize("name", slowly(FORMS, FULL))
def test_a_batch_of_any_argument_is_right_or_refused_in_one_sentence(name: str) -> None:
    form, x = FORMS[name], normal(12, 8)[:, : max(3, FORMS[name].columns)]
    given = form.arguments(x, CLASSES[:12])
    given |= {"sample_weight": normal(12).square()} if form.loss.takes("sample_weight") else {}
    for argument, value in given.items():
        for is_module in {form.loss.module is not None, False}:
            loss = form.call(is_module, num_classes=x.shape[1])
            batched = torch.vmap(lambda one, loss=loss, argument=argument: loss(**{**given, argument: one}))
            found: list[Tensor] = []
            kind, text = error_of(lambda value=value, call=batched, found=found: found.append(call(value[None])))
            assert kind == "none" or re.search(f"{BATCH}|{NO_TRANSFORM}", text), (argument, text)
            if kind == "none":
                torch.testing.assert_close(found[0][0], loss(**given), rtol=1e-12, atol=1e-14, equal_nan=True)


# Autocast: what a loss sums over a pool, half precision cannot hold

MODULES_OF_FORMS = [name for name, form in FORMS.items() if form.loss.module is not None]
# Losses whose sums are matrix products, which autocast rounds, for so many rows.
BLIND = {60: ["pauc_pairwise", "retrieval"], 3000: ["retrieval"]}


def call_of(name: str, rank: int, count: int) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    """Return a module and its arguments, the first with a gradient, on a pool that half precision cannot sum."""
    generator, form = torch.Generator().manual_seed(rank), FORMS[name]
    rows = torch.randn(count, form.columns, generator=generator)
    classes = 40 if form.loss.kind == "embeddings" else max(2, form.columns)
    targets = torch.randint(0, classes, (count,), generator=generator)
    if classes == 2:
        targets = (torch.rand(count, generator=generator) < 0.1).long()
    arguments = form.arguments(rows, targets, torch.randint(0, 9, (count,), generator=generator))
    first = next(iter(arguments))
    return form.make(), {**arguments, first: arguments[first].clone().requires_grad_()}


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.full)], ids=["pairs", "bins"])
@on_ranks(2)
def test_no_bit_is_changed_by_autocast(rank: int, count: int) -> None:
    """Of losses and gradients; the control are losses that are blind to it."""
    for name, is_guarded in [*((name, True) for name in MODULES_OF_FORMS), *((name, False) for name in BLIND[count])]:
        outcomes = []
        for enabled in (False, True):
            loss, arguments = call_of(name, rank, min(count, 600) if "retrieval" in name else count)
            blind = mock.patch.object(torch, "is_autocast_enabled", return_value=False)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), nullcontext() if is_guarded else blind:
                value = loss(**arguments)
                value = value.nan_to_num().sum() if value.ndim else value
                (gradient,) = torch.autograd.grad(value, next(iter(arguments.values())))
            outcomes.append(torch.cat([value.detach().reshape(1), gradient.flatten() * 100]))
        error = float((outcomes[0] - outcomes[1]).norm() / outcomes[0].norm())
        assert error == 0.0 if is_guarded else error > 2e-5, (name, error)
