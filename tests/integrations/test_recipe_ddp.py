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
from on_ranks import on_ranks
from pages import assert_printed, blocks, output_of, printing_blocks, run_block
from torch import Tensor, nn
from torch.utils.data import TensorDataset

pytestmark = pytest.mark.slow

_, DEFINITIONS, BALANCED, MAIN, BEST = blocks("recipes/ddp.md")
LIMIT = 1e-6  # of what the training has changed; in float64, since Adam blows up the rounding of small gradients
SIZE = 16


def make_network() -> nn.Module:
    return make_encoder(num_inputs=8).double()


def make_rows(number: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(number, 8, generator=generator, dtype=torch.float64)
    return features, (features[:, :1] + 0.5 * torch.randn(number, 1, generator=generator) > 1).long()


def queued(names: dict[str, Any]) -> nn.Module:
    ap = names["SmoothAPLoss"](num_classes=1, queue_size=64)
    return names["CombinedLoss"]({"ce": names["BCEWithLogitsLoss"](), "ap": ap})


@pytest.mark.parametrize("is_control", [False, pytest.param(True, marks=pytest.mark.full)])
@on_ranks(2)
def test_it_trains_validates_and_resumes_as_one_process(rank: int, tmp_path: Path, is_control: bool) -> None:
    """Not without the state of the loss. The control trains with other batches."""
    epoch = "sampler.set_epoch(epoch + 1)" if is_control else "sampler.set_epoch(epoch)"
    names = run_block(DEFINITIONS.replace("sampler.set_epoch(epoch)", epoch), {})
    train, val = make_rows(96, 0), make_rows(75, 1)

    def job(place: str, epochs: int, forgets: bool = False) -> tuple[nn.Module, list[float]]:
        (tmp_path / place).mkdir(exist_ok=True)
        network, loss_fn, sets = make_network(), queued(names), (TensorDataset(*train), TensorDataset(*val))
        if forgets:
            loss_fn.load_state_dict = lambda *args: None
        history = names["fit"](network, loss_fn, *sets, tmp_path / place, epochs=epochs, batch_size=SIZE)
        torch.distributed.barrier()  # the files are there
        return network, history

    (network, history), reference = job("through", 2), make_network()
    epochs = [dealt(96, SIZE, epoch) for epoch in range(2)]
    adam = partial(torch.optim.AdamW, lr=1e-2)
    expected, *_ = train_alone(reference, of_rows(alone(queued(names)), reference, *train), epochs, make_optimizer=adam)
    wrong = change(network, flat(make_network()), expected)
    assert wrong > 1e-3 if is_control else wrong <= LIMIT
    assert history[0] < history[1]  # the first epoch improves the metric
    assert is_control or history[-1] == pytest.approx(average_precision(reference, *val), rel=LIMIT)
    assert {path.name for path in (tmp_path / "through").iterdir()} == {"last.pt", "best.pt"}
    for forgets in (False, True):
        job(f"killed {forgets}", 1)
        again, continued = job(f"killed {forgets}", 2, forgets)
        assert torch.equal(flat(network), flat(again)) != forgets
        assert forgets or history == continued


@pytest.mark.full
@on_ranks(2)
def test_the_script_prints_what_the_page_says(rank: int, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    out = output_of(within_group(DEFINITIONS + MAIN + BEST, str(tmp_path)), names)
    if rank == 0:
        assert_printed(out, next(text for _, text in printing_blocks("recipes/ddp.md") if text))
    else:
        assert out == ""
    best, history = average_precision(names["network"], *names["make_rows"](8000, seed=1).tensors), names["history"]
    assert history[0] < history[1]
    assert best == pytest.approx(max(history), rel=LIMIT)


@on_ranks(2)
def test_the_two_lines_for_balanced_batches(rank: int, tmp_path: Path) -> None:
    """Every batch has as many positives; the targets are floats (N,)."""
    imported, *lines = BALANCED.replace("positives=8", "positives=5").strip().splitlines()
    swapped = re.sub(
        r"    sampler = .*\n    loader = .*\n", "".join(f"    {line}\n" for line in lines if line), DEFINITIONS
    )
    train, val = (TensorDataset(x, y[:, 0].double()) for x, y in (make_rows(96, 0), make_rows(75, 1)))
    names = run_block(f"{imported}\n{swapped}", {"all_targets": train.tensors[1]})
    loss_fn, counts = queued(names), set()
    loss_fn.register_forward_pre_hook(lambda module, args: counts.add(int(args[1].sum())))
    history = names["fit"](make_network(), loss_fn, train, val, tmp_path, epochs=2, batch_size=SIZE)
    assert counts == {5}
    assert history[0] < history[1]
