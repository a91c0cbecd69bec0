"""The texts of the accumulation example: synthetic, cut into words, with lengths that vary as in real data."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

IGNORED = -100  # the label of a token that the loss ignores

_NOUNS = ["baker", "bird", "cat", "clerk", "dog", "farmer", "fox", "king"]
_THINGS = ["book", "bridge", "cart", "door", "hat", "house", "lamp", "letter"]
_VERBS = ["builds", "draws", "finds", "keeps", "lends", "moves", "sells", "wants"]
_NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


class Tokenizer:
    """Numbers the words of a text; 0 is padding."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.words = ["<pad>", *sorted({word for text in texts for word in text.split()})]
        self._indices = {word: index for index, word in enumerate(self.words)}

    def encode(self, text: str) -> Tensor:
        """Return the indices of the words, (T,)."""
        return torch.tensor([self._indices[word] for word in text.split()])


def make_texts(lengths: str, count: int, seed: int) -> list[str]:
    """Return ``count`` texts whose numbers of words are "mixed", "extreme" or "equal".

    Short texts count up from a number, long ones are sentences. A loss that weights each text equally, instead of each
    word, learns to count first.
    """
    source = random.Random(f"{lengths} {seed}")
    return [_make_text(_draw_length(lengths, source), source) for _ in range(count)]


def _draw_length(lengths: str, source: random.Random) -> int:
    if lengths == "equal":
        return 16
    if lengths == "mixed":
        return round(3 * 20 ** source.random())  # 3 to 60, as many from 3 to 6 as from 30 to 60
    if lengths == "extreme":
        return source.randint(48, 64) if source.random() < 0.1 else source.randint(3, 5)
    raise ValueError(f"lengths: expected 'mixed', 'extreme' or 'equal', got {lengths!r}")


def _make_text(length: int, source: random.Random) -> str:
    words: list[str] = []
    if length <= 12:
        start = source.randrange(len(_NUMBERS))
        words = [_NUMBERS[(start + place) % len(_NUMBERS)] for place in range(length)]
    while len(words) < length:
        who = source.choice(_NOUNS)
        # The noun determines the verb and the object, except in one sentence out of four.
        known = _NOUNS.index(who) if source.random() < 0.75 else source.randrange(len(_VERBS))
        words += ["the", who, _VERBS[known], "a", _THINGS[(3 * known) % len(_THINGS)], "."]
    return " ".join(words[:length])


def collate(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return tokens (N, T) padded with 0, and labels padded with the ignored label."""
    tokens = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=IGNORED)
    return {"tokens": tokens, "labels": labels}
