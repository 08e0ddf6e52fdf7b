"""Maps between domains against POT's, in and out of sample, and the joint-distribution loss against a loop."""

from typing import Any

import numpy as np
import ot
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer

from otloss.estimators import TransportAdapter
from otloss.losses import jdot_loss
from tests.errors import raising

RNG = np.random.default_rng(0)
SOURCE = RNG.normal(size=(40, 3)) @ RNG.normal(size=(3, 3))
TARGET = RNG.normal(size=(50, 3)) @ RNG.normal(size=(3, 3)) + [1.0, -2.0, 0.5]
NEW = RNG.normal(size=(9, 3))
MAPS = {
    "linear": (TransportAdapter(), ot.da.LinearTransport(reg=1e-8)),
    "exact": (TransportAdapter("barycentric"), ot.da.EMDTransport()),
    "entropic": (TransportAdapter("barycentric", epsilon=1.0), ot.da.SinkhornTransport(1.0, tol=1e-10, max_iter=10**5)),
}


@pytest.mark.parametrize("name", MAPS)
def test_maps_are_those_of_pot(name: str) -> None:
    mine, theirs = MAPS[name]
    fitted = clone(mine).fit(SOURCE, target=TARGET)
    theirs.fit(Xs=SOURCE, Xt=TARGET)
    for points in (SOURCE, NEW):
        np.testing.assert_allclose(fitted.transform(points), theirs.transform(Xs=points), rtol=1e-5, atol=1e-6)
    assert mine.get_params() == fitted.get_params()


@pytest.mark.parametrize("unit", [1e-9, 1e-4, 1e6])
def test_the_linear_map_does_not_depend_on_the_unit(unit: float) -> None:
    expected = TransportAdapter().fit(SOURCE, target=TARGET).transform(NEW)
    moved = TransportAdapter().fit(unit * SOURCE, target=unit * TARGET).transform(unit * NEW)
    np.testing.assert_allclose(moved, unit * expected, rtol=1e-6)


@pytest.mark.parametrize(("unit", "unit_of_target"), [(1.0, 1e4), (1e4, 1.0), (1e-6, 1e6)])
def test_the_linear_map_does_not_depend_on_the_units_of_the_domains(unit: float, unit_of_target: float) -> None:
    """Domains of other units, as two sensors have, are mapped as domains of one unit are."""
    expected = TransportAdapter().fit(SOURCE, target=TARGET).transform(NEW)
    moved = TransportAdapter().fit(unit * SOURCE, target=unit_of_target * TARGET).transform(unit * NEW)
    np.testing.assert_allclose(moved, unit_of_target * expected, rtol=1e-6)


def test_the_linear_map_keeps_constant_features() -> None:
    """Equal numbers whose mean is rounded, and zeros, beside a feature in a small unit."""
    source, target = (np.column_stack([1e-6 * x[:, 0], np.full(len(x), 0.1), 0 * x[:, 0]]) for x in (SOURCE, TARGET))
    moved = TransportAdapter().fit(source, target=target).transform(source + np.array([0.0, 0.01, 0.01]))
    spread = target[:, 0].std() / source[:, 0].std()
    expected = target[:, 0].mean() + spread * (source[:, 0] - source[:, 0].mean())
    np.testing.assert_allclose(moved[:, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(moved[:, 1:], np.broadcast_to([0.11, 0.01], (40, 2)), rtol=1e-3)


def test_a_feature_that_is_constant_in_one_domain() -> None:
    """A rare indicator: new samples that have it are moved as others, and not by 1e4; to the target's constant."""
    rare = np.column_stack([SOURCE, np.zeros(len(SOURCE))])
    common = np.column_stack([TARGET, TARGET[:, 0] > TARGET[:, 0].mean()])
    new = np.column_stack([NEW, np.ones(len(NEW))])
    moved = TransportAdapter().fit(rare, target=common).transform(new)
    np.testing.assert_allclose(moved[:, -1], 1 + common[:, -1].mean())
    np.testing.assert_allclose(moved[:, :-1], TransportAdapter().fit(SOURCE, target=TARGET).transform(NEW))
    back = TransportAdapter().fit(common, target=rare).transform(new)
    np.testing.assert_allclose(back[:, -1], 0, atol=1e-3)


ONES, TWO, ZEROS = torch.ones(2, 1), torch.tensor([0, 1]), torch.zeros(2, 2)
test_bad_input = raising(
    (lambda: jdot_loss(ONES, ONES, 7 * TWO, ZEROS), "labels hold 0 to 7, expected 0 to 1"),
    (lambda: jdot_loss(ONES, ONES, TWO, ZEROS, marginal_penalty=1.0), "without epsilon"),
)


def test_joint_loss_is_that_of_pot_on_a_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (5, 7))
    labels, logits = torch.tensor([0, 2, 1, 1, 0]), torch.randn(7, 3, generator=generator, dtype=torch.float64)
    cost = np.zeros((5, 7))
    for i, j in np.ndindex(5, 7):
        away, chance = (source[i] - target[j]).square().sum(), torch.softmax(logits[j], 0)[labels[i]]
        cost[i, j] = 0.3 * float(away) - 2.0 * float(chance.log())
    weights = {"feature_weight": 0.3, "label_weight": 2.0}
    actual = jdot_loss(source, target, labels, logits, **weights)  # type: ignore[arg-type]
    np.testing.assert_allclose(float(actual), ot.emd2(ot.unif(5), ot.unif(7), cost), rtol=1e-9)


@pytest.mark.parametrize("method", ["linear", "barycentric"])
def test_columns_of_the_target_are_those_of_the_source(method: str) -> None:
    pd = pytest.importorskip("pandas")
    source, target = (pd.DataFrame(samples, columns=list("abc")) for samples in (SOURCE, TARGET))
    model = TransportAdapter(method)
    expected = clone(model).fit(SOURCE, target=TARGET).transform(NEW)
    new = pd.DataFrame(NEW, columns=list("abc"))
    np.testing.assert_allclose(clone(model).fit(source, target=target).transform(new), expected, rtol=1e-9)
    with pytest.raises(ValueError, match=r"target has the columns \['c', 'b', 'a'\], expected .* in the order of X"):
        clone(model).fit(source, target=target[["c", "b", "a"]])
    pyarrow = pytest.importorskip("pyarrow")
    tables = [pyarrow.Table.from_pandas(frame) for frame in (source, target)]
    np.testing.assert_array_equal(
        TransportAdapter(method).fit(tables[0], target=tables[1]).transform(new),
        TransportAdapter(method).fit(source, target=target).transform(new),
    )
    with pytest.raises(ValueError, match=r"target has the columns \[2, 1, 0\]"):
        clone(model).fit(pd.DataFrame(SOURCE), target=pd.DataFrame(TARGET)[[2, 1, 0]])
    with pytest.raises(TypeError, match="column 'a' of target has dtype datetime64"):
        clone(model).fit(source, target=target.assign(a=pd.Timestamp("2020-01-01")))


def test_arrays_may_be_read_only_and_in_any_layout() -> None:
    expected = TransportAdapter("barycentric").fit(SOURCE, target=TARGET).transform(NEW)
    source = SOURCE.copy()
    source.flags.writeable = False
    fitted = TransportAdapter("barycentric").fit(source, target=np.flip(np.flip(TARGET).copy()))
    np.testing.assert_allclose(fitted.transform(NEW), expected, rtol=1e-9)


@pytest.mark.parametrize("exponents", [(0, 3, -3), (0, 8, 0), (9, 0, -9)])
def test_the_linear_map_has_the_covariance_of_the_target_in_any_units(exponents: tuple[int, ...]) -> None:
    """Powers of covariances lose the small features: 29 % off for units of 1e-3 and 1e3, 1e16 for 1 and 1e8."""
    mpmath = pytest.importorskip("mpmath")
    rng = np.random.default_rng(0)
    source, target = (rng.normal(size=(50, 3)) @ rng.normal(size=(3, 3)) for _ in range(2))
    units = 10.0 ** np.array(exponents)
    fitted = TransportAdapter(ridge=1e-30).fit(source * units, target=target * units)
    with mpmath.workdps(80):
        s, t = (mpmath.matrix(np.cov((x * units).T, bias=True).tolist()) for x in (source, target))
        factor = mpmath.cholesky(s)
        values, vectors = mpmath.eigsy(factor.T * t * factor)
        inverse = factor**-1
        exact = inverse.T * vectors * mpmath.diag([mpmath.sqrt(v) for v in values]) * vectors.T * inverse
    expected = np.array(exact.tolist(), dtype=float).T
    np.testing.assert_allclose(fitted.matrix_ * units[:, None] / units, expected * units[:, None] / units, atol=1e-7)
    moved = fitted.transform(source * units) / units
    np.testing.assert_allclose(np.cov(moved.T), 50 / 49 * np.cov(target.T, bias=True), atol=1e-7)


def test_the_linear_map_of_thirty_correlated_features_has_the_covariance_of_the_target() -> None:
    """Their deviations are 1e-3 to 1e3; powers of covariances were off by 400 variances."""
    samples = load_breast_cancer().data
    source, target = samples[::2], samples[1::2]
    moved = TransportAdapter().fit(source, target=target).transform(source)
    scale = target.std(0)
    difference = (np.cov(moved.T, bias=True) - np.cov(target.T, bias=True)) / scale / scale[:, None]
    assert np.abs(difference).max() < 1e-3  # the ridge


def test_fewer_samples_than_features_are_warned_of() -> None:
    rng = np.random.default_rng(0)
    source, target = rng.normal(size=(5, 20)), rng.normal(size=(30, 20))
    with pytest.warns(UserWarning, match="fewer samples than features"):
        TransportAdapter().fit(source, target=target)
    fitted = TransportAdapter(ridge=0.1).fit(source, target=target)  # and no warning
    assert np.abs(fitted.transform(rng.normal(size=(9, 20)))).max() < 20


def test_settings_of_the_other_method_raise() -> None:
    for settings in ({"epsilon": 0.1}, {"method": "barycentric", "ridge": 0.1}):
        with pytest.raises(ValueError, match=r"is given with method=.*expected method=.*leave it out"):
            TransportAdapter(**settings).fit(np.eye(2), target=np.eye(2))


def test_features_that_depend_need_a_ridge() -> None:
    source = np.c_[SOURCE, SOURCE]
    with pytest.raises(ValueError, match="depend on each other, and the ridge is too small"):
        TransportAdapter(ridge=1e-200).fit(source, target=source)


def test_equal_samples_move_to_the_mean_of_their_mass() -> None:
    """On the line the exact plan is monotone: each value has one piece of the sorted target."""
    generator = np.random.default_rng(0)
    X, target = generator.integers(0, 3, (200, 1)).astype(float), generator.normal(5, 2, (200, 1))
    moved = TransportAdapter("barycentric").fit(X, target=target).transform(X)
    pieces = np.split(np.sort(target[:, 0]), np.cumsum(np.bincount(X[:, 0].astype(int)))[:-1])
    expected = [pieces[int(value)].mean() for value in X[:, 0]]
    np.testing.assert_allclose(moved[:, 0], expected, atol=1e-9)


def test_the_map_is_that_of_the_last_fit_that_succeeded() -> None:
    """Whatever settings were set after it, or failed in a fit since."""
    draw = np.random.default_rng(5)
    pd = pytest.importorskip("pandas")
    source, target = (pd.DataFrame(draw.normal(size=(20, 2)), columns=["a", "b"]) for _ in range(2))
    settings = [{"method": "linear"}, {"method": "barycentric"}, {"method": "barycentric", "epsilon": 0.5}]
    adapter = TransportAdapter()
    for own in settings:
        adapter.set_params(**{"epsilon": None} | own).fit(source, target=target)
        moved = adapter.transform(source)
        np.testing.assert_array_equal(moved, TransportAdapter(**own).fit(source, target=target).transform(source))
        with pytest.raises(ValueError, match=r"target has the columns \['a', 'b'\]"):
            adapter.fit(source[["b", "a"]], target=target)
        for other in [*settings, {"method": "barycentric", "epsilon": 0.01}]:
            adapter.set_params(**{"epsilon": None} | other)
            np.testing.assert_array_equal(adapter.transform(source), moved)


@pytest.mark.parametrize("settings", [{}, {"method": "barycentric"}, {"method": "barycentric", "epsilon": 0.5}])
def test_the_samples_of_the_fit_may_be_changed_after_it(settings: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    source, target, X = (random.normal(size=(20, 2)) for _ in range(3))
    adapter = TransportAdapter(**settings).fit(source, target=target)
    expected = adapter.transform(X)
    source += 1
    target += 1
    np.testing.assert_array_equal(adapter.transform(X), expected)
