"""Costs that are one number per token but in a few columns of the vocabulary, as those of number tokens are.

Notation: S the few columns, c_j the cost of a token's row there, r its cost in every other column, q = softmax(z).

    D = sum_{j in S} q_j c_j + r sum_{i not in S} q_i

A row of the vocabulary's size never exists: the sweeps over the logits are those without any cost, and S is small.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class FewColumns:
    """Rows of the cost for some tokens.

    Attributes:
        columns: the few, distinct ids of the vocabulary.
        rows: the costs there, one row a kind of token.
        rest: the cost in all other columns; of the label too, if it is one of them, so that a row of text has 0.
        which: the row of each token.
    """

    columns: Int[Tensor, " few"]
    rows: Float[Tensor, "kinds few"]
    rest: Float[Tensor, " kinds"]
    which: Int[Tensor, " tokens"]

    def of(self, tokens: Int[Tensor, " chunk"]) -> FewColumns:
        """The same for a chunk of the tokens."""
        return FewColumns(self.columns, self.rows, self.rest, self.which[tokens])
