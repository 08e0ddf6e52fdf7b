"""Module of the loss over tokens that are numbers."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from otloss.losses import number_token_loss
from otloss.losses.labels import check_ignore_index
from otloss.losses.number_line import number_line
from otloss.losses.numbers import check_over
from otloss.nn.base import Loss, described


class NumberTokenLoss(Loss):
    """`otloss.number_token_loss` with held values of the tokens.

    With the values of `otloss_llm.NumberCost.from_tokenizer`, take scaling="symlog", which is the default there.

    Args:
        values, form, over, delta, scaling, squash, text, ignore_index, reduction: as for `otloss.number_token_loss`.

    Example:
        >>> import torch
        >>> loss = NumberTokenLoss(torch.tensor([5.0, 6.0, 9.0, float("nan")]), scaling="rank")
        >>> loss(torch.tensor([[0.0, 2.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor(0.5491)
        >>> loss
        NumberTokenLoss(values=(4,) float32, form='wasserstein', over='vocabulary', scaling='rank', reduction='mean')
    """

    values: Tensor

    def __init__(
        self,
        values: Float[Tensor, " vocab"],
        *,
        form: str = "wasserstein",
        over: str = "vocabulary",
        delta: float = 1.0,
        scaling: str = "absolute",
        squash: float | None = None,
        text: float | None = None,
        ignore_index: int | None = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(reduction)
        number_line(values, form=form, delta=delta, scaling=scaling, squash=squash, text=text)
        check_over(over, text)
        check_ignore_index(ignore_index)
        self.hold("values", values)
        self.form, self.over, self.delta = form, over, delta
        self.scaling, self.squash, self.text, self.ignore_index = scaling, squash, text, ignore_index

    def forward(
        self,
        logits: Float[Tensor, "*batch vocab"],
        labels: Int[Tensor, "*batch"],
        *,
        sample_weight: Float[Tensor, "*batch"] | None = None,
    ) -> Tensor:
        return number_token_loss(
            logits, labels, self.values, form=self.form, over=self.over, delta=self.delta, scaling=self.scaling,
            squash=self.squash, text=self.text, sample_weight=sample_weight, ignore_index=self.ignore_index,
            reduction=self.reduction,
        )  # fmt: skip

    def extra_repr(self) -> str:
        bend = ("delta",) if self.form == "huber" else ()
        scale = ("scaling",) if self.scaling != "absolute" else ()
        shown = described(self, ("values", "form", "over", *bend, *scale, "squash", "text", "reduction"))
        return shown if self.ignore_index == -100 else f"{shown}, ignore_index={self.ignore_index}"
