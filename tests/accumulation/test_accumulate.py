"""Accumulation of summed losses: micro-batches and ranks against one process with all the rows."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import all_batches, make_batch, make_window, num_valid, one_process, sum_loss
from blindfold import Blindfold
from loss_cases import normal
from meshes import init_device_mesh
from on_ranks import common_error, on_ranks
from subjects import LIMITS, Model, assert_exact, by_hand, error, gradient, reduced, switches, wrap
from torch import Tensor, nn
from torch.utils.data import Subset
from verbs import run_window
from workers import error_of

import fullrank
from fullrank import accumulate, count_valid_tokens, discard_gradients_
from fullrank.accumulation import token_count
from fullrank.accumulation.window import list_micro_batches


@on_ranks()
def test_every_form_of_count_and_step(rank: int) -> None:
    model, expected, errors = wrap(Model(), "ddp"), one_process(Model(), all_batches("uneven")), {}
    total = sum(map(num_valid, all_batches("uneven")))
    batches = [batch | {"ids": torch.zeros_like(batch["labels"])} for batch in make_window("uneven", rank)]

    def torch_mean(step: Any, index: int, logits: Tensor, items: int) -> None:
        """NaN without a valid token, also in its gradient."""
        labels = batches[index]["labels"][:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
        step.backward(loss, num_items=(labels != -100).sum())

    forms: dict[str, dict[str, Any]] = {
        "function": {"count": num_valid},
        "function of tensors": {"count": lambda batch: (batch["labels"][:, 1:] != -100).sum()},
        "number": {"count": total},
        "tensor": {"count": torch.tensor([float(total)])},
        "window count": {"count": count_valid_tokens(batches)},
        "documents": {"count": partial(count_valid_tokens, document_ids_key="ids")},
        "mean": {"loss": lambda model, batch: model(batch["tokens"]), "use": torch_mean},
        "scale": {"use": lambda step, index, loss, items: step.scale(loss).backward()},
    }
    for name, options in forms.items():
        model.zero_grad()
        loss = run_window(model, batches, **options)
        errors |= {name: error(gradient(model), expected.gradient), f"{name} loss": error(loss, expected.loss)}
    assert_exact(errors, "float64")


@pytest.mark.parametrize(
    ("kind", "sync", "world_size", "discard"),
    [
        ("ddp", "last", 2, True),
        ("fsdp2", "last", 2, True),
        ("fsdp2", "each", 2, True),
        ("plain", "last", 2, True),
        pytest.param("hsdp", "shard", 4, True, marks=pytest.mark.slow),
        ("fsdp2", "last", 2, False),  # the control: zero_grad does not discard
    ],
)
@on_ranks(...)
def test_discarded_window_leaves_nothing(rank: int, kind: str, sync: str, discard: bool) -> None:
    """Left in the middle, or in front of the last backward. There the switches of the wrapper are restored."""
    reference, model = Model(), wrap(Model(), kind)
    batches, before = make_window("full", rank), switches(model)
    expected = one_process(reference, all_batches("full")).gradient
    options: dict[str, Any] = {"sync": sync, "group": by_hand(model)}
    for last in (0, 2):
        for index, (step, batch) in enumerate(accumulate(model, batches, count_valid_tokens, **options)):
            assert kind == "plain" or sync == "each" or index != 1 or switches(model) != before
            loss = sum_loss(model, batch)
            if index == last == 2:
                break
            step.backward(loss)
            if index == last:
                break
        assert switches(model) == before
        model.zero_grad()
        if discard:
            discard_gradients_(model)
        run_window(model, batches, sync=sync)
        wrong = error(reduced(model), expected)
        assert wrong <= LIMITS["float64"] if discard else wrong > 0.1
        discard_gradients_(model)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@on_ranks()
def test_half_precision_is_as_good_as_one_process(rank: int, dtype: str) -> None:
    """Against float64, the error may be that of one process in the same dtype, and rounding of the sums over ranks."""
    true = one_process(Model(torch.float64), all_batches("uneven")).gradient
    model = wrap(Model(dtype), "ddp")
    assert run_window(model, make_window("uneven", rank)).dtype == torch.float32
    alone = one_process(Model(dtype), all_batches("uneven")).gradient
    limit = 2 * error(alone.double(), true) + torch.finfo(alone.dtype).eps
    assert error(gradient(model).double(), true) <= limit


@on_ranks()
def test_discarded_window_of_unequal_length_leaves_nothing(rank: int) -> None:
    """All leave in their first micro-batch, which is the last too for one; DDP has a buffer that it broadcasts."""
    batches, reference, inner = make_window("full", rank)[: rank + 1], Model(), Model()
    inner.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
    model = wrap(inner, "ddp")
    everything = [batch for r in range(dist.get_world_size()) for batch in make_window("full", r)[: r + 1]]
    run_window(model, batches)
    for _ in accumulate(model, batches, count_valid_tokens):
        sum_loss(model, batches[0])
        break
    assert bool(model.require_forward_param_sync) == (rank == 0)  # the control: the next forwards would not have met
    discard_gradients_(model)
    for _ in range(2):
        model.zero_grad()
        run_window(model, batches)
        assert error(gradient(model), one_process(reference, everything).gradient) <= LIMITS["float64"]


@pytest.mark.parametrize("discards", [True, False])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@on_ranks()
def test_switches_after_a_loop_that_was_left_and_is_kept(rank: int, kind: str, discards: bool) -> None:
    """As a traceback keeps it. They are restored by a discard, or by the next loop. The control: not before."""
    model, batches = wrap(Model(), kind), make_window("full", rank)
    before, loop = switches(model), accumulate(model, batches, count_valid_tokens)
    next(loop)
    sum_loss(model, batches[0])
    assert switches(model) != before
    if discards:
        discard_gradients_(model)
        assert next(loop, None) is None  # it has ended
    assert (switches(model) == before) == discards
    run_window(model, batches)
    assert switches(model) == before
    loop.close()
    assert switches(model) == before
    assert error(gradient(model), one_process(Model(), all_batches("full")).gradient) <= LIMITS["float64"]


def make_rows() -> tuple[torch.nn.Linear, list[torch.Tensor]]:
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    return model, [normal(size, 2, seed=size) for size in (3, 1, 5)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_process_raises_at_once_and_discards_what_it_has_added(place: int) -> None:
    model, rows = make_rows()
    before = model.weight.grad = torch.ones_like(model.weight)
    for index, (step, batch) in enumerate(fullrank.accumulate(model, rows, len)):
        loss = model(batch).sum()
        if index == place:
            with pytest.raises(
                ValueError, match=f"loss of micro-batch {place}: expected a loss with a graph"
            ) as caught:
                step.backward(loss.detach())
            assert type(caught.value) is ValueError  # over ranks it is a RankError too
            break
        step.backward(loss)
    assert model.weight.grad is (None if place else before)
    assert bool((before == 1).all()) or place > 0  # nothing was added before, so nothing is taken away
    with pytest.raises(RuntimeError, match="mean_loss"):
        step.mean_loss()


@pytest.mark.parametrize("items", [None, "tensor", "number"])
def test_no_micro_batch_but_the_last_is_waited_for(
    device: torch.device, items: str | None, no_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    model, rows = make_rows()
    model, rows = model.to(device), [row.to(device) for row in rows]
    loop = fullrank.accumulate(model, rows, lambda batch: torch.full((), len(batch), device=device))
    for index, (step, batch) in enumerate(loop):
        loss = model(batch).square().sum() / (len(batch) if items else 1)
        number = {"tensor": torch.full((), len(batch), device=device), "number": len(batch)}.get(items)
        blindfold = nullcontext() if device.type == "cpu" else Blindfold()  # on the host a count is there already
        with blindfold, no_waits() if index < len(rows) - 1 else nullcontext():
            step.backward(loss, num_items=number)
    with Blindfold(), pytest.raises(AssertionError, match="a value was read"):  # it does see a read
        float(step.mean_loss())


two_of = partial(Subset, indices=[0, 1])  # a sequence by the old protocol, such as a map-style data set


@pytest.mark.parametrize("kind", [list, tuple, deque, two_of, lambda items: dict.fromkeys(items).keys()])
def test_every_sequence_is_a_window(kind: Callable[[list[int]], Any]) -> None:
    assert list_micro_batches(kind([3, 4])) == [3, 4]


def test_mean_loss_is_for_ended_windows() -> None:
    model, rows = make_rows()
    for step, batch in fullrank.accumulate(model, rows, len):
        step.backward(model(batch).sum())
        with pytest.raises(RuntimeError, match="a window that has ended, got one that has not"):
            step.mean_loss()
        break
    with pytest.raises(RuntimeError, match="a window that has ended"):
        step.mean_loss()
    with pytest.raises(RuntimeError, match="none: the loop was left"):
        step.backward(model(rows[0]).sum())


def test_nan_is_never_hidden_where_there_are_terms() -> None:
    model, rows = make_rows()
    for step, batch in fullrank.accumulate(model, rows, len):
        step.backward(model(batch).sum() * float("nan"))
    assert bool(step.mean_loss().isnan())
    assert bool(model.weight.grad.isnan().all())


def test_windows() -> None:
    assert list(fullrank.windows(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(fullrank.windows(iter(range(4)), 2)) == [[0, 1], [2, 3]]
    assert list(fullrank.windows([], 2)) == []
    taken = []
    loader = (taken.append(index) or index for index in range(9))
    assert next(fullrank.windows(loader, 2)) == [0, 1]
    assert taken == [0, 1]  # it never reads ahead of the window


@pytest.mark.parametrize(
    ("loader", "size", "kind", "text"),
    [
        ([1], 0, ValueError, "size: expected an int >= 1, got 0."),
        ([1], 2.0, TypeError, "size: expected an int, got 2.0."),
        ([1], True, TypeError, "size: expected an int, got True."),
        (7, 1, TypeError, "loader: expected an iterable of micro-batches, got 7."),
    ],
)
def test_windows_checks_at_the_call(loader: object, size: object, kind: type, text: str) -> None:
    with pytest.raises(kind) as raised:
        fullrank.windows(loader, size)
    assert str(raised.value).startswith(text)


def test_count_valid_tokens() -> None:
    labels = torch.tensor([[1, 2, -100], [-100, 4, 5]])
    keys, others = ("labels", "target_tokens"), ("labels", "other")
    holder = SimpleNamespace(labels=None, target_tokens=labels)  # a micro-batch with attributes
    assert fullrank.count_valid_tokens([{"labels": labels}]) == 3
    assert fullrank.count_valid_tokens([{"labels": labels}], shift=False) == 4
    assert fullrank.count_valid_tokens([{"labels": labels}, {"labels": labels[0]}], ignore_index=2) == 3 + 1
    assert fullrank.count_valid_tokens([{"other": labels}], key="other") == 3
    assert fullrank.count_valid_tokens([{"labels": labels, "other": labels[:1]}, {"other": labels}], key=others) == 6
    assert fullrank.count_valid_tokens([{"other": labels, "labels": None}], key=others) == 3
    assert fullrank.count_valid_tokens([holder], key=keys, shift=(True, False)) == 4
    assert fullrank.count_valid_tokens([]) == 0
    assert fullrank.count_valid_tokens([{"labels": labels[:, :0]}]) == 0
    for given, options, text in (
        (labels, {"key": 3}, r"key: expected a string or a tuple of strings, got 3\. For batches that are tuples"),
        (labels, {"shift": 1}, "shift: expected True or False, or a tuple with one for each key, got 1"),
        (labels[0, 0], {}, "Pass shift=False for single labels"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            fullrank.count_valid_tokens([{"labels": given}], **options)


def test_the_count_that_is_advised_for_tuples() -> None:
    """As a TensorDataset gives them: what the messages name counts the labels of the batch that are not ignored."""
    window = [(torch.ones(3, 1), torch.tensor([1, -100, 2])), (torch.ones(2, 1), torch.tensor([0, 3]))]
    model = nn.Linear(1, 1)
    for count in ("labels", count_valid_tokens, partial(count_valid_tokens, key=1)):
        with pytest.raises((TypeError, ValueError), match=r"tuples accumulate takes a function: count=") as raised:
            accumulate(model, window, count)
    advised = eval(str(raised.value).partition("takes a function: count=")[2].removesuffix("."))
    for step, (features, _) in accumulate(model, window, advised):
        step.backward(4 * features.sum() + 0 * model(features).sum())
    assert float(step.mean_loss()) == 4 * 5 / 4


@pytest.mark.parametrize("key", ["target_tokens", "shift_labels", "shifted_labels"])
@pytest.mark.parametrize("in_a_loop", [False, True], ids=["count", "accumulate"])
def test_labels_that_are_shifted_already_by_their_name(key: str, in_a_loop: bool) -> None:
    """One warning in the process for each key; none with shift=False, nor where another key is used."""
    token_count._warn_of_shift.cache_clear()
    window = [{key: torch.tensor([[1, 2], [-100, 4]])}] * 2

    def counted(batches: list[Any], **options: Any) -> list[str]:
        rule = partial(count_valid_tokens, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if in_a_loop:
                accumulate(nn.Linear(1, 1), batches, rule)
            else:
                rule(batches)
        return [str(warning.message) for warning in caught]

    assert counted(window, key=key, shift=False) == []
    assert counted(window, key=("labels", key), shift=(True, False)) == []
    assert counted([{"labels": torch.ones(1, 2).long(), **batch} for batch in window], key=("labels", key)) == []
    (text,) = counted(window, key=("labels", key))
    assert text.startswith(f"count_valid_tokens: shift=True does not count the first label of each row, but {key!r}")
    assert counted(window, key=key) == []


@on_ranks()
def test_count_valid_tokens_over_ranks(rank: int) -> None:
    window, world_size = make_window("uneven", rank), dist.get_world_size()
    own = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("others", "own"))["own"]
    is_last = rank == world_size - 1
    assert count_valid_tokens(window) == sum(map(num_valid, all_batches("uneven")))
    assert count_valid_tokens(window, group=own) == sum(map(num_valid, window))
    kind, text = error_of(lambda: count_valid_tokens(iter(window) if is_last else window))
    assert kind == "TypeError"
    assert f"failed on rank {world_size - 1}: " in text
    assert error_of(lambda: count_valid_tokens(window, shift=not is_last))[0] == "ValueError"


@on_ranks(2)
def test_no_graph_outlives_its_micro_batch(rank: int) -> None:
    """With sync="each" the step notes what the model has returned."""
    model, numbers, alive = wrap(Model(), "ddp"), list[int](), weakref.WeakSet[Any]()

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        alive.add(hook := partial(torch.clone))
        output.register_hook(hook)  # which lives as long as the graph

    model.register_forward_hook(watch)
    for step, batch in accumulate(model, [make_batch(rank, 0)] * 3, count_valid_tokens, sync="each"):
        step.backward(sum_loss(model, batch))
        numbers.append(len(alive))
    gc.collect()
    assert (numbers[0], len(alive)) == (1, 0)


STEPPED = "optimizer.step(): expected a call after the last backward of the window, got one before."
GONE = "gradients at the loss of micro-batch {}: expected those of the micro-batches before, got None."
HASTY: dict[str, Any] = {  # a call, its micro-batch, whether before the loss or after the backward; the error
    "step after 0": ("step", 0, True, STEPPED),
    "step before 2": ("step", 2, False, STEPPED),
    "zero_grad after 0": ("zero_grad", 0, True, GONE.format(1)),
    "zero_grad before 2": ("zero_grad", 2, False, GONE.format(2)),
    "zero_grad of the model before 1": ("zero_grad of the model", 1, False, GONE.format(1)),
    "step after 2": ("step", 2, True, ""),  # the gradients are final: the control
    "zero_grad before 0": ("zero_grad", 0, False, ""),
}


@pytest.mark.parametrize("name", HASTY)
@pytest.mark.parametrize(("kind", "sync"), [("plain", "last"), ("ddp", "last"), ("fsdp2", "each")])
@on_ranks(2)
def test_an_optimizer_inside_the_loop(rank: int, kind: str, sync: str, name: str) -> None:
    """Of one rank, in windows 1 and 2; the optimizer of another model may step, and so may this one at the end."""
    model, other = wrap(Model(), kind), Model()
    call, place, is_after, wanted = HASTY[name]
    optimizer, another = (torch.optim.SGD(one.parameters(), lr=0.0) for one in (model, other))
    calls = {"step": optimizer.step, "zero_grad": optimizer.zero_grad, "zero_grad of the model": model.zero_grad}
    batches, expected = make_window("full", rank), one_process(Model(), all_batches("full")).gradient

    def run(is_hasty: bool) -> None:
        options: Any = {"group": by_hand(model), "sync": sync}
        for index, (step, batch) in enumerate(accumulate(model, batches, count_valid_tokens, **options)):
            another.step()
            if is_hasty and (index, False) == (place, is_after):
                calls[call]()
            step.backward(sum_loss(model, batch))
            if is_hasty and (index, True) == (place, is_after):
                calls[call]()

    for _ in range(2):
        kind_of_error, text = common_error(lambda: run(not wanted or rank == 1))
        if wanted:
            assert (kind_of_error, wanted in text) == ("RuntimeError", True), text
            assert "on rank 1: " in text
            assert not gradient(model).any()
        else:
            assert kind_of_error == "none", text
            assert error(reduced(model), expected) <= 1e-12
        optimizer.step()  # after the loop
        model.zero_grad()
