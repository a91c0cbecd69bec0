"""The simulated accelerator refuses and counts what it says, and the losses give the bits of the CPU on it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, IS_SIMULATED, count, deterministic, no_float64, no_waits, only_simulated
from gradient_cases import forced
from loss_cases import FORMS, INPUTS, Form, normal
from scripts import run_script
from subjects import LIMITS, error, gradient
from torch import nn
from torch.distributed.distributed_c10d import BackendConfig
from workers import WorkerPool, error_of

import fullrank
from fullrank.kernels import native
from fullrank.kernels.costs import TABLE
from fullrank.kernels.node_tables import beyond_reach
from fullrank.losses import SigmoidFocalLoss, SmoothAPLoss, smooth_ap
from fullrank.losses.rows import Batch, TargetRule, check_batch, has_float64

ROWS = torch.arange(6.0)


@only_simulated
def test_it_is_as_strict_as_a_device() -> None:
    """The control of all that runs on it: it refuses what a device does, and what it makes stays on it."""
    ours, forbidden = ROWS.to(DEVICE), [lambda x: x + ROWS, lambda x: torch.cat([ROWS, x]), lambda x: ROWS[x.long()]]
    for mixed in forbidden:
        with pytest.raises(RuntimeError, match="all tensors on one device"):
            mixed(ours)
    with pytest.raises(TypeError, match="numpy"):
        ours.numpy()
    with no_float64(), pytest.raises(TypeError, match=r"has no torch\.float64"):
        ours.double()
    with pytest.raises(AssertionError, match="1 waits: _local_scalar_dense"), no_waits(DEVICE):
        ours.sum().item()
    with count() as counts:
        ours + ours[:1].expand(6)
    assert counts.bytes == 4 * (6 + 1 + 6)
    ours[torch.tensor([0, 1])] = 5.0  # the host may give indices and scalars
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), ours + torch.tensor(0.0)):
        assert copied.device == DEVICE
        assert copied.tolist() == [5, 5, 2, 3, 4, 5]


Given = dict[str, torch.Tensor]


def pool_of(inputs: str, step: int, dtype: torch.dtype, num_rows: int | None = None) -> Given:
    """Return rows of a pool, in the second step with weights, in the third with a mask too."""
    rows = INPUTS[inputs].rows(step, num_rows=num_rows, weighted=step > 0, masked=step == 2)
    given = rows._replace(logits=rows.logits.to(dtype))._asdict()
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def rows_of(form: Form, step: int, dtype: torch.dtype) -> Given:
    """Return rows of another loss, from the second step on with weights where it takes them."""
    rows, targets = normal(24, form.columns, seed=step).to(dtype), torch.arange(24) * 7 % max(2, form.columns)
    weights = {"sample_weight": normal(24, seed=9).abs()} if step and form.loss.takes("sample_weight") else {}
    return form.arguments(rows, targets) | weights


# A module of each loss, and what returns its arguments in a step.
SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Given]]] = {
    "a drawn pool": (
        partial(INPUTS["classes"].module, FORMS["smooth_ap"], queue_size=30, queue_keep="negatives", max_pool_size=20),
        partial(pool_of, "classes"),
    )
}
for _name, _form in FORMS.items():
    for _inputs in ("binary", "multi_hot") if _form.loss.is_pooled and _form.is_first else ():
        _make = partial(INPUTS[_inputs].module, _form, queue_size=30)
        SUBJECTS[f"{_name} of {_inputs}"] = _make, partial(pool_of, _inputs)
    if _form.is_first and _form.loss.module and not _form.loss.is_pooled:
        SUBJECTS[_name] = partial(_form.make, queue_size=30), partial(rows_of, _form)


def put(given: Given, device: torch.device | str) -> Given:
    """Return arguments on a device, the first as a leaf that requires a gradient."""
    moved = {name: tensor.detach().to(device) for name, tensor in given.items()}
    next(iter(moved.values())).requires_grad_()
    return moved


@pytest.fixture
def same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU make the sums that an accelerator makes: in torch, and in the same chunks."""
    monkeypatch.setattr(native, "FUNCTIONS", {})
    monkeypatch.setitem(TABLE, "accelerator", TABLE["cpu"])


# The sums of the CPU, or those of an accelerator, and the dtype of the rows.
SUMS = [("cpu", "float32"), ("accelerator", "float64")]
MORE = [("cpu", "float64"), ("accelerator", "float32")]


@pytest.fixture(params=[*SUMS, *(pytest.param(sums, marks=pytest.mark.full) for sums in MORE)], ids="-".join)
def way(request: pytest.FixtureRequest) -> tuple[torch.dtype, float]:
    """A dtype, and how much may differ: nothing if the same sums are made in the same chunks, else what is promised."""
    sums, dtype = request.param
    if sums == "accelerator" or not IS_SIMULATED:
        return getattr(torch, dtype), LIMITS[dtype]
    request.getfixturevalue("same_sums")
    return getattr(torch, dtype), 0.0


@pytest.mark.filterwarnings("ignore:.*is drawn down to max_pool_size")
@pytest.mark.parametrize("name", SUBJECTS)
def test_steps_of_a_loss_equal_those_of_the_cpu(name: str, way: tuple[torch.dtype, float]) -> None:
    results, (dtype, limit) = [], way
    for device in ("cpu", DEVICE):
        make, arguments = SUBJECTS[name]
        loss, found = make().to(device), []
        for step in range(3):
            if hasattr(loss, "on_train_batch_start"):
                loss.on_train_batch_start(step)
            given = put(arguments(step, dtype), device)
            value, first = loss(**given), next(iter(given.values()))
            value.backward()
            assert first.grad.device.type == torch.device(device).type
            found += [value.detach().cpu(), first.grad.cpu()]
        results.append(found)
    for theirs, ours in zip(*results):
        assert error(ours.double(), theirs.double()) <= limit


# Rows, classes and the share of positives; from bins of one and of several classes to many ties.
LARGE = {"bins": (20_001, 1, 0.3), "ties": (30_003, 1, 0.3), "classes": (3_000, 20, None), "wide": (20_001, 1, 0.3)}
KINDS = ["all", "some ignored, weighted", "some of weight 0"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [*zip([*LARGE, *LARGE], cycle(KINDS))])
def test_large_pools_equal_those_of_the_cpu(name: str, kind: str, way: tuple[torch.dtype, float]) -> None:
    (num_rows, num_classes, share), (dtype, limit) = LARGE[name], way
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(num_rows, num_classes, generator=generator, dtype=torch.float64).to(dtype)
    logits = (logits * 2).round() if name == "ties" else logits
    logits[5] = 1e30 if name == "wide" else logits[5]
    targets = torch.randint(0, num_classes, (num_rows,), generator=generator)
    if share is not None:
        targets = (torch.rand(num_rows, generator=generator) < share).long()
    weight = None if kind == "all" else torch.rand(num_rows, generator=generator).to(dtype)
    if kind == "some ignored, weighted":
        targets[::7] = -100
    elif weight is not None:
        weight[::3] = 0
    results = []
    for device in ("cpu", DEVICE):
        leaf = logits.detach().to(device).requires_grad_()
        given = None if weight is None else weight.to(device)
        value = smooth_ap(leaf, targets.to(device), 0.1, sample_weight=given)
        value.backward()
        results.append((value.detach().cpu(), leaf.grad.cpu()))
    for theirs, ours in zip(*results):
        assert error(ours.double(), theirs.double()) <= limit


@pytest.mark.parametrize("scale", [1e-25, 1e-80, 1e80])
@pytest.mark.parametrize("device", ["cpu", DEVICE], ids=["cpu", DEVICE.type])
def test_within_a_query_the_ratios_of_weights_count(device: str | torch.device, scale: float) -> None:
    """Also where float32, the dtype of the scores, cannot represent the weights of one query beside another's."""
    scores = torch.randn(12, 1, generator=torch.Generator().manual_seed(0))
    targets, queries = torch.tensor([1, 0, 1, 0, 0, 1] * 2), torch.arange(2).repeat_interleave(6)
    weight, results = torch.arange(1.0, 13.0, dtype=torch.float64), []
    for factor in (1.0, scale):
        leaf = scores.detach().to(device).requires_grad_()
        given = {"sample_weight": (weight * torch.tensor([1.0, factor], dtype=torch.float64)[queries]).to(device)}
        value = smooth_ap(leaf, targets.to(device), 0.3, indexes=queries.to(device), **given)
        value.backward()
        results.append(torch.cat([value.detach().cpu()[None], leaf.grad.cpu()[:, 0]]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("count", [256, 700, 256 * 256 + 300])
def test_sums_over_all_to_the_right(count: int) -> None:
    """In one block, in several, and where these are more than a block too: an accelerator sums no running total."""
    values = torch.randn(2, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = beyond_reach(values.to(DEVICE), 0, torch.arange(count, device=DEVICE))
    expected = beyond_reach(values, 0, torch.arange(count))
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-10)


@only_simulated
@pytest.mark.usefixtures("same_sums")
def test_accumulating_and_clipping_give_the_bits_of_the_cpu() -> None:
    trained = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        batches = [torch.randn(size, 6, generator=generator).to(device) for size in (5, 9, 7)]
        targets = (torch.rand(21, generator=generator) < 0.4).long().to(device)
        loss = SmoothAPLoss(1, queue_size=30)
        compute = lambda scores, _, loss=loss, targets=targets: loss(scores, targets)  # noqa: E731
        for _ in range(2):
            fullrank.pooled_backward(model, batches, forward=model, loss=compute)
            for step, batch in fullrank.accumulate(model, batches, len):
                step.backward(model(batch).square().sum())
            norm = fullrank.clip_grad_norm_(model, 0.1)
            assert norm.item() > 0.1
            optimizer.step()
            optimizer.zero_grad()
        trained.append([norm.cpu(), *(parameter.detach().cpu() for parameter in model.parameters())])
    for ours, theirs in zip(*trained):
        assert torch.equal(ours, theirs)


# What an accelerator does not have


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("ignored", [-(2**63), -1, 0, 1, 2, 3, 2**62, 2**63 - 1])
def test_a_check_that_waits_for_the_header_finds_what_the_host_does(ignored: int, classes: int) -> None:
    """The control: a target that is neither a class nor ignored."""
    right = [ignored, *({*range(max(2, classes))} - {ignored})]
    for targets in (right, [*right, 7]):
        outcomes = []
        for device, defers in (("cpu", False), (DEVICE, False), (DEVICE, True)):
            rows = torch.zeros(len(targets), classes).to(device), torch.tensor(targets).to(device)

            def check(rows: Any = rows, defers: bool = defers) -> None:
                batch = check_batch(Batch(*rows), TargetRule(classes, ignored), defers=defers)
                if batch.check is not None:
                    batch.check.read()

            outcomes.append(error_of(check))
        assert outcomes[0] == outcomes[1] == outcomes[2]
        assert (outcomes[0][0] == "none") == (targets is right), outcomes
    none = Batch(torch.zeros(0, classes), torch.zeros(0, dtype=torch.int64))
    assert check_batch(none, TargetRule(classes, ignored)).counts == (0, 0, 0)  # so that the sums over ranks are known


@only_simulated
def test_a_device_without_float64_is_refused() -> None:
    has_float64.cache_clear()
    try:
        with no_float64(), pytest.raises(TypeError, match=r"logits: expected a device with float64.*logits\.cpu\(\)"):
            smooth_ap(ROWS[:, None].to(DEVICE), (ROWS > 2).long().to(DEVICE))
    finally:
        has_float64.cache_clear()
    assert smooth_ap(ROWS[:, None].to(DEVICE), (ROWS > 2).long().to(DEVICE)).isfinite()


@only_simulated
def test_focal_needs_no_float64() -> None:
    with no_float64():
        rows = ROWS.to(DEVICE).requires_grad_()
        SigmoidFocalLoss()(rows, (ROWS > 2).float().to(DEVICE)).backward()
    assert rows.grad.isfinite().all()


@pytest.mark.slow
def test_deterministic_algorithms() -> None:
    with deterministic():
        for name in SUBJECTS:
            loss = SUBJECTS[name][0]().to(DEVICE)
            for step in range(3 if " of " in name else 0):
                given = pool_of(name.partition(" of ")[2], step, torch.float32, num_rows=2_000)
                loss(**put(given, DEVICE)).backward()
        generator = torch.Generator().manual_seed(0)
        logits, targets = torch.randn(50_000, 1, generator=generator), torch.rand(50_000, generator=generator) < 0.3
        smooth_ap(logits.to(DEVICE).requires_grad_(), targets.to(DEVICE), 1e-3).backward()
        if IS_SIMULATED:  # the control; on CUDA torch 2.11 has such a sum
            with pytest.raises(RuntimeError, match="cumsum does not have a deterministic implementation"):
                ROWS.to(DEVICE).cumsum(0)
    assert ROWS.to(DEVICE).cumsum(0).tolist()[-1] == 15


def test_opaque_operators_are_left_out_of_cuda_graphs() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fullrank::")]
    assert {"fullrank::smooth_ap", "fullrank::sigmoid_sums_backward", "fullrank::spread"} <= {*names}
    for name in names:
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.fullrank, name.removeprefix("fullrank::")).default.tags


# Over ranks, in a group that serves the device alone, like one of NCCL

OVER_RANKS = """
import sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist
from device import DEVICE, count, init_process_group
import fullrank

def attempt(name, call):
    with count() as counts:
        try:
            outcome = f"{{call().item():.3f}}"
        except ValueError as error:
            outcome = f"{{type(error).__name__}} {{error}}"
    print(f"{{name}} on {{rank}} after {{counts.waits}} waits: {{outcome}}")

init_process_group()
rank = dist.get_rank()
rows, targets = torch.arange(6.0)[:, None].to(DEVICE).requires_grad_(), torch.tensor([0, 1, 0, 1, 0, 1]).to(DEVICE)
calls = [lambda: fullrank.SmoothAPLoss(1)(rows, targets), lambda: fullrank.global_mean(rows.sum(), 6)]
print("gathered", [call().isfinite().item() for call in calls])
loss = fullrank.SmoothAPLoss(1, queue_size=32)
loss(rows, targets)
print("queued", len(loss.queue))

# A target or a weight that does not fit, on both ranks, on one, on none, with other reasons on each.
inputs, softmax, sigmoid = rows.expand(6, 3), fullrank.SoftmaxFocalLoss(), fullrank.SigmoidFocalLoss()
for name, held in {{"both": (7, 8), "one": (1, 9), "none": (1, 1)}}.items():
    of_classes = torch.where(rows[:, 0] == 0, held[rank], targets)
    attempt(f"softmax {{name}}", lambda: softmax(inputs, of_classes))
weights = torch.where(rows == 0, (1.0, -3.0)[rank], 1.0)
attempt("weights", lambda: sigmoid(rows, targets, sample_weight=weights))
attempt("first of two", lambda: sigmoid(rows, targets * 2, sample_weight=weights))
ranking, before = fullrank.SmoothAPLoss(1, queue_size=32, temperature=1.0), []
of_rank = torch.where(rows[:, 0] == 0, (1, 9)[rank], targets)
for step in range(3):
    before.append((ranking.queue.position, ranking.queue.checksum.item()))
    weight = torch.where(rows[:, 0] == 0, (1.0, -3.0)[rank], 1.0)
    attempt(f"ranking {{step}}", lambda: ranking(rows, of_rank))
    attempt(f"ranking with weights {{step}}", lambda: ranking(rows, targets, sample_weight=weight))
    print("unchanged", before[-1] == (ranking.queue.position, ranking.queue.checksum.item()))
    attempt(f"ranking right {{step}}", lambda: ranking(rows, targets))
    attempt(f"sharded {{step}}", lambda: fullrank.large.ShardedLoss(fullrank.SmoothAPLoss(1))(rows, of_rank))

# Sharded, where rank 1 ignores rows, next to gathered rows
many = torch.arange(20_000.0).mul_(0.618).frac_()[:, None]
for to_ignore in (0, 5):
    of_rank, results = (many[:, 0] > 0.7).long() * (many[:, 0] < 0.9), []
    of_rank[: to_ignore * rank] = -100
    for wrap in (lambda loss: loss, fullrank.large.ShardedLoss):
        leaf = (many + rank * 0.1).masked_fill_((of_rank == -100)[:, None], 1e6).to(DEVICE).requires_grad_()
        loss = wrap(fullrank.SmoothAPLoss(1, temperature=0.1))
        loss(leaf, of_rank.to(DEVICE)).backward()
        results.append(leaf.grad.cpu())
    error = (results[1] - results[0]).abs().max() / results[0].abs().max()
    print("sharded, ignored", to_ignore, error < 2e-6, results[0].abs().max() > 0, results[1][: to_ignore * rank].any())

bad = torch.where(rows[:, 0] == 0, (1, 9)[rank], targets)
attempt("other checks", lambda: softmax(inputs, bad[: 5 + rank]))

dist.group.WORLD.bound_device_id = torch.device("sim", 1)
for call in calls:
    try:
        call()
    except ValueError as error:
        print(type(error).__name__, error)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def over_ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not IS_SIMULATED:
        pytest.skip("counts on the simulated device, which CUDA stands for")
    folder = tmp_path_factory.mktemp("over_ranks")
    script = folder / "over_ranks.py"
    script.write_text(OVER_RANKS.format(tests=str(Path(__file__).parent)))
    done = run_script(script, cwd=folder, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_tensor_on_another_device_than_the_group_raises_on_every_rank(over_ranks: str) -> None:
    assert over_ranks.count("gathered [True, True]") == 2  # the control
    assert over_ranks.count("queued 12") == 2  # the rows of both
    for name in ("tensor 0", "total"):
        text = f"{name}: expected a tensor on sim:1, the device of the process group, got one on sim:0"
        assert over_ranks.count(text) >= 2, over_ranks
    assert "Call torch.sim.set_device(0) before init_process_group" in over_ranks


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("softmax both", ["rank 0: targets: expected class indices", "got 7", "rank 1: targets", "got 8"]),
        ("softmax one", ["rank 1: targets: expected class indices", "got 9"]),
        ("weights", ["rank 1: sample_weight: expected finite numbers >= 0, got -3.0"]),
        ("other checks", ["rank 0: targets: expected shape (6,)", "rank 1: targets: expected class indices", "got 9"]),
        ("first of two", ["ranks 0, 1: targets: expected numbers in [0, 1], got 2"]),
    ],
)
def test_values_that_do_not_fit_raise_the_same_on_every_rank(over_ranks: str, name: str, reasons: list[str]) -> None:
    """Although they are read together with the headers."""
    texts = {line.partition(": ")[2] for line in over_ranks.splitlines() if line.startswith(f"{name} on")}
    (text,) = texts
    assert text.startswith("RankValueError"), text
    for reason in reasons:
        assert reason in text
    lines = [line for line in over_ranks.splitlines() if line.startswith("softmax none")]  # the control
    assert ["after 2 waits: 0" in line for line in lines] == [True, True]  # the header, and the value the script reads


def test_a_group_without_a_backend_serves_the_accelerator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step costs there what it does in a group of the accelerator. The control: a group that serves the host too."""
    monkeypatch.setitem(dist.Backend.default_device_backend_map, DEVICE.type, "gloo")
    served = [
        list(BackendConfig(dist.Backend(name)).device_backend_map)
        for name in (dist.Backend.UNDEFINED, f"cpu:gloo,{DEVICE.type}:gloo")
    ]
    assert served == [[DEVICE.type], ["cpu", DEVICE.type]]


def over_the_host(rank: int) -> list[Any]:
    """Return the gradient of losses of rows on the CPU, and on the device in a group of gloo that serves it."""
    group = dist.new_group(backend=f"cpu:gloo,{DEVICE.type}:gloo")
    options: Any = {"quantile": 0.1, "surrogate": "sigmoid", "group": group}
    recall = [fullrank.RecallAtQuantileLoss(1, threshold_gradient=each, **options) for each in (True, False)]
    losses = [fullrank.SupConLoss(group=group), *map(fullrank.large.ShardedLoss, recall)]
    rows = torch.randn(90, 1, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    found = []
    for device in (torch.device("cpu"), DEVICE):
        leaf = rows.detach().to(device).requires_grad_()
        for loss in losses:
            given = torch.cat([leaf, leaf.square()], dim=1) if loss is losses[0] else leaf
            with forced("sums"):
                value = loss(given, (rows[:, 0] > 1).long().to(device))
            assert value.device == device
            value.backward()
        found.append(gradient([leaf]).cpu().numpy())
    return found


def test_rows_of_a_device_that_gloo_serves_travel_over_the_host() -> None:
    pool = WorkerPool(2)  # the device stays registered for the whole process
    for on_host, on_device in pool(over_the_host):
        assert error(torch.from_numpy(on_device), torch.from_numpy(on_host)) <= LIMITS["float64"]
    pool.close()


def test_a_sharded_loss_leaves_out_rows_that_one_rank_ignores(over_ranks: str) -> None:
    """Although the host reads only with the headers whether there are any."""
    for to_ignore in (0, 5):
        assert over_ranks.count(f"sharded, ignored {to_ignore} tensor(True) tensor(True) tensor(False)") == 2


def test_a_ranking_loss_reads_its_checks_with_the_header(over_ranks: str) -> None:
    """In the first, the second and the third step. A wrong call enqueues nothing."""
    for step in range(3):
        for rank in range(2):
            line = next(x for x in over_ranks.splitlines() if x.startswith(f"ranking right {step} on {rank} "))
            # The script reads the loss. The first step fills caches.
            assert "after 2 waits: 0." in line or step == 0, line
            for name, what in (
                ("ranking", "targets: expected 0, 1 or"),
                ("ranking with weights", "sample_weight: exp"),
                ("sharded", "targets: expected 0, 1 or"),
            ):
                line = next(x for x in over_ranks.splitlines() if x.startswith(f"{name} {step} on {rank} "))
                call = "ShardedLoss" if name == "sharded" else "SmoothAPLoss"
                assert f"RankValueError {call} failed on rank 1: {what}" in line, line
    assert over_ranks.count("unchanged True") == 6


@only_simulated
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("name", ["causal_lm_loss", "token_log_probs"])
def test_a_loss_of_hidden_states_waits_once(name: str, validates: bool) -> None:
    """For the number of tokens that count, and once more to check them. The gradients are those of the CPU."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator) for shape in ((2, 7, 5), (11, 5), (11,))]
    labels = torch.randint(0, 11, (2, 7), generator=generator).masked_fill(torch.arange(7) > 4, -100)
    settings = {"z_loss": 0.1} if name == "causal_lm_loss" else {"return_entropy": True}
    found = []
    for device in ("cpu", DEVICE):
        given, tokens = [leaf.detach().to(device).requires_grad_() for leaf in leaves], labels.to(device)
        options = {"weight": given[1], "bias": given[2], "softcap": 2.0, "validate_args": validates, **settings}
        with count() as counts:
            getattr(fullrank, name)(given[0], tokens, **options).exp().sum().backward()
        found.append([leaf.grad.cpu() for leaf in given])
    assert counts.waits == 1 + validates, counts.report()
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
