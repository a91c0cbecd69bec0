"""Next-token cross-entropy whose divisor is given: the loss to accumulate over micro-batches and ranks."""

from __future__ import annotations

import difflib
import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...distributed.global_mean import local_mean
from ...distributed.torch_private import loss_parallel_is_active, not_compiled, note_kind
from ...errors import (
    Words,
    check_amount,
    check_between,
    check_choice,
    check_int,
    check_positive,
    check_tensor,
    expected,
    first_order_only,
)
from ...kernels.documents import SHIFTED_DOCUMENTS, is_within, same_document
from ..arguments import completed
from ..base import DistributedLoss
from ..rows import compute_dtype, has_float64, has_values
from .vocabulary import (
    OF_ROWS,
    WHOLE,
    Gradients,
    Rows,
    Vocabulary,
    check_labels,
    check_range,
    check_shards,
    prepared,
    read_head,
    without_autocast,
)


@completed(DistributedLoss)
def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: Tensor | float | None = None,
    num_items_in_batch: Tensor | float | None = None,
    document_ids: Tensor | None = None,
    ignore_index: int = -100,
    shift: bool = True,
    shift_labels: Tensor | None = None,
    validate_args: bool = True,
    **unused: Any,
) -> Tensor:
    r"""Sum the cross-entropies of the next tokens, and divide by a number of items unless ``reduction="sum"``.

    Equal to ``F.cross_entropy(logits[..., :-1, :].flatten(0, -2), labels[..., 1:].flatten(), reduction="sum") / n``.

    .. math:: -\frac{1}{n} \sum_{t:\, y_{t+1} \ne \text{ignore}} \log \mathrm{softmax}(x_t)_{y_{t+1}}

    With ``weight`` logits are ``hidden @ weight.T + bias``, of which a few rows at a time exist. The memory is about
    that of the hidden states and of the gradient of the weight. The arguments are those of a loss function of Hugging
    Face transformers too: ``model.loss_function = causal_lm_loss``.

    Args:
        logits: (..., T, V) raw logits; the one at t predicts token t + 1. Inside torch's ``loss_parallel()`` also a
            DTensor that is sharded on V, over a mesh of one dimension; call backward inside it too. With ``weight``
            hidden states (..., T, D) instead, a plain tensor.
        labels: (..., T) token indices, those of the inputs; ``ignore_index`` where a token does not count.
        vocab_size: V, if it is to be checked; transformers passes it.
        weight: (V, D) of the last layer, such as ``lm_head.weight``. Plain, or a DTensor that tensor parallelism shards
            on V over one dimension of a mesh; its ranks pass the same rows.
        bias: (V,) of the last layer, in the form of ``weight``.
        z_loss: k >= 0. Adds k logsumexp(x_t)^2 for each token that counts.
        softcap: c > 0: the logits are c tanh(x / c). None for x.
        label_smoothing: s in [0, 1]: the target is 1 - s of the token, and s / V of each.
        reduction: ``"mean"``, or ``"sum"``, for :func:`~fullrank.accumulate` and :class:`~fullrank.DeferredMean`: it
            does not divide and takes no ``num_items``.
        num_items: n, a number or a tensor of one element; None for the number of valid tokens in this call. With 0 the
            sum, which is 0 then, is not divided.
        num_items_in_batch: the name of ``num_items`` in transformers.
        document_ids: (..., T) integers, the document of each token, where rows hold several: the first token of a
            document is not predicted from the last one of another. For position ids that start at 0 in each document
            use ``(position_ids == 0).cumsum(-1)``.
        ignore_index: the label that does not count.
        shift: move the labels by one. The logits are not cut, because that would copy them; those at the last t get no
            gradient. False for labels that are shifted already, as they must be before a sequence is cut over ranks.
        shift_labels: (..., T) shifted ``labels`` in their place; transformers passes them under sequence parallelism.
        **unused: other arguments that transformers passes to every loss function; without effect.

    Returns:
        Scalar, float32, or float64 for float64 logits.

    Raises:
        TypeError: for tensors of another dtype or kind; for a keyword that is almost one of ours.
        ValueError: for a weight that FSDP2 has sharded again after its forward, with the two ways out; for logits
            sharded on V outside of ``loss_parallel()``, or so that a rank has none; for shapes, devices, labels or
            counts that do not fit; for ``document_ids`` with labels that are shifted already.

    Degenerate: no valid token gives 0 with zero gradients.
    Numerics: half precision is computed in float32; the gradient has the dtype of the logits. Logits whose label does
        not count have no effect, even if they are NaN. With ``weight`` the gradients are computed in the forward, so a
        second backward raises, and so does a second derivative. On an accelerator products of half precision are added
        in float32 where it can, and the host waits once for the number of rows.

    Distributed: nothing travels, and there is no ``group``. With None for ``num_items`` each rank divides by its own
        count, under ``no_grad`` too, and the mean over ranks in DDP is a mean of means. Pass the count over all ranks,
        or use :func:`~fullrank.accumulate`; in validation :func:`~fullrank.global_mean`, which takes a ``group``.
        For logits sharded on V the ranks of their mesh pass the same labels, and get the same scalar, which is no
        DTensor: torch reduces three numbers a token over them in the forward, and none in the backward. The ranks of a
        ``weight`` that is sharded on V agree on the rows, reduce the maxima and the sums of each block of rows, and the
        gradient of the hidden states once.

    Example:
        >>> import torch
        >>> causal_lm_loss(torch.zeros(1, 3, 4), torch.tensor([[0, 2, -100]]))
        tensor(1.3863)
    """
    if shift_labels is not None:
        labels, shift = shift_labels, False
    number = num_items if num_items_in_batch is None else num_items_in_batch

    def prepare() -> Rows:
        check_int("ignore_index", ignore_index)
        for name in unused:  # a keyword that is almost one of ours is a typing mistake, not one of transformers
            for ours in difflib.get_close_matches(name, causal_lm_loss.__kwdefaults__ or (), n=1, cutoff=0.85):
                raise TypeError(f"causal_lm_loss: got the keyword {name}. Use {ours}.")
        if num_items is not None and num_items_in_batch is not None:
            raise ValueError(expected("num_items_in_batch", "None with num_items, which means the same", "both"))
        if check_choice("reduction", reduction, ("mean", "sum")) == "sum" and number is not None:
            raise ValueError(expected("num_items", 'None with reduction="sum", which divides by nothing', number))
        check_amount("z_loss", z_loss)
        check_between("label_smoothing", label_smoothing, 0.0, 1.0)
        if softcap is not None:
            check_positive("softcap", softcap)
        settings: dict[str, Any] = {"softcap": softcap, "z_loss": z_loss, "smoothing": label_smoothing}
        if weight is None:
            if bias is not None:
                fix = "Pass hidden states and the weight too."
                raise ValueError(expected("bias", "None without weight", bias, fix))
            _check_logits(logits)
            vocabulary, own_weight, own_bias = Vocabulary(logits.shape[-1], **settings), None, None
        else:
            vocabulary, own_weight, own_bias = read_head("causal_lm_loss", logits, weight, bias, **settings)
        size = vocabulary.size
        checked = check_labels("labels", labels, logits, "logits" if weight is None else "hidden")
        if vocab_size is not None and vocab_size != size:
            raise ValueError(expected("vocab_size", f"{size}, the number of logits of a token", vocab_size))
        targets = checked.to(torch.int64)
        if document_ids is not None and not shift:
            raise ValueError(expected("document_ids", "None with labels that are shifted", "both", SHIFTED_DOCUMENTS))
        if document_ids is not None:
            within = F.pad(same_document("document_ids", document_ids, checked), (1, 0), value=True)
            targets = targets.masked_fill(~within, ignore_index)
        if shift:
            targets = F.pad(targets, (0, 1), value=ignore_index)[..., 1:]
        valid = targets != ignore_index
        if validate_args and has_values(targets) and not is_within(checked, ignore_index, size):
            check_range("labels", targets, valid, size, f"ignore_index={ignore_index}")
        return Rows(vocabulary, logits, own_weight, own_bias, targets, valid)

    rows = prepared("causal_lm_loss", weight, prepare)
    total = _sum_over_logits(rows, ignore_index) if weight is None else _sum_over_hidden(rows)
    if reduction == "sum":
        return total
    if number is None:
        return note_kind(local_mean(total, rows.valid.sum()), mean=True)
    if isinstance(number, Tensor):
        if number.numel() != 1:
            raise ValueError(expected("num_items", "one element", number, "Add the counts first."))
        return local_mean(total, number.detach().reshape(()))
    return total / (check_amount("num_items", number) or 1)


def _sum_over_logits(rows: Rows, ignore_index: int) -> Tensor:
    """Return the sum of the losses from logits (..., T, V)."""
    logits: Any
    vocabulary, logits, _, _, targets, valid = rows
    is_sharded = hasattr(logits, "full_tensor")
    own = logits.to_local() if is_sharded else logits
    # Zeros where the label does not count: a NaN there would reach the gradient as 0 * NaN. The logits are the largest
    # tensor, so a copy of them is overwritten in place.
    x, ignored = own.to(compute_dtype(logits.dtype)), ~valid.unsqueeze(-1)
    x = x.masked_fill(ignored, 0.0) if x.dtype == logits.dtype else x.masked_fill_(ignored, 0.0)
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if vocabulary.softcap is not None:
        x = vocabulary.softcap * torch.tanh(x / vocabulary.softcap)
    if is_sharded:
        from torch.distributed.tensor import DTensor, Shard

        shape, stride = torch.Size((len(x), vocabulary.size)), (vocabulary.size, 1)
        x = DTensor.from_local(x, logits.device_mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)
    total: Any = F.cross_entropy(x, targets, ignore_index=ignore_index, reduction="sum")
    total = total.to_local() if is_sharded else total
    if not (vocabulary.z_loss or vocabulary.smoothing):
        return total
    lse: Any = torch.logsumexp(x, 1)
    each = vocabulary.z_loss * lse.square()
    if vocabulary.smoothing:
        each = each + vocabulary.smoothing * (lse - x.mean(1))
    each = each.full_tensor() if is_sharded else each
    return (1 - vocabulary.smoothing) * total + each.where(valid.reshape(-1), 0.0).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Return the sum over N rows of the losses of their targets::

        x [N, D]   weight [v, D]   bias [v]   targets [N]      v of the V rows of the vocabulary, those of this rank

        loss  = lse - (1 - s) z_t - s mean(z) + k lse^2         z [n, v] of a block of n rows, s smoothing, k z_loss
        dz    = (1 + 2 k lse) softmax(z) - (1 - s) [t] - s / V
        dx    = dz @ weight      dweight = dz.T @ x      dbias = sum dz

    The forward has z at hand, so it computes the gradients. To compute z again in the backward would cost a third of
    the products.
    """

    @staticmethod
    def forward(
        ctx: Any, vocabulary: Vocabulary, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        smoothing, share = vocabulary.smoothing, vocabulary.smoothing / vocabulary.size
        ctx.call, ctx.witnesses = "causal_lm_loss", [x, weight, *([] if bias is None else [bias])]
        with without_autocast(x):
            x, weight, bias = vocabulary.factors(x, weight, bias)
            gradients = Gradients(ctx.needs_input_grad[1:4], x, weight, bias)
            losses = torch.empty(len(x), dtype=compute_dtype(x.dtype), device=x.device)
            for block in vocabulary.blocks(x):
                z = vocabulary.logits(x[block], weight, bias)
                slope = vocabulary.slope(z) if gradients.are_needed else None
                sums = vocabulary.sums(z, targets[block], total=smoothing > 0)
                log_mass = sums.mass.log()
                lse = log_mass + sums.largest
                losses[block] = log_mass - (1 - smoothing) * sums.picked
                losses[block] += vocabulary.z_loss * lse.square() - share * sums.total
                if gradients.are_needed:
                    z.mul_(((1 + 2 * vocabulary.z_loss * lse) / sums.mass)[:, None]).sub_(share)
                    vocabulary.pick_(z, targets[block], torch.full_like(lse, smoothing - 1))
                    gradients.add(block, z if slope is None else z.mul_(slope), x, weight)
            ctx.gradients = gradients.finished(vocabulary)
        return losses.sum(dtype=torch.float64 if has_float64(x.device) else None).to(losses.dtype)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            fix = "Its gradients are computed in the forward and given away, so retain_graph has no effect."
            raise RuntimeError(expected("causal_lm_loss", "one backward", Words("another"), fix))
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (None if each is None else each.mul_(grad) for each in gradients)
        dtypes = [tensor.dtype for tensor in ctx.witnesses]
        found = [None if each is None else each.to(dtype) for each, dtype in zip(scaled, [*dtypes, torch.float32])]
        return None, *found, None


@functools.partial(not_compiled, reason=OF_ROWS)
def _sum_over_hidden(rows: Rows) -> Tensor:
    """Return the sum of the losses of the valid targets from hidden states (..., T, D)."""
    x, targets, _ = rows.counted()
    factors: Any = x, rows.weight, rows.bias
    if not torch.is_grad_enabled():
        factors = [None if factor is None else factor.detach() for factor in factors]
    return _LinearCrossEntropy.apply(rows.vocabulary, *factors, targets)


def _check_logits(logits: Any) -> None:
    """Raise TypeError or ValueError, the same on every rank, for what are no logits (..., T, V)."""
    check_tensor("logits", logits)
    if not logits.is_floating_point():
        raise TypeError(expected("logits", "a floating-point tensor", logits, "Pass raw logits."))
    if logits.ndim < 2 or logits.shape[-1] == 0:
        raise ValueError(expected("logits", "shape (..., T, V) with V >= 1", logits))
    if hasattr(logits, "full_tensor"):
        own = "Use DTensor.from_local(logits.to_local(), m, [Shard(-1)]), m the dimension of the mesh that shards it."
        dim = logits.ndim - 1
        check_shards("logits", logits, dim, own if any(each.is_shard(dim) for each in logits.placements) else WHOLE)
        if not loss_parallel_is_active():
            what = "a DTensor sharded on the vocabulary inside of loss_parallel()"
            fix = "Enter torch.distributed.tensor.parallel.loss_parallel(), for the backward too, or use full_tensor()."
            raise ValueError(expected("logits", what, Words("one outside of it"), fix))
