"""No loss lacks a row of the registry, no argument an entry, and no reason to leave a loss out is out of date."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from loss_cases import FAMILIES, LOSSES, SHARED, Argument, Loss
from torch import nn

from fullrank import losses

NO_LOSS = {"sigmoid_sums", "token_log_probs"}  # public in fullrank.losses, for losses of one's own


def public_losses() -> dict[str, object]:
    """Return the public functions, and the modules that are no base of another."""
    found = {name: getattr(losses, name) for name in losses.__all__ if name not in NO_LOSS}
    modules = [value for value in found.values() if inspect.isclass(value) and issubclass(value, nn.Module)]
    bases = {base for module in modules for base in module.__mro__[1:]}
    return {
        name: value
        for name, value in found.items()
        if inspect.isfunction(value) or (value in modules and value not in bases)
    }


def wrong(rows: dict[str, Loss]) -> dict[str, str]:
    """Return what the rows lack, and what in them is out of date, by name."""
    public, found = public_losses(), {}
    held = {value for row in rows.values() for value in (row.module, row.function) if value is not None}
    found |= {name: "has no row in tests/loss_cases.py" for name, value in public.items() if value not in held}
    found |= {value.__name__: "is not public" for value in held - {*public.values()}}
    for name, row in rows.items():
        known = row.arguments | row.of_function
        found |= {f"{name}.{one}": "has no entry in `own`" for one in row.arguments - SHARED.keys() - row.own.keys()}
        found |= {f"{name}.{one}": "is no argument" for one in row.own.keys() - known}
        for one in row.arguments & (SHARED.keys() | row.own.keys()):
            if row.argument(one).other is None and row.default(one) is not inspect.Parameter.empty:
                found[f"{name}.{one}"] = "expected another value"
        if (row.reference is None) != ("reference" in row.left_out):
            found[f"{name}, reference"] = "expected a definition in tests/reference.py, or a reason in `left_out`"
        for family, reason in row.left_out.items():
            if family.partition(" ")[0] not in FAMILIES:
                found[f"{name}, {family}"] = f"expected one of {', '.join(FAMILIES)}"
            elif not reason.endswith(".") or len(reason.split()) < 3:
                found[f"{name}, {family}"] = "expected a reason in one sentence"
    return found


def test_every_loss_has_a_row_and_every_argument_an_entry() -> None:
    """Whether the other reasons hold is shown where the tests of a family run: ``loss_cases.holds``."""
    assert wrong(LOSSES) == {}
    assert SHARED.keys() <= {one for row in LOSSES.values() for one in row.arguments | row.of_function}


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.module and loss.function])
def test_a_function_has_the_defaults_of_its_module(name: str) -> None:
    loss = LOSSES[name]
    of_module, of_function = (inspect.signature(call).parameters for call in (loss.module, loss.function))
    for argument in loss.arguments & loss.of_function:
        assert of_function[argument].default == of_module[argument].default, argument


RECALL, NDCG = LOSSES["recall"], LOSSES["ndcg"]


@pytest.mark.parametrize(
    ("name", "row", "text"),
    [
        ("NDCGLoss", None, "has no row in tests/loss_cases.py"),
        ("ndcg.top", replace(NDCG, own={"gain": NDCG.own["gain"]}), "has no entry in `own`"),
        ("ndcg.top", replace(NDCG, own={**NDCG.own, "top": Argument(bad=[0])}), "expected another value"),
        ("ndcg.share", replace(NDCG, own={**NDCG.own, "share": NDCG.own["gain"]}), "is no argument"),
        ("ndcg, reference", replace(NDCG, left_out={}), "expected a definition"),
        ("recall, reference", replace(RECALL, left_out={"reference": "It is compared elsewhere."}), "or a reason"),
        ("recall, speed", replace(RECALL, left_out={"speed": "It is a slow one."}), "expected one of reference, "),
        ("recall, graph", replace(RECALL, left_out={"graph": "no"}), "expected a reason in one sentence"),
    ],
)
def test_control_what_is_wrong_is_named(name: str, row: Loss | None, text: str) -> None:
    others = {key: value for key, value in LOSSES.items() if value not in (RECALL, NDCG)}
    rows = {"recall": RECALL, "ndcg": NDCG} if row is None else {"recall": RECALL, "ndcg": NDCG, row.name: row}
    if row is None:
        del rows["ndcg"]
    assert [(key, text in said) for key, said in wrong({**others, **rows}).items()] == [(name, True)]
