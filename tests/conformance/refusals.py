"""What is refused of the rows that a loss is called with: one list, for one process and for one of several ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from loss_cases import INF, LOSSES, NAN, Loss
from torch import Tensor

V, T = ValueError, TypeError

LOGITS = (torch.arange(24.0) * 7 % 24).reshape(8, 3)  # enough rows for the quartiles of a class's negatives to differ
TARGETS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
BINARY = TARGETS.clamp_max(1)
ONES, TOKENS, PIXELS = torch.ones(8), TARGETS[None], torch.zeros(4, 3, 2)
PARTS = [torch.ones(4, 3), torch.ones(2, 3)]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the strided layout is a prototype
    NESTED = [torch.nested.nested_tensor(PARTS, layout=layout) for layout in (torch.strided, torch.jagged)]


def ends(values: Tensor, number: float) -> Tensor:
    return torch.cat([values[:-1], torch.tensor([number], dtype=values.dtype)])


class Refusal(NamedTuple):
    """What raises: the class of the error, the argument it names, what is changed, and what it says was given."""

    error: type[Exception]
    argument: str
    changes: Mapping[str, Any]
    given: str = ""

    @property
    def pattern(self) -> str:
        """A regular expression of the message, in the one form of all messages."""
        return rf"(?s:(\w+, )?{self.argument}.*: expected .+, got .*{self.given}.*\.)"


# Argument, error, values with what the message says was given. A dictionary changes other arguments than the one that
# the message names. Over ranks the first value of a row is passed, by one of them.
Rows = list[tuple[str, type[Exception], list[tuple[Any, str]]]]
WEIGHTS: Rows = [
    ("sample_weight", T, [([1.0] * 8, "")]),
    ("sample_weight", T, [(ONES.bool(), "bool"), (ONES * 1j, "complex")]),
    ("sample_weight", V, [(torch.ones(9), r"\(9,\)"), (ONES[:3], r"\(3,\)")]),
    ("sample_weight", V, [(ends(ONES, -1.0), "-1")]),
    ("sample_weight", V, [(ends(ONES, NAN), "nan"), (ends(ONES, INF), "inf")]),
]
INDEXES: Rows = [
    ("indexes", T, [(BINARY.tolist(), "")]),
    ("indexes", T, [(BINARY.double(), "float64"), (BINARY > 0, "bool")]),
    ("indexes", V, [(BINARY[:, None], r"\(8, 1\)\. Use indexes\.squeeze\(1\)")]),
    ("indexes", V, [(BINARY[:-1], r"\(7,\)")]),
    ("indexes", V, [(BINARY.to("meta"), "one on meta")]),
]


def floats(name: str) -> Rows:
    """Return what is refused of floating-point rows; the first may be longer than a message."""
    nested = [(rows, rf"a nested one\. .*torch\.cat\({name}\.unbind\(\)\)") for rows in NESTED]
    array = numpy.zeros((8, 3)), r"numpy.ndarray of dtype float64 and shape \(8, 3\)\. Use "
    return [
        (name, T, [(LOGITS.tolist() * 100, rf"\.\.\. \(list\)\. Use torch\.as_tensor\({name}\)"), array, *nested]),
        (name, T, [(LOGITS.long(), "int64")]),
        (name, T, [(LOGITS.to_sparse(), rf"Use {name}\.to_dense\(\)"), (LOGITS.to_mkldnn(), r"torch\._mkldnn")]),
    ]


def entries(name: str) -> Rows:
    """Return what is refused of the class or label of each row."""
    return [
        (name, T, [(TARGETS.tolist(), ""), (TARGETS * 1j, "complex64")]),
        (name, V, [(TARGETS[:3], r"\(3,\)"), (torch.ones(8, 2).long(), r"\(8, 2\)")]),
        (name, V, [(TARGETS.to("meta"), rf"one on meta\. Use {name}\.to\(\w+\.device\)")]),
    ]


NOT_FINITE = [(ends(TARGETS.float(), NAN), "nan"), (ends(TARGETS.half(), -INF), "-inf")]
OUT_OF_RANGE = [(ends(TARGETS, 7), "7"), (ends(TARGETS, 3), "3"), (ends(TARGETS, -1), "-1")]
CLASSES: Rows = [
    *entries("targets"),
    ("targets", V, [(ends(TARGETS.double(), 0.5), r"0\.5"), (ends(TARGETS.float(), 3.0), r"3\.0"), *NOT_FINITE]),
    ("targets", V, [*OUT_OF_RANGE, (TARGETS + 1, "Class indices start at 0")]),
]
WIDE = torch.ones(4, 3)  # further rows of embeddings
REFERENCE: Rows = [
    ("reference, reference_labels", V, [({"reference": WIDE}, "None")]),
    ("reference, reference_labels", V, [({"reference_labels": TARGETS}, "")]),
    ("reference", T, [({"reference": WIDE.double(), "reference_labels": TARGETS[:4]}, "float64")]),
    ("reference", V, [({"reference": WIDE[:, :2], "reference_labels": TARGETS[:4]}, r"\(4, 2\)")]),
    ("reference_labels", V, [({"reference": WIDE, "reference_labels": TARGETS[:3]}, r"\(3,\)")]),
]
# By the kind of a loss, or one loss; "module": of its module alone, to whose function the value is something else.
VALUES: dict[str, Rows] = {
    "scores": [
        *floats("logits"),
        ("logits", V, [(LOGITS[..., None], r"\(8, 3, 1\)")]),
        *CLASSES,
        *WEIGHTS,
        ("sample_weight", V, [(torch.ones(8, 3), r"\(8, 3\)"), (ONES[:, None], r"Use sample_weight\.squeeze\(1\)")]),
        ("iid_mask", T, [(ONES, "Weights go to sample_weight="), (TARGETS, "Pass the query of each row as indexes=")]),
        ("iid_mask", V, [(ONES[:3].bool(), r"\(3,\)")]),
    ],
    "scores module": [
        ("logits", V, [(LOGITS[:, 0], r"\(8,\)")]),
        ("logits", V, [(LOGITS.repeat(1, 2), r"\(8, 6\)")]),
    ],
    "no queries": [("indexes", T, [(TARGETS, "Use SmoothAPLoss")])],
    "queries": [
        *INDEXES,
        ("logits", V, [(LOGITS, r"\(8, 3\)")]),
        ("targets", V, [(2 * BINARY - 1, r"-1\. Use \(targets > 0\)\.long\(\)")]),
    ],
    "grades": [
        *floats("logits"),
        ("logits", V, [(LOGITS, r"\(8, 3\)")]),
        ("relevance", V, [(-1 - TARGETS, "-1")]),
        ("relevance", V, [(TARGETS / 0.0, "nan")]),
        *entries("relevance"),
        *INDEXES[1::2],
        *WEIGHTS,
    ],
    "embeddings": [
        *floats("embeddings"),
        ("embeddings", V, [(ONES, r"Use embeddings\[None\] for one row"), (LOGITS[..., None, None], r"flatten\(1\)")]),
        ("embeddings", V, [(LOGITS[:, :0], r"\(8, 0\)")]),
        *entries("labels"),
        ("labels", T, [(TARGETS.double(), "float64")]),
        *WEIGHTS,
    ],
    "retrieval module": REFERENCE,
    "sup_con": [
        *REFERENCE,
        ("labels", V, [(LOGITS.long(), r"use labels\.bool\(\)"), (LOGITS[:3] > 0, r"\(3, 3\)")]),
    ],
    "pairs": [
        *floats("keys"),
        ("queries", T, [(LOGITS.long(), "int64"), (LOGITS.tolist(), ""), (LOGITS.to_sparse(), "")]),
        ("keys", T, [(LOGITS.double(), r"Use keys\.to\(torch\.float32\)")]),
        ("keys", V, [(LOGITS[:, 0], r"\(8,\)"), (LOGITS[:, :2], r"\(8, 2\)")]),
        ("keys", V, [(LOGITS[1:], r"\(7, 3\)\. Row i of the keys is the positive of row i")]),
        ("keys", V, [(LOGITS.to("meta"), "one on meta")]),
        ("labels", V, [(TARGETS[:3], r"\(3,\)")]),
        ("negatives", T, [(TARGETS, "pass labels=")]),
        ("negatives", T, [(WIDE.double(), "float64")]),
        ("negatives", V, [(WIDE[:, :2], r"\(4, 2\)")]),
        ("mask", T, [(LOGITS, "Tensor")]),
        ("mask", T, [((LOGITS,), "1 of them")]),
        ("mask", T, [({"mask": (LOGITS, LOGITS), "negatives": WIDE}, "2 of them")]),
        ("negative_labels", V, [({"negative_labels": TARGETS, "negatives": LOGITS}, "")]),
        ("negative_labels", V, [({"negative_labels": TARGETS[:3], "negatives": WIDE, "labels": TARGETS}, r"\(3,\)")]),
        ("negative_labels", T, [({"negative_labels": ONES[:4], "negatives": WIDE, "labels": TARGETS}, "float32")]),
        ("offsets", T, [(ONES, r"a Tensor\. Pass \(of_keys,\)"), ((ONES, ONES), "2 of them")]),
        ("offsets of keys", T, [({"offsets": (TARGETS,)}, "int64")]),
        ("offsets of keys", V, [({"offsets": (ONES[1:],)}, r"\(7,\)")]),
        ("offsets of keys", V, [({"offsets": (LOGITS,)}, r"\(8, 3\)")]),
        ("offsets of keys", V, [({"offsets": (ONES.clone().requires_grad_(),)}, r"with a gradient\. Detach")]),
        ("offsets of negatives", V, [({"offsets": (ONES, ONES), "negatives": WIDE}, r"\(8,\)")]),
        ("mask of keys", V, [({"mask": (LOGITS, LOGITS[1:])}, "7"), ({"mask": (LOGITS, LOGITS[:, :2])}, "")]),
        ("mask of negatives", V, [({"mask": (LOGITS, LOGITS, WIDE[:3]), "negatives": WIDE}, "3")]),
        *WEIGHTS,
    ],
    "classes": [
        *floats("inputs"),
        ("inputs", V, [(ONES, r"\(8,\)")]),
        ("inputs", V, [(LOGITS[:, :1], r"\(8, 1\)")]),
        *CLASSES,
        *WEIGHTS,
        ("sample_weight", V, [(LOGITS, r"\(8, 3\)")]),
    ],
    "elements": [
        *floats("inputs"),
        ("targets", T, [(1.0, ""), (LOGITS.tolist(), "")]),
        ("targets", V, [(TARGETS, r"\(8,\)")]),
        ("targets", V, [(LOGITS - 1, r"-1\.0\. Use \(targets > 0\)\.float")]),
        ("targets", V, [(LOGITS[:, :2], r"\(8, 2\)")]),
        *WEIGHTS,
    ],
    "cross_entropy": [
        ("inputs", V, [(LOGITS[:, :1], "BCEWithLogitsLoss")]),
        ("targets", T, [(LOGITS.long(), r"Use targets\.argmax\(dim=1\)")]),
        ("targets", V, [(LOGITS - 1, "-1")]),
    ],
    "softmax_focal": [
        ("alpha", V, [([1.0, 2.0], "")]),
        ("targets", V, [({"inputs": PIXELS, "targets": PIXELS[:, 0, 0].long()}, r"\(4,\)")]),
        ("sample_weight", V, [({"inputs": PIXELS, "targets": PIXELS[:, 0].long(), "sample_weight": ONES[:4]}, "")]),
    ],
    "sigmoid_focal": [
        ("targets", V, [({"inputs": PIXELS, "targets": PIXELS.transpose(1, 2)}, r"\(4, 2, 3\)")]),
        ("sample_weight", V, [(torch.ones(8, 5), r"\(8, 5\)"), (torch.tensor(1.0), r"\(\)")]),
    ],
    "causal_lm": [
        ("logits", T, [([1.0], ""), (LOGITS[None].long(), "int64")]),
        ("logits", V, [(LOGITS[None, :, :0], r"\(1, 8, 0\)")]),
        ("labels", T, [(TOKENS.float(), "float32"), (TOKENS.bool(), "bool"), (TOKENS.tolist(), "")]),
        ("labels", V, [(TOKENS[:, 1:], r"\(1, 7\)"), (TOKENS.to("meta"), "one on meta"), (TOKENS + 3, "3")]),
        ("labels", V, [(TOKENS - 1, "-1. Give padding the label ignore_index")]),
        ("document_ids", V, [({"document_ids": TOKENS[:, 1:], "shift": True}, r"\(1, 7\)")]),
        ("document_ids", V, [({"document_ids": TOKENS.to("meta"), "shift": True}, "one on meta")]),
        ("document_ids", T, [({"document_ids": TOKENS.double(), "shift": True}, "float64")]),
        ("vocab_size", V, [(5, "5")]),
    ],
}
QUERIED = {loss.module for loss in LOSSES.values() if loss.kind == "queries"}


def refused_rows(loss: Loss, is_module: bool = True) -> Iterator[list[Refusal]]:
    """Yield what a module, or a pure function, refuses of the rows of a call, row by row of the list."""
    kinds = [loss.kind, loss.name, *["no queries"] * (loss.is_pooled and loss.module not in QUERIED)]
    kinds += [f"{loss.kind} module"] * is_module
    for argument, error, values in (row for kind in kinds for row in VALUES.get(kind, [])):
        found = []
        for bad, given in values:
            changes = bad if isinstance(bad, dict) else {argument: bad}
            if all(loss.takes(name) if is_module else name in loss.of_function for name in changes):
                found.append(Refusal(error, argument, changes, given))
        if found:
            yield found
