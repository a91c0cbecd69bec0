"""A model with two experts, each on one rank of two, whose tokens travel there and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from subjects import Model
from torch import Tensor, nn


class Exchange(torch.autograd.Function):
    """Send rows to the ranks that hold their expert, and the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
        ctx.sizes = sends, receives, group
        output = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), receives, sends, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sends, receives, group = ctx.sizes
        output = grad.new_empty(sum(sends), *grad.shape[1:])
        dist.all_to_all_single(output, grad.contiguous(), sends, receives, group=group)
        return output, None, None, None


class Experts(nn.Module):
    """Two experts, each token going to the one of its parity: both here, or one on each rank of ``group``."""

    def __init__(self, dtype: torch.dtype, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.outer = Model(dtype)
        held = (0, 1) if group is None else (dist.get_rank(group),)
        self.experts = nn.ModuleDict({str(index): Expert(dtype, index) for index in held})

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.outer.up(self.outer.embed(tokens)).flatten(0, 1)
        order = torch.argsort(tokens.flatten() % 2, stable=True)
        num_odd = int((tokens % 2).sum())
        mixed = self._run(hidden[order], [len(order) - num_odd, num_odd])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return self.outer.down(torch.tanh(mixed[back])).unflatten(0, tokens.shape)

    def _run(self, rows: Tensor, sends: list[int]) -> Tensor:
        if self.group is None:
            return torch.cat([self.experts[str(index)](part) for index, part in enumerate(rows.split(sends))])
        receives = torch.empty(2, dtype=torch.int64)
        dist.all_to_all_single(receives, torch.tensor(sends), group=self.group)
        (expert,) = self.experts.values()
        arrived = Exchange.apply(rows, sends, receives.tolist(), self.group)
        return Exchange.apply(expert(arrived), receives.tolist(), sends, self.group)


class Expert(nn.Module):
    """A linear map of its own."""

    def __init__(self, dtype: torch.dtype, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(50 + index)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64, generator=generator).to(dtype))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight
