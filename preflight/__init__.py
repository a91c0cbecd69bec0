"""Checks before the first training: of the user's cluster (``python -m fullrank``), and of the user's own step."""

from .joining import concatenate, pad_tokens
from .verify import StepReport, verify_step

__all__ = ["StepReport", "concatenate", "pad_tokens", "verify_step"]
