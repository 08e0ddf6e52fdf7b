"""Every numeric option of the public functions: what is no number, not finite or beyond 64 bits is named."""

import inspect
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import otloss
from otloss import boosting, costs, losses, metrics, nn
from tests.otloss.draws import draw

p, q = (draw(4, seed=seed).softmax(0) for seed in (0, 1))
C, x, y = draw(4, 4), draw(5, 2), draw(6, 2)
C = (C + C.mT).fill_diagonal_(0.0)
LOGITS, LABELS, BINS = draw(3, 4), torch.tensor([0, 3, 1]), torch.arange(4.0)
VALUES = torch.tensor([1.0, 2.0, 5.0, torch.nan])
TRUE, FORECAST = np.array([0, 1, 2, 1]), np.full((4, 3), 1 / 3)
# What is not one number but may be given in its place, and where None has no meaning of its own.
ALSO_TENSORS = {"epsilon", "mass", "marginal_penalty"}


def table() -> dict[str, tuple[Callable[..., Any], dict[str, Any], str]]:
    """A valid call of each function, and its numeric options."""
    pair, labelled = {"p": p, "q": q, "cost": C}, {"logits": LOGITS, "target": LABELS}
    histogram = {"bins": BINS, "encoding": "gaussian"}
    jdot = {"source": draw(3, 2), "target": draw(4, 2), "labels": LABELS, "logits": draw(4, 4)}
    objective = "num_classes power transport cross_entropy"
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
        function.__name__: (function, given, options)
        for function, given, options in (
            (otloss.barycenter, {"p": p[None], "cost": C, "epsilon": 0.1}, "epsilon tolerance max_iterations"),
            (otloss.cdf_distance, {"p": p, "q": q}, "power"),
            (
                otloss.cloud_barycenter, {"clouds": draw(3, 5, 2), "start": draw(3, 2)},
                "start epsilon tolerance max_iterations",
            ),
            (otloss.cloud_loss, {"x": x, "y": y}, "epsilon blur marginal_penalty tolerance projections"),
            (otloss.document_search, {"query": p, "corpus": q[None], "embedding": draw(4, 3), "k": 1}, "k"),
            (otloss.emd, pair, "mass"),
            (
                otloss.fused_gromov, {"C_x": C, "C_y": C, "feature_cost": C},
                "alpha epsilon starts max_iterations tolerance",
            ),
            (losses.histogram_loss, {**labelled, "target": draw(3), **histogram}, "sigma power cross_entropy"),
            (losses.histogram_labels, {"values": draw(3), "count": 4, **histogram}, "count sigma"),
            (
                losses.number_token_loss, {"logits": LOGITS, "labels": LABELS % 3, "values": VALUES},
                "squash text ignore_index",
            ),
            (losses.ordinal_loss, {**labelled, "circular": True}, "power cross_entropy ignore_index dim period"),
            (otloss.pair, {"x0": x, "x1": y}, "epsilon"),
            (otloss.register, {"x": x, "y": y, "epsilon": 0.1, "steps": 2}, "epsilon marginal_penalty steps restarts"),
            (otloss.sinkhorn, {**pair, "epsilon": 0.1}, "epsilon mass marginal_penalty tolerance max_iterations"),
            (
                otloss.sinkhorn_divergence, {**pair, "epsilon": 0.1},
                "epsilon marginal_penalty tolerance max_iterations",
            ),
            (otloss.solve, {**pair, "epsilon": 0.1}, "epsilon mass marginal_penalty tolerance max_iterations"),
            (otloss.sliced_wasserstein, {"x": x, "y": y}, "order projections"),
            (otloss.soft_rank, {"x": x}, "epsilon"),
            (otloss.soft_sort, {"x": x}, "epsilon"),
            (otloss.soft_top_k, {"x": x, "k": 1}, "k epsilon"),
            (otloss.wasserstein_1d, {"p": p, "q": q}, "order"),
            (otloss.wasserstein_circular, {"p": p, "q": q}, "order period"),
            (losses.gradient_penalty, {"critic": lambda z: z.sum(-1), "real": x, "fake": x}, "target"),
            (losses.jdot_loss, jdot, "feature_weight label_weight epsilon marginal_penalty"),
            (losses.ngram_distance, {"x": draw(5, 3), "y": draw(6, 3), "n": 2}, "n order_weight"),
            (losses.set_loss, {"cost": C}, "epsilon"),
            (losses.soft_labels, {"target": LABELS, "num_classes": 4}, "num_classes neighbour"),
            (losses.threshold_loss, labelled, "ignore_index dim"),
            (costs.GridCost, {"shape": (2, 2)}, "power spacing"),
            (costs.LineCost, {"x": BINS}, "power"),
            (nn.CornHead, {"in_features": 2, "num_classes": 3}, "in_features num_classes"),
            (nn.CumulativeLinkHead, {"in_features": 2, "num_classes": 3}, "in_features num_classes"),
            (metrics.pit_histogram, {"y_true": np.arange(4.0), "ensemble": np.arange(12.0).reshape(4, 3)}, "bins"),
            (metrics.threshold_calibration_error, {"y_true": TRUE, "proba": FORECAST}, "bins"),
            (metrics.threshold_reliability, {"y_true": TRUE, "proba": FORECAST}, "bins"),
            (boosting.start_scores, {"labels": TRUE, "num_classes": 3}, "num_classes"),
            (boosting.xgboost_objective, {"num_classes": 3}, objective),
            (boosting.xgboost_metric, {"num_classes": 3}, objective),
            (boosting.lightgbm_objective, {"num_classes": 3}, objective),
            (boosting.lightgbm_metric, {"num_classes": 3}, objective),
        )
    }  # fmt: skip
    return calls


CALLS = table()
CASES = [(name, option) for name, (_, _, options) in CALLS.items() for option in options.split()]


def test_the_table_holds_every_numeric_option() -> None:
    """Costs are classes, and modules take the options of functions."""
    for module in (otloss, losses, metrics, boosting):
        for name in module.__all__:
            function = getattr(module, name)
            if not inspect.isfunction(function) or name in ("warm_up", "match", "scorer"):
                continue
            parameters = inspect.signature(function).parameters.values()
            numeric = {t.name for t in parameters if re.search(r"\b(float|int)\b|Penalty", str(t.annotation))}
            assert numeric <= {*CALLS.get(name, (0, 0, ""))[2].split()}, name


def message_of(name: str, option: str, value: Any) -> str:
    function, given, _ = CALLS[name]
    given = {key: t for key, t in given.items() if key != "circular" or option == "period"}
    with pytest.raises((TypeError, ValueError)) as raised:
        function(**{**given, option: value})
    return str(raised.value)


NOT_NUMBERS = {
    "a bool": True, "text": "1", "complex": 1j, "NaN": float("nan"), "a list": [1], "an array": np.ones(2),
    "a fraction": Fraction(1, 2),
}  # fmt: skip
BEYOND = {"a whole number": 10**400, "a negative one": -(10**400), "beyond 64 bits": 2**70}


@pytest.mark.parametrize(("name", "option"), CASES)
def test_what_is_no_finite_number_is_named(name: str, option: str) -> None:
    for what, value in (NOT_NUMBERS | BEYOND).items():
        if isinstance(value, np.ndarray) and option in (*ALSO_TENSORS, "projections", "start", "spacing"):
            continue  # one for each problem or axis, or directions
        if isinstance(value, list) and option in ("marginal_penalty", "spacing"):
            continue
        assert option in message_of(name, option, value), what


def test_whole_numbers_up_to_64_bits_are_numbers() -> None:
    assert torch.isfinite(otloss.sinkhorn(p, q, C, epsilon=2**60, max_iterations=2**62))
    assert torch.isfinite(otloss.soft_rank(x, epsilon=2**60)).all()
