"""The loss of a distribution over ordered classes: how far its mass lies from the label.

    value = L(softmax(z), label) + cross_entropy * nll        nll = -log softmax(z) at the label

L is computed in `otloss.losses.geometry` (the reference implementation), and for the ranked probability score
on a CPU by a numba kernel. For a label of one class, with s the derivative of L in P = softmax(z), the gradient is
g_i = P_i (s_i - P.s).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy as cross_entropy_of_classes

from otloss._autograd import release
from otloss._checks import is_differentiated, numbers
from otloss._numba import may_run_on, threads
from otloss._public import public
from otloss.costs import Cost
from otloss.losses.geometry import GeometrySettings, Line
from otloss.losses.rows import Rows, check_cross_entropy, posed_rows
from otloss.solvers.histograms import MASS_TOLERANCE

_PLAIN = (Tensor, Parameter)  # A subclass of Tensor may have no data.


@public
def ordinal_loss(
    logits: Float[Tensor, "*batch classes"],
    target: Int[Tensor, "*batch"] | Float[Tensor, "*batch classes"],
    *,
    x: Float[Tensor, " classes"] | None = None,
    power: float = 2,
    cost: Cost | Float[Tensor, "classes classes"] | None = None,
    circular: bool = False,
    period: float | None = None,
    cross_entropy: float = 0.0,
    class_weight: Float[Tensor, " classes"] | None = None,
    sample_weight: Float[Tensor, "*batch"] | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    dim: int | None = None,
) -> Float[Tensor, "*batch"]:
    """Return how far softmax(logits) lies from labels among ordered classes: what moving its mass to them costs.

    Power 2 (the default) is the ranked probability score ("squared EMD loss"): a proper score, least at the true
    probabilities. Power 1 is W_1; it is not proper but least at a point mass at the median, and so leads to
    overconfident predictions: add some `cross_entropy` where probabilities matter. The same holds for a cost.

    Where softmax has underflowed at the label, the gradient of all these is 0; `cross_entropy` fixes that as well.

    Formulas: docs/guide/definitions.md#def-ordinal

    Args:
        logits: (..., K), or with the classes on another axis `dim`; a class with -inf takes no part.
        target: (...) class positions 0 to K - 1 by rank, in an integer dtype; or (..., K) soft labels that sum to 1.
        x: (K,) strictly increasing class values, 0 to K - 1 by default; integers are taken as float64.
        power: at least 1: sum_k (x_{k+1} - x_k) |F_k - G_k|^power for the cumulative distributions F and G.
        cost: (K, K) costs >= 0, **cost[true, predicted]**, or a cost object; in place of x, power and circular. A label
            of one class costs sum_i P_i cost[y, i]; soft labels the exact transport `otloss.emd(target, P, cost)`,
            whose gradient is a subgradient where the optimum is degenerate.
        circular: the last class is next to the first, as among hours or angles. Power 1 is W_1 on the circle, power 2
            the least of sum_k d_k (F_k - G_k - m)^2 over m, the gap that closes the circle included.
        period: the circumference, K by default when x is not given.
        cross_entropy: weight of the cross-entropy that is added.
        class_weight: (K,) weights >= 0 by true class; a soft label takes its expectation.
        sample_weight: (...) weights >= 0.
        ignore_index: target that leaves a position out, whatever its logits hold; it may be a class position.
        reduction: "mean" is sum(weight * loss) / sum(weight) over the positions that take part, "sum" the former
            alone, and "none" gives weight * loss in the shape of the positions, 0 where ignored.
        dim: axis of the classes in logits and soft labels, the last one by default; 1 for images (N, K, H, W) with
            class positions (N, H, W). It has to be given where class positions fit the logits both ways, such as (N, K)
            for logits (N, K, K).

    Returns:
        A scalar, or (...), in the promoted dtype of the floating inputs, under autocast at least float32; its unit is
        the unit of x or the cost.
        Differentiable in logits, x, the cost and the weights; in soft labels too, centred over the classes except for
        the cross-entropy. Second derivatives are right, but for soft labels with a cost, where they raise. Inside
        `torch.vmap`, as for gradients of each example, no position may be ignored. Without any weight (all positions
        ignored, an empty batch) a mean is 0, with gradients of zero.

    Raises:
        TypeError: if logits are not floating, or target has neither dtype and shape of positions nor of soft labels.
        ValueError: if a position is out of range, class positions fit the logits with the classes on the last axis and
            on axis 1 alike and dim is not given, soft labels do not sum to 1, x does not increase strictly, a cost is
            negative or not K x K, a weight is negative or does not fit, settings exclude each other, a number is NaN
            or infinite, or the cross-entropy is (a label whose logit is -inf).

    Source:
        L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916, eq. 6.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 2.0]])
        >>> ordinal_loss(logits, torch.tensor([0, 0]), reduction="none")  # the second one is further off
        tensor([0.8097, 1.4177])
        >>> cost = torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 1.0], [5.0, 1.0, 0.0]])  # rows are true classes
        >>> ordinal_loss(logits, torch.tensor([0, 0]), cost=cost, cross_entropy=0.1)
        tensor(4.6914)
    """
    mix = check_cross_entropy(cross_entropy)
    rows = posed_rows(
        logits, target, GeometrySettings(x, power, cost, circular, period), class_weight=class_weight,
        sample_weight=sample_weight, ignore_index=ignore_index, reduction=reduction, dim=dim,
    )  # fmt: skip
    return ordinal_loss_of_rows(rows, mix)


def ordinal_loss_of_rows(rows: Rows, mix: float) -> Tensor:
    """Return the reduced loss, by the kernel where it serves; raise ValueError if a logit or a label is invalid."""
    positions = rows.positions
    if _suits_kernel(rows):
        # Each further operation of torch takes longer than the kernel does for a small batch.
        divisor = positions.divisor(len(rows.logits))
        values: Tensor = _RankedScore.apply(rows, mix, divisor, rows.logits)
        if math.isfinite(values.detach().sum().item()):  # otherwise the checks below raise an error with the reason
            return positions.reduced(values) if divisor is None else values.to(positions.dtype)
    return positions.reduced(_values(rows.checked(), mix))


def _values(rows: Rows, mix: float) -> Float[Tensor, " rows"]:
    """Return the loss of each row in operations of torch: the reference implementation of the kernel."""
    assert rows.geometry is not None
    logits, label = rows.logits, rows.target
    values = rows.geometry.distance(logits.softmax(-1), label)
    if not mix:
        return values
    if rows.is_soft:
        log_q = logits.log_softmax(-1)
        nll = -(label * log_q.masked_fill((label == 0) & (log_q == -torch.inf), 0.0)).sum(-1)
    else:
        nll = cross_entropy_of_classes(logits, label, reduction="none")
    of_rows = numbers(nll).flatten()
    finite = torch.isfinite(of_rows)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ValueError(
            f"the cross-entropy of row {row} (of the positions that take part) is {float(of_rows[row])}: the "
            "logit of its label is -inf or overflowed; expected finite logits at every label. Unmask that class, leave "
            "the position out, or set cross_entropy=0."
        )
    return values + mix * nll


def _suits_kernel(rows: Rows) -> bool:
    line = rows.geometry
    if not isinstance(line, Line) or line.power != 2:
        return False
    # Soft labels in half precision have a larger tolerance, which the operations of torch know.
    if rows.is_soft and (rows.target.dtype != rows.logits.dtype or rows.target.requires_grad):
        return False
    if type(rows.logits) not in _PLAIN or type(rows.target) not in _PLAIN:
        return False
    return may_run_on(rows.logits, rows.target) and not is_differentiated(line.gaps)


class _RankedScore(torch.autograd.Function):
    """The values of the rows by the kernel, or their sum over `divisor`; NaN or infinite where a row is invalid.

    The gradient is computed together with the values; with create_graph=True by the reference implementation.
    """

    @staticmethod
    def forward(ctx: Any, rows: Rows, mix: float, divisor: int | None, logits: Tensor) -> Float[Tensor, "*rows"]:
        from otloss.losses import ordinal_numba as ordinal

        assert isinstance(rows.geometry, Line)
        ctx.settings = rows, mix, divisor
        z, label, gaps = (
            t.detach().contiguous().resolve_neg().numpy() for t in (logits, rows.target, rows.geometry.gaps)
        )
        filled = ordinal.answers_of_scores(z, with_gradients=ctx.needs_input_grad[-1])
        # A small batch is finished before a second thread has started.
        count = max(1, min(torch.get_num_threads(), logits.numel() // threads.MIN_ENTRIES))
        settings = mix, 1.0 / (divisor or 1), MASS_TOLERANCE[logits.dtype]
        threads.run_on_threads(ordinal.ranked_scores, count, (z, label, gaps, *settings, *filled, count))
        values, gradients = map(torch.from_numpy, filled)
        ctx.save_for_backward(logits, gradients)
        return values if divisor is None else values.sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        logits, gradients = ctx.saved_tensors
        rows, mix, divisor = ctx.settings
        release(ctx, "settings")
        if not torch.is_grad_enabled():
            scale = upstream[0].unsqueeze(-1) if divisor is None else upstream[0]
            return None, None, None, gradients * scale
        value = _values(replace(rows, logits=logits).checked(), mix)
        value = value if divisor is None else value.sum() / divisor
        return None, None, None, torch.autograd.grad(value, logits, upstream[0], create_graph=True)[0]
