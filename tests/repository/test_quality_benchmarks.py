"""The benchmarks of quality and of the gradient's scale: they run, and what they compute with is right.

Whether a loss wins is not looked at: a few steps say nothing about that.
"""

import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import run_script
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SVG = b"<?xml"


@pytest.fixture(scope="module")
def scripts():
    """A function that imports a script of the folder by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module


def _main(module, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__name__, "--quick", *map(str, arguments)])
        module.main()


@pytest.fixture(scope="module")
def quality(scripts, tmp_path_factory):
    """The folder with the results of a quick run and its cache."""
    folder = tmp_path_factory.mktemp("quality")
    _main(scripts("quality"), "--cache", folder / "cache.jsonl", "--out", folder)
    return folder


def _tasks(folder):
    return json.loads((folder / "quality.json").read_text())["tasks"]


def test_gradient_scale_tells_who_is_off(tmp_path):
    done = run_script(FOLDER / "gradient_scale.py", "--quick", "--out", tmp_path, cwd=tmp_path, limit_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["key"]: row for row in json.loads((tmp_path / "gradient_scale.json").read_text())["gradient_scale"]}
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


def test_quality_writes_every_method(quality, scripts):
    methods = list(scripts("quality_methods").METHODS)
    assert [task["task"] for task in _tasks(quality)] == ["fraud", "digits"]
    for task in _tasks(quality):
        assert [row["method"] for row in task["methods"]] == methods
        for row in task["methods"]:
            assert all(len(row[metric]["seeds"]) == 2 for metric in ("ap", "recall", "pauc"))
    assert (quality / "quality.svg").read_bytes().startswith(SVG)
    (fraud, _) = _tasks(quality)
    assert set(scripts("quality_figure").REFERENCES) < set(fraud["references"])


def test_quality_continues_from_its_cache(quality, scripts, tmp_path):
    lines = (quality / "cache.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 16 * 3 + 3 * 2  # tasks, methods, a trial and two seeds; three references of the fraud task
    interrupted = tmp_path / "cache.jsonl"
    interrupted.write_text("\n".join(lines[:-5]) + "\n")
    _main(scripts("quality"), "--cache", interrupted, "--out", tmp_path)
    assert sorted(interrupted.read_text().splitlines()) == sorted(lines)
    assert _tasks(tmp_path) == _tasks(quality)
    # The control: what stands in the cache is what is reported.
    record = json.loads(lines[-1])
    record["figures"]["ap"] += 0.5
    interrupted.write_text("\n".join([*lines[:-1], json.dumps(record)]) + "\n")
    _main(scripts("quality"), "--cache", interrupted, "--out", tmp_path)
    assert _tasks(tmp_path) != _tasks(quality)


def test_queue_scale_writes_every_capacity(quality, scripts, tmp_path):
    losses = list(scripts("quality_methods").RANKING)
    _main(scripts("queue_scale"), "--losses", *losses, "--quality", quality / "quality.json", "--out", tmp_path)
    rows = json.loads((tmp_path / "queue_scale.json").read_text())["queue_scale"]
    found = [(row["loss"], row["capacity"]) for row in rows]
    assert found == [(loss, rows) for loss in losses for rows in (0, 1_000)]
    assert all(row["recall"]["gain"] == 0 for row in rows if row["capacity"] == 0)
    assert (tmp_path / "quality_queue.svg").read_bytes().startswith(SVG)


def test_intervals_are_of_the_differences(scripts):
    runs = scripts("quality_runs")
    gain = runs.paired([0.5, 0.7, 0.9], [0.4, 0.6, 0.7])  # 0.1, 0.1, 0.2
    # Standard deviation 0.1 / sqrt(3), of the mean of three a third of 0.1; Student's t of 2 degrees is 4.302653.
    assert gain.mean == pytest.approx(0.4 / 3)
    assert gain.width == pytest.approx(4.302653 * 0.1 / 3, rel=1e-6)
    assert gain.sign == "0"  # 0.133 +- 0.143
    assert runs.paired([0.5, 0.7, 0.9], [0.4, 0.6, 0.79]).sign == "+"
    assert runs.paired([0.4, 0.6, 0.79], [0.5, 0.7, 0.9]).sign == "-"
    # The control: the interval of the values is another one.
    assert runs.Interval.of([0.5, 0.7, 0.9]).width > 3 * gain.width
    assert math.isnan(runs.Interval.of([0.5]).width)
    with pytest.raises(ValueError, match="shorter"):
        runs.paired([0.5, 0.7], [0.4])


@pytest.fixture(scope="module")
def fraud(scripts):
    return scripts("quality_data").make_fraud(400_000, seed=1)


def test_fraud_has_the_stated_shares(fraud):
    assert [len(rows.targets) for rows in fraud] == [200_000, 80_000, 120_000]
    for rows in fraud:
        count = len(rows.targets)
        for kind, share in ((1, 0.003), (-1, 0.01)):
            found = (rows.kinds == kind).double().mean().item()
            assert abs(found - share) < 5 * math.sqrt(share / count)  # five standard deviations
        assert torch.equal(rows.targets == 1, rows.kinds == 1)


def _auc(features, kinds, column):
    suspicious = kinds != 0
    return roc_auc_score((kinds[suspicious] == 1).numpy(), column(features[suspicious].numpy()))


def test_only_the_product_tells_positives_from_decoys(fraud):
    train, test = fraud.train, fraud.test
    suspicious = train.kinds != 0
    linear = LogisticRegression(max_iter=1_000)
    linear.fit(train.features[suspicious].numpy(), (train.kinds[suspicious] == 1).numpy())
    # 360 positives and 1,200 decoys: the standard deviation of an area of one half is 0.018.
    assert abs(_auc(test.features, test.kinds, linear.decision_function) - 0.5) < 0.09
    assert _auc(test.features, test.kinds, lambda x: x[:, 4] * x[:, 5]) > 0.85
    # The control: a product of two other features does not.
    assert abs(_auc(test.features, test.kinds, lambda x: x[:, 4] * x[:, 6]) - 0.5) < 0.09


def test_decoys_are_at_the_operating_point(fraud, scripts):
    rows = fraud.test
    top = scripts("quality_data").linear_scores(rows.features).topk(len(rows.targets) // 200).indices
    assert (rows.kinds[top] == -1).double().mean() > 0.5
    assert (rows.kinds[top] == 1).double().mean() < 0.4
    assert (rows.kinds[top] == 0).double().mean() < 0.1


def test_best_scores_are_the_likelihood_ratio(fraud, scripts):
    rows = fraud.test.take(slice(0, 2_000))
    x = rows.features.double()

    def log_density(shift, correlation):
        mean, covariance = torch.zeros(20, dtype=torch.float64), torch.eye(20, dtype=torch.float64)
        mean[:4] = shift / 2
        covariance[4, 5] = covariance[5, 4] = correlation
        return torch.distributions.MultivariateNormal(mean, covariance).log_prob(x)

    decoys, rest = log_density(4, -0.9), log_density(0, 0)
    others = torch.logaddexp(decoys + math.log(0.01), rest + math.log(0.987))
    best = scripts("quality_data").best_scores(rows.features)
    torch.testing.assert_close(best, log_density(4, 0.9) - others, rtol=1e-9, atol=1e-9)
    # The control: without the cue it is another score.
    assert (best - (log_density(4, 0) - others)).abs().max() > 1


def test_digits_are_disjoint_and_rare(scripts):
    splits = scripts("quality_data").make_digits(3)
    for rows in (splits.train, splits.test):
        assert (len(rows.targets), int(rows.targets.sum())) == (836, 25)
    distances = torch.cdist(splits.train.features, splits.test.features, compute_mode="donot_use_mm_for_euclid_dist")
    assert distances.min() > 0


def test_every_method_draws_its_own_trials_and_the_same_rates(scripts):
    methods = scripts("quality_methods")
    for trial in range(5):
        drawn = {method: methods.draw(method, trial) for method in methods.METHODS}
        assert drawn == {method: methods.draw(method, trial) for method in methods.METHODS}
        assert len({config["lr"] for config in drawn.values()}) == 1
        for method, config in drawn.items():
            assert ("queue_size" in config) == ("queue" in method)
            assert ("warmup_share" in config) == ("warm-up" in method)
    assert methods.draw("SmoothAP", 0) != methods.draw("SmoothAP", 1)
    assert methods.draw("SmoothAP", 0)["temperature"] != methods.draw("RecallAtQuantile", 0)["temperature"]


def test_hard_negatives_are_the_highest(scripts):
    loss = scripts("quality_methods").hard_negative_loss(0.5)
    scores, targets = torch.tensor([1.0, -2.0, 3.0, 0.5, -1.0]), torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    softplus = [math.log1p(math.exp(x)) for x in (-1.0, 3.0, 0.5)]  # the positive, the upper two of four negatives
    assert loss(scores, targets).item() == pytest.approx(sum(softplus) / 3, rel=1e-6)
    assert scripts("quality_methods").hard_negative_loss(0.75)(scores, targets).item() != pytest.approx(
        sum(softplus) / 3, rel=1e-3
    )


def test_scores_that_are_not_finite_rank_nothing(scripts):
    runs = scripts("quality_runs")
    targets = torch.tensor([1, 0, 0, 1])
    assert set(runs.evaluate(torch.tensor([1.0, 0.0, math.nan, 2.0]), targets, 0.5).values()) == {0.0}
    assert runs.evaluate(torch.tensor([1.0, 0.0, -1.0, 2.0]), targets, 0.5) == pytest.approx(
        {"ap": 1.0, "recall": 1.0, "pauc": 1.0}
    )


def test_ties_win_nothing(scripts):
    runs = scripts("quality_runs")
    targets = (torch.arange(1_000) % 10 == 0).long()
    constant = runs.evaluate(torch.zeros(1_000), targets, 0.05)
    assert constant["recall"] == pytest.approx(0.05)  # 50 rows of 1,000 at random
    # Half of the budget is the top 25 positives, the other half is drawn from 975 tied rows with 75 positives.
    top = torch.zeros(1_000)
    top[targets.nonzero()[:25, 0]] = 1.0
    assert runs.evaluate(top, targets, 0.05)["recall"] == pytest.approx((25 + 25 / 975 * 75) / 100)
    # The controls: the metric itself reviews all ties, and without them nothing is changed.
    metric = runs.RecallAtQuantile(1, 0.05)
    metric.update(torch.zeros(1_000, 1), targets)
    assert metric.compute() == 1
    scores = torch.randn(1_000, generator=torch.Generator().manual_seed(0))
    metric.reset()
    metric.update(scores[:, None], targets)
    assert runs.evaluate(scores, targets, 0.05)["recall"] == metric.compute()


def test_runs_repeat(scripts):
    runs, methods, data = scripts("quality_runs"), scripts("quality_methods"), scripts("quality_data")
    rows, setting = data.make_digits(1), runs.Setting(0.05, 3, 64)
    config = methods.draw("SmoothAP + queue + warm-up", 0)

    def scores(seed):
        loss = methods.build("SmoothAP + queue + warm-up", config, setting.budget, setting.steps)
        return runs.score(runs.train(rows.train, loss, 1e-2, setting, seed), rows.test.features)

    assert torch.equal(scores(1), scores(1))
    assert not np.allclose(scores(1), scores(2))
