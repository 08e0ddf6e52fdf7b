"""Optimal-transport training of causal language models: EMO and its relatives at the price of cross-entropy.

from otloss_llm import EMO, EmbeddingCost, linear_token_loss      # losses: torch only
from otloss_llm import ObjectiveTrainer                           # training: pip install "torch-otloss[llm]"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import otloss as _otloss

if not hasattr(_otloss, "wasserstein_1d"):  # the package of that name on package indexes
    raise ImportError(
        f"import otloss finds another project at {_otloss.__file__}: pip uninstall otloss, then pip install "
        "--force-reinstall --no-deps torch-otloss."
    )

# isort: split
from otloss import __version__ as __version__
from otloss._checks import install_hint as _install_hint
from otloss._checks import missing_package as _missing_package
from otloss._foreign import missing_name as _missing_name
from otloss_llm._warm_up import warm_up as warm_up
from otloss_llm.costs.choice import NumberSettings as NumberSettings
from otloss_llm.costs.embedding import EmbeddingCost as EmbeddingCost
from otloss_llm.costs.embedding import all_but_the_top as all_but_the_top
from otloss_llm.costs.number_cost import MixedCost as MixedCost
from otloss_llm.costs.number_cost import NumberCost as NumberCost
from otloss_llm.costs.ratings import RatingCost as RatingCost
from otloss_llm.costs.sharded import ShardedEmbeddingCost as ShardedEmbeddingCost
from otloss_llm.costs.tokenizer_numbers import NumberTokens as NumberTokens
from otloss_llm.losses.dense import dense_token_loss as dense_token_loss
from otloss_llm.losses.token_loss import TokenLoss as TokenLoss
from otloss_llm.losses.token_loss import emo_loss as emo_loss
from otloss_llm.losses.token_loss import linear_token_loss as linear_token_loss
from otloss_llm.losses.token_loss import token_loss as token_loss
from otloss_llm.losses.token_loss import token_statistics as token_statistics
from otloss_llm.objectives import EAFT as EAFT
from otloss_llm.objectives import EMO as EMO
from otloss_llm.objectives import GEM as GEM
from otloss_llm.objectives import MLE as MLE
from otloss_llm.objectives import ExpectedValue as ExpectedValue
from otloss_llm.objectives import LabelSmoothing as LabelSmoothing
from otloss_llm.objectives import MixCE as MixCE
from otloss_llm.objectives import NumberToken as NumberToken
from otloss_llm.objectives import Power as Power
from otloss_llm.objectives import TaiLr as TaiLr
from otloss_llm.objectives import ZLoss as ZLoss
from otloss_llm.objectives import parse_objective as parse_objective

if TYPE_CHECKING:
    from otloss_llm.training.trainer import ObjectiveMixin as ObjectiveMixin
    from otloss_llm.training.trainer import ObjectiveTrainer as ObjectiveTrainer

__all__ = [
    "EAFT",
    "EMO",
    "GEM",
    "MLE",
    "EmbeddingCost",
    "ExpectedValue",
    "LabelSmoothing",
    "MixCE",
    "MixedCost",
    "NumberCost",
    "NumberSettings",
    "NumberToken",
    "NumberTokens",
    "ObjectiveMixin",
    "ObjectiveTrainer",
    "Power",
    "RatingCost",
    "ShardedEmbeddingCost",
    "TaiLr",
    "TokenLoss",
    "ZLoss",
    "__version__",
    "all_but_the_top",
    "dense_token_loss",
    "emo_loss",
    "linear_token_loss",
    "parse_objective",
    "token_loss",
    "token_statistics",
    "warm_up",
]

_OF_THE_EXTRA = ("transformers", "tokenizers", "accelerate", "safetensors", "tqdm", "filelock")
_NEEDS_TRANSFORMERS = ("ObjectiveMixin", "ObjectiveTrainer")


def __dir__() -> list[str]:
    """Return the names of `__all__`, of which some load the trainer."""
    return __all__


def __getattr__(name: str) -> Any:
    """Load the trainer on first use: the losses alone need no transformers."""
    if name not in _NEEDS_TRANSFORMERS:
        raise _missing_name(__name__, name, __all__)
    try:
        from otloss_llm.training import trainer
    except ImportError as error:
        package = _missing_package(error, *_OF_THE_EXTRA)
        raise ImportError(f"{name} needs {package}: {_install_hint('llm')}") from error
    return getattr(trainer, name)
