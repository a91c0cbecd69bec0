"""The passes over rows and pairs of Smooth-AP in C. Without the library, torch computes them.

``setup.py`` builds ``sums.c`` into a library that is loaded through ``ctypes``; ``FULLRANK_NATIVE=0`` leaves it out.
The results differ from those of torch by rounding, so all ranks of a job must use it, or none of them: the losses
compare :data:`KERNELS`. They depend neither on the number of threads nor on the vector instructions of the processor.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

_LANES = 4  # parts of the rows of a class, each summed into a table of its own
# Rows from which threads pay: those of torch keep their cores busy for milliseconds after an operation.
_MANY_ROWS = 4_000_000
_ABI = 8  # as in sums.c, which counts changes of its arguments

_POINTER, _NUMBER, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_RESULTS: dict[str, Any] = {"smooth_ap": _NUMBER, "smooth_ap_of_rows": _NUMBER, "rates": _DOUBLE}
_REALS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


def _load() -> dict[torch.dtype, dict[str, Any]]:
    """Return the functions of the library by dtype and name; none where it cannot be used."""
    path = Path(__file__).with_name("sums.library")
    if os.environ.get("FULLRANK_NATIVE") == "0" or not path.exists():
        return {}
    try:
        library = ctypes.CDLL(str(path))
        is_current = library.fullrank_abi() == _ABI
    except (OSError, AttributeError):
        is_current = False
    if not is_current:  # built for another machine, or from other sources, as after a pull without an installation
        return {}
    functions: dict[torch.dtype, dict[str, Any]] = {}
    for dtype, real in _REALS.items():
        rows = [*[_POINTER] * 4, _NUMBER, real, real, _NUMBER, _NUMBER]
        arguments = {
            "smooth_ap": [*[_POINTER] * 5, *[_NUMBER] * 3, _DOUBLE, *[_POINTER] * 3],
            "smooth_ap_of_rows": [*[_POINTER] * 4, *[_NUMBER] * 3, _POINTER, _DOUBLE, _NUMBER, *[_POINTER] * 3],
            "moments": [*rows, _POINTER],
            "evaluate": [*rows, *[_POINTER] * 4],
            "rates": [*[_POINTER] * 3, _NUMBER, real, real, _NUMBER, _DOUBLE, *[_POINTER] * 3],
        }
        functions[dtype] = {name: getattr(library, f"{name}_{str(dtype)[6:]}") for name in arguments}
        for name, function in functions[dtype].items():
            function.argtypes = arguments[name]
            function.restype = _RESULTS.get(name)
    return functions


FUNCTIONS = _load()
KERNELS = "native" if FUNCTIONS else "torch"


def is_usable(scores: Tensor) -> bool:
    """Return whether the library has functions for the device and the dtype of ``scores``."""
    return scores.is_cpu and scores.dtype in FUNCTIONS


def smooth_ap(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    with_grad: bool,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return what :func:`~fullrank.kernels.smooth_ap.sums.smooth_ap_and_gradient` returns, or None.

    None stands for what the library does not compute: scores that are not finite, and a temperature below 1e-30.
    """
    if not is_usable(scores) or scores.numel() == 0:
        return None
    num_classes, num_rows = scores.shape
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
    stride = 0 if weight is None or weight.ndim == 1 else num_rows
    masks = positive.data_ptr(), _address(member)
    pool = scores.data_ptr(), *masks, *map(_address, weights), stride, num_classes, num_rows
    out = loss.data_ptr(), valid.data_ptr(), gradient.data_ptr() if with_grad else None
    is_computed = FUNCTIONS[scores.dtype]["smooth_ap"](*pool, temperature, *out)
    if not is_computed:
        return None
    if with_grad and not original.is_contiguous():  # the compiler relies on the strides of the scores
        gradient = torch.empty_like(original).copy_(gradient)
    return loss, gradient, valid


def smooth_ap_of_rows(
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
    """Return the loss of each class (C,), 0 where not valid; validity (C,); gradient (M, C); the temperature.

    None for rows that are not ordinary: see sums.c.

    Args:
        scores: (M, C) on the host, contiguous, usable, not empty.
        targets: (M,) int64 on the host, contiguous: class indices, or 0 and 1 for one class.
        weight: (M,) in the dtype of the scores, contiguous, of the positives in the mean; None for 1.
        key_weight: the same, of the rows where they are compared.
        ignore_index: the target of rows to leave out.
        temperature: > 0; None for ``multiple`` times the spread of the scores.
        most: pairs of a positive and a row up to which C computes the loss.
    """
    num_rows, num_classes = scores.shape
    loss = scores.new_empty(num_classes, dtype=torch.float64)
    valid = scores.new_empty(num_classes, dtype=torch.bool)
    gradient, width = torch.empty_like(scores) if with_grad else None, _DOUBLE(temperature or 0.0)
    pointers = scores.data_ptr(), targets.data_ptr(), _address(weight), _address(key_weight)
    rows = *pointers, num_rows, num_classes, ignore_index
    out = loss.data_ptr(), valid.data_ptr(), None if gradient is None else gradient.data_ptr()
    scale = 0.0 if temperature is not None else multiple
    is_computed = FUNCTIONS[scores.dtype]["smooth_ap_of_rows"](*rows, ctypes.byref(width), scale, most, *out)
    return (loss, valid, gradient, width.value) if is_computed else None


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
    function, (num_classes, num_rows) = FUNCTIONS[scores.dtype]["moments"], scores.shape
    rows, groups = _as_rows(scores, member, positive, weight), 1 if positive is None else 2
    lanes = _LANES if num_classes == 1 and num_rows >= max(_MANY_ROWS, _LANES * num_bins) else 1
    tables = scores.new_zeros(num_classes * lanes, groups, num_bins + 1, p, dtype=torch.float64)

    def run(part: int, c: int, start: int, stop: int) -> None:
        numbers = stop - start, scale, float(first[c]), num_bins, p
        function(*_addresses(rows, c, start), *numbers, tables[part].data_ptr())

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
    function, (num_classes, num_rows) = FUNCTIONS[scores.dtype]["evaluate"], scores.shape
    rows = _as_rows(scores, member, positive, weight)
    tables = coefficients.permute(1, 2, 0).contiguous()
    exact = None if of_positives is None else of_positives.permute(1, 2, 0).contiguous()
    num_bins, p = tables.shape[1] - 1, tables.shape[2]
    lanes = _lanes_of(scores)
    places = None if positive is None or terms is None else _first_terms(positive, lanes)

    def run(part: int, c: int, start: int, stop: int) -> None:
        numbers = stop - start, scale, float(first[c]), num_bins, p
        of_class = None if exact is None else exact[c].data_ptr()
        own_terms = None if terms is None or places is None else terms[places[part] :].data_ptr()
        ends = tables[c].data_ptr(), of_class, own_terms, out[c, start:].data_ptr()
        function(*_addresses(rows, c, start), *numbers, *ends)

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
    function, (num_classes, num_rows) = FUNCTIONS[scores.dtype]["rates"], scores.shape
    (p, columns, _, size), lanes = tables.shape, _lanes_of(scores)
    rows = _as_rows(scores, positive, weight)
    tables = tables.permute(2, 3, 0, 1).contiguous()
    losses = scores.new_zeros(num_classes * lanes, dtype=torch.float64)
    with_grad, places = columns == 4, _first_terms(positive, lanes)
    sums = scores.new_zeros(num_classes * lanes if with_grad else 0, size, p, 2, dtype=torch.float64)
    terms = scores.new_empty(places[-1] if with_grad else 0, dtype=torch.float64)

    def run(part: int, c: int, start: int, stop: int) -> None:
        numbers = stop - start, scale, float(first[c]), p, float(factor[c])
        out = (sums[part].data_ptr(), terms[places[part] :].data_ptr()) if with_grad else (None, None)
        losses[part] = function(*_addresses(rows, c, start), *numbers, tables[c].data_ptr(), *out)

    _in_parts(run, num_classes, num_rows, lanes)
    loss = losses.view(num_classes, lanes).sum(dim=1)
    if not with_grad:
        return loss, None, None
    return loss, sums.view(num_classes, lanes, size, p, 2).sum(dim=1).permute(2, 3, 0, 1).contiguous(), terms


def _as_rows(scores: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """Return the tensors as (C, M), the entries of a class next to each other in memory."""
    return [None if rows is None else rows.contiguous().expand_as(scores) for rows in (scores, *others)]


def _addresses(rows: list[Tensor | None], c: int, start: int) -> list[int | None]:
    """Return the addresses of row ``start`` of class ``c``."""
    return [None if tensor is None else tensor[c, start:].data_ptr() for tensor in rows]


def _lanes_of(scores: Tensor) -> int:
    """Return the number of parts of the rows of the only class; 1 for several classes."""
    return _LANES if scores.shape[0] == 1 and scores.shape[1] >= _MANY_ROWS else 1


def _first_terms(positive: Tensor, lanes: int) -> list[int]:
    """Return the number of positives before each part of :func:`_in_parts`, and of all."""
    (num_classes, num_rows), array = positive.shape, positive.numpy()
    parts = _parts(num_classes, num_rows, lanes)
    return [0, *itertools.accumulate(int(numpy.count_nonzero(array[c, start:stop])) for _, c, start, stop in parts)]


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
        return [(c, c, 0, num_rows) for c in range(num_classes)]
    ends = [num_rows * lane // lanes for lane in range(lanes + 1)]
    return [(lane, 0, ends[lane], ends[lane + 1]) for lane in range(lanes)]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
