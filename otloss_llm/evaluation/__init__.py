"""Perplexity and transport cost of token ids, and numbers as answers: their distribution, its decoding and scores."""

from otloss_llm.evaluation.number_decoding import DistributionScores as DistributionScores
from otloss_llm.evaluation.number_decoding import NumberDistribution as NumberDistribution
from otloss_llm.evaluation.number_decoding import decode_numbers as decode_numbers
from otloss_llm.evaluation.number_decoding import number_distributions as number_distributions
from otloss_llm.evaluation.number_decoding import score_number_distributions as score_number_distributions
from otloss_llm.evaluation.perplexity import Perplexity as Perplexity
from otloss_llm.evaluation.perplexity import context_length as context_length
from otloss_llm.evaluation.perplexity import perplexity as perplexity

__all__ = [
    "DistributionScores",
    "NumberDistribution",
    "Perplexity",
    "context_length",
    "decode_numbers",
    "number_distributions",
    "perplexity",
    "score_number_distributions",
]
