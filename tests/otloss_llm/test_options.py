"""Every numeric option of objectives, costs and token losses: what is no finite number, or beyond 64 bits, is named."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import otloss_llm
from otloss_llm import MLE
from tests.otloss.draws import draw

LOGITS, LABELS, EMBEDDING = draw(3, 4), torch.tensor([0, 3, 1]), draw(4, 3)
VALUES = torch.tensor([1.0, 2.0, 5.0, torch.nan])
NUMBERS, OTHER = otloss_llm.NumberCost(VALUES), otloss_llm.EmbeddingCost(EMBEDDING)
TOKENS = {"logits": LOGITS, "labels": LABELS, "objective": MLE()}
HEAD = {"hidden": draw(3, 3), "weight": EMBEDDING, "labels": LABELS}
OF_KERNEL = "logit_scale logit_softcap chunk_size ignore_index"
# A valid call of each, and its numeric options.
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "EMO": ({}, "weighting ratio_clip"),
    "GEM": ({}, "beta"),
    "ExpectedValue": ({}, "weight"),
    "LabelSmoothing": ({"objective": MLE(), "epsilon": 0.1}, "epsilon"),
    "MixCE": ({"gamma": 0.1}, "gamma"),
    "NumberToken": ({}, "weight"),
    "Power": ({}, "k"),
    "TaiLr": ({"gamma": 0.1}, "gamma min_weight"),
    "ZLoss": ({"objective": MLE()}, "weight"),
    "EmbeddingCost": ({"embedding": EMBEDDING}, "directions"),
    "all_but_the_top": ({"rows": EMBEDDING}, "directions"),
    "NumberCost": ({"values": VALUES}, "text squash"),
    "MixedCost": ({"numbers": NUMBERS, "other": OTHER}, "scale"),
    "emo_loss": (
        {"logits": LOGITS, "labels": LABELS, "embedding": EMBEDDING},
        "directions weighting ratio_clip ignore_index",
    ),
    "token_loss": (TOKENS, "ignore_index num_items"),
    "linear_token_loss": ({**HEAD, "objective": MLE()}, f"{OF_KERNEL} num_items"),
    "token_statistics": (HEAD, f"{OF_KERNEL} temperature"),
}
SHARDED = "ShardedEmbeddingCost"  # which needs several processes
CASES = [(name, option) for name, (_, options) in CALLS.items() for option in options.split()]


def test_the_table_holds_every_numeric_option() -> None:
    for name in set(otloss_llm.__all__) - {"TokenLoss", "NumberTokens", "ObjectiveTrainer", "ObjectiveMixin", SHARDED}:
        function = getattr(otloss_llm, name)
        if callable(function):
            parameters = inspect.signature(function).parameters.values()
            numeric = {t.name for t in parameters if re.search(r"\b(float|int)\b", str(t.annotation))}
            assert numeric <= {*CALLS.get(name, (0, ""))[1].split()}, name


VALUES_OF_OTHER_KINDS = {
    "a bool": True, "complex": 1j, "NaN": float("nan"), "a list": [1], "text": "1",
    "a whole number": 10**400, "a negative one": -(10**400), "beyond 64 bits": 2**70,
}  # fmt: skip


@pytest.mark.parametrize(("name", "option"), CASES)
def test_what_is_no_finite_number_is_named(name: str, option: str) -> None:
    function: Callable[..., Any] = getattr(otloss_llm, name)
    for what, value in VALUES_OF_OTHER_KINDS.items():
        with pytest.raises((TypeError, ValueError)) as raised:
            function(**{**CALLS[name][0], option: value})
        assert option in str(raised.value), what
