"""Agreement: every communicating call opens with the same all-gather, of the same size on all ranks.

gloo aborts or hangs when ranks enter different collectives, or the same collective with different sizes. So each rank
first joins an all-gather of one header of twelve words, even if its checks have failed::

    | failed | digest | rows | checksum | total 0 | ... | total 7 |

    failed    2 if this rank failed its checks; 1 if a check of values on the device failed and its reason is unknown
    digest    64-bit hash of the facts that must be equal on all ranks: which call, dtypes, shapes, flags, state ...;
              if this rank failed, hash of the reason
    rows      number of rows on this rank (may differ: the payload is padded to the largest)
    checksum  hash of state on the device that must be equal on all ranks
    totals    float64 numbers that differ between ranks, such as sums and counts

Rows travel behind the header where the group has :mod:`~fullrank.distributed.room` for them.

All ranks see the same headers and therefore take the same branch. If a rank failed or the facts differ, the ranks
exchange the reasons, and all raise the same :class:`~fullrank.errors.RankError`. A :class:`DeviceCheck` is read
together with the headers. If one has failed, its rank determines the reason, and all ranks exchange headers once more.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import RankError, RankRuntimeError, RankTypeError, RankValueError, Words, expected, is_from_a_check
from . import exchange
from .exchange import ALONE, OTHER_CALLS, WITH_GRADIENT, Exchange, communicate
from .group import check_device_of_group, group_ranks, header_device
from .room import NUM_TOTALS, Room, room_of
from .torch_private import backward_is_running, func_transforms_are_active, outside_func_transforms

T = TypeVar("T")
U = TypeVar("U")

_LAYOUT = struct.Struct(f"=4q{NUM_TOTALS}d")

_UNREAD, _FAILED = 1, 2  # the first word
_MAX_NAMED = 4  # ranks, reasons and values in a message
_MAX_LENGTH = 2000  # characters of a reason or a fact that are sent: each of W ranks receives W times the longest text

_STAND_IN: ContextVar[Callable[..., Agreement[Any]] | None] = ContextVar("stand_in", default=None)  # of `agree_on`
# Facts that calls inside a module compare next to their own, such as the weight that the module gives them.
SURROUNDING: ContextVar[Mapping[str, State]] = ContextVar("surrounding", default=MappingProxyType({}))
_NUMBERS = itertools.count(1)  # of the agreements in this process, in the order in which they begin

_SAME_CALLS = "Every rank must make the same calls in the same order."
_SAME_ARGUMENTS = "Pass the same kind of arguments on every rank."
_SAME_PRESENCE = "Pass it on every rank or on none."


class State(NamedTuple):
    """A fact about state. If the ranks differ in it, the error is a RuntimeError with ``advice``, not a ValueError."""

    value: object
    advice: str

    def __repr__(self) -> str:
        return repr(self.value)


class States(State):
    """Several facts about state: the value is a dict of them. Messages show those that differ."""

    __slots__ = ()


UNKNOWN = -(2**63)  # the checksum of a rank that does not know its state yet: no rank compares it then


class Checksum(NamedTuple):
    """A hash of state that must be equal on all ranks, or UNKNOWN."""

    value: Tensor | int  # int64 scalar
    name: str = ""  # of the state, in messages
    advice: str = ""  # what to do when the ranks differ
    facts: Mapping[str, object] = {}  # what it is a hash of, if messages can show it

    def shown(self) -> Mapping[str, object]:
        """Return the facts that the ranks compare after their checksums differ."""
        return self.facts or {self.name: State(Words(f"contents {int(self.value) & 0xFFFFFFFF:08x}"), self.advice)}


class DeviceCheck(NamedTuple):
    """A check of values on the device, not yet read by the host: its outcome can travel with the header."""

    flag: Tensor  # bool scalar, or int64 0 or 1: True if the check has failed
    error: Callable[[], Exception]  # returns the exception for it; may wait for the device

    def read(self) -> None:
        """Wait for the device, and raise if the check has failed."""
        if bool(self.flag):
            raise self.error()


def combined(checks: Sequence[DeviceCheck | None]) -> DeviceCheck | None:
    """Return one check for all ``checks``, with the error of the first that failed; None without any."""
    present = [check for check in checks if check is not None]
    if len(present) < 2:
        return present[0] if present else None
    flag = torch.stack([check.flag for check in present]).any()
    return DeviceCheck(flag, lambda: next(check.error() for check in present if bool(check.flag)))


@dataclass(slots=True)
class Offer(Generic[T]):
    """What one rank contributes to a call."""

    value: T  # returned to this rank only
    facts: Mapping[str, object] = field(default_factory=dict)  # compared by ``repr``; a State has its own advice
    rows: int = 0  # on this rank
    totals: Sequence[Tensor | float] = ()  # at most eight numbers, floats or one-element tensors
    checksum: Checksum | None = None
    check: DeviceCheck | None = None
    # Row-aligned, None for an absent one; equal on all ranks but for the number of rows, which replaces ``rows``. None
    # if the call has no rows.
    tensors: tuple[Tensor | None, ...] | None = None
    names: tuple[str, ...] = ()  # of ``tensors``, for messages
    sends_rows: bool = True  # with the header if they fit; False if most calls do not need them


@dataclass(slots=True)
class Agreement(Generic[T]):
    """This rank's value and tensors, and the row counts and totals of all ranks, in rank order."""

    value: T
    rows: tuple[int, ...]
    totals: list[list[float]]  # NUM_TOTALS of each rank
    tensors: tuple[Any, ...] = ()  # a tensor or None each, as they were offered
    arrived: list[Tensor] | None = None  # ``tensors`` without None, gathered, if their rows came with the headers


def refuse_in_backward(call: str) -> None:
    """Raise RuntimeError while a backward pass runs: a recomputed forward would communicate twice."""
    if backward_is_running():
        raise RuntimeError(
            f"{call}: called while a backward pass runs, as activation checkpointing does when it recomputes. "
            "It would communicate twice and scale gradients wrongly: call the loss outside checkpoint."
        )


def agree_on(call: str, ranks: ProcessGroup | None, bring: Callable[[], Offer[T]]) -> Agreement[T]:
    """Run ``bring`` on this rank, exchange headers, and return the :class:`Agreement`; or raise on all ranks.

    An exception in ``bring`` does not leave the other ranks waiting: this rank still joins the exchange, and every rank
    raises. ``bring`` may itself communicate over ``ranks``. If an agreement of the same ranks fails inside it, they all
    have that exception already, and it is raised unchanged. Inside a transform of ``torch.func`` all ranks raise.

    Args:
        call: name of the call, the first of the facts and the head of every message.
        ranks: the group that takes part. None when this process is alone: ``bring`` runs, and nothing is exchanged.
        bring: checks this rank's arguments and returns its :class:`Offer`.

    Raises:
        RankError: the first failing rank's class of exception (value, type or runtime) if a rank failed; a value error
            if arguments differ; a runtime error if state differs. The cause is this rank's own exception, unless a
            check of this package raised it: the message then contains its text.
        RuntimeError: when the exchange fails, because a rank has died or does not make the call. NCCL does not fail by
            itself: the host waits until the watchdog of the group ends the process, after its timeout.
    """
    if ranks is None:
        offer = bring()
        if offer.check is not None:
            offer.check.read()
        totals = [*map(float, offer.totals), *[0.0] * (NUM_TOTALS - len(offer.totals))]
        return Agreement(offer.value, (offer.rows,), [totals])
    stand_in = _STAND_IN.get()
    if stand_in is not None:
        return stand_in(call, ranks, bring)
    if func_transforms_are_active() and bring is not _refuse_transforms:
        with outside_func_transforms():  # only plain tensors can travel
            return agree_on(call, ranks, _refuse_transforms)
    number, room = next(_NUMBERS), room_of(ranks)
    checksum = own_error = None

    def header_of_failure(error: Exception) -> Tensor:
        return _pack_header((_FAILED, digest({"reason": reason_of(error)}), 0, 0), (), room, ranks)

    try:
        offer = bring()
        tensors, checksum, check = offer.tensors or (), offer.checksum, offer.check
        parcel = room.parcel_of(call, tensors, ranks)
        if has_tangent(*tensors, *offer.totals):
            _refuse_transforms()
        if check is not None and (room.is_on_host or check.flag.is_cpu):
            check.read()  # the header has to wait for the flag in any case
            check = None
        hashed = digest({"call": call, **offer.facts, **SURROUNDING.get(), "tensors": parcel.described})
        rows = offer.rows if offer.tensors is None else parcel.count
        travels = bool(tensors) and offer.sends_rows and parcel.is_on_host and room.is_on_host
        words = 0 if check is None else check.flag, hashed, rows, 0 if checksum is None else checksum.value
        # Reading a total may fail too, on the meta device or after a kernel that failed.
        header = _pack_header(words, offer.totals, room, ranks)
        if travels and parcel.needed <= room.size:
            parcel.write(room, tensors)
    except Exception as error:
        if _is_shared(error, ranks, number):
            raise
        own_error, header = error, header_of_failure(error)
    failed, digests, counts, checksums = _gather_headers(call, ranks, header, room)
    if _UNREAD in failed:
        try:
            if own_error is None and check is not None:
                check.read()
                header[0] = 0
        except Exception as error:
            own_error, header = error, header_of_failure(error)
        failed, digests, counts, checksums = _gather_headers(call, ranks, header, room)
    if any(failed) or len({*digests}) > 1 or (len({*checksums}) > 1 and UNKNOWN not in checksums):
        facts: dict[str, object] = {"call": Words(call)}
        if not any(failed) and len({*digests}) > 1:
            named = {name: Words(text) for name, text in zip(offer.names, parcel.described) if text is not None}
            facts |= {**offer.facts, **SURROUNDING.get(), **(named if offer.names else {"tensors": parcel.described})}
        elif not any(failed):
            facts |= (checksum or Checksum(0, "checksum", _SAME_CALLS)).shown()
        report, reports = Report.of(facts, own_error), list[Any]([None] * ranks.size())
        what = "the exchange of what went wrong"
        communicate(call, what, dist.all_gather_object, reports, report, group=ranks, cause=own_error)
        joint = joint_error(group_ranks(ranks), reports)
        joint.agreement = (id(ranks), number)
        raise joint from cause_of(own_error)
    agreed = Agreement(offer.value, tuple(counts), room.totals.tolist(), tensors)
    most, needed = max(counts), 0
    if travels:
        needed = parcel.needed if most == parcel.count else parcel.bytes_of(most)
    if travels and needed <= room.size:
        agreed.arrived = parcel.read(room, agreed.rows)
    room.adapt(needed)
    return agreed


def each_or_raise(
    exchange: Exchange, compute: Callable[[], tuple[T, Tensor]], size: int, device: torch.device, what: str
) -> tuple[T, Tensor]:
    """Return this rank's value of ``compute`` and the stacked blocks of all ranks; if one rank fails, all raise.

    ``compute`` returns a value and a block (size,), float64 on ``device``, which must not begin with -inf. If it
    raises, such as out of memory, the rank sends -inf instead, and all agree on the error.
    """
    own_error = None
    try:
        value, block = compute()
    except Exception as error:
        own_error, block = error, torch.full((size,), -math.inf, dtype=torch.float64, device=device)
    blocks = exchange.each(block, what)

    def bring() -> Offer[None]:
        if own_error is not None:
            raise own_error
        return Offer(None)

    if -math.inf in blocks[:, 0].tolist():
        agree_on(exchange.call, exchange.group, bring)
    return value, blocks.to(device)


def agree_once(first: Callable[[], T], second: Callable[[], U]) -> tuple[T, U]:
    """Return the results of two calls that agree over the same ranks, in one agreement.

    Runs ``first`` until it would exchange its header, then ``second``, whose header carries the facts, totals and
    checks of both; ``second`` may have no rows. Calls that agree over different ranks, or not at all, run one after the
    other.
    """
    joint: list[Agreement[Any]] = []
    results: list[U] = []

    def of_first(name: str, ranks: ProcessGroup, bring_first: Callable[[], Offer[Any]]) -> Agreement[Any]:
        def of_second(call: str, its_ranks: ProcessGroup, bring: Callable[[], Offer[Any]]) -> Agreement[Any]:
            _STAND_IN.set(None)
            if its_ranks is not ranks:
                return agree_on(call, its_ranks, bring)
            offers: list[Offer[Any]] = []

            def bring_both() -> Offer[Any]:
                offers[:] = other, one = bring(), bring_first()
                if (other.tensors, other.checksum, other.rows) != (None, None, 0):
                    fix = "If a part of a loss has been replaced, construct that loss again."
                    raise ValueError(expected(call, "a call without rows, as it shares its header", Words("rows"), fix))
                facts = {f"{key} of {call}": fact for key, fact in other.facts.items()}
                totals, check = [*one.totals, *other.totals], combined([other.check, one.check])
                return replace(one, facts={**one.facts, **facts}, totals=totals, check=check)

            joint.append(agree_on(f"{call} + {name}", ranks, bring_both))
            start = len(offers[1].totals)
            return Agreement(offers[0].value, joint[0].rows, [totals[start:] for totals in joint[0].totals])

        _STAND_IN.set(of_second)
        results.append(second())
        _STAND_IN.set(None)
        return joint[0] if joint else agree_on(name, ranks, bring_first)

    token = _STAND_IN.set(of_first)
    try:
        value = first()
    finally:
        _STAND_IN.reset(token)
    return value, results[0] if results else second()


def has_tangent(*values: object) -> bool:
    """Return True if one of ``values`` is a dual tensor of forward-mode differentiation."""
    for value in values:  # noqa: SIM110  (a generator is as many calls as there are values)
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            return True
    return False


def _refuse_transforms() -> NoReturn:
    what = "backward() or torch.autograd.grad around a call over ranks"
    got = Words("a transform: torch.func, torch.vmap or forward mode")
    fix = "Transforms work where nothing is gathered, as with gather_distributed=False."
    raise RuntimeError(expected("differentiation", what, got, fix))


def _pack_header(
    words: Sequence[Tensor | int], totals: Sequence[Tensor | float], room: Room, ranks: ProcessGroup
) -> Tensor:
    """Write four words and up to eight totals into the room; return the header, on the device where it travels."""
    values: list[Any] = [*words, *totals, *[0.0] * (NUM_TOTALS - len(totals))]
    if room.is_on_host:
        _LAYOUT.pack_into(room.block, 0, *[value.item() if isinstance(value, Tensor) else value for value in values])
        return room.sent
    device = header_device(ranks)
    on_device: dict[int, Tensor] = {}  # values that stay on the accelerator, so that the host does not wait
    for slot, value in enumerate(values):
        if isinstance(value, Tensor):
            if slot >= len(words):
                check_device_of_group("total", value, ranks)
            values[slot] = value.item() if value.is_cpu else 0
            if not value.is_cpu:
                value = value.detach().reshape(1).to(device)  # before float64, which not every accelerator has
                on_device[slot] = value.to(torch.int64) if slot < len(words) else value.double().view(torch.int64)
    _LAYOUT.pack_into(room.block, 0, *values)
    # Safe without waiting: torch has read so little unpinned memory before the call returns.
    header = room.sent.to(device, non_blocking=True)
    return torch.cat([on_device.get(slot, word) for slot, word in enumerate(header.split(1))]) if on_device else header


def _gather_headers(call: str, ranks: ProcessGroup, header: Tensor, room: Room) -> list[list[int]]:
    """Gather the headers of all ranks into the room, and return each of their four words, a list over the ranks."""
    arrived = room.arrived if room.is_on_host else torch.empty_like(room.arrived, device=header.device)
    communicate(call, "the all-gather of the headers", exchange.all_gather_flat, arrived, header, ranks)
    if not room.is_on_host:
        room.arrived.copy_(arrived)
    words: list[list[int]] = room.heads.T.tolist()
    return words


def digest(facts: Mapping[str, object]) -> int:
    """Return a signed 64-bit hash of the facts, the same in every process (``hash`` is salted per process)."""
    return _hash_of(repr({name: fact.value if isinstance(fact, State) else fact for name, fact in facts.items()}))


@functools.lru_cache(maxsize=64)  # most calls repeat the facts of an earlier one
def _hash_of(text: str) -> int:
    data = text.encode(errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def _is_shared(error: BaseException, ranks: ProcessGroup, number: int) -> bool:
    """Return True when ``error``, or what it was raised from, was raised by an agreement of ``ranks`` inside this one.

    All ranks then have that error, and none of them sends another header. Errors of agreements that started before this
    one, number ``number``, are ignored: ``error`` may have been raised while one of them was handled.
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


class Report(NamedTuple):
    """What one rank sends when the ranks do not agree: why it failed, if it did, its facts, and the advice on them."""

    reason: tuple[str, str] | None  # class and text
    facts: dict[str, str]
    advice: Mapping[str, str] = {}  # for each fact of state

    @staticmethod
    def of(facts: Mapping[str, object], error: Exception | None) -> Report:
        texts, advice = dict[str, str](), dict[str, str]()
        for name, fact in facts.items():
            key, *of_call = name.partition(" of ")  # the second call of a joint agreement
            given: Any = fact.value if isinstance(fact, States) else {key: fact}
            parts = {"".join([part, *of_call]): value for part, value in given.items()}
            texts |= {part: _cut(repr(value)) for part, value in parts.items()}
            advice |= dict.fromkeys(parts, fact.advice) if isinstance(fact, State) else {}
        return Report(None if error is None else (public_class(error).__name__, reason_of(error)), texts, advice)


def joint_error(ranks: Sequence[int], reports: Sequence[Report]) -> RankError:
    """Return the error for headers that do not agree, the same on every of the global ``ranks``, from their reports."""
    failed = [(rank, one.facts["call"], *one.reason) for rank, one in zip(ranks, reports) if one.reason is not None]
    if failed:
        numbers, (call, *_), (kind, *_), texts = zip(*failed)
        named, rest = _by_value(numbers, texts, "reason")
        return _JOINT[kind](f"{call} failed on {'; '.join([f'{who}: {text}' for text, who in named] + rest)}")
    # A fact may be one of some ranks alone.
    advice = {name: text for report in reports for name, text in report.advice.items()}
    return disagreement(ranks, [report.facts for report in reports], advice)


def copy_of(error: Exception) -> Exception:
    """Return an error of the same public class and text, with which this rank still joins the next header."""
    return public_class(error)(reason_of(error))


def cause_of(error: Exception | None) -> Exception | None:
    """Return ``error`` as the cause of the joint error; None if a check raised it, because the joint text quotes it."""
    return None if error is None or is_from_a_check(error) else error


def public_class(error: Exception) -> type[Exception]:
    """Return the class of the joint error: ValueError or TypeError if ``error`` is one, else RuntimeError."""
    return next((kind for kind in (ValueError, TypeError) if isinstance(error, kind)), RuntimeError)


def reason_of(error: Exception) -> str:
    """Return the text of ``error``, after its class unless that class is raised: a KeyError contains only a key."""
    try:
        text = str(error)
    except Exception:
        text = "an error whose text cannot be read"
    is_named = isinstance(error, RankError) or type(error) is public_class(error)
    return _cut(text if is_named else f"{type(error).__name__}: {text}")


def _cut(text: str) -> str:
    """Return ``text`` with lone surrogates escaped, which a rank may not print; if long, its beginning and a hash."""
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[:_MAX_LENGTH]} ... ({len(text)} characters, hash {digest({'': text}) & 0xFFFFFFFF:08x})"


_JOINT = {"ValueError": RankValueError, "TypeError": RankTypeError, "RuntimeError": RankRuntimeError}


def disagreement(
    ranks: Sequence[int], facts: Sequence[Mapping[str, str]], advice: Mapping[str, str] | None = None
) -> RankError:
    """Return the exception for ranks that disagree. It names the facts, the ranks with each value, and what to do.

    ``facts`` are those of each rank, ``"call"`` among them. ``advice`` says what to do about each fact of state; the
    other facts are about arguments.
    """
    call, keys = facts[0]["call"], list(dict.fromkeys(key for texts in facts for key in texts))
    advice = {"call": f"{_SAME_CALLS} {OTHER_CALLS}", **(advice or {})}
    if len({texts["call"] for texts in facts}) > 1:
        call, keys = "ranks", ["call"]  # different calls have different facts, so only the calls can be compared
    values = {key: [texts.get(key, "nothing") for texts in facts] for key in keys}
    differing = [key for key in keys if len(set(values[key])) > 1]
    absent = {key for key in differing if key not in advice and "nothing" in values[key]}  # an optional tensor
    values |= {key: ["given" if key in texts else "None" for texts in facts] for key in absent}
    advice_of_all = dict.fromkeys(absent, _SAME_PRESENCE) | advice
    parts = []
    for key in differing:
        named, rest = _by_value(ranks, values[key], "value")
        parts.append(f"{key}: {', '.join([f'{value} on {who}' for value, who in named] + rest)}")
    fixes = dict.fromkeys(advice_of_all.get(key, _SAME_ARGUMENTS) for key in differing)
    without_gradient = [{value.replace(WITH_GRADIENT, "") for value in values[key]} for key in differing]
    if "gradient" in differing or any(len(distinct) == 1 for distinct in without_gradient):
        fixes[ALONE] = None
    kind = RankRuntimeError if any(key in advice for key in differing) else RankValueError
    return kind(expected(call, "the same on every rank", Words("; ".join(parts)), " ".join(fixes)))


def _by_value(ranks: Sequence[int], values: Sequence[str], noun: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the first values, each with the names of its ranks, and a list with a text about the others, if any."""
    groups: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values):
        groups.setdefault(value, []).append(rank)
    others = list(groups.values())[_MAX_NAMED:]
    number = f"1 other {noun}" if len(others) == 1 else f"{len(others)} other {noun}s"
    rest = [f"and {number} on {name_ranks(sorted(itertools.chain(*others)))}"] if others else []
    return [(value, name_ranks(same)) for value, same in groups.items()][:_MAX_NAMED], rest


def name_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return "ranks " + ", ".join(map(str, ranks[:_MAX_NAMED])) + more
