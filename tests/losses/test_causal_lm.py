"""The loss of a causal language model, against cross-entropy of shifted rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
