"""Proof on the user's own program: the gradients of one step next to those of one process with the whole batch.

First every rank runs the step alone, with the batches of all: an error in it is raised on all ranks, and none is left
waiting. Then the step runs as it is on all ranks. Where gradients differ, further runs alone tell why: with another
seed (is the step random?), with the batches in another order (is it rounding?), and with each batch on its own (is the
gradient a combination of those of the batches?).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader

from ..distributed.group import Group
from ..distributed.header import Offer, agree_on
from ..errors import RankRuntimeError, expected
from ..gradients.parameters import is_dtensor
from ..gradients.wrappers import find_ranks, find_sync
from .joining import Join, concatenate, is_window, map_tensors, tensors_in
from .one_process import Gradients, Reference, State, Step, take_gradients, whole

T = TypeVar("T")
Verdict = Literal["exact", "factor", "direction", "missing", "random"]

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

    It knows nothing of what the step does. It takes the time of two steps, and of a few more where gradients differ,
    and the memory of one more model.

    Args:
        step: ``step(model, batch)`` does forward and backward(s) of one optimizer step with the model that it is given,
            and may return the loss. If it calls an optimizer or unscales gradients, it ends there. It asks for the
            world size inside: on one process it is 1.
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
            is given, or communicates over a group of its own. An error of some ranks is raised on all.

    State:
        Parameters, buffers, gradients, random states, training modes, switches of wrappers, queues and optimizers are
        afterwards as before, also after an error.

    Limits:
        Statistics of batches (BatchNorm without synchronization) and random steps have no gradient of one process to
        compare with; the report names both. A world size that was read before the step is not exchanged.
    """

    def make_state() -> State:
        modules = [losses] if isinstance(losses, nn.Module) else list(losses)
        for name, value, is_right, kind in (
            ("step", step, callable(step), "a function"),
            ("model", model, isinstance(model, nn.Module), "a module"),
            ("losses", losses, all(isinstance(loss, nn.Module) for loss in modules), "modules"),
            ("batch", batch, not isinstance(batch, (Iterator, DataLoader)), "a batch, or a list of micro-batches"),
        ):
            if not is_right:
                raise TypeError(expected(name, kind, value))
        return State(step, model, modules, disable_dropout=disable_dropout)

    # With something else than a model a rank meets the others where those without a wrapper do.
    sync = find_sync(model if isinstance(model, nn.Module) else nn.Module())
    # Under tensor parallelism alone all ranks have the same batch.
    is_alone = group is None and sync.unwrapped is not None and any(map(is_dtensor, sync.unwrapped.parameters()))
    ranks = None if is_alone else find_ranks(sync, group)
    state = _together(ranks, make_state)
    with ExitStack() as stack:
        stack.enter_context(state.restored())
        batches = _together(ranks, lambda: _Batches(batch, join or concatenate, ranks))
        joined = _together(ranks, batches.whole)
        reference = _together(ranks, lambda: Reference(state, build_model))
        stack.callback(reference.close)
        alone = f"verify_step on one process ({'one micro-batch, ' * batches.is_window}world size 1)"
        loss_alone, wanted = _together(ranks, lambda: reference.run(joined), alone)
        state.rewind()
        loss = _together(ranks, lambda: state.run(model, batch))
        found = take_gradients(reference.sources | state.parameters_outside())
        state.rewind()
        return _Proof(reference, batches, ranks, found, wanted).report(loss, loss_alone)


@dataclass(frozen=True)
class StepReport:
    """The gradients of a step next to those of one process with all rows; the same on every rank.

    Attributes:
        verdict: "exact"; "factor": gradients of the right direction and the wrong length; "direction": others;
            "missing": gradients that one process has and the step does not; "random": two runs of one process differ.
        gradients: for the name of each parameter its ``(factor, error)``, of the rank where the error is largest.
            With g from the step and r of one process, factor is <g, r> / <r, r>, and error |g - r| / |r|.
        loss: what the step returned, its mean over the ranks, and what it returned on one process; None without.
        causes: likely causes, the likeliest first.
    """

    verdict: Verdict
    gradients: dict[str, tuple[float, float]]
    loss: tuple[float, float] | None = None
    causes: tuple[str, ...] = ()
    setting: str = ""  # processes, wrapper, rows
    kinds: dict[str, str] = field(default_factory=dict, repr=False)  # the verdict of each parameter; "zero": both are

    @property
    def is_exact(self) -> bool:
        """True if every gradient is that of one process."""
        return self.verdict == "exact"

    def check(self) -> None:
        """Raise RankRuntimeError with the report, on every rank, unless every gradient is exact."""
        if not self.is_exact:
            raise RankRuntimeError(str(self))

    def __str__(self) -> str:
        lines = [f"verify_step: {self.verdict} ({self.setting})"]
        if self.loss is not None:
            lines.append(f"loss {self.loss[0]:.6g} in the step, {self.loss[1]:.6g} on one process")
        rows = [("parameters", "factor", "error"), *self._rows()]
        width = max(len(name) for name, _, _ in rows)
        lines += ["", *(f"  {name:{width}}  {factor:>14}  {error:>7}" for name, factor, error in rows)]
        for number, cause in enumerate(self.causes, 1):
            lines += ["", *textwrap.wrap(cause, 100, initial_indent=f"{number}. ", subsequent_indent="   ")]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return a row for the parameters of each kind and factor."""
        groups: dict[object, list[str]] = {}
        for name, (factor, _) in self.gradients.items():
            kind = self.kinds[name]
            groups.setdefault((kind, round(factor, 3) if kind == "factor" else None), []).append(name)
        rows = []
        for names in groups.values():
            factors, errors = zip(*(self.gradients[name] for name in names))
            low, high = f"{min(factors):.3f}", f"{max(factors):.3f}"
            label = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
            shown = low if low == high else f"{low} to {high}"
            rows.append((label, "both 0" if self.kinds[names[0]] == "zero" else shown, f"{max(errors):.1e}"))
        return rows


def _together(ranks: ProcessGroup | None, compute: Callable[[], T], call: str = "verify_step") -> T:
    """Return ``compute()``; if it raises on one rank, all raise."""
    return agree_on(call, ranks, lambda: Offer(compute())).value


def _everyone(ranks: ProcessGroup | None, value: T) -> list[T]:
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
        self.by_rank = []
        for _, arrived, devices in everyone:
            device = iter(devices)
            arrived = map_tensors(lambda tensor: tensor.to(next(device)), arrived)  # noqa: B023
            self.by_rank.append(arrived if self.is_window else [arrived])
        tensors = [[[t for t in tensors_in(part) if t.ndim] for part in parts] for parts in self.by_rank]
        self.rows = [sum(len(found[0]) if found else 0 for found in parts) for parts in tensors]
        self.parts = [part for parts in self.by_rank for part in parts]
        self.join = join

    def whole(self, order: int = 1) -> Any:
        """Return all batches as one; with ``order`` -1 the last comes first."""
        return self.of_step(self.join(self.parts[::order]))

    def of_step(self, part: Any) -> Any:
        """Return one batch as the step gets it."""
        return [part] if self.is_window else part

    def units(self) -> dict[str, list[Any]]:
        """Return the parts of the whole batch that a loss may see alone, by what they are."""
        units = {"micro-batch" if self.is_window else "process": self.parts}
        if self.is_window and len(self.by_rank) > 1 and len(set(map(len, self.by_rank))) == 1:
            units["micro-batch of all processes"] = [self.join(column) for column in zip(*self.by_rank)]
        return {unit: parts for unit, parts in units.items() if len(parts) > 1}


class _Gap(NamedTuple):
    """The gradient g of a parameter in the step next to r of one process."""

    kind: str  # one of ``_KINDS``
    factor: float = 1.0  # <g, r> / <r, r>
    error: float = 0.0  # |g - r| / |r|


_KINDS = ("zero", "exact", "factor", "missing", "direction")  # zero: both are, up to rounding; the worst is last


class _Proof:
    """The gradients of both runs, and what further runs tell about their differences."""

    def __init__(
        self, reference: Reference, batches: _Batches, ranks: ProcessGroup | None, found: Gradients, wanted: Gradients
    ) -> None:
        self.state, self.reference, self.batches, self.ranks = reference.state, reference, batches, ranks
        self.found, self.wanted = {name: found.get(name) for name in wanted}, wanted
        eps = torch.finfo(self.state.lowest).eps
        self.tolerance = math.sqrt(eps)
        self.whole_norm = math.hypot(*(float(grad.double().norm()) for grad in wanted.values() if grad is not None))
        # Less is rounding. In float64 that of sums of 1e6 terms.
        self.zero = max(1e-9, min(32 * eps, self.tolerance / 4)) * self.whole_norm

    def report(self, loss: float | None, loss_alone: float | None) -> StepReport:
        """Compare, look for the reasons, and return what all ranks agree on."""
        is_random, (gaps, differ) = False, self._gaps({})
        if any(gap.kind not in _KINDS[:2] for gap in gaps.values()):
            is_random, noise = self._noise()
            gaps, differ = self._gaps(noise)
        kinds = {name: gap.kind for name, gap in gaps.items()}
        order: tuple[Verdict, ...] = ("direction", "missing", "factor")
        verdict: Verdict = next((kind for kind in order if kind in kinds.values()), "exact")
        verdict = "random" if is_random and verdict != "exact" else verdict
        everyone = _everyone(self.ranks, loss)
        known = [own for own in everyone if own is not None]
        mean = None if loss_alone is None or len(known) < len(everyone) else (sum(known) / len(known), loss_alone)
        differ = [] if is_random else differ  # then one process has other gradients on each rank
        causes = () if verdict == "exact" else self._causes(verdict, gaps, differ, mean)
        rows = self.batches.rows
        setting = f"{len(rows)} process{'es' * (len(rows) > 1)}, {find_sync(self.state.model).kind}, "
        setting += f"{' + '.join(map(str, rows[:8]))} rows"
        setting += f", {len(self.batches.parts)} micro-batches" * self.batches.is_window
        setting += ", up to the optimizer" * self.state.is_optimized
        gradients = {name: (gap.factor, gap.error) for name, gap in gaps.items()}
        return _everyone(self.ranks, StepReport(verdict, gradients, mean, causes, setting, kinds))[0]

    def _gaps(self, noise: dict[str, float]) -> tuple[dict[str, _Gap], list[str]]:
        """Return for each parameter the gap of the rank where it is largest, and the names of which ranks differ."""
        own = {name: self._gap(name, noise.get(name, 0.0)) for name in self.wanted}
        everyone, gaps, differ = _everyone(self.ranks, own), {}, []
        for name in own:
            every = [other[name] for other in everyone]
            gaps[name] = max(every, key=lambda gap: (_KINDS.index(gap.kind), gap.error))
            factors = [gap.factor for gap in every]
            if gaps[name].kind in _KINDS[2:] and max(factors) - min(factors) > 1e-3 * max(map(abs, factors)):
                differ.append(name)
                if gaps[name].kind == "factor":
                    gaps[name] = gaps[name]._replace(kind="direction")  # another factor on each rank
        return gaps, differ

    def _gap(self, name: str, noise: float) -> _Gap:
        both = [None if grad is None else whole(grad).double() for grad in (self.found[name], self.wanted[name])]
        if not (known := [grad for grad in both if grad is not None]):
            return _Gap("zero")
        g, r = (torch.zeros_like(known[0]) if grad is None else grad for grad in both)
        own, length, distance = float(g.norm()), float(r.norm()), float((g - r).norm())
        if not math.isfinite(own):
            return _Gap("direction", math.nan, math.inf)
        if max(own, length) <= self.zero:
            return _Gap("zero")
        factor, error = (float((g * r).sum()) / length**2, distance / length) if length else (math.inf, math.inf)
        if distance <= max(self.tolerance * length, noise):
            return _Gap("exact", factor, error)
        if own <= self.zero:
            return _Gap("missing", factor, error)
        is_pure = float((g - factor * r).norm()) <= max(self.tolerance * own, noise)
        return _Gap("factor" if is_pure else "direction", factor, error)

    def _noise(self) -> tuple[bool, dict[str, float]]:
        """Return whether the step is random, and the rounding of each gradient, from runs that differ in neither."""

        def distances(order: int, seed: int | None) -> dict[str, float]:
            _, others = _together(self.ranks, lambda: self.reference.run(self.batches.whole(order), seed))
            pairs = ((name, others.get(name), grad) for name, grad in self.wanted.items())
            return {name: float((a.double() - b).norm()) for name, a, b in pairs if a is not None and b is not None}

        limit = self.tolerance * self.whole_norm
        is_random = any(_everyone(self.ranks, math.hypot(*distances(1, seed=1).values()) > limit))
        return is_random, {name: min(16 * gap, limit) for name, gap in distances(-1, seed=None).items()}

    def _causes(
        self, verdict: Verdict, gaps: dict[str, _Gap], differ: list[str], losses: tuple[float, float] | None
    ) -> tuple[str, ...]:
        """Return the causes that fit what was found, the likeliest first."""
        rows, num_parts = self.batches.rows, len(self.batches.parts)
        ranks, micro = len(rows), num_parts / len(rows)
        kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
        layers = [name for name, m in self.state.model.named_modules() if isinstance(m, kinds) and m.training]
        statistics = ", ".join(layers[:3]) if num_parts > 1 else ""
        is_outside, names = set(differ) <= self.state.parameters_outside().keys(), ", ".join(differ[:3])
        is_finite = not any(math.isnan(gap.factor) for gap in gaps.values())
        is_factor, is_direction = verdict == "factor", verdict == "direction" and is_finite
        unit, shares, right = self._shares() if (is_factor or is_direction) and not differ else ("", (), ())
        factors = [gap.factor for gap in gaps.values() if gap.kind in _KINDS[2:]]
        is_low, is_high = (is_factor and ranks > 1 and _near(factors, factor) for factor in (1 / ranks, ranks))
        is_partial = any(gap.kind == "exact" for gap in gaps.values())
        lost = "what is used before the gather, and 1 on what is used after it" if is_partial else "everything"
        relative = [share / wanted if wanted else 0.0 for share, wanted in zip(shares, right)]
        is_uniform = bool(relative) and relative[0] > 0 and _near(relative, relative[0])  # each unit has one factor
        is_sum = is_factor and ranks > 1 and _near(right, 1) and _near(shares, 1 / ranks)
        is_added = micro > 1 and (_near([sum(shares)], micro) or (is_factor and _near(factors, micro)))
        is_joint = is_direction and not shares and not differ and not statistics  # each gradient depends on all rows
        is_over_ranks = ranks > 1 and is_joint
        is_right = losses is not None and abs(losses[0] - losses[1]) <= self.tolerance * abs(losses[1])
        texts = {
            "NaN or infinite gradients, which one process does not have: the mean of a process or micro-batch without "
            "rows that count is 0 / 0. Use accumulate, global_mean, or the losses of this package.": not is_finite,
            f"BatchNorm has statistics of each process and micro-batch alone ({statistics}): "
            "SyncBatchNorm.convert_sync_batchnorm(model) before wrapping, LayerNorm, or eval() to verify the "
            "rest.": bool(statistics) and (is_factor or is_direction),
            f"A parameter outside the model ({names}): no wrapper reduces its gradient. Make the loss a part of the "
            "model before wrapping it, or call all_reduce_grads_ on its parameters.": bool(differ) and is_outside,
            f"No wrapper has reduced these gradients ({names}), so the processes hold different ones: the forward went "
            "past the wrapper (model.module), the last backward was inside no_sync, the model has no wrapper, or DDP "
            "waits for a parameter that the step does not use (find_unused_parameters=True).": bool(differ)
            and not is_outside,
            f"1/{ranks} on everything: a sum over the rows of each process, of which the wrapper takes the mean. "
            "Multiply it by the number of processes, or use accumulate or global_mean.": is_sum,
            f"1/{ranks} on {lost}: a gather without gradient (torch.distributed.all_gather, all_gather_no_grad), or a "
            "loss that is divided by the number of processes already. Use all_gather_with_grad or gather_rows.": is_low,
            f"{ranks} on what is used after the gather, such as a learned temperature, and 1 on the rest: the loss is "
            "multiplied by the number of processes to make up for a gather without gradient. Use all_gather_with_grad "
            "or gather_rows, and no factor.": is_high and is_partial,
            f"{ranks} on everything: the loss is multiplied by the number of processes, or the gradients are added "
            "where the gather expects a mean: gradient_reduction='sum' if the wrapper adds them.": is_high
            and not is_partial,
            f"{micro:g} times: {micro:g} micro-batches are added up without dividing. Divide each mean by their "
            "number, or use accumulate, which divides by the rows of all.": is_added,
            f"1/{micro:g}: the loss is divided by the number of micro-batches twice, or by that number although it is "
            "divided by the rows of all already.": micro > 1 and is_factor and _near(factors, 1 / micro),
            f"A mean of means: each {unit} counts {_listed(shares)}, and by its rows or tokens should count "
            f"{_listed(right)}. Divide by the number of all processes and micro-batches: accumulate, global_mean, "
            "or the losses of this package.": bool(relative) and not is_uniform,
            f"A loss of own rows: each {unit} compares its own rows alone, and no weights make that the loss of all "
            "rows. Gather the rows with their gradient (gather_rows, or a loss of this package); over micro-batches "
            "use pooled_backward or a queue.": bool(shares) and not right and not statistics,
            "The loss is right and its gradient is not: own rows are compared with gathered rows, and what the losses "
            "of other processes say about the own rows is missing (m of N parts in one term). Gather with "
            "backward='reduce_scatter', or compute the whole loss from gathered rows on every "
            "process.": is_over_ranks and is_right,
            "Labels or places that number the rows of each process (arange(len(rows)), rank * len(rows)); a padded "
            "gather; or, with uneven rows, a mean over each process's own rows against the rows of all. Use "
            "gather_rows and a global mean, and add the number of rows before.": is_over_ranks,
            "Micro-batches that count by something else than their rows or tokens: a mean that is passed as a sum, or "
            "a count that leaves out a term. Pass sums, or num_items with a mean.": micro > 1 and is_joint,
            "No gradient arrives: a gather without gradient and without the own rows put back, a detach, a no_grad, or "
            "a parameter that this step uses on no process.": verdict == "missing",
            "Dropout, augmentation or sampling inside the step: pass disable_dropout=True, and draw before the step. "
            "Or a queue that the step changes outside modules: make it a module, and pass it as "
            "losses=.": verdict == "random",
        }
        return tuple(text for text, fits in texts.items() if fits)

    def _shares(self) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
        """Return units of rows, what each counts in the gradient, and should count; empty if no such numbers exist.

        The step runs with each unit alone, and the gradient is written as a combination of the gradients of these runs.
        """
        best: tuple[str, tuple[float, ...], tuple[float, ...]] = "", (), ()
        for unit, parts in self.batches.units().items():
            try:
                runs = [self.reference.run(self.batches.of_step(part))[1] for part in parts]
            except Exception:  # such as a batch without positives
                continue
            *columns, found, wanted = map(self._sample, [*runs, self.found, self.wanted])
            shares, right = (
                _combination(torch.stack(columns, 1), target, self.tolerance) for target in (found, wanted)
            )
            if shares and (not best[1] or (right and not best[2])):
                best = unit, shares, right
        return best

    def _sample(self, gradients: Gradients) -> Tensor:
        """Return some numbers of each gradient, from the same places of every run."""
        samples = []
        for name, wanted in self.wanted.items():
            like = self.found[name] if wanted is None else wanted
            if like is not None:
                grad = gradients.get(name)
                flat = whole(like if grad is None else grad).flatten() * (grad is not None)
                samples.append(flat[:: max(1, len(flat) // _SAMPLED)][: 2 * _SAMPLED].double().cpu())
        return torch.cat(samples)


def _near(factors: Sequence[float], wanted: float) -> bool:
    return bool(factors) and all(abs(factor - wanted) <= 0.01 * wanted for factor in factors)


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in numbers[:8])


def _combination(columns: Tensor, target: Tensor, tolerance: float) -> tuple[float, ...]:
    """Return the numbers with which ``columns`` add up to ``target``; empty if there are none, or many."""
    if columns.shape[1] > columns.shape[0] // 2:
        return ()
    shares = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    is_found = float((columns @ shares - target).norm()) <= max(10 * tolerance, 1e-6) * float(target.norm())
    return tuple(shares.tolist()) if is_found else ()
