"""The passes of losses over rows and pairs in C. Without the library, torch computes the same.

``setup.py`` builds ``sums.c`` into a library that is loaded through ``ctypes``; ``FULLRANK_NATIVE=0`` leaves it out.
The results differ from those of torch by rounding, so all ranks of a job must use it, or none of them: the losses
compare :data:`KERNELS`. They depend neither on the number of threads nor on the vector instructions of the processor.

C reads memory as it is told. Every tensor passes :func:`_computes` on its way there, and C checks sizes and numbers.
The functions of whole losses return None for what the library does not compute, and for tensors that are refused. What
their arguments are is in sums.c; tensors of the caller may have any strides unless it says otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ...errors import Words, expected, warn
from ..torch_private import are_plain

_LANES = 4  # parts of the rows of a class, each summed into a table of its own
# Rows from which threads pay: those of torch keep their cores busy for milliseconds after an operation.
_MANY_ROWS = 4_000_000

_POINTER, _NUMBER, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_REALS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
_CHOICES = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


def _load() -> dict[torch.dtype, dict[str, Any]]:
    """Return the functions of the library by dtype and name; none where it cannot be used, with a warning."""
    path = _path()
    if path is None or not path.exists():
        return {}
    reason = _difference_from_record(path)
    try:
        library = None if reason else ctypes.CDLL(str(path))
    except OSError as error:  # built for another machine
        library, reason = None, str(error)
    if library is None:
        fix = "Until it is built again, by installing fullrank again, torch computes the same, more slowly."
        warn(expected("kernels/native/sums.library", "what setup.py built from these sources", Words(reason), fix))
        return {}
    functions: dict[torch.dtype, dict[str, Any]] = {}
    for dtype, real in _REALS.items():
        rows = [*[_POINTER] * 4, _NUMBER, real, real, _NUMBER, _NUMBER]
        arguments = {
            "smooth_ap": [*[_POINTER] * 5, *[_NUMBER] * 3, _DOUBLE, *[_POINTER] * 3],
            "smooth_ap_of_rows": [*[_POINTER] * 4, *[_NUMBER] * 3, _POINTER, _DOUBLE, _NUMBER, *[_POINTER] * 3],
            "ndcg": [*[_POINTER] * 5, _NUMBER, _DOUBLE, *[_NUMBER] * 3, *[_POINTER] * 2],
            "soft_maximum": [*[_POINTER] * 8, _NUMBER, _NUMBER, _DOUBLE, _NUMBER, *[_POINTER] * 5],
            "unit_rows": [_POINTER, _NUMBER, _NUMBER, _POINTER],
            "unit_gradient": [*[_POINTER] * 3, _NUMBER, _NUMBER, _DOUBLE, _POINTER],
            "cross_entropy": [*[_POINTER] * 3, *[_NUMBER] * 4, _POINTER],
            "sigmoid_of_pairs": [*[_POINTER] * 3, *[_NUMBER] * 3, _POINTER],
            "cross_entropy_of_labels": [*[_POINTER] * 4, *[_NUMBER] * 3, _POINTER],
            "moments": [*rows, _POINTER],
            "evaluate": [*rows, *[_POINTER] * 4],
            "rates": [*[_POINTER] * 3, _NUMBER, real, real, _NUMBER, _NUMBER, _DOUBLE, *[_POINTER] * 4],
        }
        functions[dtype] = {name: getattr(library, f"{name}_{str(dtype)[6:]}") for name in arguments}
        for name, function in functions[dtype].items():
            function.argtypes, function.restype = arguments[name], _NUMBER
    return functions


def _path() -> Path | None:
    """Return where the library is or should be; None if the user leaves it out."""
    choice = os.environ.get("FULLRANK_NATIVE") or "1"
    if choice.lower() not in _CHOICES:
        raise ValueError(expected("FULLRANK_NATIVE", "0, 1, true, false, on or off", choice))
    return Path(__file__).with_name("sums.library") if _CHOICES[choice.lower()] else None


@functools.cache
def _warn_if_missing() -> None:
    """Say once, at the first step on the host, that there is no library: pip found no compiler."""
    path = _path()
    if path is not None and not path.exists():
        fix = "Install a wheel, or install again with a C compiler. FULLRANK_NATIVE=0 on all ranks turns this off."
        words = Words("none, so torch computes the same, two to seven times as long")
        warn(expected("kernels/native/sums.library", "the library in C", words, fix))


def _difference_from_record(path: Path) -> str:
    """Return how the library differs from the record that setup.py wrote next to it; "" if it does not.

    The system would load a truncated library, and end the process when it reads what is not there.
    """
    try:
        size, checksum = map(int, path.with_suffix(".record").read_text("ascii").split())
    except (OSError, ValueError):
        return "one without a record of its size and its sources"
    if path.stat().st_size != size:
        return f"{path.stat().st_size} of {size} bytes"
    sources = sorted([*path.parent.glob("*.c"), *path.parent.glob("*.inc")])  # not in a wheel
    if sources and zlib.crc32(b"".join(source.read_bytes() for source in sources)) != checksum:
        return "one of other sources"
    return ""


FUNCTIONS = _load()
KERNELS = "native" if FUNCTIONS else "torch"


def is_usable(scores: Tensor, *others: Tensor | None) -> bool:
    """Return whether the library has functions for the dtype of ``scores``, and all tensors are where C reads them."""
    if not FUNCTIONS and scores.is_cpu:
        _warn_if_missing()
    return scores.dtype in FUNCTIONS and are_plain((scores, *others))


_Given = tuple[Tensor | None, torch.dtype, tuple[int, ...]]  # a tensor for C, with the dtype and shape it must have


def _computes(
    name: str, given: Sequence[_Given], numbers: tuple[Any, ...], *made: Tensor, tables: Sequence[_Given] = ()
) -> bool:
    """Return whether the function ``name`` of C has computed; False if a tensor is refused, or there is no library.

    C takes the addresses of the ``given`` tensors, NULL for None, the numbers, the tables, and the tensors ``made`` for
    its results, empty where one is not wanted. All others are checked here before C sees their address. They must not
    be empty, and their numbers must be in the memory of the host, one after the other as torch shows them: not those of
    a negated view, nor the zeros that have no memory.
    """
    checked, addresses, (first, *_) = (*given, *tables), list[int | None](), given[0]
    if first is None or (first.dtype not in FUNCTIONS and not is_usable(first)):  # which warns
        return False
    if not are_plain(next(zip(*checked))):
        return False
    for tensor, dtype, shape in checked:
        address = None
        if tensor is not None:
            fits = tensor.dtype is dtype and tensor.shape == shape and tensor.is_contiguous()
            address = tensor.data_ptr() if fits else 0  # 0 too if the storage was freed
            if not address:
                return False
        addresses.append(address)
    split, results = len(given), map(Tensor.data_ptr, made)
    return bool(FUNCTIONS[first.dtype][name](*addresses[:split], *numbers, *addresses[split:], *results))


def smooth_ap(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    with_grad: bool,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return what :func:`~fullrank.kernels.smooth_ap.sums.smooth_ap_and_gradient` returns, or None."""
    if not is_usable(scores):
        return None
    num_classes, num_rows = shape = scores.shape
    original, dtype = scores.detach(), scores.dtype
    scores, positive = original.contiguous(), positive.contiguous()
    member = None if member is None else member.contiguous()
    weights = [None if given is None else given.detach().to(dtype).contiguous() for given in (weight, key_weight)]
    # Both with the same stride, so of the same shape.
    of_weights = shape if any(given is not None and given.ndim == 2 for given in weights) else shape[1:]
    masks = (positive, torch.bool, shape), (member, torch.bool, shape)
    rows = (scores, dtype, shape), *masks, *((given, dtype, of_weights) for given in weights)
    # Like the scores, because the default device may be another one.
    loss = scores.new_empty(num_classes, dtype=torch.float64)
    valid = scores.new_empty(num_classes, dtype=torch.bool)
    gradient = torch.empty_like(scores) if with_grad else scores.new_empty(0)
    numbers = num_rows if of_weights is shape else 0, num_classes, num_rows, temperature
    if not _computes("smooth_ap", rows, numbers, loss, valid, gradient):
        return None
    if with_grad and not original.is_contiguous():  # the compiler relies on the strides of the scores
        gradient = torch.empty_like(original).copy_(gradient)
    return loss, gradient, valid


def smooth_ap_rows(
    scores: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    key_weight: Tensor | None,
    ignore_index: int,
    temperature: float | None,
    multiple: float,
    with_grad: bool,
    most: int,
) -> tuple[Tensor, Tensor, Tensor | None, float] | None:
    """Return the loss of each class (C,), 0 where not valid; validity (C,); gradient (M, C); the temperature; or None.

    Of contiguous rows. A temperature of None is ``multiple`` times the spread of the scores (M, C).
    """
    (num_rows, num_classes), shape, dtype = scores.shape, scores.shape, scores.dtype
    weights = ((given, dtype, (num_rows,)) for given in (weight, key_weight))
    rows = (scores, dtype, shape), (targets, torch.int64, (num_rows,)), *weights
    loss = scores.new_empty(num_classes, dtype=torch.float64)
    valid = scores.new_empty(num_classes, dtype=torch.bool)
    gradient, width = scores.new_empty(shape if with_grad else 0), _DOUBLE(temperature or 0.0)
    scale = 0.0 if temperature is not None else multiple
    numbers = num_rows, num_classes, ignore_index, ctypes.byref(width), scale, most
    is_computed = _computes("smooth_ap_of_rows", rows, numbers, loss, valid, gradient)
    return (loss, valid, gradient if with_grad else None, width.value) if is_computed else None


def ndcg(
    scores: Tensor,
    gains: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    indexes: Tensor | None,
    temperature: float,
    top: int | None,
    is_mean: bool,
    with_grad: bool,
    most: int,
) -> tuple[Tensor, Tensor | None] | None:
    """Return the mean or sum over the queries of one minus the smooth NDCG, float64, and its gradient (M,), or None.

    Gains and weights are float64. A ``top`` of None counts all places.
    """
    shape, gradient = scores.shape, scores.new_empty(scores.shape if with_grad else 0)
    loss = scores.new_empty((), dtype=torch.float64)
    columns = [None if given is None else given.contiguous() for given in (scores, gains, member, weight, indexes)]
    dtypes = scores.dtype, torch.float64, torch.bool, torch.float64, torch.int64
    rows = [(column, dtype, shape) for column, dtype in zip(columns, dtypes)]
    numbers = len(scores), temperature, sys.maxsize if top is None else min(top, sys.maxsize), is_mean, most
    is_computed = _computes("ndcg", rows, numbers, loss, gradient)
    return (loss, gradient if with_grad else None) if is_computed else None


def soft_maximum(
    rows: Sequence[Tensor | None], budget: float, power: int, with_grad: bool, with_variance: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """Return what :func:`~fullrank.kernels.entropic_risk.risk_and_gradient` returns, or None.

    ``rows`` are its arguments up to ``scales``, and ``power`` is 1 / lambda, 0 to find it.
    """
    scores = rows[0]
    assert scores is not None
    (num_classes, num_rows), dtype = scores.shape, scores.dtype
    shapes = *[scores.shape] * 3, *[(num_rows,)] * 4, (num_classes,)
    dtypes = dtype, *[torch.bool] * 4, dtype, dtype, torch.float64
    held = [None if tensor is None else tensor.contiguous() for tensor in rows]
    loss = scores.new_empty(num_classes, dtype=torch.float64)
    tilts = torch.empty_like(loss)
    variance = scores.new_empty(num_classes if with_variance else 0, dtype=torch.float64)
    valid = scores.new_empty(num_classes, dtype=torch.bool)
    gradient = scores.new_empty(scores.shape if with_grad else 0)
    given, numbers = [*zip(held, dtypes, shapes)], (num_classes, num_rows, budget, power)
    is_computed = _computes("soft_maximum", given, numbers, loss, valid, tilts, variance, gradient)
    return (loss, gradient, valid, tilts, variance) if is_computed else None


def unit_rows(rows: Tensor) -> Tensor | None:
    """Return what :func:`~fullrank.losses.rows.unit_rows` returns for rows (N, D) of the computation, or None."""
    rows, unit = rows.detach().contiguous(), rows.new_empty(rows.shape)
    return unit if _computes("unit_rows", [(rows, rows.dtype, rows.shape)], (*rows.shape,), unit) else None


def unit_gradient(rows: Tensor, unit: Tensor, gradient: Tensor, factor: float) -> Tensor | None:
    """Return ``factor`` times the gradient of the rows (N, D) from that of their :func:`unit_rows`, or None."""
    out, tensors = rows.new_empty(rows.shape), map(Tensor.contiguous, (rows.detach(), unit, gradient))
    given = [*zip(tensors, [rows.dtype] * 3, [rows.shape] * 3)]
    return out if _computes("unit_gradient", given, (*rows.shape, factor), out) else None


def terms_of_pairs(
    name: str, scores: Tensor, positives: Tensor, weight: Tensor, first: int, both_ways: bool = False
) -> Tensor | None:
    """Return the weighted sum of the losses ``name`` of a block (b, K), the gradient in place of the scores, or None.

    ``positives`` are the scores of the pairs, and ``first + i`` the candidate of row i. ``both_ways`` adds the losses
    of the first b candidates as anchors of the rows.
    """
    total, columns, last = weight.new_empty(()), scores.shape[:1], [both_ways] if name == "cross_entropy" else []
    given = (scores, scores.dtype, scores.shape), (positives, scores.dtype, columns), (weight, torch.float64, columns)
    return total if _computes(name, given, (*scores.shape, first, *last), total) else None


def terms_of_labels(scores: Tensor, labels: Tensor, others: Tensor, weight: Tensor, first: int | None) -> Tensor | None:
    """Return the weighted sum of the losses of rows (b,) with labels, the gradient in place of the scores, or None."""
    both = (labels, torch.int64, scores.shape[:1]), (others, torch.int64, scores.shape[1:])
    given = (scores, scores.dtype, scores.shape), *both, (weight, torch.float64, scores.shape[:1])
    total, numbers = weight.new_empty(()), (*scores.shape, -1 if first is None else first)
    return total if _computes("cross_entropy_of_labels", given, numbers, total) else None


def moments(
    scores: Tensor,  # (C, M), finite, usable
    member: Tensor | None,  # (C, M) bool, the rows that take part, others in the last bin; None for all
    scale: float,  # bins per unit of the scores, a power of two
    first: Tensor,  # (C,) the number of the first bin of each class
    num_bins: int,  # of a class
    p: int,  # powers, from 0 on
    positive: Tensor | None = None,  # (C, M) bool
    weight: Tensor | None = None,  # (M,) or (C, M) in the dtype of the scores, factors of the rows; None for 1
) -> Tensor:
    """Return (p, C, num_bins + 1) float64, the sums over the rows of each bin of the powers of their positions.

    With ``positive`` there are two sums for each class, of the other rows and of these, (p, 2 C, num_bins + 1).
    """
    (num_classes, num_rows), groups = scores.shape, 1 if positive is None else 2
    lanes = _LANES if num_classes == 1 and num_rows >= max(_MANY_ROWS, _LANES * num_bins) else 1
    tables = scores.new_zeros(num_classes * lanes, groups, num_bins + 1, p, dtype=torch.float64)

    def tables_of(part: _Part) -> _Arguments:
        return (scale, float(first[part.c]), num_bins, p), [(tables[part.number], torch.float64, tables.shape[1:])]

    _pass_over("moments", scores, (member, positive), weight, _parts(scores, lanes), tables_of)
    sums = tables.view(num_classes, lanes, groups, num_bins + 1, p).sum(dim=1)
    return sums.flatten(0, 1).permute(2, 0, 1).contiguous()


def evaluate(
    coefficients: Tensor,  # (p, C, num_bins + 1) in the dtype of the scores, 0 in the last bin
    scores: Tensor,
    member: Tensor | None,
    scale: float,
    first: Tensor,
    out: Tensor,
    positive: Tensor | None = None,
    of_positives: Tensor | None = None,  # the same in float64 for the rows that are ``positive``
    weight: Tensor | None = None,
    terms: Tensor | None = None,  # those of :func:`rates`, added for the rows that are ``positive``
) -> None:
    """Write into ``out`` (C, M) the polynomial of the bin of each row at the row; 0 for a row that takes no part.

    The rows are as in :func:`moments`, and weights are factors of the values, which with ``of_positives`` require
    ``terms``.
    """
    dtype, parts = scores.dtype, _parts(scores)
    tables = coefficients.permute(1, 2, 0).contiguous()
    exact = None if of_positives is None else of_positives.permute(1, 2, 0).contiguous()
    size, p = shape = tables.shape[1:]
    places = None if positive is None or terms is None else _first_terms(positive, scores, parts)

    def tables_of(part: _Part) -> _Arguments:
        of_positives = None if exact is None else exact[part.c]
        of_class = (tables[part.c], dtype, shape), (of_positives, torch.float64, shape)
        of_part = _terms_of(terms, places, part), (out[part.c, part.rows], dtype, (part.rows.stop - part.rows.start,))
        return (scale, float(first[part.c]), size - 1, p), [*of_class, *of_part]

    _pass_over("evaluate", scores, (member, positive), weight, parts, tables_of)


def rates(
    tables: Tensor,  # (p, 4, C, num_bins + 1) float64, R_N, R_P and their slopes as polynomials; (p, 2, ...) without
    scores: Tensor,
    positive: Tensor,
    weight: Tensor,
    scale: float,
    first: Tensor,
    factor: Tensor,  # (C,) the share of a positive in the mean, divided by its weight
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss (C,) float64, the moments of the rates of the positives and the slopes of their terms.

    See :func:`~fullrank.kernels.smooth_ap.binned.solve_at_positives`: the moments are (p, 2, C, num_bins + 1) float64,
    the slopes (P + 1,) float64, with a last one that counts for nothing; None where ``tables`` has no slopes.
    """
    num_classes, parts, (p, columns, _, size) = len(scores), _parts(scores), tables.shape
    tables, with_grad = tables.permute(2, 3, 0, 1).contiguous(), columns == 4
    places = _first_terms(positive, scores, parts)
    losses = scores.new_zeros(len(parts), dtype=torch.float64)
    sums = scores.new_zeros(len(parts) if with_grad else 0, size, p, 2, dtype=torch.float64)
    terms = scores.new_empty(places[-1] + 1, dtype=torch.float64) if with_grad else None

    def tables_of(part: _Part) -> _Arguments:
        of_part = sums[part.number] if with_grad else None
        out = (losses[part.number], torch.float64, ()), (of_part, torch.float64, (size, p, 2))
        of_class = tables[part.c], torch.float64, (size, p, columns)
        numbers = scale, float(first[part.c]), size - 1, p, float(factor[part.c])
        return numbers, [of_class, *out, _terms_of(terms, places, part)]

    _pass_over("rates", scores, (positive,), weight, parts, tables_of)
    loss = losses.view(num_classes, -1).sum(dim=1)
    if terms is None:
        return loss, None, None
    return loss, sums.view(num_classes, -1, size, p, 2).sum(dim=1).permute(2, 3, 0, 1).contiguous(), terms


class _Part(NamedTuple):
    """Rows of a class that are summed into a table of their own."""

    number: int
    c: int  # the class
    rows: slice


_Arguments = tuple[tuple[Any, ...], list[_Given]]  # the numbers and the tables that C takes after the rows


def _parts(scores: Tensor, lanes: int | None = None) -> list[_Part]:
    """Return each class, or the ``lanes`` of the only one, by default so many as the rows require."""
    num_classes, num_rows = scores.shape
    if lanes is None:
        lanes = _LANES if num_classes == 1 and num_rows >= _MANY_ROWS else 1
    if lanes == 1:
        return [_Part(c, c, slice(0, num_rows)) for c in range(num_classes) if num_rows]
    ends = [num_rows * lane // lanes for lane in range(lanes + 1)]
    return [_Part(lane, 0, slice(ends[lane], ends[lane + 1])) for lane in range(lanes)]


def _pass_over(
    name: str,
    scores: Tensor,
    masks: tuple[Tensor | None, ...],
    weight: Tensor | None,
    parts: list[_Part],
    tables_of: Callable[[_Part], _Arguments],
) -> None:
    """Call the function ``name`` of C for each part of the rows, several at a time where they are many."""
    num_classes, dtype = len(scores), scores.dtype
    given = (scores, dtype), *((mask, torch.bool) for mask in masks), (weight, dtype)
    # (C, M) each, where the rows of a class are next to each other in memory.
    tensors = [(None if one is None else one.contiguous().expand(num_classes, -1), of) for one, of in given]

    def run(part: _Part) -> None:
        count, (numbers, tables) = part.rows.stop - part.rows.start, tables_of(part)
        rows = [(None if one is None else one[part.c, part.rows], of, (count,)) for one, of in tensors]
        if not _computes(name, rows, (count, *numbers), tables=tables):
            raise _refused((count, *numbers))

    threads = min(torch.get_num_threads(), len(parts)) if scores.numel() >= _MANY_ROWS else 1
    if threads == 1:
        for part in parts:
            run(part)
        return
    with ThreadPoolExecutor(threads) as pool:  # the library does not hold Python's lock
        list(pool.map(run, parts))


def _refused(got: Any) -> ValueError:
    return ValueError(expected("a tensor for C", "rows and tables in plain memory, of sizes that fit", got))


def _first_terms(positive: Tensor, scores: Tensor, parts: list[_Part]) -> list[int]:
    """Return the number of positives before each part, and of all."""
    positive = positive.contiguous()
    if not are_plain([positive]) or positive.shape != scores.shape:
        raise _refused(positive)
    array = positive.view(torch.uint8).numpy()  # bytes: numpy counts a bool as 1 only if it is the byte 1
    return [0, *itertools.accumulate(int(numpy.count_nonzero(array[part.c, part.rows])) for part in parts)]


def _terms_of(terms: Tensor | None, places: list[int] | None, part: _Part) -> _Given:
    """Return the terms from those of the positives of a part on."""
    if terms is None or places is None:
        return None, torch.float64, ()
    first = places[part.number]
    return terms[first:], torch.float64, (places[-1] + 1 - first,)
