"""Memory and time of the loss of a language model without its logits, against full logits and torch's own function.

Usage: python benchmarks/vocabulary.py [--quick] [--repeats 3] [--out FOLDER]

Forward and backward from hidden states (4,096 tokens of 256 columns, float32) and the weight of the head (32,768
words), on one thread. Each form runs in processes of its own, after a step of few tokens: the peak of the resident set
above what it was before, with the gradients of both, and the processor time; medians. ``30 %`` counts three tokens of
ten. Needs Linux's /proc. Writes vocabulary.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from memory import CLEAR, resident
from report import CPU, Record, Run, apart, print_records
from torch import Tensor

from fullrank import causal_lm_loss, token_log_probs

FULL, QUICK, FEW = (4_096, 32_768, 256), (256, 1_024, 32), 16  # tokens, words, columns; tokens of the first step
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def of_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, labels)


def of_torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from torch.nn import LinearCrossEntropyOptions as Options  # type: ignore[attr-defined]  # of torch 2.13

    loss: Tensor = F.linear_cross_entropy(hidden, weight, labels, options=Options())  # type: ignore[attr-defined]
    return loss


def of_hidden(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return causal_lm_loss(hidden, labels, weight=weight, shift=False)


def of_tokens(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    log_probs = token_log_probs(hidden, labels, weight=weight)
    assert isinstance(log_probs, Tensor)
    return -log_probs.sum() / (labels != -100).sum()


FORMS: dict[str, tuple[Form, float]] = {
    "full logits": (of_logits, 1.0),
    "F.linear_cross_entropy in chunks": (of_torch, 1.0),
    "causal_lm_loss": (of_hidden, 1.0),
    "causal_lm_loss, 30 %": (of_hidden, 0.3),
    "token_log_probs": (of_tokens, 1.0),
}


def draw(
    sizes: tuple[int, int, int], share: float, device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states and the weight of the head, which require grad, and labels of which ``share`` count."""
    (tokens, words, columns), generator = sizes, torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, columns, generator=generator, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(words, columns, generator=generator, device=device, dtype=dtype).div_(columns**0.5)
    labels = torch.randint(0, words, (tokens,), generator=generator, device=device)
    labels[torch.rand(tokens, generator=generator, device=device) >= share] = -100
    return hidden, weight.requires_grad_(), labels


def measure(name: str, sizes: tuple[int, int, int]) -> tuple[int, float, float]:
    """Return the peak in bytes, the seconds and the loss of one form."""
    torch.set_num_threads(1)
    form, share = FORMS[name]
    hidden, weight, labels = draw(sizes, share)
    form(hidden[:FEW].detach().requires_grad_(), weight[:FEW].detach().requires_grad_(), labels[:FEW] % FEW).backward()
    CLEAR.write_text("5")  # the peak so far becomes the resident set
    before, start = resident("VmRSS"), time.process_time()
    loss = form(hidden, weight, labels)
    loss.backward()
    return resident("VmHWM") - before, time.process_time() - start, loss.item()


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "vocabulary", repeats=3)
    options, records = script.start(), list[Record]()
    if not CLEAR.exists():
        print("skipped: without Linux's /proc the peak of a single step cannot be read")
        return
    sizes = QUICK if options.quick else FULL
    for name in FORMS:
        if name.startswith("F.") and not hasattr(F, "linear_cross_entropy"):
            continue
        peaks, seconds, losses = zip(*(apart(measure, name, sizes) for _ in range(options.repeats)))
        first: Record = records[0] if records else {"seconds": median(seconds)}
        of_logits = median(seconds) / first["seconds"]
        records.append({"form": name, "peak_mib": median(peaks) / 2**20, "seconds": median(seconds)})
        records[-1] |= {"of_full_logits": of_logits, "loss": losses[0]}
    tokens, words, columns = sizes
    print_records(f"{tokens:,} tokens of {columns} columns, {words:,} words: peak above the start", records)
    script.write(sizes=sizes, forms=records)


if __name__ == "__main__":
    main()
