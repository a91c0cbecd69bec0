"""``verify_step`` finds what is wrong with a training step, finds nothing else, and leaves everything as it was."""

from __future__ import annotations

import dataclasses
import gc
import math
import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from meshes import init_device_mesh
from on_ranks import common_error, on_ranks, same
from subjects import switches, wrap
from torch import nn
from torch._tensor_str import printoptions
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from verify_programs import (
    COUNTS,
    DTYPE,
    PROGRAMS,
    QUEUED,
    SCALER,
    Net,
    Program,
    bce,
    global_mean,
    make_batch,
    make_window,
    own_rows,
    window,
    with_queue,
)

import fullrank as fr
from fullrank.preflight import concatenate, pad_tokens
from fullrank.preflight.joining import is_window

pytestmark = pytest.mark.slow


def report_of(program: Program, kind: str, rank: int) -> fr.preflight.StepReport:
    model = Net(program.middle and program.middle())
    options = {"find_unused_parameters": True} if kind == "ddp" else {}
    wrapped = wrap(model, kind, **options)
    batch = (make_window if program.is_window else make_batch)(rank, program.counts)
    return fr.verify_step(program.step, wrapped, batch, build_model=None if kind in ("ddp", "plain") else Net)


@pytest.mark.parametrize(
    ("world_size", "kind"), [(3, "ddp"), (2, "fsdp"), pytest.param(2, "ddp", marks=pytest.mark.full)]
)
@on_ranks(...)
def test_programs(rank: int, kind: str) -> None:
    """The verdict, and the cause as the first or second; the same report on every rank."""
    wrong = {}
    for name, program in PROGRAMS.items():
        if kind in program.wrappers:
            report = report_of(program, kind, rank)
            same(str(report))
            cause = program.cause.format(W=dist.get_world_size())
            if report.verdict != program.verdict or cause not in " ".join(report.causes[:2]):
                wrong[name] = str(report)
            assert report.is_exact == (not report.causes)
    assert not wrong, "\n\n".join(wrong.values())


def test_one_process() -> None:
    """Without a process group the micro-batches of one process are compared with their rows as one batch."""
    verdicts = {name: report_of(p, "plain", 0).verdict for name, p in PROGRAMS.items() if p.is_window}
    assert verdicts == {name: PROGRAMS[name].verdict for name in verdicts}
    for draw in (random.random, np.random.rand, lambda: torch.rand(()).item()):

        def step(model: nn.Module, batches: Any, draw: Callable[[], float] = draw) -> None:
            sum(draw() * model(batch[0]).sum() for batch in batches).backward()

        assert fr.verify_step(step, Net(), make_window(0)).verdict == "random"


@pytest.mark.parametrize("kind", ["hsdp (1, W)", "hsdp (W, 1)", "summed", "replicate"])
@on_ranks(2)
def test_other_wrappers(rank: int, kind: str) -> None:
    """Means over HSDP are exact, and a loss of own rows is found; after sum_gradients_ a window is exact."""
    right, wrong = (window, own_rows) if kind == "summed" else (with_queue, own_rows)
    assert report_of(Program(right, "exact", is_window=right is window), kind, rank).is_exact
    assert report_of(Program(wrong, "direction"), kind, rank).verdict == "direction"


@on_ranks(2)
def test_tensor_parallelism(rank: int) -> None:
    """All ranks of tensor parallelism have the same batch, and the reference is the model without it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(Net(), mesh, plan)

    def step(model: nn.Module, batch: Any) -> Any:
        loss = nn.functional.binary_cross_entropy_with_logits(
            model.second(torch.tanh(model.first(batch[0])))[:, 0], batch[1].to(DTYPE)
        )
        loss.backward()
        return loss

    def doubled(model: nn.Module, batch: Any) -> None:
        step(model, batch)
        for parameter in model.parameters():
            parameter.grad = parameter.grad if parameter.grad is None else parameter.grad * dist.get_world_size()

    assert fr.verify_step(step, model, make_batch(0), build_model=Net).is_exact
    assert fr.verify_step(doubled, model, make_batch(0), build_model=Net).verdict == "factor"


@pytest.mark.parametrize("kind", ["static", "compiled", "checkpointed"])
@on_ranks(2)
def test_what_surrounds_a_model(rank: int, kind: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model: Any = Net()
    if kind == "checkpointed":
        model.first = checkpoint_wrapper(model.first)
    model = DistributedDataParallel(model, static_graph=kind == "static")
    if kind == "compiled":
        model = torch.compile(model, backend="eager")
    report = fr.verify_step(global_mean, model, make_batch(rank))
    assert report.is_exact
    assert set(report.gradients) == {"scale", "first.weight", "first.bias", "second.weight", "second.bias"}
    assert fr.verify_step(own_rows, model, make_batch(rank)).verdict == "direction"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@on_ranks(2)
def test_rounding_is_no_difference(rank: int, dtype: str) -> None:
    model = Net().to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    kind = next(model.parameters()).dtype
    rows, targets = make_batch(rank, (300, 500))
    batch = rows.to(kind), targets

    def right(model: nn.Module, batch: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            scores = model(batch[0])
        fr.BCEWithLogitsLoss()(scores.float(), batch[1].float()).backward()

    def wrong(model: nn.Module, batch: Any) -> None:
        fr.SmoothAPLoss(queue_size=0, gather_distributed=False)(model(batch[0]).float(), batch[1]).backward()

    wrapped = DistributedDataParallel(model)
    assert fr.verify_step(right, wrapped, batch).is_exact

    def halved(model: nn.Module, batch: Any) -> None:
        right(model, batch)
        for parameter in model.parameters():
            parameter.grad = parameter.grad if parameter.grad is None else parameter.grad / dist.get_world_size()

    assert fr.verify_step(halved, wrapped, batch).verdict == "factor"
    assert fr.verify_step(wrong, wrapped, batch).verdict == "direction"


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return all that a step may change, as texts."""
    local = [p.to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    found = {
        "parameters": [part.tolist() for part in local],
        "gradients": [None if p.grad is None else p.grad for p in model.parameters()],
        "buffers": list(model.buffers()),
        "queue": QUEUED.state_dict(),
        "modes": [module.training for module in (*model.modules(), QUEUED)],
        "random": (random.getstate(), str(np.random.get_state()), torch.get_rng_state()),  # noqa: NPY002
        "optimizer": optimizer.state_dict(),
        "switches": switches(model),
        "scaler": SCALER.state_dict(),
    }
    with printoptions(precision=17, threshold=10**6):
        return {name: str(value) for name, value in found.items()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("fault", ["", "in the step", "on one process"])
@on_ranks(2)
def test_everything_is_as_before(rank: int, kind: str, fault: str) -> None:
    """Also what an optimizer, a queue, a layer of BatchNorm and a mode have changed; also after an error."""

    def build() -> Net:
        return Net(nn.BatchNorm1d(8))

    model = wrap(build(), kind)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": frozen}], lr=0.1)
    batch = make_batch(rank)
    for _ in range(2):  # the optimizer and the queue have a state, and the parameters a gradient
        with_queue(model, batch)
        optimizer.step()

    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(model: nn.Module, batch: Any) -> Any:
        optimizer.param_groups[0]["lr"] /= 2
        loss = with_queue(model, batch)
        schedule.step()
        model.eval()
        QUEUED.eval()
        torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        if fault == ("on one process" if dist.get_world_size() == 1 else "in the step"):
            raise RuntimeError("a fault")
        optimizer.step()
        optimizer.zero_grad()
        return loss

    before = snapshot(model, optimizer) | {"schedule": str(schedule.state_dict())}
    for _ in range(2):
        if fault:
            with pytest.warns(match="a fault") if fault == "in the step" else nullcontext():  # before others can join
                error = common_error(lambda: fr.verify_step(step, model, batch, build_model=build))
            assert error[0] == "RuntimeError"
            assert "a fault" in error[1]
        else:
            assert "optimizer" in str(fr.verify_step(step, model, batch, build_model=build))
        after = snapshot(model, optimizer) | {"schedule": str(schedule.state_dict())}
        assert [name for name in before if after[name] != before[name]] == []
    with_queue(model, batch)  # the wrapper works as before
    assert optimizer.param_groups[1]["params"][0] is frozen


@on_ranks(2)
def test_faults(rank: int) -> None:
    """Bad arguments and programs raise one clear error on every rank, and each next call works."""
    model = DistributedDataParallel(Net())
    group = dist.new_group([0, 1])
    batch, other = make_batch(rank), DistributedDataParallel(Net())

    def of_group(model: nn.Module, batch: Any) -> None:
        rows = collectives.all_gather(model(batch[0])[:5], group=group)  # its backward would wait for the other ranks
        torch.cat(rows).logsumexp(0).backward()

    def of_one_batch(model: nn.Module, batch: Any) -> None:
        nn.functional.nll_loss(model(batch[0]).expand(2, -1).T, batch[1]).backward()

    def two_views(model: nn.Module, batch: Any) -> None:
        first, second = batch
        (model(first) - model(second)).square().mean().backward()

    def with_our_group(model: nn.Module, batch: Any) -> None:
        fr.SmoothAPLoss(queue_size=0, group=group)(model(batch[0]), batch[1]).backward()

    assert fr.verify_step(with_our_group, model, batch).is_exact  # a group of this package's calls is exchanged
    odd, narrow = {"rows": batch[0], "number": rank}, (batch[0][:, : 5 + rank], batch[1])
    sharded = wrap(Net(), "fsdp")
    rows: dict[str, tuple[Any, dict[str, Any]]] = {
        "step: expected a function": (None if rank else global_mean, {}),
        "model: expected a module": (global_mean, {"model": None if rank else model}),
        "losses: expected modules": (global_mean, {"losses": [model] if rank else [1]}),
        "a group of its own": (of_group, {}),
        "no wrapped model but the one": (lambda m, b: bce(other, b).backward(), {}),
        "a fault of one rank": (lambda m, b: rank and {}["a fault of one rank"], {}),
        "batch['number']: expected tensors with rows, or the same value": (global_mean, {"batch": odd}),
        "batch[0]: expected tensors that differ in their number of rows": (global_mean, {"batch": narrow}),
        "build_model=": (global_mean, {"model": sharded}),
        "expected the model that is trained": (global_mean, {"model": sharded, "build_model": lambda: nn.Linear(6, 1)}),
        "gives none": (lambda m, b: None, {}),
        "zero_grad": (lambda m, b: (bce(m, b).backward(), m.zero_grad()), {}),
        "infinite": (lambda m, b: (bce(m, b) * math.inf).backward(), {}),
        "out of bounds": (of_one_batch, {"batch": (batch[0], batch[1] + rank)}),  # rank 0 would wait in the backward
        "(one micro-batch, world size 1) failed": (two_views, {"batch": [batch[0], batch[0]]}),
    }
    for text, (step, given) in rows.items():
        error = common_error(lambda: fr.verify_step(step, **{"model": model, "batch": batch} | given))  # noqa: B023
        assert text in error[1], (text, error)
    assert fr.verify_step(global_mean, model, batch).is_exact


@pytest.mark.parametrize("loader", [iter, DataLoader])
def test_a_loader_is_no_batch(loader: Callable[[Any], Any]) -> None:
    """One process would get the same micro-batches, so that a mean of means would look exact."""
    batches, model = [torch.ones(2, 1), torch.ones(1, 1)], nn.Linear(1, 1)

    def step(model: nn.Module, micro_batches: Any) -> None:
        for batch in micro_batches:
            model(batch).mean().backward()

    with pytest.raises(TypeError, match=r"^batch: expected a batch, or a list of micro-batches, got "):
        fr.verify_step(step, model, loader(batches))
    assert fr.verify_step(step, model, batches).verdict != "exact"  # the control


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_scaler_is_named_where_there_is_one(is_scaled: bool) -> None:
    gc.collect()  # the scalers of earlier tests
    scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)
    with pytest.raises(ValueError, match=r"NaN or infinite ones\. Look for NaN") as caught:
        fr.verify_step(lambda m, b: (m(b).sum() * math.nan).backward(), nn.Linear(1, 1), torch.ones(2, 1))
    assert ("GradScaler" in str(caught.value)) == is_scaled == scaler.is_enabled()


def test_batches_are_joined() -> None:
    """Tensors, arrays and lists one after another, what is equal as it is; tokens padded on request."""
    x, y = torch.ones(2, 3), torch.zeros(1, 3)
    parts = [
        {"x": x, "name": ["a", "b"], "scale": 2.0, "t": (x, torch.tensor(3))},
        {"x": y, "name": ["c"], "scale": 2.0, "t": (y, torch.tensor(3))},
    ]
    joined = concatenate(parts)
    assert torch.equal(joined["x"], torch.cat([x, y]))
    assert torch.equal(joined["t"][0], joined["x"])
    assert (joined["name"], joined["scale"], int(joined["t"][1])) == (["a", "b", "c"], 2.0, 3)
    ones = [torch.ones(1, length, dtype=torch.long) for length in (2, 3)]
    tokens = [{"input_ids": one, "labels": one} for one in ones]
    with pytest.raises(ValueError, match="pad_tokens"):
        concatenate(tokens)
    padded = pad_tokens(-100, pad=9)(tokens)
    assert padded["labels"].tolist() == [[1, 1, -100], [1, 1, 1]]
    assert padded["input_ids"].tolist() == [[1, 1, 9], [1, 1, 1]]


@dataclasses.dataclass
class Views:
    first: torch.Tensor
    second: list[torch.Tensor]


def test_containers() -> None:
    """A list of views and targets, or of texts, is one batch; dataclasses and special mappings keep their type."""
    x = torch.ones(2, 3)
    assert is_window([(x, x), (x, x)])
    assert is_window([x, x[:1]])
    assert not any(map(is_window, ([[x, x], x[:, 0]], ["a", "b"], [x, x[:, 0]], (x, x), [])))
    joined = concatenate([Views(x, [x]), Views(x[:1], [x])])
    assert (len(joined.first), len(joined.second[0])) == (3, 4)
    assert concatenate([defaultdict(list, a=[1]), defaultdict(list, a=[2])]) == {"a": [1, 2]}


class Words(nn.Module):
    """An embedding with sparse gradients, and complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True).to(DTYPE)
        self.filter = nn.Parameter(torch.tensor([1 + 2j, 2, 3j]).to(torch.complex128))
        nn.init.normal_(self.table.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return (self.table(words) * self.filter - 1j).sum(1)


@on_ranks(2)
def test_sparse_and_complex_gradients(rank: int) -> None:
    model = DistributedDataParallel(Words())
    words = torch.arange(4) + rank

    def step(model: nn.Module, words: torch.Tensor, imaginary: float = 1.0) -> None:
        out = model(words)
        (out.real.square() + imaginary * out.imag.square()).mean().backward()

    assert fr.verify_step(step, model, words).is_exact
    report = fr.verify_step(lambda m, b: step(m, b, dist.get_world_size()), model, words)
    assert report.kinds["filter"] == report.kinds["table.weight"] == "direction"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True).to(DTYPE)
        self.recurrent = nn.LSTM(6, 1, 2, dropout=0.3, batch_first=True).to(DTYPE)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.recurrent(self.attention(rows[:, None]))[0][:, 0, 0]


@pytest.mark.parametrize("layers", [False, True])
@on_ranks(2)
def test_dropout_may_be_switched_off(rank: int, layers: bool) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Layers() if layers else Net(nn.Dropout(0.3)))
    assert fr.verify_step(global_mean, model, make_batch(rank)).verdict == "random"
    assert fr.verify_step(global_mean, model, make_batch(rank), disable_dropout=True).is_exact


@on_ranks(2)
def test_check_raises_the_report_everywhere(rank: int) -> None:
    model = DistributedDataParallel(Net())
    report = fr.verify_step(own_rows, model, make_batch(rank, COUNTS))
    assert common_error(report.check)[0] == "RuntimeError"
    global_mean(model, make_batch(rank))  # a gradient that the parameters have before is left out
    fr.verify_step(lambda m, b: m(b[0], embeds=True)[0].sum().backward(), model, make_batch(rank))  # DDP still waits
    fr.verify_step(global_mean, model, make_batch(rank)).check()
