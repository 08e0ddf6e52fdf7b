"""Win rate of one model's answers against another's, as a judge model sees them.

Any causal language model can judge. It reads the instruction and both answers, and its verdict is the likelier of " A"
and " B" as the next word. Every pair is shown twice, with the answers swapped: an answer that is preferred in both
orders wins, otherwise the pair is a tie. With w wins, t ties and n pairs

    win rate = (w + t / 2) / n,     standard error = std(1, 1/2 or 0 of each pair) / sqrt(n)

A judge that only prefers a position gives ties, and the share of verdicts for A shows it.

    python examples/win_rate.py --judge JUDGE --first runs/emo --second runs/mle --prompts asked.txt
    python examples/win_rate.py                       # samples of stories260K at three temperatures

Result: samples of stories260K at temperature 0.7 against 1.5, which it judges itself: 19 wins, 81 ties, no loss of 100
(win rate 59.5 ± 2.0 %); against 1.0: 55.0 ± 1.8 %. So small a model mostly prefers a position. Without it, a model is
trained on docstrings for a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import data
import torch
from stand_ins import small_model

from benchmarks.paper.evaluation.likelihood import sequence_nll
from benchmarks.paper.evaluation.sampling import sample_texts
from benchmarks.paper.models import load_model_and_tokenizer
from otloss_llm.evaluation import context_length

ASKED = """Which answer follows the instruction better?

Instruction: {prompt}

A: {a}

B: {b}

Better answer:"""
STORIES = "models/stories260K"
HEADING = f"{'pair':24} {'wins':>5} {'ties':>5} {'lost':>5} {'win rate, %':>15} {'A chosen, %':>11} {'too long':>9}"
OPENINGS = ("Once upon a time", "One day, Lily", "Tom had a red ball", "The dog was sad", "In the park there was")


@dataclass(frozen=True)
class WinRate:
    """The result for the first answers; `for_a` is the share of single verdicts for position A."""

    wins: int
    ties: int
    losses: int
    rate: float
    standard_error: float
    for_a: float
    left_out: int

    def __str__(self) -> str:
        return (
            f"{self.wins:5} {self.ties:5} {self.losses:5} {100 * self.rate:9.1f} ± {100 * self.standard_error:.1f} "
            f"{100 * self.for_a:11.1f} {self.left_out:9}"
        )


def judge_pairs(
    judge: Any, tokenizer: Any, prompts: Sequence[str], first: Sequence[str], second: Sequence[str], batch_size: int
) -> WinRate:
    """Win rate of the first answers; pairs longer than the judge's context are left out and counted."""
    sequences, prefixes, limit = [], [], context_length(judge) or 10**9
    for prompt, one, other in zip(prompts, first, second, strict=True):
        rows = [_rows(tokenizer, ASKED.format(prompt=prompt, a=a, b=b)) for a, b in ((one, other), (other, one))]
        ids = [row for both, _ in rows for row in both]
        if max(map(len, ids)) <= limit:
            sequences += ids
            prefixes += [length for _, length in rows for _ in range(2)]
    if not sequences:
        raise ValueError(f"all {len(prompts)} pairs are longer than the judge's context of {limit}.")
    scores = sequence_nll(judge, sequences, prefix_lengths=prefixes, batch_size=batch_size, progress=False).nll
    for_a = scores.reshape(-1, 2, 2).diff(dim=-1).squeeze(-1)  # (pairs, orders): log p(A) - log p(B)
    preferred = for_a * torch.tensor([1.0, -1.0])
    points = 0.5 + 0.5 * ((preferred > 0).all(1).double() - (preferred < 0).all(1).double())
    error = float(points.std() / len(points) ** 0.5) if len(points) > 1 else float("nan")
    wins, ties, losses = (int((points == value).sum()) for value in (1, 0.5, 0))
    share = float((for_a > 0).double().mean())
    return WinRate(wins, ties, losses, float(points.mean()), error, share, len(prompts) - len(points))


def _rows(tokenizer: Any, text: str) -> tuple[list[list[int]], int]:
    """Ids of the question with each verdict, and the length that they share."""
    if chat := bool(getattr(tokenizer, "chat_template", None)):
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    verdicts = ("A", "B") if text[-1:].isspace() else (" A", " B")
    rows = [tokenizer(text + verdict, add_special_tokens=not chat)["input_ids"] for verdict in verdicts]
    return rows, next(i for i, (a, b) in enumerate(zip(*rows, strict=False)) if a != b)


def story_model(chosen: Path | None, quick: bool) -> tuple[Any, Any]:
    try:
        return load_model_and_tokenizer(str(data.folder(STORIES, chosen=chosen) / STORIES))
    except data.MissingError as missing:
        data.say_other("a small Llama, trained on docstrings of SciPy and scikit-learn", missing)
        return small_model(2 if quick else 150)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--judge", help="folder or name of a causal language model")
    parser.add_argument("--first", help="folder or name of the model whose answers are judged")
    parser.add_argument("--second", help="of the model they are compared with")
    parser.add_argument("--prompts", type=Path, help="a text file with a prompt on each line")
    data.add_argument(parser)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    args = parser.parse_args(argv)
    given = (args.first, args.second, args.prompts)
    if any(given) and not (args.judge and all(given)):
        parser.error("give all of --judge, --first, --second and --prompts")
    model, tokenizer = load_model_and_tokenizer(args.judge) if args.judge else story_model(args.data, args.quick)
    if args.prompts:
        prompts = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        writers = [(Path(path).name, *load_model_and_tokenizer(path), 1.0, 0, 200) for path in given[:2]]
    else:
        prompts = [opening for opening in OPENINGS for _ in range(1 if args.quick else 20)]
        writers = [(f"T = {t}", model, tokenizer, t, int(10 * t), 40) for t in (0.7, 1.0, 1.5)]
    texts = []
    for name, writer, its_tokenizer, t, seed, length in writers:
        samples = sample_texts(
            writer, its_tokenizer, prompts=prompts, temperature=t, seed=seed, max_new_tokens=length, progress=False
        )
        texts.append((name, [sample.continuation for sample in samples]))
    print(HEADING)
    for (name, one), (other_name, other) in combinations(texts, 2):
        result = judge_pairs(model, tokenizer, prompts, one, other, args.batch_size)
        print(f"{f'{name} - {other_name}':24} {result}")


if __name__ == "__main__":
    main()
