"""The ordinal loss against plain formulas in float64, exact transport and high precision; what it takes and rejects."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from torch import Tensor
from torch.nn.functional import one_hot

from otloss import cdf_distance, ordinal_loss
from tests.errors import raising
from tests.otloss.draws import normal
from tests.otloss.oracles import as_double, linprog_value
from tests.otloss.strategies import weights

X = np.array([0.0, 0.5, 2.0, 5.0, 5.5])
COST = np.random.default_rng(0).uniform(0.1, 3, (5, 5))


def arcs(x: np.ndarray, period: float) -> np.ndarray:
    apart = np.abs(np.subtract.outer(x, x))
    return np.minimum(apart, period - apart)


def plain(p: np.ndarray, t: np.ndarray, settings: dict[str, Any]) -> float:
    """The loss by its definition, transport by linear programming."""
    x = settings.get("x", np.arange(p.size, dtype=float))
    power, period = settings.get("power", 2), settings.get("period", float(p.size))
    if "cost" in settings:
        return linprog_value(t, p, settings["cost"])
    if settings.get("circular"):
        if power == 1:
            return linprog_value(t, p, arcs(x, period))
        gaps = np.append(np.diff(x), period - (x[-1] - x[0]))
        r = np.cumsum(p - t)
        candidates = np.linspace(r.min(), r.max(), 4001)  # the least over m, by a search and not by the mean
        return float(min((gaps * (r - m) ** 2).sum() for m in candidates))
    return float((np.diff(x) * np.abs(np.cumsum(p - t)[:-1]) ** power).sum())


SETTINGS: dict[str, dict[str, Any]] = {
    "power 1": {"power": 1},
    "power 2": {},
    "power 1.5": {"power": 1.5},
    "spaced 2": {"x": X},
    "cost": {"cost": COST},
    "circle 1": {"circular": True, "power": 1},
    "circle 2": {"circular": True},
    "spaced circle 1": {"circular": True, "power": 1, "x": X, "period": 7.0},
    "spaced circle 2": {"circular": True, "x": X, "period": 7.0},
}
every_setting = pytest.mark.parametrize("name", SETTINGS)


def tensors(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {k: torch.tensor(v, dtype=dtype) if isinstance(v, np.ndarray) else v for k, v in SETTINGS[name].items()}


@every_setting
@settings(max_examples=25, deadline=None)
@given(weights(5), st.lists(st.floats(-4, 4), min_size=5, max_size=5))
def test_soft_labels_are_the_definition(name: str, t: np.ndarray, z: list[float]) -> None:
    value = ordinal_loss(as_double(np.array(z)), as_double(t), **tensors(name))
    assert value.item() == pytest.approx(plain(softmax(np.array(z)), t, SETTINGS[name]), abs=2e-6)


@every_setting
def test_classes_and_one_hot_labels_are_the_definition_in_every_dtype(name: str) -> None:
    z, y = normal(5, 6, seed=0).T, torch.tensor([0, 1, 2, 3, 4, 2])
    expected = [plain(softmax(row.numpy()), np.eye(5)[k], SETTINGS[name]) for row, k in zip(z, y, strict=True)]
    for target in (y, y.int(), y.to(torch.uint8), one_hot(y, 5).double()):
        value = ordinal_loss(z, target, **tensors(name), reduction="none")
        np.testing.assert_allclose(value.numpy(), expected, atol=2e-6)
    for dtype in (torch.float32, torch.bfloat16):
        leaf = z.to(dtype).requires_grad_()
        exact = leaf.detach().double().requires_grad_()
        given = tensors(name, dtype)
        value = ordinal_loss(leaf, y, **given, reduction="none")
        wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in given.items()}
        true = ordinal_loss(exact, y, **wide, reduction="none")
        assert value.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(value.double(), true, rtol=eps, atol=1e-6)
        gradients = (torch.autograd.grad(v.sum(), t)[0].double() for v, t in ((value, leaf), (true, exact)))
        torch.testing.assert_close(*gradients, rtol=eps, atol=1e-5)
    with_weights = ordinal_loss(z.bfloat16(), y, class_weight=torch.ones(5), x=torch.arange(5))
    assert with_weights.dtype == torch.float32
    with torch.autocast("cpu"):
        assert ordinal_loss(z.bfloat16(), y, **tensors(name, torch.bfloat16)).dtype == torch.float32
    thirds = torch.full((1, 3), 1 / 3, dtype=torch.bfloat16)  # the mass is 1.002
    assert ordinal_loss(torch.zeros(1, 3, dtype=torch.float64), thirds, power=1) < 1e-9


@every_setting
def test_first_and_second_derivatives(name: str) -> None:
    z, y = normal(3, 5, seed=2).requires_grad_(), torch.tensor([0, 2, 4])
    for target in (y, normal(3, 5, seed=3).softmax(-1)):
        call = lambda z, t=target: ordinal_loss(z, t, **tensors(name), cross_entropy=0.2, reduction="none")  # noqa: E731
        assert torch.autograd.gradcheck(call, z)
        if name != "cost" or target is y:
            assert torch.autograd.gradgradcheck(call, z)
            continue
        (gradient,) = torch.autograd.grad(call(z).sum(), z, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative of emd"):
            gradient.square().sum().backward()


def test_soft_labels_without_mass_have_one_sided_derivatives_that_are_centred() -> None:
    t = as_double(np.array([0.0, 0.0, 1.0, 0.0, 0.0]), grad=True)
    (actual,) = torch.autograd.grad(ordinal_loss(normal(5, seed=7), t, power=1), t)
    (expected,) = torch.autograd.grad(cdf_distance(normal(5, seed=7).softmax(-1), t, power=1), t)
    torch.testing.assert_close(actual, expected)
    assert abs(float(actual.sum())) < 1e-12


@pytest.mark.parametrize("name", ["power 1", "power 2", "power 1.5", "cost", "circle 1", "circle 2"])
@pytest.mark.parametrize("margin", [5.0, 25.0])
def test_nearly_right_predictions_keep_their_relative_accuracy(name: str, margin: float) -> None:
    z = margin * one_hot(torch.tensor([0, 2, 4, 3]), 5).double() + normal(4, 5, seed=11, scale=0.3)
    y = torch.tensor([0, 2, 4, 3])
    options = tensors(name)
    if name == "cost":
        options["cost"] = options["cost"] - options["cost"].diagonal().diag()
    narrow = {k: v.float() if isinstance(v, Tensor) else v for k, v in options.items()}
    actual, wide = z.float().requires_grad_(), z.float().double().requires_grad_()
    values = ordinal_loss(actual, y, **narrow, reduction="none")
    # Oracle: tails from float64 exponentials, summed one by one, and the chain rule by hand.
    expected = ordinal_loss(wide, y, **options, reduction="none")
    by_hand = [by_tails(row.detach().numpy(), int(k), name, options) for row, k in zip(wide, y, strict=True)]
    true_values, true_gradients = np.array([v for v, _ in by_hand]), np.stack([s for _, s in by_hand])
    np.testing.assert_allclose(expected.detach().numpy(), true_values, rtol=1e-12)
    np.testing.assert_allclose(values.detach().double().numpy(), true_values, rtol=1e-5)
    np.testing.assert_allclose(torch.autograd.grad(expected.sum(), wide)[0].numpy(), true_gradients, rtol=1e-11)
    np.testing.assert_allclose(torch.autograd.grad(values.sum(), actual)[0].double().numpy(), true_gradients, rtol=3e-5)


def by_tails(z: np.ndarray, y: int, name: str, options: dict[str, Any]) -> tuple[float, np.ndarray]:
    """The value, and its gradients in the logits."""
    e = np.exp(z - z[y])
    p = e / e.sum()
    if name in ("cost", "circle 1"):
        price = options["cost"][y].numpy() if name == "cost" else arcs(np.arange(5.0), 5.0)[y]
        return float(p @ price), p * (price - p @ price)
    r = np.array([sum(p[: k + 1]) if k < y else -sum(p[k + 1 :]) for k in range(5)])
    if name == "circle 2":
        value, by_r = float(((r - r.mean()) ** 2).sum()), 2 * (r - r.mean())
    else:
        power = {"power 1": 1, "power 2": 2, "power 1.5": 1.5}[name]
        value, by_r = float((np.abs(r[:-1]) ** power).sum()), power * np.abs(r) ** (power - 1) * np.sign(r)
    # p_i moves r_k by 1 for i <= k < y, and by -1 for i > k >= y.
    s = np.array([sum(by_r[i:y]) - sum(by_r[y:i]) for i in range(5)])
    return value, p * (s - p @ s)


@every_setting
@pytest.mark.parametrize(("scale", "dtype"), [(1e30, torch.float32), (1e4, torch.float64)])
def test_large_logits(name: str, scale: float, dtype: torch.dtype) -> None:
    z = (scale * torch.tensor([[1.0, -1, 0, 0.5, -0.5], [0, 0, 1, 1, -1]], dtype=dtype)).requires_grad_()
    for target in (torch.tensor([2, 2]), torch.tensor([[0.5, 0, 0, 0, 0.5], [0, 0, 0.5, 0.5, 0]], dtype=dtype)):
        value = ordinal_loss(z, target, **tensors(name, dtype), cross_entropy=0.5, reduction="none")
        assert torch.isfinite(value).all()
        (gradient,) = torch.autograd.grad(value.sum(), z)
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() >= 0.2  # the cross-entropy keeps its gradient


def test_integers_of_every_dtype_are_what_they_are_in_int64() -> None:
    z, y, x = normal(40, 3, seed=30).float(), torch.arange(40) % 3, torch.tensor([0.0, 10.0, 25.0])
    for options in ({}, {"circular": True, "period": 32.0}):
        for values in (x.long() + 1_700_000_000, x.to(torch.uint8)):  # computed in float64
            actual, expected = (ordinal_loss(z, y, x=v, **options, reduction="none") for v in (values, x))  # type: ignore[arg-type]
            torch.testing.assert_close(actual, expected)
    z = normal(2, 200, seed=32)
    for dtype, labels in ((torch.uint8, [156, 199]), (torch.int8, [100, 127]), (torch.int32, [156, 199])):
        y = torch.tensor(labels)  # 156 is -100 modulo 256
        actual = ordinal_loss(z, y.to(dtype), ignore_index=-100, reduction="none")
        torch.testing.assert_close(actual, ordinal_loss(z, y, reduction="none"))


def same_with_gradients(actual: Tensor, leaf: Tensor, expected: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), t)[0] for v, t in ((actual, leaf), (expected, other))))


@pytest.mark.parametrize("n", [8, 4000])  # in torch, and by the kernel
def test_weights_count_as_copies_and_ignored_positions_are_not_looked_at(n: int) -> None:
    z, y, copies = normal(n, 5, seed=17), torch.arange(n) % 5, torch.arange(n) % 4
    by_class = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    for weight in (copies, copies.double(), copies > 0):
        for reduction in ("mean", "sum"):
            leaf, again = z.clone().requires_grad_(), z.clone().requires_grad_()
            repeated = (t.repeat_interleave(weight.long(), 0) for t in (again, y))
            value = ordinal_loss(leaf, y, sample_weight=weight, class_weight=by_class, reduction=reduction)
            expected = ordinal_loss(*repeated, class_weight=by_class, reduction=reduction)
            same_with_gradients(value, leaf, expected, again)
    soft = normal(n, 5, seed=19).softmax(-1)  # takes the expected class weight
    value, weight = ordinal_loss(z, soft, class_weight=by_class), soft @ by_class
    torch.testing.assert_close(value, (weight * ordinal_loss(z, soft, reduction="none")).sum() / weight.sum())
    torch.testing.assert_close(value, ordinal_loss(z, soft, sample_weight=weight))
    for ignored in (-100, 2, 7):
        left_out = (torch.arange(n) % 6 == 3) | (y == ignored)
        leaf = z.masked_fill(left_out.unsqueeze(-1), torch.nan).requires_grad_()
        given = {"target": y.masked_fill(left_out, ignored), "ignore_index": ignored}
        assert torch.equal(ordinal_loss(leaf, **given, reduction="none") == 0, left_out)
        same_with_gradients(ordinal_loss(leaf, **given), leaf, ordinal_loss(leaf[~left_out], y[~left_out]), leaf)


@every_setting
@pytest.mark.parametrize("n", [1, 500])
def test_masked_classes_take_no_part(name: str, n: int) -> None:
    z, y = normal(n, 5, seed=12).float(), torch.arange(n) % 5
    soft = one_hot(y, 5).float() * 0.5 + torch.tensor([0.5, 0, 0, 0, 0])
    for target in (y, soft):
        masked, low = (z.index_fill(1, torch.tensor(1), fill).requires_grad_() for fill in (-torch.inf, -1e4))
        given: dict[str, Any] = {"target": target, "reduction": "none", **tensors(name, torch.float32)}
        values = [ordinal_loss(leaf, **given) for leaf in (masked, low)]
        assert all(value.isfinite().all() for value in values)
        gradients = [torch.autograd.grad(v.sum(), leaf)[0] for v, leaf in zip(values, (masked, low), strict=True)]
        assert torch.equal(gradients[0][:, 1], torch.zeros(n))
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    for target in (torch.full((n,), 3), torch.tensor([0.5, 0.0, 0.0, 0.5, 0.0]).expand(n, 5)):
        mixed = ordinal_loss(masked, target, cross_entropy=1.0, **tensors(name, torch.float32))
        assert torch.autograd.grad(mixed, masked)[0].isfinite().all()


def test_the_axis_of_the_classes() -> None:
    z, y = normal(2, 3, 4, 5, seed=40).float(), torch.arange(40).reshape(2, 4, 5) % 3
    soft, weight = normal(2, 3, 4, 5, seed=41).float().softmax(1), torch.rand(2, 4, 5)
    for target, moved in ((y, y), (soft, soft.movedim(1, -1))):
        leaf = z.clone().requires_grad_()
        given: dict[str, Any] = {"sample_weight": weight, "reduction": "none"}
        expected = ordinal_loss(leaf.movedim(1, -1), moved, **given)
        same_with_gradients(ordinal_loss(leaf, target, dim=1, **given), leaf, expected, leaf)
    # (N, K, K) with (N, K) fits both ways, with different losses.
    z, y = normal(2, 3, 3, seed=42), torch.tensor([[0, 1, 2], [2, 2, 1]])
    with pytest.raises(match=r"logits have shape \(2, 3, 3\) and target \(2, 3\), .* dim=-1 or dim=1"):
        ordinal_loss(z, y)
    assert torch.equal(ordinal_loss(z, y, dim=1), ordinal_loss(z.mT, y, dim=-1))
    assert ordinal_loss(z, y, dim=-1) != ordinal_loss(z, y, dim=1)


ROWS = torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize("given", [
    {"target": ROWS - 100, "ignore_index": -100}, {"target": ROWS, "sample_weight": torch.zeros(4)},
    {"target": ROWS, "class_weight": torch.tensor([0.0, 1, 1, 1, 1])}, {"target": ROWS[:0], "cross_entropy": 1.0},
], ids=str)  # fmt: skip
def test_nothing_to_learn_is_zero_with_zero_gradients(given: dict[str, Any]) -> None:
    z = normal(len(given["target"]), 5, seed=21).requires_grad_()
    for reduction in ("mean", "sum"):
        value = ordinal_loss(z, **given, reduction=reduction)
        assert value.item() == 0
        assert torch.equal(torch.autograd.grad(value, z)[0], torch.zeros_like(z))


Z, Y, T = torch.zeros(2, 3), torch.tensor([0, 1]), torch.full((2, 3), 1 / 3)
test_bad_input = raising(
    ({"target": torch.tensor([0, 3])}, r"1 values out of range, the first at \(1,\): 3; .* 0 to 2"),
    ({"target": torch.tensor([0, -100])}, "-100; expected 0 to 2. .* ignore_index"),
    ({"target": torch.tensor([-100, 3]), "ignore_index": -100}, "1 values out of range, .*: 3; expected 0 to 2"),
    ({"target": Y > 0}, TypeError, "target has dtype torch.bool"),
    ({"target": Y.to("meta")}, "target is on the meta device"),
    ({"sample_weight": torch.ones(3)}, r"sample_weight has shape \(3,\), expected \(2,\)"),
    ({"logits": Z[:, :0]}, r"logits have shape \(2, 0\), expected .* at least one class"),
    ({"dim": 2}, r"dim is 2, expected an axis of the logits \(2, 3\)"),
    ({"power": 0.5}, "power is 0.5, expected a finite number of at least 1"),
    ({"x": torch.arange(4)}, r"x has shape .*They have to fit the logits"),
    ({"cost": torch.ones(2, 2)}, r"cost has shape \(2, 2\)"),
    ({"target": T, "ignore_index": -100}, "ignore_index=-100 is given with soft labels"),
    ({"circular": True, "power": 3}, "power is 3, expected 1 or 2"),
    ({"period": 3.0}, "period=3.0 is given for classes on a line"),
    ({"circular": True, "period": 2.0}, "period is 2.0, expected more than 2"),
    ({"cost": torch.ones(3, 3), "x": torch.arange(3)}, "cost and x are both given"),
    ({"logits": Z + torch.inf}, r"logits holds 6 NaN or \+inf"),
    ({"target": Y.float()}, TypeError, "target has dtype torch.float32 .* target.long.* histogram_loss"),
    ({"target": torch.eye(3)[:2].long()}, TypeError, r"target.float\(\) for one-hot"),
    ({"target": Y[:, None]}, r"target has shape \(2, 1\), expected class positions \(2,\)"),
    ({"target": torch.stack([T[0], 2 * T[0]])}, "soft labels of row 1 sum to 2"),
    ({"target": torch.tensor([[1.0, 0, 0], [1.5, -0.5, 0]])}, "-0.5 for class 1 of row 1"),
    ({"logits": Z - torch.inf}, "logits of row 0 .* are -inf for every class"),
    ({"logits": Z.index_fill(1, Y[:1], -torch.inf), "cross_entropy": 1.0}, "cross-entropy of row 0 .* is inf"),
    ({"circular": True, "x": torch.arange(3.0)}, "without period="),
    ({"x": torch.tensor([1.7e9, 1.7e9 + 1, 1.8e9])}, r"x\[0\] is 1.7e\+09 .* subtract x\[0\] in"),
    ({"class_weight": torch.tensor([1.0, -1.0, 2.0])}, "class_weight holds -1.0, expected weights >= 0"),
    ({"logits": torch.zeros(2, 5, 4), "target": torch.zeros(2, 4).long()}, "pass dim=1 if they are on axis 1"),
    call=lambda change: ordinal_loss(**({"logits": Z, "target": Y} | change)),
)
