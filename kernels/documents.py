"""Rows of tokens with several documents: which tokens a causal loss may predict from the token before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import Words, expected
from .torch_private import version_of

SHIFTED_DOCUMENTS = (
    "Labels that were shifted before must have the ignored value where a document ends: set it there, and pass no "
    "document ids."
)


def check_tokens(name: str, value: Any) -> Tensor:
    """Return ``value`` if it is a plain tensor of integers, or raise TypeError."""
    if not isinstance(value, Tensor) or hasattr(value, "full_tensor"):
        fix = "Use torch.as_tensor." if not isinstance(value, Tensor) else "Pass its local part."
        raise TypeError(expected(name, "a plain torch.Tensor", value, fix))
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        fix = "Pass class indices, and ignore_index where a token does not count." if name == "labels" else ""
        raise TypeError(expected(name, "integers", value, fix))
    return value


# Labels on an accelerator whose range the host has read, with what it was read of.
_RANGES = WeakTensorKeyDictionary()


def note_token_range(labels: Tensor, ignore_index: int, low: int, high: int) -> None:
    """Note that ``labels``, while they are not changed, lie in [low, high] or are ``ignore_index``."""
    _RANGES[labels] = version_of(labels), ignore_index, low, high


def is_within(labels: Tensor, ignore_index: int, size: int) -> bool:
    """Return whether ``labels`` are known to lie in [0, size) or to be ``ignore_index``; the host does not wait."""
    if labels.is_cpu:
        return False
    version, ignored, low, high = _RANGES.get(labels) or (-1, 0, 0, 0)
    return version == version_of(labels) >= 0 and ignored == ignore_index and 0 <= low <= high < size


def same_document(name: str, document_ids: Any, labels: Tensor) -> Tensor:
    """Return (..., T - 1) bool: token t + 1 of ``labels`` (..., T) belongs to the document of token t."""
    ids = check_tokens(name, document_ids)
    if ids.shape != labels.shape:
        what = f"shape {tuple(labels.shape)}, that of the labels"
        raise ValueError(expected(name, what, ids, "Pass the document of each token."))
    if ids.device != labels.device:
        got, fix = Words(f"one on {ids.device}"), f"Use {name}.to(labels.device)."
        raise ValueError(expected(name, f"a tensor on {labels.device}, as labels", got, fix))
    return ids[..., 1:] == ids[..., :-1]
