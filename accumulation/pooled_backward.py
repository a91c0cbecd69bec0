"""One pooled loss over ranks and micro-batches: score without a graph, one loss, replay with the scores' gradients.

With s the scores of a window and w the parameters, the gradient of a loss L(s(w)) is::

    dL/dw = sum over micro-batches g of (ds_g/dw)^T dL/ds_g

dL/ds needs all scores but no activations. (ds_g/dw)^T needs the activations of one micro-batch, and its forward is made
a second time for them, with the same random masks and from the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..distributed.group import Group, group_ranks, is_initialized, resolve_group
from ..distributed.header import refuse_in_backward
from ..distributed.torch_private import fsdp_modules, not_compiled
from ..errors import Words, attempt, expected
from ..gradients.wrappers import find_sync
from .buffers import buffers_broadcast_once
from .replay_checks import check_micro_batches
from .replay_passes import CALL, Window, agree_or_raise, evaluate, replay, score
from .rng_state import accelerators_in_use


@not_compiled
def pooled_backward(
    model: nn.Module,
    micro_batches: Sequence[Any],
    *,
    forward: Callable[[Any], Tensor],
    loss: Callable[[Tensor, list[Any]], Tensor],
    group: Group = None,
    sync: str = "last",
    scaler: Any = None,
    check_replay: bool = True,
) -> Tensor:
    r"""Back-propagate one loss over the rows of all micro-batches of a window, and of all ranks.

    Equal to ``loss(torch.cat([forward(batch) for batch in micro_batches]), micro_batches).backward()``, in the memory
    of one micro-batch plus the scores; for one forward more of each micro-batch.

    .. math:: \frac{\partial L}{\partial w} = \sum_g \Big(\frac{\partial s_g}{\partial w}\Big)^{\!\top}
        \frac{\partial L}{\partial s_g}

    The first pass scores every micro-batch without a graph, the loss is computed once from all scores, and the second
    pass makes each forward again under the same random state to carry the scores' gradients to the parameters.

    Args:
        model: with DDP, FSDP2 or HSDP modules anywhere in it, or plain; it holds every module that ``forward`` runs.
        micro_batches: the window, a list of anything that ``forward`` takes. A micro-batch may have no rows.
        forward: ``forward(batch) -> scores``, (rows, ...); called twice for each micro-batch.
        loss: ``loss(scores, micro_batches) -> scalar``, with this rank's scores of the whole window in order; it
            gathers over the ranks by itself, as the pooled losses do. Called once, so a queue sees the window once. It
            may depend on no other tensor that requires grad: nothing would reduce that gradient.
        group: the ranks that call this together, and that ``loss`` gathers over; None for those that ``model`` reduces
            its gradients over, else the default group.
        sync: when gradients are reduced: after the ``"last"`` micro-batch, after ``"each"``, or for HSDP ``"shard"``,
            over the shards after each and over the replicas after the last.
        scaler: a ``torch.amp.GradScaler`` by which the loss is scaled for its gradient.
        check_replay: compare the scores of both passes, and raise on every rank when they differ.

    Returns:
        The loss, a detached scalar, not scaled.

    Shape:
        scores (n_g, ...) with equal trailing shape and dtype; ``loss`` gets (sum of n_g, ...).

    Raises:
        TypeError: for micro-batches without a length, scores or a loss that are not floating-point tensors.
        ValueError: for an empty window, a loss without a graph to the scores or with one to other leaves; for different
            numbers of micro-batches on the ranks where forwards or backwards communicate (FSDP2, HSDP, SyncBatchNorm,
            ``sync="each"``).
        RuntimeError: when a replay gives other scores; without gradients enabled; inside a backward.

    Numerics:
        A replay may differ by the square root of the scores' machine epsilon, relative to the largest score: rounding
        in another order stays far below it, other masks or other data far above.

    Distributed:
        Four collectives of 64 bytes besides those of ``loss``, DDP's broadcast of buffers and one reduction of the
        gradients. Errors are raised on every rank: before the second pass with the gradients untouched, in it with
        the gradients of the model discarded. Only what is raised by a forward that itself communicates is raised
        where it occurs: the other ranks wait for that forward, and no message reaches them there.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 3.0)
        >>> window = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
        >>> pooled_backward(model, window, forward=model, loss=lambda scores, micro_batches: scores.var())
        tensor(9.)
        >>> model.weight.grad
        tensor([[6.]])

    Reference:
        Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP 2021.
    """
    refuse_in_backward(CALL)
    ranks = _find_ranks(model, group)
    window, error = attempt(lambda: _check_window(model, micro_batches, forward, loss, group, sync, scaler))
    _agree_on_start(window, error, ranks, {"sync": sync, "scaler": scaler is not None, "check_replay": check_replay})
    assert window is not None
    with _as_found(window):
        scored = score(window, ranks)
        value = evaluate(window, scored.leaf, loss, ranks)
        replay(window, scored, value, scaler, check_replay, ranks)
    return value.detach().reshape(())


def _find_ranks(model: nn.Module, group: Group) -> ProcessGroup | None:
    """Return the ranks that agree, None when there is only this one."""
    if group is None:
        found, _ = attempt(lambda: find_sync(model).group)
        if found is None and not is_initialized():
            return None
        # The same ranks under the name that the losses know them by: a rank that fails in front of its loss joins the
        # header of the loss on the other ranks.
        is_everyone = found is not None and sorted(group_ranks(found)) == list(range(dist.get_world_size()))
        group = None if is_everyone else found
    resolved = resolve_group(group)
    return resolved if dist.get_world_size(resolved) > 1 else None


def _check_window(
    model: nn.Module, micro_batches: Any, forward: Any, loss: Any, group: Group, sync: str, scaler: Any
) -> Window:
    wrappers = find_sync(model)
    wrappers.check_managed(others_reduce=group is not None)
    if group is None:
        wrappers.resolve_group(None)  # raises where the wrappers name no single group
    for name, value in (("forward", forward), ("loss", loss)):
        if not callable(value):
            raise TypeError(expected(name, "a function", value))
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        raise TypeError(expected("scaler", "a torch.amp.GradScaler or None", scaler))
    if not torch.is_grad_enabled():
        found = Words("torch.no_grad or torch.inference_mode")
        raise RuntimeError(expected(CALL, "gradients to be enabled", found, "Call it outside of them."))
    batches = check_micro_batches(micro_batches)
    wrappers.check(sync, len(batches))
    return Window(model, batches, forward, wrappers, sync, accelerators_in_use(model))


def _agree_on_start(
    window: Window | None, error: Exception | None, ranks: ProcessGroup | None, facts: Mapping[str, object]
) -> None:
    """Raise the same error on every rank if one of them may not start, or if they do not fit together."""
    if window is None:
        agree_or_raise(ranks, error)
        raise AssertionError("unreachable: agree raises when a rank failed")
    facts = {**facts, "model": window.wrappers.kind, "micro-batches communicate": window.passes_communicate}
    counts = agree_or_raise(ranks, None, facts=facts, rows=len(window.batches)).rows
    if window.passes_communicate and len(set(counts)) > 1:
        fix = "FSDP2, SyncBatchNorm and sync='each' communicate in every micro-batch: fill up with ones of 0 rows."
        found = Words(f"{', '.join(map(str, counts))} in rank order")
        raise ValueError(expected("micro_batches", "as many on every rank", found, fix))


@contextmanager
def _as_found(window: Window) -> Iterator[None]:
    """Put back how the wrappers reduce and broadcast, and after an error also what they hold unsharded."""
    with window.wrappers.restored(), buffers_broadcast_once(window.wrappers.ddp):
        try:
            yield
        except BaseException:
            # Otherwise a forward after an optimizer step would find the parameters of before: only a backward reshards.
            for module in fsdp_modules(window.model):
                module.reshard()
            raise
