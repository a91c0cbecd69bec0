"""Every communicating call, with everything that one rank can do wrong in it.

``CALLS`` has a loss of the registry in one of its forms, or a gather: its arguments, how they can be spoiled (``bad``:
wrong by themselves), and how they can differ from those of the other ranks (``differ``: right by themselves).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import gradient_cases
import torch
from faults import Arguments, Fault
from loss_cases import FORMS, Form
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
    """Pass an optional argument, made for the number of rows."""
    return Fault(lambda arguments: {name: make(len(next(iter(arguments.values()))))}, error, text)


_WEIGHTS = {
    "weight not a tensor": _given("sample_weight", lambda n: [1.0] * n, "TypeError", "weight: expected a tensor"),
    "weight shape": _given("sample_weight", lambda n: torch.ones(n + 1), "ValueError", "sample_weight: expected "),
    "weight dtype": _given("sample_weight", lambda n: torch.ones(n, dtype=torch.bool), "TypeError", "real numbers"),
    "negative weight": _given("sample_weight", lambda n: -torch.ones(n), "ValueError", "numbers >= 0, got -1.0"),
    "weight not finite": _given("sample_weight", lambda n: torch.full((n,), torch.nan), "ValueError", "got nan"),
}
_FOREIGN = "expected a tensor on "


def _floats(name: str) -> dict[str, Fault]:
    """Return the faults of floating-point rows; the other arguments are expected where they are."""
    return {
        f"{name} not a tensor": _wrong(name, lambda x: x.tolist(), "TypeError", f"{name}: expected a tensor, got [["),
        f"integer {name}": _wrong(name, lambda x: x.detach().long(), "TypeError", "expected a floating-point tensor"),
        f"sparse {name}": _wrong(name, lambda x: x.to_sparse(), "TypeError", "expected a dense tensor"),
        f"{name} elsewhere": _wrong(name, lambda x: x.to("meta"), "ValueError", _FOREIGN + "meta"),
    }


def _entries(name: str, given: str = "a tensor") -> dict[str, Fault]:
    """Return the faults of what has an entry for each row."""
    return {
        f"{name} not a tensor": _wrong(name, lambda y: y.tolist(), "TypeError", f"{name}: expected {given}"),
        f"number of {name}": _wrong(name, lambda y: y[:-1], "ValueError", f"{name}: expected "),
        f"{name} elsewhere": _wrong(name, lambda y: y.to("meta"), "ValueError", _FOREIGN + "cpu"),
    }


_CLASS_TARGETS = {
    "soft targets": _wrong("targets", lambda y: y + 0.5, "ValueError", "targets: expected class indices in [0, 3)"),
    "class out of range": _wrong("targets", lambda y: y + 7, "ValueError", "targets: expected class indices in [0, 3)"),
}
_BAD_ROWS = {
    "dimensions of logits": _wrong("logits", lambda x: x[:, 0], "ValueError", "logits: expected shape (N, 3)"),
    "columns": _wrong("logits", lambda x: torch.cat([x, x], dim=1), "ValueError", "logits: expected shape (N, 3)"),
    **_floats("logits"),
    **_entries("targets"),
    **_CLASS_TARGETS,
    "mask shape": _given("iid_mask", lambda n: torch.ones(n - 1, dtype=torch.bool), "ValueError", "iid_mask: expected"),
    "mask dtype": _given("iid_mask", lambda n: torch.ones(n), "TypeError", "iid_mask: expected a bool tensor"),
    **_WEIGHTS,
}
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


_DIFFERENT_ROWS = _different("logits") | {
    "mask": _given("iid_mask", lambda n: torch.ones(n, dtype=torch.bool), "ValueError", _PRESENCE)
}
_BAD_INPUTS = _floats("inputs") | _entries("targets") | _WEIGHTS
_CLASS_INPUTS = _CLASS_TARGETS | {
    "dimensions of inputs": _wrong("inputs", lambda x: x[:, 0], "ValueError", "inputs: expected shape (N, C, *)"),
    "one class": _wrong("inputs", lambda x: x[:, :1], "ValueError", "at least two classes"),
}
_DIFFERENT_ELEMENTS = _different("inputs", "inputs: 'float")
_BINARY_INPUTS = {
    "targets of -1": _wrong("targets", lambda y: 2 * y - 1, "ValueError", "expected numbers in [0, 1], got -1.0"),
    "shape of targets": _wrong("targets", lambda y: y[:, :1], "ValueError", "targets: expected the shape of inputs"),
}
_BAD_INDEXES = _entries("indexes", "a tensor or None") | {
    "shape of indexes": _wrong("indexes", lambda i: i[:, None], "ValueError", "Use indexes.squeeze(1)."),
    "float indexes": _wrong("indexes", lambda i: i.double(), "TypeError", "indexes: expected a tensor of integers"),
    "bool indexes": _wrong("indexes", lambda i: i > 0, "TypeError", "indexes: expected a tensor of integers"),
}
_BAD_QUERIES = _BAD_INDEXES | {
    "targets of -1": _wrong("targets", lambda y: 2 * y - 1, "ValueError", "got -1. Use (targets > 0).long()")
}
_DIFFERENT_QUERIES = _OTHER_WEIGHTS | {"indexes": _wrong("indexes", lambda i: None, "ValueError", "got indexes: ")}
_BAD_EMBEDDINGS = {
    "dimensions": _wrong("embeddings", lambda x: x[:, 0], "ValueError", "embeddings: expected shape (N, D)"),
    "no features": _wrong("embeddings", lambda x: x[:, :0], "ValueError", "embeddings: expected shape (N, D)"),
    "float labels": _wrong("labels", lambda y: y.double(), "TypeError", "labels: expected integers or bools"),
    **_floats("embeddings"),
    **_entries("labels"),
    **_WEIGHTS,
}
_DIFFERENT_EMBEDDINGS = _different("embeddings") | {
    "features": _wrong("embeddings", lambda x: x[:, :2], "ValueError", "float64 (N, 2) with gradient")
}


def _reference(rows: Tensor | None, count: int, text: str, error: str = "ValueError") -> Fault:
    """Pass another set with labels for ``count`` rows."""
    labels = torch.arange(count) if count else None
    return Fault(lambda given: {"reference": rows, "reference_labels": labels}, error, text)


_FOUR = torch.zeros(4, 3, dtype=torch.float64)
_BAD_REFERENCE = {
    "reference without labels": _reference(_FOUR, 0, "expected both or none of them"),
    "labels of no reference": _reference(None, 4, "expected both or none of them"),
    "dtype of the reference": _reference(_FOUR.float(), 4, "reference: expected torch.float64")._replace(
        kind="TypeError"
    ),
    "width of the reference": _reference(_FOUR[:, :2], 4, "reference: expected rows of 3 numbers"),
    "labels of the reference": _reference(
        _FOUR, 3, "labels: expected shape (4,) or (4, 1), one entry per row of refer"
    ),
}
_BAD_GRADES = {
    "negative": _wrong("relevance", lambda y: -1 - y, "ValueError", "relevance: expected numbers >= 0, finite, or"),
    "not finite": _wrong("relevance", lambda y: y / 0.0, "ValueError", "relevance: expected numbers >= 0"),
    "columns": _wrong("logits", lambda x: x.expand(-1, 2), "ValueError", "logits: expected shape (N,) or (N, 1)"),
    **_floats("logits"),
    **_entries("relevance"),
    **_BAD_INDEXES,
    **_WEIGHTS,
}


def _masked(
    sizes: Callable[[int], tuple[int, ...]], text: str, error: str = "ValueError", width: int = 3, **further: Tensor
) -> Fault:
    """Pass a guide for as many rows of each side, the last of another width, and further arguments."""

    def change(given: Arguments) -> Arguments:
        *counts, last = sizes(len(given["keys"]))
        return {"mask": (*(torch.ones(count, 3) for count in counts), torch.ones(last, width)), **further}

    return Fault(change, error, text)


_BAD_PAIRS = {
    **_floats("queries"),
    "dtype of keys": _wrong("keys", lambda x: x.float(), "TypeError", "Use keys.to(torch.float64)."),
    "dimensions": _wrong("keys", lambda x: x[:, 0], "ValueError", "keys: expected shape (N, D)"),
    "number of keys": _wrong("keys", lambda x: x[1:], "ValueError", "Row i of the keys is the positive of row i"),
    "width of queries": _wrong("queries", lambda x: x[:, :2], "ValueError", "keys: expected shape"),
    "keys not a tensor": _wrong("keys", lambda x: x.tolist(), "TypeError", "keys: expected a tensor"),
    "sparse keys": _wrong("keys", lambda x: x.to_sparse(), "TypeError", "expected a dense tensor"),
    "keys elsewhere": _wrong("keys", lambda x: x.to("meta"), "ValueError", _FOREIGN + "cpu, as queries"),
    "number of labels": _given("labels", lambda n: torch.arange(n - 1), "ValueError", "one entry per row of queries"),
    "labels as negatives": _given("negatives", torch.arange, "TypeError", "pass labels="),
    "width of negatives": _given("negatives", lambda n: _FOUR[:, :2], "ValueError", "expected rows of 3 numbers"),
    "dtype of negatives": _given("negatives", lambda n: _FOUR.float(), "TypeError", "expected torch.float64"),
    "mask that is no tuple": _given("mask", lambda n: torch.ones(n, 3), "TypeError", "mask: expected a tuple"),
    "mask of one side": _masked(lambda n: (n,), "of a guide, of queries, keys, got 1", "TypeError"),
    "mask without negatives": _masked(lambda n: (n, n), "keys, negatives, got 2", "TypeError", negatives=_FOUR),
    "rows of a mask": _masked(lambda n: (n, n - 1), "mask of keys: expected "),
    "width of a mask": _masked(lambda n: (n, n), "mask of keys: expected rows of 3", width=2),
    "mask of negatives": _masked(lambda n: (n, n, 3), "mask of negatives: expected 4 rows", negatives=_FOUR),
    **_WEIGHTS,
}
_DIFFERENT_PAIRS = {
    "dtype": Fault(lambda given: {name: x.float() for name, x in given.items()}, "ValueError", "float32 (N, 3) with"),
    "width": Fault(lambda given: {name: x[:, :2] for name, x in given.items()}, "ValueError", "float64 (N, 2) with"),
    "gradient of keys": _wrong("keys", lambda x: x.detach(), "ValueError", _ALONE),
    "gradient of queries": _wrong("queries", lambda x: x.detach(), "ValueError", _ALONE),
    "negatives": _given("negatives", lambda n: _FOUR, "ValueError", _PRESENCE),
    "labels": _given("labels", torch.arange, "ValueError", _PRESENCE),
    "mask": _masked(lambda n: (n, n), _PRESENCE),
    **_OTHER_WEIGHTS,
}


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
    kind: _BAD_ROWS[kind]._replace(text="expected ")
    for kind in ("logits not a tensor", "number of targets", "soft targets", "class out of range")
}
_BAD_FOR_BOTH["one column"] = _wrong("logits", lambda x: x[:, :1], "ValueError", "expected ")
# What only the warm-up loss refuses: the main loss must not have enqueued its rows by then.
_BAD_FOR_WARMUP = {
    "targets (N, 1)": _wrong("targets", lambda y: y[:, None], "ValueError", "got an int64 tensor of shape (")
}
_FOCAL, _MAIN = "SoftmaxFocalLoss", "SmoothAPLoss"


def _wrapper(step: int, heads: tuple[str, ...], bad: Mapping[str, Fault]) -> Call:
    make, keeps_rows = partial(_warmup, step), step > 0
    return Call(heads, "LossWarmupWrapper", make, _rows, bad, _GRADIENT_OF_BOTH, keeps_rows=keeps_rows)


_GRADIENT_OF_BOTH = {"gradient": _wrong("logits", lambda x: x.detach(), "ValueError", _ALONE)}


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
    heads, faults = _HEADS.get(form.loss.name, (head,)), next(_FAULTS[name] for name in own if name in _FAULTS)
    return Call(heads, head, make, arguments, *faults, keeps_rows=keeps_rows, form=form)


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

    return call._replace(
        heads=("ShardedLoss", *call.heads), public="ShardedLoss", make=make, keeps_rows=False, form=None
    )


def _gather(
    name: str,
    arguments: Callable[[torch.Generator, int], Arguments],
    bad: Mapping[str, Fault],
    differ: Mapping[str, Fault],
    objective: Callable[[Any], Tensor] = lambda result: result,
    **options: Any,
) -> Call:
    """Return the call of a function that takes ``options``."""
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
_DIFFERENT_GRADES = _different("logits", "float32 (N) with gradient on cpu") | {
    "indexes": _wrong("indexes", lambda i: None, "ValueError", "indexes: ")
}
_DIFFERENT_CLASSES = _DIFFERENT_ELEMENTS | {
    "classes": _wrong("inputs", lambda x: torch.cat([x, x], dim=1), "ValueError", "classes: ")
}
_DIFFERENT_FRACTION = {
    "gradient": _wrong("total", lambda x: x.detach(), "ValueError", "gradient: "),
    "dtype": _wrong("total", lambda x: x.float(), "ValueError", "dtype: torch.float"),
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
_CLASSES, _BINARY = _BAD_INPUTS | _CLASS_INPUTS, _BAD_INPUTS | _BINARY_INPUTS
_BAD_ONE = _bad_tensor("tensor") | _BAD_REDUCTION
# By the name of a loss, or by what it is called with.
_FAULTS = {
    "scores": (_BAD_ROWS, _DIFFERENT_ROWS),
    "queries": (_BAD_QUERIES, _DIFFERENT_QUERIES),
    "grades": (_BAD_GRADES, _DIFFERENT_GRADES),
    "embeddings": (_BAD_EMBEDDINGS, _DIFFERENT_EMBEDDINGS),
    "sup_con": (
        _BAD_EMBEDDINGS | _BAD_REFERENCE,
        _DIFFERENT_EMBEDDINGS | {"reference": _reference(_FOUR, 4, _PRESENCE)},
    ),
    "pairs": (_BAD_PAIRS, _DIFFERENT_PAIRS),
    "classes": (_CLASSES, _DIFFERENT_ELEMENTS),
    "elements": (_BINARY, _DIFFERENT_ELEMENTS),
    "softmax_focal": (_CLASSES, _DIFFERENT_CLASSES),
    "parts": (_BAD_FOR_BOTH, _GRADIENT_OF_BOTH),
}
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
}
BAD = [(name, kind) for name, call in CALLS.items() for kind in call.bad]
DIFFERENT = [(name, kind) for name, call in CALLS.items() for kind in call.differ]
