"""The classifier of scikit-learn: its interface, what it optimises, and that it is one of the candidates it chooses."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import optimize, sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, brier_score_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from fullrank.integrations import sklearn
from fullrank.integrations.sklearn import AveragePrecisionClassifier

Rows = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Return rows whose first feature finds a third of the positives alone, and whose second has negative outliers.

    Cross-entropy follows the second, which most positives have. It costs little that the outliers come first, and the
    average precision a lot.
    """
    rng = np.random.default_rng(0)
    features, draws = rng.normal(size=(9000, 4)), rng.random(9000)
    features[draws < 0.02, 0] += 3
    features[(draws >= 0.02) & (draws < 0.06), 1] += 2
    features[draws > 0.985, 1] += 5
    return features, np.where(draws < 0.06, "yes", "no")


def test_scikit_learn_accepts_it() -> None:
    check_estimator(AveragePrecisionClassifier(Cs=(0.1, 10.0), max_iter=10), on_skip=None)


def test_average_precision_rises_above_that_of_the_regression(rows: Rows) -> None:
    features, classes = rows
    model = AveragePrecisionClassifier(random_state=0).fit(features[:3000], classes[:3000])
    start = AveragePrecisionClassifier(random_state=0, max_iter=0).fit(features[:3000], classes[:3000])
    assert model.best_iter_ > 0 == start.best_iter_
    test, positive = features[3000:], classes[3000:] == "yes"
    before, after = (average_precision_score(positive, each.decision_function(test)) for each in (start, model))
    assert after > before + 0.02
    regression = LogisticRegression(class_weight="balanced").fit(features[:3000], classes[:3000])
    assert after > average_precision_score(positive, regression.decision_function(test)) + 0.02


def test_it_optimises_with_the_slope_of_its_objective(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(objective: Callable[[np.ndarray], tuple[float, np.ndarray]], start: np.ndarray, **_: object) -> None:
        slope = optimize.approx_fprime(start, lambda weights: objective(weights)[0], 1e-6)
        np.testing.assert_allclose(objective(start)[1], slope, rtol=1e-3, atol=1e-6)

    monkeypatch.setattr(sklearn, "minimize", check)
    AveragePrecisionClassifier(Cs=(1e-3,), random_state=0).fit(rows[0][:500], rows[1][:500])


def test_sparse_rows_give_the_same_model(rows: Rows) -> None:
    features, classes = rows
    kept = np.where(np.abs(features) > 1, features, 0)[:2000]
    dense, thin = (
        AveragePrecisionClassifier(Cs=(1.0,), random_state=0).fit(each, classes[:2000])
        for each in (kept, sparse.csr_array(kept))
    )
    # Two regressions that stop at a gradient of 1e-4.
    np.testing.assert_allclose(dense.decision_function(kept), thin.decision_function(kept), rtol=0.02, atol=0.02)


def test_probabilities_are_calibrated_and_keep_the_order(rows: Rows) -> None:
    features, classes = rows
    model = AveragePrecisionClassifier(random_state=0).fit(features[:3000], classes[:3000])
    test, positive = features[3000:], classes[3000:] == "yes"
    probabilities = model.predict_proba(test)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert abs(probabilities[:, 1].mean() - positive.mean()) < 0.02
    assert brier_score_loss(positive, probabilities[:, 1]) < positive.mean() * (1 - positive.mean())  # of a constant
    assert (np.diff(probabilities[np.argsort(model.decision_function(test)), 1]) >= 0).all()


def test_it_works_in_a_pipeline_and_in_a_search(rows: Rows) -> None:
    features, classes = rows
    pipeline = make_pipeline(StandardScaler(), AveragePrecisionClassifier(Cs=(1.0,), random_state=0))
    grid = {"averageprecisionclassifier__max_iter": [0, 20]}
    search = GridSearchCV(pipeline, grid, scoring="average_precision", cv=3)
    search.fit(features[:3000] * 100, classes[:3000] == "yes")
    assert search.best_params_ == {"averageprecisionclassifier__max_iter": 20}


@pytest.mark.parametrize(("name", "value"), [("Cs", ()), ("Cs", np.zeros(0)), ("max_iter", -1)])
def test_arguments_that_do_not_fit(rows: Rows, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected .* got "):
        AveragePrecisionClassifier(**{name: value}).fit(rows[0][:200], rows[1][:200])
