"""The agreement that opens every call. What ranks can do wrong in it is in test_faults.py and test_drift.py."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loss_cases import LOSSES, normal
from on_ranks import common_error, on_ranks, slow_but
from torch.utils.checkpoint import checkpoint
from workers import error_of

import fullrank
from fullrank.distributed import group
from fullrank.distributed.header import Checksum, DeviceCheck, Offer, agree_on
from fullrank.large import ShardedLoss
from fullrank.metrics import RecallAtQuantile


def in_warm_up(name: str | None) -> fullrank.LossWarmupWrapper:
    warmup = fullrank.SoftmaxFocalLoss(name=name and f"{name} warm-up")
    return fullrank.LossWarmupWrapper(warmup, fullrank.SmoothAPLoss(3, name=name), warmup_steps=1)


NAMED: dict[str, Any] = {
    name: partial(lambda form, name: form.make(num_classes=form.columns, queue_size=8, name=name), loss.first)
    for name, loss in LOSSES.items()
    if "name" in loss.arguments
} | {"warm_up": in_warm_up}


HEADS = ["first head", "second head"]

CHECKPOINTED: dict[str, Any] = {
    "smooth_ap": lambda x, y: fullrank.SmoothAPLoss(num_classes=1, queue_size=8, temperature=0.5)(x, y),
    "sharded": lambda x, y: ShardedLoss(fullrank.SmoothAPLoss(temperature=0.5))(x, y),
    "focal": lambda x, y: fullrank.SigmoidFocalLoss()(x, y[:, None].to(x)),
    "gather": lambda x, y: fullrank.all_gather_with_grad(x).square().sum(),
    # What comes after the mean is saved: else the non-re-entrant form stops before it, and there is nothing to refuse.
    "global_mean": lambda x, y: fullrank.global_mean(x.square().sum(), 4).exp(),
    "global_sum": lambda x, y: fullrank.global_sum(x.square().sum()).log(),
}


@pytest.mark.parametrize("call", slow_but(("smooth_ap", "sharded"), CHECKPOINTED))
@on_ranks(2)
def test_a_call_inside_checkpoint_is_refused(rank: int, call: str) -> None:
    """Where it is, and nobody waits: both forms run the forward twice, once in backward. No backward communicates."""
    for reentrant, odd_ranks in ((False, (0,)), (False, (0, 1)), (True, (0, 1))):
        logits, targets = torch.randn(4, 1, requires_grad=True), torch.tensor([0, 1, 0, 1])
        inside = partial(checkpoint, CHECKPOINTED[call], use_reentrant=reentrant)
        kind, text = error_of((inside if rank in odd_ranks else CHECKPOINTED[call])(logits, targets).backward)
        assert kind == ("RuntimeError" if rank in odd_ranks else "none")
        assert ("call the loss outside checkpoint" in text) == (rank in odd_ranks)
        values = fullrank.all_gather_no_grad(CHECKPOINTED[call](logits, targets)[None])
        assert values[0] == values[1] or call == "gather"  # of which each rank has its own part


@on_ranks()
def test_the_header_carries_any_total_and_every_word(rank: int) -> None:
    """Numbers and tensors of any kind arrive as float64, in rank order; rows and checksums as they are."""
    totals = [torch.tensor([rank + 0.1], dtype=torch.float64, requires_grad=True), 3]
    totals += [torch.tensor(0.5, dtype=torch.bfloat16), -(2**60)]
    checksum = Checksum(torch.tensor(-(2**62), dtype=torch.int64), "queue", "")
    offer = Offer(None, rows=2**40 + rank, totals=totals, checksum=checksum)
    agreement, ranks = agree_on("a call", dist.group.WORLD, lambda: offer), range(dist.get_world_size())
    assert list(agreement.rows) == [2**40 + other for other in ranks]
    assert agreement.totals == [[other + 0.1, 3.0, 0.5, -(2.0**60), *[0.0] * 4] for other in ranks]


NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "meta": ({"totals": [torch.ones((), device="meta")]}, "meta"),
    "two elements": ({"totals": [torch.ones(2)]}, "2 elements"),
    "text": ({"totals": ["x"]}, "not a float"),
}


@pytest.mark.parametrize("kind", NONSENSE)
@on_ranks()
def test_a_header_that_cannot_be_made_is_an_error_on_every_rank(rank: int, kind: str) -> None:
    given, text = NONSENSE[kind]
    error, message = error_of(
        lambda: agree_on("a call", dist.group.WORLD, lambda: Offer(None, **given if rank == 1 else {}))
    )
    assert error in ("RuntimeError", "TypeError", "ValueError")
    assert message.startswith("a call failed on rank 1: ")
    assert text in message


def test_a_process_alone_reads_the_checks_of_its_arguments() -> None:
    def offer(failed: bool) -> Offer[int]:
        return Offer(3, check=DeviceCheck(torch.tensor(failed), lambda: ValueError("out of range")))

    assert agree_on("call", None, lambda: offer(False)).value == 3
    with pytest.raises(ValueError, match="out of range"):
        agree_on("call", None, lambda: offer(True))


@pytest.mark.parametrize(
    "names",
    [
        ("SmoothAPLoss", "SoftmaxFocalLoss"),
        ("all_gather_no_grad", "SmoothAPLoss"),
        ("SoftmaxFocalLoss", "RecallAtQuantile.compute"),
    ],
)
@on_ranks()
def test_ranks_in_different_calls_are_named(rank: int, names: tuple[str, str]) -> None:
    logits, targets = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    calls: dict[str, Any] = {
        "SmoothAPLoss": lambda: fullrank.SmoothAPLoss(num_classes=2)(logits, targets),
        "SoftmaxFocalLoss": lambda: fullrank.SoftmaxFocalLoss()(logits, targets),
        "all_gather_no_grad": lambda: fullrank.all_gather_no_grad(logits),
        "RecallAtQuantile.compute": lambda: RecallAtQuantile(2).compute(),
    }
    error, text = error_of(calls[names[rank == 1]])
    assert error == "RuntimeError"
    assert text.startswith("ranks: expected the same on every rank, got call: ")
    assert "Every rank must make the same calls in the same order. If the loaders of the ranks have different" in text
    assert text.endswith("It makes its metrics with sync_on_compute=False.")
    assert all(name in text for name in names)
    assert fullrank.all_gather_no_grad(torch.tensor([float(rank)]))[1] == 1.0  # the next call works


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("smooth_ap", [None, None]),
        ("smooth_ap", HEADS),
        *(pytest.param(kind, HEADS, marks=pytest.mark.slow) for kind in NAMED if kind != "smooth_ap"),
    ],
)
@on_ranks()
def test_named_losses_in_another_order_raise(rank: int, kind: str, names: list[str | None]) -> None:
    """In the same order they do not, nor without names: the gap that docs/agreement.md lists."""
    for odd in (0, dist.get_world_size() - 1, -1):
        losses = [NAMED[kind](name) for name in names]
        for step in range(2):
            form = LOSSES[kind].first
            heads = normal(2, 6 + rank, form.columns, seed=10 * step + rank).float().requires_grad_()
            targets = torch.arange(6 + rank) % 3 % 2
            for index in [1, 0] if rank == odd else [0, 1]:
                given = form.arguments(heads[index], targets)
                error, text = common_error(partial(losses[index], **given))
                if odd == -1 or names[0] is None:
                    assert error == "none"
                    continue
                assert error == "RuntimeError"
                assert "got name: 'first head" in text or "got name: 'second head" in text
                assert "keep them in a list or a dict, not in a set." in text


@pytest.mark.slow
@on_ranks(2)
def test_backends_are_kept_for_as_long_as_their_group(rank: int) -> None:
    new = dist.new_group([0, 1])
    before = len(group._BACKENDS)
    fullrank.all_gather_no_grad(torch.ones(1), new)
    assert new in group._BACKENDS
    assert len(group._BACKENDS) == before + 1
    dist.barrier(new)
    dist.destroy_process_group(new)
    del new
    gc.collect()
    assert len(group._BACKENDS) <= before
