"""The loss of a causal language model, against cross-entropy of shifted rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshes import init_device_mesh
from on_ranks import common_error, on_ranks
from torch import Tensor

from fullrank import causal_lm_loss, count_valid_tokens

VOCABULARY = 11


def make_rows(shape: tuple[int, ...] = (3, 7), dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return logits (*shape, V) and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(len(shape))
    logits = torch.randn(*shape, VOCABULARY, dtype=torch.float64, generator=generator).to(dtype)
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    return logits.requires_grad_(), labels


def by_rows(logits: Tensor, labels: Tensor, num_items: float | None, shift: bool = True) -> Tensor:
    """Return the definition, token by token."""
    total, count = logits.new_zeros(()), 0
    sequences = zip(logits.reshape(-1, *logits.shape[-2:]), labels.reshape(-1, labels.shape[-1]))
    for scores, tokens in sequences:
        for t, token in enumerate(tokens.tolist()):
            place = t - 1 if shift else t
            if token == -100 or place < 0:
                continue
            total, count = total - scores[place].log_softmax(0)[token], count + 1
    return total / ((num_items if num_items is not None else count) or 1)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("num_items", [None, 5, 2.5, torch.tensor(7), torch.tensor([3.5])])
@pytest.mark.parametrize("shape", [(3, 7), (7,), (2, 2, 5), (2, 1)])
def test_value_and_gradient(shape: tuple[int, ...], num_items: Tensor | float | None, shift: bool) -> None:
    logits, labels = make_rows(shape)
    number = num_items.item() if isinstance(num_items, Tensor) else num_items
    expected = by_rows(logits, labels, number, shift)
    loss = causal_lm_loss(logits, labels, num_items=num_items, shift=shift)
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    found = torch.autograd.grad(loss, logits)[0]
    wanted = torch.autograd.grad(expected, logits)[0] if expected.requires_grad else torch.zeros_like(logits)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def test_the_sum_has_the_bits_of_one_item() -> None:
    logits, labels = make_rows()
    loss, other = causal_lm_loss(logits, labels, reduction="sum"), causal_lm_loss(logits, labels, num_items=1)
    assert torch.equal(loss, other)
    assert torch.equal(*(torch.autograd.grad(one, logits)[0] for one in (loss, other)))
    assert torch.equal(causal_lm_loss(logits, labels, reduction="mean"), causal_lm_loss(logits, labels))


def test_the_logits_at_the_last_token_get_no_gradient() -> None:
    logits, labels = make_rows()
    causal_lm_loss(logits, labels).backward()
    assert logits.grad[:, -1].abs().max() == 0
    assert (logits.grad[:, :-1].abs().amax(dim=-1) > 0).equal(labels[:, 1:] != -100)


def test_another_ignore_index() -> None:
    logits, labels = make_rows()
    padded = torch.where(labels == -100, 0, labels)
    expected = by_rows(logits, torch.where(padded == 0, -100, padded), None)
    torch.testing.assert_close(causal_lm_loss(logits, padded, ignore_index=0), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.uint8])
def test_labels_of_any_integer_dtype(kind: torch.dtype) -> None:
    logits, labels = make_rows()
    labels = labels.clamp_min(0)
    assert causal_lm_loss(logits, labels.to(kind)) == causal_lm_loss(logits, labels)


# Rows of several documents


def by_documents(logits: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
    """Return the sum over documents, each a row of its own."""
    total = logits.new_zeros(())
    for scores, tokens, documents in zip(logits, labels, ids):
        for document in documents.unique():
            at = documents == document
            total = total + by_rows(scores[at][None], tokens[at][None], 1)
    return total


IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5], [0, 1, 2, 3, 4, 5, 6]])


def test_no_document_predicts_the_next() -> None:
    logits, labels = make_rows()
    loss = causal_lm_loss(logits, labels, reduction="sum", document_ids=IDS)
    torch.testing.assert_close(loss, by_documents(logits, labels, IDS), rtol=1e-12, atol=0)
    assert not torch.isclose(loss, causal_lm_loss(logits, labels, reduction="sum")), "the control: across the borders"
    count = count_valid_tokens([{"labels": labels, "ids": IDS}], document_ids_key="ids")
    torch.testing.assert_close(causal_lm_loss(logits, labels, document_ids=IDS) * count, loss, rtol=1e-12, atol=0)
    assert count < count_valid_tokens([{"labels": labels}])


def test_document_ids_on_another_device(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("there is no other device")
    logits, labels = make_rows()
    with pytest.raises(ValueError, match="document_ids: expected a tensor on"):
        causal_lm_loss(logits.to(device), labels.to(device), document_ids=IDS)


def test_the_call_of_transformers() -> None:
    logits, labels = make_rows()
    expected = causal_lm_loss(logits, labels, num_items=9)
    call: dict[str, Any] = {"vocab_size": VOCABULARY, "num_items_in_batch": torch.tensor(9), "output_router_logits": 1}
    assert torch.equal(causal_lm_loss(logits=logits, labels=labels, **call), expected)
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    assert torch.equal(causal_lm_loss(logits=logits, labels=None, shift_labels=shifted, **call), expected)


# Logits that are sharded on the vocabulary


def sharded(logits: Tensor, *placements: Any) -> Any:
    """Return logits over all ranks, sharded on the vocabulary or as ``placements`` say."""
    from torch.distributed.tensor import Shard, distribute_tensor

    shape = (1,) * (len(placements) - 1) + (dist.get_world_size(),)
    return distribute_tensor(logits.detach(), init_device_mesh("cpu", shape), placements or [Shard(-1)])


def with_terms(logits: Tensor, labels: Tensor, z_loss: float = 0.0, smoothing: float = 0.0) -> Tensor:
    """Return the mean with what the loss may add for each token."""
    x, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    x, targets = x[targets != -100], targets[targets != -100]
    each = F.cross_entropy(x, targets, label_smoothing=smoothing, reduction="none")
    return (each + z_loss * torch.logsumexp(x, 1) ** 2).mean()


# What the loss is called with, and its definition.
CALLS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "mean": ({}, lambda logits, labels: by_rows(logits, labels, None)),
    "sum": ({"reduction": "sum"}, lambda logits, labels: by_rows(logits, labels, 1)),
    "count": ({"num_items": torch.tensor(7)}, lambda logits, labels: by_rows(logits, labels, 7)),
    "shifted": ({"reduction": "sum", "shift": False}, lambda logits, labels: by_rows(logits, labels, 1, False)),
    "z_loss": ({"z_loss": 0.1}, lambda logits, labels: with_terms(logits, labels, z_loss=0.1)),
    "softcap": ({"softcap": 2.0}, lambda logits, labels: by_rows(2 * torch.tanh(logits / 2), labels, None)),
    "label_smoothing": ({"label_smoothing": 0.3}, lambda logits, labels: with_terms(logits, labels, smoothing=0.3)),
    "documents": (
        {"reduction": "sum", "document_ids": IDS},
        lambda logits, labels: by_documents(logits, labels, IDS),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@on_ranks(2, 3)
def test_logits_sharded_on_the_vocabulary(rank: int, name: str) -> None:
    """11 words over the ranks, as in one process; also if no label counts. The control is the loss of own words."""
    from torch.distributed.tensor.parallel import loss_parallel

    call, define = CALLS[name]
    whole, labels = make_rows()
    expected = define(whole, labels)
    (wanted,) = torch.autograd.grad(expected, whole)
    for targets, value, grad in (labels, expected, wanted), (labels * 0 - 100, expected * 0, wanted * 0):
        logits = sharded(whole.masked_fill((grad == 0).all(-1, keepdim=True), torch.nan)).requires_grad_()
        with loss_parallel():
            loss = causal_lm_loss(logits, targets, **call)
            loss.backward()
        assert type(loss) is Tensor
        torch.testing.assert_close(loss, value, rtol=1e-12, atol=0)
        assert logits.grad.placements == logits.placements
        torch.testing.assert_close(logits.grad.full_tensor(), grad, rtol=1e-12, atol=1e-15)
        with loss_parallel(), torch.no_grad():
            assert causal_lm_loss(logits, targets, **call) == loss
    own = sharded(whole).to_local()
    alone = causal_lm_loss(own, labels.where(labels < own.shape[-1], -100), **call)
    assert not torch.isclose(alone, expected)


@pytest.mark.slow
@on_ranks()
def test_other_dtensors(rank: int) -> None:
    """The ranks raise the same, and go on together."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    whole, labels = make_rows((6, 7))
    whole_sequences = "Use full_tensor(), or to_local() where each rank holds whole sequences."
    for placements, fix in (
        ([Shard(0)], whole_sequences),
        ([Shard(1)], whole_sequences),
        ([Replicate()], whole_sequences),
        ([Replicate(), Shard(2)], "Use DTensor.from_local(logits.to_local(), m, [Shard(-1)]), m the dimension of"),
    ):
        logits = sharded(whole, *placements)
        what = "logits: expected a plain tensor, or a DTensor sharded on dim 2, the vocabulary, over a mesh"
        for context in (nullcontext(), loss_parallel()):
            with context:
                kind, text = common_error(partial(causal_lm_loss, logits, labels))
            assert (kind, text.startswith(what), fix in text) == ("TypeError", True, True), text
    kind, text = common_error(lambda: causal_lm_loss(sharded(whole), labels))
    assert (kind, "Enter torch.distributed.tensor.parallel.loss_parallel()" in text) == ("ValueError", True), text
    narrow = sharded(whole[..., : dist.get_world_size() - 1])
    with loss_parallel():
        kind, text = common_error(lambda: causal_lm_loss(narrow, labels))
        assert (kind, "a part of the vocabulary on every rank" in text) == ("ValueError", True), text
        kind, text = common_error(lambda: causal_lm_loss(sharded(whole), labels + 11))
        assert (kind, "token indices in [0, 11)" in text) == ("ValueError", True), text
        kind, text = common_error(lambda: causal_lm_loss(sharded(whole), sharded(labels, Replicate())))
        assert (kind, text.startswith("labels: expected a plain tensor")) == ("TypeError", True), text
        causal_lm_loss(sharded(whole), labels)
