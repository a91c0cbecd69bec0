"""The verbs that take an optimizer step over a window of micro-batches, called as a user calls them.

Each has the form ``verb(model, micro_batches, **options) -> loss``. It leaves the gradients of all ranks in the model,
also of a plain one, and returns the mean loss over all terms of all ranks: what ``one_process`` of batches.py computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import (
    IGNORED,
    WEIGHTS,
    Batch,
    Result,
    num_mtp,
    num_valid,
    one_process,
    one_process_of_terms,
    sum_loss,
    sum_losses,
)
from subjects import NUM_FEATURES, Headless, Model, TwoHeads, by_hand
from torch import Tensor, nn

import fullrank
from fullrank import DeferredMean, accumulate, all_reduce_grads_, count_valid_tokens
from fullrank.gradients.wrappers import find_sync

COUNTS: dict[str, Any] = {"mtp": num_mtp, "ce": count_valid_tokens}  # of TwoHeads


def run_window(model: nn.Module, batches: Any, **options: Any) -> Tensor:
    """Accumulate one window and return its mean loss; gradients of a plain model are not added over the ranks.

    ``use(step, index, loss, items)`` is the body of the loop, ``loss(model, batch)`` makes its loss, and
    ``through(index)`` is the module that is called.
    """
    use = options.pop("use", lambda step, index, loss, items: step.backward(loss))
    through, loss = options.pop("through", lambda index: model), options.pop("loss", sum_loss)
    options.setdefault("group", by_hand(model))
    loop = accumulate(model, batches, options.pop("count", count_valid_tokens), **options)
    for index, (step, batch) in enumerate(loop):
        use(step, index, loss(through(index), batch), num_valid(batch))
    return step.mean_loss()


def accumulated(model: nn.Module, batches: Any, **options: Any) -> Tensor:
    """``accumulate``; the options are those of ``run_window``."""
    loss = run_window(model, batches, **options)
    _add_up(model)
    return loss


def terms_in(form: str) -> Callable[[Any, int, dict[str, Tensor], int], None]:
    """Return the body of a loop over two losses with names: "backward", "scale", "factors" or "means"."""

    def use(step: Any, index: int, losses: dict[str, Tensor], items: int) -> None:
        if form == "factors":
            factors = step.factors
            for name, loss in losses.items():
                step.record(loss, name, weight=WEIGHTS.get(name, 1.0))
            sum(WEIGHTS.get(name, 1.0) * factors[name] * loss for name, loss in losses.items()).backward()
        elif form == "means":  # NaN over no terms; the other loss stays a sum
            step.backward(losses | {"ce": losses["ce"] / (items or math.nan)}, num_items={"ce": items}, weights=WEIGHTS)
        elif form == "scale":
            step.scale(losses, weights=WEIGHTS).backward()
        else:
            step.backward(losses, weights=WEIGHTS)

    return use


class InChunks:
    """The summed loss of a ``Headless`` model, which back-propagates itself; ``sum()`` is the same with a graph."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self.model, self.batch, self.down = model, batch, getattr(model, "module", model).down

    def __call__(self, step: Any, factor: float | None = None) -> tuple[Tensor, Callable[[], None]]:
        """Return the loss, and a function that back-propagates the gradients of all chunks."""
        given = self.model(self.batch["tokens"]), self.down.weight, self.down.bias
        factor = step.factor if factor is None else factor  # after the forward, in which ranks without it wait
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        rows, targets = leaves[0][:, :-1].flatten(0, 1), self.batch["labels"][:, 1:].flatten()
        losses = []
        for part in range(0, len(rows), 5):
            logits, labels = F.linear(rows[part : part + 5], *leaves[1:]), targets[part : part + 5]
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
            (factor * loss).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum(), lambda: torch.autograd.backward(given, [leaf.grad for leaf in leaves])

    def sum(self) -> Tensor:
        return sum_loss(lambda tokens: self.down(self.model(tokens)), self.batch)


def factor_in(form: str, factor: float | None = None) -> Callable[[Any, int, InChunks, int], None]:
    """Return the body of a loop over losses that back-propagate themselves: they are recorded "last" or "first".

    On "some" ranks the loss is one with a graph. ``factor`` replaces that of the window.
    """

    def use(step: Any, index: int, loss: InChunks, items: int) -> None:
        if form == "some" and dist.get_rank() % 2:
            step.backward(loss.sum())
            return
        value, backward = loss(step, factor)
        for call in (partial(step.record, value), backward)[:: 1 if form == "first" else -1]:
            call()

    return use


def linear_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of ``sum_loss`` for a ``Headless`` model, whose logits do not exist."""
    head, hidden = getattr(model, "module", model).down, model(batch["tokens"])
    loss = fullrank.causal_lm_loss(hidden, batch["labels"], weight=head.weight, bias=head.bias, reduction="sum")
    return loss * batch["scale"] if "scale" in batch else loss


def deferred_of(model: nn.Module) -> DeferredMean:
    """Return the one object that serves all steps of a model."""
    if not hasattr(model, "deferred_mean"):
        model.deferred_mean = DeferredMean(model, by_hand(model))
    return model.deferred_mean


def collect(one: DeferredMean, model: Any, batches: Any) -> DeferredMean:
    """Back-propagate the sums of micro-batches, and return the object that has counted them."""
    for batch in batches:
        one.backward(sum_loss(model, batch), num_valid(batch))
    return one


def deferred(model: nn.Module, batches: Any, **options: Any) -> Tensor:
    """``DeferredMean``, one object for all steps.

    ``call(one, index, loss, n)`` and ``finish(one, groups)`` take the place of its methods. A call that raises is made
    again rightly, as it may be, and the first error is raised at the end of the step.
    """
    one, errors = deferred_of(model), []
    call = options.get("call", lambda one, index, loss, n: one.backward(loss, n))
    finish, through = options.get("finish", lambda one, groups: one.finish(groups)), options.get("through")
    loss = options.get("loss", sum_loss)
    groups = [] if by_hand(model) is None else [by_hand(model)]
    for index, batch in enumerate(batches):
        try:
            call(one, index, loss(through(index) if through else model, batch), num_valid(batch))
        except (ValueError, TypeError, RuntimeError) as error:
            errors.append(error)
            one.backward(loss(model, batch), num_valid(batch))
    try:
        finish(one, groups)
    except (ValueError, TypeError, RuntimeError) as error:
        errors.append(error)
        one.finish(groups)
    if errors:
        raise errors[0]
    return one.mean_loss()


def deferred_window(model: nn.Module, batches: Sequence[Batch], *, num_single: int = 0, fn: Any = None) -> Tensor:
    """``DeferredMean.backward_window``; the first ``num_single`` micro-batches take a ``backward`` each.

    ``fn(model, batch)`` is the function for the others.
    """
    one, total = deferred_of(model), 0.0

    def sum_and_number(batch: Batch) -> tuple[Tensor, int]:
        return sum_loss(model, batch), num_valid(batch)

    for batch in batches[:num_single]:
        one.backward(*sum_and_number(batch))
    if len(batches) > num_single:
        total = one.backward_window(batches[num_single:], partial(fn, model) if fn else sum_and_number).num_terms
    count = one.finish([] if by_hand(model) is None else [by_hand(model)])
    assert num_single or total == count
    return one.mean_loss()


def scores_of(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Return the logits of all predicted tokens of a micro-batch, a row each."""
    return model(batch["tokens"])[:, :-1].flatten(0, 1)


def mean_over_ranks(scores: Tensor, batches: Sequence[Batch], reduction: str) -> Tensor:
    """Return the mean loss of the tokens of all ranks, from this rank's scores."""
    labels = torch.cat([batch["labels"][:, 1:].flatten() for batch in batches])
    total = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
    return fullrank.global_mean(total, (labels != IGNORED).sum(), gradient_reduction=reduction)


def pooled(model: nn.Module, batches: Any, **options: Any) -> Tensor:
    """``pooled_backward`` with a loss over all rows of all ranks."""
    options.setdefault("forward", partial(scores_of, model))
    if "loss" not in options:
        options["loss"] = partial(mean_over_ranks, reduction=reduction_of(model))
    if "group" not in options:
        options["group"] = by_hand(model)
    value = fullrank.pooled_backward(model, batches, **options)
    _add_up(model)
    return value


def reduction_of(model: nn.Module) -> str:
    """Return how a wrapper combines gradients, as the losses name it."""
    return "sum" if find_sync(model).multiplier == 1 else "mean"


def looped(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """A loop of the user's own: ``count_valid_tokens``, ``maybe_no_sync`` and ``causal_lm_loss``."""
    number = count_valid_tokens(batches)
    factor, losses = 1 if reduction_of(model) == "sum" else dist.get_world_size(), []
    for index, batch in enumerate(batches):
        with fullrank.maybe_no_sync(model, index, len(batches)):
            logits = model(batch["tokens"])
            loss = fullrank.causal_lm_loss(logits, batch["labels"], NUM_FEATURES, num_items=number)
            (loss * factor).backward()
        losses.append(loss.detach())
    _add_up(model)
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    return total


def _add_up(model: nn.Module) -> None:
    if by_hand(model) is not None:
        all_reduce_grads_(model, by_hand(model))


FORMS_OF_TERMS = ("backward", "scale", "factors", "means")
FORMS_OF_FACTOR = ("last", "first", "some")

Verb = Callable[..., Tensor]
VERBS: dict[str, Verb] = {
    "accumulate": accumulated,
    "accumulate each": partial(accumulated, sync="each"),
    "accumulate shard": partial(accumulated, sync="shard"),
    **{
        f"terms {form}": partial(accumulated, loss=sum_losses, count=COUNTS, use=terms_in(form))
        for form in FORMS_OF_TERMS
    },
    **{f"factor {form}": partial(accumulated, loss=InChunks, use=factor_in(form)) for form in FORMS_OF_FACTOR},
    "linear": partial(accumulated, loss=linear_sum),
    "linear deferred": partial(deferred, loss=linear_sum),
    "DeferredMean": deferred,
    "DeferredMean window": deferred_window,
    "DeferredMean both": partial(deferred_window, num_single=1),
    "pooled_backward": pooled,
    "pooled_backward each": partial(pooled, sync="each"),
    "pooled_backward shard": partial(pooled, sync="shard"),
    "maybe_no_sync": looped,
}


def model_of(verb: str, dtype: Any = torch.float64, **options: Any) -> Model:
    return {"terms": TwoHeads, "factor": Headless, "linear": Headless}.get(verb.partition(" ")[0], Model)(
        dtype, **options
    )


def one_process_of(verb: str, batches: Sequence[Batch], dtype: Any = torch.float64) -> tuple[nn.Module, Result]:
    """Return the model of one process, which has the gradients, and its result."""
    is_of_terms = verb.startswith("terms")
    model = (TwoHeads if is_of_terms else Model)(dtype)
    return model, (one_process_of_terms if is_of_terms else one_process)(model, batches)


# Where each verb is tested: "shard" is for replicas of shards, which need four ranks.
EVERYWHERE = ("plain", "ddp", "fsdp2", "replicate", "summed")
WRAPPERS_OF = {
    "accumulate": EVERYWHERE,
    "accumulate each": ("plain", "ddp", "fsdp2"),
    **{f"terms {form}": ("plain", "ddp", "fsdp2") for form in FORMS_OF_TERMS},
    **{f"factor {form}": ("plain", "ddp", "fsdp2") for form in FORMS_OF_FACTOR},
    "linear": EVERYWHERE,
    "linear deferred": ("ddp", "fsdp2"),
    "DeferredMean": ("plain", "ddp", "fsdp2", "summed"),
    "DeferredMean window": ("plain", "ddp", "fsdp2", "summed"),
    "DeferredMean both": ("ddp", "fsdp2"),
    "pooled_backward": EVERYWHERE,
    "pooled_backward each": ("ddp", "fsdp2"),
    "maybe_no_sync": EVERYWHERE,
}
UNDER_HSDP = tuple(verb for verb in VERBS if verb not in ("terms scale", "factor first", "factor some"))
