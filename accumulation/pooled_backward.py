"""One pooled loss over ranks and micro-batches: score without a graph, one loss, replay with the scores' gradients.

In the formula of :func:`pooled_backward` dL/ds needs all scores s of a window but no activations. (ds_g/dw)^T needs the
activations of one micro-batch g, which is forwarded a second time, with the same random masks and buffers.

What happens in a window, on every rank and whatever the data::

    opening header    number of micro-batches, what must be equal                   open_window
    1. score          forwards without a graph; header                              _score
    2. loss           the loss, which gathers over the ranks; header                _evaluate
    3. replay         forwards with a graph, backwards of all but the last          _replay
       closing header largest difference of the replayed scores, any error
                      the last backward, in which the wrapper reduces

Each header raises the error of one rank on all of them. If forwards communicate (FSDP2, SyncBatchNorm), a pass runs
before its header and raises at once: the other ranks wait inside the model, whose collective the header would meet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed.group import DIVISOR, UNDO, Group, group_ranks
from ..distributed.header import Offer, agree_on, refuse_in_backward
from ..distributed.torch_private import not_compiled
from ..errors import RankRuntimeError, Words, expected
from ..gradients.parameters import leaves_of, variables_of
from ..gradients.when_reduced import discard_gradients_
from .replay_state import RngState, accelerators_in_use, buffers_kept, compare_scores, restore_rng, save_rng
from .window import Window, open_window

Forward = Callable[[Any], Tensor]

CALL = "pooled_backward"


@not_compiled
def pooled_backward(
    model: nn.Module,
    micro_batches: Sequence[Any],
    *,
    forward: Forward,
    loss: Callable[[Tensor, list[Any]], Tensor],
    group: Group = None,
    sync: str = "last",
    scaler: Any = None,
    check_replay: bool = True,
) -> Tensor:
    r"""Back-propagate one loss over the rows of all micro-batches of a window, and of all ranks.

    Equal to ``loss(torch.cat([forward(batch) for batch in micro_batches]), micro_batches).backward()``, in the memory
    of one micro-batch and the scores, for one more forward of each micro-batch.

    .. math:: \frac{\partial L}{\partial w} = \sum_g \Big(\frac{\partial s_g}{\partial w}\Big)^{\!\top}
        \frac{\partial L}{\partial s_g}

    Args:
        model, sync: see :func:`accumulate`; the model contains every module that ``forward`` runs.
        micro_batches: the window, a list of anything that ``forward`` takes. A micro-batch may have no rows.
        forward: ``forward(batch) -> scores``, (n_g, ...) of equal trailing shape and dtype; called twice for each
            micro-batch.
        loss: ``loss(scores, micro_batches) -> scalar``, with this rank's scores (sum of n_g, ...) of the window. It
            gathers over the ranks itself, as the pooled losses do. It is called once, so a queue sees the window once,
            and not at all after an error. It may use parameters of ``model``, such as a learned temperature, but no
            other tensor that requires grad, because no wrapper would reduce that gradient.
        group: the ranks that call this together, and that ``loss`` gathers over; see :func:`accumulate`.
        scaler: a ``torch.amp.GradScaler`` that scales the loss before its gradient is computed.
        check_replay: compare the scores of both passes, and raise on every rank when they differ.

    Returns:
        The loss, a detached scalar, not scaled.

    Raises:
        TypeError, ValueError: for a model or a window that :func:`accumulate` refuses; for scores or a loss that are
            not floating-point tensors; for a loss without a graph to the scores, or with one to leaves outside of
            ``model``; for scores that are not from the forward of the DDP module; for a loss whose
            ``gradient_reduction`` does not match the way ``model`` combines gradients.
        RuntimeError: when a replay gives different scores; when gradients are disabled; inside a backward.

    Numerics: replayed scores may differ by the root of their machine epsilon, relative to the largest score.
    Distributed:
        Four headers in addition to those of ``loss``, DDP's broadcast of buffers, and one reduction of the gradients.
        Errors are raised on every rank: before the second pass with the gradients untouched, in it after discarding the
        gradients of the model. Only an error in a forward that itself communicates is raised on this rank alone.

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

    def bring(window: Window) -> Offer[_Passes]:
        if group is None:
            window.wrappers.check_group(None)
        for name, function in (("forward", forward), ("loss", loss)):
            if not callable(function):
                raise TypeError(expected(name, "a function", function))
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(expected("scaler", "a torch.amp.GradScaler or None", scaler))
        if not torch.is_grad_enabled():
            mode = Words("torch.no_grad or torch.inference_mode")
            raise RuntimeError(expected(CALL, "gradients to be enabled", mode, "Call it outside of them."))
        passes = _Passes(forward, accelerators_in_use(model), window.wrappers.divisor)
        facts = {"scaler": scaler is not None, "check_replay": check_replay, "divisor": passes.divisor}
        return Offer(passes, facts)

    refuse_in_backward(CALL)
    window, passes, _ = open_window(CALL, model, micro_batches, sync=sync, group=group, bring=bring)
    undo = ExitStack()  # its callbacks run only after an error
    with window.wrappers.restored(quiet=True), ExitStack() as scope, undo:
        undo.callback(window.wrappers.watch_forwards, broadcasts=True)
        undo.callback(window.wrappers.reshard)
        scope.callback(UNDO.reset, UNDO.set(undo))
        scored = _score(window, passes)
        evaluated = _evaluate(window, passes, loss, scored.leaf)
        _replay(window, passes, scored, evaluated, scaler, check_replay)
        undo.pop_all()
    window.wrappers.watch_forwards(broadcasts=True)  # after the reduction
    return evaluated.value.detach().reshape(())


class _Passes(NamedTuple):
    """What is the same in both passes."""

    forward: Forward
    devices: tuple[torch.device, ...]  # accelerators that a forward may draw random numbers on
    divisor: float | None  # the number that the wrappers divide gradients by

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Disable the caller's autocast: a backward uses the dtypes of its forward, which may have disabled it too."""
        with ExitStack() as stack:
            for kind in {"cpu", *(device.type for device in self.devices)}:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield


class _Scored(NamedTuple):
    leaf: Tensor  # [rows of this rank, ...] the scores of the window
    sizes: list[int]  # rows of each micro-batch
    states: list[RngState]  # before each forward


class _Evaluated(NamedTuple):
    """The loss, a scalar with a graph to the scores, and the parameters of the model that it uses."""

    value: Tensor
    learned: Mapping[str, Tensor]


def _score(window: Window, passes: _Passes) -> _Scored:
    """Step 1: return the scores of all micro-batches, computed without a graph."""
    states: list[RngState] = []

    @functools.cache
    def score_all() -> list[Any]:
        scores = []
        try:
            with torch.no_grad(), buffers_kept(window.model):
                for batch in window.micro_batches:
                    states.append(save_rng(passes.devices))
                    part = passes.forward(batch)
                    # A copy: the next forward may write its output into the same memory.
                    scores.append(part.detach().clone() if isinstance(part, Tensor) else part)
        finally:
            # Older torch would reuse the weights that autocast has cast here without a graph (pytorch issue 158232).
            torch.clear_autocast_cache()
        return scores

    def join() -> Offer[_Scored]:
        scores = score_all()
        for part in scores:
            if not isinstance(part, Tensor) or not part.is_floating_point():
                raise TypeError(expected("forward", "a floating-point tensor of scores", part))
            if part.ndim == 0:
                fix = "Return one row per example."
                raise ValueError(expected("forward", "scores of shape (rows, ...)", part, fix))
        kinds = [f"{part.dtype} ({', '.join(map(str, ('rows', *part.shape[1:])))}) on {part.device}" for part in scores]
        if len(set(kinds)) > 1:
            fix, got = "Only the number of rows may differ.", Words(" and ".join(dict.fromkeys(kinds)))
            raise ValueError(expected("forward", "scores of one kind from all micro-batches", got, fix))
        return Offer(_Scored(torch.cat(scores).requires_grad_(), [part.shape[0] for part in scores], states))

    if window.wrappers.is_lockstep:
        score_all()
    return agree_on(CALL, window.ranks, join).value


def _evaluate(window: Window, passes: _Passes, loss: Callable[..., Any], leaf: Tensor) -> _Evaluated:
    """Step 2: return the loss of all scores, and the parameters of the model in its graph."""

    def evaluate() -> Offer[_Evaluated]:
        token = DIVISOR.set(passes.divisor)
        try:
            value = loss(leaf, window.micro_batches)
        finally:
            DIVISOR.reset(token)
        if not isinstance(value, Tensor):
            raise TypeError(expected("loss", "a scalar tensor", value, "Return the loss alone."))
        if value.numel() != 1:
            raise ValueError(expected("loss", "a scalar", value, "Reduce it."))
        leaves = {id(tensor): tensor for tensor in leaves_of(value)} if value.requires_grad else {}
        if leaves.pop(id(leaf), None) is None:
            fix = "Compute it from the scores that loss is given, without detach, item or no_grad."
            raise ValueError(expected("loss", "a loss with a graph to the scores", Words("one without"), fix))
        named = window.model.named_parameters()
        learned = {name: parameter for name, parameter in named if leaves.pop(id(parameter), None) is not None}
        for other in leaves.values():
            kind = "another tensor that requires grad"
            if isinstance(other, nn.Parameter):
                name = next((name for name, parameter in _parameters_in(loss) if parameter is other), None)
                kind = "a parameter outside of model" if name is None else f"the parameter {name!r} outside of model"
            got = Words(f"a loss of {kind}, of shape {tuple(other.shape)}, too")
            fix = (
                "No wrapper would reduce its gradient: register the module that has it in the model before that is "
                "wrapped, as in model.loss = loss, or use it in forward and return the result in the scores."
            )
            raise ValueError(expected("loss", "a function of the scores and of parameters of model", got, fix))
        return Offer(_Evaluated(value, learned), {"parameters of the loss": sorted(learned)})

    return agree_on(CALL, window.ranks, evaluate).value


def _parameters_in(loss: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters that ``loss`` contains or its code names, as far as they can be found."""
    for name, value in {"": loss, **variables_of(loss)}.items():
        if isinstance(value, nn.Module):
            yield from value.named_parameters(name)
        elif isinstance(value, nn.Parameter):
            yield name, value


def _replay(
    window: Window, passes: _Passes, scored: _Scored, evaluated: _Evaluated, scaler: Any, check_replay: bool
) -> None:
    """Step 3: back-propagate the gradient of the loss to the parameters, and restore the random generators."""
    first, again = scored.leaf.detach(), list[Tensor]()
    last_grads: Mapping[str, Tensor] = {}  # of parameters that the loss uses, for the last backward
    # DDP with find_unused_parameters treats a parameter that the forward does not use as ready, and reduces the
    # gradient that it has by then. So a parameter that only the loss uses gets its gradient before that forward.
    finds_unused = any(map(attrgetter("find_unused_parameters"), window.wrappers.ddp))
    ddp_reduces_each = window.sync == "each" and bool(window.wrappers.ddp)

    @functools.cache
    def replay_all() -> tuple[Tensor, Tensor]:
        nonlocal last_grads
        value, learned = evaluated
        with passes.without_autocast():
            value = value if scaler is None else scaler.scale(value)
            score_grad, *grads = torch.autograd.grad(value, [scored.leaf, *learned.values()])
        learned_grads = dict(zip(learned, grads))
        last_grads = {} if finds_unused else learned_grads
        parts = zip(window.micro_batches, scored.states, first.split(scored.sizes), score_grad.split(scored.sizes))
        for index, (batch, state, before, grad) in enumerate(parts):
            is_last = index == len(window.micro_batches) - 1
            if is_last and finds_unused:
                _backpropagate(window, passes, learned_grads)
            used = window.switch(index)
            restore_rng(state)
            scores = passes.forward(batch)
            if not isinstance(scores, Tensor) or scores.shape != before.shape or scores.dtype != before.dtype:
                what = f"scores like those of the first pass, {before.dtype} of shape {tuple(before.shape)}"
                raise RuntimeError(expected("forward", what, scores, _CAUSES))
            if not scores.requires_grad:
                got = Words("scores that do not require grad")
                fix = "Unfreeze a parameter that they depend on, and use neither detach nor no_grad in forward."
                raise ValueError(expected("forward", "scores with a graph", got, fix))
            if is_last or window.sync == "each":
                window.wrappers.check_forwards("scores", [scores], used)
            again.append(scores.detach().clone())
            if not is_last:
                # DDP that reduces in this backward waits for the gradient of each parameter.
                zeros = {name: torch.zeros_like(like) for name, like in last_grads.items()} if ddp_reduces_each else {}
                _backpropagate(window, passes, zeros, scores, grad)
        return scores, grad  # of the last micro-batch; its backward, which reduces, follows the header

    def close() -> Offer[tuple[Tensor, Tensor]]:
        last = replay_all()
        if not check_replay:
            return Offer(last)
        difference, largest = compare_scores(first, torch.cat(again))
        return Offer(last, totals=(difference, largest * tolerance(first.dtype), largest))

    state = save_rng(passes.devices)
    try:
        if window.is_lockstep:
            replay_all()
        closed = window.close(CALL, close)
        if check_replay:
            _check_differences(closed.totals, [0] if window.ranks is None else group_ranks(window.ranks))
        _backpropagate(window, passes, last_grads, *closed.value)
    except BaseException:
        discard_gradients_(window.model)
        raise
    finally:
        restore_rng(state)


def _backpropagate(window: Window, passes: _Passes, by_name: Mapping[str, Tensor], *root: Tensor) -> None:
    """Back-propagate a tensor from its gradient, and the gradients ``by_name`` from the parameters of the model."""
    parameters, roots, gradients = dict(window.model.named_parameters()), [*root[:1]], [*root[1:]]
    for name, gradient in by_name.items():
        is_whole = hasattr(gradient, "full_tensor") and not hasattr(parameters[name], "full_tensor")
        roots.append(parameters[name])
        gradients.append(gradient.full_tensor() if is_whole else gradient)  # type: ignore[attr-defined]
    if roots:
        with passes.without_autocast():
            torch.autograd.backward(roots, gradients)


_CAUSES = (
    "The likely causes: randomness outside torch's default generators (random, numpy, your own Generator), data that "
    "changes between the passes, module state that is not a buffer."
)


def tolerance(dtype: torch.dtype) -> float:
    """Return by how much replayed scores may differ, relative to the largest score: half the digits of ``dtype``."""
    return math.sqrt(torch.finfo(dtype).eps)


def _check_differences(totals: list[list[float]], ranks: Sequence[int]) -> None:
    """Raise on all ``ranks`` if scores of one differ too much; ``totals``: difference, its limit, largest score."""
    wrong = [(rank, *row[:3]) for rank, row in zip(ranks, totals) if not row[0] <= row[1]]
    if wrong:
        parts = [f"{gap:.3g} on rank {rank}, where scores reach {largest:.3g}" for rank, gap, _, largest in wrong]
        got = Words(f"a difference of {', and of '.join(parts)}")
        fix = f"{_CAUSES} The gradients were discarded; check_replay=False accepts the difference."
        kind = RuntimeError if len(ranks) == 1 else RankRuntimeError
        raise kind(expected(CALL, "the same scores in both passes over the window", got, fix))
