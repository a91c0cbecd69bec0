"""Time and error of clip_grad_norm_ on a plain model in one process, compared with torch.nn.utils.clip_grad_norm_.

Usage: python benchmarks/grad_norm.py [--quick] [--repeats 30] [--out FOLDER]

Both functions clip the same float32 gradients of a decoder of 50 million parameters in turn. max_norm falls by a
thousandth from call to call, so every call scales. The ratio compares the shortest runs. The error is that of the
returned norm, relative to float64. A second table has many tensors of one size, p = 2. Writes grad_norm.json; a quick
run writes only with ``--out``.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import torch
from report import Record, Run, print_records, progress
from torch import Tensor, nn

import fullrank

BAR = 1.2  # of torch's time, p = 2
POWERS = (2.0, 1.0, 3.0, math.inf)
# Number and elements of tensors: rows of 4,096 fill some, others have equal rows; 20,011 and 50,021 have no divisor.
SIZES = (
    (1000, 1000),
    (1000, 4096),
    (400, 5000),
    (400, 20_001),
    (400, 20_011),
    (400, 50_001),
    (400, 50_021),
    (400, 65_536),
)


def make_model(width: int, depth: int) -> list[nn.Parameter]:
    """Return the parameters of a decoder, with normal gradients."""
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (4 * width,)]
    shapes = [(16 * width, width), *depth * [*block, *5 * [(width,)]]]
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter).normal_(generator=generator)
    return parameters


def make_tensors(number: int, size: int) -> list[nn.Parameter]:
    """Return parameters of ``size`` elements each, with normal gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter).normal_(generator=generator)
    return parameters


def exact_norm(parameters: list[nn.Parameter], norm_type: float) -> float:
    """Return the norm in float64, from parts so short that the order of the additions does not matter."""
    parts = [
        torch.linalg.vector_norm(part.double(), norm_type) for p in parameters for part in p.grad.view(-1).split(1024)
    ]
    return torch.linalg.vector_norm(torch.stack(parts), norm_type).item()


def shortest(calls: list[Callable[[], Tensor]], repeats: int) -> list[float]:
    """Return the shortest time of each call in seconds; the calls take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]


def compare(parameters: list[nn.Parameter], norm_type: float, repeats: int) -> Record:
    """Return times and errors of both for one p."""
    exact = exact_norm(parameters, norm_type)
    largest = (exact * 0.999**index for index in itertools.count(1))
    calls = [
        lambda: torch.nn.utils.clip_grad_norm_(parameters, next(largest), norm_type),
        lambda: fullrank.clip_grad_norm_(parameters, next(largest), norm_type),
    ]
    norms = (
        torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type),
        fullrank.total_grad_norm(parameters, norm_type),
    )
    errors = [abs(norm.item() / exact - 1) for norm in norms]
    seconds = shortest(calls, repeats)
    return {
        "norm_type": str(norm_type),
        **dict(zip(("torch_seconds", "fullrank_seconds"), seconds)),
        "ratio": seconds[1] / seconds[0],
        **dict(zip(("torch_error", "fullrank_error"), errors)),
    }


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "grad_norm", repeats=30)
    options = script.start()
    parameters = make_model(64, 2) if options.quick else make_model(584, 11)
    total = sum(parameter.numel() for parameter in parameters)
    # Other powers take many times as long and have no required ratio.
    runs = {norm_type: options.repeats if norm_type == 2 else -(-options.repeats // 10) for norm_type in POWERS}
    cases = [compare(parameters, norm_type, repeats) for norm_type, repeats in progress(runs.items())]
    title = f"clip_grad_norm_, {total:,} float32 parameters in {len(parameters)} tensors, shortest run; bar {BAR}"
    print_records(title, cases)
    sizes = []
    for number, size in progress([(4, 5000)] if options.quick else SIZES):
        sizes.append({"tensors": number, "elements": size, **compare(make_tensors(number, size), 2.0, options.repeats)})
    print_records(f"the same with many tensors of one size, p = 2; bar {BAR}", sizes)
    script.write(parameters=total, tensors=len(parameters), cases=cases, sizes=sizes)


if __name__ == "__main__":
    main()
