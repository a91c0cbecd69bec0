"""Agreement: every communicating call opens with the same all-gather, of the same size on all ranks.

gloo aborts or hangs when ranks enter different collectives, or the same collective with different sizes. So each rank
first joins an all-gather of one header of eight words, even if its checks have failed::

    | failed | digest | rows | checksum | total 0 | total 1 | total 2 | total 3 |

    failed    2 if this rank failed its checks; 1 if a check of values failed whose reason is still on the device
    digest    64-bit hash of the facts that must be equal on all ranks: which call, dtypes, shapes, flags, state ...;
              of the reason, if this rank failed
    rows      number of rows on this rank (may differ: the payload is padded to the largest)
    checksum  hash of state on the device that must be equal on all ranks
    totals    float64 numbers that differ between ranks, such as sums and counts

Rows travel behind the header where the group has :mod:`~fullrank.distributed.room` for them.

All ranks see the same headers and therefore take the same branch. If a rank failed or the facts differ, the ranks
exchange the reasons, and all raise the same :class:`~fullrank.errors.RankError`. This second exchange happens only
before an error. The digests say which ranks have the same reason, so at most four ranks send one. A
:class:`DeviceCheck` is read together with the headers. If one has failed, its rank finds out the reason, and all
exchange headers once more.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import RankError, RankRuntimeError, RankTypeError, RankValueError, Words, expected, is_from_a_check
from .exchange import WITH_GRADIENT, gather_flat, naming
from .group import check_device_of_group, group_ranks, header_device
from .room import NUM_TOTALS, Room, room_of
from .torch_private import backward_is_running, func_transforms_are_active, has_tangent, outside_func_transforms

T = TypeVar("T")

_LAYOUT = struct.Struct(f"=4q{NUM_TOTALS}d")

_UNREAD, _FAILED = 1, 2  # the first word
_NO_FACTS: Mapping[str, object] = {}

_MOST = 4  # ranks, reasons and values that a message names
_LONGEST = 2000  # characters of a reason or a fact that travel: each of W ranks receives W times the longest message

_NUMBERS = itertools.count(1)  # of the agreements in this process, in the order in which they begin

_SAME_CALLS = "Every rank must make the same calls in the same order."
_SAME_ARGUMENTS = "Pass the same kind of arguments on every rank."
_ALONE = "A rank that works alone, such as in validation, sets gather_distributed=False on its losses."


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


class DeviceCheck(NamedTuple):
    """A check of values on the device that has not been read: its outcome can travel with the header."""

    flag: Tensor  # bool scalar: the check has failed
    error: Callable[[], Exception]  # what to raise then; it may wait for the device

    def read(self) -> None:
        """Wait for the device, and raise if the check has failed."""
        if bool(self.flag):
            raise self.error()


def combined(checks: Sequence[DeviceCheck]) -> DeviceCheck | None:
    """Return all ``checks`` as one, with the error of the first that failed; None without one."""
    if len(checks) < 2:
        return checks[0] if checks else None
    flag = torch.stack([check.flag for check in checks]).any()
    return DeviceCheck(flag, lambda: next(check.error() for check in checks if bool(check.flag)))


@dataclass(slots=True)
class Offer(Generic[T]):
    """What one rank contributes to a call.

    Attributes:
        value: handed back to this rank by :func:`agree_on`; does not travel.
        facts: must be equal on every rank, compared by ``repr``; a :class:`State` has its own advice. A call that
            brings the same object as the last such call spares its hash: it is never changed.
        rows: number of rows on this rank.
        totals: at most four numbers, floats or one-element tensors.
        checksum: state on the device that must be equal on every rank.
        check: checks of this rank's arguments that have not been read.
        tensors: row-aligned, None for an absent one; equal on every rank in all but the number of rows, which is then
            ``rows``. None if the call has no rows.
        stays: the rows of ``tensors`` do not travel with the header, because most calls do not need them elsewhere.
    """

    value: T
    facts: Mapping[str, object] = field(default_factory=lambda: _NO_FACTS)
    rows: int = 0
    totals: Sequence[Tensor | float] = ()
    checksum: Checksum | None = None
    check: DeviceCheck | None = None
    tensors: tuple[Tensor | None, ...] | None = None
    stays: bool = False


@dataclass(slots=True)
class Agreement(Generic[T]):
    """This rank's value and tensors, and the row counts and totals of all ranks, in rank order."""

    value: T
    rows: tuple[int, ...]
    totals: list[list[float]]  # NUM_TOTALS of each rank
    tensors: tuple[Any, ...] = ()  # a tensor or None each, as they were offered
    arrived: list[Tensor] | None = None  # those of ``tensors`` that there are with the rows of all ranks, if these came


def refuse_in_backward(call: str) -> None:
    """Raise RuntimeError when a backward pass is running: a recomputed forward would communicate twice."""
    if backward_is_running():
        raise RuntimeError(
            f"{call}: called while a backward pass runs, as activation checkpointing does when it recomputes. "
            "It would communicate twice and scale gradients wrongly: call the loss outside checkpoint."
        )


def agree_on(call: str, ranks: ProcessGroup | None, bring: Callable[[], Offer[T]]) -> Agreement[T]:
    """Run ``bring`` on this rank, exchange headers, and return the result for all ranks; or raise on all of them.

    An exception in ``bring`` does not leave the other ranks waiting: this rank still joins the exchange, and every rank
    raises. ``bring`` may itself communicate over ``ranks``. If it fails in an agreement of the same ranks, all of them
    already have that exception, and it is raised unchanged. Inside a transform of ``torch.func`` all ranks raise.

    Args:
        call: name of the call, the first of the facts and the head of every message.
        ranks: the group that takes part. None when this process is alone: then ``bring`` is just run.
        bring: checks this rank's arguments and returns its :class:`Offer`.

    Raises:
        RankError: the first failing rank's class of exception (value, type or runtime) if a rank failed; a value error
            if arguments differ; a runtime error if state differs. The text names the ranks and the reasons, and is the
            same on every rank. The cause is this rank's own exception, unless a check of this package raised that: then
            its text is in the message.
        RuntimeError: when the exchange fails, because a rank has died or does not call.
    """
    if ranks is None:
        offer = bring()
        if offer.check is not None:
            offer.check.read()
        totals = [*map(float, offer.totals), *[0.0] * (NUM_TOTALS - len(offer.totals))]
        return Agreement(offer.value, (offer.rows,), [totals])
    if func_transforms_are_active() and bring is not _refuse_transforms:
        with outside_func_transforms():  # only plain tensors can travel
            return agree_on(call, ranks, _refuse_transforms)
    number, room = next(_NUMBERS), room_of(ranks)
    checksum = mine = None

    def header_of_failure(error: Exception) -> Tensor:
        return _pack((_FAILED, digest({"reason": reason_of(error)}), 0, 0), (), room, ranks)

    try:
        offer = bring()
        tensors, checksum, check = offer.tensors or (), offer.checksum, offer.check
        parcel = room.parcel_of(call, tensors, ranks)
        if has_tangent(*tensors, *offer.totals):
            _refuse_transforms()
        if check is not None and (room.is_on_host or check.flag.is_cpu):
            check.read()  # which waits no longer than it would take to read the flag
            check = None
        # Reading a total may fail too, such as one on the meta device, or behind a kernel that failed.
        if parcel.facts is not offer.facts:
            word = digest({"call": Words(call), **offer.facts, "tensors": parcel.described})
            parcel.facts, parcel.digest = offer.facts, word
        rows = offer.rows if offer.tensors is None else parcel.count
        travels = bool(tensors) and not offer.stays and parcel.is_on_host and room.is_on_host
        words = 0 if check is None else check.flag, parcel.digest, rows, 0 if checksum is None else checksum.value
        header = _pack(words, offer.totals, room, ranks)
        if travels and parcel.needed <= room.size:
            parcel.write(room, tensors)
    except Exception as error:
        if _is_shared(error, ranks, number):
            raise
        mine, header = error, header_of_failure(error)
    _gather(call, ranks, header, room)
    heads: list[list[int]] = room.heads.tolist()
    if any(head[0] == _UNREAD for head in heads):
        try:
            if mine is None and check is not None:
                check.read()
                header[0] = 0
        except Exception as error:
            mine, header = error, header_of_failure(error)
        _gather(call, ranks, header, room)
        heads = room.heads.tolist()
    _, word, _, state = heads[0]
    if any(head[0] or head[1] != word or head[3] != state for head in heads):
        facts: dict[str, object] = {"call": Words(call)}
        if mine is None:
            facts |= {**offer.facts, "tensors": parcel.described}
        spoken = _exchange(heads, {name: repr(fact) for name, fact in facts.items()}, mine, ranks)
        advice = {name: fact.advice for name, fact in facts.items() if isinstance(fact, State)}
        raised = joint_error(call, group_ranks(ranks), heads, spoken, advice, checksum)
        raised.agreement = (id(ranks), number)
        raise raised from cause_of(mine)
    counts = tuple([head[2] for head in heads])
    agreed = Agreement(offer.value, counts, room.totals.tolist(), tensors)
    most, needed = max(counts), 0
    if travels:
        needed = parcel.needed if most == parcel.count else parcel.bytes_of(most)
    if travels and needed <= room.size:
        agreed.arrived = parcel.read(room, counts)
    room.adapt(needed)
    return agreed


def _refuse_transforms() -> NoReturn:
    what = "backward() or torch.autograd.grad around a call over ranks"
    found = Words("a transform: torch.func, torch.vmap or forward mode")
    fix = "Transforms work where nothing is gathered, as with gather_distributed=False."
    raise RuntimeError(expected("differentiation", what, found, fix))


def _pack(words: Sequence[Tensor | int], totals: Sequence[Tensor | float], room: Room, ranks: ProcessGroup) -> Tensor:
    """Write four words and up to four totals into the room; return it on the device on which it travels."""
    plain: list[Any] = [*words, *totals, *[0.0] * (NUM_TOTALS - len(totals))]
    if room.is_on_host:
        _LAYOUT.pack_into(room.own, 0, *[one.item() if isinstance(one, Tensor) else one for one in plain])
        return room.sent
    device = header_device(ranks)
    late: dict[int, Tensor] = {}  # values on an accelerator are written there, without waiting for them
    for slot, value in enumerate(plain):
        if isinstance(value, Tensor):
            if slot >= len(words):
                check_device_of_group("total", value, ranks)
            plain[slot] = value.item() if value.is_cpu else 0
            if not value.is_cpu:
                late[slot] = value.detach().reshape(1)
    _LAYOUT.pack_into(room.own, 0, *plain)
    # Without waiting: torch copies so little memory that is not pinned before it returns.
    header = room.sent.to(device, non_blocking=True)
    for slot, value in late.items():
        value = value.to(device)  # first: not every accelerator has float64
        header[slot : slot + 1] = value if slot < len(words) else value.to(torch.float64).view(torch.int64)
    return header


def _gather(call: str, ranks: ProcessGroup, header: Tensor, room: Room) -> None:
    """Let the headers of all ranks arrive in the room; an accelerator is waited for once, here."""
    if room.is_on_host:
        gather_flat(call, ranks, room.arrived, header, "the headers")
    else:
        arrived = torch.empty_like(room.arrived, device=header.device)
        gather_flat(call, ranks, arrived, header, "the headers")
        room.arrived.copy_(arrived)


def digest(facts: Mapping[str, object]) -> int:
    """Return a signed 64-bit hash of the facts, the same in every process (``hash`` is salted per process)."""
    return _hash_of(repr({name: fact.value if type(fact) is State else fact for name, fact in facts.items()}))


@functools.lru_cache(maxsize=64)  # most calls have the facts of an earlier one
def _hash_of(text: str) -> int:
    data = text.encode(errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def _is_shared(error: BaseException, ranks: ProcessGroup, number: int) -> bool:
    """Return True when ``error``, or what it was raised from, was raised by an agreement of ``ranks`` inside this one.

    There may be no header left to join: a rank that failed earlier in ``bring`` has already joined that agreement. An
    error of an agreement that began before this one, number ``number``, is not part of it. ``error`` may have been
    raised while such an error was handled.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, RankError) and link.agreement is not None:
            group, began = link.agreement
            if group == id(ranks) and began > number:
                return True
        link = link.__cause__ or link.__context__
    return False


class _Spoken(NamedTuple):
    """What one rank says when the ranks do not agree: why it failed, if it did, and its facts."""

    reason: tuple[str, str] | None  # class and text
    facts: dict[str, str]


def speakers(heads: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return which ranks say why the ranks do not agree: the first of each of the first four digests.

    Args:
        heads: the first words of the headers. If a rank failed, only ranks that failed speak. If all digests are equal,
            the checksums differ, which the headers show already: nobody speaks.

    Returns:
        The place in the group by digest, in the order of the places.
    """
    has_failed = any(head[0] for head in heads)
    places: dict[int, int] = {}
    for place, head in enumerate(heads):
        if bool(head[0]) == has_failed:
            places.setdefault(head[1], place)
    return {} if len(places) == 1 and not has_failed else dict(list(places.items())[:_MOST])


def _exchange(
    heads: Sequence[Sequence[int]], texts: Mapping[str, str], error: Exception | None, ranks: ProcessGroup
) -> dict[int, _Spoken]:
    """Return what the ranks that speak have to say, by digest; ``texts`` and ``error`` are those of this rank."""
    places = speakers(heads)
    if not places:
        return {}
    own = None
    if ranks.rank() in places.values():
        reason = None if error is None else (public_class(error).__name__, reason_of(error))
        own = _Spoken(reason, {name: _cut(text) for name, text in texts.items()})
    said: list[Any] = [None] * ranks.size()
    with naming(texts["call"], "the exchange of what went wrong", error):
        dist.all_gather_object(said, own, group=ranks)
    return {word: said[place] for word, place in places.items()}


def joint_error(
    call: str,
    ranks: list[int],
    heads: Sequence[Sequence[int]],
    spoken: Mapping[int, _Spoken],
    advice: Mapping[str, str] | None = None,
    checksum: Checksum | None = None,
) -> RankError:
    """Return the error for headers that do not agree, the same on every rank.

    Args:
        call: name of the call on this rank.
        ranks: the global ranks.
        heads: failed, digest, rows and checksum of each rank.
        spoken: what :func:`speakers` have said, by digest.
        advice: what to do about each fact of state.
        checksum: that of this rank, whose name and advice are those of all.
    """
    if any(head[0] for head in heads):
        reasons = []
        for rank, head in zip(ranks, heads):
            said = spoken.get(head[1]) if head[0] else None
            if said is not None and said.reason is not None:
                reasons.append((rank, said.facts["call"], *said.reason))
            elif head[0]:
                reasons.append((rank, "", "", f"{head[1]:016x}"))  # beyond the reasons that the text quotes
        return failure(reasons)
    if spoken:
        held = [spoken[head[1]].facts if head[1] in spoken else None for head in heads]
        return disagreement(ranks, held, advice)
    name, fix = ("checksum", _SAME_CALLS) if checksum is None else (checksum.name, checksum.advice)
    contents = [{"call": call, name: f"contents {head[3] & 0xFFFFFFFF:08x}"} for head in heads]
    return disagreement(ranks, contents, {name: fix})


def cause_of(error: Exception | None) -> Exception | None:
    """Return ``error`` as the cause of the joint one, None if a check of this package raised it: its text is there."""
    return None if error is None or is_from_a_check(error) else error


def public_class(error: Exception) -> type[Exception]:
    """Return the class that every rank can raise: ValueError, TypeError, or RuntimeError for all others."""
    return next((kind for kind in (ValueError, TypeError) if isinstance(error, kind)), RuntimeError)


def reason_of(error: Exception) -> str:
    """Return the text of ``error``, after its class if another one is raised: KeyError holds a key and nothing else."""
    try:
        text = str(error)
    except Exception:
        text = "an error whose text cannot be read"
    is_named = isinstance(error, RankError) or type(error) is public_class(error)
    return _cut(text if is_named else f"{type(error).__name__}: {text}")


def _cut(text: str) -> str:
    """Return ``text``, or its beginning and a hash of all of it: texts that differ stay different.

    A lone surrogate, such as one in the name of a file, is escaped: every rank must be able to print the text.
    """
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} ... ({len(text)} characters, hash {digest({'': text}) & 0xFFFFFFFF:08x})"


_JOINT = {"ValueError": RankValueError, "TypeError": RankTypeError, "RuntimeError": RankRuntimeError}


def failure(failed: list[tuple[int, str, str, str]]) -> RankError:
    """Return the exception for ranks that failed: (rank, call, class, text) each."""
    named, rest = _by_value([rank for rank, *_ in failed], [text for *_, text in failed], "reason")
    _, call, kind, _ = failed[0]
    return _JOINT[kind](f"{call} failed on {'; '.join([f'{who}: {text}' for text, who in named] + rest)}")


def disagreement(
    ranks: list[int], facts: Sequence[Mapping[str, str] | None], advice: Mapping[str, str] | None = None
) -> RankError:
    """Return the exception for ranks that disagree, naming each fact, who holds which value, and what to do.

    Args:
        ranks: the global ranks.
        facts: those of each rank, ``"call"`` among them; None where they are not known.
        advice: what to do about each fact of state; the others are about arguments.
    """
    held = {rank: own for rank, own in zip(ranks, facts) if own is not None}
    known, unknown = list(held.values()), [rank for rank in ranks if rank not in held]
    call, keys = known[0]["call"], list(dict.fromkeys(key for own in known for key in own))
    advice = {"call": _SAME_CALLS, **(advice or {})}
    if len({own["call"] for own in known}) > 1:
        call, keys = "ranks", ["call"]  # different calls have different facts, so only the calls can be compared
    differing = [key for key in keys if len({own.get(key, "nothing") for own in known}) > 1]
    parts = []
    for key in differing:
        named, rest = _by_value(list(held), [own.get(key, "nothing") for own in known], "value")
        parts.append(f"{key}: {', '.join([f'{value} on {who}' for value, who in named] + rest)}")
    if unknown:
        parts.append(f"others on {_name_ranks(unknown)}")
    fixes = dict.fromkeys(advice.get(key, _SAME_ARGUMENTS) for key in differing)
    without_gradient = [{own.get(key, "").replace(WITH_GRADIENT, "") for own in known} for key in differing]
    if "gradient" in differing or any(len(values) == 1 for values in without_gradient):
        fixes[_ALONE] = None
    kind = RankRuntimeError if any(key in advice for key in differing) else RankValueError
    return kind(expected(call, "the same on every rank", Words("; ".join(parts)), " ".join(fixes)))


def _by_value(ranks: list[int], values: list[str], noun: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the first values, each with the names of its ranks; and one text about the values left out, if any are."""
    groups: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values):
        groups.setdefault(value, []).append(rank)
    left = list(groups.values())[_MOST:]
    others = f"1 other {noun}" if len(left) == 1 else f"{len(left)} other {noun}s"
    rest = [f"and {others} on {_name_ranks(sorted(itertools.chain(*left)))}"] if left else []
    return [(value, _name_ranks(held)) for value, held in groups.items()][:_MOST], rest


def _name_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MOST} more" if len(ranks) > _MOST else ""
    return "ranks " + ", ".join(map(str, ranks[:_MOST])) + more
