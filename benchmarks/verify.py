"""verify_step on training steps of every kind, on the device and the backend of this machine.

Usage: torchrun --nproc-per-node 2 benchmarks/verify.py [--device cuda] [--backend gloo] [--out FOLDER]

Every step is that of a user: the model in DDP or FSDP2, batches that differ in size, the last rank's the smallest. Its
gradients are compared with those of one process with the whole batch, in float64. ``by hand`` is the control: a gather
without gradient must be off. The last line compares the norm of ``clip_grad_norm_`` with that of the full gradients.
Writes verify.json; ends with 1 if a step is not exact, or the control is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from report import Record, Run, print_records
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fullrank
from fullrank.large import ShardedLoss
from fullrank.preflight.site import Site, open_site

COLUMNS, WORDS = 6, 11
Batch = dict[str, Tensor]
COUNTS = {name: partial(fullrank.count_valid_tokens, key=name) for name in ("next", "after")}


class Case(NamedTuple):
    """A step, and whether the parameters are sharded."""

    run: Callable[[nn.Module, Any], object]
    is_sharded: bool = False
    micro_batches: int = 0  # 0: one batch


class Rows(nn.Module):
    """Scores of rows, their embeddings, or logits of the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, COLUMNS), nn.Linear(COLUMNS, COLUMNS)
        self.score, self.head = nn.Linear(COLUMNS, 1), nn.Linear(COLUMNS, WORDS, bias=False)

    def forward(self, batch: Batch, head: str = "score") -> Any:
        """Return what ``head`` says."""
        if head in ("words", "hidden"):
            hidden = self.body(self.embed(batch["tokens"])).tanh()
            return self.head(hidden) if head == "words" else (hidden, self.head.weight.clone())
        rows = self.body(batch["rows"]).tanh()
        return self.score(rows)[:, 0] if head == "score" else rows


def _of_scores(make: Callable[[], nn.Module]) -> Case:
    def run(model: nn.Module, batch: Batch) -> Tensor:
        value: Tensor = loss(model(batch), batch["targets"])
        value.backward()
        return value

    loss = make()
    return Case(run)


def _of_embeddings(make: Callable[[], nn.Module], second: str) -> Case:
    def run(model: nn.Module, batch: Batch) -> Tensor:
        rows = model(batch, "rows")
        value: Tensor = loss(rows, batch["targets"] if second == "targets" else rows + batch["rows"])
        value.backward()
        return value

    loss = make()
    return Case(run)


def _by_hand(model: nn.Module, batch: Batch) -> None:
    """Gather without gradient, the own rows put back."""
    scores, targets = model(batch), batch["targets"]
    others = fullrank.all_gather_no_grad(scores)
    rows = fullrank.all_gather_no_grad(torch.full_like(targets, dist.get_rank()))
    pool = others.masked_scatter(rows == dist.get_rank(), scores)
    fullrank.SmoothAPLoss(1, temperature=0.3, gather_distributed=False)(
        pool, fullrank.all_gather_no_grad(targets)
    ).backward()


def _accumulated(model: nn.Module, batches: list[Batch]) -> None:
    for window, batch in fullrank.accumulate(model, batches, COUNTS):
        logits = model(batch, "words")
        terms = {name: fullrank.causal_lm_loss(logits, batch[name], reduction="sum") for name in COUNTS}
        window.backward(terms, weights={"next": 1.0, "after": 0.3})


def _without_logits(model: nn.Module, batches: list[Batch]) -> None:
    for window, batch in fullrank.accumulate(model, batches, COUNTS["next"]):
        hidden, weight = model(batch, "hidden")
        window.backward(fullrank.causal_lm_loss(hidden, batch["next"], weight=weight, reduction="sum"))


def _deferred(model: nn.Module, batches: list[Batch]) -> None:
    mean = fullrank.DeferredMean(model, dist.group.WORLD)
    mean.backward_window(
        batches,
        lambda batch: (
            fullrank.causal_lm_loss(model(batch, "words"), batch["next"], reduction="sum"),
            (batch["next"] != -100).sum(),
        ),
    )
    mean.finish()  # DDP has added the gradients of the processes


def _pooled(model: nn.Module, batches: list[Batch]) -> None:
    loss = fullrank.SmoothAPLoss(1, temperature=0.3)
    fullrank.pooled_backward(
        model,
        batches,
        forward=model,
        loss=lambda scores, all_batches: loss(scores, torch.cat([batch["targets"] for batch in all_batches])),
        group=dist.group.WORLD,
    )


def cases(device: torch.device) -> dict[str, Case]:
    """Return the steps by name."""

    def margin(block: fullrank.Block) -> Tensor:
        return (block.scores - block.scores.gather(1, block.positives[:, None]) + 0.5).clamp_min(0).mean(1)

    queue = {"queue_size": 16}
    scores: dict[str, Callable[[], nn.Module]] = {
        "SmoothAP, queue": lambda: fullrank.SmoothAPLoss(1, temperature=0.3, **queue),
        "recall": lambda: fullrank.RecallAtQuantileLoss(1, 0.3),
        "pAUC, queue": lambda: fullrank.PAUCAtBudgetLoss(1, **queue),
        "cross-entropy + SmoothAP": lambda: fullrank.CombinedLoss(
            {"ce": fullrank.BCEWithLogitsLoss(class_weight="balanced"), "ap": fullrank.SmoothAPLoss(1)}
        ),
        "SmoothAP, sharded": lambda: ShardedLoss(fullrank.SmoothAPLoss(1, temperature=0.3)),
    }
    rows: dict[str, tuple[Callable[[], nn.Module], str]] = {
        "InfoNCE both ways, queue": (lambda: fullrank.InfoNCELoss(0.1, symmetric=True, **queue), "keys"),
        "SigLIP": (lambda: fullrank.SigLIPLoss(0.1), "keys"),
        "RowLoss": (lambda: fullrank.RowLoss(margin, temperature=0.5), "keys"),
        "SupCon": (lambda: fullrank.SupConLoss(0.1), "targets"),
        "retrieval": (lambda: fullrank.RetrievalSmoothAPLoss(0.5), "targets"),
    }
    return {
        "by hand": Case(_by_hand),
        **{name: _of_scores(lambda make=make: make().to(device)) for name, make in scores.items()},  # type: ignore[misc]
        **{name: _of_embeddings(lambda m=make: m().to(device), kind) for name, (make, kind) in rows.items()},  # type: ignore[misc]
        "accumulate": Case(_accumulated, micro_batches=3),
        "accumulate, without logits": Case(_without_logits, micro_batches=3),
        "DeferredMean": Case(_deferred, micro_batches=3),
        "pooled_backward": Case(_pooled, micro_batches=3),
        "FSDP2: accumulate": Case(_accumulated, True, 3),
        "FSDP2: accumulate, without logits": Case(_without_logits, True, 3),
        "FSDP2: pooled_backward": Case(_pooled, True, 3),
    }


def make_batch(site: Site, seed: int) -> Batch:
    """Return rows and sequences of this rank: fewer on the last, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(10 * seed + site.rank)
    number = 12 - 4 * (site.rank == site.world_size - 1)
    tokens = torch.randint(0, WORDS, (number, 7), generator=generator)
    rows = torch.randn(number, COLUMNS, generator=generator, dtype=torch.float64)
    made = {"rows": rows, "targets": (torch.arange(number) + site.rank) % 3 // 2, "tokens": tokens, "next": tokens}
    made["after"] = tokens.roll(-1, 1).masked_fill(torch.rand(number, 7, generator=generator) < 0.4, -100)
    return {name: tensor.to(site.device) for name, tensor in made.items()}


def build(site: Site) -> nn.Module:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return Rows().to(site.device, torch.float64)


def verify(site: Site, name: str, case: Case) -> Record:
    """Return what verify_step says of a step, in the first and the second call."""
    model = build(site)
    if case.is_sharded:
        fully_shard(model)
    else:  # no step uses all of the parameters
        model = DistributedDataParallel(model, find_unused_parameters=True)
    worst, verdict = 0.0, ""
    for seed in (0, 1):
        made = [make_batch(site, seed + 2 * number) for number in range(case.micro_batches or 1)]
        report = fullrank.verify_step(
            case.run, model, made if case.micro_batches else made[0], build_model=lambda: build(site)
        )
        verdict = verdict if verdict not in ("", "exact") else report.verdict
        worst = max([worst, *(error for _, error in report.gradients.values())])
        case.run(model, made if case.micro_batches else made[0])  # rows for the queue of the second
        model.zero_grad()
    return {"step": name, "verdict": verdict, "error": worst}


def clipped(site: Site) -> Record:
    """Return the relative error of the norm of sharded gradients, and of the clipped gradients."""
    model = fully_shard(build(site), mesh=init_device_mesh(site.device.type, (site.world_size,)))
    _accumulated(model, [make_batch(site, 0)])
    before, norm = _full(model), fullrank.clip_grad_norm_(model, 0.01)
    wanted = before * (0.01 / (before.norm() + 1e-6))  # the 1e-6 of torch
    error = max(float((norm / before.norm() - 1).abs()), float((_full(model) - wanted).norm() / wanted.norm()))
    return {"step": "FSDP2: clip_grad_norm_", "verdict": "exact" if error < site.tolerance else "off", "error": error}


def _full(model: nn.Module) -> Tensor:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([grad.full_tensor().flatten() for grad in grads])  # type: ignore[attr-defined]


def main() -> int:
    """Verify, print, write."""
    script = Run(__doc__, "verify")
    script.parser.add_argument("--device", help="cpu, cuda, ... (default: the accelerator if there is one)")
    script.parser.add_argument("--backend", help="backend of torch.distributed (default: that of the device)")
    options, found = script.start(), list[Record]()
    with open_site(options.backend, options.device, 60) as site:
        for name, case in cases(site.device).items():
            try:
                found.append(verify(site, name, case))
            except (RuntimeError, TypeError, ValueError) as error:
                found.append({"step": name, "verdict": " ".join(str(error).split())[:200], "error": math.nan})
            if site.rank == 0:
                script.write(backend=site.backend, device=str(site.device), world_size=site.world_size, steps=found)
        found.append(clipped(site))
        if site.rank == 0:
            print_records(f"{site.world_size} processes, {site.backend}, {site.device}", found)
            script.write(backend=site.backend, device=str(site.device), world_size=site.world_size, steps=found)
    must_be_exact = {record["step"]: record["step"] != "by hand" or site.world_size == 1 for record in found}
    return int(any((record["verdict"] == "exact") != must_be_exact[record["step"]] for record in found))


if __name__ == "__main__":
    sys.exit(main())
