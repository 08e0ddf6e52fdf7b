"""Clouds as users have them: modes, heavy tails, outliers, duplicates, axes of two scales, weights over 12 orders.

A mode, the bulk of a cloud, is about 1 wide in all of them (a normal cloud of deviation 0.3 has the deviation of the
unit cube), except for "narrow", where it is a sixth. Blur is told in units of that width.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

KINDS = (
    "uniform", "clusters", "narrow", "heavy", "heavier", "outlier", "colours", "moons", "axes", "weights",
)  # fmt: skip
SIZES = ("16x256", "500", "2000", "6000", "20000")
MANY_AXES = ("gaussian", "low rank", "distant clusters", "sphere", "words", "states")  # these have sizes POINTSdAXES
AXES_OF_DATA = {"words": "d25", "states": "d64"}  # the axes of the data
DATA = {"words": "words/glove_twitter_25d.npz", "states": "models/stories260K"}  # in $OTLOSS_DATA
MANY_AXES_SIZES = ("2000d25", "2000d64", "2000d512")
BLURS = (0.5, 0.05, 0.01)
CENTRES, WIDTH, NARROW = 8, 0.3, 0.05
ORDERS = 12  # orders of magnitude among the weights


@dataclass(frozen=True)
class Hard:
    """Float32 clouds x, y (..., n, d) with weights p, q (..., n) of mass 1, and the length `unit` of a mode."""

    x: Tensor
    y: Tensor
    p: Tensor
    q: Tensor
    unit: float

    @staticmethod
    def of(kind: str, size: str) -> Hard:
        """`size` is a number of points in 3-D, PROBLEMSxPOINTS in the plane, or POINTSdAXES for `MANY_AXES`."""
        generator = Generator().manual_seed(zlib.crc32(f"{kind} {size}".encode()))
        if "d" in size:
            n, axes = map(int, size.split("d"))
            x, y = _embeddings(generator, kind, n, axes)
            return Hard(x, y, torch.full((n,), 1 / n), torch.full((n,), 1 / n), 1.0)
        *batch, n = map(int, size.split("x"))
        pairs = [_PAIRS[kind](generator, n, 2 if batch else 3) for _ in range(math.prod(batch))]
        x, y = (torch.stack(clouds) if batch else clouds[0] for clouds in zip(*pairs, strict=True))
        weights = [torch.ones(x.shape[:-1]), torch.ones(x.shape[:-1])]
        if kind == "weights":
            weights = [10 ** (-ORDERS * torch.rand(w.shape, generator=generator)) for w in weights]
        p, q = (w / w.sum(-1, keepdim=True) for w in weights)
        return Hard(x, y, p, q, NARROW / WIDTH if kind == "narrow" else 1.0)


def _cubes(generator: Generator, n: int, axes: int) -> tuple[Tensor, Tensor]:
    """The unit cube, and a smaller one within it."""
    x, y = (torch.rand(n, axes, generator=generator) for _ in range(2))
    return x, 0.2 + 0.7 * y


def _modes(width: float) -> Callable[[Generator, int, int], tuple[Tensor, Tensor]]:
    """Modes around the same centres, with other counts in each cloud."""

    def draw(generator: Generator, n: int, axes: int) -> tuple[Tensor, Tensor]:
        centres = 5 * torch.randn(CENTRES, axes, generator=generator)
        x, y = (
            centres[torch.randint(CENTRES, (n,), generator=generator)]
            + width * torch.randn(n, axes, generator=generator)
            for _ in range(2)
        )
        return x, y

    return draw


def _student(degrees: float) -> Callable[[Generator, int, int], tuple[Tensor, Tensor]]:
    def draw(generator: Generator, n: int, axes: int) -> tuple[Tensor, Tensor]:
        def one() -> Tensor:  # chi^2 is twice a gamma
            alpha = torch.full((n, 1), degrees / 2)
            chi = 2 * torch._standard_gamma(alpha, generator=generator)
            return torch.randn(n, axes, generator=generator) / (chi / degrees).sqrt()

        return one(), one()

    return draw


def _outlier(generator: Generator, n: int, axes: int) -> tuple[Tensor, Tensor]:
    x, y = _cubes(generator, n, axes)
    x[0] = 100.0
    return x, y


def _colours(generator: Generator, n: int, axes: int) -> tuple[Tensor, Tensor]:
    """Two palettes, in 16 steps of each channel, so that most points have duplicates."""

    def one() -> Tensor:
        palette = torch.rand(12, axes, generator=generator)
        share = torch.rand(12, generator=generator).square()
        which = torch.multinomial(share, n, replacement=True, generator=generator)
        shaded = palette[which] + 0.05 * torch.randn(n, axes, generator=generator)
        return (shaded.clamp(0, 1) * 15).round() / 15

    return one(), one()


def _moons(generator: Generator, n: int, axes: int) -> tuple[Tensor, Tensor]:
    """Two half circles that interlock, and the same turned by 40 degrees, with other shares."""

    def one(share: float) -> Tensor:
        angle = math.pi * torch.rand(n, generator=generator)
        is_upper = torch.rand(n, generator=generator) < share
        arc = torch.stack([angle.cos(), angle.sin()], -1)
        points = torch.where(is_upper.unsqueeze(-1), arc, torch.tensor([1.0, 0.5]) - arc)
        flat = torch.zeros(n, axes)
        flat[:, :2] = points
        return flat + 0.05 * torch.randn(n, axes, generator=generator)

    x, y, turn = one(0.5), one(0.6), math.radians(40)
    rotation = torch.eye(axes)
    rotation[:2, :2] = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    return x, y @ rotation


def _two_scales(generator: Generator, n: int, axes: int) -> tuple[Tensor, Tensor]:
    x, y = _cubes(generator, n, axes)
    scale = torch.ones(axes)
    scale[0] = 30.0
    return x * scale, y * scale


def data_of(kind: str) -> Path | None:
    """Return the path of the points of a kind, None where the data are not here."""
    path = Path(os.environ.get("OTLOSS_DATA", "")) / DATA[kind]
    return path if path.exists() else None


def _words() -> Tensor:
    with np.load(str(data_of("words"))) as arrays:
        return torch.from_numpy(next(a for a in arrays.values() if a.ndim == 2)).float()


def _states() -> Tensor:
    """Hidden states of a small Llama on a text, after the last layer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = data_of("states")
    text = (folder.parents[1] / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:120_000]
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = tokens[: len(tokens) // 256 * 256].reshape(-1, 256)
        return model.base_model(rows).last_hidden_state.flatten(0, 1)


def _embeddings(generator: Generator, kind: str, n: int, axes: int) -> tuple[Tensor, Tensor]:
    """Clouds, or modes of clouds, whose points lie one from the centre in the mean."""
    if kind in AXES_OF_DATA:
        points = _words() if kind == "words" else _states()
        points = points / (points - points.mean(0)).square().sum(-1).mean().sqrt()
        drawn = points[torch.randperm(len(points), generator=generator)[: 2 * n]]
        return drawn[:n].clone(), drawn[n:].clone()
    x, y = torch.randn(2, n, axes, generator=generator) / axes**0.5
    if kind == "low rank":  # 8 directions, with noise
        directions = torch.randn(8, axes, generator=generator) / axes**0.5
        x, y = (torch.randn(n, 8, generator=generator) / 8**0.5 @ directions + 0.05 * t for t in (x, y))
    if kind == "distant clusters":
        centres = 5 / WIDTH * torch.randn(CENTRES, axes, generator=generator) / axes**0.5
        return tuple(t + centres[torch.randint(CENTRES, (n,), generator=generator)] for t in (x, y))
    y = 0.9 * y + 0.3 * torch.randn(axes, generator=generator) / axes**0.5
    return tuple(t / t.norm(dim=-1, keepdim=True) for t in (x, y)) if kind == "sphere" else (x, y)


_PAIRS: dict[str, Callable[[Generator, int, int], tuple[Tensor, Tensor]]] = {
    "uniform": _cubes, "clusters": _modes(WIDTH), "narrow": _modes(NARROW), "heavy": _student(2.0),
    "heavier": _student(1.5), "outlier": _outlier, "colours": _colours, "moons": _moons, "axes": _two_scales,
    "weights": _cubes,
}  # fmt: skip
