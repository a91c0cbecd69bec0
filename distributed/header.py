"""The agreement that opens every communicating call: one small all-gather, always of the same size.

gloo aborts or hangs when ranks enter different collectives, or the same one with different sizes. So whatever a rank
is about to do, and even when it has failed its checks, it first gathers one header of eight words::

    | failed | digest | rows | checksum | total 0 | total 1 | total 2 | total 3 |

    failed    1 when this rank has an exception to raise
    digest    64-bit hash of the facts that all ranks must share: which call, dtypes, shapes, flags, temperature ...
    rows      number of rows this rank brings (may differ: the payload is padded to the largest)
    checksum  hash of device state that all ranks must share: what the memory queue holds
    totals    float64 numbers that differ by rank and are added in rank order: sums and counts of the focal losses

All ranks see the same headers and so take the same branch. If one has failed or the facts disagree, they exchange the
reasons and all raise the same exception. That second exchange happens on this path only.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import Words, attempt, expected
from .collectives import all_gather, lost
from .group import group_ranks
from .torch_private import backward_is_running

NUM_TOTALS = 4
_WORDS = 4 + NUM_TOTALS
_LAYOUT = struct.Struct(f"=4q{NUM_TOTALS}d")

# The backends of a group never change, and torch keeps them as a text that would be parsed in every call.
_BACKENDS: WeakKeyDictionary[ProcessGroup, dict[str, str]] = WeakKeyDictionary()

# What to do about a fact that differs; facts without a line here are values and shapes of the arguments.
_STATE_ADVICE = {
    "call": "Every rank must make the same calls in the same order.",
    "enqueues rows": "Call train() or eval() on every rank; gather_distributed=False lets a rank work alone.",
    "queue": "Load the same checkpoint, or call reset_queue(), on every rank.",
    "draws": "Load the same checkpoint on every rank.",
    "schedule": "Call on_train_epoch_start and on_train_batch_start with the same numbers on every rank.",
    "gradient_reduction": "Set the same gradient_reduction on every rank.",
    "temperature": "Set the same temperature, or advance the same schedule, on every rank.",
    "arguments": "Construct it with the same arguments on every rank.",
}


class Agreement(NamedTuple):
    """What the ranks told each other: row counts, and float64 totals (W, NUM_TOTALS) in rank order."""

    rows: tuple[int, ...]
    totals: Tensor


def refuse_in_backward(call: str) -> None:
    """Raise RuntimeError when a backward pass is running: a recomputed forward would gather and enqueue twice."""
    if backward_is_running():
        raise RuntimeError(
            f"{call}: called while a backward pass runs, as activation checkpointing does when it recomputes. "
            "It would enqueue its rows twice and scale gradients wrongly: call the loss outside checkpoint."
        )


def agree(
    call: str,
    group: ProcessGroup,
    *,
    error: Exception | None = None,
    facts: Mapping[str, object] | None = None,
    rows: int = 0,
    totals: Sequence[Tensor | float] = (),
    checksum: Tensor | None = None,
) -> Agreement:
    """Exchange headers, and return what the ranks bring; or raise the same exception on all of them.

    Args:
        call: name of the call, the first of the facts and the head of every message.
        group: the group that takes part.
        error: the exception this rank has to raise, if it failed its checks.
        facts: what must be equal on every rank; compared by ``repr``.
        rows: this rank's number of rows.
        totals: at most four numbers, floats or one-element tensors.
        checksum: int64 scalar that must be equal on every rank.

    Raises:
        The failing rank's class of exception (the first of them) if a rank failed; ValueError if arguments disagree;
        RuntimeError if state disagrees. The text names the ranks and the reasons, and is the same on every rank.
        RuntimeError too when the exchange fails, because a rank has died or does not call.
    """
    assert len(totals) <= NUM_TOTALS
    device = header_device(group)
    # Reading a total may fail too, such as one on the meta device, or behind a kernel that failed.
    told = None
    if error is None:
        told, error = attempt(lambda: _tell(call, facts or {}, rows, totals, checksum, device))
    texts, words = told or ({"call": call}, _header((1, 0, 0, 0), (), device))
    gathered = torch.empty(group.size() * _WORDS, dtype=torch.int64, device=device)
    all_gather(gathered, words, group, call=call, what="the all-gather of the headers")
    gathered = gathered.view(-1, _WORDS)  # [W, 8]
    head = gathered[:, :4].tolist()
    first = head[0]
    if any(row[0] or row[1] != first[1] or row[3] != first[3] for row in head):
        _raise_together(group, error, texts, head)
    return Agreement(tuple(row[2] for row in head), gathered[:, 4:].view(torch.float64))


def _tell(
    call: str,
    facts: Mapping[str, object],
    rows: int,
    totals: Sequence[Tensor | float],
    checksum: Tensor | None,
    device: torch.device,
) -> tuple[dict[str, str], Tensor]:
    """Return the facts as texts, and the header of a rank that has not failed."""
    texts = {"call": call, **{key: repr(value) for key, value in facts.items()}}
    return texts, _header((0, digest(texts), rows, 0 if checksum is None else checksum), totals, device)


def _header(words: Sequence[Tensor | int], totals: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return four words and up to four totals as one int64 tensor (8,) on ``device``."""
    plain: list[float] = []
    late: dict[int, Tensor] = {}  # what lies on an accelerator is written there, without waiting for it
    for slot, value in enumerate((*words, *totals)):
        if not isinstance(value, Tensor):
            plain.append(value)
        elif value.device.type == "cpu":
            plain.append(value.item())
        else:
            plain.append(0)
            late[slot] = value.detach().reshape(1)
    packed = bytearray(_LAYOUT.pack(*plain, *[0.0] * (_WORDS - len(plain))))
    header = torch.frombuffer(packed, dtype=torch.int64).to(device)
    for slot, value in late.items():
        header[slot : slot + 1] = value if slot < len(words) else value.to(torch.float64).view(torch.int64)
    return header


def digest(texts: Mapping[str, str]) -> int:
    """Return a signed 64-bit hash of the facts, the same in every process (``hash`` is salted per process)."""
    data = "\n".join(f"{key}={value}" for key, value in texts.items()).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def header_device(group: ProcessGroup) -> torch.device:
    """Return the device of the header: the CPU where the group can communicate there, else the accelerator.

    It depends on the group alone, never on the arguments, so that a rank with bad arguments joins the same collective.
    """
    if "cpu" in backend_by_device(group):
        return torch.device("cpu")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, torch.accelerator.current_device_index())


def backend_by_device(group: ProcessGroup) -> dict[str, str]:
    """Return the backend that ``group`` uses for each type of device, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    known = _BACKENDS.get(group)
    if known is None:
        config = dist.get_backend_config(group)
        known = _BACKENDS[group] = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return known


def _raise_together(
    group: ProcessGroup, error: Exception | None, texts: Mapping[str, str], head: list[list[int]]
) -> NoReturn:
    """Exchange the reasons and raise the same exception on every rank."""
    reasons: list[Any] = [None] * group.size()
    reason = None if error is None else (public_class(error).__name__, reason_of(error))
    try:
        dist.all_gather_object(reasons, (reason, dict(texts)), group=group)
    except RuntimeError as problem:
        raise lost(texts["call"], "the exchange of what went wrong", problem) from (error or problem)
    ranks = group_ranks(group)
    failed = [(rank, facts["call"], *reason) for rank, (reason, facts) in zip(ranks, reasons) if reason is not None]
    if failed:
        raise failure(failed) from error
    raise disagreement(ranks, [facts for _, facts in reasons], [row[3] for row in head])


def public_class(error: Exception) -> type[Exception]:
    """Return the class that every rank can raise: ValueError, TypeError, or RuntimeError for all others."""
    return next((kind for kind in (ValueError, TypeError) if isinstance(error, kind)), RuntimeError)


def reason_of(error: Exception) -> str:
    """Return the text of ``error``, after its class if another one is raised: KeyError holds a key and nothing else."""
    name = type(error).__name__
    return str(error) if name == public_class(error).__name__ else f"{name}: {error}"


def failure(failed: list[tuple[int, str, str, str]]) -> Exception:
    """Return the exception for ranks that failed: (rank, call, class, text) each."""
    kinds = {"ValueError": ValueError, "TypeError": TypeError, "RuntimeError": RuntimeError}
    ranks_by_text: dict[str, list[int]] = {}
    for rank, _, _, text in failed:
        ranks_by_text.setdefault(text, []).append(rank)
    parts = [f"{_name_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    _, call, kind, _ = failed[0]
    return kinds[kind](f"{call} failed on {'; '.join(parts)}")


def disagreement(ranks: list[int], facts: list[dict[str, str]], checksums: list[int]) -> Exception:
    """Return the exception for ranks that disagree, naming each fact, who holds which value, and what to do."""
    call, keys = facts[0]["call"], list(dict.fromkeys(key for held in facts for key in held))
    if len({held["call"] for held in facts}) > 1:
        call, keys = "ranks", ["call"]  # different calls have different facts: only the calls themselves tell
    parts, advice, is_state = [], [], False
    for key in keys:
        values = [held.get(key, "nothing") for held in facts]
        if len(set(values)) > 1:
            parts.append(f"{key}: {_who_has_what(ranks, values)}")
            is_state |= key in _STATE_ADVICE
            advice.append(_STATE_ADVICE.get(key, "Pass the same kind of arguments on every rank."))
    if not parts:
        parts.append(f"queue: {_who_has_what(ranks, [f'contents {value & 0xFFFFFFFF:08x}' for value in checksums])}")
        advice.append(_STATE_ADVICE["queue"])
        is_state = True
    kind = RuntimeError if is_state else ValueError
    return kind(expected(call, "the same on every rank", Words("; ".join(parts)), " ".join(dict.fromkeys(advice))))


def _who_has_what(ranks: list[int], values: list[str]) -> str:
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values):
        ranks_by_value.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {_name_ranks(held)}" for value, held in ranks_by_value.items())


def _name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
