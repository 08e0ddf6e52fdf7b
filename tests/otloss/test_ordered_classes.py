"""Values of classes and costs between them: losses, boosting, estimators and metrics reject them by one message."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from otloss import metrics, ordinal_loss
from otloss.boosting import xgboost_objective
from otloss.estimators import OrdinalClassifier
from tests.errors import raising

FEATURES, LABELS = np.arange(6.0)[:, None], np.arange(6) % 3
USERS: tuple[Callable[..., Any], ...] = (
    lambda x: ordinal_loss(torch.zeros(1, 3), torch.tensor([0]), x=torch.tensor(x)),
    lambda x: xgboost_objective(3, x=x),
    lambda x: OrdinalClassifier(values=x).fit(FEATURES, LABELS),
    lambda x: metrics.ordinal_mae(LABELS, LABELS, values=x),
)
COST_USERS: tuple[Callable[..., Any], ...] = (
    lambda cost: ordinal_loss(torch.zeros(1, 3), torch.tensor([0]), cost=torch.as_tensor(cost)),
    lambda cost: xgboost_objective(3, cost=cost),
    lambda cost: OrdinalClassifier(cost=cost).fit(FEATURES, LABELS),
)
test_class_values = raising(
    *((user, [0.0, 2.0, 2.0], r"\[1\] is 2 and (x|values)\[2\] is 2, expected strictly increasing") for user in USERS),
    *((user, [0.0, 1.0], r"has shape \(2,\), expected \(3,\): one number a class, in rank order") for user in USERS),
    *((user, np.eye(2), r"cost has shape \(2, 2\), expected \(3, 3\): a cost is \[true, pre") for user in COST_USERS),
    *((user, -np.ones((3, 3)), "expected (costs >= 0|finite numbers of at least 0)") for user in COST_USERS),
    call=lambda user, given: user(given),
)
