"""One pooled loss over ranks and micro-batches: score without a graph, one loss, replay with the scores' gradients.

With s the scores of a window and w the parameters, the gradient of a loss L(s(w)) is::

    dL/dw = sum over micro-batches g of (ds_g/dw)^T dL/ds_g

dL/ds needs all scores but no activations. (ds_g/dw)^T needs the activations of one micro-batch, so that micro-batch is
forwarded a second time, with the same random masks and from the same buffers.

What happens in a window, on every rank and whatever the data::

    opening header    number of micro-batches, what must be equal                   open_window
    1. score          forwards without a graph; header                              _score
    2. loss           the loss, which gathers over the ranks; header                _evaluate
    3. replay         forwards with a graph, backwards of all but the last          _replay
       closing header how far the replayed scores are off, any mistake
                      the last backward, in which the wrapper reduces

Each header raises the mistake of one rank on all of them. Where forwards communicate (FSDP2, SyncBatchNorm), a mistake
in one is raised at once, without a header: the other ranks wait inside the model, and would not meet it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..distributed.group import Group, gradients_divided_by, group_ranks
from ..distributed.header import Agreement, Offer, agree_on, refuse_in_backward
from ..distributed.torch_private import not_compiled
from ..errors import RankRuntimeError, Words, expected
from ..gradients.parameters import leaves_of
from ..gradients.when_reduced import discard_gradients_
from .replay_state import (
    RngState,
    accelerators_in_use,
    buffers_kept,
    largest_difference,
    largest_score,
    restore_rng,
    save_rng,
)
from .window import Window, open_window

T = TypeVar("T")
U = TypeVar("U")
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
    of one micro-batch and the scores. It costs one additional forward of each micro-batch.

    .. math:: \frac{\partial L}{\partial w} = \sum_g \Big(\frac{\partial s_g}{\partial w}\Big)^{\!\top}
        \frac{\partial L}{\partial s_g}

    The first pass scores every micro-batch without a graph, the loss is computed once from all scores, and the second
    pass repeats each forward under the same random state to carry the scores' gradients to the parameters.

    Args:
        model: see :func:`accumulate`; it holds every module that ``forward`` runs.
        micro_batches: the window, a list of anything that ``forward`` takes. A micro-batch may have no rows.
        forward: ``forward(batch) -> scores``, (rows, ...); called twice for each micro-batch.
        loss: ``loss(scores, micro_batches) -> scalar``, with this rank's scores of the whole window in order. It
            gathers over the ranks itself, as the pooled losses do. It is called once, so a queue sees the window once.
            It may use parameters of ``model``, such as a learned temperature: their gradient is computed once, and the
            last backward carries it to the wrapper. It may depend on no other tensor that requires grad, which no
            wrapper would reduce.
        group: the ranks that call this together, and that ``loss`` gathers over; see :func:`accumulate`.
        sync: see :func:`accumulate`.
        scaler: a ``torch.amp.GradScaler`` by which the loss is scaled for its gradient.
        check_replay: compare the scores of both passes, and raise on every rank when they differ.

    Returns:
        The loss, a detached scalar, not scaled.

    Shape:
        scores (n_g, ...) with equal trailing shape and dtype; ``loss`` gets (sum of n_g, ...).

    Raises:
        TypeError: for micro-batches without a length, scores or a loss that are not floating-point tensors.
        ValueError: for an empty window; a loss without a graph to the scores, or with one to leaves outside of
            ``model``; scores that are not from the forward of the DDP module; a loss whose ``gradient_reduction`` is
            not how ``model`` combines gradients; a model or a number of micro-batches that :func:`accumulate` refuses.
        RuntimeError: when a replay gives other scores; without gradients enabled; in a backward.

    Numerics:
        A replay may differ by the square root of the scores' machine epsilon, relative to the largest score: rounding
        in another order stays far below it, other masks or other data far above.

    Distributed:
        Four headers besides those of ``loss``, DDP's broadcast of buffers and one reduction of the gradients. Errors
        are raised on every rank: before the second pass with the gradients untouched, in it with those of the model
        discarded. Only an error in a forward that itself communicates is raised where it occurs: the other ranks wait
        for that forward, and no message reaches them there.

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

    def bring(window: Window) -> Offer[tuple[torch.device, ...]]:
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
        facts = {"scaler": scaler is not None, "check_replay": check_replay, "divisor": window.wrappers.divisor}
        return Offer(accelerators_in_use(model), facts)

    refuse_in_backward(CALL)
    window, devices, _ = open_window(CALL, model, micro_batches, sync=sync, group=group, bring=bring)
    with window.wrappers.restored(quiet=True):
        try:
            # 1. Score every micro-batch without a graph.
            scored = _score(window, forward, devices)
            # 2. Compute the loss from all scores.
            value = _evaluate(window, loss, scored.leaf)
            # 3. Repeat each forward, and back-propagate the gradient of its scores.
            _replay(window, forward, devices, scored, value, scaler, check_replay)
        except BaseException:
            window.wrappers.reshard()
            window.wrappers.expect_broadcasts(True)
            raise
    window.wrappers.leave_as_reduced()
    return value.value.detach().reshape(())


class _Scored(NamedTuple):
    """What the first pass leaves."""

    leaf: Tensor  # [rows of this rank, ...] the scores of the window
    sizes: list[int]  # rows of each micro-batch
    states: list[RngState]  # in front of each forward


class _Value(NamedTuple):
    """The loss, a scalar with a graph to the scores, and the parameters of the model that it uses."""

    value: Tensor
    learned: Mapping[str, Tensor]


def _score(window: Window, forward: Forward, devices: Sequence[torch.device]) -> _Scored:
    """Step 1: return the scores of all micro-batches, which are made without a graph."""
    states: list[RngState] = []

    def score_all() -> list[Any]:
        scores = []
        try:
            with torch.no_grad(), buffers_kept(window.model):
                for batch in window.micro_batches:
                    states.append(save_rng(devices))
                    part = forward(batch)
                    # A copy: the next forward may write its output into the same memory.
                    scores.append(part.detach().clone() if isinstance(part, Tensor) else part)
        finally:
            # Older torch keeps the weights that autocast has cast here, without a graph (pytorch issue 158232).
            torch.clear_autocast_cache()
        return scores

    def join(scores: list[Any]) -> Offer[_Scored]:
        for part in scores:
            if not isinstance(part, Tensor) or not part.is_floating_point():
                raise TypeError(expected("forward", "a floating-point tensor of scores", part))
            if part.ndim == 0:
                fix = "Return one row per example."
                raise ValueError(expected("forward", "scores of shape (rows, ...)", part, fix))
        kinds = [f"{part.dtype} ({', '.join(map(str, ('rows', *part.shape[1:])))}) on {part.device}" for part in scores]
        if len(set(kinds)) > 1:
            fix, found = "Only the number of rows may differ.", Words(" and ".join(dict.fromkeys(kinds)))
            raise ValueError(expected("forward", "scores of one kind from all micro-batches", found, fix))
        return Offer(_Scored(torch.cat(scores).requires_grad_(), [part.shape[0] for part in scores], states))

    return _agree_after(window, window.wrappers.is_lockstep, score_all, join).value


def _evaluate(window: Window, loss: Callable[..., Any], leaf: Tensor) -> _Value:
    """Step 2: return the loss of all scores, with the parameters of the model in its graph."""

    def evaluate() -> Offer[_Value]:
        with gradients_divided_by(window.wrappers.divisor):
            value = loss(leaf, window.micro_batches)
        if not isinstance(value, Tensor):
            raise TypeError(expected("loss", "a scalar tensor", value, "Return the loss alone."))
        if value.numel() != 1:
            raise ValueError(expected("loss", "a scalar", value, "Reduce it."))
        leaves = {id(one): one for one in leaves_of(value)} if value.requires_grad else {}
        if leaves.pop(id(leaf), None) is None:
            fix = "Compute it from the scores that loss is given, without detach, item or no_grad."
            raise ValueError(expected("loss", "a loss with a graph to the scores", Words("one without"), fix))
        named = window.model.named_parameters()
        learned = {name: one for name, one in named if leaves.pop(id(one), None) is not None}
        for other in leaves.values():
            kind = "another tensor that requires grad"
            if isinstance(other, nn.Parameter):
                name = next((name for name, one in _parameters_around(loss) if one is other), None)
                kind = "a parameter outside of model" if name is None else f"the parameter {name!r} outside of model"
            found = Words(f"a loss of {kind}, of shape {tuple(other.shape)}, too")
            fix = (
                "No wrapper would reduce its gradient: register the module that has it in the model before that is "
                "wrapped, as in model.loss = loss, or use it in forward and return the result in the scores."
            )
            raise ValueError(expected("loss", "a function of the scores and of parameters of model", found, fix))
        return Offer(_Value(value, learned), {"parameters of the loss": sorted(learned)})

    return agree_on(CALL, window.ranks, evaluate).value


def _parameters_around(loss: Callable[..., Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that ``loss`` holds or its code names, as far as they are found, with their names."""
    known: Mapping[str, Any] = {}
    if isinstance(loss, nn.Module):
        yield from loss.named_parameters()
    elif isinstance(loss, functools.partial):
        yield from _parameters_around(loss.func)
        with suppress(TypeError, ValueError):  # of a function without a signature
            known = inspect.signature(loss.func).bind_partial(*loss.args, **loss.keywords).arguments
    elif inspect.ismethod(loss):
        yield from _parameters_around(loss.__func__)
        known = {"self": loss.__self__, **getattr(loss.__self__, "__dict__", {})}
    elif inspect.isfunction(loss):
        with suppress(ValueError):  # of a variable without a value
            found = inspect.getclosurevars(loss)
            known = {**found.globals, **found.nonlocals}
    for name, value in known.items():
        if isinstance(value, nn.Module):
            yield from value.named_parameters(name)
        elif isinstance(value, nn.Parameter):
            yield name, value


def _replay(
    window: Window,
    forward: Forward,
    devices: Sequence[torch.device],
    scored: _Scored,
    evaluated: _Value,
    scaler: Any,
    check_replay: bool,
) -> None:
    """Step 3: carry the gradient of the loss to the parameters; the random generators end as they began."""
    off = torch.zeros(())  # the largest difference between the scores of both passes
    first = scored.leaf.detach()
    carried: Mapping[str, Tensor] = {}  # gradients of parameters for the last backward

    def replay_all() -> tuple[Tensor, Tensor]:
        nonlocal off, carried
        value, learned = evaluated
        with _autocast_off(devices):
            value = value if scaler is None else scaler.scale(value)
            slope, *others = torch.autograd.grad(value, [scored.leaf, *learned.values()])
        of_learned = dict(zip(learned, others))
        carried = {} if finds_unused else of_learned
        parts = zip(window.micro_batches, scored.states, first.split(scored.sizes), slope.split(scored.sizes))
        for index, (batch, state, before, grad) in enumerate(parts):
            is_last = index == len(window.micro_batches) - 1
            if is_last and finds_unused:
                _carry(window, of_learned, [], [])
            used = window.switch(index)
            restore_rng(state)
            scores = forward(batch)
            if not isinstance(scores, Tensor) or scores.shape != before.shape or scores.dtype != before.dtype:
                what = f"scores like those of the first pass, {before.dtype} of shape {tuple(before.shape)}"
                raise RuntimeError(expected("forward", what, scores, _CAUSES))
            if not scores.requires_grad:
                found = Words("scores that do not require grad")
                fix = "Unfreeze a parameter that they depend on, and use neither detach nor no_grad in forward."
                raise ValueError(expected("forward", "scores with a graph", found, fix))
            if is_last or window.sync == "each":
                window.wrappers.check_forwards("scores", scores, used)
            if check_replay:
                off = torch.maximum(off.to(scores.device), largest_difference(before, scores.detach()))
            if not is_last:
                # DDP that reduces in this backward waits for each parameter.
                zeros = {name: torch.zeros_like(one) for name, one in carried.items()} if is_each else {}
                with _autocast_off(devices):
                    _carry(window, zeros, [scores], [grad])
        return scores, grad  # of the last micro-batch, whose backward reduces and follows the header

    def close(last: tuple[Tensor, Tensor]) -> Offer[tuple[Tensor, Tensor]]:
        facts = {"forwards of DDP": window.wrappers.same_forwards}
        if not check_replay:
            return Offer(last, facts)
        top = largest_score(first)
        return Offer(last, facts, totals=(off, top * tolerance(first.dtype), top))

    # DDP with find_unused_parameters takes a parameter that the forward does not use for one that is ready. It reduces
    # what the parameter holds by then.
    finds_unused = any(module.find_unused_parameters for module in window.wrappers.ddp)
    is_each = window.sync == "each" and bool(window.wrappers.ddp)
    state = save_rng(devices)
    try:
        closed = _agree_after(window, window.is_lockstep, replay_all, close)
        if check_replay:
            _check_differences(closed.totals, [0] if window.ranks is None else group_ranks(window.ranks))
        scores, grad = closed.value
        with _autocast_off(devices):
            _carry(window, carried, [scores], [grad])
    except BaseException:
        discard_gradients_(window.model)
        raise
    finally:
        restore_rng(state)


def _carry(window: Window, of_learned: Mapping[str, Tensor], roots: list[Tensor], gradients: list[Tensor]) -> None:
    """Back-propagate ``gradients`` from ``roots``, and those of parameters of the model from the parameters."""
    found = dict(window.model.named_parameters())
    for name, gradient in of_learned.items():
        is_whole = hasattr(gradient, "full_tensor") and not hasattr(found[name], "full_tensor")
        roots.append(found[name])
        gradients.append(gradient.full_tensor() if is_whole else gradient)  # type: ignore[attr-defined]
    if roots:
        torch.autograd.backward(roots, gradients)


_CAUSES = (
    "The likely causes: randomness outside torch's default generators (random, numpy, your own Generator), data that "
    "changes between the passes, module state that is not a buffer."
)


def tolerance(dtype: torch.dtype) -> float:
    """Return how much a replay may differ, relative to the largest score: half of the digits of ``dtype``."""
    return math.sqrt(torch.finfo(dtype).eps)


def _check_differences(totals: list[list[float]], ranks: Sequence[int]) -> None:
    """Raise RuntimeError when a replay was off, on all ``ranks``, which all know ``totals``.

    These are of each rank: difference, allowed difference, largest score.
    """
    wrong = [(rank, *row[:3]) for rank, row in zip(ranks, totals) if not row[0] <= row[1]]
    if wrong:
        parts = [f"{off:.3g} on rank {rank}, where scores reach {top:.3g}" for rank, off, _, top in wrong]
        found = Words(f"a difference of {', and of '.join(parts)}")
        fix = f"{_CAUSES} The gradients were discarded; check_replay=False accepts the difference."
        kind = RuntimeError if len(ranks) == 1 else RankRuntimeError
        raise kind(expected(CALL, "the same scores in both passes over the window", found, fix))


def _agree_after(
    window: Window, communicates: bool, run: Callable[[], T], offer: Callable[[T], Offer[U]]
) -> Agreement[U]:
    """Run one pass over the micro-batches, exchange a header, and return what the ranks offer.

    In a pass that ``communicates`` a mistake is raised at once: the other ranks wait inside the model, and the header
    would meet their collective.
    """
    if communicates:
        done = run()
        return agree_on(CALL, window.ranks, lambda: offer(done))
    return agree_on(CALL, window.ranks, lambda: offer(run()))


@contextmanager
def _autocast_off(devices: Sequence[torch.device]) -> Iterator[None]:
    """Leave the caller's autocast: a backward uses the dtypes of its forward, also where that had left autocast."""
    with ExitStack() as stack:
        for kind in {"cpu", *(device.type for device in devices)}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
