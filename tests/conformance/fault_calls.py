"""Every communicating call, with everything that one rank can do wrong in it.

``CALLS`` has a loss of the registry in one of its forms, or a gather: its arguments, how they can be spoiled (``bad``:
wrong by themselves), and how they can differ from those of the other ranks (``differ``: right by themselves).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import gradient_cases
import torch
from faults import Arguments, Fault
from loss_cases import FORMS, Form
from refusals import BINARY, LOGITS, TARGETS, refused_rows
from torch import Tensor

import fullrank
from fullrank.large import ShardedLoss

CLASSES = 3


class Call(NamedTuple):
    """A communicating call. ``heads`` are the names that may stand at the head of its messages."""

    heads: tuple[str, ...]
    public: str  # its name in fullrank
    make: Callable[[], Any]
    arguments: Callable[[torch.Generator, int], Arguments]
    bad: Mapping[str, Fault]
    differ: Mapping[str, Fault]
    objective: Callable[[Any], Tensor] = lambda result: result
    keeps_rows: bool = False  # of this step for the next
    form: Form | None = None  # of a loss


def _rows(generator: torch.Generator, rank: int) -> Arguments:
    count = 7 + rank
    logits = torch.randn(count, CLASSES, dtype=torch.float64, generator=generator, requires_grad=True)
    return {"logits": logits, "targets": torch.randint(0, CLASSES, (count,), generator=generator)}


def _wrong(name: str, change: Callable[[Tensor], Any], error: str, text: str) -> Fault:
    return Fault(lambda arguments: {name: change(arguments[name])}, error, text)


def _given(name: str, make: Callable[[int], Any], error: str, text: str) -> Fault:
    return Fault(lambda arguments: {name: make(len(next(iter(arguments.values()))))}, error, text)


_PRESENCE = ". Pass it on every rank or on none."
_ALONE = "A rank that works alone, such as in validation, sets gather_distributed=False on its losses."
_OTHER_WEIGHTS = {"weights": _given("sample_weight", lambda n: torch.ones(n), "ValueError", _PRESENCE)}


def _different(name: str, dtype: str = "float32 (N, 3) with gradient on cpu") -> dict[str, Fault]:
    """Return how rows can differ from those of the other ranks."""
    return {
        "dtype": _wrong(name, lambda x: x.float(), "ValueError", dtype),
        "gradient": _wrong(name, lambda x: x.detach(), "ValueError", _ALONE),
        **_OTHER_WEIGHTS,
    }


_DIFFERENT_ELEMENTS = _different("inputs", "inputs: 'float")
_DIFFERENT_EMBEDDINGS = _different("embeddings") | {
    "features": _wrong("embeddings", lambda x: x[:, :2], "ValueError", "float64 (N, 2) with gradient")
}
_FURTHER = torch.zeros(4, 3, dtype=torch.float64)
_REFERENCE = {"reference": _FURTHER, "reference_labels": torch.arange(4)}
_FURTHER_REFERENCE = {"reference": Fault(lambda given: _REFERENCE, "ValueError", _PRESENCE)}
# By the name of a loss, or by what it is called with.
_DIFFERENCES = {
    "scores": _different("logits")
    | {"mask": _given("iid_mask", lambda n: torch.ones(n, dtype=torch.bool), "ValueError", _PRESENCE)},
    "queries": _OTHER_WEIGHTS | {"indexes": _wrong("indexes", lambda i: None, "ValueError", "got indexes: ")},
    "grades": _different("logits", "float32 (N) with gradient on cpu")
    | {"indexes": _wrong("indexes", lambda i: None, "ValueError", "indexes: ")},
    "embeddings": _DIFFERENT_EMBEDDINGS,
    "retrieval": _DIFFERENT_EMBEDDINGS | _FURTHER_REFERENCE,
    "sup_con": _DIFFERENT_EMBEDDINGS
    | _FURTHER_REFERENCE
    | {
        "several labels": _wrong("labels", lambda t: t[:, None] == torch.arange(3), "ValueError", "bool (N, 3)"),
    },
    "pairs": {
        "dtype": Fault(
            lambda given: {name: x.float() for name, x in given.items()}, "ValueError", "float32 (N, 3) with"
        ),
        "width": Fault(
            lambda given: {name: x[:, :2] for name, x in given.items()}, "ValueError", "float64 (N, 2) with"
        ),
        "gradient of keys": _wrong("keys", lambda x: x.detach(), "ValueError", _ALONE),
        "gradient of queries": _wrong("queries", lambda x: x.detach(), "ValueError", _ALONE),
        "negatives": _given("negatives", lambda n: _FURTHER, "ValueError", _PRESENCE),
        "labels": _given("labels", torch.arange, "ValueError", _PRESENCE),
        "mask": _given("mask", lambda n: (torch.ones(n, 3),) * 2, "ValueError", _PRESENCE),
        **_OTHER_WEIGHTS,
    },
    "classes": _DIFFERENT_ELEMENTS,
    "elements": _DIFFERENT_ELEMENTS,
    "softmax_focal": _DIFFERENT_ELEMENTS
    | {"classes": _wrong("inputs", lambda x: torch.cat([x, x], dim=1), "ValueError", "classes: ")},
    "parts": {"gradient": _wrong("logits", lambda x: x.detach(), "ValueError", _ALONE)},
}


def _refused(form: Form) -> dict[str, Fault]:
    """Return the first value of each row of what one process refuses, and rows on another device."""
    right = form.arguments(LOGITS, TARGETS, BINARY)
    first = next(iter(right))
    elsewhere = Fault(
        lambda given: {first: right[first].to("meta")}, "ValueError", "expected a tensor on meta", lambda given: right
    )
    found = {f"{first} elsewhere": elsewhere}
    for number, (refusal, *_) in enumerate(refused_rows(form.loss)):
        found[f"{refusal.argument} {number}"] = Fault(
            lambda given, changes=refusal.changes: changes,
            refusal.error.__name__,
            re.compile(refusal.pattern),
            lambda given: right,
        )
    return found


def _bad_tensor(name: str) -> dict[str, Fault]:
    return {
        "not a tensor": _wrong(name, lambda x: [1.0], "TypeError", "expected a plain torch.Tensor or None, got [1.0]"),
        "no dimension": _wrong(name, lambda x: x.sum(), "ValueError", "expected at least one dimension"),
        "sparse": _wrong(name, lambda x: x.to_sparse(), "TypeError", "expected a dense tensor"),
        "elsewhere": _wrong(name, lambda x: x.to("meta"), "ValueError", "a device that the process group serves"),
    }


def _different_tensor(name: str) -> dict[str, Fault]:
    return {
        "dtype": _wrong(name, lambda x: x.float(), "ValueError", "float32 (N, 3)"),
        "trailing shape": _wrong(name, lambda x: x[:, :1], "ValueError", "float64 (N, 1)"),
    }


def _one(generator: torch.Generator, rank: int) -> Arguments:
    return {"tensor": _rows(generator, rank)["logits"]}


def _pair(generator: torch.Generator, rank: int) -> Arguments:
    return {"first": _rows(generator, rank)["logits"], "second": torch.arange(7 + rank)}


def _fraction(generator: torch.Generator, rank: int) -> Arguments:
    return {"total": _rows(generator, rank)["logits"].sum(), "count": 7 + rank}


def _sum(generator: torch.Generator, rank: int) -> Arguments:
    return {"value": _rows(generator, rank)["logits"].sum(dim=0)}


_UNKNOWN = "gradient_reduction: expected 'mean', 'sum' or"
_BAD_REDUCTION = {"reduction": Fault(lambda _: {"gradient_reduction": "average"}, "ValueError", _UNKNOWN)}
_OTHER_REDUCTION = {
    "gradient_reduction": Fault(lambda _: {"gradient_reduction": "sum"}, "RuntimeError", "gradient_reduction: ")
}
_OTHER_GRADIENT = {"gradient": _wrong("tensor", lambda x: x.detach(), "ValueError", "with gradient")}
_BAD_FRACTION = {
    "total not a tensor": _wrong("total", lambda x: 3.0, "TypeError", "total: expected a tensor, got 3.0"),
    "integer total": _wrong("total", lambda x: x.detach().long(), "TypeError", "expected a floating-point tensor"),
    "two totals": _wrong("total", lambda x: x.expand(2), "ValueError", "total: expected one element"),
    "total elsewhere": _wrong("total", lambda x: x.to("meta"), "RuntimeError", "meta"),
    "negative count": _wrong("count", lambda n: -1, "ValueError", "count: expected a number >= 0, got -1.0"),
    "count not a number": _wrong("count", lambda n: "many", "TypeError", "count: expected a number or a tensor"),
    "count of nan": _wrong("count", lambda n: torch.tensor(torch.nan), "ValueError", "a number >= 0, got nan"),
    "two counts": _wrong("count", lambda n: torch.ones(2), "ValueError", "count: expected one element"),
    **_BAD_REDUCTION,
}


_BAD_SUM = {
    "not a tensor": _wrong("value", lambda x: 3.0, "TypeError", "value: expected a tensor, got 3.0"),
    "integers": _wrong("value", lambda x: x.detach().long(), "TypeError", "value: expected a floating-point tensor"),
    "elsewhere": _wrong("value", lambda x: x.to("meta"), "ValueError", "a device that the process group serves"),
    **_BAD_REDUCTION,
}


def _slopes(rows: Tensor) -> Tensor:
    return (rows * torch.arange(1, len(rows) + 1)[:, None]).sum()


class _OfOneDimension(fullrank.SoftmaxFocalLoss):
    """A warm-up loss that refuses targets which the main loss takes."""

    def elements(self, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Any:
        if targets.ndim > 1:
            raise ValueError(f"targets: got an int64 tensor of shape {tuple(targets.shape)}")
        return super().elements(inputs, targets, sample_weight)


_OfOneDimension.__name__ = "SoftmaxFocalLoss"  # the head of its messages


def _warmup(step: int) -> fullrank.LossWarmupWrapper:
    """Return the wrapper in ``step``: 0 the warm-up, 1 the blend, 2 after it."""
    warmup, main = _OfOneDimension(gamma=0), fullrank.SmoothAPLoss(CLASSES, queue_size=64, temperature=0.2)
    loss = fullrank.LossWarmupWrapper(warmup, main, warmup_steps=1, blend_steps=1, temp_start=0.2, temp_end=0.1)
    for index in range(step + 1):
        loss.on_train_batch_start(index)
    return loss


_BAD_FOR_BOTH = {
    "logits not a tensor": _wrong("logits", lambda x: "scores", "TypeError", "expected a tensor, got 'scores'"),
    "number of targets": _wrong("targets", lambda y: y[:-1], "ValueError", "expected "),
    "soft targets": _wrong("targets", lambda y: y + 0.5, "ValueError", "expected "),
    "class out of range": _wrong("targets", lambda y: y + 7, "ValueError", "expected "),
    "one column": _wrong("logits", lambda x: x[:, :1], "ValueError", "expected "),
}
# What only the warm-up loss refuses: the main loss must not have enqueued its rows by then.
_BAD_FOR_WARMUP = {
    "targets (N, 1)": _wrong("targets", lambda y: y[:, None], "ValueError", "got an int64 tensor of shape (")
}
_FOCAL, _MAIN = "SoftmaxFocalLoss", "SmoothAPLoss"


def _wrapper(step: int, heads: tuple[str, ...], bad: Mapping[str, Fault]) -> Call:
    make, keeps_rows = partial(_warmup, step), step > 0
    return Call(heads, "LossWarmupWrapper", make, _rows, bad, _DIFFERENCES["parts"], keeps_rows=keeps_rows)


def _loss(form: Form) -> Call:
    """Return the call of a loss; of another form than the first the queue keeps negatives alone."""
    assert form.loss.module is not None
    head, keep = form.loss.module.__name__, "all" if form.is_first else "negatives"

    def arguments(generator: torch.Generator, rank: int) -> Arguments:
        rows = _rows(generator, rank)
        return form.arguments(rows["logits"], rows["targets"], torch.randint(0, 3, (7 + rank,), generator=generator))

    keeps_rows = form.loss.kind in ("scores", "parts")
    make = partial(form.make, num_classes=CLASSES, queue_size=64 if keeps_rows else 0, queue_keep=keep)
    own = (form.loss.name if form.is_first else "", form.loss.kind)
    differ = next(_DIFFERENCES[name] for name in own if name in _DIFFERENCES)
    bad = _BAD_FOR_BOTH if form.loss.kind == "parts" else _refused(form)
    return Call(
        _HEADS.get(form.loss.name, (head,)), head, make, arguments, bad, differ, keeps_rows=keeps_rows, form=form
    )


def _sharded(name: str, way: str = "") -> Call:
    """Return a loss over a sharded pool; with a ``way`` to compute it one that is never gathered."""
    call = CALLS[name]

    def make() -> Any:
        temperature = {"temperature": 2.0} if name == "smooth_ap" else {}  # so that few rows have few bins
        sharded = ShardedLoss(FORMS[name].make(num_classes=CLASSES, **temperature))
        forward = sharded.forward

        def take_way(*args: Any, **kwargs: Any) -> Any:
            with gradient_cases.forced(way):
                return forward(*args, **kwargs)

        sharded.forward = take_way
        return sharded

    heads, bad = (
        ("ShardedLoss", *call.heads),
        {kind: fault for kind, fault in call.bad.items() if "indexes" not in kind},
    )
    return call._replace(heads=heads, public="ShardedLoss", make=make, bad=bad, keeps_rows=False, form=None)


def _gather(
    name: str,
    arguments: Callable[[torch.Generator, int], Arguments],
    bad: Mapping[str, Fault],
    differ: Mapping[str, Fault],
    objective: Callable[[Any], Tensor] = lambda result: result,
    **options: Any,
) -> Call:
    return Call((name,), name, lambda: partial(getattr(fullrank, name), **options), arguments, bad, differ, objective)


def _gather_rows(first: Tensor, second: Tensor, **options: Any) -> Any:
    return fullrank.gather_rows(first, second, **options)


_BACKWARD = {"backward": Fault(lambda _: {"backward": "scatter"}, "ValueError", "'local' or 'reduce_scatter'")}
_OTHER_BACKWARD = {
    "backward": Fault(lambda _: {"backward": "reduce_scatter"}, "ValueError", "'local' on rank"),
    **_different_tensor("tensor"),
    **_OTHER_REDUCTION,
    **_OTHER_GRADIENT,
}
_DIFFERENT_FRACTION = {
    "gradient": _wrong("total", lambda x: x.detach(), "ValueError", "gradient: "),
    "dtype": _wrong("total", lambda x: x.float(), "ValueError", "dtype: torch.float"),
    **_OTHER_REDUCTION,
}
_DIFFERENT_SUM = {
    "gradient": _wrong("value", lambda x: x.detach(), "ValueError", "with gradient"),
    "dtype": _wrong("value", lambda x: x.float(), "ValueError", "float32 (N, 3)"),
    "shape": _wrong("value", lambda x: x[:1], "ValueError", "float64 (N, 1)"),
    **_OTHER_REDUCTION,
}
_BAD_SECOND = {
    **_bad_tensor("second"),
    **_BAD_REDUCTION,
    "elsewhere": _wrong("second", lambda x: x.to("meta"), "ValueError", "tensors: expected all on one device"),
    "number of rows": _wrong("second", lambda x: x[1:], "ValueError", " rows as in the tensors before it"),
}
_DIFFERENT_FIRST = {
    **_different_tensor("first"),
    **_OTHER_REDUCTION,
    "gradient": _wrong("first", lambda x: x.detach(), "ValueError", "with gradient"),
    "presence": _wrong("second", lambda x: None, "ValueError", "None"),
}
_BAD_ONE = _bad_tensor("tensor") | _BAD_REDUCTION
_HEADS = {"combined": (f"CrossEntropyLoss + {_MAIN}", _MAIN)}  # the latter has the rows

_NAMES = [name for name, form in FORMS.items() if form.loss.module and form.settings.get("reduction") != "none"]
CALLS = {name: _loss(FORMS[name]) for name in _NAMES if name != "warm_up"}
CALLS |= {
    "smooth_ap_sharded": _sharded("smooth_ap"),
    "smooth_ap_by_moments": _sharded("smooth_ap", "moments"),
    "smooth_ap_by_positives": _sharded("smooth_ap", "positives"),
    "recall_by_sums": _sharded("recall", "sums"),
    "pauc_trapezoid_by_sums": _sharded("pauc_trapezoid", "sums"),
    "wrapper_in_warmup": _wrapper(0, (_FOCAL,), _BAD_FOR_BOTH | _BAD_FOR_WARMUP),
    "wrapper_in_blend": _wrapper(1, (_FOCAL, _MAIN), _BAD_FOR_BOTH | _BAD_FOR_WARMUP),
    "wrapper_after_it": _wrapper(2, (_MAIN,), _BAD_FOR_BOTH),
    "all_gather_with_grad": _gather("all_gather_with_grad", _one, _BAD_ONE | _BACKWARD, _OTHER_BACKWARD, _slopes),
    "all_gather_with_grad_reduce_scatter": _gather(
        *("all_gather_with_grad", _one, _BAD_ONE),
        _different_tensor("tensor") | _OTHER_REDUCTION | _OTHER_GRADIENT,
        _slopes,
        backward="reduce_scatter",
    ),
    "all_gather_no_grad": _gather(
        "all_gather_no_grad", _one, _bad_tensor("tensor"), _different_tensor("tensor"), _slopes
    ),
    "gather_rows": _gather(
        "gather_rows", _pair, _BAD_SECOND, _DIFFERENT_FIRST, lambda gathered: _slopes(gathered[0])
    )._replace(make=lambda: _gather_rows),
    "global_mean": _gather("global_mean", _fraction, _BAD_FRACTION, _DIFFERENT_FRACTION),
    "global_sum": _gather("global_sum", _sum, _BAD_SUM, _DIFFERENT_SUM, lambda total: total.square().sum()),
}
