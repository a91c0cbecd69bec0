"""Compiled losses: other temperatures and row counts, one graph or a break, a process group that comes later.

Each starts the compiler, so a loss is compiled once, with as many of its options as one call can have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loss_cases import FORMS, IGNORED, KINDS, Form, normal
from torch import Tensor

from fullrank import losses

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]

CALLS = ((40, 0.5), (40, 0.25), (55, 0.1))  # rows, temperature: first one of them changes, then both
Given = dict[str, Tensor]


def rows(count: int, form: Form, *, floats: bool = False, weighted: bool = False) -> Given:
    """Return the arguments of a call, the first with a gradient, and on request what is optional."""
    x, targets = normal(count, 3, seed=count).requires_grad_(), torch.arange(count) % 3
    if KINDS[form.loss.kind].ignores and form.loss.kind not in ("tokens", "classes"):
        targets = targets.masked_fill(torch.arange(count) % 9 == 4, IGNORED)
    given = form.arguments(
        x, targets.double()[:, None] if floats and form.loss.kind in ("scores", "classes") else targets
    )
    if weighted and "sample_weight" in form.loss.of_function:
        given["sample_weight"] = 0.5 + targets.abs().double()
    if weighted and "iid_mask" in form.loss.of_function:
        given["iid_mask"] = targets != 1
    return given


def varied(form: Form) -> Callable[..., Tensor]:
    """Return the loss as a function of a call and of a number that it has: the temperature, or the first of its own."""
    call: Any = form.call(num_classes=3)
    numbers = [name for name, value in form.settings.items() if isinstance(value, float)]
    if form.is_function and not numbers:
        parameters = inspect.signature(form.loss.function).parameters
        numbers = [name for name, parameter in parameters.items() if isinstance(parameter.default, float)]
    name = "temperature" if "temperature" in numbers else next(iter(numbers), None)

    def function(given: Given, number: float) -> Tensor:
        value = call(**given, **({} if name is None else {name: number}))
        return value.nan_to_num().square().sum() if value.ndim else value

    return function


def assert_same(compiled: Callable[..., Tensor], plain: Callable[..., Tensor], given: Given, *options: Any) -> None:
    outcomes = []
    for function in (compiled, plain):
        value = function(given, *options)
        outcomes.append((value.detach(), torch.autograd.grad(value, next(iter(given.values())))[0]))
    torch.testing.assert_close(*outcomes, rtol=1e-12, atol=1e-14)


FUNCTIONS = [name for name, form in FORMS.items() if form.is_function and "graph" not in form.loss.left_out]
# In `make test`: by columns, of a band, and of tokens. Smooth-AP is compiled within a step below.
OFTEN = ["pauc_dro", "pauc_pairwise", "causal_lm"]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.full) for name in FUNCTIONS]
)
def test_functions_over_temperatures_and_row_counts(name: str, backend: str) -> None:
    """aot_eager traces what every backend is given, forward and backward, and takes three times as long."""
    torch._dynamo.reset()
    plain, form = varied(FORMS[name]), FORMS[name]
    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    for count, number in CALLS[:: 2 if backend == "eager" else 1]:
        assert_same(compiled, plain, rows(count, form, floats=True, weighted=True), number)


def test_forward_and_backward_of_one_column_are_traced() -> None:
    torch._dynamo.reset()
    plain = lambda g, tau: losses.smooth_ap(g["logits"][:, 0], (g["targets"] == 0).double()[:, None], tau)  # noqa: E731
    assert_same(torch.compile(plain, fullgraph=True, backend="aot_eager"), plain, rows(40, FORMS["smooth_ap"]), 0.5)


@pytest.mark.full
def test_inductor_compiles_smooth_ap() -> None:
    torch._dynamo.reset()
    plain = varied(FORMS["smooth_ap"])
    try:
        assert_same(torch.compile(plain, fullgraph=True), plain, rows(24, FORMS["smooth_ap"]), 0.3)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        pytest.skip(f"inductor cannot build here: {error}")


# Forms, and the options with which a graph cannot hold the module whole, because it keeps a state.
MODULES: dict[str, tuple[Form, dict[str, Any]]] = {
    name: (form, {}) for name, form in FORMS.items() if form.loss.module is not None and form.is_first
}
MODULES["queue"] = FORMS["smooth_ap"], {"queue_size": 64}
MODULES["draws"] = FORMS["smooth_ap"], {"max_pool_size": 64}
BROKEN = [name for name, (form, options) in MODULES.items() if options or "graph" in form.loss.left_out]


SAYING = ["queries", "retrieval", "info_nce", "queue"]
# One of each way through a graph: a pool, embeddings, several losses, a schedule, a state.
STEPS = ["smooth_ap", "info_nce", "combined", "warm_up", "queue"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in STEPS else pytest.mark.full) for name in MODULES]
)
def test_modules_within_a_compiled_step(name: str) -> None:
    """With a queue that fills, temperatures that cool and batches of other sizes."""
    torch._dynamo.reset()
    form, options = MODULES[name]
    plain, loss = (form.make(num_classes=3, **options) for _ in range(2))

    def step(module: Any, given: Given) -> Tensor:
        first, *others = given.items()
        return module(**{first[0]: first[1] * 2, **dict(others)}) + first[1].square().mean()

    compiled = torch.compile(lambda given: step(loss, given), backend="eager", fullgraph=name not in BROKEN)
    for count, temperature in CALLS:
        if "temperature" in form.loss.arguments:
            loss.temperature = plain.temperature = temperature
        assert_same(compiled, lambda given: step(plain, given), rows(count, form))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAYING else pytest.mark.full) for name in BROKEN]
)
def test_fullgraph_of_what_runs_eagerly_says_so(name: str) -> None:
    torch._dynamo.reset()
    form, options = MODULES[name]
    loss = form.make(num_classes=3, **options) if name != "queries" else form.call()  # a pool alone is in a graph
    with pytest.raises(RuntimeError, match=r"so it runs eagerly\. Compile without fullgraph=True"):
        torch.compile(loss, backend="eager", fullgraph=True)(**rows(12, form))
    if not options and form.is_function:
        with pytest.raises(RuntimeError, match=r"so it runs eagerly\. Compile without fullgraph=True"):
            torch.compile(form.call(), backend="eager", fullgraph=True)(**rows(12, form))


def test_compiled_before_the_process_group_exists() -> None:
    """What was compiled without a process group must not be used with one: it does not communicate."""
    torch._dynamo.reset()
    form = FORMS["softmax_focal"]
    compiled, given = torch.compile(form.make(), backend="eager"), rows(12, form)
    compiled(**given)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(**given)  # the control: nothing has changed, so nothing is compiled again
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with pytest.raises(torch._dynamo.exc.RecompileError, match="WORLD"):
                compiled(**given)
        finally:
            dist.destroy_process_group()


def test_what_fits_in_a_graph() -> None:
    """A call that communicates with nobody: with a process group one of ``gather_distributed=False`` alone."""
    made = [losses.SoftmaxFocalLoss(gather_distributed=value) for value in (None, False, True)]
    assert [loss.fits_in_a_graph() for loss in made] == [True, True, False]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert [loss.fits_in_a_graph() for loss in made] == [False, True, False]
    finally:
        dist.destroy_process_group()
