"""An argument that several public losses or metrics share is described in the same words in each of them."""

from __future__ import annotations

import inspect
import re
from textwrap import dedent

import pytest

import fullrank.losses
import fullrank.metrics

OWNERS = {
    name: getattr(module, name)
    for module in (fullrank.losses, fullrank.metrics)
    for name in module.__all__
    if name != "sigmoid_sums"  # the sums under the losses are not a loss
}

# Arguments of one name that differ in meaning, with the reason. A description that is shared does not stand here.
OF_QUERIES = "a query takes the place of a class"
OF_TOKENS = "its rows are tokens"
OF_ELEMENTS = "its rows are elements, and each has a loss of its own"
EXCEPTIONS = {
    ("LossWarmupWrapper", "gather_distributed"): "sets the attribute of two losses, which have settings of their own",
    ("PAUCAtBudgetLoss", "temperature"): "a multiple of the scale of the scores instead of a width in their units",
    ("pauc_at_budget", "temperature"): "a multiple of the scale of the scores instead of a width in their units",
    ("RetrievalSmoothAPLoss", "temperature"): "the unit is that of the cosine",
    ("retrieval_smooth_ap", "temperature"): "the unit is that of the cosine",
    ("RetrievalSmoothAPLoss", "reduction"): OF_QUERIES,
    ("retrieval_smooth_ap", "reduction"): OF_QUERIES,
    ("RetrievalSmoothAPLoss", "ignore_index"): "is compared with labels",
    ("retrieval_smooth_ap", "ignore_index"): "is compared with labels",
    ("RetrievalSmoothAPLoss", "validate_args"): "no check of it reads values",
    ("causal_lm_loss", "logits"): OF_TOKENS,
    ("causal_lm_loss", "labels"): OF_TOKENS,
    ("causal_lm_loss", "ignore_index"): "is compared with labels",
    ("causal_lm_loss", "validate_args"): "has no weights to check",
    ("FocalLoss", "reduction"): "the subclass gives it its values",
    ("SigmoidFocalLoss", "reduction"): OF_ELEMENTS,
    ("sigmoid_focal", "reduction"): OF_ELEMENTS,
    ("SoftmaxFocalLoss", "reduction"): OF_ELEMENTS,
    ("softmax_focal", "reduction"): OF_ELEMENTS,
    ("SigmoidFocalLoss", "alpha"): "a weight of the positives, not an end of a band",
    ("sigmoid_focal", "alpha"): "a weight of the positives, not an end of a band",
    ("SoftmaxFocalLoss", "alpha"): "weights of the classes, not an end of a band",
    ("softmax_focal", "alpha"): "weights of the classes, not an end of a band",
    ("sigmoid_focal", "inputs"): "may have any shape",
    ("sigmoid_focal", "targets"): "are numbers in [0, 1]",
    ("softmax_focal", "targets"): OF_ELEMENTS,
    ("sigmoid_focal", "sample_weight"): OF_ELEMENTS,
    ("softmax_focal", "sample_weight"): OF_ELEMENTS,
    ("SoftmaxFocalLoss", "ignore_index"): OF_ELEMENTS,
    ("softmax_focal", "ignore_index"): OF_ELEMENTS,
    ("hard_negative_cross_entropy", "sample_weight"): "counts for the negatives too",
    ("HardNegativeCrossEntropyLoss", "queue_keep"): "is a pointwise loss, so that scores cannot rise together",
    ("PAUCAtBudget", "budget_basis"): "says what is counted, since the metric has no reference rows",
}


def described(docstring: str) -> dict[str, str]:
    """Return the description of each argument in an Args section, with single spaces."""
    text = inspect.cleandoc(docstring)
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", text + "\n", re.MULTILINE)
    if section is None:
        return {}
    entries = re.split(r"^(?=[\w*])", dedent(section[1]), flags=re.MULTILINE)
    split = [entry.split(": ", 1) for entry in entries if entry.strip()]
    return {name: " ".join(words.split()) for names, words in split for name in names.split(", ")}


DESCRIPTIONS = {
    (owner, argument): words
    for owner, public in OWNERS.items()
    for argument, words in described(public.__doc__ or "").items()
}


def differing(descriptions: dict[tuple[str, str], str]) -> dict[str, set[str]]:
    """Return the arguments with more than one description, and the descriptions."""
    found: dict[str, set[str]] = {}
    for (_, argument), words in descriptions.items():
        found.setdefault(argument, set()).add(words)
    return {argument: words for argument, words in found.items() if len(words) > 1}


def test_a_shared_argument_has_one_description() -> None:
    assert differing({key: words for key, words in DESCRIPTIONS.items() if key not in EXCEPTIONS}) == {}


@pytest.mark.parametrize("key", EXCEPTIONS)
def test_every_exception_differs(key: tuple[str, str]) -> None:
    others = [words for other, words in DESCRIPTIONS.items() if other[1] == key[1] and other not in EXCEPTIONS]
    also = [words for other, words in DESCRIPTIONS.items() if other[1] == key[1] and other != key]
    assert also, "no other has this argument"
    assert DESCRIPTIONS[key] not in others


def test_control_another_word_is_seen() -> None:
    changed = DESCRIPTIONS | {("SmoothAPLoss", "queue_size"): "places of the memory queue."}
    assert "queue_size" in differing(changed)
    assert len(DESCRIPTIONS) > 120


@pytest.mark.parametrize("owner", OWNERS)
def test_every_argument_is_described(owner: str) -> None:
    public = OWNERS[owner]
    found = {argument for described_in, argument in DESCRIPTIONS if described_in == owner}
    if hasattr(public, "_fields"):  # a result or a pool: its fields have comments
        assert found == set()
        return
    parameters = inspect.signature(public).parameters.values()
    assert found == {f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name for p in parameters}
