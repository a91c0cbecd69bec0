"""docs/recipes/ddp.md: the script trains as one process does, resumes, and prints what the page says."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_cases import alone, average_precision, change, dealt, flat, make_encoder, of_rows, within_group
from integration_cases import train as train_alone
from pages import assert_printed, blocks, output_of, printing_blocks, run_block
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from workers import WorkerPool

pytestmark = pytest.mark.slow

DEFINITIONS, BALANCED, MAIN, BEST = blocks("recipes/ddp.md")
LIMIT = 1e-6  # of what the training has changed; in float64, since Adam blows up the rounding of small gradients
SIZE = 16


def make_network() -> nn.Module:
    """Return a small network in float64, the same on every rank."""
    return make_encoder(num_inputs=8).double()


def make_rows(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return features and targets (N, 1), one in six positive."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(number, 8, generator=generator, dtype=torch.float64)
    return features, (features[:, :1] + 0.5 * torch.randn(number, 1, generator=generator) > 1).long()


def queued(names: dict[str, Any]) -> nn.Module:
    """Return the loss of the page, with a queue."""
    ap = names["SmoothAPLoss"](num_classes=1, queue_size=64)
    return names["CombinedLoss"]({"ce": names["BCEWithLogitsLoss"](), "ap": ap})


def fitted(rank: int, definitions: str, folder: str) -> tuple[float, list[float], float]:
    """Return the error of the parameters after two epochs, the metric of each, and its last value by scikit-learn."""
    names = run_block(definitions, {})
    train, val = make_rows(96, 0), make_rows(75, 1)
    network, reference = make_network(), make_network()
    before = flat(network)
    history = names["fit"](
        network, queued(names), TensorDataset(*train), TensorDataset(*val), Path(folder), epochs=2, batch_size=SIZE
    )
    epochs = [dealt(96, SIZE, epoch) for epoch in range(2)]
    adam = partial(torch.optim.AdamW, lr=1e-2)
    expected, *_ = train_alone(reference, of_rows(alone(queued(names)), reference, *train), epochs, make_optimizer=adam)
    return change(network, before, expected), history, average_precision(reference, *val)


def resumed(rank: int, definitions: str, folder: str, keeps_loss: bool) -> tuple[bool, bool]:
    """Return whether weights and history after a restart equal those of a job without one."""
    names = run_block(definitions, {})
    sets = [TensorDataset(*make_rows(*of)) for of in ((96, 0), (75, 1))]

    def job(place: str, epochs: int) -> tuple[Tensor, list[float]]:
        path = Path(folder) / place
        path.mkdir(exist_ok=True)
        network = make_network()
        history = names["fit"](network, queued(names), *sets, path, epochs=epochs, batch_size=SIZE)
        return flat(network), history

    through, history = job("through", 2)
    job("killed", 1)
    if not keeps_loss:
        path = Path(folder) / "killed" / "last.pt"
        saved = torch.load(path, weights_only=True)
        saved["loss"] = queued(names).state_dict()
        torch.distributed.barrier()
        torch.save(saved, path.with_name(f"{rank}.pt"))
        path.with_name(f"{rank}.pt").replace(path)
        torch.distributed.barrier()
    again, continued = job("killed", 2)
    return torch.equal(through, again), history == continued


def whole(rank: int, script: str) -> tuple[str, list[float], float]:
    """Return what the script prints, the metrics of the last training, and that of its best model by scikit-learn."""
    names: dict[str, Any] = {}
    out = output_of(script, names)
    best = average_precision(names["network"], *names["make_rows"](8000, seed=1).tensors)
    return out, names["history"], best


def of_vectors(rank: int, definitions: str, folder: str) -> tuple[set[int], list[float]]:
    """Return the positives of each batch, and the metrics, with balanced batches and float targets (N,)."""
    sets = [
        TensorDataset(features, targets[:, 0].double()) for features, targets in (make_rows(96, 0), make_rows(75, 1))
    ]
    names = run_block(definitions, {"all_targets": sets[0].tensors[1]})
    loss_fn, counts = queued(names), set()
    loss_fn.register_forward_pre_hook(lambda module, args: counts.add(int(args[1].sum())))
    return counts, names["fit"](make_network(), loss_fn, *sets, Path(folder), epochs=2, batch_size=SIZE)


SHUFFLED = DEFINITIONS.replace("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch + 1)")


@pytest.mark.parametrize("is_control", [False, pytest.param(True, marks=pytest.mark.full)])
def test_it_trains_and_validates_as_one_process(pool_of_two: WorkerPool, tmp_path: Path, is_control: bool) -> None:
    """The control trains with other batches."""
    recipe = SHUFFLED if is_control else DEFINITIONS
    for parameters, history, expected in pool_of_two(fitted, recipe, str(tmp_path)):
        assert parameters > 1e-3 if is_control else parameters <= LIMIT
        assert history[0] < history[1]  # the first epoch improves the metric
        assert is_control or history[-1] == pytest.approx(expected, rel=LIMIT)
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt", "best.pt"}


@pytest.mark.parametrize("keeps_loss", [True, pytest.param(False, marks=pytest.mark.full)])
def test_it_resumes_bit_for_bit(pool_of_two: WorkerPool, tmp_path: Path, keeps_loss: bool) -> None:
    """Not without the state of the loss."""
    for same, history in pool_of_two(resumed, DEFINITIONS, str(tmp_path), keeps_loss):
        assert (same, history) == (True, True) if keeps_loss else not same


def test_the_script_prints_what_the_page_says(pool_of_two: WorkerPool, tmp_path: Path) -> None:
    script = within_group(DEFINITIONS + MAIN + BEST, str(tmp_path))
    (out, history, best), (quiet, *_) = pool_of_two(whole, script)
    assert_printed(out, next(text for _, text in printing_blocks("recipes/ddp.md") if text))
    assert quiet == ""
    assert history[0] < history[1]
    assert best == pytest.approx(max(history), rel=LIMIT)


def test_the_two_lines_for_balanced_batches(pool_of_two: WorkerPool, tmp_path: Path) -> None:
    imported, *lines = BALANCED.replace("positives=8", "positives=5").strip().splitlines()
    swapped = re.sub(
        r"    sampler = .*\n    loader = .*\n", "".join(f"    {line}\n" for line in lines if line), DEFINITIONS
    )
    for counts, history in pool_of_two(of_vectors, f"{imported}\n{swapped}", str(tmp_path)):
        assert counts == {5}
        assert history[0] < history[1]
