"""How far the gradient of Smooth-AP is from the definition, pair by pair and by bins, in float32 and in float64.

Usage: python benchmarks/accuracy.py [--quick] [--out FOLDER]

Score sets at scales 1 to 1000 and temperatures 1e-4 to 10. In float64 the reference is the definition in the extended
precision of numpy's long double, written out here; in float32 it is the direct method in float64, from the same float32
scores. An error is ``norm(gradient - reference) / norm(reference)``; at any row it is the largest difference over the
largest element. The table holds the worst over the temperatures, the JSON every case. Nothing is timed. Where long
double is no wider than double, the float64 columns stay empty. The full run takes a few minutes and writes
accuracy.json, a quick one seconds, and only where ``--out`` says. Needs the ``bench`` extra.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from report import Record, Run, print_records, progress
from torch import Tensor

from fullrank.kernels import bins as binning
from fullrank.kernels.costs import costs_of
from fullrank.kernels.node_tables import order_for
from fullrank.kernels.smooth_ap import sums

SCALES, TEMPERATURES = (1.0, 10.0, 100.0, 1000.0), (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
ROWS, SHARE = (4_000, 8_000), 0.02
MANY_ROWS, MANY_SHARE = costs_of(torch.device("cpu")).many_rows, 1.25e-4  # from so many rows float32 takes other bins
MANY_CASES = ((1.0, 0.01), (1.0, 1.0), (10.0, 1.0))  # scale and temperature
METHODS = ("direct", "binned")
PAIRS = 2**18  # summed together
BAR_32, TIMES_DIRECT, BAR_ROW, BAR_LOSS, BAR_64 = 2e-6, 1.5, 5e-6, 1e-8, 1e-12


def normal(size: int) -> Tensor:
    """Return normal scores, float64."""
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def clustered(size: int) -> Tensor:
    """Return two clusters, one of them a hundred times as narrow as the other."""
    return torch.cat([normal(size)[::2] * 0.01, 3 + normal(size)[1::2]])


def with_outlier(size: int) -> Tensor:
    """Return normal scores and one of 1e30."""
    return torch.cat([normal(size)[1:], torch.full((1,), 1e30, dtype=torch.float64)])


def cauchy(size: int) -> Tensor:
    """Return scores with tails that no window of bins covers."""
    uniform = torch.rand(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.tan(math.pi * (uniform - 0.5))


SETS: dict[str, Callable[[int], Tensor]] = {
    "random": normal,
    "tied": lambda size: normal(size).round(decimals=1),
    "clustered": clustered,
    "outlier": with_outlier,
    "cauchy": cauchy,
}


def choose_positives(size: int, share: float) -> Tensor:
    """Return (size,) bool, about ``share`` of it True."""
    return torch.rand(size, generator=torch.Generator().manual_seed(2)) < share


def run(method: str, scores: Tensor, positive: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the loss (1,) and the gradient (M,) of one class, in float64."""
    leaf = scores[None].clone().requires_grad_()
    loss = sums.smooth_ap_sums(leaf, positive[None], None, None, temperature, method)[0]
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach().double(), leaf.grad[0].double()


def is_extended() -> bool:
    """Return whether numpy's long double is wider than double, which depends on the platform."""
    return bool(np.finfo(np.longdouble).eps < np.finfo(np.float64).eps)


def define(scores: Tensor, positive: Tensor, temperature: float) -> tuple[Any, Any]:
    """Return the loss and the gradient (M,) of the definition in extended precision, as numpy's long double."""
    x, tau, is_positive = scores.numpy().astype(np.longdouble), np.longdouble(temperature), positive.numpy()
    chosen = np.flatnonzero(is_positive)
    loss, gradient = np.longdouble(0), np.zeros(x.size, np.longdouble)
    for own in np.array_split(chosen, max(1, math.ceil(chosen.size * x.size / PAIRS))):
        z = (x - x[own][:, None]) / tau  # [p, M]
        z[np.arange(own.size), own] = -np.inf  # j = i does not count
        decay = np.exp(-np.abs(z))
        sigmoid = np.where(z >= 0, 1, decay) / (1 + decay)
        r = 1 + sigmoid[:, is_positive].sum(axis=1)
        n = sigmoid[:, ~is_positive].sum(axis=1)
        loss += (n / (r + n)).sum() / chosen.size
        factor = 1 / (chosen.size * (r + n) ** 2 * tau)
        change = decay / (1 + decay) ** 2 * np.where(is_positive, (-n * factor)[:, None], (r * factor)[:, None])
        gradient += change.sum(axis=0)
        gradient[own] -= change.sum(axis=1)
    return loss, gradient


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Return the relative error in the 2-norm."""
    return float((ours - reference).norm() / reference.norm())


def extended_error(ours: Tensor, reference: Any) -> float:
    """Return the same against a reference in extended precision."""
    return float(np.sqrt(((ours.numpy() - reference) ** 2).sum() / (reference**2).sum()))


def way(scores: Tensor, temperature: float) -> str:
    """Return in words how ``method="binned"`` sums these scores."""
    fine = order_for(scores, scores.numel()).fine
    bins = binning.cover(scores.min()[None], scores.max()[None], temperature, fine)
    if bins.window <= binning.most_bins(scores.numel()):
        return "one window"
    return "neighbours" if binning.cover_bulk(scores, temperature, fine) is None else "window + far bins"


def measure_case(name: str, rows: int, share: float, scale: float, temperature: float) -> Record:
    """Return the errors of both methods in both dtypes for one set."""
    scores, positive = SETS[name](rows) * scale, choose_positives(rows, share)
    record: Record = {"scores": name, "rows": rows, "scale": scale, "temperature": temperature}
    single = scores.float()
    record["way"] = way(single, temperature)
    loss, gradient = run("direct", single.double(), positive, temperature)
    ours = {method: run(method, single, positive, temperature) for method in METHODS}
    for method in METHODS:
        record[f"float32 {method}"] = relative_error(ours[method][1], gradient)
    record["any row"] = float((ours["binned"][1] - gradient).abs().max() / gradient.abs().max())
    record["loss"] = float((ours["binned"][0] - loss).abs())
    reference = define(scores, positive, temperature)[1] if is_extended() else None
    for method in METHODS:
        of_ours = None
        if reference is not None:
            of_ours = extended_error(run(method, scores, positive, temperature)[1], reference)
        record[f"float64 {method}"] = of_ours
    return record | {"met": is_met(record)}


def is_met(record: Record) -> bool:
    """Return whether every error is within its bar; a NaN is not."""
    bars = [
        (record["float32 binned"], max(BAR_32, TIMES_DIRECT * record["float32 direct"])),
        (record["any row"], BAR_ROW),
        (record["loss"], BAR_LOSS),
        *((record[f"float64 {method}"], BAR_64) for method in METHODS),
    ]
    return all(value <= bar for value, bar in bars if value is not None)


def worst(records: Sequence[Record]) -> Record:
    """Return the largest of each error over cases of one set and one scale."""
    first = records[0]
    result = {key: first[key] for key in ("scores", "rows", "scale")}
    for key in ("float32 direct", "float32 binned", "any row", "loss", "float64 direct", "float64 binned"):
        result[key] = None if first[key] is None else max(record[key] for record in records)
    return result | {"met": "yes" if all(record["met"] for record in records) else "NO"}


def print_results(records: list[Record]) -> None:
    """Print the worst of each set and scale, then every case that is outside of a bar."""
    groups: dict[tuple[str, int, float], list[Record]] = {}
    for record in records:
        groups.setdefault((record["scores"], record["rows"], record["scale"]), []).append(record)
    bars = f"bars: float32 binned {BAR_32:g} or {TIMES_DIRECT} x direct, any row {BAR_ROW:g}, loss {BAR_LOSS:g}"
    title = f"Largest relative error of the gradient over the temperatures; {bars}; float64 {BAR_64:g}"
    print_records(title, [worst(group) for group in groups.values()])
    missed = [record for record in records if not record["met"]]
    if missed:
        print_records("Outside of a bar", missed)
    print(f"\n{len(records) - len(missed)} of {len(records)} cases are within the bars")


def measure(quick: bool) -> list[Record]:
    """Return the errors of every case."""
    if quick:
        cases = [(name, 800, SHARE, 1.0, temperature) for name in SETS for temperature in TEMPERATURES[2:5]]
    else:
        cases = list(itertools.product(SETS, ROWS, [SHARE], SCALES, TEMPERATURES))
        cases += [(name, MANY_ROWS, MANY_SHARE, *case) for name in SETS for case in MANY_CASES]
    return [measure_case(*case) for case in progress(cases)]


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "accuracy")
    script.start()
    digits = np.finfo(np.longdouble).nmant + 1
    print(f"long double has {digits} bits{'' if is_extended() else ', so there is no reference for float64'}")
    records = measure(script.options.quick)
    print_results(records)
    script.write(cases=records)


if __name__ == "__main__":
    main()
