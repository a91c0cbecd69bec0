"""How far the numeric comparisons of the tests are from their bounds, with other draws of their data.

``python tests/margins.py 50 tests/losses/test_numerics.py ...`` runs these tests 50 times, each time with all seeds
moved. It prints the tests that fail, the lines whose largest difference / bound is above a quarter, and those that pass
with a value 1 + 1e-3 times as large, if it is not 0. After an interrupt it prints those of the runs until then. It sees
``assert_close``, on ranks too, and in this process ``error <= limit``, ``assert_as_exact`` included. A draw may lack
what a test says of it; such a failure means nothing.
"""

from __future__ import annotations

import collections
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import workers

Ratios = dict[str, tuple[float, bool]]  # by line, with whether 1 + 1e-3 passes
ratios: Ratios = collections.defaultdict(lambda: (0.0, False))
plain_close, plain_call = torch.testing.assert_close, workers.WorkerPool.__call__


class Generator(torch.Generator):
    offset = 0

    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed(seed + 10_007 * Generator.offset)


def install(offset: int) -> None:
    """Replace what the files of tests import; they are imported later."""
    Generator.offset, torch.Generator, torch.testing.assert_close = offset, Generator, close


def note(place: str, ratio: float, is_blind: bool) -> None:
    ratios[place] = max(ratios[place][0], ratio), ratios[place][1] or is_blind


def close(actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None, **options: Any) -> None:
    plain_close(actual, expected, rtol=rtol, atol=atol, **options)
    frame = [frame for frame in traceback.extract_stack()[:-1] if "/tests/" in frame.filename][-1]
    for pair in zip(*(x if isinstance(x, (tuple, list)) else [x] for x in (actual, expected))):
        a, b = (torch.as_tensor(x).detach().double().cpu() for x in pair)
        if a.shape == b.shape and a.numel() and (rtol or atol):
            ours, larger = (((x - b).abs() / (atol + rtol * b.abs())).nan_to_num(0, 1e9).max() for x in (a, 1.001 * a))
            note(
                f"tests/{frame.filename.split('/tests/')[1]}:{frame.lineno}", float(ours), bool(larger <= 1 and a.any())
            )


def on_rank(rank: int, offset: int, function: Callable[..., Any], *arguments: Any) -> tuple[Any, Ratios]:
    install(offset)
    ratios.clear()
    return function(rank, *arguments), dict(ratios)


def over_ranks(pool: workers.WorkerPool, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    results = plain_call(pool, on_rank, Generator.offset, function, *arguments)
    for place, (ratio, is_blind) in (item for _, of_rank in results for item in of_rank.items()):
        note(place, ratio, is_blind)
    return [result for result, _ in results]


class Plugin:
    def pytest_assertion_pass(self, item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
        """Take the two numbers from the text; where it is not an expression, this is no comparison of numbers."""
        with suppress(Exception):
            error, limit = (float(eval(side, vars(torch))) for side in expl.split("\n")[0].split(" <= "))
            if 0 < limit < 1e-2:
                note(f"tests/{item.location[0]}:{lineno}", error / limit, False)


if __name__ == "__main__":
    sys.pycache_prefix = tempfile.mkdtemp()  # what pytest has compiled calls no hook
    workers.WorkerPool.__call__ = over_ranks  # type: ignore[method-assign]
    options = ["-q", "--tb=line", "-m", "not full", "-o", "enable_assertion_pass_hook=true", "-p", "no:cacheprovider"]
    for number in range(int(sys.argv[1])):
        install(number)
        status = pytest.main([*options, *sys.argv[2:]], plugins=[Plugin()])
        workers.close_pools()
        if status == pytest.ExitCode.INTERRUPTED:
            break
    for place, (ratio, is_blind) in sorted(ratios.items()):
        if ratio > 0.25 or is_blind:
            print(f"{place} {ratio:.2g}{', passes with 1 + 1e-3' if is_blind else ''}")
