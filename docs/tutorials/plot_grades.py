"""
Grades in a table: a pipeline and a search
==========================================

A table has a label with an order: five stages of diabetes. A model that knows the order makes fewer errors of several
stages. Here it is the last step of a pipeline of scikit-learn, and a search chooses its settings.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_diabetes
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from otloss.estimators import OrdinalClassifier
from otloss.metrics import ordinal_mae, scorer
from otloss.plotting import plot_cdfs, plot_confusion_matrix, plot_reliability

# %%
# The table has a column of text and missing values, as tables do. The grades are words, so that their order has to be
# named.

X, progression = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
X["sex"] = X["sex"].map({1: "f", 2: "m"})
X.loc[::7, "bmi"] = np.nan
stages = ["none", "mild", "moderate", "severe", "critical"]
y = np.array(stages)[np.digitize(progression, [70, 110, 170, 240])]
print(X[["age", "sex", "bmi", "bp"]].assign(stage=y).head(4))

# %%
# `categories=` names the order. The search compares settings by the ranked probability score of held-out rows; scorers
# read the order from the model.

columns = make_column_transformer((OneHotEncoder(), ["sex"]), remainder=SimpleImputer())
model = make_pipeline(columns, StandardScaler(), OrdinalClassifier(categories=stages))
settings = {"ordinalclassifier__alpha": [0.1, 1, 10], "ordinalclassifier__cross_entropy": [0, 0.2, 1]}
search = GridSearchCV(model, settings, scoring=scorer("ranked_probability_score"), cv=3)
search.fit(X, y)
print({name.partition("__")[2]: value for name, value in search.best_params_.items()})

# %%
# Two models on held-out rows: a usual classifier answers with the most likely stage, ours with the median of its
# forecast.

usual = make_pipeline(columns, StandardScaler(), LogisticRegression(max_iter=1000))
predicted = {
    "LogisticRegression": cross_val_predict(usual, X, y, cv=5),
    "OrdinalClassifier": cross_val_predict(search.best_estimator_, X, y, cv=5),
}
ranks = pd.Series(range(5), index=stages)
for name, answer in predicted.items():
    far = np.mean(abs(ranks[y].to_numpy() - ranks[answer].to_numpy()) >= 3)
    print(f"{name}: {ordinal_mae(y, answer, labels=stages):.2f} stages off on average, {far:.1%} off by three or more")

# %%
# The confusion matrices show where the errors went: towards the diagonal.

figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for axis, (name, answer) in zip(axes, predicted.items(), strict=True):
    plot_confusion_matrix(y, answer, labels=stages, ax=axis)
    axis.set_title(name)

# %%
# A forecast is a distribution over the stages. The area between its cumulative curve and the curve of the truth is the
# earth mover's distance, which the loss makes small. The curve of many patients says whether forecasts can be trusted:
# on the diagonal, what was forecast with 70 % comes true in 70 % of the cases.

forecast = search.best_estimator_.fit(X[:250], y[:250]).predict_proba(X[250:])
truth = y[250:]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
i = list(truth).index("moderate")
plot_cdfs(truth[i : i + 1], forecast[i : i + 1], labels=stages, ax=left)
left.set_title("One patient, whose stage is moderate")
plot_reliability(truth, forecast, labels=stages, bins=5, ax=right)
right.set_title("All patients of the test")
