"""What a causal language model does to its logits after the head, measured by running it: `T(z)`.

    T(z) = scale * z      or      T(z) = softcap * tanh(scale * z / softcap)

`placeholders` makes logits that go through the model in place of the head's, and `fitted_transform` solves for scale
and soft cap from the result. No name in a config is read, so unknown models work too.

There are three rows of placeholders with a different number in each column of the vocabulary: small ones, where any cap
is nearly the identity and only the scale acts; ones of the size of logits; and large ones, where the cap acts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_SMALL, _MIDDLE, _LARGE = 2.0**-6, 40.0, 2.0**10
_COLUMNS_OF_THE_FIT = 64
_FINE = 1e-5  # Relative error without 16-bit rounding.
_NO_SCALE = 2.0**-8  # The median of ratios in bfloat16 differs from 1 by less.


class LogitTransform(NamedTuple):
    """`softcap * tanh(scale * z / softcap)`; without a soft cap `scale * z`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)

    def __str__(self) -> str:
        cap = "no soft cap" if self.softcap is None else f"soft cap {self.softcap:.6g}"
        return f"scale {self.scale:.6g} and {cap}"


def placeholders(vocab: int, device: torch.device | str = "cpu") -> Float[Tensor, "3 vocab"]:
    """Return logits to send through a model in place of its own: small, middle and large ones of both signs.

    >>> placeholders(5)[1]
    tensor([-40., -20.,   0.,  20.,  40.])
    """
    size = torch.linspace(0.5, 1.0, vocab, dtype=torch.float32, device=device)  # whatever torch's default dtype is
    middle = torch.linspace(-_MIDDLE, _MIDDLE, vocab, dtype=torch.float32, device=device)
    signed = torch.where(torch.arange(vocab, device=device) % 2 == 0, size, -size)
    return torch.stack([_SMALL * signed, middle, _LARGE * signed])


def fitted_transform(
    sent: Float[Tensor, "3 vocab"], observed: Float[Tensor, "3 vocab"], tolerance: float
) -> LogitTransform:
    """Return the simplest transform that maps `sent`, made by `placeholders`, to `observed`; if none does, the nearest.

    The caller checks `deviation` of the result. A cap that changes no placeholder by more than `tolerance` is left out.

    >>> sent = placeholders(7)
    >>> fitted_transform(sent, sent / 4, 1e-5)
    LogitTransform(scale=0.25, softcap=None)
    """
    ends = 0, sent.shape[-1] - 1
    columns = torch.linspace(*ends, _COLUMNS_OF_THE_FIT, dtype=torch.float32, device=sent.device).long().unique()
    z, y = sent[..., columns].double(), observed[..., columns].double()
    scale = _seven_digits(y[0] / z[0])
    forms = [LogitTransform(scale), _capped(z, y, scale)]
    if abs(scale - 1) <= _NO_SCALE:
        forms = [LogitTransform(), _capped(z, y, 1.0, refine=False), *forms]
    errors = [deviation(form, z, y) for form in forms]
    for bound in (min(_FINE, tolerance), tolerance):  # rounding to 16 bits must not hide a scale of 1.01
        for form, error in zip(forms, errors, strict=True):
            if error <= bound:
                return form
    return forms[errors.index(min(errors))]


def deviation(transform: LogitTransform, sent: Tensor, observed: Tensor) -> float:
    """Return the largest relative error of `transform(sent)`; infinity where `observed` is not finite.

    Where a placeholder is 0 or tiny the error is relative to the smallest of the others.
    """
    expected = transform(sent)
    unit = expected.abs().clamp(min=min(1.0, abs(transform.scale)) * _SMALL / 2)
    return float(((observed.to(sent.dtype) - expected).abs() / unit).nan_to_num(nan=torch.inf).max())


def _capped(z: Tensor, y: Tensor, scale: float, refine: bool = True) -> LogitTransform:
    """Return the cap from the large placeholders, given the scale; then the scale from the small ones, alternating.

    At a small placeholder a cap changes the observed scale by about `(scale * z / cap)^2 / 3`: 5 rounds are enough.
    """
    softcap: float | None = None
    for _ in range(5 if refine else 1):
        softcap = _cap(z[2], y[2], scale)
        if softcap is None or not refine:
            break
        scale = _seven_digits(softcap * torch.atanh((y[0] / softcap).clamp(-0.999, 0.999)) / z[0])
    return LogitTransform(scale, softcap)


def _cap(z: Tensor, y: Tensor, scale: float) -> float | None:
    """Return the cap c with `y = c tanh(scale z / c)`, the median over columns; None if there is no such cap.

    With `x = scale z / c` this is `tanh(x) / x = y / (scale z)`, which falls from 1 to 0 in x: bisection.
    """
    ratio = y / (scale * z)
    low, high = torch.full_like(z, -12.0), torch.full_like(z, 12.0)  # log x
    for _ in range(70):
        middle = (low + high) / 2
        x = middle.exp()
        too_small = torch.tanh(x) / x > ratio
        low, high = torch.where(too_small, middle, low), torch.where(too_small, high, middle)
    cap = _seven_digits((scale * z / low.exp()).abs())
    return cap if 0.0 < cap < torch.finfo(torch.float32).max else None


def _seven_digits(value: Tensor) -> float:
    """Return the median, to the precision of float32."""
    return float(f"{float(value.median()):.7g}")
