"""Proof on the user's own program: the gradients of one step next to those of one process with the whole batch.

First every rank runs the step alone, with the batches of all: an error in it is raised on all ranks, and none is left
waiting. Then the step runs as it is on all ranks. Where gradients differ, further runs alone tell why: with another
seed (is the step random?), with the batches in another order (is it rounding?), and with each batch on its own (is the
gradient a combination of those of the batches?).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..distributed.group import Group, is_initialized
from ..distributed.header import Offer, agree_on
from ..errors import expected
from ..gradients import discard_gradients_
from ..gradients.parameters import is_dtensor
from ..gradients.wrappers import find_ranks, find_sync
from .joining import Join, concatenate, is_window, map_tensors, tensors_in
from .one_process import Gradients, NoDropout, Reference, State, Step, plain_names, take_gradients, whole
from .report import Findings, StepReport, Verdict, likely_causes

T = TypeVar("T")

_SAMPLED = 64  # numbers of each gradient that tell a combination of gradients from others


def verify_step(
    step: Step,
    model: nn.Module,
    batch: Any,
    *,
    build_model: Callable[[], nn.Module] | None = None,
    join: Join | None = None,
    losses: Iterable[nn.Module] = (),
    group: Group = None,
    disable_dropout: bool = False,
) -> StepReport:
    """Compare the gradients of a training step with those that one process would get with the whole batch.

    It knows nothing of what the step does: losses of any package, gathers written by hand, windows of micro-batches,
    DDP, FSDP2, HSDP and tensor parallelism. It takes the time of two steps, and of a few more where gradients differ,
    and the memory of one more model.

    Args:
        step: ``step(model, batch)`` does forward and backward(s) of one optimizer step, without the optimizer, with the
            model that it is given, and may return the loss. It asks for the world size inside: on one process it is 1.
        model: the model as it is trained, wrapped or not.
        batch: of this rank: a tensor, or tuples, mappings and dataclasses of tensors; or a list of micro-batches. One
            process gets one batch, or a list of one.
        build_model: makes the unwrapped model where it cannot be copied: FSDP2, HSDP, tensor parallelism. It is given
            the full parameters of ``model``.
        join: makes one batch of a list of batches. By default tensors, arrays and lists are concatenated in dimension
            0, and other values must be equal. :func:`~fullrank.preflight.pad_tokens` pads token batches.
        losses: modules whose state the step changes. Those that are called, or named in ``step``, are found without it.
        group: the ranks that have different batches; None for those that the wrappers reduce gradients over, or all.
        disable_dropout: switch dropout off in all runs.

    Returns:
        The :class:`~fullrank.preflight.StepReport`, the same on every rank of ``group``: print it, or call ``check()``.

    Raises:
        TypeError: for an argument of another type.
        ValueError: when batches cannot be joined, the model cannot be copied, the step does not train the model that it
            is given, or communicates over a group of its own.
        RankError: an error on some ranks, such as one of the step, raised on all of them.

    State:
        Parameters, buffers, gradients, random states, training modes, switches of wrappers, queues and optimizers are
        afterwards as before, also after an error. A step that calls the optimizer is undone, and the report says so.

    Limits:
        Statistics of batches (BatchNorm without synchronization) and random steps have no gradient of one process to
        compare with; the report names both. A world size that was read before the step is not exchanged.
    """
    losses = [losses] if isinstance(losses, nn.Module) else list(losses)
    for name, value, is_right, kind in (
        ("step", step, callable(step), "a function"),
        ("model", model, isinstance(model, nn.Module), "a module"),
        ("losses", losses, all(isinstance(loss, nn.Module) for loss in losses), "modules"),
    ):
        if not is_right:
            raise TypeError(expected(name, kind, value))
    ranks = _data_ranks(model, group)

    def run(model: nn.Module, batch: Any) -> float | None:
        with NoDropout(model) if disable_dropout else nullcontext():
            value = step(model, batch)
        if isinstance(value, Tensor):
            return float(value.detach().double().mean())
        return float(value) if isinstance(value, (int, float)) else None

    state = _together(ranks, lambda: State(step, model, losses))
    with state.restored(), ExitStack() as stack:
        batches = _together(ranks, lambda: _Batches(batch, join or concatenate, ranks))
        joined = _together(ranks, batches.whole)
        discard_gradients_(model)
        reference = _together(ranks, lambda: Reference(run, state, build_model))
        stack.callback(reference.close)
        alone = f"verify_step on one process ({'one micro-batch, ' * batches.is_window}world size 1)"
        wanted_value, wanted = _together(ranks, lambda: reference.run(joined), alone)
        state.rewind()
        own_value = _together(ranks, lambda: run(model, batch))
        found = take_gradients(plain_names(model) | state.parameters_outside())
        state.rewind()  # notices what the step has changed
        return _Proof(state, reference, batches, ranks, found, wanted).report(own_value, wanted_value)


def _data_ranks(model: nn.Module, group: Group) -> ProcessGroup | None:
    """Return the ranks that have different batches; None for this rank alone."""
    if group is None and not is_initialized():
        return None
    sync = find_sync(model)
    if group is None and sync.unwrapped is not None and any(map(is_dtensor, model.parameters())):
        return None  # tensor parallelism alone: all ranks have the same batch
    return find_ranks(sync, group)


def _together(ranks: ProcessGroup | None, compute: Callable[[], T], call: str = "verify_step") -> T:
    """Return ``compute()``; if it raises on one rank, all raise."""
    return agree_on(call, ranks, lambda: Offer(compute())).value


def _everyone(ranks: ProcessGroup | None, value: T) -> list[T]:
    """Return ``value`` of every rank."""
    if ranks is None:
        return [value]
    values: list[Any] = [None] * ranks.size()
    dist.all_gather_object(values, value, group=ranks)
    return values


class _Batches:
    """The batches of all ranks, and of their micro-batches."""

    def __init__(self, batch: Any, join: Join, ranks: ProcessGroup | None) -> None:
        sent = map_tensors(lambda tensor: tensor.detach().cpu(), batch)
        everyone = _everyone(ranks, (is_window(batch), sent, [tensor.device.type for tensor in tensors_in(batch)]))
        self.is_window = any(is_list for is_list, _, _ in everyone)
        arrived = []
        for _, part, devices in everyone:
            device = iter(devices)
            arrived.append(map_tensors(lambda tensor: tensor.to(next(device)), part))  # noqa: B023
        self.by_rank = [part if self.is_window else [part] for part in arrived]
        self.rows = tuple(sum(map(_count_rows, parts)) for parts in self.by_rank)
        self.parts = [part for parts in self.by_rank for part in parts]
        self.join = join

    def whole(self, order: int = 1) -> Any:
        """Return all batches as one; with ``order`` -1 the last comes first."""
        return self.of_step(self.join(self.parts[::order]))

    def of_step(self, part: Any) -> Any:
        """Return one batch as the step gets it."""
        return [part] if self.is_window else part


def _count_rows(batch: Any) -> int:
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 0)


class _Gap(NamedTuple):
    """The gradient g of a parameter in the step next to r of one process."""

    factor: float  # <g, r> / <r, r>
    error: float  # |g - r| / |r|
    kind: str  # "exact", "zero" (both are, up to rounding), "factor", "direction" or "missing"

    @property
    def is_right(self) -> bool:
        return self.kind in ("exact", "zero")


_ZERO = _Gap(1.0, 0.0, "zero")


class _Proof:
    """The gradients of both runs, and what further runs tell about their differences."""

    def __init__(
        self,
        state: State,
        reference: Reference,
        batches: _Batches,
        ranks: ProcessGroup | None,
        found: Gradients,
        wanted: Gradients,
    ) -> None:
        self.state, self.reference, self.batches, self.ranks = state, reference, batches, ranks
        eps = torch.finfo(state.lowest).eps
        self.tolerance = math.sqrt(eps)
        # Of the norm of all gradients: less is rounding. In float64 that of sums of 1e6 terms.
        self.zero = max(1e-9, min(32 * eps, self.tolerance / 4))
        has_gradient = _everyone(ranks, {name for name, grad in found.items() if grad is not None})
        common = set.intersection(*has_gradient)
        self.found = {name: found[name] if name in common else None for name in wanted}
        self.wanted = wanted
        self.whole_norm = math.hypot(*(float(grad.double().norm()) for grad in wanted.values() if grad is not None))
        self.own = self._sample(self.found)

    def report(self, value: float | None, wanted_value: float | None) -> StepReport:
        """Compare, look for the reasons, and return what all ranks agree on."""
        ranks, gaps = self.ranks, self._gaps()
        is_random = False
        if not all(gap.is_right for gap in gaps.values()):
            is_random, noise = self._noise()
            gaps = self._gaps(noise)
        kinds = {name: gap.kind for name, gap in gaps.items()}
        order: tuple[Verdict, ...] = ("direction", "missing", "factor")
        verdict: Verdict = next((kind for kind in order if kind in kinds.values()), "exact")
        verdict = "random" if is_random and verdict != "exact" else verdict
        values, wanted_value = _everyone(ranks, value), _everyone(ranks, wanted_value)[0]
        known = [own for own in values if own is not None]
        mean = None
        if wanted_value is not None and len(known) == len(values):
            mean = sum(known) / len(known), wanted_value
        causes = () if verdict == "exact" else likely_causes(verdict, self._findings(gaps, mean))
        is_optimized = any(_everyone(ranks, self.state.is_optimized))
        notes = ("The step changed parameters (an optimizer?): this was undone. Leave it out.",) * is_optimized
        number, parts = len(self.batches.rows), len(self.batches.parts)
        setting = f"{number} process{'es' * (number > 1)}, {find_sync(self.state.model).kind}, "
        setting += f"{' + '.join(map(str, self.batches.rows[:8]))} rows"
        setting += f", {parts} micro-batches" * self.batches.is_window
        gradients = {name: (gap.factor, gap.error) for name, gap in gaps.items()}
        return StepReport(verdict, gradients, mean, causes, setting, notes, kinds)

    def _gaps(self, noise: dict[str, float] | None = None) -> dict[str, _Gap]:
        """Return for each parameter the gap of the rank where it is largest."""
        own = {name: self._gap(name, (noise or {}).get(name, 0.0)) for name in self.wanted}
        everyone = _everyone(self.ranks, own)
        worst = ("zero", "exact", "factor", "missing", "direction").index
        gaps = {n: max((gaps[n] for gaps in everyone), key=lambda gap: (worst(gap.kind), gap.error)) for n in own}
        for name, gap in gaps.items():
            factors = [other[name].factor for other in everyone]
            if gap.kind == "factor" and max(factors) - min(factors) > 1e-3 * abs(gap.factor):
                gaps[name] = gap._replace(kind="direction")  # another factor on each rank
        return gaps

    def _gap(self, name: str, noise: float) -> _Gap:
        found, wanted = self._double(self.found[name]), self._double(self.wanted[name])
        length = 0.0 if wanted is None else float(wanted.norm())
        if found is None:
            is_zero = length <= self.zero * self.whole_norm
            return _ZERO if is_zero else _Gap(0.0, 1.0, "missing")
        if wanted is None:
            wanted = torch.zeros_like(found)
        own = float(found.norm())
        gap = float((found - wanted).norm())
        factor = float((found * wanted).sum()) / length**2 if length else math.inf if own else 1.0
        error = gap / length if length else math.inf if gap else 0.0
        if not math.isfinite(own):
            return _Gap(math.nan, math.inf, "direction")
        if max(own, length) <= self.zero * self.whole_norm:
            return _ZERO
        if gap <= max(self.tolerance * length, noise):
            return _Gap(factor, error, "exact")
        if own <= self.zero * self.whole_norm:
            return _Gap(factor, error, "missing")
        is_pure = float((found - factor * wanted).norm()) <= max(self.tolerance * own, noise)
        return _Gap(factor, error, "factor" if is_pure else "direction")

    def _double(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else whole(grad).double()

    def _noise(self) -> tuple[bool, dict[str, float]]:
        """Return whether the step is random, and the rounding of each gradient, from runs that differ in neither."""

        def distances(order: int, seed: int | None) -> dict[str, float]:
            _, gradients = _together(self.ranks, lambda: self.reference.run(self.batches.whole(order), seed))
            pairs = (
                (name, self._double(gradients.get(name)), self._double(grad)) for name, grad in self.wanted.items()
            )
            return {name: float((a - b).norm()) for name, a, b in pairs if a is not None and b is not None}

        limit = self.tolerance * self.whole_norm
        is_random = any(_everyone(self.ranks, math.hypot(*distances(1, seed=1).values()) > limit))
        return is_random, {name: min(16 * gap, limit) for name, gap in distances(-1, seed=None).items()}

    def _findings(self, gaps: dict[str, _Gap], values: tuple[float, float] | None) -> Findings:
        state, batches = self.state, self.batches
        wrong = {name: gap for name, gap in gaps.items() if not gap.is_right}
        everyone = _everyone(self.ranks, self.own)
        differ = {
            name
            for own in everyone
            for name, sample in own.items()
            if any(
                float((other[name] - sample).norm()) > 10 * self.tolerance * float(sample.norm()) for other in everyone
            )
        }
        outside = set(state.parameters_outside())
        unit, shares, right = ("", (), ()) if differ else self._shares()
        kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
        layers = [name for name, m in state.model.named_modules() if isinstance(m, kinds) and m.training]
        return Findings(
            factors=tuple(sorted({round(gap.factor, 6) for gap in wrong.values()})),
            is_partial=any(gap.kind == "exact" for gap in gaps.values()),
            parts=len(batches.parts),
            rows=batches.rows,
            differ=tuple(sorted(differ & wrong.keys())),
            outside=differ & wrong.keys() <= outside,
            unit=unit,
            shares=shares,
            right_shares=right,
            same_loss=values is not None and abs(values[0] - values[1]) <= self.tolerance * abs(values[1]),
            statistics=tuple(layers) if len(batches.parts) > 1 else (),
        )

    def _sample(self, gradients: Gradients) -> dict[str, Tensor]:
        """Return some numbers of each gradient, the same places in every run."""
        samples = {}
        for name, wanted in self.wanted.items():
            other = self.found[name] if wanted is None else wanted
            if other is not None:
                grad = gradients.get(name)
                flat = torch.zeros(other.numel()) if grad is None else whole(grad).flatten().cpu()
                samples[name] = flat[:: max(1, len(flat) // _SAMPLED)][: 2 * _SAMPLED].double()
        return samples

    def _shares(self) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
        """Return units of rows, what each counts in the gradient, and should count; empty if no such numbers exist."""
        by_rank, join = self.batches.by_rank, self.batches.join
        units = {"process": by_rank if len(by_rank) > 1 else [], "micro-batch": [[part] for part in self.batches.parts]}
        if len(by_rank) > 1 and self.batches.is_window and len(set(map(len, by_rank))) == 1:
            units["micro-batch of all processes"] = [[join(column)] for column in zip(*by_rank)]
        found: list[tuple[str, tuple[float, ...], tuple[float, ...]]] = []
        for unit, parts in units.items():
            if len(parts) > 1:
                columns = self._columns([part if self.batches.is_window else part[0] for part in parts])
                targets = self.own, self._sample(self.wanted)
                both = [_combination(columns, _flat(samples), self.tolerance) for samples in targets]
                found += [(unit, both[0], both[1])] if both[0] else []
        return max(found, key=lambda row: bool(row[2]), default=("", (), ()))

    def _columns(self, batches: list[Any]) -> Tensor | None:
        """Return samples of the gradients of each batch alone, as columns; None if the step fails for one."""
        rank, size = (0, 1) if self.ranks is None else (dist.get_rank(self.ranks), self.ranks.size())
        own: list[Tensor | None] = []
        for place in range(rank, -(-len(batches) // size) * size, size):  # equally many runs on every rank
            try:
                own.append(_flat(self._sample(self.reference.run(batches[place % len(batches)])[1])))
            except Exception:  # such as a batch without positives
                own.append(None)
        everyone = _everyone(self.ranks, own)
        columns = [everyone[place % size][place // size] for place in range(len(batches))]
        known = [column for column in columns if column is not None]
        return torch.stack(known, 1) if len(known) == len(columns) else None


def _flat(samples: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(samples.values()))


def _combination(columns: Tensor | None, target: Tensor, tolerance: float) -> tuple[float, ...]:
    """Return the numbers with which ``columns`` add up to ``target``; empty if there are none, or many."""
    if columns is None or columns.shape[1] > columns.shape[0] // 2:
        return ()
    shares = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    is_found = float((columns @ shares - target).norm()) <= max(10 * tolerance, 1e-6) * float(target.norm())
    return tuple(shares.tolist()) if is_found else ()
