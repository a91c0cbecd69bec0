"""What a window of micro-batches, its scores, its loss and its replay must be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Words, expected


def check_micro_batches(micro_batches: Any) -> list[Any]:
    """Return the micro-batches as a list; TypeError for what cannot be gone through twice, ValueError without any."""
    if isinstance(micro_batches, (Mapping, str)) or not hasattr(micro_batches, "__len__"):
        fix = "Use list(...), or windows(loader, size) for lists of size micro-batches."
        raise TypeError(expected("micro_batches", "a list of micro-batches", micro_batches, fix))
    batches = list(micro_batches)
    if not batches:
        fix = "A rank without rows passes a micro-batch with 0 rows."
        raise ValueError(expected("micro_batches", "at least one micro-batch", Words("none"), fix))
    return batches


def join_scores(scores: Sequence[Any]) -> Tensor:
    """Return the scores of all micro-batches as one leaf; TypeError or ValueError when they do not fit together."""
    for value in scores:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(expected("forward", "a floating-point tensor of scores", value))
        if value.ndim == 0:
            raise ValueError(expected("forward", "scores of shape (rows, ...)", value, "Return one row per example."))
    kinds = {f"{value.dtype} ({', '.join(map(str, ('rows', *value.shape[1:])))}) on {value.device}" for value in scores}
    if len(kinds) > 1:
        fix = "Only the number of rows may differ."
        found = Words(" and ".join(sorted(kinds)))
        raise ValueError(expected("forward", "scores of one kind from all micro-batches", found, fix))
    return torch.cat(list(scores)).requires_grad_()


def check_loss(value: Any, scores: Tensor, model: nn.Module) -> None:
    """Raise unless ``value`` is a scalar that depends on ``scores`` and on no other leaf."""
    if not isinstance(value, Tensor):
        raise TypeError(expected("loss", "a scalar tensor", value, "Return the loss alone."))
    if value.numel() != 1:
        raise ValueError(expected("loss", "a scalar", value, "Reduce it."))
    leaves = list(_leaves(value)) if value.requires_grad else []
    foreign = [leaf for leaf in leaves if leaf is not scores]
    if foreign:
        names = {id(parameter): f"the parameter {name!r}" for name, parameter in model.named_parameters()}
        found = Words(f"a loss of {names.get(id(foreign[0])) or _describe_leaf(foreign[0])} too")
        fix = "Compute with it in forward and return the result within the scores: nothing else reaches the parameters."
        raise ValueError(expected("loss", "a function of the scores alone", found, fix))
    if not leaves:
        fix = "Compute it from the scores that loss is given, without detach, item or no_grad."
        raise ValueError(expected("loss", "a loss with a graph to the scores", Words("one without"), fix))


def _leaves(value: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of the graph of ``value``."""
    seen, waiting = set(), [torch.autograd.graph.get_gradient_edge(value).node]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        waiting += [parent for parent, _ in node.next_functions if parent is not None]


def _describe_leaf(leaf: Tensor) -> str:
    kind = "a parameter outside of model" if isinstance(leaf, nn.Parameter) else "another tensor that requires grad"
    return f"{kind}, of shape {tuple(leaf.shape)},"


def check_replayed(scores: Any, first: Tensor) -> None:
    """Raise unless the scores of the second pass have the form of ``first`` and a graph."""
    if not isinstance(scores, Tensor) or scores.shape != first.shape or scores.dtype != first.dtype:
        raise RuntimeError(expected("forward", f"scores like those of the first pass, {_form(first)}", scores, _CAUSES))
    if not scores.requires_grad:
        fix = "Unfreeze a parameter that they depend on, and use neither detach nor no_grad in forward."
        raise ValueError(expected("forward", "scores with a graph", Words("scores that do not require grad"), fix))


def _form(scores: Tensor) -> str:
    return f"{scores.dtype} of shape {tuple(scores.shape)}"


_CAUSES = (
    "The likely causes: randomness outside torch's default generators (random, numpy, a Generator of your own), data "
    "that changes between the passes, module state that is not a buffer."
)


def largest_difference(first: Tensor, again: Tensor) -> Tensor:
    """Return the largest |first - again|, a scalar on their device: 0 for equal infinities and NaN, else infinity."""
    wide = torch.promote_types(first.dtype, torch.float32)
    if first.numel() == 0:
        return first.new_zeros((), dtype=wide)
    same = (first == again) | (first.isnan() & again.isnan())
    difference = (first.to(wide) - again.to(wide)).abs().masked_fill(same, 0.0)
    return difference.nan_to_num(nan=math.inf, posinf=math.inf).amax()


def largest_score(scores: Tensor) -> Tensor:
    """Return the largest finite |score|, 0 without one; a scalar on their device."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if scores.numel() == 0:
        return scores.new_zeros((), dtype=wide)
    return scores.to(wide).abs().masked_fill(~scores.isfinite(), 0.0).amax()


def tolerance(dtype: torch.dtype) -> float:
    """Return by how much a replay may differ, relative to the largest score: half of the digits of ``dtype``.

    The same operations in another order, or another kernel, lose the last few digits. Another mask, another row or a
    buffer that has moved on changes the first ones.
    """
    return math.sqrt(torch.finfo(dtype).eps)


def check_differences(totals: Tensor, ranks: Sequence[int]) -> None:
    """Raise RuntimeError when a replay was off; the columns of ``totals``: difference, what is allowed, largest score.

    A function of what all ranks know, so that all of them raise.
    """
    wrong = [(rank, *row) for rank, row in zip(ranks, totals.tolist()) if not row[0] <= row[1]]
    if wrong:
        parts = [f"{off:.3g} beside scores up to {top:.3g} on rank {rank}" for rank, off, _, top, *_ in wrong]
        found = Words(f"a difference of {', of '.join(parts)}")
        fix = f"{_CAUSES} The gradients were discarded; check_replay=False accepts what differs."
        raise RuntimeError(expected("pooled_backward", "the same scores in both passes over the window", found, fix))
