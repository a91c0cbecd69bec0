"""scikit-learn: a linear model of two classes that is trained on a metric of its ranking."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import Words, check_choice, check_share, expected, warn
from ..losses import SmoothAPLoss

try:
    from scipy.optimize import minimize  # type: ignore[import-untyped]
    from sklearn.base import BaseEstimator, ClassifierMixin  # type: ignore[import-untyped]
    from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve  # type: ignore[import-untyped]
    from sklearn.model_selection import StratifiedGroupKFold, train_test_split  # type: ignore[import-untyped]
    from sklearn.utils import check_array, check_consistent_length  # type: ignore[import-untyped]
    from sklearn.utils.class_weight import compute_class_weight  # type: ignore[import-untyped]
    from sklearn.utils.multiclass import type_of_target  # type: ignore[import-untyped]
    from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
except ImportError as error:
    got = Words(getattr(sys.modules.get("sklearn"), "__version__", "none"))
    fix = "Run `pip install -U scikit-learn`, or install fullrank with its extra `scikit-learn`."
    raise ImportError(expected("fullrank.integrations.sklearn", "scikit-learn >= 1.6", got, fix)) from error

CS = tuple(10.0**power for power in range(-4, 5))


class _Rows(NamedTuple):
    """Rows (N, F), 1 for the positive class (N,), and weights (N,)."""

    X: Any
    targets: np.ndarray
    weights: np.ndarray

    def take(self, index: np.ndarray) -> _Rows:
        return _Rows(self.X[index], self.targets[index], self.weights[index])


def _column(name: str, values: Any, X: Any, dtype: Any = None) -> np.ndarray:
    """Return one value a row as an array (N,)."""
    column: np.ndarray = check_array(values, ensure_2d=False, dtype=dtype, input_name=name)
    if column.ndim != 1:
        raise ValueError(f"{name}: expected shape (N,), got {column.shape}")
    check_consistent_length(X, column)
    return column


def _weights(X: Any, sample_weight: Any = None) -> np.ndarray:
    """Return the weights of the rows (N,), all 1 without ``sample_weight``."""
    weights = np.ones(X.shape[0]) if sample_weight is None else _column("sample_weight", sample_weight, X, np.float64)
    if (weights < 0).any():
        raise ValueError(expected("sample_weight", "numbers >= 0", float(weights.min())))
    return weights


def _recall(targets: np.ndarray, scores: np.ndarray, weights: np.ndarray, budget: float) -> float:
    """Return the share of positives among the ``budget`` of the rows with the highest scores; ties share it."""
    alarms, hits, _ = roc_curve(targets, scores, sample_weight=weights, drop_intermediate=False)
    share = np.average(targets, weights=weights)
    return float(np.interp(budget, share * hits + (1 - share) * alarms, hits))


# Each metric of targets, scores and weights of rows, and of the budget.
OBJECTIVES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, float], float]] = {
    "average_precision": lambda y, scores, w, _: average_precision_score(y, scores, sample_weight=w),
    "recall": _recall,
    "partial_auc": lambda y, scores, w, budget: roc_auc_score(y, scores, sample_weight=w, max_fpr=budget),
}


class AveragePrecisionClassifier(ClassifierMixin, BaseEstimator):
    """A linear model of two classes that starts from a logistic regression and is trained on average precision.

    The start is the best logistic regression over ``Cs`` and class weights. L-BFGS then minimises
    :class:`~fullrank.SmoothAPLoss` at its automatic temperature, with the L2 penalty of the regression. The weights of
    the best iteration are kept, which may be those of the regression. Every choice is made by the metric ``objective``
    on rows that are held out; a slope and an offset fitted to them turn scores into probabilities (Platt scaling).

    Args:
        objective: the metric that chooses: ``"average_precision"``; ``"recall"``, the share of the positives among the
            ``budget`` of the rows with the highest scores; or ``"partial_auc"``, the area under the ROC curve to a
            false-positive rate of ``budget``.
        budget: in (0, 1), for ``"recall"`` and ``"partial_auc"``.
        pos_label: the positive class. None: 1 or True of classes 0 and 1, -1 and 1 or bool, else the class of fewer
            rows. A warning says when it has more than half of the weight.
        Cs: inverse strengths of L2 to try.
        class_weight: None, ``"balanced"`` or a weight for each class, which multiply ``sample_weight``. The default,
            ``"auto"``, has equal weights, and tries balanced ones for the regression alone.
        max_iter: iterations of L-BFGS; 0 keeps the regression.
        validation_fraction: share of the rows of each class that is held out.
        random_state: seed or generator that chooses these rows.
        verbose: 1 prints the start and the result, 2 each iteration too.

    Attributes:
        classes_: (2,), sorted.
        pos_label_: the positive class.
        coef_, intercept_: (1, F) and (1,), of the log-odds of the second class, which ``decision_function`` returns.
        best_iter_: the iteration whose weights are kept, 0 for those of the regression.
        n_iter_: the number of iterations whose weights were compared, the regression included.
        validation_scores_: (n_iter_,) the metric of each on the held-out rows.
        C_, is_balanced_: the regression that was the best, and whether ``"auto"`` gave it balanced weights.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(500, 3))
        >>> model = AveragePrecisionClassifier(random_state=0).fit(X, X[:, 0] > 1.5)
        >>> model.predict_proba(X).shape
        (500, 2)
    """

    def __init__(
        self,
        *,
        objective: str = "average_precision",
        budget: float = 0.05,
        pos_label: Any = None,
        Cs: Sequence[float] = CS,
        class_weight: str | Mapping[Any, float] | None = "auto",
        max_iter: int = 60,
        validation_fraction: float = 0.25,
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.objective = objective
        self.budget = budget
        self.pos_label = pos_label
        self.Cs = Cs
        self.class_weight = class_weight
        self.max_iter = max_iter
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.sparse = True
        return tags

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None, validation: Sequence[Any] | None = None
    ) -> AveragePrecisionClassifier:
        """Train on rows (N, F), dense or sparse, and their classes (N,).

        Args:
            X, y: the rows and their classes, two in all.
            sample_weight: (N,) numbers >= 0, for the regression, the loss, the metric and the probabilities. Rows of
                weight 0 are left out. A row of weight 2 is two rows that are trained on, or held out, together.
            groups: (N,) labels, such as patients: all rows of a group are held out, or none.
            validation: (X, y) or (X, y, sample_weight), rows to hold out; then all rows of ``X`` are trained on.
        """
        if self.max_iter < 0:
            raise ValueError(expected("max_iter", "an int >= 0", self.max_iter))
        if np.ndim(self.Cs) != 1 or not len(self.Cs):
            raise ValueError(expected("Cs", "a sequence of numbers > 0, such as (0.1, 1.0)", self.Cs))
        check_share("budget", self.budget)
        metric = OBJECTIVES[check_choice("objective", self.objective, tuple(OBJECTIVES))]
        if groups is not None and validation is not None:
            raise ValueError("groups and validation both say which rows are held out. Pass one of them.")
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        if (kind := type_of_target(y, input_name="y", raise_unknown=True)) != "binary":
            raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
        self.classes_ = np.unique(y)
        if len(self.classes_) == 1:
            raise ValueError("y has 1 class; average precision needs rows of two")
        row_weights = _weights(X, sample_weight)
        self.pos_label_ = self._positive(y, row_weights)
        self._sign = 1 if self.pos_label_ == self.classes_[1] else -1  # scikit-learn's scores are of the second class
        training, kept = self._rows(X, y, row_weights)
        if validation is None:
            training, held_out = self._split(training, None if groups is None else _column("groups", groups, X)[kept])
        else:
            X, y, *rest = validation
            X, y = validate_data(self, X, y, reset=False, accept_sparse="csr", dtype=np.float64)
            held_out, _ = self._rows(X, y, _weights(X, *rest))
        if self.class_weight != "auto":
            classes = self.classes_[:: self._sign]  # the positive one last
            per_class = compute_class_weight(self.class_weight, classes=classes, y=classes[training.targets])
            parts = training, held_out
            training, held_out = (part._replace(weights=part.weights * per_class[part.targets]) for part in parts)

        def score(weights: np.ndarray) -> float:
            return float(metric(held_out.targets, held_out.X @ weights, held_out.weights, self.budget))

        iterates, decay = self._start(training, score)
        self._train(training, iterates, decay, score)
        self.n_iter_ = len(iterates)
        self.validation_scores_ = np.array([score(weights) for weights in iterates])
        self.best_iter_ = int(np.argmax(self.validation_scores_))
        self._print(1, f"kept: iteration {self.best_iter_} of {self.n_iter_ - 1}")
        weights = iterates[self.best_iter_]
        platt = LogisticRegression(C=1e6)
        platt.fit((held_out.X @ weights)[:, None], held_out.targets, held_out.weights)
        slope = max(platt.coef_[0, 0], 1e-6)  # a negative slope would reverse the order
        self.coef_, self.intercept_ = self._sign * slope * weights[None], self._sign * platt.intercept_
        return self

    def _positive(self, y: np.ndarray, weights: np.ndarray) -> Any:
        """Return the class that is to come first; warn if it has more than half of the weight."""
        classes, second, kept = self.classes_.tolist(), y == self.classes_[1], weights > 0
        if self.pos_label is None:
            # By rows, because weights may be those that balance the classes. [False, True] == [0, 1]
            place = int(classes in ([0, 1], [-1, 1]) or np.sum(second & kept) <= np.sum(kept) / 2)
        else:
            place = classes.index(check_choice("pos_label", self.pos_label, tuple(classes)))
        share = weights[second == place].sum() / (weights.sum() or 1.0)
        if share > 0.5 + 1e-6:  # balanced weights are equal up to rounding
            fix = f"Average precision is for a rare class: pass pos_label={classes[1 - place]!r}, or other weights."
            warn(f"AveragePrecisionClassifier: positive class {classes[place]!r} has {share:.0%} of the weight. {fix}")
        return classes[place]

    def _rows(self, X: Any, y: np.ndarray, weights: np.ndarray) -> tuple[_Rows, np.ndarray]:
        """Return the rows of positive weight, of both classes, and which they are."""
        if len(unknown := np.setdiff1d(y, self.classes_)):
            raise ValueError(expected("y", f"the classes {self.classes_.tolist()}", unknown.tolist()))
        kept = weights > 0
        targets = (y == self.pos_label_).astype(np.int64)
        if len(np.unique(targets[kept])) < 2:
            where = "" if kept.all() else " of which sample_weight is not zero"
            raise ValueError(f"the rows{where} have 1 class; average precision needs rows of two")
        return _Rows(X, targets, weights).take(np.flatnonzero(kept)), kept

    def _split(self, rows: _Rows, groups: np.ndarray | None) -> tuple[_Rows, _Rows]:
        """Return the rows to train on and the held-out ones."""
        name, smallest = "rows" if groups is None else "groups", np.bincount(rows.targets).min()
        got, fix = Words(f"{smallest} of the rarer class"), "Pass validation=(X, y), or another validation_fraction."
        too_few = ValueError(expected(name, "rows of both classes on either side of the split", got, fix))
        if smallest < 2:
            raise too_few
        if groups is None:
            options = {"test_size": self.validation_fraction, "random_state": self.random_state}
            index = train_test_split(np.arange(len(rows.targets)), stratify=rows.targets, **options)
        else:
            folds = max(2, round(1 / self.validation_fraction))
            splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=self.random_state)
            index = next(splitter.split(rows.targets, rows.targets, groups))
        training, held_out = map(rows.take, index)
        if min(len(np.unique(part.targets)) for part in (training, held_out)) < 2:
            raise too_few
        return training, held_out

    def _start(self, rows: _Rows, score: Callable[[np.ndarray], float]) -> tuple[list[np.ndarray], float]:
        """Return the weights of the best regression, and its L2 penalty relative to the mean loss."""
        best, iterates, decay = -1.0, list[np.ndarray](), 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a start need not have converged
            for class_weight in (None, "balanced") if self.class_weight == "auto" else (None,):
                model = LogisticRegression(class_weight=class_weight, warm_start=True, max_iter=300)
                for strength in self.Cs:
                    model.set_params(C=strength).fit(rows.X, rows.targets, rows.weights)
                    if (reached := score(model.coef_[0])) > best:
                        best, iterates = reached, [model.coef_[0].copy()]
                        self.C_, self.is_balanced_ = strength, class_weight is not None
                        decay = 1 / (strength * rows.weights.sum())
        self._print(1, f"regression: C={self.C_:g}{', balanced' * self.is_balanced_}, {self.objective} {best:.4f}")
        return iterates, decay

    def _train(
        self, rows: _Rows, iterates: list[np.ndarray], decay: float, score: Callable[[np.ndarray], float]
    ) -> None:
        """Append the weights after each iteration of L-BFGS to ``iterates``, which has those of the start."""
        loss, labels = SmoothAPLoss(1, gather_distributed=False), torch.from_numpy(rows.targets)
        weight = None if (rows.weights == 1).all() else torch.from_numpy(rows.weights)

        def objective(weights: np.ndarray) -> tuple[float, np.ndarray]:
            scores = torch.from_numpy(rows.X @ weights).requires_grad_()
            value = loss(scores[:, None], labels, sample_weight=weight)
            (slope,) = torch.autograd.grad(value, scores)
            loss.temperature = loss.current_temperature  # fixed after the first call, as L-BFGS requires
            return value.item() + decay / 2 * weights @ weights, rows.X.T @ slope.numpy() + decay * weights

        def visit(weights: np.ndarray) -> None:
            iterates.append(weights.copy())
            if self.verbose > 1:
                self._print(2, f"iteration {len(iterates) - 1}: {self.objective} {score(weights):.4f}")

        if self.max_iter > 0:  # L-BFGS takes one step even with maxiter=0
            options = {"maxiter": self.max_iter}
            minimize(objective, iterates[0], jac=True, method="L-BFGS-B", callback=visit, options=options)

    def _print(self, level: int, text: str) -> None:
        if self.verbose >= level:
            print(f"[AveragePrecisionClassifier] {text}", flush=True)

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the log-odds of the second of ``classes_`` (N,)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        scores: np.ndarray = X @ self.coef_[0] + self.intercept_[0]
        return scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities of the classes (N, 2)."""
        second = 0.5 + 0.5 * np.tanh(self.decision_function(X) / 2)
        return np.stack([1 - second, second], axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """Return the more probable class of each row (N,); when positives are rare, set a threshold instead."""
        is_second = self.decision_function(X) > 0
        chosen: np.ndarray = self.classes_[is_second.astype(int)]
        return chosen

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the metric ``objective`` of rows (N, F) and their classes (N,), of which there must be both."""
        check_is_fitted(self)
        X, y = validate_data(self, X, y, reset=False, accept_sparse="csr", dtype=np.float64)
        rows, _ = self._rows(X, y, _weights(X, sample_weight))
        scores = self._sign * (rows.X @ self.coef_[0])
        return float(OBJECTIVES[self.objective](rows.targets, scores, rows.weights, self.budget))
