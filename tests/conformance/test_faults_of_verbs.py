"""A mistake of one rank in a verb over a window is raised on every rank, leaves nothing behind, and the next is exact.

The tables say what a rank does wrong. Each row runs in the first and in the third step of a model, whose wrappers
communicate at other places once they have warmed up, and under DDP with a buffer, which it broadcasts. Where a rank
makes no backward it also runs without.
"""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from batches import WEIGHTS, Batch, all_batches, make_window, num_valid, sum_loss
from faults import WRONG_LOSSES, Arguments, Fault
from on_ranks import on_ranks, same
from subjects import Model, TwoHeads, error, gradient, has_gradients, mesh_of, switches, wrap
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from verbs import (
    COUNTS,
    VERBS,
    InChunks,
    deferred_of,
    factor_in,
    mean_over_ranks,
    model_of,
    one_process_of,
    pooled,
    reduction_of,
    scores_of,
    terms_in,
)
from workers import error_of

from fullrank import count_valid_tokens, global_mean
from fullrank.accumulation.accumulate import MAX_TERMS

# --- what every rank passes if it does nothing wrong


def plain(step: Any, index: int, loss: Tensor, items: int) -> None:
    step.backward(loss)


def means(step: Any, index: int, loss: Tensor, items: int) -> None:
    step.backward(loss / max(items, 1), num_items=items)


def loop(mistake: Callable[[Any, Any, int], Any], place: int, right: Callable[..., None] = plain) -> Any:
    return lambda step, index, loss, items: (
        mistake(step, loss, items) if index == place else right(step, index, loss, items)
    )


def arguments_of(verb: str, model: nn.Module, rank: int) -> Arguments:
    arguments: Arguments = {"model": model, "batches": make_window("full", rank)}
    if verb in UNSEEN_BY:
        arguments |= {"through": lambda index: model}
    if verb.startswith("accumulate"):
        arguments |= {"count": count_valid_tokens, "use": plain, "sync": "each" if "each" in verb else "last"}
    if verb == "pooled_backward":
        arguments |= {"forward": partial(scores_of, model), "loss": partial(mean, model), "context": nullcontext}
    return arguments


def mean(model: nn.Module, scores: Tensor, batches: list[Batch]) -> Tensor:
    return mean_over_ranks(scores, batches, reduction_of(model))


def take(verb: str, arguments: Arguments) -> None:
    given = dict(arguments)
    model, batches = given.pop("model"), given.pop("batches")
    given.pop("use" if verb == "DeferredMean" else "call", None)  # a fault of several verbs passes both
    if verb == "pooled_backward":
        context, through = given.pop("context"), given.pop("through")
        if through(0) is not model or through(2) is not model:
            modules = iter([through(index) for _ in range(2) for index in range(3)])
            given["forward"] = lambda batch: scores_of(next(modules), batch)
        with context():
            pooled(model, batches, **given)
    else:
        VERBS[verb](model, batches, **given)


def _local_count(given: Arguments) -> Arguments:
    return {"count": 5 + dist.get_rank()}


# --- the tables


def changed(name: str, change: Callable[[Any], Any], kind: str, text: str, **common: Any) -> Fault:
    """Return the fault of another value for one argument; ``common``: what every rank passes."""
    return Fault(lambda given: {name: change(given.get(name))}, kind, text, lambda given: common)


def passed(name: str, value: Any, kind: str, text: str, **common: Any) -> Fault:
    return changed(name, lambda _: value, kind, text, **common)


def _labels(change: Callable[[Tensor], Any]) -> Callable[[list[Batch]], Any]:
    return lambda window: [{"labels": change(batch["labels"])} for batch in window]


def _two(window: list[Batch]) -> list[Batch]:
    return window[:2]


def _length(batch: Batch) -> Tensor:
    return batch["length"]


def _no_length(batch: Batch) -> Tensor:
    raise ValueError("none here")


_RAISED = f"'length', raised in _length ({__file__}, line {_length.__code__.co_firstlineno + 1})."


class DeepSpeedEngine(nn.Module):
    """Has the name that an engine of DeepSpeed is known by, which is no test dependency."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


_ENGINE = changed("model", DeepSpeedEngine, "ValueError", "plain modules, got an engine of DeepSpeed.", group=None)
_A_RULE = partial(count_valid_tokens, shift=False)

OPENINGS = {
    "engine of DeepSpeed": _ENGINE,
    "generator": changed("batches", iter, "TypeError", "with a length, got a list_iterator. The window is read before"),
    "one mapping": changed("batches", lambda window: window[0], "TypeError", "Pass [batch] for one batch."),
    "one text": passed("batches", "tokens", "TypeError", "Pass [batch] for one batch."),
    "number of micro-batches": passed(
        "batches", 3, "TypeError", "expected a list of micro-batches, with a length, got a "
    ),
    "no micro-batch": passed("batches", [], "ValueError", "expected at least one micro-batch on every rank, got none."),
    "unequal, each": changed("batches", _two, "ValueError", "0 rows, as fullrank.data.until_all_end(", sync="each"),
    "unequal": changed("batches", _two, "ValueError", "2 on rank 1"),
    "missing key": changed("batches", lambda window: [{}] * 3, "ValueError", "expected one of the keys 'labels'"),
    "float labels": changed("batches", _labels(Tensor.float), "TypeError", "labels: expected integers"),
    "list of labels": changed("batches", _labels(Tensor.tolist), "TypeError", "labels: expected a plain torch.Tensor"),
    "negative count": passed("count", lambda batch: -1, "ValueError", "0: expected a finite number >= 0, got -1."),
    "several counts": passed("count", lambda batch: batch["labels"], "ValueError", "batch 0: expected one element"),
    "count that fails": passed("count", _length, "RuntimeError", f"expected a number, got KeyError: {_RAISED}"),
    "count that raises": passed("count", _no_length, "ValueError", "got ValueError: none here, raised in _no_length ("),
    "built-in count that fails": passed("count", int, "TypeError", "expected a number, got TypeError: int() "),
    "count that is text": passed("count", str, "TypeError", "count of micro-batch 0: expected a number or a tensor"),
    "count of no kind": passed("count", "tokens", "TypeError", "count: expected a function of a micro-batch, "),
    "positional count": passed("count", partial(count_valid_tokens, []), "TypeError", "only, got positional ones."),
    "group of the count": passed("count", partial(count_valid_tokens, group=None), "TypeError", "only, got group. "),
    "local count": Fault(
        lambda given: {}, "ValueError", "count: 5 over all ranks and micro-batches on rank 0, 6", _local_count
    ),
    "another rule": passed("count", _A_RULE, "ValueError", "on rank 0, TokenRule(key='labels', shift=False"),
    "another sync": passed("sync", "each", "ValueError", "sync: 'last' on rank 0, 'each' on rank 1"),
    "unknown sync": passed("sync", "never", "ValueError", "sync: expected one of 'last', 'each', 'shard', got"),
    "shard without FSDP": passed("sync", "shard", "ValueError", "expected a model with FSDP2 modules for 'shard'"),
    "another multiplier": passed("multiplier", 7.0, "ValueError", "on rank 0, 7.0 on rank 1"),
    "bad multiplier": passed("multiplier", 0.0, "ValueError", "multiplier: expected a finite number > 0, got 0.0."),
    "another module": changed(
        "model", lambda model: getattr(model, "module", Model()), "ValueError", "got 5 trainable", group=None
    ),
}


def looped(
    place: int, mistake: Callable[[Any, Any, int], Any], kind: str, text: str, right: Any = plain, **common: Any
) -> Fault:
    common = {"use": right} | common
    return Fault(lambda given: {"use": loop(mistake, place, right)}, kind, text, lambda given: common)


def _twice(step: Any, loss: Tensor, items: int) -> None:
    step.backward(loss, num_items=None)
    step.backward(loss * 2)


def _scaled_twice(step: Any, loss: Tensor, items: int) -> None:
    scaled = step.scale(loss)
    for _ in range(2):
        scaled.backward(retain_graph=True)


def _inside(step: Any, loss: Tensor, items: int) -> None:
    loss.backward(retain_graph=True)
    step.backward(loss)


_no_call: Any = lambda step, loss, items: None  # noqa: E731
_scale_alone: Any = lambda step, loss, items: step.scale(loss)  # noqa: E731
_with_items: Any = lambda number: lambda step, loss, items: step.backward(loss, num_items=number)  # noqa: E731
_too_many: Any = lambda step, loss, items: step.backward(loss / max(items, 1), num_items=items + 1)  # noqa: E731
_NAMES = "expected the names ['ce', 'mtp']"


def lost(name: str, place: int, *, is_scaled: bool = False) -> Fault:
    change, kind, text = WRONG_LOSSES[name]

    def mistake(step: Any, loss: Tensor, items: int) -> None:
        step.scale(change(loss)).backward() if is_scaled else step.backward(change(loss))

    return looped(place, mistake, kind, f"on rank 1: loss of micro-batch {place}: {text}")


LOOPS = {
    **{f"{name} in {place}": lost(name, place) for name in ("mean", "vector") for place in (0, 2)},
    **{f"{name} in 2": lost(name, 2) for name in ("number", "no graph")},
    **{f"scaled {name} in {at}": lost(name, at, is_scaled=True) for name in ("mean", "vector") for at in (1, 2)},
    "no call in 2": looped(2, _no_call, "RuntimeError", "on rank 1: micro-batch 2: expected one backward, got 0."),
    "two calls in 0": looped(0, _twice, "RuntimeError", "expected one call of backward or scale, got 2."),
    "weights without names": looped(
        0,
        lambda step, loss, items: step.backward(loss, weights={"": 2.0}),
        "ValueError",
        "weights of micro-batch 0: expected None without",
    ),
    "negative items in 1": looped(1, _with_items(-1), "ValueError", "1: expected a finite number >= 0", means),
    "tensor of negative items in 1": looped(
        1, _with_items(torch.tensor(-1)), "ValueError", "1: expected a finite number >= 0, got -1."
    ),
    "text as items in 0": looped(0, _with_items("3"), "TypeError", "0: expected a number or a tensor", means),
    "too many items in 0": looped(0, _too_many, "ValueError", "num_items of micro-batch 0: expected ", means),
}
# No backward follows these, for which the others wait where the wrapper communicates in every one.
WITHOUT_BACKWARD = {
    "number in 0": lost("number", 0),
    "no graph in 1": lost("no graph", 1),
    "no call in 0": looped(0, _no_call, "RuntimeError", "micro-batch 0: expected one backward, got 0."),
    "scale alone in 1": looped(1, _scale_alone, "RuntimeError", "micro-batch 1: expected one backward, got 0."),
}
# The others have met its backward in theirs, so that no zeros follow it.
PLAIN = {
    "plain backward in 0": looped(
        0, lambda step, loss, items: loss.backward(), "RuntimeError", "micro-batch 0: expected one backward, got 0"
    )
}
# One more backward, in which FSDP2 communicates: every rank makes this mistake.
INSIDE = {
    "backward inside": looped(0, _inside, "RuntimeError", "micro-batch 0: expected gradients that have not changed"),
    "two backwards": looped(0, _scaled_twice, "RuntimeError", "micro-batch 0: expected one backward, got 2"),
}
SKIPPED = {
    "skips its only micro-batch": Fault(
        lambda given: {"use": loop(_no_call, 0)},
        "RuntimeError",
        "failed on rank 1: micro-batch 0: expected one backward, got 0",
        lambda given: {"batches": given["batches"][:1]},
    )
}


class Mistake(Exception):
    """Raised by the code of a user."""


def _fail(*arguments: Any) -> Any:
    raise Mistake("this is mine")


def at(number: int) -> Callable[[Any], Any]:
    """Return a function whose call ``number`` raises."""

    def changed(function: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        calls = iter(range(100))
        return lambda batch: (_fail if next(calls) == number else function)(batch)

    return changed


_OUTSIDE = nn.Parameter(torch.ones((), dtype=torch.float64))
_MINE = "RuntimeError", "pooled_backward failed on rank 1: Mistake: this is mine"


def _scored(change: Callable[[Tensor, Batch], Tensor], kind: str, text: str) -> Fault:
    return changed("forward", lambda forward: lambda batch: change(forward(batch), batch), kind, text)


def _loss(change: Callable[[Any, Tensor, Any], Any], kind: str, text: str) -> Fault:
    return changed("loss", lambda loss: partial(change, loss), kind, text)


# Before the second pass, with the gradients as they were.
POOLED = {
    "engine of DeepSpeed": _ENGINE,
    "unequal, each": changed("batches", _two, "ValueError", "every rank, got 3 on rank 0, 2 on rank 1", sync="each"),
    "unequal": changed("batches", _two, "ValueError", "micro_batches: expected the same number on every rank, got 3"),
    "sync": passed("sync", "never", "ValueError", "failed on rank 1: sync: expected one of"),
    "scaler": passed("scaler", torch.amp.GradScaler("cpu"), "ValueError", "scaler: False on rank 0, True on rank 1"),
    "check_replay": passed("check_replay", False, "ValueError", "check_replay: True on rank 0, False on rank 1"),
    "no_grad": passed("context", torch.no_grad, "RuntimeError", "rank 1: pooled_backward: expected gradients to be"),
    "forward": changed("forward", at(1), *_MINE),
    "first forward": changed("forward", at(0), *_MINE),
    "scores of two kinds": _scored(
        lambda scores, batch: scores[:, : 1 + int(batch["tokens"][0, 0]) % 3], "ValueError", "scores of one kind"
    ),
    "before": _loss(lambda loss, scores, batches: _fail(), *_MINE),
    "after": _loss(lambda loss, scores, batches: (loss(scores, batches), _fail()), *_MINE),
    "inside": _loss(lambda *_: global_mean(3.0, 1), "TypeError", "global_mean failed on rank 1: total"),
    "detached": _loss(lambda loss, scores, batches: loss(scores.detach(), batches), "ValueError", "gradient"),
    "vector": _loss(
        lambda loss, scores, batches: loss(scores, batches).expand(2), "ValueError", "rank 1: loss: expected a scalar"
    ),
    "leaf": _loss(
        lambda loss, scores, batches: loss(scores, batches) * _OUTSIDE, "ValueError", "the parameter '_OUTSIDE' outside"
    ),
}
# In it, with the gradients dropped.
REPLAYED = {
    "replay": _scored(lambda scores, _: scores * (1 + random.random()), "RuntimeError", "the same scores in both"),
    "again": changed("forward", at(3), *_MINE),
    "later": changed("forward", at(4), *_MINE),
    "last": changed("forward", at(5), *_MINE),
    "frozen": _scored(lambda scores, _: scores.detach(), "ValueError", "forward: expected scores with a graph"),
}


def called(change: Callable[[Any, Tensor, int], Any], kind: str, text: str, place: int = 1) -> Fault:
    """Return the fault of another call of ``DeferredMean``, by default the second."""

    def call(one: Any, index: int, loss: Tensor, n: int) -> None:
        change(one, loss, n) if index == place else one.backward(loss, n)

    return Fault(lambda given: {"call": call}, kind, text)


def with_loss(change: Callable[[Tensor], Any], kind: str, text: str) -> Fault:
    return called(lambda one, loss, n: one.backward(change(loss), n), kind, text)


def with_count(n: Any, kind: str, text: str, place: int = 1) -> Fault:
    return called(lambda one, loss, _: one.backward(loss, n), kind, text, place)


def finished(groups: Callable[[nn.Module], Any], kind: str, text: str) -> Fault:
    return Fault(lambda given: {"finish": lambda one, own: one.finish(groups(given["model"]))}, kind, text)


_NEGATIVE = "ValueError", "DeferredMean.backward failed on rank 1: n: expected a finite number >= 0, got -1."

DEFERRED = {
    **{
        name: with_loss(change, kind, f"on rank 1: loss_sum: {text}")
        for name, (change, kind, text) in WRONG_LOSSES.items()
    },
    "names": with_loss(lambda loss: {"ce": loss}, "TypeError", "got a dict. Their counts are open until the end"),
    "negative count": with_count(-1, *_NEGATIVE),
    "count that is text": with_count("3", "TypeError", "n: expected a number or a tensor of one element"),
    "finish instead": called(
        lambda one, loss, n: one.finish(), "RuntimeError", "backward on rank 0, DeferredMean.finish on rank 1"
    ),
    "finish first": called(lambda one, loss, n: one.finish(), "RuntimeError", "expected a backward since the last", 0),
    "negative count in the last": with_count(-1, *_NEGATIVE, 2),
}
_ONE_KIND = "sync_groups[0]: expected a ProcessGroup, a DeviceMesh or None"
FINISHED = {
    "text": finished(lambda model: "all", "TypeError", "sync_groups: expected a list of groups"),
    "one group": finished(lambda model: dist.group.WORLD, "TypeError", "Pass [group] for one group."),
    "a module": finished(lambda model: [model], "TypeError", _ONE_KIND),
    "another model's": finished(
        lambda model: [(nn.Linear(1, 1), None)], "ValueError", "sync_groups[0]: expected a parameter of the model"
    ),
    "no parameter": finished(lambda model: [("weight", None)], "TypeError", "parameter 0: expected a parameter"),
    "used up": finished(lambda model: [(iter([]), None)], "ValueError", "parameters, got an iterator with none."),
    "twice": finished(
        lambda model: [dist.group.WORLD, ([*model.parameters()][:1], dist.group.WORLD)],
        "ValueError",
        "in sync_groups[1]: expected one sum over each group, got a second sum over the same ranks",
    ),
    "nothing": finished(lambda model: [], "ValueError", "sync_groups: 1 on rank 0, 0 on rank 1."),
    "others": finished(
        lambda model: [([*model.parameters()][1:], dist.group.WORLD)], "ValueError", "5 on rank 0, 4 on rank 1."
    ),
}


def _unseen(places: Sequence[int]) -> Fault:
    """Return the fault of calling the module inside DDP in some micro-batches, after which DDP would not reduce."""
    return Fault(
        lambda given: {"through": lambda index: given["model"].module if index in places else given["model"]},
        "ValueError",
        "forward of the DDP module",
    )


def _leaf(given: Arguments) -> Arguments:
    """Return a loss without the model in the last micro-batch."""
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    return {
        "use": lambda step, index, loss, items: step.backward(zero if index == 2 else loss),
        "call": lambda one, index, loss, n: one.backward(zero if index == 2 else loss, n),
    }


_RIGHT = terms_in("backward")
_TERMS: dict[str, Any] = {  # arguments of step.backward instead of losses by name and their weights
    "unknown name": (lambda sums: {"loss": sums | {"kl": sums["ce"]}}, "ValueError", _NAMES),
    "missing other name": (lambda sums: {"loss": {"mtp": sums["mtp"]}}, "ValueError", _NAMES),
    "no mapping": (lambda sums: {"loss": sums["ce"] + sums["mtp"]}, "TypeError", "a mapping of ['ce', 'mtp']"),
    "unknown weight": (lambda sums: {"weights": {"kl": 1.0}}, "ValueError", "a mapping of names among"),
    "infinite weight": (
        lambda sums: {"weights": {"mtp": math.inf}},
        "ValueError",
        "weight of 'mtp': expected a finite number, got inf",
    ),
    "text weight": (lambda sums: {"weights": {"mtp": "1"}}, "TypeError", "weight of 'mtp': expected"),
    "items": (lambda sums: {"num_items": 3}, "ValueError", "expected a mapping of names among"),
    "unknown items": (lambda sums: {"num_items": {"kl": 3}}, "ValueError", "a mapping of names among"),
    "other items": (lambda sums: {"num_items": {"mtp": torch.tensor(99)}}, "ValueError", "of 'mtp': expected "),
}
# A loss of each name, of one, of none and of another weight: what is left for a wrapper to communicate.
_GRAPHS: dict[str, Any] = {
    "a number": (lambda sums: {"loss": sums | {"mtp": 1.0}}, "TypeError", "of 'mtp': expected a floating-point tensor"),
    "missing name": (lambda sums: {"loss": {"ce": sums["ce"]}}, "ValueError", _NAMES),
    "no name": (lambda sums: {"loss": {}}, "ValueError", _NAMES),
    "other weight": (lambda sums: {"weights": {"mtp": 0.5}}, "ValueError", "weight of 'mtp': expected 0.3, as earlier"),
}


def termed(place: int, change: Callable[[Any], Arguments], kind: str, text: str) -> Fault:
    wrong = lambda step, sums, items: step.backward(**{"loss": sums, "weights": WEIGHTS} | change(sums))  # noqa: E731
    return looped(place, wrong, kind, text, _RIGHT)


def _early(step: Any, index: int, losses: Any, items: int) -> None:
    """Read the factors on one rank, which sends its weights ahead."""
    if dist.get_rank() == 0:
        step.factors  # noqa: B018
    _RIGHT(step, index, losses, items)


def _one_of_two(step: Any, index: int, losses: Any, items: int) -> None:
    step.backward(losses["ce"])


_other_weights: Any = lambda step, index, losses, items: step.backward(losses, weights={"mtp": 1.3})  # noqa: E731
_TWO_WEIGHTS = "accumulate (end of the window): expected the same on every rank, got weight of 'mtp': 0.3 on rank 0, 1."
TERMS = {f"{name} in 1": termed(1, *row) for name, row in _TERMS.items()} | {
    "other weights": passed("use", _other_weights, "ValueError", _TWO_WEIGHTS),
    "other weights, early": passed("use", _other_weights, "ValueError", _TWO_WEIGHTS, use=_early),
}
GRAPHS = {f"{name} in {place}": termed(place, *row) for place in (1, 0, 2) for name, row in _GRAPHS.items()}
GRAPHS["other weight in 0"] = GRAPHS["other weight in 0"]._replace(text="weight of 'mtp': expected 0.5, as earlier")
# Zeros from all outputs would gather the other head under FSDP2, in which the other ranks take no part.
ONE_HEAD = {
    "a head left out": looped(
        1,
        lambda step, losses, items: step.backward(losses["ce"], num_items=-1),
        "ValueError",
        "num_items of micro-batch 1: expected a finite number >= 0",
        _one_of_two,
        count=count_valid_tokens,
    )
}
COUNTED = {  # what one rank counts
    "other names": passed("count", {"ce": count_valid_tokens}, "ValueError", "count of 'mtp'"),
    "no names": passed("count", {}, "ValueError", f"one to {MAX_TERMS} names, got 0"),
    "too many": passed("count", {str(n): len for n in range(MAX_TERMS + 1)}, "ValueError", f"one to {MAX_TERMS} names"),
    "a number as name": passed("count", {1: len}, "TypeError", "names that are not empty"),
    "no name as name": passed("count", {"": len}, "TypeError", "names that are not empty"),
    "text as count": passed("count", COUNTS | {"ce": "x"}, "TypeError", "count of 'ce': expected a function"),
    "negative": passed(
        "count", COUNTS | {"ce": lambda batch: -1}, "ValueError", "count of 'ce' of micro-batch 0: expected a finite"
    ),
    "no mapping": passed("count", count_valid_tokens, "ValueError", "the same on every rank"),
    "number with each": passed("count", 7.0, "ValueError", "expected a function with each=True, got 7.0", each=True),
    "another each": passed("each", True, "ValueError", "each: False on rank 0, True on rank 1"),
    "each of no kind": passed("each", 1, "TypeError", "each: expected True or False, got 1"),
}


def recorded(place: int, mistake: Callable[[Any, InChunks], Any], kind: str, text: str) -> Fault:
    return looped(place, lambda step, loss, items: mistake(step, loss), kind, text, factor_in("last"))


def _text(step: Any, loss: InChunks) -> None:
    loss(step)[1]()
    step.record("x")


def _after(step: Any, loss: InChunks) -> None:
    step.backward(loss.sum())
    step.record(0.0)


def _twice_recorded(step: Any, loss: InChunks) -> None:
    factor_in("last")(step, 0, loss, 0)
    step.record(0.0)


_ONE_RECORD = "recorded loss of micro-batch 0: expected one call, before step.backward"
RECORDED = {
    "text in 0": recorded(0, _text, "TypeError", "recorded loss of micro-batch 0: expected a number"),
    "text in 2": recorded(2, _text, "TypeError", "recorded loss of micro-batch 2: expected a number"),
    "twice": recorded(0, _twice_recorded, "RuntimeError", _ONE_RECORD),
    "after backward": recorded(0, _after, "RuntimeError", _ONE_RECORD),
}
NOTHING = {  # a rank that runs no forward: under FSDP2 the others wait in theirs
    f"nothing in {place}": recorded(
        place, lambda step, loss: None, "RuntimeError", f"micro-batch {place}: expected one backward, got 0"
    )
    for place in (0, 2)
}


def windowed(wrong: Callable[[nn.Module, Batch], Any], kind: str, text: str) -> Fault:
    def change(given: Arguments) -> Arguments:
        right = lambda model, batch: (sum_loss(model, batch), num_valid(batch))  # noqa: E731
        return {"fn": lambda model, batch: (wrong if batch is given["batches"][2] else right)(model, batch)}

    return Fault(change, kind, f"DeferredMean.backward_window (end of the window) failed on rank 1: {text}")


WINDOWED = {
    **{
        name: windowed(
            lambda model, batch, change=change: (change(sum_loss(model, batch)), 2),
            kind,
            f"loss of micro-batch 1: {text}",
        )
        for name, (change, kind, text) in WRONG_LOSSES.items()
    },
    "no pair": windowed(sum_loss, "TypeError", "fn of micro-batch 1: expected a pair (loss_sum, n), got a"),
    "negative": windowed(
        lambda model, batch: (sum_loss(model, batch), -1), "ValueError", "n of micro-batch 1: expected a finite number"
    ),
    "names": windowed(
        lambda model, batch: ({"ce": sum_loss(model, batch)}, {"ce": 2}),
        "TypeError",
        "loss_sum: expected one summed loss, got a dict.",
    ),
}
RAISED = {"raises": windowed(_fail, "RuntimeError", "Mistake: this is mine")}

UNSEEN = {
    "module in every one": _unseen(range(3)),
    "module in the last": _unseen([2]),
    "no model in the last": Fault(_leaf, "ValueError", "expected a tensor that the model has computed, got a leaf"),
}

# Every rank does so: none reduces. A window of one micro-batch has no earlier one to look at.
PAST_DDP = {
    "module in one": Fault(
        lambda given: {"through": lambda index: given["model"].module},
        "ValueError",
        "DDP reduces only after a forward of its own",
        lambda given: {"batches": given["batches"][:1]},
    ),
    **{name: UNSEEN[name]._replace(text="DDP reduces only after a forward") for name in [*UNSEEN][:2]},
}

FAULTS = {
    "accumulate": OPENINGS | LOOPS | WITHOUT_BACKWARD | INSIDE | SKIPPED | UNSEEN,
    "accumulate each": WITHOUT_BACKWARD | PLAIN | UNSEEN,
    "pooled_backward": POOLED | REPLAYED | UNSEEN,
    "DeferredMean": DEFERRED | FINISHED | UNSEEN,
    "DeferredMean both": WINDOWED | RAISED,
    "terms backward": COUNTED | TERMS | GRAPHS | ONE_HEAD,
    "factor last": RECORDED | NOTHING | PAST_DDP,
}
UNSEEN_BY = [verb for verb, faults in FAULTS.items() if UNSEEN.keys() <= faults.keys()]


# --- one step with a fault, and the next one


class Seen(NamedTuple):
    """What one rank saw of a step that is spoiled, and of the next one."""

    kind: str
    text: str
    left: str  # of the gradients: "kept" as they were, "dropped", or "exact", those of the step
    restored: bool  # the switches of the wrappers
    next_error: float
    tracebacks: int  # that an uncaught exception would print


@cache
def gradient_of_one_process(verb: str) -> Tensor:
    return one_process_of(verb, all_batches("full"))[1].gradient


def wrapped(verb: str, kind: str, buffers: bool) -> nn.Module:
    """Return the model of a verb; FSDP2 gathers each of two heads in the backward of its own loss."""
    model = model_of(verb, buffers=buffers)
    for head in (model.down, model.mtp) if isinstance(model, TwoHeads) and kind == "fsdp2" else ():
        fully_shard(head, mesh=mesh_of(kind))
    return wrap(model, kind)


def spoil(rank: int, verb: str, name: str, kind: str, is_everyone: bool) -> list[Seen]:
    """Run a step in which the last rank, or everyone, does something wrong, and the next one; and both again."""
    is_bad, found = is_everyone or rank == dist.get_world_size() - 1, []
    # With sync="each" every forward broadcasts.
    has_buffers = kind == "ddp" and name not in OPENINGS and (verb != "accumulate each" or is_everyone)
    for buffers in [False, True] if has_buffers and name in WITHOUT_BACKWARD | SKIPPED else [has_buffers]:
        model = wrapped(verb, kind, buffers)
        found.append(_spoil(rank, verb, FAULTS[verb][name], model, is_bad))
        if name == "backward inside":  # which is looked for in the first, second and fourth step, not in the third
            take(verb, arguments_of(verb, model, rank))
        found.append(_spoil(rank, verb, FAULTS[verb][name], model, is_bad))
    return found


def _spoil(rank: int, verb: str, fault: Fault, model: nn.Module, is_bad: bool) -> Seen:
    expected, is_deferred = gradient_of_one_process(verb), verb.startswith("DeferredMean")
    model.zero_grad()
    if not is_deferred:  # which begins without gradients
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    given, before, found, printed = arguments_of(verb, model, rank), switches(model), ("none", ""), ""
    given |= fault.common(given)
    given |= fault.change(given) if is_bad else {}
    try:
        take(verb, given)
    except Exception as raised:
        found, printed = (type(raised).__name__, str(raised)), "".join(traceback.format_exception(raised))
    left, restored = _left(model, expected), switches(model) == before
    if is_deferred:
        assert error_of(deferred_of(model).finish)[0] == "RuntimeError"  # nothing is left
        deferred_of(model).discard()
    model.zero_grad()
    take(verb, arguments_of(verb, model, rank))
    tracebacks = printed.count("Traceback (most recent call last)")
    return Seen(*found, left, restored, error(gradient(model), expected), tracebacks)


def _left(model: nn.Module, expected: Tensor) -> str:
    held = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    if not has_gradients(model):
        return "dropped"
    if any(grad is None for grad in held):
        return "some"
    if all(bool((grad == 1).all()) for grad in held):
        return "kept"
    return "exact" if error(gradient(model), expected) <= 1e-12 else "others"


KINDS = ("ddp", "fsdp2", "plain")


def in_turns(faults: dict[str, Fault], everywhere: tuple[str, ...], kinds: tuple[str, ...] = KINDS) -> list[Any]:
    """Return faults and wrappers: each fault under one, in turns, and those ``everywhere`` under all."""
    cases = [(name, kinds[index % len(kinds)]) for index, name in enumerate(faults)]
    cases += [(name, kind) for name in everywhere for kind in kinds]
    return list(dict.fromkeys(cases))


# Arguments are checked before the model is looked at, so their mistakes take turns.
OF_SOME = [("shard without FSDP", "ddp"), ("shard without FSDP", "plain"), ("another module", "ddp")]
OF_SOME += [("unequal", "fsdp2")]  # where unequal numbers would hang
OPENED = in_turns(
    {name: fault for name, fault in OPENINGS.items() if name not in dict(OF_SOME)},
    ("another sync",),
    ("ddp", "plain"),
)
OPENED += OF_SOME
# Mistakes that leave a model in the middle of its window are made under every wrapper.
LOOPED = in_turns(LOOPS, ("vector in 0", "no graph in 2"))
EARLY = in_turns(WITHOUT_BACKWARD, ("number in 0",))
IN_EACH = in_turns(WITHOUT_BACKWARD | PLAIN, ("number in 0",), KINDS[:2])
TERMED = in_turns(TERMS, (), ("plain", "ddp"))
TERMED += in_turns({name: fault for name, fault in GRAPHS.items() if name.endswith("1")}, ())
TERMED += in_turns({name: fault for name, fault in GRAPHS.items() if not name.endswith("1")}, (), ("ddp", "fsdp2"))
OWN = [*in_turns(RECORDED, ("text in 2",)), *in_turns(NOTHING, tuple(NOTHING), ("ddp", "plain"))]
OF_WINDOW = [*in_turns(WINDOWED, ("vector",)), *in_turns(RAISED, tuple(RAISED), ("ddp", "plain"))]

# Arguments are checked before the wrapper is looked at.
CALLED = in_turns(DEFERRED, (), ("ddp",))
CALLED += [(name, "fsdp2") for name in ("vector", "finish instead", "negative count in the last")]
# Under FSDP2 not "forward": the others would wait in the collectives of the forward that one of them does not make.
UNDER_FSDP = ("unequal", "before", "inside", "leaf", "scores of two kinds")


def rows() -> list[Any]:
    """Return verb, fault, wrapper, world size, what is left of the gradients, and whether every rank makes it."""
    found = [("accumulate", name, kind, 2, "kept", False) for name, kind in OPENED]
    found += [("accumulate", name, kind, 2, "dropped", False) for name, kind in LOOPED]
    found += [("accumulate", name, kind, 2, "dropped", False) for name, kind in EARLY]
    found += [("accumulate", name, kind, 2, "dropped", kind == "fsdp2") for name in INSIDE for kind in KINDS]
    found += [("accumulate each", name, kind, 2, "dropped", False) for name, kind in IN_EACH]
    found += [("accumulate", *SKIPPED, "ddp", world_size, "kept", False) for world_size in (2, 3)]
    found += [("pooled_backward", name, "ddp", 2, "kept", False) for name in POOLED if name != "unequal"]
    found += [("pooled_backward", name, "fsdp2", 2, "kept", False) for name in UNDER_FSDP]
    found += [("pooled_backward", "after", "plain", 2, "kept", False)]
    found += [("pooled_backward", name, "ddp", 2, "dropped", False) for name in REPLAYED]
    # What FSDP2 and HSDP hold unreduced is discarded too.
    found += [("pooled_backward", "replay", kind, 2, "dropped", False) for kind in ("fsdp2", "plain")]
    found += [("pooled_backward", "replay", "hsdp", 4, "dropped", False)]
    found += [("terms backward", name, "plain", 2, "kept", False) for name in COUNTED]
    found += [("terms backward", name, kind, 2, "dropped", False) for name, kind in TERMED]
    found += [("terms backward", *ONE_HEAD, "fsdp2", 2, "dropped", False)]
    found += [("factor last", name, kind, 2, "dropped", False) for name, kind in OWN]
    found += [("factor last", name, "ddp", 2, "dropped", True) for name in PAST_DDP]
    found += [("DeferredMean both", name, kind, 2, "dropped", False) for name, kind in OF_WINDOW]
    # A forward that communicates cannot tell the others: they wait inside the model.
    # The step continues, and its gradient is exact.
    found += [("DeferredMean", name, kind, 2, "exact", False) for name, kind in CALLED]
    found += [("DeferredMean", name, "plain", 2, "exact", False) for name in FINISHED]
    found += [
        (verb, name, "ddp", 2, "exact" if verb == "DeferredMean" else "dropped", is_everyone)
        for verb in UNSEEN_BY
        for name in UNSEEN
        for is_everyone in (False, True)
        # A replay has scores; with sync="each" the first micro-batch raises on that rank alone.
        if (verb, name) != ("pooled_backward", "no model in the last")
        and (verb, name, is_everyone) != ("accumulate each", "module in every one", False)
    ]
    fast = {(name, "ddp") for name in (*WITHOUT_BACKWARD, *INSIDE, *SKIPPED)} | {
        (name, "plain") for name in (*FINISHED, *COUNTED, *TERMS)
    }

    def mark(verb: str, name: str, kind: str, world_size: int, left: str, is_everyone: bool) -> Any:
        if world_size > 2 or (is_everyone and name in UNSEEN and verb in ("accumulate each", "pooled_backward")):
            return pytest.mark.full  # what all ranks do wrong is seen in the same place as what one does
        return [] if (name, kind) in fast else pytest.mark.slow

    return [pytest.param(*row, marks=mark(*row)) for row in found]


@pytest.mark.parametrize(("verb", "name", "kind", "world_size", "left", "is_everyone"), rows())
@on_ranks(...)
def test_a_mistake(rank: int, verb: str, name: str, kind: str, left: str, is_everyone: bool) -> None:
    """The same error on all ranks, what it leaves of the gradients, the switches of the wrapper, an exact next step."""
    fault, last = FAULTS[verb][name], dist.get_world_size() - 1
    for seen in spoil(rank, verb, name, kind, is_everyone):
        same(seen[:2])
        assert seen.kind in ([fault.kind] if is_everyone else []) + [f"Rank{fault.kind}"], seen
        assert fault.text.replace("rank 1", f"rank {last}") in seen.text, seen
        assert seen.left == left, seen
        assert seen.restored
        assert seen.next_error <= 1e-12, seen
        # The cause of an error of these may be one of the user's own.
        assert seen.tracebacks == 1 or verb in ("pooled_backward", "DeferredMean both"), seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "later", "frozen"])
@on_ranks(2)
def test_pooled_backward_with_a_mistake_of_all_ranks(rank: int, name: str) -> None:
    for seen in spoil(rank, "pooled_backward", name, "fsdp2", True):
        assert seen.text.startswith(("this is mine", "forward: expected scores with a graph"))
        assert seen.left == ("kept" if name == "forward" else "dropped")
        assert seen.next_error <= 1e-12
