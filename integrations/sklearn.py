"""scikit-learn: a linear model of two classes that is trained on average precision."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator, ClassifierMixin  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.metrics import average_precision_score  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from sklearn.utils.multiclass import type_of_target  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]

from ..errors import expected
from ..losses import SmoothAPLoss

CS = tuple(10.0**power for power in range(-4, 5))


class AveragePrecisionClassifier(ClassifierMixin, BaseEstimator):
    """A linear model of two classes that starts from a logistic regression and is trained on average precision.

    A part of the rows is held out, and every choice is made by the average precision on it. The start is the best
    logistic regression over ``Cs``, with equal or balanced class weights. L-BFGS then minimises
    :class:`~fullrank.SmoothAPLoss` of all other rows at its automatic temperature, with the L2 penalty of the
    regression. The weights of the best iteration are kept, which may be those of the regression. A slope and an offset
    fitted to the held-out rows turn scores into probabilities without changing their order (Platt scaling).

    Args:
        Cs: inverse strengths of L2 to try.
        max_iter: iterations of L-BFGS; 0 keeps the regression.
        validation_fraction: share of the rows of each class that is held out.
        random_state: seed or generator that chooses these rows.

    Attributes:
        classes_: (2,); the second in sorted order is the positive one.
        coef_, intercept_: (1, F) and (1,), of the log-odds that ``decision_function`` returns.
        best_iter_: the iteration whose weights are kept, 0 for those of the regression.
        n_iter_: the number of iterations whose weights were compared, the regression included.

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
        Cs: Sequence[float] = CS,
        max_iter: int = 60,
        validation_fraction: float = 0.25,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.Cs = Cs
        self.max_iter = max_iter
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn may expect: two classes, dense and sparse rows."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.sparse = True
        return tags

    def fit(self, X: Any, y: Any) -> AveragePrecisionClassifier:
        """Train on rows (N, F), dense or sparse, and their classes (N,)."""
        if self.max_iter < 0:
            raise ValueError(expected("max_iter", "an int >= 0", self.max_iter))
        if not np.size(self.Cs):
            raise ValueError(expected("Cs", "at least one number > 0", self.Cs))
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        if (kind := type_of_target(y, input_name="y", raise_unknown=True)) != "binary":
            raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
        self.classes_, targets = np.unique(y, return_inverse=True)
        if len(self.classes_) == 1:
            raise ValueError("y has 1 class; average precision needs rows of two")
        X, X_validation, targets, validation_targets = train_test_split(
            X, targets, test_size=self.validation_fraction, stratify=targets, random_state=self.random_state
        )
        iterates: list[np.ndarray] = []
        best = -1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a start need not have converged
            for class_weight in (None, "balanced"):
                model = LogisticRegression(class_weight=class_weight, warm_start=True, max_iter=300)
                for strength in self.Cs:
                    weights = model.set_params(C=strength).fit(X, targets).coef_[0]
                    if (precision := average_precision_score(validation_targets, X_validation @ weights)) > best:
                        best, iterates, decay = precision, [weights.copy()], 1 / (strength * len(targets))
        loss, labels = SmoothAPLoss(1, gather_distributed=False), torch.from_numpy(targets)

        def objective(weights: np.ndarray) -> tuple[float, np.ndarray]:
            scores = torch.from_numpy(X @ weights).requires_grad_()
            value = loss(scores[:, None], labels)
            (slope,) = torch.autograd.grad(value, scores)
            loss.temperature = loss.current_temperature  # fixed after the first call, as L-BFGS requires
            return value.item() + decay / 2 * weights @ weights, X.T @ slope.numpy() + decay * weights

        if self.max_iter > 0:  # L-BFGS takes one step even with maxiter=0
            options = {"method": "L-BFGS-B", "options": {"maxiter": self.max_iter}}
            minimize(objective, iterates[0], jac=True, callback=lambda x: iterates.append(x.copy()), **options)
        self.n_iter_ = len(iterates)
        precisions = [average_precision_score(validation_targets, X_validation @ weights) for weights in iterates]
        self.best_iter_ = int(np.argmax(precisions))
        weights = iterates[self.best_iter_]
        platt = LogisticRegression(C=1e6).fit((X_validation @ weights)[:, None], validation_targets)
        slope = max(platt.coef_[0, 0], 1e-6)  # a negative slope would reverse the order
        self.coef_, self.intercept_ = slope * weights[None], platt.intercept_
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the log-odds of the positive class (N,)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        scores: np.ndarray = X @ self.coef_[0] + self.intercept_[0]
        return scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities of the classes (N, 2)."""
        positive = 0.5 + 0.5 * np.tanh(self.decision_function(X) / 2)
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """Return the more probable class of each row (N,); when positives are rare, set a threshold instead."""
        positive = self.decision_function(X) > 0
        chosen: np.ndarray = self.classes_[positive.astype(int)]
        return chosen
