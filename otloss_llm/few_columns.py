"""Costs that are one number per token but in a few columns of the vocabulary, as those of number tokens are.

Notation: S the few columns, c_j the cost of a token's row there, r its cost in every other column, q = softmax(z).

    D = sum_{j in S} q_j c_j + r sum_{i not in S} q_i

A row of the vocabulary's size never exists: the sweeps over the logits are those without any cost, and S is small.

Where the loss is no mean of costs but bends the mean number (the squared error of the expected value), `bend` gives the
costs of its tangent: with m = sum_S q_j and mu = sum_S q_j x_j / m, D = m phi(mu) + r (1 - m) is again sum q_i c_i for
c_j = phi(mu) + phi'(mu) (x_j - mu), and its slope in the logits is q_i (c_i - D), as for any row of costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

Bend = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class FewColumns:
    """Rows of the cost for some tokens.

    Attributes:
        columns: the few, distinct ids of the vocabulary.
        rows: the costs there, one row a kind of token; with `bend`, the signed distances x_j from the label.
        rest: the cost in all other columns; of the label too, if it is one of them, so that a row of text has 0.
        which: the row of each token.
        bend: `(rows, weights) -> costs`, both `(tokens, few)`; weights are proportional to q. None: rows are costs.
    """

    columns: Int[Tensor, " few"]
    rows: Float[Tensor, "kinds few"]
    rest: Float[Tensor, " kinds"]
    which: Int[Tensor, " tokens"]
    bend: Bend | None = None

    def of(self, tokens: Int[Tensor, " chunk"]) -> FewRows:
        """The rows of these tokens."""
        which = self.which[tokens]
        return FewRows(self.columns, self.rows[which], self.rest[which], self.bend)


@dataclass(frozen=True)
class FewRows:
    """`FewColumns` of the tokens of a chunk, a row each."""

    columns: Int[Tensor, " few"]
    rows: Float[Tensor, "tokens few"]
    rest: Float[Tensor, " tokens"]
    bend: Bend | None = None

    def costs(self, weights: Float[Tensor, "tokens few"]) -> Float[Tensor, "tokens few"]:
        """The costs in the few columns, where q is proportional to `weights`."""
        rows = self.rows.to(weights.dtype)
        return rows if self.bend is None else self.bend(rows, weights)
