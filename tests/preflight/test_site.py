"""What the preflight finds out about devices: which one each rank computes on, and whether its products are rounded."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, Backend, only_simulated
from torch.utils._python_dispatch import TorchDispatchMode

from fullrank.preflight import checks, command, site
from fullrank.preflight.site import Place, Site

pytestmark = pytest.mark.slow


@only_simulated
def test_the_launcher_may_show_one_device_to_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(command, "CHECKS", {"placement": checks.placement})
    for visible in (1, 2):
        monkeypatch.setattr(Backend, "device_count", lambda self, visible=visible: visible)
        with site.open_site("gloo", "sim", 60) as opened:
            assert opened.device == torch.device("sim", visible - 1)
            group = dist.group.WORLD._get_backend(torch.device("cpu"))
            assert group.options._timeout == timedelta(seconds=60)
            (result,) = command.run_checks(opened)
        assert result[1:] == ("passed", f"device 0, of {visible} that the process sees")


def _placed(*places: Place) -> list[str]:
    found = []
    for rank in range(len(places)):
        try:
            found.append(checks.placement(Site(rank, len(places), "", DEVICE, torch.float64, 0.0, places)))
        except checks.Failed as failure:
            found.append(str(failure))
    return found


def test_ranks_on_one_device_are_found() -> None:
    both = _placed(Place("a", 0, 2, ""), Place("a", 0, 2, ""))
    assert both[0] == "computes on device 0, and so does rank 1; LOCAL_RANK is not set"
    assert "rank 0" in both[1]
    named = _placed(Place("a", 0, 1, "x"), Place("a", 0, 1, "x"))
    assert "and so does rank 1" in named[0]
    for right in (
        [Place("a", 0, 2, ""), Place("a", 1, 2, "")],
        [Place("a", 0, 2, ""), Place("b", 0, 2, "")],
        [Place("a", 0, 1, "x"), Place("a", 0, 1, "y")],
        [Place("a", 0, 1, ""), Place("a", 0, 1, "")],
    ):
        assert all(text.startswith("device ") for text in _placed(*right)), right


def test_facts_that_differ_and_hosts_are_shown() -> None:
    places, facts = (
        (Place("a", 0, 1, ""), Place("b", 0, 1, "")),
        ({"torch": "1", "cores": "2"}, {"torch": "1", "cores": "4"}),
    )
    found = site.describe(Site(0, 2, "gloo", DEVICE, torch.float64, 0.0, places, facts), "1.2.3")
    assert (found["hosts"], found["torch"], found["cores"]) == (2, "1", "DIFFERENT: 2, 4")


class Rounding(TorchDispatchMode):
    """Rounds the factors of matrix products to bfloat16; unless ``always``, not while full products are asked for."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_full = torch.backends.mkldnn.matmul.fp32_precision in ("ieee", "none")
        if func is torch.ops.aten.mm.default and (self.always or not is_full):
            args = tuple(arg.bfloat16().float() for arg in args)
        return func(*args, **(kwargs or {}))


def test_rounded_products_are_found(device: torch.device) -> None:
    assert site.products(device) == "full"
    with Rounding(always=True):
        assert site.products(device) == "ROUNDED, also inside the losses"
    cuda = device.type == "cuda"  # which rounds by itself; a processor without bfloat16 does not
    backend: Any = torch.backends.cuda.matmul if cuda else torch.backends.mkldnn.matmul
    before, backend.fp32_precision = backend.fp32_precision, "tf32" if cuda else "bf16"
    try:
        with nullcontext() if cuda else Rounding(always=False):
            assert site.products(device) == "rounded, full inside the losses"
    finally:
        backend.fp32_precision = before
