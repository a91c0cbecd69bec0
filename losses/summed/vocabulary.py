r"""The last layer of a language model, a block of rows at a time, so that the logits of all rows never exist.

.. math:: z = \frac{c}{\tau} \tanh\left(\frac{x W^T + b}{c}\right), \qquad \log p = z - \log \sum \exp z

The vocabulary may be spread over ranks, of which each has some rows of W. Then the ranks exchange the maximum of each
row of z, its sums, and at the end the gradients of x.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...distributed.exchange import Exchange
from ...distributed.header import Checksum, Offer, agree_on
from ...distributed.torch_private import is_sharded_by_fsdp, not_compiled
from ...errors import Words, check_tensor, expected
from ..rows import check_device, check_values, compute_dtype, is_integer

WHOLE = "Use full_tensor(), or to_local() where each rank holds whole sequences."
OF_ROWS = (
    "the number of tokens that count is known only when it runs, so it runs eagerly. Compile without fullgraph=True"
)
SAME_ROWS = "The ranks that share the vocabulary of a weight pass the same rows."
_MIX = (-7046029254386353131, -4417276706812531889)  # odd multipliers of a 64-bit hash
LEAST_ROWS = 128  # of a block: 64 took a tenth longer in benchmarks/vocabulary.py, 256 a sixth more memory


class Sums(NamedTuple):
    """Of each row of logits z (n, V), less the largest of the row: what the losses need, over the whole vocabulary."""

    largest: Tensor  # [n]
    mass: Tensor  # [n], sum exp z
    picked: Tensor  # [n], z of the target
    total: Tensor  # [n], sum z
    moment: Tensor  # [n], sum z exp z


class Vocabulary(NamedTuple):
    """How logits follow from hidden states, what a loss adds, and which rows of the vocabulary this rank has."""

    size: int  # V
    softcap: float | None = None  # c
    temperature: float = 1.0  # tau
    z_loss: float = 0.0
    smoothing: float = 0.0
    exchange: Exchange | None = None  # between the ranks that share the vocabulary
    first: int = 0  # the first row of this rank

    def factors(self, x: Tensor, *tensors: Tensor | None) -> list[Any]:
        """Return ``x`` and ``tensors`` in the dtype that is multiplied, that of autocast where it is active.

        It is float32 for half precision, except on a device that adds products of half precision in float32.
        """
        dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors if t is not None], x.dtype)
        if dtype != torch.float64 and _has_autocast(kind := x.device.type):
            dtype = torch.get_autocast_dtype(kind)
        if not _adds_in_float32(x.device, dtype):
            dtype = compute_dtype(dtype)
        return [None if tensor is None else tensor.to(dtype) for tensor in (x, *tensors)]

    def blocks(self, x: Tensor) -> Iterator[slice]:
        """Yield the rows of each block, whose logits take about the memory of all hidden states."""
        size = max(LEAST_ROWS, x.numel() // self.size)
        return (slice(start, start + size) for start in range(0, len(x), size))

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's logits [n, v] of a block of rows, in float32 or float64."""
        z = _product(x, weight.T)
        if bias is not None:
            z.add_(bias)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z if self.temperature == 1 else z.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor | None:
        """Return the derivative of the soft cap where it gave the logits ``z`` [n, v]; None without one."""
        if self.softcap is None:
            return None
        return (z * (self.temperature / self.softcap)).square_().neg_().add_(1)

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column [n, 1] of each target, and whether this rank has it; if not, the column is another one."""
        at, size = targets[:, None] - self.first, self.size
        if self.exchange is None:
            return at, torch.ones_like(at, dtype=torch.bool)
        size = min(-(-size // self.exchange.group.size()), size - self.first)
        return at.clamp(0, size - 1), (at >= 0) & (at < size)

    def sums(self, z: Tensor, targets: Tensor, *, total: bool = False, moment: bool = False) -> Sums:
        """Overwrite logits ``z`` [n, v] by their exponentials, and return what is asked for over the vocabulary."""
        largest = z.amax(1)
        if self.exchange is not None:
            largest = self.exchange.largest(largest, "the largest logits")
        z.sub_(largest[:, None])
        at, is_own = self.places(targets)
        found = torch.zeros(4, len(z), dtype=z.dtype, device=z.device)
        found[1] = z.gather(1, at).where(is_own, 0.0)[:, 0]
        if total:
            found[2] = z.sum(1)
        if moment:
            found[3] = (z.exp() * at_least(z)).sum(1)
        found[0] = z.exp_().sum(1)
        if self.exchange is not None:
            found = self.exchange.sum(found, "the sums of logits")
        return Sums(largest, *found)

    def pick_(self, slope: Tensor, targets: Tensor, amount: Tensor) -> Tensor:
        """Add ``amount`` [n] to ``slope`` [n, v] at the targets that this rank has."""
        at, is_own = self.places(targets)
        return slope.scatter_add_(1, at, amount[:, None] * is_own)


class Gradients:
    """The gradients of rows and of this rank's weight and bias, added up block by block; None where not ``needed``."""

    def __init__(self, needed: tuple[bool, ...], x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        dtype = compute_dtype(weight.dtype)
        self.x = torch.empty(x.shape, dtype=dtype, device=x.device) if needed[0] else None
        self.weight = torch.zeros(weight.shape, dtype=dtype, device=x.device) if needed[1] else None
        self.bias = weight.new_zeros(len(weight), dtype=dtype) if bias is not None and needed[2] else None

    @property
    def are_needed(self) -> bool:
        return not (self.x is None and self.weight is None and self.bias is None)

    def add(self, block: slice, slope: Tensor, x: Tensor, weight: Tensor) -> None:
        """Add those of a block of rows, from the derivative [n, v] by its logits before the soft cap."""
        if self.bias is not None:
            self.bias += slope.sum(0)
        slope = slope.to(x.dtype)
        if self.x is not None:
            self.x[block] = _product(slope, weight)
        if self.weight is None:
            return
        if x.dtype == self.weight.dtype:
            self.weight.addmm_(slope.T, x[block])
        else:
            self.weight += _product(slope.T, x[block])

    def finished(self, vocabulary: Vocabulary) -> list[Tensor | None]:
        """Return them, that of the rows over the whole vocabulary."""
        if self.x is not None and vocabulary.exchange is not None:
            self.x = vocabulary.exchange.sum(self.x, "the gradients of hidden states")
        return [self.x, self.weight, self.bias]


def at_least(z: Tensor) -> Tensor:
    """Return logits of which those that are -inf, of a padded vocabulary, are finite: times a mass of 0 they are 0."""
    return z.clamp_min(torch.finfo(z.dtype).min / 4)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products have the dtype of their factors."""
    return torch.autocast(x.device.type, enabled=False) if _has_autocast(x.device.type) else nullcontext()


def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, in float32 for half precision."""
    return a @ b if a.dtype == compute_dtype(a.dtype) else torch.mm(a, b, out_dtype=torch.float32)


@functools.cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies matrices of half precision, and returns float32."""
    try:
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        return dtype != compute_dtype(dtype) and torch.mm(ones, ones, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):  # NotImplementedError among them
        return False


def read_head(
    call: str, hidden: Any, weight: Any, bias: Any, **settings: Any
) -> tuple[Vocabulary, Tensor, Tensor | None]:
    """Return how logits follow from hidden states, and this rank's weight and bias, whose gradients reach DTensors."""
    tensors = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise TypeError(expected(name, "a floating-point tensor", tensor))
    check_values("hidden", hidden)
    is_sharded = hasattr(weight, "full_tensor")
    if hasattr(hidden, "full_tensor"):
        raise TypeError(expected("hidden", "a plain tensor", Words("a DTensor"), WHOLE))
    if hidden.ndim < 2 or hidden.shape[-1] == 0:
        raise ValueError(expected("hidden", "shape (..., T, D) with D >= 1", hidden))
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or len(weight) == 0:
        what = f"shape (V, {hidden.shape[-1]}) with V >= 1, for hidden states of that width"
        raise ValueError(expected("weight", what, weight, "Pass the weight of the last layer, such as lm_head.weight."))
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(expected("bias", f"shape ({len(weight)},), that of a row for each token", bias))
    if bias is not None and hasattr(bias, "full_tensor") != is_sharded:
        raise TypeError(expected("bias", f"a {type(weight).__name__}, as weight", Words(type(bias).__name__)))
    for name in [*tensors][1:]:
        check_device(name, tensors[name], hidden, "hidden")
    if not is_sharded:
        return Vocabulary(len(weight), **settings), weight, bias
    if is_sharded_by_fsdp(weight):
        what = "the whole weight, or a DTensor that tensor parallelism shards on the vocabulary"
        fix = (
            "FSDP2 gathers the weight inside the forward of its module alone. Compute the loss inside that forward; or "
            'in a method of the module, registered with register_fsdp_forward_method(module, "name").'
        )
        raise ValueError(expected("weight", what, Words("a part that FSDP2 holds between forwards"), fix))
    check_shards("weight", weight, 0, "Use full_tensor(), or to_local() where each rank holds it all.")
    mesh, size = weight.device_mesh, len(weight)
    if bias is not None and (bias.device_mesh, bias.placements) != (mesh, weight.placements):
        raise TypeError(expected("bias", f"placements {weight.placements}, as weight", bias.placements))
    first = -(-size // mesh.size()) * mesh.get_local_rank()
    vocabulary = Vocabulary(size, **settings, exchange=Exchange(call, mesh.get_group()), first=first)
    return vocabulary, weight.to_local(), None if bias is None else bias.to_local()


def check_shards(name: str, tensor: Any, dim: int, fix: str) -> None:
    """Raise TypeError or ValueError unless a DTensor is sharded on ``dim`` alone, with a part on every rank."""
    num_ranks, size = tensor.device_mesh.size(), tensor.shape[dim]
    if not is_shared(tensor, dim):
        what = f"a plain tensor, or a DTensor sharded on dim {dim}, the vocabulary, over a mesh of one dimension"
        raise TypeError(expected(name, what, Words(f"a DTensor with placements {tensor.placements}"), fix))
    if -(-size // num_ranks) * (num_ranks - 1) >= size:  # torch would wait for ranks that leave out a collective
        got = Words(f"{size} over {num_ranks} ranks")
        raise ValueError(expected(name, "a part of the vocabulary on every rank", got, "Use full_tensor()."))


def is_shared(tensor: Any, dim: int) -> bool:
    """Return whether a tensor is a DTensor that the ranks of a mesh of one dimension share on ``dim``."""
    return hasattr(tensor, "full_tensor") and [placement.is_shard(dim) for placement in tensor.placements] == [True]


class Rows(NamedTuple):
    """The checked rows of a call, and this rank's part of the last layer."""

    vocabulary: Vocabulary
    hidden: Tensor  # (..., T, D), or logits (..., T, V)
    weight: Any
    bias: Any
    targets: Tensor  # (..., T) int64
    valid: Tensor  # (..., T) bool

    def counted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows (N, D) that are valid, their targets and places; the host waits once, for their number."""
        places = self.valid.flatten().nonzero()[:, 0]
        x = self.hidden.flatten(0, -2).index_select(0, places)
        return x, self.targets.flatten().index_select(0, places), places

    @property
    def checksum(self) -> Tensor:
        """A hash of the targets that are valid, and of their places."""
        targets = self.targets.where(self.valid, -1).flatten()
        mixed = (targets ^ torch.arange(1, len(targets) + 1, device=targets.device) * _MIX[0]) * _MIX[1]
        return ((mixed ^ (mixed >> 32)) * _MIX[0]).sum()


def prepared(call: str, weight: Any, prepare: Callable[[], Rows]) -> Rows:
    """Return ``prepare()``; ranks that share a weight all raise if one of them does, or if their rows differ."""
    if not is_shared(weight, 0) or is_sharded_by_fsdp(weight):
        return prepare()
    return _agreed(call, weight, prepare)


@functools.partial(not_compiled, reason=OF_ROWS)
def _agreed(call: str, weight: Any, prepare: Callable[[], Rows]) -> Rows:
    def bring() -> Offer[Rows]:
        rows = prepare()
        settings = rows.vocabulary._replace(exchange=None, first=0)
        needs_grad = torch.is_grad_enabled() and rows.hidden.requires_grad
        facts = {"rows": tuple(rows.targets.shape), "settings": settings, "gradient of hidden": needs_grad}
        return Offer(rows, facts, checksum=Checksum(rows.checksum, "labels", SAME_ROWS))

    return agree_on(call, weight.device_mesh.get_group(), bring).value


def check_labels(name: str, labels: Any, rows: Tensor, rows_name: str) -> Tensor:
    """Return the tokens ``labels`` (..., T) of ``rows`` (..., T, *), or raise TypeError or ValueError."""
    check_tensor(name, labels)
    if hasattr(labels, "full_tensor"):
        raise TypeError(expected(name, "a plain tensor", Words("a DTensor"), WHOLE))
    if not is_integer(labels):
        raise TypeError(expected(name, "integer token indices", labels, f"Use {name}.long()."))
    if labels.shape != rows.shape[:-1]:
        what = f"shape {tuple(rows.shape[:-1])} for {rows_name} (..., T, {'V' if rows_name == 'logits' else 'D'})"
        fix = "Pass the labels of the same tokens; shift=True moves them." if name == "labels" else ""
        raise ValueError(expected(name, what, labels, fix))
    check_device(name, labels, rows, rows_name)
    return labels


def check_range(name: str, targets: Tensor, valid: Tensor, size: int, ignored: str) -> None:
    """Raise ValueError when a target that is valid is no token of ``size``; the host waits for a device."""
    bad = ((targets < 0) | (targets >= size)) & valid
    if bool(bad.any()):
        what = f"token indices in [0, {size}) or {ignored}"
        raise ValueError(expected(name, what, int(targets[bad][0]), "Give padding the label ignore_index."))
