"""One optimizer step under a pipeline schedule of torch, for a loss that is a sum divided by a count.

The schedule owns the loop, and only the last stage computes the loss. So the ranks agree twice, each time over the
stages of a pipeline first and then over the pipelines::

    opening     count of the targets, what must be equal                              every stage knows N
    step        forwards and backwards as the schedule orders them; the loss function multiplies sums by m / N
    closing     sum of losses, and any error of the loss function since the opening   every stage knows the mean

The other stages wait for the gradient of a rank whose loss function raises, so it sends zeros until the closing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..distributed.group import Group, resolve_group
from ..distributed.header import Offer, agree_on, copy_of
from ..distributed.torch_private import not_compiled
from ..errors import Words, check_amount, expected
from ..gradients.all_reduce_grads import note_count
from ..gradients.when_reduced import discard_gradients_
from ..gradients.wrappers import find_ranks, find_sync
from .summed_loss import SUM_UP, as_mean, checked_sum, not_a_sum, zero_loss
from .token_count import Count, Term, as_numbers, read_count, token_rule
from .torch_private import loss_of_schedule, num_micro_batches_of_schedule, stages_of_schedule

T = TypeVar("T")

_NO_DATA_GROUP = (
    "Pass group, the ranks with other rows for the same stage; add up the gradients with all_reduce_grads_. Pass "
    "multiplier=1.0 if there are none, as with tensor parallelism alone."
)


class PipelineMean:
    r"""Runs a schedule of ``torch.distributed.pipelining`` with a summed loss, divided by its count.

    .. math:: \frac{\sum_r \sum_g S_{rg}}{\sum_r n_r}

    over the pipelines r and their micro-batches g: value and gradient of one process with the whole batch. ::

        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=8, loss_fn=loss_sum)
        mean = PipelineMean(schedule, count_valid_tokens)
        for tokens, labels in loader:
            optimizer.zero_grad()
            mean.step(*[tokens] if is_first else [], target=labels if is_last else None)
            optimizer.step()
            log(mean.mean_loss())

    Args:
        schedule: any schedule with a ``loss_fn`` that returns the *sum* of the losses of a micro-batch, such as with
            ``reduction="sum"``, of one or more stages on this rank, plain or with FSDP2 or HSDP. Its ``scale_grads``
            has no effect here.
        count: the number of terms that the losses sum: a function of ``target``; :func:`count_valid_tokens`, with
            keywords bound by ``functools.partial``, for a target of labels; or one number over all ranks.
        group: the ranks that hold other rows for the same stage. None is the ranks over which the wrapper of this
            rank's stages reduces gradients. If no wrapper does, and there are more ranks than stages, it is required.
        multiplier: the number that gradients are divided by after the loss; None to read it from the stages.

    Raises:
        TypeError, ValueError: on this rank, for what is not a schedule; for stages with DDP; for stages that reduce
            over several groups, or have no wrapper if ``group`` is needed; see also :func:`accumulate`.

    Distributed: two headers over the stages and two over ``group``, in addition to what the schedule exchanges.
    """

    def __init__(self, schedule: Any, count: Count, group: Group = None, *, multiplier: float | None = None) -> None:
        stages = stages_of_schedule(schedule)
        if not stages:
            raise TypeError(expected("schedule", "a schedule of torch.distributed.pipelining", schedule))
        self._schedule, self._stages, self._count = schedule, stages, count
        self._group, self._given_multiplier = group, multiplier
        self._model = nn.ModuleList(stage.submod for stage in stages)  # of this rank
        self._sync = find_sync(self._model)
        pipeline = resolve_group(stages[0].group)
        self._pipeline = pipeline if pipeline.size() > 1 else None
        if self._sync.ddp:
            fix = "A schedule prepares DDP's reduction by private calls that fail in interleaved ones: use fully_shard."
            raise ValueError(expected("schedule", "stages without DDP", Words(self._sync.kind), fix))
        self._sync.check_managed(others_reduce=group is not None, multiplier=multiplier)
        self._sync.check_group(group)
        is_alone = group is None and self._sync.unwrapped is not None
        if is_alone and multiplier is None and pipeline.size() < torch.distributed.get_world_size():
            got = Words(f"none, on {torch.distributed.get_world_size()} ranks for a pipeline of {pipeline.size()}")
            raise ValueError(expected("group", "the ranks that add up the gradients of a stage", got, _NO_DATA_GROUP))
        self._ranks = None if is_alone else find_ranks(self._sync, group)
        self._mean_loss: Tensor | None = None

    @not_compiled
    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Run ``schedule.step`` once, and leave the gradient of the mean loss in the stages.

        Args:
            *args: the arguments of ``schedule.step``, and ``**kwargs`` its keywords.
            target: the targets of the whole batch of this pipeline, on the rank with the last stage; others may pass
                None.
            losses: a list to fill with the summed loss of each micro-batch, on the rank with the last stage.

        Returns:
            What ``schedule.step`` returns.

        Raises:
            TypeError, ValueError, RuntimeError: on every rank. Before the first forward for a missing target, a bad
                count, and what differs between ranks. After the last backward, with the gradients of the stages
                discarded, for a loss that is a mean, gathers, or has no graph, and for an error of ``loss_fn``.
        """
        term = self._open(target)
        num_losses = num_micro_batches_of_schedule(self._schedule) * (1 if self._ranks is None else self._ranks.size())
        errors: list[Exception] = []
        scaled: list[Tensor] = []
        sums: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the scaled loss, which is kept alive

        def scale(loss_fn: Callable[..., Any]) -> Callable[..., Tensor]:
            def scaled_loss(output: Any, *rest: Any, **options: Any) -> Tensor:
                try:
                    loss = loss_fn(output, *rest, **options)
                    total = checked_sum(loss, "loss")
                    if term.number != num_losses and (wrong := not_a_sum(loss, f"{SUM_UP}.", "loss")) is not None:
                        raise wrong
                except Exception as error:
                    errors.append(error)
                    tensors = output if isinstance(output, (tuple, list)) else [output]
                    zeros = [zero_loss(one.sum()) for one in tensors if isinstance(one, Tensor) and one.requires_grad]
                    return sum(zeros[1:], zeros[0])
                share = total * term.factor if term.factor else zero_loss(total)
                sums[id(share)] = share, total.detach()
                return share

            return scaled_loss

        with loss_of_schedule(self._schedule, scale):
            outputs = self._schedule.step(*args, target=target, losses=scaled, **kwargs)
        # The schedule has also called the loss once to learn its shape, which is no loss of a micro-batch.
        found = [sums[id(share)][1] for share in scaled if id(share) in sums]
        if losses is not None:
            losses[:] = found
        self._close(found, term.number, errors)
        return outputs

    def mean_loss(self) -> Tensor:
        """Return the loss of the last step, as :meth:`Step.mean_loss` does, on every rank; RuntimeError before one."""
        if self._mean_loss is None:
            raise RuntimeError(expected("mean_loss", "a step that has ended", Words("none"), "Call step(...) first."))
        return self._mean_loss.clone()

    def _open(self, target: Any) -> Term:
        """Exchange the opening headers; return the number of terms over all ranks, and the factor."""

        def bring() -> Offer[tuple[Term, float]]:
            multiplier = self._sync.checked_multiplier(self._group, self._given_multiplier)
            if not torch.is_grad_enabled():
                raise RuntimeError(expected("step", "gradients to be enabled", Words("torch.no_grad")))
            rule, has_loss = token_rule(self._count), any(stage.is_last for stage in self._stages)
            if has_loss and target is None and callable(self._count):
                fix = "Pass the targets on the rank with the last stage."
                raise ValueError(expected("target", "targets to count", target, fix))
            batch = target if rule is None or isinstance(target, Mapping) else {rule.keys_and_shifts()[0][0]: target}
            term = read_count(self._count, [batch] if has_loss else [])
            own = check_amount("count", math.fsum(as_numbers(term.counts or [])))
            num_micro_batches = num_micro_batches_of_schedule(self._schedule)
            facts = {"multiplier": multiplier, "micro-batches": num_micro_batches, "count": term.fact}
            return Offer((term, multiplier), facts, totals=(own,))

        (term, multiplier), totals = self._agree("PipelineMean.step", bring)
        term.divide([own for own, *_ in totals], multiplier)
        return term

    def _close(self, losses: list[Tensor], number: float, errors: list[Exception]) -> None:
        """Exchange the closing headers and keep the mean loss; on every rank, or raise after discarding gradients."""

        def bring() -> Offer[None]:
            if errors:
                raise errors[0]
            is_double = any(loss.dtype == torch.float64 for loss in losses)
            return Offer(None, totals=(math.fsum(as_numbers(losses)), float(is_double)))

        try:
            _, totals = self._agree("PipelineMean.step (end of the step)", bring)
        except Exception:
            discard_gradients_(self._model)
            raise
        loss, is_double = (math.fsum(column) for column in list(zip(*totals))[:2])
        dtype = torch.float64 if is_double else torch.float32
        self._mean_loss = as_mean(loss, number, dtype, self._stages[0].device)
        for part in self._model:
            note_count(part, number)

    def _agree(self, call: str, bring: Callable[[], Offer[T]]) -> tuple[T, list[list[float]]]:
        """Agree over the stages, then over the pipelines, also after an error, for which the other pipelines wait."""

        def bring_with_facts() -> Offer[Any]:
            offer: Offer[Any] = bring()
            offer.value = offer.value, offer.facts
            return offer

        def bring_pipeline() -> Offer[Any]:
            try:
                value, facts = (agreed := agree_on(call, self._pipeline, bring_with_facts)).value
            except Exception as error:
                if self._ranks is None:
                    raise
                # With an error that an agreement has raised, this rank would skip the header.
                raise copy_of(error) from None
            return Offer(value, facts, totals=[math.fsum(column) for column in zip(*agreed.totals)])

        agreed = agree_on(f"{call}, over the pipelines", self._ranks, bring_pipeline)
        return agreed.value, agreed.totals
