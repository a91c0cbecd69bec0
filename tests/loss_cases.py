"""The registry of the losses: a row for each, from which the tests of all folders read.

A new loss is a new row. What a test needs and a loss does not have, such as a queue, weights or a pure function, is
read from its signatures. Where a test cannot hold for a loss, ``left_out`` of its row says why in a sentence.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import pytest
import reference
import torch
import torch.distributed as dist
from reference import Rows
from torch import Tensor, nn

from fullrank import losses
from fullrank.kernels import native

IGNORED = -100
NAN, INF = math.nan, math.inf
Settings = Mapping[str, Any]


class Kind(NamedTuple):
    """What a loss is called with.

    ``make`` returns its arguments for rows (N, C), the class of each row and the query of each row. ``columns``: the
    least C in which the tests of all losses run. ``ignores``: the class of a row may be ``IGNORED``. ``is_binary``: of
    several columns the first is used, with class 1 against the others.
    """

    make: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
    columns: int = 1
    ignores: bool = True
    is_binary: bool = False


def as_elements(x: Tensor, targets: Tensor) -> Tensor:
    """Return the class of each row as 0 and 1 in the shape of ``x``; of one column, class 1 against the others."""
    classes = torch.arange(x.shape[1], device=x.device) if x.shape[1] > 1 else torch.ones(1, device=x.device)
    return (targets[:, None] == classes).to(x.dtype)


KINDS = {
    "scores": Kind(lambda x, t, q: {"logits": x, "targets": t}),
    "queries": Kind(lambda x, t, q: {"logits": x[:, :1], "targets": t.clamp_max(1), "indexes": q}, is_binary=True),
    "grades": Kind(lambda x, t, q: {"logits": x[:, :1], "relevance": t, "indexes": q}),
    "classes": Kind(lambda x, t, q: {"inputs": x, "targets": t}, columns=3),
    "elements": Kind(lambda x, t, q: {"inputs": x, "targets": as_elements(x, t)}, ignores=False),
    "embeddings": Kind(lambda x, t, q: {"embeddings": x, "labels": t}, columns=8),
    "pairs": Kind(lambda x, t, q: {"queries": x, "keys": x.roll(1, 1)}, columns=8, ignores=False),
    "parts": Kind(lambda x, t, q: {"logits": x, "targets": t}, columns=3),
    "tokens": Kind(lambda x, t, q: {"logits": x[None], "labels": t[None]}, columns=3),
}


class Argument(NamedTuple):
    """An argument of a loss.

    ``other``: a value other than the usual one, or a function that makes it on each process. The processes may not
    differ in it, unless ``apart`` says why they may. ``bad``: values that raise ValueError. ``wrong``: values that
    raise TypeError. ``among``: the settings next to which ``other`` has an effect, if the form has others.
    """

    other: Any = None
    bad: Sequence[Any] = ()
    wrong: Sequence[Any] = ()
    apart: str = ""
    among: Mapping[str, Any] = {}


# What several losses have. A row describes the arguments of its own, and what it refuses besides.
SHARED = {
    "num_classes": Argument(3, [0, -1], [2.0, True]),
    "queue_size": Argument(7, [-1], [1.5]),
    "num_features": Argument(8, [0, -1], [2.5, True], apart="It says which state can be loaded."),
    "temperature": Argument(0.7, [0.0, -0.1, NAN, INF], ["0.1"]),
    "reduction": Argument("sum", ["average", None]),
    "ignore_index": Argument(-1, [], [1.0, None]),
    "update_queue_in_eval": Argument(True, apart="Its effect is compared: DRIFTS of test_drift.py has it."),
    "max_pool_size": Argument(9, [0], [2.5]),
    "queue_keep": Argument("negatives", ["positives"]),
    "queue_in_eval": Argument(True),
    "multi_hot": Argument(True),
    "weighting": Argument("positives", ["negatives"]),
    "normalize": Argument(False),
    "gather_distributed": Argument(True, [], ["yes", 1], apart="A process that does not gather does not call."),
    "group": Argument(
        lambda: dist.group.WORLD, [], ["world"], apart="A process that names another group cannot be asked."
    ),
    "gradient_reduction": Argument("sum", ["max", 0, -1, 1.5, True, None]),
    "validate_args": Argument(False, apart="Whichever process checks, all raise."),
    "name": Argument("other", [], [1]),
}


@dataclass(frozen=True, repr=False)
class Loss:
    """A row of the registry.

    Args:
        name: of the row, and in the names of the tests.
        kind: what the loss is called with, a key of ``KINDS``.
        module: its class; None if it is a function alone.
        function: its pure function, if it has one.
        reference: its slow definition, from tests/reference.py.
        forms: settings for which it has code of its own, by name. Tests run over them, or over the first of them.
        settings: more settings in which it is compared with the reference.
        controls: changes of the first form that change the value of the reference.
        own: the arguments of its own, and what it refuses of the shared ones.
        together: the argument that a message names, values that do not go together, and a part of the message.
        parts: returns the losses that it is made of, from the options of their constructors.
        needs: the rows without which a class is not valid.
        of_order: only differences of scores count, in units of a temperature, and the loss is in [0, 1].
        left_out: why a family of tests cannot hold for it, by the name of the family in ``FAMILIES``, or for one of its
            forms, by that and the name of the form, ``"first"`` for one without a name.
    """

    name: str
    kind: str
    module: type[nn.Module] | None = None
    function: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    forms: Mapping[str, Settings] = field(default_factory=lambda: {"": {}})
    settings: Mapping[str, Settings] = field(default_factory=dict)
    controls: Sequence[Settings] = ()
    own: Mapping[str, Argument] = field(default_factory=dict)
    together: Sequence[tuple[str, Settings, str]] = ()
    parts: Callable[..., Settings] | None = None
    needs: frozenset[str] = frozenset({"positives", "negatives"})
    of_order: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The names of the arguments of the constructor."""
        return frozenset(() if self.module is None else inspect.signature(self.module).parameters)

    @cached_property
    def of_function(self) -> frozenset[str]:
        """The names of the arguments of the pure function."""
        return frozenset(() if self.function is None else inspect.signature(self.function).parameters)

    def default(self, argument: str) -> Any:
        """Return the default of an argument of the constructor."""
        return inspect.signature(self.module).parameters[argument].default

    def takes(self, name: str) -> bool:
        """Return whether a call takes an argument; what is made of parts passes it on."""
        names = inspect.signature(self.function if self.module is None else self.module.forward).parameters
        return name in names or "kwargs" in names

    @property
    def is_pooled(self) -> bool:
        """Whether it ranks a pool of rows, one class against the rest."""
        return self.kind == "scores"

    @property
    def is_automatic(self) -> bool:
        """Whether its usual temperature follows from the scores."""
        if "temperature" not in self.arguments or self.argument("temperature").apart:
            return False
        return self.default("temperature") is None

    def argument(self, name: str) -> Argument:
        """Return the entry of an argument: what is said of it here, and of all losses that have it."""
        own, shared = self.own.get(name, Argument()), SHARED.get(name, Argument())
        other = shared.other if own.other is None else own.other
        refused = [*shared.bad, *own.bad], [*shared.wrong, *own.wrong]
        return Argument(other, *refused, own.apart or shared.apart, own.among)

    @property
    def first(self) -> Form:
        """The first form."""
        return Form(self, next(iter(self.forms.values())))

    def form_with(self, argument: str) -> Form:
        """Return the first form that sets an argument, or the first of all."""
        return next((Form(self, settings) for settings in self.forms.values() if argument in settings), self.first)

    @property
    def compared(self) -> dict[str, Form]:
        """All settings in which it is compared with the reference, by name."""
        return {name: Form(self, settings) for name, settings in {**self.forms, **self.settings}.items()}


class Form(NamedTuple):
    """A loss with settings for which it has code of its own."""

    loss: Loss
    settings: Settings

    @property
    def is_first(self) -> bool:
        """Whether it is the one that is used where one is enough."""
        return self.settings is self.loss.first.settings

    def given(self, **options: Any) -> dict[str, Any]:
        """Return the arguments of the constructor: the settings, the parts, and the options that the loss takes."""
        if KINDS[self.loss.kind].is_binary:
            options = {**options, "num_classes": 1}
        parts = {} if self.loss.parts is None else self.loss.parts(**options)
        return {**self.settings, **parts, **{k: v for k, v in options.items() if k in self.loss.arguments}}

    def make(self, **options: Any) -> Any:
        """Return a module; one with a schedule is in step 1 of it."""
        assert self.loss.module is not None
        module = self.loss.module(**self.given(**options))
        if hasattr(module, "on_train_batch_start"):
            module.on_train_batch_start(1)
        return module

    @property
    def is_function(self) -> bool:
        """Whether the pure function takes the settings."""
        return self.loss.function is not None and self.loss.of_function >= self.settings.keys()

    def call(self, as_module: bool = False, **options: Any) -> Callable[..., Tensor]:
        """Return the pure function; without one, or on request, a function that makes a new module in each call."""
        if as_module or not self.is_function:
            return lambda *rows, **given: self.make(**options)(*rows, **given)
        assert self.loss.function is not None
        taken = {name: value for name, value in options.items() if name in self.loss.of_function}
        return partial(self.loss.function, **{**self.settings, **taken})

    @property
    def columns(self) -> int:
        """The least number of columns."""
        return KINDS[self.loss.kind].columns

    def arguments(self, x: Tensor, targets: Tensor, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Return the arguments of a call for rows (N, C), the class of each, and its query, which is one of four."""
        given = torch.arange(len(x), device=x.device) % 4 if queries is None else queries
        return KINDS[self.loss.kind].make(x, targets, given)

    def value(self, x: Tensor, targets: Tensor, queries: Tensor | None = None, **options: Any) -> Tensor:
        """Return the loss of rows (N, C) as a number; ``options`` are those of the constructor or the function."""
        found = self.call(num_classes=x.shape[1], **options)(**self.arguments(x, targets, queries))
        return found.nan_to_num().square().sum() if found.ndim else found


def of_elements(options: Settings) -> dict[str, Any]:
    """Return the options that every loss over processes takes."""
    return {name: options[name] for name in ("group", "gather_distributed", "gradient_reduction") if name in options}


def combined(wrap: Callable[[Any], nn.Module] = lambda loss: loss, **options: Any) -> Settings:
    """Return the losses of a weighted sum; ``wrap`` is put around that over a pool."""
    ap = wrap(LOSSES["smooth_ap"].first.make(**{"num_classes": 3, **options}))
    return {"losses": {"ap": ap, "ce": losses.CrossEntropyLoss(label_smoothing=0.1, **of_elements(options))}}


def warm_up(wrap: Callable[[Any], nn.Module] = lambda loss: loss, **options: Any) -> Settings:
    """Return the losses of a warm-up; ``wrap`` is put around that over a pool."""
    ap = wrap(LOSSES["smooth_ap"].first.make(**{"num_classes": 3, **options}))
    return {"warmup_loss": losses.SoftmaxFocalLoss(**of_elements(options)), "main_loss": ap}


AP = losses.SmoothAPLoss(3)
WEIGHT = torch.tensor([0.2, 1.0, 3.0])
BAD_WEIGHTS = [-WEIGHT, WEIGHT * NAN, WEIGHT * INF]
SHARE = Argument(0.3, [-0.1, 1.1, NAN], ["0.1"])  # a number in [0, 1]
RULE = Argument("lower", ["cubic"])
WARM = {"temperature": 0.2}
SIGMOID = {"temperature": 0.2, "bias": -1.0}
MARGIN = Argument(0.5, [-0.1, NAN, INF], ["0.1"])
STRATEGY = Argument("relative", ["quotient", None], among={"margin": 0.5})
SMOOTH_RECALL = {"surrogate": "sigmoid"}
QUANTILE = Argument(0.4, [0.0, 1.0, -0.1, 1.5, NAN], ["0.1"])
WITHOUT_EFFECT = "The two surrogates of recall do not take the same arguments."
TRAPEZOID, DRO = {"surrogate": "trapezoid"}, {"surrogate": "dro"}
BAND, LINEAR = {"alpha": 0.1, "beta": 0.7}, {"quantile_interpolation": "linear"}
READS_VALUES = "It reads values, of which the meta device has none."
OF_EPOCHS = {"warmup_steps": None, "blend_steps": None, "warmup_epochs": 1}
KEEPS_STATE = "A graph holds no state, so the module runs eagerly."
OF_PARTS = "Each of its parts rounds the gradient of its own."
BY_VALUES = "The number of operators depends on values, so it runs eagerly."
OF_TORCH = "test_cross_entropy.py compares it with that of torch."
CONTRASTIVE = {"reference": "test_contrast.py compares it, with a queue.", "graph": BY_VALUES}
CONTRASTIVE["func"] = "Its backward communicates, which no transform of torch.func can."


def of_block(block: losses.Block) -> Tensor:
    """Return the cross-entropy of a block, of whose scores those of each guide and column are a part."""
    more = [*block.columns.values(), *([] if block.guide is None else [block.guide])]
    return nn.functional.cross_entropy(sum(more, block.scores), block.positives, reduction="none")


def decoupled(block: losses.Block) -> Tensor:
    """Return the loss of a block without the own key in the denominator."""
    others = block.scores.scatter(1, block.positives[:, None], -INF)
    return others.logsumexp(dim=1) - block.scores.gather(1, block.positives[:, None])[:, 0]


JOINT = {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), "queue_size": 0}
OWN = {"function": of_block, **WARM}
OF_AREAS = {
    "alpha": Argument(0.05, [-0.1, 0.7, NAN], ["0"]),
    "beta": Argument(0.6, [0.0, 1.1, -0.5, NAN], [None]),
    "surrogate": Argument("trapezoid", ["hinge"]),
    "n_knots": Argument(4, [1, 2.5]),
    "tau_scale": Argument("band", ["std"]),
    "pos_numerator": Argument("live", ["queue"]),
    "budget_basis": Argument("population", ["tpr"]),
    "quantile_interpolation": RULE,
    "dro_lambda": Argument(0.5, [0.0], ["1"]),
    "threshold_gradient": Argument(False),
    "temperature": Argument(wrong=[None]),  # there is no automatic one
}

ROWS = (
    Loss(
        "smooth_ap",
        "scores",
        losses.SmoothAPLoss,
        losses.smooth_ap,
        reference.smooth_ap,
        forms={"": {"temperature": 0.3}, "automatic": {}},
        settings={
            "narrow": {"temperature": 0.05},
            "wide": {"temperature": 1.0},
            "positives": {"temperature": 0.3, "weighting": "positives"},
        },
        controls=[{"temperature": 0.31}],
        of_order=True,
    ),
    Loss(
        "recall",
        "scores",
        losses.RecallAtQuantileLoss,
        losses.recall_at_quantile,
        reference.recall_at_quantile,
        forms={
            "": {"quantile": 0.3, "temperature": 0.3, **SMOOTH_RECALL},
            "linear": {"quantile": 0.13, "temperature": 0.3, **LINEAR},
            "automatic": {"quantile": 0.3, **SMOOTH_RECALL},
        },
        settings={
            rule: {"quantile": q, "temperature": 0.3, "quantile_interpolation": rule}
            for rule, q in (("lower", 0.13), ("higher", 0.1), ("nearest", 0.37), ("midpoint", 0.45))
        }
        | {"detached": {"quantile": 0.3, "temperature": 0.3, "threshold_gradient": False}},
        controls=[{"quantile": 0.34}, {"quantile": 0.2}],
        own={
            "quantile": QUANTILE,
            "quantile_interpolation": RULE,
            "threshold_gradient": Argument(False),
            "surrogate": Argument("dro", ["hinge"], apart=WITHOUT_EFFECT, among={"temperature": None}),
        },
        needs=frozenset({"positives"}),
        of_order=True,
    ),
    Loss(
        "recall_dro",
        "scores",
        losses.RecallAtQuantileLoss,
        losses.recall_at_quantile,
        reference.recall_at_quantile,
        forms={"": {"quantile": 0.2}},
        settings={"defaults": {}, "half": {"quantile": 0.5}},
        controls=[{"quantile": 0.5}, SMOOTH_RECALL],
        own={
            "quantile": QUANTILE,
            "quantile_interpolation": RULE,
            "threshold_gradient": Argument(False),
            "temperature": Argument(apart="It makes the loss the smooth recall.", among=SMOOTH_RECALL),
            "surrogate": Argument("sigmoid", ["hinge"]),
        },
        together=[
            ("temperature", {"temperature": 0.3, **DRO}, "0.3.*'sigmoid'"),
            ("quantile_interpolation", {**LINEAR, **DRO}, "linear.*'sigmoid'"),
            ("threshold_gradient", {"threshold_gradient": False, **DRO}, "False.*'sigmoid'"),
        ],
    ),
    Loss(
        "pauc",
        "scores",
        losses.PAUCAtBudgetLoss,
        losses.pauc_at_budget,
        reference.pauc_at_budget,
        forms={
            "pairwise": {"beta": 0.5, "surrogate": "pairwise", "temperature": 0.3},
            "trapezoid": {**BAND, **TRAPEZOID, "n_knots": 5, "temperature": 0.3, "threshold_gradient": True},
            "dro": {"beta": 0.2},
            "dro_tilted": {"dro_lambda": 0.3, "tau_scale": "iqr", **DRO},
            "dro_band": {"dro_lambda": 4.0, "tau_scale": "band", "beta": 0.7, **DRO},
        },
        settings={
            "defaults": {},
            "trapezoid_half": {"beta": 0.3, **TRAPEZOID},
            "detached": {"beta": 0.3, **TRAPEZOID, "threshold_gradient": False},
            "band": {"alpha": 0.05, "beta": 0.8, "tau_scale": "band", **LINEAR, **TRAPEZOID},
            "population": {"beta": 0.6, "budget_basis": "population", "n_knots": 3, **TRAPEZOID},
            "pairwise_band": {"alpha": 0.1, "beta": 0.9, "surrogate": "pairwise", "tau_scale": "band"},
            "pairwise_population": {"beta": 0.8, "surrogate": "pairwise", "budget_basis": "population"},
            "live": {"beta": 0.5, "pos_numerator": "live", **TRAPEZOID},
            "live_pairwise": {"beta": 0.5, "pos_numerator": "live", "surrogate": "pairwise"},
            "dro_half": {"beta": 0.5},
            "dro_iqr": {"dro_lambda": 1.0, "tau_scale": "iqr"},
            "dro_population": {"beta": 0.2, "tau_scale": "iqr", "budget_basis": "population"},
            "dro_pairs": {"dro_lambda": 0.3, "beta": 0.4, **DRO},
            "live_dro": {"dro_lambda": 2.5, "pos_numerator": "live", **DRO},
            "live_dro_iqr": {"dro_lambda": 2.5, "pos_numerator": "live", "tau_scale": "iqr"},
        },
        controls=[
            *({"alpha": 0.1}, {"beta": 0.6}, TRAPEZOID, {"tau_scale": "band"}, {"pos_numerator": "live"}),
            *({"budget_basis": "population"}, {"quantile_interpolation": "lower"}),
        ],
        own=OF_AREAS,
        together=[
            ("alpha, beta", {"alpha": 0.3, "beta": 0.3}, ""),
            ("alpha", {"alpha": 0.1, "temperature": 0.1, **DRO}, r"0\.1.*For a band use surrogate='pairwise'"),
            ("temperature", {"temperature": 0.3, **DRO}, "0.3.*'pairwise' and 'trapezoid'"),
            ("n_knots", {"n_knots": 3, "temperature": 0.1, **DRO}, "3.*'trapezoid'"),
            ("n_knots", {"n_knots": 3}, "3.*'trapezoid'"),
            ("threshold_gradient", {"threshold_gradient": False}, "False.*'trapezoid'"),
            ("dro_lambda", {"dro_lambda": 1.0, **TRAPEZOID}, "1.0.*'dro'"),
        ],
        of_order=True,
    ),
    Loss(
        "queries",
        "queries",
        losses.SmoothAPLoss,
        losses.smooth_ap,
        forms={"": {"temperature": 0.3}},
        left_out={"reference": "test_retrieval.py compares it.", "graph": BY_VALUES, "meta": READS_VALUES},
    ),
    Loss(
        "pauc_queries",
        "queries",
        losses.PAUCAtBudgetLoss,
        losses.pauc_at_budget,
        forms={"": {"beta": 0.5, "surrogate": "pairwise", "temperature": 0.3}, "dro": {"beta": 0.5}},
        own=OF_AREAS,
        left_out={"reference": "test_retrieval.py compares it.", "graph": BY_VALUES, "meta": READS_VALUES},
    ),
    Loss(
        "retrieval",
        "embeddings",
        losses.RetrievalSmoothAPLoss,
        losses.retrieval_smooth_ap,
        forms={"": WARM, "automatic": {"temperature": None}, "none": {**WARM, "reduction": "none"}},
        left_out={"reference": "test_retrieval.py compares it, with a queue.", "graph": BY_VALUES},
    ),
    Loss(
        "ndcg",
        "grades",
        losses.NDCGLoss,
        forms={"": {"temperature": 0.5}, "automatic": {}},
        own={"gain": Argument("exponential", ["square"]), "top": Argument(3, [0], [1.5])},
        left_out={
            "reference": "test_ndcg.py compares it, query by query.",
            "graph": BY_VALUES,
            "meta": READS_VALUES,
        },
    ),
    Loss(
        "info_nce",
        "pairs",
        losses.InfoNCELoss,
        forms={"": WARM, "symmetric": {**WARM, "symmetric": True, "learn_temperature": True}},
        own={
            "symmetric": Argument(False, [], ["yes"]),
            "learn_temperature": Argument(False, [], [1]),
            "max_logit_scale": Argument(
                50.0, [0.0, NAN], ["100"], among={"learn_temperature": True, "temperature": 0.02}
            ),
            "directions": Argument(
                ("query_to_doc", "query_to_query"),
                [("doc_to_query",), ("query_to_doc", "all")],
                ["query_to_doc", None],
                among={"queue_size": 0},
            ),
            "partition_mode": Argument(
                "per_direction",
                ["both", None],
                among={"directions": ("query_to_doc", "doc_to_query"), "queue_size": 0},
            ),
            "hardness_mode": Argument("all_negatives", ["all"], among={"hardness_strength": 3.0}),
            "hardness_strength": Argument(2.0, [-0.1, NAN, INF], ["0.1"], among={"hardness_mode": "all_negatives"}),
            "margin": MARGIN,
            "margin_strategy": STRATEGY,
        },
        together=[
            ("symmetric", {**JOINT, "symmetric": True}, "True"),
            ("queue_size", {**JOINT, "queue_size": 8}, "8"),
            ("directions", {**JOINT, "partition_mode": "per_direction"}, ""),
        ],
        left_out={**CONTRASTIVE, "meta symmetric": READS_VALUES},
    ),
    Loss(
        "siglip",
        "pairs",
        losses.SigLIPLoss,
        forms={"": {**SIGMOID, "learn": False}, "learned": SIGMOID},
        own={
            "bias": Argument(-2.0, [NAN, INF], ["1"]),
            "learn": Argument(True, [], [1]),
            "max_logit_scale": Argument(50.0, [0.0, NAN], ["100"], among={"learn": True, "temperature": 0.02}),
            "margin": MARGIN,
            "margin_strategy": STRATEGY,
        },
        left_out={**CONTRASTIVE, "meta learned": READS_VALUES},
    ),
    Loss(
        "row_loss",
        "pairs",
        losses.RowLoss,
        forms={"": OWN, "learned": {**OWN, "learn_temperature": True}},
        own={
            "function": Argument(lambda: decoupled, [], [None, "mean"]),
            "learn_temperature": Argument(False, [], [1]),
            "max_logit_scale": Argument(
                50.0, [0.0, NAN], ["100"], among={"learn_temperature": True, "temperature": 0.02}
            ),
        },
        left_out={**CONTRASTIVE, "meta learned": READS_VALUES},
    ),
    Loss(
        "sup_con",
        "embeddings",
        losses.SupConLoss,
        forms={"": WARM},
        left_out={**CONTRASTIVE, "meta": READS_VALUES},
    ),
    Loss(
        "softmax_focal",
        "classes",
        losses.SoftmaxFocalLoss,
        losses.softmax_focal,
        reference.softmax_focal,
        forms={
            "": {},
            "weights": {"alpha": WEIGHT.tolist(), "gamma": 1.5, "reduction": "mean_weighted"},
            "foreground": {"reduction": "mean_positive"},
        },
        settings={
            "cross_entropy": {"gamma": 0.0},
            "no_weight": {"alpha": [2.0, 0.0, 0.7]},
            "smoothing": {"label_smoothing": 0.2},
            "background": {"background_class": 2},
        },
        own={
            "alpha": Argument([1.0, 2.0, 1.0], [[1.0, -1.0, 1.0], [1.0, NAN, 1.0]], [0.25, "balanced"]),
            "gamma": Argument(1.0, [-1.0, NAN], ["2"]),
            "label_smoothing": SHARE,
            "background_class": Argument(1, [], [0.5], among={"reduction": "mean_positive"}),
        },
        together=[("inputs", {"inputs": torch.zeros(4), "targets": torch.zeros(4).long()}, "")],
    ),
    Loss(
        "sigmoid_focal",
        "elements",
        losses.SigmoidFocalLoss,
        losses.sigmoid_focal,
        reference.sigmoid_focal,
        forms={"": {}, "weights": {"reduction": "mean_weighted"}},
        settings={"cross_entropy": {"alpha": -1, "gamma": 0}, "root": {"gamma": 0.5, "alpha": 0.9}},
        own={
            "alpha": Argument(0.5, [-0.5, 1.5, NAN], ["0.5"]),
            "gamma": Argument(1.0, [-1.0, NAN], ["2"]),
            "reduction": Argument(bad=["mean_positive"]),
        },
    ),
    Loss(
        "cross_entropy",
        "classes",
        losses.CrossEntropyLoss,
        forms={
            "": {},
            "weights": {"weight": WEIGHT, "label_smoothing": 0.1},
            "balanced": {"class_weight": "balanced", "label_smoothing": 0.1},
        },
        own={
            "class_weight": Argument(lambda: None, ["equal", 0.5]),
            "weight": Argument(WEIGHT.flip(0), [*BAD_WEIGHTS, WEIGHT[:, None], WEIGHT[0]], [WEIGHT.tolist(), 0.5]),
            "label_smoothing": SHARE,
            "reduction": Argument(bad=["mean_weighted"]),
        },
        left_out={"reference": OF_TORCH},
    ),
    Loss(
        "binary_cross_entropy",
        "elements",
        losses.BCEWithLogitsLoss,
        forms={
            "": {},
            "weights": {"weight": torch.tensor(0.7), "pos_weight": torch.tensor(3.0)},
            "balanced": {"class_weight": "balanced"},
        },
        own={
            "class_weight": Argument(lambda: None, ["equal", 0.5]),
            "weight": Argument(torch.tensor(0.8), BAD_WEIGHTS, [WEIGHT.tolist(), 0.5]),
            "pos_weight": Argument(torch.tensor(2.0), [torch.tensor(-1.0)], [19.0]),
            "reduction": Argument(bad=["mean_weighted"]),
        },
        left_out={
            "reference": OF_TORCH,
            **dict.fromkeys(
                ("func first", "func weights"), "Under torch.func the formula of torch rounds in other places."
            ),
        },
    ),
    Loss(
        "causal_lm",
        "tokens",
        function=losses.causal_lm_loss,
        forms={"": {"shift": False}},
        own={
            "reduction": Argument(bad=["none"]),
            "num_items": Argument(bad=[-1, NAN, INF, torch.ones(2)], wrong=["3", True]),
            "z_loss": Argument(bad=[-1, NAN, INF], wrong=["3", None]),
            "softcap": Argument(bad=[-1, 0, NAN, INF], wrong=["3"]),
            "label_smoothing": Argument(bad=[-0.1, 1.1, NAN], wrong=["3", None]),
            "weight": Argument(bad=[torch.eye(4)], wrong=["3"]),
        },
        together=[
            ("num_items_in_batch", {"num_items": 1, "num_items_in_batch": 1}, "both"),
            ("document_ids", {"document_ids": torch.zeros(1, 8).long()}, "Labels that were shifted before"),
            ("logits", {"logits": torch.zeros(4), "labels": torch.tensor(0)}, ""),
        ],
        left_out={"reference": "test_linear_form.py compares it, token by token."},
    ),
    Loss(
        "combined",
        "parts",
        losses.CombinedLoss,
        forms={"": {"weights": {"ap": 0.5, "ce": 2.0}}},
        own={
            "losses": Argument(None, [{}, {"a.p": AP}, {"keys": AP}, {1: AP}], [None, [AP], {"ap": type(AP)}]),
            "weights": Argument(
                {"ap": 0.3, "ce": 1.5},
                [{"ap": 1}, {"ap": -1, "ce": 1}, {"ap": NAN, "ce": 1}],
                [[1], {"ap": "1", "ce": 1}],
            ),
        },
        parts=combined,
        left_out={"reference": "test_combined.py compares it with its parts.", "graph": KEEPS_STATE, "half": OF_PARTS},
    ),
    Loss(
        "warm_up",
        "parts",
        losses.LossWarmupWrapper,
        forms={"": {"warmup_steps": 1, "blend_steps": 2, "temp_start": 0.5, "temp_end": 0.1, "temp_decay_steps": 3}},
        own={
            **dict.fromkeys(("warmup_loss", "main_loss"), Argument(wrong=[type(AP), losses.smooth_ap, None])),
            **dict.fromkeys(("warmup_epochs", "blend_epochs"), Argument(2, [-1], [1.5, True], among=OF_EPOCHS)),
            "reset_queue_each_epoch": Argument(True, among={**OF_EPOCHS, "warmup_epochs": 0}),
            "warmup_steps": Argument(2, [-1], [1.5, True]),
            "blend_steps": Argument(1),
            **dict.fromkeys(("temp_start", "temp_end"), Argument(0.3, [0.0, -1.0, NAN, INF], ["0.1"])),
            "temp_decay_steps": Argument(2, [0], [1.5]),
            "final_main_weight": Argument(0.7, [0.0, 1.1, -0.5, NAN], ["1"]),
        },
        together=[
            ("warmup_steps", {"warmup_steps": 5, "warmup_epochs": 1}, "5"),
            ("blend_steps", {"blend_steps": 5}, "5"),
            ("blend_steps", {"warmup_steps": 1, "blend_steps": -1}, "-1"),
            ("blend_epochs", {"warmup_steps": 1, "blend_epochs": 1}, "1"),
            ("temp_end", {"temp_start": 0.1}, "None"),
            ("temp_start", {"temp_end": 0.1}, "None"),
            ("warmup_epochs", {}, "main_loss alone"),  # nothing to do
        ],
        parts=warm_up,
        left_out={"reference": "test_warmup.py compares its course.", "graph": KEEPS_STATE, "half": OF_PARTS},
    ),
)
LOSSES: dict[str, Loss] = {row.name: row for row in ROWS}
POOLED = {name: loss for name, loss in LOSSES.items() if loss.is_pooled}
SUMMED = {name: loss for name, loss in LOSSES.items() if loss.reference and not loss.is_pooled}
FORMS: dict[str, Form] = {
    "_".join(filter(None, (name, form))): Form(loss, settings)
    for name, loss in LOSSES.items()
    for form, settings in loss.forms.items()
}
OF_POOL = [name for name, form in FORMS.items() if form.loss.is_pooled]

# The tests that a loss may be left out of: values of a slow definition, one graph, the gradient by torch.func, other
# transforms, half precision and the shapes of meta tensors. Where one is, the test shows that it does not hold.
FAMILIES = ("reference", "graph", "func", "transforms", "half", "meta")


@contextmanager
def holds(family: str, name: str, sentence: str = ".") -> Iterator[None]:
    """Let the body show what a family of tests claims of a form. Where it is left out the body must fail.

    It is left out by the name of the family, or by that and the name of the form.
    """
    assert family in FAMILIES
    loss = FORMS[name].loss if name in FORMS else None
    form = "" if loss is None else name.removeprefix(loss.name).removeprefix("_") or "first"
    if loss is None or loss.left_out.keys().isdisjoint({family, f"{family} {form}"}):
        yield
        return
    with pytest.raises(Exception, match=f"(?s){sentence}|^$"):
        yield


def slowly(names: Iterable[str], mark: Any = pytest.mark.slow) -> list[Any]:
    """Return forms as cases, of which the first of each loss is in the fast tests."""
    return [pytest.param(n, marks=[] if FORMS[n].is_first else mark) for n in names]


def on_devices(cases: Iterable[Sequence[Any]], also: Iterable[Sequence[Any]] = ()) -> list[Any]:
    """Return cases with a device: all with the CPU, some with the other one too; test_device.py has all losses on it.

    They are parameters of a test whose last one is ``device``, which is ``indirect``.
    """
    others = [pytest.param(*case, "other", marks=pytest.mark.slow) for case in also]
    return [*((*case, "cpu") for case in cases), *others]


@dataclass(frozen=True)
class InputCase:
    """Named inputs: ``rows(seed)`` is a step's batch; weights and iid masks on request."""

    num_classes: int
    num_rows: int = 24
    multi_hot: bool = False
    positive_share: float = 0.4
    grid: float = 0.0  # scores are rounded to multiples of it

    def rows(
        self,
        seed: int = 0,
        *,
        num_rows: int | None = None,
        weighted: bool = False,
        masked: bool = False,
        poisoned: bool = False,
    ) -> Rows:
        """Float64 rows, about a tenth of them ignored; positives of class c score a little higher in column c.

        With ``poisoned`` the scores that are ignored are not finite or huge.
        """
        generator = torch.Generator().manual_seed(seed)
        count, columns = self.num_rows if num_rows is None else num_rows, self.num_classes
        chance = torch.rand(count, columns, generator=generator)
        if columns == 1 or self.multi_hot:
            codes = (chance < self.positive_share).long()
            if count:
                codes[0] = 1
        else:
            codes = torch.nn.functional.one_hot(chance.argmax(dim=1), columns)
        logits = torch.randn(count, columns, generator=generator, dtype=torch.float64) + 0.8 * codes
        if self.grid:
            logits = (logits / self.grid).round() * self.grid
        ignored = torch.rand(codes.shape, generator=generator) < 0.1
        if self.multi_hot:
            targets = codes.masked_fill(ignored, IGNORED)
        else:
            targets = codes[:, 0] if columns == 1 else codes.argmax(dim=1)
            targets = targets.masked_fill(ignored[:, 0], IGNORED)
        if poisoned:
            odd = torch.tensor([NAN, INF, -INF, 1e30], dtype=torch.float64)[torch.arange(count) % 4]
            is_ignored = (targets == IGNORED).view(count, -1).expand_as(logits)
            logits = torch.where(is_ignored, odd[:, None], logits)
        iid = torch.rand(count, generator=generator) < 0.8 if masked else None
        weight = 2 * torch.rand(count, generator=generator, dtype=torch.float64) if weighted else None
        return Rows(logits, targets, iid, weight)

    def module(self, form: Form, **options: Any) -> Any:
        """Return a module for these inputs."""
        return form.make(num_classes=self.num_classes, multi_hot=self.multi_hot, **options)


INPUTS: dict[str, InputCase] = {
    "binary": InputCase(num_classes=1),
    "classes": InputCase(num_classes=3, num_rows=23),
    "multi_hot": InputCase(num_classes=3, num_rows=21, multi_hot=True),
    "imbalanced": InputCase(num_classes=1, num_rows=61, positive_share=0.04),
    "tied": InputCase(num_classes=2, num_rows=26, grid=0.5),
}


def rows_of_elements(kind: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, targets and weights, of which the second dimension is that of the classes, if there are any.

    Classes are (6, 3, 2) with background and ignored elements; elements are (5, 3, 2) with some soft targets.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(6 if kind == "classes" else 5, 3, 2, generator=generator, dtype=torch.float64)
    if kind == "classes":
        targets = torch.randint(0, 3, (6, 2), generator=generator)
        targets[1, 0], targets[2, 1], targets[4, 0] = IGNORED, IGNORED, 0
    else:
        targets = torch.randint(0, 2, logits.shape, generator=generator).double()
        targets[0, 0] = torch.tensor([0.3, 0.9])
    return logits, targets, torch.rand(targets.shape, generator=generator, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers that float32 holds, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def draw(count: int, columns: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return logits (count, columns) that require a gradient, and targets; binary with one column."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, columns, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return logits, torch.randint(0, max(2, columns), (count,), generator=generator)


def step(loss: Callable[..., Tensor], logits: Tensor, targets: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient."""
    leaf = logits.detach().clone().requires_grad_()
    value = loss(leaf, targets, **given)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def leaf(rows: Rows) -> Rows:
    """Return the rows with logits that record a gradient."""
    return rows._replace(logits=rows.logits.detach().clone().requires_grad_())


def gradient(loss: Tensor, logits: Tensor, seed: int = 0) -> Tensor:
    """Return the gradient of a fixed random combination of the finite entries of ``loss``."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.rand(loss.shape, generator=generator, dtype=torch.float64).to(loss)
    return torch.autograd.grad((torch.where(loss.isnan(), 0, loss) * factors).sum(), logits, retain_graph=True)[0]


def call(loss: Callable[..., Any], rows: Rows, **options: Any) -> Any:
    """Call a module or a functional form on ``rows``; only some functional forms take an iid mask."""
    given = dict(options)
    if rows.iid_mask is not None:
        given["iid_mask"] = rows.iid_mask
    return loss(rows.logits, rows.targets, sample_weight=rows.sample_weight, **given)


CLASSES = torch.arange(60) % 3


def functions() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return every loss as a function of scores (60, 3 or more), on any device; no value of a target is looked at."""

    def value(form: Form, x: Tensor) -> Tensor:
        return form.value(x, CLASSES.to(x.device), validate_args=False)

    sums = {"sigmoid_sums": lambda x: losses.sigmoid_sums(x[:, 0], x[:, 1], x[:, 1:], 0.5).square().mean()}
    return {name: partial(value, form) for name, form in FORMS.items()} | sums


FUNCTIONS = functions()


def why_torch_computes() -> str:
    """Return the reason for which a test of the library in C is skipped."""
    return "the extension was not built" if native._path() else "FULLRANK_NATIVE switches the library in C off"
