"""Scale and soft cap, solved for from placeholders before and after a transform."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from otloss_llm.models.logit_transform import deviation, fitted_transform, placeholders

SCALES = st.floats(0.02, 20.0) | st.floats(-20.0, -0.02) | st.sampled_from([1.0, 0.0625, 1 / 13, 1.01, 0.995])
CAPS = st.none() | st.floats(1.0, 3000.0) | st.sampled_from([30.0, 50.0])


@given(scale=SCALES, softcap=CAPS, vocab=st.integers(2, 300))
def test_transforms_in_float32_are_found(scale: float, softcap: float | None, vocab: int) -> None:
    before = placeholders(vocab)
    after = before * scale
    if softcap is not None:
        after = torch.tanh(after / softcap) * softcap
    actual = fitted_transform(before, after, 1e-5)
    assert deviation(actual, before, after) < 1e-5
    assert actual.scale == pytest.approx(scale, rel=1e-5)
    if softcap is None:
        assert actual.softcap is None
    elif softcap < 1000 * abs(scale):  # a higher cap hardly changes even the large placeholders
        assert actual.softcap == pytest.approx(softcap, rel=1e-3)


@given(scale=SCALES, vocab=st.integers(30, 300), rounded=st.booleans())
def test_rounding_to_16_bits_hides_no_scale(scale: float, vocab: int, rounded: bool) -> None:
    """The tolerance of 16-bit models is 2^-6; a scale of 1.01 is still told from 1, with and without rounding."""
    before = placeholders(vocab)
    after = (before.bfloat16() * scale).float() if rounded else before * scale
    actual = fitted_transform(before, after, 2.0**-6)
    assert actual.scale == pytest.approx(scale, rel=2.0**-7 if rounded else 1e-6)
    assert actual.softcap is None
