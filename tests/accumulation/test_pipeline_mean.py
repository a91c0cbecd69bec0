"""PipelineMean: a step under a pipeline schedule, against one process with all the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import IGNORED, Batch, make_batch, num_valid, one_process
from faults import WRONG_LOSSES
from meshes import init_device_mesh
from on_ranks import common_error, on_ranks
from subjects import Model, error
from subjects import gradient as flat
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers import error_of

from fullrank import PipelineMean, causal_lm_loss, count_valid_tokens

NUM_BATCHES = 4


def batches_of(copy: int, layout: str = "full") -> list[Batch]:
    """Return the micro-batches of one pipeline; ``uneven``: the first pipeline has no terms, ``none``: no pipeline."""
    empty = {"uneven": copy == 0, "none": True}.get(layout, False)
    return [make_batch(copy, index, empty=empty or index == 1 + copy) for index in range(NUM_BATCHES)]


def sums(logits: Tensor, labels: Tensor) -> Tensor:
    return causal_lm_loss(logits, labels, reduction="sum")


def layers_of(model: Model) -> list[nn.Module]:
    return [model.embed, model.up, nn.Tanh(), model.down]


class Copy(nn.Module):
    """Ends a stage: the schedules of zero bubbles detach its output in place, which torch refuses for a view."""

    def forward(self, output: Tensor) -> Tensor:
        return output.clone()


class Pipeline:
    """Stages of one model, with ``dist.get_world_size() / 2`` copies of a pipeline of two ranks."""

    def __init__(self, name: str, kind: str = "plain", loss_fn: Any = sums, **options: Any) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "stages"))
        self.copy, self.rank = self.mesh["data"].get_local_rank(), self.mesh["stages"].get_local_rank()
        self.num_copies = self.mesh["data"].size()
        self.layers, self.kind = layers_of(Model()), kind
        is_single = name in ("ScheduleGPipe", "Schedule1F1B")
        cuts = [(0, 2), (2, 4)] if is_single else [(0, 1), (1, 2), (2, 3), (3, 4)]
        self.places = [self.rank] if is_single else [self.rank, 2 + self.rank]
        if name == "ScheduleZBVZeroBubble":
            self.places = [self.rank, 3 - self.rank]
        self.cuts = [cuts[place] for place in self.places]
        self.parts = [self.wrap(nn.Sequential(*self.layers[start:end], Copy())) for start, end in self.cuts]
        stages = [
            pipelining.PipelineStage(part, place, len(cuts), torch.device("cpu"), group=self.mesh["stages"].get_group())
            for part, place in zip(self.parts, self.places)
        ]
        make = getattr(pipelining, name)
        self.schedule = make(stages[0] if is_single else stages, NUM_BATCHES, loss_fn=loss_fn)
        self.is_first, self.is_last = 0 in self.places, len(cuts) - 1 in self.places
        if self.kind == "plain" and self.num_copies > 1:
            options.setdefault("group", self.mesh["data"].get_group())
        self.options = options

    def wrap(self, part: nn.Module) -> nn.Module:
        if self.kind == "fsdp2":
            fully_shard(part, mesh=self.mesh["data"])
        if self.kind == "ddp" and [*part.parameters()]:
            return DistributedDataParallel(part, process_group=self.mesh["data"].get_group())
        return part

    def mean(self, count: Any = count_valid_tokens, **options: Any) -> PipelineMean:
        return PipelineMean(self.schedule, count, **{**self.options, **options})

    def step(self, mean: PipelineMean, batches: list[Batch], **options: Any) -> Any:
        tokens, labels = (torch.cat([batch[key] for batch in batches]) for key in ("tokens", "labels"))
        options.setdefault("target", labels if self.is_last else None)
        return mean.step(*[tokens] if self.is_first else [], **options)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def gradient(self) -> Tensor:
        """Return that of this rank's stages, added up over the copies where no wrapper did."""
        found = torch.cat([flat(part) for part in self.parts if [*part.parameters()]])
        if self.kind == "plain" and self.num_copies > 1:
            dist.all_reduce(found, group=self.mesh["data"].get_group())
        return found

    def expected(self, reference: Model) -> Tensor:
        layers = layers_of(reference)
        own = [nn.Sequential(*layers[start:end]) for start, end in self.cuts]
        return torch.cat([flat(part) for part in own if [*part.parameters()]])


OLD_TORCH = torch.__version__.startswith("2.10.")
SLOW = partial(pytest.param, marks=pytest.mark.slow)
NOT_OLD = pytest.mark.skipif(OLD_TORCH, reason="torch 2.10 cannot run it on gloo, by itself")
SCHEDULES: list[Any] = ["Schedule1F1B", "ScheduleInterleaved1F1B"]
SCHEDULES += [SLOW("ScheduleGPipe"), SLOW("ScheduleInterleavedZeroBubble")]
SCHEDULES += [pytest.param("ScheduleZBVZeroBubble", marks=[pytest.mark.slow, NOT_OLD])]


def check(pipeline: Pipeline, layouts: tuple[str, ...] = ("full", "uneven", "none"), **options: Any) -> None:
    mean = pipeline.mean(**options)
    for layout in [each for each in layouts for _ in range(2)]:
        check_step(pipeline, mean, layout)


def check_step(pipeline: Pipeline, mean: PipelineMean, layout: str = "full") -> None:
    everything = [batch for copy in range(pipeline.num_copies) for batch in batches_of(copy, layout)]
    reference, losses = Model(), list[Tensor]()
    expected = one_process(reference, everything)
    pipeline.zero_grad()
    pipeline.step(mean, batches_of(pipeline.copy, layout), losses=losses)
    assert error(pipeline.gradient(), pipeline.expected(reference)) <= 1e-12
    assert mean.mean_loss().dtype == torch.float64
    assert error(mean.mean_loss(), expected.loss) <= 1e-12
    assert len(losses) == (NUM_BATCHES if pipeline.is_last else 0)


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(2)
def test_one_pipeline(rank: int, name: str) -> None:
    """Counted in every form. The control divides by the number of micro-batches, as a schedule does on its own."""
    pipeline = Pipeline(name)
    check(pipeline)
    check(pipeline, ("uneven",), count=lambda labels: (labels[:, 1:] != IGNORED).sum())
    check(pipeline, ("full",), count=sum(map(num_valid, batches_of(0))))
    assert pipeline.schedule.scale_grads is True
    reference = Model()
    number = one_process(reference, batches_of(0)).gradient
    assert number.abs().max() > 0
    pipeline.zero_grad()
    tokens, labels = (torch.cat([batch[key] for batch in batches_of(0)]) for key in ("tokens", "labels"))
    pipeline.schedule.step(*[tokens] if pipeline.is_first else [], target=labels if pipeline.is_last else None)
    expected = pipeline.expected(reference)
    assert error(pipeline.gradient(), expected) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("Schedule1F1B", "plain"), ("ScheduleGPipe", "fsdp2"), ("ScheduleInterleaved1F1B", "fsdp2")]
)
@on_ranks(4)
def test_two_pipelines(rank: int, name: str, kind: str) -> None:
    check(Pipeline(name, kind))


def _nan_without_terms(logits: Tensor, labels: Tensor) -> Tensor:
    return sums(logits, labels) + logits.sum() * torch.nan


@on_ranks(2)
def test_without_terms_gradients_are_zero_though_losses_are_nan(rank: int) -> None:
    pipeline = Pipeline("Schedule1F1B", loss_fn=_nan_without_terms)
    mean = pipeline.mean()
    pipeline.step(mean, batches_of(0, "none"))
    assert not pipeline.gradient().any()


class Fails:
    """A loss function that is wrong in one micro-batch, given as the number of its call."""

    def __init__(self, wrong: Callable[[Tensor, Tensor], Any], place: int) -> None:
        self.wrong, self.place, self.calls = wrong, place, 0

    def __call__(self, logits: Tensor, labels: Tensor) -> Any:
        self.calls += logits.device.type != "meta"
        return self.wrong(logits, labels) if self.calls == self.place else sums(logits, labels)


def _raises(logits: Tensor, labels: Tensor) -> Tensor:
    raise KeyError("labels")


LOSSES: dict[str, tuple[Any, str, str]] = {
    "raises": (_raises, "RuntimeError", "KeyError: 'labels'"),
    **{
        name: (lambda logits, labels, change=change: change(sums(logits, labels)), kind, f"loss: {text}")
        for name, (change, kind, text) in WRONG_LOSSES.items()
    },
}


@pytest.mark.parametrize(
    ("fault", "place"),  # the last place is in the second step
    [("raises", 3), SLOW("raises", 1), SLOW("raises", 7), *(SLOW(*case) for case in zip(WRONG_LOSSES, (1, 3, 7, 3)))],
)
@on_ranks(2)
def test_a_bad_loss_raises_on_every_stage_and_the_next_step_is_exact(rank: int, fault: str, place: int) -> None:
    wrong, kind, text = LOSSES[fault]
    pipeline = Pipeline("ScheduleInterleaved1F1B", loss_fn=(loss_fn := Fails(wrong, 0)))
    mean = pipeline.mean()
    if place > NUM_BATCHES:
        pipeline.step(mean, batches_of(0))
        pipeline.zero_grad()
    loss_fn.place = loss_fn.calls + (place - 1) % NUM_BATCHES + 1
    found, message = common_error(lambda: pipeline.step(mean, batches_of(0)))
    assert found == kind
    assert text in message
    assert message.startswith("PipelineMean.step (end of the step) failed on rank 1: ")
    assert all(p.grad is None for part in pipeline.parts for p in part.parameters())
    loss_fn.place = 0
    check_step(pipeline, mean)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("Schedule1F1B", "plain"), ("ScheduleInterleaved1F1B", "fsdp2")])
@on_ranks(4)
def test_an_error_of_one_pipeline_is_raised_on_all(rank: int, name: str, kind: str) -> None:
    """In the loss, and for a missing target; the next step is exact. Each stage names its rank of pipeline 1."""
    pipeline = Pipeline(name, kind, loss_fn=(loss_fn := Fails(_raises, 0)))
    mean, batches = pipeline.mean(), batches_of(pipeline.copy)
    for _ in range(2):
        loss_fn.place = loss_fn.calls + 2 if pipeline.copy == 1 else 0
        assert "KeyError: 'labels'" in error_of(lambda: pipeline.step(mean, batches))[1]
        loss_fn.place = 0
        step = partial(pipeline.step, mean, batches, **({"target": None} if pipeline.copy == 1 else {}))
        assert "target: expected targets to count" in error_of(step)[1]
        check_step(pipeline, mean)
        pipeline.zero_grad()
    other = pipeline.mean(multiplier=7.0 if rank == 3 else None)
    kind_of_error, text = error_of(lambda: pipeline.step(other, batches))
    assert kind_of_error == "ValueError"
    assert "multiplier: " in text


@pytest.mark.slow
@on_ranks(4)
def test_what_the_constructor_refuses(rank: int) -> None:
    pipeline = Pipeline("ScheduleGPipe")
    with pytest.raises(ValueError, match=r"^group: expected the ranks that add up the gradients of a stage, got none"):
        pipeline.mean(group=None)
    with pytest.raises(TypeError, match=r"^schedule: expected a schedule of torch\.distributed\.pipelining"):
        PipelineMean(Model(), count_valid_tokens)
    with pytest.raises(ValueError, match=r"^schedule: expected stages without DDP"):
        Pipeline("ScheduleGPipe", "ddp").mean()
    with pytest.raises(RuntimeError, match=r"^mean_loss: expected a step that has ended"):
        pipeline.mean().mean_loss()
