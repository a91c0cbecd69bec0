"""The classifier of scikit-learn: its interface, what it optimises, and that it is one of the candidates it chooses."""

import importlib
import pickle
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy import optimize, sparse
from sklearn.base import clone
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import validation
from sklearn.utils.class_weight import compute_class_weight, compute_sample_weight
from sklearn.utils.estimator_checks import check_estimator

from fullrank.integrations import sklearn
from fullrank.integrations.sklearn import AveragePrecisionClassifier

Rows = tuple[np.ndarray, np.ndarray]
NAME = "averageprecisionclassifier"


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


def test_an_older_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(validation, "validate_data")
    monkeypatch.setattr("sklearn.__version__", "1.5.2")
    with pytest.raises(ImportError, match=r"expected scikit-learn >= 1\.6, got 1\.5\.2\. Run `pip install"):
        importlib.reload(sklearn)


def test_a_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"expected scikit-learn >= 1\.6, got none\. Run `pip install"):
        importlib.reload(sklearn)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:AveragePrecisionClassifier. positive class")
def test_scikit_learn_accepts_it() -> None:
    # A row of weight 2 is held out as one row, so that ten rows written out are split otherwise.
    names = (f"check_sample_weight_equivalence_on_{kind}_data" for kind in ("dense", "sparse"))
    failing = dict.fromkeys(names, "rows are held out")
    model = AveragePrecisionClassifier(Cs=(0.1, 10.0), max_iter=2)
    check_estimator(model, on_skip=None, expected_failed_checks=failing, on_fail="raise")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_names_of_classes_a_table_with_gaps_a_search_and_a_pickle(rows: Rows) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(rows[0] * 100, columns=list("abcd"))
    table = table.mask(np.random.default_rng(0).random(table.shape) < 0.02)
    classes = pandas.Series(np.where(rows[1] == "yes", "fraud", "ok"))  # the rarer class is the first in sorted order
    model = AveragePrecisionClassifier(Cs=(1.0,), random_state=0)
    search = GridSearchCV(make_pipeline(SimpleImputer(), StandardScaler(), model), {f"{NAME}__max_iter": [0, 20]}, cv=3)
    search.fit(table[:3000], classes[:3000])
    test, positive = table[3000:], classes[3000:] == "fraud"
    search = pickle.loads(pickle.dumps(search))
    best = search.best_estimator_.named_steps[NAME]
    assert (best.pos_label_, best.classes_.tolist(), best.max_iter) == ("fraud", ["fraud", "ok"], 20)
    probabilities = search.predict_proba(test)[:, 0]
    average_precision = average_precision_score(positive, probabilities)
    assert search.score(test, classes[3000:]) == pytest.approx(average_precision)
    # The same rows as numbers, of which the greater one is positive: the same model with the other sign.
    numbers = clone(search.best_estimator_).fit(table[:3000], classes[:3000] == "fraud")
    np.testing.assert_allclose(numbers.decision_function(test), -search.decision_function(test), rtol=1e-9)
    # Trained on the frequent class it is not the same, so the comparison can fail.
    other = clone(search.best_estimator_).set_params(**{f"{NAME}__pos_label": "ok"})
    with pytest.warns(UserWarning, match="positive class 'ok' has 95% of the weight.* pass pos_label='fraud'"):
        other.fit(table[:3000], classes[:3000])
    assert average_precision_score(positive, other.predict_proba(test)[:, 0]) < average_precision - 0.01


# Classes, the others and the rarer tenth of the rows, and which is the positive one; the frequent one warns.
POSITIVE: list[tuple[tuple[Any, Any], Any]] = [
    ((0, 1), 1),
    ((1, 0), 1),
    ((1, -1), 1),
    ((True, False), True),
    ((1, 2), 2),
    ((2, 1), 1),
    (("0", "1"), "1"),
    (("1", "0"), "0"),
]


@pytest.mark.parametrize(("classes", "positive"), POSITIVE)
def test_the_positive_class(rows: Rows, classes: tuple[Any, Any], positive: Any) -> None:
    features, y = rows[0][:500], np.array(classes)[(np.arange(500) % 10 == 0).astype(int)]
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        model = AveragePrecisionClassifier(Cs=(1.0,), max_iter=0, random_state=0).fit(features, y)
    assert (model.pos_label_, type(model.pos_label_)) == (positive, type(positive))
    assert len(given) == (positive == classes[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # balanced weights are equal up to rounding
        assert model.fit(features, y, compute_sample_weight("balanced", y)).pos_label_ == positive


def test_equal_classes_have_the_second_as_positive(rows: Rows) -> None:
    y = np.array(["a", "b"])[np.arange(500) % 2]
    assert AveragePrecisionClassifier(Cs=(1.0,), max_iter=0).fit(rows[0][:500], y).pos_label_ == "b"


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 1])
def test_weights_are_rows_written_out(rows: Rows, kept: int) -> None:
    features, classes = rows[0][:600], rows[1][:600]
    validation, weights = (rows[0][3000:5000], rows[1][3000:5000]), np.random.default_rng(0).integers(kept, 3, 600)
    make = partial(AveragePrecisionClassifier, Cs=(0.1,), max_iter=20)
    weighted = make().fit(features, classes, weights, validation=validation)
    written = make().fit(np.repeat(features, weights, axis=0), np.repeat(classes, weights), validation=validation)
    equal = make().fit(features, classes, validation=validation)
    # Two regressions that stop at a gradient of 1e-4.
    np.testing.assert_allclose(weighted.validation_scores_[0], written.validation_scores_[0], rtol=1e-3)
    np.testing.assert_allclose(weighted.coef_, written.coef_, atol=0.01)
    assert np.abs(equal.coef_ - written.coef_).max() > 0.03
    # Rows of validation: the same metric, calibration and choice.
    weights = np.random.default_rng(1).integers(kept, 3, 2000)
    weighted = make().fit(features, classes, validation=(*validation, weights))
    written = make().fit(features, classes, validation=[np.repeat(part, weights, axis=0) for part in validation])
    np.testing.assert_allclose(weighted.validation_scores_, written.validation_scores_, rtol=1e-9)
    np.testing.assert_allclose(weighted.intercept_, written.intercept_, rtol=1e-4)
    assert not np.allclose(equal.validation_scores_, written.validation_scores_, rtol=1e-3)


def test_rows_of_a_group_are_held_out_together(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[Any] = []
    split = AveragePrecisionClassifier._split

    def spy(model: AveragePrecisionClassifier, kept: Any, groups: np.ndarray | None) -> Any:
        parts.append(split(model, kept, groups))
        return parts[-1]

    monkeypatch.setattr(AveragePrecisionClassifier, "_split", spy)
    features, classes = rows[0][:1000].copy(), rows[1][:1000]
    features[:, 3] = groups = np.arange(1000) % 50
    weights = (np.arange(1000) % 7 > 0) * 1.0
    for own in (groups, None):
        AveragePrecisionClassifier(Cs=(1.0,), max_iter=1, random_state=0).fit(features, classes, weights, groups=own)
    (training, held_out), (_, drawn) = parts
    assert not set(training.X[:, 3]) & set(held_out.X[:, 3])
    assert len(set(drawn.X[:, 3])) == 50  # of every group some
    assert len(training.targets) + len(held_out.targets) == weights.sum()


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["recall", "partial_auc"])
def test_the_objective_chooses(rows: Rows, objective: str) -> None:
    features, classes = rows
    train, held_out, positive = slice(0, 3000), slice(3000, 9000), classes[3000:] == "yes"
    model = AveragePrecisionClassifier(objective=objective, budget=0.03)
    model.fit(features[train], classes[train], validation=(features[held_out], classes[held_out]))
    scores = model.decision_function(features[held_out])
    if objective == "recall":
        expected = positive[np.argsort(-scores)[:180]].sum() / positive.sum()
    else:
        expected = roc_auc_score(positive, scores, max_fpr=0.03)
    assert model.validation_scores_[model.best_iter_] == model.validation_scores_.max() == pytest.approx(expected)
    assert model.best_iter_ > 0
    assert model.score(features[held_out], classes[held_out]) == pytest.approx(expected)
    weights = 1.0 + np.arange(6000) % 3
    written = np.repeat(features[held_out], weights.astype(int), axis=0), np.repeat(positive, weights.astype(int))
    weighted = model.score(features[held_out], classes[held_out], weights)
    assert weighted == pytest.approx(model.score(written[0], np.where(written[1], "yes", "no"))) != expected


def test_recall_of_equal_scores_is_the_budget() -> None:
    targets, weights = np.array([0, 1, 0, 1]), np.array([1.0, 2.0, 3.0, 4.0])
    assert sklearn.OBJECTIVES["recall"](targets, np.zeros(4), weights, 0.25) == pytest.approx(0.25)
    # 40 % of the weight is the last row alone.
    assert sklearn.OBJECTIVES["recall"](targets, np.arange(4.0), weights, 0.4) == pytest.approx(4 / 6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:AveragePrecisionClassifier. positive class")
@pytest.mark.parametrize(("class_weight", "pos_label"), [("balanced", "yes"), ({"no": 1, "yes": 20}, "no")])
def test_class_weights_multiply_those_of_rows(rows: Rows, class_weight: Any, pos_label: str) -> None:
    features, classes = rows[0][:2000], rows[1][:2000]
    validation, weights = (rows[0][2000:5000], rows[1][2000:5000]), np.random.default_rng(0).random(2000)
    make = partial(AveragePrecisionClassifier, Cs=(0.01,), max_iter=5, pos_label=pos_label)
    model = make(class_weight=class_weight).fit(features, classes, weights, validation=validation)
    of_class = compute_class_weight(class_weight, classes=np.array(["no", "yes"]), y=classes)
    all_weights = [of_class[(labels == "yes").astype(int)] for labels in (classes, validation[1])]
    written = make(class_weight=None).fit(
        features, classes, weights * all_weights[0], validation=(*validation, all_weights[1])
    )
    equal = make(class_weight=None).fit(features, classes, weights, validation=validation)
    np.testing.assert_allclose(model.coef_, written.coef_, rtol=1e-12)
    np.testing.assert_allclose(model.intercept_, written.intercept_, rtol=1e-12)
    assert np.abs(equal.intercept_ - written.intercept_) > 1


def test_the_regression_may_be_balanced(rows: Rows) -> None:
    features, classes = rows[0][:2000], rows[1][:2000]
    regression = LogisticRegression(C=1e-4, class_weight="balanced").fit(features, classes)
    scores = regression.decision_function(rows[0][2000:])
    validation = rows[0][2000:], np.where(scores > np.quantile(scores, 0.9), "yes", "no")
    models = [AveragePrecisionClassifier(Cs=(1e-4,), class_weight=kind, max_iter=0) for kind in ("auto", None)]
    auto, equal = (model.fit(features, classes, validation=validation) for model in models)
    assert auto.is_balanced_
    assert not equal.is_balanced_
    assert auto.validation_scores_[0] == pytest.approx(1, abs=1e-9)
    assert equal.validation_scores_[0] < 0.99999


def test_verbose_prints_the_start_each_iteration_and_the_result(rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in range(3):
        model = AveragePrecisionClassifier(Cs=(1.0,), max_iter=3, random_state=0, verbose=verbose)
        model.fit(rows[0][:500], rows[1][:500])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == (0, 2, 1 + model.n_iter_)[verbose]
    assert "average_precision" in lines[0]
    assert lines[-1].endswith(f"kept: iteration {model.best_iter_} of {model.n_iter_ - 1}")


# Of the estimator, and of `fit`.
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"Cs": wrong}, "^Cs: expected .* got ") for wrong in ((), np.zeros(0), 0.01)),
    ({"pos_label": "maybe"}, "pos_label: expected one of 'no', 'yes', got 'maybe'"),
    ({"max_iter": -1}, "^max_iter: expected .* got "),
    ({"objective": "auc"}, "^objective: expected .* got "),
    *(({"budget": budget}, f"^budget: expected .*between 0 and 1, got {budget}\\.$") for budget in (0, 1, 101, 1.0)),
    ({"budget": 5}, r"between 0 and 1, got 5\. 5 % is 0\.05\.$"),
    ({"budget": 100}, r"between 0 and 1, got 100\. 100 % is 1\.$"),
    ({"sample_weight": -np.ones(200)}, "sample_weight: expected numbers >= 0, got -1"),
    ({"sample_weight": np.ones((200, 1))}, r"sample_weight: expected shape \(N,\), got \(200, 1\)"),
    ({"groups": np.zeros(199)}, "inconsistent numbers of samples"),
    ({"groups": np.zeros(200)}, "groups"),
    ({"groups": np.arange(200), "validation": (np.zeros((2, 4)), ["no", "yes"])}, "Pass one of them"),
    ({"validation": (np.zeros((2, 4)), ["no", "maybe"])}, r"y: expected .* got \['maybe'\]"),
    ({"validation": (np.zeros((2, 3)), ["no", "yes"])}, "3 features"),
    ({"validation": (np.zeros((2, 4)), ["no", "no"])}, "1 class"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_does_not_fit_is_refused(rows: Rows, arguments: dict[str, Any], message: str) -> None:
    own = {name: value for name, value in arguments.items() if name in AveragePrecisionClassifier().get_params()}
    of_rows = {name: value for name, value in arguments.items() if name not in own}
    with pytest.raises(ValueError, match=message):
        AveragePrecisionClassifier(**own).fit(rows[0][:200], rows[1][:200], **of_rows)


@pytest.mark.parametrize("number", [1, 2])
def test_too_few_positives_to_hold_some_out_are_refused(rows: Rows, number: int) -> None:
    with pytest.raises(ValueError, match=rf"rows: expected .* got {number} of the rarer class\. Pass validation="):
        AveragePrecisionClassifier(random_state=0).fit(rows[0][:200], np.arange(200) < number)
