"""Values of classes and costs between them: losses, boosting, estimators and metrics reject them by one message."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from otloss import metrics, ordinal_loss
from otloss.boosting import xgboost_objective
from otloss.estimators import OrdinalClassifier

FEATURES, LABELS = np.arange(6.0)[:, None], np.arange(6) % 3
USERS: dict[str, Callable[..., Any]] = {
    "x of a loss": lambda x: ordinal_loss(torch.zeros(1, 3), torch.tensor([0]), x=torch.tensor(x)),
    "x of boosting": lambda x: xgboost_objective(3, x=x),
    "values of an estimator": lambda x: OrdinalClassifier(values=x).fit(FEATURES, LABELS),
    "values of a metric": lambda x: metrics.ordinal_mae(LABELS, LABELS, values=x),
}


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([0.0, 2.0, 2.0], r"\[1\] is 2 and (x|values)\[2\] is 2, expected strictly increasing values"),
        ([0.0, 1.0], r"has shape \(2,\), expected \(3,\): one number a class, in rank order"),
    ],
)
@pytest.mark.parametrize("user", USERS)
def test_class_values(user: str, x: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        USERS[user](x)


@pytest.mark.parametrize(
    "call",
    [
        lambda cost: ordinal_loss(torch.zeros(1, 3), torch.tensor([0]), cost=torch.as_tensor(cost)),
        lambda cost: xgboost_objective(3, cost=cost),
        lambda cost: OrdinalClassifier(cost=cost).fit(FEATURES, LABELS),
    ],
)
def test_class_costs(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"cost has shape \(2, 2\), expected \(3, 3\): a cost is \[true, predicted\]"):
        call(np.eye(2))
