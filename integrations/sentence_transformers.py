"""sentence-transformers: average precision over the batch of all ranks, and one loss over the window of all ranks.

This module does not import sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.group import is_initialized, resolve_group
from ..errors import Words, expected
from ..losses import RetrievalSmoothAPLoss
from . import transformers

LABELS_OF_A_RANK = 1 << 40  # each rank numbers its pairs in a range of its own, so that no two ranks share a label


class RetrievalAPLoss(nn.Module):
    """Smooth average precision as a loss: every text ranks the texts of all ranks by cosine similarity.

    Equal to :class:`~fullrank.RetrievalSmoothAPLoss` of ``model(texts)["sentence_embedding"]``. The data set has:

    - either one column of texts and a column ``label`` of integers. Texts with the same label should find each other;
    - or two columns or more, without a label: ``anchor``, ``positive``, and any number of columns of hard negatives, in
      this order. Anchor and positive of a row should find each other. All other texts of all ranks are negatives for
      both. The other texts rank a hard negative, but it is not a query, because it has no positive.

    Use ``gradient_accumulation_steps=1``, or :class:`PooledLossMixin`: each call ranks only the texts of a micro-batch.

    Args:
        model: the SentenceTransformer.
        temperature: width of the sigmoid that replaces the step, in units of the cosine. None is automatic.
        **options: further arguments of :class:`~fullrank.RetrievalSmoothAPLoss`.

    Raises:
        ValueError: for one column without a label for each text; for several with labels, or with a ``queue_size``.
        TypeError: for labels that are not integers, such as scores.

    Example:
        >>> model = torch.nn.Identity()  # stands for a model; it returns its input
        >>> loss = RetrievalAPLoss(model)
        >>> columns = [{"sentence_embedding": torch.eye(3)}, {"sentence_embedding": torch.eye(3).flip(0)}]
        >>> loss(columns, None)
        tensor(0.4762)
    """

    def __init__(self, model: nn.Module, temperature: float | None = 0.01, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.ranking = RetrievalSmoothAPLoss(temperature, **options)

    def forward(self, sentence_features: Iterable[Mapping[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the loss of one batch.

        Args:
            sentence_features: the output of the tokenizer for each column of texts.
            labels: (N,) integers with one column of texts; None with several.
        """
        columns = list(sentence_features)
        if len(columns) > 1 and labels is not None:
            fix = "Remove the label: this loss takes anchor, positive and hard negatives, but no scores of pairs."
            raise ValueError(expected("labels", f"none with {len(columns)} columns of texts", labels, fix))
        if labels is not None and (labels.is_floating_point() or labels.is_complex()):
            fix = "A label is the class of a text; texts of one class should find each other. Scores are no classes."
            raise TypeError(expected("labels", "integers", labels, fix))
        embeddings = [self.model(features)["sentence_embedding"] for features in columns]
        if labels is None and len(columns) > 1:
            if self.ranking.queue_size:
                fix = "Pairs of other steps would have the same labels. Give the data set a column `label`."
                name = f"queue_size with {len(columns)} columns of texts"
                raise ValueError(expected(name, "0", self.ranking.queue_size, fix))
            # Anchor and positive share a label that no other rank has; each hard negative has a label of its own.
            count = len(embeddings[0])
            numbers = torch.arange(count * (len(columns) - 1), device=embeddings[0].device)
            rank = 0
            if is_initialized() and self.ranking.gather_distributed is not False:
                rank = resolve_group(self.ranking.group).rank()
            labels = rank * LABELS_OF_A_RANK + torch.cat([numbers[:count], numbers])
        elif labels is None or labels.numel() != len(embeddings[0]):
            got = labels if labels is not None else Words("none")
            fix = "Give the data set a column `label` of integers, or a second column of texts."
            raise ValueError(expected("labels", f"{len(embeddings[0])}, one for each text", got, fix))
        return self.ranking(torch.cat(embeddings), labels.reshape(-1))

    def get_config_dict(self) -> dict[str, Any]:
        """Return the arguments, for the model card."""
        return {"temperature": self.ranking.temperature}

    @property
    def citation(self) -> str:
        """The paper of the loss, for the model card."""
        return "Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020."


class PooledLossMixin(transformers.PooledLossMixin):
    """A mixin for ``SentenceTransformerTrainer``: one loss over the texts of all micro-batches and all ranks.

    It is :class:`fullrank.integrations.transformers.PooledLossMixin` with embeddings in place of logits: (N, D) of the
    only column and the labels, if there is a column ``label``, as for a :class:`~fullrank.SupConLoss`; otherwise of
    each column, as for an :class:`~fullrank.InfoNCELoss`. The trainer's argument ``loss`` is not used.
    """

    collect_features: Callable[[Mapping[str, Any]], tuple[list[dict[str, Tensor]], Tensor | None]]
    _label_column = "label"

    def _outputs_of(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        columns = [model(features)["sentence_embedding"] for features in self.collect_features(inputs)[0]]
        return {"logits": columns[0] if len(columns) == 1 else torch.stack(columns, dim=1)}
