"""Figures: what is drawn where, on the Axes that was given, for odd sizes, and without matplotlib."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import otloss
from otloss import metrics, plotting

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")
from matplotlib import pyplot as plt  # noqa: E402

NAMES = ["poor", "fair", "good", "excellent"]


def draw(seed: int = 0, n: int = 200, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    proba = rng.dirichlet(np.ones(classes), n)
    return proba, np.array([rng.choice(classes, p=row) for row in proba])


CALLS: dict[str, Callable[..., Any]] = {
    "cdfs": lambda proba, y, **given: plotting.plot_cdfs(y, proba, **given),
    "confusion": lambda proba, y, **given: plotting.plot_confusion_matrix(y, proba.argmax(1), **given),
    "reliability": lambda proba, y, **given: plotting.plot_reliability(y, proba, **given),
    "pit": lambda proba, y, labels, **given: plotting.plot_pit(y, proba, **given),
    "plan": lambda proba, y, labels, **given: plotting.plot_transport_plan(proba, **given),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("n", "classes"), [(1, 2), (60, 30)])
def test_draws_on_the_axes_that_is_given_and_returns_it(name: str, n: int, classes: int) -> None:
    data = draw(0, n, classes)
    figure, (left, right) = plt.subplots(1, 2, layout="constrained")
    assert CALLS[name](*data, labels=range(classes), ax=right) is right
    assert not left.has_data()
    assert right.has_data()
    figure.canvas.draw()  # ticks, legends and colour bars are laid out without a warning
    fresh = CALLS[name](*data, labels=range(classes))
    assert fresh.figure is not figure
    assert all((fresh.get_title(), fresh.get_xlabel(), fresh.get_ylabel()))


def test_a_confusion_matrix_shows_the_classes_that_occur_at_their_distances() -> None:
    for far in (9999, 10**12):
        ax = plotting.plot_confusion_matrix([0, 1, far, 0], [0, 0, far, far])
        assert [text.get_text() for text in ax.get_xticklabels()] == ["0", "1", str(far)]
        image, colours = ax.get_images()[0].get_array(), ax.get_figure().axes[1].get_ylim()
        assert np.shape(image) == (3, 3, 3)
        assert colours[1] == far + 0.5
        ax.get_figure().canvas.draw()


def test_figures_show_the_numbers_of_the_metrics() -> None:
    proba, y = draw()
    values = [0.0, 1.0, 5.0, 7.0]
    ax = plotting.plot_cdfs(np.array(NAMES)[y], proba, labels=NAMES, columns="rank", values=values)
    predicted, true = (line.get_xydata()[:4].T for line in ax.get_lines())
    np.testing.assert_allclose(predicted, [values, proba.cumsum(1).mean(0)])
    np.testing.assert_allclose(true, [values, [(y <= k).mean() for k in range(4)]])
    ax = plotting.plot_reliability(y, proba, bins=5, strategy="quantile")
    curves = metrics.threshold_reliability(y, proba, bins=5, strategy="quantile")
    for line, curve in zip(ax.get_lines()[1:], curves, strict=True):
        np.testing.assert_allclose(line.get_xydata().T, [curve.forecast, curve.observed])
    y, predicted = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 2, 1, 2, 2, 1])
    ax = plotting.plot_confusion_matrix(np.array(NAMES)[y], np.array(NAMES)[predicted], labels=NAMES)
    texts = {text.get_position(): text.get_text() for text in ax.texts}
    assert texts == {(0, 0): "1\n50%", (2, 0): "1\n50%", (1, 1): "1\n100%", (2, 2): "2\n67%", (1, 2): "1\n33%"}
    x, z = torch.tensor([3.0, 0.0, 1.0]), torch.tensor([0.0, 2.0])
    solution = otloss.solve(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.75, 0.25]), (x[:, None] - z).abs())
    mesh = plotting.plot_transport_plan(solution, x=x, y=z).collections[0]
    np.testing.assert_allclose(mesh.get_array(), solution.plan()[[1, 2, 0]])
    np.testing.assert_allclose(mesh.get_coordinates()[:, 0, 1], [-0.5, 0.5, 2.0, 4.0])


def test_without_matplotlib_the_message_says_what_to_install(without: Callable[[str], None]) -> None:
    without("matplotlib")
    with pytest.raises(ImportError, match=r'^figures need matplotlib: pip install "torch-otloss\[plot\]"$'):
        plotting.plot_transport_plan([[1.0]])


def test_dollar_signs_in_names_of_classes_begin_no_formula() -> None:
    names = np.array(["$0-$10k", "$5%-$9%", "$9+"])
    ax = plotting.plot_confusion_matrix(names, names[[0, 2, 1]], labels=names)
    ax.figure.canvas.draw()
    assert [label.get_text().replace("\\", "") for label in ax.get_xticklabels()] == names.tolist()
    plt.close(ax.figure)
