"""Clipping refuses gradients that FSDP2 or DDP has not reduced."""

from __future__ import annotations

import re
import warnings
from functools import partial

import pytest
import torch
from batches import all_batches, make_batch, make_window, one_process, sum_loss
from on_ranks import on_ranks
from subjects import Model, error, wrap
from verbs import run_window
from workers import error_of

import fullrank

# Per step: the micro-batches in no_sync, whether one more reduces, and whether a forward without gradients follows.
WAYS = {
    "reduced": (0, True, False),
    "reduced, then evaluated": (0, True, True),
    "accumulated, then evaluated": (2, True, True),
    "not reduced": (1, False, False),
    "not reduced, then evaluated": (1, False, True),
    "two not reduced": (2, False, False),
    "two not reduced, then evaluated": (2, False, True),
}


@pytest.mark.parametrize(
    ("way", "has_views"), [*((way, False) for way in WAYS), ("two not reduced, then evaluated", True)]
)
@on_ranks(2)
def test_a_warning_comes_where_the_norms_differ_and_nowhere_else(rank: int, way: str, has_views: bool) -> None:
    """Gradients of several backwards in no_sync look like reduced ones at first: they warn from the second call on."""
    model, counts, differ = wrap(Model(), "ddp", gradient_as_bucket_view=has_views), [], []
    for num_local, reduces, evaluates in [WAYS[way]] * 3 + [WAYS["reduced, then evaluated"]]:
        model.zero_grad()
        for index in range(num_local):
            with model.no_sync():
                sum_loss(model, make_batch(rank, index)).backward()
        if reduces:
            sum_loss(model, make_batch(rank, num_local)).backward()
        if evaluates:
            with torch.no_grad():
                model(make_batch(rank, 5)["tokens"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            norms = fullrank.all_gather_no_grad(fullrank.clip_grad_norm_(model, 1.0)[None])
        counts.append(sum("inside no_sync" in str(one.message) for one in caught))
        differ.append(bool((norms[0] - norms[1]).abs() > 1e-6 * norms[0]))
    num_local, reduces, _ = WAYS[way]
    wanted = [0, 0, 0] if reduces else [1, 1, 1] if num_local == 1 else [0, 1, 1]
    assert counts == [*wanted, 0]
    assert differ == [not reduces] * 3 + [False]


@pytest.mark.parametrize(("kind", "listed"), [("fsdp2", False), ("hsdp", True)])
@on_ranks(4)
def test_gradients_that_fsdp_holds_back_are_refused(rank: int, kind: str, listed: bool) -> None:
    """Those that another model has reduced can be clipped meanwhile."""
    model, other, batches = wrap(Model(), kind), wrap(Model(), kind), make_window("full", rank)
    for _ in range(2):  # the second time .grad is there, from before
        if kind == "hsdp":
            model.set_requires_all_reduce(False)
        else:
            model.set_requires_gradient_sync(False)
        sum_loss(model, batches[0]).backward()
    sum_loss(other, batches[0]).backward()
    parameters = list(model.parameters()) if listed else model
    for call in (partial(fullrank.clip_grad_norm_, max_norm=1.0), fullrank.total_grad_norm):
        error_class, text = error_of(lambda call=call: call(parameters))
        assert error_class == "RuntimeError"
        assert re.match(r"(clip_grad_norm_|total_grad_norm) failed on ranks ", text)
        assert "gradients: expected final gradients, got 5 that FSDP2 holds back unreduced" in text
        assert "maybe_no_sync does, or call set_requires_gradient_sync(True)" in text
    assert fullrank.total_grad_norm(other) > 0
    assert all(parameter.grad is None for parameter in model.parameters())  # control: .grad shows a norm of 0
    fullrank.discard_gradients_(model)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    run_window(model, batches)
    expected = one_process(Model(), all_batches("full")).gradient.norm()
    assert error(fullrank.clip_grad_norm_(parameters, None), expected) <= 1e-12


@on_ranks(2)
def test_gradients_inside_no_sync_are_refused(rank: int) -> None:
    """Afterwards it warns, which the first test compares with the norms."""
    model = wrap(Model(), "ddp")
    with model.no_sync():
        sum_loss(model, make_batch(rank, 0)).backward()
        kind, text = error_of(lambda: fullrank.clip_grad_norm_(model, 1.0))
    assert kind == "RuntimeError"
    assert "expected final gradients, got those of DDP inside no_sync" in text
    text = "total_grad_norm: the last forward of the DDP module with gradients ran inside no_sync"
    with pytest.warns(UserWarning, match=text):
        fullrank.total_grad_norm(model)
