"""The bound of a numeric test, which follows from the arithmetic and so holds on any processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from subjects import LIMITS, error
from torch import Tensor

MULTIPLE = 8  # of the error of the usual form: what rounds at other places errs by another draw of the same size


def assert_as_exact(found: Sequence[Tensor], usual: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Assert that ``found`` errs by at most a few times what ``usual`` errs by, and that a factor of 1 + 1e-3 does.

    ``usual`` is what a plain form gives in the same dtype on this machine, ``exact`` float64 of the same inputs. One
    number may be right by chance, so the largest relative error of a value and its gradients counts for all of them. No
    reference here is more exact than float64, whose bound is that of the promise: 4500 roundings of the norm.
    """
    dtype = found[-1].dtype
    eps = LIMITS["float64"] / MULTIPLE if dtype == torch.float64 else torch.finfo(dtype).eps
    limit = MULTIPLE * max(eps, *map(error, usual, exact))
    assert [number for number, pair in enumerate(zip(found, exact)) if not error(*pair) <= limit] == [], limit
    assert all(error(1.001 * one, true) > limit for one, true in zip(found, exact) if true.any())
