"""Evaluation of language models: likelihood, held-out and judged, sampling and its variety, numbers and answers."""

from __future__ import annotations

from otloss_llm.data.labelled import LabelledText as LabelledText
from otloss_llm.data.labelled import read_labelled_texts as read_labelled_texts
from otloss_llm.evaluation.answer_scores import NumberScores as NumberScores
from otloss_llm.evaluation.answer_scores import extract_answer as extract_answer
from otloss_llm.evaluation.answer_scores import final_number as final_number
from otloss_llm.evaluation.answer_scores import same_answer as same_answer
from otloss_llm.evaluation.answer_scores import score_answers as score_answers
from otloss_llm.evaluation.answer_scores import style_of as style_of
from otloss_llm.evaluation.answering import NumberTokenScores as NumberTokenScores
from otloss_llm.evaluation.answering import answer_questions as answer_questions
from otloss_llm.evaluation.answering import number_token_scores as number_token_scores
from otloss_llm.evaluation.answering import score_number_labels as score_number_labels
from otloss_llm.evaluation.divergences import TokenDivergence as TokenDivergence
from otloss_llm.evaluation.divergences import token_divergence as token_divergence
from otloss_llm.evaluation.in_context import InContextScores as InContextScores
from otloss_llm.evaluation.in_context import classify_in_context as classify_in_context
from otloss_llm.evaluation.mauve import ClusterDivergence as ClusterDivergence
from otloss_llm.evaluation.mauve import Mauve as Mauve
from otloss_llm.evaluation.mauve import cluster_divergence as cluster_divergence
from otloss_llm.evaluation.mauve import mauve as mauve
from otloss_llm.evaluation.mauve import text_features as text_features
from otloss_llm.evaluation.neighbours import NeighbourOverlap as NeighbourOverlap
from otloss_llm.evaluation.neighbours import neighbour_overlap as neighbour_overlap
from otloss_llm.evaluation.number_decoding import DistributionScores as DistributionScores
from otloss_llm.evaluation.number_decoding import NumberDistribution as NumberDistribution
from otloss_llm.evaluation.number_decoding import decode_numbers as decode_numbers
from otloss_llm.evaluation.number_decoding import number_distributions as number_distributions
from otloss_llm.evaluation.number_decoding import score_number_distributions as score_number_distributions
from otloss_llm.evaluation.overlap import distinct_n as distinct_n
from otloss_llm.evaluation.overlap import repetition as repetition
from otloss_llm.evaluation.overlap import rouge as rouge
from otloss_llm.evaluation.perplexity import Perplexity as Perplexity
from otloss_llm.evaluation.perplexity import SequenceScores as SequenceScores
from otloss_llm.evaluation.perplexity import TextScores as TextScores
from otloss_llm.evaluation.perplexity import perplexity as perplexity
from otloss_llm.evaluation.perplexity import score_texts as score_texts
from otloss_llm.evaluation.perplexity import sequence_nll as sequence_nll
from otloss_llm.evaluation.sampling import Sample as Sample
from otloss_llm.evaluation.sampling import sample_texts as sample_texts

__all__ = [
    "ClusterDivergence",
    "DistributionScores",
    "InContextScores",
    "LabelledText",
    "Mauve",
    "NeighbourOverlap",
    "NumberDistribution",
    "NumberScores",
    "NumberTokenScores",
    "Perplexity",
    "Sample",
    "SequenceScores",
    "TextScores",
    "TokenDivergence",
    "answer_questions",
    "classify_in_context",
    "cluster_divergence",
    "decode_numbers",
    "distinct_n",
    "extract_answer",
    "final_number",
    "mauve",
    "neighbour_overlap",
    "number_distributions",
    "number_token_scores",
    "perplexity",
    "read_labelled_texts",
    "repetition",
    "rouge",
    "same_answer",
    "sample_texts",
    "score_answers",
    "score_number_distributions",
    "score_number_labels",
    "score_texts",
    "sequence_nll",
    "style_of",
    "text_features",
    "token_divergence",
]
