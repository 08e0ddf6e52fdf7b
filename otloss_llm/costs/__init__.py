"""Costs between the tokens of a vocabulary."""

from otloss_llm.costs.choice import NumberSettings as NumberSettings
from otloss_llm.costs.embedding import EmbeddingCost as EmbeddingCost
from otloss_llm.costs.number_cost import MixedCost as MixedCost
from otloss_llm.costs.number_cost import NumberCost as NumberCost
from otloss_llm.costs.sharded import ShardedEmbeddingCost as ShardedEmbeddingCost
from otloss_llm.costs.tokenizer_numbers import NumberTokens as NumberTokens
