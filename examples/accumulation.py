"""Train the same batches cut into micro-batches in several ways, and compare the learning curves.

One process:    python examples/accumulation.py
Two processes:  torchrun --standalone --nproc-per-node 2 examples/accumulation.py

Two optimizer steps are equal only if their gradients are. A language model averages over tokens, and SmoothAP ranks all
rows. For both, the usual accumulation (the mean of the losses of the micro-batches) optimises a different loss for each
way to cut the batch. `accumulate` and `pooled_backward` optimise the same loss, on any number of ranks. To use them in
your own training, copy the lines of `language_step` and `ranking_step`.

The language models are a toy on synthetic texts and, where transformers is installed, a small GPT-NeoX on paragraphs of
Python's help pages. The program writes the curves; docs/make_diagrams.py draws those of benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accumulation_models import make_language_model, make_rows, make_scorer
from accumulation_report import Curve, Panel, print_gaps, save
from accumulation_text import Tokenizer, collate, make_texts
from accumulation_transformers import is_installed, make_neox, make_paragraphs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fullrank import SmoothAPLoss, accumulate, causal_lm_loss, count_valid_tokens, maybe_no_sync, pooled_backward
from fullrank.losses import smooth_ap

LARGEST_GAP = 1e-12  # between curves that must coincide: float64 rounding, which training amplifies slightly
LANGUAGE_SETTINGS = ((32, 1), (16, 2), (2, 16), (1, 32))  # micro-batches of all ranks x sequences
NEOX_SETTINGS = ((16, 1), (4, 4), (1, 16))  # micro-batches of all ranks x paragraphs
RANKING_SETTINGS = ((16, 32), (4, 128), (1, 512))  # micro-batches of all ranks x rows
NUM_FEATURES = 8
TEMPERATURE = 0.1

Step = Callable[[nn.Module, list[Any]], None]


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits; a model of transformers returns them in an object."""
    output = model(batch["tokens"])
    return output if isinstance(output, Tensor) else output.logits


def language_step(model: nn.Module, micro_batches: list[dict[str, Tensor]]) -> None:
    """Accumulate exactly: every token of the window has the same weight."""
    for step, batch in accumulate(model, micro_batches, count_valid_tokens):
        step.backward(causal_lm_loss(logits_of(model, batch), batch["labels"], reduction="sum"))


def mean_of_means_step(model: nn.Module, micro_batches: list[dict[str, Tensor]]) -> None:
    """Accumulate in the usual way: every micro-batch and every rank has the same weight."""
    for index, batch in enumerate(micro_batches):
        with maybe_no_sync(model, index, len(micro_batches)):
            loss = causal_lm_loss(logits_of(model, batch), batch["labels"])
            (loss / len(micro_batches)).backward()


class Ranking:
    """Steps with SmoothAP, where the loss of a row depends on all other rows."""

    def __init__(self, gather_distributed: bool | None) -> None:
        self.loss = SmoothAPLoss(1, queue_size=0, temperature=TEMPERATURE, gather_distributed=gather_distributed)

    def ranking_step(self, model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> None:
        """Accumulate exactly: one loss over the rows of all micro-batches and ranks."""
        pooled_backward(
            model,
            micro_batches,
            forward=lambda batch: model(batch[0]),
            loss=lambda scores, batches: self.loss(scores, torch.cat([targets for _, targets in batches])),
        )

    def mean_step(self, model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> None:
        """Accumulate in the usual way: each micro-batch is ranked separately."""
        for index, (features, targets) in enumerate(micro_batches):
            with maybe_no_sync(model, index, len(micro_batches)):
                (self.loss(model(features), targets) / len(micro_batches)).backward()


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def cut(rows: Sequence[Any], setting: tuple[int, int]) -> list[Sequence[Any]]:
    """Return this rank's share of a batch, cut into micro-batches of the size in the setting."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    start, stop = (len(rows) * edge // world_size() for edge in (rank, rank + 1))
    return [rows[first : min(first + setting[1], stop)] for first in range(start, stop, setting[1])]


def train(
    model: nn.Module,
    batches: Iterable[list[Any]],
    step: Step,
    evaluate: Callable[[nn.Module], float],
    lr: float,
    alone: bool = False,
) -> Curve:
    """Take one optimizer step per batch, a list of this rank's micro-batches; return the losses along the way.

    ``alone``: each rank trains its own model without DDP, as one process does.
    """
    wrapped = DistributedDataParallel(model) if dist.is_initialized() and not alone else model
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=lr)
    curve = [(0, evaluate(model))]
    for number, micro_batches in enumerate(batches):
        optimizer.zero_grad()
        step(wrapped, micro_batches)
        optimizer.step()
        curve.append((number + 1, evaluate(model)))
    return curve


def compare_toy(lengths: str, num_steps: int) -> Panel:
    """Train the toy on synthetic texts of some lengths."""
    size = LANGUAGE_SETTINGS[0][0] * LANGUAGE_SETTINGS[0][1]
    texts, test_texts = make_texts(lengths, num_steps * size, seed=0), make_texts(lengths, 64, seed=1)
    tokenizer = Tokenizer([*texts, *test_texts])
    rows, test = ([tokenizer.encode(text) for text in part] for part in (texts, test_texts))
    must_coincide = lengths == "equal" and size % world_size() == 0
    settings = LANGUAGE_SETTINGS
    title = f"language model, {lengths} lengths"
    return compare_language(
        title, rows, test, lambda: make_language_model(len(tokenizer.words)), settings, 1e-2, must_coincide
    )


def compare_neox(num_steps: int, length: int) -> Panel:
    """Train GPT-NeoX on paragraphs of at most ``length`` tokens."""
    size = NEOX_SETTINGS[0][0] * NEOX_SETTINGS[0][1]
    paragraphs = make_paragraphs(length)
    rows, test = (paragraphs[64:] * (1 + num_steps * size // len(paragraphs)))[: num_steps * size], paragraphs[:64]
    panel = compare_language("GPT-NeoX, help pages of Python", rows, test, make_neox, NEOX_SETTINGS, 1e-2)
    return panel._replace(in_picture=True)


def compare_language(
    title: str,
    rows: list[Tensor],
    test_rows: list[Tensor],
    make_model: Callable[[], nn.Module],
    settings: Sequence[tuple[int, int]],
    lr: float,
    naive_must_coincide: bool = False,
) -> Panel:
    """Train a language model on undivided batches, and with every setting in both ways."""
    size = settings[0][0] * settings[0][1]
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    tests = [collate(test_rows[start : start + 16]) for start in range(0, len(test_rows), 16)]
    num_tests = sum(int((test["labels"][:, 1:] != -100).sum()) for test in tests)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        total = sum(causal_lm_loss(logits_of(model, test), test["labels"], reduction="sum") for test in tests)
        return float(total / num_tests)

    def run(step: Step, setting: tuple[int, int] | None = None) -> Curve:
        parts = ([collate(part) for part in ([batch] if setting is None else cut(batch, setting))] for batch in batches)
        return train(make_model(), parts, step, evaluate, lr, alone=setting is None)

    return Panel(
        title,
        "loss per token, test texts",
        run(mean_of_means_step),
        {f"mean of means, {name_of(setting)}": run(mean_of_means_step, setting) for setting in settings},
        {f"accumulate, {name_of(setting)}": run(language_step, setting) for setting in settings},
        naive_must_coincide,
    )


def compare_ranking(num_steps: int) -> Panel:
    """Train with SmoothAP on undivided batches, and with every setting in both ways."""
    size = RANKING_SETTINGS[0][0] * RANKING_SETTINGS[0][1]
    features, targets = make_rows(num_steps * size, NUM_FEATURES, seed=0)
    test_features, test_targets = make_rows(2000, NUM_FEATURES, seed=1)
    batches = torch.arange(len(targets)).split(size)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        return float(smooth_ap(model(test_features), test_targets, temperature=TEMPERATURE))

    def run(method: str, setting: tuple[int, int] | None = None) -> Curve:
        cuts = ([batch] if setting is None else cut(batch, setting) for batch in batches)
        parts = ([(features[index], targets[index]) for index in cut_batch] for cut_batch in cuts)
        step = getattr(Ranking(gather_distributed=None if setting else False), method)
        return train(make_scorer(NUM_FEATURES), parts, step, evaluate, 1e-2, alone=setting is None)

    return Panel(
        "SmoothAP, 512 rows",
        "SmoothAP loss, test rows",
        run("mean_step"),
        {f"mean of losses, {name_of(setting)}": run("mean_step", setting) for setting in RANKING_SETTINGS},
        {f"pooled_backward, {name_of(setting)}": run("ranking_step", setting) for setting in RANKING_SETTINGS},
        in_picture=True,
    )


def name_of(setting: tuple[int, int]) -> str:
    """Return "32 x 1"."""
    return f"{setting[0]} x {setting[1]}"


def demonstrate(options: argparse.Namespace, is_first: bool) -> int:
    """Train, compare, report; return the exit status, 0 if the curves that must coincide do."""
    start = time.perf_counter()
    panels = [compare_toy(lengths, options.steps) for lengths in ("extreme", "equal")]
    if is_installed:
        panels.append(compare_neox(2 * options.steps, options.length))
    panels.append(compare_ranking(3 * options.steps))  # each of these steps is cheaper
    if not is_first:
        return 0
    ranks = "1 process" if world_size() == 1 else f"{world_size()} processes"
    steps = f"{options.steps} optimizer steps (GPT-NeoX: {2 * options.steps}, SmoothAP: {3 * options.steps})"
    print(f"{steps}, {ranks}, float64")
    if not is_installed:
        print("Without GPT-NeoX, which needs transformers and the help pages of Python.")
    print()
    is_kept = print_gaps(panels, LARGEST_GAP)
    save(panels, options.output)
    print(f"\nCurves: {options.output}\nTime: {time.perf_counter() - start:.0f} s")
    return 0 if is_kept else 1


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Compare the learning curves of the same batches cut into micro-batches in several ways.",
        epilog="With two processes: torchrun --standalone --nproc-per-node 2 examples/accumulation.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=int, default=24, help="optimizer steps of the toy, half of GPT-NeoX's and a third of SmoothAP's"
    )
    parser.add_argument("--length", type=int, default=512, help="the most tokens of a paragraph for GPT-NeoX, 4 to 512")
    parser.add_argument("--output", type=Path, default=Path("outputs/accumulation.json"), help="where the curves go")
    options = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > NEOX_SETTINGS[0][0]:
        parser.error(f"--nproc-per-node of torchrun: expected at most {NEOX_SETTINGS[0][0]}, one for each paragraph")
    if options.steps < 1:
        parser.error(f"--steps: expected a number >= 1, got {options.steps}")
    if not 4 <= options.length <= 512:
        parser.error(f"--length: expected a number in [4, 512], got {options.length}")
    return options


def main() -> int:
    """Run on as many processes as torchrun started, or on one; return the exit status."""
    options = parse_options()
    if "RANK" not in os.environ:  # not started by torchrun
        return demonstrate(options, True)
    dist.init_process_group("gloo")
    try:
        status = demonstrate(options, dist.get_rank() == 0)
        dist.barrier()  # gloo may abort a rank that leaves while another rank still communicates
        return status
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
