"""What a step of each loss costs on this machine: its waits, its operators, its time and that of a copy of its bytes.

Usage: python benchmarks/steps.py [--device cuda] [--backend gloo] [--quick] [--out FOLDER]
       torchrun --nproc-per-node 2 benchmarks/steps.py

Every loss of the preflight, forward and backward, float32, on 1,000 and 100,000 rows of each rank, which are gathered;
losses of embeddings take quadratic time and stop at 2,048. docs/accelerators.md explains the columns. The first line
has the constants of the model in launches.py, each measured alone. Takes a minute or two on a machine that does nothing
else, and writes steps.json.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from report import Run, Step, clock, interleave, print_table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fullrank
from fullrank.losses import DistributedLoss, RetrievalSmoothAPLoss
from fullrank.losses.embeddings.base import ContrastiveLoss
from fullrank.preflight import checks
from fullrank.preflight.checks import CLASSES, Arguments
from fullrank.preflight.site import Site, open_site

ROWS = (1_000, 100_000)  # of each rank
QUEUE = 1_024
RARE = 0.01  # share of each class but the first
MOST_EMBEDDINGS, WIDTH = 2_048, 64  # their losses take quadratic time
PRODUCT = 2_048  # rows of the matrices that are multiplied
MOST_BYTES = 2**28  # of a copy; the time of a larger one is extrapolated
WARM, COUNTED = 3, 4  # steps: first fill queue and caches, then count
REPEATS, MOST_SECONDS = 10, 2.0  # of a step: fewer where it is slow
PACKAGE, FOLDERS = Path(fullrank.__file__).parent, ("distributed", "kernels", "losses", "queues")


class OperatorCount(TorchDispatchMode):
    """Counts the operators that run inside, of the backward too, and the bytes of their inputs and outputs.

    Views and allocations are free. An operator may be several kernels, a sort for example.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            self.operators += 1
            self.num_bytes += sum(map(_bytes_of, _tensors([args, list(kwargs.values()), result])))
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def _bytes_of(tensor: Tensor) -> int:
    number = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride()):
        number *= size if stride else 1  # an expanded dimension is read once
    return number


class Machine(NamedTuple):
    """What the device and its host can do, each measured alone."""

    launch: float  # seconds of an operator on one number
    wait: float  # seconds of the same, with its result read
    copy: float  # bytes a second, read and written
    product: float  # float32 operations a second


class StepCost(NamedTuple):
    """One step, forward and backward, of one loss."""

    loss: str
    rows: int  # of each rank
    waits: float | None  # for the device; None where it cannot say
    operators: int
    num_bytes: int  # that the operators read and write
    seconds: float
    copy_seconds: float  # of a copy that reads and writes as many bytes
    repeat: float  # relative difference of the gradients of equal steps; not 0 where atomic operations add in any order
    deterministic: str  # "yes", or what raises under torch.use_deterministic_algorithms
    waited: dict[str, float]  # waits by line of the package


def measure_machine(device: torch.device, product: int, num_bytes: int) -> Machine:
    """Measure the four numbers of :class:`Machine` on ``device``."""
    number, matrix = torch.zeros(1, device=device), torch.zeros(product, product, device=device)

    def launch() -> None:
        for _ in range(100):
            number.add_(1)

    def wait() -> None:
        for _ in range(100):
            number.add_(1).item()

    steps = {"launch": launch, "wait": wait, "copy": _copy(device, num_bytes), "product": lambda: matrix @ matrix}
    times = {name: median(runs) for name, runs in interleave(steps, 3, device).items()}
    operations = 2 * product**3 / times["product"]
    return Machine(times["launch"] / 100, times["wait"] / 100, num_bytes / times["copy"], operations)


def measure_steps(site: Site, rows: tuple[int, ...]) -> Iterator[StepCost]:
    """Yield a step of each loss of each size. Every rank has ``rows`` rows, which are gathered."""
    for count in rows:
        for name in checks.LOSSES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # hints about the random rows
                step = _measure(site, name, count)
            yield step


def _measure(site: Site, name: str, rows: int) -> StepCost:
    loss, form = checks.make_losses(site.device, QUEUE)[name]
    inputs, targets = _inputs(loss, rows, site.rank, site.device)
    step = partial(_step, loss, form, inputs, targets)
    local = copy.deepcopy(loss)
    local.gather_distributed = False
    alone = partial(_gradient, local, form, inputs, targets)
    for _ in range(WARM):
        step()
    waited = count_waits(site.device, step)
    with OperatorCount() as counted:
        step()
    num_bytes = min(counted.num_bytes, MOST_BYTES)
    copied = seconds_together(site, _copy(site.device, num_bytes)) * counted.num_bytes / max(1, num_bytes)
    return StepCost(
        loss=name,
        rows=inputs.shape[0],
        waits=None if waited is None else sum(waited.values()),
        operators=counted.operators,
        num_bytes=counted.num_bytes,
        seconds=seconds_together(site, step),
        copy_seconds=copied,
        repeat=_repeat(alone),
        deterministic=_deterministic(alone),
        waited=waited or {},
    )


def seconds_together(site: Site, step: Step) -> float:
    """Return the median time of ``step``, which may communicate, on the slowest rank: ten runs, fewer if it is slow."""

    def seconds() -> float:
        start = clock(site.device)
        step()
        return clock(site.device) - start

    first = [seconds() for _ in range(2)]
    repeats = min(REPEATS, max(2, int(MOST_SECONDS / max(site.gather(first[1])))))
    return max(site.gather(median(seconds() for _ in range(repeats))))


def _inputs(loss: DistributedLoss, rows: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return float32 logits, or embeddings where those are compared, and targets: rare classes, or labels of four."""
    numbers = torch.Generator().manual_seed(rank)
    if isinstance(loss, (RetrievalSmoothAPLoss, ContrastiveLoss)):
        rows = min(rows, MOST_EMBEDDINGS)
        inputs, targets = torch.randn(rows, WIDTH, generator=numbers), torch.arange(rows) // 4
    else:
        inputs = torch.randn(rows, CLASSES, generator=numbers)
        drawn = torch.rand(rows, generator=numbers).div(RARE).long()
        targets = torch.where(drawn < CLASSES - 1, drawn + 1, 0)
    return inputs.to(device).requires_grad_(), targets.to(device)


def _step(loss: DistributedLoss, form: Arguments, inputs: Tensor, targets: Tensor) -> None:
    inputs.grad = None
    loss(*form(inputs, targets)).backward()


def _gradient(loss: DistributedLoss, form: Arguments, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of a step of a copy of ``loss``, whose state stays as it is."""
    _step(copy.deepcopy(loss), form, inputs, targets)
    assert inputs.grad is not None
    return inputs.grad


def _copy(device: torch.device, num_bytes: int) -> Step:
    """Return a copy that reads and writes ``num_bytes`` together."""
    source, target = torch.zeros(2, max(1, num_bytes // 2), dtype=torch.uint8, device=device)
    return lambda: target.copy_(source)


def _repeat(alone: Any) -> float:
    """Return the largest relative difference between the gradients of four equal steps."""
    first, *others = (alone().double() for _ in range(4))
    return max(float((other - first).norm() / first.norm()) for other in others)


def _deterministic(alone: Any) -> str:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        alone()
        return "yes"
    except RuntimeError as error:
        return " ".join(str(error).split())
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def count_waits(device: torch.device, step: Step) -> dict[str, float] | None:
    """Return how often a step waits for ``device``, by line of the package; None where the device cannot say.

    CUDA warns about each wait on request. Its count leaves out collectives and what waits outside torch.
    """
    with _warned(device) as found:
        for _ in range(COUNTED):
            step()
    return None if found is None else {line: number / COUNTED for line, number in found.most_common()}


@contextmanager
def _warned(device: torch.device) -> Iterator[Counter[str] | None]:
    """Let the device warn about each wait, and count the warnings by the line that waits."""
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        yield None
        return
    found: Counter[str] = Counter()
    mode = module.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it may miss some
        warnings.filterwarnings("always", message="called a synchronizing")
        show = warnings.showwarning

        def note(message: Any, *others: Any, **options: Any) -> None:
            if str(message).startswith("called a synchronizing"):
                found[_line()] += 1
            else:
                show(message, *others, **options)

        warnings.showwarning = note
        module.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            module.set_sync_debug_mode(mode)


def _line() -> str:
    """Return the innermost line of the losses and what they use; autograd reports its waits when they are over."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE) and file.relative_to(PACKAGE).parts[0] in FOLDERS:
            return f"{file.relative_to(PACKAGE).as_posix()}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def print_steps(constants: Machine, found: list[StepCost]) -> None:
    """Print the constants, the table of the steps, then what waits and what raises."""
    print(
        f"one operator {constants.launch * 1e6:.3g} us, with its result read {constants.wait * 1e6:.3g} us, "
        f"copy {constants.copy / 1e9:.3g} GB/s, float32 matrix products {constants.product / 1e12:.3g} TFLOP/s"
    )
    lines = [
        [
            step.loss,
            str(step.rows),
            "-" if step.waits is None else f"{step.waits:g}",
            str(step.operators),
            *(f"{value:.3g}" for value in (step.num_bytes / 1e6, step.seconds * 1e3, step.copy_seconds * 1e3)),
            f"{step.repeat:.0e}" if step.repeat else "exact",
            "yes" if step.deterministic == "yes" else "raises",
        ]
        for step in found
    ]
    header = ("loss", "rows", "waits", "operators", "MB", "ms", "copy ms", "repeat", "deterministic")
    title = f"Steps, forward and backward, float32: {CLASSES} classes, queue of {QUEUE:,}, rows of each rank"
    print_table(title, header, lines)
    for step in found:
        if step.waited:
            waited = ", ".join(f"{line} {number:g}" for line, number in step.waited.items())
            print(f"{step.loss}, {step.rows} rows, waits of a step: {waited}")
        if step.deterministic != "yes":
            print(f"{step.loss}, {step.rows} rows, deterministic algorithms: {step.deterministic[:200]}")


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "steps")
    script.parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the accelerator if there is one)")
    script.parser.add_argument("--backend", help="backend of torch.distributed (default: that of the device)")
    options = script.start()
    rows, product, num_bytes = ((20,), 8, 1_000) if options.quick else (ROWS, PRODUCT, MOST_BYTES)
    with open_site(options.backend, options.device, 60) as site:
        constants, found = measure_machine(site.device, product, num_bytes), []
        for step in measure_steps(site, rows):
            found.append(step)
            if site.rank == 0:  # after each: whoever ends the script keeps what was measured
                results = {"constants": constants._asdict(), "steps": [one._asdict() for one in found]}
                script.write(device=str(site.device), world_size=site.world_size, **results)
        if site.rank == 0:
            print_steps(constants, found)


if __name__ == "__main__":
    main()
