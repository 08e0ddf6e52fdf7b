"""Masses that differ by the rounding of narrower dtypes. Tensors that are not plain are in test_every_function.py."""

import pytest
import torch

import otloss

COST = torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 1.0], [4.0, 1.0, 0.0]])


@pytest.mark.parametrize(
    ("dtype", "valid", "invalid"),
    [
        (torch.float64, 5e-7, 2e-6),
        (torch.float32, 5e-6, 2e-5),
        (torch.float16, 2e-3, 1e-2),
        (torch.bfloat16, 1e-2, 0.1),
    ],
)
def test_masses_may_differ_by_rounding(dtype: torch.dtype, valid: float, invalid: float) -> None:
    p, q = (torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64) for _ in range(2))
    assert otloss.emd(p.to(dtype), (q * (1 + valid)).to(dtype), COST).isfinite()
    for wider in {dtype, torch.float64}:
        with pytest.raises(ValueError, match=r"p and q hold different masses.*Normalise both"):
            otloss.emd(p.to(dtype).to(wider), (q * (1 + invalid)).to(dtype).to(wider), COST)
