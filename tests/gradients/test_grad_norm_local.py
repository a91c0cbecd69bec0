"""The gradient norm in one process: torch's own function at the same arguments, wider in range, closer to float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from blindfold import Blindfold
from device import DEVICE
from subjects import with_gradient
from torch import Tensor, nn

import fullrank
from fullrank.gradients import norm_measure

POWERS = [0.5, 1.0, 2.0, 3.0, math.inf]
DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
# One row, rows of 4096, rows of equal length, rows and a rest, more than is converted at a time.
SIZES = [(0,), (), (5, 7), (32768,), (3, 16384), (3, 16391), (32771,), (2**20 + 4103,)]


def model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Return a model with gradients; one of its parameters has none."""
    generator = torch.Generator().manual_seed(seed)
    layers = nn.Sequential(nn.Linear(5, 3), nn.Conv2d(2, 3, 2), nn.BatchNorm1d(4)).to(dtype)
    for parameter in list(layers.parameters())[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return layers


def of(*grads: Tensor, norm_type: Any = 2.0) -> Tensor:
    return fullrank.total_grad_norm([with_gradient(grad) for grad in grads], norm_type)


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda layers: layers.parameters(),
    "list": lambda layers: list(layers.parameters()),
    "tensor": lambda layers: layers[0].weight,
    "module": lambda layers: layers,
    "named_parameters": lambda layers: layers.named_parameters(),
    "items": lambda layers: dict(layers.named_parameters()).items(),
    "tied": lambda layers: [*layers.parameters(), layers[0].weight],
}


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("form", FORMS)
def test_same_as_torch(form: str, foreach: bool | None) -> None:
    """A parameter that is listed twice counts and shrinks once, which torch is not asked to do."""
    for arguments in ((0.5,), (0.5, 3.0), (0.5, "inf", True), (1e6, 1), (torch.tensor(0.5), 2), (0.0,)):
        ours, theirs = model(), model()
        norm = fullrank.clip_grad_norm_(FORMS[form](ours), *arguments, foreach=foreach)
        listed = theirs[0].weight if form == "tensor" else theirs.parameters()
        expected = torch.nn.utils.clip_grad_norm_(listed, *arguments, foreach=foreach)
        # Some thirty squares, added in another order.
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
        for own, other in zip(ours.parameters(), theirs.parameters()):
            if other.grad is not None:
                torch.testing.assert_close(own.grad, other.grad, rtol=1e-14, atol=0)
            assert (own.grad is None) == (other.grad is None)


@pytest.mark.parametrize("norm_type", POWERS)
def test_gradients_on_several_devices_have_one_norm_and_one_factor(norm_type: float) -> None:
    """Also of several dtypes; in the order of the parameters the first device is the CPU."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    own = [torch.randn(7, 3, generator=torch.Generator().manual_seed(seed)).to(dtypes[seed % 3]) for seed in range(6)]
    parameters = [with_gradient(grad.to(DEVICE) if i in (1, 4) else grad) for i, grad in enumerate(own)]
    expected = torch.cat([grad.double().flatten() for grad in own]).norm(norm_type)
    norm = fullrank.total_grad_norm(parameters, norm_type)
    assert norm.device == DEVICE
    assert norm.item() == pytest.approx(expected.item(), rel=1e-7)
    on_host = fullrank.total_grad_norm([parameter for parameter in parameters if parameter.device != DEVICE], norm_type)
    assert norm.item() > on_host.item() * (1 + 1e-7) or norm_type == math.inf
    assert fullrank.clip_grad_norm_(parameters, 0.5, norm_type).item() == norm.item()
    for parameter, grad in zip(parameters, own):
        assert parameter.grad is not None
        assert parameter.grad.device == parameter.device
        factor = 0.5 / (expected + 1e-6)
        torch.testing.assert_close(parameter.grad.cpu(), (grad.double() * factor).to(grad.dtype), rtol=1e-2, atol=1e-6)


def test_what_changes_between_two_calls_is_seen() -> None:
    """The same list, one thing after the other: also what torch sets past the checks of ``grad``."""
    parameters = [with_gradient(torch.full((3,), float(index + 1))) for index in range(4)]

    def norm() -> Tensor:
        expected = [grad.to_dense().double() for p in parameters if (grad := p.grad) is not None]
        found = fullrank.clip_grad_norm_(parameters, 1e9)
        torch.testing.assert_close(found.double(), torch.cat(expected).norm(), rtol=1e-6, atol=0)
        return found

    first = norm()
    parameters[0].grad = None
    second = norm()
    parameters[1].grad = torch.tensor([0.0, 7.0, 0.0]).to_sparse()
    third = norm()
    parameters[2].data = parameters[2].data.double()  # the gradient stays in float32, the result is now float64
    assert norm().dtype is torch.float64
    parameters[3].grad = None
    parameters[3] = with_gradient(torch.full((3,), 60000.0, dtype=torch.float16))
    assert first > second != third < norm()
    parameters[0] = with_gradient(torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="gradients: expected values of all, or of none, got cpu, meta"):
        norm()
    with pytest.raises(TypeError, match="parameter 3: expected a parameter"):
        fullrank.clip_grad_norm_([*parameters[1:], None, 3], 1.0)


@pytest.mark.parametrize("foreach", [None, False])
def test_gradients_are_written_only_where_they_shrink(foreach: bool | None) -> None:
    """Without a maximum it only measures."""
    parameter = with_gradient(torch.tensor([3.0, 4.0]))
    for largest, writes in ((None, 0), (math.inf, 0), (5.1, 0), (4.9, 1)):
        before = parameter.grad._version
        norm = fullrank.total_grad_norm([parameter])
        assert fullrank.clip_grad_norm_([parameter], largest, foreach=foreach) == norm == 5
        assert parameter.grad._version - before == writes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "norm_type"),
    [*((dtype, 2.0) for dtype in DTYPES), ("float32", 0.5), ("bfloat16", math.inf), ("complex64", 0.5)],
)
def test_every_dtype_and_size(dtype: str, norm_type: float) -> None:
    generator = torch.Generator().manual_seed(1)
    kind = getattr(torch, dtype)
    grads = [torch.randn(size, generator=generator, dtype=torch.float32).to(kind) for size in SIZES]
    grads[2] = grads[2].t() * (1j if kind.is_complex else 1)
    wide = torch.complex128 if kind.is_complex else torch.float64
    whole = torch.cat([grad.flatten() for grad in grads]).to(wide)
    norm = of(*grads, norm_type=norm_type)
    expected = whole.abs()
    while len(expected) > 1:  # rows of 64: a single sum of a million terms is itself not exact
        rows = torch.nn.functional.pad(expected, (0, -len(expected) % 64)).view(-1, 64)
        expected = torch.linalg.vector_norm(rows, norm_type, dim=1)
    expected = expected[0]
    is_wide = kind in (torch.float64, torch.complex128)
    # Norms of eight gradients are rounded to float32, whose sums round numbers of few digits all the same way.
    eps = torch.finfo(torch.float32).eps
    limit = 1e-14 if is_wide else 8 * eps if kind in (torch.float32, torch.complex64) else 1e-5
    torch.testing.assert_close(norm.double(), expected, rtol=limit, atol=0)
    assert norm.dtype == (torch.float64 if is_wide else torch.float32)
    torch.testing.assert_close(
        norm_without_reading(grads, norm_type), expected, rtol=1e-14 if is_wide else 8 * eps, atol=0
    )


def norm_without_reading(grads: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm as it is taken on an accelerator, with a check that no value is read."""
    grads = [grad for grad in grads if grad.numel() > 0]
    with Blindfold():
        if norm_type == math.inf:
            return norm_measure.local_norm(grads, norm_type)
        return norm_measure._norm_without_reading(grads, norm_type)


def test_the_blindfold_sees_a_look() -> None:
    with Blindfold(), pytest.raises(AssertionError, match="a value was read"):
        norm_measure._norm_on_host([torch.ones(2)], 2.0)


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, 6.0, 20.0, 100.0, math.inf])
@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [
        ("float16", 6e4),
        ("float16", 1e-7),
        ("bfloat16", 1e38),
        ("bfloat16", 1e-37),
        ("float32", 1e38),
        ("float32", 1e-40),  # a denormal number
        ("float64", 1e300),
        ("float64", 1e-300),
    ],
)
def test_no_power_leaves_the_range(dtype: str, magnitude: float, norm_type: float) -> None:
    """Eight equal elements and many zeros: the norm is 8^(1/p) times one of them, which the result can hold."""
    count = 1 if norm_type == 0.5 else 2 if magnitude > 1e30 else 8
    grad = torch.zeros(5000, dtype=getattr(torch, dtype))
    grad[:count] = magnitude
    expected = grad[0].double() * count ** (1 / norm_type)
    # The p-th root of p roundings of a power, each of which may err by several in float32.
    tolerance = {"rtol": 1e-14 if dtype == "float64" else 32 * torch.finfo(torch.float32).eps, "atol": 0.0}
    if dtype == "float32" and magnitude < 1e-38:
        tolerance["rtol"] = 1e-4  # a denormal result has few digits
    torch.testing.assert_close(of(grad, norm_type=norm_type).double(), expected, **tolerance)
    torch.testing.assert_close(norm_without_reading([grad], norm_type), expected, **tolerance)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_norm_beyond_its_dtype_clips(foreach: bool | None) -> None:
    """float32 holds each element, and neither the norm nor the square of a denormal complex one."""
    parameter = with_gradient(torch.full((4,), 3e38))
    assert fullrank.clip_grad_norm_([parameter], 1.0, foreach=foreach) == math.inf
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5), rtol=1e-6, atol=0)  # roundings of float32
    assert of(torch.full((4,), 1e-40 + 0j)).item() == pytest.approx(2e-40, rel=1e-4)


def test_small_elements_next_to_large_ones_count() -> None:
    """What a fixed divisor or float32 squares would lose: 1e-19 next to 1e-17, each a thousandfold."""
    grad = torch.full((8192,), 1e-17)
    grad[::2] = 2e-19
    expected = grad.double().square().sum().sqrt()
    torch.testing.assert_close(of(grad).double(), expected, rtol=1e-7, atol=0)


def test_millions_of_float32_keep_their_digits() -> None:
    grad = torch.randn(8_000_000, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.vector_norm(grad.double().view(-1, 4000), dim=1).norm().item()
    assert of(grad).item() == pytest.approx(expected, rel=1e-7)
    # The control: torch's one sum in float32.
    assert torch.nn.utils.get_total_norm([grad]).item() != pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", POWERS)
def test_nan_and_inf_come_through(norm_type: float, value: float) -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        grad = torch.zeros(9000, dtype=dtype)
        grad[8999] = value
        expected = torch.tensor(abs(value))
        norms = of(grad, torch.ones(3), norm_type=norm_type), norm_without_reading([grad], norm_type)
        for norm in norms:
            torch.testing.assert_close(norm.float(), expected, rtol=0, atol=0, equal_nan=True)
    both = of(torch.tensor([math.inf]), torch.tensor([math.nan]), norm_type=norm_type)
    assert both.isnan()


def test_sparse_gradients_are_added_before_their_norm() -> None:
    embedding = nn.Embedding(6, 2, sparse=True)
    (embedding(torch.tensor([1, 1, 2])) * torch.tensor([1.0, 2.0])).sum().backward()
    dense = embedding.weight.grad.to_dense()
    assert fullrank.clip_grad_norm_(embedding, 1.0) == pytest.approx(dense.norm().item())
    clipped = dense / (dense.norm() + 1e-6)
    torch.testing.assert_close(embedding.weight.grad.to_dense(), clipped, rtol=1e-6, atol=0)  # roundings of float32
    assert embedding.weight.grad.is_sparse
    # The control: index 1 is there twice.
    assert embedding.weight.grad._values().norm() < 0.9
    assert fullrank.total_grad_norm(embedding) == pytest.approx(1.0, rel=1e-5)


def test_a_small_factor_is_not_rounded_away() -> None:
    parameter = with_gradient(torch.full((1000,), 6e4, dtype=torch.float16))
    assert fullrank.clip_grad_norm_([parameter], 0.01).item() == pytest.approx(6e4 * math.sqrt(1000), rel=1e-3)
    # 5e-9 is 0 in float16, whose smallest number is 6e-8; the clipped elements are 3e-4.
    assert parameter.grad.double().norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("parameters", [[], [nn.Parameter(torch.ones(2))], nn.ReLU(), [with_gradient(torch.zeros(0))]])
def test_no_gradient_is_a_norm_of_zero(parameters: Any) -> None:
    norm = fullrank.clip_grad_norm_(parameters, 1.0, math.inf, error_if_nonfinite=True)
    assert norm == 0
    assert norm.shape == ()


def test_a_generator_that_is_used_up_warns() -> None:
    parameters = model().parameters()
    list(parameters)
    with pytest.warns(UserWarning, match="an empty generator") as caught:
        assert fullrank.clip_grad_norm_(parameters, 1.0) == 0
    assert caught[0].filename == __file__


def test_what_is_not_finite_is_named_and_nothing_scaled() -> None:
    layers = model()
    layers[1].bias.grad[1] = math.nan
    before = layers[0].weight.grad.clone()
    text = r"clip_grad_norm_: expected gradients with a finite norm, got nan: 1\.bias on rank 0\."
    with pytest.raises(RuntimeError, match=text):
        fullrank.clip_grad_norm_(layers, 0.1, error_if_nonfinite=True)
    assert torch.equal(layers[0].weight.grad, before)
    with pytest.raises(RuntimeError, match=r"total_grad_norm: .* got nan: parameter 3 on rank 0\."):
        fullrank.total_grad_norm(layers.parameters(), error_if_nonfinite=True)
    many = [with_gradient(torch.tensor([math.inf])) for _ in range(13)]
    with pytest.raises(RuntimeError, match=r"parameter 9 on rank 0; 3 more\."):
        fullrank.total_grad_norm(many, error_if_nonfinite=True)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"norm_type": 0}, ValueError, "norm_type: expected a number > 0, or inf, got 0"),
        ({"norm_type": -1.0}, ValueError, "norm_type: expected a number > 0"),
        ({"norm_type": None}, TypeError, "norm_type: expected a number > 0, or inf, got None"),
        # Arguments in the order of another function.
        ({"norm_type": True}, TypeError, r"norm_type: expected a number > 0, or inf, got True\. .* error_if_nonfinite"),
        ({"max_norm": True}, TypeError, "max_norm: expected a number >= 0, or None to measure only, got True"),
        ({"max_norm": -0.5}, ValueError, "max_norm: expected a number >= 0, or None to measure only, got -0.5"),
        ({"max_norm": math.nan}, ValueError, "max_norm: expected a number >= 0"),
        ({"max_norm": "one"}, TypeError, "max_norm: expected a number >= 0"),
        ({"parameters": 3}, TypeError, "parameters: expected a module, a tensor, or an iterable"),
        ({"parameters": {"weight": torch.ones(1)}}, TypeError, r"got 'weight'\. Pass \.items\(\) of a dict"),
        ({"parameters": [("weight", None)]}, TypeError, "weight: expected a parameter"),
        ({"shard_groups": lambda _: "tp"}, RuntimeError, "init_process_group"),
        ({"across": "pp"}, RuntimeError, "init_process_group"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    parameter = with_gradient(torch.ones(2))
    with pytest.raises(error, match=text):
        fullrank.clip_grad_norm_(**({"parameters": [parameter], "max_norm": 1.0} | arguments))
    assert torch.equal(parameter.grad, torch.ones(2))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_sparse_layout_that_torch_cannot_scale_is_refused() -> None:
    parameter = nn.Parameter(torch.eye(2).to_sparse_csr())
    parameter.grad = torch.eye(2).to_sparse_csr()
    with pytest.raises(TypeError, match=r"gradient of parameter 0: expected a dense or a sparse COO tensor"):
        fullrank.total_grad_norm([parameter])


def test_the_device_is_not_waited_for(
    device: torch.device, no_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    layers = model(torch.float32).to(device)
    for parameter in layers.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad.to(device)
    expected = torch.nn.utils.get_total_norm([p.grad for p in layers.parameters() if p.grad is not None])
    with no_waits():
        norms = [fullrank.clip_grad_norm_(layers, 1e6, norm_type) for norm_type in (2.0, 7.0, math.inf)]
    torch.testing.assert_close(norms[0], expected, rtol=1e-6, atol=0)  # sums of float32 in another order
    assert norms[2] < norms[1] < norms[0]
