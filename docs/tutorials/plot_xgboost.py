"""
XGBoost with a transport objective
==================================

`xgboost_objective` gives XGBoost the gradients of a loss that knows the order of the classes, and `xgboost_metric`
measures it on held-out rows. The data are made: one number, with noise, in seven grades.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
import xgboost
from sklearn.datasets import make_friedman1
from sklearn.model_selection import train_test_split

from otloss.boosting import start_scores, xgboost_metric, xgboost_objective
from otloss.losses import decode_classes

X, number = make_friedman1(3000, noise=2.0, random_state=0)
y = np.digitize(number, np.quantile(number, [0.04, 0.15, 0.35, 0.6, 0.82, 0.95]))  # seven grades, 0 to 6
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.5, random_state=0, stratify=y)
train, test = xgboost.DMatrix(X_train, y_train), xgboost.DMatrix(X_test, y_test)

# %%
# Both runs start from the frequencies of the grades. The objective of XGBoost passes probabilities to the metric, an
# objective of our own passes scores.

common = {
    "objective": "multi:softprob", "num_class": 7, "base_score": start_scores(y_train, 7).tolist(), "max_depth": 4,
    "eta": 0.15, "disable_default_eval_metric": True, "nthread": 2,
}  # fmt: skip
runs = {
    "cross-entropy": {"custom_metric": xgboost_metric(7, predictions="probabilities")},
    "transport": {"obj": xgboost_objective(7), "custom_metric": xgboost_metric(7)},
}
curves, forecasts = {}, {}
for name, own in runs.items():
    history = {}
    trees = xgboost.train(common, train, 80, evals=[(test, "test")], evals_result=history, verbose_eval=False, **own)
    curves[name] = history["test"]["rps"]
    forecasts[name] = torch.from_numpy(trees.predict(test, output_margin=True))
    print(f"{name}: ranked probability score {min(curves[name]):.3f} at best, {curves[name][-1]:.3f} at the end")

# %%
# The decision matters as much as the loss. The median of a forecast has the least expected error in grades, and it
# costs nothing: try it first, with the loss that you have.

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
for name, curve in curves.items():
    left.plot(np.arange(1, 81), curve, label=name)
left.set(xlabel="rounds", ylabel="ranked probability score, test", title="The score over the rounds")
left.legend(frameon=False)
arms = [(name, rule) for name in forecasts for rule in ("argmax", "median")]
for place, (name, rule) in enumerate(arms):
    errors = abs(decode_classes(forecasts[name], rule).numpy() - y_test)
    shares = [100 * np.mean(errors >= size) for size in (2, 3)]
    colour = "C0" if name == "cross-entropy" else "C1"
    right.bar(
        np.arange(2) + 0.2 * (place - 1.5), shares, 0.18, color=colour, alpha=0.4 if rule == "argmax" else 1,
        label=f"{name}, {'most likely grade' if rule == 'argmax' else 'median'}",
    )  # fmt: skip
    print(f"{name}, {rule}: {errors.mean():.3f} grades off on average")
right.set(xticks=range(2), xticklabels=["two grades or more", "three or more"], ylabel="test rows (%)")
right.set_title("Errors of several grades")
right.legend(frameon=False)
