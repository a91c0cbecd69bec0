"""The scores of a window of which no list is kept: each micro-batch is added to a table, and later read from it.

Of each micro-batch a few numbers remain, by which a second pass with other scores is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Words, expected
from .replay_state import RngState, checksum_of, largest_difference, largest_score, restore_rng, save_rng

NUM_SAMPLED = 16  # scores of each micro-batch that are kept for the comparison with those of the second pass


class StreamedScores:
    """The scores of the first pass, as sums; and the second pass over the same micro-batches.

    ``rows_of`` reads the targets and the weights of a micro-batch. ``table`` is what the loss adds them up in, such as
    the ``StreamedTable`` of Smooth-AP.
    """

    def __init__(
        self,
        micro_batches: Collection[Any],
        rows_of: Callable[[Any], tuple[Tensor, Tensor | None]],
        table: Any,
        devices: Sequence[torch.device],
    ) -> None:
        self._micro_batches, self._rows_of, self._table, self._devices = micro_batches, rows_of, table, devices
        self._loss: Any = None  # what the table holds in the end
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        # One tensor: small ones that live on, each behind the buffers of a forward, would keep their memory in pieces.
        self._digests = torch.empty(0)  # [micro-batches, NUM_SAMPLED + 1]
        self._checksums = torch.empty(0, dtype=torch.int64)  # [micro-batches] of targets and weights
        self._mistake: Exception | None = None
        self.of_learned: dict[str, Tensor] = {}  # no gradients of parameters of the model
        self.num_changed: Tensor | float = 0.0  # micro-batches with other targets or weights in the second pass
        self.top = torch.zeros(())
        self._began = save_rng(devices)
        self._forwarded: RngState | None = None  # the state before the last backward of the second pass

    def first_pass(self) -> Iterator[Any]:
        """Yield each micro-batch; it goes to :meth:`add` with its scores."""
        return _read(self._micro_batches)

    def add(self, scores: Any, batch: Any) -> None:
        """Add the scores of a micro-batch. A mistake is kept: :meth:`check` raises it, where all ranks can."""
        try:
            if self._mistake is None:
                self._add(scores, batch)
        except Exception as error:
            self._mistake = error

    def _add(self, scores: Any, batch: Any) -> None:
        check_scores(scores)
        form = scores.shape[1:], scores.dtype
        if self._forms and form != (self._forms[0][0][1:], self._forms[0][1]):
            found = Words(" and ".join(f"{kind} (rows, ...{tuple(shape)})" for shape, kind in (self._forms[0], form)))
            raise ValueError(expected("forward", "scores of one kind from all micro-batches", found))
        scores, rows = scores.detach(), self._rows_of(batch)
        self._table.add(scores, *rows)
        digest, checksum, number = digest_of(scores), checksum_of(rows), len(self._micro_batches)
        if not self._forms:
            self._digests, self._checksums = digest.new_empty(number, digest.numel()), checksum.new_empty(number)
        self._digests[len(self._forms)], self._checksums[len(self._forms)] = digest, checksum
        self._forms.append((scores.shape, scores.dtype))
        self.top = torch.maximum(self.top.to(scores.device), largest_score(scores))

    def check(self) -> StreamedScores:
        """Return this, or raise the mistake that was found in the scores or the rows of a micro-batch."""
        if self._mistake is not None:
            raise self._mistake
        return self

    def evaluate(self) -> Tensor:
        """Return the loss; a collective."""
        self._loss = self._table.finish()
        value: Tensor = self._loss.value
        return value

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scores."""
        return self._forms[0][1]

    def start(self, value: Tensor) -> None:
        """Let :meth:`gradient` be that of ``value``."""
        self._loss.start(value)

    def second_pass(self) -> Iterator[Any]:
        """Yield each micro-batch under the random state of the first pass: every draw is made again, in its order."""
        restore_rng(self._began)
        for batch in _read(self._micro_batches):
            yield batch
            if self._forwarded is not None:
                restore_rng(self._forwarded)  # whatever the backward has drawn

    def form(self, index: int) -> tuple[torch.Size, torch.dtype]:
        """Return the shape and the dtype of the scores of a micro-batch in the first pass."""
        return self._forms[index]

    def difference(self, index: int, scores: Tensor) -> Tensor:
        """Return how far the ``scores`` of a micro-batch are from those of the first pass, as far as is known."""
        return largest_difference(self._digests[index], digest_of(scores))

    def gradient(self, index: int, batch: Any, scores: Tensor) -> Tensor:
        """Return the gradient of the scores of a micro-batch.

        A mistake in its targets or weights is kept for :meth:`check`. The gradient is then 0: the backward that follows
        may communicate, so this rank must still take part in it.
        """
        gradient = torch.zeros_like(scores)
        if self._mistake is None:
            try:
                rows = self._rows_of(batch)
                found = self._loss.gradient(scores, *rows)
                self.num_changed = self.num_changed + (checksum_of(rows) != self._checksums[index]).double()
                gradient = found
            except Exception as error:
                self._mistake = error
        self._forwarded = save_rng(self._devices)  # targets and weights may be drawn too
        return gradient


def _read(micro_batches: Collection[Any]) -> Iterator[Any]:
    """Yield as many micro-batches as there are said to be, or raise ValueError."""
    count = 0
    for batch in micro_batches:
        count += 1
        if count > len(micro_batches):
            break
        yield batch
    if count != len(micro_batches):
        found = Words("more" if count > len(micro_batches) else str(count))
        what = f"{len(micro_batches)} micro-batches, as many as its length says, in each of two passes"
        fix = "It must be possible to read it twice, as a list or a DataLoader." if count == 0 else ""
        raise ValueError(expected("micro_batches", what, found, fix))


def check_scores(scores: Any) -> None:
    """Raise unless ``scores`` are floating-point numbers with a row for each example."""
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(expected("forward", "a floating-point tensor of scores", scores))
    if scores.ndim == 0:
        raise ValueError(expected("forward", "scores of shape (rows, ...)", scores, "Return one row per example."))


def digest_of(scores: Tensor) -> Tensor:
    """Return (NUM_SAMPLED + 1,) the mean of the scores and some of them, evenly spaced from first to last; then 0."""
    flat = scores.detach().reshape(-1).to(torch.promote_types(scores.dtype, torch.float32))
    digest = flat.new_zeros(NUM_SAMPLED + 1)
    if flat.numel():
        count = min(NUM_SAMPLED, flat.numel())
        places = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
        digest[0], digest[1 : count + 1] = flat.mean(dtype=torch.float64), flat[places]
    return digest
