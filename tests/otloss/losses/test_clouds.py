"""Moving clouds against GeomLoss, linear programs and loops, and rigid registration against motions that are known."""

import math
import re
from typing import Any

import pytest
import torch
from geomloss import SamplesLoss
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.autograd import forward_ad, gradcheck

import otloss
from otloss import cloud_loss, register
from otloss.costs.order import Ordering
from tests.errors import raising
from tests.otloss.draws import draw, normal, weights
from tests.samples import sampled

KINDS: list[dict[str, Any]] = [
    {"kind": "divergence", "epsilon": 0.2, "tolerance": 1e-10},
    {"kind": "divergence", "epsilon": 0.2, "tolerance": 1e-10, "metric": "euclidean", "marginal_penalty": 0.7},
    {"kind": "emd"},
    {"kind": "emd", "metric": "euclidean"},
    {"kind": "sliced", "metric": "euclidean", "projections": torch.tensor([[1.0, 0.3], [-0.4, 1.0]]).double()},
]


# GeomLoss takes 1e-4 for the distance of a point from itself, and its unbalanced gradients are scaled wrongly.
BLURS = [("sqeuclidean", 2, None, 1e-6), ("euclidean", 1, None, 3e-4), ("sqeuclidean", 2, 0.6, 3e-3)]


@pytest.mark.parametrize(("metric", "p", "reach", "rtol"), BLURS)
def test_blur_is_that_of_geomloss(metric: str, p: int, reach: float | None, rtol: float) -> None:
    x, y, a, b = draw(20, 3).requires_grad_(), draw(25, 3, seed=1) + 0.2, weights(20), weights(25, seed=6)
    loss = SamplesLoss("sinkhorn", p=p, blur=1.0, reach=reach, scaling=0.99, diameter=4.0, backend="tensorized")
    theirs = loss(a, x, b, y).squeeze()
    penalty, factor = None if reach is None else 2 * reach**2, 2 if p == 2 else 1
    options: dict[str, Any] = {"metric": metric, "marginal_penalty": penalty, "tolerance": 1e-12}
    ours = cloud_loss(x, y, a, b, blur=1.0, **options)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0)
    torch.testing.assert_close(ours, cloud_loss(x, y, a, b, epsilon=float(factor), **options) / factor)
    if reach is None:
        gradients = [torch.autograd.grad(value, x)[0] for value in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_the_default_blur_is_that_of_geomloss_and_one_too_small_for_the_clouds_is_named() -> None:
    x, y = draw(20, 3), draw(25, 3, seed=1) + 0.2
    for metric, p in (("sqeuclidean", 2), ("euclidean", 1)):
        theirs = SamplesLoss("sinkhorn", p=p, scaling=0.99, backend="tensorized")(x, y).squeeze()
        torch.testing.assert_close(cloud_loss(x, y, metric=metric), theirs, rtol=2e-3, atol=0)
    for options, told in (({}, "blur is 0.05 by default"), ({"blur": 0.1, "metric": "euclidean"}, "blur is 0.1,")):
        with pytest.raises(ValueError, match=rf"{told}.* expected at least \S+ for clouds of this size") as error:
            cloud_loss(1e12 * x, 1e12 * y, **options)
        smallest = float(re.findall(r"at least (\S+)", str(error.value))[0])
        assert cloud_loss(1e12 * x, 1e12 * y, **{**options, "blur": 1e3 * smallest}).isfinite()
    with pytest.warns(otloss.ConvergenceWarning, match=r"Raise epsilon \(blur, for cloud_loss\)"):
        cloud_loss(100 * draw(200, 2), 100 * draw(200, 2, seed=1), blur=0.01, tolerance=1e-18)


def dense_divergence(x: Tensor, y: Tensor, epsilon: float) -> float:
    """By logarithms in float64, at falling values of epsilon."""

    def cost(x: Tensor, y: Tensor) -> float:
        C, f, g = torch.cdist(x, y).square(), x.new_zeros(len(x)), y.new_zeros(len(y))
        for stage in range(4, -1, -1):
            width = epsilon * 2.0**stage
            for _ in range(120):
                f = -width * (torch.logsumexp((g - C) / width, 1) - math.log(len(y)))
                g = -width * (torch.logsumexp((f - C.mT) / width, 1) - math.log(len(x)))
        return float(f.mean() + g.mean())

    return cost(x, y) - (cost(x, x) + cost(y, y)) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clouds_on_a_line_by_the_way_of_large_ones(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's method between points; at a small blur the value is the cost of sorted points."""
    monkeypatch.setattr("otloss.costs.order.ORDERING", Ordering(min_pairs=0))
    monkeypatch.setattr("otloss.solvers.entropic.ladder.PATIENCE", 2)
    for n, m in ((1, 3), (2, 1), (30, 40)):
        x, y = normal(n, 1, seed=1, scale=0.7), normal(m, 1, seed=2)
        expected = dense_divergence(x, y, 2 * 0.2**2) / 2
        assert float(cloud_loss(x.to(dtype), y.to(dtype), blur=0.2)) == pytest.approx(expected, rel=1e-4)
        expected = float(otloss.wasserstein_1d(None, None, x[:, 0], y[:, 0], order=2)) / 2
        assert float(cloud_loss(x.to(dtype), y.to(dtype), blur=0.005)) == pytest.approx(expected, rel=1e-3)


def test_assignments_have_the_precision_of_the_points_and_large_ones_start_from_sinkhorn() -> None:
    # Mixed, apart, and in clusters whose shares differ.
    x, y = draw(3, 300, 3, seed=3), draw(3, 300, 3, seed=4)
    y[1] += 20
    x[2, :100] += 5
    y[2, :150] += 5
    leaf = x.clone().requires_grad_()
    value = cloud_loss(leaf, y, kind="emd")
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    for k in range(3):
        rows, columns = linear_sum_assignment(torch.cdist(x[k], y[k]).square().numpy())
        apart = x[k] - y[k][columns]
        torch.testing.assert_close(value[k], apart[rows].square().sum() / 300, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient[k], 2 * apart / 300)
    cost = otloss.costs.PointCost(x[1], y[1])
    assert 2 * otloss.solve(None, None, cost).iterations < otloss.solve(None, None, cost.dense()).iterations


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(str(v) for v in o.values() if isinstance(v, str)))
def test_ragged_batches_are_loops_and_gradients_are_right(options: dict[str, Any]) -> None:
    sizes_x, sizes_y = (4, 1, 6), (3, 5, 2)
    x, y = ([draw(n, 2, seed=10 * s + n) for n in sizes] for s, sizes in enumerate((sizes_x, sizes_y)))
    a = [weights(n, seed=n) for n in sizes_x]
    loop = torch.stack([cloud_loss(*case, **options) for case in zip(x, y, a, strict=True)])
    torch.testing.assert_close(cloud_loss(x, y, a, **options), loop)
    # Padded with what must not be read; and one cloud for all.
    mask = torch.arange(6) < torch.tensor(sizes_x).unsqueeze(-1)
    padded, padded_a = torch.full((3, 6, 2), torch.nan, dtype=torch.float64), torch.rand(3, 6, dtype=torch.float64)
    padded[mask], padded_a[mask] = torch.cat(x), torch.cat(a)
    torch.testing.assert_close(cloud_loss(padded, y, padded_a, mask_x=mask, **options), loop)
    shared = torch.stack([cloud_loss(cloud, y[0], **options) for cloud in x])
    torch.testing.assert_close(cloud_loss(padded, y[0], mask_x=mask, **options), shared)
    leaves = [t.requires_grad_() for t in (*x, *y)]
    assert gradcheck(lambda *t: cloud_loss(list(t[:3]), list(t[3:]), a, **options), leaves, atol=1e-5, fast_mode=True)
    leaf = padded.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cloud_loss(leaf, y[0], mask_x=mask, **options).sum(), leaf)
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] != 0).any()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(str(v) for v in o.values() if isinstance(v, str)))
def test_gradients_of_weights_do_not_depend_on_the_sizes_of_other_clouds(options: dict[str, Any]) -> None:
    sizes = (4, 1, 6)
    x, y = ([draw(n, 2, seed=10 * s + n) for n in sizes] for s in range(2))
    a = [weights(n, seed=n).requires_grad_() for n in sizes]
    alone = [torch.autograd.grad(cloud_loss(*case, **options), case[2])[0] for case in zip(x, y, a, strict=True)]
    actual = torch.autograd.grad(cloud_loss(x, y, a, **options).sum(), a)
    torch.testing.assert_close(list(actual), alone)
    mask = torch.arange(6) < torch.tensor(sizes).unsqueeze(-1)
    padded, padded_a = torch.zeros(3, 6, 2, dtype=torch.float64), torch.rand(3, 6, dtype=torch.float64)
    padded[mask], padded_a[mask] = torch.cat(x), torch.cat(a).detach()
    values = cloud_loss(padded, y, padded_a.requires_grad_(), mask_x=mask, **options)
    (gradient,) = torch.autograd.grad(values.sum(), padded_a)
    torch.testing.assert_close(gradient[mask], torch.cat(alone))
    assert (gradient[~mask] == 0).all()
    if options["kind"] != "divergence":  # has no forward mode
        tangent = draw(3, 6, seed=9)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(padded_a.detach(), tangent)
            change = forward_ad.unpack_dual(cloud_loss(padded, y, dual, mask_x=mask, **options)).tangent
        torch.testing.assert_close(change, (gradient * tangent).sum(-1))


def test_an_infinite_weight_of_a_padded_cloud_is_named() -> None:
    a = [torch.tensor([0.5, 0.5]), torch.tensor([0.5, torch.inf, 0.5]).requires_grad_()]
    clouds = [torch.rand(2, 2), torch.rand(3, 2)]
    with pytest.raises(ValueError, match=r"a holds 1 .*infin.*\(1, 1\)"):
        cloud_loss(clouds, clouds, a)


@pytest.mark.parametrize("penalty", [None, 1.0, (1.0, None), (None, 1.0)])
def test_weights_of_a_batch_with_an_empty_cloud_have_gradients(penalty: Any) -> None:
    """As the other pairs alone; a first mass in an empty cloud would have an infinite derivative."""
    x, y = torch.rand(3, 1, 4, 2, generator=torch.Generator().manual_seed(0)).double(), torch.rand(5, 2).double()
    weights = torch.full((3, 2, 4), 0.25).double().requires_grad_()
    mask = torch.tensor([True, False, True])[:, None, None].expand(3, 1, 4)
    options = {"epsilon": 0.1, "marginal_penalty": penalty}
    values = cloud_loss(x, y, weights, mask_x=mask, empty="zero", **options)
    (gradient,) = torch.autograd.grad(values.sum(), weights)
    alone = cloud_loss(x[::2], y, weights[::2], **options)
    torch.testing.assert_close(values[::2], alone)
    torch.testing.assert_close(gradient[::2], torch.autograd.grad(alone.sum(), weights)[0][::2])
    assert not values[1].any()
    assert not gradient[1].any()
    per_pair = torch.tensor([[0.1], [0.2], [0.5]]).double()  # options per pair go with their pairs
    options = {"epsilon": per_pair, "marginal_penalty": None if penalty is None else (None, 5 * per_pair)}
    values = cloud_loss(x, y, weights, mask_x=mask, empty="zero", **options)
    for k in (0, 2):
        own = {"epsilon": 0.1 * (1, 2, 5)[k], "marginal_penalty": penalty and (None, 0.5 * (1, 2, 5)[k])}
        torch.testing.assert_close(values[k], cloud_loss(x[k], y, weights[k], **own), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", KINDS[::2])
def test_empty_clouds(options: dict[str, Any]) -> None:
    x, y = [draw(3, 2), draw(0, 2), draw(2, 2)], draw(4, 2, seed=1).requires_grad_()
    with pytest.raises(ValueError, match=r'x has no point in cloud \(1,\), expected at least one.*empty="zero"'):
        cloud_loss(x, y, **options)
    value = cloud_loss(x, y, empty="zero", **options)
    torch.testing.assert_close(value[0], cloud_loss(x[0], y, **options))
    assert value[1] == 0 < value[2]
    (gradient,) = torch.autograd.grad(value[1], y, retain_graph=True)
    assert (gradient == 0).all()
    none = cloud_loss(torch.zeros(2, 0, 2), torch.zeros(2, 4, 2), empty="zero", **options)
    assert none.tolist() == [0, 0]
    assert cloud_loss(torch.zeros(0, 4, 2).double(), y, **options).shape == (0,)


test_bad_input = raising(
    ({"epsilon": None, "metric": "cityblock"}, "metric is 'cityblock', expected one of"),
    ({"epsilon": None, "metric": "l1"}, "metric='l1' has no default blur; give epsilon"),
    ({"blur": 0.1}, "both epsilon and blur are given"),
    ({"kind": "emd"}, 'epsilon given for kind="emd"'),
    ({"mask_x": torch.ones(4)}, TypeError, "mask_x has dtype torch.float32, expected torch.bool"),
    ({"a": torch.ones(4)}, "a and b hold different masses.*a / a.sum.*keepdim=True\\)\\.$"),
    ({"a": torch.ones(4) / 4, "mask_x": torch.arange(4) < 3}, "0.75 and 1.*Weights where mask_x is"),
    ({"x": [torch.zeros(2, 2), torch.zeros(2, 3)]}, r"x\[1\] has shape \(2, 3\), expected"),
    call=lambda change: otloss.cloud_loss(**({"x": torch.zeros(4, 2), "y": torch.ones(3, 2), "epsilon": 0.1} | change)),
)


def shape(n: int, d: int = 3, seed: int = 0) -> Tensor:
    """A bent cloud, unlike any rotation of itself."""
    t = torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    t[:, 0] = 3 * t[:, 0].square()
    t[:, 1] = t[:, 1] + t[:, 0].square() / 3
    return t


def motion(d: int, angle: float) -> tuple[Tensor, Tensor]:
    turn = torch.zeros(d, d, dtype=torch.float64)
    turn[0, 1], turn[1, 0] = -angle, angle
    return torch.linalg.matrix_exp(turn), torch.full((d,), 7.0, dtype=torch.float64)


@pytest.mark.parametrize(("d", "angle", "restarts"), [(2, 0.6, 0), (3, 0.6, 0), (3, 2.4, 12)])
def test_known_motions_are_found(d: int, angle: float, restarts: int) -> None:
    x, (rotation, translation) = shape(120, d), motion(d, angle)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    y = (x @ rotation.mT + translation)[order]
    a = torch.rand(120, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.1
    actual = register(
        x, y, a / a.sum(), (a / a.sum())[order], epsilon=1e-3, restarts=restarts,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    torch.testing.assert_close(actual.rotation, rotation, atol=1e-3, rtol=0)
    torch.testing.assert_close(actual.translation, translation, atol=1e-2, rtol=0)
    torch.testing.assert_close(actual.apply(x)[order], y, atol=1e-2, rtol=0)
    assert torch.linalg.det(actual.rotation) > 0.99
    assert actual.transport.plan().shape == (120, 120)


def test_registration_leaves_poses_that_are_as_symmetric_as_both_clouds() -> None:
    """A brick across another one: no turn changes the value to first order, and a quarter turn makes them one."""
    brick = torch.cartesian_prod(torch.arange(4.0), torch.arange(2.0))
    actual = register(brick, brick.flip(1), epsilon=0.05)
    assert actual.rotation[0].abs().tolist() == pytest.approx([0, 1], abs=1e-3)
    assert float(actual.transport.value) == pytest.approx(0.1040, abs=1e-3)


@pytest.mark.parametrize(("angle", "restarts"), [(0.3, 0), (2.0, 15)])
def test_parts_without_a_partner_drop_out(angle: float, restarts: int) -> None:
    x, (rotation, translation) = shape(120), motion(3, angle)
    y = x @ rotation.mT + translation
    along = x[:, 0].argsort()
    left, right = x[along[12:]], y[along[:-12]]  # a tenth is missing on each side, at either end
    errors = []
    for penalty in (0.02, None):
        actual = register(
            left, right, epsilon=2e-3, marginal_penalty=penalty, steps=60, restarts=restarts,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        errors.append((actual.rotation - rotation).norm())
    assert errors[0] < 0.05
    assert errors[0] < 0.3 * errors[1]


test_bad_registration = raising(
    ({"y": torch.zeros(4, 2)}, "x has 3 coordinates"),
    ({"a": torch.zeros(4), "b": torch.zeros(5)}, "a has no mass"),
    ({"b": torch.tensor([1.0, 1.0, torch.nan, 1.0, 1.0])}, "b holds 1 NaN"),
    ({"a": torch.tensor([2.0, -1.0, 0.0, 0.0])}, "a holds -1.0 in bin 1"),
    ({"a": torch.full((2, 4), 0.25)}, r"a has shape \(2, 4\), expected \(4,\)"),
    ({"a": torch.ones(4)}, "a and b hold different masses"),
    call=lambda change: register(**({"x": torch.rand(4, 3), "y": torch.rand(5, 3), "epsilon": 0.1} | change)),
)


def many_axes(kind: str, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two pairs of clouds of more pairs than torch takes alone, in numbers that float32 holds, and weights."""
    generator = torch.Generator().manual_seed(d)
    x, y = (torch.randn(2, n, d, generator=generator) / d**0.5 for n in (260, 270))
    parts = [torch.arange(t.shape[1]) % 3 for t in (x, y)]
    a, b = (torch.rand(len(part), generator=generator, dtype=torch.float64) + 0.2 for part in parts)
    if kind != "one":  # parts of equal masses: plain updates hardly exchange mass between them
        a, b = (w / torch.zeros(3).double().index_add_(0, i, w)[i] for w, i in zip((a, b), parts, strict=True))
    if kind == "clusters":
        centres = 10 * torch.randn(3, d, generator=generator) / d**0.5
        x, y = (t + centres[part] for t, part in zip((x, y), parts, strict=True))
    if kind == "near":  # far from the centre, with duplicates and points that nearly are
        x, y = (t + 3.0 * (part > 0).unsqueeze(-1) / d**0.5 for t, part in zip((x, y), parts, strict=True))
        y[:, 10:40] = x[:, 10:40]
        y[:, 20:40] += 1e-4 * torch.randn(20, d, generator=generator)
        x[:, 50:60:3] = x[:, 50:51]
    return x, y, a / a.sum(), b / b.sum()


def divergence_by_matrices(
    x: Tensor, y: Tensor, a: Tensor, b: Tensor, rho: float | None, epsilon: float = 0.3
) -> tuple[Tensor, Tensor]:
    """The divergence between squared distances and its gradient in x, in float64 from differences, by plain updates."""
    damping = 1.0 if rho is None else rho / (rho + epsilon)
    value, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(x)
    if rho is None:
        a, b = (w / w.sum() * (a.sum() + b.sum()) / 2 for w in (a, b))
    for one, other, p, q, share in ((x, y, a, b, 1.0), (x, x, a, a, -0.5), (y, y, b, b, -0.5)):
        costs = torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist").square()
        f, g = torch.zeros_like(p), torch.zeros_like(q)
        for _ in range(120):
            new_f = -damping * epsilon * ((g - costs) / epsilon + q.log()).logsumexp(-1)
            f = (f + new_f) / 2 if one is other else new_f
            g = f if one is other else -damping * epsilon * ((f - costs.mT) / epsilon + p.log()).logsumexp(-1)
        plan = ((f.unsqueeze(-1) + g - costs) / epsilon).exp() * p.unsqueeze(-1) * q
        if rho is None:
            value = value + share * (f @ p + g @ q)
        else:
            kept = sum(w @ (1 - (-h / rho).exp()) for w, h in ((p, f), (q, g)))
            value = value + share * (rho * kept - epsilon * (plan.sum() - p.sum() * q.sum()))
        if one is x:
            gradient = gradient + share * (2 if other is y else 4) * (plan.sum(-1, keepdim=True) * one - plan @ other)
    return value + (0 if rho is None else epsilon * (a.sum() - b.sum()) ** 2 / 2), gradient


MANY_AXES = [("one", 1536, None), ("clusters", 64, None), ("near", 64, None), ("near", 64, 2.0)]
ROUNDINGS = [(torch.float32, 2e-5), (torch.float64, 1e-8)]


# Each kind with one of the dtypes, and then with the other one.
@pytest.mark.parametrize(
    ("kind", "d", "rho", "dtype", "rtol"),
    sampled(4, [(*case, *ROUNDINGS[(k + turn) % 2]) for turn in range(2) for k, case in enumerate(MANY_AXES)]),
)
def test_clouds_of_many_axes(kind: str, d: int, rho: float | None, dtype: torch.dtype, rtol: float) -> None:
    clouds = many_axes(kind, d)
    x, y, a, b = (t.to(dtype) for t in clouds)
    x = x.clone().requires_grad_()
    values = cloud_loss(x, y, a, b, epsilon=0.3, marginal_penalty=rho, tolerance=1e-3 * rtol)
    gradients = torch.autograd.grad(values.sum(), x)[0]
    x, y, a, b = (t.double() for t in clouds)
    for k in range(2):
        value, gradient = divergence_by_matrices(x[k], y[k], a, b, rho)
        torch.testing.assert_close(values[k].double(), value, rtol=rtol, atol=0)
        largest = float(gradient.abs().max())
        torch.testing.assert_close(gradients[k].double(), gradient, rtol=0, atol=rtol * largest)


@pytest.mark.parametrize("seed", range(8))
def test_gradients_of_weights_are_centred_where_points_are_equal(seed: int) -> None:
    """Derivatives of equal points differ by rounding, which is no reason to centre the others by another constant."""
    x, y, a, b = draw(6, 2, seed=seed), draw(4, 2, seed=seed + 50), draw(6, seed=seed), draw(4, seed=seed + 50)
    y[1] = y[0]
    b = b.abs() * torch.tensor([1.0, 1.0, 1.0, 0.0])
    a, b = a.softmax(0), (b / b.sum()).requires_grad_()
    one, other = (
        torch.autograd.grad(value, b)[0]
        for value in (
            otloss.cloud_loss(x, y, a, b, metric="euclidean", blur=0.3),
            otloss.cloud_loss(y, x, b, a, metric="euclidean", blur=0.3),
        )
    )
    assert one.sum().abs() < 1e-9 * one.abs().max()
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
