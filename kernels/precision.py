"""The precision of float32 matrix products, a setting of the whole process that the kernels raise while they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FULL = ("none", "ieee")  # values of torch.backends.*.fp32_precision with which float32 products are float32
_lock = threading.Lock()
_calls = 0  # that run with full products because of :func:`full_products`
_before: list[tuple[Any, str]] = []  # what they restore: settings and their values


def products_are_rounded() -> bool:
    """Return True if products of float32 matrices may not be float32 products throughout a call that begins now."""
    try:
        # While another thread has raised the precision it reads "highest", until that thread restores it.
        return _calls > 0 or torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # torch raises if the precision was lowered by the newer settings, torch.backends.*
        return True


@contextmanager
def full_products() -> Iterator[None]:
    """Compute float32 matrix products in float32, as with ``torch.set_float32_matmul_precision("highest")``."""
    global _calls
    with _lock:
        if _calls == 0:
            found: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
            settings = [setting for setting in found if hasattr(setting, "fp32_precision")]  # from torch 2.9 on
            if settings:
                _before[:] = [(one, one.fp32_precision) for one in settings if one.fp32_precision not in _FULL]
                for setting, _ in _before:
                    setting.fp32_precision = "ieee"
            else:
                _before[:] = [(None, torch.get_float32_matmul_precision())]
                torch.set_float32_matmul_precision("highest")
        _calls += 1
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            for setting, value in _before if _calls == 0 else []:
                if setting is None:
                    torch.set_float32_matmul_precision(value)
                    continue
                setting.fp32_precision = "none"  # inherits from the settings above it, as torch.backends.fp32_precision
                if setting.fp32_precision != value:
                    setting.fp32_precision = value
