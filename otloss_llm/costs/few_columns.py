"""Costs that are one number per token but in a few columns of the vocabulary, as those of number tokens are.

Notation: S the few columns, c_j the cost of a token's row there, r its cost in every other column, q = softmax(z).

    D = sum_{j in S} q_j c_j + r sum_{i not in S} q_i

A row of the vocabulary's size never exists: the sweeps over the logits are those without any cost, and S is small.

Where the loss is no mean of costs but bends the mean number (the squared error of the expected value), `tangent` gives
the costs: with m = sum_S q_j and mu = sum_S q_j x_j / m, D = m phi(mu) + r (1 - m) is again sum q_i c_i for
c_j = phi(mu) + phi'(mu) (x_j - mu), and its slope in the logits is q_i (c_i - D), as for any row of costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

# mu -> (phi - phi' mu, phi'), one each for every token: c_j = intercept + slope x_j.
Tangent = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FewColumns:
    """Rows of the cost for some tokens.

    Attributes:
        columns: the few, distinct ids of the vocabulary.
        rows: the costs there, one row a kind of token; with `tangent`, the signed distances x_j from the label.
        rest: the cost in all other columns; of the label too, if it is one of them, so that a row of text has 0.
        which: the row of each token.
        tangent: what makes costs of x, given its mean; None: rows are costs.
    """

    columns: Int[Tensor, " few"]
    rows: Float[Tensor, "kinds few"]
    rest: Float[Tensor, " kinds"]
    which: Int[Tensor, " tokens"]
    tangent: Tangent | None = None

    def of(self, tokens: Int[Tensor, " chunk"]) -> FewColumns:
        """The same for a chunk of the tokens."""
        return FewColumns(self.columns, self.rows, self.rest, self.which[tokens], self.tangent)

    def costs_from(self, mean: Float[Tensor, " tokens"]) -> tuple[Tensor, Tensor]:
        """Intercept and slope of each token's costs in `rows`, where their mean under q is this."""
        if self.tangent is None:
            return mean.new_zeros(mean.shape), mean.new_ones(mean.shape)
        return self.tangent(mean)
