"""The documentation: every Python block runs, every public name is in the reference, and the site builds by itself."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
import torch.distributed as dist
from meshes import init_device_mesh
from scripts import run_script
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import WorkerPool, get_pool

import fullrank
import fullrank.losses

pytestmark = pytest.mark.slow


def make_network() -> nn.Module:
    """Return a small network, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_rows(number: int) -> tuple[Tensor, Tensor]:
    """Return features (N, 5) and targets (N,), about a third positive."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(number, 5, generator=generator, dtype=torch.float64)
    return features, (features[:, 0] > 0.4).long()


def run(block: str, **names: Any) -> dict[str, Any]:
    """Execute a block on ``names``, and return them with what it defines."""
    with contextlib.redirect_stdout(io.StringIO()):
        exec(block, names)
    return names


def gradients(network: nn.Module) -> Tensor:
    """Return the whole gradient."""
    parts = [parameter.grad for parameter in network.parameters()]
    return torch.cat([(part.full_tensor() if hasattr(part, "full_tensor") else part).reshape(-1) for part in parts])


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max())


def own_rows(rank: int, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return this rank's part; the parts differ in size."""
    size, world_size = len(rows[0]), dist.get_world_size()
    bounds = [size * r * (r + 1) // (world_size * (world_size + 1)) for r in range(world_size + 1)]
    return tuple(part[bounds[rank] : bounds[rank + 1]] for part in rows)


def smooth_ap(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of the page in one process."""
    return fullrank.losses.smooth_ap(scores, targets, temperature=0.1)


def two_heads(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of the page, of which the second is of the negated scores."""
    return smooth_ap(scores, targets) + smooth_ap(-scores, targets)


def squared_margin(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the user-written loss of the page, pair by pair."""
    pairs = [(1 - p + n).clamp_min(0) ** 2 for p in scores[targets == 1] for n in scores[targets == 0]]
    return torch.stack(pairs).mean()


def one_step(rank: int, block: str, loss: str, wrapped: bool = False) -> tuple[float, float]:
    """Return the errors of loss and gradient of a block that takes one step with ``network`` on this rank's rows."""
    rows = make_rows(36)
    features, targets = own_rows(rank, rows)
    network, reference = make_network(), make_network()
    mesh = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")) if dist.get_world_size() == 4 else None
    )
    names = {"features": features, "targets": targets, "mesh": mesh}
    found = run(block, network=DistributedDataParallel(network) if wrapped else network, **names)
    expected = globals()[loss](reference(rows[0]), rows[1])
    expected.backward()
    return error(found["loss"], expected), error(gradients(network), gradients(reference))


def validation(rank: int, block: str) -> tuple[float | None, float, int, bool]:
    """Return the validation loss, its expected value, and, after a training step, the rows queued and the mode."""
    features, targets = own_rows(rank, make_rows(36))
    network = make_network()
    loss_fn = fullrank.SmoothAPLoss(num_classes=1, temperature=0.1, queue_size=64)
    found = run(block, network=network, features=features, targets=targets, loss_fn=loss_fn)
    value = found.get("validation_loss")
    expected = float(smooth_ap(network(features), targets))
    loss_fn(network(features), targets)
    return None if value is None else float(value), expected, len(loss_fn.queue), loss_fn.training


def different_steps(rank: int, block: str) -> tuple[int, float]:
    """Return the steps of ranks with 3 and 1 batches, and the error of the gradients of all of them."""
    features, targets = make_rows(48)
    parts = {(0, 0): slice(0, 14), (0, 1): slice(14, 24), (0, 2): slice(24, 36), (1, 0): slice(36, 48)}
    loader = [(features[part], targets[part]) for (owner, _), part in parts.items() if owner == rank]
    network, reference = make_network(), make_network()
    loss_fn = fullrank.SmoothAPLoss(num_classes=1, temperature=0.1, queue_size=16)
    names = {"torch": torch, "dist": dist, "loader": loader, "loss_fn": loss_fn}
    model = DistributedDataParallel(network)
    steps: list[int] = []
    model.register_forward_pre_hook(lambda module, given: steps.append(len(given[0])))
    run(block, model=model, **names)
    alone = fullrank.SmoothAPLoss(num_classes=1, temperature=0.1, queue_size=16, gather_distributed=False)
    for step in range(3):
        rows = torch.cat([torch.arange(48)[part] for (_, at), part in parts.items() if at == step])
        alone(reference(features[rows]), targets[rows]).backward()
    return len(steps), error(gradients(network), gradients(reference))


def draw_gradients(model: nn.Module, seed: int) -> None:
    """Give every parameter a gradient, far above a norm of 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = 3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def norm_of(*models: nn.Module) -> Tensor:
    """Return the norm of all gradients of ``models``."""
    return torch.cat([gradients(model) for model in models]).norm()


def clipped_fsdp(rank: int, block: str) -> float:
    """Return the error of the gradient of FSDP2, clipped by the block, against torch's clipping of the whole."""
    from torch.distributed.fsdp import fully_shard

    features, targets = make_rows(20)
    model, reference = make_network(), make_network()
    fully_shard(model)
    for network in (model, reference):
        (100 * network(features)[:, 0] * targets).sum().backward()
    run(block, model=model)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    return error(gradients(model), gradients(reference))


def clipped_experts(rank: int, block: str) -> float:
    """Return the error of the clipped gradients of a dense layer, copied, and of experts, one per rank."""
    experts = [nn.Linear(4, 4).double() for _ in range(2)]
    dense = nn.Linear(4, 4).double()
    for seed, layer in enumerate((dense, *experts)):
        draw_gradients(layer, seed)
    model = nn.Module()
    model.dense, model.experts = dense, experts[rank]
    expected = gradients(model) / (norm_of(dense, *experts) + 1e-6)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    run(block, model=model, mesh=mesh, clip_grad_norm_=fullrank.clip_grad_norm_)
    return error(gradients(model), expected)


def clipped_stages(rank: int, block: str, tied: bool) -> float:
    """Return the error of the clipped gradients of two stages, which share a layer if ``tied``."""
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double() for _ in range(2)]
    for seed, layer in enumerate((*stages[0], *stages[1])):
        draw_gradients(layer, seed)
    parts = [*stages[0], *stages[1]]
    if tied:  # the last layer of the second stage is the first of the first
        draw_gradients(stages[1][1], 0)
        parts.pop()
    stage = stages[rank]
    expected = gradients(stage) / (norm_of(*parts) + 1e-6)
    counted_once = list(stage.parameters()) if rank == 0 or not tied else list(stage[0].parameters())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    names = {"torch": torch, "clip_grad_norm_": fullrank.clip_grad_norm_, "counted_once": counted_once}
    run(block, stage=stage, mesh=mesh, **names)
    return error(gradients(stage), expected)


ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))}
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
LIMIT = 1e-12  # float64


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return [code for code, _ in BLOCK.findall(PAGES[page])]


# The blocks of these pages are run by other tests, each with a check that none is left out.
ELSEWHERE = {
    "accumulation.md": ("test_accumulation_doc.py", "test_every_block_is_run_here"),
    "checkpointing.md": ("test_resume.py", "test_no_block_is_left_out"),
    "integrations.md": ("test_integrations_plain.py", "test_every_block_is_run"),
    "recipes/accelerate.md": ("test_integrations_accelerate.py", "test_it_trains_validates_and_resumes_as_one_process"),
    "recipes/ddp.md": ("test_recipe_ddp.py", "test_the_script_prints_what_the_page_says"),
    "recipes/fsdp.md": ("test_recipe_fsdp.py", "test_it_validates_saves_and_resumes_as_one_process"),
    "recipes/loop.md": ("test_recipe_loop.py", "test_two_heads_are_those_of_one_process"),
    "recipes/sentence-transformers.md": ("test_recipe_sentence_transformers.py", "test_it_trains_as_one_process"),
    "recipes/lightning.md": ("test_integrations_lightning.py", "test_the_ranker_trains_as_one_process"),
    "recipes/trainer.md": ("test_integrations_transformers.py", "test_it_trains_validates_and_resumes_as_one_process"),
}
ELSEWHERE |= {
    page: ("test_migrating.py", "test_the_block_of_a_page") for page in PAGES if page.startswith("migrating/")
}
# One namespace per page, one process, in the order of the page; what they print is on the page.
IN_ORDER = [f"recipes/{name}.md" for name in ("after-training", "batches")] + [
    f"{name}.md"
    for name in ("choosing", "index", "logging", "migrating", "queue", "retrieval", "scale", "temperature", "tutorial")
]
DDP, FSDP, SUM, OWN_LOSS, TWO_HEADS, VALIDATION = blocks("distributed.md")
(DIFFERENT_STEPS,) = blocks("agreement.md")
CLIP, EXPERTS, STAGES, TIED = blocks("gradient-norm.md")
*_, TRAIN = blocks("tutorial.md")


def test_every_block_is_run() -> None:
    here = {*IN_ORDER, "distributed.md", "agreement.md", "gradient-norm.md"}
    assert {page for page, text in PAGES.items() if "```python" in text} == here | set(ELSEWHERE)
    assert here.isdisjoint(ELSEWHERE)
    assert all(text.count("```python") == len(blocks(page)) for page, text in PAGES.items())
    assert TRAIN.startswith("# train.py")


@pytest.mark.parametrize("page", ELSEWHERE)
def test_the_other_tests_exist(page: str) -> None:
    file, function = ELSEWHERE[page]
    (path,) = (ROOT / "tests").rglob(file)
    tree = ast.parse(path.read_text("utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


# Pages of one process

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def assert_printed(found: str, expected: str) -> None:
    """Compare word by word; the last digits of a training depend on the machine."""
    assert NUMBER.sub("#", found).split() == NUMBER.sub("#", expected).split()
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.05, abs=0.03)


@pytest.mark.parametrize("wrong", ["loss 0.48\n", "loss 0.42 of 1\n", "gain 0.48 of 1\n"])
def test_control_another_print_is_seen(wrong: str) -> None:
    assert_printed("loss 0.49 of 1\n", "loss 0.48 of 1\n")
    with pytest.raises(AssertionError):
        assert_printed(wrong, "loss 0.48 of 1\n")


@pytest.fixture
def pyplot() -> Iterator[Any]:
    """matplotlib without a screen, and without the figures that a test leaves behind."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    yield pyplot
    pyplot.close("all")


def run_in_order(page: str) -> dict[str, Any]:
    """Run the blocks of a page, but for a script of its own, and compare what they print."""
    names: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        for code, expected in BLOCK.findall(PAGES[page]):
            if code.startswith("# train.py"):
                continue
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, names)
            assert_printed(out.getvalue(), expected)
    return names


@pytest.mark.parametrize("page", [page for page in IN_ORDER if page != "tutorial.md"])
def test_a_page(page: str, pyplot: Any) -> None:
    run_in_order(page)


def load(path: Path) -> ModuleType:
    """Import a script of docs/ under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tutorial_and_its_figure(tmp_path: Path, pyplot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_in_order("tutorial.md")
    losses = [row["loss"] for row in names["history"]]
    assert losses[-1] < 0.7 * losses[0]  # it learns
    monkeypatch.syspath_prepend(str(DOCS))
    load(DOCS / "make_diagnostics.py").draw(names, tmp_path / "diagnostics.svg")
    assert "t_alpha" in (tmp_path / "diagnostics.svg").read_text("utf-8")


def test_the_script_of_the_tutorial(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    done = run_script(script, cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stderr
    expected = BLOCK.findall(PAGES["tutorial.md"])[-1][1]
    assert_printed(done.stdout, expected)


# Pages of several processes

HSDP = FSDP.replace("fully_shard(network)  #", "fully_shard(network, mesh=mesh)  #")
WITH_NETWORK = [
    pytest.param(DDP, 2, "smooth_ap", False, id="DDP"),
    pytest.param(FSDP, 2, "smooth_ap", False, id="FSDP2"),
    pytest.param(HSDP, 4, "smooth_ap", False, id="HSDP"),
    pytest.param(SUM, 2, "smooth_ap", False, id="sum"),
    pytest.param(OWN_LOSS, 2, "squared_margin", True, id="own loss"),
    pytest.param(TWO_HEADS, 2, "two_heads", True, id="two heads"),
]


@pytest.mark.parametrize(("block", "world_size", "loss", "wrapped"), WITH_NETWORK)
def test_a_step(block: str, world_size: int, loss: str, wrapped: bool) -> None:
    assert HSDP != FSDP
    for errors in get_pool(world_size)(one_step, block, loss, wrapped):
        assert max(errors) <= LIMIT


def test_the_summed_loss_of_ones_own() -> None:
    names: dict[str, Any] = {}
    exec(OWN_LOSS.partition("\n\nloss =")[0], names)
    tokens = names["token_loss"](torch.zeros(3, 4), torch.tensor([1, -100, 2]))
    assert tokens.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    ("block", "old", "new", "loss", "wrapped"),
    [
        (DDP, "temperature=0.1", "temperature=0.1, gather_distributed=False", "smooth_ap", False),
        (SUM, ', gradient_reduction="sum"', "", "smooth_ap", False),
        (OWN_LOSS, "gather_rows(scores, targets)", "scores, targets", "squared_margin", True),
        (TWO_HEADS, "-network(features)", "network(features)", "two_heads", True),
    ],
    ids=["no gather", "mean instead of sum", "own rows alone", "one head twice"],
)
def test_control_a_wrong_step(
    pool_of_two: WorkerPool, block: str, old: str, new: str, loss: str, wrapped: bool
) -> None:
    wrong = block.replace(old, new)
    assert wrong != block
    for _, gradient in pool_of_two(one_step, wrong, loss, wrapped):
        assert gradient > 0.05


def test_validation_on_one_rank(pool_of_two: WorkerPool) -> None:
    (value, expected, *after), (other, _, *after_other) = pool_of_two(validation, VALIDATION)
    assert value == pytest.approx(expected, rel=LIMIT)
    assert other is None
    assert after == after_other == [36, True]  # the training step after it gathers, and is the first to enqueue


def test_ranks_with_different_steps(pool_of_two: WorkerPool) -> None:
    for steps, gradient in pool_of_two(different_steps, DIFFERENT_STEPS):
        assert steps == 3
        assert gradient <= LIMIT


def test_clipping_under_fsdp(pool_of_two: WorkerPool) -> None:
    assert max(pool_of_two(clipped_fsdp, CLIP)) <= LIMIT
    assert min(pool_of_two(clipped_fsdp, "")) > 0.5  # control: not clipped


def test_clipping_of_experts(pool_of_two: WorkerPool) -> None:
    assert max(pool_of_two(clipped_experts, EXPERTS)) <= LIMIT
    unnamed = re.sub(r", shard_groups=.*\)", ")", EXPERTS)
    assert unnamed != EXPERTS
    assert max(pool_of_two(clipped_experts, unnamed)) > 0.05


@pytest.mark.parametrize(("block", "tied"), [(STAGES, False), (TIED, True)], ids=["stages", "tied"])
def test_clipping_of_stages(pool_of_two: WorkerPool, block: str, tied: bool) -> None:
    assert max(pool_of_two(clipped_stages, block, tied)) <= LIMIT
    alone = block.replace(', across=mesh["pp"]', "")
    assert alone != block
    assert max(pool_of_two(clipped_stages, alone, tied)) > 0.05


# Pictures


DIAGRAMS = [
    "accumulation-narrow.svg",
    "accumulation.svg",
    "call.svg",
    "gains.svg",
    "map-narrow.svg",
    "map.svg",
    "travel.svg",
]


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_is_that_of_its_code(name: str) -> None:
    diagrams = load(DOCS / "make_diagrams.py").DIAGRAMS
    assert (DOCS / "images" / name).read_text("utf-8") == diagrams[name]()
    drawn = {path.name for path in (DOCS / "images").glob("*.svg") if "fr-diagram" in path.read_text("utf-8")}
    assert set(diagrams) == drawn


def test_pictures_are_small_and_used() -> None:
    for path in (DOCS / "images").iterdir():
        assert path.stat().st_size < 200 * 1024, path
        assert path.name.replace("-narrow", "") in "".join(PAGES.values()) + (ROOT / "README.md").read_text("utf-8"), (
            path
        )


# The site


def build(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run mkdocs in the root of the repository."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)


needs_site = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("mkdocs", "material", "mkdocstrings", "latex2mathml", "ziamath", "fontTools")
    ),
    reason="needs the extra `docs`",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link or an anchor that leads nowhere is an error. `make test` has just built it."""
    if "FULLRANK_SITE" in os.environ:
        return Path(os.environ["FULLRANK_SITE"])
    folder = tmp_path_factory.mktemp("site")
    done = build(["--site-dir", str(folder)])
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """What a page, or a style sheet, holds: its anchors, what it links to, and what it loads."""

    LOADING = ("stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads = re.findall(r"url\([\"']?([^)\"']+)", text) + re.findall(r"@import\s+[\"']([^\"']+)", text)
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what a tag names."""
        values = {name: value or "" for name, value in attributes}
        self.anchors.update(value for name, value in values.items() if name in ("id", "name"))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and any(kind in values.get("rel", "").split() for kind in self.LOADING):
            self.loads.append(values.get("href", ""))
        if tag != "a":
            self.loads += [values[name] for name in ("src", "srcset", "data", "poster") if values.get(name)]


@functools.cache
def page_of(path: Path) -> Page:
    """Return what a file of the site holds."""
    return Page(path.read_text("utf-8"))


def is_external(address: str) -> bool:
    return bool(urlsplit(address).netloc) or urlsplit(address).scheme not in ("", "data")


@needs_site
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    assert {load for page in pages for load in page_of(page).loads if is_external(load)} == set()
    # The theme's script fetches a library for diagrams, if a page has one of that kind.
    assert not any('class="mermaid"' in page.read_text("utf-8") for page in pages)
    styles = sorted(site.rglob("*.css"))
    assert any("extra" in style.name for style in styles)
    for style in styles:
        loads = [load for load in Page(style.read_text("utf-8")).loads if not load.startswith("data:")]
        assert [load for load in loads if is_external(load) or not (style.parent / load).is_file()] == []


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/x.css">',
        '<link rel="preconnect" href="https://fonts.example">',
        "<style>@font-face { src: url(https://fonts.example/x.woff2); }</style>",
        "<style>@import 'https://fonts.example/x.css';</style>",
        '<img src="http://pictures.example/x.png">',
    ],
)
def test_control_what_is_loaded_from_elsewhere_is_seen(text: str) -> None:
    assert any(is_external(load) for load in Page(text).loads)


SOUGHT = {"AUROC", "AUPRC", "pos_weight", "wandb", "calibration", "InfoNCE", "triplet", "early stopping"}
SOUGHT |= {
    "class weights",
    "hard negatives",
    "oversampling",
    "GradCache",
    "MoCo",
    "NDCG",
    "DeepSpeed",
    "TensorBoard",
    "GradScaler",
}


@needs_site
def test_the_search_knows_the_words_of_others(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    text = " ".join(entry["title"] + " " + entry["text"] for entry in index["docs"]).lower()
    assert [word for word in SOUGHT if word.lower() not in text] == []
    assert "no such word" not in text
    # What the search needs in a page that is opened from a folder.
    assert (site / "search" / "search_index.js").read_text("utf-8").startswith("var __index")
    assert "javascripts/iframe-worker.js" in (site / "index.html").read_text("utf-8")


@needs_site
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    """mkdocs checks those of Markdown; here also those of the theme, the reference and the shown files."""
    pages = {path.resolve(): page_of(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if path.name == "404.html" and parts.path.startswith("/"):
                continue  # this one page is served under any address
            known = pages[target].anchors if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in known):
                broken.append((path.name, link))
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 1000


@needs_site
@pytest.mark.parametrize("wrong", ["[x](index.md#nowhere)", "[x](nowhere.md)"])
def test_control_a_broken_link_fails_the_build(tmp_path: Path, wrong: str) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text(f"# Page\n\n{wrong}\n", encoding="utf-8")
    # The settings of the site, without what only its own pages need.
    settings = f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {pages}\nsite_dir: {tmp_path / 'site'}\nnav: [index.md]\n"
    settings += f"hooks: []\nextra_css: []\nplugins: [search]\nwatch: [{pages}]\n"
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    done = build(["--config-file", str(tmp_path / "mkdocs.yml")])
    assert done.returncode != 0
    assert "nowhere" in done.stdout + done.stderr


# The reference


def public_names() -> list[str]:
    """Return the names that the reference must have: of several paths of an object the shortest."""
    names = [f"fullrank.{name}" for name in fullrank.__all__]
    names += [f"fullrank.losses.{name}" for name in fullrank.losses.__all__ if name not in fullrank.__all__]
    metrics = importlib.import_module("fullrank.metrics")
    names += [f"fullrank.metrics.{name}" for name in metrics.__all__]
    names += [f"fullrank.data.{name}" for name in importlib.import_module("fullrank.data").__all__]
    for module in ("lightning", "sentence_transformers", "transformers"):
        tree = ast.parse((ROOT / "integrations" / f"{module}.py").read_text("utf-8"))
        defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        names += [f"fullrank.integrations.{module}.{name}" for name in defined if not name.startswith("_")]
    return names


@needs_site
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = [page_of(path).anchors for path in (site / "reference").glob("*.html")]
    found = set().union(*anchors)
    # A function that has the name of its module is under the path of its definition.
    assert [name for name in public_names() if {name, f"{name}.{name.rpartition('.')[2]}"}.isdisjoint(found)] == []
    assert "fullrank.no_such_name" not in found
    assert len(public_names()) > 35


def test_the_integrations_are_all_looked_at() -> None:
    modules = {path.stem for path in (ROOT / "integrations").glob("*.py")}
    public = {"lightning", "sentence_transformers", "transformers"}
    assert modules == {"__init__", "schedules", *public}  # schedules is shared by the others


def test_every_option_of_the_command_is_in_the_reference(tmp_path: Path) -> None:
    done = run_script("fullrank", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    options = set(re.findall(r"^  (?:-h, )?(--[\w-]+)", done.stdout, re.MULTILINE)) - {"--help"}
    assert len(options) >= 4
    assert {option for option in options if f"`{option} " not in PAGES["reference/preflight.md"]} == set()


@needs_site
def test_docstrings_look_like_pages(site: Path) -> None:
    text = "".join(path.read_text("utf-8") for path in (site / "reference").glob("*.html"))
    for left in (".. math", ":func:", ":class:", ":meth:", "$$", "arithmatex", "&gt;&gt;&gt;</p>", "<blockquote>"):
        assert left not in text, left
    assert text.count("<math") >= 15
    assert 'href="formulas.html#fullrank.losses.smooth_ap.smooth_ap"' in text  # a role that became a link


@needs_site
def test_formulas_have_their_font(site: Path) -> None:
    """All characters are in it, and brackets grow: that is what its table MATH is for."""
    from fontTools.ttLib import TTFont

    font = TTFont(site / "stylesheets" / "math.woff")
    formulas = [
        found for path in site.rglob("*.html") for found in re.findall(r"<math.*?</math>", path.read_text("utf-8"))
    ]
    characters = {ord(character) for found in formulas for character in unescape(re.sub(r"<[^>]*>", "", found))}
    assert len(formulas) > 40
    assert characters <= set(font.getBestCmap())
    assert len(font["MATH"].table.MathVariants.VertGlyphCoverage.glyphs) > 0
    assert 'url("math.woff")' in (site / "stylesheets" / "extra.css").read_text("utf-8")


needs_griffe = pytest.mark.skipif(importlib.util.find_spec("griffe") is None, reason="needs the extra `docs`")


@needs_griffe
@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (".. math:: a\n    + b\n\nText.", "$$ a + b $$\n\n\nText."),
        (".. math::\n    a\n", "$$ a $$"),
        ("The :math:`x_r` of ``N``.", "The $x_r$ of `N`."),
        ("See :func:`~fullrank.windows`.", "See [`windows`][fullrank.windows]."),
        ("See :func:`windows`.", "See [`windows`][fullrank.windows]."),
        ("See :class:`Hidden`.", "See `Hidden`."),
        ("As here. ::\n\n    f(x)\n\nMore.", "As here.\n\n```python\nf(x)\n```\n\nMore."),
        ("Example:\n    >>> 1\n    1", "Examples:\n    >>> 1\n    1"),
        ("Args:\n    a, b: numbers.", "Args:\n    a: numbers.\n    b: numbers."),
        ("Args:\n    a, b: two\n        numbers.", "Args:\n    a: see `b`.\n    b: two\n        numbers."),
        ("Args:\n    a: > 0, a number.", "Args:\n    a: \\> 0, a number."),
        ("Raises:\n    A, B: for others.", "Raises:\n    A, B: for others."),
    ],
)
def test_a_docstring_becomes_markdown(docstring: str, expected: str) -> None:
    module = load(DOCS / "tools" / "docstrings.py")
    link = {"fullrank.windows": "fullrank.windows", "windows": "fullrank.windows"}.get
    assert module.to_markdown(docstring, link).strip() == expected


@needs_griffe
@pytest.mark.parametrize("text", ["Shape:\n    (N,).", "Shape: (N,)."])
def test_a_section_becomes_a_headed_paragraph(text: str) -> None:
    module = load(DOCS / "tools" / "docstrings.py")
    assert module.to_markdown(text).split() == ["<span", 'class="doc-section-title">Shape:</span>', "(N,)."]
