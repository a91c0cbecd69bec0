"""The one file that uses private parts of :class:`torchmetrics.Metric` (1.9): gather rows, cache values, copy, plot."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from ..distributed.gather import gather_agreed
from ..distributed.group import Group, resolve_group
from ..distributed.header import Offer, State, agree_on
from ..losses.base import SAME_ARGUMENTS


class GatheredMetric(Metric):
    """A metric whose state is rows of tensors; all ranks gather them in one block, by the same collectives.

    A subclass names the states, ``row_states``, and adds ``rows()`` and, if not (), ``result_shape``.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0
    row_states: tuple[str, ...]
    result_shape: tuple[int, ...] = ()  # of the last value of ``compute``

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in self.row_states:
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def rows(self) -> tuple[Tensor, ...]:
        """Return all rows of each state, in the same dtypes even without rows."""
        raise NotImplementedError

    @property
    def has_rows_of_all_ranks(self) -> bool:
        """True while the state is that of all ranks, as in a ``compute`` that synchronizes."""
        return self._is_synced

    def synchronized_rows(self) -> tuple[Tensor, ...]:
        """Return the rows that ``compute`` sees; a collective where that synchronizes."""
        synchronizes = self._to_sync and not self._is_synced
        with self.sync_context(self.dist_sync_fn, should_sync=synchronizes, should_unsync=synchronizes):
            return self.rows()

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot ``val``, results of ``forward`` or ``compute`` (by default a new one), and return figure and axes."""
        return self._plot(val, ax)

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap as torchmetrics does, without three of its effects that are wrong for these metrics."""
        wrapped = super()._wrap_compute(compute)

        @functools.wraps(compute)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            synchronizes = self._to_sync and not self._is_synced and self.distributed_available_fn()
            if synchronizes:
                self._agree_on_cache()
            # Before it synchronizes, torchmetrics warns that this rank has no rows. Other ranks may have rows;
            # `compute` warns if none has. A count of at least 1 silences the warning.
            count = self._update_count
            is_silenced = count == 0 and (synchronizes or self._is_synced)
            if is_silenced:
                self._update_count = 1
            try:
                value = wrapped(*args, **kwargs)
            finally:
                if is_silenced:
                    self._update_count = count
            # torchmetrics squeezes (1,) to ().
            has_shape = isinstance(value, dict) or value.shape == self.result_shape
            return value if has_shape else value.reshape(self.result_shape)

        return wrapper

    def _agree_on_cache(self) -> None:
        """Drop the cached value, which torchmetrics returns without communicating, unless every rank has one."""
        if self.dist_sync_fn is not None:
            self._computed = None  # a user's function communicates in its own way, so no agreement is possible
            return
        if not self.compute_with_cache:
            return
        group = resolve_group(self.process_group, name="process_group")
        if dist.get_world_size(group) > 1:
            facts = {"arguments": State(self.extra_repr(), SAME_ARGUMENTS)}
            offer = Offer(None, facts, totals=[float(self._computed is not None)])
            agreed = agree_on(f"{type(self).__name__}.compute", group, lambda: offer)
            if not all(is_cached for is_cached, *_ in agreed.totals):
                self._computed = None

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Group = None) -> None:
        """Replace the state with the rows of all ranks; torchmetrics makes no collectives for an empty list."""
        group = self.process_group if process_group is None else process_group
        rows: Sequence[Any]
        if dist_sync_fn is not gather_all_tensors:
            rows = [torch.cat(list(dist_sync_fn(tensor, group=group))) for tensor in self.rows()]
        elif dist.get_world_size(resolved := resolve_group(group, name="process_group")) == 1:
            rows = self.rows()
        else:
            call, facts = f"{type(self).__name__}.sync", {"arguments": State(self.extra_repr(), SAME_ARGUMENTS)}
            rows = gather_agreed(call, resolved, lambda: Offer(None, facts, tensors=self.rows())).tensors
        # New lists: the old ones may be shared with other metrics of a MetricCollection.
        for name, tensor in zip(self.row_states, rows):
            setattr(self, name, [tensor])

    def __deepcopy__(self, memo: dict[int, Any]) -> GatheredMetric:
        """Copy everything except the process group, which cannot be copied. The copy shares it, as with the losses."""
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin
