"""What the workers of test_preflight.py run: the checks of the preflight with a fault put in."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fullrank.losses import smooth_ap
from fullrank.preflight import checks, command
from fullrank.preflight.site import Site


def raise_failed(site: Site) -> str:
    raise checks.Failed("off by one")


def _spoil_rows(*tensors: Any, **options: Any) -> Any:
    gathered = list(_gather_rows(*tensors, **options))
    if dist.get_rank() == 1 and gathered[0].shape[0] == 16:
        gathered[0] = gathered[0] + 1
    return tuple(gathered)


_gather_rows = checks.gather_rows


class _LocalSmoothAP(checks.SmoothAPLoss):
    """Ranks against the rows of this rank only, as a loss without gather does."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return smooth_ap(logits, targets, self.temperature) + 0 * super().forward(logits, targets)


class _Poisoned(checks.SmoothAPLoss):
    """Returns NaN where it gathers, with the right gradient."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        loss = super().forward(logits, targets)
        return loss if self.gather_distributed is False else loss + (loss * float("nan")).detach()


class _Silent(checks.SmoothAPLoss):
    """Returns zero for bad input instead of raising."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        try:
            return super().forward(logits, targets)
        except ValueError:
            return logits.sum() * 0


def with_fault(rank: int, fault: str, check: str) -> list[tuple[str, str]]:
    """Return outcome and detail of ``check``, run with ``fault``, and of another check after it."""
    site = Site(rank, dist.get_world_size(), "gloo", torch.device("cpu"), torch.float64, 1e-12)
    replacement: dict[str, Any] = {
        "gradient of one loss": ("SmoothAPLoss", _LocalSmoothAP),
        "value of one loss": ("SmoothAPLoss", _Poisoned),
        "rows on one rank": ("gather_rows", _spoil_rows),
        "silence on bad input": ("SmoothAPLoss", _Silent),
    }
    kept = {key: command._CHECKS[key] for key in (check, "gather, no rows")}
    with mock.patch.object(checks, *replacement[fault]), mock.patch.object(command, "_CHECKS", kept):
        return [(result.outcome, result.detail) for result in command._run(site)]
