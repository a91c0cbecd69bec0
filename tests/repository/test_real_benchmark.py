"""The benchmark on real data: it runs, and what it computes with is right.

Which loss wins is not looked at: a few steps say nothing about that.
"""

import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, roc_auc_score

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    """A function that imports a script of the folder by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module


@pytest.fixture(scope="module")
def data(scripts):
    """The module with the sets, where their packages are installed."""
    module = scripts("real_data")
    if (absent := module.missing()) is not None:
        pytest.skip(absent)
    return module


def _main(module, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__name__, "--quick", "--workers", "1", *map(str, arguments)])
        module.main()


@pytest.fixture(scope="module")
def real(scripts, data, tmp_path_factory):
    """The folder with the results of a quick run and its cache."""
    folder = tmp_path_factory.mktemp("real")
    _main(scripts("real"), "--cache", folder / "cache.jsonl", "--out", folder)
    return folder


def _results(folder):
    results = json.loads((folder / "real.json").read_text())
    return {name: records for name, records in results.items() if name != "machine"}


def test_it_writes_every_method_of_every_table(real, scripts):
    methods, results = scripts("real_methods"), _results(real)
    for steps, expected in ((4, (*methods.LONG, *methods.SHORT)), (8, methods.LONG)):
        found = [record["method"] for record in results["defaults"] if record["steps"] == steps]
        assert found == [*expected, methods.TREES]
    assert [record["method"] for record in results["tuned"]] == [*methods.TUNED, methods.TREES]
    assert [record["method"] for record in results["classes"]] == 3 * list(methods.SEVERAL)
    queues = [(record["method"], record["batch"], record["queue"]) for record in results["queue"]]
    assert queues == [(loss, batch, queue) for loss in methods.QUEUED for batch in (128, 1_024) for queue in (0, 1_024)]
    for record in results["defaults"]:
        for metric in ("ap", "recall", "pauc", "own_recall", "own_pauc"):
            assert list(record[metric]) == ["satimage-4", "covid-tests"]
            assert all(len(values) == 2 and min(values) >= 0 for values in record[metric].values())
    assert all(len(record["ap"]["covid-tests"]) == 1 for record in results["tuned"])  # split 0 is that of the search


def test_it_continues_from_its_cache(real, scripts, tmp_path):
    lines = (real / "cache.jsonl").read_text().splitlines()
    interrupted = tmp_path / "cache.jsonl"
    interrupted.write_text("\n".join(lines[:-5]) + "\n")
    _main(scripts("real"), "--cache", interrupted, "--out", tmp_path)
    assert sorted(interrupted.read_text().splitlines()) == sorted(lines)
    assert _results(tmp_path) == _results(real)
    # The control: what stands in the cache is what is reported.
    record = json.loads(lines[0])
    record["figures"] = {name: value + 0.5 for name, value in record["figures"].items()}
    interrupted.write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    _main(scripts("real"), "--cache", interrupted, "--out", tmp_path)
    assert _results(tmp_path) != _results(real)


def test_one_process_or_two_give_the_same(scripts, data, tmp_path):
    runs = scripts("real_runs")
    jobs = [runs.Job("satimage-4", seed, "SmoothAP", {"lr": 0.01}, (4,), 64) for seed in (0, 1, 0)]
    found = []
    for count in (1, 2):
        workers = runs.Workers(count, runs.Cache(None))
        found.append(workers.run("test", jobs))
        workers.close()
    assert found[0] == found[1]
    assert found[0][0] == found[0][2] != found[0][1]


def test_every_comparison_is_paired_and_corrected(scripts):
    real = scripts("real")
    base = {"a": [0.4, 0.6], "b": [0.2, 0.2], "c": [0.5, 0.5]}
    values = {"a": [0.5, 0.7], "b": [0.4, 0.4], "c": [0.4, 0.4]}
    found = real.against([values], [base], 1)
    assert (found.gain, found.better, found.of) == (pytest.approx(0.2 / 3), 2, 3)
    assert found.worst == pytest.approx(0.8)
    # Gains of the sets 0.1, 0.2, -0.1: standard deviation 0.152753; Student's t of 2 degrees is 4.302653.
    assert found.over_sets == pytest.approx(4.302653 * 0.1527525 / math.sqrt(3), rel=1e-6)
    # Each of them twice: standard deviation 0.136626; Student's t of 5 degrees is 2.570582.
    assert found.over_splits == pytest.approx(2.570582 * 0.1366260 / math.sqrt(6), rel=1e-6)
    # Five comparisons take 1 %: Student's t of 2 degrees is 9.924843.
    assert real.against([values], [base], 5).over_sets == pytest.approx(found.over_sets * 9.924843 / 4.302653, rel=1e-6)
    # Two learning rates count as two for "better", and as one for the interval.
    both = real.against([values, base], [base, base], 1)
    assert (both.better, both.of, both.gain) == (2, 6, pytest.approx(0.1 / 3))


@pytest.mark.parametrize("name", ["satimage-4", "covid-tests"])
def test_splits_are_disjoint_stratified_and_standardised(data, name):
    table, parts = data.load(name), data.split(name, seed=3)
    sizes = [len(rows.targets) for rows in parts]
    assert sum(sizes) == len(table.targets)
    for rows, share in zip(parts, (0.6, 0.2, 0.2), strict=True):
        assert len(rows.targets) == pytest.approx(share * sum(sizes), abs=2)
        assert int(rows.targets.sum()) == pytest.approx(share * table.targets.sum(), abs=1)
        assert rows.features.isfinite().all()
    numbers = parts.train.features[:, : table.numbers.shape[1]]
    torch.testing.assert_close(numbers.mean(dim=0), torch.zeros(numbers.shape[1]), rtol=0, atol=0.05)  # clipped at 8
    # The statistics are those of the training rows alone.
    assert (parts.test.features[:, : table.numbers.shape[1]].mean(dim=0).abs() > 1e-3).any()
    assert not torch.equal(parts.train.features, data.split(name, seed=4).train.features)
    assert torch.equal(parts.train.features, data.split(name, seed=3).train.features)


def _best_column(data, source, monkeypatch):
    """The highest area under the ROC curve of any column alone."""
    monkeypatch.setitem(data.BINARY, "probe", source)
    data.load.cache_clear()
    table = data.load("probe")
    columns = np.concatenate([np.nan_to_num(table.numbers, nan=-1e9), table.indicators], axis=1)
    areas = [roc_auc_score(table.targets, column) for column in columns.T]
    return max(max(area, 1 - area) for area in areas)


def test_no_column_reveals_the_target(data, monkeypatch):
    for source in list(data.BINARY.values()):
        assert _best_column(data, source, monkeypatch) < 0.98, source.file
    # The control: what is left out does.
    for name in ("accidents-fatal", "flights-cancelled", "covid-tests"):
        assert _best_column(data, data.BINARY[name]._replace(dropped=()), monkeypatch) > 0.98, name


def test_tails_shrink_geometrically(data):
    targets = np.repeat(np.arange(5), [300, 250, 400, 260, 900])
    kept = data.tail_of(targets, 0.2, np.random.default_rng(0))
    sizes = np.bincount(targets[kept])
    expected = [250 * 0.2 ** (place / 4) for place in range(5)]
    assert sorted(sizes, reverse=True) == pytest.approx(expected, abs=0.5)
    assert len(np.unique(kept)) == len(kept)
    assert (np.bincount(targets[data.tail_of(targets, 0.2, np.random.default_rng(1))]) != sizes).any()


def test_weighted_cross_entropy_divides_by_the_sum_of_the_weights(scripts):
    methods = scripts("real_methods")
    logits, targets = torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([1, 0, 0])
    loss = methods.build("weighted CE", torch.tensor([0.1]), {})(logits, targets)
    two = torch.cat([torch.zeros_like(logits), logits], dim=1)
    expected = F.cross_entropy(two, targets, weight=torch.tensor([1 / 0.9, 1 / 0.1]))
    torch.testing.assert_close(loss, expected)
    several = methods.build("weighted CE", torch.tensor([0.9, 0.1]), {})(two, targets)
    torch.testing.assert_close(several, expected)
    # A term with a weight, and the control: without weights it is another loss.
    plain = methods.build("CE", torch.tensor([0.1]), {})(logits, targets)
    torch.testing.assert_close(plain, F.cross_entropy(two, targets))
    assert abs(plain - expected) > 0.1
    ranking = methods.build("SmoothAP", torch.tensor([0.1]), {})(logits, targets)
    both = methods.build("SmoothAP + weighted CE", torch.tensor([0.1]), {"ce": 0.3})(logits, targets)
    torch.testing.assert_close(both, ranking + 0.3 * expected)


def test_every_method_draws_its_own_trials_and_the_same_rates(scripts):
    methods = scripts("real_methods")
    for trial in range(4):
        drawn = {method: methods.draw(method, trial) for method in methods.TUNED}
        assert drawn == {method: methods.draw(method, trial) for method in methods.TUNED}
        assert len({config["lr"] for config in drawn.values()}) == 1
        assert all(len(config) > 1 for method, config in drawn.items() if method != methods.BASELINE)
    assert methods.draw("SmoothAP", 0) != methods.draw("SmoothAP", 1)


def test_all_methods_start_equal_and_see_the_same_batches(scripts, data):
    runs = scripts("real_runs")
    rows = data.split("satimage-4", 0).train

    def seen(method):
        job, batches, models = runs.Job("satimage-4", 0, method, {"lr": 0.01}, (3,), 64), [], []

        def loss(logits, targets):
            batches.append(targets)
            return 0 * logits.sum()

        runs.train(rows, loss, job, 1, (3,), lambda step, model: models.append(model(rows.features[:9])))
        return torch.cat([*batches, models[0][:, 0]])

    assert torch.equal(seen("CE"), seen("SmoothAP"))
    assert len(seen("CE")) == 3 * 64 + 9


def test_several_classes_are_evaluated_one_against_the_rest(scripts):
    runs = scripts("real_runs")
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(60, 3, generator=generator), torch.arange(60) % 7 % 3
    found = runs.evaluate_classes(logits, targets)
    each = [average_precision_score(targets == label, logits[:, label]) for label in range(3)]
    assert found["macro_ap_logits"] == pytest.approx(np.mean(each))
    hits = logits.argmax(dim=1) == targets
    accuracy = np.mean([hits[targets == label].double().mean() for label in range(3)])
    assert found["balanced_accuracy"] == pytest.approx(accuracy)
    # A constant per class changes no ranking of the logits, and one per row no probability.
    by_class = runs.evaluate_classes(logits + torch.tensor([5.0, 0.0, 0.0]), targets)
    assert by_class["macro_ap_logits"] == pytest.approx(found["macro_ap_logits"])
    assert by_class["balanced_accuracy"] == pytest.approx(1 / 3, abs=0.1)
    assert by_class["macro_ap_softmax"] != pytest.approx(found["macro_ap_softmax"], abs=1e-3)
    by_row = runs.evaluate_classes(logits + torch.randn(60, 1, generator=generator), targets)
    assert by_row["macro_ap_softmax"] == pytest.approx(found["macro_ap_softmax"])
    assert by_row["balanced_accuracy"] == found["balanced_accuracy"]
    assert by_row["macro_ap_logits"] != pytest.approx(found["macro_ap_logits"], abs=1e-3)
