"""Every verb under every wrapper gives the loss, the gradient and the norm of one process with all the rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import all_batches, make_batch, make_window, num_mtp, num_valid, sum_loss
from collective_counter import CollectiveCounter
from on_ranks import on_ranks
from subjects import LIMITS, assert_exact, error, gradient, wrap
from verbs import COUNTS, UNDER_HSDP, VERBS, WRAPPERS_OF, factor_in, model_of, one_process_of

import fullrank

MOST = 0.5  # max_norm, as a share of the norm

# Where a wrapper communicates in the last backward alone, the ranks may have different numbers of micro-batches.
FREE = {
    (verb, kind)
    for verb in VERBS
    if verb.startswith(("accumulate", "terms", "factor", "DeferredMean window", "pooled_backward"))
    and not verb.endswith(("each", "shard"))
    for kind in ("plain", "ddp", "replicate")
    if (verb, kind) not in {("pooled_backward", "replicate"), ("DeferredMean window", "replicate")}
}


def windows_of(layout: str) -> list[list[Any]]:
    """Return the window of every rank. ``"one"`` is the last one that ``windows`` cuts four micro-batches into."""
    ranks = range(dist.get_world_size())
    if layout != "one":
        return [make_window(layout, rank) for rank in ranks]
    return [[*fullrank.windows([make_batch(rank, index) for index in range(4)], 3)][-1] for rank in ranks]


MOST_USED = ("accumulate", "DeferredMean", "pooled_backward")
UNDER_FSDP2 = ("accumulate each", "terms means", "factor last", "linear", "DeferredMean window", "pooled_backward each")


def cases() -> list[Any]:
    """Return world size, verb, wrapper and dtype; the fast tests have the wrappers that most people use.

    `make test` has the verbs that are most used under every wrapper, and the others under DDP, some also under FSDP2.
    """
    slow, full = pytest.mark.slow, pytest.mark.full
    found = []
    for verb, kinds in WRAPPERS_OF.items():
        for kind in kinds:
            is_common = kind == "ddp" or (kind in ("plain", "fsdp2") and verb in MOST_USED)
            is_common = is_common and not verb.endswith(("scale", "factors", "some"))
            mark = slow if verb in MOST_USED or kind == "ddp" or (kind == "fsdp2" and verb in UNDER_FSDP2) else full
            found.append(pytest.param(2, verb, kind, "float64", marks=[] if is_common else [mark]))
            found.append(pytest.param(3, verb, kind, "float64", marks=full))
            mark = slow if kind == "ddp" and verb in MOST_USED else full
            found.append(pytest.param(2, verb, kind, "float32", marks=mark))
    shapes = [(2, "(1, W)"), (2, "(W, 1)"), (1, "(1, W)")]  # dimensions of one rank, of which the verbs take turns
    for number, verb in enumerate(sorted(UNDER_HSDP, key=lambda verb: verb not in MOST_USED)):
        mark = slow if verb in ("accumulate", "accumulate shard", "pooled_backward") else full
        found.append(pytest.param(4, verb, "hsdp", "float64", marks=mark))
        found.append(pytest.param(4, verb, "hsdp", "float32", marks=full))
        for turn, (world_size, shape) in enumerate(shapes):
            mark = slow if verb in MOST_USED and turn == number % 3 else full
            found.append(pytest.param(world_size, verb, f"hsdp {shape}", "float64", marks=mark))
    return found


@pytest.mark.parametrize(("world_size", "verb", "kind", "dtype"), cases())
@on_ranks(...)
def test_equals_one_process(rank: int, verb: str, kind: str, dtype: str) -> None:
    """Uneven tokens, a rank without any, a window without any, a window of one, unequal numbers of micro-batches.

    One model takes a step with each.
    """
    kept, model, errors = getattr(torch, dtype), wrap(model_of(verb, dtype), kind), {}
    for layout in ["full", "uneven", "none", "one", *(["unequal"] if (verb, kind) in FREE else [])]:
        model.zero_grad()
        window = windows_of(layout)
        reference, expected = one_process_of(verb, [batch for batches in window for batch in batches], dtype)
        nan = {"scale": torch.tensor(torch.nan)} if layout == "none" else {}  # a sum over nothing, which is not used
        loss = VERBS[verb](model, [batch | nan for batch in window[rank]])
        assert (loss.dtype, loss.shape, loss.requires_grad) == (kept, (), False)
        assert all(parameter.grad is not None for parameter in model.parameters())
        errors[layout] = error(gradient(model), expected.gradient)
        errors[f"{layout} loss"] = error(loss, expected.loss)
        errors[f"{layout} norm"] = error(fullrank.total_grad_norm(model), expected.gradient.norm())
        most = MOST * float(expected.gradient.norm())
        torch.nn.utils.clip_grad_norm_(reference.parameters(), most)
        fullrank.clip_grad_norm_(model, most)
        errors[f"{layout} clipped"] = error(gradient(model), gradient(reference))
        if layout == "none":
            assert float(gradient(model).abs().max()) == 0
    assert_exact(errors, dtype)


# Headers, reductions and broadcasts of a buffer in a window of three micro-batches. DDP has one bucket here, FSDP2 two
# groups of parameters, which it gathers with the collective of the headers; HSDP reduces over shards and replicas.
COLLECTIVES = {
    (2, "accumulate", "ddp"): (2, 1, 1),
    (2, "accumulate", "fsdp2"): (0, 2, 0),
    (4, "accumulate", "hsdp"): (0, 4, 0),
    (2, "accumulate each", "ddp"): (2, 3, 3),
    (2, "accumulate each", "fsdp2"): (0, 6, 0),
    (4, "accumulate shard", "hsdp"): (0, 8, 0),
    (2, "factor last", "ddp"): (3, 1, 1),
    (2, "DeferredMean", "ddp"): (4, 3, 3),
    (2, "DeferredMean", "fsdp2"): (0, 6, 0),
    (2, "DeferredMean window", "ddp"): (3, 1, 1),
    (2, "DeferredMean window", "fsdp2"): (0, 2, 0),
    (2, "pooled_backward", "ddp"): (5, 1, 1),
    (2, "pooled_backward", "fsdp2"): (0, 2, 0),
    (4, "pooled_backward shard", "hsdp"): (0, 8, 0),
    (2, "maybe_no_sync", "ddp"): (1, 2, 1),  # one reduction is that of the losses, by hand
    (2, "maybe_no_sync", "fsdp2"): (0, 3, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "verb", "kind"), COLLECTIVES)
@on_ranks(...)
def test_number_of_collectives(rank: int, verb: str, kind: str) -> None:
    model = wrap(model_of(verb, buffers=True), kind)
    for _ in range(3):  # a wrapper sets itself up in the first two: DDP arranges its buckets
        model.zero_grad()
        with CollectiveCounter() as counter:
            VERBS[verb](model, make_window("full", rank))
    headers = counter.counts["_allgather_base_.default"] if kind == "ddp" else 0
    reductions = counter.counts["allreduce_.default"] + counter.counts["_reduce_scatter_base_.default"]
    found = headers, reductions, counter.counts["broadcast_.default"]
    assert found == COLLECTIVES[dist.get_world_size(), verb, kind]


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("mean of means", "ddp"),
        ("fixed length", "ddp"),
        ("unshifted count", "ddp"),
        ("count alone", "ddp"),
        ("divided before the sum", "plain"),
        ("second sync", "plain"),
        ("one count of two losses", "ddp"),
        ("no factor", "plain"),
        ("no factor", "ddp"),
        ("no factor", "fsdp2"),
    ],
)
@on_ranks(2)
def test_control_what_is_widely_done_is_wrong(rank: int, way: str, kind: str) -> None:
    verb, options = {
        "unshifted count": ("accumulate", {"count": partial(fullrank.count_valid_tokens, shift=False)}),
        "one count of two losses": ("terms backward", {"count": dict.fromkeys(COUNTS, num_mtp)}),
        "no factor": ("factor last", {"use": factor_in("last", 1.0)}),
    }.get(way, ("", {}))
    model, batches = wrap(model_of(verb), kind), make_window("full", rank)
    expected = one_process_of(verb, all_batches("full"))[1].gradient
    number = sum(map(num_valid, all_batches("full")))
    if verb:
        VERBS[verb](model, batches, **options)
    for index, batch in enumerate([] if verb else batches):
        with fullrank.maybe_no_sync(model, index, len(batches)):
            terms = {"mean of means": len(batches) * max(num_valid(batch), 1), "fixed length": 2 * len(batches) * 8}
            (sum_loss(model, batch) / terms.get(way, 1)).backward()
    for parameter in model.parameters():
        if way == "count alone":  # DDP has divided by the number of ranks already
            parameter.grad /= number
        elif way == "divided before the sum":
            parameter.grad /= sum(map(num_valid, batches)) * dist.get_world_size()
            dist.all_reduce(parameter.grad)
        elif way == "second sync":
            for _ in range(2):
                dist.all_reduce(parameter.grad)
            parameter.grad /= number
    assert error(gradient(model), expected) > 0.05 > LIMITS["float64"]
