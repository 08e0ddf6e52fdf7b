"""Calls as other packages take them: each raises an error that names ours, and arrays of numpy are tensors."""

import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import otloss
import otloss_llm
from otloss import nn
from otloss.costs import PointCost
from otloss_llm import emo_loss, parse_objective
from tests.errors import raising

X, Y = torch.rand(4, 2, generator=torch.Generator().manual_seed(0)), torch.rand(5, 2)
P, Q, C = torch.full((4,), 1 / 4), torch.full((5,), 1 / 5), torch.rand(4, 5)
CALLS: dict[str, Callable[..., Any]] = {
    "cloud_loss": lambda **k: otloss.cloud_loss(X, Y, **k),
    "CloudLoss": nn.CloudLoss,
    "emd": lambda **k: otloss.emd(P, Q, C, **k),
    "Emd": lambda **k: nn.Emd(cost=C, **k),
    "sinkhorn": lambda **k: otloss.sinkhorn(P, Q, C, **k),
    "sinkhorn_divergence": lambda **k: otloss.sinkhorn_divergence(P, P, C[:, :4], **k),
    "solve": lambda **k: otloss.solve(P, Q, C, **k),
    "soft_rank": lambda **k: otloss.soft_rank(P, **k),
    "wasserstein_1d": lambda **k: otloss.wasserstein_1d(None, None, P, Q, **k),
    "barycenter": lambda **k: otloss.barycenter(P.expand(2, 4), C[:, :4], **k),
    "fused_gromov": lambda **k: otloss.fused_gromov(C[:, :4], C[:, :4], **k),
    "match": lambda **k: otloss.match(C, **k),
    "wasserstein_circular": lambda **k: otloss.wasserstein_circular(P, P, **k),
    "cdf_distance": lambda **k: otloss.cdf_distance(P, P, **k),
    "cloud_barycenter": lambda **k: otloss.cloud_barycenter(X.expand(2, 4, 2), **k),
    "soft_sort": lambda **k: otloss.soft_sort(P, **k),
    "soft_top_k": lambda **k: otloss.soft_top_k(P, 1, **k),
    "gradient_penalty": lambda **k: otloss.losses.gradient_penalty(lambda x: x.sum(1), X, X, **k),
    "pair": lambda **k: otloss.pair(X, X, **k),
}


@pytest.mark.parametrize(("function", "keyword", "ours"), [
    ("cloud_loss", "reach", "marginal_penalty="), ("CloudLoss", "reach", "marginal_penalty="),
    ("cloud_loss", "reach_y", r"marginal_penalty=\(2 \* reach_x"),
    ("cloud_loss", "debias", "sinkhorn_divergence"), ("cloud_loss", "p", "metric="), ("cloud_loss", "loss", "kind="),
    ("sinkhorn", "blur", r"epsilon=2 \* blur\*\*2"), ("sinkhorn", "reg", "epsilon=reg"), ("Emd", "log", r"solve\("),
    ("sinkhorn_divergence", "debias", "sinkhorn_divergence are debiased"), ("emd", "numItermax", "leave it out"),
    ("solve", "reg_m", "marginal_penalty=reg_m"), ("emd", "M", "cost=M"),
    ("soft_rank", "regularization_strength", "epsilon="), ("soft_rank", "direction", "descending=True"),
    ("wasserstein_1d", "u_values", r"wasserstein_1d\(u_weights, v_weights, u_values, v_values\)"),
    ("wasserstein_circular", "u_values", r"wasserstein_circular\(u_weights, v_weights, u_values, v_values, period=1"),
    ("cdf_distance", "u_values", "energy_distance"), ("cloud_loss", "potentials", r"grad\(value, \(a, b\)\)"),
    ("barycenter", "M", r"cost=M\.T"), ("barycenter", "A", r"p=A\.T"), ("barycenter", "log", "leave it out"),
    ("fused_gromov", "M", "feature_cost=M"), ("fused_gromov", "C2", "C_y=C2"), ("fused_gromov", "tol", "of the value"),
    ("cloud_barycenter", "reg", "debiased"), ("match", "maximize", "leave it out for maximize=False"),
    ("wasserstein_1d", "v_weights", "q=v_weights"), ("cloud_loss", "seed", r"generator=torch\.Generator"),
    ("soft_sort", "regularization_strength", r"\(x.max\(\) - x.min\(\)\) / \(n - 1\)"),
    ("soft_top_k", "dim", r"x\.movedim"), ("soft_top_k", "largest", "give -x"), ("soft_rank", "tau", "epsilon="),
    ("gradient_penalty", "lambda_gp", "multiply the value"), ("pair", "replace", "leave it out"),
    ("solve", "tau_b", r"epsilon \* tau_a / \(1 - tau_a\)"), ("sinkhorn", "threshold", "tolerance="),
])  # fmt: skip
def test_a_foreign_keyword_names_ours(function: str, keyword: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"^{function} has no option '{keyword}', .*{ours}"):
        CALLS[function](**{keyword: 0.5})


@pytest.mark.parametrize(("keyword", "ours"), [
    ("early_stopping_rounds", "is XGBoost and LightGBM's; give n_iter_no_change="), ("eta", "learning_rate="),
    ("subsample", r"booster_params=\{'subsample': ...\}"), ("eval_set", "give it to fit"),
    ("feature_fraction", "booster_params"), ("scale_pos_weight", "class_weight"), ("cat_features", "dtype category"),
    ("num_class", "leave it out"),
    ("learning_rates", "did you mean learning_rate="),
])  # fmt: skip
def test_a_keyword_of_a_booster_names_ours(keyword: str, ours: str) -> None:
    estimators = pytest.importorskip("otloss.estimators")
    with pytest.raises(TypeError, match=f"^OrdinalBoostingClassifier has no option '{keyword}'.*{ours}"):
        estimators.OrdinalBoostingClassifier(**{keyword: 3})
    assert estimators.OrdinalBoostingClassifier(n_iter_no_change=3).get_params()["n_iter_no_change"] == 3


# Whose names have another one here, and which.
NAMES = {
    "emd2": "otloss.emd", "sinkhorn2": "otloss.solve", "gromov_wasserstein2": "otloss.fused_gromov",
    "sinkhorn_unbalanced": "marginal_penalty=reg_m", "SamplesLoss": "otloss.cloud_loss", "PointCloud": "PointCost",
    "wasserstein_distance": r"wasserstein_1d\(None, None, u, v\)", "EMOLoss": "otloss_llm.emo_loss",
    "NTLoss": "number_token_loss", "ContinuousRankedProbabilityScore": "losses.crps", "warmup": "did you mean warm_up",
    "linear_sum_assignment": r"otloss.match\(-cost\)", "CloudLoss": "use otloss.nn.CloudLoss", "": "",
    "CoralLayer": "otloss.nn.CumulativeLinkHead",
    "LogisticAT": "all_threshold", "amae": "otloss.metrics.macro_mae", "CLM": "otloss.nn.CumulativeLinkHead",
    "OrderedModel": "otloss.estimators.CumulativeLinkClassifier",
    "perplexity": "otloss_llm.evaluation.perplexity",
}  # fmt: skip


@pytest.mark.parametrize("module", [otloss, otloss_llm])
@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_name_names_ours(module: Any, name: str) -> None:
    assert not hasattr(module, name)
    assert getattr(module, name, None) is None
    with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute '{name}'.*{NAMES[name]}"):
        getattr(module, name)
    with pytest.raises(ImportError, match=f"^cannot import name '{name}x_y_z'"):
        exec(f"from {module.__name__} import {name}x_y_z")


@pytest.mark.parametrize("home", ["boosting", "costs", "estimators", "losses", "metrics", "nn", "plotting"])
def test_submodules_name_ours_too(home: str) -> None:
    pytest.importorskip("sklearn")
    module = importlib.import_module(f"otloss.{home}")
    for name, ours in NAMES.items():
        if name not in ("warmup", *module.__all__):
            with pytest.raises(AttributeError, match=f"'otloss.{home}' has no attribute '{name}'.*{ours}"):
                getattr(module, name)
    nearly = module.__all__[0][:-1]
    with pytest.raises(AttributeError, match=f"'otloss.{home}' has no attribute '{nearly}'; did you mean"):
        getattr(module, nearly)


def test_names_of_one_package_are_named_in_the_other() -> None:
    for module, name, home in (
        (otloss, "linear_token_loss", "otloss_llm"),
        (otloss_llm, "number_token_loss", "otloss"),
        (otloss_llm, "decode_numbers", "otloss_llm.evaluation"),
    ):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'; use {home}.{name}$"):
            getattr(module, name)


def test_what_foreign_names_name_exists() -> None:
    """And the names themselves are neither ours nor twice in the table."""
    from otloss import _foreign

    names = [name for call in _foreign._CALLS for name in call.names.split()]
    assert len(set(names)) == len(names)
    assert not {*names} & {*otloss.__all__, *otloss_llm.__all__}
    for home, names_there in _foreign._OF_SUBMODULES.items():
        assert {*names_there.split()} == {*importlib.import_module(home).__all__} - {*otloss.__all__}
    for call in _foreign._CALLS:
        for called in re.findall(r"otloss(?:_llm)?(?:\.\w+)+", call.ours):
            module, _, attribute = called.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), called


def test_what_foreign_names_name_gives_their_numbers() -> None:
    """Keywords of POT whose value or plan is promised to be the same; test_coming_from.py has more."""
    ot = pytest.importorskip("ot")
    scope: dict[str, Any] = {"otloss": otloss, "reg": 0.3, "reg_m": 0.5, "m": 0.6}
    cost = torch.rand(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scope |= {"p": (P + 0.1 * torch.arange(4)).double(), "q": Q.double(), "cost": cost}
    scope["p"] /= scope["p"].sum()
    p, q, exact = scope["p"].numpy(), scope["q"].numpy(), {"stopThr": 1e-12, "numItermax": 10_000}
    theirs = {
        "emd2": ot.emd2(p, q, cost.numpy()),
        "sinkhorn2": ot.sinkhorn2(p, q, cost.numpy(), 0.3, **exact),
        "sinkhorn_unbalanced": ot.sinkhorn_unbalanced(p, q, cost.numpy(), 0.3, 0.5, **exact),
        "sinkhorn_unbalanced2": ot.sinkhorn_unbalanced2(p, q, cost.numpy(), 0.3, 0.5, **exact),
        "partial_wasserstein2": ot.partial.partial_wasserstein2(p, q, cost.numpy(), m=0.6),
    }
    images = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    images /= images.sum((1, 2), keepdim=True)
    scope |= {"images": images, "shape": (4, 4), "n": 4}
    name = "convolutional_barycenter2d"
    theirs[name] = ot.bregman.convolutional_barycenter2d(images.numpy(), 0.3, stopThr=1e-12).reshape(-1)
    factors = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    covariances, means = factors @ factors.mT + torch.eye(3), factors[:, 0]
    scope |= dict(zip(("Cs", "Ct", "ms", "mt"), (*covariances, *means), strict=True))
    name = "bures_wasserstein_distance"
    theirs[name] = ot.gaussian.bures_wasserstein_distance(*(t.numpy() for t in (*means, *covariances)))
    for name, value in theirs.items():
        ours = re.match(r"otloss\..*\)(\.linear_cost)?", _call_of(name).replace("debiased=...", "debiased=False"))
        assert ours is not None
        np.testing.assert_allclose(eval(ours[0], scope), value, atol=1e-5)


def _call_of(name: str) -> str:
    from otloss import _foreign

    return next(call.ours for call in _foreign._CALLS if name in call.names.split())


GRID, LABELS, D = torch.linspace(-1, 1, 4), torch.arange(4), torch.cdist(X, X)
W1: Any = otloss.wasserstein_1d
test_what_a_call_says = raising(
    (lambda: otloss.sinkhorn(P, Q, C, 0.05), TypeError, r"takes 3 arguments .*, and got 4; .*: epsilon=0.05"),
    (lambda: nn.CloudLoss(blurr=0.1), TypeError, "CloudLoss has no option 'blurr'; did you mean blur="),
    (lambda: otloss.ordinal_loss(C, LABELS, weight=P), TypeError, "class_weight=weight"),
    (lambda: emo_loss(C, LABELS, C.T, mode=2), TypeError, 'weighting="transport"'),
    (lambda: W1(GRID, GRID, P, P.flip(0)), r"do not sum to 1, .*expected wasserstein_1d\(p, q, x, y\)"),
    (lambda: W1(GRID, GRID, P, P, p=2), TypeError, "got p=2, a number, .*order="),
    (lambda: W1(GRID + 1, P), "different masses.* If they are samples u and v, call .*None, None, u, v"),
    (lambda: W1(GRID, P), "p holds -1.0 in bin 0.* If they are samples u and v"),
    (lambda: W1(P, Q), "p has 4 bins and q 5.* If they are samples u and v"),
    (lambda: otloss.match(X, Y), TypeError, r"match\(torch.cdist\(x, y\)\).* call pair\(x, y\)"),
    (lambda: otloss.cloud_loss(X, Y, reduction="mean"), TypeError, r"take .mean\(\).*otloss.nn.CloudLoss\(reduction"),
    (lambda: otloss.solve(P, Q, C, reduction="mean"), TypeError, "leave it out"),
    (lambda: otloss.match(C, maximize=True), TypeError, r"scipy's; .*match\(-cost\)"),
    (lambda: otloss.cloud_loss(P, X, Q, Y), r"GeomLoss's SamplesLoss.*expected points first, cloud_loss\(x, y, a, b\)"),
    (lambda: nn.CloudLoss()(*(t.expand(3, *t.shape) for t in (P, X, Q, Y))), "expected points first"),
    *(
        (lambda written=written: parse_objective(written), rf"did you mean '{re.escape(meant)}'\?")
        for written, meant in (
            ("ntl", "number_token"),
            ("number:0.5", "number_token:0.5"),
            ("emo:0.5+ntl", "emo:0.5+number"),
            ("ce+smoothing:0.2", "mle+smoothing:0.2"),
            ("gem + label-smoothing", "gem+smoothing:0.1"),
            ("cross-entropy", "mle"),
            ("crossentropy", "mle"),
            ("label_smoothing:0.2", "mle+smoothing:0.2"),
            ("gemm:0.5+zloss:1e-4", "gem:0.5+z_loss:1e-4"),
        )
    ),
    (lambda: parse_objective("emo+ntl:0.3"), r"^objective is 'emo\+ntl:0.3', expected one of"),
    (lambda: otloss.fused_gromov(D, D, P, P), r"weights stand third, .*fused_gromov\(C1, C2, p=p, q=q\)"),
    (lambda: otloss.fused_gromov(D, D, P.sum()), r"feature_cost has shape \(\)"),
    (lambda: otloss.cloud_loss(X, Y, P.sum(), P), r"a has shape \(\), expected a last axis of"),
    (lambda: otloss.fused_gromov(C, D, torch.cdist(Y, Y)), r"feature cost stands first, .*\(C1, C2, M, p, q\)"),
)


def test_our_order_of_a_cloud_loss_is_never_taken_for_another_one() -> None:
    """Shapes that fit both orders: 3 clouds of 2 points in 2 dimensions, and of 3."""
    x, y, a, b = torch.rand(3, 2), torch.rand(3, 2, 2), torch.full((3,), 1 / 3), torch.full((3, 2), 1 / 2)
    torch.testing.assert_close(otloss.cloud_loss(x, y, a, b), torch.stack([otloss.cloud_loss(x, one) for one in y]))


def test_arrays_of_numpy_may_be_changed_after_a_call() -> None:
    """A reader may fill one buffer again and again: graphs and results keep the numbers of their call."""
    x = X.clone().requires_grad_()
    buffer, other = Y.numpy().copy(), [Y.numpy().copy()]
    loss = otloss.cloud_loss(x, buffer) + otloss.cloud_loss([x], other).sum()
    p, cost = np.full(len(X), 1 / len(X)), np.square(X.numpy()[:, None] - X.numpy()).sum(-1)
    answer, expected = (otloss.solve(p, p, c, epsilon=0.1) for c in (cost, cost.copy()))
    for array in (buffer, *other, p, cost):
        array[...] = 7.0
    (actual,) = torch.autograd.grad(loss, x)
    (gradient,) = torch.autograd.grad(otloss.cloud_loss(x, Y), x)
    torch.testing.assert_close(actual, 2 * gradient)
    torch.testing.assert_close(answer.plan(), expected.plan())
    assert answer.certificate == expected.certificate


def test_arrays_of_numpy_are_tensors_of_their_dtype() -> None:
    calls: list[tuple[Callable[..., Any], Any]] = [
        (otloss.emd, (P, Q, C)), (lambda *given: otloss.solve(*given).plan(), (P, None, C)), (W1, (P, P.flip(0), GRID)),
        (otloss.cloud_loss, (X, Y)), (lambda p, q, c: otloss.sinkhorn(p, q=q, cost=c, epsilon=0.1), (P, Q, C)),
    ]  # fmt: skip
    for function, tensors in calls:
        arrays = [None if t is None else t.numpy() for t in tensors]
        torch.testing.assert_close(function(*arrays), function(*tensors))
    torch.testing.assert_close(otloss.cloud_loss([X.numpy()], [Y.numpy()]), otloss.cloud_loss([X], [Y]))
    assert W1(p=3 * P, q=3 * P.flip(0), x=P, y=P) == 0  # by keyword it is no call in POT's order
    rows = GRID.double().numpy()[::-1].astype(">f8")  # neither contiguous nor of this machine's byte order
    rows.flags.writeable = False
    assert W1(P.double(), P.flip(0).double(), rows) == W1(P.double(), P.flip(0).double(), GRID.double().flip(0))
    with pytest.raises(TypeError, match=r"p has dtype torch\.int64, expected a floating dtype"):
        otloss.emd(np.arange(4), Q, C)


@pytest.mark.parametrize("arguments", [(C, P, Q), (C[:, :4], P, P), (PointCost(X, Y), P, Q)])
def test_the_cost_in_front_is_named(arguments: tuple[Any, Any, Any]) -> None:
    entropic = (otloss.sinkhorn, otloss.sinkhorn_divergence, otloss.solve)
    for function in (otloss.emd, otloss.lower_bound, otloss.upper_bound, *entropic):
        with pytest.raises(ValueError, match=r"the cost stands first, .* expected the order \(p, q, C\), as in emd\(p"):
            function(*arguments, **({"epsilon": 0.1} if function in entropic else {}))  # type: ignore[operator]


def test_words_in_another_order_and_generators_of_another_kind_are_named() -> None:
    with pytest.raises(AttributeError, match="did you mean wasserstein_tree"):
        otloss.tree_wasserstein  # noqa: B018
    for call in (
        lambda generator: otloss.sliced_wasserstein(X, Y, generator=generator),
        lambda generator: otloss.cloud_loss(X, Y, kind="sliced", generator=generator),
        lambda generator: otloss.pair(X, X, generator=generator),
        lambda generator: otloss.losses.gradient_penalty(nn.SlicedWasserstein(), X, X, generator=generator),
    ):
        for generator in (3, np.random.default_rng(0)):
            with pytest.raises(TypeError, match=r"^generator is .*, expected a torch\.Generator"):
                call(generator)


def test_masked_entries_do_not_count_as_numbers() -> None:
    """Conversions of numpy drop the mask."""
    from otloss import estimators, metrics

    masked, labels = np.ma.masked_greater(Y.numpy(), Y.median().item()), np.array([0, 1, 0, 1, 0])
    for call in (
        lambda: otloss.cloud_loss(masked, Y.numpy()),
        lambda: otloss.emd(P, Q, [masked]),
        lambda: metrics.ordinal_mae(labels, np.ma.masked_equal(labels, 1)),
        lambda: estimators.OrdinalClassifier().fit(masked, labels),
        lambda: estimators.OrdinalClassifier().fit(Y.numpy(), np.ma.masked_equal(labels, 1)),
    ):
        with pytest.raises(ValueError, match=r"masked entries, expected numbers; drop them"):
            call()
    assert metrics.ordinal_mae(np.ma.masked_equal(labels, 7), labels) == 0
    with pytest.raises(TypeError, match=r"sample_weight is 'balanced', expected real numbers; .*class_weight="):
        metrics.ordinal_mae(labels, labels, sample_weight="balanced")
