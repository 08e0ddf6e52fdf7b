"""Costs between the tokens of a vocabulary."""

from otloss_llm.costs.choice import NumberSettings as NumberSettings
from otloss_llm.costs.embedding import EmbeddingCost as EmbeddingCost
from otloss_llm.costs.number_tokens import NumberTokens as NumberTokens
from otloss_llm.costs.numbers import MixedCost as MixedCost
from otloss_llm.costs.numbers import NumberCost as NumberCost
from otloss_llm.costs.sharded import ShardedEmbeddingCost as ShardedEmbeddingCost
