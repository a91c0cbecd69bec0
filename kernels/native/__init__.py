"""The passes of losses over rows and pairs in C. Without the library, torch computes the same.

``setup.py`` builds ``sums.c`` into a library that is loaded through ``ctypes``; ``FULLRANK_NATIVE=0`` leaves it out.
The results differ from those of torch by rounding, so all ranks of a job must use it, or none of them: the losses
compare :data:`KERNELS`. They depend neither on the number of threads nor on the vector instructions of the processor.

C reads memory as it is told. Every tensor passes :func:`_address` on its way there, and C checks sizes and numbers. The
functions of whole losses return None for what the library does not compute, see sums.c, and for tensors that the gate
refuses.
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
from typing import Any

import numpy
import torch
from torch import Tensor

from ...errors import Words, expected, warn
from ..torch_private import is_plain

_LANES = 4  # parts of the rows of a class, each summed into a table of its own
# Rows from which threads pay: those of torch keep their cores busy for milliseconds after an operation.
_MANY_ROWS = 4_000_000

_POINTER, _NUMBER, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_REALS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
_CHOICES = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


def _load() -> dict[torch.dtype, dict[str, Any]]:
    """Return the functions of the library by dtype and name; none where it cannot be used, with a warning.

    Without a library the warning comes with the first step: not everybody takes one on the host.
    """
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
    """Say once, at the first step that torch computes for it, that there is no library: pip found no compiler."""
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
    return scores.dtype in FUNCTIONS and all(tensor is None or is_plain(tensor) for tensor in (scores, *others))


def _address(tensor: Tensor | None, dtype: torch.dtype, *shapes: tuple[int, ...]) -> int | None:
    """Return the address of ``tensor``, or None for None.

    Every tensor from outside is checked here before C sees its address; outputs that we allocate are not.

    Raises:
        _Refused: unless these are numbers of ``dtype`` in one of the ``shapes``, not empty, in the memory of the host,
            one after the other as torch shows them: not those of a negated view, nor the zeros that have no memory.
    """
    if tensor is None:
        return None
    address = 0
    if tensor.dtype is dtype and tensor.shape in shapes and is_plain(tensor) and tensor.is_contiguous():
        address = tensor.data_ptr()  # 0 if the storage was freed
    if not address:
        raise _Refused("a tensor for C", f"{dtype} of a shape in {shapes} in plain memory", tensor)
    return address


class _Refused(ValueError):
    """What does not pass the gate: torch computes in place of C, or the caller is wrong."""

    def __str__(self) -> str:
        return expected(*self.args)  # later than at the raise, of which a step may have one


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
    if not is_usable(scores) or scores.numel() == 0:
        return None
    num_classes, num_rows = shape = scores.shape
    original = scores.detach()
    scores, positive = original.contiguous(), positive.contiguous()
    member = None if member is None else member.contiguous()
    weights = [
        None if given is None else given.detach().to(scores.dtype).contiguous() for given in (weight, key_weight)
    ]
    # Like the scores, because the default device may be another one.
    loss = scores.new_empty(num_classes, dtype=torch.float64)
    valid = scores.new_empty(num_classes, dtype=torch.bool)
    gradient = torch.empty_like(scores) if with_grad else scores.new_empty(0)
    # Both with the same stride, so of the same shape.
    of_weights = shape if any(given is not None and given.ndim == 2 for given in weights) else shape[1:]
    out = loss.data_ptr(), valid.data_ptr(), gradient.data_ptr() if with_grad else None
    try:
        masks = _address(positive, torch.bool, shape), _address(member, torch.bool, shape)
        addresses = [_address(given, scores.dtype, of_weights) for given in weights]
        pool = _address(scores, scores.dtype, shape), *masks, *addresses
    except _Refused:
        return None
    stride = num_rows if of_weights is shape else 0
    if not FUNCTIONS[scores.dtype]["smooth_ap"](*pool, stride, num_classes, num_rows, temperature, *out):
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

    Args:
        scores: (M, C), of a dtype that the library has functions for.
        targets: (M,) int64: class indices, or 0 and 1 for one class.
        weight: (M,) in the dtype of the scores, of the positives in the mean; None for 1.
        key_weight: the same, of the rows where they are compared.
        ignore_index: the target of rows to leave out.
        temperature: > 0; None for ``multiple`` times the spread of the scores.
        most: pairs of a positive and a row up to which C computes the loss.
    """
    num_rows, num_classes = shape = scores.shape
    try:
        pool = _address(scores, scores.dtype, shape), _address(targets, torch.int64, (num_rows,))
        of_positives = None if weight is None else _address(weight, scores.dtype, (num_rows,))
        of_keys = None if key_weight is None else _address(key_weight, scores.dtype, (num_rows,))
    except _Refused:
        return None
    loss = scores.new_empty(num_classes, dtype=torch.float64)
    valid = scores.new_empty(num_classes, dtype=torch.bool)
    gradient, width = torch.empty_like(scores) if with_grad else None, _DOUBLE(temperature or 0.0)
    out = loss.data_ptr(), valid.data_ptr(), None if gradient is None else gradient.data_ptr()
    scale = 0.0 if temperature is not None else multiple
    numbers = num_rows, num_classes, ignore_index, ctypes.byref(width), scale, most
    is_computed = FUNCTIONS[scores.dtype]["smooth_ap_of_rows"](*pool, of_positives, of_keys, *numbers, *out)
    return (loss, valid, gradient, width.value) if is_computed else None


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

    Args:
        scores: (M,), of a dtype that the library has functions for.
        gains: (M,) float64.
        member: (M,) bool, the rows that take part, and all with a gain; None for all.
        weight: (M,) float64, of which a query has the mean; None for 1.
        indexes: (M,) int64, the query of each row; None for one query.
        temperature: > 0.
        top: places that count; None for all.
        is_mean: False for the sum.
        with_grad: whether to return the gradient.
        most: pairs of a row with a gain and a row of its query up to which C computes the loss.
    """
    shape, gradient = scores.shape, scores.new_empty(scores.shape) if with_grad else None
    loss = scores.new_empty((), dtype=torch.float64)
    columns = [None if given is None else given.contiguous() for given in (scores, gains, member, weight, indexes)]
    dtypes = scores.dtype, torch.float64, torch.bool, torch.float64, torch.int64
    try:
        rows = [_address(column, dtype, shape) for column, dtype in zip(columns, dtypes)]
    except _Refused:
        return None
    numbers = len(scores), temperature, sys.maxsize if top is None else min(top, sys.maxsize), is_mean, most
    out = loss.data_ptr(), None if gradient is None else gradient.data_ptr()
    return (loss, gradient) if FUNCTIONS[scores.dtype]["ndcg"](*rows, *numbers, *out) else None


def soft_maximum(
    rows: Sequence[Tensor | None], budget: float, power: int, with_grad: bool, with_variance: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """Return the loss (C,), its gradient (C, M), the validity, lambda and the variance of the losses (C,), or None.

    ``rows`` are the arguments of :func:`~fullrank.kernels.entropic_risk.risk_and_gradient` up to ``scales``, and
    ``power`` is 1 / lambda, 0 to find it.
    """
    scores = rows[0]
    assert scores is not None
    if scores.dtype not in FUNCTIONS and not is_usable(scores):  # which warns
        return None
    (num_classes, num_rows), dtype, held, addresses = scores.shape, scores.dtype, [], []
    shapes = *[scores.shape] * 3, *[(num_rows,)] * 4, (num_classes,)
    dtypes = dtype, *[torch.bool] * 4, dtype, dtype, torch.float64
    try:
        for tensor, kind, shape in zip(rows, dtypes, shapes):
            held.append(None if tensor is None else tensor.contiguous())
            addresses.append(None if tensor is None else _address(held[-1], kind, shape))
    except _Refused:
        return None
    loss = scores.new_empty(num_classes, dtype=torch.float64)
    tilts = torch.empty_like(loss)
    variance = scores.new_empty(num_classes if with_variance else 0, dtype=torch.float64)
    valid = scores.new_empty(num_classes, dtype=torch.bool)
    gradient = scores.new_empty(scores.shape if with_grad else 0)
    made = [variance.data_ptr() if with_variance else None, gradient.data_ptr() if with_grad else None]
    numbers, out = (num_classes, num_rows, budget, power), (loss.data_ptr(), valid.data_ptr(), tilts.data_ptr(), *made)
    is_computed = FUNCTIONS[dtype]["soft_maximum"](*addresses, *numbers, *out)
    return (loss, gradient, valid, tilts, variance) if is_computed else None


def unit_rows(rows: Tensor) -> Tensor | None:
    """Return what :func:`~fullrank.losses.rows.unit_rows` returns for rows (N, D) of the computation, or None."""
    if rows.dtype not in FUNCTIONS and not is_usable(rows):  # which warns
        return None
    rows, unit = rows.detach().contiguous(), rows.new_empty(rows.shape)
    try:
        address = _address(rows, rows.dtype, rows.shape)
    except _Refused:
        return None
    return unit if FUNCTIONS[rows.dtype]["unit_rows"](address, *rows.shape, unit.data_ptr()) else None


def unit_gradient(rows: Tensor, unit: Tensor, gradient: Tensor, factor: float) -> Tensor | None:
    """Return ``factor`` times the gradient of the rows (N, D) from that of their :func:`unit_rows`, or None."""
    if rows.dtype not in FUNCTIONS and not is_usable(rows):
        return None
    given, out = (rows.detach().contiguous(), unit.contiguous(), gradient.contiguous()), rows.new_empty(rows.shape)
    try:
        addresses = [_address(one, rows.dtype, rows.shape) for one in given]
    except _Refused:
        return None
    function = FUNCTIONS[rows.dtype]["unit_gradient"]
    return out if function(*addresses, *rows.shape, factor, out.data_ptr()) else None


def moments(
    scores: Tensor,
    member: Tensor | None,
    scale: float,
    first: Tensor,
    num_bins: int,
    p: int,
    positive: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Return (p, C, num_bins + 1) float64, the sums over the rows of each bin of the powers of their positions.

    Args:
        scores: (C, M), finite, usable.
        member: (C, M) bool, the rows that take part; None for all. The last bin counts the others.
        scale: bins per unit of the scores, a power of two.
        first: (C,) the number of the first bin of each class.
        num_bins: bins of a class.
        p: powers, from 0 on.
        positive: (C, M) bool: two sums are returned for each class, of the other rows and of these, (p, 2 C, ...); None
            for one.
        weight: (M,) or (C, M) in the dtype of the scores, factors of the rows; None for 1.
    """
    (num_classes, num_rows), groups = scores.shape, 1 if positive is None else 2
    lanes = _LANES if num_classes == 1 and num_rows >= max(_MANY_ROWS, _LANES * num_bins) else 1
    tables = scores.new_zeros(num_classes * lanes, groups, num_bins + 1, p, dtype=torch.float64)
    function = _of_parts("moments", scores, (member, positive), weight)

    def run(part: int, c: int, start: int, stop: int) -> None:
        table = _address(tables[part], torch.float64, tables.shape[1:])
        function(c, start, stop, scale, float(first[c]), num_bins, p, table)

    _in_parts(run, num_classes, num_rows, lanes)
    sums = tables.view(num_classes, lanes, groups, num_bins + 1, p).sum(dim=1)
    return sums.flatten(0, 1).permute(2, 0, 1).contiguous()


def evaluate(
    coefficients: Tensor,
    scores: Tensor,
    member: Tensor | None,
    scale: float,
    first: Tensor,
    out: Tensor,
    positive: Tensor | None = None,
    of_positives: Tensor | None = None,
    weight: Tensor | None = None,
    terms: Tensor | None = None,
) -> None:
    """Write into ``out`` (C, M) the polynomial of the bin of each row at the row; 0 for a row that takes no part.

    Args:
        coefficients: (p, C, num_bins + 1) in the dtype of the scores, 0 in the last bin.
        scores: (C, M), and the arguments after it: as in :func:`moments`.
        of_positives: the same in float64 for the rows that are ``positive``.
        weight: as in :func:`moments`, factors of the values. With ``of_positives`` it requires ``terms``.
        terms: those of :func:`rates`, which are added for the rows that are ``positive``.
    """
    (num_classes, num_rows), dtype, lanes = scores.shape, scores.dtype, _lanes_of(scores)
    tables = coefficients.permute(1, 2, 0).contiguous()
    exact = None if of_positives is None else of_positives.permute(1, 2, 0).contiguous()
    size, p = shape = tables.shape[1:]
    function = _of_parts("evaluate", scores, (member, positive), weight)
    places = None if positive is None or terms is None else _first_terms(positive, lanes)

    def run(part: int, c: int, start: int, stop: int) -> None:
        of_positives = None if exact is None else exact[c]
        of_class = _address(tables[c], dtype, shape), _address(of_positives, torch.float64, shape)
        out_of_part = _address_of_terms(terms, places, part), _address(out[c, start:stop], dtype, (stop - start,))
        function(c, start, stop, scale, float(first[c]), size - 1, p, *of_class, *out_of_part)

    _in_parts(run, num_classes, num_rows, lanes)


def rates(
    tables: Tensor, scores: Tensor, positive: Tensor, weight: Tensor, scale: float, first: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss (C,) float64, the moments of the rates of the positives and the slopes of their terms.

    See :func:`~fullrank.kernels.smooth_ap.binned.solve_at_positives`: the moments are (p, 2, C, num_bins + 1) float64
    and the slopes (P,) float64; None if ``tables`` has no slopes.

    Args:
        tables: (p, 4, C, num_bins + 1) float64, R_N, R_P and their slopes as polynomials; (p, 2, ...) without slopes.
        scores: (C, M), finite, usable, and ``positive``, ``weight``, ``scale``, ``first`` as in :func:`moments`.
        factor: (C,) the share of a positive in the mean, divided by its weight.
    """
    (num_classes, num_rows), lanes = scores.shape, _lanes_of(scores)
    (p, _, _, size), with_grad = tables.shape, tables.shape[1] == 4
    tables = tables.permute(2, 3, 0, 1).contiguous()
    function, places = _of_parts("rates", scores, (positive,), weight), _first_terms(positive, lanes)
    losses = scores.new_zeros(num_classes * lanes, dtype=torch.float64)
    sums = scores.new_zeros(num_classes * lanes if with_grad else 0, size, p, 2, dtype=torch.float64)
    terms = scores.new_empty(places[-1] if with_grad else 0, dtype=torch.float64)

    def run(part: int, c: int, start: int, stop: int) -> None:
        if places[part] == places[part + 1]:
            return  # without a positive
        of_class = _address(tables[c], torch.float64, (size, p, 4 if with_grad else 2))
        out = [_address(losses[part], torch.float64, ()), None, None]
        if with_grad:
            out[1:] = _address(sums[part], torch.float64, (size, p, 2)), _address_of_terms(terms, places, part)
        function(c, start, stop, scale, float(first[c]), size - 1, p, float(factor[c]), of_class, *out)

    _in_parts(run, num_classes, num_rows, lanes)
    loss = losses.view(num_classes, lanes).sum(dim=1)
    if not with_grad:
        return loss, None, None
    return loss, sums.view(num_classes, lanes, size, p, 2).sum(dim=1).permute(2, 3, 0, 1).contiguous(), terms


def _lanes_of(scores: Tensor) -> int:
    """Return the number of parts of the rows of the only class; 1 for several classes."""
    return _LANES if scores.shape[0] == 1 and scores.shape[1] >= _MANY_ROWS else 1


def _first_terms(positive: Tensor, lanes: int) -> list[int]:
    """Return the number of positives before each part of :func:`_in_parts`, and of all."""
    (num_classes, num_rows), positive = positive.shape, positive.contiguous()
    parts = _parts(num_classes, num_rows, lanes)
    if parts:
        _address(positive, torch.bool, (num_classes, num_rows))
    array = positive.view(torch.uint8).numpy()  # bytes: numpy counts a bool as 1 only if it is the byte 1
    return [0, *itertools.accumulate(int(numpy.count_nonzero(array[c, start:stop])) for _, c, start, stop in parts)]


def _address_of_terms(terms: Tensor | None, places: list[int] | None, part: int) -> int | None:
    """Return the address of the terms of the positives of a part; None without any."""
    if terms is None or places is None or places[part] == places[part + 1]:
        return None
    return _address(terms[places[part] : places[part + 1]], torch.float64, (places[part + 1] - places[part],))


def _of_parts(
    name: str, scores: Tensor, masks: tuple[Tensor | None, ...], weight: Tensor | None
) -> Callable[..., None]:
    """Return the function ``name`` of C for a class, a start, a stop, and the numbers and tables after the rows."""
    function, num_classes, dtype = FUNCTIONS[scores.dtype][name], scores.shape[0], scores.dtype
    given = (scores, dtype), *((mask, torch.bool) for mask in masks), (weight, dtype)
    # (C, M) each, where the rows of a class are next to each other in memory.
    tensors = [(None if one is None else one.contiguous().expand(num_classes, -1), of) for one, of in given]

    def call(c: int, start: int, stop: int, *numbers: Any) -> None:
        rows = [_address(None if one is None else one[c, start:stop], of, (stop - start,)) for one, of in tensors]
        if not function(*rows, stop - start, *numbers):
            raise _Refused("numbers for C", "rows, bins and powers of tables", (stop - start, *numbers))

    return call


def _in_parts(run: Callable[[int, int, int, int], None], num_classes: int, num_rows: int, lanes: int) -> None:
    """Call ``run(part, class, start, stop)`` for each class, or for each of the ``lanes`` of the only one."""
    parts = _parts(num_classes, num_rows, lanes)
    threads = min(torch.get_num_threads(), len(parts)) if num_classes * num_rows >= _MANY_ROWS else 1
    if threads == 1:
        for part in parts:
            run(*part)
        return
    with ThreadPoolExecutor(threads) as pool:  # the library does not hold Python's lock
        for future in [pool.submit(run, *part) for part in parts]:
            future.result()


def _parts(num_classes: int, num_rows: int, lanes: int) -> list[tuple[int, int, int, int]]:
    """Return the number, the class, and the ends of the rows of each part."""
    if lanes == 1:
        return [(c, c, 0, num_rows) for c in range(num_classes) if num_rows]
    ends = [num_rows * lane // lanes for lane in range(lanes + 1)]
    return [(lane, 0, ends[lane], ends[lane + 1]) for lane in range(lanes)]
