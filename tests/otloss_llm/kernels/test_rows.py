"""The numba sweeps over rows of float32 logits against the formulas in float64."""

import numpy as np
import pytest
import torch
from numba import njit

from otloss_llm import MLE
from otloss_llm.kernels.rows_numba import _exp
from tests.otloss_llm.scoring import from_logits

EPS = torch.finfo(torch.float32).eps


def test_exp_to_rounding() -> None:
    @njit
    def each(x: np.ndarray, out: np.ndarray) -> None:
        for i in range(len(x)):
            out[i] = _exp(x[i])

    x = np.concatenate([np.linspace(-87, 0, 400_001), -np.logspace(-30, 0, 1001), [0.0]]).astype(np.float32)
    x = x[x > -87]
    out = np.empty_like(x)
    each(x, out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 1.5 * EPS
    beyond = np.array([-87.1, -1e4, -np.inf, np.nan], dtype=np.float32)
    each(beyond, out[:4])
    assert (out[:3] == 0).all()
    assert np.isnan(out[3])


@pytest.mark.parametrize("at_label", [True, False])
def test_infinite_logits_raise(at_label: bool) -> None:
    """Finite inputs whose product overflows float32."""
    z = torch.randn(2, 40)
    z[1, 3 if at_label else 20] = 3e38
    with pytest.raises(ValueError, match="-log q is nan for label 3"):
        from_logits(z, torch.tensor([3, 3]), "chunked", objective=MLE(), logit_scale=10.0)
