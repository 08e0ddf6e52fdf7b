"""Measures of the experiments: divergences, samples and their overlap with real text, answers, labels in context."""
