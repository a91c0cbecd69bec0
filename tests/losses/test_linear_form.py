"""The loss of a language model, of logits and from hidden states, whose logits do not exist."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bounds import assert_as_exact
from loss_cases import normal
from meshes import init_device_mesh
from on_ranks import common_error, on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fullrank
from fullrank import causal_lm_loss, count_valid_tokens, token_log_probs
from fullrank.losses.summed import vocabulary

SIZE, WIDTH = 11, 5  # of the vocabulary and of a hidden state
LIMIT = {"rtol": 1e-12, "atol": 1e-15}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 6 rows of the 14 here: N D / V."""
    monkeypatch.setattr(vocabulary, "LEAST_ROWS", 3)


def make(dtype: torch.dtype = torch.float64, size: int = SIZE) -> tuple[list[Tensor], Tensor]:
    """Return hidden states, weight and bias of a last layer, and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(size)
    shapes = (2, 7, WIDTH), (size, WIDTH), (size,)
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    labels = torch.randint(0, size, (2, 7), generator=generator)
    labels[0, 4:] = -100
    return [tensor.requires_grad_() for tensor in tensors], labels


def define(
    logits: Tensor, labels: Tensor, *, z_loss: float = 0.0, softcap: float | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Return the mean over tokens, in functions of torch."""
    x, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    each = F.cross_entropy(x, targets, label_smoothing=label_smoothing, reduction="none")
    each = each + z_loss * torch.logsumexp(x, 1) ** 2 * (targets != -100)
    return each.sum() / (targets != -100).sum()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z_loss": {"z_loss": 0.1},
    "softcap": {"softcap": 2.0},
    "label_smoothing": {"label_smoothing": 0.3},
    "all": {"z_loss": 0.1, "softcap": 2.0, "label_smoothing": 0.3},
}


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", SETTINGS)
def test_value_and_gradients(name: str, has_bias: bool) -> None:
    """Of both forms; the control leaves a setting out."""
    (hidden, weight, bias), labels = make()
    leaves = [hidden, weight, bias][: 2 + has_bias]
    logits = F.linear(hidden, weight, bias if has_bias else None)
    expected = define(logits, labels, **SETTINGS[name])
    wanted = torch.autograd.grad(expected, leaves, retain_graph=True)
    linear = causal_lm_loss(hidden, labels, weight=weight, bias=bias if has_bias else None, **SETTINGS[name])
    for loss in (linear, causal_lm_loss(logits, labels, **SETTINGS[name])):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        found = torch.autograd.grad(3 * loss, leaves)
        torch.testing.assert_close([each / 3 for each in found], [*wanted], **LIMIT)
    for setting in SETTINGS[name]:
        others = {one: value for one, value in SETTINGS[name].items() if one != setting}
        assert not torch.isclose(define(logits, labels, **others), expected), setting


IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5]])
count_of: Any = lambda y: count_valid_tokens([{"labels": y, "ids": IDS}], document_ids_key="ids")  # noqa: E731
# Arguments of the loss, and its definition.
CALLS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": ({"reduction": "sum"}, lambda x, y: by_rows(x, y, 1)),
    "count": ({"num_items": 7}, lambda x, y: by_rows(x, y, 7)),
    "count in a tensor": ({"num_items": torch.tensor([3.5])}, lambda x, y: by_rows(x, y, 3.5)),
    "shifted": ({"shift": False}, lambda x, y: by_rows(x, y, None, shift=False)),
    "documents": ({"document_ids": IDS, "reduction": "sum"}, lambda x, y: by_documents(x, y, IDS)),
    "mean of documents": ({"document_ids": IDS}, lambda x, y: by_documents(x, y, IDS) / count_of(y)),
    "ignored": ({"ignore_index": 3}, lambda x, y: by_rows(x, y.where(y > 3, -100), None)),
    "one sequence": ({"reduction": "mean"}, lambda x, y: by_rows(x, y, None)),
    "more dimensions": ({"num_items": torch.tensor(7)}, lambda x, y: by_rows(x, y, 7)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_arguments_of_both_forms(name: str) -> None:
    """The control: without the argument."""
    (hidden, weight, _), labels = make()
    if name == "one sequence":
        hidden, labels = hidden[1], labels[1]
    if name == "more dimensions":
        hidden, labels = hidden[:, None], labels[:, None]
    labels = labels.clamp_min(3) if name == "ignored" else labels
    (settings, definition), logits = CALLS[name], hidden @ weight.T
    expected = definition(logits, labels)
    (wanted,) = torch.autograd.grad(expected, weight, retain_graph=True)
    linear = causal_lm_loss(hidden, labels, SIZE, weight=weight, **settings)
    for found in (linear, causal_lm_loss(logits, labels, **settings)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(torch.autograd.grad(found, weight)[0], wanted, **LIMIT)
    assert torch.isclose(causal_lm_loss(logits, labels), expected) == (name == "one sequence")


def test_rows_that_do_not_count_are_not_projected() -> None:
    """NaN there reaches nothing; and without any that counts, the gradients are 0."""
    (hidden, weight, _), labels = make()
    ignored = F.pad(labels, (0, 1), value=-100)[..., 1:] == -100
    spoiled = hidden.detach().masked_fill(ignored[..., None], torch.nan).requires_grad_()
    loss = causal_lm_loss(spoiled, labels, weight=weight)
    torch.testing.assert_close(loss, causal_lm_loss(hidden, labels, weight=weight), rtol=0, atol=0)
    for kind, targets in (("", labels), ("none", labels * 0 - 100)):
        loss = causal_lm_loss(spoiled, targets, weight=weight)
        gradients = torch.autograd.grad(loss, [spoiled, weight])
        assert all(gradient.isfinite().all() for gradient in gradients), kind
        assert gradients[0][ignored].abs().max() == 0
        assert (loss.item(), gradients[1].abs().max().item()) == (0, 0) or kind != "none"


def test_frozen_parts_and_no_grad() -> None:
    (hidden, weight, bias), labels = make()
    expected = causal_lm_loss(hidden, labels, weight=weight, bias=bias)
    wanted = torch.autograd.grad(expected, [hidden, weight, bias])
    for learned in itertools.product((False, True), repeat=3):
        leaves = [leaf.detach().requires_grad_(flag) for leaf, flag in zip((hidden, weight, bias), learned)]
        loss = causal_lm_loss(leaves[0], labels, weight=leaves[1], bias=leaves[2])
        assert (loss, loss.requires_grad) == (expected, any(learned))
        if any(learned):
            loss.backward()
        for leaf, flag, gradient in zip(leaves, learned, wanted):
            assert torch.equal(leaf.grad, gradient) if flag else leaf.grad is None
    with torch.no_grad():
        loss = causal_lm_loss(hidden, labels, weight=weight, bias=bias)
    assert (loss, loss.requires_grad) == (expected, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """Errs by what logits of float32 from the same numbers err by."""
    (hidden, weight, bias), labels = make(dtype, size=50)
    leaves = [hidden, weight, bias]

    def outcome(kind: torch.dtype, is_linear: bool = False) -> list[Tensor]:
        given = [leaf.detach().to(kind).requires_grad_() for leaf in leaves]
        if is_linear:
            loss = causal_lm_loss(given[0], labels, weight=given[1], bias=given[2])
        else:
            loss = causal_lm_loss(F.linear(*given), labels)
        return [loss.detach(), *torch.autograd.grad(loss, given)]

    exact, usual, found = outcome(torch.float64), outcome(torch.float32), outcome(dtype, True)
    assert [each.dtype for each in found] == [torch.float32, *[dtype] * 3]
    assert_as_exact(found[:1], usual[:1], exact[:1])
    for one, other in zip(found[1:], usual[1:]):  # rounded once, where float32 is not at a border of two numbers
        assert (one != other.to(dtype)).float().mean() <= 0.02
    (rounded, *_) = outcome(dtype)  # the control: the logits are rounded
    assert abs(rounded - exact[0]) > 8 * abs(found[0] - exact[0])


def test_autocast_rounds_nothing_where_products_are_made_in_float32() -> None:
    (hidden, weight, bias), labels = make(torch.float32)
    found = []
    for is_enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            loss = causal_lm_loss(hidden, labels, weight=weight, bias=bias)
            found.append([loss.detach(), *torch.autograd.grad(loss, [hidden, weight, bias])])
    assert all(map(torch.equal, *found))


def test_gradients_are_given_once_and_are_no_function() -> None:
    (hidden, weight, _), labels = make()
    loss = causal_lm_loss(hidden, labels, weight=weight)
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"causal_lm_loss: expected one backward, got another\. .* retain_graph has no"
    ):
        loss.backward()
    (gradient,) = torch.autograd.grad(causal_lm_loss(hidden, labels, weight=weight), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="causal_lm_loss: expected a first derivative, got a second one"):
        gradient.square().sum().backward()


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, Tensor))])
        return found


def largest(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> int:
    """Return the most elements of a tensor in forward and backward, of 300 tokens out of 2,000 words."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (300, 2000))
    labels = torch.randint(0, 2000, (1, 300), generator=generator)
    with Largest() as mode:
        loss(hidden[None], labels, weight).backward()
    return mode.most


@pytest.mark.parametrize("name", ["plain", "all"])
def test_no_tensor_is_larger_than_a_block_or_the_weight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loss and of log-probabilities. The control is the form with logits."""
    monkeypatch.setattr(vocabulary, "LEAST_ROWS", 16)
    assert largest(lambda h, y, w: causal_lm_loss(h, y, weight=w, **SETTINGS[name])) == 16 * 2000
    assert largest(lambda h, y, w: weighted(token_log_probs(h, y, weight=w, **SCORES[name]))) == 16 * 2000
    assert largest(lambda h, y, w: causal_lm_loss(h @ w.T, y, **SETTINGS[name])) >= 300 * 2000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiled_code_calls_it_as_it_is() -> None:
    (hidden, weight, _), labels = make()

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return 2 * causal_lm_loss(hidden.tanh(), labels, weight=weight)

    torch._dynamo.reset()
    pairs = []
    for function in (torch.compile(step, backend="eager"), step):
        loss = function(hidden, weight)
        pairs.append([loss.detach(), *torch.autograd.grad(loss, [hidden, weight])])
    torch.testing.assert_close(*pairs, rtol=1e-14, atol=0)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="the number of tokens that count is known only when it runs"):
        torch.compile(step, backend="eager", fullgraph=True)(hidden, weight)


H, W, B, Y = torch.zeros(2, 3, 4), torch.zeros(6, 4), torch.zeros(6), torch.zeros(2, 3).long()
REFUSED: dict[str, Callable[[], Any]] = {
    "bias: expected None without weight": lambda: causal_lm_loss(H, Y, bias=B),
    r"weight: expected shape \(V, 4\).*lm_head.weight": lambda: causal_lm_loss(H, Y, weight=W.T),
    "weight: expected a floating-point tensor": lambda: causal_lm_loss(H, Y, weight=W.long()),
    "weight: expected a tensor, got Linear": lambda: causal_lm_loss(H, Y, weight=nn.Linear(4, 6)),
    r"bias: expected shape \(6,\)": lambda: causal_lm_loss(H, Y, weight=W, bias=B[:5]),
    "hidden: expected a floating-point tensor": lambda: causal_lm_loss(H.long(), Y, weight=W),
    r"hidden: expected shape \(\.\.\., T, D\)": lambda: causal_lm_loss(H[0, 0], Y[0, 0], weight=W),
    r"labels: expected shape \(2, 3\) for hidden": lambda: causal_lm_loss(H, Y[:1], weight=W),
    r"labels: expected token indices in \[0, 6\)": lambda: causal_lm_loss(H, Y + 6, weight=W),
    "vocab_size: expected 6": lambda: causal_lm_loss(H, Y, 4, weight=W),
    "hidden: expected a tensor with values": lambda: causal_lm_loss(H.to("meta"), Y, weight=W),
    r"tokens: expected shape \(2, 3\) for hidden \(\.\.\., T, D\)": lambda: token_log_probs(H, Y[:1], weight=W),
    r"tokens: .* in \[0, 6\) or ignore_index=-100, got 6": lambda: token_log_probs(H, Y + 6, weight=W),
    "tokens: expected integer token indices": lambda: token_log_probs(H, Y.float(), weight=W),
    "temperature: expected a finite number > 0": lambda: token_log_probs(H, Y, weight=W, temperature=0.0),
    "softcap: expected a finite number > 0": lambda: token_log_probs(H, Y, weight=W, softcap=-1.0),
    "ignore_index: expected an int": lambda: token_log_probs(H, Y, weight=W, ignore_index=0.5),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
        REFUSED[text]()


# Log-probabilities of tokens


SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 2.0},
    "entropy": {"return_entropy": True},
    "all": {"temperature": 0.7, "softcap": 2.0, "return_entropy": True},
}


def scored(logits: Tensor, tokens: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return what is to be differentiated, of log-probabilities and entropies by the definition."""
    softcap, kept = settings.get("softcap"), tokens != -100
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_probs = (logits / settings.get("temperature", 1.0)).log_softmax(-1)
    found = [log_probs.gather(-1, tokens.clamp_min(0)[..., None])[..., 0].where(kept, 0.0)]
    found += [-(log_probs.exp() * log_probs).sum(-1).where(kept, 0.0)] if "return_entropy" in settings else []
    return torch.stack(found)


def weighted(found: Tensor) -> Tensor:
    """Return a sum in which each number counts in its own way."""
    return (found.reshape(-1) / 3).exp() @ torch.linspace(-1, 2, found.numel(), dtype=found.dtype)


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", SCORES)
def test_log_probs_of_tokens(name: str, has_bias: bool) -> None:
    """The token at t from the hidden state at t; those that are not needed are 0, and NaN there reaches nothing."""
    (hidden, weight, bias), tokens = make()
    leaves = [hidden, weight, bias][: 2 + has_bias]
    expected = scored(F.linear(hidden, weight, bias if has_bias else None), tokens, SCORES[name])
    wanted = torch.autograd.grad(weighted(expected), leaves)
    spoiled = hidden.detach().masked_fill((tokens == -100)[..., None], torch.nan).requires_grad_()
    settings = {"weight": weight, "bias": bias if has_bias else None, **SCORES[name]}
    found = token_log_probs(spoiled, tokens, **settings)
    torch.testing.assert_close(found if "return_entropy" in SCORES[name] else found[None], expected, **LIMIT)
    gradients = torch.autograd.grad(weighted(found), [spoiled, *leaves[1:]], retain_graph=True)
    torch.testing.assert_close([*gradients], [*wanted], **LIMIT)
    again = torch.autograd.grad(weighted(found), [spoiled, *leaves[1:]])
    assert all(map(torch.equal, gradients, again)), "it is computed again, so it may be called again"
    for setting in SCORES[name].keys() - {"return_entropy"}:
        others = {one: value for one, value in SCORES[name].items() if one != setting}
        assert not torch.allclose(scored(F.linear(hidden, weight, bias), tokens, others), expected), setting
    with torch.no_grad():
        assert not token_log_probs(spoiled, tokens, **settings).requires_grad
    (gradient,) = torch.autograd.grad(weighted(token_log_probs(hidden, tokens, **settings)), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="token_log_probs: expected a first derivative, got a second one"):
        gradient.square().sum().backward()


def test_log_probs_in_half_precision() -> None:
    """Err by what float32 from the same numbers errs by."""
    (hidden, weight, _), tokens = make(torch.bfloat16, size=50)

    def outcome(kind: torch.dtype) -> list[Tensor]:
        given = [leaf.detach().to(kind).requires_grad_() for leaf in (hidden, weight)]
        found = token_log_probs(given[0], tokens, weight=given[1])
        return [found.detach(), *torch.autograd.grad(weighted(found), given)]

    found, usual = outcome(torch.bfloat16), outcome(torch.float32)
    assert [each.dtype for each in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert torch.equal(found[0], usual[0])
    assert all(torch.equal(one, other.bfloat16()) for one, other in zip(found[1:], usual[1:]))


# A vocabulary that is spread over ranks


def spread(tensor: Tensor, *placements: Any) -> DTensor:
    """Return a tensor over all ranks, sharded on dim 0 or as ``placements`` say."""
    mesh = init_device_mesh("cpu", (1,) * (len(placements) - 1) + (dist.get_world_size(),))
    part = distribute_tensor(tensor.detach(), mesh, placements or [Shard(0)])
    return part.requires_grad_(tensor.is_floating_point())


@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in [*SETTINGS][1:])])
@on_ranks()
def test_a_vocabulary_over_ranks(rank: int, name: str) -> None:
    """11 words over the ranks, as in one process, from hidden states and from logits; also if no label counts.

    The control is the loss of the words of one rank.
    """
    (hidden, weight, bias), labels = make()
    logits = F.linear(hidden, weight, bias)
    expected = define(logits, labels, **SETTINGS[name])
    *wanted, of_logits = torch.autograd.grad(expected, [hidden, weight, bias, logits])
    parts = hidden.detach().requires_grad_(), spread(weight), spread(bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "LEAST_ROWS", 3)
        loss = causal_lm_loss(parts[0], labels, weight=parts[1], bias=parts[2], **SETTINGS[name])
        loss.backward()
    assert type(loss) is Tensor
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for part, gradient in zip(parts, wanted):
        whole = part.grad.full_tensor() if isinstance(part, DTensor) else part.grad
        assert not isinstance(part, DTensor) or part.grad.placements == part.placements
        torch.testing.assert_close(whole, gradient, **LIMIT)
    for targets, value, slopes in (labels, expected, of_logits), (labels * 0 - 100, expected * 0, of_logits * 0):
        given = spread(logits.masked_fill((slopes == 0).all(-1, keepdim=True), torch.nan), Shard(-1))
        with loss_parallel():
            loss = causal_lm_loss(given, targets, **SETTINGS[name])
            loss.backward()
        assert type(loss) is Tensor
        torch.testing.assert_close(loss, value, rtol=1e-12, atol=0)
        assert given.grad.placements == given.placements
        torch.testing.assert_close(given.grad.full_tensor(), slopes, **LIMIT)
        with loss_parallel(), torch.no_grad():
            assert causal_lm_loss(given, targets, **SETTINGS[name]) == loss
    own = parts[1].to_local().detach(), parts[2].to_local().detach()
    alone = causal_lm_loss(hidden, labels.where(labels < len(own[0]), -100), weight=own[0], bias=own[1])
    assert not torch.isclose(alone, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
@on_ranks()
def test_log_probs_of_a_vocabulary_over_ranks(rank: int, name: str) -> None:
    (hidden, weight, bias), tokens = make()
    expected = scored(F.linear(hidden, weight, bias), tokens, SCORES[name])
    wanted = torch.autograd.grad(weighted(expected), [hidden, weight, bias])
    parts = hidden.detach().requires_grad_(), spread(weight), spread(bias)
    found = token_log_probs(parts[0], tokens, weight=parts[1], bias=parts[2], **SCORES[name])
    torch.testing.assert_close(found if "return_entropy" in SCORES[name] else found[None], expected, **LIMIT)
    weighted(found).backward()
    for part, gradient in zip(parts, wanted):
        whole = part.grad.full_tensor() if isinstance(part, DTensor) else part.grad
        torch.testing.assert_close(whole, gradient, **LIMIT)
    alone = token_log_probs(hidden, tokens.clamp_max(2), weight=parts[1].to_local()[:3].detach())
    assert not torch.allclose(alone, expected[0])


@pytest.mark.slow
@on_ranks()
def test_other_dtensors(rank: int) -> None:
    (hidden, weight, bias), labels = make()
    loss, logits = partial(causal_lm_loss, hidden, labels), F.linear(hidden, weight)

    def of(*placements: Any, words: int = SIZE, labels: Tensor = labels) -> Tensor:
        return causal_lm_loss(spread(logits[..., :words], *placements), labels)

    mesh = "over a mesh of one dimension"
    of_weight = f"weight: expected a plain tensor, or a DTensor sharded on dim 0, the vocabulary, {mesh}"
    whole = rf"sharded on dim 2, the vocabulary, {mesh}.*Use full_tensor\(\), or to_local\(\) where each rank"
    for call, kind, text in (
        (partial(loss, weight=spread(weight, Replicate())), "TypeError", of_weight),
        (partial(loss, weight=spread(weight, Shard(1))), "TypeError", of_weight),
        (partial(loss, weight=spread(weight, Replicate(), Shard(0))), "TypeError", of_weight),
        (partial(loss, weight=spread(weight[:1])), "ValueError", "expected a part of the vocabulary on every rank"),
        (partial(loss, weight=spread(weight), bias=bias), "TypeError", "bias: expected a DTensor, as weight"),
        (partial(loss, weight=weight, bias=spread(bias)), "TypeError", "bias: expected a Tensor, as weight"),
        (
            partial(loss, weight=spread(weight), bias=spread(bias, Replicate())),
            "TypeError",
            "bias: expected placements",
        ),
        (lambda: causal_lm_loss(spread(hidden), labels, weight=weight), "TypeError", "hidden: expected a plain tensor"),
        *((partial(of, placement), "TypeError", whole) for placement in (Shard(0), Shard(1), Replicate())),
        (partial(of, Replicate(), Shard(2)), "TypeError", r"Use DTensor.from_local\(logits.to_local\(\), m, \[Shard"),
        (partial(of, Shard(2)), "ValueError", r"Enter torch.distributed.tensor.parallel.loss_parallel\(\)"),
        (partial(of, Shard(2), words=1), "ValueError", "a part of the vocabulary on every rank"),
        (partial(of, Shard(2), labels=labels + SIZE), "ValueError", r"token indices in \[0, 11\)"),
        (partial(of, Shard(2), labels=spread(labels, Replicate())), "TypeError", "labels: expected a plain tensor"),
    ):
        with nullcontext() if "Enter" in text else loss_parallel():
            found = common_error(call)
        assert (found[0], bool(re.search(text, found[1]))) == (kind, True), (text, found)
    loss(weight=spread(weight))
    with loss_parallel():
        of(Shard(2))


def test_a_padded_vocabulary_has_the_entropy_of_its_words() -> None:
    """A bias of -inf leaves a word out, with its gradient; the control counts it."""
    hidden, weight, tokens = normal(4, 3, seed=0), normal(5, 3, seed=1), torch.tensor([0, 3, 1, 2])
    outcomes = []
    for words, last in ((4, 0.0), (5, -math.inf), (5, 0.0)):
        bias, leaves = (
            torch.zeros(words, dtype=torch.float64),
            (hidden.clone().requires_grad_(), weight[:words].clone()),
        )
        bias[-1] = last
        found = token_log_probs(leaves[0], tokens, weight=leaves[1], bias=bias, return_entropy=True)
        outcomes.append(torch.cat([*found, *torch.autograd.grad(found.square().sum(), leaves[0])[0]]))
    torch.testing.assert_close(outcomes[1], outcomes[0], **LIMIT)
    assert not torch.allclose(outcomes[2], outcomes[0], rtol=1e-3)


@pytest.mark.parametrize("verb", ["causal_lm_loss", "token_log_probs"])
@on_ranks(2)
def test_ranks_that_share_a_vocabulary_raise_together(rank: int, verb: str) -> None:
    """In the first step and after a right one. The control: without the agreement other rows give another number."""
    (hidden, weight, _), labels = make()
    call, head = partial(getattr(fullrank, verb), weight=spread(weight)), hidden.detach().requires_grad_()
    other, frozen = labels.where((labels < 0) | (rank == 0), SIZE - 1 - labels), hidden.detach() if rank else head
    for _ in range(2):
        for given, options, kind, text in (
            ((head, labels + 11 * rank), {}, "ValueError", "token indices in [0, 11)"),
            ((head, labels.float() if rank else labels), {}, "TypeError", "expected integer token indices"),
            ((head, labels), {"softcap": -1.0 if rank else None}, "ValueError", "softcap"),
            ((head, other), {}, "RuntimeError", vocabulary.SAME_ROWS),
            ((head[rank:], labels[rank:]), {}, "ValueError", "rows"),
            ((frozen, labels), {}, "ValueError", "gradient of hidden"),
        ):
            found = common_error(partial(call, *given, **options))
            assert (found[0], text in found[1]) == (kind, True), found
        right = call(head, labels)
    with mock.patch.object(vocabulary, "_agreed", lambda call, weight, prepare: prepare()):
        assert not torch.allclose(call(head, other), right)


# The form with logits, token by token


def by_rows(logits: Tensor, labels: Tensor, num_items: float | None, shift: bool = True) -> Tensor:
    total, count = logits.new_zeros(()), 0
    sequences = zip(logits.reshape(-1, *logits.shape[-2:]), labels.reshape(-1, labels.shape[-1]))
    for scores, tokens in sequences:
        for t, token in enumerate(tokens.tolist()):
            place = t - 1 if shift else t
            if token == -100 or place < 0:
                continue
            total, count = total - scores[place].log_softmax(0)[token], count + 1
    return total / ((num_items if num_items is not None else count) or 1)


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.uint8])
def test_labels_of_any_integer_dtype(kind: torch.dtype) -> None:
    logits, labels = normal(2, 7, SIZE), make()[1].clamp_min(0)
    assert causal_lm_loss(logits, labels.to(kind)) == causal_lm_loss(logits, labels)


def by_documents(logits: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
    """Return the sum over documents, each a row of its own."""
    total = logits.new_zeros(())
    for scores, tokens, documents in zip(logits, labels, ids):
        for document in documents.unique():
            at = documents == document
            total = total + by_rows(scores[at][None], tokens[at][None], 1)
    return total


def test_the_call_of_transformers() -> None:
    logits, labels = normal(2, 7, SIZE), make()[1]
    expected = causal_lm_loss(logits, labels, num_items=9)
    call: dict[str, Any] = {"vocab_size": SIZE, "num_items_in_batch": torch.tensor(9), "output_router_logits": 1}
    assert torch.equal(causal_lm_loss(logits=logits, labels=labels, **call), expected)
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    assert torch.equal(causal_lm_loss(logits=logits, labels=None, shift_labels=shifted, **call), expected)
