"""What ``verify_step`` returns: the gradients of a step next to those of one process, and likely causes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import RankRuntimeError

Verdict = Literal["exact", "factor", "direction", "missing", "random"]


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


def _near(factors: Sequence[float], wanted: float) -> bool:
    """Return True if every factor is about ``wanted``."""
    return bool(factors) and all(abs(factor - wanted) <= 0.01 * wanted for factor in factors)


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in numbers[:8])


def likely_causes(
    verdict: Verdict,
    *,
    factors: Sequence[float],  # of the parameters that are not exact
    is_partial: bool,  # other parameters are exact
    parts: int,  # the number of micro-batches of all processes
    rows: Sequence[int],  # of each process
    differ: Sequence[str],  # parameters of which the processes hold different gradients
    outside: bool,  # these are outside the model
    unit: str,  # what ``shares`` are of: process, micro-batch, or micro-batch of all processes
    shares: Sequence[float],  # what the gradient of each unit counts in that of the step; empty: no combination
    right_shares: Sequence[float],  # what it should count; empty: no combination is right
    same_loss: bool,  # the mean of the logged losses is that of one process
    statistics: Sequence[str],  # layers of BatchNorm without synchronization in training mode
) -> tuple[str, ...]:
    """Return the causes that fit what was found, the likeliest first."""
    ranks, micro, names = len(rows), parts / len(rows), ", ".join(differ[:3])
    is_factor, is_direction = verdict == "factor", verdict == "direction"
    is_low, is_high = (is_factor and ranks > 1 and _near(factors, factor) for factor in (1 / ranks, ranks))
    relative = [share / right if right else 0.0 for share, right in zip(shares, right_shares)]
    is_uniform = bool(relative) and relative[0] > 0 and _near(relative, relative[0])  # each unit has one factor
    is_sum = is_factor and ranks > 1 and _near(right_shares, 1) and _near(shares, 1 / ranks)
    is_joint = is_direction and not shares and not differ and not statistics  # each gradient depends on all rows
    texts = {
        f"BatchNorm has statistics of each process and micro-batch alone ({', '.join(statistics[:3])}): "
        "SyncBatchNorm.convert_sync_batchnorm(model) before wrapping, LayerNorm, or eval() to verify the rest.": (
            bool(statistics) and (is_factor or is_direction)
        ),
        f"A parameter outside the model ({names}): no wrapper reduces its gradient. Make the loss a part of the model "
        "before wrapping it, or call all_reduce_grads_ on its parameters.": bool(differ) and outside,
        f"No wrapper has reduced these gradients ({names}), so the processes hold different ones: the forward went "
        "past the wrapper (model.module), the last backward was inside no_sync, the model has no wrapper, or DDP "
        "waits for a parameter that the step does not use (find_unused_parameters=True).": (
            bool(differ) and not outside
        ),
        f"1/{ranks} on everything: a sum over the rows of each process, of which the wrapper takes the mean. "
        "Multiply it by the number of processes, or use accumulate or global_mean.": is_sum,
        f"1/{ranks} on everything: a gather without gradient (torch.distributed.all_gather, all_gather_no_grad), or a "
        "loss that is divided by the number of processes already. Use all_gather_with_grad or gather_rows.": (
            is_low and not is_partial
        ),
        f"1/{ranks} on what is used before the gather, and 1 on what is used after it: the gather has no gradient "
        "(torch.distributed.all_gather, all_gather_no_grad). Use all_gather_with_grad or gather_rows.": (
            is_low and is_partial
        ),
        f"{ranks} on what is used after the gather, such as a learned temperature, and 1 on the rest: the loss is "
        "multiplied by the number of processes to make up for a gather without gradient. Use all_gather_with_grad or "
        "gather_rows, and no factor.": is_high and is_partial,
        f"{ranks} on everything: the loss is multiplied by the number of processes, or the gradients are added where "
        "the gather expects a mean: gradient_reduction='sum' if the wrapper adds them.": is_high and not is_partial,
        f"{micro:g} times: {micro:g} micro-batches are added up without dividing. Divide each mean by their number, or "
        "use accumulate, which divides by the rows of all.": (
            micro > 1 and (_near([sum(shares)], micro) or (is_factor and _near(factors, micro)))
        ),
        f"1/{micro:g}: the loss is divided by the number of micro-batches twice, or by that number although it is "
        "divided by the rows of all already.": micro > 1 and is_factor and _near(factors, 1 / micro),
        f"A mean of means: each {unit} counts {_listed(shares)}, and by its rows or tokens should count "
        f"{_listed(right_shares)}. Divide by the number of all processes and micro-batches: accumulate, global_mean, "
        "or the losses of this package.": bool(relative) and not is_uniform,
        f"A loss of own rows: each {unit} compares its own rows alone, and no weights make that the loss of all rows. "
        "Gather the rows with their gradient (gather_rows, or a loss of this package); over micro-batches use "
        "pooled_backward or a queue.": bool(shares) and not right_shares and not statistics,
        "The loss is right and its gradient is not: own rows are compared with gathered rows, and what the losses of "
        "other processes say about the own rows is missing (m of N parts in one term). Gather with "
        "backward='reduce_scatter', or compute the whole loss from gathered rows on every process.": (
            ranks > 1 and is_joint and same_loss
        ),
        "Only with uneven rows: a mean over each process's own rows against the rows of all; a padded gather; or "
        "places of rows that assume equal numbers (rank * len(rows)). Use gather_rows and a global mean.": (
            ranks > 1 and is_joint and len(set(rows)) > 1
        ),
        "Labels or places that number the rows of each process (arange(len(rows))): the same number then names "
        "another row on every process. Add the number of rows before.": ranks > 1 and is_joint,
        "Micro-batches that count by something else than their rows or tokens: a mean that is passed as a sum, or a "
        "count that leaves out a term. Pass sums, or num_items with a mean.": micro > 1 and is_joint,
        "No gradient arrives: a gather without gradient and without the own rows put back, a detach, a no_grad, or a "
        "parameter that this step uses on no process.": verdict == "missing",
        "Dropout, augmentation or sampling inside the step: pass disable_dropout=True, and draw before the step. Or a "
        "queue that the step changes outside modules: make it a module, and pass it as losses=.": verdict == "random",
    }
    return tuple(text for text, fits in texts.items() if fits)
