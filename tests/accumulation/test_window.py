"""What accumulate and pooled_backward share: the check of the window, and its opening in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fullrank
from fullrank.accumulation.window import list_micro_batches


def accumulated(model: Any, micro_batches: Any, **options: Any) -> None:
    """Run a window of accumulate."""
    for step, batch in fullrank.accumulate(model, micro_batches, len, **options):
        step.backward(model(batch).sum())


def pooled(model: Any, micro_batches: Any, **options: Any) -> None:
    """Run a window of pooled_backward."""
    fullrank.pooled_backward(model, micro_batches, forward=model, loss=lambda scores, _: scores.sum(), **options)


each_verb = pytest.mark.parametrize("run", [accumulated, pooled])


class Indexed:
    """A sequence by the old protocol, such as a map-style data set."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


@pytest.mark.parametrize(
    "kind", [list, tuple, deque, lambda items: Indexed(*items), lambda items: dict.fromkeys(items).keys()]
)
def test_every_sequence_is_a_window(kind: Callable[[list[int]], Any]) -> None:
    assert list_micro_batches(kind([3, 4])) == [3, 4]


@each_verb
@pytest.mark.parametrize("micro_batches", [3, "text"])
def test_what_is_no_sequence_of_micro_batches(run: Callable[..., None], micro_batches: Any) -> None:
    """Other mistakes with windows are in tests/conformance/test_faults_of_verbs.py."""
    text = "got a int" if micro_batches == 3 else r"Pass \[batch\] for one batch"
    with pytest.raises(TypeError, match=rf"^micro_batches: expected a list of micro-batches.*{text}\."):
        run(nn.Linear(2, 1), micro_batches)


@each_verb
def test_a_model_that_is_none(run: Callable[..., None]) -> None:
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module"):
        run(None, [torch.ones(1, 2)])
