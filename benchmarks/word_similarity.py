"""`python -m benchmarks word_similarity`: does the cost between words follow human judgements of their similarity?

Spearman's correlation of 1 - c(i, j) = cos(e_i, e_j) with the mean judgements of the 30 pairs of nouns of G. A. Miller,
W. G. Charles, "Contextual correlates of semantic similarity", Language and Cognitive Processes 6 (1991), for rows e of
GloVe vectors and of a small language model, raw and transformed as in `benchmarks.embedding_costs`. A word of
several tokens has the mean of their rows. The interval is that of 2,000 bootstrap samples of the pairs.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks import embedding_costs
from benchmarks.measure import Settings, table
from otloss_llm import all_but_the_top
from otloss_llm.experiments.oracle import sample_rows
from otloss_llm.models.heads import find_head
from otloss_llm.models.loading import load_model, load_tokenizer

PAIRS = """car automobile 3.92, gem jewel 3.84, journey voyage 3.84, boy lad 3.76, coast shore 3.70,
asylum madhouse 3.61, magician wizard 3.50, midday noon 3.42, furnace stove 3.11, food fruit 3.08, bird cock 3.05,
bird crane 2.97, tool implement 2.95, brother monk 2.82, crane implement 1.68, lad brother 1.66, journey car 1.16,
monk oracle 1.10, cemetery woodland 0.95, food rooster 0.89, coast hill 0.87, forest graveyard 0.84,
shore woodland 0.63, monk slave 0.55, coast forest 0.42, lad wizard 0.42, chord smile 0.13, glass magician 0.11,
rooster voyage 0.08, noon string 0.08"""
BOOTSTRAP = 2000


def verdict() -> list[tuple[str, str, float]]:
    """The pairs of words with their judgements, from 0 to 4."""
    rows = [pair.split() for pair in PAIRS.replace("\n", " ").split(",")]
    return [(first, second, float(score)) for first, second, score in rows]


def correlation(rows: Tensor, ids: dict[str, list[int]]) -> tuple[float, float, float, int]:
    """Spearman's correlation, its 95 % interval, and the number of pairs whose words are known."""
    pairs = [(a, b, score) for a, b, score in verdict() if ids.get(a) and ids.get(b)]
    mean = {word: torch.nn.functional.normalize(rows[ids[word]].mean(0), dim=0) for a, b, _ in pairs for word in (a, b)}
    cosines = np.array([float(mean[a] @ mean[b]) for a, b, _ in pairs])
    scores = np.array([score for *_, score in pairs])
    draws = np.random.default_rng(0).integers(0, len(pairs), (BOOTSTRAP, len(pairs)))
    low, high = np.nanquantile([spearmanr(cosines[d], scores[d]).statistic for d in draws], [0.025, 0.975])
    return float(spearmanr(cosines, scores).statistic), float(low), float(high), len(pairs)


def transformed(rows: Tensor) -> dict[str, Tensor]:
    return {"raw": rows, "centred": embedding_costs.centred(rows), "all-but-the-top": all_but_the_top(rows),
            "whitened": embedding_costs.whitened(rows)}  # fmt: skip


def main(settings: Settings) -> None:
    if settings.data is None:
        return
    lines = [["embedding", "rows", "correlation", "95 % interval", "pairs"]]
    kept = np.load(settings.data / "words/glove_twitter_25d.npz", allow_pickle=False)
    words = {str(word): [i] for i, word in enumerate(kept["words"])}
    glove = torch.from_numpy(kept["vectors"]).float()
    home = str(settings.data / "models/stories260K")
    model, tokenizer = load_model(home), load_tokenizer(home)
    ids = {w: tokenizer(w, add_special_tokens=False)["input_ids"] for a, b, _ in verdict() for w in (a, b)}
    head = find_head(model).weight.detach().float()
    texts = sample_rows(model, torch.full((2000, 1), tokenizer.bos_token_id), 128)
    cases = [("GloVe, 25 dimensions", form, rows, words) for form, rows in transformed(glove).items()]
    cases += [("stories260K", form, rows, ids) for form, rows in transformed(head).items()]
    cases += [("stories260K", "context averages", embedding_costs.context_averages(model, texts), ids)]
    cases += [("stories260K", "random", torch.randn(head.shape, generator=torch.Generator().manual_seed(0)), ids)]
    for name, form, rows, known in cases:
        value, low, high, pairs = correlation(rows, known)
        lines.append([name, form, f"{value:.2f}", f"{low:.2f} to {high:.2f}", str(pairs)])
    table(lines)
