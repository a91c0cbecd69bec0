"""Agreement: every communicating call opens with the same small all-gather, always of the same size.

gloo aborts or hangs when ranks enter different collectives, or the same collective with different sizes. So each rank
first joins an all-gather of one header of eight words, even if its checks have failed::

    | failed | digest | rows | checksum | total 0 | total 1 | total 2 | total 3 |

    failed    1 if this rank failed its checks
    digest    64-bit hash of the facts that must be equal on all ranks: which call, dtypes, shapes, flags, state ...
    rows      number of rows on this rank (may differ: the payload is padded to the largest)
    checksum  hash of state on the device that must be equal on all ranks
    totals    float64 numbers that differ between ranks, such as sums and counts

All ranks see the same headers and therefore take the same branch. If a rank failed or the facts differ, the ranks
exchange the reasons, and all raise the same exception. This second exchange happens only before an error.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import Words, expected
from .collectives import all_gather, lost
from .group import group_ranks
from .torch_private import backward_is_running

T = TypeVar("T")

NUM_TOTALS = 4
_WORDS = 4 + NUM_TOTALS
_LAYOUT = struct.Struct(f"=4q{NUM_TOTALS}d")

# The backends of a group never change. torch stores them as text, which would otherwise be parsed in every call.
_BACKENDS: WeakKeyDictionary[ProcessGroup, dict[str, str]] = WeakKeyDictionary()

_SAME_CALLS = "Every rank must make the same calls in the same order."
_SAME_ARGUMENTS = "Pass the same kind of arguments on every rank."


class State(NamedTuple):
    """A fact about state: ranks that differ raise RuntimeError with ``advice``. Other facts give ValueError."""

    value: object
    advice: str

    def __repr__(self) -> str:
        return repr(self.value)


class Checksum(NamedTuple):
    """A hash, int64 scalar, of state that must be equal on all ranks; its name; what to do when the ranks differ."""

    value: Tensor
    name: str
    advice: str


@dataclass(frozen=True)
class Offer(Generic[T]):
    """What one rank contributes to a call.

    Attributes:
        value: handed back to this rank by :func:`agree_on`; does not travel.
        facts: must be equal on every rank, compared by ``repr``; a :class:`State` has its own advice.
        rows: number of rows on this rank.
        totals: at most four numbers, floats or one-element tensors.
        checksum: state on the device that must be equal on every rank.
    """

    value: T
    facts: Mapping[str, object] = field(default_factory=dict)
    rows: int = 0
    totals: Sequence[Tensor | float] = ()
    checksum: Checksum | None = None


@dataclass(frozen=True)
class Agreement(Generic[T]):
    """This rank's value, and the row counts and float64 totals (W, NUM_TOTALS) of all ranks, in rank order."""

    value: T
    rows: tuple[int, ...]
    totals: Tensor


def refuse_in_backward(call: str) -> None:
    """Raise RuntimeError when a backward pass is running: a recomputed forward would gather and enqueue twice."""
    if backward_is_running():
        raise RuntimeError(
            f"{call}: called while a backward pass runs, as activation checkpointing does when it recomputes. "
            "It would enqueue its rows twice and scale gradients wrongly: call the loss outside checkpoint."
        )


def agree_on(call: str, ranks: ProcessGroup | None, bring: Callable[[], Offer[T]]) -> Agreement[T]:
    """Run ``bring`` on this rank, exchange headers, and return the result for all ranks; or raise on all of them.

    An exception in ``bring`` does not leave the other ranks waiting: this rank still joins the exchange, and every rank
    raises. ``bring`` may itself communicate over ``ranks``. If it fails in an agreement of the same ranks, all of them
    already have that exception, and it is raised unchanged.

    Args:
        call: name of the call, the first of the facts and the head of every message.
        ranks: the group that takes part. None when this process is alone: then ``bring`` is just run.
        bring: checks this rank's arguments and returns its :class:`Offer`.

    Raises:
        The failing rank's class of exception (the first of them) if a rank failed; ValueError if arguments differ;
        RuntimeError if state differs. The text names the ranks and the reasons, and is the same on every rank.
        RuntimeError too when the exchange fails, because a rank has died or does not call.
    """
    if ranks is None:
        offer = bring()
        totals = [*map(float, offer.totals), *[0.0] * (NUM_TOTALS - len(offer.totals))]
        return Agreement(offer.value, (offer.rows,), torch.tensor([totals], dtype=torch.float64, device="cpu"))
    handled = sys.exc_info()[1]
    device = header_device(ranks)
    try:
        offer = bring()
        texts = {"call": call, **{name: repr(fact) for name, fact in offer.facts.items()}}
        # Reading a total may fail too, such as one on the meta device, or behind a kernel that failed.
        checksum = 0 if offer.checksum is None else offer.checksum.value
        header = _pack((0, digest(texts), offer.rows, checksum), offer.totals, device)
    except Exception as error:
        if _is_shared(error, ranks, handled):
            raise
        _gather_headers(call, _pack((1, 0, 0, 0), (), device), ranks)
        _raise_together(ranks, {"call": call}, error=error)
    gathered = _gather_headers(call, header, ranks)  # [W, 8]
    heads = gathered[:, :4].tolist()
    first = heads[0]
    if any(head[0] or head[1] != first[1] or head[3] != first[3] for head in heads):
        advice = {name: fact.advice for name, fact in offer.facts.items() if isinstance(fact, State)}
        _raise_together(ranks, texts, advice, offer.checksum, [head[3] for head in heads])
    return Agreement(offer.value, tuple(head[2] for head in heads), gathered[:, 4:].view(torch.float64))


def _pack(words: Sequence[Tensor | int], totals: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return four words and up to four totals as one int64 tensor (8,) on ``device``."""
    assert len(totals) <= NUM_TOTALS
    plain: list[float] = []
    late: dict[int, Tensor] = {}  # values on an accelerator are written there, without waiting for them
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


def _gather_headers(call: str, header: Tensor, ranks: ProcessGroup) -> Tensor:
    """Return the headers of all ranks, (W, 8) int64 on the device of ``header``."""
    gathered = torch.empty(ranks.size() * _WORDS, dtype=torch.int64, device=header.device)
    all_gather(gathered, header, ranks, call=call, what="the all-gather of the headers")
    return gathered.view(-1, _WORDS)


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


def _is_shared(error: BaseException, ranks: ProcessGroup, handled: BaseException | None) -> bool:
    """Return True when ``error``, or what it was raised from, was raised by an agreement of ``ranks`` on all of them.

    There may be no header left to join: a rank that failed earlier in ``bring`` has already joined that agreement.
    ``handled`` is the exception that the caller was handling before the call, which is not part of this one.
    """
    link: BaseException | None = error
    while link is not None and link is not handled:
        if getattr(link, "_agreed_by", None) == id(ranks):
            return True
        link = link.__cause__ or link.__context__
    return False


def _raise_together(
    ranks: ProcessGroup,
    texts: Mapping[str, str],
    advice: Mapping[str, str] | None = None,
    checksum: Checksum | None = None,
    checksums: Sequence[int] = (),
    error: Exception | None = None,
) -> NoReturn:
    """Exchange the reasons and raise the same exception on every rank.

    Args:
        ranks: the group.
        texts: the facts of this rank.
        advice: what to do about each fact of state.
        checksum: of this rank, if it has one.
        checksums: those of all ranks.
        error: what went wrong on this rank, if anything did.
    """
    reasons: list[Any] = [None] * ranks.size()
    reason = None if error is None else (public_class(error).__name__, reason_of(error))
    try:
        dist.all_gather_object(reasons, (reason, dict(texts)), group=ranks)
    except RuntimeError as problem:
        raise lost(texts["call"], "the exchange of what went wrong", problem) from (error or problem)
    everyone, facts = group_ranks(ranks), [held for _, held in reasons]
    failed = [(rank, held["call"], *why) for rank, (why, held) in zip(everyone, reasons) if why is not None]
    if failed:
        raised = failure(failed)
    elif checksum is not None and all(held == facts[0] for held in facts):
        contents = [f"contents {value & 0xFFFFFFFF:08x}" for value in checksums]
        facts = [{"call": texts["call"], checksum.name: content} for content in contents]
        raised = disagreement(everyone, facts, {checksum.name: checksum.advice})
    else:
        raised = disagreement(everyone, facts, advice)
    raised._agreed_by = id(ranks)  # type: ignore[attr-defined]
    raise raised from error


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


def disagreement(ranks: list[int], facts: list[dict[str, str]], advice: Mapping[str, str] | None = None) -> Exception:
    """Return the exception for ranks that disagree, naming each fact, who holds which value, and what to do.

    Args:
        ranks: the global ranks.
        facts: those of each rank, ``"call"`` among them.
        advice: what to do about each fact of state; the others are about arguments.
    """
    call, keys = facts[0]["call"], list(dict.fromkeys(key for held in facts for key in held))
    advice = {"call": _SAME_CALLS, **(advice or {})}
    if len({held["call"] for held in facts}) > 1:
        call, keys = "ranks", ["call"]  # different calls have different facts, so only the calls can be compared
    differing = [key for key in keys if len({held.get(key, "nothing") for held in facts}) > 1]
    parts = [f"{key}: {_who_has_what(ranks, [held.get(key, 'nothing') for held in facts])}" for key in differing]
    fixes = dict.fromkeys(advice.get(key, _SAME_ARGUMENTS) for key in differing)
    kind = RuntimeError if any(key in advice for key in differing) else ValueError
    return kind(expected(call, "the same on every rank", Words("; ".join(parts)), " ".join(fixes)))


def _who_has_what(ranks: list[int], values: list[str]) -> str:
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values):
        ranks_by_value.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {_name_ranks(held)}" for value, held in ranks_by_value.items())


def _name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
