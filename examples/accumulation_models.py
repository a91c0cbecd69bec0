"""The models of the accumulation example, in float64 and small enough for a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LONGEST = 64  # words


class LanguageModel(nn.Module):
    """A transformer decoder of one layer: tokens (N, T) to logits (N, T, V) of the next tokens."""

    def __init__(self, num_words: int, width: int = 24, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.embed = nn.Embedding(num_words, width)
        self.place = nn.Parameter(0.1 * torch.randn(_LONGEST, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, num_words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits. Padding is on the right, so causal attention never reads it."""
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        x = x + self._attend(self.norms[0](x))
        x = x + self.inner(self.norms[1](x))
        return self.head(self.norms[2](x))

    def _attend(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(x).chunk(3, dim=-1)
        heads = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)  # [N, heads, T, width]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.join(mixed.transpose(1, 2).flatten(2))


def make_language_model(num_words: int) -> nn.Module:
    """Return a language model, the same at every call."""
    torch.manual_seed(0)
    return LanguageModel(num_words).double()


def make_scorer(num_features: int) -> nn.Module:
    """Return a perceptron with one score per row, the same at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(num_features, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def make_rows(count: int, num_features: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return features (N, F) and targets (N,): the twentieth closest to a point is positive, up to noise."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, num_features, generator=generator, dtype=torch.float64)
    distance = (features - torch.linspace(1, 0, num_features, dtype=torch.float64)).norm(dim=1)
    noisy = distance + 0.2 * torch.randn(count, generator=generator, dtype=torch.float64)
    return features, (noisy <= noisy.kthvalue(max(1, count // 20)).values).long()
