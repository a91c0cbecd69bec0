"""Fine bins are counted exactly, also where there are more of them than float32 has whole numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fullrank.kernels import bins as bins_of
from fullrank.kernels.bins import MOST_EXACT, Bins, Outside, compact_ids, cover_bulk, locate

WIDTH = 0.5


def window_at_the_limit(fine: int, num_left: int, dtype: torch.dtype) -> tuple[Bins, Tensor]:
    """Return a window of as many bins as are allowed, with occupied bins to the left of it, and rows in all parts."""
    window = MOST_EXACT * 64 // fine
    ids = -1000.0 - torch.arange(num_left, 0, -1, dtype=torch.float64)
    bins = Bins(WIDTH, fine, torch.zeros(1, dtype=dtype), window, Outside(ids, num_left, torch.arange(0)))
    inside = torch.linspace(0.0, (window - 1) * WIDTH, 4001, dtype=torch.float64)
    last = (window - 1) * WIDTH + torch.arange(fine // 2) * WIDTH / fine
    return bins, torch.cat([inside, last, (ids + 0.25) * WIDTH]).to(dtype)


def exact_numbers(bins: Bins, scores: Tensor) -> Tensor:
    """Return the fine bin of each score by whole numbers of Python."""
    assert bins.outside is not None
    ids, left, found = bins.outside.ids.tolist(), bins.outside.num_left, []
    for score in scores.double().tolist():
        fine = round(score * bins.fine / bins.width)
        coarse = fine // bins.fine
        place = coarse + left if 0 <= coarse < bins.window else ids.index(float(coarse))
        found.append(place * bins.fine + fine % bins.fine)
    return torch.tensor(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fine", [8, 32, 64])
def test_rows_are_in_their_bins_at_the_limit_of_float32(fine: int, dtype: torch.dtype) -> None:
    bins, scores = window_at_the_limit(fine, 301, dtype)
    index, _ = locate(bins, scores[None], slice(None))
    exact = exact_numbers(bins, scores)
    assert torch.equal(index[0], exact)
    # Control: the same numbers in float32, in which every second one above 2^24 is another.
    assert not torch.equal(exact.float().long(), exact)


@pytest.mark.parametrize("offset", [2.0**26, -(2.0**26), 1e9])
def test_window_and_outside_agree_far_from_zero(offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The float32 numbers of coarse bins are then multiples of 8, and no end of a window is a whole number of them."""
    monkeypatch.setattr(bins_of, "FEWEST_ROWS", 0)
    monkeypatch.setattr(bins_of, "most_bins", lambda num_rows: 4097)
    scores = (offset + 64.0 * torch.arange(-400, 400)).float()
    bins = cover_bulk(scores, 0.1, 8)
    assert bins is not None
    assert bins.outside is not None
    ids = compact_ids(bins, 10)
    assert ids is not None
    assert bool((ids.diff() > 0).all())  # every bin exists once
    index, _ = locate(bins, scores[None], slice(None))
    assert index[0].diff().min() > 0
    assert int(index.max()) < bins.num_fine
