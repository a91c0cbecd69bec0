"""pooled_backward: one loss over ranks and micro-batches, with the gradient of one big batch.

In tests/conformance are the wrappers, every pooled loss against one process, and the mistakes of one rank.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import Rows, cut, make_rows, part_of, split
from gradient_cases import Case, OfRows, joined_loss, make_loss, make_step, num_outputs
from loss_cases import normal
from on_ranks import on_ranks, slow_but
from subjects import Model, by_hand, error, gradient, has_gradients, mesh_of, wrap
from torch import Tensor, nn
from workers import error_of

import fullrank
from fullrank.accumulation.replay_state import RngState, accelerators_in_use, compare_scores, save_rng
from fullrank.distributed.group import UNDO

# The package holds the function under the name of its module.
replay = importlib.import_module("fullrank.accumulation.pooled_backward")


def make_model(*layers: nn.Module, dtype: str = "float64") -> Model:
    return Model(dtype, 1, middle=layers)


def own_window(rank: int, count: int) -> list[Rows]:
    step = make_step(Case("smooth_ap"), 0)
    return cut(part_of(step, split(len(step.features), dist.get_world_size(), 0), rank), count, seed=rank)


def pool_window(model: nn.Module, batches: list[Rows], loss: Any, **options: Any) -> Tensor:
    options = {"forward": lambda batch: model(batch.features), "group": by_hand(model)} | options
    return fullrank.pooled_backward(model, batches, loss=loss, **options)


def retained(model: nn.Module, batches: Any, forward: Callable[[Any], Tensor], loss: Callable[..., Tensor]) -> Tensor:
    """Return the loss after one backward through the graphs of all micro-batches."""
    value = loss(torch.cat([forward(batch) for batch in batches]), batches)
    value.backward()
    return value.detach()


def mean_of_squares(scores: Tensor, batches: list[Rows], reduction: str | int) -> Tensor:
    return fullrank.global_mean(scores.square().sum(), scores.numel(), gradient_reduction=reduction)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapper", "name"),
    [("ddp", "smooth_ap"), ("ddp", "global_mean"), ("fsdp2", "global_mean"), ("summed", "smooth_ap")],
)
@on_ranks()
def test_a_loss_whose_gradient_does_not_fit_the_model(rank: int, wrapper: str, name: str) -> None:
    """Every setting whose gradient is wrong is refused on every rank, and no other one."""
    size = dist.get_world_size()
    for reduction in ("mean", "sum", size, 2 * size):
        case = Case("smooth_ap" if name == "global_mean" else name, gradient_reduction=reduction)
        losses = [joined_loss(make_loss(case, local=False)) for _ in range(2)]
        loss_alone = joined_loss(make_loss(case._replace(gradient_reduction="mean"), local=True))
        if name == "global_mean":
            losses = [functools.partial(mean_of_squares, reduction=reduction)] * 2
            loss_alone = lambda scores, given: scores.square().mean()  # noqa: E731
        model, alone = wrap(make_model(), wrapper), make_model()
        text = error_of(functools.partial(pool_window, model, own_window(rank, 3), losses[0]))[1]
        step = make_step(case, 0)
        loss_alone(alone(step.features), [step]).backward()
        # The gradient as it was before the check, for the control: of the loss alone, with retained graphs.
        raw = wrap(make_model(), wrapper)
        retained(raw, own_window(rank, 3), lambda batch, raw=raw: raw(batch.features), losses[1])
        is_right = reduction in (("sum",) if wrapper == "summed" else ("mean", size))
        assert (error(gradient(raw), gradient(alone)) <= 1e-12) == is_right
        if is_right:
            assert text == ""
        else:
            fix = '"sum"' if wrapper == "summed" else '"mean"'
            assert "gradient_reduction: expected the way the model combines gradients" in text
            assert f"times the right one: pass gradient_reduction={fix}." in text


@on_ranks(2)
def test_a_loss_over_a_group_of_one_is_checked_too(rank: int) -> None:
    """The model averages over two ranks. With k = 1 it gets the mean of the pools' gradients, with 2 their sum."""
    lone, step = [dist.new_group([member]) for member in range(2)][rank], make_step(Case("smooth_ap"), 0)
    for reduction, scale in (("mean", 1), (2, 2), ("sum", None), (4, None)):
        loss = joined_loss(make_loss(Case("smooth_ap", gradient_reduction=reduction), local=False, group=lone))
        model, alone = wrap(make_model(), "ddp"), make_model()
        kind, text = error_of(functools.partial(pool_window, model, [step], loss))
        joined_loss(make_loss(Case("smooth_ap"), local=True))(alone(step.features), [step]).backward()
        if scale is None:
            assert kind == "ValueError"
            assert "times the right one: pass gradient_reduction=2." in text
        else:
            assert (kind, text) == ("none", "")
            assert error(gradient(model), scale * gradient(alone)) <= 1e-12


class RunningNorm(nn.Module):
    """Subtracts a running mean that each forward first moves on, so that scores depend on how often it was moved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        if self.training and len(values):
            self.mean.mul_(0.5).add_(0.5 * values.detach().mean(dim=0))
        return values - self.mean


# --- one process: what both passes must share


def run_both(
    make: Callable[[], nn.Module],
    *,
    device: str | torch.device = "cpu",
    autocast: bool = False,
    check_replay: bool = True,
) -> tuple[nn.Module, nn.Module]:
    """Return the model after a backward through all graphs, and after pooled_backward; loss and random state agree."""
    sizes, dtype = (5, 9, 7), next(make().parameters()).dtype
    batches = [normal(size, 7, seed=size).to(device, dtype) for size in sizes]
    targets = (normal(sum(sizes)) < -0.25).long().to(device)
    loss = fullrank.SmoothAPLoss(1, queue_size=0, temperature=0.5)

    def compute(scores: Tensor, given: list[Tensor]) -> Tensor:
        return loss(scores, targets)

    def run(pooled: bool) -> tuple[nn.Module, Tensor, RngState]:
        model = make().to(device)
        torch.manual_seed(11)
        # Without its cache autocast casts a weight for each micro-batch, and adds up the gradients in float32.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast, cache_enabled=pooled):
            if pooled:
                value = fullrank.pooled_backward(model, batches, forward=model, loss=compute, check_replay=check_replay)
            else:
                value = compute(torch.cat([model(batch) for batch in batches]), batches)
        if not pooled:
            value.backward()
        return model, value.detach(), save_rng(accelerators_in_use(model))

    (first, value, state), (second, other, after) = run(False), run(True)
    assert torch.equal(value, other)
    assert torch.equal(state.cpu, after.cpu)
    for (where, kept), (_, other) in zip(state.devices, after.devices, strict=True):
        assert torch.equal(kept, other), where
    return first, second


def with_dropout() -> nn.Module:
    return make_model(nn.Dropout(0.4))


def test_dropout_uses_the_same_masks(device: torch.device) -> None:
    first, second = run_both(with_dropout, device=device)
    assert error(gradient(second), gradient(first)) <= 1e-12


def test_control_without_the_random_states_dropout_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = replay.restore_rng, itertools.count()
    # Only the fourth call of a window, which puts the state back at its end, is made.
    monkeypatch.setattr(replay, "restore_rng", lambda state: real(state) if next(calls) % 4 == 3 else None)
    with pytest.raises(RuntimeError, match="the same scores in both passes"):
        run_both(with_dropout)
    first, second = run_both(with_dropout, check_replay=False)
    assert error(gradient(second), gradient(first)) > 1e-2


def test_batch_norm_counts_a_micro_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: make_model(nn.BatchNorm1d(8))  # noqa: E731
    first, second = run_both(make)
    assert error(gradient(second), gradient(first)) <= 1e-12
    for a, b in zip(first.buffers(), second.buffers()):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)  # the same operations
    assert second.middle[0].num_batches_tracked == 3
    monkeypatch.setattr(replay, "buffers_kept", lambda model: contextlib.nullcontext())
    first, second = run_both(make)
    assert second.middle[0].num_batches_tracked == 6
    assert error(second.middle[0].running_mean, first.middle[0].running_mean) > 1e-2


class Awkward(nn.Module):
    """Treats its buffers in every way that a forward may; the scores depend on each."""

    def __init__(self) -> None:
        super().__init__()
        one = torch.ones(8, dtype=torch.float64)
        self.register_buffer("replaced", one.clone())
        self.register_buffer("through_data", one.clone())
        self.register_buffer("absent", None)
        self.register_buffer("expanded", torch.ones(1, dtype=torch.float64).expand(8))
        self.register_buffer("hidden", one.clone(), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        self.replaced = self.replaced * 0.9
        self.through_data.data.mul_(0.8)
        self.hidden.add_(0.1)
        self.absent = torch.ones_like(self.hidden) if self.absent is None else self.absent * 1.1
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.full_like(self.hidden, 0.5))
        self.made += 0.01
        scale = self.replaced * self.through_data * self.absent * self.expanded * self.hidden * self.made
        return values * scale.clone()


def test_buffers_of_every_kind_are_put_back() -> None:
    first, second = run_both(lambda: make_model(Awkward()))
    assert error(gradient(second), gradient(first)) <= 1e-12
    for (name, a), (other, b) in zip(first.named_buffers(), second.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(a, b), name


def test_buffers_keep_their_identity_and_other_graphs() -> None:
    """What else holds a buffer sees it change once, and a graph that saved one before stays usable."""
    model = make_model(nn.BatchNorm1d(8)).eval()
    before = [id(buffer) for buffer in model.buffers()]
    other = model(torch.ones(3, 7, dtype=torch.float64)).sum()
    fullrank.pooled_backward(model, [torch.ones(2, 7, dtype=torch.float64)], forward=model, loss=lambda s, _: s.sum())
    other.backward()
    assert [id(buffer) for buffer in model.buffers()] == before


class Float32Island(nn.Module):
    """A product that leaves autocast, and a scale that autocast does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) + 0.1)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, values: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            values = values.float() @ self.weight
        return values * self.scale


def test_autocast_is_that_of_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same casts and products on both sides, and the backward outside of autocast; inside of it, it is rounded."""
    make = lambda: make_model(Float32Island(), dtype="float32")  # noqa: E731
    first, second = run_both(make, autocast=True)
    assert error(gradient(second), gradient(first)) <= 1e-6
    monkeypatch.setattr(replay._Passes, "without_autocast", lambda passes: contextlib.nullcontext())
    first, second = run_both(make, autocast=True)
    assert error(gradient(second), gradient(first)) > 1e-4


def test_weights_that_were_cast_without_graph_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of autocast keep the casts of the first pass, which have no graph."""
    calls: list[str] = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: calls.append("clear"))
    model = make_model()
    one_call(model=model, forward=lambda batch: (calls.append("forward"), model(batch))[1])
    assert calls == ["forward", "forward", "clear", "forward", "forward"]


def test_grad_scaler_scales_the_gradient_and_not_the_value() -> None:
    case, values, gradients = Case("smooth_ap", dtype="float32"), [], []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for given in (None, scaler):
        model, loss = make_model(dtype="float32"), joined_loss(make_loss(case, local=True))
        values.append(pool_window(model, cut(make_step(case, 0), 3), loss, scaler=given))
        gradients.append(gradient(model))
    assert torch.equal(*values)
    assert error(gradients[1], 1024.0 * gradients[0]) <= 1e-6
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
    assert error(gradient(model), gradients[0]) <= 1e-6


def test_memory_is_that_of_one_micro_batch() -> None:
    """The bytes that graphs hold at the same time, counted as they are saved and freed."""

    def peak(backward: Callable[..., Any], count: int) -> int:
        model, held = make_model(nn.Linear(8, 8, dtype=torch.float64)), Counter[str]()

        def keep(tensor: Tensor) -> list[Tensor]:
            kept = Kept([tensor.detach()])
            size = tensor.numel() * tensor.element_size()
            held["now"] += size
            held["most"] = max(held["most"], held["now"])
            weakref.finalize(kept, held.subtract, {"now": size})
            return kept

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept[0]):
            batches = torch.ones(1024, 7).double().split(1024 // count)
            backward(model, batches, forward=model, loss=lambda scores, _: scores.mean())
        return held["most"]

    assert peak(fullrank.pooled_backward, 16) <= peak(retained, 1) / 12
    assert peak(retained, 16) > 0.9 * peak(retained, 1)  # control: cutting alone saves nothing


class Kept(list[Tensor]):
    """One saved tensor, whose graph is gone when it is."""


@pytest.mark.parametrize("columns", [(), (1,), (3,), (2, 2)], ids=str)
def test_scores_of_any_trailing_shape(columns: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.randn(7, *columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    model = nn.ParameterList([weight])
    batches = [torch.randn(rows, 7, dtype=torch.float64) for rows in (2, 0, 5)]
    seen = []

    def loss(scores: Tensor, given: list[Tensor]) -> Tensor:
        seen.append((tuple(scores.shape), given is not None and len(given)))
        return scores.square().sum()

    value = fullrank.pooled_backward(model, batches, forward=lambda b: torch.tensordot(b, model[0], 1), loss=loss)
    expected = torch.tensordot(torch.cat(batches), weight.detach(), 1).square().sum()
    assert seen == [((7, *columns), 3)]  # once
    assert value.shape == ()
    assert not value.requires_grad
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(torch.tensordot(torch.cat(batches), weight, 1).square().sum(), weight)
    torch.testing.assert_close(weight.grad, slope, rtol=1e-12, atol=0)


def test_window_without_rows_gives_zero_gradients() -> None:
    model = make_model()
    loss = fullrank.SmoothAPLoss(1)
    batches = [torch.zeros(0, 7, dtype=torch.float64)] * 2
    none = torch.zeros(0, dtype=torch.int64)
    value = fullrank.pooled_backward(model, batches, forward=model, loss=lambda scores, _: loss(scores, none))
    assert value == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


# --- over ranks: communication and state


@on_ranks(2)
def test_ddp_buffers_are_those_of_rank_zero_in_both_passes(rank: int) -> None:
    """The running statistics differ between the ranks at the start, and the model uses them: rank 0's count."""
    batches = [batch for batch in own_window(rank, 3) if len(batch.features)][: 2 - rank]
    norm, plain = RunningNorm(8), make_model(RunningNorm(8))
    plain.middle[0].mean += 1.0
    loss = joined_loss(make_loss(Case("smooth_ap", gradient_reduction="sum"), local=False))
    retained(plain, batches, lambda batch: plain(batch.features), loss)
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
    model = wrap(make_model(norm), "ddp")
    norm.mean.copy_(torch.full((8,), 1.0 + rank))  # the constructor has broadcast them too
    pool_window(model, batches, joined_loss(make_loss(Case("smooth_ap"), local=False)))
    assert error(gradient(model), gradient(plain)) <= 1e-12
    assert error(norm.mean, plain.middle[0].mean) <= 1e-12
    assert model.require_forward_param_sync  # the next forward broadcasts


@on_ranks(2)
def test_groups_in_every_form(rank: int) -> None:
    """A mistake in front of the loss is that of one rank for groups given in different forms, or found in the model."""
    pair = dist.new_group([0, 1])
    for group, process_group in ((mesh_of("fsdp2"), None), (dist.group.WORLD, None), (pair, None), (None, pair)):
        loss = joined_loss(make_loss(Case("smooth_ap"), local=False, group=group))
        wrong = loss if rank else lambda scores, given: 1 / 0
        model = wrap(make_model(), "ddp", process_group=process_group)
        call = functools.partial(pool_window, model, own_window(rank, 2), wrong, group=group)
        assert error_of(call)[1] == "pooled_backward failed on rank 0: ZeroDivisionError: division by zero"


def one_call(**options: Any) -> nn.Module:
    model = options.pop("model", None) or make_model()
    batches = options.pop("batches", [torch.ones(2, 7, dtype=torch.float64)] * 2)
    fullrank.pooled_backward(model, batches, **{"forward": model, "loss": lambda scores, _: scores.sum(), **options})
    return model


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"forward": None}, TypeError, "forward: expected a function"),
        ({"loss": 3}, TypeError, "loss: expected a function"),
        ({"forward": lambda batch: batch.tolist()}, TypeError, "floating-point tensor of scores"),
        ({"forward": lambda batch: batch.long()}, TypeError, "floating-point tensor of scores"),
        ({"forward": lambda batch: batch.sum()}, ValueError, r"shape \(rows, \.\.\.\)"),
        ({"forward": lambda batch: batch}, ValueError, "scores with a graph"),
        ({"loss": lambda scores, _: (scores.sum(), 1)}, TypeError, "loss: expected a scalar tensor"),
        ({"loss": lambda scores, _: scores.sum().item()}, TypeError, "loss: expected a scalar tensor"),
        ({"scaler": 2.0}, TypeError, "GradScaler"),
        ({"model": 3, "forward": torch.sin}, TypeError, "nn.Module"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        one_call(**options)


class Head(nn.Linear):
    def loss(self, scores: Tensor, _: Any) -> Tensor:
        return self(scores).sum()


def test_foreign_leaf_is_named() -> None:
    """Parameters outside of the model, by their names where the code of the loss names them."""
    model, head, factor = make_model(), Head(1, 1).double(), nn.Parameter(torch.ones(1, dtype=torch.float64))
    offset, box = torch.ones(1, requires_grad=True, dtype=torch.float64), [factor]
    wrong: dict[str, Any] = {
        "the parameter 'head.weight' outside of model.* as in model.loss = loss": lambda scores, _: head(scores).sum(),
        "the parameter 'factor' outside of model": lambda scores, _: (scores * factor).sum(),
        "the parameter 'weight' outside of model": functools.partial(
            lambda s, _, weight: (s * weight).sum(), weight=factor
        ),
        "the parameter 'self.weight' outside of model": head.loss,
        "a parameter outside of model, of shape": lambda scores, _: (
            scores * (unset if model is None else box[0])
        ).sum(),
        "another tensor that requires grad": lambda scores, _: (scores + offset).sum(),
    }
    for text, loss in wrong.items():
        with pytest.raises(ValueError, match=text):
            one_call(model=model, forward=model, loss=loss)
        assert not has_gradients(model)
    unset = factor


def make_learned() -> nn.Module:
    """Return a model that holds a loss with a learned temperature, which its forward does not use."""
    model = Model(num_outputs=6)
    model.contrast = fullrank.InfoNCELoss(0.3, symmetric=True, learn_temperature=True, queue_size=16).double()
    return model


LEARNED = ["ddp", "ddp unused", "ddp each", "fsdp2", "fsdp2 each"]
LEARNED += [pytest.param(kind, marks=pytest.mark.full) for kind in ("summed", "hsdp")]


@pytest.mark.parametrize("kind", LEARNED)
@on_ranks(2, pytest.param(4, marks=pytest.mark.full))
def test_a_parameter_of_the_model_in_the_loss(rank: int, kind: str) -> None:
    """GradCache for CLIP, a learned temperature: three steps, with uneven micro-batches and empty ones."""
    reference, model = make_learned(), make_learned()
    reference.contrast.gather_distributed = False
    model.contrast.gradient_reduction = "sum" if kind == "summed" else "mean"
    name, _, option = kind.partition(" ")
    wrapped = wrap(model, name, **({"find_unused_parameters": True} if option == "unused" else {}))
    for step in range(3):
        rows = make_rows(step, 23)
        own = part_of(rows, split(23, dist.get_world_size(), step), rank)
        for one in (reference, model):
            one.zero_grad()
        value = fullrank.pooled_backward(
            wrapped,
            [part.features for part in cut(own, 3, rank)],
            forward=wrapped,
            loss=lambda scores, _: model.contrast(*scores.chunk(2, dim=1)),
            sync="each" if option == "each" else "last",
        )
        whole = reference.contrast(*reference(rows.features).chunk(2, dim=1))
        whole.backward()
        assert max(error(gradient(model), gradient(reference)), float(abs(value - whole))) <= 1e-12
        for one in (reference, model):
            torch.optim.SGD(one.parameters(), lr=0.1).step()


def test_a_parameter_of_the_forward_and_of_the_loss() -> None:
    """Its two gradients are added. The control: that of the forward alone."""
    model, rows = make_model(), torch.randn(8, 7, dtype=torch.float64)
    loss = lambda scores, _: (scores * model.down.bias.sum()).square().sum()  # noqa: E731
    fullrank.pooled_backward(model, [rows[:3], rows[3:]], forward=model, loss=loss)
    found = gradient(model)
    model.zero_grad()
    loss(model(rows), None).backward()
    assert error(found, gradient(model)) <= 1e-12
    model.zero_grad()
    (model(rows) * model.down.bias.sum().detach()).square().sum().backward()
    assert error(found, gradient(model)) > 1e-3


def test_refused_inside_a_backward() -> None:
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: one_call() and None)
    with pytest.raises(RuntimeError, match="while a backward pass runs"):
        leaf.sum().backward()


def test_random_state_after_an_error_in_the_replay() -> None:
    noise, model, batches = random.Random(0), with_dropout(), [torch.ones(2, 7, dtype=torch.float64)] * 3
    torch.manual_seed(3)
    for batch in batches:
        model(batch)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="the same scores"):
        one_call(model=model, batches=batches, forward=lambda batch: model(batch) * noise.random())
    assert torch.equal(torch.get_rng_state(), state)
    assert not has_gradients(model)


QUEUED = {
    "drawn": Case("smooth_ap", queue_size=50, options={"max_pool_size": 40}),  # which rows, a saved number determines
    "weighted": Case("smooth_ap", queue_size=50, weighted=True),
    "sup_con": Case("sup_con", queue_size=50),  # the first rows determine the width of the queue
    "info_nce": Case("info_nce", queue_size=50),
    "retrieval": Case("retrieval", queue_size=50),
}


@pytest.mark.parametrize("kind", slow_but(["drawn"], QUEUED))
@on_ranks(2, pytest.param(1, marks=pytest.mark.full))
def test_a_window_that_fails_can_be_repeated(rank: int, kind: str) -> None:
    """The losses, the queue and the gradients are those of a run without the failures, on every rank."""
    case, size = QUEUED[kind], dist.get_world_size()

    def run(failures: dict[int, str]) -> list[Tensor]:
        found, loss = [], OfRows(case, make_loss(case, size == 1))
        model = wrap(Model(case.dtype, num_outputs(case)), "ddp")
        for index in range(3):
            step = make_step(case, index)
            batches, number = cut(part_of(step, split(len(step.features), size, 0), rank), 3, rank), itertools.count()

            def forward(batch: Rows, way: str = failures.get(index, ""), number: Any = number) -> Tensor:
                is_wrong = next(number) == 5 and rank == size - 1  # in the last one of the second pass
                if is_wrong and way == "raises":
                    raise ValueError("a file that cannot be read")
                return model(batch.features) * (1 + is_wrong * (way == "differs"))

            if index in failures:
                before = kept(loss.loss)
                call = functools.partial(pool_window, model, batches, joined_loss(loss), forward=forward)
                assert error_of(call)[0] in ("ValueError", "RuntimeError")
                assert all(map(torch.equal, kept(loss.loss), before))
            value = pool_window(model, batches, joined_loss(loss))
            found += [value, gradient(model), *kept(loss.loss)]
            assert len(loss.loss.queue) > 20  # and what is done outside of a window stays
            assert UNDO.get() is None
            model.zero_grad()
        return found

    def kept(loss: Any) -> list[Tensor]:
        rows = [rows.clone() for rows in loss.queue.rows() if rows is not None]
        return [torch.tensor([*loss.queue.position, loss._num_draws]), loss.queue.checksum.clone(), *rows]

    straight = run({})
    for failures in ({0: "raises", 1: "differs"}, {1: "raises"}, {0: "differs", 2: "raises"}):
        assert all(map(torch.equal, run(failures), straight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_difference_of_replays(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    first = torch.tensor([1.0, inf, -inf, nan, -2.0], dtype=dtype)
    assert compare_scores(first, first) == (0, 2)
    assert compare_scores(first[1:4], first[1:4]) == (0, 0)
    for index, value in [(0, nan), (1, -inf), (1, 1.0), (2, nan), (3, 1.0), (4, inf)]:
        again = first.clone()
        again[index] = value
        assert compare_scores(first, again)[0] == inf, (index, value)
    again = first.clone()
    again[0] += 0.5
    assert compare_scores(first, again)[0] == 0.5
    assert compare_scores(first[:0], first[:0]) == (0, 0)
    assert replay.tolerance(dtype) == torch.finfo(dtype).eps ** 0.5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda scores: scores * (1 + 1e-12), ""),  # the last digits
        (lambda scores: scores * (1 + 1e-6), "the same scores in both passes"),  # half of the digits
        (lambda scores: scores[:1], "like those of the first pass"),
    ],
)
def test_scores_of_the_second_pass(change: Callable[[Tensor], Tensor], text: str) -> None:
    model, number = make_model(), itertools.count()
    call = lambda: one_call(  # noqa: E731
        model=model, forward=lambda batch: change(model(batch)) if next(number) == 2 else model(batch)
    )
    with pytest.raises(RuntimeError, match=text) if text else contextlib.nullcontext():
        call()
