"""Ratings as tokens: losses and decodings of a small model as a judge, beside their controls, on human ratings.

The lexicon of VADER (Hutto and Gilbert 2014; the package vaderSentiment has it) gives 7,000 words the ratings of ten
people each, from -4 to 4, here the tokens 1 to 9. A model reads a word and predicts a rating; it is trained on the
ratings of one person or of all ten, and tested on words it has not seen (other forms of their stems may be among those
it has). The model is a Llama from scratch over letters, and a pretrained one where that is at hand.

    mle                       cross-entropy
    expected_value:W          plus W (sum_i q_i v_i - v_y)^2
    number_token:W            plus W sum_i q_i |v_i - v_y|
    ordinal                   0.2 times cross-entropy, plus `ordinal_loss` of the nine ratings: the squared EMD
    .../shuffled, .../equal   controls: the values permuted; all ratings alike (for ordinal: the Brier score)
    regression head           a linear layer in place of the vocabulary, trained by the squared error
    constant                  the distribution of all ratings in training, whatever the word

Each distribution is decoded by its most probable rating, its median and its mean. Errors and Spearman's correlation are
to the mean of the ten people; nll, CRPS and the share within the middle 90 % are of their ratings, one by one. Each run
is a row of ratings.csv; --resume continues with those that are there.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from benchmarks.measure import Settings, say
from benchmarks.number_regression import WIDTH, fit, small_llama
from benchmarks.paper.models import load_model_and_tokenizer
from benchmarks.runs import Runs
from otloss import ordinal_loss
from otloss_llm import NumberCost, RatingCost, parse_objective, token_loss

NAME = "ratings"
SCALE, LOWEST = 9, -4  # ratings, and the first of them
TEST = 1000
DECODINGS = ("argmax", "median", "mean")
MEASURES = (*(f"{measure} {by}" for measure in ("mae", "spearman") for by in DECODINGS), "nll", "crps", "within_90")
CHANGES = (("mae argmax", "mle", "mae argmax"), ("mae mean", "mle", "mae argmax"), ("mae mean", "mle", "mae mean"),
           ("nll", "mle", "nll"), ("spearman mean", "mle", "spearman mean"), ("crps", "mle", "crps"))  # fmt: skip
SHORT = ("mle", "expected_value:1", "ordinal", "regression head", "constant")
CONTROLS = ("expected_value:1/shuffled", "expected_value:1/equal", "ordinal/shuffled", "ordinal/equal")
ARMS = ("expected_value:0.1", "number_token:0.3", "number_token:0.3/shuffled", "number_token:0.3/equal")
ASK, PAD = "?", 0
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Words:
    """Words with the ratings of ten people each, as positions 0 to 8 on the scale."""

    words: list[str]
    ratings: Tensor  # (words, 10)

    def part(self, index: Tensor) -> Words:
        return Words([self.words[i] for i in index.tolist()], self.ratings[index])


@dataclass(frozen=True)
class Judge:
    """A model that reads a word: `states(words)` are the hidden states (words, d) from which the rating is read."""

    model: Any
    encode: Callable[[str], list[int]]
    rating_ids: Tensor

    def states(self, words: list[str]) -> Tensor:
        rows = [torch.tensor(self.encode(word)) for word in words]
        ids = pad_sequence(rows, batch_first=True, padding_value=PAD)  # behind the end, which looks at no later token
        end = torch.tensor([len(row) - 1 for row in rows])
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden[torch.arange(len(rows)), end]


@dataclass(frozen=True)
class Case:
    """So many words to train on, with the ratings of so many people, from one model."""

    name: str
    words: int
    people: int
    steps: int
    arms: tuple[str, ...]
    judge: Callable[[int], Judge]


def read_lexicon(lines: Iterable[str]) -> Words:
    """The words of letters alone: a line is the word, mean, deviation and list of ratings, with tabs between."""
    entries = [line.rstrip("\n").split("\t") for line in lines]
    kept = [entry for entry in entries if entry[0].isascii() and entry[0].isalpha() and entry[0].islower()]
    ratings = torch.tensor([ast.literal_eval(entry[3]) for entry in kept]) - LOWEST
    return Words([entry[0] for entry in kept], ratings)


def letters(seed: int) -> Judge:
    """A model over letters from scratch; ratings are the tokens 0 to 8."""
    first = SCALE + 1
    encode = lambda word: [*(first + LETTERS.index(letter) for letter in word), SCALE]  # noqa: E731
    return Judge(small_llama(first + len(LETTERS), seed), encode, torch.arange(SCALE))


def pretrained(folder: Path) -> Callable[[int], Judge]:
    def judge(seed: int) -> Judge:
        model, tokenizer = load_model_and_tokenizer(str(folder))
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(str(rating + 1)) for rating in range(SCALE)])
        return Judge(model, lambda word: tokenizer(f"{word} {ASK}")["input_ids"], ids)

    return judge


def loss_of(arm: str, judge: Judge, seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of an arm, from logits over the vocabulary and positions on the scale."""
    name, _, control = arm.partition("/")
    ids, size = judge.rating_ids, judge.model.config.vocab_size
    places = torch.arange(SCALE)
    if control == "shuffled":
        places = torch.randperm(SCALE, generator=torch.Generator().manual_seed(seed))
    if name == "ordinal" and control == "equal":
        return lambda z, y: 0.2 * cross_entropy(z, ids[y]) + brier(z[:, ids], y)
    if name == "ordinal":
        inverse = places.argsort()
        return lambda z, y: 0.2 * cross_entropy(z, ids[y]) + ordinal_loss(z[:, ids[inverse]], places[y])
    values = torch.full((size,), torch.nan)
    values[ids] = torch.full((SCALE,), 5.0) if control == "equal" else 1.0 + places
    cost: Any = None
    if name.startswith("number_token"):  # Its price of text is the price of the ratings that are not alike.
        cost = NumberCost(values, text=1.01 * (SCALE - 1))
    elif name.startswith("expected_value"):
        cost = RatingCost(values)
    objective = parse_objective(name)
    return lambda z, y: token_loss(z, ids[y], objective=objective, cost=cost).loss


def brier(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.softmax(-1) - torch.nn.functional.one_hot(y, SCALE)).square().sum(-1).mean()


def predicted(arm: str, case: Case, train: Words, test: Words, seed: int) -> Tensor:
    """Train an arm; returns log probabilities (words, 9) of the test's ratings, or values (words,)."""
    labels = train.ratings[:, : case.people]
    if arm == "constant":
        counts = labels.flatten().bincount(minlength=SCALE).double()
        return ((counts + 1) / (counts + 1).sum()).log().expand(len(test.words), -1)
    torch.manual_seed(seed)
    judge, drawn = case.judge(seed), torch.Generator().manual_seed(seed + 1)
    parameters = list(judge.model.parameters())
    if arm == "regression head":
        head = torch.nn.Linear(WIDTH, 1)
        parameters += list(head.parameters())
        of = lambda words: SCALE / 2 + 2 * head(judge.states(words)).squeeze(-1)  # noqa: E731
        loss: Any = lambda z, y: (z - y).square().mean() / 4  # noqa: E731
    else:
        of = lambda words: judge.model.lm_head(judge.states(words))  # noqa: E731
        loss = loss_of(arm, judge, seed)

    def of_batch(batch: Tensor) -> Tensor:
        person = torch.randint(case.people, batch.shape, generator=drawn)
        return loss(of([train.words[i] for i in batch.tolist()]), labels[batch, person])

    fit(parameters, of_batch, len(train.words), steps=case.steps, seed=seed)
    judge.model.eval()
    with torch.no_grad():
        z = of(test.words)
    return z.double() if arm == "regression head" else z[:, judge.rating_ids].double().log_softmax(-1)


def measures(output: Tensor, ratings: Tensor) -> dict[str, float]:
    """The measures of log probabilities, or of values, against the ratings of ten people a word."""
    truth, measured = ratings.double().mean(-1), dict.fromkeys(MEASURES, float("nan"))
    decoded = {"mean": output}
    if output.dim() == 2:
        share = output.exp()
        below, places = share.cumsum(-1), torch.arange(SCALE, dtype=torch.float64)
        median = (below < 0.5).sum(-1).clamp(max=SCALE - 1).double()
        decoded = {"argmax": share.argmax(-1).double(), "median": median, "mean": share @ places}
        step = (below[:, None] - (places >= ratings[..., None]).double()).square().sum(-1)
        middle = (below - share / 2).gather(1, ratings)
        inside = (middle > 0.05) & (middle < 0.95)
        measured |= {"nll": float(-output.gather(1, ratings).mean()), "crps": float(step.mean()),
                  "within_90": float(inside.double().mean())}  # fmt: skip
    for by, value in decoded.items():
        measured[f"mae {by}"] = float((value - truth).abs().mean())
        if np.ptp(value.numpy()):  # a constant has no correlation
            measured[f"spearman {by}"] = float(spearmanr(value, truth).statistic)
    return measured


def lexicon() -> Words | None:
    package = find_spec("vaderSentiment")
    if package is None or not package.submodule_search_locations:
        say(f"\n{NAME} is skipped: it reads the lexicon of the package vaderSentiment (pip install vaderSentiment).")
        return None
    path = Path(package.submodule_search_locations[0]) / "vader_lexicon.txt"
    return read_lexicon(path.read_text(encoding="utf-8").splitlines())


def cases(settings: Settings) -> list[Case]:
    made = [
        Case("1,500 words, one person", 1500, 1, 600, SHORT + CONTROLS + ARMS, letters),
        Case("6,000 words, ten people", 6000, 10, 1000, SHORT, letters),
    ]
    if settings.data is not None:
        model = settings.data / "models/stories260K"
        made.append(Case("1,500 words, one person, pretrained", 1500, 1, 300, SHORT + CONTROLS, pretrained(model)))
    return made


def main(settings: Settings) -> None:
    words = lexicon()
    if words is None:
        return
    run(cases(settings)[:1] if settings.small else cases(settings), words, settings)


def run(made: list[Case], words: Words, settings: Settings) -> None:
    runs = Runs(NAME, MEASURES, settings)
    for case in made:
        for seed in range(2 if settings.small else 3):
            order = torch.from_numpy(np.random.default_rng(seed).permutation(len(words.words)))
            size = len(order) // 4 if settings.small else TEST
            test, train = words.part(order[:size]), words.part(order[size : size + case.words])
            for arm in case.arms:
                if runs.lacks(case.name, arm, seed):
                    runs.add(case.name, arm, seed, measures(predicted(arm, case, train, test, seed), test.ratings))
        runs.report(case.name, case.arms, CHANGES)
