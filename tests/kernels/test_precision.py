"""A lower precision of float32 matrix products changes no bit of a loss, and is what it was after the call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from loss_cases import FORMS, FUNCTIONS
from torch import Tensor

from fullrank.kernels import native, registration
from fullrank.kernels.registration import full_products

ROWS = 300


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute pairs by torch: the extension makes no products."""
    monkeypatch.setattr(native, "FUNCTIONS", {})


def rows(columns: int) -> Tensor:
    return torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(3)).requires_grad_()


NEWER: list[Any] = [torch.backends, torch.backends.mkldnn.matmul, torch.backends.cuda.matmul]
SETTINGS = ["high", "medium", "mkldnn", "everything"]
LOSSES = {name: form for name, form in FORMS.items() if form.loss.kind in ("scores", "embeddings", "pairs")}


@contextmanager
def products_by(setting: str) -> Iterator[None]:
    """Lower the precision of float32 products, through the older setting or the newer ones, and restore it."""
    try:
        for owner in NEWER:
            owner.fp32_precision = "none"
        if setting in ("high", "medium"):
            torch.set_float32_matmul_precision(setting)
        else:
            NEWER[setting == "mkldnn"].fp32_precision = "bf16"
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for owner in NEWER:
            owner.fp32_precision = "none"


def value_and_gradient(name: str) -> tuple[Tensor, Tensor]:
    if name == "sigmoid_sums":
        leaf = rows(3)
        value = FUNCTIONS[name](leaf)
        return value.detach(), torch.autograd.grad(value, leaf)[0]
    of_pool = LOSSES[name].loss.kind == "scores"
    leaf, targets = rows(LOSSES[name].columns if of_pool else 256), torch.arange(ROWS) % (7 if of_pool else 20)
    value = LOSSES[name].value(leaf, (targets == 0).long() if of_pool else targets)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def current() -> tuple[object, ...]:
    """Return every setting of the precision of float32 products."""
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "mixed"
    return older, *(setting.fp32_precision for setting in NEWER)


@pytest.mark.parametrize(("name", "setting"), [*zip([*LOSSES, "sigmoid_sums"], itertools.cycle(SETTINGS))])
def test_no_bit_is_changed(name: str, setting: str) -> None:
    plain = value_and_gradient(name)
    with products_by(setting):
        before = current()
        lowered = value_and_gradient(name)
        assert current() == before
    assert torch.equal(lowered[0], plain[0])
    assert torch.equal(lowered[1], plain[1])


def test_control_unguarded_products_are_rounded() -> None:
    numbers = rows(256)
    product = numbers @ numbers.t()
    plain = value_and_gradient("retrieval")
    with products_by("medium"):
        if torch.equal(numbers @ numbers.t(), product):
            pytest.skip("this processor computes float32 products in float32 at any setting")
        with mock.patch.object(registration, "full_products", nullcontext):
            rounded = value_and_gradient("retrieval")
    assert not torch.equal(rounded[1], plain[1])


@pytest.mark.parametrize("setting", SETTINGS)
def test_products_are_full_inside_the_kernels(setting: str) -> None:
    """Whatever the hardware makes of the setting: it is full precision at each product."""
    seen: list[bool] = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.Tensor.matmul or func is torch.Tensor.__matmul__:
                seen.append(registration._calls > 0)
            return func(*args, **(kwargs or {}))

    with products_by(setting), Recorder():
        value_and_gradient("retrieval")
        assert seen
        assert all(seen)
    seen.clear()
    with Recorder():
        value_and_gradient("retrieval")
    assert seen
    assert not any(seen)  # nothing is switched in the common case


def test_calls_within_calls_and_exceptions_restore_the_setting() -> None:
    with products_by("medium"):
        before = current()
        with pytest.raises(ValueError, match="inside"), full_products(), full_products():
            raise ValueError("inside")
        assert current() == before


def test_what_was_inherited_is_inherited_again() -> None:
    with products_by("everything"):
        value_and_gradient("retrieval")
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
