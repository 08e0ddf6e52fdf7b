"""Calls as other packages take them: each raises an error that names ours, and arrays of numpy are tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import otloss
from otloss import nn
from otloss.costs import PointCost
from otloss_llm import emo_loss
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
}


@pytest.mark.parametrize(("function", "keyword", "ours"), [
    ("cloud_loss", "reach", "marginal_penalty="), ("CloudLoss", "reach", "marginal_penalty="),
    ("cloud_loss", "debias", "sinkhorn_divergence"), ("cloud_loss", "p", "metric="), ("cloud_loss", "loss", "kind="),
    ("sinkhorn", "blur", r"epsilon=2 \* blur\*\*2"), ("sinkhorn", "reg", "epsilon=reg"), ("Emd", "log", r"solve\("),
    ("sinkhorn_divergence", "debias", "sinkhorn_divergence are debiased"), ("emd", "numItermax", "leave it out"),
    ("solve", "reg_m", "marginal_penalty=reg_m"), ("emd", "M", "cost=M"),
])  # fmt: skip
def test_a_foreign_keyword_names_ours(function: str, keyword: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"^{function} has no option '{keyword}', .*{ours}"):
        CALLS[function](**{keyword: 0.5})


GRID, LABELS, D = torch.linspace(-1, 1, 4), torch.arange(4), torch.cdist(X, X)
W1: Any = otloss.wasserstein_1d
test_what_a_call_says = raising(
    (lambda: otloss.sinkhorn(P, Q, C, 0.05), TypeError, r"takes 3 arguments .*, and got 4; .*: epsilon=0.05"),
    (lambda: nn.CloudLoss(blurr=0.1), TypeError, "CloudLoss has no option 'blurr'; did you mean blur="),
    (lambda: otloss.ordinal_loss(C, LABELS, weight=P), TypeError, "class_weight=weight"),
    (lambda: emo_loss(C, LABELS, C.T, mode=2), TypeError, 'weighting="transport"'),
    (lambda: W1(GRID, GRID, P, P.flip(0)), r"do not sum to 1, .*expected wasserstein_1d\(p, q, x, y\)"),
    (lambda: W1(GRID, GRID, P, P, p=2), TypeError, "got p=2, a number, .*order="),
    (lambda: otloss.fused_gromov(D, D, P, P), r"weights stand third, .*fused_gromov\(C1, C2, p=p, q=q\)"),
    (lambda: otloss.fused_gromov(C, D, torch.cdist(Y, Y)), r"feature cost stands first, .*\(C1, C2, M, p, q\)"),
)


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
