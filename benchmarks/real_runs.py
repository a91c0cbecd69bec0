"""The runs of the benchmark on real data: losses by name, small networks trained with them, and their figures.

A method is named by its terms and, after a comma, by what is added: ``"weighted cross-entropy + SmoothAP"``,
``"cross-entropy, sampler"``, ``"SmoothAP, queue"``. ``"recall"`` is ``RecallAtQuantileLoss(surrogate="sigmoid")``, and
``"pAUC dro"`` and ``"pAUC pairwise"`` are ``PAUCAtBudgetLoss`` with that surrogate, all with the budget of the metric;
``"pAUC dro"`` is ``RecallAtQuantileLoss`` with its default surrogate too. ``"pAUC"`` has its defaults. Weighted
cross-entropy weighs each row by the inverse share of its class in the batches and divides by the sum of the weights, as
``torch.nn.CrossEntropyLoss(weight=)`` does. With ``"memory 0.9"`` the shares are those of the batches so far, each of
which counts 0.9 of the next. Terms have weight 1, and losses of fullrank their defaults. ``"hard-negative 0.2"`` is a
baseline that is written out here.
``"LibAUC AP"`` and ``"LibAUC pAUC"`` are ``APLoss`` with ``SOAP`` and ``pAUC_DRO_Loss`` with ``SOPAs`` of LibAUC 2, on
probabilities, with its defaults and half of each batch positive, as in its examples.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from real_data import Splits, split, thinned
from report import Run
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_curve
from torch import Tensor, nn

from fullrank import PAUCAtBudgetLoss, RecallAtQuantileLoss, SmoothAPLoss
from fullrank.data import BalancedBatchSampler
from fullrank.kernels.spread import spread_of

WIDTH, BATCH = 32, 256
SAMPLED, QUEUE = 16, 4_096  # positives in a batch of the sampler on thinned sets, elsewhere a quarter; rows of a queue
TREES = "boosted trees"
PEERS = {"LibAUC AP": ("APLoss", "soap.SOAP"), "LibAUC pAUC": ("pAUC_DRO_Loss", "sopa_s.SOPAs")}
METRICS = ("AP", "recall", "pAUC")  # recall in the top BUDGET of the rows, area to a false-positive rate of BUDGET
BUDGET = 0.05
CLASS_STEPS, CLASS_RATE, CLASS_BATCH, SMALLEST = 600, 1e-2, 512, 0.03
Loss = Callable[[Tensor, Tensor], Tensor]


class Job(NamedTuple):
    """One method on one set, at every rate and on every split; the fields are the key in the cache."""

    set: str
    method: str
    rates: tuple[float, ...]
    splits: tuple[int, ...]
    steps: tuple[int, ...]  # after which the figures are taken
    share: float | None = None  # of positives, to which training and validation rows are thinned
    batch: int = BATCH
    parts: int = 1  # of a batch, each with a loss of its own, whose mean counts: processes that do not pool
    budget: float = BUDGET  # of the losses and of the metrics


class Cache:
    """Results of finished runs, in memory and, if a file is given, as one line of JSON per run."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, Any] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                record = json.loads(line)
                self.known[record["key"]] = record["result"]

    @classmethod
    def start(cls, script: Run, missing: str | None = None) -> Cache:
        """Start ``script`` with the option ``--cache`` on one thread; exit if it needs what is ``missing``."""
        script.parser.add_argument("--cache", type=Path, help="file of finished runs, one line of JSON each")
        options = script.start()
        if missing is not None:
            script.parser.exit(0, f"{script.parser.prog}: {missing}\n")
        torch.set_num_threads(1)
        return cls(options.cache)

    def get(self, key: Sequence[Any], compute: Callable[[], Any]) -> Any:
        """Return the result of the run called ``key``, from the file or from ``compute``."""
        text = json.dumps(key)
        if text not in self.known:
            self.known[text] = compute()
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(json.dumps({"key": text, "result": self.known[text]}) + "\n")
        return self.known[text]


def make_model(features: int, seed: int, outputs: int = 1) -> nn.Sequential:
    """Return a multilayer perceptron with ``outputs`` logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden = [nn.Linear(features, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))


class Networks:
    """The networks of R rates and S splits, trained side by side: no weight is shared, so each goes its own way."""

    def __init__(self, features: int, splits: Sequence[int], rates: Sequence[float]) -> None:
        models = [make_model(features, seed) for seed in splits]
        stacked = [
            torch.stack([part.detach().mT if part.ndim == 2 else part.detach()[None] for part in parts])
            for parts in zip(*(model.parameters() for model in models), strict=True)
        ]  # of weights (S, in, out), of biases (S, 1, out)
        self.parameters = [[nn.Parameter(part.clone()) for part in stacked] for _ in rates]
        groups = [{"params": own, "lr": rate} for own, rate in zip(self.parameters, rates, strict=True)]
        self.optimizer = torch.optim.Adam(groups, fused=True)

    def __call__(self, features: Tensor) -> Tensor:
        """Return the logits (R, S, N) of features (S, N, F)."""
        first, a, second, b, third, c = (torch.stack(parts) for parts in zip(*self.parameters, strict=True))
        hidden = ((features @ first + a).relu() @ second + b).relu()
        return (hidden @ third + c)[..., 0]


def hard_negative(logits: Tensor, targets: Tensor, share: float) -> Tensor:
    """Return the sum over the columns of the mean cross-entropy of positives and the highest ``share`` of negatives."""
    positive = targets == 1
    negatives = logits.detach().masked_fill(positive, -torch.inf)
    count = ((~positive).sum(dim=0).double() * share - 1e-9).ceil().clamp_min(1).long()
    least = negatives.sort(dim=0, descending=True).values.gather(0, (count - 1)[None])
    counted = positive | (negatives >= least)  # ties too
    each = F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none")
    return ((each * counted).sum(dim=0) / counted.sum(dim=0)).sum()


def build(method: str, share: float, columns: int, budget: float = BUDGET) -> Loss:
    """Return the sum over the columns of the loss of each, to be called with logits and targets (N, columns).

    Args:
        method: its name, as above.
        share: of positives in the batches.
        columns: number of networks.
        budget: of the losses that have one.
    """
    names, _, added = method.partition(", ")
    options: dict[str, Any] = {"reduction": "sum", "multi_hot": True}

    memory = float(added.removeprefix("memory ")) if added.startswith("memory") else None
    counts = torch.zeros(2, columns)  # of negatives and positives

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        weight = torch.where(targets == 1, 1 / share, 1 / (1 - share)) if "weighted" in names else targets * 0.0 + 1
        if memory is not None:
            counts.mul_(memory).add_(torch.stack([(targets == 0).sum(dim=0), (targets == 1).sum(dim=0)]))
            weight = torch.where(targets == 1, 1 / counts[1].clamp_min(1e-9), 1 / counts[0].clamp_min(1e-9))
        each = F.binary_cross_entropy_with_logits(logits, targets.to(logits), weight, reduction="none")
        return (each.sum(dim=0) / weight.sum(dim=0)).sum()

    def in_units_of_spread(loss: Loss) -> Loss:
        # The automatic temperature is one for all classes. In units of its own spread each column has that of its own.
        def of_units(logits: Tensor, targets: Tensor) -> Tensor:
            spreads = [spread_of(column[None], None) for column in logits.detach().T]
            return loss(logits / torch.tensor(spreads), targets)

        return of_units

    def with_queue(make: Callable[..., Loss], **settings: Any) -> Loss:
        losses = [make(1, queue_size=QUEUE, **settings) for _ in range(columns)]
        return lambda logits, targets: sum(
            (own(logits[:, i], targets[:, i]) for i, own in enumerate(losses)), torch.zeros(())
        )

    ranking: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "SmoothAP": (SmoothAPLoss, {}),
        "recall": (RecallAtQuantileLoss, {"quantile": budget, "surrogate": "sigmoid"}),
        "pAUC": (PAUCAtBudgetLoss, {}),
        "pAUC dro": (PAUCAtBudgetLoss, {"beta": budget, "surrogate": "dro"}),
        "pAUC pairwise": (PAUCAtBudgetLoss, {"beta": budget, "surrogate": "pairwise"}),
    }
    terms: list[Loss] = []
    for name in names.split(" + "):
        kind, _, value = name.partition(" ")
        if kind == "hard-negative":
            terms.append(partial(hard_negative, share=float(value)))
        elif name not in ranking:
            terms.append(cross_entropy)
        else:
            make, settings = ranking[name]
            if added == "queue":
                terms.append(with_queue(make, **settings))
            elif make is PAUCAtBudgetLoss:
                terms.append(make(columns, **settings, **options))
            else:
                terms.append(in_units_of_spread(make(columns, temperature=make.spread_multiple, **settings, **options)))
    return lambda logits, targets: sum((term(logits, targets) for term in terms), torch.zeros(()))


def has_peer() -> bool:
    """Return whether LibAUC is installed; ``pip install --no-deps libauc==2.0.1`` is enough for its losses."""
    return importlib.util.find_spec("libauc") is not None


def build_peer(method: str, networks: Networks, rows: int, columns: int) -> Loss:
    """Return the sum of a loss of LibAUC over the columns, and give ``networks`` its optimizer.

    The loss is called with logits and the place of each positive in the training set, -1 for a negative, both
    (N, columns): LibAUC keeps a moving average for each positive.
    """
    name, (folder, optimizer) = PEERS[method][0], PEERS[method][1].split(".")
    auc = importlib.import_module("libauc.losses.auc")
    losses = [getattr(auc, name)(rows, device="cpu") for _ in range(columns)]
    make = getattr(importlib.import_module(f"libauc.optimizers.{folder}"), optimizer)
    groups = [{"params": group["params"], "lr": group["lr"]} for group in networks.optimizer.param_groups]
    networks.optimizer = make(groups, mode="adam", device="cpu")

    def loss(logits: Tensor, places: Tensor) -> Tensor:
        each = zip(losses, logits.sigmoid().T, places.T, strict=True)
        return sum(
            (own(scores, (index >= 0).long(), index.clamp_min(0)) for own, scores, index in each), torch.zeros(())
        )

    return loss


def batches(targets: Tensor, size: int, positives: int | None, seed: int) -> Iterator[Tensor]:
    """Yield the rows of batch after batch without end: shuffled, or with a number of positives in each."""
    generator = torch.Generator().manual_seed(seed)
    sampler = None if positives is None else BalancedBatchSampler(targets, size, positives, seed=seed)
    epoch = 0
    while True:
        if sampler is None:
            order = torch.randperm(len(targets), generator=generator)
            yield from order[: len(order) // size * size].split(size)
        else:
            sampler.set_epoch(epoch)
            yield from map(torch.tensor, sampler)
        epoch += 1


@lru_cache(maxsize=3)
def _rows(name: str, seed: int, share: float | None) -> Splits:
    parts = split(name, seed)
    return parts if share is None else thinned(parts, share, seed)._replace(test=parts.test)


def figures_of(scores: Tensor, targets: Tensor, share: float | None = None, budget: float = BUDGET) -> list[float]:
    """Return the ``METRICS``, 0 if a score is not finite.

    With a ``share`` negatives are weighed so that positives have that share: the figure is that of rows with so few
    positives, and all positives of the test rows count.
    """
    if not bool(scores.isfinite().all()):
        return [0.0] * len(METRICS)
    weights = None
    if share is not None:
        negative = float(targets.sum()) * (1 - share) / share / float((targets == 0).sum())
        weights = torch.where(targets == 1, 1.0, negative)
    of_numpy = None if weights is None else weights.numpy()
    rows = targets.numpy(), scores.double().numpy()
    precision = float(average_precision_score(*rows, sample_weight=of_numpy))
    # Ties share the budget. RecallAtQuantile reviews all rows that tie with the last one, which are all rows of a
    # network that has collapsed.
    alarms, hits, _ = roc_curve(*rows, sample_weight=of_numpy, drop_intermediate=False)
    share_of_positives = share or float(targets.float().mean())
    reviewed = share_of_positives * hits + (1 - share_of_positives) * alarms
    recall = float(np.interp(budget, reviewed, hits))
    inside = alarms < budget
    end = np.interp(budget, alarms, hits)
    area = float(np.trapezoid(np.append(hits[inside], end), np.append(alarms[inside], budget))) / budget
    return [precision, recall, area]


def run(job: Job) -> list[Any]:
    """Return the ``METRICS`` on validation and on test rows: (3, 2, rates, splits, steps).

    The boosted trees of scikit-learn have their defaults, and the same figure for all rates and steps.
    """
    all_rows = [_rows(job.set, seed, job.share) for seed in job.splits]
    found: list[list[list[list[list[float]]]]] = [[[[] for _ in job.splits] for _ in job.rates] for _ in range(2)]

    def result() -> list[Any]:
        metrics_first: list[Any] = np.moveaxis(np.array(found), -1, 0).tolist()
        return metrics_first

    def visit(score: Callable[[Tensor], Tensor]) -> None:
        for part, share in ((0, None), (1, job.share)):
            rows = [splits[part + 1] for splits in all_rows]
            with torch.no_grad():
                scores = score(torch.stack([each.features for each in rows]))
            for rate, by_split in zip(scores, found[part], strict=True):
                for own, each, values in zip(rate, rows, by_split, strict=True):
                    values.append(figures_of(own, each.targets, share, job.budget))

    if job.method == TREES:
        trees = [HistGradientBoostingClassifier(random_state=seed) for seed in job.splits]
        for one, splits in zip(trees, all_rows, strict=True):
            one.fit(splits.train.features.numpy(), splits.train.targets.numpy())
        visit(
            lambda features: torch.stack(
                [torch.tensor(one.decision_function(own.numpy())) for one, own in zip(trees, features, strict=True)]
            ).expand(len(job.rates), -1, -1)
        )
        return result()
    features = torch.stack([splits.train.features for splits in all_rows])
    targets = torch.stack([splits.train.targets for splits in all_rows])
    share, positives = float(targets[0].float().mean()), None
    if job.method.endswith(", sampler"):
        positives = job.batch // 4 if job.share is None else SAMPLED
        share = positives / job.batch
    if job.method in PEERS:
        positives = job.batch // 2
    networks = Networks(features.shape[2], job.splits, job.rates)
    columns = len(job.rates) * len(job.splits)
    if job.method in PEERS:
        loss = build_peer(job.method, networks, targets.shape[1], columns)
    else:
        loss = build(job.method, share, columns * job.parts, job.budget)
    streams = [batches(own, job.batch, positives, seed) for own, seed in zip(targets, job.splits, strict=True)]
    place = torch.arange(len(job.splits))[:, None]
    for step in range(1, max(job.steps) + 1):
        index = torch.stack([next(stream) for stream in streams])
        logits = networks(features[place, index])
        own = targets[place, index]
        own = (index.where(own == 1, -1) if job.method in PEERS else own).expand_as(logits)
        networks.optimizer.zero_grad()
        # A part of a batch is one more column.
        by_part = [rows.reshape(columns * job.parts, -1).T for rows in (logits, own)]
        (loss(*by_part) / job.parts).backward()
        networks.optimizer.step()
        if step in job.steps:
            visit(networks)
    return result()


def run_classes(name: str, seed: int, method: str, steps: int) -> dict[str, float]:
    """Return macro AP of the logits and of the softmax probabilities, and the balanced accuracy of the argmax.

    Macro AP is the mean over the classes of the AP of each against the rest. A loss through a softmax leaves a constant
    per row undetermined, so its logits are not comparable between rows, and its probabilities are. A ranking loss
    leaves a constant per class undetermined, so its probabilities are not.
    """
    rows = split(name, seed, SMALLEST)
    shares = rows.train.targets.bincount().float() / len(rows.train.targets)
    model, terms = make_model(rows.train.features.shape[1], seed, len(shares)), list[Loss]()
    for term in method.split(" + "):
        if term == "SmoothAP":
            terms.append(SmoothAPLoss(len(shares)))
        else:
            terms.append(nn.CrossEntropyLoss(weight=1 / shares if "weighted" in term else None))
    optimizer = torch.optim.Adam(model.parameters(), lr=CLASS_RATE, fused=True)
    for _, index in zip(
        range(steps), batches(rows.train.targets, min(CLASS_BATCH, len(rows.train.targets)), None, seed)
    ):
        logits, targets = model(rows.train.features[index]), rows.train.targets[index]
        optimizer.zero_grad()
        sum(term(logits, targets) for term in terms).backward()
        optimizer.step()
    with torch.no_grad():
        logits, targets = model(rows.test.features).double(), rows.test.targets
    figures = {"accuracy": float(balanced_accuracy_score(targets.numpy(), logits.argmax(dim=1).numpy()))}
    for key, scores in (("logits", logits), ("probabilities", logits.softmax(dim=1))):
        each = [figures_of(scores[:, label], (targets == label).long())[0] for label in targets.unique()]
        figures[key] = float(np.mean(each))
    return figures
