"""What ``verify_step`` returns: the gradients of a step next to those of one process, and likely causes."""

from __future__ import annotations

import textwrap
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
