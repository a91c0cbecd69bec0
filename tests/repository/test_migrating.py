"""The pages about other packages: every line of their tables is executed, and every block.

The check of a line is found by the text of its first cell. Where the other package is installed, the check runs it.
Where it cannot be, its rule is written out in the check, as a control that gives the other number.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pages
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import make_batch, sum_loss
from batches import one_process as gradient_of_one_process
from collective_counter import CollectiveCounter
from experts import Experts
from meshes import init_device_mesh
from subjects import Model, error
from subjects import gradient as flat
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import error_of, get_pool

import fullrank

pytestmark = pytest.mark.slow

PAGES = [page for page in pages.PAGES if page.startswith("migrating/")]
CLOSE = {"rtol": 1e-12, "atol": 1e-14}
Check = Callable[[], None]
CHECKS: dict[tuple[str, str], Check] = {}


def lines_of(page: str) -> list[str]:
    """Return the first cells of the table of a page."""
    rows = [line for line in pages.PAGES[page].splitlines() if line.startswith("|")]
    return [row.split(" | ")[0].strip("| ") for row in rows[2:]]


def line(page: str, *cells: str) -> Callable[[Check], Check]:
    """Register the check of lines, each by its first cell."""

    def register(check: Check) -> Check:
        CHECKS.update({(page, cell): check for cell in cells})
        return check

    return register


@pytest.mark.parametrize("page", PAGES)
def test_the_block_of_a_page(page: str) -> None:
    if page == HUGGING:
        pytest.importorskip("transformers")
    ((code, expected),) = pages.printing_blocks(page)
    with torch.random.fork_rng(devices=[]):
        assert pages.output_of(code, {}).split() == expected.split()


@pytest.mark.parametrize("page", PAGES)
def test_every_line_has_a_check(page: str) -> None:
    assert sorted(lines_of(page)) == sorted(cell for of, cell in CHECKS if of == page)


def make_rows(seed: int = 0, rows: int = 40, columns: int = 3) -> tuple[Tensor, Tensor]:
    """Return logits with gradient and targets; binary with one column."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, dtype=torch.float64, generator=generator).requires_grad_()
    return logits, torch.randint(0, max(2, columns), (rows,), generator=generator)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


@functools.cache
def on_two_ranks(function: Callable[..., Any]) -> list[Any]:
    """Return what a worker function returns on each of two ranks, run once for all lines that read it."""
    return get_pool(2)(function)


def installed(name: str) -> Any:
    """Return a module, or skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


# imbalanced-losses

IMBALANCED = "migrating/imbalanced-losses.md"


def imbalanced_on_a_rank(rank: int) -> dict[str, Any]:
    """Return what both packages do on two ranks."""
    import imbalanced_losses

    logits, targets = make_rows(seed=0, rows=40, columns=1)
    own = slice(0, 20) if rank == 0 else slice(20, 40)
    found: dict[str, Any] = {}
    for module in (fullrank, imbalanced_losses):
        name = module.__name__
        arguments = {"num_classes": 1, "queue_size": 0, "temperature": 0.3}
        weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
        module.SmoothAPLoss(**arguments)(weight * logits.detach()[own], targets[own]).backward()
        dist.all_reduce(weight.grad)
        one = torch.ones(1, dtype=torch.float64, requires_grad=True)
        whole = module.SmoothAPLoss(**arguments, gather_distributed=False)(one * logits.detach(), targets)
        found[f"{name} share"] = float(weight.grad / 2 / gradient(whole, one))
        focal = module.SigmoidFocalLoss(reduction="none")(logits[own], targets[own, None].double())
        found[f"{name} elements"] = len(focal)
        torch.manual_seed(rank)
        sampled = module.SmoothAPLoss(**arguments, max_pool_size=8)
        found[f"{name} subset"] = float(sampled(logits.detach()[own], targets[own]))
        counts = module.PAUCAtBudgetLoss(1, beta=0.5, surrogate="pairwise", queue_size=0)
        found[f"{name} positives"] = float(
            counts(logits[own], targets[own], return_per_class=True, return_diagnostics=True)[3]["grad_pos_count"]
        )
    found["own positives"] = int(targets[own].sum())
    gathered = fullrank.gather_rows(logits[own], targets[own])
    found["gathered"] = error_of(lambda: fullrank.SmoothAPLoss(1)(*gathered))
    found["kept"] = float(fullrank.SmoothAPLoss(1, temperature=0.3, gather_distributed=False)(*gathered))
    found["pool"] = float(fullrank.SmoothAPLoss(1, temperature=0.3)(logits[own], targets[own]))
    bad = targets[own] if rank == 0 else targets[own][:3]
    found["bad"] = error_of(lambda: fullrank.SmoothAPLoss(1)(logits[own], bad))
    return found


def theirs() -> Any:
    return pytest.importorskip("imbalanced_losses")


def test_the_old_numbers() -> None:
    """What the block prints is what the defaults of the other package give."""
    ((code, printed),) = pages.printing_blocks(IMBALANCED)
    losses = [getattr(theirs(), name)(3) for name in ("SmoothAPLoss", "RecallAtQuantileLoss", "PAUCAtBudgetLoss")]
    names = pages.run_block(code, {})
    found = [float(loss(names["logits"], names["targets"])) for loss in losses]
    assert found == pytest.approx([float(number) for number in printed.split()], abs=1e-6)


@line(IMBALANCED, "gradient under DDP on W ranks")
def share_of_the_gradient() -> None:
    theirs()
    for found in on_two_ranks(imbalanced_on_a_rank):
        assert found["fullrank share"] == pytest.approx(1, rel=1e-12)
        assert found["imbalanced_losses share"] == pytest.approx(0.5, rel=1e-6)


@line(IMBALANCED, "gathering by hand before the loss")
def gathered_rows() -> None:
    theirs()
    for found in on_two_ranks(imbalanced_on_a_rank):
        assert found["gathered"][0] == "ValueError"
        assert found["kept"] == pytest.approx(found["pool"], rel=1e-12)


@line(IMBALANCED, "focal losses on several ranks")
def focal_elements() -> None:
    theirs()
    for found in on_two_ranks(imbalanced_on_a_rank):
        assert (found["fullrank elements"], found["imbalanced_losses elements"]) == (20, 40)


@line(IMBALANCED, "half precision")
def half_precision() -> None:
    logits, targets = make_rows()
    for module, dtype in ((fullrank, torch.float32), (theirs(), torch.bfloat16)):
        half = logits.detach().bfloat16().requires_grad_()
        loss = module.SmoothAPLoss(3, queue_size=0, temperature=0.3)(half, targets)
        assert loss.dtype == dtype
        assert gradient(loss, half).dtype == torch.bfloat16


@line(IMBALANCED, "`max_pool_size` on several ranks")
def subsets() -> None:
    theirs()
    first, second = on_two_ranks(imbalanced_on_a_rank)
    assert first["fullrank subset"] == second["fullrank subset"]
    assert first["imbalanced_losses subset"] != second["imbalanced_losses subset"]


@line(IMBALANCED, "bad input on one rank")
def bad_input() -> None:
    theirs()
    first, second = (found["bad"] for found in on_two_ranks(imbalanced_on_a_rank))
    assert first == second
    assert first[0] == "ValueError"
    assert "rank 1" in first[1]


@line(IMBALANCED, "targets out of range, several classes")
def class_range() -> None:
    logits, targets = make_rows()
    targets[0] = 7
    theirs().SmoothAPLoss(3, queue_size=0)(logits, targets)
    with pytest.raises(ValueError, match="7"):
        theirs().RecallAtQuantileLoss(3, queue_size=0)(logits, targets)
    for loss in (fullrank.SmoothAPLoss, fullrank.RecallAtQuantileLoss, fullrank.PAUCAtBudgetLoss):
        with pytest.raises(ValueError, match="targets"):
            loss(3)(logits, targets)
    fullrank.SmoothAPLoss(3, validate_args=False)(logits, targets)


@line(IMBALANCED, "targets outside [0, 1], `SigmoidFocalLoss`")
def focal_range() -> None:
    logits, _ = make_rows()
    theirs().SigmoidFocalLoss()(logits, logits.detach())
    with pytest.raises(ValueError, match="targets"):
        fullrank.SigmoidFocalLoss()(logits, logits.detach())
    fullrank.SigmoidFocalLoss(validate_args=False)(logits, logits.detach())


def with_a_queue(module: Any, **options: Any) -> Any:
    """Return a loss that has seen one batch."""
    loss = module.SmoothAPLoss(3, queue_size=64, temperature=0.3, **options)
    loss(*make_rows(seed=1))
    return loss


@line(IMBALANCED, "the queue in eval mode")
def queue_in_eval() -> None:
    rows = make_rows()
    alone = fullrank.SmoothAPLoss(3, temperature=0.3)(*rows)
    assert torch.equal(with_a_queue(fullrank).eval()(*rows), alone)
    pool = with_a_queue(fullrank, queue_in_eval=True).eval()(*rows)
    torch.testing.assert_close(with_a_queue(theirs()).double().eval()(*rows), pool, rtol=1e-6, atol=0)
    assert not torch.isclose(pool, alone, rtol=1e-3)


@line(IMBALANCED, "ignored and non-finite rows")
def queued_rows() -> None:
    logits, targets = make_rows()
    targets[:5] = -100
    with torch.no_grad():
        logits[5] = torch.nan
    stored = []
    for module in (fullrank, theirs()):
        loss = module.SmoothAPLoss(3, queue_size=64, temperature=0.3)
        loss(logits, targets)
        state = loss.state_dict()
        stored.append(len(loss.queue) if module is fullrank else int(state["_queue._q_ptr"]))
    assert stored == [34, 40]


@line(IMBALANCED, "queue in checkpoints")
def queue_keys() -> None:
    state = with_a_queue(theirs()).state_dict()
    assert all(key.startswith("_queue._q_") for key in state)
    assert "queue._extra_state" in with_a_queue(fullrank).state_dict()
    loaded = with_a_queue(fullrank)
    loaded.load_state_dict(state, strict=False)


# By the cell of the page: losses, an argument, its default there and here.
RANKING = ("SmoothAPLoss", "RecallAtQuantileLoss", "PAUCAtBudgetLoss")
DEFAULTS = {
    "`temperature` of `SmoothAPLoss` and `RecallAtQuantileLoss`": [(RANKING[:2], "temperature", 0.01, None)],
    "`surrogate` of `PAUCAtBudgetLoss`": [(RANKING[2:], "surrogate", "trapezoid", "dro")],
    "`num_classes` of the ranking losses": [(RANKING, "num_classes", inspect.Parameter.empty, 1)],
    "`queue_size` of the ranking losses": [(RANKING, "queue_size", 1024, 0)],
    "`tau_scale` of `PAUCAtBudgetLoss`": [(RANKING[2:], "tau_scale", "iqr", None)],
    "`temp_start`, `temp_end` of `LossWarmupWrapper`": [
        (("LossWarmupWrapper",), "temp_start", 0.05, None),
        (("LossWarmupWrapper",), "temp_end", 0.005, None),
    ],
}


def defaults_of(cell: str) -> None:
    for names, argument, *expected in DEFAULTS[cell]:
        for name in names:
            losses = [getattr(module, name) for module in (theirs(), fullrank)]
            assert [inspect.signature(loss).parameters[argument].default for loss in losses] == expected


for cell in DEFAULTS:
    line(IMBALANCED, cell)(functools.partial(defaults_of, cell))


@line(IMBALANCED, "`alpha` above 0 in `PAUCAtBudgetLoss`")
def alpha_above_zero() -> None:
    theirs().PAUCAtBudgetLoss(1, alpha=0.1, beta=0.2)
    with pytest.raises(ValueError, match="alpha"):
        fullrank.PAUCAtBudgetLoss(1, alpha=0.1, beta=0.2)
    for surrogate in ("pairwise", "trapezoid"):
        fullrank.PAUCAtBudgetLoss(1, alpha=0.1, beta=0.2, surrogate=surrogate)


@line(IMBALANCED, "thresholds of `RecallAtQuantileLoss` and of the trapezoid")
def thresholds() -> None:
    logits, targets = make_rows()
    for name, options in (
        ("RecallAtQuantileLoss", {"quantile": 0.2, "temperature": 0.3}),
        ("PAUCAtBudgetLoss", {"beta": 0.4, "surrogate": "trapezoid"}),
    ):
        old = gradient(getattr(theirs(), name)(3, queue_size=0, **options)(logits, targets), logits)
        ours = getattr(fullrank, name)
        detached = gradient(ours(3, threshold_gradient=False, **options)(logits, targets), logits)
        torch.testing.assert_close(detached, old, **CLOSE)
        assert not torch.allclose(gradient(ours(3, **options)(logits, targets), logits), old, rtol=1e-3)


@line(IMBALANCED, "`LossWarmupWrapper` without a length, a temperature or a weight")
def empty_warmup() -> None:
    logits, targets = make_rows()
    wrapped = theirs().LossWarmupWrapper(nn.CrossEntropyLoss(), theirs().SmoothAPLoss(3, queue_size=0))
    wrapped.on_train_epoch_start(0)
    assert not wrapped.in_warmup
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the schedule that is not called
        wrapped(logits, targets)
    with pytest.raises(ValueError, match="warmup"):
        fullrank.LossWarmupWrapper(nn.CrossEntropyLoss(), fullrank.SmoothAPLoss(3))


@line(IMBALANCED, "decay of the temperature when a wrapper without saved state starts at a later step")
def decay_after_a_resume() -> None:
    temperatures = {"temp_start": 0.8, "temp_end": 0.1, "temp_decay_steps": 30}
    halfway = pytest.approx(0.8 * 0.125 ** (20 / 30), rel=1e-12)
    for module, of_steps, at_once in ((fullrank, halfway, 0.8), (theirs(), 0.8, halfway)):
        for lengths, expected, first in (({"warmup_steps": 10}, of_steps, 10), ({}, at_once, 0)):
            losses = nn.CrossEntropyLoss(), module.SmoothAPLoss(3, queue_size=0, temperature=0.3)
            late = module.LossWarmupWrapper(*losses, **temperatures, **lengths)
            trained, loaded = copy.deepcopy(late), copy.deepcopy(late)
            late.on_train_batch_start(first + 20)
            assert late.current_temperature == expected
            trained.on_train_batch_start(first)
            loaded.load_state_dict(trained.state_dict())
            loaded.on_train_batch_start(first + 20)
            assert loaded.current_temperature == halfway


@line(IMBALANCED, "temperature in checkpoints")
def saved_temperature() -> None:
    for module, kept in ((fullrank, 0.05), (theirs(), 0.3)):
        loss, other = (module.SmoothAPLoss(1, queue_size=0, temperature=0.3) for _ in range(2))
        loss.temperature = 0.05
        other.load_state_dict(loss.state_dict())
        assert other.temperature == kept


@line(IMBALANCED, "`grad_pos_count` of the pAUC diagnostics")
def positives_of_all_ranks() -> None:
    theirs()
    ranks = on_two_ranks(imbalanced_on_a_rank)
    own = [found["own positives"] for found in ranks]
    assert [found["imbalanced_losses positives"] for found in ranks] == own
    assert [found["fullrank positives"] for found in ranks] == [sum(own)] * 2


@line(IMBALANCED, "`LossWarmupWrapper(gather_distributed=False)` or `True`")
def gather_of_both() -> None:
    settings = []
    for module in (fullrank, theirs()):
        first, main = module.SoftmaxFocalLoss(gamma=0), module.SmoothAPLoss(3, queue_size=0)
        module.LossWarmupWrapper(first, main, warmup_steps=3, gather_distributed=False)
        settings.append((first.gather_distributed, main.gather_distributed))
    assert settings == [(False, False), (None, False)]


# xorl: its rules are written out

XORL = "migrating/xorl.md"


def language_batches(empty: bool = False) -> list[dict[str, Tensor]]:
    """Return micro-batches of uneven numbers of tokens."""
    return [make_batch(0, index, empty and index == 1) for index in range(3)]


def accumulated(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    for step, batch in fullrank.accumulate(model, batches, fullrank.count_valid_tokens):
        step.backward(sum_loss(model, batch))
    return flat(model)


def xorl_on_a_rank(rank: int) -> dict[str, float]:
    """Return errors of gradients under FSDP2 on two ranks."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    batches = [[make_batch(r, index) for index in range(2)] for r in range(2)]
    right = gradient_of_one_process(Model(torch.float64), [*batches[0], *batches[1]]).gradient
    found = {}
    for factor in (None, 1.0):
        model = fully_shard(Model(torch.float64), mesh=mesh)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
            model.set_force_sum_reduction_for_comms(True)
        for step, batch in fullrank.accumulate(model, batches[rank], fullrank.count_valid_tokens):
            number = (batch["labels"][:, 1:] != -100).sum()
            step.backward(sum_loss(model, batch) / number, num_items=number)
        found[f"divide factor {factor}"] = error(flat(model), right)
    return found


def experts_on_a_rank(rank: int) -> dict[str, float]:
    """Return errors of the gradients of two experts with two copies each: ours, and with ``ep_size`` as a factor."""
    from torch.distributed.fsdp import fully_shard

    batches = [[make_batch(r, index) for index in range(2)] for r in range(4)]
    everything = [batch for part in batches for batch in part]
    reference = Experts(torch.float64)
    gradient_of_one_process(reference, everything)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    model = Experts(torch.float64, mesh["experts"].get_group())
    own = reference.experts[str(mesh["experts"].get_local_rank())].weight.grad.flatten()
    (expert,) = model.experts.values()
    fully_shard(expert, mesh=mesh["data"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    failure = error_of(lambda: next(iter(fullrank.accumulate(model, batches[rank], fullrank.count_valid_tokens))))
    found = {"raises": float("sum_gradients_" in failure[1])}
    fullrank.sum_gradients_(model)
    for step, batch in fullrank.accumulate(model, batches[rank], fullrank.count_valid_tokens):
        step.backward(sum_loss(model, batch))
    found |= {"experts": error(flat(expert), own), "dense": error(flat(model.outer), flat(reference.outer))}
    # The rule before a160a7d: losses divided by the tokens of all ranks, SUM, and ep_size as the factor of experts.
    model.zero_grad()
    expert.set_gradient_divide_factor(2.0)
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in everything)
    for batch in batches[rank]:
        (sum_loss(model, batch) / total).backward()
    found["ep_size"] = error(flat(expert), own / 2)
    return found


@line(
    XORL,
    "`gradient_accumulate_loss(mean, n, N, group)`, then `backward()`",
    "`set_gradient_divide_factor(1.0)` on every FSDP module",
)
def means_with_their_number() -> None:
    for found in on_two_ranks(xorl_on_a_rank):
        assert max(found["divide factor None"], found["divide factor 1.0"]) <= 1e-12


@line(XORL, "divide factor `ep_size` on experts (before `a160a7d`)")
def factor_on_experts() -> None:
    """The control, FSDP2 itself with the factor, ends with half of the gradient."""
    for found in get_pool(4)(experts_on_a_rank):
        assert found["raises"]
        assert max(found["experts"], found["dense"]) <= 1e-12
        assert found["ep_size"] <= 1e-12


@line(XORL, "`count_valid_tokens(micro_batches, group)`", "`target_tokens`, else `labels`, both shifted")
def shifted_labels() -> None:
    labels = torch.tensor([[4, -100, 2], [1, 3, -100]])
    batches = [{"labels": labels}, {"labels": labels, "target_tokens": labels[:1]}]
    by_their_rule = sum(int((b.get("target_tokens", b["labels"]) != -100).sum()) for b in batches)
    keys = ("target_tokens", "labels")
    assert fullrank.count_valid_tokens(batches[:1], shift=False) == 4
    assert fullrank.count_valid_tokens(batches, key=keys, shift=False) == by_their_rule == 6
    assert fullrank.count_valid_tokens(batches, key=keys, shift=(False, True)) == 2 + 2
    assert fullrank.count_valid_tokens(batches, key=keys) != by_their_rule  # the control: another shift


@line(XORL, "`cp_fsdp_mode`, `sp_grad_sync_group`")
def four_modes() -> None:
    expected = {"all": None, "ulysses_only": "ring", "ring_only": "ulysses", "none": "both"}
    groups = {"ring": "ring", "ulysses": "ulysses", "unified": "both"}
    assert {mode: fullrank.sequence_sync_group(mode, **groups) for mode in expected} == expected


def sequence_on_a_rank(rank: int) -> tuple[float, float]:
    """Return errors after two calls of a server: added in ``finish``, and added in place after each call."""
    parts = [[make_batch(r, call) for call in range(2)] for r in range(2)]
    right = gradient_of_one_process(Model(torch.float64), [*parts[0], *parts[1]]).gradient
    numbers = [[(b["labels"][:, 1:] != -100).sum() for b in part] for part in parts]
    model, other = Model(torch.float64), Model(torch.float64)
    deferred = fullrank.DeferredMean(model, dist.group.WORLD)
    for batch, number in zip(parts[rank], numbers[rank]):
        deferred.backward(sum_loss(model, batch), number)
        sum_loss(other, batch).backward()
        for parameter in other.parameters():
            dist.all_reduce(parameter.grad)
    deferred.finish([dist.group.WORLD])
    # By that rule the first call has been added twice.
    total = sum(int(number) for part in numbers for number in part)
    first = gradient_of_one_process(Model(torch.float64), [parts[0][0], parts[1][0]], total).gradient
    return error(flat(model), right), error(flat(other) / total, right + first)


@line(XORL, "`sync_sp_gradients(model, group)` after each call of a server")
def sums_of_sums() -> None:
    for ours, of_their_rule in on_two_ranks(sequence_on_a_rank):
        assert max(ours, of_their_rule) <= 1e-12


@line(XORL, "tokens counted per `model_id`, division in the optimizer step")
def adapters() -> None:
    base = Model(torch.float64)
    adapters = [nn.Linear(7, 7, bias=False, dtype=torch.float64) for _ in range(2)]
    base.requires_grad_(False)
    batches = language_batches()
    deferred = [fullrank.DeferredMean(adapter) for adapter in adapters]

    def loss_of(adapter: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return fullrank.causal_lm_loss(adapter(base(batch["tokens"])), batch["labels"], num_items=1)

    for which, index in ((0, 0), (1, 1), (0, 2)):  # the clients' calls are mixed
        number = (batches[index]["labels"][:, 1:] != -100).sum()
        deferred[which].backward(loss_of(adapters[which], batches[index]), number)
    for which, calls in ((0, (0, 2)), (1, (1,))):
        deferred[which].finish()
        with pytest.raises(RuntimeError, match="a backward since the last finish"):
            deferred[which].finish()
        total = sum(int((batches[index]["labels"][:, 1:] != -100).sum()) for index in calls)
        loss = torch.stack([loss_of(adapters[which], batches[index]) for index in calls]).sum() / total
        torch.testing.assert_close(adapters[which].weight.grad, gradient(loss, adapters[which].weight), **CLOSE)


def stage_on_a_rank(rank: int) -> tuple[float, float]:
    """Return our norm of two stages, and the larger of their own norms."""
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 0.0]) if rank == 0 else torch.tensor([0.0, 4.0])
    largest = weight.grad.norm()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(fullrank.clip_grad_norm_([weight], 1.0, across=dist.group.WORLD)), float(largest)


@line(XORL, "`clip_gradients(..., pp_group=)`")
def norm_of_stages() -> None:
    assert on_two_ranks(stage_on_a_rank) == [(5.0, 4.0)] * 2


# KempnerForge: its rules are written out

FORGE = "migrating/kempnerforge.md"


def usual(model: nn.Module, batches: list[dict[str, Tensor]], **keywords: int) -> Tensor:
    """Return the gradient of the loop with ``loss / n``."""
    for index, batch in enumerate(batches):
        with fullrank.maybe_no_sync(model, micro_step=index, **keywords):
            loss = fullrank.causal_lm_loss(model(batch["tokens"]), batch["labels"])
            (loss / len(batches)).backward()
    return flat(model)


def even_batches() -> list[dict[str, Tensor]]:
    """Return micro-batches in which every label counts."""
    return [{"tokens": batch["tokens"], "labels": batch["tokens"]} for batch in language_batches()]


def switches_on_a_rank(rank: int) -> list[bool]:
    """Return whether DDP would reduce: in the first and the last micro-step, and after each."""
    model = DistributedDataParallel(Model(torch.float64))
    found = []
    for index in range(2):
        with fullrank.maybe_no_sync(model, index, grad_accum_steps=2):
            found.append(model.require_backward_grad_sync)
        found.append(model.require_backward_grad_sync)
    return found


@line(FORGE, "`maybe_no_sync(model, micro_step, n)`", "`maybe_no_sync(model, micro_step=i, grad_accum_steps=n)`")
def the_loop_as_it_is() -> None:
    for names in ({"grad_accum_steps": 3}, {"num_micro_steps": 3}):
        expected = gradient_of_one_process(Model(torch.float64), even_batches()).gradient
        torch.testing.assert_close(usual(Model(torch.float64), even_batches(), **names), expected, **CLOSE)
    assert on_two_ranks(switches_on_a_rank) == [[False, True, True, True]] * 2


@line(FORGE, "`clip_grad_norm_(model, max_norm)`", "`clip_grad_norm_(model, max_norm, foreach)`")
def clipping() -> None:
    model, other = Model(torch.float64), Model(torch.float64)
    for one in (model, other):
        gradient_of_one_process(one, language_batches())
    norm = fullrank.clip_grad_norm_(model, 0.1, foreach=True)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1, foreach=True), **CLOSE)
    torch.testing.assert_close(flat(model), flat(other), **CLOSE)
    with pytest.raises(TypeError, match="norm_type"):
        fullrank.clip_grad_norm_(model, 0.1, True)


@line(FORGE, "`(loss_fn(logits, labels) / n).backward()`")
def means_of_means() -> None:
    batches = language_batches()
    expected = gradient_of_one_process(Model(torch.float64), batches).gradient
    torch.testing.assert_close(accumulated(Model(torch.float64), batches), expected, **CLOSE)
    assert error(usual(Model(torch.float64), batches, grad_accum_steps=3), expected) > 0.05  # the control


@line(FORGE, "`loss + weight * aux_loss`")
def auxiliary_losses() -> None:
    model, batches = Model(torch.float64), language_batches()
    numbers = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]

    def auxiliary(batch: dict[str, Tensor]) -> Tensor:
        return model(batch["tokens"]).square().mean()

    for (step, batch), number in zip(fullrank.accumulate(model, batches, fullrank.count_valid_tokens), numbers):
        step.backward(sum_loss(model, batch) + 0.1 * auxiliary(batch) * number)
    found = flat(model)
    model.zero_grad()
    total = sum(numbers)
    mean = sum(sum_loss(model, batch) for batch in batches) / total
    weighted = sum(number * auxiliary(batch) for number, batch in zip(numbers, batches)) / total
    (mean + 0.1 * weighted).backward()
    torch.testing.assert_close(found, flat(model), **CLOSE)


@line(FORGE, "`total_loss / n` with `loss.item()` in each micro-step")
def reported_losses() -> None:
    model, batches = Model(torch.float64), language_batches()
    expected = gradient_of_one_process(Model(torch.float64), batches).loss
    for step, batch in fullrank.accumulate(model, batches, fullrank.count_valid_tokens):
        step.backward(sum_loss(model, batch))
    torch.testing.assert_close(step.mean_loss().double(), expected, rtol=1e-12, atol=0)
    means = [fullrank.causal_lm_loss(model(batch["tokens"]), batch["labels"]).item() for batch in batches]
    assert abs(sum(means) / len(means) / float(expected) - 1) > 1e-3  # the control


def schedule_on_a_rank(rank: int) -> list[float]:
    """Return the errors of this stage's gradient: uneven by our recipe, and the mean twice divided."""
    from torch.distributed import pipelining

    batches = language_batches()
    tokens, labels = (torch.cat([batch[key] for batch in batches]) for key in ("tokens", "labels"))
    total = fullrank.count_valid_tokens(batches) / 2  # both stages count the same labels
    losses = {
        "sum": lambda logits, target: fullrank.causal_lm_loss(logits, target, num_items=total),
        "mean": fullrank.causal_lm_loss,
        "mean / n": lambda logits, target: fullrank.causal_lm_loss(logits, target) / 3,
    }
    errors = []
    for name, targets, scale in (
        ("sum", labels, False),
        ("mean", labels, True),
        ("mean", tokens, True),
        ("mean / n", tokens, True),
    ):
        full, reference = Model(torch.float64), Model(torch.float64)
        part = nn.Sequential(full.embed, full.up) if rank == 0 else nn.Sequential(nn.Tanh(), full.down)
        stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = pipelining.ScheduleGPipe(stage, 3, loss_fn=losses[name], scale_grads=scale)
        schedule.step(*[tokens] if rank == 0 else [], target=targets if rank == 1 else None)
        whole = [{"tokens": tokens, "labels": targets}]
        gradient_of_one_process(reference, whole)
        own = [reference.embed, reference.up] if rank == 0 else [reference.down]
        errors.append(error(flat(part), torch.cat([flat(layer) for layer in own])))
    return errors


@line(FORGE, "schedule with `n_microbatches=n` and a mean as its loss")
def pipelines() -> None:
    for ours, uneven, even, twice in on_two_ranks(schedule_on_a_rank):
        assert max(ours, even) <= 1e-12
        assert uneven > 0.01
        assert twice == pytest.approx(2 / 3, rel=1e-9)  # a third of the gradient is left


@line(FORGE, "`clip_grad_norm_(model, max_norm)` on each stage")
def clipped_stages() -> None:
    norm_of_stages()


# transformers

HUGGING = "migrating/transformers.md"


def both_losses(**options: Any) -> tuple[Tensor, Tensor]:
    """Return the losses of the same call, ours and theirs."""
    theirs = installed("transformers.loss.loss_utils").ForCausalLMLoss
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, generator=generator).to(options.pop("dtype", torch.float32))
    labels = torch.randint(0, 11, (3, 7), generator=generator)
    labels[0, 3:] = options.get("ignore_index", -100)
    call = {"logits": logits, "labels": labels, "vocab_size": 11} | options
    ours, other = (loss(**call) for loss in (fullrank.causal_lm_loss, theirs))
    torch.testing.assert_close(ours.float(), other.float(), rtol=1e-6, atol=0, equal_nan=False)
    return ours, other


@line(
    HUGGING,
    "`(logits, labels, vocab_size)`",
    "`num_items_in_batch=n`",
    "`num_items_in_batch=None`",
)
def same_losses() -> None:
    for number in (None, 9, torch.tensor(9)):
        both_losses(num_items_in_batch=number)
    with pytest.raises(ValueError, match="vocab_size"):
        fullrank.causal_lm_loss(torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64), 5)


@line(HUGGING, "no valid label")
def no_label() -> None:
    theirs = installed("transformers.loss.loss_utils").ForCausalLMLoss
    logits, labels = torch.zeros(1, 3, 4, requires_grad=True), torch.full((1, 3), -100)
    assert theirs(logits, labels, 4).isnan()
    loss = fullrank.causal_lm_loss(logits, labels, 4)
    assert loss == 0
    assert not gradient(loss, logits).any()


@line(HUGGING, "float64 logits", "half-precision logits")
def dtypes() -> None:
    for dtype, ours in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        assert [loss.dtype for loss in both_losses(dtype=dtype)] == [ours, torch.float32]


@line(HUGGING, "`ignore_index=`", "`shift_labels=`")
def more_keywords() -> None:
    both_losses(ignore_index=0)
    both_losses(labels=None, shift_labels=torch.arange(21).reshape(3, 7) % 11)


@line(HUGGING, "labels on another device")
def other_device() -> None:
    with pytest.raises(ValueError, match="labels: expected a tensor on cpu"):
        fullrank.causal_lm_loss(torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64, device="meta"))


@line(HUGGING, "further keywords")
def unknown_keywords() -> None:
    both_losses(output_router_logits=True)
    with pytest.raises(TypeError, match="Use num_items_in_batch"):
        both_losses(num_items_in_batches=9)


@line(HUGGING, "a label outside the vocabulary")
def bad_label() -> None:
    theirs = installed("transformers.loss.loss_utils").ForCausalLMLoss
    logits, labels = torch.zeros(1, 3, 4), torch.tensor([[0, 9, 1]])
    with pytest.raises(IndexError):
        theirs(logits, labels, 4)
    with pytest.raises(ValueError, match="got 9"):
        fullrank.causal_lm_loss(logits, labels)
    with pytest.raises(IndexError):
        fullrank.causal_lm_loss(logits, labels, validate_args=False)


@line(HUGGING, "rows of several documents")
def documents() -> None:
    logits, labels = torch.randn(1, 6, 5), torch.tensor([[1, 2, 3, 4, 0, 1]])
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    apart = [fullrank.causal_lm_loss(logits[:, part], labels[:, part], num_items=1) for part in (slice(3), slice(3, 6))]
    together = fullrank.causal_lm_loss(logits, labels, num_items=1, document_ids=ids)
    torch.testing.assert_close(together, apart[0] + apart[1])


# pytorch-metric-learning

METRIC = "migrating/metric-learning.md"


def block_names(page: str) -> dict[str, Any]:
    """Return what the block of a page defines."""
    with torch.random.fork_rng(devices=[]):
        return pages.run_block(*pages.blocks(page), {})


@line(METRIC, "`SmoothAPLoss(temperature=0.01)(embeddings, labels)`")
def the_query_itself() -> None:
    peer = installed("pytorch_metric_learning.losses")
    names = block_names(METRIC)
    found = peer.SmoothAPLoss(temperature=0.01)(names["embeddings"], names["labels"])
    assert float(found) == pytest.approx(float(names["theirs"]), rel=1e-5)
    assert float(names["ours"]) > float(found) + 0.1


@line(METRIC, "rows sorted by label, as many of each as there are labels")
def any_labels() -> None:
    peer = installed("pytorch_metric_learning.losses").SmoothAPLoss()
    square = torch.arange(4).repeat_interleave(4)
    for labels in (square.reshape(4, 4).T.flatten(), torch.arange(3).repeat_interleave(5)):
        assert float(peer(torch.eye(4)[labels], labels)) > 0.1
        assert float(fullrank.RetrievalSmoothAPLoss()(torch.eye(4)[labels], labels)) < 1e-6
    with pytest.raises(ValueError, match="same number"):
        peer(torch.eye(4)[:3], torch.tensor([0, 0, 1]))
    fullrank.RetrievalSmoothAPLoss()(torch.eye(4)[:3], torch.tensor([0, 0, 1]))


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operator returns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        self.size = max([self.size, *(tensor.numel() for tensor in tensors)])
        return output


@line(METRIC, "a tensor of N x N x N numbers")
def memory() -> None:
    peer = installed("pytorch_metric_learning.losses").SmoothAPLoss()
    labels = torch.arange(8).repeat_interleave(8)
    embeddings = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    sizes = []
    for loss in (peer, fullrank.RetrievalSmoothAPLoss()):
        with Largest() as largest:
            loss(embeddings, labels)
        sizes.append(largest.size)
    assert sizes[0] == 64**3
    assert sizes[1] < 64**3 / 4


def metric_on_a_rank(rank: int) -> dict[str, float]:
    """Return values and gradients of two ways to gather, against one process."""
    from pytorch_metric_learning.losses import ContrastiveLoss
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

    generator = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(12, 4, dtype=torch.float64, generator=generator), torch.arange(12) % 3
    own = slice(0, 6) if rank == 0 else slice(6, 12)
    loss = ContrastiveLoss(pos_margin=0, neg_margin=1)

    def encoder() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Linear(4, 3, dtype=torch.float64)

    alone = encoder()
    whole = loss(alone(rows), labels)
    whole.backward()
    found = {}
    for name in ("wrapper", "gather", "retrieval"):
        model = encoder()
        wrapped = DistributedDataParallel(model)
        embeddings = wrapped(rows[own])
        if name == "wrapper":
            value = DistributedLossWrapper(loss)(embeddings, labels[own])
        elif name == "gather":
            gathered = fullrank.all_gather_with_grad(embeddings)
            value = loss(gathered, fullrank.all_gather_no_grad(labels[own]))
        else:
            uneven = slice(0, 5) if rank == 0 else slice(5, 12)
            value = fullrank.RetrievalSmoothAPLoss(temperature=0.1)(wrapped(rows[uneven]), labels[uneven])
        value.backward()
        if name == "retrieval":
            alone = encoder()
            whole = fullrank.losses.retrieval_smooth_ap(alone(rows), labels, temperature=0.1)
            whole.backward()
        found[f"{name} value"] = float(value / whole)
        found[f"{name} gradient"] = error(flat(model), flat(alone))
    return found


@line(METRIC, "`DistributedLossWrapper(loss)` around it", "`DistributedLossWrapper(loss)` around another loss")
def wrapped_losses() -> None:
    installed("pytorch_metric_learning.losses")
    for found in on_two_ranks(metric_on_a_rank):
        assert found["wrapper value"] == pytest.approx(2, rel=1e-6)
        assert found["gather value"] == pytest.approx(1, rel=1e-6)
        assert found["retrieval value"] == pytest.approx(1, rel=1e-12)
        assert max(found["wrapper gradient"], found["gather gradient"]) < 1e-6
        assert found["retrieval gradient"] < 1e-12


@line(METRIC, "a larger batch than memory holds", "`CrossBatchMemory(loss, ...)`")
def large_batches() -> None:
    rows, labels = torch.randn(20, 4, dtype=torch.float64), torch.arange(20) % 4
    model = nn.Linear(4, 3, dtype=torch.float64)
    loss_fn = fullrank.RetrievalSmoothAPLoss(temperature=0.1)
    batches = list(zip(rows.split(6), labels.split(6)))
    fullrank.pooled_backward(
        model,
        batches,
        forward=lambda batch: model(batch[0]),
        loss=lambda embeddings, parts: loss_fn(embeddings, torch.cat([part[1] for part in parts])),
    )
    found = flat(model)
    model.zero_grad()
    loss_fn(model(rows), labels).backward()
    torch.testing.assert_close(found, flat(model), rtol=1e-10, atol=1e-13)


# LibAUC, which is not installed: its rules are written out, and what only it does is a fact of its version 2.0.1

LIBAUC = "migrating/libauc.md"


def auc_rows() -> tuple[Tensor, Tensor]:
    """Return scores with gradient and targets, (N, 1)."""
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(40, 1, generator=generator) < 0.25).float()
    return torch.randn(40, 1, generator=generator).requires_grad_(), targets


@line(LIBAUC, "`APLoss(data_len=n)` with `SOAP`")
def average_precision() -> None:
    scores, targets = auc_rows()
    found = gradient(fullrank.SmoothAPLoss(num_classes=1)(scores, targets), scores)
    assert found[targets == 1].sum() < 0 < found[targets == 0].sum()


@line(LIBAUC, "`pAUC_DRO_Loss(data_len=n, Lambda=t)` with `SOPAs`")
def soft_budget() -> None:
    test_the_block_of_a_page(LIBAUC)


@line(LIBAUC, "`pAUC_CVaR_Loss(data_len=n, pos_len=p, beta=b)` with `SOPA`")
def hard_budget() -> None:
    scores, targets = auc_rows()
    found = gradient(fullrank.PAUCAtBudgetLoss(1, beta=0.2, surrogate="pairwise")(scores, targets), scores)
    moved = int((found[targets == 0] != 0).sum())
    assert 0 < moved <= 0.2 * int((targets == 0).sum()) + 1


@line(LIBAUC, "`AUCMLoss()` with `PESG`")
def soft_auroc() -> None:
    scores, targets = auc_rows()
    loss = fullrank.PAUCAtBudgetLoss(1, beta=1.0, surrogate="pairwise", tau_scale="iqr", temperature=0.1)
    value, _, _, stats = loss(scores, targets, return_per_class=True, return_diagnostics=True)
    pairs = (scores[targets == 1][:, None] - scores[targets == 0]) / stats["tau_eff"]
    torch.testing.assert_close(value, 1 - pairs.sigmoid().mean(), rtol=1e-5, atol=0)
    assert not list(loss.parameters())


@line(LIBAUC, "`CrossEntropyLoss()`", "`FocalLoss(alpha=a, gamma=g)`")
def focal() -> None:
    scores, targets = auc_rows()
    expected = F.binary_cross_entropy_with_logits(scores, targets)
    torch.testing.assert_close(fullrank.BCEWithLogitsLoss()(scores, targets), expected)
    weights = torch.where(targets == 0, 0.3, 0.7)
    each = fullrank.SigmoidFocalLoss(alpha=-1, gamma=2.0, reduction="none")(scores, targets)
    ours = fullrank.SigmoidFocalLoss(alpha=1 - 0.3, gamma=2.0)(scores, targets)
    torch.testing.assert_close(ours, (weights * each).mean())
    assert not torch.isclose(ours, weights.mean() * each.mean(), rtol=1e-4)  # what 2.0.1 returns


@line(LIBAUC, "`DualSampler`")
def no_positives() -> None:
    scores, targets = auc_rows()
    loss = fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.3)
    assert loss(scores, 0 * targets) == 0
    assert fullrank.SmoothAPLoss(1, temperature=0.3)(scores, targets) < loss(scores, targets)  # 40 more negatives


@line(LIBAUC, "`mAPLoss`, `MultiLabelpAUCLoss`")
def several_labels() -> None:
    scores, targets = (torch.cat([part, part.flip(0)], dim=1) for part in auc_rows())
    loss = fullrank.SmoothAPLoss(2, multi_hot=True, temperature=0.3)(scores, targets)
    columns = [fullrank.SmoothAPLoss(1, temperature=0.3)(scores[:, [c]], targets[:, c]) for c in range(2)]
    torch.testing.assert_close(loss, torch.stack(columns).mean())


@line(LIBAUC, "`y_pred` after a sigmoid")
def raw_logits() -> None:
    scores, targets = auc_rows()
    found = [fullrank.SmoothAPLoss(1)(s, targets) for s in (scores, 5 * scores + 3)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


# GradCache: its rule is written out

GRADCACHE = "migrating/gradcache.md"


def by_their_rule(model: nn.Module, parts: list[Any], loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Representations without a graph, the gradient of the loss at them, and one backward for each part."""
    with torch.no_grad():
        leaf = torch.cat([model(*part) for part in parts])
    leaf.requires_grad_()
    value = loss(leaf)
    cached = gradient(value, leaf).split([len(part[0]) for part in parts])
    for part, own in zip(parts, cached):
        (model(*part) * own).sum().backward()
    return value.detach()


@line(
    GRADCACHE,
    "`cache(inputs, ...)`",
    "`models=[query, passage]`",
    "`chunk_sizes=`",
    "`split_input_fn=`, `get_rep_fn=`",
    "`loss_fn(*reps, **kwargs)`",
)
def the_same_gradient() -> None:
    names = block_names(GRADCACHE)
    model, loss = names["model"], names["contrastive"]
    model.zero_grad()
    value = by_their_rule(model, names["micro_batches"], loss)
    torch.testing.assert_close(value, names["loss"], **CLOSE)
    torch.testing.assert_close(flat(model), torch.cat([part.flatten() for part in names["found"]]), **CLOSE)


@line(GRADCACHE, "`no_sync_except_last=True`, DDP")
def one_reduction() -> None:
    """Two micro-batches, one bucket of DDP, one reduction."""
    assert [reductions for *_, reductions in towers()] == [1, 1]


@line(GRADCACHE, "`fp16=True, scaler=scaler`")
def scaled() -> None:
    names = block_names(GRADCACHE)
    model, scaler = names["model"], torch.amp.GradScaler("cpu", init_scale=1024.0)
    model.zero_grad()
    forward, loss = (lambda batch: model(*batch)), names["contrastive"]
    fullrank.pooled_backward(model, names["micro_batches"], forward=forward, loss=loss, scaler=scaler)
    expected = torch.cat([part.flatten() for part in names["found"]])
    torch.testing.assert_close(flat(model) / 1024, expected, **CLOSE)


@line(GRADCACHE, "random state of each chunk")
def dropout_and_statistics() -> None:
    rows = [torch.randn(4, 3) for _ in range(3)]
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    fullrank.pooled_backward(model, rows, forward=model, loss=lambda scores, _: scores.square().mean())
    assert model[0].num_batches_tracked == 3
    noise = iter(range(100))

    def changing(batch: Tensor) -> Tensor:
        return model(batch) + next(noise)

    with pytest.raises(RuntimeError, match="check_replay"):
        fullrank.pooled_backward(model, rows, forward=changing, loss=lambda scores, _: scores.square().mean())


@line(GRADCACHE, "a loss with a parameter of its own, such as a temperature")
def learned_temperature() -> None:
    names = block_names(GRADCACHE)
    temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="scores"):
        fullrank.pooled_backward(
            names["model"],
            names["micro_batches"],
            forward=lambda batch: names["model"](*batch),
            loss=lambda scores, parts: names["contrastive"](scores * temperature),
        )


def towers_on_a_rank(rank: int, code: str) -> tuple[float, float, int]:
    """Return errors of the block's gradient and of half of it by the gather of own rows, and the reductions by DDP."""
    names: dict[str, Any] = {}
    exec(code.partition("\n\ntorch.manual_seed")[0], names)
    torch.manual_seed(0)
    queries, passages = torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)
    alone = names["Towers"]().double()
    own = slice(0, 6) if rank == 0 else slice(6, 12)
    parts = list(zip(queries[own].split(4), passages[own].split(4)))

    def whole(pairs: Tensor) -> Tensor:
        query, passage = pairs.unbind(dim=1)
        return F.cross_entropy(query @ passage.T, torch.arange(len(pairs)))

    def detached(pairs: Tensor) -> Tensor:
        gathered = [torch.empty_like(pairs) for _ in range(2)]
        dist.all_gather(gathered, pairs.detach())
        gathered[rank] = pairs
        return whole(torch.cat(gathered))

    model, other = names["Towers"]().double(), names["Towers"]().double()
    for one in (model, other):
        one.load_state_dict(alone.state_dict())
    whole(alone(queries, passages)).backward()
    wrapped = DistributedDataParallel(model)
    with CollectiveCounter() as counter:
        fullrank.pooled_backward(wrapped, parts, forward=lambda batch: wrapped(*batch), loss=names["contrastive"])
    reductions = counter.counts["allreduce_"] + counter.counts["allreduce_.default"]
    by_their_rule(other, parts, detached)
    found = flat(other)
    dist.all_reduce(found)  # DDP's sum and division
    return error(flat(model), flat(alone)), error(found / 2, flat(alone) / 2), reductions


@functools.cache
def towers() -> list[tuple[float, float, int]]:
    return get_pool(2)(towers_on_a_rank, *pages.blocks(GRADCACHE))


@line(GRADCACHE, "`DistributedContrastiveLoss`")
def half_of_the_gradient() -> None:
    for ours, half, _ in towers():
        assert max(ours, half) <= 1e-12


@pytest.mark.parametrize(("page", "cell"), CHECKS)
def test_a_line(page: str, cell: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        CHECKS[page, cell]()
