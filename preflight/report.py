"""What ``verify_step`` returns: the gradients of a step next to those of one process, and likely causes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..errors import RankRuntimeError

Verdict = Literal["exact", "factor", "direction", "missing", "random"]


class Findings(NamedTuple):
    """What the causes are judged by."""

    factors: tuple[float, ...]  # distinct ones of the parameters that are not exact
    is_partial: bool  # other parameters are exact
    parts: int  # the number of micro-batches of all processes
    rows: tuple[int, ...]  # of each process
    differ: tuple[str, ...]  # parameters of which the processes hold different gradients
    outside: bool  # all of these are outside the model
    unit: str  # what ``shares`` are of: processes, micro-batches, or micro-batches of all processes
    shares: tuple[float, ...]  # what the gradient of each unit counts in that of the step; empty: no combination
    right_shares: tuple[float, ...]  # what it should count; empty: no combination is right
    same_loss: bool  # the mean of the logged losses is that of one process
    statistics: tuple[str, ...]  # layers of BatchNorm without synchronization in training mode


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
    notes: tuple[str, ...] = ()
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
        return "\n".join([*lines, *self.notes])

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


def _near(factors: Sequence[float], *wanted: float) -> bool:
    """Return True if every factor is one of ``wanted``."""
    return bool(factors) and all(any(abs(f - w) <= 0.01 * abs(w) for w in wanted) for f in factors)


def likely_causes(verdict: Verdict, found: Findings) -> tuple[str, ...]:
    """Return the causes that fit what was found, the likeliest first."""
    ranks, factors, unit = len(found.rows), found.factors, found.unit
    micro, total = found.parts / ranks, sum(found.rows)
    names = ", ".join(found.differ[:3]) + (" ..." if len(found.differ) > 3 else "")
    shares, right = (", ".join(f"{share:.3g}" for share in part[:8]) for part in (found.shares, found.right_shares))
    is_sum = bool(found.right_shares) and _near(found.right_shares, 1) and _near(found.shares, 1 / ranks)
    is_whole, is_joint = not found.is_partial, not found.shares and not found.differ
    any_wrong = "factor direction missing"
    causes = [  # verdicts, whether it fits, text
        (
            "direction factor",
            bool(found.statistics),
            f"BatchNorm has statistics of each process and micro-batch alone ({', '.join(found.statistics[:3])}): "
            "SyncBatchNorm.convert_sync_batchnorm(model) before wrapping, LayerNorm, or eval() to verify the rest.",
        ),
        (
            any_wrong,
            bool(found.differ) and found.outside,
            f"A parameter outside the model ({names}): no wrapper reduces its gradient. Make the loss a part of the "
            "model before wrapping it, or call all_reduce_grads_ on its parameters.",
        ),
        (
            any_wrong,
            bool(found.differ) and not found.outside,
            f"No wrapper has reduced these gradients ({names}), so the processes hold different ones: the forward went "
            "past the wrapper (model.module), the last backward was inside no_sync, or the wrapper ignores them.",
        ),
        (
            "factor",
            ranks > 1 and is_sum,
            f"1/{ranks} on everything: a sum over the rows of each process, of which the wrapper takes the mean. "
            "Multiply it by the number of processes, or use accumulate or global_mean.",
        ),
        (
            "factor",
            ranks > 1 and _near(factors, 1 / ranks) and is_whole,
            f"1/{ranks} on everything: a gather without gradient (torch.distributed.all_gather, all_gather_no_grad), "
            "or a loss that is divided by the number of processes already. Use all_gather_with_grad or gather_rows.",
        ),
        (
            "factor",
            ranks > 1 and _near(factors, 1 / ranks) and found.is_partial,
            f"1/{ranks} on what is used before the gather, and 1 on what is used after it: the gather has no gradient "
            "(torch.distributed.all_gather, all_gather_no_grad). Use all_gather_with_grad or gather_rows.",
        ),
        (
            "factor",
            ranks > 1 and _near(factors, ranks) and found.is_partial,
            f"{ranks} on what is used after the gather, such as a learned temperature, and 1 on the rest: the loss is "
            "multiplied by the number of processes to make up for a gather without gradient. Use all_gather_with_grad "
            "or gather_rows, and no factor.",
        ),
        (
            "factor",
            ranks > 1 and _near(factors, ranks) and is_whole,
            f"{ranks} on everything: the loss is multiplied by the number of processes, or the gradients are added "
            "where the gather expects a mean: gradient_reduction='sum' if the wrapper adds them.",
        ),
        (
            "factor direction",
            micro > 1 and (_near(factors, micro) or (bool(shares) and _near([sum(found.shares)], micro))),
            f"{micro:g} times: {micro:g} micro-batches are added up without dividing. Divide each mean by their "
            "number, or use accumulate, which divides by the rows of all.",
        ),
        (
            "factor",
            micro > 1 and _near(factors, 1 / micro),
            f"1/{micro:g}: the loss is divided by the number of micro-batches twice, or by that number although it is "
            "divided by the rows of all already.",
        ),
        (
            "factor",
            _near(factors, total, *found.rows, *(1 / rows for rows in (total, *found.rows) if rows)),
            "The number of rows: a sum is taken for a mean, or a mean for a sum.",
        ),
        (
            "direction factor",
            bool(found.right_shares) and bool(shares) and not is_sum,
            f"A mean of means: each {unit} counts {shares}, and by its rows or tokens should count {right}. Divide by "
            "the number of all processes and micro-batches: accumulate, global_mean, or the losses of this package.",
        ),
        (
            "direction factor",
            bool(shares) and not found.right_shares,
            f"A loss of own rows: each {unit} compares its own rows alone, and no weights make that the loss of all "
            "rows. Gather the rows with their gradient (gather_rows, or a loss of this package); over micro-batches "
            "use pooled_backward or a queue.",
        ),
        (
            "direction",
            ranks > 1 and is_joint and found.same_loss,
            "The loss is right and its gradient is not: own rows are compared with gathered rows, and what the losses "
            "of other processes say about the own rows is missing (m of N parts in one term). Gather with "
            "backward='reduce_scatter', or compute the whole loss from gathered rows on every process.",
        ),
        (
            "direction",
            ranks > 1 and is_joint and len(set(found.rows)) > 1,
            "Only with uneven rows: a mean over each process's own rows against the rows of all; a padded gather; or "
            "places of rows that assume equal numbers (rank * len(rows)). Use gather_rows and a global mean.",
        ),
        (
            "direction",
            ranks > 1 and is_joint,
            "Labels or places that number the rows of each process (arange(len(rows))): the same number then names "
            "another row on every process. Add the number of rows before.",
        ),
        (
            "direction",
            micro > 1 and is_joint,
            "Micro-batches that count by something else than their rows or tokens: a mean that is passed as a sum, or "
            "a count that leaves out a term. Pass sums, or num_items with a mean.",
        ),
        (
            "missing",
            True,
            "No gradient arrives: a gather without gradient and without the own rows put back, a detach, a no_grad, or "
            "a parameter that this step uses on no process.",
        ),
        (
            "direction factor",
            found.is_partial,
            "One term of several: the parameters that are exact have no part in it. Verify each term alone.",
        ),
        (
            "random",
            True,
            "Dropout, augmentation or sampling inside the step: pass disable_dropout=True, and draw before the step.",
        ),
    ]
    return tuple(text for verdicts, fits, text in causes if verdict in verdicts and fits)
