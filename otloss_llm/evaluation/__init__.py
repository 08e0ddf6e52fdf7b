"""Evaluation of language models: held-out and judged likelihood, sampling, and the variety of samples."""

from __future__ import annotations

from otloss_llm.evaluation.overlap import distinct_n as distinct_n
from otloss_llm.evaluation.overlap import repetition as repetition
from otloss_llm.evaluation.perplexity import Perplexity as Perplexity
from otloss_llm.evaluation.perplexity import SequenceScores as SequenceScores
from otloss_llm.evaluation.perplexity import TextScores as TextScores
from otloss_llm.evaluation.perplexity import perplexity as perplexity
from otloss_llm.evaluation.perplexity import score_texts as score_texts
from otloss_llm.evaluation.perplexity import sequence_nll as sequence_nll
from otloss_llm.evaluation.sampling import Sample as Sample
from otloss_llm.evaluation.sampling import sample_texts as sample_texts

__all__ = [
    "Perplexity",
    "Sample",
    "SequenceScores",
    "TextScores",
    "distinct_n",
    "perplexity",
    "repetition",
    "sample_texts",
    "score_texts",
    "sequence_nll",
]
