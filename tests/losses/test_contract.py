"""The contract of every loss, as tables: what is refused and in which words, what warns, which forms of inputs are one.

A row of a table is a case. To add a loss, name it in loss_cases.py; to add an argument, add a row here.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from loss_cases import FOCAL, POOLED
from on_ranks import on_ranks
from torch import Tensor, nn
from workers import error_of

import fullrank.metrics
from fullrank import losses
from fullrank.losses import (
    BCEWithLogitsLoss,
    CombinedLoss,
    CrossEntropyLoss,
    InfoNCELoss,
    LossWarmupWrapper,
    NDCGLoss,
    RetrievalSmoothAPLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
    SoftmaxFocalLoss,
    SupConLoss,
    causal_lm_loss,
    sigmoid_focal,
    smooth_ap,
    softmax_focal,
)
from fullrank.losses.base import GroupOptions
from fullrank.losses.pooled.base import PoolOptions

NAN, INF = math.nan, math.inf
V, T = ValueError, TypeError

LOGITS = (torch.arange(24.0) * 7 % 24).reshape(8, 3)  # enough rows for the quartiles of a class's negatives to differ
TARGETS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
BINARY = TARGETS.clamp_max(1)
ONES = torch.ones(8)
PIXELS, LABELS = torch.zeros(4, 3, 2), torch.zeros(4, 2, dtype=torch.int64)
TOKENS, NEXT = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)


def ends(values: Tensor, number: float) -> Tensor:
    """Return ``values`` with another last entry."""
    return torch.cat([values[:-1], torch.tensor([number], dtype=values.dtype)])


# --- the subjects ----------------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    """A loss, the arguments of a good call, and the settings of a good instance, which are None for a function."""

    kind: Callable[..., Any]
    call: Mapping[str, Any]
    settings: Mapping[str, Any] | None = None


ROWS = {"logits": LOGITS, "targets": TARGETS}
EMBEDDINGS = {"embeddings": LOGITS, "labels": TARGETS}
QUERIES = {"logits": LOGITS[:, :1], "targets": BINARY, "indexes": TARGETS}
SUBJECTS = {
    "sigmoid_sums": Subject(
        losses.sigmoid_sums,
        {"queries": torch.ones(3), "keys": torch.ones(5), "weights": torch.ones(5, 1), "temperature": 1.0},
    ),
    "LossWarmupWrapper": Subject(
        LossWarmupWrapper, ROWS, {"warmup_loss": CrossEntropyLoss(), "main_loss": SmoothAPLoss(3)}
    ),
    "RetrievalSmoothAPLoss": Subject(RetrievalSmoothAPLoss, EMBEDDINGS, {}),
    "NDCGLoss": Subject(NDCGLoss, {"logits": LOGITS[:, 0], "relevance": TARGETS, "indexes": BINARY}, {}),
    "InfoNCELoss": Subject(InfoNCELoss, {"queries": LOGITS, "keys": LOGITS}, {"queue_size": 8}),
    "SupConLoss": Subject(SupConLoss, EMBEDDINGS, {"queue_size": 8}),
    "retrieval_smooth_ap": Subject(losses.retrieval_smooth_ap, EMBEDDINGS),
    "SmoothAPLoss of queries": Subject(SmoothAPLoss, QUERIES, {"num_classes": 1, "queue_size": 8}),
    "smooth_ap of queries": Subject(smooth_ap, QUERIES),
    "causal_lm_loss": Subject(causal_lm_loss, {"logits": TOKENS, "labels": NEXT}),
    "CrossEntropyLoss": Subject(CrossEntropyLoss, {"inputs": LOGITS, "targets": TARGETS}, {}),
    "BCEWithLogitsLoss": Subject(BCEWithLogitsLoss, {"inputs": LOGITS, "targets": LOGITS.sigmoid()}, {}),
    "CombinedLoss": Subject(CombinedLoss, ROWS, {"losses": {"ap": SmoothAPLoss(3), "ce": CrossEntropyLoss()}}),
}
for _name, _loss in POOLED.items():
    SUBJECTS[_loss.module.__name__] = Subject(_loss.module, ROWS, {"num_classes": 3, "queue_size": 8, **_loss.default})
    SUBJECTS[_name] = Subject(_loss.functional, ROWS | dict(_loss.default))
for _name, _focal in FOCAL.items():
    _given = dict(zip(("inputs", "targets"), _focal.inputs()))
    SUBJECTS[_focal.module.__name__] = Subject(_focal.module, _given, {})
    SUBJECTS[_name] = Subject(_focal.functional, _given)

MODULES = [loss.module.__name__ for loss in POOLED.values()]
RANKING = [*MODULES, *POOLED]
RETRIEVAL = ["RetrievalSmoothAPLoss", "retrieval_smooth_ap"]
RECALL = ["RecallAtQuantileLoss", "recall_at_quantile"]
PAUC = ["PAUCAtBudgetLoss", "pauc_at_budget"]
SIGMOID, SOFTMAX = ["SigmoidFocalLoss", "sigmoid_focal"], ["SoftmaxFocalLoss", "softmax_focal"]
CROSS_ENTROPY, BINARY_CROSS_ENTROPY = ["CrossEntropyLoss"], ["BCEWithLogitsLoss"]
OF_TORCH = [*CROSS_ENTROPY, *BINARY_CROSS_ENTROPY]
OF_EMBEDDINGS = ["RetrievalSmoothAPLoss", "InfoNCELoss", "SupConLoss"]
GATHERING = [*MODULES, SIGMOID[0], SOFTMAX[0], *OF_TORCH, *OF_EMBEDDINGS, "NDCGLoss"]

# --- what is refused -------------------------------------------------------------------------------------------------

# subjects, setting, values of the right class that do not fit (ValueError), values of another class (TypeError)
SETTINGS: list[tuple[Sequence[str], str, list[Any], list[Any]]] = [
    (MODULES, "num_classes", [0, -1], [2.0, True]),
    (MODULES, "queue_size", [-1], [1.5]),
    (MODULES, "max_pool_size", [0], [2.5]),
    (MODULES, "queue_keep", ["positives"], []),
    (GATHERING, "gather_distributed", [], ["yes", 1]),
    (GATHERING, "gradient_reduction", ["max", 0], []),
    (GATHERING, "group", [], ["world"]),
    (GATHERING, "name", [], [1]),
    ([*RANKING, *RETRIEVAL, *SOFTMAX], "reduction", ["average", None], []),
    ([*RANKING, *RETRIEVAL, *SOFTMAX, "causal_lm_loss"], "ignore_index", [], [1.0, None]),
    ([*RANKING, *RETRIEVAL], "temperature", [0.0, -0.1, NAN, INF], ["0.1"]),
    (PAUC, "temperature", [], [None]),  # it has no automatic form
    ([*RECALL, *PAUC], "quantile_interpolation", ["cubic"], []),
    (RECALL, "quantile", [0.0, 1.0, -0.1, 1.5, NAN], ["0.1"]),
    (PAUC, "alpha", [-0.1, 0.5, NAN], ["0"]),
    (PAUC, "beta", [0.0, 1.1, -0.5, NAN], [None]),
    (PAUC, "surrogate", ["hinge"], []),
    (PAUC, "dro_lambda", [0.0], ["1"]),
    (PAUC, "n_knots", [1, 2.5], []),
    (PAUC, "tau_scale", ["std"], []),
    (PAUC, "budget_basis", ["tpr"], []),
    (PAUC[:1], "pos_numerator", ["queue"], []),
    (SIGMOID, "alpha", [-0.5, 1.5, NAN], ["0.5"]),
    (SIGMOID, "gamma", [-1.0, NAN], ["2"]),
    (SIGMOID, "reduction", ["mean_positive"], []),
    (SOFTMAX, "alpha", [[1.0, -1.0, 1.0, 1.0], [1.0, NAN, 1.0, 1.0]], [0.25, "balanced"]),
    (SOFTMAX, "gamma", [-1.0, NAN], ["2"]),
    (SOFTMAX, "label_smoothing", [-0.1, 1.1, NAN], ["0.1"]),
    (SOFTMAX, "background_class", [], [0.5]),
    (["LossWarmupWrapper"], "warmup_loss", [], [SmoothAPLoss, nn.functional.cross_entropy, None]),
    (["LossWarmupWrapper"], "main_loss", [], [SmoothAPLoss, nn.functional.cross_entropy, None]),
    (["LossWarmupWrapper"], "warmup_epochs", [-1], [1.5, True]),
    (["LossWarmupWrapper"], "blend_epochs", [-1], [1.5, True]),
    (["LossWarmupWrapper"], "warmup_steps", [-1], [1.5, True]),
    (["LossWarmupWrapper"], "temp_start", [0.0, -1.0, NAN, INF], ["0.1"]),
    (["LossWarmupWrapper"], "temp_end", [0.0, -1.0, NAN, INF], ["0.1"]),
    (["LossWarmupWrapper"], "temp_decay_steps", [0], [1.5]),
    (["LossWarmupWrapper"], "final_main_weight", [0.0, 1.1, -0.5, NAN], ["1"]),
    (["LossWarmupWrapper"], "gather_distributed", [], [1]),
    (["causal_lm_loss"], "reduction", ["none", None], []),
    (["causal_lm_loss"], "num_items", [-1, NAN, INF, torch.ones(2)], ["3", True]),
    (OF_TORCH, "reduction", ["average", "mean_weighted", None], []),
    (OF_TORCH, "weight", [-ONES[:3], ends(ONES[:2], NAN), ends(ONES[:2], INF)], [[1.0, 1.0, 1.0], 0.5]),
    (CROSS_ENTROPY, "weight", [torch.ones(3, 1), torch.tensor(1.0)], []),
    (CROSS_ENTROPY, "ignore_index", [], [1.0, None]),
    (CROSS_ENTROPY, "label_smoothing", [-0.1, 1.1, NAN], ["0.1"]),
    (BINARY_CROSS_ENTROPY, "pos_weight", [torch.tensor(-1.0)], [19.0]),
    (["CombinedLoss"], "losses", [{}, {"a.p": SmoothAPLoss(3)}, {"keys": SmoothAPLoss(3)}, {1: SmoothAPLoss(3)}], []),
    (["CombinedLoss"], "losses", [], [None, [SmoothAPLoss(3)], {"ap": SmoothAPLoss}]),
    (["CombinedLoss"], "weights", [{"ap": 1.0}, {"ap": -1.0, "ce": 1.0}, {"ap": NAN, "ce": 1.0}], []),
    (["CombinedLoss"], "weights", [], [[1.0, 1.0], {"ap": "1", "ce": 1.0}]),
    (["sigmoid_sums"], "temperature", [0.0, -1.0, NAN], []),
    (["sigmoid_sums"], "method", ["fast"], []),
]
# subjects, argument that the message names, changes, what the message says was expected or given
TOGETHER: list[tuple[Sequence[str], str, dict[str, Any], str]] = [
    (PAUC, "alpha, beta", {"alpha": 0.3, "beta": 0.3}, ""),
    (PAUC, "alpha", {"alpha": 0.1, "beta": 0.5, "surrogate": "dro"}, r"0\.1.*For a band use surrogate='pairwise'"),
    (PAUC, "temperature", {"surrogate": "dro", "temperature": 0.3}, "0.3.*'pairwise' and 'trapezoid'"),
    (PAUC, "n_knots", {"surrogate": "dro", "n_knots": 3, "temperature": 0.1}, "3.*'trapezoid'"),
    (PAUC, "n_knots", {"surrogate": "pairwise", "n_knots": 3}, "3.*'trapezoid'"),
    (PAUC, "threshold_gradient", {"surrogate": "pairwise", "threshold_gradient": False}, "False.*'trapezoid'"),
    (PAUC, "dro_lambda", {"surrogate": "trapezoid", "dro_lambda": 1.0}, "1.0.*'dro'"),
    (["LossWarmupWrapper"], "warmup_steps", {"warmup_steps": 5, "warmup_epochs": 1}, "5"),
    (["LossWarmupWrapper"], "blend_steps", {"blend_steps": 5}, "5"),
    (["LossWarmupWrapper"], "blend_steps", {"warmup_steps": 1, "blend_steps": -1}, "-1"),
    (["LossWarmupWrapper"], "blend_epochs", {"warmup_steps": 1, "blend_epochs": 1}, "1"),
    (["LossWarmupWrapper"], "temp_end", {"temp_start": 0.1}, "None"),
    (["LossWarmupWrapper"], "temp_start", {"temp_end": 0.1}, "None"),
    (["LossWarmupWrapper"], "warmup_epochs", {}, "main_loss alone"),  # nothing to do
    (["causal_lm_loss"], "num_items_in_batch", {"num_items": 1, "num_items_in_batch": 1}, "both"),
    (["causal_lm_loss"], "document_ids", {"document_ids": NEXT, "shift": False}, "Labels that were shifted before"),
]
# subjects, argument, tensors that do not fit each with what the message says was given; more are in
# tests/conformance/fault_calls.py, where one of several ranks passes them
VALUES: list[tuple[Sequence[str], str, type[Exception], list[tuple[Any, str]]]] = [
    (RANKING, "logits", T, [(LOGITS.tolist() * 100, r"\.\.\. \(list\)\. Use torch\.as_tensor\(logits\)")]),
    (RANKING, "logits", T, [(numpy.zeros((8, 3)), r"numpy.ndarray of dtype float64 and shape \(8, 3\)\. Use ")]),
    (RANKING, "logits", V, [(LOGITS[..., None], r"\(8, 3, 1\)")]),
    (RANKING, "targets", T, [(TARGETS.tolist(), ""), (TARGETS * 1j, "complex64")]),
    (RANKING, "targets", V, [(ends(TARGETS.double(), 0.5), "0.5"), (ends(TARGETS.float(), NAN), "nan")]),
    (RANKING, "targets", V, [(ends(TARGETS.half(), -INF), "-inf"), (ends(TARGETS.float(), 3.0), r"3\.0")]),
    (RANKING, "targets", V, [(TARGETS[:3], r"\(3,\)"), (torch.ones(8, 3).long(), r"\(8, 3\)")]),
    (RANKING, "targets", V, [(ends(TARGETS, 3), "3"), (ends(TARGETS, -1), "-1")]),
    (
        RANKING,
        "targets",
        V,
        [(TARGETS + 1, "Class indices start at 0"), (TARGETS.to("meta"), r"\.to\(logits\.device\)")],
    ),
    (RANKING, "sample_weight", T, [([1.0] * 8, ""), (ONES.bool(), "bool"), (ONES * 1j, "complex")]),
    (RANKING, "sample_weight", V, [(torch.ones(8, 3), r"\(8, 3\)"), (ends(ONES, -1.0), "-1")]),
    (RANKING, "sample_weight", V, [(ONES[:, None], r"Use sample_weight\.squeeze\(1\)")]),
    (RANKING, "sample_weight", V, [(ends(ONES, NAN), "nan"), (ends(ONES, INF), "inf")]),
    (MODULES, "iid_mask", T, [(ONES, "Weights go to sample_weight=")]),
    (["SmoothAPLoss of queries"], "indexes", V, [(TARGETS[:, None], r"\(8, 1\)")]),
    (["smooth_ap of queries"], "logits", V, [(LOGITS, r"\(8, 3\)")]),
    (RECALL[:1], "indexes", T, [(TARGETS, "Use SmoothAPLoss")]),
    (RETRIEVAL, "labels", V, [(torch.ones(8, 2).long(), r"\(8, 2\)")]),
    (RETRIEVAL, "labels", V, [(TARGETS.to("meta"), r"one on meta\. Use labels\.to\(embeddings\.device\)")]),
    (SOFTMAX[1:], "inputs", T, [([[0.0]], ""), (PIXELS.long(), "int64")]),
    (SIGMOID[1:], "inputs", T, [(PIXELS.long(), "int64")]),
    (SIGMOID[1:], "targets", T, [(1.0, "")]),
    (SIGMOID[1:], "targets", V, [(LABELS, "")]),
    (OF_TORCH, "inputs", T, [([[0.0]], ""), (LOGITS.long(), "int64")]),
    (CROSS_ENTROPY, "inputs", V, [(ONES, r"\(8,\)"), (LOGITS[:, :1], "BCEWithLogitsLoss")]),
    (CROSS_ENTROPY, "targets", T, [(LOGITS.long(), r"Use targets\.argmax\(dim=1\)"), (TARGETS * 1j, "complex64")]),
    (CROSS_ENTROPY, "targets", V, [(TARGETS + 3, "3. Class indices start at 0"), (TARGETS + 0.5, r"0\.5")]),
    (CROSS_ENTROPY, "targets", V, [(TARGETS[:3], r"\(3,\)"), (LOGITS - 1, "-1"), (TARGETS.to("meta"), "one on meta")]),
    (CROSS_ENTROPY, "sample_weight", V, [(LOGITS, r"\(8, 3\)"), (-ONES, "-1")]),
    (BINARY_CROSS_ENTROPY, "targets", V, [(TARGETS, r"\(8,\)"), (LOGITS - 1, r"-1\.0\. Use \(targets > 0\)\.float")]),
    (BINARY_CROSS_ENTROPY, "sample_weight", V, [(ONES[:3], r"\(3,\)"), (-ONES, "-1")]),
    (["causal_lm_loss"], "logits", T, [([1.0], ""), (TOKENS.long(), "int64")]),
    (["causal_lm_loss"], "logits", V, [(TOKENS[..., :0], r"\(2, 3, 0\)")]),
    (["causal_lm_loss"], "labels", T, [(NEXT.float(), "float32"), (NEXT.bool(), "bool"), (NEXT.tolist(), "")]),
    (["causal_lm_loss"], "labels", V, [(NEXT[:, 1:], r"\(2, 2\)"), (NEXT.to("meta"), "one on meta")]),
    (["causal_lm_loss"], "labels", V, [(NEXT + 4, "4"), (NEXT - 1, "-1. Give padding the label ignore_index")]),
    (["causal_lm_loss"], "document_ids", V, [(NEXT[:1], r"\(1, 3\)")]),
    (["causal_lm_loss"], "document_ids", T, [(NEXT.double(), "float64")]),
    (["causal_lm_loss"], "vocab_size", V, [(5, "5")]),
]
# subject, error, argument, tensors of another shape that only fit together
TENSORS: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    *[
        ("sigmoid_sums", V, "queries, keys, weights", changes)
        for changes in (
            {"weights": torch.ones(5)},
            {"weights": torch.ones(4, 1)},
            {"queries": torch.ones(2, 3)},
            {"queries": torch.tensor(1.0)},
        )
    ],
    *[
        ("softmax_focal", error, argument, {"inputs": PIXELS, "targets": LABELS, argument: value})
        for error, argument, values in [
            (V, "targets", [LABELS[:, 0], LABELS + 0.5, LABELS + 3.0, LABELS + 3, LABELS - 1]),
            (T, "targets", [LABELS * 1j]),
            (V, "alpha", [[1.0, 2.0]]),
            (V, "sample_weight", [torch.ones(4), -torch.ones(4, 2)]),
            (T, "sample_weight", [[1.0]]),
        ]
        for value in values
    ],
    ("softmax_focal", V, "inputs", {"inputs": PIXELS[:, 0, 0], "targets": LABELS[:, 0]}),
    ("sigmoid_focal", V, "targets", {"inputs": PIXELS, "targets": PIXELS.transpose(1, 2)}),
    *[
        ("sigmoid_focal", V, "sample_weight", {"inputs": PIXELS, "targets": PIXELS, "sample_weight": value})
        for value in (torch.ones(3), torch.ones(4, 5, 2), torch.tensor(1.0), torch.full((4,), INF))
    ],
    ("causal_lm_loss", V, "logits", {"logits": TOKENS[0, 0], "labels": NEXT[0, 0]}),
]

# (subject, class of the error, argument that the message names, changed arguments, what the message says was given)
CASES: list[tuple[str, type[Exception], str, dict[str, Any], str]] = [
    *[
        (subject, error, argument, {argument: value}, "")
        for subjects, argument, *classes in SETTINGS
        for subject in subjects
        for error, values in zip((V, T), classes)
        for value in values
    ],
    *[
        (subject, V, argument, changes, given)
        for subjects, argument, changes, given in TOGETHER
        for subject in subjects
    ],
    *[
        (subject, error, argument, {argument: value}, given)
        for subjects, argument, error, values in VALUES
        for subject in subjects
        for value, given in values
    ],
    *[(*case, "") for case in TENSORS],
]


def state_of(module: nn.Module) -> object:
    """Return all that a call of a loss may change."""
    if not isinstance(module, losses.RankingLoss):
        return None
    return module.queue.position, int(module.queue.checksum), module.get_extra_state()


def check_refused(subject: str, error: type[Exception], argument: str, changes: dict[str, Any], given: str) -> None:
    kind, call, settings = SUBJECTS[subject]
    refused = pytest.raises(error, match=rf"(?s)^(\w+, )?{argument}.*: expected .+, got .*{given}.*\.")
    if settings is None:
        with refused:
            kind(**{**call, **changes})
        return
    forward = inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    if not changes.keys() & forward.keys():
        with refused:
            kind(**{**settings, **changes})
        return
    module = kind(**settings)
    module(**call)
    before = state_of(module)
    with refused:
        module(**{**call, **changes})
    assert state_of(module) == before


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_is_refused(subject: str) -> None:
    """The message has the one form of all messages, and a refused call leaves the loss as it was."""
    cases = [case for case in CASES if case[0] == subject]
    assert cases
    for case in cases:
        try:
            check_refused(*case)
        except (Exception, pytest.fail.Exception) as failure:
            raise AssertionError(f"of {case}: {failure}") from failure


@pytest.mark.parametrize("name", POOLED)
def test_what_is_refused_at_the_forward(name: str) -> None:
    kind, _, settings = SUBJECTS[POOLED[name].module.__name__]
    assert settings is not None
    hot = kind(**settings, multi_hot=True)
    for targets, given in ((TARGETS, r"\(8,\)"), (torch.full((8, 3), 2), "2"), (torch.full((8, 3), 0.5), r"0\.5")):
        with pytest.raises(ValueError, match=rf"^targets: expected .+, got .*{given}"):
            hot(LOGITS, targets)
    assert len(hot.queue) == 0
    trusting = kind(**settings, validate_args=False)
    trusting(LOGITS, ends(TARGETS, 7))  # values are not looked at
    with pytest.raises(ValueError, match=r"^targets: expected"):  # metadata always is
        trusting(LOGITS, TARGETS[:3])


@pytest.mark.parametrize("name", [*POOLED, "RetrievalSmoothAPLoss", "InfoNCELoss", "SupConLoss", "NDCGLoss"])
def test_a_bad_value_set_later_is_refused(name: str) -> None:
    """In every call, until it is set right."""
    kind, call, settings = SUBJECTS[POOLED[name].module.__name__ if name in POOLED else name]
    given: list[tuple[str, Any]] = [("temperature", value) for value in (-1.0, 0.0, NAN, "0.1")]
    if name == "pauc_at_budget":
        given += [("surrogate", "nope"), ("dro_lambda", -1.0), ("beta", 2.0), ("n_knots", 5)]
    for argument, value in given:
        module = kind(**(settings or {}))
        kept = getattr(module, argument)
        setattr(module, argument, value)
        before = state_of(module)
        for one in (module, module.eval()):
            with pytest.raises(T if value == "0.1" else V, match=rf"^(\w+, )?{argument}: expected .+, got .*{value}"):
                one(**call)
        assert state_of(module) == before
        setattr(module, argument, kept)
        assert module.train()(**call).isfinite()


@pytest.mark.parametrize("subject", GATHERING)
def test_gathering_without_a_process_group_is_refused(subject: str) -> None:
    kind, call, settings = SUBJECTS[subject]
    module = kind(**(settings or {}), gather_distributed=True)
    with pytest.raises(RuntimeError, match=r"^gather_distributed=True: expected .+, got None"):
        module(**call)
    for value in (None, False):  # may be changed between steps
        module.gather_distributed = value
        assert bool(module(**call).isfinite())
    with pytest.raises(TypeError, match=r"^gather_distributed: expected .+, got 'yes'"):
        module.gather_distributed = "yes"


def in_warmup(main: nn.Module) -> LossWarmupWrapper:
    """Return a wrapper that uses the cross-entropy of torch."""
    return LossWarmupWrapper(nn.CrossEntropyLoss(), main, warmup_steps=1).eval()


# what a message advises: the call
ADVICE: dict[str, Callable[[], object]] = {
    r"weight: expected shape \(3,\), one weight per class": lambda: CrossEntropyLoss(ONES)(LOGITS, TARGETS),
    "ignore_index is not supported for floating point": lambda: CrossEntropyLoss(ignore_index=2)(LOGITS, LOGITS * 0),
    r"broadcast to \(8, 3\).*sample_weight": lambda: BCEWithLogitsLoss(ONES)(LOGITS, LOGITS * 0),
    r"pos_weight: .* broadcast to \(8, 3\)": lambda: BCEWithLogitsLoss(None, LOGITS[None])(LOGITS, LOGITS * 0),
    r"Pass float\(temperature\)\.": lambda: SmoothAPLoss(3, temperature=torch.tensor(0.1)),
    "max_pool_size: expected None in a call with indexes, got 100": lambda: SmoothAPLoss(1, max_pool_size=100)(
        **QUERIES
    ),
    r"0, 1 or ignore_index=-100, got 0\.3.* SigmoidFocalLoss for soft": lambda: smooth_ap(ONES, ONES * 0.3),
    r"got -1\.0\. Use \(targets > 0\)\.long\(\) for targets of -1 and \+1": lambda: smooth_ap(ONES, -ONES),
    r"got nan\. Rows without a label .*nan_to_num\(-100\)": lambda: smooth_ap(ONES, ONES * NAN),
    r"got 2\.0\. Use .*num_classes=C": lambda: smooth_ap(ONES, ONES * 2),
    "holds the indices of 257 classes, got a bfloat16 tensor.*Keep class indices as integers": lambda: smooth_ap(
        torch.zeros(3, 257), torch.zeros(3, dtype=torch.bfloat16)
    ),
    "at least two classes in dim 1.*For one logit use SigmoidFocalLoss": lambda: softmax_focal(
        LOGITS[:, :1], TARGETS * 0
    ),
    r"numbers in \[0, 1\], got -1\.0\. Use \(targets > 0\)\.float\(\)": lambda: sigmoid_focal(ONES, -ONES),
    r"at least two classes .*one logit is always 0. Use BCEWithLogitsLoss\(": lambda: in_warmup(SmoothAPLoss(1))(
        LOGITS[:, :1], BINARY
    ),
    r"targets: expected class indices in \[0, 2\).*got 0\.5": lambda: in_warmup(SmoothAPLoss(2))(
        LOGITS[:, :2], BINARY * 0.5
    ),
    r"logits: expected a tensor, got a tuple of length 1\. Index it: logits\[0\]\.": lambda: smooth_ap((ONES,), ONES),
    'num_items: expected None with reduction="sum".*, got 3': lambda: causal_lm_loss(
        TOKENS, NEXT, reduction="sum", num_items=3
    ),
    "got the keyword num_item. Use num_items": lambda: causal_lm_loss(TOKENS, NEXT, num_item=3),
    "Use ignore_index": lambda: causal_lm_loss(TOKENS, NEXT, ignore_idx=3),
    "^SmoothAPLoss: got an unexpected keyword argument 'nope'$": lambda: SmoothAPLoss(nope=3),
    "^RetrievalSmoothAPLoss: too many positional arguments$": lambda: RetrievalSmoothAPLoss(0.1, "sum", -1, None, 5),
}


@pytest.mark.parametrize("text", ADVICE)
def test_messages_say_what_to_do(text: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
        ADVICE[text]()


def test_values_are_not_looked_at_without_validation() -> None:
    assert bool(sigmoid_focal(ONES, -ONES, gamma=0, validate_args=False).isfinite())
    labels = NEXT.clone()
    labels[:, 0] = 99  # is no target
    causal_lm_loss(TOKENS, labels)
    labels[:, 1] = 99
    with pytest.raises(IndexError):  # left to torch
        causal_lm_loss(TOKENS, labels, validate_args=False)


@pytest.mark.parametrize("name", POOLED)
def test_a_warning_points_at_the_line_that_calls_the_loss(name: str) -> None:
    loss, logits, odd = POOLED[name], LOGITS.reshape(24, 1), torch.tensor([0, 2, 0, 1] * 6)
    drawn = loss.module(3, max_pool_size=6, **loss.default)
    text = r"targets: expected 0 or 1 with num_classes=1, got \[2\].* Use \(targets > 0\)\.long\(\)"
    calls: list[tuple[str, Callable[[], Tensor]]] = [
        ("drawn down to max_pool_size=6", lambda: nn.Sequential()(drawn(LOGITS, TARGETS))),
        (text, lambda: loss.module(1, **loss.default)(logits, odd)),
        (text, lambda: loss.functional(logits, odd, **loss.default)),
    ]
    for match, call in calls:
        with pytest.warns(UserWarning, match=match) as caught:
            found = call()
        assert [warning.filename for warning in caught] == [__file__]
    assert torch.equal(found, loss.functional(logits, (odd != 0).long(), **loss.default))  # other values are positive


# --- which forms are one ---------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """How targets are given: in which dtype, and whether those of one dimension are a column."""

    dtype: torch.dtype
    column: bool = False

    def of(self, targets: Tensor) -> Tensor:
        """Return ``targets`` in this form; classes are no bools, and one column of multi-hot targets may be flat."""
        if self.dtype != torch.bool or bool(((targets == 0) | (targets == 1)).all()):
            targets = targets.to(self.dtype)
        if targets.ndim == 1:
            return targets[:, None] if self.column else targets
        return targets[:, 0] if targets.shape[1] == 1 and not self.column else targets


FORMS = {
    "(N, 1)": Form(torch.int64, column=True),
    "int8": Form(torch.int8),
    "float32": Form(torch.float32),
    "float64, (N, 1)": Form(torch.float64, column=True),
    "float16": Form(torch.float16),
    "bfloat16": Form(torch.bfloat16),
    "bool": Form(torch.bool),
    "bool, (N, 1)": Form(torch.bool, column=True),
}


def binary_rows(device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """Return logits (60, 1) and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 1, generator=generator, dtype=torch.float64)
    targets = (torch.rand(60, generator=generator) < 0.3).long()
    targets[::7] = -100
    return logits.to(device), targets.to(device)


def cases_of(name: str, device: torch.device) -> list[tuple[Callable[..., Tensor], Tensor, Tensor]]:
    """Return losses with scores, and with targets that are integers of one dimension (of two if multi-hot)."""
    logits, some = binary_rows(device)
    plain, several = some.clamp_min(0), logits.reshape(20, 3)
    classes = torch.arange(20, device=device) % 3
    classes[::9] = -100
    if name == "sigmoid_focal":
        return [(loss, logits, plain) for loss in (SigmoidFocalLoss(), sigmoid_focal)]
    if name == "softmax_focal":
        return [(loss, several, classes) for loss in (SoftmaxFocalLoss(), softmax_focal)]
    if name in SUBJECTS:
        return [(BCEWithLogitsLoss(), logits, plain), (CrossEntropyLoss(), several, classes)]
    hot = (several > 0).long().masked_fill(several > 1.5, -100)
    module, function, options = POOLED[name].module, POOLED[name].functional, POOLED[name].default
    return [
        (module(1, queue_size=80, **options), logits, some),
        (module(1, queue_size=80, **options), logits, plain),
        (functools.partial(function, **options), logits, some),
        (functools.partial(function, **options), logits, plain),
        (module(3, **options), several, classes),
        (module(3, multi_hot=True, **options), several, hot),
        (module(1, multi_hot=True, **options), logits, plain[:, None]),
    ]


def answers(loss: Callable[..., Tensor], logits: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the loss, the gradient in one shape, and the checksum of the queue afterwards."""
    logits = logits.clone().requires_grad_()
    value = loss(logits, targets)
    value.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape
    queue = getattr(loss, "queue", None)
    return [value.detach(), logits.grad.flatten(), *([] if queue is None else [queue.checksum.clone()])]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*POOLED, *FOCAL, "CrossEntropyLoss"])
def test_targets_and_scores_of_every_form_are_those_of_integers(name: str, form: str, device: torch.device) -> None:
    """Scores of one class may lack the dimension of the classes."""
    for loss, scores, targets in cases_of(name, device):
        twin = copy.deepcopy(loss)
        alone = scores[:, 0] if scores.shape[1] == 1 else scores
        for _ in range(2):  # the second step has a queue
            expected = answers(twin, scores, targets)
            for mine, other in zip(answers(loss, alone, FORMS[form].of(targets)), expected):
                assert torch.equal(mine, other)
        # The control: other labels give another loss.
        assert not torch.equal(copy.deepcopy(twin)(scores, targets.roll(1, 0)), twin(scores, targets))


def test_forms_of_pixels_elements_and_labels() -> None:
    logits, targets = binary_rows()
    assert torch.equal(RetrievalSmoothAPLoss()(LOGITS, TARGETS[:, None]), RetrievalSmoothAPLoss()(LOGITS, TARGETS))
    images, pixels = logits.reshape(5, 3, 4), (torch.arange(20) % 3).reshape(5, 4)
    assert torch.equal(softmax_focal(images, pixels[..., None].double()), softmax_focal(images, pixels))
    for given in (logits, logits[:, 0]):
        assert sigmoid_focal(given, targets.clamp_min(0), reduction="none").shape == given.shape


@pytest.mark.parametrize("form", FORMS)
def test_a_warm_up_gives_the_losses_of_torch_what_they_need(form: str, device: torch.device) -> None:
    logits, targets = binary_rows(device)
    targets, convert = targets.clamp_min(0), FORMS[form].of
    blend = LossWarmupWrapper(nn.BCEWithLogitsLoss(), SmoothAPLoss(1), warmup_steps=1, blend_steps=1)
    first, last = nn.BCEWithLogitsLoss()(logits, targets[:, None].double()), SmoothAPLoss(1)(logits, targets)
    for given in (logits, logits[:, 0]):
        for step, expected in enumerate((first, 0.5 * first + 0.5 * last, last)):
            blend.on_train_batch_start(step)
            assert torch.equal(blend(given, convert(targets)), expected)
    several, classes = logits.reshape(20, 3), torch.arange(20, device=device) % 3
    classes[::9] = -100
    wrapper = in_warmup(SmoothAPLoss(3))
    assert torch.equal(wrapper(several, convert(classes)), nn.CrossEntropyLoss()(several, classes))
    soft = torch.full_like(several, 1 / 3)
    assert torch.equal(wrapper(several, soft), nn.CrossEntropyLoss()(several, soft))


@on_ranks(2)
def test_ranks_may_give_their_rows_in_other_forms(rank: int) -> None:
    logits, targets = binary_rows()
    own = slice(0, 20) if rank == 0 else slice(20, 60)
    clean, bad = targets.clamp_min(0)[own], targets[own].float()
    bad[3] = 0.25 if rank else 1.0
    other = (logits[own], targets[own].float()) if rank else (logits[own, 0], targets[own, None])
    loss, twin = (SmoothAPLoss(1, temperature=0.3, queue_size=30) for _ in range(2))
    expected = answers(loss, logits[own], targets[own])
    assert all(map(torch.equal, answers(twin, *other), expected))
    assert fullrank.all_gather_no_grad(expected[0][None]).unique().numel() == 1
    focal = SigmoidFocalLoss()
    assert torch.equal(focal(logits[own], clean[:, None]), focal(logits[own], clean.float() if rank else clean))
    error, text = error_of(lambda: SmoothAPLoss(1)(logits[own], bad))
    assert error == "ValueError"
    assert "rank 1: targets: expected 0, 1 or ignore_index=-100, got 0.25." in text


def test_floats_cost_no_wait_and_three_launches(simulated_device: Any) -> None:
    logits, targets = binary_rows(simulated_device.DEVICE)
    costs = []
    for given in (targets.clamp_min(0), targets.clamp_min(0).float()):
        loss = SmoothAPLoss(1, temperature=0.1)
        loss(logits, given)
        with simulated_device.count() as counts:
            loss(logits, given)
        costs.append((counts.waits, counts.launches))
    integers, floats = costs
    assert floats[0] == integers[0]
    assert floats[1] <= integers[1] + 3


# --- what is said about the arguments --------------------------------------------------------------------------------

PUBLIC = {
    name: getattr(module, name)
    for module in (losses, fullrank.metrics)
    for name in module.__all__
    if name != "sigmoid_sums" and not hasattr(getattr(module, name), "_fields")  # fields of a result have comments
}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_in_the_signature_and_the_docstring(name: str) -> None:
    public = PUBLIC[name]
    parameters = inspect.signature(public).parameters.values()
    section = inspect.cleandoc(public.__doc__).split("Args:\n")[1].split("\n\n")[0]
    heads = re.findall(r"^    ([*\w].*?):", section, re.MULTILINE)
    described = {argument for head in heads for argument in head.split(", ")}
    assert described == {f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name for p in parameters}
    if issubclass(public if inspect.isclass(public) else object, nn.Module) and public.__module__.startswith(
        "fullrank.losses"
    ):
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters)


def test_what_a_subclass_passes_on_is_all_that_the_base_takes() -> None:
    group = inspect.signature(losses.DistributedLoss).parameters.keys() - {"gather_distributed"}
    assert GroupOptions.__annotations__.keys() == group
    pooled = inspect.signature(losses.RankingLoss).parameters.values()
    assert PoolOptions.__annotations__.keys() == {p.name for p in pooled if p.kind is p.KEYWORD_ONLY}


def test_repr_shows_the_schedule_and_the_temperature() -> None:
    """Other settings are compared by the processes: tests/distributed/test_drift.py."""
    assert "warmup_steps=3" in repr(LossWarmupWrapper(SoftmaxFocalLoss(), SmoothAPLoss(3), warmup_steps=3))
    assert "temperature=0.2" in repr(SmoothAPLoss(1, temperature=0.2))
    assert "temperature=None\n" in repr(SmoothAPLoss(1))
