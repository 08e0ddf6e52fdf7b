"""
Grades in a table, by gradient boosting
=======================================

A table has a label with an order: five stages of diabetes. A model that knows the order makes fewer errors of several
stages. Here boosted trees are trained by XGBoost's own objective and by ours.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.model_selection import cross_val_predict
from xgboost import XGBClassifier

from otloss.estimators import OrdinalBoostingClassifier
from otloss.metrics import ordinal_mae
from otloss.plotting import plot_confusion_matrix

X, progression = load_diabetes(return_X_y=True)
y = np.digitize(progression, [70, 110, 170, 240])  # five stages, 0 to 4

# %%
# Both models have 60 rounds of trees of depth 2. `OrdinalBoostingClassifier` trains by the ranked probability score
# with some cross-entropy, and answers with the median of its forecast. The median helps a usual forecast too, so it
# stands beside.

usual = XGBClassifier(n_estimators=60, max_depth=2, learning_rate=0.1)
ordinal = OrdinalBoostingClassifier(
    booster="xgboost", n_estimators=60, max_depth=2, early_stopping=False, random_state=0
)
proba = cross_val_predict(usual, X, y, cv=5, method="predict_proba")
predicted = {
    "XGBoost, most likely stage": proba.argmax(1),
    "XGBoost, median": (proba.cumsum(1) >= 0.5).argmax(1),
    "ordinal": cross_val_predict(ordinal, X, y, cv=5),
}
for name, answer in predicted.items():
    far = np.mean(abs(y - answer) >= 3)
    print(f"{name}: mean error {ordinal_mae(y, answer):.2f} stages, {far:.1%} wrong by three or more")

# %%
# The confusion matrices show where the errors went: towards the diagonal.

figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for axis, name in zip(axes, ("XGBoost, most likely stage", "ordinal"), strict=True):
    plot_confusion_matrix(y, predicted[name], ax=axis)
    axis.set_title(name)

# %%
# The forecast itself is a distribution over the stages, from which other decisions follow: the expected stage, or the
# probability of at least a stage.

forecast = ordinal.fit(X[:300], y[:300]).predict_proba(X[300:303])
for row, truth in zip(forecast, y[300:303], strict=True):
    at_least_3 = row[3:].sum()
    print(f"true stage {truth}: expected {row @ np.arange(5):.1f}, stage 3 or more with probability {at_least_3:.2f}")
